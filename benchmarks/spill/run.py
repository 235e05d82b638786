"""A GPT four times larger than its device, beside plain PyTorch with checkpointing.

    python benchmarks/spill/run.py [--rounds 5] [--precision bf16] [--json FILE]

All arms train the same model on the same batches with the same kernels, and all recompute
every block; only shoal's keep within the budget. Two of these keep on the device what fits
there, two let every shard travel. CPU time, because copies cost CPU here. Bytes over each
link are compared with the closed formula, the measured peak with the prediction. In bf16 the
arms step on the host, with weights that travel as bfloat16 and with whole ones.
"""

from __future__ import annotations

import argparse
import functools
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[1]))
import common
import shoal
from shoal.core.event import ActionFinished, Event, PeakMeasured, StepFinished
from shoal.core.plan import Job, Plan
from shoal.core.technique import Spilled
from shoal.examples.gpt import GPT
from shoal.planner.need import moved_saved_bytes
from shoal.program.costs import part_bytes
from shoal.program.ir import Part

WIDTH, DEPTH, HEADS, CONTEXT, BATCH = 256, 16, 4, 128, 4  # 512 tokens a step
STEPS, WARM_UP = 8, 2
PLAIN = "plain with checkpointing"
ARMS: dict[str, dict[str, Spilled]] = {
    "fp32": {
        "host": Spilled(optimizer="host"),
        "device": Spilled(optimizer="device"),
        "host, nothing kept": Spilled(optimizer="host", keep=(), recompute=True),
        "device, nothing kept": Spilled(optimizer="device", keep=(), recompute=True),
    },
    "bf16": {
        "host": Spilled(optimizer="host", transfer="bf16"),
        "host, whole weights": Spilled(optimizer="host", transfer="fp32"),
        "nothing kept": Spilled(optimizer="host", keep=(), recompute=True, transfer="bf16"),
        "nothing kept, whole weights": Spilled(
            optimizer="host", keep=(), recompute=True, transfer="fp32"
        ),
    },
}


def model(hp: Any) -> nn.Module:
    return GPT(width=WIDTH, depth=DEPTH, heads=HEADS, context=CONTEXT, dropout=0.1)


def data(hp: Any) -> tuple[list[tuple[Tensor, Tensor]], None]:
    generator = torch.Generator().manual_seed(0)
    windows = [
        torch.randint(256, (BATCH, CONTEXT + 1), generator=generator)
        for _ in range(STEPS + WARM_UP)
    ]
    return [(w[:, :-1].contiguous(), w[:, 1:].contiguous()) for w in windows], None


def loss(output: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def state_bytes() -> int:
    """Parameters, gradients and AdamW's two moments."""
    return 16 * sum(p.numel() for p in model({}).parameters())


class _Checkpointed(nn.Module):
    """A block whose activations are recomputed in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def plain_cpu_seconds(precision: str) -> float:
    """CPU seconds a step of plain PyTorch with per-block checkpointing."""
    torch.manual_seed(0)
    net = model({})
    net.blocks = nn.ModuleList(_Checkpointed(block) for block in net.blocks)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    begin = 0.0
    for step, batch in enumerate(data({})[0]):
        if step == WARM_UP:
            begin = time.process_time()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            found = loss(net(batch[0]), batch)
        found.backward()
        optimizer.step()
    return (time.process_time() - begin) / STEPS


def worker_cpu_seconds(pid: int) -> float:
    """User and system seconds of a process so far, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


class _Watch:
    """Events of a run: CPU time at the first and last measured step, bytes, peaks."""

    def __init__(self) -> None:
        self.pid = 0
        self.begin = self.end = 0.0
        self.moved: dict[int, dict[str, int]] = {}
        self.peak: PeakMeasured | None = None

    def __call__(self, event: Event) -> None:
        if type(event).__name__ == "WorkerStarted":
            self.pid = event.pid  # type: ignore[union-attr]
        if isinstance(event, StepFinished):
            if event.step == WARM_UP:
                self.begin = worker_cpu_seconds(self.pid)
            if event.step == STEPS + WARM_UP:
                self.end = worker_cpu_seconds(self.pid)
        if isinstance(event, ActionFinished) and event.bytes:
            streams = self.moved.setdefault(event.step, {})
            streams[event.stream] = streams.get(event.stream, 0) + event.bytes
        if isinstance(event, PeakMeasured):
            self.peak = event


def formula(job: Job) -> dict[str, int]:
    """Bytes a step over each link, of one micro-batch without clipping.

    A shard that is not kept at all is loaded for its forward and for its backward. The last
    one has no forward. One whose slot nobody needs in between, because no more shards than
    ``lookahead`` come by meanwhile, is loaded once, and so are as many before as hold their
    parameters over the turn. With the step on the host gradients go
    down; on the device the state goes both ways and the parameters go down, unless they stay.
    Who borrows tied parameters loads them with its own; who lends them and stays stores them.
    Inputs that wait on the host go there and come back. Of a shard with a head the rest moves.
    """
    technique = job.technique
    assert isinstance(technique, Spilled)
    keep, last = technique.keep or (), len(job.shards) - 1
    travel = [shard for shard in job.shards if shard.index not in keep]
    loaded = [shard for shard in travel if shard.index not in technique.keep_weights]
    up = 0
    for shard in loaded:
        come_by = sum(other.index > shard.index for other in travel)
        stays = come_by <= (technique.lookahead or 0) + (technique.keep_turn or 0)
        up += part_bytes(shard, Part.PARAM) * (1 if shard.index == last or stays else 2)
    if technique.optimizer == "host":
        down = sum(shard.gradient_bytes for shard in travel)
    else:
        states = sum(part_bytes(shard, Part.STATE) for shard in travel)
        up += states
        borrowed = sum(shard.parameter_bytes - shard.owned_bytes for shard in loaded)
        down = states + sum(part_bytes(shard, Part.PARAM) for shard in loaded) - borrowed
    borrows = any(shard.parameter_bytes > shard.owned_bytes for shard in job.shards)
    if borrows and job.shards[0] not in loaded:  # the token embedding, which the head borrows
        down += job.shards[0].owned_bytes
    if technique.boundaries == "host":
        nearest = last - 1 - (technique.lookahead or 0)  # from there on they stay
        recomputed = set(range(1, nearest)) - set(technique.keep_activations or ())  # or moved
        waiting = sum(job.shards[shard].private_bytes for shard in recomputed)
        up, down = up + waiting, down + waiting
    saved = moved_saved_bytes(job.shards, technique)
    return {"up": up + saved, "down": down + saved}


def stays(job: Job) -> int:
    """Bytes that come to the device before the first step, and leave it after the last."""
    technique = job.technique
    assert isinstance(technique, Spilled)
    whole = [s for s in job.shards if s.index in (technique.keep or ())]
    weights = [s for s in job.shards if s.index in technique.keep_weights]
    params = sum(s.parameter_bytes for s in (*whole, *weights))
    return params + sum(s.state_bytes for s in whole) + sum(s.head_bytes for s in job.shards)


def expected(job: Job) -> dict[int, dict[str, int]]:
    """Bytes by step, as they are told: what comes first with the first, what leaves after all."""
    each, extra = formula(job), stays(job)
    steps = {step: dict(each) for step in range(1, STEPS + WARM_UP + 1)}
    if extra:
        steps[1]["up"] += extra
        steps[STEPS + WARM_UP + 1] = {"down": extra}
    return steps


def shoal_run(
    technique: Spilled, precision: str, budget: int, pool: Any
) -> tuple[float, dict[str, Any]]:
    """CPU seconds a step of the worker, and what was moved and held."""
    watch = _Watch()
    recipe = shoal.Recipe(model=model, data=data, loss=loss, precision=precision)
    with tempfile.TemporaryDirectory() as directory:
        study = shoal.Study(
            "spill",
            recipe,
            space={"lr": 1e-3},
            trials=1,
            steps=STEPS + WARM_UP,
            metric="train_loss",
            directory=directory,
        )
        hardware = shoal.Hardware.virtual(devices=1, memory=budget)
        study.run(
            hardware=hardware,
            technique=technique,
            callbacks=[watch],
            progress=False,
            workers=pool,
        )
        plan = Plan.from_json((Path(directory) / "spill" / "plan.json").read_text())
    job = plan.jobs[0]
    assert watch.peak is not None
    assert isinstance(job.technique, Spilled)
    seconds = (watch.end - watch.begin) / STEPS
    return seconds, {
        "shards": len(job.shards),
        "lookahead": job.technique.lookahead,
        "kept": len(job.technique.keep or ()),
        "weights_kept": len(job.technique.keep_weights),
        "activations_kept": len(job.technique.keep_activations or ()),
        "activations_moved": len(job.technique.spill_activations or ()),
        "boundaries": job.technique.boundaries,
        "transfer": job.technique.transfer,
        "bytes_a_step": watch.moved[STEPS],
        "formula": formula(job),
        "bytes_equal_formula": watch.moved == expected(job),
        "budget": budget,
        "predicted_peak": watch.peak.predicted_bytes,
        "measured_peak": watch.peak.peak_bytes,
        "measured_over_predicted": watch.peak.peak_bytes / watch.peak.predicted_bytes,
        "within_budget": watch.peak.peak_bytes <= budget,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", choices=ARMS, default="fp32")
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    from shoal.runtime.pool import WorkerPool

    budget = state_bytes() // 4
    techniques = ARMS[options.precision]
    details: dict[str, Any] = {}

    def arm(name: str, pool: Any) -> float:
        seconds, details[name] = shoal_run(techniques[name], options.precision, budget, pool)
        return seconds

    with WorkerPool() as pool:
        arms = {name: functools.partial(arm, name, pool) for name in techniques}
        plain = functools.partial(plain_cpu_seconds, options.precision)
        figures = common.interleaved({PLAIN: plain} | arms, options.rounds)
    result = {
        "tokens_a_step": BATCH * CONTEXT,
        "state_bytes": state_bytes(),
        "state_over_budget": state_bytes() / budget,
        "cpu_seconds_a_step": {name: common.spread(values) for name, values in figures.items()},
        "precision": options.precision,
        "over_plain": {name: common.ratios(figures, name, PLAIN) for name in techniques},
        "shoal": details,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024,
    }
    common.finish(result, options.json)


if __name__ == "__main__":
    main()
