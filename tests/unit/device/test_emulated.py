"""An emulated device: real bits, the profile's times."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from shoal.core.profile import Profile
from shoal.core.spec import DeviceSpec
from shoal.core.turns import Upload
from shoal.core.units import Bytes
from shoal.device import EmulatedDevice, Event, Lane, ThreadEvent, VirtualDevice, open_device
from shoal.device.streams import Piece, Turn
from shoal.testing import ManualClock

MB = 10**6


def _profile(both: float | None = None) -> Profile:
    """Round figures: 100 MB/s up, 50 MB/s down, 1 GB/s on the host, 1 GFLOP/s."""
    return Profile(
        name="round",
        memory=Bytes(MB),
        up_bytes_per_s=100e6,
        down_bytes_per_s=50e6,
        both_bytes_per_s=both,
        host_bytes_per_s=1e9,
        memory_bytes_per_s=10e9,
        fp32_flops_per_s=1e9,
        bf16_flops_per_s=1e9,
        fp16_flops_per_s=1e9,
    )


def _spec(both: float | None = None, *, poison: bool = False) -> DeviceSpec:
    return DeviceSpec(
        name="cpu:0", kind="virtual", memory=Bytes(MB), profile=_profile(both), poison=poison
    )


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def device(clock: ManualClock) -> EmulatedDevice:
    return EmulatedDevice(_spec(), clock)


@pytest.fixture
def lane(device: EmulatedDevice) -> Iterator[Lane]:
    lane = device.lane()
    yield lane
    lane.close()


def _seconds(event: Event) -> float:
    begin, end = event.span()
    return end - begin


def _bytes(size: int, value: int = 1) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def test_a_description_with_a_profile_opens_an_emulated_device() -> None:
    assert type(open_device(_spec())) is EmulatedDevice
    plain = DeviceSpec(name="cpu:0", kind="virtual", memory=Bytes(MB))
    assert type(open_device(plain)) is VirtualDevice


def test_compute_takes_the_seconds_it_is_given(device: EmulatedDevice, clock: ManualClock) -> None:
    ran = [device.compute(lambda: clock.advance(0.01), seconds=0.25) for _ in range(4)]

    assert clock.now() == pytest.approx(101.0)
    assert [_seconds(event) for event in ran] == pytest.approx([0.25] * 4)
    assert ran[1].span()[0] == pytest.approx(ran[0].span()[1])
    assert device.fidelity()["compute"].emulated_s == pytest.approx(1.0)


def test_compute_of_no_given_seconds_takes_its_real_time(
    device: EmulatedDevice, clock: ManualClock
) -> None:
    event = device.compute(lambda: clock.advance(0.3))

    assert clock.now() == pytest.approx(100.3)
    assert _seconds(event) == pytest.approx(0.3)
    assert device.fidelity() == {}


def test_compute_that_fails_does_not_sleep(device: EmulatedDevice, clock: ManualClock) -> None:
    def fail() -> None:
        raise ValueError("no")

    event = device.compute(fail, seconds=9.0)

    assert isinstance(event.error, ValueError)
    assert clock.now() == 100.0


def test_a_copy_takes_its_direction_s_time_and_moves_the_bits(
    device: EmulatedDevice, lane: Lane, clock: ManualClock
) -> None:
    source, target, back = _bytes(MB, 3), _bytes(MB, 0), _bytes(MB, 0)

    up = lane.up.submit(lambda: device.copy(target, source, "up"))
    down = lane.down.submit(lambda: device.copy(back, target, "down"), [up])
    down.wait()

    assert torch.equal(back, source)
    assert _seconds(up) == pytest.approx(0.01)
    assert _seconds(down) == pytest.approx(0.02)
    assert down.span()[0] == pytest.approx(up.span()[1])
    assert clock.now() == pytest.approx(100.03)


def test_the_copies_of_one_load_follow_each_other(device: EmulatedDevice, lane: Lane) -> None:
    def load() -> None:
        for _ in range(3):
            device.copy(_bytes(MB), _bytes(MB), "up")

    event = lane.up.submit(load)
    event.wait()

    assert _seconds(event) == pytest.approx(0.03)


@pytest.mark.parametrize(("stream", "seconds"), [("up", 0.01), ("host", 0.05)])
def test_the_trials_of_a_device_share_its_link_and_its_host_memory(
    device: EmulatedDevice, lane: Lane, stream: str, seconds: float
) -> None:
    other, gate = device.lane(), ThreadEvent()

    def load() -> None:
        device.copy(_bytes(MB), _bytes(MB), "up")

    works = {"up": (load, None), "host": (lambda: None, seconds)}
    work, given = works[stream]
    events = [getattr(o, stream).submit(work, [gate], seconds=given) for o in (lane, other)]
    gate.run(lambda: None)
    for event in events:
        event.wait()
    other.close()

    first, second = sorted(event.span() for event in events)
    assert second[1] - first[0] == pytest.approx(2 * seconds)
    assert second[0] == pytest.approx(first[1])


@pytest.mark.parametrize("emulated", [True, False])
def test_activations_pass_weights_that_are_on_their_way_up(emulated: bool) -> None:
    plain = DeviceSpec(name="cpu:0", kind="virtual", memory=Bytes(MB), link_bytes_per_s=100e6)

    def passes() -> bool:
        device = EmulatedDevice(_spec()) if emulated else VirtualDevice(plain)
        lane, large, small = device.lane(), _bytes(40 * MB), _bytes(MB)
        back, weights = Upload(0, 1), Upload(0, 2)
        up = lane.up.submit(lambda: device.copy(large, large.clone(), "up", upload=weights))
        while not device._wires["up"].is_busy(time.perf_counter()):
            time.sleep(1e-3)
        passing = lane.activations.submit(
            lambda: device.copy(small, small, "up", upload=back, passes=True)
        )
        passing.wait()
        is_under_way = not up.done
        up.wait()
        lane.close()
        assert _seconds(passing) + 1e-5 >= 0.01
        assert _seconds(up) + 1e-5 >= 0.4
        is_before = passing.span()[1] < up.span()[1] and _seconds(passing) + 1e-5 < 0.3
        return is_under_way and is_before and _seconds(up) + 1e-5 >= 0.41

    # On a busy machine a thread may wake up when all is over.
    assert any(passes() for _ in range(5))


def test_compute_waits_for_a_load_and_counts_from_when_it_was_due(
    device: EmulatedDevice, lane: Lane
) -> None:
    load = lane.up.submit(lambda: device.copy(_bytes(MB), _bytes(MB), "up"))
    unit = device.compute(lambda: None, [load], seconds=0.1)

    assert unit.span()[0] == pytest.approx(load.span()[1])


def test_what_is_submitted_after_a_unit_begins_when_the_unit_was_due(
    device: EmulatedDevice, lane: Lane, clock: ManualClock
) -> None:
    unit = device.compute(lambda: None, seconds=0.1)
    clock.advance(0.004)  # Python, and a thread that woke up late
    load = lane.up.submit(lambda: device.copy(_bytes(MB), _bytes(MB), "up"))
    load.wait()

    assert load.span()[0] == pytest.approx(unit.span()[1])


def test_host_work_of_no_given_seconds_takes_its_real_time(
    device: EmulatedDevice, lane: Lane, clock: ManualClock
) -> None:
    event = lane.host.submit(lambda: clock.advance(0.2))
    event.wait()

    assert _seconds(event) == pytest.approx(0.2)


def test_a_failure_reaches_whoever_waits(device: EmulatedDevice, lane: Lane) -> None:
    def fail() -> None:
        raise ValueError("no")

    event = lane.host.submit(fail, seconds=1.0)
    behind = lane.up.submit(lambda: None, [event])

    for failed in (event, behind):
        with pytest.raises(ValueError, match="no"):
            failed.wait()
        assert _seconds(failed) >= 0


def test_a_link_that_both_directions_share_is_slower_when_both_are_busy() -> None:
    device = EmulatedDevice(_spec(both=100e6))
    lane = device.lane()
    source, target, back = _bytes(4 * MB), _bytes(4 * MB), _bytes(2 * MB)

    def up(gate: ThreadEvent | None = None) -> Event:
        return lane.up.submit(lambda: device.copy(target, source, "up"), [gate] if gate else [])

    def longest_together() -> float:
        gate = ThreadEvent()
        copies = [up(gate)]
        copies += [lane.down.submit(lambda: device.copy(back, source[: 2 * MB], "down"), [gate])]
        gate.run(lambda: None)
        for copy in copies:
            copy.wait()
        return max(map(_seconds, copies))

    alone = [up() for _ in range(8)]
    for event in alone:
        event.wait()
    together = [longest_together() for _ in range(5)]
    lane.close()

    # Alone, a direction has all of its speed. Unix seconds have 7 digits after the point.
    # On a busy machine a copy may take longer than the link that it emulates.
    assert min(map(_seconds, alone)) == pytest.approx(0.04, abs=1e-5)
    assert any(0.044 < seconds <= 0.0601 for seconds in together)  # they want 1.5 times the link


def test_a_copy_outside_of_any_stream_begins_when_the_link_is_free(
    device: EmulatedDevice, clock: ManualClock
) -> None:
    device.copy(_bytes(MB), _bytes(MB), "up")
    clock.advance(5.0)
    device.copy(_bytes(MB), _bytes(MB), "up")

    assert clock.now() == pytest.approx(105.02)


def test_a_poisoned_device_delays_copies_but_not_what_is_due() -> None:
    device = EmulatedDevice(_spec(poison=True))
    lane = device.lane()

    event = lane.up.submit(lambda: device.copy(_bytes(MB), _bytes(MB), "up"))
    event.wait()
    lane.close()

    assert _seconds(event) == pytest.approx(0.01, abs=1e-5)


def test_a_plain_virtual_device_ignores_the_seconds() -> None:
    device = VirtualDevice(DeviceSpec(name="cpu:0", kind="virtual", memory=Bytes(MB)))
    lane = device.lane()

    ran = device.compute(lambda: None, seconds=60.0)
    event = lane.host.submit(lambda: None, seconds=60.0)
    event.wait()
    lane.close()

    assert _seconds(ran) < 30
    assert _seconds(event) < 30


def test_pieces_of_a_host_step_take_their_seconds_one_after_another(device, lane) -> None:
    done: list[int] = []
    pieces = [Piece(lambda n=n: done.append(n), 0.25 * n) for n in (1, 2, 3)]
    event = lane.host.submit_pieces(pieces, turn=Turn(device.host_turns, 0))
    event.wait()
    assert done == [1, 2, 3]
    assert _seconds(event) == pytest.approx(1.5)
    after = lane.host.submit(lambda: None, seconds=0.5)
    after.wait()
    assert after.span()[0] == pytest.approx(event.span()[1])


def test_what_goes_between_two_pieces_of_another_step_takes_its_seconds_there(
    device, lane
) -> None:
    other = device.lane()
    device.host_turns.choose = max
    begun, go_on = threading.Event(), threading.Event()
    pieces = [Piece(lambda: begun.set() or go_on.wait(), 1.0), Piece(lambda: None, 1.0)]
    patient = lane.host.submit_pieces(pieces, turn=Turn(device.host_turns, 1))
    begun.wait()
    urgent = other.host.submit(lambda: None, seconds=0.5, turn=Turn(device.host_turns, 2))
    while not device.host_turns._waiting:
        time.sleep(1e-3)
    go_on.set()
    patient.wait()
    urgent.wait()
    assert _seconds(urgent) == pytest.approx(0.5)
    assert urgent.span()[0] == pytest.approx(patient.span()[0] + 1.0)
    assert _seconds(patient) == pytest.approx(2.5)
    other.close()
