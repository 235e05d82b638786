"""The state of a trial's best evaluation: kept wherever it trains, and that of training alone."""

from __future__ import annotations

import shutil
import signal
import textwrap
import warnings
from pathlib import Path

import commands
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.core.errors import SpecError
from shoal.observe.reader import read_events, read_trial
from shoal.observe.snapshot import Snapshot
from shoal.runtime.saving import checkpoint
from shoal.runtime.saving.tensorfile import row
from shoal.testing import assert_same, plain_loop
from shoal.ui.show import describe_trial
from shoal.verify import describe_verdict, verify_trials

EPOCHS = 8


def model(hp):
    layers = (nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    return nn.Sequential(*layers)


def data(hp):
    draws = torch.Generator().manual_seed(0)
    rows = [
        TensorDataset(
            torch.randn(40, 6, generator=draws), torch.randint(3, (40,), generator=draws)
        )
        for _ in range(2)
    ]
    return DataLoader(rows[0], 8, shuffle=True), DataLoader(rows[1], 8)


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


RECIPE = shoal.Recipe(model=model, data=data, loss=loss, splittable=True)
SPACE = shoal.grid(lr=[1e-3, 1e-2, 1e-1])


@pytest.fixture
def run(tmp_path, warm_workers):
    def runs(devices=1, of=RECIPE, study=None, **options):
        asked = {"space": SPACE, "epochs": EPOCHS, "keep_best": True, **(study or {})}
        made = shoal.Study("it", of, directory=tmp_path, **asked)
        hardware = shoal.Hardware.virtual(devices=devices, memory="64MiB")
        return made.run(hardware=hardware, workers=warm_workers, **options)

    return runs


def rows_of(trial):
    return {row["step"]: row["metrics"]["valid_loss"] for row in trial.history}


def assert_kept(report, of=RECIPE, **loop):
    for last, best in zip(report.trials, report.at_best().trials, strict=True):
        rows = rows_of(last)
        step = min(rows, key=rows.get)
        assert best.metrics["valid_loss"] == rows[step]
        assert best.history[-1]["step"] == step
        alone = plain_loop(of, last.hp, last.seed, steps=step, **loop)
        assert_same(alone, best)
        for name, tensor in alone.model.state_dict().items():
            assert torch.equal(best.load().state_dict()[name], tensor)
    assert any(
        best.history[-1]["step"] < last.history[-1]["step"]
        for last, best in zip(report.trials, report.at_best().trials, strict=True)
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"technique": shoal.Spilled(shards=2)},
        {"technique": shoal.Spilled(shards=2, optimizer="host")},
        {"technique": shoal.Pipelined(schedule="flush", stages=2), "devices": 2},
    ],
    ids=["resident", "spilled", "on the host", "pipelined"],
)
def test_it_is_that_of_training_alone(options, run):
    assert_kept(run(**options))


def test_by_steps_too(run):
    report = run(study={"epochs": None, "steps": 33, "eval_every": 4})
    assert_kept(report, eval_every=4)


@pytest.mark.parametrize("fuse", [3, "2/1"])
def test_in_arrays_it_is_its_slots(fuse, run, tmp_path):
    report = run(fuse=fuse)
    for last, best in zip(report.trials, report.at_best().trials, strict=True):
        rows = rows_of(last)
        assert best.history[-1]["step"] == min(rows, key=rows.get)
        assert best.load_state()["step"] == best.history[-1]["step"]
        alone = plain_loop(RECIPE, last.hp, last.seed, steps=best.load_state()["step"])
        for name, tensor in alone.model.state_dict().items():
            assert torch.allclose(best.load().state_dict()[name], tensor, atol=1e-4)


def test_replicas_save_it_once(run):
    report = run(devices=2, technique=shoal.DataParallel(width=2))
    for best in report.at_best().trials:
        assert best.load_state()["step"] == best.history[-1]["step"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("keep_finished", ["weights", "all"])
def test_it_stays_beside_what_is_kept_of_a_finished_trial(keep_finished, run):
    report = run(study={"keep": 1, "keep_finished": keep_finished, "checkpoint_every": 0})
    for last, best in zip(report.trials, report.at_best().trials, strict=True):
        kept = {int(path.name[5:13]) for path in last.checkpoint.parent.glob("step-*")}
        assert kept == {last.history[-1]["step"], best.history[-1]["step"]}
        assert best.load_state()["optimizer"] is not None or keep_finished == "weights"


def test_where_it_was_not_kept_that_is_said(run):
    report = run(study={"keep_best": False})
    best = report.at_best().best
    assert best.metrics["valid_loss"] < report.best.metrics["valid_loss"]
    with pytest.raises(SpecError, match=r"no checkpoint: Study\(keep_best=True\) keeps one"):
        best.load()


def test_a_trial_that_goes_on_keeps_a_better_one_alone(run):
    run(study={"epochs": 3})
    assert_kept(run())


def test_in_a_population_it_is_ones_own(run):
    space = {"lr": shoal.log_uniform(1e-3, 0.3)}
    pruner = shoal.PBT(interval=2, quantile=0.25)
    report = run(study={"space": space, "trials": 4, "pruner": pruner})
    assert any(trial.inherited for trial in report.trials)
    for last, best in zip(report.trials, report.at_best().trials, strict=True):
        step = best.history[-1]["step"]
        had = [one["hp"] for one in last.hp_schedule if one["after"] < step]
        assert best.hp == had[-1]
        found = valid_loss(best.load())
        assert found == pytest.approx(best.metrics["valid_loss"], abs=1e-6)


def valid_loss(net):
    with torch.no_grad():
        found = [float(loss(net(batch[0]), batch)) for batch in data({})[1]]
    return sum(found) / len(found)


SCRIPT = """
    import os, signal, sys
    sys.path.insert(0, {here!r})
    import shoal
    from test_kept_best import RECIPE, SPACE

    study = shoal.Study("it", RECIPE, space=SPACE, epochs=8, directory={place!r}, keep_best=True)
    left = [int(sys.argv[1])]

    class Kills:
        def __call__(self, event):
            left[0] -= type(event).__name__ == "Evaluated"
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    if __name__ == "__main__":
        hardware = shoal.Hardware.virtual(devices=1, memory="64MiB")
        study.run(hardware=hardware, callbacks=[Kills()], fuse={fuse!r})
"""


@pytest.mark.parametrize("fuse", [pytest.param(False, marks=pytest.mark.full), 3])
def test_after_kills_it_is_the_same(fuse, tmp_path):
    here = str(Path(__file__).parent)
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT.format(here=here, place=str(tmp_path), fuse=fuse)))
    for evaluations in (2, 7, 10**6):
        done = commands.run(script, str(evaluations), cwd=tmp_path)
        assert done.returncode in (0, -signal.SIGKILL)
    assert done.returncode == 0
    report = shoal.open(tmp_path / "it", recipe=RECIPE)
    if not fuse:
        assert_kept(report)
    for best in report.at_best().trials:
        assert valid_loss(best.load()) == pytest.approx(best.metrics["valid_loss"], abs=1e-6)


def verified(report, of=RECIPE):
    """What ``shoal verify`` says of all trials, and after which step each was best."""
    snapshot = Snapshot.of(read_events(report.directory))
    verdicts = list(verify_trials(report.directory, snapshot.trials, recipe=of))
    ends = [(min(rows := rows_of(t), key=rows.get), max(rows)) for t in report.trials]
    return verdicts, [best if best < last else None for best, last in ends]


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"technique": shoal.Spilled(shards=2)},
        {"fuse": 3},
        {"study": {"epochs": None, "steps": 33, "eval_every": 4, "keep_finished": "weights"}},
        {
            "study": {
                "space": {"lr": shoal.log_uniform(1e-3, 0.3)},
                "trials": 4,
                "pruner": shoal.PBT(interval=2, quantile=0.25),
            }
        },
    ],
    ids=["resident", "spilled", "array", "by steps", "population"],
)
def test_verification_compares_it_too(options, run):
    report = run(**options)
    verdicts, best = verified(report)
    assert [(v.equal, v.first_difference) for v in verdicts] == [(True, "")] * len(verdicts)
    assert [verdict.best_step for verdict in verdicts] == best
    assert any(best)
    for verdict in verdicts:
        words = f"; of its best evaluation, after step {verdict.best_step}, "
        assert (words in describe_verdict(verdict, "")) is (verdict.best_step is not None)
        assert bool(verdict.best_tensors) is (verdict.best_step is not None)


def test_verification_finds_it_different_where_its_last_state_is_as_alone(run):
    report = run()
    (trial, best, step) = next(
        (last, best, best.history[-1]["step"])
        for last, best in zip(report.trials, report.at_best().trials, strict=True)
        if last.checkpoint != best.checkpoint
    )
    other = plain_loop(RECIPE, trial.hp, trial.seed + 1, steps=step)
    place = checkpoint.generations(report.directory, trial.number)
    was = checkpoint.at(best.checkpoint)
    with place.begin(step) as draft:
        tensors = dict(other.model.state_dict()).items()
        draft.tensors(checkpoint.WEIGHTS, [row(*pair) for pair in tensors])
        draft.link(was, checkpoint.STATE)
        draft.commit(**was.manifest.meta)

    verdict = verified(report)[0][trial.number]

    assert verdict.first_difference.startswith(f"its best evaluation, after step {step}: model")


def test_verification_says_where_it_is_gone(run):
    report = run()
    trial, best = next(
        (last, best)
        for last, best in zip(report.trials, report.at_best().trials, strict=True)
        if last.checkpoint != best.checkpoint
    )
    shutil.rmtree(best.checkpoint)

    verdict = verified(report)[0][trial.number]

    assert verdict.equal
    (note,) = verdict.notes
    step = best.history[-1]["step"]
    assert note == f"of its best evaluation, after step {step}, there is no checkpoint to compare"


def test_one_that_was_stopped_early_may_be_the_best(run):
    optuna = pytest.importorskip("optuna")
    with warnings.catch_warnings(action="ignore"):  # that it is experimental
        patient = optuna.pruners.PatientPruner(None, patience=1)
    report = run(study={"pruner": patient, "generation": 3})
    assert report.count("PRUNED")
    best = report.at_best().best
    values = {trial.number: min(rows_of(trial).values()) for trial in report.trials}
    assert best.number == min(values, key=values.get)
    assert best.load_state()["step"] == best.history[-1]["step"]


def test_show_says_where_it_is(run):
    report = run()
    snapshot = Snapshot.of(read_trial(report.directory, 2))
    best = report.at_best().trials[2]
    step = best.history[-1]["step"]
    text = describe_trial(snapshot, snapshot.trial(2), report.directory)
    assert f"at step {step}, epoch {step // 5}; weights: {best.checkpoint}" in text


def test_a_metric_that_no_evaluation_finds_is_refused(run):
    with pytest.raises(SpecError, match="train_loss is the mean of the steps before"):
        run(study={"metric": "train_loss"})
