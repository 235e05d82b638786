"""What a failure is worth: the same mistake in every trial, or a lack of memory. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from shoal.core.units import list_some
from shoal.frames import raised

SAME_FAILURES = 3
"""When the first so many trials fail in the same way and none did a step, the study stops."""

SAME_ENDS = 3
"""When one exception ended so many workers before a trial did a step, the study stops."""

_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_NO_ROOM = re.compile(
    r"torch\.(cuda\.)?OutOfMemoryError$|shoal\.core\.errors\.CapacityError$|MemoryError$"
    r"|numpy\._?core\._exceptions\._ArrayMemoryError$"
)
_NO_ROOM_WORDS = re.compile(  # how torch says it in a RuntimeError of its own
    r"CUDA out of memory\. Tried|CUDA error: out of memory|CU(BLAS|DNN)_STATUS_ALLOC_FAILED"
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory"
)
_DEVICE_GAVE_UP = re.compile(r"CUDA error|CUDNN_STATUS|CUBLAS_STATUS|device-side assert")
"""What a trial's own kernel may leave behind: everything raises then, until the process ends."""


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

    def __init__(self) -> None:
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
        if self._is_over or len(self._seen) < SAME_FAILURES:
            return ""
        numbers = ", ".join(str(trial) for trial, _ in self._seen)
        return (
            f"the first {len(self._seen)} trials ({numbers}) failed in the same way before their "
            f"first step, so the others were not tried. The error of trial {trial}:\n{error}"
        )


class SameEnds:
    """Counts workers that an exception ended, which was raised in no trial's code.

    A worker that is killed, or that leaves, is a trial's own doing and does not count.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], list[int]] = defaultdict(list)

    def passed(self) -> None:
        """A trial did a step."""
        self._seen.clear()

    def ended(self, running: Iterable[int], error: str, *, of: int) -> str:
        """Why the study should stop, or nothing.

        Args:
            running: The trials whose turn it was.
            error: The traceback.
            of: So many trials there are. One alone of several may be a trial's own trouble.
        """
        if not error or is_out_of_memory(error) or _DEVICE_GAVE_UP.search(_raised(error)[1]):
            return ""
        seen = self._seen[signature(error)]
        seen.append(min(running, default=-1))
        trials = sorted(set(seen) - {-1})
        if len(seen) < SAME_ENDS or len(trials) < min(2, of):
            return ""
        return (
            f"the same exception ended {len(seen)} workers, when it was the turn of "
            f"{'trials' if len(trials) > 1 else 'trial'} {list_some(trials)}, and it was not "
            "raised in a trial's code. Nothing else is tried: this is an error of shoal itself. "
            f"Please report it, with its traceback:\n{error.rstrip()}"
        )
