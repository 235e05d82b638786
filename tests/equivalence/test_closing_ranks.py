"""Trials of arrays whose others are pruned go on in other seats: to the bits of their epochs."""

from __future__ import annotations

import ownsteps
import pytest
import ranks
import studies
from ranks import EVERY

import shoal
from shoal.core.errors import SpecError
from shoal.core.event import TrialReplanned
from shoal.core.seats import ALONE, epochs_of
from shoal.planner.narrower import Narrower
from shoal.planning import fusing
from shoal.verify import verify_trials

pytestmark = pytest.mark.usefixtures("warm_plans")


def run(study, warm_workers, fuse=ranks.FUSE, devices=2, **more):
    studies.run(study, warm_workers, devices=devices, fuse=fuse, **more)
    return study.directory


def epochs_by_trial(place):
    return {row.number: epochs_of(row.numerics) for row in ranks.rows_of(place)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, warm_workers):
    return run(ranks.make(tmp_path_factory.mktemp("ranks")), warm_workers)


def test_those_that_go_on_fill_narrower_arrays_and_the_last_trains_alone(undisturbed):
    rows, told = ranks.rows_of(undisturbed), epochs_by_trial(undisturbed)
    assert {str(row.state) for row in rows} == {"FINISHED", "PRUNED"}
    assert [epochs[0][1:3] for epochs in told.values()] == [(n % 4, 4) for n in range(12)]
    longest = max(told.values(), key=len)
    assert [epoch.step for epoch in longest] == [0, EVERY, 3 * EVERY]
    assert longest[-1].width == ALONE
    passed = [epochs for epochs in told.values() if len(epochs) > 1]
    assert [epochs[1][1:3] for epochs in passed] == [(n, 4) for n in range(4)]
    ranks.check(undisturbed)
    verdicts = list(verify_trials(undisturbed, rows, recipe=ranks.recipe()))
    assert all(verdict.equal for verdict in verdicts)
    assert any("from step 12 alone" in " ".join(verdict.notes) for verdict in verdicts)


def test_the_same_trials_are_pruned_at_the_same_steps_without_arrays(
    undisturbed, tmp_path, warm_workers
):
    place = run(ranks.make(tmp_path), warm_workers, fuse=False)
    ends = [
        [(r.number, str(r.state), r.step) for r in ranks.rows_of(p)] for p in (place, undisturbed)
    ]
    assert ends[0] == ends[1]


def test_seats_do_not_depend_on_the_number_of_devices(undisturbed, tmp_path, warm_workers):
    place = run(ranks.make(tmp_path), warm_workers, devices=1)
    assert ranks.outcome(place) == ranks.outcome(undisturbed)


def test_a_trial_is_seated_once_a_rung_and_that_is_told(undisturbed):
    from shoal.observe.reader import read_events

    told = [event for event in read_events(undisturbed) if isinstance(event, TrialReplanned)]
    assert len(told) == len({(event.trial, event.step) for event in told})
    assert all(event.reason.startswith("others were pruned: from step") for event in told)


@pytest.mark.sample(1)
@pytest.mark.parametrize("fuse", ["4/2", "4/1", 4, "3/2", "4/2/1 traced", "4/2/1 eager"])
def test_other_widths(fuse, tmp_path, warm_workers):
    place = run(ranks.make(tmp_path), warm_workers, fuse=fuse)
    asked = [int(w) for w in str(fuse).partition(" ")[0].split("/")]
    widths = {epoch.width for told in epochs_by_trial(place).values() for epoch in told}
    assert widths <= set(asked)
    assert len(widths) > 1 or fuse == 4
    ranks.check(place)


@pytest.mark.full
@pytest.mark.parametrize(
    "search",
    [
        {"generation": 4},
        {"pruner": "median", "trials": 8, "generation": 8},
        {"pruner": "hyperband", "trials": 16, "generation": 16},
        {"sampler": "tpe", "generation": 6},
    ],
    ids=str,
)
def test_other_searches(search, tmp_path, warm_workers):
    if search.get("sampler") == "tpe":
        pytest.importorskip("optuna")
    place = run(ranks.make(tmp_path, **search), warm_workers)
    ranks.check(place)
    again = run(ranks.make(tmp_path / "again", **search), warm_workers, devices=1)
    assert ranks.outcome(place) == ranks.outcome(again)


@pytest.mark.full
def test_widths_that_were_measured_are_on_record_and_stay(tmp_path, warm_workers, monkeypatch):
    told = (Narrower(2, 4), Narrower(1, 1))
    monkeypatch.setattr(fusing, "narrower", lambda *_: told)
    monkeypatch.setattr(fusing, "choose", lambda *_: (4, "traced", ("chosen here",)))
    monkeypatch.setattr(fusing, "why_no_look", lambda _: "")
    monkeypatch.setattr(
        fusing,
        "next_candidate",
        lambda m, *_: fusing.Candidate(4, "traced") if not m.widths else None,
    )
    study = ranks.make(tmp_path)
    place = run(study, warm_workers, fuse="auto")
    assert {row.numerics["array_widths"] for row in ranks.rows_of(place)} == {
        "4, 2 for 4, 1 for 1"
    }
    widths = [[e.width for e in told] for told in epochs_by_trial(place).values()]
    assert max(widths, key=len) == [4, 2, ALONE]
    ranks.check(place)
    monkeypatch.undo()
    run(ranks.make(tmp_path, trials=18, generation=12), warm_workers, fuse=None)
    rows = ranks.rows_of(place)
    assert {row.numerics["array_widths"] for row in rows} == {"4, 2 for 4, 1 for 1"}
    ranks.check(place)


def test_a_plan_says_where_the_last_ones_go_on(tmp_path):
    plan = ranks.make(tmp_path).plan(hardware=studies.hardware(2), fuse=ranks.FUSE)
    assert "slot 0 of an array of 4" in plan.explain()
    assert "(of its generation the last 2 in an array of 2, the last 1 alone)" in plan.explain()
    assert type(plan).from_json(plan.to_json()) == plan


def test_without_a_pruner_nobody_is_to_get_another_seat(tmp_path):
    study = ranks.make(tmp_path, pruner=None, generation=None)
    plan = study.plan(hardware=studies.hardware(2), fuse=4)
    assert all(job.array.rooms == () for job in plan.jobs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gan"])
def test_trials_with_a_step_of_their_own(kind, tmp_path, warm_workers):
    recipe = ownsteps.recipe(kind)
    study = shoal.Study(
        "k", recipe, space=shoal.grid(lr=[1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1]), directory=tmp_path,
        steps=8, eval_every=2, pruner="asha", metric="valid_gap", generation=6,
    )  # fmt: skip
    place = run(study, warm_workers, fuse="3/1")
    told = [epochs for epochs in epochs_by_trial(place).values() if len(epochs) > 1]
    assert {epoch.width for epochs in told for epoch in epochs} == {3, ALONE}
    verdicts = list(verify_trials(place, ranks.rows_of(place), recipe=recipe))
    assert [v.first_difference or v.failure or v.skipped for v in verdicts] == [""] * 6


@pytest.mark.parametrize("fuse", ["4/4", "2/4", "4/0", "4/", "/", "4/2 compiled", "4/x"])
def test_widths_that_do_not_fall_are_refused(fuse, tmp_path):
    with pytest.raises(SpecError, match=r"fuse is 'auto'|are of one width"):
        ranks.make(tmp_path).run(hardware=shoal.Hardware.virtual(), fuse=fuse)
