"""What a failure is worth: the same mistake in every trial, or a lack of memory. Pure."""

from __future__ import annotations

import re

SAME_FAILURES = 3
"""When the first so many trials fail in the same way and none did a step, the study stops."""

_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_OUT_OF_MEMORY = re.compile(
    r"^(torch\.)?OutOfMemoryError|^torch\.cuda\.OutOfMemoryError|CUDA out of memory"
    r"|^(\S+\.)?CapacityError|^MemoryError|can't allocate memory|not enough memory",
    re.MULTILINE,
)


def signature(error: str) -> tuple[str, str]:
    """Equal for errors of one cause: the exception's type, and where it was raised."""
    frames = _FRAME.findall(error)
    last = error.strip().rpartition("\n")[2]
    return last.partition(":")[0], ":".join(frames[-1]) if frames else last


def is_out_of_memory(error: str) -> bool:
    """Whether a traceback says that a device or the host had no room."""
    last = error.strip().rpartition("\n\n")[2]
    return bool(_OUT_OF_MEMORY.search(last))


class SameFailures:
    """Counts the first trials that end; ``verdict`` says when to stop the study."""

    def __init__(self, most: int = SAME_FAILURES) -> None:
        self._most = most
        self._seen: list[tuple[int, str]] = []
        self._is_over = False

    def passed(self) -> None:
        """A trial ended well, or did a step: the recipe works."""
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
