"""What a study may be asked for: refused before anything is made."""

from __future__ import annotations

import re

from shoal.core.errors import SpecError
from shoal.recipe import Recipe

_NAME = re.compile(r"[a-z0-9._-]{1,64}")


def check_name(name: object) -> None:
    """Names never become paths.

    Raises:
        SpecError: it could not name a directory.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or set(name) == {"."}:
        raise SpecError(
            f"a study's name names its directory: it is [a-z0-9._-]{{1,64}}, got {name!r}."
        )


def check_length(epochs: object, steps: object, eval_every: object) -> None:
    """How long trials train, and how often they are evaluated.

    Raises:
        SpecError: both lengths or none of them are given, or what is no count.
    """
    if (epochs is None) == (steps is None):
        raise SpecError(
            f"a study trains for epochs or for steps, got epochs={epochs} and steps={steps}. "
            "Give exactly one of them."
        )
    for label, count in (("epochs", epochs), ("steps", steps), ("eval_every", eval_every)):
        if count is not None and (not isinstance(count, int) or count < 1):
            raise SpecError(f"{label} is a whole number from 1, got {count!r}")


def check_metric(recipe: Recipe, metric: str, mode: str) -> None:
    """What trials are compared by.

    Raises:
        SpecError: the recipe does not measure that, or the mode is none.
    """
    if mode not in ("min", "max"):
        raise SpecError(f"mode is 'min' or 'max', got {mode!r}")
    known = {"train_loss", "valid_loss", *(f"valid_{name}" for name in recipe.metrics)}
    its_own = recipe.step is not None and metric.startswith(("train_", "valid_"))
    if metric not in known and not its_own:  # a step names its losses when it runs
        raise SpecError(
            f"metric={metric!r} is not measured by this recipe; it has "
            f"{', '.join(sorted(known))}. Add it to Recipe(metrics=...)."
        )


def num_evaluations(epochs: int | None, steps: int | None, eval_every: int | None) -> int | None:
    """How often a trial is evaluated, where that follows from its length alone."""
    if eval_every is None:
        return epochs
    return None if steps is None else -(-steps // eval_every)


def check_retries(retries: int) -> int:
    """How often a trial that raised goes on.

    Raises:
        SpecError: that is no number of times.
    """
    if type(retries) is not int or retries < 0:
        raise SpecError(f"retries is a whole number from 0, got {retries!r}")
    return retries
