"""The live table in narrow terminals, and how far a study is."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import replace

from rich.console import Console

from shoal.core.event import Event, TrialFailed, TrialPlanned, TrialPruned
from shoal.observe.snapshot import Snapshot
from shoal.ui.dashboard import bar_of, render
from shoal.ui.lines import total_steps

Events = Callable[..., Iterator[Event]]
BAR = "━"


def _draw(snapshot: Snapshot, width: int, height: int = 24) -> list[str]:
    console = Console(record=True, width=width, height=height, file=io.StringIO())
    console.print(render(snapshot, width, height))
    return console.export_text().splitlines()


def test_a_long_name_leaves_room_for_how_far_the_study_is(study_events: Events) -> None:
    snapshot = Snapshot.of(study_events(upto=50))
    long = replace(snapshot, study="a-study-whose-name-is-rather-long-for-a-line-of-a-terminal")
    for width in (60, 80):
        title = _draw(long, width)[0]
        assert title.startswith("a-study-whose")
        assert title.endswith("8 trials  31 % of 160 steps") or BAR in title
        assert "31 % of 160 steps" in title
    assert long.study in _draw(long, 200)[0]


def test_how_long_it_will_take_has_a_line_of_its_own_where_one_is_too_short(
    study_events: Events,
) -> None:
    snapshot = Snapshot.of(study_events(upto=50, failing=(0,)))
    *_, counts, times = _draw(snapshot, 52)
    assert counts == "3 running, 4 waiting, 1 failed"
    assert times.startswith("elapsed ")
    assert "ETA" in times
    assert "ETA" in _draw(snapshot, 80)[-1]


def test_a_device_that_has_no_trial_has_no_speed(study_events: Events) -> None:
    events = list(study_events(2, steps=20, upto=30))
    assert len([line for line in _draw(Snapshot.of(events), 80) if "steps/s  trial" in line]) == 2
    ended = TrialPruned(
        time=9e9, trial=0, step=15, reason="late", checkpoint="", metrics={}, seconds=1.0
    )
    lines = [line for line in _draw(Snapshot.of([*events, ended]), 80) if line.startswith("cpu:")]
    assert ["steps/s" in line for line in lines] == [False, True]


def test_a_long_title_costs_no_other_column(study_events: Events) -> None:
    events = [
        replace(event, hp={"learning_rate_of_the_optimizer_of_the_head": 0.1 * event.trial})
        if isinstance(event, TrialPlanned)
        else event
        for event in study_events(2, upto=5)
    ]
    header = _draw(Snapshot.of(events), 80)[2]
    assert "learning_rate..." in header
    assert "how" in header
    assert "learning_rate_of_the_optimizer_of_the_head" in _draw(Snapshot.of(events), 200)[2]


def test_a_title_is_whole_where_columns_left_room_for_it(study_events: Events) -> None:
    snapshot = replace(Snapshot.of(study_events(2, upto=5)), metric="valid_accuracy_of_all")
    headers = {width: _draw(snapshot, width)[2] for width in range(50, 120)}
    for width, header in headers.items():
        missing = len("best valid_accuracy_of_all") - len("best valid_ac...")
        assert "..." not in header or len(header.rstrip()) + missing > width, width
    assert any("best valid_ac..." in header for header in headers.values())


def test_a_bar_of_progress_is_not_red(study_events: Events) -> None:
    bar = bar_of(10, 5)
    assert (bar.complete_style, bar.finished_style) == ("cyan", "green")


def test_a_trial_that_ended_early_is_done(study_events: Events) -> None:
    events = list(study_events(2, steps=20, upto=10))
    assert total_steps(Snapshot.of(events)) == 40
    pruned = TrialPruned(
        time=9e9, trial=0, step=5, reason="late", checkpoint="", metrics={}, seconds=1.0
    )
    assert total_steps(Snapshot.of([*events, pruned])) == 25


def test_a_trial_that_failed_before_it_was_planned_leaves_the_others_their_share(
    study_events: Events,
) -> None:
    events = list(study_events(3, steps=20, upto=10))
    events = [e for e in events if not (isinstance(e, TrialPlanned) and e.trial == 2)]
    failed = TrialFailed(time=9e9, trial=2, step=0, error="ValueError: 13 units")
    snapshot = Snapshot.of([*events, failed])
    assert total_steps(snapshot) == 40
    assert "18 % of 40 steps" in _draw(snapshot, 80)[0]


def test_where_no_end_is_known_there_is_no_bar(study_events: Events) -> None:
    events = [
        replace(event, steps=None) if isinstance(event, TrialPlanned) else event
        for event in study_events(2, upto=10)
    ]
    title = _draw(Snapshot.of(events), 80)[0]
    assert title.split() == ["sweep", "2", "trials", "10", "steps"]
