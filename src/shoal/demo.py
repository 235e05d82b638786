"""The study of ``shoal demo``: eight language models, none of which fits its device.

Byte-level GPTs over the source text of Python's own library. Two learning rates, two
widths and two depths; the training state of each (parameters, gradients, AdamW's two
moments) is 3 to 5 times the 12 MiB of a virtual device.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shoal.core.errors import SpecError
from shoal.core.event import StudyStarted
from shoal.core.studyfiles import RECORD
from shoal.examples.gpt import GPT, RandomWindows, library_data, next_byte_loss
from shoal.hardware import Hardware
from shoal.observe.lock import StudyLock
from shoal.observe.reader import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.recipes.recipe import HP, Recipe
from shoal.search.space import grid
from shoal.study import Study

NAME = "demo"
SOURCE = "shoal.demo:study"
DEVICES = 2
DEVICE_MEMORY = "12MiB"
CONTEXT = 64
WINDOWS = 4  # 4 x 64 = 256 tokens a step
HEADS = 4
STEPS = 100  # of each trial, for one minute
PROMPT = b"def "


def build_model(hp: HP) -> GPT:
    """A GPT of the trial's width and depth."""
    width, depth = int(hp["width"]), int(hp["depth"])  # type: ignore[arg-type]
    return GPT(width=width, depth=depth, heads=HEADS, context=CONTEXT)


def build_data(hp: HP) -> tuple[RandomWindows, RandomWindows]:
    """One epoch is the whole training: as many batches as the trial has steps."""
    steps = int(hp["steps"])  # type: ignore[arg-type]
    return library_data(batches=steps, windows=WINDOWS, length=CONTEXT)


def build_optimizer(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], hp: HP
) -> torch.optim.AdamW:
    """AdamW; matrices decay, norms and biases do not."""
    named = list(named_parameters)
    groups = [
        {"params": [p for _, p in named if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=float(hp["lr"]), betas=(0.9, 0.99), fused=True)  # type: ignore[arg-type]


@dataclass(frozen=True)
class WarmupCosine:
    """A learning rate's factor: up in a line for a fifth of the steps, then down a cosine."""

    steps: int

    def __call__(self, step: int) -> float:
        warmup = max(1, self.steps // 5)
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, self.steps - warmup))
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))


def build_schedule(optimizer: torch.optim.Optimizer, hp: HP) -> Any:
    """Warm-up and cosine over the trial's steps."""
    steps = int(hp["steps"])  # type: ignore[arg-type]
    return torch.optim.lr_scheduler.LambdaLR(optimizer, WarmupCosine(steps))


recipe = Recipe(
    model=build_model,
    data=build_data,
    loss=next_byte_loss,
    optimizer=build_optimizer,
    schedule=build_schedule,
    clip_grad_norm=1.0,
)


def make_study(steps: int = STEPS, directory: str = "runs") -> Study:
    """The demo's study; ``steps`` is a hyperparameter, so that a trial's record has it all."""
    space = grid(lr=[1e-3, 2e-3], width=[144, 160], depth=[10, 12], steps=[steps])
    made = Study(NAME, recipe, space=space, steps=steps, directory=directory)
    made.source = SOURCE
    return made


def make_hardware() -> Hardware:
    """Two CPU devices with 12 MiB each."""
    return Hardware.virtual(devices=DEVICES, memory=DEVICE_MEMORY)


study = make_study()


def steps_for(minutes: float) -> int:
    """How many steps of each trial to take for about ``minutes`` on two idle cores.

    Raises:
        SpecError: no minutes.
    """
    if not 0 < minutes < 60 * 24 * 7:
        raise SpecError(f"--minutes is more than 0 and at most a week, got {minutes:g}.")
    return max(2, round(STEPS * minutes))


def remove_earlier(directory: str | Path = "runs") -> Path | None:
    """Delete the demo that ran before in ``directory``; its path, or None if there was none.

    Raises:
        SpecError: what is there is no demo, or it is running now. Nothing is deleted.
    """
    place = Path(directory) / NAME
    if not place.exists() or not any(place.iterdir()):
        return None
    started = [e for e in read_outline(place) if isinstance(e, StudyStarted)]
    if not started or started[0].source != SOURCE:
        raise SpecError(
            f"{place} holds something that no earlier demo wrote, and the demo replaces only "
            "its own. Move it away, or run the demo in another directory."
        )
    with StudyLock(place):  # refuses while another process runs it
        shutil.rmtree(place)
    return place


def can_go_on(steps: int, directory: str | Path = "runs") -> bool:
    """Whether a demo of that many steps was stopped in ``directory`` before its end."""
    place = Path(directory) / NAME
    if not (place / RECORD).exists():
        return False
    earlier = Snapshot.of(read_outline(place))
    same = {row.hp.get("steps") for row in earlier.trials} == {steps}
    return same and earlier.source == SOURCE and any(not row.is_done for row in earlier.trials)


class Sample(NamedTuple):
    """Text that a trained model wrote, and how good that model is."""

    text: str
    prompt: str
    loss: float  # validation, nats per byte

    @property
    def bits_per_byte(self) -> float:
        return self.loss / math.log(2)


def write_sample(model: GPT, loss: float, *, count: int = 256) -> Sample:
    """What ``model`` makes of the beginning of a function; the same text each time."""
    generator = torch.Generator().manual_seed(0)
    with _one_thread():  # one small window at a time: more threads only wait for each other
        text = model.generate(PROMPT, count, temperature=0.8, top_k=40, generator=generator)
    return Sample(text.decode("utf-8", errors="replace"), PROMPT.decode(), loss)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
