"""What trials print lands in their own logs, whoever shares the worker with them."""
# ruff: noqa: T201  # printing is what is tested

from __future__ import annotations

import errno
import io
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shoal.runtime.printing.output import TrialOutput
from shoal.runtime.printing.triallog import log_path
from shoal.testing import ManualClock


class Worker:
    """This process as a worker's: ``terminal`` is its standard error.

    A context manager and no fixture, since pytest changes the streams after the set-up.
    """

    def __init__(self, study: Path, output: TrialOutput | None = None) -> None:
        self.terminal = io.StringIO()
        self.output = output or TrialOutput(max_bytes=4096)
        self._study = study

    def __enter__(self) -> tuple[TrialOutput, io.StringIO]:
        self._before = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = self.terminal
        self.output.install(self._study)
        return self.output, self.terminal

    def __exit__(self, *_: object) -> None:
        self.output.close()
        sys.stdout, sys.stderr = self._before


def _lines(study: Path, trial: int) -> list[str]:
    """The lines of a log without their times."""
    text = log_path(study, trial).read_text()
    assert text.endswith("\n")
    return [line.partition(" ")[2] for line in text.splitlines()]


def test_what_a_trial_prints_is_in_its_log_and_not_on_the_terminal(tmp_path: Path) -> None:
    with Worker(tmp_path) as (output, terminal):
        output.set(3)
        print("epoch", 1)
        print("oh", file=sys.stderr)
        output.set(None)
        print("the worker's own")

        assert _lines(tmp_path, 3) == ["epoch 1", "oh"]
        assert terminal.getvalue() == "the worker's own\n"


def test_what_a_plan_prints_again_is_shown_once_and_is_in_every_log(tmp_path: Path) -> None:
    with Worker(tmp_path) as (output, terminal):
        for trial in (None, None, 0, 1, None):
            output.set(trial)
            print("LOAD REPORT", file=sys.stderr)
        print("begun", end="")
        assert "begun" not in terminal.getvalue()
        sys.stdout.flush()
        assert terminal.getvalue() == "LOAD REPORT\nbegun"
        print("; and not ended", end="")
        print("held", end="", file=sys.stderr)

        assert _lines(tmp_path, 0) == _lines(tmp_path, 1) == ["LOAD REPORT"]
    assert terminal.getvalue() == "LOAD REPORT\nbegun; and not endedheld"


def test_the_next_study_of_a_worker_shows_its_lines_again(tmp_path: Path) -> None:
    output = TrialOutput()
    for study in ("one", "two"):
        with Worker(tmp_path / study, output) as (_, terminal):
            print("LOAD REPORT")
            assert terminal.getvalue() == "LOAD REPORT\n"


def test_each_line_begins_with_its_time(tmp_path: Path) -> None:
    clock = ManualClock(1_700_000_000.9)
    with Worker(tmp_path, TrialOutput(clock=clock.now)) as (output, _):
        output.set(0)
        print("first")
        clock.advance(1.0)
        print("second")

        first, second = log_path(tmp_path, 0).read_text().splitlines()
        assert first[:4] == "2023"
        assert first[16:19] == ":20"
        assert second[16:19] == ":21"
        assert first.endswith("00 first")  # behind the offset from UTC


def test_a_line_that_two_trials_interrupt_stays_whole(tmp_path: Path) -> None:
    with Worker(tmp_path) as (output, _):
        output.set(1)
        print("begun ", end="")
        output.set(2)
        print("another's")
        output.set(1)
        print("and ended")

        assert _lines(tmp_path, 1) == ["begun and ended"]
        assert _lines(tmp_path, 2) == ["another's"]


def test_lines_of_many_threads_never_mix(tmp_path: Path) -> None:
    with Worker(tmp_path) as (output, _):

        def chatter(letter: str) -> None:
            for _ in range(20):
                for _ in range(4):
                    sys.stdout.write(letter)
                sys.stdout.write("\n")

        output.set(0)
        threads = [threading.Thread(target=chatter, args=(letter,)) for letter in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert sorted(_lines(tmp_path, 0)) == sorted(letter * 4 for letter in "abcd" * 20)


def test_a_thread_belongs_to_the_trial_that_started_it(tmp_path: Path) -> None:
    with Worker(tmp_path) as (output, _):
        go = threading.Event()
        output.set(1)
        thread = threading.Thread(target=lambda: (go.wait(), _print_from_a_thread()))
        thread.start()
        output.set(2)
        go.set()
        thread.join()

        assert _lines(tmp_path, 1) == ["from a thread", "from a thread of a thread"]
        assert not log_path(tmp_path, 2).exists()


def _print_from_a_thread() -> None:
    print("from a thread")
    inner = threading.Thread(target=print, args=("from a thread of a thread",))
    inner.start()
    inner.join()


def test_a_thread_that_outlives_its_study_is_nobodys(tmp_path: Path) -> None:
    with Worker(tmp_path) as (output, terminal):
        go = threading.Event()
        output.set(1)
        thread = threading.Thread(target=lambda: (go.wait(), print("late")))
        thread.start()
        output.close()
        output.install(tmp_path / "next")
        go.set()
        thread.join()

        assert terminal.getvalue() == "late\n"


def test_a_handler_that_was_made_before_is_caught_until_the_end(tmp_path: Path) -> None:
    logger, terminal = logging.getLogger("made.before"), io.StringIO()
    before = sys.stderr
    sys.stderr = terminal
    handler = logging.StreamHandler()
    logger.addHandler(handler)
    output = TrialOutput()
    output.install(tmp_path)
    try:
        output.set(0)
        logger.warning("logged")
        output.close()
        logger.warning("after the study")
    finally:
        sys.stderr = before
        logger.removeHandler(handler)

    assert _lines(tmp_path, 0) == ["logged"]
    assert terminal.getvalue() == "after the study\n"


def test_a_process_with_warnings_and_no_logging_of_its_own(tmp_path: Path) -> None:
    program = f"""
import logging, warnings
from shoal.runtime.printing.output import TrialOutput
output = TrialOutput()
output.install({str(tmp_path)!r})
output.set(4)
warnings.warn("mind the gap")
logging.warning("and the step")
output.set(None)
print("mine")
output.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    first, *_, last = _lines(tmp_path, 4)
    assert first.endswith("UserWarning: mind the gap")
    assert last.endswith("and the step")
    assert (done.stdout, done.stderr) == ("mine\n", "")


def test_a_handler_of_one_study_serves_the_next_study_of_the_worker(tmp_path: Path) -> None:
    with Worker(tmp_path) as (output, _):
        handler = logging.StreamHandler(sys.stderr)  # as a module of the user makes it at import
        output.close()
        (tmp_path / "second").mkdir()
        output.install(tmp_path / "second")
        output.set(7)

        handler.stream.write("still caught\n")

        assert _lines(tmp_path / "second", 7) == ["still caught"]


def test_a_log_stops_at_its_size_and_says_so(tmp_path: Path) -> None:
    with Worker(tmp_path) as (output, _):
        output.set(0)
        for _ in range(200):
            print("x" * 50)
        output.close()
        output.install(tmp_path)
        output.set(0)
        print("more")

        assert log_path(tmp_path, 0).stat().st_size < 4096 + 200
        lines = _lines(tmp_path, 0)
        assert lines[-1] == "cut: this log has reached 4.0 KiB; the rest is dropped"
        assert len(lines) - 1 + output.dropped in (200, 201)  # the second run may fit a short one


def test_a_study_that_is_gone_fails_nobody_and_is_not_made_again(tmp_path: Path) -> None:
    with Worker(tmp_path / "gone") as (output, _):
        output.set(0)
        print("lost")
        print("lost too")

        assert output.dropped == 2
        assert not (tmp_path / "gone").exists()


def test_a_full_disk_drops_lines_and_the_next_line_says_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Worker(tmp_path) as (output, _):

        def full(file: int, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        output.set(0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            print("a\nb")
        print("c")

        assert _lines(tmp_path, 0) == ["lines dropped: 2 (No space left on device)", "c"]
        assert output.dropped == 2


def test_a_line_torn_by_a_full_disk_is_ended_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Worker(tmp_path) as (output, _):
        write = os.write
        output.set(0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda file, data: write(file, data[:30]))
            print("torn " * 10)
        print("whole")

        lines = log_path(tmp_path, 0).read_text().splitlines()
        assert len(lines[0]) == 30
        assert lines[-1].endswith(" whole")


def test_a_link_in_the_place_of_a_log_is_not_followed(tmp_path: Path) -> None:
    with Worker(tmp_path) as (output, _):
        path = log_path(tmp_path, 0)
        path.parent.mkdir(parents=True)
        path.symlink_to(tmp_path / "elsewhere")
        output.set(0)
        print("x")

        assert not (tmp_path / "elsewhere").exists()
        assert output.dropped == 1


def test_of_a_progress_bar_the_last_state_is_kept(tmp_path: Path) -> None:
    with Worker(tmp_path) as (output, _):
        output.set(0)
        for percent in range(0, 101, 10):
            print(f"\r{percent} %", end="", flush=True)
        print("\nnext\r\nkept", end="\r")
        print()

        assert _lines(tmp_path, 0) == ["100 %", "next", "kept"]


def test_a_line_without_end_is_cut_into_several(tmp_path: Path) -> None:
    with Worker(tmp_path, TrialOutput()) as (output, _):
        output.set(0)
        for _ in range(5):
            print("y" * 2**15, end="")
        output.close()

        assert [len(line) for line in _lines(tmp_path, 0)] == [2**16, 2**16, 2**15]


def test_bytes_and_strange_characters_are_written(tmp_path: Path) -> None:
    with Worker(tmp_path) as (output, _):
        output.set(0)
        sys.stdout.buffer.write(b"raw \xff\n")
        print("lone \ud800, \x1b[31m")

        assert _lines(tmp_path, 0) == ["raw \ufffd", "lone \\ud800, \x1b[31m"]


def test_what_is_no_text_is_refused_as_ever(tmp_path: Path) -> None:
    with Worker(tmp_path), pytest.raises(TypeError, match="must be str, not bytes"):
        sys.stdout.write(b"x")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_process_writes_to_the_log_of_its_trial_even_under_a_held_lock(
    tmp_path: Path,
) -> None:
    with Worker(tmp_path) as (output, _):
        output.set(5)
        print("parent's unfinished ", end="")
        with output._lock:
            child = os.fork()
            if child == 0:
                print("child")
                os._exit(0)
            os.waitpid(child, 0)
        print("line")

        assert _lines(tmp_path, 5) == ["child", "parent's unfinished line"]


def test_more_trials_than_open_files_keep_their_logs(tmp_path: Path) -> None:
    with Worker(tmp_path) as (output, _):
        for _ in range(2):
            for trial in range(40):
                output.set(trial)
                print(f"trial {trial}")

        assert all(_lines(tmp_path, trial) == [f"trial {trial}"] * 2 for trial in range(40))
        assert len(output._logs) <= 16


def test_close_writes_what_has_no_newline_and_puts_everything_back(tmp_path: Path) -> None:
    with Worker(tmp_path) as (output, terminal):
        marked = threading.Thread.start
        output.set(0)
        print("no end", end="")

        output.close()

        assert _lines(tmp_path, 0) == ["no end"]
        assert sys.stdout is terminal
        assert threading.Thread.start is not marked


def test_the_module_needs_no_torch() -> None:
    program = "import sys; import shoal.runtime.printing.output; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_each_trial_is_warned_once_of_what_another_was_warned_of(tmp_path: Path) -> None:
    script = """
import sys, warnings
from shoal.runtime.printing.output import TrialOutput
output = TrialOutput()
output.install(sys.argv[1])
def warn():
    warnings.warn("of this", stacklevel=1)
warn()  # while measuring, when no trial runs
for trial in (0, 1, 0, 1):
    output.set(trial)
    warn()
output.close()
"""
    subprocess.run([sys.executable, "-c", script, tmp_path], check=True, capture_output=True)

    for trial in (0, 1):
        assert sum("UserWarning: of this" in line for line in _lines(tmp_path, trial)) == 1
