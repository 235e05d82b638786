"""One resident trial, no tricks: shoal beside a hand-written PyTorch loop.

python benchmarks/ordinary/run.py [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))
import common
import shoal
from shoal.core.event import Event, StepFinished
from shoal.observe import read_events
from shoal.workerenv import worker_environment

WARM_UP = 10
STEPS = {"mlp": 2000, "gpt": 120}


def mlp(hp: Any) -> nn.Module:
    """A classifier of tabular rows: 0.3 M parameters, about two milliseconds a step."""
    return nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def gpt(hp: Any) -> nn.Module:
    """A small byte-level language model, about forty milliseconds a step."""
    from shoal.examples.gpt import GPT

    return GPT(width=128, depth=4, heads=4, context=64, dropout=0.1)


def mlp_loss(output: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(output, batch[1])


def gpt_loss(output: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def rows(kind: str, workers: int) -> DataLoader[Any]:
    """A shuffling DataLoader with enough batches for one epoch of the benchmark."""
    generator = torch.Generator().manual_seed(0)
    count = STEPS[kind] + WARM_UP
    if kind == "mlp":
        x = torch.randn(count * 128, 64, generator=generator)
        y = torch.randint(10, (count * 128,), generator=generator)
        return DataLoader(TensorDataset(x, y), 128, shuffle=True, num_workers=workers)
    x = torch.randint(256, (count * 8, 65), generator=generator)
    data = TensorDataset(x[:, :-1].contiguous(), x[:, 1:].contiguous())
    return DataLoader(data, 8, shuffle=True, num_workers=workers)


MODELS = {"mlp": (mlp, mlp_loss), "gpt": (gpt, gpt_loss)}


def plain_seconds(kind: str, workers: int) -> float:
    """Seconds a step of the loop anyone would write, after warming up."""
    model_, loss_ = MODELS[kind]
    torch.manual_seed(0)
    model = model_({})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    begin = end = 0.0
    for step, batch in enumerate(rows(kind, workers)):
        if step == WARM_UP:
            begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = loss_(model(batch[0]), batch)
        loss.backward()
        optimizer.step()
        loss.item()
        end = time.perf_counter()
    return (end - begin) / STEPS[kind]


def kept_seconds(kind: str, workers: int) -> float:
    """The same in a process that keeps its memory as shoal's workers do."""
    command = [sys.executable, str(Path(__file__)), "--plain", kind, str(workers)]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=worker_environment()
    )
    return float(done.stdout)


def recipe(kind: str, workers: int) -> shoal.Recipe:
    model_, loss_ = MODELS[kind]
    return shoal.Recipe(model=model_, data=lambda hp: (rows(kind, workers), None), loss=loss_)


def shoal_seconds(kind: str, workers: int, pool: Any) -> float:
    """Seconds a step of the same training as a study of one trial."""
    times: dict[int, float] = {}

    def watch(event: Event) -> None:
        if isinstance(event, StepFinished):
            times[event.step] = event.time

    with tempfile.TemporaryDirectory() as directory:
        study = shoal.Study(
            "ordinary",
            recipe(kind, workers),
            space={"lr": 1e-3},
            trials=1,
            steps=STEPS[kind] + WARM_UP,
            metric="train_loss",
            directory=directory,
        )
        hardware = shoal.Hardware.virtual(devices=1, memory="512MiB")
        study.run(hardware=hardware, callbacks=[watch], progress=False, workers=pool)
    last = max(times)
    return (times[last] - times[WARM_UP]) / (last - WARM_UP)


START = """
import sys
sys.path.insert(0, {here!r})
import run
import shoal
study = shoal.Study("start", run.recipe("mlp", 0), space={{"lr": 1e-3}}, trials=1, steps=3,
                    metric="train_loss", directory={directory!r})
"""


def start_seconds() -> float:
    """From the command ``shoal run`` to the first step, less a process that imports torch."""
    began = time.time()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    importing = time.time() - began
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "start.py"
        file.write_text(START.format(here=str(Path(__file__).parent), directory=directory))
        flags = ["--devices", "cpu:1", "--device-memory", "512MiB"]
        began = time.time()
        command = [sys.executable, "-m", "shoal", "run", str(file), *flags]
        # A package that pip installed has its bytecode; a checkout may be told to write none.
        usual = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        subprocess.run(command, check=True, capture_output=True, env=usual)
        steps = (e for e in read_events(Path(directory) / "start") if isinstance(e, StepFinished))
        return next(steps).time - began - importing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    parser.add_argument("--plain", nargs=2, metavar=("MODEL", "WORKERS"), help="one loop, timed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.plain:
        print(plain_seconds(options.plain[0], int(options.plain[1])))
        return
    from shoal.runtime.pool import WorkerPool

    result: dict[str, Any] = {}
    with WorkerPool() as pool:
        for kind in MODELS:
            for workers in (0, 1):
                figures = common.interleaved(
                    {
                        "plain": lambda k=kind, w=workers: plain_seconds(k, w),
                        "kept": lambda k=kind, w=workers: kept_seconds(k, w),
                        "shoal": lambda k=kind, w=workers: shoal_seconds(k, w, pool),
                    },
                    options.rounds,
                )
                result[f"{kind}, {workers} loader workers"] = {
                    "plain_ms": common.spread([s * 1e3 for s in figures["plain"]]),
                    "shoal_ms": common.spread([s * 1e3 for s in figures["shoal"]]),
                    "kept_ms": common.spread([s * 1e3 for s in figures["kept"]]),
                    "throughput_ratio": common.ratios(figures, "plain", "shoal"),
                    "throughput_over_kept": common.ratios(figures, "kept", "shoal"),
                }
    result["start_s"] = common.spread([start_seconds() for _ in range(options.rounds)])
    common.finish(result, options.json)


if __name__ == "__main__":
    main()
