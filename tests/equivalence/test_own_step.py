"""Trials with a step of their own end on the bits of plain loops that call it."""

from __future__ import annotations

from dataclasses import replace

import ownsteps
import populations
import pytest
import studies
import torch
from listening import Heard
from processes import Runner
from safetensors.torch import load_file

import shoal
from shoal.core.errors import PlanError
from shoal.core.event import PeakMeasured, TrialMoved, TrialParked
from shoal.execution import floor
from shoal.observe import read_events
from shoal.observe.snapshot import Snapshot
from shoal.scheduler import leases
from shoal.testing import assert_same, compare, plain_loop, same_bits
from shoal.verify import read_losses, verify_trials


@pytest.fixture
def train(run_study, assert_alone):
    """Run a study of one kind and hold its trials to the plain loop; returns its report."""

    def run(kind, *, lr=(1e-2, 3e-2), loop=None, **options):
        recipe, loop = ownsteps.recipe(kind), loop or {"epochs": 2}
        metric = ownsteps.METRICS.get(kind, "valid_loss")
        space = shoal.grid(lr=list(lr))
        report = run_study(recipe, space, metric=metric, **loop, **options)
        assert_alone(report, report.trials, recipe, **loop)
        return report

    return run


# -- bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ownsteps.KINDS)
def test_beside_neighbours_and_evaluated_in_between(kind, train):
    heard = Heard()
    train(kind, poison=True, loop={"steps": 11, "eval_every": 3}, callbacks=[heard])
    peaks = heard.of(PeakMeasured)
    assert peaks
    assert all(peak.peak_bytes <= peak.predicted_bytes for peak in peaks)


@pytest.mark.parametrize(
    "kind",
    ["gan", *(pytest.param(kind, marks=pytest.mark.full) for kind in ownsteps.KINDS[1:])],
)
def test_moved_between_two_devices_at_every_step(kind, train, monkeypatch):
    heard = Heard()
    with_short_leases(monkeypatch)
    train(kind, lr=(1e-2, 2e-2, 3e-2), devices=2, callbacks=[heard])
    assert len(heard.of(TrialParked, TrialMoved)) > 5


def with_short_leases(monkeypatch) -> None:
    monkeypatch.setattr(floor, "LEASE_S", 1e-3)
    monkeypatch.setattr(floor, "STEADY_S", 0.0)
    monkeypatch.setattr(leases, "should_leave", lambda roster, *args: bool(roster.waiting))


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["gan", "target"])
def test_taken_up_from_a_checkpoint_of_any_step(kind, tmp_path, warm_workers):
    """What was saved is all there is: the trial had ended, and is asked for more."""
    recipe = ownsteps.recipe(kind)
    for steps in (1, 2, 4, 7):
        study = ownsteps.make(tmp_path, kind=kind, lr=(1e-2,), epochs=None, steps=steps)
        (trial,) = studies.run(study, warm_workers).trials
        found = compare(plain_loop(recipe, trial.hp, trial.seed, steps=steps), trial.load_state())
        assert found.equal, found.first_difference


@pytest.mark.parametrize("kind", ["gan", pytest.param("target", marks=pytest.mark.full)])
def test_killed_and_run_again(kind, tmp_path):
    runner = Runner(tmp_path, maker="ownsteps", kind=kind)
    process = runner.start("kill after CheckpointWritten", **{studies.PACE_S: "0.05"})
    assert process.wait() == -9, runner.words()
    assert runner.run() == 0, runner.words()
    report = shoal.open(runner.place, ownsteps.recipe(kind))
    losses = read_losses(runner.place)
    for trial in report.trials:
        plain = plain_loop(ownsteps.recipe(kind), trial.hp, trial.seed, epochs=3)
        assert_same(plain, trial, losses=losses[trial.number])


@pytest.mark.full
def test_a_population_of_gans_copies_all_their_models(tmp_path, warm_workers):
    recipe = ownsteps.recipe("gan")
    space = {"lr": shoal.log_uniform(1e-3, 1e-1), "dropout": shoal.choice(0.1, 0.3)}
    study = shoal.Study(
        *("k", recipe), space=space, trials=4, directory=tmp_path, steps=6, eval_every=2,
        pruner=shoal.PBT(quantile=0.5), metric="valid_gap", checkpoint_every=0,
    )  # fmt: skip
    report = studies.run(study, warm_workers, devices=2)
    assert sum(len(trial.inherited) for trial in report.trials) >= 2
    populations.assert_lineage(report, recipe, steps=6, eval_every=2)


# -- what comes of it ---------------------------------------------------------------------


def test_each_loss_is_recorded_and_the_models_come_back_by_name(train, tmp_path):
    report = train("gan", loop={"steps": 7, "eval_every": 3})
    trial = report.best
    plain = plain_loop(ownsteps.recipe("gan"), trial.hp, trial.seed, steps=7, eval_every=3)
    assert [row["metrics"] for row in trial.history] == [r["metrics"] for r in plain.history]
    names = {"train_loss", "train_generator", "train_discriminator", "valid_gap", "valid_score"}
    assert set(trial.metrics) == names

    models = trial.load()

    assert list(models) == ["generator", "discriminator"]
    assert not any(module.training for module in models.values())
    alone = plain.model.state_dict()
    for name, model in models.items():
        for key, tensor in model.state_dict().items():
            assert same_bits(tensor, alone[f"{name}.{key}"])

    folder = trial.export(tmp_path / "out")
    assert {"generator.safetensors", "discriminator.safetensors"} <= {
        path.name for path in folder.iterdir()
    }
    built = ownsteps.build_gan(trial.hp)
    for name, model in built.items():
        model.load_state_dict(load_file(folder / f"{name}.safetensors"))
        assert same_bits(next(model.parameters()), next(models[name].parameters()))


def test_a_loss_called_loss_is_the_loss_and_a_bare_module_comes_back_bare(train):
    report = train("actor-critic", lr=(1e-2,))
    (trial,) = report.trials
    assert set(trial.metrics) == {"train_loss", "train_actor", "train_critic", "valid_loss"}
    assert isinstance(trial.load(), ownsteps.ActorCritic)
    keys = trial.load_state()["optimizer"]["state"]["trunk.1.weight"]
    assert {"0/exp_avg", "1/exp_avg"} <= set(keys)  # both optimizers have the trunk


def test_verify_calls_them_equal(train):
    for kind in ("gan", "actor-critic"):
        report = train(kind, lr=(1e-2,))
        rows = Snapshot.of(read_events(report.directory)).trials
        (verdict,) = verify_trials(report.directory, rows, recipe=ownsteps.recipe(kind))
        assert verdict.equal, verdict


# -- what cannot be done ------------------------------------------------------------------


@pytest.mark.parametrize(
    "technique", ["spilled", shoal.Spilled(shards=1), shoal.Pipelined(schedule="gpipe", stages=2)]
)
def test_it_is_neither_spilled_nor_pipelined(technique, run_study):
    with pytest.raises(PlanError, match="its recipe has a step of its own: that is one unit"):
        run_study(
            *(ownsteps.recipe("gan"), {"lr": 0.1}),
            steps=2,
            metric="valid_gap",
            technique=technique,
            devices=2,
        )


def test_one_that_does_not_fit_is_told_what_it_needs(run_study):
    words = r"does not fit a device of 8\.0 KiB: with all its models and optimizers it needs"
    with pytest.raises(PlanError, match=words + ".*cannot be spilled or cut into stages"):
        run_study(
            *(ownsteps.recipe("gan"), {"lr": 0.1}), steps=2, metric="valid_gap", memory="8KiB"
        )


def test_a_trial_that_fails_leaves_its_neighbours_alone(run_study, assert_alone):
    """Its loss is no number in the third step, which had stepped already."""
    recipe = replace(ownsteps.recipe("distillation"), step=nan_in_step_3)
    report = run_study(recipe, shoal.grid(lr=[1e-2, 0.5]), steps=5, checkpoint_every=0)
    good, bad = report.trials
    assert_alone(report, [good], recipe, steps=5)
    assert bad.state == "FAILED"
    assert "the loss is nan in step 3. A step of one's own has stepped" in bad.error
    assert bad.checkpoint is None or "step-00000002" in str(bad.checkpoint)


def nan_in_step_3(models, batch, optimizers, hp, number):
    loss = ownsteps.distillation_step(models, batch, optimizers, hp)
    return loss * float("nan") if hp["lr"] == 0.5 and number == 2 else loss


def grows(models, batch, optimizers, hp, number):
    if hp["lr"] == 0.5 and number == 2:
        models.student[1].bias.data = torch.zeros(9)
    return ownsteps.distillation_step(models, batch, optimizers, hp) if number != 2 else 0.0


@pytest.mark.parametrize("fuse", [None, 2])
def test_a_parameter_of_another_shape_fails_its_trial(fuse, run_study):
    recipe = replace(ownsteps.recipe("distillation"), step=grows)
    good, bad = run_study(recipe, shoal.grid(lr=[1e-2, 0.5]), steps=5, fuse=fuse).trials
    assert good.state == "FINISHED", good.error
    assert "keep their shapes" in bad.error


def test_where_that_is_ignored_it_trains_on_as_the_plain_loop_does(run_study, assert_alone):
    recipe = replace(ownsteps.recipe("distillation"), step=nan_in_step_3, on_nonfinite="ignore")
    report = run_study(recipe, {"lr": 0.5}, steps=5)
    assert_alone(report, report.trials, recipe, steps=5)


@pytest.mark.parametrize("options", [{}, {"fuse": 2}])
def test_a_metric_that_nothing_returns_ends_the_trials_in_words(options, tmp_path, warm_workers):
    """A pruner would wait for it."""
    study = ownsteps.make(tmp_path, metric="valid_gpa", pruner="asha", eval_every=2)
    report = studies.run(study, warm_workers, **options)
    words = (
        "metric='valid_gpa' is none of what its step and its evaluation return: train_loss, "
        "train_discriminator, train_generator, valid_gap, valid_score"
    )
    assert all(words in trial.error for trial in report.trials), report
