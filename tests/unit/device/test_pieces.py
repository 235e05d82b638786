"""What a copy on a GPU is made of; no GPU is needed to see that."""

import pytest
import torch

from shoal.device import cuda


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 64])
def test_a_large_copy_in_pieces_is_the_same_copy(size, monkeypatch):
    monkeypatch.setattr(cuda, "PIECE_BYTES", 8)
    source, target = torch.arange(size).to(torch.uint8), torch.zeros(size, dtype=torch.uint8)
    cuda.CudaDevice.copy(None, target, source, "up")
    assert torch.equal(target, source)


def test_floats_and_tables_go_in_pieces_too(monkeypatch):
    monkeypatch.setattr(cuda, "PIECE_BYTES", 8)
    source, target = torch.randn(5, 7), torch.zeros(5, 7)
    cuda.CudaDevice.copy(None, target, source, "up")
    assert torch.equal(target, source)


def test_tensors_that_do_not_lie_alike_go_in_one(monkeypatch):
    monkeypatch.setattr(cuda, "PIECE_BYTES", 8)
    source, target = torch.randn(5, 7).t(), torch.zeros(7, 5)
    cuda.CudaDevice.copy(None, target, source, "down")
    assert torch.equal(target, source)
