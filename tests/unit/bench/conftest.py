"""A result as an H200 with the cost model's assumed figures would give it."""

from __future__ import annotations

import pytest

from shoal.bench import (
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


def rate(best: float) -> Rate:
    return Rate(best=best, median=0.9 * best, samples=5)


def make_measured(**changes: object) -> Measured:
    """55 GB/s each way, 150 GB/s of host memory, also under AdamW; 550 TFLOP/s in bf16."""
    blocks = tuple(
        Block(
            precision=precision,
            tokens=8192,
            width=4096,
            heads=32,
            forward_s=1.0,
            backward_s=2.0,
            forward_flops=int(flops),
            backward_flops=int(2 * flops),
        )
        for precision, flops in (("fp32", 50e12), ("bf16", 550e12))
    )
    fields: dict[str, object] = {
        "machine": Machine(cpu="Some CPU", cores=16, torch="2.13.0", gpus=("NVIDIA H200",)),
        "taken_at": 1.8e9,
        "load": 0.5,
        "device": "cuda:0",
        "threads": 16,
        "host": HostMemory(
            copy_one=rate(20e9), copy_all=rate(140e9), triad_one=rate(18e9), triad_all=rate(150e9)
        ),
        "link": Link(up=rate(55e9), down=rate(55e9), both=rate(110e9)),
        "disk": Disk(write=rate(3e9), read=rate(5e9), direct=True, file_system="ext4"),
        "optimizer": HostOptimizer(one=rate(1e9), all=rate(150e9 / 28)),
        "matmuls": tuple(
            Matmul(
                name="qkv",
                precision=precision,
                rows=8192,
                inner=4096,
                columns=12288,
                flops_per_s=rate(flops),
            )
            for precision, flops in (("fp32", 52e12), ("bf16", 790e12))
        ),
        "kernels": tuple(
            Kernel(name=name, precision=precision, seconds=1e-3, flops=flops)
            for precision in ("fp32", "bf16")
            for name, flops in (("norm", 0), ("qkv", 10**12))
        ),
        "blocks": blocks,
        "notes": ("a note",),
    }
    return Measured(**(fields | changes))


@pytest.fixture
def measured() -> Measured:
    return make_measured()


@pytest.fixture
def make():
    """``make_measured``, for tests that cannot import this file."""
    return make_measured
