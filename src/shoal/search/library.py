"""Optuna, imported when it is needed and nowhere else; its names for shoal's things."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import sys
import warnings
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from shoal.core.errors import SpecError
from shoal.core.spec import Scalar
from shoal.search.space import Distribution, Integer, Point, Uniform, walk


def load_optuna(asked: str) -> Any:
    """The library; ``asked`` is what needs it, for the message.

    Raises:
        SpecError: it is not installed.
    """
    try:
        import optuna  # lazy: an extra
    except ImportError as error:
        raise SpecError(
            f"{asked} needs Optuna, which cannot be imported: {error}. Install it: "
            "pip install 'optuna>=5'."
        ) from None
    return optuna


def is_of(value: object, module: str, name: str) -> bool:
    """Whether ``value`` is of a class of Optuna's; who made it has imported that."""
    kind = getattr(sys.modules.get(f"optuna.{module}"), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


_PACKAGES = {
    "CmaEsSampler": "cmaes",
    "GPSampler": "scipy",
    "QMCSampler": "scipy",
    "WilcoxonPruner": "scipy",
}
"""What objects of Optuna's import when they first need it, which is after some trials."""


def require_packages(what: str, value: Any) -> None:
    """Refuse a sampler or pruner that needs what is not installed; ``what`` it is, in a word.

    One that it holds (``PatientPruner(WilcoxonPruner())``) as well.

    Raises:
        SpecError: it could not go on after some trials.
    """
    found = [value]
    for one in found:
        name = type(one).__name__
        package = _PACKAGES.get(name, "")
        if package and importlib.util.find_spec(package) is None:
            raise SpecError(
                f"the {what} {name} needs the package {package}, which is not installed: "
                f"pip install {package}"
            )
        for inside in getattr(one, "__dict__", {}).values():
            is_one = is_of(inside, "samplers", "BaseSampler")
            is_one = is_one or is_of(inside, "pruners", "BasePruner")
            if is_one and not any(inside is known for known in found):
                found.append(inside)


@contextlib.contextmanager
def quiet(optuna: Any) -> Iterator[None]:
    """No line on standard error for each study that is made."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def copied(what: str, value: Any) -> Any:
    """A copy of a sampler or pruner, which is asked in place of its user's; ``what`` it is.

    Raises:
        SpecError: it holds what cannot be copied.
    """
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise SpecError(
            f"the {what} {type(value).__name__} cannot be copied, and copies of it are asked, so "
            f"that a study can go on: {type(error).__name__}: {str(error).rstrip('.')}. Keep "
            "locks, files and connections out of it."
        ) from error


def new_study(optuna: Any, mode: str, **options: Any) -> Any:
    """An empty study in memory; ``mode`` is shoal's."""
    direction = {"min": "minimize", "max": "maximize"}[mode]
    with quiet(optuna):
        return optuna.create_study(direction=direction, **options)


def suggest(trial: Any, name: str, distribution: Distribution) -> Scalar:
    """One value, as the sampler wants it."""
    value: Scalar
    if isinstance(distribution, Uniform):
        how = {"log": distribution.log, "step": distribution.step}
        value = trial.suggest_float(name, distribution.lo, _upper(distribution), **how)
    elif isinstance(distribution, Integer):
        how = {"log": distribution.log, "step": distribution.step}
        value = trial.suggest_int(name, distribution.lo, distribution.hi, **how)
    else:
        value = trial.suggest_categorical(name, distribution.values)
    return value


def to_optuna(optuna: Any, distribution: Distribution) -> Any:
    """A distribution of ours as one of Optuna's."""
    kinds = optuna.distributions
    if isinstance(distribution, Uniform):
        how = {"log": distribution.log, "step": distribution.step}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it lowers the end to the last value
            return kinds.FloatDistribution(distribution.lo, _upper(distribution), **how)
    if isinstance(distribution, Integer):
        how = {"log": distribution.log, "step": distribution.step}
        return kinds.IntDistribution(distribution.lo, distribution.hi, **how)
    return kinds.CategoricalDistribution(distribution.values)


def _upper(entry: Uniform) -> float:
    """An upper end of which Optuna makes the last value, though that be a rounded one.

    It lowers an end that is no whole number of steps from the lower one, as text, to the last that
    is: by a whole step, where the last value was rounded down.
    """
    if entry.step is None:
        return entry.hi
    low, high, step = (Decimal(str(number)) for number in (entry.lo, entry.hi, entry.step))
    return entry.hi if (high - low) % step == 0 else entry.hi + entry.step / 2


def distributions_of(
    optuna: Any, space: Mapping[str, Distribution], point: Point
) -> dict[str, Any]:
    """What each name of a point was drawn from."""
    found: dict[str, Any] = {}

    def note(name: str, distribution: Distribution) -> Any:
        found[name] = to_optuna(optuna, distribution)
        return point[name]

    walk(space, note)
    return found
