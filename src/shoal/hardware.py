"""Which devices a study may use, and how many bytes of each.

torch is imported only where GPUs are asked about (``_num_gpus``, ``gpu_names``), so that
naming virtual devices costs nothing.

[Note: who asks a GPU what is free]
Whoever asks CUDA for a GPU's free memory has a context there from then on, up to half a GiB that
no trial gets. The study's process outlives all trials, so another process asks, and ends. What it
finds free is without its own context, in whose place there will be the worker's.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from shoal.core.errors import SpecError
from shoal.core.profile import PROFILES, Profile, find_profile
from shoal.core.spec import NO_BYTES, DeviceSpec, shared_gpus
from shoal.core.technique import DataParallel, Pipelined, Technique
from shoal.core.units import Bytes, format_bytes, parse_bytes
from shoal.core.values import flag, is_number, items, plain, whole

FREE_SHARE = 0.8  # of what is free now; the rest is for the libraries and other processes
CONTEXT_BYTES = 512 * 2**20  # of a GPU, for each process on it beyond the first
PATIENCE_S = 120.0  # with a process that opens all GPUs, and may import torch
_ASK_FREE = Path(__file__).with_name("askfree.py")
_DEVICES = re.compile(
    r"(?P<kind>cpu|cuda)(?::(?P<which>[0-9,]+))?"
    r"(?:@(?P<profile>[a-z0-9_-]+)(?:/(?P<scale>[0-9.]+))?)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The devices of a study and the host memory they share.

    ``host_memory`` bounds the host tier; None is what is free when a study begins, less a fifth
    for libraries and other processes. ``shared_cores``
    is set where the devices only share what the machine has (``detect``): then fewer
    trials than devices get wider devices. Threads somebody chose never change,
    because they are part of a trial's numerics. ``spill_dir`` is a directory on a disk: where the
    states of a study's trials do not fit the host's memory they are in files there.
    """

    devices: tuple[DeviceSpec, ...]
    host_memory: Bytes | None = None
    shared_cores: int | None = None
    spill_dir: str | None = None

    def with_host_limit(self) -> Hardware:
        """The same with a bound on the host tier."""
        if self.host_memory is not None:
            return self
        return replace(self, host_memory=Bytes(int(FREE_SHARE * free_memory())))

    def __post_init__(self) -> None:
        devices = items("Hardware(devices=...)", self.devices, "devices=(DeviceSpec(...),)")
        if not all(isinstance(device, DeviceSpec) for device in devices):
            raise SpecError(
                f"Hardware(devices=...) are DeviceSpecs, got {self.devices!r}. Write "
                "shoal.Hardware.virtual(devices=2, memory='256MiB'), or shoal.Hardware.detect()."
            )
        object.__setattr__(self, "devices", devices)
        object.__setattr__(self, "spill_dir", _spill_dir(self.spill_dir))
        names = [device.name for device in devices]
        if not names:
            raise SpecError("the hardware has no device. Give at least one.")
        if len(set(names)) < len(names):
            raise SpecError(f"each device needs a name of its own, got {', '.join(names)}.")

    @staticmethod
    def virtual(
        devices: int = 2,
        memory: int | str = "256MiB",
        threads: int = 1,
        poison: bool = False,
        link: float | str | None = None,
        *,
        host_memory: int | str | None = None,
        spill_dir: str | os.PathLike[str] | None = None,
    ) -> Hardware:
        """CPU workers ``cpu:0``, ``cpu:1``, ... with an enforced budget of ``memory`` each.

        ``link`` is bytes per second of the copies between host and device, as a number
        or a size such as ``"1GB"``; None copies at memory speed.
        """
        devices, threads = whole("devices", devices, 1), whole("threads", threads, 1)
        poison = flag("poison", poison)
        first = DeviceSpec(
            name="cpu:0",
            kind="virtual",
            memory=parse_bytes(memory),
            threads=threads,
            poison=poison,
            link_bytes_per_s=_link_speed(link),
        )
        return _virtual(first, devices, host_memory, spill_dir)

    @staticmethod
    def emulated(
        profile: str | Profile = "h200",
        devices: int = 1,
        memory: int | str | None = None,
        scale: float | None = None,
        threads: int = 1,
        poison: bool = False,
        *,
        host_memory: int | str | None = None,
        spill_dir: str | os.PathLike[str] | None = None,
    ) -> Hardware:
        """Virtual devices that take the time of real ones: links, host memory and kernels.

        ``profile`` is one of ``shoal.core.profile.PROFILES`` or a ``Profile`` of your own.
        Its figures are assumptions; their sources are in that file.

        ``scale`` is how many times slower than the profile everything is: each time is
        multiplied by it, so compute : link : host memory stay what they are on the real
        device, while the cores of this machine can keep up with the real arithmetic. None
        is slow enough for one core in float32 (h200 2250, rtx4090 2400, v100 600); bf16 takes
        12 times more on the h200. Work that takes this machine longer than the emulated
        time is counted and reported, never hidden.

        ``memory`` is each device's budget. None is the profile's divided by ``scale``: a
        model of 1/scale the parameters then meets the real device's ratios, in its seconds.
        The devices are ``cpu:0``, ``cpu:1``, ... with a link each; they share the profile's
        host memory bandwidth equally.
        """
        devices, threads = whole("devices", devices, 1), whole("threads", threads, 1)
        poison = flag("poison", poison)
        found = find_profile(profile) if isinstance(profile, str) else profile
        if not isinstance(found, Profile):
            raise SpecError(
                f"profile is a name ({', '.join(PROFILES)}) or a shoal.core.profile.Profile, got "
                f"{profile!r}."
            )
        factor = found.default_scale if scale is None else plain(scale)
        slow = found.slowed(factor, sharing=devices)
        budget = max(1, int(found.memory / slow.scale)) if memory is None else memory
        first = DeviceSpec(
            name="cpu:0",
            kind="virtual",
            memory=parse_bytes(budget),
            threads=threads,
            poison=poison,
            profile=slow,
        )
        return _virtual(first, devices, host_memory, spill_dir)

    @staticmethod
    def detect(*, spill_dir: str | os.PathLike[str] | None = None) -> Hardware:
        """The GPUs if there are any, else one virtual device per core.

        Budgets are 0.8 of what is free now; virtual devices share the machine's
        memory, and all devices share its cores.
        """
        count = _num_gpus()
        found = _cuda_hardware(range(count)) if count else _cpu_hardware(available_cores())
        return replace(found, spill_dir=_path(spill_dir))

    @staticmethod
    def parse(
        devices: str | None = None,
        device_memory: int | str | None = None,
        host_memory: int | str | None = None,
        *,
        threads: int | None = None,
        spill_dir: str | os.PathLike[str] | None = None,
    ) -> Hardware:
        """The hardware of command line text: ``cpu:2``, ``cpu``, ``cuda`` or ``cuda:0,1``.

        ``cpu:N`` is N devices of one thread unless ``threads`` says otherwise; ``cpu``
        is one per core; None or ``auto`` is ``detect()``. ``cpu:2@h200`` is ``emulated``:
        two devices that take the time of an H200 each, ``cpu:2@h200/500`` at a scale of 500.
        ``cuda:0,0`` is one GPU as two devices: a worker process each, and half of its memory.
        That is for trials whose kernels leave it idle and that cannot train as an array. No
        trial is over several such devices: they do the work of one GPU.
        """
        hardware = _named(devices)
        specs = hardware.devices
        if device_memory is not None:
            specs = tuple(_with_memory(spec, parse_bytes(device_memory)) for spec in specs)
        if threads is not None:
            threads = whole("threads", threads, 1)
            specs = tuple(replace(spec, threads=threads) for spec in specs)
        limit = _optional_bytes(host_memory) if host_memory is not None else hardware.host_memory
        fixed = device_memory is not None and any(spec.kind == "virtual" for spec in specs)
        cores = None if threads is not None or fixed else hardware.shared_cores
        place = _path(spill_dir)
        return Hardware(devices=specs, host_memory=limit, shared_cores=cores, spill_dir=place)

    def fewer_trials(self, trials: int, technique: Technique | None = None) -> Hardware:
        """The hardware for ``trials`` trials: no more devices than those have, and wider ones.

        Only detected devices widen: they share the cores, and virtual ones the memory. A trial
        has one device, with a ``technique`` of stages or replicas one for each, or as many as
        there are.
        """
        trials = whole("trials", trials, 1) * self._each(technique)
        if trials >= len(self.devices):
            return self
        if self.shared_cores is None:
            return replace(self, devices=self.devices[:trials])
        return self._first(trials, threads=max(1, self.shared_cores // trials))

    def idle(self, used: Hardware, technique: Technique | None) -> tuple[DeviceSpec, ...]:
        """The devices that are not ``used`` and that trials may have all the same.

        None where a technique is asked for, and where those that are used have their cores or
        are parts of the same GPU.
        """
        rest = self.devices[len(used.devices) :]
        shared = self.shared_cores is not None and any(d.kind == "virtual" for d in rest)
        if technique is not None or shared or shared_gpus(self.devices):
            return ()
        return tuple(replace(device, threads=used.devices[0].threads) for device in rest)

    def _each(self, technique: Technique | None) -> int:
        """Devices that one trial may use."""
        if isinstance(technique, DataParallel):
            return technique.width or len(self.devices)
        if not isinstance(technique, Pipelined):
            return 1
        stages = technique.stages
        return stages * technique.width if stages else len(self.devices)

    def with_threads(
        self, threads: int, trials: int, technique: Technique | None = None
    ) -> Hardware:
        """Detected devices of a given width: as many as the cores allow and trials need.

        A trial goes on to the same bits only with the thread count that it began with. A GPU is
        worth more than the cores that its threads would have to themselves.
        """
        assert self.shared_cores is not None
        trials *= self._each(technique)
        virtual = any(device.kind == "virtual" for device in self.devices)
        by_cores = self.shared_cores // threads if virtual else len(self.devices)
        return self._first(max(1, min(trials, len(self.devices), by_cores)), threads=threads)

    def _first(self, count: int, *, threads: int) -> Hardware:
        """The first ``count`` devices, of that width; virtual ones share the memory of all."""
        total = sum(device.memory for device in self.devices)
        kept = tuple(
            replace(
                device,
                threads=threads,
                memory=Bytes(total // count) if device.kind == "virtual" else device.memory,
            )
            for device in self.devices[:count]
        )
        return replace(self, devices=kept)


def _num_gpus() -> int:
    """How many GPUs torch sees; none of them is opened."""
    import torch  # lazy: a study on virtual devices is described without it

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _free_bytes(numbers: Iterable[int]) -> dict[int, int]:
    """What these GPUs have free; see [Note: who asks a GPU what is free].

    Raises:
        SpecError: one of them cannot be opened.
    """
    numbers = sorted(set(numbers))
    ask = [sys.executable, "-P", str(_ASK_FREE), *map(str, numbers)]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
        found = [int(word) for word in done.stdout.split()[-len(numbers) :]]
        return dict(zip(numbers, found, strict=True))
    except subprocess.TimeoutExpired:
        why = f"there was no answer within {PATIENCE_S:.0f} s"
    except subprocess.CalledProcessError as error:
        why = (error.stderr.strip().splitlines() or [f"it ended with {error.returncode}"])[-1]
    except ValueError:
        why = f"the answer was {done.stdout!r}"
    raise SpecError(
        f"{', '.join(f'cuda:{number}' for number in numbers)} cannot be asked for free memory: "
        f"{why}. See what nvidia-smi says of that, or choose other devices (--devices cpu:2)."
    )


def gpu_names() -> tuple[str, ...]:
    """What the GPUs that torch sees call themselves."""
    import torch  # lazy, as above

    if not torch.cuda.is_available():
        return ()
    return tuple(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))


def _named(devices: str | None) -> Hardware:
    if devices is not None and not isinstance(devices, str):
        raise SpecError(f"devices is text such as 'cpu:2' or 'cuda', got {devices!r}.")
    text = (devices or "auto").strip().lower()
    if text == "auto":
        return Hardware.detect()
    match = _DEVICES.fullmatch(text)
    if match is None:
        raise SpecError(
            f"cannot read the devices {devices!r}. Write cpu:2 (two virtual devices), cpu, cuda, "
            "cuda:0,1 or auto; cuda:0,0 for two workers on one GPU; cpu:2@h200 for two that take "
            f"the time of an H200 (profiles: {', '.join(PROFILES)})."
        )
    if match["profile"] is not None:
        return _emulated_named(match["kind"], match["which"], match["profile"], match["scale"])
    return _cuda_named(match["which"]) if match["kind"] == "cuda" else _cpu_named(match["which"])


def _cpu_named(count: str | None) -> Hardware:
    if count is None:
        return _cpu_hardware(available_cores())
    number = _count_of(count)
    return Hardware.virtual(number, memory=_memory_share(number))


def _count_of(count: str) -> int:
    if "," in count:
        raise SpecError(f"cpu:{count}: write how many virtual devices, for example cpu:2.")
    return whole("devices", int(count), 1)


def _emulated_named(kind: str, count: str | None, profile: str, scale: str | None) -> Hardware:
    if kind == "cuda":
        raise SpecError(
            f"cuda@{profile} was asked for, but only virtual devices emulate another one. "
            f"Write cpu:1@{profile}."
        )
    try:
        factor = None if scale is None else float(scale)
    except ValueError:
        raise SpecError(
            f"cannot read the scale {scale!r} of {profile}. Write how many times slower than the "
            f"real device, for example cpu:1@{profile}/1000."
        ) from None
    return Hardware.emulated(
        profile, devices=1 if count is None else _count_of(count), scale=factor
    )


def _cuda_named(which: str | None) -> Hardware:
    count = _num_gpus()
    if not count:
        raise SpecError(
            "cuda was asked for, but torch sees no GPU (torch.cuda.is_available() is False). "
            "Check the driver and CUDA_VISIBLE_DEVICES, or use --devices cpu:2."
        )
    if which is None:
        return _cuda_hardware(range(count))
    chosen = [int(word) for word in which.split(",") if word]
    missing = [number for number in chosen if number >= count]
    if missing or not chosen:
        raise SpecError(
            f"cuda:{which} was asked for, but torch sees {count} GPU(s), cuda:0 to "
            f"cuda:{count - 1}."
        )
    return _cuda_hardware(chosen)


def _cuda_hardware(numbers: Sequence[int]) -> Hardware:
    """A device for each time that a GPU is named, in rounds over the GPUs."""
    free_bytes = _free_bytes(numbers)
    cores, named = available_cores(), Counter(numbers)
    seen = Counter[int]()
    parts = list[tuple[int, DeviceSpec]]()
    for number in numbers:
        part, count = seen[number], named[number]
        seen[number] += 1
        free = max(count, free_bytes[number] - (count - 1) * CONTEXT_BYTES) // count
        spec = DeviceSpec(
            name=f"cuda:{number}/{part}" if count > 1 else f"cuda:{number}",
            kind="cuda",
            memory=Bytes(int(FREE_SHARE * free)),
            threads=max(1, cores // len(numbers)),
            share_bytes=Bytes(free) if count > 1 else NO_BYTES,
        )
        parts.append((part, spec))
    specs = tuple(spec for _, spec in sorted(parts, key=itemgetter(0)))
    host = Bytes(int(FREE_SHARE * free_memory()))
    return Hardware(devices=specs, host_memory=host, shared_cores=cores)


def _cpu_hardware(cores: int) -> Hardware:
    hardware = Hardware.virtual(cores, memory=_memory_share(cores), threads=1)
    return replace(hardware, shared_cores=cores)


def _with_memory(spec: DeviceSpec, memory: Bytes) -> DeviceSpec:
    free = int(spec.memory / FREE_SHARE)
    if spec.kind == "cuda" and memory > free:
        raise SpecError(
            f"a budget of {format_bytes(memory)} was asked for on {spec.name}, but "
            f"{format_bytes(free)} are free. Ask for less, or free the device."
        )
    return replace(spec, memory=memory)


def _memory_share(count: int) -> Bytes:
    return Bytes(max(1, int(FREE_SHARE * free_memory()) // count))


def _virtual(
    first: DeviceSpec,
    devices: int,
    host_memory: int | str | None,
    spill_dir: str | os.PathLike[str] | None,
) -> Hardware:
    """So many devices like the first, by their numbers."""
    specs = tuple(replace(first, name=f"cpu:{index}") for index in range(devices))
    limit = _optional_bytes(host_memory)
    return Hardware(devices=specs, host_memory=limit, spill_dir=_path(spill_dir))


def _optional_bytes(size: int | str | None) -> Bytes | None:
    return None if size is None else parse_bytes(size)


def _path(directory: str | os.PathLike[str] | None) -> str | None:
    return os.fspath(directory) if isinstance(directory, os.PathLike) else directory


def _spill_dir(given: Any) -> str | None:
    """A directory on a disk, by its whole name.

    Raises:
        SpecError: it is none, or memory.
    """
    if given is None:
        return None
    if not isinstance(given, str | os.PathLike):
        raise SpecError(f"spill_dir is a directory's path, got {given!r}.")
    path = Path(given).resolve()
    if not path.is_dir() or not os.access(path, os.W_OK):
        what = "cannot be written to" if path.is_dir() else "is no directory"
        raise SpecError(f"spill_dir={os.fspath(given)!r} {what}. Name one on a disk with room.")
    if is_in_memory(path):
        raise SpecError(
            f"spill_dir={os.fspath(given)!r} is in memory (a tmpfs), which is what spilling to "
            "disk is to save. Name a directory on a disk."
        )
    return str(path)


def is_in_memory(path: Path) -> bool:
    """Whether what is written there takes the host's memory."""
    number = path.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            head, _, tail = line.partition(" - ")
            if head.split()[2] == device:
                return tail.split()[0] in ("tmpfs", "ramfs")
    return False


def _link_speed(link: float | str | None) -> float | None:
    if link is None or isinstance(link, str):
        return None if link is None else float(parse_bytes(link.removesuffix("/s")))
    number = plain(link)
    if not is_number(number) or not 0 < number < math.inf:
        raise SpecError(f"link is bytes per second, positive or None, got {link!r}.")
    return float(number)


def available_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """The cores this process may use: its affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal():
        return max(1, min(cores or 1, round(int(quota) / int(period))))
    return cores or 1


def free_memory(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> Bytes:
    """Bytes of host memory this process can still take, its container's limit included."""
    match = re.search(r"MemAvailable:\s+(\d+) kB", _read(meminfo))
    if match:
        free = int(match[1]) * 1024
    else:  # no Linux: all of it is the best that is known
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, used = _read(cgroup / "memory.max"), _read(cgroup / "memory.current")
    if limit.isdecimal() and used.isdecimal():
        free = min(free, max(0, int(limit) - int(used) + _reclaimable(cgroup)))
    return Bytes(free)


def _reclaimable(cgroup: Path) -> int:
    """Page cache counted as used that the kernel gives back on demand."""
    match = re.search(r"^inactive_file (\d+)", _read(cgroup / "memory.stat"), re.MULTILINE)
    return int(match[1]) if match else 0


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
