"""What code has within: of functions, lambdas, comprehensions and classes that it defines."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """The code itself, and all code within, however deep."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def names_in(code: CodeType) -> Iterator[str]:
    """Of the globals and attributes that code reads, and code within."""
    for one in codes_in(code):
        yield from one.co_names
