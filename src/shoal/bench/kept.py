"""Where the figures of this machine are kept, and whether they are still this machine's.

Reading needs torch only where a file of this CPU and this torch was found: for the names
of the GPUs.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path

from shoal.bench.measured import Machine, Measured
from shoal.core.errors import StorageError
from shoal.hardware import available_cores, gpu_names
from shoal.storage.documents import read_json, write_json
from shoal.storage.files import make_directory


def bench_path() -> Path:
    """``bench.json`` in the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return home / "shoal" / "bench.json"


def save(measured: Measured, path: Path | None = None) -> Path:
    """Keep the figures, in one step; where they are now.

    Raises:
        StorageError: the directory cannot be written.
    """
    path = path or bench_path()
    make_directory(path.parent)
    write_json(path, measured.to_dict())
    return path


def load(path: Path | None = None) -> Measured | None:
    """The figures of this machine; None where there are none, or only another one's.

    A file that is damaged, of another format, of another machine or of another torch
    is no figures.
    """
    path = path or bench_path()
    try:
        if not path.is_file():
            return None
        measured = Measured.from_dict(read_json(path))
    except (StorageError, ValueError, OSError):
        return None
    found = measured.machine
    same = (found.cpu, found.cores, found.torch) == (cpu_model(), available_cores(), _torch())
    return measured if same and found.gpus == gpu_names() else None


def this_machine() -> Machine:
    """What the figures taken now belong to."""
    return Machine(cpu=cpu_model(), cores=available_cores(), torch=_torch(), gpus=gpu_names())


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's name as the kernel gives it."""
    try:
        match = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine()


def _torch() -> str:
    """Its version, without the second that importing it takes."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
