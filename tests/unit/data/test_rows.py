"""A loader that gives rows of tensors gives the same batches when they are taken at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from shoal.data.reading import PlainReader


def columns(count=23):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 3, 4, generator=generator)
    return x, torch.arange(count), torch.rand(count, generator=generator) > 0.5


def read_twice(make):
    """Batches and the generator's state afterwards, as the loader gives them and as we read."""
    found = []
    for read in (iter, lambda source: PlainReader(source).open()):
        torch.manual_seed(1)
        found.append((list(read(make())), torch.get_rng_state()))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 5},
        {"batch_size": 5, "shuffle": True},
        {"batch_size": 5, "shuffle": True, "drop_last": True},
        {"batch_size": 64},
        {"batch_sampler": BatchSampler(RandomSampler(range(23)), 4, False)},
        {"batch_size": 5, "generator": torch.Generator().manual_seed(2)},
        {"batch_size": 5, "sampler": [3, -1, 0, 22, 3]},
        {"batch_size": None, "sampler": [3, 2]},
    ],
    ids=lambda options: repr(options).partition(" object at")[0],
)
def test_the_batches_are_the_loaders(options):
    (theirs, state), (ours, our_state) = read_twice(
        lambda: DataLoader(TensorDataset(*columns()), **options)
    )
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert type(mine) is type(other)
        for one, another in zip(mine, other, strict=True):
            assert one.dtype == another.dtype
            assert one.stride() == another.stride()
            assert torch.equal(one, another)
    assert torch.equal(state, our_state)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.complex64, torch.uint8, torch.float8_e4m3fn],
    ids=str,
)
def test_columns_of_every_type_are_taken(dtype):
    column = torch.arange(24).reshape(8, 3).to(torch.float32).to(dtype)
    (theirs, _), (ours, _) = read_twice(
        lambda: DataLoader(TensorDataset(column, columns(8)[1]), 3, shuffle=True)
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert mine[0].dtype == other[0].dtype == dtype
        assert torch.equal(mine[0].view(torch.uint8), other[0].view(torch.uint8))
        assert torch.equal(mine[1], other[1])


def test_rows_are_taken_by_the_quick_kernel(monkeypatch):
    loader, taken = DataLoader(TensorDataset(*columns()), 5), []
    quick = torch.Tensor.index_select
    monkeypatch.setattr(
        torch.Tensor, "index_select", lambda t, *a: taken.append(0) or quick(t, *a)
    )
    list(PlainReader(loader).open())
    assert len(taken) == 3 * len(loader)


class Doubled(TensorDataset):
    def __getitem__(self, index):
        return tuple(2 * column for column in super().__getitem__(index))


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Doubled(columns()[0]), 5),
        lambda: DataLoader(TensorDataset(columns()[0]), 5, collate_fn=len),
        lambda: DataLoader(TensorDataset(columns()[0].transpose(1, 2)), 5),
        lambda: DataLoader([(torch.ones(2), n) for n in range(9)], 5),
    ],
)
def test_whatever_else_a_loader_does_it_does(make):
    (theirs, _), (ours, _) = read_twice(make)
    assert str(ours) == str(theirs)


@pytest.mark.parametrize(
    "batches",
    [
        [[np.int64(3), np.int64(0)]],
        [[torch.tensor(4), torch.tensor(1)], torch.tensor([1, 0])],
        [(2, 2)],
        [[slice(0, 2), slice(3, 5)]],
        [[None]],
        [[True, False]],
        [[torch.tensor([1]), torch.tensor([2])]],
        [bytes([1, 2])],
    ],
    ids=str,
)
def test_an_index_may_be_whatever_a_tensor_takes(batches):
    def outcome(read):
        loader = DataLoader(TensorDataset(columns()[0]), batch_sampler=batches)
        try:
            return [batch[0].tolist() for batch in read(loader)]
        except Exception as error:
            return type(error)

    assert outcome(lambda loader: PlainReader(loader).open()) == outcome(iter)


def test_an_index_that_is_none_is_an_error():
    for one in ([0.5], []):
        loader = DataLoader(TensorDataset(columns()[0]), batch_sampler=[one])
        with pytest.raises((IndexError, TypeError, RuntimeError)):
            list(PlainReader(loader).open())


def test_an_index_beyond_the_end_is_an_error():
    loader = DataLoader(TensorDataset(torch.ones(3)), 2, sampler=[0, 7])
    with pytest.raises(IndexError):
        list(PlainReader(loader).open())
