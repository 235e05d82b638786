"""``shoal stop``, ``pause``, ``resume``, ``extend`` and ``clone``: orders to a study.

Stopping and pausing need a study that runs. The others change one that runs, or else
give None: then the study's file is loaded and run, which is ``train.resume_study``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.control import (
    CloneTrial,
    Command,
    Continue,
    ExtendTrials,
    NotRunning,
    Pause,
    Status,
    StopStudy,
    StopTrial,
    send,
)
from shoal.core.errors import SpecError
from shoal.core.spec import Scalar
from shoal.observe import Snapshot, is_running, jsonl, read_outline
from shoal.resume import kinds_of
from shoal.ui.failures import ExitCode
from shoal.ui.studies import find_recorded, find_study, refuse_unrecorded

SAVING_S = 600.0  # how long a study may take to save all its trials
ENDING_S = 10.0  # and to end its workers then
_WORDS = {"true": True, "false": False, "yes": True, "no": False}


def _find(name: str, directory: Path) -> Path:
    """The study, which may be planned at the moment."""
    place = find_study(name, directory)
    if not is_running(place):
        refuse_unrecorded(place)
    return place


def stop_study(
    name: str, trial: int | None, directory: Path, *, grace_s: float, reason: str, as_json: bool
) -> int:
    """End a study that can be resumed, or one of its trials."""
    place = _find(name, directory)
    if trial is not None:
        answer = send(place, StopTrial(trial=trial, reason=reason))
        return _tell(answer, f"trial {trial} stops; its state is kept", as_json)
    answer = send(place, StopStudy(reason=reason, grace_s=grace_s), timeout_s=grace_s + SAVING_S)
    _wait_for_end(place)
    return _tell(answer, f"stopped; go on with it: shoal resume {place}", as_json)


def _wait_for_end(place: Path) -> None:
    """All is saved, and what comes next may want the directory: that is held for moments more."""
    until = time.monotonic() + ENDING_S
    while is_running(place) and time.monotonic() < until:
        time.sleep(0.02)


def pause_study(name: str, directory: Path, *, as_json: bool) -> int:
    """Save and park all trials of a study; its process stays."""
    place = _find(name, directory)
    answer = send(place, Pause(), timeout_s=SAVING_S)
    return _tell(answer, f"paused; go on with it: shoal resume {place}", as_json)


def continue_study(
    name: str, directory: Path, given: Sequence[str], *, as_json: bool
) -> int | None:
    """Let a paused study go on; None where no process runs it.

    ``given`` names the options that only a new process could obey.

    Raises:
        SpecError: it is running and not paused.
    """
    place = _find(name, directory)
    status = _send_if_running(place, Status())
    if status is None:
        return None
    _refuse_options(place, given)
    if status.get("state") == "running":
        raise SpecError(
            f"the study in {place} is running already{_process(status)}. Look at it: shoal show "
            f"{place}."
        )
    return _tell(send(place, Continue()), f"the study in {place} goes on", as_json)


def extend_study(
    name: str, command: ExtendTrials, directory: Path, given: Sequence[str], *, as_json: bool
) -> int | None:
    """Add trials to a study that runs; None where no process runs it."""
    answer = _send_if_running(_find(name, directory), command, given)
    many = f"{command.trials} more to train" if command.trials else f"{command.to} trials in all"
    return None if answer is None else _tell(answer, many, as_json)


def clone_trial(
    name: str, command: CloneTrial, directory: Path, given: Sequence[str], *, as_json: bool
) -> int | None:
    """Add a trial like another one to a study that runs; None where no process runs it."""
    answer = _send_if_running(_find(name, directory), command, given)
    return None if answer is None else _tell(answer, f"a clone of trial {command.trial}", as_json)


def clone_command(
    name: str, trial: int, changes: Iterable[str], directory: Path, *, warm: bool
) -> CloneTrial:
    """The command of ``NAME=VALUE`` texts: values are of the types that the study has.

    Raises:
        SpecError: no such trial or hyperparameter, or a text that is no such value.
    """
    place = find_recorded(name, directory)
    snapshot = Snapshot.of(read_outline(place))
    points = {row.number: row.hp for row in snapshot.trials}
    if not points:
        raise SpecError(
            f"no trial of the study in {place} is on record yet: it is being planned, or ended "
            f"before that. Ask again when it trains: shoal show {place}."
        )
    if trial not in points:
        raise SpecError(
            f"study {snapshot.study} has no trial {trial}; it has {len(points)}, numbered from 0."
        )
    parsed: dict[str, Scalar] = {}
    for text in changes:
        key, value = _parse_change(text, trial, points)
        if key in parsed:
            raise SpecError(f"--set {key}=... is given twice. Give it once.")
        parsed[key] = value
    return CloneTrial(trial=trial, changes=parsed, warm=warm)


# -- sending ----------------------------------------------------------------------------------


def _send_if_running(
    place: Path, command: Command, given: Sequence[str] = ()
) -> dict[str, Any] | None:
    """The answer; None where no process runs the study. Options are refused before it is sent."""
    try:
        if given:
            send(place, Status())
            _refuse_options(place, given)
        return send(place, command)
    except NotRunning:
        return None


def _refuse_options(place: Path, given: Sequence[str]) -> None:
    if given:
        raise SpecError(
            f"the study in {place} is running, and {', '.join(given)} cannot be changed under "
            f"way. Stop it first (shoal stop {place}), then shoal resume {place} with what you "
            "want; or leave that out."
        )


def _process(status: Mapping[str, Any]) -> str:
    return f" (process {status['pid']})" if "pid" in status else ""


def _tell(answer: Mapping[str, Any], otherwise: str, as_json: bool) -> int:
    print(jsonl.dumps(answer, indent=2) if as_json else answer.get("text") or otherwise)
    return ExitCode.STORAGE if answer.get("unsaved") else ExitCode.DONE


# -- values -----------------------------------------------------------------------------------


def _parse_change(
    text: str, trial: int, points: Mapping[int, Mapping[str, Scalar]]
) -> tuple[str, Scalar]:
    name, equals, value = text.partition("=")
    if not equals:
        raise SpecError(f"--set takes NAME=VALUE, such as --set lr=0.001, got {text!r}.")
    if name not in points[trial]:
        known = ", ".join(map(repr, points[trial])) or "none"
        raise SpecError(f"trial {trial} has no hyperparameter {name!r}; it has {known}.")
    kinds = kinds_of(points.values(), name)
    for kind, read in _READERS.items():
        if kind in kinds:
            try:
                return name, read(value)
            except (ValueError, KeyError):
                continue
    meant = " or ".join(_MEANINGS[kind] for kind in _READERS if kind in kinds)
    raise SpecError(f"--set {text}: {name!r} is {meant} in this study, got {value!r}.")


def _read_none(text: str) -> None:
    if text.lower() not in ("none", "null"):
        raise ValueError(text)


_READERS: dict[type, Callable[[str], Scalar]] = {
    type(None): _read_none,
    bool: lambda text: _WORDS[text.lower()],
    int: int,
    float: float,
    str: str,
}
_MEANINGS: dict[type, str] = {
    type(None): "None",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
}
