"""A step on the host with its float32 in two parts, beside float32 and a bfloat16 copy.

    python benchmarks/spill/split.py [--rounds 9] [--json FILE]

Four matrices of 2048 x 2048 and fused AdamW, with gradients that came as bfloat16: what the
host does for one shard of such weights in a step, one matrix after the other. The arms have
regions of their own and the same values, and are compared to the bit when they are through.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import common
from shoal.core.technique import Spilled
from shoal.memory.layout import TrialLayout, as_it_travels, lay_out, split_bytes
from shoal.memory.split import split_weights, write_params
from shoal.memory.store import Region, create_region, describe
from shoal.runtime.placing.binding import Binding
from shoal.runtime.placing.placed import Placed, place_on_host

WIDTH, MATRICES = 2048, 4
WHOLE, SPLIT = "float32 and a bfloat16 copy", "in two parts"
ASKED = Spilled(shards=1, optimizer="host", keep=(), transfer="bf16")
TECHNIQUES = {WHOLE: ASKED, SPLIT: replace(ASKED, master="split")}


@dataclass
class Arm:
    """One way to keep the weights, and what a step needs."""

    layout: TrialLayout
    region: Region
    host: Placed
    binding: Binding
    memory: Tensor | None
    steps: int = 0

    def step(self) -> float:
        """Seconds of one step."""
        began = time.perf_counter()
        for part, names in self.binding.pieces[0]:
            grads = {name: self.host.grads[name].float() for name in names}
            self.binding.step_on_host(part, self.host, grads, self.steps, self.memory)
            self.host.renew_copies(names)
        self.steps += 1
        return time.perf_counter() - began

    def weights(self) -> dict[str, Tensor]:
        """In float32."""
        found = {name: w.whole() for name, w in self._split().items()}
        return found or dict(self.host.params)

    def _split(self):
        return split_weights(self.region.bytes, self.layout.shards[0])


def arm(technique: Spilled) -> Arm:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(MATRICES)))
    names = [name for name, _ in model.named_parameters()]
    specs = {name: describe(name, p) for name, p in model.named_parameters()}
    keys = ("exp_avg", "exp_avg_sq")
    states = {name: [replace(specs[name], key=key) for key in keys] for name in names}
    layout = as_it_travels(lay_out([names], [[]], specs, states, []), technique, names, sums=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    chunks = {0: [[name] for name in names]}
    binding = Binding(model, optimizer, [names], torch.device("cpu"), chunks=chunks)
    descriptor = create_region("split", layout.num_bytes)
    region = Region(descriptor, layout.num_bytes)
    os.close(descriptor)
    write_params(region.bytes, layout.shards[0], binding.params)
    host = place_on_host(region, layout, 0)
    host.renew_copies()
    for number, grad in enumerate(host.grads.values()):
        generator = torch.Generator().manual_seed(number)
        grad.copy_(torch.randn(grad.shape, generator=generator))
    room = max(split_bytes(layout.shards[0], [name]) for name in names)
    memory = torch.empty(room, dtype=torch.uint8) if room else None
    return Arm(layout, region, host, binding, memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    arms = {name: arm(technique) for name, technique in TECHNIQUES.items()}
    for each in arms.values():  # memory that nobody has touched, and state that is not there
        each.step()
        each.step()
    measured = {name: functools.partial(Arm.step, each) for name, each in arms.items()}
    figures = common.interleaved(measured, options.rounds)
    count = MATRICES * WIDTH * WIDTH
    first, other = (each.weights() for each in arms.values())
    grads = {name: each.layout.shards[0].grad.num_bytes for name, each in arms.items()}
    result = {
        "parameters": count,
        "seconds_a_step": {name: common.spread(values) for name, values in figures.items()},
        "split_over_whole": common.ratios(figures, SPLIT, WHOLE),
        "bytes_a_parameter": {name: a.layout.num_bytes / count for name, a in arms.items()},
        "without_gradients": {
            name: (a.layout.num_bytes - grads[name]) / count for name, a in arms.items()
        },
        "bytes_of_a_chunk": arms[SPLIT].memory.numel(),
        "same_bits": all(torch.equal(first[name], other[name]) for name in first),
    }
    common.finish(result, options.json)


if __name__ == "__main__":
    main()
