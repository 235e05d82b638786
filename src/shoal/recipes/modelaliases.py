"""What code reads in a parameter's memory, and not by the parameter.

A trial's parameters move: into the memory that is kept for them, to a device, into a row of an
array, to the host and back. What is made of one where the trial is made (``self.tied =
layer.weight.data``, ``.t()``, ``.detach()``) would be left behind, with the first values: in an
attribute of the model, its optimizer or schedule, in a hook, in a global.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shoal.core.closures import closed_over
from shoal.core.codes import names_in
from shoal.core.errors import SpecError
from shoal.recipes.libraries import is_library
from shoal.recipes.spelled import code_met

DEEPEST = 4
MOST = 1000  # values of an attribute that are looked into


def refuse_aliases(model: nn.Module) -> None:
    """Raise SpecError for an attribute or a hook in a parameter's memory that its code reads.

    Of those that are trained: what is frozen has the first values anywhere.
    """
    memory = _Memory(dict(model.named_parameters()), model.buffers())
    read: Collection[str] | None = None
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if f"{key}_orig" in module._parameters or (key in _TORCHS and key not in _HOOKS):
                continue  # its old norms set those
            name = memory.name_of(value)
            if name is None:
                continue
            read = _names_read(_methods_of(model)) if read is None else read
            if key in _HOOKS or key in read:
                place = repr(f"{path}.{key}".lstrip("."))
                raise _left_behind(
                    f"Recipe(model=...) returned a model whose code reads {place}", name
                )
    for path, parameter in model.named_parameters():
        hooks = [getattr(parameter, key, None) for key in _HOOKS_OF_TENSORS]
        if (name := memory.name_of([one for one in hooks if one])) is not None:
            raise _left_behind(f"a hook of the parameter {path!r} keeps a tensor", name)


def refuse_kept(
    made: object, parameters: Mapping[str, nn.Parameter], field: str, but: Collection[str] = ()
) -> None:
    """Raise SpecError for what an optimizer or a schedule keeps in a parameter's memory.

    In its attributes, ``but`` some, and in its hooks.
    """
    memory = _Memory(parameters)
    for key, value in getattr(made, "__dict__", {}).items():
        if key not in but and (name := memory.name_of(value)) is not None:
            kind = type(made).__name__
            raise _left_behind(f"the {kind} of Recipe({field}=...) keeps {key!r}", name)


def refuse_met(
    parameters: Mapping[str, nn.Parameter],
    recipe: Mapping[str, Any],
    model: nn.Module | None = None,
) -> None:
    """Raise SpecError for what code comes to in a parameter's memory, as in a global.

    ``recipe`` has it by field, and a ``model`` in its methods. Of parameters that somebody else
    holds, which few are: all of the code is gone through.
    """
    held = {n: p for n, p in parameters.items() if p.requires_grad and _is_held_elsewhere(p)}
    if not held:
        return
    memory = _Memory(held)
    code = [given for field, given in recipe.items() if field not in _FIRST]
    met = list(code_met([*code, *_methods_run(model)], makes=False))
    kinds = [one for one in met if isinstance(one, type) and not is_library(one)]
    methods = [value for kind in kinds for value in _methods_in(kind)]
    for one in (*met, *code_met(methods, makes=False)):
        if isinstance(one, Tensor | np.ndarray) and (name := memory.name_of(one)) is not None:
            shape = "x".join(map(str, one.shape)) or "a number"
            raise _left_behind(
                f"the recipe's code reads a tensor ({shape}), as in a global or a closure", name
            )


_FIRST = ("model", "data")
"""Fields whose code runs before anything trains."""


def _is_held_elsewhere(parameter: Tensor) -> bool:
    if parameter.layout is not torch.strided or parameter.device.type == "meta":
        return False
    storage = parameter.untyped_storage()
    holders: int = torch._C._storage_Use_Count(storage._cdata)
    return holders > 2 or not storage.resizable()  # itself and ``storage``; NumPy's or a file's


def _methods_in(kind: type) -> Iterator[types.FunctionType]:
    """With no name of code that calls them, as torch calls those of an optimizer."""
    for name, value in vars(kind).items():
        if isinstance(value, types.FunctionType) and name not in _MAKING:
            yield value


def _methods_run(model: nn.Module | None) -> Iterator[types.FunctionType]:
    """The methods of a model's classes, but for what only makes it."""
    methods = {} if model is None else _methods_of(model)
    read = _names_read(methods)
    return (one for name, some in methods.items() if name in read for one in some)


def _left_behind(what: str, name: str) -> SpecError:
    return SpecError(
        f"{what}, which lies in the memory of the parameter {name!r} (by .data, .detach(), "
        ".numpy() or a view). A trial's parameters get memory of their own, and it would be left "
        "behind with the first values. Keep the parameter itself, and take that of it where it is "
        "read; or if the first values are what is wanted, a copy (.clone())."
    )


_TORCHS = frozenset(vars(nn.Module()))
"""What torch keeps in each module."""
_HOOKS = frozenset(
    name for name in _TORCHS if name.endswith("_hooks") and "state_dict" not in name
)
"""Of that what calls the user's code as it trains."""
_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_MAKING = frozenset(("__init__", "__new__"))


class _Memory:
    """Where the trained among these parameters lie; ``others`` are known beside them."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], others: Iterable[Tensor] = ()
    ) -> None:
        self._spans = {name: _span(p) for name, p in parameters.items() if p.requires_grad}
        self._own = {id(tensor) for tensor in (*parameters.values(), *others)}

    def name_of(self, value: Any) -> str | None:
        """The parameter in whose memory something of a value lies that is none of them."""
        found = [_span(one) for one in _tensors_in(value) if id(one) not in self._own]
        spans = self._spans.items() if found else ()
        return next((name for name, span in spans if any(map(span.meets, found))), None)


class _Span(NamedTuple):
    """From which byte to which something lies in memory."""

    start: int
    end: int

    def meets(self, other: _Span) -> bool:
        return self.start < other.end and other.start < self.end


def _span(value: Any) -> _Span:
    """That of a tensor or of an array of NumPy."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.device.type == "meta" or not value.numel():
            return _Span(0, 0)
        steps = zip(value.shape, value.stride(), strict=True)
        reach = (1 + sum((size - 1) * step for size, step in steps)) * value.element_size()
        return _Span(value.data_ptr(), value.data_ptr() + reach)
    start = int(value.__array_interface__["data"][0])
    return _Span(start, start + value.nbytes)


def _tensors_in(value: Any) -> Iterator[Any]:
    """Tensors and arrays in an attribute: in containers, closures and the user's objects."""
    waiting: list[tuple[Any, int]] = [(value, 0)]
    met: set[int] = set()
    while waiting and len(met) < MOST:
        one, depth = waiting.pop()
        if isinstance(one, Tensor | np.ndarray):
            yield one
        elif id(one) not in met and depth < DEEPEST:
            met.add(id(one))
            waiting += ((part, depth + 1) for part in _parts(one))


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if type(value) in (dict, OrderedDict, types.MappingProxyType):  # others may run code
        return list(value.values())
    if isinstance(value, types.FunctionType):
        return closed_over(value).values()
    if isinstance(value, types.MethodType):
        return (value.__self__,)
    if isinstance(value, partial):
        return (*value.args, *value.keywords.values())
    is_code = isinstance(value, nn.Module | type | types.ModuleType)  # modules have their own turn
    try:
        kept: dict[str, Any] = {} if is_code else object.__getattribute__(value, "__dict__")
    except AttributeError:
        return ()
    return kept.values()


def _methods_of(model: nn.Module) -> dict[str, list[types.FunctionType]]:
    """By name the methods and properties of the model's classes, but of torch's."""
    methods: dict[str, list[types.FunctionType]] = {}
    for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
        if kind.__module__.partition(".")[0] != "torch":
            for name, value in vars(kind).items():
                function = getattr(value, "fget", None) or getattr(value, "__func__", value)
                if isinstance(function, types.FunctionType):
                    methods.setdefault(name, []).append(function)
    return methods


def _names_read(methods: Mapping[str, Iterable[types.FunctionType]]) -> Collection[str]:
    """The names that these spell, but for what only makes a model."""
    named = {
        name: {one for function in some for one in names_in(function.__code__)}
        for name, some in methods.items()
    }
    making = _reached(["__init__"], named)
    return _reached(["forward", *(named.keys() - making)], named)


def _reached(names: Iterable[str], methods: Mapping[str, Collection[str]]) -> set[str]:
    """These names, and those that methods of such names spell, and so on."""
    found, waiting = set[str](), list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += methods.get(name, ())
    return found
