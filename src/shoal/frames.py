"""Tracebacks of a user's code, without the frames of shoal that called it."""

from __future__ import annotations

import os
import sysconfig
import traceback
from typing import Any

_HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_LIBRARIES = tuple(
    {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib")}
)

WRAPPED = ("__wrapped__", "func", "function")
"""Where decorators, partials and functions with a trial's hyperparameters keep the one within."""


def own_traceback(error: BaseException) -> str:
    """The traceback from the first frame on that is neither shoal's nor a library's.

    All of it where there is none: then the error is shoal's own, or of what it was given.
    """
    frames = error.__traceback__
    while frames is not None and not is_users(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    found = frames or error.__traceback__
    return "".join(traceback.format_exception(type(error), error, found))


def user_line(error: BaseException) -> str:
    """The innermost line of the user's that an error came through, ``model.py:12``, or nothing."""
    found, frames = "", error.__traceback__
    while frames is not None:
        if is_users(filename := frames.tb_frame.f_code.co_filename):
            found = f"{_near(filename)}:{frames.tb_lineno}"
        frames = frames.tb_next
    return found


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


def is_users(filename: str) -> bool:
    """Whether a frame's file is neither shoal's nor a library's."""
    return not filename.startswith((_HERE, "<frozen", *_LIBRARIES))
