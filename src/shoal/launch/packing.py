"""A recipe as bytes for the workers."""

from __future__ import annotations

import functools
import importlib
import io
import sys
import warnings
import weakref
from collections import ChainMap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, ClassVar

import cloudpickle
import numpy as np
from cloudpickle.cloudpickle import _make_empty_cell
from torch._library.custom_ops import CustomOpDef

from shoal.core.closures import closed_over
from shoal.core.codes import found_by_name, names_in
from shoal.core.errors import SpecError
from shoal.core.units import format_bytes
from shoal.launch.reached import imported_for_itself, named_objects, reached
from shoal.launch.replaced import users_modules
from shoal.launch.usercode import codes_of
from shoal.pystate.ambient import is_users
from shoal.pystate.arriving import arrive, read_state
from shoal.pystate.changes import (
    Change,
    Named,
    Unsent,
    cached,
    function_of,
    known_by,
    set_function_and_note,
    with_changes,
)
from shoal.pystate.comparing import Fingerprints
from shoal.pystate.modulestate import ModuleState, Place, left_words
from shoal.pystate.values import place_of_own_stream
from shoal.recipes.recipe import Recipe
from shoal.source import MAINS, MODULE_NAME

_WARN_BYTES = 16 * 2**20
_MOST_ROUNDS = 3  # until no more modules, and no large values, are found that go
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_CODE = (FunctionType, type, functools.partial, MethodType)
_NO_FILE = "<dynamic-code>"  # what cloudpickle puts in the place of a file's name


def pack_recipe(recipe: Recipe, changes: Collection[Change] = ()) -> bytes:
    """The recipe as bytes for a worker; only what ``__main__`` defines travels by value.

    ``changes`` in other modules go with it: they are made where it is read. So does what the
    user's own modules hold (``modulestate``); what of it the recipe refers to is theirs.

    Raises:
        SpecError: something cannot travel; names the field and the object. Or a module's file has
            changed since it was imported.
    """
    _register_source_module()
    changes = tuple(_with_unsent(changes))
    try:
        packed = _dumps(_Arriving(_Changed(changes, recipe)))
    except SpecError:
        raise
    except Exception as error:
        state = _state_of(list(users_modules().values()))
        _refuse_change(changes, state)
        field, reason, place = _culprit(recipe, error, state)
        what = f"{place[0].upper()}{place[1:]} is an object" if place else "It refers to an object"
        raise SpecError(
            f"Recipe({field}=...) cannot be sent to a worker: {reason.rstrip('.')}. {what} "
            "that lives in this process only (an open file, a lock, a connection, a generator). "
            "Make that object inside the function, or load it from a path there."
        ) from error
    if len(packed) > _WARN_BYTES:
        warnings.warn(
            f"the recipe is {format_bytes(len(packed))} for every worker: it carries data along. "
            "Load the data inside Recipe(data=...) instead of closing over it.",
            stacklevel=2,
        )
    return packed


@dataclass(frozen=True, slots=True)
class _Changed:
    """Read as the recipe alone, when the changes have been made."""

    changes: tuple[Change, ...]
    recipe: Any

    @property
    def modules(self) -> set[str]:
        """Those that are imported where changes are made, to be undone as these are."""
        values = (change.value for change in self.changes)
        return {value.module for value in values if isinstance(value, Named)}

    def __reduce__(self) -> tuple[Any, ...]:
        return with_changes, (self.changes, self.recipe)


@dataclass(frozen=True, slots=True)
class _Arriving:
    """Read as what was packed, in a process whose modules hold what they hold here."""

    packed: _Changed

    def __reduce__(self) -> tuple[Any, ...]:
        users, fingerprints = users_modules(), Fingerprints()
        modules, whole = reached((), users), set[int]()
        for _ in range(_MOST_ROUNDS):
            state, file, pickler = self._packed(modules, whole=whole, fingerprints=fingerprints)
            before, modules = modules, reached(pickler.modules, users)
            whole |= pickler.large
            if modules == before and not pickler.large:
                break
        first = {*pickler.modules, *imported_for_itself(users)} - self.packed.modules
        imports = [name for name in users if name in first]
        codes = codes_of(modules)
        return arrive, (list(sys.argv), imports, state.packed, file.getvalue(), codes)

    def _packed(
        self, modules: list[ModuleType], **options: Any
    ) -> tuple[ModuleState, io.BytesIO, _Pickler]:
        """What is in there, but for what those modules hold."""
        state, file = _state_of(modules, **options), io.BytesIO()
        by_value = {id(function_of(one.value)) for one in self.packed.changes if not one.is_sure}
        pickler = _Pickler(file, state, by_value=by_value)
        pickler.dump((state.of_main, self.packed))
        return state, file, pickler


def _state_of(modules: list[ModuleType], **options: Any) -> ModuleState:
    """What modules hold; nothing that could not be read again, with a warning of whose it is."""
    named = list(named_objects())

    def state_of(chosen: Collection[Place] | None = None) -> ModuleState:
        return ModuleState(modules, _size_by_value, named, chosen=chosen, **options)

    state = state_of()
    if _unreadable(state) is None:
        return state
    good = set[Place]()
    for place in state.places:
        if (error := _unreadable(state_of([place]))) is None:
            good.add(place)
        else:
            words = left_words(*place, f"{type(error).__name__}: {error}")
            warnings.warn(words, stacklevel=2)
    return state_of(good)


def _unreadable(state: ModuleState) -> Exception | None:
    try:
        read_state(state.packed)
    except Exception as error:  # whatever a type of somebody else's does
        return error
    return None


def _size_by_value(value: Any) -> int | None:
    """Bytes of what the main file defines; None where it cannot be sent."""
    try:
        return len(_dumps(value))
    except Exception:  # whatever its own code raises
        return None


def _with_unsent(changes: Collection[Change]) -> Iterator[Change]:
    """An import may have made those that are not sure: one that cannot go is looked for there."""
    state = None
    for change in changes:
        if not change.is_sure:
            state = state or _state_of(list(users_modules().values()))
            if (reason := _why_not(change, state, (id(function_of(change.value)),))) is not None:
                why = (
                    f"is what code of {function_of(change.value).__module__} put there, which "
                    f"cannot be sent to workers ({type(reason).__name__}: {reason}), so they have "
                    "what their imports make. If it is to hold there, call that code inside "
                    "Recipe(model=...)"
                )
                change = change._replace(value=Unsent(known_by(change.value), why))
        yield change


def _refuse_change(changes: Iterable[Change], state: ModuleState) -> None:
    for change in changes:
        if (reason := _why_not(change, state)) is not None:
            raise SpecError(
                f"{change.full_name} is what your file put there, and that cannot be sent to a "
                f"worker: {type(reason).__name__}: {reason}. Put it there inside "
                "Recipe(model=...), which workers call."
            ) from reason


def _dumps(value: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _reduce_code(code: CodeType) -> tuple[Any, tuple[Any, ...]]:
    make, arguments = cloudpickle.CloudPickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if a == _NO_FILE else a for a in arguments)


def _reduce_cached(function: Any) -> str | tuple[Any, ...]:
    """By value where workers have no such module; what was cached stays here."""
    if function.__module__ in MAINS or "<locals>" in function.__qualname__:
        return cached, (function.__wrapped__, function.cache_parameters())
    return str(function.__qualname__)


def _reduce_property(one: functools.cached_property[Any]) -> tuple[Any, ...]:
    """Without the lock that Python 3.11 has in it."""
    state = {name: value for name, value in vars(one).items() if name != "lock"}
    return functools.cached_property, (one.func,), state


def _reduce_weak(held: Any) -> tuple[Any, ...]:
    """What is in it now, and is held by others: ``functools.singledispatch`` has such a cache."""
    return type(held), (list(held) if isinstance(held, weakref.WeakSet) else dict(held),)


def _reduce_variable(variable: ContextVar[Any]) -> tuple[Any, ...]:
    """One of that name, with what this thread has in it."""
    default, value = (tuple(_value_in(one, variable)) for one in (Context(), copy_context()))
    return _make_variable, (variable.name, default, value)


def _value_in(context: Context, variable: ContextVar[Any]) -> Iterator[Any]:
    with suppress(LookupError):
        yield context.run(variable.get)


def _make_variable(name: str, default: tuple[Any, ...], value: tuple[Any, ...]) -> ContextVar[Any]:
    made: ContextVar[Any] = ContextVar(name, default=default[0]) if default else ContextVar(name)
    if value:
        made.set(value[0])
    return made


class _EmptyCell:
    """Read as a cell with nothing in it yet."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_empty_cell, ()


@dataclass(frozen=True, slots=True)
class _Globals:
    """Read as the globals of a module."""

    module: ModuleType

    def __reduce__(self) -> tuple[Any, ...]:
        return vars, (self.module,)


def _home(function: FunctionType) -> ModuleType | None:
    """The user's module that a function is from and workers have; what it holds, too."""
    name = function.__globals__.get("__name__")
    module = None if name in MAINS else sys.modules.get(str(name))
    is_from = module is not None and vars(module) is function.__globals__ and is_users(module)
    return module if is_from else None


def _is_of_class_by_value(function: FunctionType) -> bool:
    """Whether ``super()`` is asked in it of a class that no name finds."""
    names = function.__code__.co_freevars
    cell = dict(zip(names, function.__closure__ or (), strict=True)).get("__class__")
    try:
        kind = cell.cell_contents if cell is not None else None
    except ValueError:  # the class is being made
        return False
    if not isinstance(kind, type):
        return False
    found: Any = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is not kind


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]  # it has no types
    """Code keeps the name of its file, so that tracebacks and warnings show the user's lines.

    Functions with ``lru_cache`` around them go as functions do, which cloudpickle by itself sends
    by name. Modules of a class of their own (``torch.backends.cudnn``) go by name as others do.
    What the user's file defines goes by value, also where it wraps a library's function, has the
    name of that one and is in its place; and what another module of theirs has by no name of its
    own (a class that a decorator took the place of), with that module's globals. What functions
    close over together they do so there.

    Args:
        state: Of objects that the other side has already.
        by_value: Functions, by ``id``, that another name than theirs has there.

    Attributes:
        modules: Names of those that were met, by themselves or by what they have.
        large: By identity, values that the other side has only if they go.
    """

    dispatch_table: ClassVar[Any] = ChainMap(
        {
            CodeType: _reduce_code,
            functools._lru_cache_wrapper: _reduce_cached,
            functools.cached_property: _reduce_property,
            ContextVar: _reduce_variable,
            **dict.fromkeys(_WEAK, _reduce_weak),
        },
        cloudpickle.CloudPickler.dispatch_table,
    )

    def __init__(
        self,
        file: io.BytesIO,
        state: ModuleState | None = None,
        *,
        by_value: Collection[int] = (),
        is_trial: bool = False,
    ) -> None:
        super().__init__(file)
        self._by_value = by_value
        self._going: dict[tuple[tuple[str, int], ...], dict[str, Any]] = {}
        self._is_trial = is_trial
        self._numbers: Mapping[int, int] = state.numbers if state else {}
        self._homes: Sequence[str] = state.homes if state else ()
        self._cells: dict[int, tuple[CellType, _EmptyCell]] = {}
        self.modules: set[str] = set()
        self.large: set[int] = set()
        self._large: Mapping[int, Any] = state.large if state else {}

    def persistent_id(self, value: Any) -> int | None:
        number = self._numbers.get(id(value))
        if number is not None:
            if place_of_own_stream(value) is not None:
                return None  # each process has one
            self.modules.add(self._homes[number])
        elif id(value) in self._large:
            self.large.add(id(value))
        return number

    def reducer_override(self, value: Any) -> Any:
        """Asked before the table, which knows exact types only."""
        self._meet(value)
        if _is_special_module(value):
            return importlib.import_module, (value.__name__,)
        if isinstance(value, FunctionType) and value.__globals__.get("__name__") in MAINS:
            return self._of_main(value)
        if isinstance(value, FunctionType) and (
            id(value) in self._by_value or _is_of_class_by_value(value)
        ):
            return self._dynamic_function_reduce(value)
        if isinstance(value, CustomOpDef):
            return _where_defined(value)
        if (original := _displaced(value)) is not None:
            return _imported, original
        if (place := place_of_own_stream(value)) is not None:
            return getattr, place
        return super().reducer_override(value)

    def _of_main(self, function: FunctionType) -> tuple[Any, ...]:
        """By value, with globals that it names and those of which it may make the names."""
        reduced: tuple[Any, ...] = self._dynamic_function_reduce(function)
        _, parts = reduced[2]
        known = self._those_that_go(found_by_name(function))
        parts["__globals__"] = known | parts["__globals__"]
        return reduced

    def _those_that_go(self, found: dict[str, Any]) -> dict[str, Any]:
        """What can be sent, of what code may not ask for at all; one look at all of it may do."""
        if self._is_trial:
            return {}
        key = tuple((name, id(one)) for name, one in found.items())
        if key not in self._going:
            some = found if _goes(found) else {k: v for k, v in found.items() if _goes(v)}
            self._going[key] = some
        return self._going[key]

    def _dynamic_function_reduce(self, function: FunctionType) -> tuple[Any, ...]:
        reduced: tuple[Any, ...] = super()._dynamic_function_reduce(function)
        if _home(function) is not None:
            _, parts = reduced[2]
            named = parts["__globals__"].items()  # what is no code is there as it is here
            parts["__globals__"] = {name: one for name, one in named if isinstance(one, _CODE)}
            return (*reduced[:5], set_function_and_note)
        return reduced

    def _function_getnewargs(self, function: FunctionType) -> tuple[Any, ...]:
        """Cells that functions share are shared afterwards too; what is in them comes later."""
        code, held, *arguments, _ = super()._function_getnewargs(function)
        home = _home(function)
        arguments = [code, held if home is None else _Globals(home), *arguments]
        if function.__closure__ is None:
            return (*arguments, None)
        shared = [self._cells.setdefault(id(c), (c, _EmptyCell())) for c in function.__closure__]
        return (*arguments, tuple(empty for _, empty in shared))

    def _meet(self, value: Any) -> None:
        if isinstance(value, ModuleType):
            self.modules.add(value.__name__)
        else:
            code = value if isinstance(value, FunctionType | type) else type(value)
            self.modules.add(str(code.__module__))


def _goes(value: Any) -> bool:
    """Whether it can be sent, but for what its code may come to by names that it makes."""
    try:
        _Pickler(io.BytesIO(), is_trial=True).dump(value)
    except Exception:  # whatever its own code raises
        return False
    return True


def _displaced(function: Any) -> tuple[str, str] | None:
    """Where a worker finds a function that is written in C, where a file has put another one."""
    kind = type(function)
    if kind not in (BuiltinFunctionType, np.ufunc) and kind.__name__ != _OF_NUMPY:
        return None
    module = "numpy" if isinstance(function, np.ufunc) else function.__module__
    home, name = sys.modules.get(str(module)), function.__name__
    found = None if home is None else vars(home).get(name)
    return None if found in (None, function) else (str(module), name)


_OF_NUMPY = "_ArrayFunctionDispatcher"  # it has no name of its own there


def _imported(module: str, name: str) -> Any:
    """What a module has there; a recipe is read before changes are made."""
    return getattr(importlib.import_module(module), name)


def _where_defined(operator: CustomOpDef) -> tuple[Any, ...]:
    """An operator as what a module has: torch knows it by the module's import."""
    module, name = operator._init_fn.__module__, operator._init_fn.__name__
    known = sys.modules.get(module)
    if module in MAINS or getattr(known, name, None) is not operator:
        raise TypeError(
            f"the operator {operator._qualname} is not at the top level of a module that workers "
            "import; define it in one beside your file, and import that"
        )
    return getattr, (known, name)


def _is_special_module(value: object) -> bool:
    if not isinstance(value, ModuleType) or type(value) is ModuleType:
        return False
    return sys.modules.get(value.__name__) is value


def _register_source_module() -> None:
    module = sys.modules.get(MODULE_NAME)
    if module is not None:
        cloudpickle.register_pickle_by_value(module)


def _culprit(recipe: Recipe, error: Exception, state: ModuleState) -> tuple[str, str, str]:
    """The first field that cannot be pickled, why, and the name of what cannot, if it has one."""
    for name in recipe.__dataclass_fields__:
        value = getattr(recipe, name)
        if (reason := _why_not(value, state)) is not None:
            place = _name_within(value, state, set())
            return name, f"{type(reason).__name__}: {reason}", place
    return "...", f"{type(error).__name__}: {error}", ""


def _why_not(
    value: object, state: ModuleState, by_value: Collection[int] = ()
) -> Exception | None:
    """Why it cannot be pickled, beside what is in ``state``."""
    try:
        _Pickler(io.BytesIO(), state, by_value=by_value).dump(value)
    except Exception as reason:
        return reason
    return None


def _name_within(value: object, state: ModuleState, met: set[int]) -> str:
    """Which global or variable that code refers to cannot be pickled; the innermost."""
    met.add(id(value))
    for words, inner in _referred(value):
        if id(inner) in met or _why_not(inner, state) is None:
            continue
        if found := _name_within(inner, state, met):
            return found
        if met.isdisjoint(id(one) for _, one in _referred(inner)):  # a method leads to its class
            return words
    return ""


def _referred(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, type):
        yield from ((f"{name!r} of {value.__name__}", one) for name, one in vars(value).items())
    if not isinstance(value, FunctionType):
        return
    known, where = value.__globals__, value.__qualname__
    for name in names_in(value.__code__):
        if name in known:
            yield f"the global {name!r}, which {where} names,", known[name]
    for name, one in closed_over(value).items():
        yield f"{name!r}, which {where} closes over,", one
