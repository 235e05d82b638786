"""Many tensors are copied at once, where the device has a kernel for that."""

from __future__ import annotations

import pytest
import torch

from shoal.fusion.crew import Undo, copy_all
from shoal.fusion.rows.stacked import Stacked

KINDS = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint16, torch.complex64)


@pytest.fixture(autouse=True)
def _as_cuda_has_it(monkeypatch):
    real = torch._foreach_copy_

    def copy(places, values, non_blocking=False):
        kinds = {value.dtype for value in values}
        if torch.uint16 in kinds:
            raise NotImplementedError("\"foreach_tensor_copy\" not implemented for 'UInt16'")
        assert len(kinds) == 1
        return real(places, values, non_blocking)

    monkeypatch.setattr(torch, "_foreach_copy_", copy)


def test_tensors_of_all_types_and_shapes_are_copied():
    values = [torch.ones(shape).to(kind) for kind in KINDS for shape in ((3, 2), (), (0,))]
    places = [torch.zeros_like(value) for value in values]
    copy_all(places, values)
    assert all(map(torch.equal, places, values))
    copy_all([], [])


def test_buffers_are_put_back_as_they_were():
    module = torch.nn.BatchNorm1d(4)
    module.register_buffer("tokens", torch.arange(4).to(torch.uint16))
    stacked = Stacked([module])
    undo = Undo.of(stacked)
    before = {name: buffer.clone() for name, buffer in stacked.buffers.items()}
    for buffer in stacked.buffers.values():
        buffer.fill_(7)
    undo.put_back(stacked)
    assert all(torch.equal(stacked.buffers[name], value) for name, value in before.items())
