"""A trial's region is mapped, and registered with CUDA, once for all of its leases."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from shoal.core.errors import CapacityError
from shoal.memory.store import Region, Regions, create_region

SIZE = 4096


class Runtime:
    """CUDA's calls, with room to register so many regions."""

    def __init__(self):
        self.room = 8
        self.there: list[int] = []
        self.calls: list[tuple[str, int]] = []

    def cudaHostRegister(self, at: int, size: int, flags: int) -> int:
        assert (size, flags) == (SIZE, 1)
        assert at not in self.there
        if len(self.there) == self.room:
            return 2
        self.there.append(at)
        self.calls.append(("pin", at))
        return 0

    def cudaHostUnregister(self, at: int) -> int:
        self.there.remove(at)
        self.calls.append(("unpin", at))
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


@pytest.fixture
def files() -> Iterator[list[int]]:
    made = [create_region(f"test-{number}", SIZE) for number in range(4)]
    yield made
    for descriptor in made:
        os.close(descriptor)


def opened(regions: Regions, trial: int, descriptor: int) -> Region:
    copy = os.dup(descriptor)
    try:
        return regions.open(trial, copy, SIZE)
    finally:
        os.close(copy)


def test_the_next_lease_finds_it_pinned(runtime: Runtime, files: list[int]):
    regions = Regions(pin=True)
    first = opened(regions, 0, files[0])
    first.bytes.fill_(7)
    first.rest()
    second = opened(regions, 0, files[0])
    assert second is first
    assert second.bytes.eq(7).all()
    assert [call for call, _ in runtime.calls] == ["pin"]
    regions.forget(0)
    regions.forget(0)
    assert runtime.there == [first.bytes.data_ptr()]  # copies may be in flight
    second.rest()
    assert runtime.there == []


def test_other_memory_of_the_same_trial_is_mapped_anew(runtime: Runtime, files: list[int]):
    regions = Regions(pin=True)
    opened(regions, 0, files[0]).rest()
    assert len(runtime.there) == 1
    other = opened(regions, 0, files[1])
    assert runtime.there == [other.bytes.data_ptr()]
    assert not other.is_of(files[0], SIZE)
    assert not other.is_of(files[1], SIZE // 2)


def test_a_file_that_took_its_number_is_no_other(files: list[int]):
    """The number of a mapped file is not given again, also when its last descriptor is closed."""
    regions = Regions(pin=False)
    descriptor = create_region("test-closed", SIZE)
    region = regions.open(0, descriptor, SIZE)
    os.close(descriptor)
    others = [create_region(f"test-later-{number}", SIZE) for number in range(64)]
    assert not any(region.is_of(other, SIZE) for other in others)
    for other in others:
        os.close(other)


def test_without_room_those_that_wait_make_some(runtime: Runtime, files: list[int]):
    regions, runtime.room = Regions(pin=True), 2
    waiting, busy = opened(regions, 0, files[0]), opened(regions, 1, files[1])
    waiting.rest()
    third = opened(regions, 2, files[2])
    assert runtime.there == [busy.bytes.data_ptr(), third.bytes.data_ptr()]
    third.rest()
    assert opened(regions, 0, files[0]) is waiting  # pinned again, in place of the third
    assert runtime.there == [busy.bytes.data_ptr(), waiting.bytes.data_ptr()]


def test_without_room_and_nobody_waiting_it_is_refused(runtime: Runtime, files: list[int]):
    regions, runtime.room = Regions(pin=True), 1
    busy = opened(regions, 0, files[0])
    with pytest.raises(CapacityError, match="cannot pin"):
        opened(regions, 1, files[1])
    assert runtime.there == [busy.bytes.data_ptr()]
    busy.rest()
    opened(regions, 1, files[1])


def test_one_that_nobody_keeps_is_unpinned_when_it_rests(runtime: Runtime, files: list[int]):
    region = Region(files[0], SIZE, pin=True)
    region.rest()
    assert runtime.there == []
