"""``shoal logs``: what a trial printed, as text that a terminal does not obey."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

from shoal.core.errors import SpecError
from shoal.observe import is_running, read_outline
from shoal.observe.snapshot import Snapshot
from shoal.observe.states import study_state, trial_state
from shoal.runtime.printing.triallog import log_path
from shoal.ui.failures import ExitCode
from shoal.ui.studies import find_recorded, wait_while_running


def show_log(name: str, trial: int, directory: Path, *, tail: int | None, follow: bool) -> int:
    """Print the log of a trial, or its last ``tail`` lines.

    ``follow`` prints what comes, too, until the study ends or Ctrl-C.
    """
    if tail is not None and tail < 0:
        raise SpecError(f"--tail is a number of lines from 0, got {tail}.")
    place = find_recorded(name, directory)
    path = log_path(place, trial)
    if not path.exists() and not (follow and is_running(place)):
        print(_no_log(place, trial), file=sys.stderr)
        return ExitCode.DONE
    try:
        print_log(path, sys.stdout, tail=tail, wait=lambda: follow and wait_while_running(place))
    except KeyboardInterrupt:
        print(file=sys.stderr)  # asked for: the way to end it
    return ExitCode.DONE


def print_log(
    path: Path, stream: IO[str], *, tail: int | None = None, wait: Callable[[], bool]
) -> None:
    """Print a log, and what it grows by for as long as ``wait()`` is true, and once more."""
    goes_on = True
    while goes_on and not path.exists():
        goes_on = wait()
    if not path.exists():
        return
    with open(path, "rb") as file:
        lines: Iterable[bytes] = deque(file, maxlen=tail)
        while True:
            for line in lines:
                stream.write(visible(line.decode("utf-8", "replace")))
            stream.flush()
            if not goes_on:
                return
            goes_on, lines = wait(), file


def visible(text: str) -> str:
    r"""``text`` with what a terminal would obey, or hide, as escapes such as ``\x1b``."""
    if text.rstrip("\n").isprintable():
        return text
    return "".join(c if c in "\n\t" or c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _no_log(place: Path, trial: int) -> str:
    """Why there is nothing to print.

    Raises:
        SpecError: the study has no such trial.
    """
    snapshot = Snapshot.of(read_outline(place))
    if not 0 <= trial < snapshot.total:
        raise SpecError(
            f"study {snapshot.study} has no trial {trial}; it has {snapshot.total}, numbered "
            "from 0."
        )
    state = trial_state(snapshot.trial(trial), study_state(snapshot, place))
    return f"trial {trial} of {snapshot.study} is {state} and has printed nothing"
