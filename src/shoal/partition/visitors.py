"""A model that rests on the host, of which some layers at a time are on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from shoal.partition.chain import Chain

There = Callable[[int, int], AbstractContextManager[object]]
"""Entered while layers [start, stop) run: their parameters are on the device then."""


def everywhere(start: int, stop: int) -> AbstractContextManager[object]:
    """Of a model that is on the device as a whole."""
    return nullcontext()


def visits_of(chain: Chain) -> There:
    """Of a model that is on the host, whose buffers are where ``chain`` runs."""

    def visit(start: int, stop: int) -> AbstractContextManager[object]:
        return parameters_on(chain.device, chain.model, chain.parameters_in(start, stop))

    return visit


@contextmanager
def parameters_on(device: torch.device, model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Inside, these parameters are on ``device``; afterwards where they were, without gradients.

    What was written to them there is in them. No graph may cross either border.
    """
    parameters = [model.get_parameter(name) for name in names]
    homes = [(parameter.data, parameter._version) for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
            parameter.data = parameter.data.to(device)
        yield
    finally:
        for parameter, (home, version) in zip(parameters, homes, strict=True):
            parameter.grad = None
            there = parameter.data
            if there.device != home.device:
                parameter.data = home if parameter._version == version else home.copy_(there)


@contextmanager
def buffers_on(device: torch.device, model: nn.Module) -> Iterator[None]:
    """Inside, the model's buffers are on ``device``; afterwards where they were, as they were."""
    homes = [
        (module, key, buffer)
        for module in model.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and buffer.device != device
    ]
    moved = {id(buffer): buffer.to(device) for _, _, buffer in homes}
    try:
        for module, key, buffer in homes:
            module._buffers[key] = moved[id(buffer)]
        yield
    finally:
        for module, key, buffer in homes:
            module._buffers[key] = buffer
