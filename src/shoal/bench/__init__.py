"""What this machine can do: measured in a minute, kept in a file, read by the planner."""

from __future__ import annotations

from shoal.bench.kept import bench_path, load, save
from shoal.bench.measured import (
    Block,
    Disk,
    HostMemory,
    HostOptimizer,
    Kernel,
    Link,
    Machine,
    Matmul,
    Measured,
    Rate,
)
from shoal.bench.spilling import SCHEMES, FreeFrom, free_from

__all__ = [
    "SCHEMES",
    "Block",
    "Disk",
    "FreeFrom",
    "HostMemory",
    "HostOptimizer",
    "Kernel",
    "Link",
    "Machine",
    "Matmul",
    "Measured",
    "Rate",
    "bench_path",
    "free_from",
    "load",
    "save",
]
