"""Datasets whose loader processes meet with an accident, and who is still alive."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import torch
from torch.utils.data import Dataset

LENGTH = 24


def children() -> set[int]:
    """This process's children that have not ended."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_ = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended since
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.add(int(path.parent.name))
    return found


class Noisy(Dataset):
    """Draws in the loader's process; at ``index`` something happens, as long as ``flag`` lacks."""

    def __init__(self, flag: Path | None = None, index: int = 13) -> None:
        self.flag, self.index = flag, index

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int):
        if index == self.index and self.flag is not None and self.happens():
            self.happen()
        return torch.tensor([float(index)]) + torch.rand(1)

    def happens(self) -> bool:
        """Once: the process that finds no flag leaves one."""
        try:
            self.flag.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def happen(self) -> None:
        raise ValueError("this example is damaged")


class Killed(Noisy):
    def happen(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class KilledEachTime(Killed):
    def happens(self) -> bool:
        return True


class Leaving(Noisy):
    """Ends as if all were well."""

    def happen(self) -> None:
        os._exit(0)


class Stuck(Noisy):
    def happens(self) -> bool:
        return True

    def happen(self) -> None:
        threading.Event().wait()


class Stopped(Stuck):
    def happen(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class Large(Noisy):
    """Batches that are longer than a pipe holds; see ``as_bytes``."""


def as_bytes(items) -> bytes:
    """A batch that goes through the pipe itself, a megabyte of it."""
    return torch.stack(items).numpy().tobytes() * 2**16
