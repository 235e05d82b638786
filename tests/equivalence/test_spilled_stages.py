"""Pipelines of spilled stages end on the bits of the plain loop with the same accumulation."""

from __future__ import annotations

import itertools
import re

import pitfalls
import pytest
import staging
import traps
import unlucky
import zoo
from listening import Heard

import shoal
from shoal import Pipelined
from shoal.core.errors import PlanError
from shoal.core.event import (
    PeakMeasured,
    TrialParked,
)
from shoal.observe import read_timeline
from shoal.recipes.recipe import Recipe
from shoal.runtime.saving.checkpoint import read_state
from shoal.testing import compare
from shoal.verify import verify_trials

LR = {"lr": 1e-2}
SCHEDULES = ("naive", "gpipe", "flush")


@pytest.mark.parametrize("keep", [None, (0,)])
def test_what_stays_is_there_when_the_first_batch_is_looked_at(keep, run_staged):
    run_staged(unlucky.probability(), Pipelined(stages=2, shards=4, optimizer="host", keep=keep))


@pytest.mark.slow
@pytest.mark.parametrize(
    "technique",
    [
        Pipelined(stages=2, recompute=False),
        Pipelined(stages=2, shards=4, optimizer="device", keep=(0, 1), recompute=False),
    ],
    ids=["whole", "spilled"],
)
def test_a_new_size_in_mid_step_is_no_write_to_what_forwards_saved(technique, run_staged):
    run_staged(unlucky.uneven(), technique)


# -- schedules ----------------------------------------------------------------------------


def settings():
    """Every schedule, both places, with and without clipping; the product is ``full``."""
    quick = (3, "flush", "device", True)
    for one in itertools.product((2, 3), SCHEDULES, ("host", "device"), (True, False)):
        marks = () if one == quick else pytest.mark.full
        yield pytest.param(*one, marks=marks)


@pytest.mark.parametrize(("stages", "schedule", "place", "clips"), list(settings()))
def test_dropout_clipping_a_falling_rate_and_validation(
    stages, schedule, place, clips, run_staged
):
    recipe = staging.rich(clip_grad_norm=0.01 if clips else None)
    technique = Pipelined(
        stages=stages, schedule=schedule, shards=6, optimizer=place, keep=(), lookahead=1
    )
    run_staged(recipe, technique)


HOW = [
    Pipelined(stages=2, shards=6, optimizer="host", keep=(), keep_gradients=False),
    Pipelined(stages=2, shards=6, optimizer="device", keep=(), keep_gradients=True),
    Pipelined(stages=2, shards=6, optimizer="host", keep=(), keep_gradients=True, lookahead=0),
    Pipelined(stages=2, shards=6, optimizer="device", keep=(0, 4), recompute=False),
    Pipelined(stages=3, shards=5, optimizer="host", keep=(1, 4), recompute=True, lookahead=2),
    Pipelined(stages=2, shards=6, schedule="gpipe", optimizer="device", keep=(2, 3, 5)),
    Pipelined(cuts=(2,), shards=5, optimizer="device", keep=(), lookahead=0),
    Pipelined(stages=2, shards=2, optimizer="host", keep=()),
    Pipelined(stages=2, shards=4, lag=1),
    Pipelined(stages=2, optimizer="host"),
]


QUICK = (0, 3, 5, 9)
HOW = [pytest.param(t, marks=() if n in QUICK else pytest.mark.full) for n, t in enumerate(HOW)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("technique", HOW, ids=str)
def test_what_stays_and_what_comes_ahead_changes_no_bit(technique, run_staged):
    run_staged(staging.rich(), technique)


@pytest.mark.slow
@pytest.mark.parametrize("poison", [True])
@pytest.mark.parametrize("schedule", ["gpipe", "flush"])
@pytest.mark.parametrize("place", ["host", pytest.param("device", marks=pytest.mark.full)])
def test_no_copy_is_read_before_it_is_there(place, schedule, poison, run_study):
    recipe = staging.rich()
    technique = Pipelined(stages=2, shards=6, schedule=schedule, optimizer=place, keep=(1,))
    report = run_study(recipe, LR, technique=technique, devices=2, poison=poison, epochs=2)
    staging.assert_staged(report, recipe, technique, epochs=2)


# -- models -------------------------------------------------------------------------------

MODELS = (
    traps.Skips,
    traps.SharedBoundary,
    traps.SharedArgument,
    traps.Reused,
    traps.Structured,
    traps.InPlace,
    traps.Glue,
    traps.Unused,
    traps.LateGradient,
    traps.FrozenStart,
    traps.Recurrent,
    traps.Stochastic,
    traps.InnerCheckpoint,
)
HARD = (traps.SharedBoundary, traps.LateGradient, traps.FrozenStart, traps.Stochastic)


def models():
    for number, model in enumerate(MODELS):
        for schedule, place in itertools.product(("gpipe", "flush"), ("host", "device")):
            mine = (number % 2 == 0) == (schedule == "gpipe") and place == "host"
            marks = () if model in HARD and mine else pytest.mark.full
            name = f"{model.__name__}, {schedule}, {place}"
            yield pytest.param(model, schedule, place, marks=marks, id=name)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("model", "schedule", "place"), list(models()))
def test_models_that_break_a_careless_engine(model, schedule, place, run_staged):
    """Batches of two sizes; an epoch's last step is short."""
    recipe = staging.trap(model, clip_grad_norm=0.01)
    technique = Pipelined(stages=2, shards=4, schedule=schedule, optimizer=place, keep=())
    run_staged(recipe, technique)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "stages", "schedule", "place"),
    [
        ("gpt", 2, "gpipe", "host"),
        pytest.param("gpt", 3, "flush", "device", marks=pytest.mark.full),
        ("resnet", 2, "flush", "host"),
        ("resnet", 2, "gpipe", "device"),
        pytest.param("gpt", 2, "naive", "device", marks=pytest.mark.full),
        pytest.param("bert", 2, "flush", "host", marks=pytest.mark.full),
        pytest.param("llama", 3, "gpipe", "host", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_zoo(model, stages, schedule, place, precision, run_staged):
    """Tied weights on two devices, BatchNorm's statistics, masks that all shards read."""
    recipe = zoo.recipe(clip=0.1, accumulate=3, schedule=True, precision=precision)
    space = {**LR, "model": model, "optimizer": "adamw"}
    technique = Pipelined(stages=stages, shards=4, schedule=schedule, optimizer=place)
    run_staged(recipe, technique, space)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("place", "keep"),
    [
        ("host", ()),
        ("device", (0,)),
        ("host", (0, 1, 2)),
        pytest.param("device", (), marks=pytest.mark.full),
        pytest.param("host", (0,), marks=pytest.mark.full),
        pytest.param("device", (0, 1, 2), marks=pytest.mark.full),
    ],
)
def test_tied_weights_whose_owner_stays_or_travels(place, keep, run_staged):
    recipe = Recipe(model=pitfalls.build, data=pitfalls.data, loss=pitfalls.loss, accumulate=2)
    technique = Pipelined(stages=2, shards=4, optimizer=place, keep=keep)
    run_staged(recipe, technique, shoal.grid(kind=["Tied"], lr=[0.01]), steps=6)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        ("DrawsBetween", "gpipe"),
        ("CountsLate", "flush"),
        pytest.param("DrawsBetween", "flush", marks=pytest.mark.full),
        pytest.param("CountsLate", "gpipe", marks=pytest.mark.full),
    ],
)
def test_what_pipelines_got_wrong_once(kind, schedule, run_staged):
    recipe = Recipe(model=pitfalls.build, data=pitfalls.data, loss=pitfalls.loss, accumulate=2)
    technique = Pipelined(stages=2, shards=4, schedule=schedule, optimizer="host", keep=())
    run_staged(recipe, technique, shoal.grid(kind=[kind], lr=[0.01]), steps=6)


@pytest.mark.parametrize(
    ("optimizer", "place"),
    [
        (traps.last_layers, "host"),
        pytest.param(staging.sgd, "host", marks=pytest.mark.full),
        pytest.param(traps.two_rates, "device", marks=pytest.mark.full),
    ],
)
def test_optimizers_with_and_without_a_state(optimizer, place, run_staged):
    limit = None if optimizer is traps.last_layers else 0.01
    recipe = staging.rich(optimizer=optimizer, clip_grad_norm=limit)
    run_staged(recipe, Pipelined(stages=2, shards=4, optimizer=place, keep=()))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "data", ["reusing", "shuffled", pytest.param("quiet", marks=pytest.mark.full)]
)
def test_sources_of_any_habit(data, run_staged):
    recipe = staging.trap(traps.Chain, data=getattr(staging, data))
    run_staged(recipe, Pipelined(stages=2, shards=4, schedule="gpipe", optimizer="host"))


@pytest.mark.full
def test_batches_in_pieces_end_on_the_bits_of_as_many_micro_batches(run_staged):
    recipe = staging.rich(2, splittable=True, schedule=None)
    technique = Pipelined(stages=2, shards=5, schedule="gpipe", micro_batches=8, keep=())
    report = run_staged(recipe, technique)
    assert staging.numerics(report)[0]["micro_batches"] == 8


# -- leases -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "keep"),
    [("host", (1,)), pytest.param("device", (0, 3), marks=pytest.mark.full)],
)
def test_trials_that_leave_and_come_back_end_on_the_same_bits(place, keep, run_staged, impatient):
    heard = Heard()
    run_staged(
        staging.rich(),
        Pipelined(stages=2, shards=5, optimizer=place, keep=keep),
        shoal.grid(lr=[0.01, 0.003, 0.001]),
        devices=3,
        options={"callbacks": [heard], "checkpoint_every": 0.05},
        epochs=4,
    )
    assert len(heard.of(TrialParked)) >= 4


def test_every_generation_is_of_one_step(run_study):
    """Whatever the stages' streams had in flight when it was taken."""
    recipe = staging.rich()
    technique = Pipelined(stages=2, shards=5, optimizer="host", keep=(1,))
    options = {"checkpoint_every": 0, "keep": 50, "epochs": 3}
    report = run_study(recipe, LR, technique=technique, devices=2, **options)
    (trial,) = report.trials
    states = {s["step"]: s for s in map(read_state, trial.checkpoint.parent.glob("step-*"))}
    assert sorted(states) == [1, 2, 3, 4, 5, 6]
    for step, state in states.items():
        plain = staging.defined(recipe, trial, technique, steps=step)
        found = compare(plain, state)
        assert found.equal, f"step {step}: {found.first_difference}"


@pytest.mark.full
def test_two_spilled_pipelines_fill_each_others_bubbles(run_staged):
    technique = Pipelined(stages=2, shards=6, optimizer="host", keep=())
    space = shoal.grid(lr=[0.01, 0.003])
    report = run_staged(staging.rich(), technique, space, options={"timeline": True}, epochs=6)
    actions = [a for a in read_timeline(report.directory) if a.stream == "compute"]
    assert {a.stream for a in read_timeline(report.directory)} == {"compute", "up", "down", "host"}
    for device in {action.device for action in actions}:
        trials = [a.trial for a in sorted(actions, key=lambda a: a.start) if a.device == device]
        turns = sum(one != other for one, other in itertools.pairwise(trials))
        assert set(trials) == {0, 1}
        assert turns > 20
    for verdict in verify_trials(report.directory, staging.rows(report), recipe=staging.rich()):
        assert verdict.equal, verdict


# -- bytes --------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("technique", "memory"),
    [
        (Pipelined(stages=2), "600KiB"),
        (Pipelined(stages=2, schedule="gpipe", optimizer="host"), "600KiB"),
        pytest.param(Pipelined(stages=2, optimizer="device"), "600KiB", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_model_whose_stages_fit_no_device_trains_over_two(
    technique, memory, run_staged, run_study
):
    recipe, heard = staging.large(), Heard()
    with pytest.raises(PlanError, match="needs"):
        run_study(recipe, LR, technique=Pipelined(cuts=(7,)), devices=2, memory=memory, epochs=1)
    options = {"memory": memory, "callbacks": [heard], "timeline": True}
    report = run_staged(recipe, technique, options=options)
    actions = list(read_timeline(report.directory))
    assert {a.stream for a in actions} >= {"compute", "up", "down"}
    assert {re.match("[A-Z]+", a.action)[0] for a in actions} >= {"LOAD", "STORE", "F", "B"}
    peaks = {event.device: event for event in heard.of(PeakMeasured)}
    assert len(peaks) == 2
    assert all(peak.peak_bytes <= peak.predicted_bytes for peak in peaks.values())
    assert all(peak.predicted_bytes <= peak.budget_bytes for peak in peaks.values())


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("schedule", ["flush", pytest.param("gpipe", marks=pytest.mark.full)])
def test_a_model_that_draws_and_is_larger_than_its_device_is_never_there_as_a_whole(
    schedule, precision, run_staged
):
    """The first stage foretells what all others draw, with a layer of theirs at a time."""
    heard, recipe = Heard(), staging.rich(model=staging.noisy, precision=precision)
    weights = sum(p.nbytes for p in staging.noisy(None).parameters())
    how = {"shards": 8, "lookahead": 0, "keep": (), "keep_gradients": False}
    technique = Pipelined(stages=2, schedule=schedule, optimizer="host", **how)
    kib = 5800 if (schedule, precision) == ("gpipe", "bf16") else 5500  # it needs 5.6 MiB
    options = {"memory": f"{kib}KiB", "callbacks": [heard], "timeline": True}
    run_staged(recipe, technique, options=options)
    assert weights > kib * 2**10
    for peak in heard.of(PeakMeasured):
        assert peak.peak_bytes <= peak.predicted_bytes <= peak.budget_bytes


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "technique",
    [
        Pipelined(stages=2, shards=4, optimizer="host", keep=()),
        Pipelined(stages=2),
        Pipelined(stages=2, schedule="2bw"),
    ],
    ids=["spilled", "whole", "2bw"],
)
def test_the_timeline_says_of_which_step_an_action_is(technique, run_staged):
    report = run_staged(staging.rich(), technique, options={"timeline": True}, epochs=2)
    actions = [a for a in read_timeline(report.directory) if a.action.startswith("B ")]
    assert {a.step for a in actions} == {1, 2, 3, 4}
    assert len({sum(a.step == step for a in actions) for step in (1, 2, 3, 4)}) == 1


# -- interrupted --------------------------------------------------------------------------


SPILLED = Pipelined(stages=2, shards=5, optimizer="host", keep=(1,))
RESUMES = [
    (SPILLED, None),
    pytest.param(SPILLED, Pipelined(stages=3, schedule="zb-h1"), marks=pytest.mark.full),
    (Pipelined(stages=2), Pipelined(stages=3, shards=6, schedule="gpipe", optimizer="device")),
    (shoal.Spilled(shards=3), SPILLED),
    pytest.param(SPILLED, "resident", marks=pytest.mark.full),
    pytest.param(SPILLED, shoal.Spilled(shards=4), marks=pytest.mark.full),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("technique", "then"), RESUMES, ids=str)
def test_an_interrupted_study_goes_on_to_the_same_bits(technique, then, interrupted):
    """How a model is cut, and what of it is where, is placement."""
    recipe = staging.rich()
    report = interrupted(recipe, technique, then)
    staging.assert_staged(report, recipe, SPILLED, epochs=6)


# -- failures -----------------------------------------------------------------------------

FAILURES = {
    "nan": "the loss of step 3 is nan",
    "raise": "the head has gone wrong",
    "metric": "the metric has gone wrong",
    "data": "the data has gone wrong",
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "what",
    [pytest.param(w, marks=pytest.mark.full if w in ("data", "metric") else ()) for w in FAILURES],
)
def test_what_fails_at_a_stage_fails_its_trial_alone(what, run_study):
    recipe = staging.failing(None)
    space = shoal.grid(what=["", what, "-"], lr=[0.01])
    loop = {"epochs": 2, "eval_every": 2}
    report = run_study(recipe, space, technique=SPILLED, devices=2, checkpoint_every=60, **loop)
    first, failed, last = report.trials
    assert failed.state == "FAILED"
    assert FAILURES[what] in failed.error
    assert staging.rows(report)[1].step == 2
    staging.assert_staged(report, recipe, SPILLED, [first, last], **loop)


@pytest.mark.full
def test_a_trial_that_waits_holds_no_memory_of_the_device(run_staged, impatient):
    """The data count the seats that are there, whose memory it is, and refuse more than one."""
    run_staged(
        staging.rich(data=staging.counting_seats),
        SPILLED,
        shoal.grid(lr=[0.01, 0.003, 0.001]),
        epochs=4,
    )
