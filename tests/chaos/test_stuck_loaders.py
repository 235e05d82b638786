"""A loader's process that never answers: the study still ends, and nothing of it stays."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from processes import Process, until

pytestmark = pytest.mark.clock

FILE = """
import time
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
import shoal

class Sleepy(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index >= 8:
            open("stuck", "w").close()
            time.sleep(1000)
        return torch.ones(4), torch.tensor(0)

def loss(output, batch):
    return torch.nn.functional.cross_entropy(output, batch[1])

study = shoal.Study(
    "sleepy",
    shoal.Recipe(
        model=lambda hp: torch.nn.Linear(4, 2),
        data=lambda hp: (DataLoader(Sleepy(), 4, num_workers=1), None),
        loss=loss,
    ),
    space={"lr": 0.1},
    trials=1,
    epochs=1,
    metric="train_loss",
)
"""


@pytest.fixture
def stuck(tmp_path):
    """A study's process whose trial waits for a batch that never comes."""
    (tmp_path / "study.py").write_text(FILE)
    popen = subprocess.Popen(
        [sys.executable, "-m", "shoal", "run", "study.py", "--devices", "cpu:1"],
        cwd=tmp_path,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    process = Process(popen, None)
    until((tmp_path / "stuck").exists, "no loader was ever stuck")
    yield process
    if process.members():
        process.kill()
    popen.wait()


def test_a_study_that_is_killed_takes_a_stuck_loader_along(stuck):
    assert len(stuck.members()) >= 3

    stuck.send(signal.SIGKILL)

    stuck.wait()
    stuck.check_nothing_left()


def test_a_worker_that_is_killed_is_noticed_and_replaced_beside_its_stuck_loader(stuck):
    worker = next(iter(stuck.workers()))

    stuck.send_to(worker, signal.SIGKILL)

    until(lambda: stuck.workers() - {worker}, "no other worker came", 30.0)


def test_a_second_signal_leaves_at_once_beside_a_stuck_loader(stuck):
    stuck.send(signal.SIGTERM)
    time.sleep(1.0)  # two at once may arrive as one
    stuck.send(signal.SIGTERM)

    assert stuck.is_over_after(20.0)
    stuck.check_nothing_left()
