"""What is asked of a GPU's allocator, by a stand-in for its statistics."""

from __future__ import annotations

import pytest
import torch

from shoal.device.allocator import (
    Allocator,
    allocator_here,
    allocator_of,
    held_by_libraries,
)


def test_a_rise_is_above_what_there_was_before(memory):
    allocator = Allocator(memory)
    memory.take(10_000)
    memory.give_back(8000)

    before = allocator.before()
    memory.take(300)
    memory.give_back(100)

    assert before == 2000
    assert allocator.rise(before) == 300


def test_the_peak_that_is_shown_outlives_resets_until_it_is_forgotten(memory):
    allocator = Allocator(memory)
    memory.take(5000)
    memory.give_back(5000)
    for _ in range(3):
        allocator.before()

    assert memory.resets == 3
    assert memory.most == 0
    assert allocator.peak_bytes == 5120  # as the allocator gave them out
    memory.take(6000)
    assert allocator.peak_bytes == 6144
    memory.give_back(6000)
    allocator.forget()
    assert allocator.peak_bytes == 0


def test_nothing_is_asked_while_a_graph_is_captured(memory):
    memory.is_capturing = True

    assert Allocator(memory).before() is None
    assert memory.resets == 0


def test_a_cpu_has_no_allocator_to_ask():
    assert allocator_here() is None


class Torch:
    """The calls of ``torch.cuda``."""

    def __init__(self, monkeypatch, backend="native"):
        self.resets, self.error = [], None
        calls = {
            "get_allocator_backend": lambda: backend,
            "memory_stats_as_nested_dict": self.stats,
            "reset_peak_memory_stats": self.resets.append,
            "is_current_stream_capturing": lambda: False,
            "is_initialized": lambda: True,
            "current_device": lambda: 1,
        }
        for name, call in calls.items():
            monkeypatch.setattr(torch.cuda, name, call)

    def stats(self, index):
        if self.error:
            raise self.error
        return {
            "requested_bytes": {"all": {"current": 100, "peak": 300}},
            "allocated_bytes": {"all": {"current": 512, "peak": 1024}},
        }


@pytest.fixture
def fresh():
    """Allocators that this test makes are gone with it."""
    allocator_of.cache_clear()
    yield
    allocator_of.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_torchs_allocator_tells_bytes_as_they_were_asked_for(monkeypatch):
    calls = Torch(monkeypatch)
    allocator = allocator_here()

    assert allocator_here() is allocator
    assert allocator.before() == 100
    assert allocator.rise(100) == 200
    assert allocator.peak_bytes == 1024
    assert calls.resets == [1]


@pytest.mark.usefixtures("fresh")
def test_cudas_own_allocator_tells_them_as_it_gave_them_out(monkeypatch):
    Torch(monkeypatch, backend="cudaMallocAsync")

    allocator = allocator_here()

    assert allocator.before() == 512
    assert allocator.rise(512) == 512


@pytest.mark.usefixtures("fresh")
def test_an_allocator_without_statistics_is_not_asked(monkeypatch):
    Torch(monkeypatch).error = RuntimeError("does not yet support getDeviceStats")

    assert allocator_here() is None


def test_what_libraries_keep_is_what_is_left_of_products_of_each_type():
    held = {}

    class Kept(torch.utils._python_dispatch.TorchDispatchMode):
        """A workspace at the first product of each type, forward and backward."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "mm" in func.name():
                held[func.name(), args[-1].dtype] = 1000
            return func(*args, **(kwargs or {}))

    state = torch.get_rng_state()
    with Kept():
        found = held_by_libraries(torch.device("cpu"), lambda: sum(held.values()))

    assert {dtype for _, dtype in held} == {torch.float32, torch.bfloat16}
    assert len(held) == 4  # an addmm and an mm of each
    assert found == 4000
    assert torch.equal(torch.get_rng_state(), state)
