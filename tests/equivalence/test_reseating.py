"""Studies that go on with another width: trials under way change seats where they stand, exactly.

Each study is short at first, and longer when it goes on: so it is known at which step that is.
"""

from __future__ import annotations

from signal import SIGTERM, raise_signal

import pytest
import ranks
import studies
import torch
from torch import nn

import shoal
from shoal.core.event import StudyChanged
from shoal.core.seats import ALONE, Epoch, epochs_of
from shoal.observe import read_events
from shoal.verify import verify_trials

pytestmark = pytest.mark.usefixtures("warm_plans")

TRIALS = 5
IN_AN_EPOCH, AT_AN_EVALUATION, AT_THE_END_OF_AN_EPOCH = 7, 8, 10


def go_on(directory, warm_workers, steps, fuse, *, accept=True, devices=1, **options):
    """Train a study of a few trials so far, as arrays or not; its directory."""
    usual = {"steps": steps, "trials": TRIALS, "pruner": None, "generation": None}
    study = ranks.make(directory, **(usual | options))
    studies.run(study, warm_workers, devices=devices, fuse=fuse, accept_numerics=accept)
    return study.directory


def told(place):
    return [epochs_of(row.numerics) for row in ranks.rows_of(place)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("at", [IN_AN_EPOCH, AT_AN_EVALUATION, AT_THE_END_OF_AN_EPOCH])
@pytest.mark.parametrize(
    ("before", "after"),
    [(4, 2), (2, 4), (4, False), (4, "3 eager"), (False, 4), (None, 2), (4, "4/2")],
    ids=str,
)
def test_trials_go_on_in_another_width(at, before, after, tmp_path, warm_workers):
    go_on(tmp_path, warm_workers, at, before)
    place = go_on(tmp_path, warm_workers, 16, after)
    was, is_now = _width(before), _width(after)
    for epochs in told(place):
        assert [epoch.width for epoch in epochs] == ([was, is_now] if was != is_now else [was])
        assert all(epoch.step == at and epoch.asked for epoch in epochs[1:])
    slots = [epochs[-1].slot for epochs in told(place)]
    assert sorted(slots) == sorted(number % is_now for number in range(TRIALS))
    ranks.check_seats(place)


def _width(fuse) -> int:
    return int(str(fuse or ALONE).partition(" ")[0].partition("/")[0])


@pytest.mark.full
def test_what_was_asked_for_once_stays(tmp_path, warm_workers):
    go_on(tmp_path, warm_workers, 5, 4)
    go_on(tmp_path, warm_workers, 9, 2)
    place = go_on(tmp_path, warm_workers, 14, None, accept=False)
    assert {tuple(e.width for e in epochs) for epochs in told(place)} == {(4, 2)}
    ranks.check_seats(place)
    go_on(tmp_path, warm_workers, 18, False)
    go_on(tmp_path, warm_workers, 20, None, accept=False, devices=2)
    assert {tuple(e.width for e in epochs) for epochs in told(place)} == {(4, 2, ALONE)}
    ranks.check_seats(place)


@pytest.mark.full
def test_trials_that_come_later_have_the_width_of_those_that_went_on(tmp_path, warm_workers):
    go_on(tmp_path, warm_workers, 5, 4)
    go_on(tmp_path, warm_workers, 9, 2)
    place = go_on(tmp_path, warm_workers, 9, None, accept=False, trials=TRIALS + 2)
    assert {tuple(e.width for e in epochs) for epochs in told(place)[TRIALS:]} == {(2,)}
    ranks.check_seats(place)


@pytest.mark.slow
def test_trials_that_ended_stay_what_they_were(tmp_path, warm_workers):
    place = go_on(tmp_path, warm_workers, 6, 4)
    go_on(tmp_path, warm_workers, 6, 2, trials=TRIALS + 2)
    widths = [tuple(e.width for e in epochs) for epochs in told(place)]
    assert widths == [(4,)] * TRIALS + [(2,)] * 2
    ranks.check_seats(place)


def test_without_accepting_other_bits_trials_stay_and_that_is_said(tmp_path, warm_workers):
    place = go_on(tmp_path, warm_workers, 6, 4)
    go_on(tmp_path, warm_workers, 12, 2, accept=False)
    assert {tuple(e.width for e in epochs) for epochs in told(place)} == {(4,)}
    plan = (place / "plan.json").read_text()
    assert "it stays in slot 0 of 4, as its bits depend on that" in plan
    assert "accept_numerics=True" in plan
    ranks.check_seats(place)


@pytest.mark.slow
def test_that_it_was_asked_for_is_on_record(tmp_path, warm_workers):
    go_on(tmp_path, warm_workers, 6, 4)
    place = go_on(tmp_path, warm_workers, 12, 2)
    said = [e.changes for e in read_events(place) if isinstance(e, StudyChanged)]
    words = "trial 1 goes on elsewhere, as asked from step 6 slot 1 of 2"
    assert words in [change for changes in said for change in changes]
    assert (
        "it goes on so from step 6, as was asked; before that it was in slot 0 of 4"
        in (place / "plan.json").read_text()
    )


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("before", "after"), [("4 branches", 2), (4, "2 branches")])
def test_passes_of_their_own_bits_stay(before, after, tmp_path, warm_workers):
    place = go_on(tmp_path, warm_workers, 6, before)
    go_on(tmp_path, warm_workers, 12, after)
    assert {tuple(e.width for e in epochs) for epochs in told(place)} == {(4,)}
    assert "passes that are branches have bits of their own" in (place / "plan.json").read_text()
    ranks.check_seats(place)


@pytest.mark.full
def test_a_narrower_array_where_the_wider_one_has_no_room(tmp_path, warm_workers):
    """The reason to ask: the study goes on on a smaller device."""
    study = ranks.make(tmp_path, steps=6, trials=8, pruner=None, generation=None)
    studies.run(study, warm_workers, fuse=8)
    need = {job.array.width: job.peak_bytes for job in study.plan(fuse=8).jobs}[8]
    small = shoal.Hardware.virtual(devices=1, memory=need * 3 // 4)
    longer = ranks.make(tmp_path, steps=12, trials=8, pruner=None, generation=None)
    longer.run(hardware=small, fuse=2, accept_numerics=True, workers=warm_workers, progress=False)
    assert {tuple(e.width for e in epochs) for epochs in told(study.directory)} == {(8, 2)}
    ranks.check_seats(study.directory)


@pytest.mark.full
def test_where_its_newest_generation_is_damaged_the_seat_holds_from_the_one_before(
    tmp_path, warm_workers
):
    go_on(tmp_path, warm_workers, 5, 4, keep=4)
    go_on(tmp_path, warm_workers, 9, None, accept=False, keep=4)
    place = go_on(tmp_path, warm_workers, 10, 2, keep=4)
    trial = place / "trials" / "0001"
    for newer in sorted(trial.iterdir())[1:]:
        for file in newer.glob("*.safetensors"):
            file.write_bytes(b"\0" * file.stat().st_size)
    go_on(tmp_path, warm_workers, 16, None, accept=False, keep=4)
    assert told(place)[0] == (Epoch(0, 0, 4), Epoch(9, 0, 2, asked=True))
    first, asked = told(place)[1]
    assert first == Epoch(0, 1, 4)
    assert asked[1:] == (1, 2, True, False)
    assert asked.step == 5
    ranks.check_seats(place)


@pytest.mark.full
def test_an_array_that_cannot_be_had_leaves_trials_where_they_are(tmp_path, warm_workers):
    study = ranks.make(tmp_path, steps=6, trials=8, pruner=None, generation=None)
    studies.run(study, warm_workers, fuse=2)
    need = {job.array.width: job.peak_bytes for job in study.plan(fuse=8).jobs}[8]
    small = shoal.Hardware.virtual(devices=1, memory=need * 3 // 4)
    longer = ranks.make(tmp_path, steps=12, trials=8, pruner=None, generation=None)
    longer.run(
        hardware=small,
        fuse="8 eager",
        accept_numerics=True,
        workers=warm_workers,
        progress=False,
        technique="resident",
    )
    assert {tuple(e.width for e in epochs) for epochs in told(study.directory)} == {(2,)}
    plan = (study.directory / "plan.json").read_text()
    assert "it stays in slot 0 of 2: unfused: 8 of them do not fit" in plan
    assert "as was asked" not in plan
    ranks.check_seats(study.directory)


@pytest.mark.full
def test_trials_whose_array_has_no_room_any_more_go_on_alone_where_that_is_accepted(
    tmp_path, warm_workers
):
    options = {"trials": 8, "pruner": None, "generation": None}
    study = ranks.make(tmp_path, steps=6, **options)
    studies.run(study, warm_workers, fuse=8)
    need = {job.array.width: job.peak_bytes for job in study.plan(fuse=8).jobs}[8]
    small = shoal.Hardware.virtual(devices=1, memory=need * 3 // 4)
    how = {"hardware": small, "workers": warm_workers, "technique": "resident", "progress": False}
    longer = ranks.make(tmp_path, steps=12, **options)
    words = r"array of trial 0 was 'slot 0 of 8' and is 'none' \(unfused: 8 of them do not fit"
    with pytest.raises(shoal.SpecError, match=words):
        longer.run(**how)
    longer.run(**how, accept_numerics=True)
    alone = (Epoch(6, 0, ALONE, asked=True),)
    assert told(study.directory) == [(Epoch(0, slot, 8), *alone) for slot in range(8)]
    ranks.check_seats(study.directory)
    go_on(tmp_path, warm_workers, 15, 8, **options)
    for slot, epochs in enumerate(told(study.directory)):
        assert epochs == (Epoch(0, slot, 8), *alone, Epoch(12, slot, 8, asked=True))
    ranks.check_seats(study.directory)


@pytest.mark.full
def test_the_same_wish_again_changes_nothing(tmp_path, warm_workers):
    """Who always accepts other numbers trains to the same bits, wherever the study stopped."""
    options = {"trials": 12, "generation": 12, "pruner": "asha"}
    study = ranks.make(tmp_path, steps=36, **options)
    closed = []

    def stop_when_alone(event):
        numerics = getattr(event, "numerics", {})
        closed.extend([event] * ("from step 12 alone" in str(numerics.get("array", ""))))
        if closed and type(event).__name__ == "StepFinished" and event.step > 13:
            raise_signal(SIGTERM)

    with pytest.raises(SystemExit):
        studies.run(
            study, warm_workers, fuse=ranks.FUSE, accept_numerics=True, callbacks=[stop_when_alone]
        )
    go_on(tmp_path, warm_workers, 36, ranks.FUSE, **options)
    assert closed
    assert not any(epoch.asked for epochs in told(study.directory) for epoch in epochs)
    ranks.check(study.directory)


@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "after"), [(False, 4), pytest.param(4, False, marks=pytest.mark.full)]
)
def test_a_trial_that_lost_all_its_generations_begins_in_the_seat_that_was_asked_for(
    before, after, tmp_path, warm_workers
):
    go_on(tmp_path, warm_workers, 5, before)
    place = go_on(tmp_path, warm_workers, 9, after)
    for file in (place / "trials" / "0001").rglob("*.safetensors"):
        file.write_bytes(b"\0" * file.stat().st_size)
    go_on(tmp_path, warm_workers, 12, None, accept=False)
    go_on(tmp_path, warm_workers, 16, None, accept=False)
    assert told(place)[1] == (() if after is False else (Epoch(0, 1, 4),))
    ranks.check_seats(place)


@pytest.mark.slow
def test_trials_by_themselves_are_planned_smaller_like_others(tmp_path, warm_workers):
    """A batch that is larger than all before does not fit: it goes on in shards."""
    recipe = shoal.Recipe(model=_tower, data=_growing, loss=_loss)

    def study(steps):
        space = shoal.grid(lr=[1e-3, 1e-2, 3e-2])
        return shoal.Study("k", recipe, space=space, steps=steps, directory=tmp_path)

    studies.run(study(8), warm_workers, fuse=3)
    small = shoal.Hardware.virtual(devices=1, memory="1100KiB")
    longer = study(20)
    report = longer.run(
        hardware=small, fuse=False, accept_numerics=True, workers=warm_workers, progress=False
    )
    assert [str(trial.state) for trial in report.trials] == ["FINISHED"] * 3
    assert {tuple(e.width for e in epochs) for epochs in told(longer.directory)} == {(3, ALONE)}
    verdicts = list(
        verify_trials(longer.directory, ranks.rows_of(longer.directory), recipe=recipe)
    )
    assert [v.first_difference or v.failure or v.skipped for v in verdicts] == [""] * 3


def _tower(hp):
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(nn.Linear(8, 64), *blocks, nn.Linear(64, 1))


def _growing(hp):
    draws = torch.Generator().manual_seed(1)
    sizes = [8] * 13 + [256] + [8] * 6
    return [
        (torch.randn(n, 8, generator=draws), torch.randn(n, 1, generator=draws)) for n in sizes
    ], None


def _loss(output, batch):
    return nn.functional.mse_loss(output, batch[1])
