"""What ``shoal bench`` measured, as records that a file can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from shoal.core.profile import Precision

FORMAT = 1  # of the file; another one is not read


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How much per second: the best of ``samples`` runs, and their median.

    The best is what the machine can do, the median what other programs left of it.

    Raises:
        ValueError: a figure that no measurement gives.
    """

    best: float
    median: float
    samples: int

    def __post_init__(self) -> None:
        for value in (self.best, self.median):
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ValueError(f"{value!r} is no rate")
        if type(self.samples) is not int or self.samples < 1:
            raise ValueError(f"{self.samples!r} is no number of samples")

    @staticmethod
    def of(amount: float, seconds: Sequence[float]) -> Rate:
        """``amount`` done in each of ``seconds``."""
        rates = [amount / max(taken, 1e-9) for taken in seconds]
        return Rate(best=max(rates), median=median(rates), samples=len(rates))


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What figures belong to: another machine, or another torch, has others."""

    cpu: str
    cores: int  # that this process may use
    torch: str
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes per second, read and written ones added up; ``one`` core, and ``all`` of them."""

    copy_one: Rate
    copy_all: Rate
    triad_one: Rate
    triad_all: Rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Bytes per second between host and device; ``both`` is the sum of the two at once."""

    up: Rate
    down: Rate
    both: Rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """Bytes per second; ``direct`` says whether the page cache was passed by."""

    write: Rate
    read: Rate
    direct: bool
    file_system: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptimizer:
    """Parameters per second of AdamW (fused, float32, in chunks) on the host."""

    one: Rate
    all: Rate
    bytes_per_parameter: int = 28  # p, g, m, v are read, p, m, v written

    @property
    def nanoseconds(self) -> float:
        """Per parameter, on all cores."""
        return 1e9 / self.all.best

    @property
    def bytes_per_s(self) -> float:
        """The host memory's bandwidth that it gets."""
        return self.bytes_per_parameter * self.all.best

    def bytes_per_s_on(self, cores: int) -> float:
        """The bandwidth it gets on so many cores: of one as many times, at most that of all."""
        parameters_per_s = min(cores * self.one.best, max(self.one.best, self.all.best))
        return self.bytes_per_parameter * parameters_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """FLOP/s of one matrix product of a layer: ``rows x inner`` by ``inner x columns``."""

    name: str
    precision: Precision
    rows: int
    inner: int
    columns: int
    flops_per_s: Rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Seconds of one kernel of a block's forward; ``flops`` is 0 where none are counted."""

    name: str
    precision: Precision
    seconds: float
    flops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One transformer block; seconds are the best, FLOPs what torch's counter finds.

    Raises:
        ValueError: a figure that no measurement gives.
    """

    precision: Precision
    tokens: int
    width: int
    heads: int
    forward_s: float
    backward_s: float  # the backward alone
    forward_flops: int
    backward_flops: int

    def __post_init__(self) -> None:
        for value in (self.forward_s + self.backward_s, self.forward_flops, self.backward_flops):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{value!r} is no figure of a block")

    @property
    def flops_per_s(self) -> float:
        """Of the forward and the backward together: what a training step sustains."""
        flops = self.forward_flops + self.backward_flops
        return flops / (self.forward_s + self.backward_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All of it. ``notes`` say what could not be measured, and what to keep in mind.

    ``taken_at`` is Unix seconds, ``load`` the machine's load just before. ``device`` is
    ``cpu``, a virtual device of ``threads`` threads, or a GPU such as ``cuda:0``.
    """

    machine: Machine
    taken_at: float
    load: float
    device: str
    threads: int
    host: HostMemory
    link: Link
    disk: Disk | None
    optimizer: HostOptimizer
    matmuls: tuple[Matmul, ...]
    kernels: tuple[Kernel, ...]
    blocks: tuple[Block, ...]
    notes: tuple[str, ...] = ()

    def block(self, precision: Precision) -> Block:
        """The block that was measured in ``precision``."""
        return next(block for block in self.blocks if block.precision == precision)

    @property
    def device_bytes_per_s(self) -> float | None:
        """The device memory's bandwidth, by the GELU in float32; None where that is missing.

        It reads a tensor of four widths a token once and writes another: the largest of the
        kernels that memory bounds, and more than a GPU's cache holds.
        """
        block = self.block("fp32")
        moved = 2 * 4 * (4 * block.width * block.tokens)
        found = [k for k in self.kernels if (k.name, k.precision) == ("gelu", "fp32")]
        return moved / found[0].seconds if found and found[0].seconds > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """What ``from_dict`` reads, in values that JSON has."""
        return {"format": FORMAT, **asdict(self)}

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> Measured:
        """What ``to_dict`` gave, through JSON or not.

        Raises:
            ValueError: another format, or a record that is none of these.
        """
        if not isinstance(record, Mapping) or record.get("format") != FORMAT:
            raise ValueError(f"this is no result of shoal bench of format {FORMAT}")
        try:
            measured = _read(record)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is no result of shoal bench: {error!r}") from error
        if {"fp32", "bf16"} - {block.precision for block in measured.blocks}:
            raise ValueError("this result of shoal bench lacks the block of a precision")
        return measured


def _read(record: Mapping[str, Any]) -> Measured:
    machine, disk = record["machine"], record["disk"]
    return Measured(
        machine=Machine(**{**machine, "gpus": tuple(machine["gpus"])}),
        taken_at=float(record["taken_at"]),
        load=float(record["load"]),
        device=str(record["device"]),
        threads=int(record["threads"]),
        host=HostMemory(**_rates(record["host"])),
        link=Link(**_rates(record["link"])),
        disk=None if disk is None else Disk(**_rates(disk)),
        optimizer=HostOptimizer(**_rates(record["optimizer"])),
        matmuls=tuple(Matmul(**_rates(entry)) for entry in record["matmuls"]),
        kernels=tuple(Kernel(**entry) for entry in record["kernels"]),
        blocks=tuple(Block(**entry) for entry in record["blocks"]),
        notes=tuple(map(str, record["notes"])),
    )


def _rates(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a record, those that are rates as such."""
    return {
        name: Rate(**value) if isinstance(value, Mapping) else value
        for name, value in entry.items()
    }
