"""Trials that a study trains in copies of a pipeline end on the bits of the loop of their rule."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import staging
import traps
import zoo
from listening import Heard, Orders, short_leases

import shoal
from shoal import Pipelined
from shoal.control import StopStudy
from shoal.core.errors import SpecError
from shoal.core.event import PeakMeasured, StepFinished, TrialMoved, TrialParked
from shoal.observe import read_timeline
from shoal.runtime.gangs.pipelined import without_versions
from shoal.runtime.saving.checkpoint import read_state
from shoal.scheduler import placing
from shoal.testing import compare, plain_loop
from shoal.verify import verify_trials

LR = {"lr": 1e-2}


def wide(stages=2, **how):
    return Pipelined(**({"stages": stages, "width": 2} | how))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "technique",
    [
        pytest.param(wide(schedule="gpipe", cuts=(2,), recompute=True), marks=pytest.mark.full),
        wide(schedule="flush"),
        wide(schedule="zb-h1"),
        wide(schedule="2bw"),
        pytest.param(wide(schedule="2bw", predict=True, lag=1), marks=pytest.mark.full),
        wide(schedule="flush", width=3),
        pytest.param(wide(schedule="naive"), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_every_schedule_with_dropout_clipping_a_falling_rate_and_validation(technique, run_staged):
    report = run_staged(staging.rich(), technique)
    assert report.trials[0].history


@pytest.mark.parametrize(
    ("model", "schedule"),
    [
        (traps.LateGradient, "2bw"),
        *(
            pytest.param(*pair, marks=pytest.mark.full)
            for pair in [(traps.SharedLayer, "2bw"), (traps.FrozenStart, "zb-h1")]
        ),
    ],
)
def test_models_that_break_a_careless_engine(model, schedule, run_staged):
    recipe = staging.trap(model, 4, data=staging.even, clip_grad_norm=0.01)
    run_staged(recipe, wide(schedule=schedule))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "schedule", "precision"),
    [
        ("gpt", "2bw", "fp32"),
        ("gpt", "2bw", "bf16"),
        ("resnet", "flush", "fp32"),
        pytest.param("gpt", "zb-h1", "fp32", marks=pytest.mark.full),
        pytest.param("resnet", "flush", "bf16", marks=pytest.mark.full),
    ],
)
def test_ties_and_buffers(model, schedule, precision, run_staged):
    """Five batches an epoch: with four a step the last step would have one, with five it fits."""
    recipe = zoo.recipe(clip=0.1, accumulate=5, schedule=True, precision=precision)
    run_staged(recipe, wide(schedule=schedule), {**LR, "model": model, "optimizer": "adamw"})


@pytest.mark.parametrize("data", ["reusing", pytest.param("shuffled", marks=pytest.mark.full)])
def test_sources_of_any_habit(data, run_staged):
    accumulate = 4 if data == "reusing" else 5
    run_staged(staging.trap(traps.Chain, accumulate, data=getattr(staging, data)), wide())


def test_uneven_steps_and_evaluations_anywhere(run_staged):
    """Five batches an epoch, three a step: copies take two and one, then one and one."""
    report = run_staged(staging.trap(), wide(), steps=7, eval_every=2)
    assert len(report.trials[0].history) == 4


@pytest.mark.slow
def test_batches_in_pieces(run_staged):
    recipe = staging.rich(2, splittable=True)
    report = run_staged(recipe, wide(schedule="2bw", micro_batches=8))
    assert staging.numerics(report)[0]["copies"] == 2


def test_it_is_the_plain_loop_but_for_rounding(run_staged):
    recipe = staging.rich()
    (trial,) = run_staged(recipe, wide()).trials
    plain = plain_loop(recipe, trial.hp, trial.seed, epochs=2)
    state = trial.load_state()["model"]
    for name, parameter in plain.parameters.items():
        assert (state[name] - parameter.detach()).abs().max() < 1e-6


def test_draws_that_nobody_can_foretell_fail_the_trial_in_words(run_study):
    """A model that draws from Python's streams."""
    recipe = staging.trap(traps.Stochastic, 4, data=staging.even)
    report = run_study(recipe, LR, technique=wide(), devices=4, epochs=1)
    assert "cannot be foretold: 2 copies would wait" in report.trials[0].error_line
    assert "Use width=1" in report.trials[0].error_line


# -- evaluation -------------------------------------------------------------------------------


def test_validation_batches_go_to_the_copies_in_turn(run_staged):
    """Three batches a pass: copy 0 takes two, copy 1 one; the metrics are the plain loop's."""
    report = run_staged(staging.rich(), wide(), options={"timeline": True})
    assert len(report.trials[0].history) == 2
    actions = [a for a in read_timeline(report.directory) if a.stream == "compute"]
    forwards = [a.device for a in actions if a.action.startswith("F s1")]  # in training none
    assert sorted(forwards) == ["cpu:1"] * 4 + ["cpu:3"] * 2


@pytest.mark.slow
def test_a_buffer_that_evaluation_changes_is_one_copys(run_staged):
    run_staged(staging.trap(accumulate=4, data=staging.even, model=staging.counts), wide())


def test_a_buffer_that_a_later_validation_batch_changes_fails_the_trial_in_words(run_study):
    recipe = staging.trap(accumulate=4, data=staging.even, model=staging.counts)
    report = run_study(recipe, {**LR, "late": 1}, technique=wide(), devices=4, epochs=1)
    (trial,) = report.trials
    assert trial.state == "FAILED"
    assert "evaluating a batch wrote to the buffer 'leave.seen'" in trial.error_line
    assert "Use width=1" in trial.error_line


# -- leases, generations, resuming ------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["flush", "2bw"])
def test_every_generation_is_of_one_step(schedule, run_study):
    recipe, technique = staging.rich(), wide(schedule=schedule)
    options = {"checkpoint_every": 0, "keep": 50, "epochs": 2}
    report = run_study(recipe, LR, technique=technique, devices=4, **options)
    (trial,) = report.trials
    states = map(read_state, trial.checkpoint.parent.glob("step-*"))
    states = {state["step"]: without_versions(state) for state in states}
    assert sorted(states) == [1, 2, 3, 4]
    for step, state in states.items():
        plain = staging.defined(recipe, trial, technique, steps=step)
        found = compare(plain, state)
        assert found.equal, f"step {step}: {found.first_difference}"


def wander(roster, trial):
    """Other devices than before, or the same ones in another order."""
    free = sorted(name for name in roster.devices if roster.has_room(trial, name))
    turn = round(trial.remaining_s / trial.step_s) % max(1, len(free))
    places = (*free[turn:], *free[:turn])[: trial.gang]
    return places if len(places) == trial.gang else ()


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["flush", pytest.param("2bw", marks=pytest.mark.full)])
def test_trials_that_leave_and_come_back_end_on_the_same_bits(
    schedule, run_staged, impatient, monkeypatch
):
    """What was stage 0 of copy 0 is another stage of another copy."""
    monkeypatch.setattr(placing, "choose_devices", wander)
    heard = Heard()
    run_staged(
        staging.rich(),
        wide(schedule=schedule),
        shoal.grid(lr=[0.01, 0.003]),
        options={"callbacks": [heard], "devices": 5},
        epochs=4,
    )
    assert heard.of(TrialParked)
    assert heard.of(TrialMoved)


RESUMES = [
    (wide(), wide(schedule="zb-h1")),
    pytest.param(wide(), None, marks=pytest.mark.full),
    (wide(schedule="2bw"), None),
    (wide(), wide(3, schedule="gpipe")),
]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("technique", "then"), RESUMES, ids=str)
def test_an_interrupted_study_goes_on_to_the_same_bits(
    technique, then, tmp_path, warm_workers, monkeypatch
):
    recipe, orders = staging.rich(), Orders(tmp_path / "k", monkeypatch)
    orders.at(
        lambda event: isinstance(event, StepFinished) and event.step >= 3, StopStudy(), "stop"
    )
    shown = {"progress": False, "timeline": False, "workers": warm_workers}
    for how, callback in ((technique, orders), (then, Heard())):
        settings = {"epochs": 6, "checkpoint_every": 60}
        study = shoal.Study("k", recipe, space=LR, directory=tmp_path, **settings)
        devices = 6 if then is not None and then.stages == 3 else 4
        hardware = shoal.Hardware.virtual(devices=devices, memory="64MiB")
        with short_leases(monkeypatch) if callback is orders else nullcontext():
            report = study.run(hardware=hardware, technique=how, callbacks=[callback], **shown)
        if callback is orders:
            orders.join()
            assert report.stopped
            with pytest.raises(SpecError, match="copies of trial 0 was 2"):
                study.run(hardware=hardware, technique=wide(width=1), **shown)
    staging.assert_staged(report, recipe, technique, epochs=6)


@pytest.mark.parametrize("schedule", ["2bw", pytest.param("flush", marks=pytest.mark.full)])
def test_trials_in_copies_share_their_devices(schedule, run_staged):
    space = shoal.grid(lr=[0.01, 0.003, 0.001])
    report = run_staged(staging.rich(), wide(schedule=schedule), space, options={"timeline": True})
    actions = [a for a in read_timeline(report.directory) if a.stream == "compute"]
    assert {a.device for a in actions} == {f"cpu:{number}" for number in range(4)}
    for device in {a.device for a in actions}:
        assert {a.trial for a in actions if a.device == device} == {0, 1, 2}


# -- what is said of them -----------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [pytest.param("flush", marks=pytest.mark.full), "2bw"])
def test_the_record_says_how_many_copies_there_are_and_verify_repeats_them(schedule, run_study):
    recipe, technique = staging.rich(), wide(schedule=schedule)
    report = run_study(recipe, LR, technique=technique, devices=4, epochs=2)
    assert [key["copies"] for key in staging.numerics(report)] == [2]
    for verdict in verify_trials(report.directory, staging.rows(report), recipe=recipe):
        assert verdict.equal, verdict


def test_what_was_predicted_is_enough(run_staged):
    heard = Heard()
    run_staged(staging.large(), wide(), options={"callbacks": [heard], "memory": "8MiB"})
    peaks = heard.of(PeakMeasured)
    assert {event.device for event in peaks} == {f"cpu:{number}" for number in range(4)}
    assert all(peak.peak_bytes <= peak.predicted_bytes <= peak.budget_bytes for peak in peaks)


@pytest.mark.parametrize(
    "what",
    [
        "nan",
        pytest.param("raise", marks=pytest.mark.full),
        pytest.param("data", marks=pytest.mark.full),
    ],
)
def test_what_fails_at_a_copy_fails_its_trial_alone(what, run_study):
    """The tenth batch is the second of its step: it is copy 1 that computes it."""
    recipe, technique = staging.failing(None), wide()
    space, loop = shoal.grid(what=["", what], lr=[0.01]), {"epochs": 2, "eval_every": 2}
    report = run_study(recipe, space, technique=technique, devices=4, **loop)
    well, failed = report.trials
    assert failed.state == "FAILED"
    said = {"nan": "the loss of step 3 is nan", "raise": "the head has", "data": "the data has"}
    assert said[what] in failed.error
    assert staging.rows(report)[1].step == 2
    staging.assert_staged(report, recipe, technique, [well], **loop)
