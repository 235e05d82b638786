"""Which weights autocast alone reads, so that only the bfloat16 it makes of them need travel.

[Note: narrow weights]
Under bf16 autocast a matrix product casts its float32 weight and forgets it. Where nothing else
reads the weight, the device can be given the cast in the first place:

    wide     weight float32 --cast--> bfloat16 --> product      gradient bfloat16 --> float32
    narrow   (cast on the host)       bfloat16 --> product      gradient bfloat16

Half the bytes travel, and neither float32 copy is on the device. The bits are the same: the host
casts as the device does, and a gradient in bfloat16 says all there is to say. Only a sum over
micro-batches is float32; then the gradient is cast before it is added, as the plain loop does.

What counts is not trusted but watched, operator by operator, and then tried: a sharded step with
narrow weights must give the bits of one with wide ones. That is of one batch of one trial, so all
forwards of all trials are watched too, function by function (``UseWatch``): who reads a narrow
weight otherwise fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.kernels.dispatched import run_operation
from shoal.partition.build import clone_batch
from shoal.partition.chain import Chain
from shoal.partition.drive import every_layer, sharded_backward, sharded_evaluation
from shoal.partition.preserve import evaluating, preserved, same_values, shaken
from shoal.partition.template import flatten
from shoal.partition.wires import storage_key, tensors_in
from shoal.recipes.recipe import Batch, autocast, loss_and_output

_VIEWS = frozenset({"t", "transpose", "permute", "view", "_unsafe_view", "expand", "unsqueeze"})
_PRODUCTS = frozenset(
    {"mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "linear", "convolution"}
)
"""What every autocast, whatever the device, does in bfloat16."""
_BY = frozenset(
    {
        F.linear,
        *(getattr(F, f"conv{dims}d") for dims in (1, 2, 3)),
        *(getattr(F, f"conv_transpose{dims}d") for dims in (1, 2, 3)),
        F.multi_head_attention_forward,
        torch.matmul,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.mm,
        torch.bmm,
        torch.addmm,
        torch.baddbmm,
    }
)
"""The functions that a narrow weight may be given to."""
_LOOKS = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "ndim", "device", "requires_grad", "is_leaf", "grad_fn", "layout")
) | {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.untyped_storage,  # by whoever counts bytes
}


class CastWatch(TorchDispatchMode):
    """Notes which float32 parameters a forward only casts to bfloat16, for a product.

    Attributes:
        cast: Names of parameters that were cast.
        read: Names of those that were read otherwise, or whose cast was.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._names = {storage_key(p): name for name, p in model.named_parameters()}
        self._casts: dict[int, str] = {}
        self._alive: list[Tensor] = []  # so that no other tensor gets a cast's storage
        self.cast: set[str] = set()
        self.read: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = run_operation(func, args, kwargs)
        operator = func._schema.name.removeprefix("aten::")
        for tensor in tensors_in((args, kwargs)):
            key = storage_key(tensor)
            if key in self._names:
                self._note(self._names[key], operator, result)
            elif key in self._casts and operator not in _PRODUCTS | _VIEWS:
                self.read.add(self._casts[key])
        return result

    def _note(self, name: str, operator: str, result: Any) -> None:
        if operator != "_to_copy" or result.dtype != torch.bfloat16:
            self.read.add(name)
            return
        self.cast.add(name)
        self._casts[storage_key(result)] = name
        self._alive.append(result)


class UseWatch(TorchFunctionMode):
    """Sees to it that parameters are used as narrow weights may be: by products, once each.

    Attributes:
        odd: Names of those that another function was given, their type asked for among it.
        counts: How often each was used by a product since ``restart``.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self.odd: dict[str, str] = {}
        self.counts: Counter[str] = Counter()

    def restart(self) -> None:
        """Count from 0 again: another forward begins."""
        self.counts.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for name in self._given(args, kwargs):
            if func in _BY:
                self.counts[name] += 1
            elif func not in _LOOKS and not isinstance(func, OpOverload):  # of watches, backwards
                self.odd.setdefault(name, getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))

    def _given(self, args: tuple[Any, ...], kwargs: Any) -> list[str]:
        values = (*args, *kwargs.values()) if kwargs else args
        flat = [
            item
            for value in values
            for item in (value if type(value) in (tuple, list) else (value,))
        ]
        return [self._names[id(item)] for item in flat if id(item) in self._names]


@contextmanager
def narrowed(model: nn.Module, names: Collection[str], *, sums: bool) -> Iterator[None]:
    """The named parameters in bfloat16, and afterwards as they were.

    ``sums``: their gradients are float32, for several micro-batches.
    """
    values = [(p, p.data, p.grad) for p in map(model.get_parameter, names)]
    try:
        for parameter, value, _ in values:
            parameter.grad = None
            parameter.data = value.to(torch.bfloat16)
            if sums and parameter.requires_grad:
                parameter.grad_dtype = torch.float32
        yield
    finally:
        for parameter, value, grad in values:
            parameter.grad = None
            parameter.data = value
            parameter.grad = grad


def find_narrow(chain: Chain, batch: Batch, *, sums: bool) -> tuple[str, ...]:
    """The names of the parameters that may travel as bfloat16, in the model's order.

    Runs a few forwards and backwards of the whole model; all is afterwards as before.
    """
    if chain.recipe.precision != "bf16":
        return ()
    cast = _watched(chain, batch, sums=sums) & _able(chain)
    with shaken(chain.model):  # a 0 or a 1 that a norm starts from is the same in bfloat16
        wide = _outcome(chain, batch, (), sums)
        while cast:
            try:
                different = _differences(wide, _outcome(chain, batch, cast, sums))
            except Exception:  # of the model's own, at a type that it did not expect
                return ()
            if not different:
                break
            cast = cast - different if different & cast else set()
    return tuple(name for name, _ in chain.model.named_parameters() if name in cast)


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether somebody is told the parameter's gradient, who would see it in bfloat16."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _able(chain: Chain) -> set[str]:
    """Parameters of one layer that no forward writes to."""
    layers = range(chain.num_layers)
    written = {name for layer in layers for name in chain.written_parameters(layer)}
    borrowed = {name for layer in layers for name in chain.borrowed_by(layer)}
    return {
        name
        for name, parameter in chain.model.named_parameters()
        if parameter.dtype == torch.float32 and name not in written | borrowed
        if not has_hooks(parameter)
    }


def _watched(chain: Chain, batch: Batch, *, sums: bool) -> set[str]:
    """Parameters that are only cast, for products.

    In training, without gradients, and, where the model has a loss there, in evaluation.
    """
    casts, uses = CastWatch(chain.model), UseWatch(dict(chain.model.named_parameters()))
    _run(chain, batch, casts, uses, grads=True)
    often = {name for name, count in uses.counts.items() if sums and count > 1}
    _run(chain, batch, casts, uses, grads=False)
    with evaluating(chain.model), suppress(Exception):  # one without a loss is not validated
        _run(chain, batch, casts, uses, grads=False)
    return casts.cast - casts.read - uses.odd.keys() - often


def _run(chain: Chain, batch: Batch, casts: CastWatch, uses: UseWatch, *, grads: bool) -> None:
    mine = clone_batch(batch)
    cast = autocast(chain.recipe, chain.device)
    with preserved(chain.model, chain.device), torch.set_grad_enabled(grads), uses, cast, casts:
        loss_and_output(chain.recipe, chain.model, mine)


def _outcome(
    chain: Chain, batch: Batch, names: Collection[str], sums: bool
) -> Mapping[str, Tensor]:
    """Loss, output and gradients of sharded runs; gradients in float32 under their own name.

    Narrow weights are watched, as they will be: torch's fast path of attention in evaluation, in
    float32 under autocast, is not taken by who is watched.
    """
    model, ranges = chain.model, every_layer(chain)
    watch = UseWatch({name: model.get_parameter(name) for name in names})
    with (
        narrowed(model, names, sums=sums),
        preserved(model, chain.device),
        watch if names else nullcontext(),
    ):
        found = {"": sharded_backward(chain, clone_batch(batch), ranges)}
        if sums:
            sharded_backward(chain, clone_batch(batch), ranges)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad.float() if name in names else parameter.grad
        with evaluating(model):
            try:
                loss, output = sharded_evaluation(chain, clone_batch(batch), ranges)
            except Exception:
                return found
        leaves = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]
        return found | {f" {index}": leaf for index, leaf in enumerate([loss, *leaves])}


def _differences(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> set[str]:
    names = one.keys() | other.keys()
    return {
        n for n in names if n not in one or n not in other or not same_values(one[n], other[n])
    }
