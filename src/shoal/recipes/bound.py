"""A recipe as it is for one trial: loss, metrics and clipping with its hyperparameters.

``bound`` is called where a trial's objects are made. From there on a loss is a function of output
and batch, and a limit of the norm is a number, as in a recipe that takes no hyperparameters.

[Note: what a loss reads]
In an array one copy of the code runs for all slots (docs/design/0015), and a graph of it holds the
numbers that it read. So which hyperparameters a loss reads has to be known before it runs: those
that its code spells out (``spelled.py``). These are the ``values`` of ``Told``, an object like any
that a loss may keep: floats may differ between slots, the rest is a part of the signature. Any
other name is looked up in ``rest``. Alone that is no matter; an array refuses it (``sealed.py``),
and a list of operations with it is one trial's (``runtime/capture/captures.py``).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from shoal.core.errors import SpecError
from shoal.core.spec import HyperParameters, Scalar
from shoal.core.values import is_number, plain
from shoal.recipes.recipe import HP, Recipe
from shoal.recipes.spelled import spelled
from shoal.recipes.wholeset import WholeSet

NAME = "hp"
"""What the parameter of a function is called that takes the trial's hyperparameters."""

_ALL = ""  # for a name: all of them were asked for at once
_listening: list[set[str]] = []


def bound(recipe: Recipe, hp: HP) -> Recipe:
    """The recipe of a trial with these hyperparameters; the same object if it takes none.

    One that is bound already is bound anew.

    Raises:
        SpecError: ``clip_grad_norm`` returned no limit.
    """
    changes: dict[str, Any] = {}
    loss = _of_trial(recipe.loss, hp)
    if loss is not recipe.loss:
        changes["loss"] = loss
    metrics = {name: _of_trial(metric, hp) for name, metric in recipe.metrics.items()}
    if any(metrics[name] is not metric for name, metric in recipe.metrics.items()):
        changes["metrics"] = metrics
    if callable(recipe.clip_grad_norm):
        limit = _limit(recipe.clip_grad_norm, hp)
        if limit is not recipe.clip_grad_norm:
            changes["clip_grad_norm"] = limit
    return replace(recipe, **changes) if changes else recipe


def takes_hp(function: Callable[..., Any]) -> bool:
    """Whether a function has a parameter called ``hp`` that nobody has filled in."""
    if isinstance(function, functools.partial) and NAME in function.keywords:
        return False
    own = _parameters(function, follow_wrapped=False)
    hands_on = any(one.kind is one.VAR_KEYWORD for one in own.values())
    if NAME not in own and hands_on:  # a decorator's
        own = _parameters(function, follow_wrapped=True)
    return NAME in own and own[NAME].kind in (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )


def _parameters(
    function: Callable[..., Any], *, follow_wrapped: bool
) -> Mapping[str, inspect.Parameter]:
    function = getattr(function, "_orig_mod", function)  # of a module that torch compiled
    code = function.forward if isinstance(function, nn.Module) else function
    try:
        return inspect.signature(code, follow_wrapped=follow_wrapped).parameters
    except (TypeError, ValueError):  # a callable that has no signature
        return {}


# ---------------------------------------------------------------- losses and metrics


class Told(HyperParameters):
    """A trial's hyperparameters, as a function reads them: ``values`` are those that it spells."""

    def __init__(self, values: Mapping[str, Scalar], rest: Rest) -> None:
        super().__init__(values)
        self.rest = rest

    def __getitem__(self, name: str) -> Scalar:
        return self._values[name] if name in self._values else self.rest.behind(name)[name]

    def get(self, name: str, default: Any = None) -> Any:
        if name in self._values:
            return self._values[name]
        return self.rest.behind(name).get(name, default)

    def __contains__(self, name: object) -> bool:
        return name in self._values or name in self.rest.behind(str(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.rest.behind(_ALL))

    def __len__(self) -> int:
        return len(self.rest.behind(_ALL))

    def __repr__(self) -> str:
        return repr(self.rest.behind(_ALL))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._values, self.rest)

    @property
    def spelled(self) -> Mapping[str, Scalar]:
        """The values alone."""
        return self._values

    def over(self, rest: Rest) -> Told:
        """The same values, with another rest."""
        return Told(self._values, rest)

    def is_of(self, hp: HP) -> bool:
        """Whether these are a trial's of these hyperparameters."""
        return _exact(self.rest.all) == _exact(hp)


class Rest:
    """All of a trial's hyperparameters, of which the code spells some ``names``."""

    __slots__ = ("all", "names")  # no part of what an array compares, and a graph is made of

    def __init__(self, all_: HyperParameters, names: frozenset[str]) -> None:
        self.all, self.names = all_, names

    def behind(self, name: str) -> HyperParameters:
        """Where a name is looked up that is none of the values; "" for all of them."""
        if name not in self.names:
            for heard in _listening:
                heard.add(name)
        return self.all


class OfTrial:
    """A function that takes a trial's hyperparameters, with them: one of output and batch."""

    def __init__(self, function: Callable[..., Any], hp: Told) -> None:
        self.function, self.hp = function, hp

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.function(*given, **named, hp=self.hp)


def code_of(function: Any) -> Any:
    """A recipe's function as it was given."""
    return function.function if isinstance(function, OfTrial) else function


def _of_trial(function: Any, hp: HP) -> Any:
    """A recipe's function with these hyperparameters, if it takes them."""
    if isinstance(function, WholeSet):
        collect, compute = _of_trial(function.collect, hp), _of_trial(function.compute, hp)
        is_as_it_was = collect is function.collect and compute is function.compute
        return function if is_as_it_was else WholeSet(collect, compute)
    if isinstance(function, OfTrial):
        if function.hp.is_of(hp):
            return function
        function = function.function
    elif function is None or not takes_hp(function):
        return function
    names = spelled(function) - {_ALL}
    values = {name: hp[name] for name in sorted(hp) if name in names}
    return OfTrial(function, Told(values, Rest(HyperParameters(hp), names)))


@contextmanager
def unspelled_reads() -> Iterator[set[str]]:
    """Fills with the names that are read inside and that no code spells; "" for all of them."""
    heard: set[str] = set()
    _listening.append(heard)
    try:
        yield heard
    finally:
        _listening.remove(heard)


def _exact(hp: HP) -> list[tuple[str, type, Scalar]]:
    """With types: 1, 1.0 and True are three."""
    return [(name, type(hp[name]), hp[name]) for name in hp]


# ---------------------------------------------------------------- clipping


@dataclass(frozen=True, slots=True)
class LimitOfTrial:
    """What ``function`` said of one trial: the largest norm of its gradients, or None.

    A trial without a limit is planned as one that clips: by population-based training it may
    come to have one, and must find a plan that goes on.
    """

    function: Callable[[HP], float | None]
    hp: HyperParameters
    limit: float | None

    def __call__(self, hp: HP) -> float | None:
        return self.function(hp)


def clip_limit(recipe: Recipe) -> float | None:
    """The largest norm of the gradients of a recipe that is a trial's; None: they are not clipped.

    That of a trial may be None where ``clip_grad_norm`` is not: then its programs look for a
    factor as others' do, and find none.
    """
    asked = recipe.clip_grad_norm
    if isinstance(asked, LimitOfTrial):
        return asked.limit
    assert not callable(asked), "the recipe is not bound to a trial's hyperparameters"
    return asked


def _limit(asked: Callable[[HP], float | None], hp: HP) -> LimitOfTrial:
    if isinstance(asked, LimitOfTrial):
        if _exact(asked.hp) == _exact(hp):
            return asked
        asked = asked.function
    own = HyperParameters(hp)
    found = asked(own)
    limit: Any = plain(found)
    if limit is not None and (not is_number(limit) or not limit > 0):
        raise SpecError(
            f"Recipe(clip_grad_norm=...) returned {found!r} for the trial with {own!r}; return "
            "the largest norm of its gradients, a positive number, or None not to clip."
        )
    return LimitOfTrial(asked, own, None if limit is None else float(limit))
