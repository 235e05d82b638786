"""In an array in shards every trial ends on its bits, whatever its batches and neighbours are."""

from __future__ import annotations

import breakdowns
import pytest
import squads
import uneven

import shoal
from shoal.core.technique import Spilled
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.planning import fusing

HOST = Spilled(shards=2, optimizer="host")
DEVICE = Spilled(shards=3, optimizer="device", keep=(1,))
QUICK = {("first", "host"), ("middle", "device"), ("first two", "host")}


def techniques(report):
    return [row.technique for row in Snapshot.of(read_outline(report.directory)).trials]


def positions():
    for position in uneven.SHORT:
        for name, way in (("host", HOST), ("device", DEVICE)):
            marks = () if (position, name) in QUICK else pytest.mark.full
            yield pytest.param(position, way, marks=marks, id=f"{position}, {name}")


@pytest.mark.sample(1)
@pytest.mark.parametrize(("position", "way"), list(positions()))
def test_a_short_batch_anywhere_in_a_step_leaves_the_bits_of_the_whole_array(
    position, way, run_study
):
    recipe, loop = uneven.short(), {"epochs": 1}
    space = shoal.grid(lr=[0.01, 0.003], short=[position], usual=[False, True], drop=[0.1])
    report = run_study(recipe, space, **loop, fuse=4, technique=way, poison=True)
    assert techniques(report) == ["Spilled"] * 4
    squads.assert_arrayed(report, report.trials, recipe, 4, **loop)


@pytest.mark.slow
@pytest.mark.parametrize("way", [HOST, DEVICE], ids=["host", "device"])
def test_weights_that_a_short_batch_passes_by_are_not_stepped(way, run_study):
    """Where nobody has a gradient for them, one by itself has, or those that ran together have."""
    recipe, loop = uneven.left_out(accumulate=1), {"epochs": 1}
    space = shoal.grid(lr=[0.1], short=["all", "ends", "last"], usual=[False], drop=[0.1])
    report = run_study(recipe, space, **loop, fuse=3, technique=way)
    assert techniques(report) == ["Spilled"] * 3
    squads.assert_arrayed(report, report.trials, recipe, 3, **loop)


@pytest.mark.parametrize("way", [HOST, pytest.param(DEVICE, marks=pytest.mark.full)])
def test_in_one_shard_the_norm_of_a_slot_by_itself_is_known_in_time(way, run_study):
    way = Spilled(shards=1, optimizer=way.optimizer, lookahead=0)
    recipe, loop = uneven.short(accumulate=1), {"epochs": 1}
    space = shoal.grid(lr=[0.01], short=["first", "ends"], usual=[False], drop=[0.1])
    report = run_study(recipe, space, **loop, fuse=2, technique=way)
    assert techniques(report) == ["Spilled"] * 2
    squads.assert_arrayed(report, report.trials, recipe, 2, **loop)


def test_trials_come_to_slots_after_others_that_ran_by_themselves(run_study):
    recipe, loop = uneven.short(model=uneven.named), {"epochs": 1}
    space = shoal.grid(lr=[0.01, 0.003, 0.001, 0.03], short=["middle"])
    report = run_study(recipe, space, **loop, fuse=2, technique=HOST)
    squads.assert_arrayed(report, report.trials, recipe, 2, **loop)


# -- a batch that is none -----------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("moved", "the label is lost"),
        ("told", "the label is gone"),
        ("shape", "RuntimeError"),
        ("short", "the loss gave up"),
        pytest.param("short target", "out of bounds", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("accumulate", [1, pytest.param(3, marks=pytest.mark.full)])
def test_a_batch_that_is_none_fails_its_trial_alone(bad, words, accumulate, run_study):
    recipe, loop = uneven.bad_batches(accumulate=accumulate), {"steps": 4 if accumulate > 1 else 9}
    if bad == "short target":
        recipe = uneven.bad_batches(accumulate=accumulate, loss=squads.loss)
    space = shoal.grid(bad=["none", bad, "no"], lr=[0.01], drop=[0.1])
    report = run_study(recipe, space, **loop, fuse=3, technique=HOST)
    failed = [trial for trial in report.trials if str(trial.state) == "FAILED"]
    assert [trial.hp["bad"] for trial in failed] == [bad]
    assert words in failed[0].error
    alive = [trial for trial in report.trials if trial not in failed]
    squads.assert_arrayed(report, alive, recipe, 3, **loop)


@pytest.mark.slow
def test_those_whose_neighbour_failed_end_on_their_bits_when_the_study_goes_on(
    tmp_path, warm_workers
):
    recipe = uneven.bad_batches()
    space = shoal.grid(bad=["none", "told", "no"], lr=[0.01], drop=[0.1])
    hardware = shoal.Hardware.virtual(devices=1, memory="64MiB")
    options = {"hardware": hardware, "workers": warm_workers, "progress": False}
    for steps in (6, 11):
        study = shoal.Study("k", recipe, space=space, directory=tmp_path, steps=steps)
        report = study.run(**options, fuse=3, technique=HOST, timeline=False)
    alive = [trial for trial in report.trials if trial.hp["bad"] != "told"]
    assert {str(trial.state) for trial in alive} == {"FINISHED"}
    squads.assert_arrayed(report, alive, recipe, 3, steps=11)


STAYING = [
    Spilled(shards=3, optimizer="host", keep=(0, 1)),
    Spilled(shards=3, optimizer="device", keep=(1,), keep_weights=(0,)),
]


@pytest.mark.slow
@pytest.mark.parametrize("way", STAYING, ids=["host", "device"])
def test_a_trial_that_is_saved_where_it_is_goes_on_from_there(way, run_study, tmp_path):
    """It fails once, after steps of which each was saved; what stays on the device is in that."""
    recipe = breakdowns.recipe(optimizer=squads.adam)
    space = shoal.grid(mishap=["none", "once"], flag=[str(tmp_path / "failed")], lr=[0.01])
    space, loop = space | {"drop": 0.1}, {"steps": 8, "eval_every": 2}
    options = {"retries": 1, "checkpoint_every": 0, "technique": way}
    report = run_study(recipe, space, **loop, **options, fuse=2)
    assert (tmp_path / "failed").exists()
    assert techniques(report) == ["Spilled"] * 2
    squads.assert_arrayed(report, report.trials, recipe, 2, **loop)


@pytest.mark.slow
@pytest.mark.parametrize("technique", [None, HOST], ids=["whole", "in shards"])
def test_a_neighbour_without_finite_numbers_is_nothing_to_one_that_waits(technique, run_study):
    """The trial that ends early sees the other's batch, and weighs nothing."""
    recipe, loop = uneven.neighbours(), {"epochs": 1}
    space = shoal.grid(kind=["nan", "ends early", "usual"], lr=[0.01], drop=[0.1])
    report = run_study(recipe, space, **loop, fuse=3, technique=technique)
    alive = [trial for trial in report.trials if trial.hp["kind"] != "nan"]
    assert [str(t.state) for t in report.trials if t not in alive] == ["FAILED"]
    for trial in alive:
        assert str(trial.state) == "FINISHED", trial.error
        squads.assert_near([trial], recipe, 1e-6, **loop)


@pytest.mark.slow
@pytest.mark.parametrize("technique", [HOST, pytest.param(DEVICE, marks=pytest.mark.full)])
def test_nor_is_one_whose_loss_is_finite_and_its_gradient_is_not(technique, run_study):
    recipe, loop = uneven.neighbours(model=uneven.rooted, clip_grad_norm=0.5), {"epochs": 1}
    space = shoal.grid(kind=["zero", "ends early", "usual"], lr=[0.01], drop=[0.1])
    report = run_study(recipe, space, **loop, fuse=3, technique=technique)
    squads.assert_arrayed(report, report.trials, recipe, 3, **loop)


# -- what metrics are given ---------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "model"),
    [("tuple", uneven.tuples), ("object", uneven.objects)],
)
@pytest.mark.parametrize(
    "options",
    [{}, {"fuse": "3 traced"}, {"technique": HOST}],
    ids=["eager", "traced", "in shards"],
)
def test_a_metric_is_given_what_its_trial_alone_would_give(name, model, options, run_study):
    recipe = squads.recipe(model=model, loss=uneven.smooth_loss, metrics=uneven.METRICS)
    space, loop = uneven.SMOOTHINGS, {"epochs": 2}
    report = run_study(recipe, space, **loop, **({"fuse": "3 eager"} | options))
    assert squads.widths(report) == [3] * 3
    for trial in report.trials:
        assert str(trial.state) == "FINISHED", trial.error
        assert trial.metrics["valid_smoothing"] == pytest.approx(trial.hp["smoothing"])
        assert trial.metrics["valid_largest"] > 0


# -- chosen -------------------------------------------------------------------------------


@pytest.mark.full  # what is measured decides: a busy machine may find no gain
def test_an_array_in_shards_is_taken_where_it_is_quicker_by_replay(run_study, jobs, monkeypatch):
    """Many small operations, whose activations do not fit for 8 trials, nor for 4."""
    monkeypatch.setattr(fusing, "why_no_look", lambda load: "")
    recipe, loop = uneven.settled(), {"epochs": 2}
    space = shoal.grid(lr=[0.01 * n for n in range(1, 9)])
    report = run_study(recipe, space, **loop, memory="160KiB", fuse="auto")
    assert techniques(report) == ["Spilled"] * 8
    assert squads.widths(report) == [8] * 8
    words = next(why for why in jobs[0].why if why.startswith("as arrays of 8, eager, spilled in"))
    assert "one by one" in words
    squads.assert_arrayed(report, report.trials[::3], recipe, 8, **loop)
