"""What real devices sustain, as data: the profiles that a virtual device can emulate.

[Note: where the numbers come from]
Nothing here was measured by shoal. A profile is what an emulation *assumes*, and it is as
good as its sources. "Assumed" is a usual figure for such a machine that nobody looked up.

    h200      an H200 on PCIe 5 x16, 16 cores of a server beside it
      links     55 GB/s each way: assumed; nvbandwidth logs of PCIe 5 x16 cards show 55.6 up,
                57.3 down, and 51.8 + 49.0 when both run at once
      host      150 GB/s for 16 cores: assumed, and the least certain number here
      memory    4.3 TB/s: a copy with PyTorch on one such card; the datasheet says 4.8
      bf16      550 TFLOP/s sustained in a transformer: assumed; a matrix product, 770 to 800
      fp32      45 TFLOP/s: assumed; a matrix product on an H100, the same chip, reaches 52
                (torch 2.7, TF32 off)
    rtx4090   an RTX 4090 on PCIe 4 x16 in a desktop
      links     25 GB/s each way: assumed; nvbandwidth's README shows 26.0 on PCIe 4 x16, and
                18.6 each way when both run at once
      host      60 GB/s, two channels of DDR5: assumed
      memory    0.92 TB/s: clpeak
      bf16      140 TFLOP/s sustained: assumed; a matrix product reaches 150 to 165 (torch 2.7)
      fp32      48 TFLOP/s: assumed; a matrix product reaches 54
    v100      a V100 16 GB on PCIe 3 x16
      links     12.4 up, 13.2 down, 22.8 together: an nvbandwidth log of a PCIe 3 x16 card
      host      80 GB/s, six channels of DDR4 in a server: assumed
      memory    0.75 TB/s: assumed; the datasheet says 0.9
      fp16      75 TFLOP/s sustained: assumed; a matrix product reaches 97 (torch 2.7)
      bf16      9 TFLOP/s: no units for it; a matrix product reaches 10.6
      fp32      12 TFLOP/s, as in benchmarks/hydra: assumed; a matrix product reaches 14.5

GB and TB are powers of ten here, GiB powers of two. Measure your own machine: ``shoal bench``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from shoal.core.errors import SpecError
from shoal.core.units import Bytes, Seconds
from shoal.core.values import is_number, plain

Precision = Literal["fp32", "bf16", "fp16"]
Direction = Literal["up", "down"]
GIB = 2**30
CORE_FLOPS_PER_S = 20e9  # in fp32, of one busy core that has another process beside it


TOLERANCE = 0.02
"""Of the emulated time, by which a run may fall behind and still be believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What one device and the host beside it sustain, in bytes and FLOPs per second.

    ``both_bytes_per_s`` is what the link carries when both directions are busy; None where
    neither slows the other. ``host_bytes_per_s`` is this device's part of the host memory's
    bandwidth. ``scale`` says how many times slower than the real device all of it already is.

    Raises:
        SpecError: a figure that is not positive; names it.
    """

    name: str
    memory: Bytes
    up_bytes_per_s: float
    down_bytes_per_s: float
    host_bytes_per_s: float
    memory_bytes_per_s: float
    fp32_flops_per_s: float
    bf16_flops_per_s: float
    fp16_flops_per_s: float
    both_bytes_per_s: float | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = plain(getattr(self, field.name))
            if field.name == "name" or (field.name == "both_bytes_per_s" and value is None):
                continue
            if not is_number(value) or not value > 0:
                raise SpecError(
                    f"{field.name} of profile {self.name!r} is a number above 0, got {value!r}."
                )
            object.__setattr__(self, field.name, value)

    @property
    def default_scale(self) -> float:
        """Slow enough for one core to keep up with this profile in float32."""
        return max(1.0, self.fp32_flops_per_s / CORE_FLOPS_PER_S)

    def slowed(self, scale: float, sharing: int = 1) -> Profile:
        """Everything ``scale`` times slower; the host memory shared by ``sharing`` devices."""
        if not is_number(scale) or not 0 < scale < math.inf:
            raise SpecError(f"scale is a number above 0, got {scale!r}.")
        rates = {
            field.name: getattr(self, field.name) / scale
            for field in dataclasses.fields(self)
            if field.name.endswith("_per_s") and getattr(self, field.name) is not None
        }
        rates["host_bytes_per_s"] /= sharing
        return dataclasses.replace(self, scale=self.scale * scale, **rates)

    def link_seconds(self, num_bytes: int, direction: Direction) -> Seconds:
        """How long a copy takes while the other direction is idle."""
        speed = self.up_bytes_per_s if direction == "up" else self.down_bytes_per_s
        return Seconds(num_bytes / speed)

    def host_seconds(self, num_bytes: int) -> Seconds:
        """How long work on the host takes that reads and writes ``num_bytes`` of its memory."""
        return Seconds(num_bytes / self.host_bytes_per_s)

    def memory_seconds(self, num_bytes: int) -> Seconds:
        """How long a kernel takes that reads and writes ``num_bytes`` of device memory."""
        return Seconds(num_bytes / self.memory_bytes_per_s)

    def kernel_seconds(self, flops: float, precision: Precision = "fp32") -> Seconds:
        """How long ``flops`` floating point operations take."""
        rates: dict[Precision, float] = {
            "fp32": self.fp32_flops_per_s,
            "bf16": self.bf16_flops_per_s,
            "fp16": self.fp16_flops_per_s,
        }
        return Seconds(flops / rates[precision])


_KNOWN = (
    Profile(
        name="h200",
        memory=Bytes(139 * GIB),
        up_bytes_per_s=55e9,
        down_bytes_per_s=55e9,
        both_bytes_per_s=100e9,
        host_bytes_per_s=150e9,
        memory_bytes_per_s=4.3e12,
        fp32_flops_per_s=45e12,
        bf16_flops_per_s=550e12,
        fp16_flops_per_s=550e12,
    ),
    Profile(
        name="rtx4090",
        memory=Bytes(24 * GIB),
        up_bytes_per_s=25e9,
        down_bytes_per_s=25e9,
        both_bytes_per_s=37e9,
        host_bytes_per_s=60e9,
        memory_bytes_per_s=0.92e12,
        fp32_flops_per_s=48e12,
        bf16_flops_per_s=140e12,
        fp16_flops_per_s=140e12,
    ),
    Profile(
        name="v100",
        memory=Bytes(16 * GIB),
        up_bytes_per_s=12.4e9,
        down_bytes_per_s=13.2e9,
        both_bytes_per_s=22.8e9,
        host_bytes_per_s=80e9,
        memory_bytes_per_s=0.75e12,
        fp32_flops_per_s=12e12,
        bf16_flops_per_s=9e12,
        fp16_flops_per_s=75e12,
    ),
)
PROFILES: Mapping[str, Profile] = MappingProxyType({p.name: p for p in _KNOWN})


def find_profile(name: str) -> Profile:
    """A known profile.

    Raises:
        SpecError: there is none of that name; lists those there are.
    """
    if name not in PROFILES:
        raise SpecError(
            f"there is no profile {name!r} to emulate. Known: {', '.join(PROFILES)}; or make a "
            "shoal.core.profile.Profile of your own figures."
        )
    return PROFILES[name]


def as_profile(value: Profile | Mapping[str, Any] | None) -> Profile | None:
    """A profile that may have been through JSON."""
    return Profile(**value) if isinstance(value, Mapping) else value
