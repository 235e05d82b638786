"""One arm, once, in a process of its own; the last line it prints is JSON.

    python benchmarks/peers/arm.py ARM TASK [--seed 0] [--count]

TASK is the JSON text of a ``task.Task``. Needs torch and, for a peer, nothing of shoal but
its source on the path: DeepSpeed's environment has no shoal.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import loops
import processes
from held import StepWatch, held
from task import Task

from shoal.rng import seed_all

MARK = "figures: "


def peer(name: str, task: Task, seed: int, *, count: bool) -> dict[str, Any]:
    """The figures of a peer. ``count``: bytes of tensors too, in one more step at the end."""
    loops.prepare(name)
    seed_all(seed)
    before = processes.own_bytes()
    loop = loops.BUILDERS[name](task)
    on_gpu = torch.device(task.device).type == "cuda"
    losses, batches, first_step_at = [], task.batches(), 0.0
    began, began_cpu = time.perf_counter(), time.process_time()
    for number, batch in enumerate(batches):
        if number == task.warm_up:
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            began, began_cpu = time.perf_counter(), time.process_time()
        losses.append(loop.step(batch))
        if not number:
            first_step_at = time.time()
    if on_gpu:
        torch.cuda.synchronize()
    figures: dict[str, Any] = {
        "first_step_at": first_step_at,
        "seconds_a_step": (time.perf_counter() - began) / max(1, task.steps),
        "cpu_seconds_a_step": (time.process_time() - began_cpu) / max(1, task.steps),
        "losses": {str(seed): losses},
        "before_bytes": before,
        "at_a_time": 1,
        "notes": list(loop.notes),
    }
    if on_gpu:
        figures["device_peak_bytes"] = torch.cuda.max_memory_allocated()
    if count:
        figures |= counted(loop, batches[-1], on_gpu=on_gpu)
    return figures


def counted(loop: loops.Loop, batch: Any, *, on_gpu: bool) -> dict[str, Any]:
    """Bytes of one more step's tensors, where device and host are the same memory.

    Of a loop that offloads, what outlives a step is in host memory and the rest passes
    through the device; of one that does not, everything is on the device.
    """
    if on_gpu:
        return {}
    with StepWatch() as watch:
        loop.step(batch)
    found = held(watch.changes)
    return {
        "device_peak_bytes": found.passing if loop.offloads else found.total,
        "host_bytes": found.outliving if loop.offloads else 0,
    }


def version_of(name: str) -> str | None:
    """Of the package that an arm measures, where it is not torch."""
    if name in (loops.ZERO3, loops.ZERO3_ADAM):
        return f"deepspeed {importlib.metadata.version('deepspeed')}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arm")
    parser.add_argument("task", type=Task.from_json)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.task.threads)
    if options.arm in loops.BUILDERS:
        figures = peer(options.arm, options.task, options.seed, count=options.count)
    else:
        import ours

        figures = ours.train(options.task, ours.ARMS[options.arm])
    figures |= {"torch": torch.__version__, "version": version_of(options.arm)}
    print(MARK + json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
