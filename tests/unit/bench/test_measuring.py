"""Measuring itself, with sizes that take no time."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shoal.bench import disk as disk_module
from shoal.bench import link as link_module
from shoal.bench.disk import BLOCK_BYTES, file_system, measure_disk
from shoal.bench.kernels import BlockShape, TransformerBlock, measure_block, measure_matmuls
from shoal.bench.link import measure_link, virtual_copies
from shoal.bench.memory import measure_adamw, measure_host
from shoal.bench.run import Sizes, find_device, run_bench
from shoal.bench.timing import LEAST, host_timer, repeat, threads
from shoal.core.errors import SpecError
from shoal.device.pace import SystemClock
from shoal.testing import ManualClock

CLOCK = SystemClock()
CPU = torch.device("cpu")
SMALL = Sizes(
    array_bytes=2**16,
    copy_bytes=2**16,
    parameters=2**12,
    chunk=2**10,
    disk_bytes=BLOCK_BYTES,
    block=BlockShape(batch=2, sequence=8, width=16, heads=2),
)
SECONDS = 0.01


def _work(clock: ManualClock, seconds: float) -> Callable[[], float]:
    def work() -> float:
        clock.advance(seconds)
        return seconds

    return work


def test_work_is_repeated_until_its_time_is_over() -> None:
    clock = ManualClock()

    assert len(repeat(_work(clock, 0.1), 2.0, clock)) == 19  # and one to warm up
    assert clock.now() == pytest.approx(2.0)


def test_work_is_repeated_a_few_times_even_if_there_is_little_time() -> None:
    clock = ManualClock()

    assert len(repeat(_work(clock, 0.1), 0.2, clock)) == LEAST


def test_work_that_is_far_too_slow_is_measured_once() -> None:
    clock = ManualClock()

    assert repeat(_work(clock, 10.0), 1.0, clock) == [10.0]


def test_the_host_s_timer_tells_the_clock_s_time() -> None:
    clock = ManualClock()

    assert host_timer(clock)(lambda: clock.advance(3.0)) == 3.0


def test_the_number_of_threads_is_put_back() -> None:
    before, during = torch.get_num_threads(), []

    def fail() -> None:
        with threads(before + 1):
            during.append(torch.get_num_threads())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert (during, torch.get_num_threads()) == ([before + 1], before)


def test_host_memory_is_measured_on_one_core_and_on_all() -> None:
    host = measure_host(2**16, 2, SECONDS, CLOCK)

    assert min(host.copy_one.best, host.copy_all.best, host.triad_one.best) > 1e6
    assert host.triad_all.samples >= LEAST


def test_adamw_steps_every_parameter_of_every_chunk() -> None:
    optimizer = measure_adamw(2**12, 1000, 1, SECONDS, CLOCK)  # the last chunk is a smaller one

    assert optimizer.one.best > 1e4
    assert optimizer.all.best > 1e4


def test_a_virtual_link_is_measured_each_way_and_both_at_once() -> None:
    asked: list[tuple[str, ...]] = []
    with virtual_copies(2**16) as copies:

        def noted(directions):
            asked.append(directions)
            return copies(directions)

        link = measure_link(noted, 2**16, SECONDS, CLOCK)

    assert set(asked) == {("up",), ("down",), ("up", "down")}
    assert min(link.up.best, link.down.best, link.both.best) > 1e5


def test_both_directions_at_once_count_the_bytes_of_both() -> None:
    link = measure_link(lambda directions: 0.5, 1000, 0.0, CLOCK)

    assert (link.up.best, link.down.best, link.both.best) == (2000.0, 2000.0, 4000.0)


class FakeEvent:
    """A CUDA event on a clock that only copies turn: ``seconds`` each, one after another."""

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self, stream: FakeStream) -> None:
        self.at = stream.at

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1e3 * (end.at - self.at)


class FakeStream:
    current: FakeStream | None = None

    def __init__(self) -> None:
        self.at = 0.0

    def wait_event(self, event: FakeEvent) -> None:
        self.at = max(self.at, event.at)

    def __enter__(self) -> None:
        FakeStream.current = self

    def __exit__(self, *_: object) -> None:
        FakeStream.current = None


class FakeTensor:
    """A buffer whose copies take the time of where they go."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.sources = seconds, []

    def copy_(self, source: FakeTensor, non_blocking: bool) -> None:
        assert non_blocking
        assert FakeStream.current is not None
        FakeStream.current.at += self.seconds
        self.sources.append(source)


def test_copies_of_a_gpu_begin_together_and_end_with_the_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    pinned = {"up": FakeTensor(0.0), "down": FakeTensor(0.3)}
    there = {"up": FakeTensor(0.1), "down": FakeTensor(0.0)}
    streams = {"up": FakeStream(), "down": FakeStream()}

    up = link_module._timed_copies(("up",), pinned, there, streams)
    both = link_module._timed_copies(("up", "down"), pinned, there, streams)

    assert (up, both) == (pytest.approx(0.1), pytest.approx(0.3))
    assert set(there["up"].sources) == {pinned["up"]}
    assert set(pinned["down"].sources) == {there["down"]}


def test_a_disk_is_written_and_read_and_nothing_is_left(tmp_path: Path) -> None:
    disk = measure_disk(tmp_path, BLOCK_BYTES, SECONDS, CLOCK)

    assert min(disk.write.best, disk.read.best) > 1e4
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_direct_access_is_measured_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "_try_direct", lambda name: None)

    disk = measure_disk(tmp_path, BLOCK_BYTES, SECONDS, CLOCK)

    assert not disk.direct
    assert disk.read.best > 1e4


def test_a_file_system_that_refuses_direct_access_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "no")

    path = tmp_path / "file"
    path.touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert disk_module._try_direct(str(path)) is None
    with monkeypatch.context() as patch:  # opened, and then refused
        patch.setattr(os, "pwrite", refuse)
        assert disk_module._try_direct(str(path)) is None


def test_a_disk_that_fails_leaves_nothing_and_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(disk_module, "_try_direct", lambda name: None)
    monkeypatch.setattr(os, "pwrite", fail)

    with pytest.raises(OSError, match="broken"):
        measure_disk(tmp_path, BLOCK_BYTES, SECONDS, CLOCK)

    assert list(tmp_path.iterdir()) == []


def test_the_file_system_is_the_innermost_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"root / ext4 rw 0 0\ndisk {tmp_path} xfs rw 0 0\nother {tmp_path}-other tmpfs rw 0 0\n"
    )

    assert file_system(tmp_path, mounts) == "xfs"
    assert file_system(Path("/"), mounts) == "ext4"
    assert file_system(tmp_path, tmp_path / "nowhere") == ""


def test_the_products_of_a_layer_are_measured_in_both_precisions() -> None:
    matmuls = measure_matmuls(SMALL.block, CPU, host_timer(CLOCK), SECONDS, CLOCK)

    assert {(m.name, m.precision) for m in matmuls} == {
        (name, precision)
        for name in ("qkv", "projection", "feed-forward up", "feed-forward down")
        for precision in ("fp32", "bf16")
    }
    assert {(m.rows, m.inner, m.columns) for m in matmuls if m.name == "qkv"} == {(16, 16, 48)}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_block_s_flops_are_those_of_its_shape(precision) -> None:
    shape = SMALL.block

    block, kernels = measure_block(shape, precision, CPU, host_timer(CLOCK), SECONDS, CLOCK)

    products = 2 * shape.tokens * 12 * shape.width**2
    attention = 2 * 2 * shape.tokens * shape.sequence * shape.width
    assert block.forward_flops == products + attention
    assert block.backward_flops == 2 * products + attention * 5 // 2
    assert block.flops_per_s > 0
    assert sum(kernel.flops for kernel in kernels) == block.forward_flops
    assert [kernel.name for kernel in kernels][:3] == ["norm", "qkv", "attention"]


def test_the_block_is_causal_and_keeps_the_shape() -> None:
    torch.manual_seed(0)
    block, x = TransformerBlock(16, 2), torch.rand(2, 8, 16)
    later = x.clone()
    later[:, 5:] += 1

    assert block(x).shape == x.shape
    assert torch.allclose(block(x)[:, :5], block(later)[:, :5], atol=1e-6)


def test_everything_is_measured_in_order_and_the_threads_are_put_back(tmp_path: Path) -> None:
    before, told = torch.get_num_threads(), []

    measured = run_bench(0.05, "cpu", tmp_path, sizes=SMALL, tell=told.append)

    assert told == [
        "host memory",
        "AdamW on the host",
        "link",
        "disk",
        "matrix products",
        "a transformer block in fp32",
        "a transformer block in bf16",
    ]
    assert (measured.device, len(measured.blocks)) == ("cpu", 2)
    assert measured.disk is not None
    assert any("the device is a virtual one" in note for note in measured.notes)
    assert torch.get_num_threads() == before
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_cannot_be_measured_is_noted(tmp_path: Path) -> None:
    measured = run_bench(0.05, "cpu", tmp_path / "nowhere", sizes=SMALL)

    assert measured.disk is None
    assert any(note.startswith("the disk was not measured") for note in measured.notes)


def test_an_interrupt_goes_through_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fdatasync", interrupted)
    before = torch.get_num_threads()

    with pytest.raises(KeyboardInterrupt):
        run_bench(0.05, "cpu", tmp_path, sizes=SMALL)

    assert torch.get_num_threads() == before
    assert list(tmp_path.iterdir()) == []


def test_a_small_machine_gets_small_arrays() -> None:
    sizes = Sizes().within(2**30)

    assert 3 * sizes.array_bytes <= 2**30 // 8
    assert sizes.parameters < Sizes().parameters
    assert Sizes().within(2**40) == Sizes()


@pytest.mark.parametrize("name", ["gpu", "cpu:1", "cpu@h200", "cuda:x", ""])
def test_a_device_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=r"cannot measure the device .*cpu .*cuda:0"):
        find_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_with_a_way_out() -> None:
    with pytest.raises(SpecError, match=r"cuda:0 was asked for, but torch sees 0 GPUs.*cpu"):
        find_device("cuda:0")
    assert find_device(None) == CPU


@pytest.mark.parametrize("seconds", [0, -1, True, "long"])
def test_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(SpecError, match="--seconds is a number above 0"):
        run_bench(seconds)
