"""Projections to a large vocabulary are put off until it is known that a loss reads them.

[Note: putting off]
``F.linear`` is met by a mode, while a recipe's forward and loss run. What it returns instead of
logits knows its shape and type and has no memory:

    logits = head(x)                   Deferred: x, weight, bias
    logits[:, :-1].flatten(0, 1)       Deferred: the same, and which rows
    F.cross_entropy(those, labels)     the loss by rows (see ``loss``)
    anything else                      F.linear, the views, then the function asked for

Anything else must find what it would have found: the bits, the autograd graph with its nodes in
their order, the memory. So only views and questions of shape, and functions of integers, may
come before the loss. Any other function has what waits computed first, and in place of a
Deferred gets the tensor itself; what waits at the end of the forward is computed there. Where
torch shows a function to no mode and no subclass, as ``autograd.Function.apply``, the Deferred
enters as it is: its values are computed for the operators within (``__torch_dispatch__``) and
its gradient for the projection is that of an ordinary one (``_Standing``).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from shoal.rowwise.deferred import Deferred
from shoal.rowwise.layout import Layout
from shoal.rowwise.projection import WIDE, Projection, Shown, Tally
from shoal.rowwise.questions import is_identity, is_question, name_of

_CAST = frozenset({torch.float32, torch.float16, torch.bfloat16})  # by autocast


class LossByRows(TorchFunctionMode):
    """Inside the ``with``, losses over a large vocabulary are computed ``rows`` at a time.

    It may be entered again and again.

    Attributes:
        tally: What was met since it was entered last.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.tally = Tally()
        self._rows = rows
        self._waiting: weakref.ref[Projection] | None = None

    def __enter__(self) -> LossByRows:
        self.tally = Tally()
        super().__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # as above
        if error is None:
            self._compute_waiting()
        self._waiting = None

    @property
    def note(self) -> str:
        """What came of it since it was entered last."""
        return self.tally.describe(self._rows)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            self._compute_waiting()
            deferred = self._put_off(*args, **kwargs)
            if deferred is not None:
                return deferred
        elif self._waiting is not None and _reads_others(func, args, kwargs):
            self._compute_waiting()
        return func(*args, **kwargs)

    def _compute_waiting(self) -> None:
        projection = self._waiting() if self._waiting is not None else None
        self._waiting = None
        if projection is not None and not projection.used:
            projection.compute()

    def _put_off(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """Stands for the logits; None where they are not many, or not of a known kind."""
        if not _is_large(input, weight, bias, self._rows):
            return None
        projection = Projection((input, weight, bias), self._rows, self.tally)
        self._waiting = weakref.ref(projection)
        layout = Layout.of_all((*input.shape[:-1], weight.shape[0]), projection.dtype)
        return Deferred.standing_for(Shown(projection, layout, None, ()))


def _is_large(input: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> bool:
    """Is a projection to a large vocabulary, of more than ``rows`` rows, asked for?"""
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in (input, weight)):
        return False
    if input.dim() < 2 or weight.dim() != 2 or weight.shape[1] != input.shape[-1]:
        return False
    classes, features = weight.shape
    if features == 0 or classes <= WIDE * features or input.numel() <= rows * features:
        return False
    return _is_ordinary([input, weight]) and (bias is None or _is_bias(bias, weight))


def _is_bias(bias: Tensor, weight: Tensor) -> bool:
    known = type(bias) in (Tensor, nn.Parameter) and bias.shape == weight.shape[:1]
    return known and _is_ordinary([bias, weight])


def _is_ordinary(tensors: list[Tensor]) -> bool:
    """On one device, of types that go together, and outside of torch's transformations."""
    devices, dtypes = {t.device for t in tensors}, {t.dtype for t in tensors}
    kind = tensors[0].device.type
    if len(devices) > 1 or kind not in ("cpu", "cuda") or torch.compiler.is_compiling():
        return False
    if torch._C._are_functorch_transforms_active() or _is_checkpointed():
        return False
    if torch.is_autocast_enabled(kind):
        return dtypes <= _CAST
    return len(dtypes) == 1 and dtypes <= {*_CAST, torch.float64}


def _is_checkpointed() -> bool:
    """Does somebody take what the graph saves, to run this again where no mode is?"""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _reads_others(func: Any, args: Any, kwargs: Any) -> bool:
    """May it matter to what waits, or to the graph, that ``func`` comes first?"""
    if name_of(func)[1] == "__get__" or is_question(func) or is_identity(func):
        return False
    return any(
        isinstance(leaf, Tensor)
        and type(leaf) is not Deferred
        and (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
        for leaf in pytree.tree_leaves((args, kwargs))
    )
