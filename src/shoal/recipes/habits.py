"""What a schedule of the user's own does beside setting numbers of param groups.

A schedule is the one object of a recipe's that is called after each step, so it is where code goes
that freezes layers, scales weights, or looks at gradients. Which of that a schedule may do is read
in its code, since it may do so once in a thousand steps.
"""

from __future__ import annotations

import random
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from shoal.core.closures import closed_over
from shoal.kernels.kernelstep import put_back
from shoal.recipes.libraries import is_library
from shoal.recipes.recipe import Recipe
from shoal.recipes.schedules import each_schedule
from shoal.recipes.spelled import spelled_by

_TORCHS = (
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("normal", "bernoulli", "multinomial", "poisson", "binomial", "dropout", "sample", "rsample"),
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_"),
    *("uniform_", "default_rng", "get_rng_state", "set_rng_state", "initial_seed", "manual_seed"),
)
DRAWING = frozenset(
    (
        *_TORCHS,
        *(name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")),
        *(name for name in dir(random) if callable(getattr(random.Random, name, None))),
        *("random", "standard_normal", "permutation", "integers", "rand", "randn"),
    )
)
"""Names of what draws random numbers of the process, or may: a module's, or imported from it."""
TOUCHING = frozenset(
    (
        *("parameters", "named_parameters", "modules", "named_modules", "children", "state"),
        *("grad", "requires_grad", "requires_grad_", "add_param_group"),
    )
)
"""Names by which code comes to parameters, or to an optimizer's state."""

UNFREEZING = frozenset(("requires_grad", "requires_grad_"))
"""Names by which code has a parameter trained, or not."""

DEEPEST = 4  # containers within containers


class Habits(NamedTuple):
    """Whether a schedule ``draws`` random numbers, and ``touches`` parameters or their state.

    ``freezes``: whether it names what has parameters trained, or not.
    """

    draws: bool = False
    touches: bool = False
    freezes: bool = False


def habits_of(schedule: Any) -> Habits:
    """Those of the user's code in a schedule; torch's own have none."""
    code = [one for member in each_schedule(schedule) for one in _users_code(member)]
    if not code:
        return Habits()
    found = spelled_by(code)
    touches = "params" in found.strings or bool(found.names & TOUCHING)
    kept = [value for member in each_schedule(schedule) for value in _values(member)]
    holds = _holds_tensors([*code, *kept])
    rest = not found.is_whole
    freezes = bool(found.names & UNFREEZING)
    return Habits(bool(found.names & DRAWING) or rest, touches or holds or rest, freezes)


def unfreezes(recipe: Recipe, habits: Habits) -> bool:
    """Whether its schedule, of these ``habits``, or its own step may train what is frozen now."""
    if recipe.step is None or habits.touches:
        return habits.touches
    found = spelled_by([recipe.step])
    return bool(found.names & UNFREEZING) or not found.is_whole


def _users_code(schedule: Any) -> Iterator[types.FunctionType]:
    for kind in type(schedule).__mro__:
        if not is_library(kind):
            own = vars(kind).items()
            yield from (v for n, v in own if isinstance(v, types.FunctionType) and n != "__init__")
    yield from (v for v in _values(schedule) if isinstance(v, types.FunctionType))


def _values(schedule: Any) -> Iterator[Any]:
    """What a schedule keeps."""
    for value in getattr(schedule, "__dict__", {}).values():
        yield from value if isinstance(value, list | tuple) else (value,)


def _holds_tensors(values: Iterable[Any], depth: int = 0) -> bool:
    """Whether a tensor or a module is among the values, or in what they are made of."""
    for value in values:
        if isinstance(value, nn.Module | Tensor):
            return True
        inside: Iterable[Any] = ()
        if isinstance(value, list | tuple | set):
            inside = value
        elif isinstance(value, dict):
            inside = value.values()
        elif isinstance(value, types.FunctionType):
            inside = closed_over(value).values()
        if depth < DEEPEST and _holds_tensors(inside, depth + 1):
            return True
    return False


@contextmanager
def kept_in_place(parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Parameters keep the memory that they have, with the data that code gives them inside.

    Raises:
        TrialError: that has another shape or type.
    """
    places = {name: parameter.data for name, parameter in parameters.items()}
    yield
    for name, place in places.items():
        put_back(name, parameters[name], place)


def trained(module: nn.Module) -> list[bool]:
    """Which parameters are to be trained, in their order."""
    return [parameter.requires_grad for parameter in module.parameters()]
