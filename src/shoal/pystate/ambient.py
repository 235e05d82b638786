"""What a recipe's code keeps in globals, on classes and in its own functions.

A process has one of each, and alone a trial has them for itself. So each trial of a worker has
values of its own, which are put in place with its random streams, and begins with those that the
making of trials has left: a factory may keep what it has read from a disk.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import types
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shoal.core.closures import closed_over
from shoal.core.codes import codes_in, names_in
from shoal.core.errors import TrialError
from shoal.kernels.kernelchoice import KernelChoice
from shoal.pystate.iterators import is_iterator
from shoal.pystate.ofprocess import SETTINGS, OfProcess, may_set
from shoal.pystate.ofthread import OF_THREAD
from shoal.pystate.packing import LOST, Giving, Unkept, pack_one
from shoal.pystate.parts import SPACES, changing_defaults, has_attributes
from shoal.pystate.values import NOTHING, PLAIN, STREAMS, Look, Note, look_at, put_one
from shoal.recipes.bound import code_of
from shoal.recipes.libraries import is_installed, is_library
from shoal.recipes.recipe import Recipe
from shoal.recipes.spelled import code_met, spelled, stored_in
from shoal.source import MAINS

DATA = (*PLAIN, type(None), list, dict, set, deque, tuple, Tensor, np.ndarray, *STREAMS, *SPACES)
"""What code may keep something in, beside iterators, functions and objects of the user's."""
MAKING = frozenset(("__init__", "__new__"))
"""Methods that make an object, and are no part of a step."""
OURS = f"{Path(__file__).parents[1]}{os.sep}"
LONGEST, LARGEST, VALUES, ROOM = 200, 2**20, 500, 2**24
"""What of one global is looked into, each time that trials alternate."""
PROCESS = "this process"
Notes = Mapping[str, Mapping[str, Note]]
"""By owner and name."""


class Ambient:
    """The globals that steps of one recipe read and write, in this process.

    Made before any of the recipe's code has run. ``begin`` undoes what steps did since a trial was
    last built, ``settle``: what makes trials may keep what it has read from a disk, and says so in
    globals. ``take`` says what is there now, and ``put`` puts that in place again. Notes refer to
    the objects themselves and belong to who took them.

    ``fixed``: what of a trial somebody else looks after, by identity, as its parameters.
    ``all_code``: also what nothing but the making of trials reads and writes.
    """

    def __init__(self, recipe: Recipe | None, *, all_code: bool = False) -> None:
        self._recipe = recipe
        self._met = [] if recipe is None else list(code_met(map(code_of, _given(recipe))))
        owners = () if recipe is None else _owners(recipe, self._met, all_code)
        self._owners = dict(owners)
        self._process = OfProcess() if may_set(self.makers()) else None
        if self._process is not None:
            self._owners[PROCESS] = self._process
        self._settled = self.take()

    @functools.cached_property
    def making(self) -> Ambient:
        """That of all code of the recipe's."""
        return Ambient(self._recipe, all_code=True)

    def begin(self) -> None:
        """As when a trial was last built; the next one is built from there."""
        self.put(self._settled)
        if self._process is not None:
            self._process.begin()

    def settle(self, fixed: Mapping[int, str] | None = None) -> Notes:
        """A trial has been built: what that set stays for the next one; what is there now.

        But for settings of the process: each trial begins with those of its study.
        """
        made = self._settled = self.take(fixed)
        if self._process is not None:
            self._process.end()
            own = {SETTINGS: Note("other", self._process.of_study)}
            self._settled = {**made, PROCESS: own}
        return made

    def end(self) -> None:
        """Nothing is built any more."""
        if self._process is not None:
            self._process.end()

    def take(self, fixed: Mapping[int, str] | None = None) -> Notes:
        """What is there now."""
        look = Look(fixed or {}, longest=LONGEST, largest=LARGEST, room=ROOM)
        return {where: _look(owner, look) for where, owner in self._owners.items()}

    def put(self, notes: Notes) -> None:
        """Have the globals be as they were when ``notes`` were taken.

        Raises:
            TrialError: some cannot be; all others are.
        """
        stuck: list[_Stuck] = []
        for where, kept in notes.items():
            owner = self._owners[where]
            stuck += [_Stuck(where, name, owner, e) for name, e in _refill(owner, kept)]
        if stuck:
            raise TrialError(_in_words(stuck)) from stuck[0].error

    @functools.cached_property
    def asked(self) -> frozenset[str]:
        """The names of globals and attributes that code of steps reads, and strings: keys."""
        if self._recipe is None:
            return frozenset()
        codes = [code for code, _ in _codes(self._recipe, _kinds_met(self._met))]
        names = {name for code in codes for name in (*names_in(code), *_free_in(code))}
        return frozenset(names.union(*(spelled(code) for code in codes)))

    def held(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """What there is now, by who has it, of any type; also what functions close over."""
        for where, owner in self._owners.items():
            yield where, owner.every() if isinstance(owner, _Globals) else owner
        for one in self._met:
            if isinstance(one, types.FunctionType) and one.__closure__ and is_users(one):
                yield one.__qualname__, closed_over(one)

    def makers(self) -> list[types.FunctionType]:
        """All functions of the user's that the recipe comes to, those that make trials too."""
        found = [one for one in map(_function, self._met) if one is not None]
        given = map(_function, map(code_of, _given(self._recipe))) if self._recipe else ()
        found += [one for one in given if one is not None]
        return list({id(one): one for one in found}.values())

    def has(self, place: str) -> bool:
        """Whether a value called ``module.name`` or ``module.class.name`` is a trial's own.

        Or a setting, as ``KernelChoice`` calls it.
        """
        if self._process is not None and place in KernelChoice.here().called():
            return True
        return any(
            f"{place}.".startswith(f"{where}.{name}.") and _is_whole(note)
            for where, notes in self._settled.items()
            for name, note in notes.items()
        )

    def changed(self, before: Notes, after: Notes) -> tuple[dict[str, Any], list[str]]:
        """By place what changed from ``before`` to ``after``, packed.

        And the places of what changed and is no trial's own: it cannot be packed, or put back.
        """
        found: dict[str, Any] = {}
        lost: list[str] = []
        own = {id(note.held) for notes in after.values() for note in notes.values()}
        for where, notes in after.items():
            for name, note in notes.items() if where != PROCESS else ():
                was = before.get(where, {}).get(name, NOTHING)
                if was is NOTHING and isinstance(note.held, types.FunctionType):
                    was = Note("parts", note.held, {})  # that had no attributes then
                packed = LOST if _is_written(was, note) else pack_one(note, was, own)
                if packed is LOST:
                    lost.append(f"{where}: {name}")
                elif packed is not None:
                    found[f"{where}: {name}"] = packed
        return found, lost

    def give(
        self,
        packed: Mapping[str, Any],
        device: torch.device,
        fixed: Mapping[str, Any] | None = None,
    ) -> None:
        """Have what is in place hold what was packed; ``fixed`` by the names that notes had."""
        giving = Giving(device, fixed=fixed)
        for place, one in packed.items():
            where, _, name = place.rpartition(": ")
            if (owner := self._owners.get(where)) is None:
                continue
            with suppress(Unkept):
                owner[name] = giving.give(one, owner.get(name), (place,))


_active: list[Ambient] = []  # that of this process's studies first, then those of loops alone


def watch(recipe: Recipe) -> None:
    """From now on this process trains trials of ``recipe``, none of whose code has run yet."""
    _active[:] = [Ambient(recipe)]
    _came[:] = [_Before()]


def leave() -> None:
    """All is as it was when ``watch`` was called: the next study may be of the same code."""
    for ambient in _active:
        ambient.end()
    while _came:
        _came.pop().undo()


class _Before:
    """What all of the recipe's code finds now, to have it so again.

    Modules of the user's that are imported until then are imported anew after it, since what they
    did when they were is undone.
    """

    def __init__(self) -> None:
        self.making = here().making
        self._notes, self._modules = self.making.take(), set(sys.modules)

    def undo(self) -> None:
        self.making.put(self._notes)
        for name in sys.modules.keys() - self._modules:
            module = sys.modules[name]
            if isinstance(module, types.ModuleType) and is_users(module):
                del sys.modules[name]


_came: list[_Before] = []  # how this process's study found it


def here() -> Ambient:
    """The globals of the recipe that this process trains; none where nobody said which."""
    return _active[0] if _active else Ambient(None)


@contextmanager
def watching(recipe: Recipe) -> Iterator[Ambient]:
    """The same for a loop that trains trials alone, one after another."""
    ambient = Ambient(recipe)
    _active.append(ambient)
    try:
        yield ambient
    finally:
        ambient.end()
        _active.remove(ambient)


class Hollow(Exception):
    """What was made without memory is in a global, where other code would look for it."""


@contextmanager
def tried() -> Iterator[None]:
    """What is made inside may fail, or have no memory: then it leaves nothing in globals.

    Raises:
        Hollow: it left there what has no memory.
    """
    before = _Before()
    try:
        yield
    except BaseException:
        before.undo()
        raise
    if any(_is_hollow(n) for notes in before.making.take().values() for n in notes.values()):
        before.undo()
        raise Hollow


def _is_hollow(note: Note) -> bool:
    """Whether a tensor without memory is in there."""
    if isinstance(note.held, Tensor):
        return note.held.device.type == "meta"
    inside = note.inside.values() if isinstance(note.inside, dict) else note.inside
    return note.kind in ("items", "dict", "parts") and any(map(_is_hollow, inside))


def built(fixed: Mapping[int, str] | None = None) -> None:
    """All of a trial has been built, and nothing has run; ``fixed`` as of ``Ambient``."""
    for ambient in _active:
        ambient.settle(fixed)


def _is_whole(note: Note) -> bool:
    """Whether all that it holds can be put back, beside code."""
    if note.kind in ("tensor", "array"):
        return (note.inside[1] if note.kind == "tensor" else note.inside) is not None
    if note.kind in ("other", "iterator", "huge"):
        return isinstance(note.held, _CODE)
    inside = note.inside.values() if isinstance(note.inside, dict) else note.inside
    return note.kind not in ("items", "dict", "parts") or all(map(_is_whole, inside))


_CODE = (type, types.BuiltinFunctionType, types.ModuleType)


def _look(owner: Mapping[str, Any], look: Look) -> dict[str, Note]:
    if isinstance(owner, OfProcess):
        return {name: Note("other", value) for name, value in owner.items()}
    found = {}
    for name, value in owner.items():
        look.values = VALUES
        is_kept = not isinstance(owner, _Globals) or owner.may_change(value)
        found[name] = look_at(value, look) if is_kept else Note("other", value)
    return found


def _refill(
    owner: MutableMapping[str, Any], notes: Mapping[str, Note]
) -> list[tuple[str, Exception]]:
    """Have it hold what was noted; the names of what cannot be put back, and why."""
    stuck: list[tuple[str, Exception]] = []
    for name in [name for name in owner if name not in notes]:
        value = owner[name]
        try:
            if isinstance(value, types.FunctionType):  # that had no attributes then
                vars(value).clear()
            else:
                del owner[name]
        except Exception as error:
            stuck.append((name, error))
    for name, note in notes.items():
        try:
            put_one(owner, name, note)
        except Exception as error:
            stuck.append((name, error))
    return stuck


class _Stuck(NamedTuple):
    """A value that cannot be put back."""

    where: str
    name: str
    owner: Mapping[str, Any]
    error: Exception


def _in_words(stuck: Sequence[_Stuck]) -> str:
    where, name, owner, error = stuck[0]
    kind = type(owner.get(name)).__qualname__
    others = f", nor can {len(stuck) - 1} more" if len(stuck) > 1 else ""
    return (
        f"{name!r} of {where}, of type {kind}, cannot be given back what it held{others}: "
        f"{type(error).__name__}: {error}. Each trial has values of its own of the globals that "
        "steps read, and the trials of a worker would share this one. Have steps change plain "
        "containers, tensors or attributes of your own objects there; if it is of a package, "
        "install that: what is in site-packages is left alone."
    )


def _is_written(before: Note, after: Note) -> bool:
    """Whether a tensor was written in place that is too large to be put back."""
    if before.kind != "tensor" or before.held is not after.held or before.inside[1] is not None:
        return False
    return bool(before.inside[0] != after.inside[0])


# -- who has globals ------------------------------------------------------------------------------


class _Globals(MutableMapping[str, Any]):
    """The values among a module's globals that code names, or among a class's attributes.

    Args:
        names: None for all.
        assigned: Those that code assigns, whatever they hold.
    """

    def __init__(
        self, owner: Any, names: Iterable[str] | None = None, assigned: Iterable[str] = ()
    ) -> None:
        self._owner, self._assigned = owner, frozenset(assigned)
        self._names = None if names is None else sorted({*names, *self._assigned})
        held = self._held
        there = list(held) if self._names is None else [n for n in self._names if n in held]
        modules = [held[name] for name in there if isinstance(held[name], nn.Module)]
        self._modules = {id(module): module for module in modules}  # none of a trial's models

    def may_change(self, value: Any) -> bool:
        """Whether it is a value that code may keep something in."""
        return _may_change(value) or id(value) in self._modules

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.items())

    def items(self) -> list[tuple[str, Any]]:  # type: ignore[override]
        """Those that may change, with their values."""
        every = self.every().items()
        return [(n, v) for n, v in every if n in self._assigned or self.may_change(v)]

    def every(self) -> dict[str, Any]:
        """The same of any value."""
        held = self._held
        names = list(held) if self._names is None else [n for n in self._names if n in held]
        return {name: held[name] for name in names if not name.startswith("__")}

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        return self._held[name]

    def __setitem__(self, name: str, value: Any) -> None:
        before = self._held.get(name, NOTHING)
        if before is value:
            return
        if isinstance(self._owner, type):
            if not isinstance(before, types.FunctionType):  # torch wraps an optimizer's step
                setattr(self._owner, name, value)
        else:
            self._owner[name] = value

    def __delitem__(self, name: str) -> None:
        if isinstance(self._owner, type):
            delattr(self._owner, name)
        else:
            del self._owner[name]

    @property
    def _held(self) -> Mapping[str, Any]:
        return vars(self._owner) if isinstance(self._owner, type) else self._owner


def _owners(
    recipe: Recipe, met: Sequence[Any], all_code: bool
) -> Iterator[tuple[str, MutableMapping[str, Any]]]:
    """What code of steps keeps values in, by how it is called; ``met`` as ``code_met`` says."""
    users = _kinds_met(met)
    codes = list(_codes(recipe, users))
    if all_code:
        functions = [f for f in met if isinstance(f, types.FunctionType) and is_users(f)]
        codes += [(function.__code__, function.__globals__) for function in functions]
    spelled = frozenset(name for code, _ in codes for name in names_in(code))
    named: dict[int, tuple[dict[str, Any], set[str], set[str]]] = {}
    for code, known in codes:
        _, names, assigned = named.setdefault(id(known), (known, set(), set()))
        names |= set(names_in(code)) & known.keys()
        assigned |= set(stored_in(code))
    for one in met:
        if isinstance(one, types.ModuleType) and is_users(one):
            named.setdefault(id(vars(one)), (vars(one), set(), set()))[1].update(spelled)
        elif isinstance(one, types.FunctionType) and is_users(one):
            known = one.__globals__
            if id(known) in named:  # what a factory assigns, and steps read
                _, names, assigned = named[id(known)]
                assigned |= set(stored_in(one.__code__)) & (spelled | names)
    called = Counter[str]()  # functions that come by value have globals of their own, so named
    for known, names, assigned in named.values():
        name = str(known.get("__name__", ""))
        called[name] += 1
        number = f" ({called[name]})" if called[name] > 1 else ""
        yield f"{name}{number}", _Globals(known, names, assigned)
    for kind in users:
        yield f"{kind.__module__}.{kind.__qualname__}", _Globals(kind)
    yield "the recipe", dict(_steps(recipe))


def _kinds_met(met: Iterable[Any]) -> list[type]:
    """The user's classes that code comes to, and those of its objects."""
    named = [one if isinstance(one, type) else type(one) for one in met]
    named += {type(one) for one in named}
    kinds = {id(kind): kind for one in named for kind in one.__mro__}
    return [kind for kind in kinds.values() if is_users(kind)]


def _given(recipe: Recipe) -> Iterator[Any]:
    """All code that the recipe's user gave."""
    yield from (value for value in vars(recipe).values() if callable(value))
    yield from (function for _, function in recipe.metric_functions())


def _steps(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """The functions that a step calls."""
    for name in ("loss", "inputs", "step", "evaluate"):
        if (value := getattr(recipe, name)) is not None:
            yield name, code_of(value)
    for name, metric in recipe.metric_functions():
        yield f"metric {name!r}", code_of(metric)


def _codes(
    recipe: Recipe, kinds: Iterable[type]
) -> Iterator[tuple[types.CodeType, dict[str, Any]]]:
    """The code of steps, with its globals: what makes trials counts by what it defines."""
    waiting: deque[Any] = deque(value for _, value in _steps(recipe))
    for value in list(waiting):
        waiting += [v for kind in type(value).__mro__ for v in vars(kind).values()]
    makers: list[Any] = [recipe.model, recipe.data, recipe.optimizer, recipe.schedule]
    for kind in kinds:
        waiting += [value for name, value in vars(kind).items() if name not in MAKING]
        makers += [vars(kind)[name] for name in MAKING if name in vars(kind)]
    for maker in map(_function, makers):
        if maker is not None:  # a hook, say, that it registers, or what a schedule asks
            yield from ((code, maker.__globals__) for code in _codes_within(maker))
            waiting += _called_within(maker)
    met = set[int]()
    if (source := _function(recipe.data)) is not None:  # what it names is called for each batch
        waiting += [*_named_by(source), *closed_over(source).values()]
    while waiting:
        function = _function(waiting.popleft())
        if function is None or id(function) in met:
            continue
        met.add(id(function))
        yield function.__code__, function.__globals__
        waiting += _named_by(function)
        inside = closed_over(function).values()
        waiting += [value for value in inside if isinstance(value, types.FunctionType)]


def _free_in(code: types.CodeType) -> Iterator[str]:
    """What code closes over, and code within."""
    for one in codes_in(code):
        yield from one.co_freevars


def _codes_within(function: types.FunctionType) -> Iterator[types.CodeType]:
    """Of the functions that it defines."""
    return (one for one in function.__code__.co_consts if isinstance(one, types.CodeType))


def _called_within(function: types.FunctionType) -> list[Any]:
    """What functions that it defines name: of its globals, and of what it closes over."""
    codes = list(_codes_within(function))
    names = {n for code in codes if not _runs_at_once(code) for n in names_in(code)}
    free = {n for code in codes if not _runs_at_once(code) for n in _free_in(code)}
    inside = closed_over(function)
    return [*_globals_named(function, names), *(inside[n] for n in sorted(free & inside.keys()))]


def _runs_at_once(code: types.CodeType) -> bool:
    """Whether it is of a comprehension, which runs where it stands."""
    return code.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


def _named_by(function: types.FunctionType) -> list[Any]:
    """The values of globals that a function names, and what it asks of those that are modules."""
    return _globals_named(function, set(names_in(function.__code__)))


def _globals_named(function: types.FunctionType, names: set[str]) -> list[Any]:
    values = [function.__globals__[n] for n in sorted(names & function.__globals__.keys())]
    modules = [v for v in values if isinstance(v, types.ModuleType) and is_users(v)]
    return values + [vars(m)[name] for m in modules for name in sorted(names & vars(m).keys())]


def _function(value: Any) -> types.FunctionType | None:
    """A function of the user's, out of what wraps it."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.cached_property | functools.partialmethod):
        value = value.func
    elif isinstance(value, types.MethodType | staticmethod | classmethod):
        value = value.__func__
    value = inspect.unwrap(value) if isinstance(value, types.FunctionType) else value
    return value if isinstance(value, types.FunctionType) and is_users(value) else None


def is_users(code: Any) -> bool:
    """Whether a function, class or module is in the user's files: no package's, nor shoal's."""
    if is_library(code):
        return False
    if isinstance(code, types.FunctionType):
        known = code.__globals__
    elif isinstance(code, types.ModuleType):
        known = vars(code)
    elif code.__module__ in MAINS:  # of a script: this process's own main file is shoal's
        return True
    else:
        known = vars(sys.modules.get(code.__module__, types))
    file = str(known.get("__file__") or "")
    return not is_installed(file) and not file.startswith(OURS)


def _may_change(value: Any) -> bool:
    kind = type(value)
    if kind is types.FunctionType:
        keeps = vars(value) or value.__closure__ or changing_defaults(value)
        return bool(keeps) and not is_library(value)
    known = _kinds.get(kind)
    if known is None:
        known = _kinds.setdefault(kind, _kind_may_change(value))
    return known


_kinds: dict[type, bool] = {}  # whether values of a type may change


def _kind_may_change(value: Any) -> bool:
    if isinstance(value, (*DATA, *OF_THREAD)) or is_iterator(value):
        return True
    is_code = isinstance(value, type | types.ModuleType | nn.Module | property | staticmethod)
    kind = type(value)
    return not is_code and has_attributes(kind) and not is_library(kind)
