"""What a module's code asks of its own floats: whether a rate is more than 0, or there is one.

[Note: answers are part of a shape]
Code of one array runs once for all slots, so that slots have to answer alike: where they do not,
the part around the question runs slot by slot, and then a trial's bits would depend on who is
beside it. So what trials answer is in their signature, and those that answer otherwise are in
another array. The questions are read from the bytecode of the module's class: an attribute of
``self``, of what it has, or a local name for one, that is compared with a constant, or taken for
true or false. torch's own modules ask none that no rule answers, but for attention that returns
its weights.
"""

from __future__ import annotations

import dis
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, MappingProxyType
from typing import Any

from torch import nn

Path = tuple[str, ...]
"""Names of attributes, one of another."""
Question = tuple[str, float]
"""A comparison, such as (">", 0.0); ("is true", 0.0)."""

TRUE = "is true"
_ANSWERS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    TRUE: lambda value, _: bool(value),
}
_SWAPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
_OF_TORCH: dict[type, dict[Path, Question]] = {
    nn.MultiheadAttention: {("dropout",): (">", 0.0)},
}
_SKIPPED = {"CACHE", "EXTENDED_ARG", "PRECALL", "NOP", "SWAP", "COPY"}


def answers(module: nn.Module) -> Iterator[tuple[str, str]]:
    """What a module's code is told that asks of its floats, by the name of each."""
    kind: Any = type(module)
    for path, asked in questions(kind).items():
        value = functools.reduce(_part, path, module)
        if isinstance(value, int | float) and not isinstance(value, bool):
            told = [
                f"{'' if _ANSWERS[sign](value, than) else 'not '}{_words(sign, than)}"
                for sign, than in asked
            ]
            yield ".".join(path), ", ".join(told)


def _part(value: Any, name: str) -> Any:
    """An attribute, or a module within a module; None where there is none."""
    there = getattr(value, "__dict__", {})
    return there.get(name, there.get("_modules", {}).get(name))


def _words(sign: str, than: float) -> str:
    return sign if sign == TRUE else f"{sign} {than:g}"


@functools.cache
def questions(kind: type) -> Mapping[Path, tuple[Question, ...]]:
    """By attribute what the code of a class, and of those that it is made of, asks."""
    found: dict[Path, set[Question]] = {}
    for base in kind.__mro__:
        for path, question in _OF_TORCH.get(base, {}).items():
            found.setdefault(path, set()).add(question)
        if base.__module__.split(".")[0] in ("torch", "builtins"):
            continue
        for function in vars(base).values():
            if isinstance(function, FunctionType) and function.__code__.co_argcount:
                for path, question in _asked_by(function):
                    found.setdefault(path, set()).add(question)
    return MappingProxyType({path: tuple(sorted(asked)) for path, asked in found.items()})


def _asked_by(function: FunctionType) -> Iterator[tuple[Path, Question]]:
    code = [one for one in dis.get_instructions(function) if one.opname not in _SKIPPED]
    known: dict[str, Path] = {function.__code__.co_varnames[0]: ()}  # local names
    at = 0
    while at < len(code):
        first, one = at, code[at]
        at += 1
        if one.opname == "STORE_FAST":
            known.pop(one.argval, None)
        if not one.opname.startswith("LOAD_FAST") or one.argval not in known:
            continue
        path = known[one.argval]
        while at < len(code) and code[at].opname == "LOAD_ATTR":
            path = (*path, code[at].argval)
            at += 1
        if not path or at >= len(code):
            continue
        if code[at].opname == "STORE_FAST":  # rate = self.rate
            known[code[at].argval] = path
            at += 1
            continue
        for question in _asked_at(code[max(0, first - 1)], code[at : at + 4]):
            yield path, question


def _asked_at(before: dis.Instruction, after: Sequence[dis.Instruction]) -> Iterator[Question]:
    """The questions of a number that was loaded just now."""
    if _takes_for_true(after[0]):
        yield TRUE, 0.0
    elif sign := _sign(after[0]):  # 0 < self.rate, and maybe < 1
        if _is_number(before):
            yield _SWAPPED[sign], float(before.argval)
        if len(after) == 4 and _takes_for_true(after[1]):
            yield from _compared(after[2:])
    else:
        yield from _compared(after)


def _compared(code: Sequence[dis.Instruction]) -> Iterator[Question]:
    """The question of code that begins with a number and compares with it."""
    if len(code) > 1 and _is_number(code[0]) and (sign := _sign(code[1])):
        yield sign, float(code[0].argval)


def _sign(one: dis.Instruction) -> str:
    """That of a comparison, empty of anything else."""
    sign = str(one.argval).removeprefix("bool(").removesuffix(")")
    return sign if one.opname == "COMPARE_OP" and sign in _SWAPPED else ""


def _is_number(one: dis.Instruction) -> bool:
    return one.opname.startswith("LOAD_") and type(one.argval) in (int, float)


def _takes_for_true(one: dis.Instruction) -> bool:
    is_jump = "JUMP" in one.opname and "IF_" in one.opname and "NONE" not in one.opname
    return is_jump or one.opname in ("TO_BOOL", "UNARY_NOT")
