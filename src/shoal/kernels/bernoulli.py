"""What torch's ``bernoulli_`` draws on a CPU, several times as fast, where there is a C compiler.

[Note: the same numbers, sooner]
A mask of dropout takes torch 5 ns a number: two words of the Mersenne Twister, one by one. In an
array of narrow Transformers that was a quarter of a step, since each slot draws its trial's own
masks. ``bernoulli.c`` draws the same numbers from the same state in 1.2 ns. It is compiled when it
is first needed, once for a machine, and used if what it draws and leaves is torch's to the bit;
without a compiler, or with ``SHOAL_MASKS=torch``, torch draws.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import math
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HOW = "SHOAL_MASKS"
SOURCE = Path(__file__).with_suffix(".c")
OPTIONS = ("-O3", "-march=native", "-shared", "-fPIC")
LEAST = 512
"""Numbers from which on it is worth its call."""
STATE_BYTES = 5056
"""Of a state of torch's CPU generators, in all versions so far."""
REALS: dict[torch.dtype, tuple[str, Any]] = {
    torch.float32: ("fill_float", ctypes.c_float),
    torch.float64: ("fill_double", ctypes.c_double),
}


def bernoulli_(out: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
    """``out.bernoulli_(p, generator=generator)``: these numbers, and that state afterwards."""
    if not _fills(out, p, 1.0, generator):
        out.bernoulli_(p, generator=generator)
    return out


def dropout_mask_(out: Tensor, rate: float, generator: torch.Generator) -> Tensor:
    """Zeros and 1 / (1 - ``rate``), as ``torch.dropout`` draws them; the rate is below 1."""
    if not _fills(out, 1 - rate, _one_over(1 - rate, out.dtype), generator):
        out.bernoulli_(1 - rate, generator=generator).div_(1 - rate)
    return out


def _fills(out: Tensor, p: float, one: float, generator: torch.Generator | None) -> bool:
    """Whether it is done; if not nothing is."""
    count = out.numel()
    if count < LEAST or out.dtype not in REALS or not out.is_cpu or not _is_dense(out):
        return False
    library = _library()
    if library is None or not 0 <= p <= 1:
        return False
    _fill(library, out, p, one, generator or torch.default_generator)
    return True


def _fill(
    library: ctypes.CDLL, out: Tensor, p: float, one: float, generator: torch.Generator
) -> None:
    state = generator.get_state()
    fill = getattr(library, REALS[out.dtype][0])
    fill(state.data_ptr(), math.ceil(p * 2**53), one, out.data_ptr(), out.numel())
    generator.set_state(state)


def _is_dense(out: Tensor) -> bool:
    """Whether its numbers fill a piece of memory, in whose order torch draws them."""
    if out.is_contiguous():
        return True
    step = 1
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


@functools.lru_cache(maxsize=256)
def _one_over(p: float, dtype: torch.dtype) -> float:
    """1 / ``p``, as torch divides tensors of ``dtype``."""
    return torch.ones((), dtype=dtype).div_(p).item()


# -- the compiled code ----------------------------------------------------------------------


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The compiled code; None where there is none, or torch draws otherwise."""
    if os.environ.get(HOW) == "torch":
        return None
    try:
        library = _compiled()
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None
    return library if library is not None and _is_torchs(library) else None


def _compiled() -> ctypes.CDLL | None:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return None
    kept = _kept_in() / f"bernoulli-{_digest(compiler)}.so"
    if kept.exists():
        return _loaded(kept)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "bernoulli.so")
        command = [compiler, *OPTIONS, "-o", str(made), str(SOURCE)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        _keep(made, kept)
        return _loaded(made)


def _keep(made: Path, kept: Path) -> None:
    """Leave a copy for the next process, all of it or none."""
    beside = kept.with_name(f"{kept.name}.{os.getpid()}")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(made, beside)
        beside.replace(kept)
    except OSError:  # no home, no room: it is compiled anew
        with contextlib.suppress(OSError):
            beside.unlink()


def _kept_in() -> Path:
    given = os.environ.get("XDG_CACHE_HOME")
    return Path(given or Path.home() / ".cache", "shoal")


def _digest(compiler: str) -> str:
    """Of everything that the code depends on: the source, the compiler, the processor."""
    told = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in told if line.startswith(("flags", "Features"))), "")
    stamp = Path(compiler).resolve()
    all_of_it = (SOURCE.read_text(), OPTIONS, str(stamp), stamp.stat().st_mtime_ns, flags)
    return hashlib.sha256(repr(all_of_it).encode()).hexdigest()[:16]


def _loaded(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, real in REALS.values():
        fill = getattr(library, name)
        fill.restype = None
        pointers = ctypes.c_void_p, ctypes.c_void_p
        fill.argtypes = [pointers[0], ctypes.c_uint64, real, pointers[1], ctypes.c_size_t]
    return library


def _is_torchs(library: ctypes.CDLL) -> bool:
    """Whether it draws what torch draws, and leaves the generator as torch does."""
    ours, torchs = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
    if ours.get_state().numel() != STATE_BYTES:
        return False
    for dtype in REALS:
        for count, p in ((1, 0.5), (311, 0.9), (312, 0.1), (1, 1e-9), (2000, 1 / 3), (5, 1.0)):
            mine, its = (torch.empty((count, 2), dtype=dtype).t() for _ in range(2))
            _fill(library, mine, p, 1.0, ours)
            its.bernoulli_(p, generator=torchs)
            if not torch.equal(mine, its) or not torch.equal(ours.get_state(), torchs.get_state()):
                return False
    return True
