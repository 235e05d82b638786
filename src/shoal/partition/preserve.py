"""State that a trial run must not change: kept, read and put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.kernels.dispatched import run_operation
from shoal.partition.dataread import address_of, plain_data
from shoal.partition.wires import storage_key
from shoal.partition.writes import written_by
from shoal.rng import capture_rng, restore_rng


@contextmanager
def preserved(
    model: nn.Module, device: torch.device, *, guard_parameters: bool = True
) -> Iterator[None]:
    """Random state, buffers, gradients and parameters are afterwards what they are now.

    Inside, every ``.grad`` starts as None. A parameter is copied when something is about to
    write to it (``Embedding(max_norm=...)`` does); watching for that slows operators down, so
    what is to be timed runs without ``guard_parameters``.
    """
    with _WriteGuard(model) if guard_parameters else nullcontext(), _rest_preserved(model, device):
        yield


@contextmanager
def _rest_preserved(model: nn.Module, device: torch.device) -> Iterator[None]:
    rng = capture_rng(device)
    buffers = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    parameters = [(p, plain_data(p), p.grad) for p in model.parameters()]
    drop_gradients(model)
    # Graphs that saw a buffer before see the same bits afterwards: to them it was never written.
    counted = tuple(b for b, _ in buffers.values() if not b.is_inference())
    try:
        with _unsafe_preserve_version_counter(counted):
            try:
                yield
            finally:
                _put_back(model, buffers)
    finally:
        for parameter, data, grad in parameters:
            parameter.grad = None
            if has_other(parameter, data):
                parameter.data = data
            parameter.grad = grad
        restore_rng(rng, device)


def has_other(parameter: Tensor, data: Tensor) -> bool:
    """Whether its values are others than ``data``, in whose place it was given memory.

    In other memory it may have the same ones, as weights of an LSTM that lie in a row for cuDNN.
    """
    return address_of(parameter) != address_of(data) and not same_values(parameter.data, data)


def _put_back(model: nn.Module, buffers: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Have the model's buffers be these, with these values."""
    for name, _ in list(model.named_buffers()):
        if name not in buffers:
            module, key = place_of(model, name)
            del module._buffers[key]
    for name, (buffer, values) in buffers.items():
        _copy(buffer, values)
        module, key = place_of(model, name)
        module._buffers[key] = buffer


class _WriteGuard(TorchDispatchMode):
    """Copies a parameter before the first operator that writes to it; puts it back at the end."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._parameters = {storage_key(p): p for p in model.parameters()}
        self._saved: list[tuple[nn.Parameter, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for tensor in written_by(func, args, kwargs):
            parameter = self._parameters.pop(storage_key(tensor), None)
            if parameter is not None:
                self._saved.append((parameter, parameter.detach().clone()))
        return run_operation(func, args, kwargs)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for parameter, values in self._saved:
            _copy(parameter, values)


@contextmanager
def shaken(model: nn.Module) -> Iterator[None]:
    """Every parameter a little off, and afterwards as before.

    Where gradients are summed in another order, values such as the 0 and 1 that many
    parameters start from may hide it.
    """
    devices = {parameter.device for parameter in model.parameters()}
    random = {device: torch.Generator(device).manual_seed(0) for device in devices}
    values = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    try:
        with torch.no_grad():
            for parameter, value in values:
                if value.is_floating_point():
                    device = value.device
                    noise = torch.randn(value.shape, generator=random[device], device=device)
                    parameter.add_(0.05 * noise.to(value.dtype))
        yield
    finally:
        with torch.no_grad():
            for parameter, value in values:
                parameter.copy_(value)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """``model.eval()``, and every module's own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def drop_gradients(model: nn.Module) -> None:
    """Set every gradient to None."""
    for parameter in model.parameters():
        parameter.grad = None


def read_buffers(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Copies of the named buffers, as they are now."""
    return {name: model.get_buffer(name).clone() for name in names}


def write_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy ``values`` into the named buffers.

    Not between a forward with gradients and its backward: BatchNorm's backward reads the
    running statistics that its forward saw, and raises when they were written since.
    """
    for name, saved in values.items():
        _copy(model.get_buffer(name), saved)


def _copy(buffer: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        buffer.copy_(values)


def place_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has it, and under which key."""
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


class BufferWatch:
    """Notices which buffers a forward changes: their values, or the tensor itself."""

    def __init__(self, model: nn.Module, *, without: Iterable[nn.Module] = ()) -> None:
        self._model, self._without = model, tuple(without)
        self.restart()

    def restart(self) -> None:
        """Take the buffers as they are now for the start."""
        self._before = {
            name: (buffer, buffer._version, buffer.clone()) for name, buffer in self._buffers()
        }

    def changed(self) -> set[str]:
        """Names of the buffers that differ from how they were at the start."""
        return {name for name, buffer in self._buffers() if self._differs(name, buffer)}

    def have_other_values(self) -> set[str]:
        """Names of those that hold something else, and not merely the same once more."""
        return {
            name
            for name, buffer in self._buffers()
            if name not in self._before or not same_values(buffer, self._before[name][2])
        }

    def changed_themselves(self) -> set[str]:
        """Those that are changed, but for views of a memory in which only others have been.

        Views of one memory have one version: it tells of none which it is.
        """
        other = self.have_other_values()
        memories = {storage_key(buffer) for name, buffer in self._buffers() if name in other}
        changed = {name: buffer for name, buffer in self._buffers() if name in self.changed()}
        return {n for n, b in changed.items() if n in other or storage_key(b) not in memories}

    def added(self) -> set[str]:
        """Names of the buffers that were not there at the start."""
        return {name for name, _ in self._buffers()} - set(self._before)

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        left_out = {id(b) for module in self._without for b in module.buffers()}  # maybe made anew
        named = self._model.named_buffers()
        return ((name, buffer) for name, buffer in named if id(buffer) not in left_out)

    def _differs(self, name: str, buffer: Tensor) -> bool:
        if name not in self._before:
            return True
        before, version, values = self._before[name]
        if buffer is not before or buffer._version != version:
            return True
        return not same_values(buffer, values)


def same_values(first: Tensor, second: Tensor) -> bool:
    """Bitwise equality of shape, dtype and values; NaN equals NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.layout is not torch.strided:
        parts = zip(_parts(first), _parts(second), strict=True)
        return first.layout is second.layout and all(same_values(*pair) for pair in parts)
    if torch.equal(first, second):
        return True
    if not (first.dtype.is_floating_point or first.dtype.is_complex):
        return False
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """What a sparse tensor consists of: where its numbers stand, and they."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    at = (tensor.crow_indices, tensor.col_indices)
    starts, others = at if by_row else (tensor.ccol_indices, tensor.row_indices)
    return starts(), others(), tensor.values()
