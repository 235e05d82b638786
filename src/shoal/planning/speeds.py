"""How fast a device's links are: what it emulates, what it was told, what was measured here."""

from __future__ import annotations

from dataclasses import replace

from shoal.bench import Measured, load
from shoal.core.profile import Profile
from shoal.core.spec import DeviceSpec
from shoal.core.units import Bytes, format_bytes
from shoal.planner.price import Speeds

CPU_BYTES_PER_S = 8e9  # a copy in memory, by a thread that has a core
GPU_BYTES_PER_S = 20e9  # PCIe 4 x16, pinned
HOST_STEP = 10.0  # times that a step takes longer on the host than on a GPU


def speeds_of(device: DeviceSpec) -> Speeds:
    """The speeds of a device; reads what ``shoal bench`` kept, if it did."""
    if device.profile is not None:
        return _emulated(device.profile)
    if device.link_bytes_per_s is not None:
        link = device.link_bytes_per_s
        return Speeds(
            up_bytes_per_s=link, down_bytes_per_s=link, source="the link speed that was given"
        )
    on_gpu = device.kind == "cuda"
    measured = load()
    if measured is not None and measured.device.startswith("cuda") == on_gpu:
        return _measured(measured, on_gpu)
    link = GPU_BYTES_PER_S if on_gpu else CPU_BYTES_PER_S
    return Speeds(
        up_bytes_per_s=link,
        down_bytes_per_s=link,
        host_step=HOST_STEP if on_gpu else 1.0,
        source="assumed link speeds (`shoal bench` measures them)",
    )


SLOWER = 0.5
"""A link that carries less than so much of what it is said to is planned with as it is."""


def corrected(speeds: Speeds, link: tuple[float, float] | None) -> Speeds:
    """``speeds``, or what was just measured where that is far slower."""
    if link is None:
        return speeds
    up, down = link
    if up >= SLOWER * speeds.up_bytes_per_s and down >= SLOWER * speeds.down_bytes_per_s:
        return speeds
    up, down = min(up, speeds.up_bytes_per_s), min(down, speeds.down_bytes_per_s)
    found, said = (
        f"{_rate(way[0])} up and {_rate(way[1])} down"
        for way in ((up, down), (speeds.up_bytes_per_s, speeds.down_bytes_per_s))
    )
    source = f"link speeds measured just now, {found}, far less than {speeds.source}, {said}"
    return replace(speeds, up_bytes_per_s=up, down_bytes_per_s=down, source=source)


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(Bytes(round(bytes_per_s)))}/s"


def _emulated(profile: Profile) -> Speeds:
    """Its measures are the profile's, and its steps were measured as on the host."""
    return Speeds(
        up_bytes_per_s=profile.up_bytes_per_s,
        down_bytes_per_s=profile.down_bytes_per_s,
        device_step=profile.host_bytes_per_s / profile.memory_bytes_per_s,
        source=f"the link speeds of {profile.name}",
    )


def _measured(measured: Measured, on_gpu: bool) -> Speeds:
    link = measured.link
    return Speeds(
        up_bytes_per_s=link.up.best,
        down_bytes_per_s=link.down.best,
        host_step=HOST_STEP if on_gpu else 1.0,
        source="the link speeds that `shoal bench` measured",
    )
