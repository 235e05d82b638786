"""From a recipe's fields to all that their code names: values in words, definitions as text.

[Note: how far] A definition is followed to the functions, classes and constants that it
names, and these to theirs, as long as they are the user's own. Of a library only the
name is recorded, and the version for what stands in the recipe itself. A constant is its
value where that cannot change under way, else the assignment that made it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from shoal.core.closures import closed_over
from shoal.core.codes import codes_in, found_by_name
from shoal.resume.code import (
    Definitions,
    digest_of,
    is_read_whole,
    names_of,
    names_of_code,
    text_of,
)
from shoal.resume.home import Home, module_of, unwrap
from shoal.resume.words import (
    PLAIN,
    attributes_of,
    hide,
    is_plain,
    is_secret,
    qualname,
    shorten,
    stable_repr,
    version_of,
)

MAX_SOURCES = 500
_MAX_DEPTH = 4  # objects inside objects
_MAX_ITEMS = 100  # of a container


class Walk:
    """Describes values, and follows what their code names until nothing is new."""

    def __init__(self, home: Home) -> None:
        self._home, self._files = home, Definitions()
        self._names: dict[int, str] = {}  # of the definitions that were met, by identity
        self._met: list[Any] = []  # the same, kept so that no identity comes twice
        self._waiting: deque[Any] = deque()
        self._handed: dict[str, tuple[Any, str, Namespace]] = {}  # on as a whole, by place
        self.sources: dict[str, str] = {}

    def follow_all(self) -> None:
        """Give every definition that was met its source, and those it names."""
        while self._waiting:
            if len(self.sources) >= MAX_SOURCES:
                self.sources["..."] = f"more than {MAX_SOURCES} definitions"
                break
            definition = self._waiting.popleft()
            if isinstance(definition, type):
                self._follow_class(definition)
            else:
                self._follow_function(definition)
        for lasting, (owner, name, value) in self._handed.items():
            needed = self._needed(owner, name, value)
            self.sources[lasting] = f"{name} = {self._named(name, needed)}"

    def _needed(self, owner: Any, name: str, value: Namespace) -> Namespace:
        """Without what the file reads for itself, and no code that was met: a study's length.

        Nobody knows what becomes of the rest where it is handed on.
        """
        methods = [m for one in self._met if isinstance(one, type) for m in _methods(one)]
        codes = [one.__code__ for one in (*self._met, *methods) if isinstance(one, FunctionType)]
        read = {word for code in codes for one in codes_in(code) for word in one.co_names}
        for_file = self._files.read_at_top(owner, name) - read
        return Namespace(**{k: v for k, v in vars(value).items() if k not in for_file})

    # -- values in words ----------------------------------------------------------------------

    def describe(self, value: Any, depth: int = 0) -> str:
        """A value, or the name of a definition that will be followed."""
        if isinstance(value, PLAIN):
            return shorten(repr(value))
        if depth > _MAX_DEPTH:
            return f"{qualname(type(value))} object"
        if isinstance(value, Mapping | list | tuple | set | frozenset):
            return shorten(self._container(value, depth + 1))
        if isinstance(value, functools.partial):
            return self._partial(value, depth + 1)
        if isinstance(value, MethodType):
            return f"{self.describe(value.__self__, depth + 1)}.{value.__name__}"
        value = unwrap(value)
        if self._is_own_definition(value):
            return self._meet(value)
        if isinstance(value, ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, FunctionType | BuiltinFunctionType | type):
            return f"{qualname(value)}{version_of(value)}"
        return self._object(value, depth + 1)

    def _container(self, value: Any, depth: int) -> str:
        if len(value) > _MAX_ITEMS:
            return f"{qualname(type(value))} of {len(value)}"
        if isinstance(value, Mapping):
            pairs = ((self.describe(k, depth), self.describe(v, depth)) for k, v in value.items())
            return "{" + ", ".join(f"{key}: {item}" for key, item in pairs) + "}"
        items = [self.describe(item, depth) for item in value]
        if isinstance(value, set | frozenset):
            return "{" + ", ".join(sorted(items)) + "}"
        inside = ", ".join(items)
        return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"

    def _partial(self, value: functools.partial[Any], depth: int) -> str:
        parts = [self.describe(value.func, depth)]
        parts += [self.describe(argument, depth) for argument in value.args]
        parts += [f"{k}={self._named(k, v, depth)}" for k, v in sorted(value.keywords.items())]
        return f"partial({', '.join(parts)})"

    def _object(self, value: Any, depth: int) -> str:
        """An object's class, and those of its attributes that say what it does."""
        kind = type(value)
        is_own = self._home.owns(kind)
        name = self._meet(kind) if is_own else f"{qualname(kind)}{version_of(kind)}"
        kept = attributes_of(value, with_all=is_own or kind is Namespace)
        if not kept and not is_own:
            return stable_repr(value, name)
        shown = (f"{key}={self._named(key, item, depth)}" for key, item in kept.items())
        return f"{name} object({', '.join(shown)})"

    def _named(self, name: str, value: Any, depth: int = 0) -> str:
        if isinstance(value, str) and is_secret(name):
            return hide(value)
        return self.describe(value, depth)

    # -- definitions --------------------------------------------------------------------------

    def _is_own_definition(self, value: Any) -> bool:
        return isinstance(value, FunctionType | type) and self._home.owns(value)

    def _meet(self, definition: Any) -> str:
        """A definition's name; one that is new will be followed."""
        if id(definition) not in self._names:
            taken = set(self._names.values())
            name = wanted = self._home.name(definition, definition.__qualname__)
            count = 1
            while name in taken:
                count += 1
                name = f"{wanted} ({count})"
            self._names[id(definition)] = name
            self._met.append(definition)
            self._waiting.append(definition)
        return self._names[id(definition)]

    def _follow_function(self, function: FunctionType) -> None:
        name, code = self._names[id(function)], function.__code__
        node = self._files.function(function)
        if node is not None:
            self.sources[name] = text_of(node)
            self._add_globals(function, function.__globals__, names_of(node), node)
        else:
            self.sources[name] = digest_of(code)
            self._add_globals(function, function.__globals__, names_of_code(code))
            self._add_values(name, _defaults(function))  # else a part of the text
        self._add_values(name, _closure(function))
        self._add_by_name(function)

    def _follow_class(self, kind: type) -> None:
        name, methods = self._names[id(kind)], list(_methods(kind))
        node = self._files.class_(kind, methods) or self._files.constant(kind, kind.__qualname__)
        if node is not None:
            self.sources[name] = text_of(node)
            self._add_globals(kind, _namespace(kind, methods), names_of(node), node)
        else:
            parts = [self.describe(base) for base in kind.__bases__]
            self.sources[name] = "class of " + ", ".join([*parts, *map(self._meet, methods)])
        for method in methods:
            self._add_values(name, _closure(method))
            self._add_by_name(method)

    def _add_values(self, name: str, values: Mapping[str, Any]) -> None:
        """What a definition has of its own: defaults, and variables around it."""
        for variable, value in values.items():
            self.sources[f"{name}: {variable}"] = f"{variable} = {self._named(variable, value)}"

    def _add_by_name(self, function: FunctionType) -> None:
        """Definitions that it may come to by ``globals()`` or ``eval``."""
        for value in map(unwrap, found_by_name(function).values()):
            if self._is_own_definition(value):
                self._meet(value)

    # -- globals ------------------------------------------------------------------------------

    def _add_globals(
        self,
        owner: Any,
        namespace: Mapping[str, Any],
        names: Iterable[str],
        node: ast.AST | None = None,
    ) -> None:
        """All that the code of ``owner`` names, builtins aside; ``node`` is that code."""
        for dotted in names:
            name, *attributes = dotted.split(".")
            if name not in namespace or name.startswith("__"):
                continue  # the module's own __name__ says how it was imported
            place, value = owner, namespace[name]
            is_whole = node is None or attributes or is_read_whole(name, node)
            if isinstance(value, Namespace) and not is_whole:
                continue  # what is read of it is among the names
            while attributes and isinstance(value, ModuleType) and self._leads_home(value):
                place, name = value, attributes.pop(0)
                value = vars(value).get(name)
            if attributes and isinstance(value, Namespace):
                name, value = f"{name}.{attributes[0]}", getattr(value, attributes[0], None)
            self._add_global(place, name, value)

    def _leads_home(self, module: ModuleType) -> bool:
        """Whether a module is the user's, or a folder of modules that may be."""
        is_folder = getattr(module, "__file__", None) is None and hasattr(module, "__path__")
        return is_folder or self._home.owns(module)

    def _add_global(self, owner: Any, name: str, value: Any) -> None:
        """One global: followed where it is a definition, else recorded under its name."""
        value = unwrap(value)
        if self._is_own_definition(value):
            self._meet(value)
            return
        lasting = self._home.name(owner, name)
        if lasting in self.sources:
            return
        if isinstance(value, Namespace):  # no line says it; what it is to hold is known at the end
            self.describe(value)
            self._handed[lasting] = owner, name, value
            self.sources[lasting] = ""
            return
        is_told = is_plain(value)
        written = None if is_told else self._files.constant(owner, name)
        if written is not None:
            self.sources[lasting] = text_of(written)
            inside = [other for other in names_of(written) if other != name]
            self._add_globals(owner, _namespace(owner, []), inside, written)
        elif isinstance(value, FunctionType | BuiltinFunctionType | type):
            self.sources[lasting] = f"{name} = {qualname(value)}"
        else:
            self.sources[lasting] = f"{name} = {self._named(name, value)}"


def _namespace(owner: Any, methods: list[FunctionType]) -> Mapping[str, Any]:
    """The globals around a definition, or of a module."""
    around = owner if isinstance(owner, FunctionType) else None
    for function in [around, *methods]:
        if function is not None and function.__module__ == module_of(owner):
            return function.__globals__
    module = sys.modules.get(module_of(owner))
    return {} if module is None else vars(module)


def _methods(kind: type) -> Iterator[FunctionType]:
    for value in vars(kind).values():
        for part in ("__func__", "fget", "func"):  # class and static methods, properties
            value = getattr(value, part, None) or value
        value = unwrap(value)
        if isinstance(value, FunctionType) and value.__module__ == kind.__module__:
            yield value


def _closure(function: FunctionType) -> dict[str, Any]:
    """What a function closes over, but for the class that ``super`` reads."""
    return {name: value for name, value in closed_over(function).items() if name != "__class__"}


def _defaults(function: FunctionType) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
