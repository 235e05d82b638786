"""What it takes until a study trains: workers forked from a server, beside workers that start.

``shoal run`` of a study of two trials of 8 steps, from the command's start to its end, on 1, 2 and
4 virtual devices; and how long a pool takes to have another worker. Needs nothing but shoal.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import common
from shoal.forkserver import ForkServer, WorkerProcess
from shoal.observe import read_events
from shoal.runtime.pool import MODULE
from shoal.runtime.wire.channel import Channel
from shoal.runtime.wire.messages import RECORDER, Ready
from shoal.workerenv import worker_environment

STUDY = """
import torch, shoal
from torch import nn

x, y = torch.randn(256, 8), torch.randint(0, 3, (256,))


def data(hp):
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 32), None


study = shoal.Study(
    "short",
    shoal.Recipe(
        model=lambda hp: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)),
        data=data,
        loss=lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
    ),
    space=shoal.grid(lr=[0.1, 0.01]),
    epochs=1,
    metric="train_loss",
)
"""
ARMS = ("fork", "spawn")


def command(arm: str, devices: int) -> dict[str, float]:
    """Seconds of the command, of its processes' CPU time, and until the first step's end."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "short.py"
        file.write_text(STUDY)
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
        subprocess.run(
            [sys.executable, "-m", "shoal", "run", str(file), "--devices", f"cpu:{devices}"],
            cwd=folder,
            env={**os.environ, "SHOAL_WORKERS": arm},
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        ended, after = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
        events = read_events(Path(folder) / "runs" / "short")
        first = next(e.time for e in events if type(e).__name__ == "StepFinished")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": ended - began, "cpu_s": cpu, "first_step_s": first - began}


def another(arm: str) -> float:
    """Seconds until a second worker has imported all, beside one that has."""
    os.environ["SHOAL_WORKERS"] = arm
    server = ForkServer(MODULE)
    first, _ = _start(server)
    second, seconds = _start(server)
    for worker in (first, second):
        worker.kill()
    server.close()
    return seconds


def _start(server: ForkServer) -> tuple[WorkerProcess, float]:
    began = time.perf_counter()
    ours, theirs = socket.socketpair()
    files = [os.memfd_create("recorder"), os.memfd_create("stacks")]
    os.truncate(files[0], RECORDER.size)
    worker = server.start(MODULE, [theirs.fileno(), *files], worker_environment())
    theirs.close()
    (_, message), _ = Channel(ours).receive()
    assert isinstance(message, Ready)
    return worker, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--devices", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--json")
    options = parser.parse_args()
    result: dict[str, object] = {}
    for devices in options.devices:
        rounds = [{arm: command(arm, devices) for arm in ARMS} for _ in range(options.rounds)]
        result[f"{devices} devices"] = {
            arm: {
                what: common.spread([one[arm][what] for one in rounds])
                for what in ("wall_s", "cpu_s", "first_step_s")
            }
            for arm in ARMS
        }
    taken = [{arm: another(arm) for arm in ARMS} for _ in range(options.rounds)]
    result["another worker_s"] = {arm: common.spread([one[arm] for one in taken]) for arm in ARMS}
    common.finish(result, options.json)


if __name__ == "__main__":
    main()
