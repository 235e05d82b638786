"""The timeline: whole lines, and what is left of them after a crash."""

import json
import math

import pytest

from shoal.observe import Database, TimelineReader, jsonl, read_events, read_timeline


def write(directory, *events):
    with Database(directory) as database:
        database.write(events)


def test_actions_are_rows_of_their_own_file_under_a_line_of_names(tmp_path, tell):
    actions = [tell.action(0, 1), tell.action(1, 2, action="LOAD s1 param")]
    write(tmp_path, tell.study(), *actions)
    write(tmp_path, tell.action(2, 3))

    lines = (tmp_path / "timeline.jsonl").read_text().splitlines()
    assert json.loads(lines[0])[:5] == ["device", "stream", "trial", "step", "action"]
    assert json.loads(lines[1]) == ["cpu:0", "compute", 0, 1, "F s0 m0", 1000.0, 1001.0, 0]
    assert len(lines) == 4
    assert list(read_timeline(tmp_path)) == [*actions, tell.action(2, 3)]
    assert len(list(read_events(tmp_path))) == 1


@pytest.mark.parametrize("torn", [b'["cpu:0", "com', b"[", b'["cpu:0"]', b"x" * 200_000])
def test_a_torn_last_line_never_happened(tmp_path, tell, torn):
    write(tmp_path, tell.action(0, 1))
    with open(tmp_path / "timeline.jsonl", "ab") as file:
        file.write(torn)

    assert len(list(read_timeline(tmp_path))) == 1

    write(tmp_path, tell.action(1, 2))
    assert [action.start for action in read_timeline(tmp_path)] == [1000.0, 1001.0]


def test_a_file_with_nothing_but_a_torn_line_starts_again(tmp_path, tell):
    (tmp_path / "timeline.jsonl").write_bytes(b"x" * 200_000)

    write(tmp_path, tell.action(3, 4))

    assert list(read_timeline(tmp_path)) == [tell.action(3, 4)]


def test_a_line_that_cannot_be_read_is_skipped_with_a_warning(tmp_path, tell):
    write(tmp_path, tell.action(0, 1))
    with open(tmp_path / "timeline.jsonl", "ab") as file:
        file.write(b'["\xff"]\n[1]\n7\n' + b"[" * 100_000 + b"\n")
    write(tmp_path, tell.action(1, 2))

    with pytest.warns(UserWarning, match=r"timeline\.jsonl: the line that ends at byte \d+"):
        actions = list(read_timeline(tmp_path))

    assert len(actions) == 2


def test_a_reader_that_follows_gets_each_action_once(tmp_path, tell):
    reader = TimelineReader(tmp_path / "timeline.jsonl")
    assert list(reader.poll()) == []

    with Database(tmp_path) as database:
        for start in (0, 1):
            database.write([tell.action(start, start + 1)])
            assert [action.start for action in reader.poll()] == [1000.0 + start]
        assert list(reader.poll()) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.1, -0.0])
def test_every_float_is_valid_json_and_comes_back(value):
    text = jsonl.dumps({"loss": value})

    json.loads(text, parse_constant=pytest.fail)
    assert repr(jsonl.loads(text)["loss"]) == repr(value)


@pytest.mark.parametrize("text", ["NaN", "\\NaN", "\\\\-Infinity", "Infinity", "not NaN"])
def test_a_string_that_reads_like_a_float_stays_a_string(text):
    assert jsonl.loads(jsonl.dumps({"activation": [text, math.nan]}))["activation"][0] == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"lr": 1, "lr": 2}', "same name twice"),
        ("[NaN]", "NaN is no JSON"),
        ("[-Infinity]", "-Infinity is no JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("{} {}", "Extra data"),
    ],
)
def test_text_that_another_reader_would_take_otherwise_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        jsonl.loads(text)
