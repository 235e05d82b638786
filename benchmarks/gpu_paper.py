"""What the planner decides for the trials of gpu_large.py, on paper; needs no GPU.

    python benchmarks/gpu_paper.py [--tokens 16384] [--cap 8GiB]

The seconds of a block are those of the unspilled run that recomputes on an H200
(results/gpu-large-h200.json), bytes those that shoal measured there, links and the host's step
those of ``shoal bench``. Told first: what a step would take if the GPU computed all the time.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from shoal.core.spec import JobMeasure, LayerMeasure
from shoal.core.technique import Spilled
from shoal.core.units import Bytes, Seconds, parse_bytes
from shoal.planner.choose import choices
from shoal.planner.keep import keep_best
from shoal.planner.need import Request
from shoal.planner.predict import predict_shards
from shoal.planner.price import Speeds, price
from shoal.planner.room import Room
from shoal.testing import make_layer, make_measure

MIB = 2**20
BLOCKS, PARAMETERS, ROWS = 48, 30_740_800, 8 * 1024  # of a block; tokens of a micro-batch
LIBRARIES = 65 * MIB
LINK = 55.2e9  # bytes a second, each way
HOST_S, DEVICE_TIMES = 0.19e-9, 1 / 35  # AdamW, a parameter; on the device in times of that
FORWARD = 0.24  # of a block's seconds; the rest is its backward, which runs it again
MEASURED = Path(__file__).parent / "results" / "gpu-large-h200.json"


def layer(name: str, parameters: int, seconds: float, **sizes: int) -> LayerMeasure:
    """One whose weights travel as bfloat16; seconds of a forward and of a backward."""
    given: dict[str, Any] = {key: Bytes(size * MIB) for key, size in sizes.items()}
    return make_layer(
        name,
        2 * parameters,
        state_bytes=Bytes(8 * parameters),
        gradient_bytes=Bytes(4 * parameters),  # sums of several micro-batches
        forward_s=Seconds(FORWARD * seconds),
        backward_s=Seconds((1 - FORWARD) * seconds),
        step_s=Seconds(HOST_S * parameters),
        **given,
    )


def measure(block_s: float) -> JobMeasure:
    """The GPT, as it was measured; what goes from block to block is in float32. MiB."""
    stream: dict[str, Any] = dict.fromkeys(("boundary_bytes", "private_bytes", "carry_bytes"), 50)
    block = {"forward_peak_bytes": 289, "saved_bytes": 488, "backward_peak_bytes": 646}
    first = {"forward_peak_bytes": 106, "saved_bytes": 1, "backward_peak_bytes": 106}
    last = {"forward_peak_bytes": 80, "saved_bytes": 60, "backward_peak_bytes": 101}
    layers = [
        layer("embedding", 2_048_000, 0.3e-3, **stream, **first),
        *(layer(f"block {i}", PARAMETERS, block_s, **stream, **block) for i in range(BLOCKS)),
        layer("head", 412_800, 0.4e-3, boundary_bytes=0, **last),
    ]
    return make_measure(layers, batch_bytes=Bytes(16 * ROWS))


def on_paper(
    found: JobMeasure, micro_batches: int, cap: int, active: int
) -> dict[str, Any] | None:
    """What is taken for so many trials at a time; None: nothing fits."""
    request = Request(
        micro_batches=micro_batches, clip=True, technique=None, prefers="device", mixes=False
    )
    speeds = Speeds(up_bytes_per_s=LINK, down_bytes_per_s=LINK, device_step=DEVICE_TIMES)
    budget = Bytes(cap - LIBRARIES)
    for choice in choices(found, budget, (active,), request, speeds):
        shards = predict_shards(found.layers, choice.cuts)
        room = Room(
            measure=found,
            shards=shards,
            technique=choice.technique,
            request=request,
            budget=budget,
            active=active,
            layout=None,
        )
        kept = keep_best(room, speeds)
        if kept is None:
            continue
        technique, _ = kept
        cost = price(shards, found.batch_bytes, technique, request, speeds, active)
        assert isinstance(technique, Spilled)
        return {
            "shards": len(shards),
            "optimizer": technique.optimizer,
            "order": technique.order,
            "busy": cost.busy,
            "step_s": cost.step_s,
        }
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2 * ROWS)
    parser.add_argument("--cap", default="8GiB")
    options = parser.parse_args()
    micro_batches, cap = options.tokens // ROWS, parse_bytes(options.cap)
    stages = json.loads(MEASURED.read_text())["stages"]
    passes = 2 * BLOCKS  # of the run that was measured
    found = measure((stages["recompute 16384"]["step_s"] - 0.02) / passes)  # less its optimizer
    ideal = micro_batches * sum(one.forward_s + one.backward_s for one in found.layers)
    unspilled = [stages[f"{name} 16384"]["tokens_a_second"] for name in ("recompute", "fastest")]
    print(f"{options.tokens} tokens a step under {options.cap}; kernels alone take {ideal:.3f} s.")
    print("trials  shards  step on  order   ms a step  busy  tokens/s  of recompute  of fastest")
    for active in (1, 2, 3, 4):
        one = on_paper(found, micro_batches, cap, active)
        if one is None:
            print(f"{active:6}  nothing fits")
            continue
        rate = options.tokens / one["step_s"]
        ratios = [rate / other for other in unspilled]
        print(
            f"{active:6}  {one['shards']:6}  {one['optimizer']:7}  {one['order']:6}"
            f"  {1e3 * one['step_s']:9.0f}  {one['busy']:4.2f}  {rate:8.0f}  {ratios[0]:12.2f}"
            f"  {ratios[1]:10.2f}"
        )


if __name__ == "__main__":
    main()
