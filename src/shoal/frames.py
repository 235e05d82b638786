"""Tracebacks of a user's code, without the frames of shoal that called it."""

from __future__ import annotations

import os
import sysconfig
import traceback

_HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_LIBRARIES = tuple(
    {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib")}
)


def own_traceback(error: BaseException) -> str:
    """The traceback from the first frame on that is neither shoal's nor a library's.

    All of it where there is none: then the error is shoal's own, or of what it was given.
    """
    frames = error.__traceback__
    while frames is not None and not is_users(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    found = frames or error.__traceback__
    return "".join(traceback.format_exception(type(error), error, found))


def is_users(filename: str) -> bool:
    """Whether a frame's file is neither shoal's nor a library's."""
    return not filename.startswith((_HERE, "<frozen", *_LIBRARIES))
