"""All measurements, one after another, within the time there is."""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from shoal.bench.disk import measure_disk
from shoal.bench.kept import this_machine
from shoal.bench.kernels import PRECISIONS, BlockShape, measure_block, measure_matmuls
from shoal.bench.link import Copies, cuda_copies, measure_link, virtual_copies
from shoal.bench.measured import Block, Disk, Kernel, Measured
from shoal.bench.memory import measure_adamw, measure_host
from shoal.bench.timing import Timer, cuda_timer, host_timer, threads
from shoal.core.errors import SpecError
from shoal.core.seams import Clock
from shoal.core.units import format_bytes
from shoal.device.pace import SystemClock
from shoal.hardware import available_cores, free_memory

MIB = 2**20
_BUSY = 0.5  # load per core above which figures say less than they should
# How the time is shared, in the order of the measurements.
_WEIGHTS = {
    "host": 4.0,
    "adamw": 2.0,
    "link": 3.0,
    "disk": 3.0,
    "matmuls": 4.0,
    **{f"block in {precision}": 4.0 for precision in PRECISIONS},
}
_SHORTEST = 0.25  # of its fair share, for what comes last when others took too long


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is moved and computed in one run of each measurement."""

    array_bytes: int = 256 * MIB  # of each of three; well beyond any cache
    copy_bytes: int = 64 * MIB
    parameters: int = 32 * MIB
    chunk: int = 4 * MIB  # parameters
    disk_bytes: int = 128 * MIB  # of a pass; the file is four times as large
    block: BlockShape = field(
        default_factory=lambda: BlockShape(batch=2, sequence=512, width=768, heads=12)
    )

    def within(self, free: int) -> Sizes:
        """Arrays that together take at most an eighth of ``free`` bytes of host memory."""
        halvings = 0
        while (
            3 * (self.array_bytes >> halvings) > free // 8 and self.array_bytes >> halvings > MIB
        ):
            halvings += 1
        return replace(
            self,
            array_bytes=self.array_bytes >> halvings,
            parameters=self.parameters >> halvings,
            copy_bytes=max(MIB, self.copy_bytes >> halvings),
        )


_ON_GPU = Sizes(
    copy_bytes=256 * MIB, block=BlockShape(batch=4, sequence=2048, width=4096, heads=32)
)
_ON_SMALL_GPU = replace(_ON_GPU, block=BlockShape(batch=2, sequence=2048, width=2048, heads=16))
_LARGE_GPU_BYTES = 20 * 1024 * MIB  # free, for the large block in float32 and its gradients


def sizes_for(device: torch.device) -> Sizes:
    """What a device works on at its best, as far as there is memory for it now."""
    sizes = Sizes()
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        sizes = _ON_GPU if free >= _LARGE_GPU_BYTES else _ON_SMALL_GPU
    return sizes.within(free_memory())


def find_device(name: str | None) -> torch.device:
    """The device to measure: ``cpu``, ``cuda`` or ``cuda:1``; None is a GPU if there is one.

    Raises:
        SpecError: the name is none of these, or that GPU is not there.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        return torch.device("cuda", 0) if count else torch.device("cpu")
    kind, _, index = name.strip().lower().partition(":")
    if (
        kind not in ("cpu", "cuda")
        or (index and not index.isdecimal())
        or (kind == "cpu" and index)
    ):
        raise SpecError(
            f"cannot measure the device {name!r}. Write cpu (a virtual device), cuda or cuda:0. "
            "Emulated devices have the figures of their profile."
        )
    if kind == "cpu":
        return torch.device("cpu")
    if int(index or 0) >= count:
        raise SpecError(
            f"{name} was asked for, but torch sees {count} GPUs. Check the driver and "
            "CUDA_VISIBLE_DEVICES, or use --device cpu."
        )
    return torch.device("cuda", int(index or 0))


def run_bench(
    seconds: float = 60.0,
    device: str | None = None,
    directory: Path | None = None,
    *,
    sizes: Sizes | None = None,
    tell: Callable[[str], None] = lambda stage: None,
) -> Measured:
    """Measure this machine in about ``seconds``; ``tell`` hears what comes next.

    ``directory`` is where the disk is measured; None is the system's place for temporary
    files. Nothing is left behind. torch's number of threads is afterwards what it was.

    Raises:
        SpecError: no such device, or no time.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise SpecError(f"--seconds is a number above 0, got {seconds!r}.")
    where = find_device(device)
    bench = _Bench(where, sizes or sizes_for(where), seconds, SystemClock(), tell)
    return bench.measure(directory or Path(tempfile.gettempdir()))


class _Bench:
    """One run: the device, the time, and what is noted on the way."""

    def __init__(
        self,
        device: torch.device,
        sizes: Sizes,
        seconds: float,
        clock: Clock,
        tell: Callable[[str], None],
    ) -> None:
        self._device, self._sizes, self._clock, self._tell = device, sizes, clock, tell
        self._seconds, self._until = seconds, clock.now() + seconds
        self._cores = available_cores()
        self._notes: list[str] = []

    def measure(self, directory: Path) -> Measured:
        """Everything, the host first."""
        machine, load = this_machine(), os.getloadavg()[0]
        self._note_what_disturbs(load)
        sizes, cores, clock = self._sizes, self._cores, self._clock
        host = measure_host(sizes.array_bytes, cores, self._begin("host", "host memory"), clock)
        budget_s = self._begin("adamw", "AdamW on the host")
        optimizer = measure_adamw(sizes.parameters, sizes.chunk, cores, budget_s, clock)
        budget_s = self._begin("link", "link")
        with self._copies() as copies:
            link = measure_link(copies, sizes.copy_bytes, budget_s, clock)
        disk = self._measure_disk(directory, self._begin("disk", "disk"))
        with threads(cores):
            budget_s = self._begin("matmuls", "matrix products")
            matmuls = measure_matmuls(sizes.block, self._device, self._timer, budget_s, clock)
            blocks, kernels = self._measure_blocks()
        return Measured(
            machine=machine,
            taken_at=time.time(),
            load=load,
            device=str(self._device),
            threads=cores,
            host=host,
            link=link,
            disk=disk,
            optimizer=optimizer,
            matmuls=matmuls,
            kernels=kernels,
            blocks=blocks,
            notes=tuple(self._notes),
        )

    def _begin(self, name: str, words: str) -> float:
        """Tell what comes next; the seconds for it: its part of what is left."""
        self._tell(words)
        names = list(_WEIGHTS)
        later = sum(_WEIGHTS[other] for other in names[names.index(name) :])
        left_s = self._until - self._clock.now()
        fair_s = self._seconds * _WEIGHTS[name] / sum(_WEIGHTS.values())
        return max(left_s * _WEIGHTS[name] / later, _SHORTEST * fair_s)

    @functools.cached_property
    def _timer(self) -> Timer:
        return cuda_timer(self._device) if self._device.type == "cuda" else host_timer(self._clock)

    def _copies(self) -> AbstractContextManager[Copies]:
        size = self._sizes.copy_bytes
        cuda = self._device.type == "cuda"
        return cuda_copies(self._device, size) if cuda else virtual_copies(size)

    def _measure_blocks(self) -> tuple[tuple[Block, ...], tuple[Kernel, ...]]:
        blocks: list[Block] = []
        kernels: list[Kernel] = []
        for precision in PRECISIONS:
            budget_s = self._begin(f"block in {precision}", f"a transformer block in {precision}")
            block, parts = measure_block(
                self._sizes.block, precision, self._device, self._timer, budget_s, self._clock
            )
            blocks.append(block)
            kernels += parts
        return tuple(blocks), tuple(kernels)

    def _measure_disk(self, directory: Path, budget_s: float) -> Disk | None:
        """None, and a note why, where the disk cannot be measured."""
        try:
            disk = measure_disk(directory, self._sizes.disk_bytes, budget_s, self._clock)
        except OSError as error:
            self._notes.append(
                f"the disk was not measured: {directory.resolve()} has no room for "
                f"{format_bytes(4 * self._sizes.disk_bytes)} or cannot be written ({error})"
            )
            return None
        if not disk.direct:
            self._notes.append(
                f"the disk was measured through the page cache: {disk.file_system or 'its'} file "
                "system has no O_DIRECT"
            )
        if disk.file_system in ("tmpfs", "ramfs"):
            self._notes.append(f"{directory.resolve()} is memory ({disk.file_system}), no disk")
        return disk

    def _note_what_disturbs(self, load: float) -> None:
        if load > _BUSY * self._cores:
            self._notes.append(
                f"other programs use this machine (load {load:.1f} on {self._cores} cores): the "
                "best of many runs is shown, an idle machine may be faster"
            )
        if self._device.type == "cuda":
            return
        seen = "torch sees no GPU" if not torch.cuda.is_available() else "the GPU was left out"
        self._notes.append(
            f"{seen}: the device is a virtual one, {self._cores} threads of this machine; its "
            "link is memory copied by a thread each way, which takes cores from the kernels"
        )
