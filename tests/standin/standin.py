"""Make ``cuda:0`` a device of a torch without CUDA: memory and kernels are the CPU's.

See README.md. ``install()`` builds the extension once for each version of torch and of
``device.cpp``, loads it and puts what CUDA's own bindings have in ``torch._C`` in place.
"""

from __future__ import annotations

import enum
import fcntl
import functools
import hashlib
import importlib
import os
import shutil
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

HERE = Path(__file__).parent
VARIABLE = "SHOAL_CUDA_STANDIN"  # set: sitecustomize.py installs the stand-in with torch
MEMORY = "SHOAL_CUDA_STANDIN_MEMORY"  # bytes of each device
DEVICES = "SHOAL_CUDA_STANDIN_DEVICES"
ORDER = "SHOAL_CUDA_STANDIN_ORDER"  # set: what two streams use and no event orders raises
NAME = "NVIDIA stand-in"

_loaded = None


def can_build() -> bool:
    """Whether there is what an extension is built with, and torch has no code for CUDA itself."""
    from torch.version import cuda

    return cuda is None and bool(shutil.which("g++") and (shutil.which("ninja") or _ninja()))


def install(memory: int | None = None, devices: int | None = None) -> None:
    """From now on this process sees GPUs. A second call does nothing."""
    global _loaded
    import torch

    if _loaded is not None:
        return
    if torch.cuda.is_available():
        raise RuntimeError("torch sees a real GPU: there is no need of a stand-in")
    _loaded = native = _load()
    native.configure(
        devices or int(os.environ.get(DEVICES, "1")),
        memory or int(os.environ.get(MEMORY, str(4 << 30))),
        _unchecked(),
    )
    if not native.hooked():
        raise RuntimeError("torch did not take the stand-in's hooks")
    native.check_order(bool(os.environ.get(ORDER)))
    native.take_kernels()
    _bind(torch, native)


def _ninja() -> str | None:
    found = Path(sys.executable).with_name("ninja")
    return str(found) if found.exists() else None


def _load():
    import torch

    code = (HERE / "device.cpp").read_bytes()
    key = hashlib.sha256(code + torch.__version__.encode() + sys.version.encode()).hexdigest()[:16]
    name = f"shoal_standin_{key}"
    base = os.environ.get("SHOAL_CUDA_STANDIN_BUILD")
    folder = Path(base or Path(tempfile.gettempdir()) / f"shoal-standin-{os.getuid()}") / name
    library = folder / f"{name}.so"
    if not library.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.parent / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # who builds loads what it built: one at a time
            if not library.exists():
                _build(name, folder)
    spec = importlib.util.spec_from_file_location(name, library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(name: str, folder: Path) -> None:
    """In a folder of its own that is then renamed: half a library is nobody's."""
    from torch.utils import cpp_extension

    path = os.environ["PATH"]
    if not shutil.which("ninja") and _ninja():
        os.environ["PATH"] = f"{Path(_ninja()).parent}{os.pathsep}{path}"
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        cpp_extension.load(
            name,
            [str(HERE / "device.cpp")],
            build_directory=str(made),
            extra_cflags=["-O1", "-w"],
            is_python_module=False,
            is_standalone=False,
        )
    finally:
        os.environ["PATH"] = path
    made.rename(folder)


def _unchecked() -> list[str]:
    """The operators that torch's own list does not check for tensors of different devices."""
    import torchgen

    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    found, name = [], ""
    for line in path.read_text().splitlines():
        if line.startswith("- func:"):
            name = line.removeprefix("- func:").strip().partition("(")[0]
        elif line.strip() == "device_check: NoCheck" or line.startswith(
            "  device_check: NoCheck "
        ):
            found.append(name)
    # A structured kernel is checked by how it is made: all its forms are as its out= form.
    return found


# ---------------------------------------------------------------- what torch.cuda asks for


class _Error(enum.IntEnum):
    success = 0
    invalid_value = 1
    already_mapped = 712
    not_mapped = 713


def _stream_base(torch, native) -> type:
    class StreamBase(torch.Stream):
        def __new__(cls, priority=0, stream_id=None, device_index=None, device_type=None, **_):
            if stream_id is not None:
                self = torch.Stream.__new__(
                    cls, stream_id=stream_id, device_index=device_index, device_type=device_type
                )
            else:
                device = torch.device("cuda", native.get_device())
                self = torch.Stream.__new__(cls, device=device, priority=priority)
            return self

        def __init__(self, *arguments, **options):
            pass

        cuda_stream = property(lambda self: self.stream_id)
        priority = property(lambda self: 0)

        @staticmethod
        def priority_range():
            return 0, -5

        def query(self):
            self.synchronize()
            return True

        def synchronize(self):
            native.host_waits_for_stream(self.device_index, self.stream_id)

        def __eq__(self, other):
            key = other.stream_id, other.device_index
            return (self.stream_id, self.device_index) == key

    return StreamBase


def _event_base(torch, native) -> type:
    class EventBase:
        def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
            self = object.__new__(cls)
            self._timing, self._time, self._device = enable_timing, None, None
            self._mark = None
            return self

        def __init__(self, *arguments, **options):
            pass

        cuda_event = property(lambda self: 0 if self._time is None else id(self))
        device = property(lambda self: self._device)

        def record(self, stream):
            _check_stream(torch, stream)
            if self._device is not None and self._device != stream.device:
                raise RuntimeError(
                    f"Event device {self._device} does not match recording stream's device "
                    f"{stream.device}."
                )
            self._time, self._device = time.perf_counter(), stream.device
            self._mark = native.mark(stream.device_index, stream.stream_id)

        def wait(self, stream):
            _check_stream(torch, stream)
            if self._mark is not None:
                native.wait_for(stream.device_index, stream.stream_id, self._mark)

        def query(self):
            self.synchronize()
            return True

        def synchronize(self):
            if self._mark is not None:
                native.host_waits(self._mark)

        def elapsed_time(self, end):
            if not isinstance(end, EventBase):
                raise TypeError(f"elapsed_time takes a torch.cuda.Event, got {type(end)}")
            if self._time is None or end._time is None:
                raise ValueError("Both events must be recorded before calculating elapsed time.")
            if not (self._timing and end._timing):
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            return (end._time - self._time) * 1e3

    return EventBase


def _properties(native, index):
    if not 0 <= index < native.device_count():
        raise AssertionError("Invalid device id")
    return types.SimpleNamespace(
        name=NAME,
        major=9,
        minor=0,
        total_memory=native.mem_get_info(index)[1],
        multi_processor_count=16,
        uuid=f"5ea1057a-0000-0000-0000-{index:012d}",
        is_integrated=False,
        is_multi_gpu_board=False,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472,
        L2_cache_size=52428800,
        gcnArchName="",
        pci_bus_id=index,
        pci_device_id=0,
        pci_domain_id=0,
    )


def _bind(torch, native) -> None:
    cuda, c = torch.cuda, torch._C

    def set_stream(stream_id, device_index, device_type):
        native.set_device(device_index)
        native.set_stream(device_index, stream_id)

    def start():
        native.start()
        cuda.default_generators = tuple(
            map(native.default_generator, range(native.device_count()))
        )
        cuda._get_device_properties = functools.partial(_properties, native)

    lock = threading.RLock()
    bindings = {
        "_cuda_init": start,
        "_cuda_getDeviceCount": native.device_count,
        "_cuda_getDevice": native.get_device,
        "_cuda_setDevice": native.set_device,
        "_cuda_exchangeDevice": native.exchange_device,
        "_cuda_maybeExchangeDevice": native.exchange_device,
        "_cuda_canDeviceAccessPeer": lambda one, other: True,
        "_cuda_getCompiledVersion": lambda: 0,
        "_cuda_getArchFlags": lambda: "sm_90",
        "_cuda_isInBadFork": lambda: False,
        "_cuda_getCurrentStream": lambda index: (native.current_stream(index), index, 1),
        "_cuda_getDefaultStream": lambda index: (0, index, 1),
        "_cuda_getCurrentRawStream": native.current_stream,
        "_cuda_setStream": set_stream,
        "_cuda_synchronize": native.host_waits_for_all,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_memoryStats": native.memory_stats,
        "_cuda_resetPeakMemoryStats": native.reset_peaks,
        "_cuda_resetAccumulatedMemoryStats": lambda index: None,
        "_cuda_emptyCache": native.empty_cache,
        "_cuda_setMemoryFraction": native.set_fraction,
        "_cuda_getMemoryFraction": native.get_fraction,
        "_cuda_memorySnapshot": lambda *asked: {"segments": [], "device_traces": []},
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_set_sync_debug_mode": native.set_sync_debug_mode,
        "_cuda_get_sync_debug_mode": native.get_sync_debug_mode,
        "_cuda_clearCublasWorkspaces": native.clear_workspaces,
        "_cuda_lock_mutex": lock.acquire,
        "_cuda_unlock_mutex": lock.release,
        "_cuda_hostMemoryStats": dict,
        "_cuda_attach_out_of_memory_observer": lambda observer: None,
        "_CudaStreamBase": _stream_base(torch, native),
        "_CudaEventBase": _event_base(torch, native),
        "_CudaDeviceProperties": types.SimpleNamespace,
        "_has_cuda": True,
    }
    for name, value in bindings.items():
        setattr(c, name, value)
    streams = importlib.reload(sys.modules["torch.cuda.streams"])
    cuda.Stream, cuda.Event, cuda.ExternalStream = (
        streams.Stream,
        streams.Event,
        streams.ExternalStream,
    )
    cuda.graphs._cuda_isCurrentStreamCapturing = bindings["_cuda_isCurrentStreamCapturing"]
    cuda._exchange_device = cuda._maybe_exchange_device = native.exchange_device
    cuda._CudaDeviceProperties = types.SimpleNamespace
    _bind_storages(torch)
    torch.backends.cudnn.is_acceptable = lambda tensor: False  # and no warning of it
    cuda._queued_calls.clear()  # they look at versions that there are none of
    cuda._cached_device_count = None
    cuda._cudart = types.SimpleNamespace(
        cudaError=_Error,
        cudaHostRegister=lambda at, size, flags: _error(native.host_register(at, size)),
        cudaHostUnregister=lambda at: _error(native.host_unregister(at)),
        cudaMemGetInfo=native.mem_get_info,
        cudaGetErrorString=lambda code: f"CUDA error {int(code)}",
        cudaStreamCreate=None,
        cudaProfilerStart=lambda: _Error.success,
        cudaProfilerStop=lambda: _Error.success,
    )


def _bind_storages(torch) -> None:
    """Storages that Python asks for by themselves: torch's own know no CUDA in this build."""
    untyped = torch.UntypedStorage
    made, resized = untyped.__new__, untyped.resize_

    def new(cls, *arguments, device=None, **options):
        if device is not None and torch.device(device).type == "cuda":
            size = arguments[0] if arguments else options.get("size", 0)
            values = None if isinstance(size, int) else list(size)
            count = size if values is None else len(values)
            flat = torch.empty(count, dtype=torch.uint8, device=device)
            if values:
                flat.copy_(torch.tensor(values, dtype=torch.uint8))
            return flat.untyped_storage()
        if device is not None:
            options["device"] = device
        return made(cls, *arguments, **options)

    def resize_(self, size):
        if self.device.type != "cuda":
            return resized(self, size)
        flat = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
        _loaded.resize_storage(flat, size)
        return self

    untyped.__new__ = new
    untyped.resize_ = resize_


def _error(code: int) -> _Error:
    return _Error(code)


def _check_stream(torch, stream) -> None:
    if not isinstance(stream, torch.Stream) or stream.device.type != "cuda":
        raise TypeError(f"a CUDA stream is asked for, got {stream!r}")
