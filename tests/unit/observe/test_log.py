"""The log: whole lines, one writer, and what is left after a crash."""

import errno
import json
import math
import os

import pytest

from shoal.core.errors import SpecError
from shoal.observe import jsonl
from shoal.observe.log import EventLog, LogReader, TimelineReader, read_events, read_timeline


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "digits" / "events.jsonl"


def write(path, *events):
    with EventLog(path) as log:
        log.write(events)


def test_what_is_written_is_read_back_in_order(path, tell):
    events = [tell.study(), tell.planned(0), tell.started(0), tell.step(0, 1)]
    write(path, *events[:2])
    write(path, *events[2:])

    assert list(read_events(path)) == events
    assert list(read_events(path.parent)) == events


def test_actions_are_rows_of_their_own_file_under_a_line_of_names(path, tell):
    actions = [tell.action(0, 1), tell.action(1, 2, action="LOAD s1 param")]
    write(path, tell.study(), *actions)
    write(path, tell.action(2, 3))

    lines = (path.parent / "timeline.jsonl").read_text().splitlines()
    assert json.loads(lines[0])[:5] == ["device", "stream", "trial", "step", "action"]
    assert json.loads(lines[1]) == ["cpu:0", "compute", 0, 1, "F s0 m0", 1000.0, 1001.0, 0]
    assert len(lines) == 4
    assert list(read_timeline(path.parent)) == [*actions, tell.action(2, 3)]
    assert len(list(read_events(path))) == 1


def test_a_written_batch_can_be_read_before_the_log_is_closed(path, tell):
    with EventLog(path) as log:
        log.write([tell.started(0)])

        assert len(list(read_events(path))) == 1


@pytest.mark.parametrize("torn", [b'{"event": "TrialStar', b"{", b'{"event": "TrialStarted"}'])
def test_a_torn_last_line_never_happened(path, tell, torn):
    write(path, tell.started(0))
    with open(path, "ab") as file:
        file.write(torn)

    assert [event.trial for event in read_events(path)] == [0]

    write(path, tell.started(1))
    assert [event.trial for event in read_events(path)] == [0, 1]


def test_a_file_with_nothing_but_a_torn_line_starts_again(path, tell):
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * 200_000)

    write(path, tell.started(3))

    assert [event.trial for event in read_events(path)] == [3]


def test_a_line_that_cannot_be_read_is_skipped_with_a_warning(path, tell):
    write(path, tell.started(0))
    with open(path, "ab") as file:
        file.write(b'{"event": \xff\n[]\n{"event": "TrialStarted", "colour": 1}\n')
    write(path, tell.started(1))

    with pytest.warns(UserWarning, match=r"events\.jsonl: the line that ends at byte \d+"):
        events = list(read_events(path))

    assert [event.trial for event in events] == [0, 1]


def test_an_event_of_a_later_version_is_passed_over(path, tell):
    write(path, tell.started(0))
    with open(path, "ab") as file:
        file.write(b'{"event": "TrialDreamt", "time": 1.0}\n')

    assert len(list(read_events(path))) == 1


def test_a_second_writer_is_refused_until_the_first_is_done(path, tell):
    with EventLog(path), pytest.raises(SpecError, match=r"has another writer.*running already"):
        EventLog(path)

    write(path, tell.started(0))


def test_a_full_disk_leaves_whole_lines_and_the_batch_can_be_written_again(
    path, tell, monkeypatch
):
    batch = [tell.started(1), tell.action(0, 1)]
    with EventLog(path) as log:
        log.write([tell.started(0)])
        timeline = log._timeline._file
        monkeypatch.setattr(log._timeline, "_file", FullDisk(timeline))
        with pytest.raises(OSError, match="No space"):
            log.write(batch)
        assert [event.trial for event in read_events(path)] == [0]

        monkeypatch.setattr(log._timeline, "_file", timeline)
        log.write(batch)
        log.sync()

    assert [event.trial for event in read_events(path)] == [0, 1]
    assert len(list(read_timeline(path.parent))) == 1


class FullDisk:
    """A file that takes ten bytes and then has no room."""

    def __init__(self, file):
        self.file = file
        self.room = 10

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self.file.write(data[: self.room])
        self.room = 0
        return written

    def truncate(self, size):
        self.file.truncate(size)


def test_a_reader_that_follows_gets_each_event_once(path, tell):
    reader, actions = LogReader(path), TimelineReader(path.parent / "timeline.jsonl")
    assert list(reader.poll()) == []

    with EventLog(path) as log:
        log.write([tell.started(0), tell.action(0, 1)])
        assert [event.trial for event in reader.poll()] == [0]
        assert len(list(actions.poll())) == 1
        log.write([tell.started(1), tell.action(1, 2)])
        assert [event.trial for event in reader.poll()] == [1]
        assert len(list(actions.poll())) == 1
        assert list(reader.poll()) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.1, -0.0])
def test_every_float_is_valid_json_and_comes_back(value):
    text = jsonl.dumps({"loss": value})

    json.loads(text, parse_constant=pytest.fail)
    assert repr(jsonl.loads(text)["loss"]) == repr(value)


@pytest.mark.parametrize("text", ["NaN", "\\NaN", "\\\\-Infinity", "Infinity", "not NaN"])
def test_a_string_that_reads_like_a_float_stays_a_string(text):
    assert jsonl.loads(jsonl.dumps({"activation": [text, math.nan]}))["activation"][0] == text
