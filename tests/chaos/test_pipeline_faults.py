"""A stage that dies, hangs or raises is found in time, is named, and leaves no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import stopping
from processes import workers_of

from shoal.core.errors import TrialError, WorkerError
from shoal.pipeline.processes import StageProcesses
from shoal.pipeline.run import run_stages
from shoal.testing import compare, plain_loop

pytestmark = pytest.mark.clock

HERE = Path(__file__).parent
CUTS = (2, 4)  # the head in the last stage


@pytest.fixture
def crew():
    with StageProcesses(3) as processes:
        before = workers_of(os.getpid())
        yield processes
        assert workers_of(os.getpid()) <= before | {process.pid for process in processes._idle}


def train(crew, how, **changes):
    return run_stages(
        stopping.recipe(how),
        {},
        0,
        steps=4,
        stages=3,
        cuts=CUTS,
        processes=crew,
        **({"hang_s": 60} | changes),
    )


def test_a_killed_stage_is_named_at_once_and_no_process_is_left(crew):
    before = workers_of(os.getpid())
    start = time.monotonic()
    with pytest.raises(
        WorkerError, match=r"stage 2 \(process \d+\) ended with signal 9 at 'STEP s2"
    ):
        train(crew, "kill", direct=True)
    assert time.monotonic() - start < 30
    assert workers_of(os.getpid()) == before


def test_a_hanging_stage_is_found_after_the_stated_time_with_its_stacks(crew):
    before = workers_of(os.getpid())
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        train(crew, "hang", hang_s=2)
    assert 2 <= time.monotonic() - start < 30
    assert "stage 2 has been at 'STEP s2 v1' for 2 s" in str(caught.value)
    assert "stage 1 at 'RECV s2" in str(caught.value)
    assert "_stop" in str(caught.value)  # where it stands
    assert workers_of(os.getpid()) == before


def test_an_exception_in_a_stage_arrives_with_its_traceback(crew):
    with pytest.raises(WorkerError, match="the head has gone wrong") as caught:
        train(crew, "raise")
    assert "stage 2 failed" in str(caught.value)
    assert "stopping.py" in str(caught.value)


def test_after_a_fault_the_next_training_is_right(crew):
    with pytest.raises(WorkerError):
        train(crew, "kill")
    trained = train(crew, "")
    plain = plain_loop(stopping.recipe(), {}, 0, steps=4)
    assert compare(plain, trained.state, losses=trained.losses).equal


@pytest.mark.parametrize("schedule", ["flush", "2bw"])
def test_a_loss_that_is_not_finite_fails_the_training_as_alone(schedule, crew):
    hp = {"scale": float("inf")}
    with pytest.raises(TrialError) as alone:
        plain_loop(stopping.recipe(), hp, 0, steps=2)
    with pytest.raises(TrialError) as piped:
        run_stages(stopping.recipe(), hp, 0, steps=2, stages=3, schedule=schedule, processes=crew)
    assert str(piped.value) == str(alone.value)


def test_stages_end_with_the_process_that_started_them(tmp_path):
    code = (
        "import stopping; from shoal.pipeline.run import run_stages\n"
        "run_stages(stopping.recipe('hang'), {}, 0, steps=4, stages=3)\n"
    )
    paths = os.pathsep.join([str(HERE), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "SHOAL_TEST_PIDS": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment)
    _until(lambda: any(tmp_path.iterdir()))
    stages = workers_of(parent.pid)
    assert len(stages) == 3
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    _until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in stages))


def _until(is_so) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_stage_that_never_begins_is_found_too(crew, monkeypatch):
    monkeypatch.setattr("shoal.pipeline.processes.SETUP_S", 1.0)
    before = workers_of(os.getpid())
    with pytest.raises(WorkerError, match="stage 0 has been at its setting up for 1 s"):
        crew.run(stopping.sleep, 2, hang_s=1)
    assert workers_of(os.getpid()) == before
