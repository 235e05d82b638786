"""What a module's code asks of its own floats: whether a rate is more than 0, or there is one.

[Note: answers are part of a shape]
Code of one array runs once for all slots, so that slots have to answer alike: where they do not,
the part around the question runs slot by slot, and then a trial's bits would depend on who is
beside it. So what trials answer is in their signature, and those that answer otherwise are in
another array. The questions are read from the bytecode of the module's class: an attribute of
``self`` that is compared with a constant, or taken for true or false. torch's own modules ask
none that no rule answers, but for attention that returns its weights.
"""

from __future__ import annotations

import dis
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, MappingProxyType
from typing import Any

from torch import nn

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
_OF_TORCH: dict[type, dict[str, Question]] = {nn.MultiheadAttention: {"dropout": (">", 0.0)}}
_SKIPPED = {"CACHE", "EXTENDED_ARG", "PRECALL", "NOP", "SWAP", "COPY"}


def answers(module: nn.Module, name: str, value: float) -> str:
    """What a module's code is told that asks of its float ``name``; empty where none does."""
    kind: Any = type(module)
    asked = questions(kind).get(name, ())
    return ", ".join(
        f"{'' if _ANSWERS[sign](value, than) else 'not '}{_words(sign, than)}"
        for sign, than in asked
    )


def _words(sign: str, than: float) -> str:
    return sign if sign == TRUE else f"{sign} {than:g}"


@functools.cache
def questions(kind: type) -> Mapping[str, tuple[Question, ...]]:
    """By attribute what the code of a class, and of those that it is made of, asks."""
    found: dict[str, set[Question]] = {}
    for base in kind.__mro__:
        for name, question in _OF_TORCH.get(base, {}).items():
            found.setdefault(name, set()).add(question)
        if base.__module__.split(".")[0] in ("torch", "builtins"):
            continue
        for function in vars(base).values():
            if isinstance(function, FunctionType):
                for name, question in _asked_by(function):
                    found.setdefault(name, set()).add(question)
    return MappingProxyType({name: tuple(sorted(asked)) for name, asked in found.items()})


def _asked_by(function: FunctionType) -> Iterator[tuple[str, Question]]:
    code = [one for one in dis.get_instructions(function) if one.opname not in _SKIPPED]
    for at, load in enumerate(code):
        if load.opname != "LOAD_ATTR":
            continue
        before, after = code[max(0, at - 2)], code[at + 1 : at + 5]
        if _takes_for_true(after[0]):
            yield load.argval, (TRUE, 0.0)
        elif sign := _sign(after[0]):  # 0 < self.rate, and maybe < 1
            if _is_number(before):
                yield load.argval, (_SWAPPED[sign], float(before.argval))
            if len(after) == 4 and _takes_for_true(after[1]):
                yield from _compared(load.argval, after[2:])
        else:
            yield from _compared(load.argval, after)


def _compared(name: str, code: Sequence[dis.Instruction]) -> Iterator[tuple[str, Question]]:
    """The question of code that begins with a number and compares with it."""
    if len(code) > 1 and _is_number(code[0]) and (sign := _sign(code[1])):
        yield name, (sign, float(code[0].argval))


def _sign(one: dis.Instruction) -> str:
    """That of a comparison, empty of anything else."""
    sign = str(one.argval).removeprefix("bool(").removesuffix(")")
    return sign if one.opname == "COMPARE_OP" and sign in _SWAPPED else ""


def _is_number(one: dis.Instruction) -> bool:
    return one.opname.startswith("LOAD_") and type(one.argval) in (int, float)


def _takes_for_true(one: dis.Instruction) -> bool:
    is_jump = "JUMP" in one.opname and "IF_" in one.opname and "NONE" not in one.opname
    return is_jump or one.opname in ("TO_BOOL", "UNARY_NOT")
