"""What chunks of the host's steps are worth, on paper: who waits how long, what a mix takes.

    python benchmarks/overlap/chunks.py [--profiles h200 rtx4090] [--json FILE]

Replays, no device: the mixes of ``paper.py``, and mixes of few large shards, with steps on the
host that are one piece, and cut as ``memory/chunks.py`` cuts them. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import log2
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import paper

import common
from shoal.core.profile import PROFILES, Profile
from shoal.core.spec import ShardSpec
from shoal.core.units import Bytes, Seconds
from shoal.memory import chunks
from shoal.planner.keep import ALIKE
from shoal.planner.price import mix_s
from shoal.program.costs import JobCosts
from shoal.program.replay import Run
from shoal.spill.generate import spilled_step

BLOCK = (3, 1, 4, 4)  # tensors of a block, in squares of its width
SEEDS = range(7)
CALL_S = 1e-4  # of Python, for each chunk after the first: more than was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A transformer in shards of ``blocks`` each."""

    one: paper.Mixed
    blocks: int = 1

    def shards(self, profile: Profile, least_s: float | None) -> Iterator[ShardSpec]:
        """``least_s``: of a chunk; None for steps in one piece."""
        costs = paper.host_costs(list(map(self._of_blocks, self.one.shards(profile))), profile)
        sizes = [4 * squares * self.one.width**2 for squares in BLOCK * self.blocks]
        for shard in costs.shards:
            cut = () if least_s is None else _cut(sizes, shard.step_s, least_s)
            step_s = Seconds(shard.step_s + CALL_S * max(0, len(cut) - 1))
            yield replace(shard, step_chunks=cut, step_s=step_s)

    def _of_blocks(self, shard: ShardSpec) -> ShardSpec:
        return replace(
            shard,
            parameter_bytes=Bytes(self.blocks * shard.parameter_bytes),
            owned_bytes=Bytes(self.blocks * shard.owned_bytes),
            state_bytes=Bytes(self.blocks * shard.state_bytes),
            gradient_bytes=Bytes(self.blocks * shard.gradient_bytes),
            forward_s=Seconds(self.blocks * shard.forward_s),
            backward_s=Seconds(self.blocks * shard.backward_s),
        )

    def run(self, profile: Profile, least_s: float | None, number: int) -> Run:
        program = spilled_step(self.one.depth, clip=self.one.clip, optimizer="host", lookahead=1)
        costs = JobCosts(
            shards=tuple(self.shards(profile, least_s)),
            up_bytes_per_s=profile.up_bytes_per_s,
            down_bytes_per_s=profile.down_bytes_per_s,
        )
        return Run(program=program, costs={0: costs}, steps=self.one.steps, trial=number)


def _cut(sizes: Sequence[int], seconds: float, least_s: float) -> tuple[Bytes, ...]:
    before, chunks.CHUNK_S = chunks.CHUNK_S, least_s
    try:
        return chunks.chunk_bytes(sizes, seconds)
    finally:
        chunks.CHUNK_S = before


def few_shards(seed: int, profile: Profile, *, length_s: float) -> list[Trial]:
    """Three trials of four shards, of 1 to 16 blocks and widths that differ by a factor of 4."""
    draw, found = random.Random(seed), []
    for blocks, width in ((1, 1024), (4, 2048), (16, 4096)):
        tokens = round(paper.balanced_tokens(profile) * 2 ** draw.uniform(-log2(4), log2(4)))
        one = paper.Mixed(depth=4, width=width, tokens=tokens, clip=draw.random() < 0.5, steps=1)
        trial = Trial(one=one, blocks=blocks)
        alone_s = paper.demand(
            spilled_step(4, clip=one.clip, optimizer="host", lookahead=1),
            trial.run(profile, None, 0).costs[0],
        ).roofline_s
        steps = max(3, round(draw.uniform(1, 2) * length_s / alone_s))
        found.append(replace(trial, one=replace(one, steps=steps)))
    return found


# -- who waits ----------------------------------------------------------------------------


class _Waiting(paper._Paper):
    """Notes how long steps wait at the host for one that would go after them."""

    def __init__(self, runs: Sequence[Run], slowdown: float) -> None:
        self.waits: list[float] = []
        self._owner: Any = None
        self._since: list[float] = []
        super().__init__(runs, len(runs), slowdown)

    def _transfer(self, lane: Any, stream: Any) -> None:
        link = lane.device.links.get("host")
        if stream == "host" and link is not None and link.busy and self._owner is not None:
            lanes = [self._owner, *(waiting for waiting, _ in link.ready), lane]
            ready = [x.candidate(x.queues["host"][0][0]) for x in lanes]
            if self._choose(ready) == len(link.ready) + 1:
                self._since.append(self._now)
        super()._transfer(lane, stream)

    def _start(self, lane: Any, round_: Any, index: int) -> None:
        if lane.lines[index].stream == "host":
            self._owner = lane
            self.waits += [self._now - since for since in self._since]
            self._since.clear()
        super()._start(lane, round_, index)


@dataclass(frozen=True, slots=True)
class Found:
    """Of one mix: what it takes, and how long urgent steps wait."""

    makespan_s: float
    roofline: float
    waits: tuple[float, ...]


def play(mix: Sequence[Trial], profile: Profile, least_s: float | None) -> Found:
    runs = [trial.run(profile, least_s, number) for number, trial in enumerate(mix)]
    whole = paper.total(
        paper.demand(run.program, trial.run(profile, None, 0).costs[0]).times(run.steps)
        for run, trial in zip(runs, mix, strict=True)
    )
    paper_ = _Waiting(runs, paper.slower(profile))
    paper_.run()
    took_s = paper_.timeline().makespan_s
    return Found(took_s, whole.roofline_s / took_s, tuple(paper_.waits))


def describe(found: Iterable[Found]) -> dict[str, float]:
    every = list(found)
    waits = sorted(wait for one in every for wait in one.waits)
    at = round(0.99 * (len(waits) - 1)) if waits else 0
    return {
        "roofline": median(one.roofline for one in every),
        "least": min(one.roofline for one in every),
        "waits": len(waits),
        "mean_wait_ms": 1e3 * sum(waits) / max(1, len(waits)),
        "p99_wait_ms": 1e3 * waits[at] if waits else 0.0,
        "longest_wait_ms": 1e3 * waits[-1] if waits else 0.0,
    }


def compare(mixes: Sequence[Sequence[Trial]], profile: Profile) -> dict[str, Any]:
    """For each length of a chunk; ``gain`` is the median of the mixes' ratios."""
    whole = [play(mix, profile, None) for mix in mixes]
    found: dict[str, Any] = {"whole": describe(whole)}
    for least_s in (0.05, 0.02, 0.01, 0.005, 0.0):
        cut = [play(mix, profile, least_s) for mix in mixes]
        gains = [a.makespan_s / b.makespan_s for a, b in zip(whole, cut, strict=True)]
        name = f"{1e3 * least_s:.0f} ms" if least_s else "each tensor"
        found[name] = describe(cut) | _spread(gains)
        if least_s == chunks.CHUNK_S:
            planned = [
                a if whole_is_sooner(mix, profile) else b
                for mix, a, b in zip(mixes, whole, cut, strict=True)
            ]
            gains = [a.makespan_s / b.makespan_s for a, b in zip(whole, planned, strict=True)]
            found["as planned"] = describe(planned) | _spread(gains)
    return found


def _spread(gains: Sequence[float]) -> dict[str, float]:
    return {"gain": median(gains), "most": max(gains), "fewest": min(gains)}


def whole_is_sooner(mix: Sequence[Trial], profile: Profile) -> bool:
    """Whether the planner leaves steps in one piece: its replay is of a few steps of each."""
    took_s = {
        least_s: mix_s([t.run(profile, least_s, n) for n, t in enumerate(mix)], len(mix))
        for least_s in (None, chunks.CHUNK_S)
    }
    return took_s[None] * ALIKE <= took_s[chunks.CHUNK_S]


def mixes_of(kind: str, profile: Profile) -> list[list[Trial]]:
    length_s = 30 * PROFILES["h200"].host_bytes_per_s / profile.host_bytes_per_s
    if kind == "few":
        return [few_shards(seed, profile, length_s=length_s) for seed in SEEDS]
    drawn = [paper.random_mix(seed, profile, length_s=length_s) for seed in SEEDS]
    count = {"six": 6, "three": 3, "two": 2}[kind]
    return [[Trial(one=one) for one in mix[:count]] for mix in drawn]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profiles", nargs="+", default=["h200", "rtx4090"])
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name in options.profiles:
        profile = PROFILES[name]
        kinds = ("two", "three", "six", "few")
        results[name] = {kind: compare(mixes_of(kind, profile), profile) for kind in kinds}
        for kind, rows in results[name].items():
            print(f"{name}, {kind}")
            for length, row in rows.items():
                values = "  ".join(f"{key} {value:.4g}" for key, value in row.items())
                print(f"  {length:12}{values}")
    common.finish({"profiles": results}, options.json)


if __name__ == "__main__":
    main()
