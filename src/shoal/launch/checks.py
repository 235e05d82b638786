"""What a study may be asked for: refused before anything is made."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import NamedTuple

from shoal.core.errors import SpecError
from shoal.core.values import one_of, optional_whole
from shoal.recipes.recipe import Recipe

_NAME = re.compile(r"[a-z0-9._-]{1,64}")


def check_name(name: object) -> None:
    """Names never become paths.

    Raises:
        SpecError: it could not name a directory.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or set(name) == {"."}:
        like = re.sub(r"[^a-z0-9._-]+", "-", str(name).lower()).strip("-.")[:64]
        hint = f" Call it {like!r}, for example." if isinstance(name, str) and like else ""
        raise SpecError(
            f"a study's name names its directory: it is [a-z0-9._-]{{1,64}}, got {name!r}.{hint}"
        )


class Length(NamedTuple):
    """How long trials train, one of the two, and how often they are evaluated."""

    epochs: int | None
    steps: int | None
    eval_every: int | None


def check_length(epochs: object, steps: object, eval_every: object) -> Length:
    """The length that is asked for.

    Raises:
        SpecError: both lengths or none of them are given, or what is no count.
    """
    if (epochs is None) == (steps is None):
        raise SpecError(
            f"a study trains for epochs or for steps, got epochs={epochs} and steps={steps}. "
            "Give exactly one of them."
        )
    return Length(
        optional_whole("epochs", epochs, 1),
        optional_whole("steps", steps, 1),
        optional_whole("eval_every", eval_every, 1),
    )


def check_metric(recipe: Recipe, metric: str, mode: str) -> None:
    """What trials are compared by.

    Raises:
        SpecError: the recipe does not measure that, or the mode is none.
    """
    if not isinstance(metric, str):
        raise SpecError(
            f"metric is a name, such as 'valid_loss', got {metric!r}. A study compares its trials "
            "by one; what else the recipe measures is beside it in its tables and curves."
        )
    one_of("mode", mode, ("min", "max"))
    known = {"train_loss", "valid_loss", *(f"valid_{name}" for name in recipe.metrics)}
    its_own = recipe.step is not None and metric.startswith(("train_", "valid_"))
    if metric not in known and not its_own:  # a step names its losses when it runs
        close = difflib.get_close_matches(f"valid_{metric}", known, 1, 0.8)
        close = close or difflib.get_close_matches(metric, known, 1, 0.8)
        what = f"Did you mean {close[0]!r}?" if close else "Add it to Recipe(metrics=...)."
        raise SpecError(
            f"metric={metric!r} is not measured by this recipe; it has "
            f"{', '.join(sorted(known))} (of validation data is what begins with valid_). {what}"
        )


def doubt_of_mode(metric: str, mode: str) -> str:
    """In words, where the least of a metric counts as the best of which more mostly is better."""
    if mode == "min" and MORE_IS_BETTER & set(metric.lower().split("_")):
        return (
            f"the trial with the least {metric} counts as the best: mode='min', which is what a "
            "study has if it says nothing. Say mode='max' if more of it is better."
        )
    return ""


MORE_IS_BETTER = frozenset(
    (
        *("acc", "accuracy", "auc", "auroc", "auprc", "f1", "precision", "recall", "r2", "score"),
        *("bleu", "rouge", "iou", "miou", "dice", "psnr", "ssim", "map", "map50", "ndcg", "mrr"),
        *("mcc", "kappa", "reward", "return", "top1", "top5"),
    )
)


def num_evaluations(epochs: int | None, steps: int | None, eval_every: int | None) -> int | None:
    """How often a trial is evaluated, where that follows from its length alone."""
    if eval_every is None:
        return epochs
    return None if steps is None else -(-steps // eval_every)


def check_directory(directory: object) -> Path:
    """Where studies live.

    Raises:
        SpecError: that is no path.
    """
    if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
        raise SpecError(f"directory is where studies live, such as 'runs', got {directory!r}.")
    return Path(directory)
