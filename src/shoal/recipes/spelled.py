"""Which strings the code of a function spells: the names by which it can read a mapping.

Nothing is run. Followed are the functions, classes and values that a function names: in its
constants, defaults, closure and globals, and the attributes of modules, classes and objects that
it asks for; not what libraries define. So the answer is the same in every process, and at any
time. It may have strings that are no names. It lacks a name that is put together as the code runs.
"""

from __future__ import annotations

import dis
import functools
import itertools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from shoal.core.closures import closed_over
from shoal.core.codes import codes_in, names_in
from shoal.recipes.libraries import is_library

STORES = dis.opmap["STORE_GLOBAL"]
CALLS = {dis.opmap[name] for name in ("KW_NAMES", "CALL_KW") if name in dis.opmap}
"""With keywords: before Python 3.13, and since."""
MOST = 1000  # values that are looked into
LONGEST = 100  # items of a list
ATTRIBUTES = frozenset(("__call__", "__init__", "forward"))
"""Those that nobody has to name."""


def spelled(function: Any) -> frozenset[str]:
    """Every string in the code of a function, and of what that names."""
    return spelled_by([function]).strings


class Spelled(NamedTuple):
    """What code spells: strings, and names of globals and attributes that it asks for.

    ``is_whole``: all was looked into that it names.
    """

    strings: frozenset[str]
    names: frozenset[str]
    is_whole: bool


def spelled_by(functions: Iterable[Any]) -> Spelled:
    """The same of several, and more."""
    walk = _Walk()
    for function in functions:
        walk.look_at(getattr(function, "_orig_mod", function))  # of a module that torch compiled
    return Spelled(frozenset(walk.found), frozenset(walk.names), walk.is_whole)


def code_met(functions: Iterable[Any], *, makes: bool = True) -> Iterator[Any]:
    """The functions, classes and modules that code comes to, as far as ``spelled`` looks.

    Where it ``makes`` objects of the classes that it names, what that comes to, too.
    """
    walk = _Walk()
    if not makes:
        walk.names.discard("__init__")
    for function in functions:
        walk.look_at(getattr(function, "_orig_mod", function))
    yield from walk.met


class _Walk:
    """What was found so far, and what is still to be looked into."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.names = set(ATTRIBUTES)  # of globals and attributes that the code asks for
        self._met: dict[int, Any] = {}  # by identity; held, so that no identity comes twice
        self._waiting: deque[Any] = deque()
        self._holders: list[Mapping[str, Any]] = []  # attributes, of which names count

    def look_at(self, value: Any) -> None:
        """A value, all that it is made of, and whatever attributes are asked for."""
        self._waiting.append(value)
        while self._waiting and len(self._met) < MOST:
            one = self._waiting.popleft()
            if isinstance(one, str):
                self.found.add(one)
            elif id(one) not in self._met:
                self._met[id(one)] = one
                self._waiting += self._parts(one)
            if not self._waiting:
                self._waiting += self._asked_for()

    @property
    def met(self) -> Iterator[Any]:
        """All that was looked into but strings, in that order."""
        return iter(self._met.values())

    @property
    def is_whole(self) -> bool:
        return not self._waiting

    def _asked_for(self) -> list[Any]:
        values = [
            holder[name] for holder in self._holders for name in sorted(self.names & holder.keys())
        ]
        self.found.update(value for value in values if isinstance(value, str))
        return [v for v in values if not isinstance(v, str) and id(v) not in self._met]

    def _parts(self, value: Any) -> Iterable[Any]:
        """What a value is made of, as far as a name may be in it."""
        if value is None or isinstance(value, bool | int | float | complex | bytes | Tensor):
            return ()
        if isinstance(value, set | frozenset):  # in an order that is the same in each process
            return sorted(one for one in value if isinstance(one, str))[:LONGEST]
        if isinstance(value, list | tuple):
            return itertools.islice(value, LONGEST)
        if isinstance(value, dict):  # of a class of its own, which may have another ``items``
            return itertools.chain(*itertools.islice(dict.items(value), LONGEST))
        if isinstance(value, types.MappingProxyType):  # others would run code
            return itertools.chain(*itertools.islice(value.items(), LONGEST))
        if isinstance(value, types.CodeType):
            self.names |= set(value.co_names)
            return _constants(value)
        if isinstance(value, functools.partial):
            return (value.func, *value.args, *value.keywords.values())
        if isinstance(value, types.MethodType):
            return value.__func__, value.__self__
        if isinstance(value, staticmethod | classmethod):
            return (value.__func__,)
        if isinstance(value, property):
            return (value.fget,)
        if isinstance(value, types.FunctionType):
            return () if is_library(value) else _parts_of_function(value)
        self._hold(value)
        return ()

    def _hold(self, value: Any) -> None:
        """The attributes of a class, a module or an object; of a library's, a module's parts."""
        if isinstance(value, types.ModuleType):
            kinds: list[Any] = [] if is_library(value) else [value]
        elif isinstance(value, type):
            kinds = [kind for kind in value.__mro__ if not is_library(kind)]
        else:
            kinds = [kind for kind in type(value).__mro__ if not is_library(kind)]
            if type(value).__dictoffset__ and (kinds or isinstance(value, nn.Module)):
                kinds.append(value)
        self._holders += [vars(kind) for kind in kinds]
        if isinstance(value, nn.Module):
            self._holders.append(dict(value.named_children()))


def _constants(code: types.CodeType) -> Iterator[Any]:
    """Those of code, but for names of arguments in calls: ``Adam(p, lr=1e-3)`` reads no ``lr``."""
    tuples = [one for one in code.co_consts if isinstance(one, tuple)]
    if not tuples or not CALLS & set(code.co_code[::2]):
        return iter(code.co_consts)
    before, keywords = None, set[int]()
    for one in dis.get_instructions(code):
        if one.opcode in CALLS and one.opname == "KW_NAMES":
            keywords.add(one.arg or 0)
        elif one.opcode in CALLS and before is not None and before.opname == "LOAD_CONST":
            keywords.add(before.arg or 0)
        before = one
    return (one for at, one in enumerate(code.co_consts) if at not in keywords)


def _parts_of_function(function: types.FunctionType) -> Iterator[Any]:
    yield function.__code__
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from vars(function).values()  # what a decorator keeps there
    yield from closed_over(function).values()
    for name in sorted(set(names_in(function.__code__)) & function.__globals__.keys()):
        yield function.__globals__[name]


def stored_in(code: types.CodeType) -> Iterator[str]:
    """The globals that code assigns, and code within."""
    for one in codes_in(code):
        if STORES in one.co_code[::2]:  # hardly any does, and to take instructions apart is slow
            yield from (o.argval for o in dis.get_instructions(one) if o.opcode == STORES)
