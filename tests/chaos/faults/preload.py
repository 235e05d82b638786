"""faults/preload.c compiled, and a process that runs with it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from faults.injector import Fault
from faults.scenarios import Scenario

SOURCE = Path(__file__).with_name("preload.c")


def compiler() -> str | None:
    """The C compiler of this machine, if it has one."""
    return shutil.which(os.environ.get("CC", "cc"))


def compile_library(folder: Path) -> Path:
    """The shared library, made in ``folder``."""
    library, found = folder / "faults.so", compiler()
    assert found, "no C compiler"
    command = [found, "-std=gnu11", "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"]
    subprocess.run(command, check=True)
    return library


class PreloadInjector:
    """Counts in libc; works only in a process that was started with the library."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        if not hasattr(self._library, "faults_arm"):
            sys.exit("start this process with LD_PRELOAD; see faults/preload.py")
        self._library.faults_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int]
        self._library.faults_disarm.restype = ctypes.c_long
        self._library.faults_call.argtypes = [ctypes.c_long]
        self._library.faults_call.restype = ctypes.c_char_p

    def no_syncs(self) -> AbstractContextManager[object]:
        return nullcontext()  # the library does none

    def calls(self, scenario: Scenario, root: Path) -> list[str]:
        self._library.faults_arm(bytes(root), 0, 0)
        try:
            scenario.act(root, lambda _: None)
        finally:
            count = self._library.faults_disarm()
        return [self._library.faults_call(number).decode() for number in range(count)]

    def arm(self, root: Path, point: int, fault: Fault) -> None:
        self._library.faults_arm(bytes(root), point, fault.value)

    def disarm(self) -> None:
        self._library.faults_disarm()
