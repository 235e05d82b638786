"""``shoal doctor``: what this machine offers, measured, and what is missing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from shoal.bench.link import glance
from shoal.core.units import format_bytes
from shoal.device.pace import SystemClock
from shoal.hardware import Hardware, available_cores, free_memory
from shoal.ui.failures import ExitCode

_GIB = 2**30
_NEEDED = ("torch", "numpy", "safetensors", "cloudpickle", "rich", "typer", "xxhash")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the doctor's: what was looked at, what was found, what to do about it."""

    name: str
    status: Literal["OK", "WARN"]
    found: str
    advice: str = ""


def run_doctor(*, as_json: bool) -> int:
    """Print all checks; the exit code is 0 also when some of them warn."""
    checks = []
    for check in examine():
        checks.append(check)
        if not as_json:
            advice = f" ({check.advice})" if check.advice else ""
            print(f"{check.status:4}  {check.name:13}  {check.found}{advice}", flush=True)
    if as_json:
        print(json.dumps(list(map(asdict, checks)), indent=2))
    return ExitCode.DONE


def examine() -> Iterator[Check]:
    """All checks, one after another; the last takes about a second."""
    yield _check_python()
    for package in _NEEDED:
        yield _check_package(package)
    yield _check_cores()
    yield _check_memory()
    yield _check_shared_memory()
    yield _check_shm()
    yield _check_disk(Path())
    yield _guarded("fused AdamW", _check_fused)
    yield _guarded("CUDA", _check_cuda)
    yield _guarded("devices", _check_devices)
    yield _guarded("link", _check_link)


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # a broken part of the machine is a finding
        return Check(name=name, status="WARN", found=f"{type(error).__name__}: {error}")


def _judged(name: str, found: str, *, is_fine: bool, advice: str) -> Check:
    """A finding, with advice where it is not fine."""
    if is_fine:
        return Check(name=name, status="OK", found=found)
    return Check(name=name, status="WARN", found=found, advice=advice)


def _check_python() -> Check:
    return Check(
        name="python", status="OK", found=f"{platform.python_version()}, {platform.system()}"
    )


def _check_package(package: str) -> Check:
    try:
        return Check(name=package, status="OK", found=importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        advice = f"pip install {package}"
        return Check(name=package, status="WARN", found="not installed", advice=advice)


def _check_cores() -> Check:
    cores, load = available_cores(), os.getloadavg()[0]
    return _judged(
        "cores",
        f"{cores} for this process, load {load:.1f}",
        is_fine=load <= 0.5 * cores,
        advice="other processes use the cores now; timings will suffer, results will not",
    )


def _check_memory() -> Check:
    free = free_memory()
    return _judged(
        "memory",
        f"{format_bytes(free)} free",
        is_fine=free >= 2 * _GIB,
        advice="the state of all trials lives in host memory",
    )


def _check_shared_memory() -> Check:
    """Workers share the trials' state through anonymous files."""
    name = "shared memory"
    try:
        descriptor = os.memfd_create("shoal-doctor")
        try:
            os.posix_fallocate(descriptor, 0, 1 << 20)
        finally:
            os.close(descriptor)
    except (AttributeError, OSError) as error:
        advice = "shoal needs Linux with memfd_create"
        return Check(name=name, status="WARN", found=f"memfd failed: {error}", advice=advice)
    return Check(name=name, status="OK", found="memfd works")


def _check_shm() -> Check:
    """DataLoader workers hand batches over in /dev/shm; shoal itself does not use it."""
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Check(name="/dev/shm", status="WARN", found=str(error))
    return _judged(
        "/dev/shm",
        f"{format_bytes(free)} free",
        is_fine=free >= 2**28,
        advice="a DataLoader with workers may need more (docker: --shm-size)",
    )


def _check_disk(directory: Path) -> Check:
    free = shutil.disk_usage(directory).free
    return _judged(
        "disk",
        f"{format_bytes(free)} free in {directory.resolve()}",
        is_fine=free >= 5 * _GIB,
        advice="every finished trial writes its weights and optimizer state",
    )


def _check_fused() -> Check:
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.ones(4)
    torch.optim.AdamW([parameter], fused=True).step()
    return Check(name="fused AdamW", status="OK", found="works on the CPU")


def _check_cuda() -> Check:
    if not torch.cuda.is_available():
        return Check(name="CUDA", status="OK", found="no GPU; CPU devices are used")
    count = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    return Check(name="CUDA", status="OK", found=f"{count}: {names}")


def _check_devices() -> Check:
    devices = Hardware.detect().devices
    budgets = ", ".join(f"{d.name} {format_bytes(d.memory)}" for d in devices)
    return Check(name="devices", status="OK", found=f"by default {budgets}")


def _check_link(seconds: float = 1.0) -> Check:
    """How fast weights come to the first device and go: a GPU's link, else a copy in memory."""
    device = Hardware.detect().devices[0]
    found = None
    if device.kind == "cuda":
        found = glance(device, torch.device(device.torch_name), SystemClock())
    if found is not None:
        slowest = min(found.up.best, found.down.best)
        words = (
            f"{found.up.best / _GIB:.1f} GiB/s to {device.name}, {found.down.best / _GIB:.1f} back"
        )
    else:
        slowest = _copies_a_second(seconds)
        words = f"{slowest / _GIB:.1f} GiB/s copied in memory"
    return _judged("link", words, is_fine=slowest >= _GIB, advice="spilling will be slow")


def _copies_a_second(seconds: float) -> float:
    """Bytes per second that one thread copies of host memory: a virtual device's link."""
    source = torch.ones(2**24, dtype=torch.uint8)
    target = torch.zeros_like(source)
    copied, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        target.copy_(source)
        copied += source.numel()
    return copied / elapsed
