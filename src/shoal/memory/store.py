"""A trial's tensors in flat shared host memory, and views of flat memory as tensors.

The region is an anonymous memory file that the study's process creates and every
worker maps by descriptor: it needs no room in /dev/shm and outlives a killed worker.

Where the host's memory is too small it is a file without a name, on a disk, that is mapped alike.
What of it is in memory then, the kernel decides: what was used last, as far as there is room. It
is gone with the last process that has it open, however that ends.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile

import torch

from shoal.core.errors import CapacityError, TrialError
from shoal.core.units import format_bytes
from shoal.memory.layout import Field, Segment, TensorSpec


def create_region(name: str, num_bytes: int, directory: str = "") -> int:
    """A descriptor of ``num_bytes`` of shared memory, really allocated. The caller closes it.

    ``directory``: on the disk that it is on; "" for the host's memory.

    Raises:
        CapacityError: there is not that much, or no such directory.
    """
    what = f"{f'in {directory}' if directory else 'of host memory'} for {name}"
    free = "Free memory, or run fewer or smaller trials at once"
    if directory:
        free = "Free some, or name another spill_dir="
    descriptor = -1
    try:
        descriptor = _anonymous(name, directory)
        os.posix_fallocate(descriptor, 0, max(num_bytes, 1))
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise CapacityError(
            f"cannot allocate {format_bytes(num_bytes)} {what}: {error.strerror}. {free}."
        ) from error
    return descriptor


def _anonymous(name: str, directory: str) -> int:
    """A file without a name, or one that has lost it where the file system knows no such."""
    if not directory:
        return os.memfd_create(f"shoal-{name}", os.MFD_CLOEXEC)
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
    descriptor, path = tempfile.mkstemp(prefix="shoal-", dir=directory)
    os.unlink(path)
    return descriptor


def is_on_disk(descriptor: int) -> bool:
    """Whether a region is a file, which is not to be held in memory."""
    return not os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:")


class Region:
    """A mapped region as one flat byte tensor; ``pin`` registers it with CUDA.

    The mapping lives as long as a tensor that views it.
    """

    def __init__(self, descriptor: int, num_bytes: int, *, pin: bool = False) -> None:
        self.num_bytes = num_bytes
        self._map = mmap.mmap(descriptor, max(num_bytes, 1))
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._file = _file_of(descriptor)
        self._pinned = False
        self.rests: bool | None = None  # None: nobody keeps it for another lease
        if pin:
            self.pin()

    def is_of(self, descriptor: int, num_bytes: int) -> bool:
        """Whether it maps this very memory. A file that is mapped keeps its number."""
        return self.num_bytes == num_bytes and self._file == _file_of(descriptor)

    def pin(self) -> None:
        """Register it with CUDA, if it is not.

        Raises:
            CapacityError: CUDA does not take it.
        """
        if not self._pinned:
            _register(self.bytes)
            self._pinned = True

    def rest(self) -> None:
        """No copy is in flight, nor will be until it is opened again: it may be unpinned."""
        if self.rests is None:
            self.unpin()
        else:
            self.rests = True

    def leave(self) -> None:
        """It will not be opened again."""
        if self.rests:
            self.unpin()
        self.rests = None

    def unpin(self) -> None:
        """Let CUDA forget the memory; no copy may be in flight. A second call does nothing."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
            self._pinned = False

    def segment(self, at: int, num_bytes: int) -> torch.Tensor:
        """A flat byte view."""
        return self.bytes[at : at + num_bytes]


class Regions:
    """The trials' regions that one process has mapped, each until its trial is forgotten.

    To pin memory takes a part of a second for each GB, and the first touch of each page. So a
    region is registered once, and not once a lease; where CUDA takes no more, those of trials
    that wait for a lease are let go of, the first that came first.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._known: dict[int, Region] = {}

    def open(self, trial: int, descriptor: int, num_bytes: int) -> Region:
        """The trial's region, mapped, and pinned if it is memory; the caller keeps the descriptor.

        Raises:
            CapacityError: CUDA does not take it, nor without those that rest.
        """
        region = self._known.get(trial)
        if region is None or not region.is_of(descriptor, num_bytes):
            self.forget(trial)
            region = Region(descriptor, num_bytes)
        if self._pin and not is_on_disk(descriptor):
            self._pinned(region)
        region.rests = False
        self._known[trial] = region
        return region

    def _pinned(self, region: Region) -> None:
        others = (one for one in list(self._known.values()) if one.rests and one is not region)
        while True:
            try:
                return region.pin()
            except CapacityError:
                other = next(others, None)
                if other is None:
                    raise
                other.unpin()

    def forget(self, trial: int) -> None:
        """The trial does not come back, or with other memory; what is in use is unpinned later."""
        region = self._known.pop(trial, None)
        if region is not None:
            region.leave()

    def close(self) -> None:
        """Forget all of them; none is in use."""
        for trial in list(self._known):
            self.forget(trial)


class Staging:
    """Private host memory in its exact size, for what comes back soon; ``pin`` as of a region.

    Raises:
        CapacityError: the host has not that much memory.
    """

    def __init__(self, num_bytes: int, *, pin: bool = False) -> None:
        try:
            self._map = mmap.mmap(-1, max(num_bytes, 1))
        except OSError as error:
            raise CapacityError(
                f"cannot allocate {format_bytes(num_bytes)} of host memory for what waits there "
                f"for a backward: {error.strerror}. Free memory, or train with "
                "shoal.Spilled(spill_activations=(), boundaries='device')."
            ) from error
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)[:num_bytes]
        self._pinned = pin and num_bytes > 0
        if self._pinned:
            _register(self.bytes)

    def unpin(self) -> None:
        """Let CUDA forget the memory, when no copy is in flight any more."""
        if self._pinned:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
            self._pinned = False


def view(flat: torch.Tensor, offset: int, spec: TensorSpec) -> torch.Tensor:
    """The tensor of ``spec`` at byte ``offset`` of a flat byte tensor's storage.

    The result shares memory but no version counter with ``flat`` or other views: a
    prefetch into one slot does not upset the backward of another.
    """
    dtype = getattr(torch, spec.dtype)
    tensor = torch.empty(0, dtype=dtype, device=flat.device)
    start = flat.storage_offset() + offset
    tensor.set_(flat.untyped_storage(), start // tensor.element_size(), spec.shape, spec.stride)
    return tensor


def views(
    flat: torch.Tensor, segment: Segment, at: int = 0, head: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Tensor per field name of a segment that begins at byte ``at`` of ``flat``.

    Its first fields are in ``head``, if there is one, and what begins at ``at`` is the rest.
    """
    return {field.spec.name: _divided(flat, at, field, head) for field in segment.fields}


def _divided(flat: torch.Tensor, at: int, field: Field, head: torch.Tensor | None) -> torch.Tensor:
    in_head = 0 if head is None else head.numel()
    if head is not None and field.offset < in_head:
        return view(head, field.offset, field.spec)
    return view(flat, at + field.offset - in_head, field.spec)


def state_views(
    flat: torch.Tensor, segment: Segment, at: int = 0, head: torch.Tensor | None = None
) -> dict[str, dict[str, torch.Tensor]]:
    """Optimizer state per parameter name and key of a state segment, as ``views``."""
    result: dict[str, dict[str, torch.Tensor]] = {}
    for field in segment.fields:
        tensor = _divided(flat, at, field, head)
        result.setdefault(field.spec.name, {})[field.spec.key] = tensor
    return result


def field_view(flat: torch.Tensor, at: int, field: Field) -> torch.Tensor:
    """The tensor of one field of a segment at byte ``at``."""
    return view(flat, at + field.offset, field.spec)


def describe(name: str, tensor: torch.Tensor, key: str = "") -> TensorSpec:
    """The spec under which ``tensor`` is stored: its own strides where they are dense."""
    kept = torch.empty_like(tensor, device="meta")  # dense strides in the tensor's own order
    return TensorSpec(
        name=name,
        shape=tuple(tensor.shape),
        stride=tuple(kept.stride()),
        dtype=str(tensor.dtype).removeprefix("torch."),
        num_bytes=tensor.numel() * tensor.element_size(),
        key=key,
    )


def keep(name: str, place: torch.Tensor, buffer: torch.Tensor | None) -> None:
    """Copy a buffer to its place in a region; None: the model has no such buffer yet.

    Raises:
        TrialError: it has grown, or shrunk, since the trial was measured.
    """
    if buffer is None or place.shape != buffer.shape:
        is_now, leaf = "is not there", name.rpartition(".")[2]
        advice = "Register it where the model is built, as large as it will be."
        if buffer is not None:
            is_now = f"is {list(buffer.shape)}"
            advice = (
                "Have it as large as it will be where the model is built: run a forward there, or "
                "register it so. One whose size follows the batch's is to be a plain attribute: "
                f"module.{leaf} = module._buffers.pop({leaf!r}) for each such module."
            )
        raise TrialError(
            f"the buffer {name!r} {is_now}, and was {list(place.shape)} when the trial was "
            "measured: a forward registers another one, or resizes it, as torch's observers of "
            f"channels do. {advice}"
        )
    place.copy_(buffer)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors are equal in type, shape and every bit (NaN payloads and signs too)."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(bytes_of(first.cpu()), bytes_of(second.cpu()))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers as bytes: a view, where they lie in order.

    One number may have any stride, a slice of a vector has that of the slice.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def _file_of(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _register(flat: torch.Tensor) -> None:
    """Pin existing memory for CUDA in its exact size; torch's own pinned pool rounds up."""
    runtime = torch.cuda.cudart()
    portable = 1
    code = runtime.cudaHostRegister(flat.data_ptr(), flat.numel(), portable)
    if int(code) != 0:
        with contextlib.suppress(Exception):  # CUDA has whoever comes next told of it once more
            torch.zeros(1, device="cuda")
        raise CapacityError(
            f"cannot pin {format_bytes(flat.numel())} of host memory: CUDA error {int(code)}. "
            "Raise the locked-memory limit (ulimit -l) or run fewer trials at once."
        )
