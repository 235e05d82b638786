"""Properties of the database and the fold: nothing is lost, and batches do not matter."""

import dataclasses
import tempfile
import typing
from collections.abc import Mapping
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.event import (
    ActionFinished,
    Evaluated,
    Event,
    StepFinished,
    StudyStarted,
    TrialFailed,
    TrialFinished,
    TrialMoved,
    TrialRestarted,
    TrialStarted,
    WorkerDied,
)
from shoal.observe import jsonl
from shoal.observe.actions import TimelineReader, read_timeline
from shoal.observe.db import Database
from shoal.observe.reader import DatabaseReader, read_events
from shoal.observe.snapshot import Folder, Snapshot

TEXT = st.text(max_size=20) | st.sampled_from(["NaN", "\\NaN", "-Infinity", "\n", "\ud800", "é"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
BY_TYPE = {
    float: st.floats(),
    int: st.integers(),
    str: TEXT,
    bool: st.booleans(),
    type(None): st.none(),
    typing.Any: SCALARS,
}


def strategy(kind):
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{f.name: by_type(hints[f.name]) for f in fields(kind)})


def by_type(hint):
    if hint in BY_TYPE:
        return BY_TYPE[hint]
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return st.lists(by_type(arguments[0]), max_size=3).map(tuple)
    if typing.get_origin(hint) is Mapping:
        return st.dictionaries(TEXT, by_type(arguments[1]), max_size=3)
    return st.one_of(*map(by_type, arguments))


KINDS = typing.get_args(Event)


class Study:
    """A database that is written and followed."""

    def __init__(self, directory):
        self.directory, self.database = directory, Database(directory)
        self.readers = DatabaseReader(directory), TimelineReader(directory / "timeline.jsonl")

    def poll(self):
        return [event for reader in self.readers for event in reader.poll()]

    def reopen(self):
        self.database.close()
        self.database = Database(self.directory)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    study = Study(tmp_path_factory.mktemp("study"))
    yield study
    study.database.close()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_every_event_comes_back_from_the_database_as_it_was(study, kind, data):
    events = data.draw(st.lists(strategy(kind), min_size=1, max_size=4))
    study.poll()

    study.database.write(events)

    assert [bits(event) for event in study.poll()] == [bits(event) for event in events]


# An operation is a batch to write, or POLL, or CLOSE (and open again).
POLL, CLOSE = "poll", "close"
OPERATIONS = st.lists(
    st.lists(st.one_of(*map(strategy, KINDS)), max_size=6) | st.sampled_from([POLL, CLOSE]),
    max_size=8,
)


@settings(max_examples=50, deadline=None)
@given(operations=OPERATIONS)
def test_any_batching_with_readers_between_gives_what_was_written(operations):
    with tempfile.TemporaryDirectory() as directory:
        study, written, followed = Study(Path(directory)), [], []
        for operation in [*operations, POLL, CLOSE, POLL]:
            if operation == POLL:
                followed += study.poll()
                assert split(followed) == split(written)
            elif operation == CLOSE:
                study.reopen()
            else:
                study.database.write(operation)
                written += operation
        study.database.close()

        assert split([*read_events(directory), *read_timeline(directory)]) == split(written)


def split(events):
    """The actions, which have a file of their own, and all others, each in order."""
    parts = ([], [])
    for event in events:
        parts[isinstance(event, ActionFinished)].append(bits(event))
    return parts


def bits(event):
    """The event as text in which NaN equals itself and 1 differs from 1.0 and True."""
    return repr((type(event), dataclasses.asdict(event)))


@given(value=st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner)))
def test_json_lines_keep_any_value(value):
    assert repr(jsonl.loads(jsonl.dumps(value))) == repr(value)


TRIALS, STEPS, TIMES = st.integers(0, 2), st.integers(1, 6), st.floats(0, 100)
DEVICES = st.sampled_from(["cpu:0", "cpu:1"])
LOSSES = st.floats(-5, 5) | st.just(float("nan")) | st.just(float("inf"))
STORY = st.lists(
    st.builds(
        StudyStarted, time=TIMES, study=st.just("s"), metric=st.just("valid_loss"),
        mode=st.sampled_from(["min", "max"]), trials=st.just(3), devices=st.just(()),
        source=st.just(""), versions=st.just({}),
    )
    | st.builds(TrialStarted, time=TIMES, trial=TRIALS, device=DEVICES)
    | st.builds(TrialMoved, time=TIMES, trial=TRIALS, device=DEVICES, step=STEPS)
    | st.builds(TrialRestarted, time=TIMES, trial=TRIALS, step=STEPS)
    | st.builds(
        StepFinished, time=TIMES, trial=TRIALS, step=STEPS, epoch=st.integers(0, 2),
        loss=LOSSES, seconds=st.floats(0.01, 1), device=DEVICES,
    )
    | st.builds(
        Evaluated, time=TIMES, trial=TRIALS, step=STEPS, epoch=st.integers(0, 2),
        metrics=st.builds(lambda loss: {"valid_loss": loss}, LOSSES),
    )
    | st.builds(
        TrialFinished, time=TIMES, trial=TRIALS, step=STEPS, metrics=st.just({}),
        checkpoint=st.just("c"), seconds=TIMES,
    )
    | st.builds(TrialFailed, time=TIMES, trial=TRIALS, step=STEPS, error=st.just("E"))
    | st.builds(
        WorkerDied, time=TIMES, device=DEVICES, pid=st.just(1), reason=st.just("r"),
        trials=st.lists(TRIALS, max_size=2).map(tuple),
    ),
    max_size=40,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(story=STORY, cuts=st.lists(st.integers(0, 40), max_size=4))
def test_any_chunking_of_any_story_folds_to_the_same_snapshot(story, cuts):
    whole = Snapshot.of(story)
    edges = [0, *sorted(min(cut, len(story)) for cut in cuts), len(story)]

    live, pure = Folder(), Snapshot()
    for start, stop in pairwise(edges):
        live.add_all(story[start:stop]).snapshot()
        pure = pure.folder().add_all(story[start:stop]).last_snapshot()

    assert repr(live.snapshot()) == repr(whole)
    assert repr(pure) == repr(whole)


@settings(max_examples=100, deadline=None)
@given(story=STORY)
def test_the_steps_of_a_history_only_grow(story):
    for row in Snapshot.of(story).trials:
        steps = [line.step for line in row.history]
        assert steps == sorted(set(steps))
