"""A GPT four times larger than its device, beside plain PyTorch with checkpointing.

    python benchmarks/spill/run.py [--rounds 5] [--json FILE]

Both arms train the same model on the same batches with the same kernels, and both
recompute every block; only shoal's keeps within the budget. CPU time, because copies cost
CPU here. Bytes over each link are compared with the closed formula, the measured peak
with the prediction.
"""

from __future__ import annotations

import argparse
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
from shoal.core.plan import Plan, Spilled
from shoal.examples.gpt import GPT

WIDTH, DEPTH, HEADS, CONTEXT, BATCH = 256, 16, 4, 128, 4  # 512 tokens a step
STEPS, WARM_UP = 8, 2


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


def plain_cpu_seconds() -> float:
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
        loss(net(batch[0]), batch).backward()
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


def formula(plan: Plan) -> dict[str, int]:
    """Bytes a step over each link: 2K - 1 loads, and what the step's place needs."""
    shards = plan.jobs[0].shards
    technique = plan.jobs[0].technique
    assert isinstance(technique, Spilled)
    loads = sum(s.parameter_bytes for s in shards[:-1]) + sum(s.parameter_bytes for s in shards)
    if technique.optimizer == "host":
        return {"up": loads, "down": sum(s.gradient_bytes for s in shards)}
    state = sum(s.state_bytes for s in shards)
    return {"up": loads + state, "down": sum(s.owned_bytes for s in shards) + state}


def shoal_run(optimizer: Any, budget: int, pool: Any) -> tuple[float, dict[str, Any]]:
    """CPU seconds a step of the worker, and what was moved and held."""
    watch = _Watch()
    recipe = shoal.Recipe(model=model, data=data, loss=loss)
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
            technique=shoal.Spilled(optimizer=optimizer),
            callbacks=[watch],
            progress=False,
            workers=pool,
        )
        plan = Plan.from_json((Path(directory) / "spill" / "plan.json").read_text())
    expected = formula(plan)
    assert watch.peak is not None
    seconds = (watch.end - watch.begin) / STEPS
    return seconds, {
        "shards": len(plan.jobs[0].shards),
        "bytes_a_step": watch.moved[STEPS],
        "formula": expected,
        "bytes_equal_formula": all(m == expected for m in watch.moved.values()),
        "budget": budget,
        "predicted_peak": watch.peak.predicted_bytes,
        "measured_peak": watch.peak.peak_bytes,
        "measured_over_predicted": watch.peak.peak_bytes / watch.peak.predicted_bytes,
        "within_budget": watch.peak.peak_bytes <= budget,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    from shoal.runtime.pool import WorkerPool

    budget = state_bytes() // 4
    details: dict[str, Any] = {}

    def arm(place: str, pool: Any) -> float:
        seconds, details[place] = shoal_run(place, budget, pool)
        return seconds

    with WorkerPool() as pool:
        figures = common.interleaved(
            {
                "plain with checkpointing": plain_cpu_seconds,
                "host": lambda: arm("host", pool),
                "device": lambda: arm("device", pool),
            },
            options.rounds,
        )
    base = "plain with checkpointing"
    result = {
        "tokens_a_step": BATCH * CONTEXT,
        "state_bytes": state_bytes(),
        "state_over_budget": state_bytes() / budget,
        "cpu_seconds_a_step": {name: common.spread(values) for name, values in figures.items()},
        "over_plain": {p: common.ratios(figures, p, base) for p in ("host", "device")},
        "shoal": details,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024,
    }
    common.finish(result, options.json)


if __name__ == "__main__":
    main()
