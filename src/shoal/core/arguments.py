"""Arguments that a class does not take are refused with the one that was meant."""

from __future__ import annotations

import difflib
import functools
import inspect
from typing import Any, TypeVar

from shoal.core.errors import SpecError

Kind = TypeVar("Kind", bound=type)


def names_what_is_meant(kind: Kind) -> Kind:
    """The class, which says of an argument that it does not have which one is close to it."""
    init: Any = kind.__init__  # type: ignore[misc]  # of this class, and no other one's
    known = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        if unknown := [name for name in given if name not in known]:
            raise SpecError(_refusal(kind.__name__, unknown[0], known))
        init(self, *args, **given)

    setattr(kind, "__init__", checked)  # noqa: B010  # mypy allows no assignment to a method
    return kind


def _refusal(kind: str, name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {close[0]}=?" if close else f"it takes {', '.join(known)}."
    return f"{kind}({name}=...) is no argument of a {kind}; {meant}"
