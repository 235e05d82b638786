"""What a rule works with: the slots of one pass, their tensors and their random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name
from torch.utils import _pytree as pytree

from shoal.fusion.declined import FROZEN, Declined, Disagreement, Unbatched
from shoal.fusion.passes.outside import AtOnce, Outside
from shoal.fusion.passes.streams import SlotStreams
from shoal.fusion.rows.layout import as_alone, in_one_piece
from shoal.fusion.rows.level import Level, plainly
from shoal.fusion.rows.perslot import PerSlot, values_of

WRITING = frozenset(
    (
        *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__"),
        *("__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"),
    )
)
"""Operators that write into their first operand; methods that do end in an underscore."""

NUMBERS = (bool, int, float, complex, str)


class Slots:
    """One pass of a model's code for all slots; ``active`` are those whose results count.

    ``outside`` draws and checks for it; at once, if nothing else is said. ``is_trained`` tells of
    a parameter as the code finds it, which does not say so itself; None of other tensors.
    ``are_rows`` tells whether a tensor is in the memory of parameters or buffers.
    Shapes in the rules: N slots, B rows of a batch, C channels, T time, H heads or hidden.
    """

    def __init__(
        self,
        level: Level,
        streams: SlotStreams,
        active: Sequence[bool],
        outside: Outside | None = None,
    ) -> None:
        self.level, self.streams, self.width = level, streams, level.width
        self.outside: Outside = outside or AtOnce(streams)
        self.is_trained: Callable[[Tensor], bool | None] = lambda tensor: None
        self.are_rows: Callable[[Tensor], bool] = lambda stacked: False
        self._active = active
        self.num_looped = 0  # operations that ran slot by slot

    def asks_gradient(self, tensor: Tensor, requires_grad: bool = True) -> bool:
        """Have a batch's tensor keep its gradient, by which code takes a derivative, or not.

        Code may say of a parameter that it is trained, or frozen, if it is: then, and of what all
        slots share, False, and nothing is done.

        Raises:
            Declined: it is not.
        """
        if (is_trained := self.is_trained(tensor)) not in (None, requires_grad):
            raise Declined(FROZEN)
        if is_trained is not None or not self.level.is_slotted(tensor):
            return False
        with plainly():  # torch's batching has no such thing, and says nothing
            self.level.open(tensor)[0].requires_grad_(requires_grad)
        return True

    def has_values(self, *values: object) -> bool:
        """Whether one of ``values`` is a tensor with a value per slot."""
        return any(isinstance(v, Tensor) and self.level.is_slotted(v) for v in values)

    def stacked(self, tensor: Tensor) -> Tensor:
        """The plain tensor [N, ...] behind what the model's code holds."""
        return self.level.stacked(tensor)

    def slotted(self, stacked: Tensor, dim: int = 0) -> Tensor:
        """The other way; ``dim`` is the dimension of slots."""
        return self.level.slotted(stacked, dim)

    def numbers(self, number: float, like: Tensor) -> Tensor:
        """A float of every slot as a tensor [N] of the type of ``like``."""
        dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
        values = values_of(number, self.width)
        with plainly():
            return torch.tensor(values, dtype=dtype, device=like.device)

    def by_value(self, *numbers: float) -> dict[Any, list[int]]:
        """The slots that have one value, or one of several numbers each, by that value."""
        found: dict[Any, list[int]] = {}
        columns = [values_of(number, self.width) for number in numbers]
        for slot, values in enumerate(zip(*columns, strict=True)):
            found.setdefault(values if len(values) > 1 else values[0], []).append(slot)
        return found

    def answered(self, function: Callable[..., Any], tensor: Tensor) -> Any:
        """What ``function`` makes of a tensor of one number: a truth, or a whole number."""
        if not self.level.is_slotted(tensor):
            return self.outside.answer(tensor, lambda: function(tensor))
        x_N = self.level.stacked(tensor)
        return self.outside.answer(x_N, lambda: self.each(function, (tensor,)))

    def each(self, function: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        """``function`` slot by slot, each with its own numbers: right for anything.

        Raises:
            Disagreement: Python values that differ by slot, or tensors of differing shapes.
        """
        return self.each_its_own([function] * self.width, args, kwargs)

    def each_its_own(self, functions: Sequence[Callable[..., Any]], args: Any, kwargs: Any) -> Any:
        """The same with another function for every slot."""
        self.outside.loops(_name(functions[0]))
        self.num_looped += 1
        leaves, tree = pytree.tree_flatten((args, kwargs or {}))
        opened: list[tuple[Any, int | None]] = [
            self._opened(x) if isinstance(x, Tensor) else (x, None) for x in leaves
        ]
        self._refuse_shared_target(functions[0], leaves, kwargs or {})
        if functions[0] is Tensor.normal_:
            opened[0] = self._opened(leaves[0], in_one_piece)
        if writes(functions[0]) and self._keeps_what_is_written(opened):
            opened[0] = self._rows_for_each(*opened[0]), 0
        results: list[Any] = [None] * self.width
        taking_part = [slot for slot in range(self.width) if self._active[slot]]
        with plainly():
            for slot in taking_part:
                mine = [_pick(value, dim, slot) for value, dim in opened]
                own_args, own_kwargs = pytree.tree_unflatten(mine, tree)
                with self.streams.as_default(slot):
                    results[slot] = functions[slot](*own_args, **own_kwargs)
        if writes(functions[0]):
            self._write_back(leaves[0], opened[0][0])
        some = results[taking_part[0]]
        if writes(functions[0]) and isinstance(some, Tensor):
            return leaves[0]
        for slot in set(range(self.width)) - set(taking_part):  # anything of that shape will do
            results[slot] = pytree.tree_map_only(Tensor, Tensor.detach, some)
        return self._joined(functions[0], results, taking_part)

    def _opened(
        self, tensor: Tensor, lay: Callable[[Tensor], Tensor] = as_alone
    ) -> tuple[Tensor, int | None]:
        """What is within and its dimension of slots, each slot's as it lies alone."""
        inside, dim = self.level.open(tensor)
        if dim is None:
            return inside, dim
        x_N = self.level.stacked(tensor)
        with plainly():
            laid = lay(x_N)
        return (inside, dim) if laid is x_N else (laid, 0)

    def _keeps_what_is_written(self, opened: Sequence[tuple[Any, int | None]]) -> bool:
        """Whether a backward may need what an operation writes.

        Rows of one tensor have one count of what was written: a slot's would be out of date as
        soon as the next slot's is written.
        """
        tensors = (value for value, _ in opened if isinstance(value, Tensor))
        is_slotted = opened[0][1] is not None
        return is_slotted and torch.is_grad_enabled() and any(t.requires_grad for t in tensors)

    def _rows_for_each(self, inside: Tensor, dim: int | None) -> list[Tensor]:
        """A copy of each slot's row, in memory of its own, where it lies as it did."""
        with plainly():
            rows = inside.unbind(dim or 0)
            empty = [inside.new_empty_strided(row.shape, row.stride()) for row in rows]
            return [own.copy_(row) for own, row in zip(empty, rows, strict=True)]

    def _write_back(self, target: Any, written: Any) -> None:
        """What has been written into a copy, or into one of each slot's, into the tensor itself.

        Raises:
            Unbatched: they have another shape now, which no slot's part of a tensor can have.
        """
        if not isinstance(target, Tensor) or written is self.level.open(target)[0]:
            return
        with plainly():
            into = self.level.stacked(target)
            rows = torch.stack(written) if isinstance(written, list) else written
            if rows.shape != into.shape:
                raise Unbatched("it gives a tensor another shape in place.")
            into.copy_(rows)

    def _refuse_shared_target(
        self, function: Callable[..., Any], leaves: Sequence[Any], kwargs: Any
    ) -> None:
        """Raise as torch's batching does, where every slot would write into one tensor."""
        targets = [kwargs.get("out"), *(leaves[:1] if writes(function) else [])]
        if any(isinstance(t, Tensor) and not self.level.is_slotted(t) for t in targets):
            raise RuntimeError(
                f"vmap: {_name(function)} writes into a tensor that all slots share"
            )

    def _joined(
        self, function: Callable[..., Any], results: Sequence[Any], asked: Sequence[int]
    ) -> Any:
        """One result for all of those of ``asked`` slots; what the others have is nothing."""
        found = [pytree.tree_flatten(result) for result in results]
        tree = found[0][1]
        if any(other != tree for _, other in found):
            raise Disagreement(
                f"{_name(function)} returns another structure in every slot.",
                _alike([other for _, other in found], asked),
            )
        columns = zip(*(leaves for leaves, _ in found), strict=True)
        return pytree.tree_unflatten([self._join(function, c, asked) for c in columns], tree)

    def _join(
        self, function: Callable[..., Any], values: Sequence[Any], asked: Sequence[int]
    ) -> Any:
        first = values[0]
        if isinstance(first, Tensor):
            shapes = [tuple(value.shape) for value in values]
            if len(several := set(shapes)) > 1:
                raise Disagreement(
                    f"{_name(function)} returns shapes that depend on the data: "
                    f"{sorted(several)}.",
                    _alike(shapes, asked),
                )
            with plainly():
                stacked = torch.stack(list(values))
            return self.slotted(stacked)
        if all(value is first for value in values):
            return first
        if isinstance(first, NUMBERS) and all(value == first for value in values):
            return first
        raise Disagreement(
            f"{_name(function)} makes a Python {type(first).__name__} of a tensor, and the slots "
            "differ in it: control flow that depends on the data.",
            _alike(values if isinstance(first, NUMBERS) else [*map(id, values)], asked),
        )


def _alike(answers: Sequence[Any], slots: Sequence[int]) -> list[list[int]]:
    """These slots by what they answered; each whose answer is NaN by itself."""
    groups: list[list[int]] = []
    for slot in slots:
        same = (some for some in groups if answers[some[0]] == answers[slot])
        if (mine := next(same, None)) is None:
            groups.append([slot])
        else:
            mine.append(slot)
    return groups


def _pick(value: Any, dim: int | None, slot: int) -> Any:
    if isinstance(value, PerSlot):
        return value.values[slot]
    if isinstance(value, list):
        return value[slot]
    return value if dim is None else value.select(dim, slot)


def writes(function: Callable[..., Any]) -> bool:
    """Whether the operation writes into its first argument, as its name says."""
    name = getattr(function, "__name__", "")
    return name in WRITING or (name.endswith("_") and not name.endswith("__"))


def _name(function: Callable[..., Any]) -> str:
    """As torch's documentation has it: ``torch.Tensor.item``."""
    name = resolve_name(function) or getattr(function, "__qualname__", None) or function
    return str(name).replace("_VariableFunctionsClass.", "torch.")


Rule = Callable[..., Any]
"""``(slots, *args, **kwargs) -> result``; ``NotImplemented`` where it does not apply."""
