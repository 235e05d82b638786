"""``shoal watch``: the live table of a study that another process runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from shoal.core.errors import SpecError
from shoal.core.event import Event
from shoal.observe import DatabaseReader, is_running, read_outline
from shoal.observe.snapshot import Snapshot
from shoal.ui.dashboard import LiveTable, make_screen
from shoal.ui.failures import ExitCode
from shoal.ui.lines import PlainLines
from shoal.ui.show import ending_code
from shoal.ui.studies import find_study, refuse_unrecorded, wait_while_running


def watch_study(name: str | None, directory: Path) -> int:
    """Show a study until it ends or Ctrl-C.

    Where standard output is no terminal it is lines: where the study is, and from then on
    what happens. The exit code says what is on record: all trials finished, some failed, or
    it was stopped, also by Ctrl-C here, which leaves the study alone.

    Raises:
        SpecError: there is no such study, or it ended before anything of it was on record.
    """
    place = find_study(name, directory)
    if not is_running(place):
        refuse_unrecorded(place)
    elif Snapshot.of(read_outline(place)).is_finished:
        print("it has ended before, and is being planned again", file=sys.stderr)
    try:
        with make_screen(sys.stdout) as screen:
            follow(DatabaseReader(place).poll, screen, wait=lambda: wait_while_running(place))
    except KeyboardInterrupt:
        if is_running(place):
            print("the study goes on", file=sys.stderr)
        return ExitCode.PAUSED
    except BrokenPipeError:  # whoever read it has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.PAUSED
    if not place.exists():
        raise SpecError(f"the run was refused, and nothing is left of {place}. It said why.")
    refuse_unrecorded(place)
    ending = Snapshot.of(read_outline(place))
    if not ending.is_finished:
        print(f"no process runs it any more; to go on: shoal resume {place}", file=sys.stderr)
    return ending_code(ending)


def follow(
    poll: Callable[[], Iterator[Event]], screen: LiveTable | PlainLines, wait: Callable[[], bool]
) -> None:
    """Show what ``poll()`` finds for as long as ``wait()`` is true, and once more."""
    screen.catch_up(poll())
    goes_on = True
    while goes_on:
        goes_on = wait()
        screen.tell(poll())
