"""The command line: what it costs to start, its exit codes, and what reading verbs print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import shoal
from shoal.core.errors import CapacityError, PlanError, SpecError, TransitionError
from shoal.core.event import (
    Evaluated,
    Event,
    StudyFinished,
    StudyPaused,
    StudyStarted,
    TrialFinished,
)
from shoal.core.units import format_bytes
from shoal.observe import Database
from shoal.ui.cli import app
from shoal.ui.failures import ExitCode, run_command, show_warnings_in_words
from shoal.ui.show import full_record, leaderboard, list_studies, read_snapshot
from shoal.ui.text import format_metric

Events = Callable[..., Iterator[Event]]


@pytest.fixture
def runs(tmp_path: Path, study_events: Events) -> Path:
    """A directory with a finished study, ``sweep``."""
    with Database(tmp_path / "sweep") as log:
        log.write(study_events(4, failing=(2,)))
    return tmp_path


def _shoal(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the program, and list on the last line of standard error what it imported."""
    program = (
        "import sys; from shoal.ui.cli import app; from shoal.ui.failures import run_command\n"
        "code = run_command(app)\n"
        "print([m for m in ('torch', 'numpy', 'rich') if m in sys.modules], file=sys.stderr)\n"
        "sys.exit(code)"
    )
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def _invoke(*words: str) -> tuple[int, str]:
    """The exit code and standard output of a command, run in this process."""
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    return result.exit_code, result.stdout


def test_a_letter_that_standard_output_has_no_bytes_for_is_an_escape(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shoal", "ls", "--directory", str(tmp_path / "\u6f22")]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    found = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=60
    )

    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout == f"no studies in {tmp_path}/\\u6f22\n"


@pytest.mark.parametrize(
    "words", [("--help",), ("ls",), ("show", "sweep"), ("trace", "sweep"), ("--version",)]
)
def test_reading_verbs_load_neither_torch_nor_rich(runs: Path, words: tuple[str, ...]) -> None:
    where = ("--directory", str(runs)) if words[0] in ("ls", "show", "trace") else ()

    done = _shoal(*words, *where)

    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


def test_watching_loads_no_torch(runs: Path) -> None:
    done = _shoal("watch", "sweep", "--directory", str(runs))

    assert done.returncode == 1, done.stderr  # a trial of it failed
    assert "torch" not in done.stderr.splitlines()[-1]


def test_import_shoal_loads_nothing_heavy() -> None:
    program = "import shoal, sys; print([m for m in ('torch', 'rich') if m in sys.modules])"

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout == "[]\n"


def test_python_dash_m_is_the_same_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "--version"], capture_output=True, text=True, check=True
    )

    assert done.stdout == "shoal 0.1.0\n"


def test_help_lists_every_verb() -> None:
    _, text = _invoke("--help")

    for verb in ("demo", "run", "plan", "ls", "show", "trace", "verify", "doctor"):
        assert f"\n  {verb} " in text


# ---------------------------------------------------------------- exit codes


def test_an_unknown_verb_is_bad_usage() -> None:
    assert _shoal("traverse").returncode == ExitCode.USAGE


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SpecError("no such study"), ExitCode.USAGE),
        (PlanError("a shard needs 13.0 MiB of 12.0 MiB"), ExitCode.USAGE),
        (CapacityError("host memory is full"), ExitCode.USAGE),
        (TransitionError("impossible"), ExitCode.INTERNAL),
        (OSError(28, "No space left on device"), ExitCode.STORAGE),
        (KeyboardInterrupt(), ExitCode.PAUSED),
    ],
)
def test_an_error_has_its_exit_code_and_no_traceback(
    error: BaseException,
    code: ExitCode,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SHOAL_DEBUG", raising=False)

    def command() -> None:
        raise error

    assert run_command(command) == code
    assert "Traceback" not in capsys.readouterr().err


def test_ctrl_c_inside_a_verb_is_a_pause(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.ui.show.list_studies", interrupt)

    code = run_command(lambda: app(["ls"]))

    assert code == ExitCode.PAUSED
    assert "stopped; what was saved stays, and the same command goes on" in capsys.readouterr().err


def test_debug_shows_the_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_DEBUG", "1")

    def command() -> None:
        raise SpecError("no such study")

    run_command(command)

    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("shoal: no such study\n")


def test_an_error_of_shoal_itself_always_shows_its_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOAL_DEBUG", raising=False)

    assert run_command(lambda: format_bytes("many")) == ExitCode.INTERNAL  # type: ignore[arg-type]

    err = capsys.readouterr().err
    assert "ValueError" in err
    assert "an error of shoal itself" in err


def test_what_code_leaves_with_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda: sys.exit("no GPU here")) == ExitCode.USAGE
    assert capsys.readouterr().err == "no GPU here\n"


def test_an_error_of_the_users_code_is_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    def model() -> None:
        raise ZeroDivisionError

    assert run_command(model) == ExitCode.USAGE

    err = capsys.readouterr().err
    assert "ZeroDivisionError" in err
    assert "in code that is not shoal's" in err
    assert "an error of shoal itself" not in err


def test_a_missing_file_is_told_in_one_line(tmp_path: Path) -> None:
    done = _shoal("run", str(tmp_path / "none.py"))

    assert done.returncode == ExitCode.USAGE
    assert "none.py': it does not exist" in done.stderr
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------- ls, show, trace


def test_ls_has_a_line_per_study(runs: Path) -> None:
    code, text = _invoke("ls", "--directory", str(runs))

    assert code == 0
    assert text.splitlines()[1].split()[:6] == [
        *("sweep", "finished", "3/4", "1", "3.1000"),
        "valid_loss",
    ]


def test_ls_tells_what_runs_from_what_was_interrupted(
    tmp_path: Path, study_events: Events
) -> None:
    begun = list(study_events(4, upto=9))
    stop = StudyFinished(time=9.0, finished=0, failed=0, seconds=9.0, stopped="Ctrl-C")
    for name, events in (
        ("died", begun),
        ("paused", [*begun, StudyPaused(time=9.0, reason="a full disk")]),
        ("stopped", [*begun, stop]),
        ("done", list(study_events(4))),
    ):
        with Database(tmp_path / name) as database:
            database.write(events)
    with Database(tmp_path / "runs") as database:
        database.write(begun)

        text = _invoke("ls", "--directory", str(tmp_path))[1]
        shown = _invoke("show", "runs", "--directory", str(tmp_path))[1]

    assert dict(line.split()[:2] for line in text.splitlines()[1:]) == {
        "died": "interrupted",
        "paused": "paused",
        "stopped": "stopped",
        "done": "finished",
        "runs": "running",
    }
    assert "study sweep: running" in shown
    after = _invoke("show", str(tmp_path / "runs"))[1]
    assert "study sweep: interrupted" in after
    assert (" running " in shown, " running " in after) == (True, False)


def test_ls_reads_the_steps_where_the_result_is_in_them(
    tmp_path: Path, study_events: Events
) -> None:
    events = [
        replace(event, metric="train_loss")
        if isinstance(event, StudyStarted)
        else replace(event, metrics={})
        if isinstance(event, TrialFinished)
        else event
        for event in study_events(2, steps=4)
        if not isinstance(event, Evaluated)
    ]
    with Database(tmp_path / "sweep") as database:
        database.write(events)

    (record,) = json.loads(_invoke("ls", "--directory", str(tmp_path), "--json")[1])

    assert (record["best"], record["best_value"]) == (0, pytest.approx(3.9375))


def test_ls_goes_on_past_a_study_that_cannot_be_read(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "torn").mkdir()
    (runs / "torn" / "study.db").write_bytes(b"x" * 5000)
    (runs / "old").mkdir()
    (runs / "old" / "events.jsonl").write_text("{}\n")

    code = list_studies(runs, as_json=False)

    said = capsys.readouterr()
    assert code == ExitCode.STORAGE
    states = dict(line.split()[:2] for line in said.out.splitlines()[1:])
    assert states == {"sweep": "finished", "torn": "unreadable", "old": "unreadable"}
    assert f"shoal: {runs / 'torn' / 'study.db'} is damaged: file is not a database" in said.err
    assert "was written by an earlier development version of shoal" in said.err

    list_studies(runs, as_json=True)
    records = {record["study"]: record for record in json.loads(capsys.readouterr().out)}
    assert records["torn"]["state"] == "unreadable"
    assert "is damaged" in records["torn"]["error"]


def test_ls_of_an_empty_directory_says_so(tmp_path: Path) -> None:
    assert _invoke("ls", "--directory", str(tmp_path)) == (0, f"no studies in {tmp_path}\n")


def test_ls_json_can_be_read_by_a_script(runs: Path) -> None:
    (record,) = json.loads(_invoke("ls", "--directory", str(runs), "--json")[1])

    assert record["study"] == "sweep"
    assert (record["finished"], record["failed"], record["best"]) == (3, 1, 0)


def test_show_prints_the_leaderboard_best_first_and_failures_last(runs: Path) -> None:
    _, text = _invoke("show", "sweep", "--directory", str(runs))

    lines = text.splitlines()
    assert [line.split()[0] for line in lines[4:8]] == ["0", "1", "3", "2"]
    assert "trial 2 failed at step 3: ValueError: the label 7 is unknown" in lines
    assert any(line.startswith("cpu:0") and "94%" in line for line in lines)


def test_states_are_left_out_where_all_finished(tmp_path: Path, study_events: Events) -> None:
    with Database(tmp_path / "good") as log:
        log.write(study_events(4))

    text = _invoke("show", "good", "--directory", str(tmp_path))[1]

    assert " state " not in text
    assert "trial" in text.splitlines()[3]


def test_show_without_a_name_takes_the_newest(runs: Path) -> None:
    assert "study sweep" in _invoke("show", "--directory", str(runs))[1]


def test_show_accepts_a_path(runs: Path) -> None:
    assert "study sweep" in _invoke("show", str(runs / "sweep"))[1]


def test_show_of_a_failed_trial_has_its_whole_traceback(runs: Path) -> None:
    _, text = _invoke("show", "sweep", "--trial", "2", "--directory", str(runs))

    assert "Traceback (most recent call last):" in text


def test_show_of_a_trial_has_its_learning_curve(runs: Path) -> None:
    _, text = _invoke("show", "sweep", "--trial", "0", "--directory", str(runs))

    assert "weights: " + str(runs / "sweep" / "trials/0") in text
    assert text.splitlines()[-1].split()[:2] == ["20", "1"]


def test_show_json_has_trials_and_devices(runs: Path) -> None:
    record = json.loads(_invoke("show", "sweep", "--directory", str(runs), "--json")[1])
    ended = full_record(runs / "sweep", read_snapshot(runs / "sweep", with_actions=True))
    assert ended.keys() == record.keys(), "what run --json says is what show --json does"
    cells = leaderboard(read_snapshot(runs / "sweep"))
    assert all(format_metric(one["smooth_loss"]) in cells for one in record["trials"])

    assert [trial["state"] for trial in record["trials"]].count("FAILED") == 1
    assert record["devices"][0]["peak_bytes"] <= record["devices"][0]["budget_bytes"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("show", "other"), r"no study 'other' in .*; the studies there: sweep"),
        (("show", "sweep", "--trial", "9"), r"has no trial 9; it has 4, numbered from 0"),
        (("show",), None),
    ],
)
def test_a_study_that_is_not_there_is_named(
    runs: Path, words: tuple[str, ...], said: str | None
) -> None:
    if said is None:
        with pytest.raises(SpecError, match=r"there is no study in .* Run one: shoal demo"):
            _invoke(*words, "--directory", str(runs / "nothing"))
    else:
        with pytest.raises(SpecError, match=said):
            _invoke(*words, "--directory", str(runs))


def test_trace_writes_a_timeline_and_a_chart(runs: Path) -> None:
    _, text = _invoke("trace", "sweep", "--directory", str(runs))

    assert "ui.perfetto.dev" in text
    assert json.loads((runs / "sweep" / "trace.json").read_text())["traceEvents"]
    assert (runs / "sweep" / "gantt.svg").read_text().startswith("<svg")


def test_trace_writes_where_it_is_told(runs: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere" / "t.json"

    record = json.loads(
        _invoke("trace", "sweep", "--directory", str(runs), "--output", str(target), "--json")[1]
    )

    assert record == {"trace": str(target), "chart": str(target.with_suffix(".svg"))}
    assert target.exists()


def test_a_warning_that_no_line_of_the_users_asked_for_is_words_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    show_warnings_in_words()
    ours, theirs = (
        warnings.formatwarning("a line was skipped", UserWarning, filename, 3, "line")
        for filename in (shoal.__file__, "mine.py")
    )
    assert ours == "shoal: warning: a line was skipped\n"
    assert theirs == "mine.py:3: UserWarning: a line was skipped\n  line\n"


def test_trace_writes_no_chart_over_the_timeline(runs: Path, tmp_path: Path) -> None:
    target = tmp_path / "t.svg"

    _invoke("trace", "sweep", "--directory", str(runs), "--output", str(target))

    assert target.read_text().startswith("<svg")
    assert json.loads(target.with_suffix(".json").read_text())["traceEvents"]


@pytest.mark.parametrize("is_there", [False, True])
def test_trace_writes_into_a_directory(runs: Path, tmp_path: Path, is_there: bool) -> None:
    target = tmp_path / "pictures"
    if is_there:
        target.mkdir()

    _invoke("trace", "sweep", "--directory", str(runs), "--output", str(target))

    assert sorted(file.name for file in target.iterdir()) == ["gantt.svg", "trace.json"]


def test_doctor_reports_every_check_as_json() -> None:
    checks = json.loads(_invoke("doctor", "--json")[1])

    names = {check["name"] for check in checks}
    assert {"python", "torch", "cores", "memory", "devices", "fused AdamW", "link"} <= names
    assert all(check["status"] in ("OK", "WARN") for check in checks)


@pytest.mark.parametrize("verb", ["run", "plan"])
@pytest.mark.parametrize("behind", [(), ("--", "c")])
def test_what_is_for_the_file_stands_behind_two_dashes(verb: str, behind: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [verb, "a.py", "b.py", *behind])

    assert result.exit_code == ExitCode.USAGE
    words = " ".join(result.stderr.split())
    assert "unexpected extra argument (b.py)" in words
    assert f"stands after --: shoal {verb} FILE.py -- b.py" in words
