"""Arguments that a class or function does not take are refused with what was meant."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from shoal.core.errors import SpecError

Kind = TypeVar("Kind", bound=type)
Given = ParamSpec("Given")
Made = TypeVar("Made")


def names_what_is_meant(**elsewhere: str) -> Callable[[Kind], Kind]:
    """Has a class say of an argument that it does not have which one is meant.

    Args:
        elsewhere: What it is called here, by what other libraries call it; for all others the
            closest name is taken.
    """

    def decorate(kind: Kind) -> Kind:
        init: Any = kind.__init__  # type: ignore[misc]  # of this class, and no other one's
        known = list(inspect.signature(init).parameters)[1:]

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **given: Any) -> None:
            if unknown := [name for name in given if name not in known]:
                words = _meant(unknown[0], known, elsewhere)
                name = kind.__name__
                raise SpecError(f"{name}({unknown[0]}=...) is no argument of a {name}; {words}")
            init(self, *args, **given)

        setattr(kind, "__init__", checked)  # noqa: B010  # mypy allows no assignment to a method
        return kind

    return decorate


def says_instead(
    **instead: str,
) -> Callable[[Callable[Given, Made]], Callable[Given, Made]]:
    """Has a function say of arguments that others of its kind take what to do ``instead``."""

    def decorate(function: Callable[Given, Made]) -> Callable[Given, Made]:
        @functools.wraps(function)
        def checked(*args: Given.args, **given: Given.kwargs) -> Made:
            if unknown := [name for name in given if name in instead]:
                name = unknown[0]
                raise SpecError(f"{function.__name__}({name}=...): {instead[name]}")
            return function(*args, **given)

        return checked

    return decorate


def _meant(name: str, known: list[str], elsewhere: Mapping[str, str]) -> str:
    close = [elsewhere[name]] if name in elsewhere else difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}=?" if close else f"it takes {', '.join(known)}."
