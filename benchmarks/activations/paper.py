"""GPT blocks on paper: what keeping, recomputing and moving activations costs on a real device.

Bytes that a block's forward saves are counted on a small block; seconds are those of a profile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from shoal.core.profile import Profile
from shoal.core.spec import ShardSpec
from shoal.core.technique import Spilled
from shoal.core.units import Bytes
from shoal.examples.gpt import Block
from shoal.partition.savedset import SavedSet
from shoal.partition.wires import Wire, storage_key
from shoal.planner.keep import keep_best
from shoal.planner.need import Request, need
from shoal.planner.price import Speeds, price
from shoal.planner.room import Room
from shoal.testing import make_measure, make_shard

BLOCKS = 32
STEP_BYTES = 34  # of the host's memory, a parameter: AdamW whose weights travel as bfloat16
ARMS = {
    "recompute": Spilled(recompute=True),
    "keep": Spilled(spill_activations=()),
    "move too": Spilled(),
}
ROOM = 3  # saved sets for which the budget has room beside what recomputing needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A GPT of ``BLOCKS`` blocks in bf16, each a shard, and its tokens a step."""

    profile: Profile
    width: int
    context: int
    windows: int = 1

    @property
    def tokens(self) -> int:
        return self.windows * self.context

    def shards(self) -> list[ShardSpec]:
        """Blocks that travel as bfloat16; the last one stands for the head."""
        width, tokens = self.width, self.tokens
        parameters = 12 * width**2
        products, scores = 24 * width**2 * tokens, 4 * self.context * width * tokens
        seconds = [
            self.profile.kernel_seconds(flops, "bf16")
            for flops in (products + scores, 3 * products + 3.5 * scores)
        ]
        saved = Bytes(round(saved_by_token(64) / 64 * width * tokens))
        stream = Bytes(4 * width * tokens)  # autocast leaves the residual stream in float32
        return [
            make_shard(
                index,
                2 * parameters,
                layers=(index, index + 1),
                state_bytes=Bytes(8 * parameters),
                boundary_bytes=stream if index else Bytes(0),
                private_bytes=stream if index else Bytes(0),
                carry_bytes=stream if index else Bytes(0),
                saved_bytes=saved if index < BLOCKS - 1 else None,
                movable_bytes=saved if index < BLOCKS - 1 else None,
                saving_peak_bytes=saved,
                forward_peak_bytes=stream,
                backward_peak_bytes=Bytes(saved + stream + 2 * parameters),
                step_peak_bytes=Bytes(0),
                forward_s=seconds[0],
                backward_s=seconds[1],
                step_s=self.profile.host_seconds(STEP_BYTES * parameters),
            )
            for index in range(BLOCKS)
        ]


def saved_by_token(width: int) -> float:
    """Bytes that a block of this width saves a token in bf16, less its input and its weights.

    The casts of weights are left out too: they travel as bfloat16.
    """
    block, tokens = Block(width, 4, 0.0), 64
    x_BTC = torch.randn(1, tokens, width)
    names = [name for name, _ in block.named_parameters()]
    saved = SavedSet(block, names, {Wire(0, "out.0"): x_BTC})
    with torch.autocast("cpu", torch.bfloat16), saved.saving(torch.device("cpu")):
        output = block(x_BTC.requires_grad_())
    kept = sum(cell.num_bytes for cell in saved.movable({storage_key(output)}))
    casts = 2 * sum(p.numel() for p in block.parameters() if p.dim() > 1)
    return (kept - casts) / tokens


def figures(case: Case) -> dict[str, object]:
    """Seconds of a step, at one budget, by what may be done with activations."""
    shards, profile = case.shards(), case.profile
    request = Request(micro_batches=1, clip=False, technique=None, prefers="host", mixes=False)
    measure = make_measure(shards=shards, batch_bytes=Bytes(0))
    speeds = Speeds(
        up_bytes_per_s=profile.up_bytes_per_s, down_bytes_per_s=profile.down_bytes_per_s
    )
    base = Spilled(
        shards=BLOCKS, optimizer="host", lookahead=1, lookbehind=1, keep=(), boundaries="host"
    )
    least = need(measure, shards, _with(base, Spilled(recompute=True)), request).total
    budget = Bytes(least + ROOM * (shards[1].saved_bytes or 0))
    row: dict[str, object] = {
        "profile": profile.name,
        "width": case.width,
        "context": case.context,
        "tokens": case.tokens,
        "budget_bytes": budget,
        "saved_bytes": shards[1].saved_bytes,
        "forward_s": shards[1].forward_s,
    }
    for name, arm in ARMS.items():
        room = Room(
            measure=measure,
            shards=shards,
            technique=_with(base, arm),
            request=request,
            budget=budget,
            active=1,
        )
        found = keep_best(room, speeds)
        assert found is not None
        technique = found[0]
        took = price(shards, measure.batch_bytes, technique, request, speeds, 1)
        row[name] = {
            "step_s": took.step_s,
            "busy": took.busy,
            "keep": len(technique.keep_activations or ()),
            "move": len(technique.spill_activations or ()),
        }
    return row


def _with(base: Spilled, arm: Spilled) -> Spilled:
    """``base`` with what an arm says of activations."""
    return replace(base, recompute=arm.recompute, spill_activations=arm.spill_activations)
