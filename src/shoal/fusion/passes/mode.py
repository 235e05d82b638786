"""Between a model's Python code and torch: sends each operation to its rule.

[Note: who does what]
An operation on slotted tensors goes, in this order, to: the rule of ``RULES``, where a rule is
faster than torch's own batching or is needed for each slot's random numbers; slot by slot, if
it draws; a tensor in place of a per-slot number, or slot by slot; torch's batching; and slot
by slot again, where torch has none. Functions of ``torch.nn.functional`` that are written in
Python would be entered with this mode off, so that what they call is not seen; a copy of them
that does not look for modes is run with it on.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from shoal.fusion.declined import OF_ALL_TRIALS, OfMemory, Unbatched
from shoal.fusion.passes.ownfunctions import functions_by_slot
from shoal.fusion.passes.slots import Slots, writes
from shoal.fusion.rows.layout import as_alone
from shoal.fusion.rows.level import plainly
from shoal.fusion.rows.perslot import PerSlot
from shoal.fusion.rules import RULES

FUNCTIONS = (
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("bernoulli", "normal", "multinomial", "poisson", "rrelu", "rrelu_", "native_dropout"),
    *("alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_"),
)
METHODS = (
    *("bernoulli", "bernoulli_", "uniform_", "normal_", "exponential_", "random_", "geometric_"),
    *("cauchy_", "log_normal_", "multinomial"),
)
DRAWING = frozenset(
    [*(getattr(torch, name) for name in FUNCTIONS), *(getattr(Tensor, name) for name in METHODS)]
)
"""Operations that draw, and have no rule of their own."""

READING = frozenset((Tensor.numpy, Tensor.tolist, Tensor.__array__))
"""Operations that make Python's numbers of a tensor's, for which torch's batching has none."""

TRUTHS = frozenset((Tensor.__bool__, torch.is_nonzero, Tensor.is_nonzero))
ASKING = TRUTHS | {Tensor.item, Tensor.__int__, Tensor.__index__, Tensor.__float__}
"""By which code asks a tensor for a truth, or for a number."""
LISTED = 16
"""Numbers of a tensor that code may have as a list, where it is told one after the other."""

ALL_TRUE = torch._is_all_true
"""By which ``torch.distributions`` looks at its numbers before it computes with them."""

FACTORIES = frozenset((torch.empty, torch.zeros, torch.ones, torch.full))

OPERATORS = (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__"),
    *("__rtruediv__", "__lt__", "__le__", "__gt__", "__ge__"),
    *("add", "sub", "mul", "div", "true_divide", "lt", "le", "gt", "ge"),
)
LIFTED = frozenset(getattr(Tensor, name) for name in OPERATORS) | {
    getattr(torch, name) for name in ("add", "sub", "mul", "div", "true_divide")
}
"""Operations for which a tensor of no dimensions gives the bits of a Python number.

Not in half precision, where torch computes with a number that is not rounded; and not powers,
which have kernels of their own for some exponents.
"""
NORMS = frozenset((torch.layer_norm, torch.group_norm, torch.rms_norm))
"""Run for all slots once for each value: the lone kernel sums in another order."""
MIXED = frozenset((torch.layer_norm, torch.group_norm))
"""Their kernels on a CPU take half precision and weights of float32, and give half precision."""

FREEZING = frozenset((Tensor.requires_grad_, Tensor.requires_grad.__set__))  # type: ignore[attr-defined]
"""Has a parameter trained from now on, or not; or a batch's tensor keep its gradient."""

REPLACING = Tensor.data.__set__  # type: ignore[attr-defined]
"""Gives a tensor other memory. Slot by slot that would be the memory of a row's alias."""

NAMES_STRIDED = ("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter")


def _strided() -> Iterator[Callable[..., Any]]:
    """By whichever name code calls them: of torch, of tensors, operators and their overloads."""
    for name in NAMES_STRIDED:
        operator = getattr(torch.ops.aten, name)
        yield from (operator, *(getattr(operator, overload) for overload in operator.overloads()))
        yield from (
            vars(owner)[name] for owner in (torch, torch._C.TensorBase) if name in vars(owner)
        )


STRIDED = frozenset(_strided())
"""May be told from which number in memory on, which torch's batching heeds. Slot by slot, as
short batches run, it would be the first slot's number, where memory is that of rows."""

SCATTERED = frozenset(f for f in STRIDED if "scatter" in f.__name__)
"""Of them what torch does not batch: slot by slot, also of what is no row."""

HALF = (torch.bfloat16, torch.float16)

ASKS_FORMAT = "is_contiguous inside of vmap"
"""What torch says of an operation that asks in which format images lie."""

ABOUT_BATCHING = (
    "vmap",
    "atching rule",
    "functorch",
    "BatchedTensor",
    "tensor to use channels_last",
)
"""In what torch says where it does not batch; the last, of dimensions, slots among them."""

UNTOUCHED = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


class SlotMode(TorchFunctionMode):
    """Runs the code inside for all slots of ``slots``.

    ``own_factories``: what ``torch.zeros`` and its like make has a value per slot, for code
    that writes into it.
    """

    def __init__(self, slots: Slots, *, own_factories: bool) -> None:
        super().__init__()
        self._slots, self._own_factories = slots, own_factories
        self._entered = ExitStack()
        self._depth = 0

    def __enter__(self) -> Any:
        if self._depth == 0:
            self._entered.enter_context(functions_by_slot(self._slots))
        self._depth += 1
        return super().__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._depth -= 1
        if self._depth == 0:
            self._entered.close()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """One operation of the model's code."""
        kwargs = kwargs or {}
        rule = RULES.get(func)
        if rule is not None:
            result = rule(self._slots, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if func is ALL_TRUE and self._are_all_true(*args):
            return True
        if func in ASKING and args and self._is_answered(func, *args):
            return self._slots.answered(func, *args)
        if func is Tensor.tolist and self._is_answered(func, *args) and args[0].numel() <= LISTED:
            return self._listed(*args)
        if func in READING:
            return self._slots.each(func, args, kwargs)
        if func == REPLACING and self._slots.has_values(args[0]):
            raise Unbatched("it gives a tensor other memory by .data.")
        if func in STRIDED and self._says_where(func, args, kwargs):
            raise OfMemory(OF_ALL_TRIALS)
        if func in FREEZING and self._slots.asks_gradient(*args, **kwargs):
            return args[0]
        if func in DRAWING:
            return self._draw(func, args, kwargs)
        twin = TWINS.get(func)
        if twin is not None:
            with self:
                return twin(*args, **kwargs)
        if _holds_per_slot(args, kwargs):
            return self._with_numbers(func, args, kwargs)
        if self._own_factories and func in FACTORIES:
            return self._own(func(*args, **kwargs))
        return self._batched(func, args, kwargs)

    def _batched(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Torch's own batching, or slot by slot where it has none.

        Torch multiplies by weights after it has normalised, which would give their type.
        """
        if func in MIXED and _is_mixed(args, kwargs):
            input, *rest = args
            wide: Tensor = self._batched(func, (input.float(), *rest), kwargs)
            return wide.to(input.dtype)
        try:
            return func(*args, **kwargs)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            if "on the same device" in str(error) and (moved := self._beside(args, kwargs)):
                return self._batched(func, *moved)
            if not _is_about_batching(error):
                raise
            if ASKS_FORMAT in str(error) and (laid := self._as_alone(func, args, kwargs)):
                return self._batched(func, *laid)
            return self._slots.each(func, args, kwargs)

    def _as_alone(
        self, func: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        """The arguments with images as each slot's lie alone; None: they do, or it writes there.

        GroupNorm has kernels for two formats and asks, for which torch's batching has no answer
        where slots lie beside channels (``layout.py``).
        """
        leaves, tree = pytree.tree_flatten((args, kwargs))
        has = self._slots.has_values
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and has(leaf)]
        if writes(func) or "out" in kwargs or not self._slots.level.is_innermost:
            return None
        stacked = {i: self._slots.stacked(leaves[i]) for i in at}
        with plainly():
            laid = {i: as_alone(x) for i, x in stacked.items()}
        if all(laid[i] is stacked[i] for i in at):
            return None
        for i in at:
            leaves[i] = self._slots.slotted(laid[i])
        found: tuple[Any, Any] = pytree.tree_unflatten(leaves, tree)
        return found

    def _beside(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The arguments with each slot's number where the other tensors are; None: there is none.

        Alone ``torch.tensor(rate)`` is one number on the CPU, which goes with tensors of any
        device. With a value per slot it is a vector to torch, which does not.
        """
        leaves, tree = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        where = next((t.device for t in tensors if t.device.type != "cpu"), None)
        lone = [t for t in tensors if t.device.type == "cpu" and t.dim() == 0]
        numbers = {id(t) for t in lone if self._slots.has_values(t)}
        if where is None or not numbers:
            return None
        moved = [leaf.to(where) if id(leaf) in numbers else leaf for leaf in leaves]
        found: tuple[Any, Any] = pytree.tree_unflatten(moved, tree)
        return found

    def _is_answered(self, func: Callable[..., Any], asked: Tensor) -> bool:
        """Whether code is told a truth, a whole number, or one of a tensor that all slots share.

        Of another number each slot has its own.
        """
        is_whole = func in TRUTHS or not (asked.is_floating_point() or asked.is_complex())
        return is_whole or not self._slots.has_values(asked)

    def _listed(self, asked: Tensor) -> Any:
        """``tolist``, which asks for number after number."""
        if asked.dim() == 0:
            return self._slots.answered(Tensor.item, asked)
        return [self._listed(one) for one in asked.unbind(0)]

    def _are_all_true(self, input: Tensor) -> bool:
        """Of all slots; what distributions ask of their numbers is nearly always so."""
        with plainly():
            return self._slots.outside.holds(self._slots.stacked(input).all())

    def _says_where(self, func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
        """Whether code says where a view begins, in memory that all slots have in common."""
        at = 4 if func in SCATTERED else 3
        given = args[at] if len(args) > at else kwargs.get("storage_offset")
        input = args[0] if args else kwargs.get("input", kwargs.get("self"))
        if given is None:
            return False
        if func in SCATTERED and self._slots.has_values(input):
            return True
        return self._slots.are_rows(self._slots.level.open(input)[0])

    def _draw(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        return self._slots.each(func, args, kwargs)

    def _with_numbers(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if func in NORMS:
            return self._by_value(func, args, kwargs)
        if func not in LIFTED or _holds_per_slot((), kwargs):
            return self._slots.each(func, args, kwargs)
        like = next(x for x in args if isinstance(x, Tensor))
        if like.dtype in HALF:
            return self._slots.each(func, args, kwargs)
        lifted = [
            self._slots.slotted(self._slots.numbers(x, like)) if isinstance(x, PerSlot) else x
            for x in args
        ]
        return func(*lifted, **kwargs)

    def _by_value(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What all slots would have with one slot's numbers, for each in turn."""
        leaves, tree = pytree.tree_flatten((args, kwargs))
        at = [index for index, leaf in enumerate(leaves) if type(leaf) is PerSlot]
        found: dict[int, Tensor] = {}
        groups: dict[tuple[float, ...], list[int]] = {}
        for slot in range(self._slots.width):
            groups.setdefault(tuple(leaves[i].values[slot] for i in at), []).append(slot)
        for values, mine in groups.items():
            numbers = dict(zip(at, values, strict=True))
            plain = [numbers.get(index, leaf) for index, leaf in enumerate(leaves)]
            own_args, own_kwargs = pytree.tree_unflatten(plain, tree)
            stacked = self._slots.stacked(self._batched(func, own_args, own_kwargs))
            with plainly():
                rows = stacked.unbind(0)
            found |= {slot: rows[slot] for slot in mine}
        with plainly():
            joined = torch.stack([found[slot] for slot in range(self._slots.width)])
        return self._slots.slotted(joined)

    def _own(self, shared: Tensor) -> Tensor:
        with plainly():
            stacked = shared.unsqueeze(0).repeat(self._slots.width, *([1] * shared.dim()))
        return self._slots.slotted(stacked)


def _holds_per_slot(args: Any, kwargs: Any) -> bool:
    return any(type(x) is PerSlot for x in args) or any(
        type(x) is PerSlot for x in kwargs.values()
    )


def _is_mixed(args: Any, kwargs: Any) -> bool:
    """Whether an input of half precision meets weights of more, on a CPU."""
    input, *rest = args or (None,)
    if not isinstance(input, Tensor) or input.dtype not in HALF or input.device.type != "cpu":
        return False
    every = (*rest, *kwargs.values())
    return any(isinstance(t, Tensor) and t.dtype == torch.float32 for t in every)


def _is_about_batching(error: Exception) -> bool:
    text = str(error)
    return any(word in text for word in ABOUT_BATCHING)


def _twins() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Copies of torch.nn.functional's Python functions that do not look for modes."""
    names = {**vars(functional), **dict.fromkeys(UNTOUCHED, lambda *tensors: False)}
    twins: dict[Callable[..., Any], Callable[..., Any]] = {}
    for function in list(vars(functional).values()):
        if isinstance(function, types.FunctionType) and function.__globals__ is vars(functional):
            twin = types.FunctionType(
                function.__code__, names, function.__name__, function.__defaults__
            )
            twin.__kwdefaults__ = function.__kwdefaults__
            twins[function] = twin
    return twins


TWINS = _twins()
