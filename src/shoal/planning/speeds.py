"""How fast a device's links are: what it emulates, what it was told, what was measured here.

On a GPU, also how much longer an optimizer step takes on the host.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from shoal.bench import Measured, load
from shoal.core.profile import Profile
from shoal.core.spec import DeviceSpec
from shoal.core.units import Seconds, counted, format_rate, format_seconds
from shoal.planner.price import Price, Speeds

CPU_BYTES_PER_S = 4e9  # a copy of what no cache holds, beside a thread that computes (docs/lab.md)
GPU_BYTES_PER_S = 20e9  # PCIe 4 x16, pinned
HOST_STEP = 10.0  # times that a step takes longer on the host than on a GPU, until it is measured


class HostStep(NamedTuple):
    """How many times longer a step takes on the host than where it was measured; who says so."""

    times: float
    words: str = ""


def speeds_of(device: DeviceSpec) -> Speeds:
    """The speeds of a device; reads what ``shoal bench`` kept, if it did."""
    if device.profile is not None:
        return _emulated(device.profile)
    measured = load()
    if measured is not None and measured.device.startswith("cuda") != (device.kind == "cuda"):
        measured = None
    up, down, source = _link(device, measured)
    step = host_step(device, measured)
    return Speeds(
        up_bytes_per_s=up,
        down_bytes_per_s=down,
        host_step=step.times,
        source=source,
        steps=step.words,
    )


def host_step(device: DeviceSpec, measured: Measured | None) -> HostStep:
    """By what ``shoal bench`` measured, where that was.

    A step is bound by memory in both places: it takes so many times longer as AdamW gets less
    of the host's memory, on as many cores as a worker has, than a kernel gets of the device's.
    A virtual device's steps are measured on the host itself.
    """
    if device.kind != "cuda":
        return HostStep(1.0)
    there = measured.device_bytes_per_s if measured is not None else None
    if measured is None or there is None:
        return HostStep(
            HOST_STEP,
            f"an assumed {HOST_STEP:g} times as long for an optimizer step on the host as on the "
            "GPU",
        )
    here = measured.optimizer.bytes_per_s_on(device.threads)
    times = max(1.0, there / here)
    return HostStep(
        times,
        f"{times:.1f} times as long for an optimizer step on the host as on the GPU, which "
        f"`shoal bench` measured: AdamW gets {format_rate(here)} of the host's memory "
        f"({counted(device.threads, 'thread')}), a kernel {format_rate(there)} of the GPU's",
    )


def why_priced(found: Price, shared_s: Seconds, active: int, speeds: Speeds) -> str:
    """What a step takes, for a plan: of a device by itself, and where its cores do all of it."""
    company, each = "one trial", "a step takes"
    if active > 1:
        company, each = f"{active} such trials", "a step of each takes, of the device's time,"
    cores = f", {format_seconds(shared_s)} with its copies and host steps on the same cores"
    return (
        f"with {company} on a device {each} {format_seconds(found.step_s)}"
        f"{cores if shared_s > found.step_s else ''}, and the device computes {found.busy:.0%} of "
        f"the time; worked out with {speeds.sources}"
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
        f"{format_rate(way[0])} up and {format_rate(way[1])} down"
        for way in ((up, down), (speeds.up_bytes_per_s, speeds.down_bytes_per_s))
    )
    source = f"link speeds measured just now, {found}, far less than {speeds.source}, {said}"
    return replace(speeds, up_bytes_per_s=up, down_bytes_per_s=down, source=source)


def _emulated(profile: Profile) -> Speeds:
    """Its measures are the profile's, and its steps were measured as on the host."""
    return Speeds(
        up_bytes_per_s=profile.up_bytes_per_s,
        down_bytes_per_s=profile.down_bytes_per_s,
        device_step=profile.host_bytes_per_s / profile.memory_bytes_per_s,
        source=f"the link speeds of {profile.name}",
    )


def _link(device: DeviceSpec, measured: Measured | None) -> tuple[float, float, str]:
    """Bytes per second up and down, and who says so."""
    if device.link_bytes_per_s is not None:
        return device.link_bytes_per_s, device.link_bytes_per_s, "the link speed that was given"
    if measured is not None:
        link = measured.link
        return link.up.best, link.down.best, "the link speeds that `shoal bench` measured"
    link_bytes_per_s = GPU_BYTES_PER_S if device.kind == "cuda" else CPU_BYTES_PER_S
    return (
        link_bytes_per_s,
        link_bytes_per_s,
        "assumed link speeds (`shoal bench` measures them)",
    )
