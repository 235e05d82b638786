"""Tracebacks of a user's code, without the frames of shoal that called it."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from types import FrameType
from typing import Any

from shoal.core.errors import CapacityError, PlanError, SpecError, StorageError, TrialError

_HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_LIBRARIES = tuple(
    {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib")}
)

_PLUMBING = ("_wrapped_call_impl", "_call_impl")
"""What stands between any two modules in a traceback."""
_TORCHS_OWN = tuple(
    os.path.join("torch", *path)
    for path in (("_dynamo", ""), ("_compile.py",), ("_ops.py",), ("utils", "_contextlib.py"))
)

WRAPPED = ("__wrapped__", "func", "function")
"""Where decorators, partials and functions with a trial's hyperparameters keep the one within."""


def own_traceback(error: BaseException) -> str:
    """The traceback from the first frame on that is neither shoal's nor a library's.

    Where there is none and a library raised it, what that library's modules were doing. All of it
    where shoal did: then the error is its own, or of what it was given; but of one that says all
    there is to say of a trial, such as that its loss is nan, the last frame. What was raised
    before it and caught by shoal, as where an array tries its trials one by one, is no part of it.
    """
    frames = error.__traceback__
    while frames is not None and not is_users(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    found = traceback.TracebackException(type(error), error, frames or error.__traceback__)
    if frames is not None:
        _forget_tries(found)
    elif found.stack and not is_shoals(found.stack[-1].filename):
        some = [one for one in found.stack if not (is_shoals(one.filename) or _is_plumbing(one))]
        found.stack = traceback.StackSummary.from_list(some or found.stack[-1:])
    elif isinstance(error, TrialError) and not os.environ.get("SHOAL_DEBUG"):
        found.stack = traceback.StackSummary.from_list(found.stack[-1:])
    return "".join(found.format())


def _forget_tries(found: traceback.TracebackException) -> None:
    """Of those that came before it leave those that a user's code handled."""
    while found.__cause__ is None and (before := found.__context__) is not None:
        if before.stack and is_shoals(before.stack[0].filename):
            found.__context__ = None
            return
        found = before


class UsersFrames:
    """Around what a script calls: an error of shoal's own leaves it without shoal's frames.

    What is left is the line of the script, and what the error says; ``SHOAL_DEBUG`` keeps all.
    Other errors, also those that are to be reported, keep theirs.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, frames: Any) -> None:
        told = isinstance(error, SpecError | PlanError | CapacityError | TrialError | StorageError)
        if error is not None and told and not os.environ.get("SHOAL_DEBUG"):
            error.__traceback__, error.__suppress_context__ = None, error.__cause__ is None


def raised(text: str) -> str:
    """What a traceback in words ends with: the exception's type, its message, and its notes."""
    lines = text.rpartition("Traceback (most recent call last):\n")[2].strip("\n").split("\n")
    at = next((i for i, line in enumerate(lines) if line and not line.startswith(" ")), 0)
    return "\n".join(lines[at:])


def user_line(error: BaseException) -> str:
    """The innermost line of the user's that an error came through, ``model.py:12``, or nothing."""
    found, frames = "", error.__traceback__
    while frames is not None:
        if is_users(filename := frames.tb_frame.f_code.co_filename):
            found = f"{_near(filename)}:{frames.tb_lineno}"
        frames = frames.tb_next
    return found


def raised_by_user(error: BaseException) -> bool:
    """Whether it came out of the user's code, or of a library that this called."""
    innermost, frames = "", error.__traceback__
    while frames is not None:
        filename = frames.tb_frame.f_code.co_filename
        if (is_users(filename) and filename[:1] != "<") or is_shoals(filename):
            innermost = filename  # made up code is whose it is that calls it
        frames = frames.tb_next
    return bool(innermost) and not is_shoals(innermost)


def line_now() -> str:
    """The innermost line of the user's that is running, as ``user_line`` has it, or nothing."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{_near(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else ""


def line_of(function: Any) -> str:
    """Where a function of the user's begins, `` at model.py:12``, or nothing."""
    for _ in range(10):  # an object may answer to any name
        function = next((getattr(function, n) for n in WRAPPED if hasattr(function, n)), function)
    code = getattr(function, "__code__", None)
    if code is None or not is_users(code.co_filename):
        return ""
    return f" at {_near(code.co_filename)}:{code.co_firstlineno}"


def _near(filename: str) -> str:
    """A file as it is called from here, if it lies below."""
    near = os.path.relpath(filename)
    return filename if near.startswith(os.pardir) else near


def _is_plumbing(frame: traceback.FrameSummary) -> bool:
    return frame.name in _PLUMBING or any(part in frame.filename for part in _TORCHS_OWN)


def is_shoals(filename: str) -> bool:
    """Whether a file is one of shoal's own."""
    return filename.startswith(_HERE)


def is_users(filename: str) -> bool:
    """Whether a frame's file is neither shoal's nor a library's."""
    return not filename.startswith((_HERE, "<frozen", *_LIBRARIES))
