"""Whether what a forward saved may wait on the host: it goes there and back once, measured.

[Note: rehearsal]
Between a forward whose saved tensors leave and its backward, its parameters leave too, and other
shards' are where they were. What autograd saves is found again (``savedset``). What a forward
keeps by itself is not seen: a custom Function's ``ctx.wt = w.t()``, a closure over a view of one.
Its backward would read other parameters and be wrong without an error. So before a shard is asked
for it, it is tried: its parameters are cloned, NaN takes their place, what it saved goes to the
host cell by cell; and the wires and gradients must have the bits of those without that. Where a
shard's do not repeat themselves anyway, as of kernels that add in any order, NaN must not get in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.partition.chain import Chain, Micro
from shoal.partition.drive import Visit, recompute
from shoal.partition.preserve import drop_gradients
from shoal.partition.savedset import Cell
from shoal.partition.units import BackwardResult, Held

Outcome = Mapping[str, Tensor]
"""What a backward made, by what it is; on the host."""


class Rehearsal(NamedTuple):
    """How many bytes of what was saved can wait on the host; None where nothing may, and why."""

    movable_bytes: int | None = None
    why_not: str = ""


def outcome(chain: Chain, result: BackwardResult) -> Outcome:
    """Copies of the gradients that a backward has left in parameters and hands on."""
    named = chain.model.named_parameters()
    grads = {f"gradient of {name!r}": p.grad for name, p in named if p.grad is not None}
    wires = {f"gradient of the tensor {wire}": grad for wire, grad in result.grads.items()}
    tied = {f"part of the gradient of {name!r}": part for name, part in result.tied.items()}
    return {name: _on_host(tensor) for name, tensor in (grads | wires | tied).items()}


def rehearse(
    chain: Chain,
    micro: Micro,
    span: tuple[int, int],
    visit: Visit,
    after: BackwardResult,
    wanted: Outcome,
) -> Rehearsal:
    """A range's recompute with all away in between; its outcome must be ``wanted``.

    Whatever fails is a reason, and no error: nobody has asked for it yet. Parameters, buffers and
    random state are afterwards as before, and there are no gradients.
    """
    trial = _Trial(chain, span)
    try:
        result = recompute(chain, micro, span, visit, after, note_saved=trial.there_and_back)
        found = outcome(chain, result)
        del result
        odd = trial.odd or _difference(found, wanted)
        if odd and not trial.odd:
            trial.back()
            drop_gradients(chain.model)
            again = outcome(chain, recompute(chain, micro, span, visit, after))
            if _difference(again, wanted):  # nor is a recompute that of before
                odd = _new_nan(found, wanted)
    except Exception as error:
        return Rehearsal(None, _why(error))
    finally:
        trial.back()
        drop_gradients(chain.model)
    if odd:
        return Rehearsal(
            None,
            f"its code keeps memory of parameters where hooks do not see it, and the {odd} is "
            "another one once they are elsewhere; as of a custom Function that keeps a view of a "
            "weight on its ctx",
        )
    return Rehearsal(trial.moved_bytes)  # nothing where nothing goes backwards


class _Trial:
    """What is away between a forward and its backward."""

    def __init__(self, chain: Chain, span: tuple[int, int]) -> None:
        self._parameters = [chain.model.get_parameter(n) for n in chain.parameters_in(*span)]
        self._was: list[tuple[nn.Parameter, Tensor]] = []
        self.moved_bytes = 0
        self.odd = ""  # what it handed on that has changed

    def there_and_back(self, held: Held) -> None:
        """The parameters are elsewhere from now on; what was saved was on the host."""
        handed = {f"tensor {wire}": _on_host(tensor) for wire, tensor in held.made.items()}
        self._send_away()
        now = {f"tensor {wire}": _on_host(tensor) for wire, tensor in held.made.items()}
        self.odd = _difference(now, handed)
        held.made.clear()  # what was saved is held by nobody else from now on
        assert held.saved is not None
        for cell in held.saved.movable():
            self.moved_bytes += cell.num_bytes
            _move(cell)

    def back(self) -> None:
        """Put the parameters where they were."""
        with torch.no_grad(), torch._C.DisableTorchFunction():
            while self._was:
                parameter, old = self._was.pop()
                old.copy_(parameter.data)
                parameter.data = old

    def _send_away(self) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            clones = [parameter.data.clone() for parameter in self._parameters]
            for parameter, clone in zip(self._parameters, clones, strict=True):
                old = parameter.data
                _require_dense(old)
                parameter.data = clone
                self._was.append((parameter, old))
            for _, old in self._was:
                _spoil(old)


def _require_dense(tensor: Tensor) -> None:
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        raise RuntimeError("a parameter is a view with gaps or overlaps")


def _spoil(tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)
    else:
        tensor.bitwise_not_()


def _move(cell: Cell) -> None:
    """One storage to the host and back, elsewhere."""
    here = cell.bytes_now()
    device, copy = here.device, here.to("cpu", copy=True)
    del here
    cell.leave()
    cell.memory = copy.to(device)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _difference(ones: Outcome, others: Outcome) -> str:
    """The first that has not the same bits in both."""
    for name in (*ones, *others):
        one, other = ones.get(name), others.get(name)
        if one is None or other is None or not torch.equal(_bits(one), _bits(other)):
            return name
    return ""


def _new_nan(found: Outcome, wanted: Outcome) -> str:
    """The first with NaN that has none without."""
    for name in _with_nan(found):
        if name not in set(_with_nan(wanted)):
            return name
    return ""


def _with_nan(tensors: Outcome) -> Iterable[str]:
    return [name for name, t in tensors.items() if bool(torch.isnan(_dense(t)).any())]


def _dense(tensor: Tensor) -> Tensor:
    plain = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return plain.resolve_conj().resolve_neg()


def _bits(tensor: Tensor) -> Tensor:
    return _dense(tensor).reshape(-1).view(torch.uint8)


def _why(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return f"the device or the host had no memory left to try it ({text[:200]})"
    if "hooks" in text:
        return "its code allows no hooks on what autograd saves"
    return f"its backward failed when that was tried: {type(error).__name__}: {text[:200]}"
