"""Trials that a study trains as arrays end on the bits of their slots with nobody beside them."""

from __future__ import annotations

import oddcodes
import pytest
import squads
from listening import Heard
from torch.utils.data import DataLoader

import shoal
from shoal.core.event import PeakMeasured, TrialReplanned
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.planning import fusing
from shoal.verify import verify_trials

DEVICES = (1, 2)
QUICK = ("mlp", "accumulate", "restless")


def marks_of(name, devices):
    """On two devices all but the quickest are in the full product."""
    return () if name in QUICK or devices == 1 else pytest.mark.full


ROWS = [
    pytest.param(
        name,
        devices,
        marks=marks_of(name, devices),
        id=f"{name}, {devices}",
    )
    for name in squads.CASES
    for devices in DEVICES
]


@pytest.fixture
def run_case(run_study):
    """Run a case in arrays of some width; all of its trials were in one."""

    def run(case, *, fuse, **options):
        heard = Heard()
        report = run_study(
            case.recipe,
            case.space,
            **(case.loop | {"fuse": fuse, "callbacks": [heard]} | options),
        )
        assert [trial.error for trial in report.trials] == [""] * len(report.trials)
        assert set(squads.widths(report)) == {fuse}
        assert not heard.of(TrialReplanned)
        return report

    return run


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "devices"), ROWS)
def test_every_trial_ends_on_the_bits_of_its_slot(name, devices, run_case):
    case = squads.CASES[name]
    report = run_case(case, fuse=4, devices=devices)
    squads.assert_arrayed(report, report.trials, case.recipe, 4, **case.loop)
    squads.assert_near(report.trials, case.recipe, case.near, **case.loop)


@pytest.mark.sample(1)
@pytest.mark.parametrize("width", [2, 3, 7])
def test_more_trials_than_slots_or_fewer_train_to_the_same_bits(width, run_case):
    case = squads.CASES["mlp"]
    report = run_case(case, fuse=width, devices=1)
    squads.assert_arrayed(report, report.trials, case.recipe, width, **case.loop)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("every", [0, 0.01])
def test_generations_of_a_trial_in_an_array_do_not_disturb_it(every, run_case):
    case = squads.CASES["accumulate"]
    report = run_case(case, fuse=3, devices=1, checkpoint_every=every)
    squads.assert_arrayed(report, report.trials, case.recipe, 3, **case.loop)


@pytest.mark.sample(1)
@pytest.mark.parametrize("keep", ["all", "best:2"])
def test_what_of_finished_trials_is_kept_is_as_it_ended(keep, run_case):
    case = squads.CASES["mlp"]
    report = run_case(case, fuse=4, devices=1, keep_finished=keep)
    kept = [trial for trial in report.trials if trial.checkpoint.is_dir()]
    assert len(kept) == (2 if keep == "best:2" else len(report.trials))
    squads.assert_arrayed(report, kept, case.recipe, 4, **case.loop)


def mixed():
    return shoal.grid(lr=[0.01, 0.003], drop=[0.1, 0.3], width=[8, 12])


@pytest.mark.sample(1)
@pytest.mark.parametrize("devices", DEVICES)
def test_trials_of_two_shapes_train_in_two_arrays(devices, run_case):
    case = squads.Case(squads.recipe(), space=mixed(), loop={"epochs": 3})
    report = run_case(case, fuse=3, devices=devices)
    squads.assert_arrayed(report, report.trials, case.recipe, 3, **case.loop)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("devices", DEVICES)
def test_a_spilled_array_trains_beside_one_that_fits(devices, run_study):
    """Half of the trials fit no device, not even one at a time."""
    space = shoal.grid(lr=[0.01, 0.003, 0.001], drop=[0.1], width=[8, 160])
    recipe, loop, heard = squads.recipe(), {"epochs": 3}, Heard()
    report = run_study(
        recipe, space, **loop, devices=devices, memory="1MiB", fuse=2, callbacks=[heard]
    )
    assert [trial.error for trial in report.trials] == [""] * 6
    assert squads.widths(report) == [2] * 6
    rows = Snapshot.of(read_outline(report.directory)).trials
    wide = [trial.hp["width"] == 160 for trial in report.trials]
    assert [row.technique == "Spilled" for row in rows] == wide
    squads.assert_arrayed(report, report.trials, recipe, 2, **loop)
    peaks = heard.of(PeakMeasured)
    assert all(event.peak_bytes <= 2**20 for event in peaks)


def test_a_study_that_is_over_at_once_is_not_measured_for_arrays(run_study, assert_alone, jobs):
    case = squads.CASES["mlp"]
    report = run_study(case.recipe, case.space, **case.loop, fuse="auto")
    assert set(squads.widths(report)) == {1}
    assert all("too soon for arrays to be measured" in " ".join(job.why) for job in jobs)
    assert_alone(report, report.trials, case.recipe, **case.loop)


def test_an_automatic_width_is_none_that_loses(run_study, assert_alone, monkeypatch):
    """Whatever was measured: those in arrays are exact there, and the others alone."""
    monkeypatch.setattr(fusing, "why_no_look", lambda load: "")
    case = squads.CASES["mlp"]
    report = run_study(case.recipe, case.space, **case.loop, fuse="auto")
    (width,) = set(squads.widths(report))
    if width == 1:
        assert_alone(report, report.trials, case.recipe, **case.loop)
    else:
        squads.assert_arrayed(report, report.trials, case.recipe, width, **case.loop)


def test_a_trial_that_is_added_later_trains_as_the_others_did(tmp_path, warm_workers):
    recipe, space = squads.recipe(), {"lr": shoal.log_uniform(1e-3, 1e-2), "drop": 0.1}
    shown = {"progress": False, "timeline": False, "workers": warm_workers}
    hardware = shoal.Hardware.virtual(devices=1, memory="64MiB")

    def run(**options):
        study = shoal.Study("k", recipe, space=space, trials=3, epochs=1, directory=tmp_path)
        return study.run(hardware=hardware, **shown, **options)

    run(fuse=4)
    report = run(extend=2)
    assert squads.widths(report) == [4] * 5
    squads.assert_arrayed(report, report.trials, recipe, 4, epochs=1)
    again = run(extend=1, fuse=2)
    assert squads.widths(again) == [4] * 6


def test_a_shape_that_comes_later_trains_as_was_asked_of_the_study(tmp_path, warm_workers):
    """Its own trials have nothing on record."""
    recipe, drop = squads.recipe(), 0.1
    shown = {"progress": False, "timeline": False, "workers": warm_workers}
    hardware = shoal.Hardware.virtual(devices=1, memory="64MiB")

    def run(sizes, **options):
        space = shoal.grid(lr=[1e-2, 3e-3], width=sizes, drop=[drop])
        study = shoal.Study("k", recipe, space=space, epochs=1, directory=tmp_path)
        return study.run(hardware=hardware, **shown, **options)

    run([8], fuse=2)
    report = run([8, 12])
    assert squads.widths(report) == [2] * 4
    squads.assert_arrayed(report, report.trials, recipe, 2, epochs=1)
    again = run([8, 12, 16], fuse="off")
    assert squads.widths(again) == [2] * 4 + [1] * 2
    assert squads.widths(run([8, 12, 16, 20])) == [2] * 4 + [1] * 4


def test_a_study_without_arrays_goes_on_without(tmp_path, warm_workers, assert_alone):
    recipe, space = squads.recipe(), {"lr": shoal.log_uniform(1e-3, 1e-2), "drop": 0.1}
    shown = {"progress": False, "timeline": False, "workers": warm_workers}
    hardware = shoal.Hardware.virtual(devices=1, memory="64MiB")
    study = shoal.Study("k", recipe, space=space, trials=3, epochs=1, directory=tmp_path)
    study.run(hardware=hardware, **shown)
    report = study.run(hardware=hardware, **shown, extend=2, fuse=2)
    assert squads.widths(report) == [1] * 3 + [2] * 2
    assert_alone(report, report.trials[:3], recipe, epochs=1)
    squads.assert_arrayed(report, report.trials[3:], recipe, 2, epochs=1)


def test_fused_trials_are_verified_in_their_slots(run_case):
    case = squads.CASES["lengths"]
    report = run_case(case, fuse=4, devices=2)
    rows = Snapshot.of(read_outline(report.directory)).trials
    for verdict in verify_trials(report.directory, rows, recipe=case.recipe):
        assert verdict.equal, verdict
        assert any("slot" in note for note in verdict.notes)


@pytest.mark.parametrize("technique", [None, shoal.Spilled(shards=2)])
def test_who_waits_to_be_evaluated_leaves_the_others_in_training(technique, run_study):
    """Epochs of 4 and 6 steps, 12 batches to evaluate: the first trial waits for the second."""

    def data(hp):
        return DataLoader(squads.points(hp["rows"]), 5), DataLoader(squads.points(24, 1), 2)

    recipe = squads.recipe(data=data)
    space = shoal.grid(lr=[0.01], drop=[0.3], rows=[20, 30])
    report = run_study(recipe, space, epochs=2, fuse=2, technique=technique)
    assert squads.widths(report) == [2, 2]
    squads.assert_arrayed(report, report.trials, recipe, 2, epochs=2)


@pytest.mark.parametrize(
    ("model", "odd"),
    [
        (oddcodes.closing, "closes over layers"),
        (oddcodes.model, "adds up"),
        (oddcodes.model, "goes on"),
    ],
)
def test_code_that_was_declined_for_no_need(model, odd, run_study):
    """A function that closes over layers; ``+=`` on ``torch.zeros``; a state that goes on."""
    recipe, space = oddcodes.recipe(model=model), shoal.grid(lr=[0.1, 0.01, 0.03], odd=[odd])
    report = run_study(recipe, space, fuse=3, steps=4)
    assert squads.widths(report) == [3] * 3
    squads.assert_near(report.trials, recipe, 1e-12, steps=4)
    squads.assert_verified(report, recipe)
