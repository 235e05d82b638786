"""Ctrl-C while a command imports, and loads a file: heard, whatever that code does with it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def heeding_interrupts() -> Iterator[None]:
    """Ctrl-C in this block ends it, though what runs in it may swallow the exception.

    To import torch is to go through bare ``except`` clauses, destructors and callbacks of C, and
    a user's file may have any: the study would go on as if nobody had pressed anything.

    Raises:
        KeyboardInterrupt: at once, and where that was swallowed when the block ends.
    """
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # nohup ignores it
    if not is_usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = False

    def take(number: int, frame: FrameType | None) -> None:
        nonlocal heard
        heard = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, take)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is take:  # a file may have put its own there
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if heard:  # also where what swallowed it made another error of it
            raise KeyboardInterrupt
