"""Trials of a study whose arrays are traced or compiled: their bits, on record and verified."""

from __future__ import annotations

import pytest
import squads

import shoal
from shoal.core.event import TrialReplanned
from shoal.fusion.graphs.compiled import compiler
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.verify import verify_trials

compiles = pytest.mark.skipif(not compiler(), reason="there is no C++ compiler")
FLOATS = {"recipe": squads.recipe(model=squads.single, data=squads.floats)}


def rows(report):
    return Snapshot.of(read_outline(report.directory)).trials


def left(report):
    return [e for e in read_outline(report.directory) if isinstance(e, TrialReplanned)]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("fuse", "kind", "name"),
    [
        (4, "traced", "mlp"),
        ("4 eager", "eager", "mlp"),
        (4, "traced", "bf16"),
        (4, "traced", "images"),
    ],
)
def test_a_width_is_traced_unless_it_is_said_otherwise(fuse, kind, name, run_study):
    case = squads.CASES[name]
    report = run_study(case.recipe, case.space, **case.loop, fuse=fuse, devices=1)
    assert set(squads.kinds(report)) == {kind}
    squads.assert_arrayed(report, report.trials, case.recipe, 4, **case.loop)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name",
    ["mlp", "bf16", "lengths, accumulate", "language"],
)
def test_branches_run_each_slots_own_pass_and_are_verified(name, run_study):
    """Also where a slot is another trial's, after those that have ended."""
    case = squads.CASES[name]
    report = run_study(case.recipe, case.space, **case.loop, fuse="4 branches", devices=1)
    assert set(squads.kinds(report)) == {"branches"}
    assert not left(report)
    squads.assert_arrayed(report, report.trials, case.recipe, 4, "branches", **case.loop)
    squads.assert_near(report.trials, case.recipe, 1e-12, **case.loop)
    (verdict,) = verify_trials(report.directory, rows(report)[-1:], recipe=case.recipe)
    assert verdict.equal, verdict
    assert any("branches" in note for note in verdict.notes)


@pytest.mark.full
@compiles
def test_a_compiled_array_ends_on_the_bits_of_its_slots_and_is_verified(run_study):
    recipe, space = FLOATS["recipe"], shoal.grid(lr=[0.01, 0.003], drop=[0.2])
    report = run_study(recipe, space, epochs=1, fuse="2 compiled", devices=1)
    assert squads.kinds(report) == ["compiled"] * 2
    squads.assert_arrayed(report, report.trials[:1], recipe, 2, "compiled", epochs=1)
    (verdict,) = verify_trials(report.directory, rows(report)[1:2], recipe=recipe)
    assert verdict.equal, verdict


@pytest.mark.full
@compiles
@pytest.mark.parametrize("devices", [1, 2])
def test_compiled_trials_end_on_the_bits_of_their_slots_and_are_verified(devices, run_study):
    """Of several rates of dropout, with a short last batch, and more trials than slots."""
    recipe = FLOATS["recipe"]
    space = shoal.grid(lr=[0.01, 0.003], drop=[0.2, 0.1, 0.4])
    report = run_study(recipe, space, epochs=2, fuse="4 compiled", devices=devices)
    assert set(squads.kinds(report)) == {"compiled"}
    assert not left(report)
    squads.assert_arrayed(report, report.trials[:2], recipe, 4, "compiled", epochs=2)
    squads.assert_near(report.trials, recipe, 0.01, epochs=2)
    assert all("g++" in str(row.numerics["array_pass"]) for row in rows(report))
    for verdict in verify_trials(report.directory, rows(report)[2:4], recipe=recipe):
        assert verdict.equal, verdict
        assert any("compiled" in note for note in verdict.notes)


@pytest.mark.full
@compiles
def test_trials_whose_code_holds_other_floats_are_in_another_array(run_study):
    """A rate of none is another code; the trials of it are traced."""
    recipe = FLOATS["recipe"]
    space = shoal.grid(lr=[0.01, 0.003, 0.001], drop=[0.2, 0.0])
    report = run_study(recipe, space, epochs=1, fuse="3 compiled", devices=1)
    expected = ["compiled" if trial.hp["drop"] else "traced" for trial in report.trials]
    assert squads.kinds(report) == expected
    assert not left(report)
    for kind, some in (("compiled", report.trials[:1]), ("eager", report.trials[1:2])):
        squads.assert_arrayed(report, some, recipe, 3, kind, epochs=1)


@pytest.mark.parametrize("fuse", [4, "4 branches"])
def test_a_pruner_comes_to_the_same_trial_in_arrays_and_without(fuse, tmp_path, warm_workers):
    """The same trials go on at each rung; what arrays round otherwise decides nothing here."""
    pytest.importorskip("optuna")
    space = {"lr": shoal.log_uniform(1e-4, 1e-1), "drop": shoal.uniform(0.0, 0.3)}
    found = []
    for name, wish in (("fused", fuse), ("unfused", False)):
        settings = {"trials": 9, "epochs": 9, "pruner": "asha", "metric": "valid_loss", "seed": 3}
        study = shoal.Study(
            name, squads.recipe(), space=space, mode="min", directory=tmp_path, **settings
        )
        report = study.run(
            hardware=shoal.Hardware.virtual(devices=2, memory="64MiB"),
            fuse=wish,
            workers=warm_workers,
            progress=False,
            timeline=False,
        )
        found.append([(row.state, row.step) for row in rows(report)] + [report.best.number])
        assert set(squads.widths(report)) == ({4} if wish else {1})
    assert found[0] == found[1]
    assert {str(state) for state, _ in found[0][:-1]} == {"FINISHED", "PRUNED"}
