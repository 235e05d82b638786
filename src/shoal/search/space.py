"""What a search space is made of: distributions, constants and grids.

A space maps each hyperparameter's name to a distribution or to a constant. It is
*finite* when every entry is a ``choice`` or a constant. A distribution turns one
number in [0, 1) into a value, so that the sampler alone owns the random numbers.

[Note: conditional spaces]
A choice may bring names of its own for some of its values: ``choice("sgd", "adam",
when={"sgd": {"momentum": uniform(0, 0.99)}})``. A trial has the names of the branch it took and
no others. So a space is a tree; a grid of it lists each branch's points, and a value that brings
nothing counts once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.core.arguments import says_instead
from shoal.core.errors import SpecError
from shoal.core.spec import Scalar
from shoal.core.values import flag, is_number, plain

RESERVED = frozenset({"trial", "number", "state", "seconds", "error", "checkpoint", "train_loss"})
_SCALARS = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class Uniform:
    """A float between ``lo`` and ``hi``, even in value or (``log``) in its logarithm."""

    lo: float
    hi: float
    log: bool = False

    def pick(self, unit: float) -> float:
        """The value at ``unit`` in [0, 1)."""
        if not self.log:
            return self.lo + (self.hi - self.lo) * unit
        low, high = math.log(self.lo), math.log(self.hi)
        return min(max(math.exp(low + (high - low) * unit), self.lo), self.hi)


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number from ``lo`` to ``hi``, both included."""

    lo: int
    hi: int
    log: bool = False

    def pick(self, unit: float) -> int:
        """The value at ``unit`` in [0, 1)."""
        if not self.log:
            return self.lo + int((self.hi - self.lo + 1) * unit)
        low, high = math.log(self.lo - 0.5), math.log(self.hi + 0.5)  # whole bins at both ends
        return min(max(round(math.exp(low + (high - low) * unit)), self.lo), self.hi)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of ``values``, each equally likely.

    ``branches`` are the names that come with each value, in the order of ``values``; empty
    where no value brings any.
    """

    values: tuple[Scalar, ...]
    branches: tuple[Mapping[str, Distribution], ...] = ()

    def pick(self, unit: float) -> Scalar:
        """The value at ``unit`` in [0, 1)."""
        return self.values[int(len(self.values) * unit)]

    def branch(self, value: Scalar) -> Mapping[str, Distribution]:
        """The names that come with ``value``."""
        return self.branches[_index(self.values, value)] if self.branches else {}

    def __repr__(self) -> str:
        more = f", branches={self.branches!r}" if self.branches else ""
        return f"Choice(values={self.values!r}{more})"

    def __hash__(self) -> int:
        return hash(self.values)


Distribution = Uniform | Integer | Choice
Space = Mapping[str, Distribution | Scalar]
Point = dict[str, Scalar]


def _index(values: Iterable[Scalar], value: Scalar) -> int:
    """Where ``value`` is among ``values``: 1, 1.0 and True are three."""
    known = [(type(one), one) for one in values]
    return known.index((type(value), value))


def find_equal(values: Iterable[Scalar]) -> tuple[Scalar, Scalar] | None:
    """Two values of other types that ``==`` holds to be one, as Optuna does: 1 and True."""
    seen: dict[Scalar, Scalar] = {}
    for value in values:
        first = seen.setdefault(value, value)
        if type(first) is not type(value):
            return first, value
    return None


_STEPS = (
    "ranges have no steps. Let {} be how many of them, such as integer(1, 8) for 8, 16, ..., 64, "
    "and multiply in the recipe; or list values: choice(8, 16, 32)."
)


@says_instead(step=_STEPS.format("a whole number"), log="write log_uniform(lo, hi).")
def uniform(lo: float, hi: float) -> Uniform:
    """A float between ``lo`` and ``hi``."""
    return Uniform(*_bounds("uniform", lo, hi))


@says_instead(step=_STEPS.format("a whole number"))
def log_uniform(lo: float, hi: float) -> Uniform:
    """A float between ``lo`` and ``hi`` whose logarithm is uniform: for learning rates."""
    low, high = _bounds("log_uniform", lo, hi)
    if low <= 0:
        raise SpecError(f"log_uniform({lo!r}, {hi!r}): a logarithm needs lo > 0, got {lo!r}.")
    return Uniform(low, high, log=True)


@says_instead(step=_STEPS.format("it"))
def integer(lo: int, hi: int, log: bool = False) -> Integer:
    """A whole number from ``lo`` to ``hi``, both included; ``log`` spreads it over decades."""
    low, high = _bounds("integer", lo, hi)
    log = flag("integer(log=...)", log)
    if low != int(low) or high != int(high):
        raise SpecError(f"integer({lo!r}, {hi!r}): both bounds must be whole numbers.")
    if log and low < 1:
        raise SpecError(f"integer({lo!r}, {hi!r}, log=True): a logarithm needs lo >= 1.")
    return Integer(int(low), int(high), log)


def choice(*values: Any, when: Mapping[Any, Mapping[str, Any]] | None = None) -> Choice:
    """One of the given values; numbers, strings, booleans or None.

    Args:
        when: For some of the values, a space of names that only trials with that value have.

    Raises:
        SpecError: no values, one that is no scalar, or ``when`` names another value.
    """
    if not values:
        raise SpecError("choice() got no values. Write at least one, for example choice(64, 128).")
    if len(values) == 1 and isinstance(values[0], list | tuple | set | dict):
        raise SpecError(
            f"choice({values[0]!r}) got one {type(values[0]).__name__}; write the values as "
            "arguments: choice(*values)."
        )
    scalars = tuple(to_scalar("choice(...)", value) for value in values)
    if when is not None and not isinstance(when, Mapping):
        raise SpecError(
            f"choice(when=...) is a dict from a value to a space of its own, got {when!r}."
        )
    return Choice(scalars, _branches(scalars, when) if when else ())


def _branches(
    values: tuple[Scalar, ...], when: Mapping[Any, Mapping[str, Any]]
) -> tuple[Mapping[str, Distribution], ...]:
    branches: list[Mapping[str, Distribution]] = [{} for _ in values]
    for value, space in when.items():
        try:
            index = _index(values, to_scalar("choice(when=...)", value))
        except ValueError:
            raise SpecError(
                f"choice(..., when={{{value!r}: ...}}): {value!r} is none of the values "
                f"{', '.join(map(repr, values))}. Add it to them, or leave it out of when."
            ) from None
        branches[index] = check_space(space)
    return tuple(branches)


def grid(**lists: Iterable[Any]) -> dict[str, Choice]:
    """Every combination of the lists, the last name changing fastest.

    Raises:
        SpecError: a list that is empty or no list; names its key.
    """
    space = {}
    for name, values in lists.items():
        if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
            if isinstance(values, Uniform | Integer | Choice):
                raise SpecError(
                    f"grid({name}=...) got a {type(values).__name__.lower()}, and a grid lists "
                    f"its values. List some, or write space={{{name!r}: ...}} without grid."
                )
            raise SpecError(
                f"grid({name}={values!r}) needs a list of values. For a constant write "
                f"grid({name}=[{values!r}])."
            )
        if isinstance(values, set | frozenset):
            raise SpecError(
                f"grid({name}={values!r}) got a set, whose order may be another one in each run, "
                "and with it the trials' numbers. Write a list."
            )
        items = list(values)
        if not items:
            raise SpecError(f"grid({name}=[]) is empty, so there is no trial to run. Add a value.")
        space[name] = Choice(tuple(to_scalar(repr(name), item) for item in items))
    return space


def _bounds(kind: str, lo: Any, hi: Any) -> tuple[float, float]:
    low, high = plain(lo), plain(hi)
    for bound in (low, high):
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            raise SpecError(f"{kind}({lo!r}, {hi!r}): {bound!r} is no number.")
        if not math.isfinite(bound):
            raise SpecError(f"{kind}({lo!r}, {hi!r}): the bounds must be finite, got {bound!r}.")
    assert isinstance(low, int | float)
    assert isinstance(high, int | float)
    if low >= high:
        raise SpecError(
            f"{kind}({lo!r}, {hi!r}): lo must be below hi. For one value write the constant."
        )
    return low, high


def to_scalar(where: str, value: Any) -> Scalar:
    """``value`` as a plain Python scalar; NumPy's scalars are converted.

    Raises:
        SpecError: any other type; names ``where`` and the type.
    """
    kind, value = type(value), plain(value)
    if type(value) is float and math.isnan(value):
        raise SpecError(
            f"{where} has the value nan, which equals nothing, itself neither: no trial with it "
            "could be found again. Leave it out."
        )
    if type(value) not in _SCALARS:
        raise SpecError(
            f"{where} has a value of type {kind.__name__}: {value!r}. A hyperparameter is a "
            "number, a string, a boolean or None; put its name here and build the object in "
            "the recipe."
        )
    scalar: Scalar = value
    return scalar


def is_finite(space: Space) -> bool:
    """Whether the space has finitely many points that a grid could list."""
    return not any(isinstance(entry, Uniform | Integer) for _, entry in entries(space))


def entries(space: Space) -> Iterable[tuple[str, Distribution | Scalar]]:
    """Every name with what it is, those in branches too; one may come more than once."""
    for name, entry in space.items():
        yield name, entry
        for branch in entry.branches if isinstance(entry, Choice) else ():
            yield from entries(branch)


def size(space: Space) -> int:
    """How many points a space without ``Uniform`` has; constants count one."""
    return math.prod(ways(e) for e in space.values() if isinstance(e, Choice | Integer))


def ways(entry: Choice | Integer) -> int:
    """How many points an entry has with all that comes with its values."""
    if isinstance(entry, Integer):
        return entry.hi - entry.lo + 1
    return sum(map(size, entry.branches)) if entry.branches else len(entry.values)


def walk(space: Mapping[str, Distribution], pick: Callable[[str, Distribution], Scalar]) -> Point:
    """A point of ``space``: ``pick`` gives each name's value, a choice's before its branch's."""
    point: Point = {}
    for name, distribution in space.items():
        point[name] = pick(name, distribution)
        if isinstance(distribution, Choice):
            point |= walk(distribution.branch(point[name]), pick)
    return point


def check_space(space: Any) -> dict[str, Distribution]:
    """The space as a dict of distributions, constants as choices of one.

    Raises:
        SpecError: no mapping, a reserved name, or an entry that is no distribution or scalar.
    """
    if not isinstance(space, Mapping):
        raise SpecError(
            f"a space is a dict of distributions or grid(...), got {type(space).__name__}."
        )
    for name in space:
        _check_name(name)
    checked = {name: _check_entry(name, entry) for name, entry in space.items()}
    _check_branches(checked)
    return checked


def _check_branches(space: Mapping[str, Distribution]) -> None:
    """A name may be in several branches of one choice if it is the same there, else once."""
    taken: dict[str, str] = dict.fromkeys(space, "the space itself")
    for name, entry in space.items():
        inside: dict[str, Distribution | Scalar] = {}
        for branch in entry.branches if isinstance(entry, Choice) else ():
            for inner, distribution in entries(branch):
                if inner in taken or inside.setdefault(inner, distribution) != distribution:
                    raise SpecError(
                        f"the branches of {name!r} have {inner!r}, which is in "
                        f"{taken.get(inner, f'another branch of {name!r}, and differs')} too. "
                        "Give each its own name."
                    )
        taken |= dict.fromkeys(inside, f"a branch of {name!r}")


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise SpecError(f"a hyperparameter's name is a string that is not empty, got {name!r}.")
    if name in RESERVED or name.startswith("valid_"):
        raise SpecError(
            f"the hyperparameter name {name!r} is reserved: reports have a column of that name. "
            f"Reserved are {', '.join(sorted(RESERVED))} and valid_*. Choose another."
        )


def _check_entry(name: str, entry: Any) -> Distribution:
    if isinstance(entry, Uniform | Integer | Choice):
        return entry
    if isinstance(entry, list | tuple | set | range):
        values = ", ".join(map(repr, entry))
        between = _between([plain(value) for value in entry])
        raise SpecError(f"{name!r} is a {type(entry).__name__}; write choice({values}){between}.")
    if type(entry).__module__.startswith("optuna."):
        raise SpecError(
            f"{name!r} is a {type(entry).__name__} of Optuna's. Write shoal.uniform(low, high), "
            "shoal.log_uniform(low, high), shoal.integer(low, high) or shoal.choice(...) in its "
            "place; sampler= takes Optuna's samplers."
        )
    return Choice((to_scalar(repr(name), entry),))


def _between(ends: Sequence[Any]) -> str:
    """What else two values may have meant: what lies between them."""
    if len(ends) != 2 or not all(map(is_number, ends)) or not ends[0] < ends[1]:
        return ""
    low, high = ends
    kinds = ["uniform", *["log_uniform"] * (low > 0)]
    kinds += ["integer"] * (type(low) is int and type(high) is int)
    words = " or ".join(f"{kind}({low!r}, {high!r})" for kind in kinds)
    return f" for one of these two, {words} for what lies between them"
