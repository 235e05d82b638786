"""Trials in arrays that are killed, paused, or moved end on the bits of their slots."""

from __future__ import annotations

import functools
import random
import signal
import sys

import populations
import pytest
import searches
import squads
import studies
from processes import Runner

import shoal
from shoal.core.event import TrialFinished, WorkerDied
from shoal.fusion.graphs.compiled import compiler
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.testing import array_loop, assert_same
from shoal.verify import read_losses, verify_trials

WIDTH, PAUSED, TRIALS = 2, 75, 6
OPTIONS = {"kinds": ("resident", "workers"), "lr": (3e-3, 1e-3, 5e-4)}
FUSED = ("--fuse", str(WIDTH))


@functools.cache
def alone(kind: str, lr: float, seed: int, slot: int, epochs: int):
    """The trial in its slot, with nobody beside it."""
    hp = {"kind": kind, "lr": lr}
    return array_loop(studies.recipe(), hp, seed, slot=slot, width=WIDTH, epochs=epochs)


def check_arrayed(place, epochs: int) -> None:
    report, losses = shoal.open(place, studies.recipe()), read_losses(place)
    slots = squads.slots_of(report)
    assert squads.widths(report) == [WIDTH] * TRIALS
    for trial in report.trials:
        assert trial.state == "FINISHED", trial.error or trial
        slot, _ = slots[trial.number]
        plain = alone(trial.hp["kind"], trial.hp["lr"], trial.seed, slot, epochs)
        assert_same(plain, trial, losses=losses[trial.number])


def run_under_fire(folder, kills: int, epochs: int, seed: int, options=OPTIONS) -> None:
    """Each run is another number of devices, and only the first one asks for arrays."""
    sys.stderr.write(f"seed {seed}\n")  # shown when it fails
    draw = random.Random(seed)
    runner = Runner(folder, epochs=epochs, checkpoint_every=draw.choice([0, 0.05, 0.3]), **options)
    words = FUSED
    for _ in range(kills):
        runner._devices = draw.choice([1, 2, 3])
        process = runner.start(words=words, **{studies.PACE_S: "0.01"})
        process.wait_for("StepFinished", or_end=True)
        words = ()
        if draw.random() < 0.4 and not process.is_over_after(draw.uniform(0.0, 1.0)):
            process.kill_a_worker(draw)
        if not process.is_over_after(draw.uniform(0.0, 1.5)):
            process.kill()
        process.check_nothing_left()
    assert runner.start(words=words).wait() == 0, runner.words()
    check_arrayed(runner.place, epochs)
    finished = [e.trial for e in runner.events() if isinstance(e, TrialFinished)]
    assert sorted(finished) == list(range(TRIALS))


@pytest.mark.full
def test_arrays_killed_at_random_instants_end_on_the_same_bits(tmp_path):
    run_under_fire(tmp_path, kills=3, epochs=4, seed=random.SystemRandom().randrange(10**6))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(5))
def test_arrays_killed_often_end_on_the_same_bits(tmp_path, seed):
    run_under_fire(tmp_path, kills=10, epochs=10, seed=seed)


@pytest.mark.full
def test_arrays_that_are_paused_go_on_to_the_same_bits(tmp_path):
    runner = Runner(tmp_path, epochs=3, checkpoint_every="1h", **OPTIONS)
    words = FUSED
    for count, devices in ((3, 2), (9, 1), (4, 3)):
        runner._devices = devices
        process = runner.start(words=words, **{studies.PACE_S: "0.02"})
        process.wait_for("StepFinished", count)
        process.send(signal.SIGTERM)
        assert process.wait() == PAUSED, runner.words()
        process.check_nothing_left()
        words = ()
    assert runner.start(verb="resume").wait() == 0, runner.words()
    assert not any(isinstance(event, WorkerDied) for event in runner.events())
    check_arrayed(runner.place, 3)


@pytest.mark.skipif(not compiler(), reason="there is no C++ compiler")
@pytest.mark.full
def test_compiled_arrays_that_are_killed_go_on_compiled_to_the_same_bits(tmp_path):
    runner = Runner(tmp_path, epochs=3, checkpoint_every=0.05, **OPTIONS)
    words = ("--fuse", f"{WIDTH}-compiled")
    for count in (3, 9):
        process = runner.start(words=words, **{studies.PACE_S: "0.02"})
        process.wait_for("StepFinished", count)
        process.kill()
        process.check_nothing_left()
        words = ()  # as it did before
    assert runner.start(verb="resume").wait() == 0, runner.words()
    report, losses = shoal.open(runner.place, studies.recipe()), read_losses(runner.place)
    assert squads.kinds(report) == ["compiled"] * TRIALS
    slots = squads.slots_of(report)
    for trial in report.trials[:2]:
        told = {"slot": slots[trial.number][0], "width": WIDTH, "kind": "compiled", "epochs": 3}
        plain = array_loop(studies.recipe(), trial.hp, trial.seed, **told)
        assert_same(plain, trial, losses=losses[trial.number])


# -- spilled ----------------------------------------------------------------------------------

SPILLED = {"kinds": ("spilled", "resident"), "lr": (3e-3, 1e-3, 5e-4)}


def techniques(place) -> set[str]:
    rows = Snapshot.of(read_outline(place)).trials
    return {row.technique for row in rows}


@pytest.mark.full
def test_spilled_arrays_that_are_killed_and_paused_go_on_to_the_same_bits(tmp_path):
    runner = Runner(tmp_path, epochs=2, checkpoint_every=0.05, devices=1, **SPILLED)
    process = runner.start(words=FUSED, **{studies.PACE_S: "0.01"})
    process.wait_for("StepFinished", 9)
    process.kill()
    process.check_nothing_left()
    assert techniques(runner.place) == {"Spilled", "Resident"}
    runner._devices = 2
    process = runner.start(**{studies.PACE_S: "0.01"})
    process.wait_for("StepFinished", 20)
    process.send(signal.SIGTERM)
    assert process.wait() in (PAUSED, 0), runner.words()
    assert runner.start(verb="resume").wait() == 0, runner.words()
    check_arrayed(runner.place, 2)


@pytest.mark.full
def test_a_spilled_array_goes_on_as_a_whole_where_there_is_room(tmp_path, monkeypatch):
    """Where its rows are is placement."""
    runner = Runner(tmp_path, epochs=2, checkpoint_every="1h", devices=1, **SPILLED)
    process = runner.start(words=FUSED, **{studies.PACE_S: "0.02"})
    process.wait_for("StepFinished", 9)
    process.send(signal.SIGTERM)
    assert process.wait() == PAUSED, runner.words()
    monkeypatch.setattr(studies, "MEMORY", "64MiB")
    assert runner.start().wait() == 0, runner.words()
    check_arrayed(runner.place, 2)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2))
def test_spilled_arrays_killed_at_random_instants_end_on_the_same_bits(tmp_path, seed):
    run_under_fire(tmp_path, kills=3, epochs=3, seed=seed, options=SPILLED)


# -- search -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, warm_workers):
    """What a search with arrays comes to on one device."""
    pytest.importorskip("optuna")
    study = searches.make(tmp_path_factory.mktemp("search"))
    studies.run(study, warm_workers, fuse=4)
    assert set(squads.widths(study.report())) == {4}
    return searches.outcome(study.directory)


@pytest.mark.slow
def test_a_search_in_arrays_comes_to_the_same_on_more_devices(tmp_path, warm_workers, undisturbed):
    study = searches.make(tmp_path)
    studies.run(study, warm_workers, devices=2, fuse=4)
    assert searches.outcome(study.directory) == undisturbed


@pytest.mark.full
def test_a_search_in_arrays_that_is_killed_comes_to_the_same(tmp_path, undisturbed):
    runner = Runner(tmp_path, maker="searches", devices=2)
    for hook, words in (
        ("kill before TrialPruned", ("--fuse", "4")),
        ("kill after TrialFinished", ()),
    ):
        assert runner.start(hook, words=words).wait() == -signal.SIGKILL, runner.words()
    assert runner.start(verb="resume").wait() == 0, runner.words()
    assert searches.outcome(runner.place) == undisturbed


def test_a_trial_of_a_search_is_verified_in_its_slot(tmp_path, warm_workers):
    study = searches.make(tmp_path, trials=6)
    studies.run(study, warm_workers, devices=2, fuse=4)
    check_verified(study.directory, searches.recipe())


# -- population -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def population(tmp_path_factory, warm_workers):
    """What a population in arrays comes to on one device."""
    study = populations.make(tmp_path_factory.mktemp("population"))
    studies.run(study, warm_workers, fuse=4)
    assert set(squads.widths(study.report())) == {4}
    assert any(trial.inherited for trial in study.report().trials)
    return populations.outcome(study.directory)


@pytest.mark.full
def test_a_population_in_arrays_comes_to_the_same_on_more_devices(
    tmp_path, warm_workers, population
):
    study = populations.make(tmp_path)
    studies.run(study, warm_workers, devices=2, fuse=4)
    assert populations.outcome(study.directory) == population


@pytest.mark.full
def test_a_population_in_arrays_that_is_killed_comes_to_the_same(tmp_path, population):
    runner = Runner(tmp_path, maker="populations", devices=2)
    for hook, words in (
        ("kill after TrialExploited", ("--fuse", "4")),
        ("kill after TrialFinished", ()),
    ):
        assert runner.start(hook, words=words).wait() == -signal.SIGKILL, runner.words()
    assert runner.start(verb="resume").wait() == 0, runner.words()
    assert populations.outcome(runner.place) == population


@pytest.mark.parametrize("length", ["steps", pytest.param("epochs", marks=pytest.mark.full)])
def test_a_trial_of_a_population_is_verified_in_its_slot(length, tmp_path, warm_workers):
    loop = {"steps": 12, "eval_every": 3} if length == "steps" else {}
    study = populations.make(tmp_path, **loop)
    report = studies.run(study, warm_workers, devices=2, fuse=4)
    assert any(trial.inherited for trial in report.trials)
    check_verified(study.directory, populations.recipe())


def check_verified(place, recipe) -> None:
    rows = Snapshot.of(read_outline(place)).trials
    verdicts = list(verify_trials(place, rows, recipe=recipe))
    assert len(verdicts) == len(rows)
    for verdict in verdicts:
        assert verdict.equal, verdict
        assert verdict.losses
