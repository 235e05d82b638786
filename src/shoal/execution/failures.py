"""What a failure is worth: the same mistake in every trial, or a lack of memory. Pure."""

from __future__ import annotations

import re

from shoal.frames import raised

SAME_FAILURES = 3
"""When the first so many trials fail in the same way and none did a step, the study stops."""

_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_NO_ROOM = re.compile(
    r"torch\.(cuda\.)?OutOfMemoryError$|shoal\.core\.errors\.CapacityError$|MemoryError$"
    r"|numpy\._?core\._exceptions\._ArrayMemoryError$"
)
_NO_ROOM_WORDS = re.compile(  # how torch says it in a RuntimeError of its own
    r"CUDA out of memory\. Tried|CUDA error: out of memory|CU(BLAS|DNN)_STATUS_ALLOC_FAILED"
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory"
)


def signature(error: str) -> tuple[str, str]:
    """Equal for errors of one cause: the exception's type, and where it was raised."""
    kind, _ = _raised(error)
    frames = _FRAME.findall(error)
    return kind, ":".join(frames[-1]) if frames else error.strip().rpartition("\n")[2]


def is_out_of_memory(error: str) -> bool:
    """Whether a traceback says that a device or the host had no room."""
    kind, message = _raised(error)
    if kind == "RuntimeError":
        return bool(_NO_ROOM_WORDS.search(message))
    return bool(_NO_ROOM.match(kind))


def _raised(error: str) -> tuple[str, str]:
    """The type and the message of the exception that a traceback ends with."""
    kind, _, message = raised(error).partition(":")
    return kind.strip(), message


class SameFailures:
    """Counts the first trials that end; ``failed`` says when to stop the study."""

    def __init__(self, most: int = SAME_FAILURES) -> None:
        self._most = most
        self._seen: list[tuple[int, str]] = []
        self._is_over = False

    def passed(self) -> None:
        """A trial ended well, or did a step, now or in an earlier run: the recipe works."""
        self._is_over = True

    def failed(self, trial: int, error: str) -> str:
        """Why the study should stop, or nothing."""
        if self._is_over:
            return ""
        self._seen.append((trial, error))
        alike = {signature(error) for _, error in self._seen}
        if len(alike) > 1:
            self._is_over = True
        if self._is_over or len(self._seen) < self._most:
            return ""
        numbers = ", ".join(str(trial) for trial, _ in self._seen)
        return (
            f"the first {len(self._seen)} trials ({numbers}) failed in the same way before their "
            f"first step, so the others were not tried. The error of trial {trial}:\n{error}"
        )
