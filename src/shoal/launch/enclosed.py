"""What a call put into a module or class: a function or class that one of the user's modules made
within another function, so that no name finds it.

``patches.apply()`` makes a function that calls ``old = Attention.forward``, and puts it there. No
line of the file assigns anything. In an installed package such a function stands because one of
the user's modules put it there; in the user's own where a module's code defines another one of
that name, as it is. Whether an import has done that already, which a worker does too, is seen
there (``Change.is_sure``).
"""

from __future__ import annotations

import dis
import gc
from collections.abc import Callable, Iterator, Mapping
from inspect import CO_OPTIMIZED
from types import CodeType, FunctionType, ModuleType
from typing import Any

from shoal.launch.usercode import code_of_file
from shoal.pystate.changes import AROUND, function_of
from shoal.pystate.sendable import home_of

_WITHIN = "<locals>"


def made_within(users: Mapping[str, ModuleType]) -> dict[int, Any]:
    """Functions and classes of the user's modules that were made within functions, by ``id``; and
    what is around one, as a ``staticmethod``."""
    if not users:
        return {}
    kinds = {FunctionType, *AROUND, *metaclasses()}
    found = [one for one in gc.get_objects() if type(one) in kinds]
    return {id(one): one for one in found if _is_within(function_of(one), users)}


def _is_within(one: Any, users: Mapping[str, ModuleType]) -> bool:
    if type(one) is FunctionType:  # by its code: one that wraps another has the other's names
        return home_of(one) in users and _WITHIN in one.__code__.co_qualname
    is_class = issubclass(type(one), type) and str(vars(one).get("__module__")) in users
    return is_class and _WITHIN in one.__qualname__


def metaclasses(kind: type[type] = type) -> Iterator[type]:
    """Types of classes: by them classes are found that nobody is to ask what they are."""
    yield kind
    for one in type.__subclasses__(kind):
        yield from metaclasses(one)


def replaced_in(
    module: ModuleType, found: Callable[[Any], bool]
) -> Iterator[tuple[str, str, Any]]:
    """What of those ``found`` stands in a module, or in a class of it, where its code gives the
    name another function or class, or has no such name: path, name and value."""
    code = code_of_file(module)
    if code is None:
        return
    within = (one for one in code.co_consts if isinstance(one, CodeType))
    bodies = {one.co_qualname: one for one in within if not one.co_flags & CO_OPTIMIZED}
    classes = {
        name: value
        for name, value in list(vars(module).items())
        if isinstance(value, type) and value.__module__ == module.__name__
    }
    yield from (("", *one) for one in _others(vars(module), code, found, bodies))
    for name, kind in classes.items():
        if kind.__qualname__ == name and (body := bodies.get(name)) is not None:
            yield from ((name, *one) for one in _others(vars(kind), body, found, {}))


def _others(
    held: Mapping[str, Any],
    code: CodeType,
    found: Callable[[Any], bool],
    classes: Mapping[str, CodeType],
) -> Iterator[tuple[str, Any]]:
    given = _given(code)
    for name, value in list(held.items()):
        if found(value) and (given.get(name, True) or (name in classes and name in given)):
            yield name, value


def _given(code: CodeType) -> dict[str, bool]:
    """Names that code of a module or class gives something: whether it is each time a function as
    it is, without a decorator."""
    given: dict[str, bool] = {}
    before = ""
    for step in dis.get_instructions(code):
        if step.opname == "STORE_NAME":
            name = str(step.argval)
            given[name] = before == "MAKE_FUNCTION" and given.get(name, True)
        if step.opname != "SET_FUNCTION_ATTRIBUTE":  # defaults and the like, from Python 3.13 on
            before = step.opname
    return given
