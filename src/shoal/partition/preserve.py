"""State that a trial run must not change: kept, read and put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shoal.rng import capture_rng, restore_rng


@contextmanager
def preserved(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Random state, buffers and gradients are afterwards what they are now.

    Inside, every ``.grad`` starts as None. Parameters are the caller's promise.
    """
    rng = capture_rng(device)
    buffers = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    drop_gradients(model)
    try:
        yield
    finally:
        for name, _ in list(model.named_buffers()):
            if name not in buffers:
                module, key = _place_of(model, name)
                del module._buffers[key]
        for name, (buffer, values) in buffers.items():
            _copy(buffer, values)
            module, key = _place_of(model, name)
            module._buffers[key] = buffer
        for parameter, grad in grads:
            parameter.grad = grad
        restore_rng(rng, device)


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


def _place_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


class BufferWatch:
    """Notices which buffers a forward changes: their values, or the tensor itself."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = {
            name: (buffer, buffer._version, buffer.clone()) for name, buffer in _buffers(model)
        }

    def changed(self) -> set[str]:
        """Names of the buffers that differ from how they were at the start."""
        return {name for name, buffer in _buffers(self._model) if self._differs(name, buffer)}

    def added(self) -> set[str]:
        """Names of the buffers that were not there at the start."""
        return {name for name, _ in _buffers(self._model)} - set(self._before)

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
    if torch.equal(first, second):
        return True
    if not (first.dtype.is_floating_point or first.dtype.is_complex):
        return False
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return model.named_buffers()
