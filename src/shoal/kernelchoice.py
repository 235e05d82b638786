"""The settings of torch by which kernels are chosen: those of a process, and repeatable ones.

[Note: which kernels]
What a user set in their own process (``torch.use_deterministic_algorithms``,
``torch.backends.cudnn.deterministic``, ``torch.set_float32_matmul_precision``) holds for what they
train there alone. So workers are told of it, and train with the same kernels. Some of a GPU's add
up in whatever order their threads come by: two runs of one pass differ then in the last bits,
by torch's defaults in most convolutions, and in attention over long sequences. Where two passes
should be equal (a chain and its module, a capture and its pass) both are run with ``repeatable``
kernels before it is said that they are not.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

TOLD = (
    "deterministic algorithms",
    "deterministic cuDNN",
    "cuDNN by timing",
    "cuDNN in full float32",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """Settings of one process; torch's names for them."""

    matmul: str
    deterministic: bool
    only_warns: bool
    cudnn_deterministic: bool
    cudnn_benchmark: bool
    cudnn_tf32: bool

    @staticmethod
    def here() -> KernelChoice:
        """Those of this process."""
        cudnn = torch.backends.cudnn
        return KernelChoice(
            matmul=torch.get_float32_matmul_precision(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            only_warns=torch.is_deterministic_algorithms_warn_only_enabled(),
            cudnn_deterministic=cudnn.deterministic,
            cudnn_benchmark=cudnn.benchmark,
            cudnn_tf32=cudnn.allow_tf32,
        )

    def take(self) -> None:
        """Have this process choose so from here on."""
        if self != KernelChoice.here():
            torch.set_float32_matmul_precision(self.matmul)
            torch.use_deterministic_algorithms(self.deterministic, warn_only=self.only_warns)
            cudnn = torch.backends.cudnn
            cudnn.deterministic = self.cudnn_deterministic
            cudnn.benchmark = self.cudnn_benchmark
            cudnn.allow_tf32 = self.cudnn_tf32

    def told(self) -> dict[str, str]:
        """For the numerics key: what is not torch's default, but for the matmul precision."""
        there = (
            self.deterministic,
            self.cudnn_deterministic,
            self.cudnn_benchmark,
            not self.cudnn_tf32,
        )
        return {name: "yes" for name, differs in zip(TOLD, there, strict=True) if differs}


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Inside, what runs twice on a GPU comes to the same bits, wherever torch has such a kernel.

    Of operations that have none torch would warn. On a CPU nothing changes.
    """
    if device.type != "cuda":
        yield
        return
    memory: Any = torch.utils.deterministic
    before, filled = KernelChoice.here(), memory.fill_uninitialized_memory
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic")
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.backends.cudnn.deterministic = True
            torch.backends.cudnn.benchmark = False
            memory.fill_uninitialized_memory = False
            yield
    finally:
        memory.fill_uninitialized_memory = filled
        before.take()
