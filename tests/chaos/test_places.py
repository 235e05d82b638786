"""Two processes on one directory, a directory that goes away, a clock that jumps."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import studies
from processes import until
from studies import run, written

from shoal.core.errors import SpecError, StorageError
from shoal.core.event import StepFinished, StudyFinished, TrialFinished
from shoal.observe import read_events
from shoal.ui.failures import ExitCode, exit_code

_OTHER_PROCESS = """
import sys
from shoal.observe.lock import StudyLock
lock = StudyLock(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("place", "named"),
    [("/proc/shoal", "/proc/shoal"), ("/dev/null/a", "/dev/null"), ("file",) * 2],
)
def test_a_directory_that_cannot_be_made_is_a_clear_error(place, named, tmp_path, warm_workers):
    (tmp_path / "file").write_text("mine")
    study = studies.make(tmp_path / place)

    with pytest.raises(StorageError, match=r"cannot (make the directory|look at)") as error:
        run(study, warm_workers)

    assert named in str(error.value)


@pytest.mark.parametrize("what", ["nothing", "another"])
def test_a_directory_that_vanishes_ends_the_run_and_can_be_put_back(
    what, interrupted, tmp_path, warm_workers
):
    away, copy = tmp_path / "away", tmp_path / "copy"
    shutil.copytree(interrupted.directory, copy)

    def move(event) -> None:
        if isinstance(event, StepFinished):
            interrupted.directory.rename(away)
            if what == "another":
                copy.rename(interrupted.directory)

    with pytest.raises(StorageError, match="moved, removed or replaced") as error:
        run(interrupted, warm_workers, callbacks=[move])

    assert exit_code(error.value) == ExitCode.STORAGE
    if what == "another":  # a worker may be writing there for a moment
        until(lambda: is_removed(interrupted.directory), "it came back")
    assert not interrupted.directory.exists(), "nobody made it anew"
    away.rename(interrupted.directory)
    run(interrupted, warm_workers)
    studies.check_alone(interrupted.directory)


def is_removed(path: Path) -> bool:
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


def test_a_second_process_is_refused_by_the_first_ones_number(interrupted, warm_workers):
    command = [sys.executable, "-c", _OTHER_PROCESS, str(interrupted.directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(SpecError, match=f"process {other.pid}"):
            run(interrupted, warm_workers)
        assert other.poll() is None
        other.kill()

    run(interrupted, warm_workers)  # a crash has freed it

    studies.check_alone(interrupted.directory)


def test_a_study_that_runs_is_refused_to_its_own_process(interrupted, warm_workers):
    refused = []

    def again(event) -> None:
        if isinstance(event, StepFinished) and not refused:
            with pytest.raises(SpecError, match="running already"):
                run(interrupted, None)
            refused.append(event)

    run(interrupted, warm_workers, callbacks=[again])

    assert refused
    studies.check_alone(interrupted.directory)


def test_a_clock_that_jumps_back_a_year_changes_no_order(interrupted, warm_workers, monkeypatch):
    now = time.time
    steps = []

    def jump(event) -> None:
        if isinstance(event, StepFinished):
            steps.append(event.step)
            if event.step == 20:
                monkeypatch.setattr(time, "time", lambda: now() - 365 * 86400)

    report = run(interrupted, warm_workers, callbacks=[jump])

    studies.check_alone(interrupted.directory)
    assert steps == sorted(steps)
    recorded = [event.step for event in written(interrupted, StepFinished)]
    assert recorded[-len(steps) :] == steps
    assert report.wall_seconds >= 0
    last = list(read_events(interrupted.directory))[-1]
    assert isinstance(last, StudyFinished)
    assert last.seconds >= 0
    assert all(event.seconds >= 0 for event in written(interrupted, TrialFinished))
