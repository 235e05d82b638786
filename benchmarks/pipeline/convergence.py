"""What do stale weights cost a training, and what is left of 2BW's quicker steps?

    python benchmarks/pipeline/convergence.py [--text FILE] [--json FILE]

A small byte-level GPT, trained by three rules, which pipelines follow bit for bit: synchronous,
2BW, 2BW with prediction. Seconds are those of ``results.json`` beside this file. ``picture.py``
draws the curves. See README.md.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import common
from shoal.examples.gpt import (
    GPT,
    VOCABULARY,
    RandomWindows,
    next_byte_loss,
    read_library,
)
from shoal.recipes.recipe import HP, Recipe
from shoal.testing import evaluate, plain_2bw_loop, plain_loop

RULES = ("synchronous", "2bw", "2bw predicted")
RATES = (5e-4, 1.5e-3, 4.5e-3)
SEEDS = (0, 1, 2)
MICRO_BATCHES, WINDOWS, CONTEXT = 4, 8, 64
WARM_UP, EVERY = 20, 20
VALID_BATCHES = 16
# Which arm of results.json says how long a step of a rule takes: a synchronous one has two.
CLOCKS = {
    "synchronous, flush": ("synchronous", "m=4 flush"),
    "synchronous, zb-h1": ("synchronous", "m=4 zb-h1"),
    "2bw": ("2bw", "m=4 2bw"),
    "2bw predicted": ("2bw predicted", "m=4 2bw"),
}
# By rule and learning rate, one per seed: the held-out loss every EVERY steps.
Curves = dict[tuple[str, float], list[list[float]]]


class Text(NamedTuple):
    """Bytes to train on, and bytes held out."""

    train: Tensor
    valid: Tensor


@dataclass(frozen=True, kw_only=True)
class Training:
    """One point of the grid; goes to the process that trains it."""

    rule: str
    rate: float
    seed: int
    steps: int
    file: str | None

    def run(self) -> list[float]:
        """The held-out loss every ``EVERY`` steps."""
        torch.set_num_threads(1)
        recipe = recipe_on(read_text(self.file), self.steps)
        hp = {"lr": self.rate, "seed": self.seed}
        if self.rule == "synchronous":
            trained = plain_loop(recipe, hp, self.seed, steps=self.steps, eval_every=EVERY)
            losses = [row["metrics"]["valid_loss"] for row in trained.history]
        else:
            losses = self._stale(recipe, hp)
        return [loss if math.isfinite(loss) else math.inf for loss in losses]

    def _stale(self, recipe: Recipe, hp: HP) -> list[float]:
        losses: list[float] = []
        _, valid = recipe.data(hp)
        assert valid is not None

        def look(step: int, model: nn.Module) -> None:
            if step % EVERY == 0:
                losses.append(evaluate(recipe, model, valid, torch.device("cpu"))["valid_loss"])

        predict = self.rule == "2bw predicted"
        plain_2bw_loop(recipe, hp, self.seed, steps=self.steps, predict=predict, after_step=look)
        return losses


def read_text(file: str | None) -> Text:
    """The last tenth of a file is held out; without one, files of Python's library are."""
    if file is None:
        return Text(*read_library())
    text = torch.frombuffer(bytearray(Path(file).read_bytes()), dtype=torch.uint8)
    cut = len(text) * 9 // 10
    return Text(text[:cut], text[cut:])


def recipe_on(text: Text, steps: int) -> Recipe:
    """AdamW with a warm-up; other batches for every seed, the same held-out ones for all."""

    def data(hp: HP) -> tuple[RandomWindows, RandomWindows]:
        form = {"windows": WINDOWS, "length": CONTEXT}
        seed = int(hp["seed"])
        return (
            RandomWindows(text.train, batches=MICRO_BATCHES * steps, seed=seed, **form),
            RandomWindows(text.valid, batches=VALID_BATCHES, seed=0, **form),
        )

    return Recipe(
        model=build,
        data=data,
        loss=next_byte_loss,
        schedule=warm_up,
        accumulate=MICRO_BATCHES,
        on_nonfinite="ignore",
    )


def build(hp: HP) -> GPT:
    return GPT(width=64, depth=4, heads=4, context=CONTEXT, dropout=0.0)


def warm_up(optimizer: torch.optim.Optimizer, hp: HP) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / WARM_UP))


def loss_of_frequencies(text: Text) -> float:
    """What a model reaches that knows how often each byte comes, and nothing of order."""
    counts_V = torch.bincount(text.train.long(), minlength=VOCABULARY) + 1.0
    log_V = (counts_V / counts_V.sum()).log()
    return float(F.nll_loss(log_V.expand(len(text.valid), -1), text.valid.long()))


def seconds_per_step() -> dict[str, float]:
    """By clock, from the measured medians of ``run.py``: four stages, four micro-batches."""
    measured = json.loads((Path(__file__).parent / "results.json").read_text())
    return {
        clock: measured["seconds_per_step"][arm]["median"] for clock, (_, arm) in CLOCKS.items()
    }


def loss_at(curve: Sequence[float], step: float) -> float:
    """Between two evaluations a straight line is drawn."""
    position = step / EVERY - 1
    left = int(position)
    share = position - left
    if share == 0:
        return curve[left]
    return (1 - share) * curve[left] + share * curve[left + 1]


def steps_to(curve: Sequence[float], loss: float) -> float:
    """After how many steps ``loss`` is first reached; infinite when it is not."""
    for number, value in enumerate(curve, 1):
        if value <= loss:
            return float(number * EVERY)
    return math.inf


def tabulate(curves: Curves, seconds: dict[str, float], frequencies: float) -> dict[str, Any]:
    """Spreads over the seeds: at the same step, at the same second, and seconds to one loss.

    The second is the one at which the quickest clock ends. The loss is what every rule reaches
    with its best rate, as a median.
    """
    steps = EVERY * len(curves[RULES[0], RATES[0]][0])
    horizon_s = steps * min(seconds.values())
    ends = {point: median(curve[-1] for curve in seeds) for point, seeds in curves.items()}
    target = max(min(ends[rule, rate] for rate in RATES) for rule in RULES)
    rows = []
    for rate, (clock, (rule, _)) in itertools.product(RATES, CLOCKS.items()):
        seeds, step_s = curves[rule, rate], seconds[clock]
        rows.append(
            {
                "rate": rate,
                "clock": clock,
                "at_half": common.spread([loss_at(curve, steps / 2) for curve in seeds]),
                "at_end": common.spread([curve[-1] for curve in seeds]),
                "at_horizon": common.spread(
                    [loss_at(curve, horizon_s / step_s) for curve in seeds]
                ),
                "target_s": common.spread([steps_to(curve, target) * step_s for curve in seeds]),
                "stuck": sum(curve[-1] >= frequencies for curve in seeds),
            }
        )
    return {"horizon_s": horizon_s, "target_loss": target, "rows": rows}


def finite(value: Any) -> Any:
    """The same with None for what JSON has no word for."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def train(asked: argparse.Namespace) -> Curves:
    """Every rule with every rate; one curve per seed."""
    grid = list(itertools.product(RULES, RATES))
    trainings = [
        Training(rule=rule, rate=rate, seed=seed, steps=asked.steps, file=asked.text)
        for (rule, rate), seed in itertools.product(grid, SEEDS)
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(asked.processes, mp_context=context) as pool:
        found = iter(list(pool.map(Training.run, trainings)))
    return {point: [next(found) for _ in SEEDS] for point in grid}


def described(file: str | None, text: Text) -> dict[str, Any]:
    """Enough to know the same text again."""
    whole = torch.cat(text).numpy().tobytes()
    return {
        "text": Path(file).name if file else "Python's library",
        "bytes": len(whole),
        "sha256": hashlib.sha256(whole).hexdigest(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", help="any text; without it, the source of Python's library")
    parser.add_argument("--steps", type=int, default=360)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json")
    asked = parser.parse_args()
    if asked.steps < 2 * EVERY or asked.steps % EVERY:
        parser.error(f"--steps is a multiple of {EVERY} from {2 * EVERY}, got {asked.steps}")
    text, seconds = read_text(asked.text), seconds_per_step()
    frequencies = loss_of_frequencies(text)
    curves = train(asked)
    result = {
        **described(asked.text, text),
        "parameters": sum(p.numel() for p in build({}).parameters()),
        "steps": asked.steps,
        "every": EVERY,
        "seconds_per_step": seconds,
        "loss_of_frequencies": frequencies,
        **tabulate(curves, seconds, frequencies),
        "curves": [
            {"rule": rule, "rate": rate, "seeds": seeds} for (rule, rate), seeds in curves.items()
        ],
    }
    common.finish(finite(result), asked.json)


if __name__ == "__main__":
    main()
