"""What durability costs: saving, resuming, and bytes on disk against the plan's.

python benchmarks/durability/run.py [--rounds 3] [--json FILE]

A study of spilled and resident GPTs runs with and without saving, in turn. The default is a
generation each five minutes; here it is each ``EVERY_S`` seconds, so that there is something
to measure, and what one generation costs is scaled. The database has a file of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import common
import shoal
from shoal.core.event import CheckpointWritten, Event, StepFinished
from shoal.examples.gpt import GPT
from shoal.launch.policy import CheckpointPolicy
from shoal.observe import read_events
from shoal.runtime.pool import WorkerPool

EVERY_S = 1.0
DEFAULT_S = 300.0
STEPS, WARM_UP, BATCH, CONTEXT = 120, 5, 4, 64
NEVER_S = 1e9


def model(hp: Any) -> nn.Module:
    return GPT(width=256, depth=8, heads=4, context=CONTEXT, dropout=0.1)


def data(hp: Any) -> tuple[list[tuple[Tensor, Tensor]], None]:
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(256, (16, BATCH, CONTEXT + 1), generator=generator)
    return [(w[:, :-1].contiguous(), w[:, 1:].contiguous()) for w in windows], None


def loss(output: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())


RECIPE = shoal.Recipe(model=model, data=data, loss=loss)
MEMORY = {"spilled": "24MiB", "resident": "512MiB"}


def study_of(directory: str, every_s: float) -> shoal.Study:
    """One trial of 6.4 M parameters: 73 MiB of weights and optimizer state."""
    return shoal.Study(
        "durability",
        RECIPE,
        space={"lr": 1e-3},
        trials=1,
        steps=STEPS,
        metric="train_loss",
        directory=directory,
        checkpoint_every=every_s,
    )


class _Watch:
    """Times of the steps, and the generations that were written."""

    def __init__(self) -> None:
        self.times: dict[int, float] = {}
        self.saved: list[CheckpointWritten] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepFinished):
            self.times[event.step] = event.time
        if isinstance(event, CheckpointWritten) and event.step < STEPS:
            self.saved.append(event)

    @property
    def seconds(self) -> float:
        """From the end of the warm-up to the last step."""
        return self.times[STEPS] - self.times[WARM_UP]


def train(kind: str, every_s: float, pool: WorkerPool, found: list[_Watch]) -> float:
    """Seconds of a run's steps; what was seen is added to ``found``."""
    watch = _Watch()
    with tempfile.TemporaryDirectory() as directory:
        hardware = shoal.Hardware.virtual(devices=1, memory=MEMORY[kind])
        study_of(directory, every_s).run(
            hardware=hardware,
            technique=kind,
            callbacks=[watch],
            progress=False,
            workers=pool,
            timeline=False,
        )
    found.append(watch)
    return watch.seconds


def overhead(kind: str, rounds: int, pool: WorkerPool) -> dict[str, Any]:
    """The share of a run's time that saving takes, at EVERY_S and at the default."""
    seen: list[_Watch] = []
    figures = common.interleaved(
        {
            "never": lambda: train(kind, NEVER_S, pool, []),
            "saving": lambda: train(kind, EVERY_S, pool, seen),
        },
        rounds,
    )
    each = [
        (with_ - without) / max(1, len(watch.saved))
        for with_, without, watch in zip(figures["saving"], figures["never"], seen, strict=True)
    ]
    return {
        "bytes_of_a_generation": seen[0].saved[0].bytes if seen[0].saved else None,
        "generations": [len(watch.saved) for watch in seen],
        "seconds_to_write": common.spread([s.seconds for watch in seen for s in watch.saved]),
        "time_over_never_saving": common.ratios(figures, "saving", "never"),
        "seconds_lost_for_each": common.spread(each),
        "share_at_the_default": common.spread([s / DEFAULT_S for s in each]),
    }


FILE = """
import sys
sys.path.insert(0, {here!r})
import run
study = run.study_of({directory!r}, {every})
study.steps = {steps}
"""


def resume_seconds() -> dict[str, float]:
    """From the command to the first new step, less a process that imports torch."""
    began = time.time()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    importing = time.time() - began
    here = str(Path(__file__).parent)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "study.py"
        command = [sys.executable, "-m", "shoal", "run", str(file)]
        command += ["--devices", "cpu:1", "--device-memory", MEMORY["spilled"]]
        times = []
        for steps in (20, 25):
            text = FILE.format(here=here, directory=directory, every=NEVER_S, steps=steps)
            file.write_text(text)
            began = time.time()
            subprocess.run(command, check=True, capture_output=True)
            found = [e for e in read_events(Path(directory) / "durability")]
            first = next(e.time for e in found if isinstance(e, StepFinished) and e.time > began)
            times.append(first - began - importing)
    return {"fresh_s": times[0], "resumed_s": times[1]}


def disk() -> dict[str, int]:
    """Bytes on disk of a finished trial, beside what the plan said."""
    with tempfile.TemporaryDirectory() as directory, WorkerPool() as pool:
        study = study_of(directory, EVERY_S)
        hardware = shoal.Hardware.virtual(devices=1, memory=MEMORY["spilled"])
        plan = study.plan(hardware=hardware, workers=pool)
        study.run(hardware=hardware, progress=False, workers=pool, timeline=False)
        trials = Path(directory) / "durability" / "trials"
        found = sum(path.stat().st_size for path in trials.rglob("*") if path.is_file())
        policy: CheckpointPolicy = study.policy
        return {"planned": int(policy.finished_bytes(plan)), "found": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"every_s": EVERY_S, "default_s": DEFAULT_S}
    with WorkerPool() as pool:
        for kind in MEMORY:
            result[kind] = overhead(kind, options.rounds, pool)
    resumed = [resume_seconds() for _ in range(options.rounds)]
    for name in ("fresh_s", "resumed_s"):
        result[name] = common.spread([figures[name] for figures in resumed])
    result["disk"] = disk()
    common.finish(result, options.json)


if __name__ == "__main__":
    main()
