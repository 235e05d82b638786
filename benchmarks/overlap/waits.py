"""Do two trials fill each other's waits on a GPU? Without one: the stand-in, with clocks.

    python benchmarks/overlap/waits.py [--json FILE]      # needs g++ and ninja

Two GPTs of 8 blocks, each in 10 shards with their optimizer on the host, share a device of the
stand-in for CUDA (tests/standin), whose streams have clocks (clocked.py): a block's forward, its
backward, its weights' way up and its step on the host take as long as those of a block of width
1600 on an H200. Said of each arm: the time of a trial's step, and the part of the time that the
device computes, while both are there. ``ahead`` is how shoal submits units; ``at once`` is as CUDA
would have it, which takes all and computes in order.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STANDIN = HERE.parents[1] / "tests" / "standin"
sys.path[:0] = [str(HERE), str(HERE.parent)]
STEPS, WARM_UP, TRIALS, BLOCKS, WIDTH, CONTEXT, ROWS = 12, 3, 2, 8, 64, 160, 2
BLOCK_BYTES = 4 * 12 * WIDTH**2
ARMS = {
    f"{name}, {ahead} loaded ahead": {"order": order, "lookahead": ahead, "lookbehind": ahead}
    for name, order in (("micro-batch by micro-batch", "micro"), ("shard by shard", "shard"))
    for ahead in (0, 1)
}


def clock() -> Any:
    from clocked import Clock

    return Clock(
        forward_s=1.25e-3,
        backward_s=3.9e-3,
        host_step_s=5.0e-3,
        link=BLOCK_BYTES / 2.2e-3,  # 123 MB of float32 at 55 GB/s
        slower=12.0,
    )


def model(hp: Any) -> Any:
    import clocked

    from shoal.examples.gpt import GPT
    from shoal.runtime import runahead

    clocked.install(clock())
    if hp["arm"] == "at once":
        runahead.RunAhead.waited = lambda self: False  # type: ignore[method-assign]
        runahead.RunAhead.ready = lambda self, ready, stays: ready  # type: ignore[method-assign]
    return GPT(width=WIDTH, depth=BLOCKS, heads=4, context=CONTEXT, dropout=0.0)


def data(hp: Any) -> Any:
    import torch

    draws = torch.Generator().manual_seed(0)
    rows = [torch.randint(256, (ROWS, CONTEXT + 1), generator=draws) for _ in range(2)]
    return [(r[:, :-1].contiguous(), r[:, 1:].contiguous()) for r in rows], None


def in_pairs() -> None:
    """Have two trials share the device, whatever the planner makes of seconds measured here."""
    from shoal.planning import deciding

    choices = deciding.choices
    deciding.choices = lambda measure, budget, actives, request, speeds: choices(  # type: ignore
        measure, budget, (TRIALS,), request, speeds
    )


def run(arm: str, how: dict[str, Any]) -> dict[str, float]:
    import shoal
    from gpu_large import length
    from shoal.core.event import ActionFinished, StepFinished
    from shoal.examples.gpt import next_byte_loss

    ends: dict[int, list[float]] = {}
    spans: list[tuple[float, float]] = []

    def watch(event: Any) -> None:
        if isinstance(event, StepFinished):
            ends.setdefault(event.trial, []).append(event.time)
        if isinstance(event, ActionFinished) and event.stream == "compute":
            spans.append((event.start, event.end))

    with tempfile.TemporaryDirectory() as directory:
        study = shoal.Study(
            "waits",
            shoal.Recipe(
                model=model,
                data=data,
                loss=next_byte_loss,
                precision="bf16",
                accumulate=2,
                clip_grad_norm=1.0,
            ),
            space=shoal.grid(lr=[1e-4, 2e-4], arm=[arm]),
            steps=STEPS,
            metric="train_loss",
            directory=directory,
            checkpoint_every="10h",
        )
        study.run(
            hardware=shoal.Hardware.parse("cuda:0", "64MiB"),
            technique=shoal.Spilled(shards=BLOCKS + 2, optimizer="host", transfer="fp32", **how),
            callbacks=[watch],
            progress=False,
        )
    began = max(times[WARM_UP] for times in ends.values())
    ended = min(times[-1] for times in ends.values())
    if len(ends) < TRIALS or began >= ended:
        raise RuntimeError("the trials did not share the device")
    inside = [(max(a, began), min(b, ended)) for a, b in spans if b > began and a < ended]
    steps = sum(began < end <= ended for times in ends.values() for end in times)
    slower = clock().slower
    return {
        "step_ms": 1e3 * (ended - began) / slower / steps,
        "busy": length(inside) / (ended - began),
        "steps": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    options = parser.parse_args()
    if os.environ.get("SHOAL_CUDA_STANDIN") != "1":  # it is installed where Python starts
        path = os.pathsep.join([str(STANDIN), *filter(None, [os.environ.get("PYTHONPATH")])])
        settings = {"SHOAL_CUDA_STANDIN": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        settings["SHOAL_CUDA_STANDIN_MEMORY"] = str(2 * 10**9)
        done = subprocess.run([sys.executable, *sys.argv], env=os.environ | settings, check=False)
        sys.exit(done.returncode)
    import common

    in_pairs()
    found: dict[str, Any] = {}
    for _ in range(options.rounds):
        for name, how in ARMS.items():
            for arm in ("at once", "ahead"):
                row = run(arm, how)
                print(f"{name}, {arm}: {row['step_ms']:.1f} ms a step, busy {row['busy']:.2f}")
                for key, value in row.items():
                    found.setdefault(f"{name}, {arm}", {}).setdefault(key, []).append(value)
    common.finish(found, options.json)


if __name__ == "__main__":
    main()
