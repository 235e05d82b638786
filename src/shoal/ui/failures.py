"""What a command's failure means to the shell: exit codes, and errors as clear text.

0 done, 1 some trials failed, 2 bad usage, 70 an error of shoal itself, 74 storage,
75 stopped before the end.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from enum import IntEnum

from shoal.core.errors import (
    CapacityError,
    PlanError,
    ShoalError,
    SpecError,
    StorageError,
    TrialError,
)
from shoal.frames import is_shoals, own_traceback, raised_by_user, user_line


class ExitCode(IntEnum):
    """What the shell is told; fixed, because scripts read it."""

    DONE = 0
    TRIALS_FAILED = 1
    USAGE = 2
    INTERNAL = 70
    STORAGE = 74
    PAUSED = 75


def run_command(command: Callable[[], object]) -> int:
    """Run a command to its exit code; errors become text on standard error.

    An error in the request or in the storage is told without a traceback, unless
    ``SHOAL_DEBUG`` is set.
    """
    try:
        command()
    except (SystemExit, KeyboardInterrupt) as ending:
        if (signal := _interrupt_in(ending)) is not None:
            begun = getattr(signal, "has_begun", True)
            print(_STOPPED if begun else _STOPPED_EARLY, file=sys.stderr)
            return ExitCode.PAUSED
        code = getattr(ending, "code", None)
        if isinstance(code, str):  # of the user's own sys.exit("...")
            print(code, file=sys.stderr)
        return code if isinstance(code, int) else ExitCode.USAGE
    except ShoalError as error:
        _tell(f"{error}", error)
        return exit_code(error)
    except OSError as error:
        at = f", at {user_line(error)}" if raised_by_user(error) else ""
        _tell(f"cannot read or write{at}: {error}", error)
        return ExitCode.STORAGE
    except Exception as error:
        if raised_by_user(error):  # a model that is made again, to be exported
            _tell(f"raised at {user_line(error)}, in code that is not shoal's:", error)
            print(own_traceback(error), end="", file=sys.stderr)
            return ExitCode.USAGE
        traceback.print_exc()
        print("shoal: this is an error of shoal itself; please report it.", file=sys.stderr)
        return ExitCode.INTERNAL
    return ExitCode.DONE


_STOPPED = "stopped; what was saved stays, and the same command goes on"
_STOPPED_EARLY = (
    "stopped before anything was trained, so there is no study yet; the same command begins it"
)


def _interrupt_in(ending: BaseException | None) -> BaseException | None:
    """The signal at the bottom of it; the parser turns Ctrl-C into an exit of its own."""
    while ending is not None:
        if isinstance(ending, KeyboardInterrupt) or hasattr(ending, "was_interrupted"):
            return ending
        ending = ending.__cause__ or ending.__context__
    return None


def show_warnings_in_words() -> None:
    """Warnings that no line of the user's has asked for, without the line of shoal's that did."""
    shown = warnings.formatwarning

    def format_warning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        if is_shoals(filename) and not os.environ.get("SHOAL_DEBUG"):
            return f"shoal: warning: {message}\n"
        return shown(message, category, filename, lineno, line)

    warnings.formatwarning = format_warning


def exit_code(error: ShoalError) -> ExitCode:
    """Whose mistake an error is: the request's, a trial's, or shoal's own."""
    if isinstance(error, StorageError):
        return ExitCode.STORAGE
    if isinstance(error, TrialError):
        return ExitCode.TRIALS_FAILED
    is_request = isinstance(error, SpecError | PlanError | CapacityError)
    return ExitCode.USAGE if is_request else ExitCode.INTERNAL


def _tell(text: str, error: Exception) -> None:
    if os.environ.get("SHOAL_DEBUG"):
        traceback.print_exception(error)
    print("\n".join([f"shoal: {text}", *getattr(error, "__notes__", ())]), file=sys.stderr)
