"""What a search space is made of: distributions, constants and grids.

A space maps each hyperparameter's name to a distribution or to a constant. It is *finite* when
every entry is a ``choice`` or a constant: then it lists its points. A distribution turns one
number in [0, 1) into a value, so that the sampler alone owns the random numbers.

[Note: steps]
The values of a range with a step are counted in decimals, as its user wrote them: 0.1 + 2 * 0.1 is
0.3, and not the 0.30000000000000004 of binary sums. So values are the same in every record, and
two that should be equal are. Optuna counts in binary; what it suggests is taken for the nearest.

[Note: conditional spaces]
A choice may bring names of its own for some of its values: ``choice("sgd", "adam",
when={"sgd": {"momentum": uniform(0, 0.99)}})``. A trial has the names of the branch it took and
no others. So a space is a tree; a grid of it lists each branch's points, and a value that brings
nothing counts once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Any

from shoal.core.arguments import says_instead
from shoal.core.errors import SpecError
from shoal.core.spec import Scalar
from shoal.core.values import flag, is_number, plain

RESERVED = frozenset({"trial", "number", "state", "seconds", "error", "checkpoint", "train_loss"})
_SCALARS = (bool, int, float, str, type(None))
_EXACT = Context(prec=60)  # digits; that of the thread is its user's
_NEAR, _ROUNDED = 1e-6, Decimal("1e-8")  # of a step


@dataclass(frozen=True, slots=True)
class Uniform:
    """A float between ``lo`` and ``hi``, even in value or (``log``) in its logarithm.

    With a ``step`` one of ``lo``, ``lo + step``, ..., ``hi``, which then is one of these.
    """

    lo: float
    hi: float
    log: bool = False
    step: float | None = None

    def pick(self, unit: float) -> float:
        """The value at ``unit`` in [0, 1)."""
        if self.step is not None:
            return self.at(min(int(self.count * unit), self.count - 1))
        if not self.log:
            return self.lo + (self.hi - self.lo) * unit
        low, high = math.log(self.lo), math.log(self.hi)
        return min(max(math.exp(low + (high - low) * unit), self.lo), self.hi)

    @property
    def count(self) -> int:
        """How many values there are; 0 where they have no end."""
        return 0 if self.step is None else _num_steps(self.lo, self.hi, self.step) + 1

    def at(self, index: int) -> float:
        """Value ``index`` of those with a step."""
        assert self.step is not None
        return float(_EXACT.fma(Decimal(index), _decimal(self.step), _decimal(self.lo)))

    def has(self, value: float) -> bool:
        """Whether a number is one of the values, within the rounding of sums."""
        if not self.lo <= value <= self.hi:
            return False
        places = 0.0 if self.step is None else (value - self.lo) / self.step
        return abs(places - round(places)) < _NEAR

    def nearest(self, value: float) -> float:
        """The value that is nearest to any number."""
        if self.step is not None and self.lo < value < self.hi:
            value = self.at(round((value - self.lo) / self.step))
        return min(max(value, self.lo), self.hi)

    def __repr__(self) -> str:
        step = "" if self.step is None else f", step={self.step!r}"
        return f"Uniform(lo={self.lo!r}, hi={self.hi!r}, log={self.log!r}{step})"


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number from ``lo`` to ``hi``, both included, each ``step`` from the one before."""

    lo: int
    hi: int
    log: bool = False
    step: int = 1

    def pick(self, unit: float) -> int:
        """The value at ``unit`` in [0, 1)."""
        if not self.log:
            return self.at(min(int(self.count * unit), self.count - 1))
        low, high = math.log(self.lo - 0.5), math.log(self.hi + 0.5)  # whole bins at both ends
        return min(max(round(math.exp(low + (high - low) * unit)), self.lo), self.hi)

    @property
    def count(self) -> int:
        """How many values there are."""
        return (self.hi - self.lo) // self.step + 1

    def at(self, index: int) -> int:
        """Value ``index``."""
        return self.lo + index * self.step

    def has(self, value: float) -> bool:
        """Whether a number is one of the values."""
        return self.lo <= value <= self.hi and (value - self.lo) % self.step == 0

    def nearest(self, value: float) -> int:
        """The value that is nearest to any number."""
        if self.step == 1:
            return min(max(round(value), self.lo), self.hi)
        index = round((min(max(value, self.lo), self.hi) - self.lo) / self.step)
        return self.at(index)

    def __repr__(self) -> str:
        step = "" if self.step == 1 else f", step={self.step!r}"
        return f"Integer(lo={self.lo!r}, hi={self.hi!r}, log={self.log!r}{step})"


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

    @property
    def count(self) -> int:
        """How many values there are."""
        return len(self.values)

    def at(self, index: int) -> Scalar:
        """Value ``index``."""
        return self.values[index]

    def has(self, value: object) -> bool:
        """Whether it is one of the values: 1, 1.0 and True are three."""
        return any(type(value) is type(one) and value == one for one in self.values)

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


@says_instead(log="write log_uniform(lo, hi).")
def uniform(lo: float, hi: float, *, step: float | None = None) -> Uniform:
    """A float between ``lo`` and ``hi``; with a ``step`` one of ``lo``, ``lo + step``, ...

    These are counted in decimals: ``uniform(0.1, 0.5, step=0.1)`` has 0.3. Where no step ends at
    ``hi``, the last value is the one before, and a warning says so.
    """
    low, high = _bounds("uniform", lo, hi)
    if step is None:
        return Uniform(low, high)
    call = f"uniform({lo!r}, {hi!r}, step={step!r})"
    width = plain(step)
    if not is_number(width) or not 0 < width < math.inf:
        raise SpecError(f"{call}: a step is a number above 0, got {step!r}.")
    whole = Uniform(float(low), float(high), step=float(width))
    if max(abs(low), abs(high)) / width > _FINEST:
        raise SpecError(
            f"{call}: a step is at least {1 / _FINEST:g} of the larger bound, below which Optuna "
            "cannot tell values apart. Leave step out, and round in the recipe."
        )
    return Uniform(whole.lo, _last(call, whole, stacklevel=4), step=whole.step)


@says_instead(
    step="values whose logarithms are even have no step. Take integer(lo, hi, log=True), or let "
    "integer(lo, hi) be an exponent and compute 10 ** hp[...] in the recipe, or list values: "
    "choice(1e-4, 3e-4, 1e-3)."
)
def log_uniform(lo: float, hi: float) -> Uniform:
    """A float between ``lo`` and ``hi`` whose logarithm is uniform: for learning rates."""
    low, high = _bounds("log_uniform", lo, hi)
    if low <= 0:
        raise SpecError(f"log_uniform({lo!r}, {hi!r}): a logarithm needs lo > 0, got {lo!r}.")
    return Uniform(low, high, log=True)


def integer(lo: int, hi: int, log: bool = False, *, step: int = 1) -> Integer:
    """A whole number from ``lo`` to ``hi``, both included; ``log`` spreads it over decades.

    With a ``step`` one of ``lo``, ``lo + step``, ...; where no step ends at ``hi``, the last value
    is the one before, and a warning says so.
    """
    low, high = _bounds("integer", lo, hi)
    log = flag("integer(log=...)", log)
    if low != int(low) or high != int(high):
        raise SpecError(f"integer({lo!r}, {hi!r}): both bounds must be whole numbers.")
    if log and low < 1:
        raise SpecError(f"integer({lo!r}, {hi!r}, log=True): a logarithm needs lo >= 1.")
    call = f"integer({lo!r}, {hi!r}, step={step!r})"
    width = plain(step)
    if type(width) is not int or width < 1:
        raise SpecError(f"{call}: a step is a whole number from 1, got {step!r}.")
    if log and width > 1:
        raise SpecError(
            f"integer({lo!r}, {hi!r}, log=True, step={step!r}): values whose logarithms are even "
            "have no step. Leave one of the two out, or list values: choice(8, 16, 32)."
        )
    whole = Integer(int(low), int(high), log, width)
    return Integer(whole.lo, int(_last(call, whole, stacklevel=3)), log, width)


_FINEST = 1e7  # of a bound: Optuna holds values to be on a step that are 1e-8 of a step away


def _last(call: str, entry: Uniform | Integer, *, stacklevel: int) -> float:
    """The last value of a range; a warning where it is not its end.

    Raises:
        SpecError: it is the first one too.
    """
    if entry.count < 2:
        raise SpecError(
            f"{call}: the step is larger than hi - lo, so that {entry.lo!r} would be the only "
            "value. Write it as a constant, or give a smaller step."
        )
    last = entry.at(entry.count - 1)
    if last != entry.hi:
        warnings.warn(
            f"{call}: no step ends at {entry.hi!r}, so the last value is {last!r}.",
            stacklevel=stacklevel,
        )
    return last


def _num_steps(lo: float, hi: float, step: float) -> int:
    """How many whole steps there are; ``hi`` may be the float next to where the last ends."""
    low, high, width = map(_decimal, (lo, hi, step))
    return int(_EXACT.add(_EXACT.divide(_EXACT.subtract(high, low), width), _ROUNDED))


def _decimal(value: float) -> Decimal:
    """A number as it is written."""
    return Decimal(repr(value))


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


def grid(**lists: Iterable[Any] | Uniform | Integer) -> dict[str, Choice]:
    """Every combination of the lists, the last name changing fastest.

    A range stands for the list of its values, if they have an end.

    Raises:
        SpecError: a list that is empty or no list; names its key.
    """
    space = {}
    for name, values in lists.items():
        if isinstance(values, Uniform | Integer) and values.count:
            values = map(values.at, range(values.count))
        if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
            if isinstance(values, Uniform | Integer | Choice):
                raise SpecError(
                    f"grid({name}=...) got a {type(values).__name__.lower()}, and a grid lists "
                    "its values. List some, take a uniform with a step, or write "
                    f"space={{{name!r}: ...}} without grid."
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
    """Whether the space is made of lists and constants, so that it lists its points itself."""
    return not any(isinstance(entry, Uniform | Integer) for _, entry in entries(space))


def endless(space: Space) -> str | None:
    """The first name whose values have no end, so that no grid could list them."""
    return next((name for name, entry in entries(space) if _is_endless(entry)), None)


def _is_endless(entry: Distribution | Scalar) -> bool:
    return isinstance(entry, Uniform) and entry.step is None


def entries(space: Space) -> Iterable[tuple[str, Distribution | Scalar]]:
    """Every name with what it is, those in branches too; one may come more than once."""
    for name, entry in space.items():
        yield name, entry
        for branch in entry.branches if isinstance(entry, Choice) else ():
            yield from entries(branch)


def size(space: Space) -> int:
    """How many points a space has in which nothing is endless; constants count one."""
    own = (entry for entry in space.values() if isinstance(entry, Uniform | Integer | Choice))
    return math.prod(ways(entry) for entry in own if not _is_endless(entry))


def ways(entry: Distribution) -> int:
    """How many points an entry has with all that comes with its values."""
    branches = entry.branches if isinstance(entry, Choice) else ()
    return sum(map(size, branches)) if branches else entry.count


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
