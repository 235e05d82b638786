"""A study as Optuna's own storage: a SQLite file for its dashboard."""

from __future__ import annotations

import math
import os
import sqlite3
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from shoal.core.errors import SpecError
from shoal.core.spec import Scalar
from shoal.search.library import load_optuna, quiet, to_optuna
from shoal.search.space import Choice, Distribution, Integer, Uniform, entries, find_equal

State = Literal["COMPLETE", "PRUNED", "FAIL", "RUNNING", "WAITING"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver:
    """One trial; ``curve`` is the metric by step, times are Unix seconds.

    ``value`` counts where it is COMPLETE; PRUNED it has the last of its curve, as Optuna's own.
    """

    point: Mapping[str, Scalar]
    state: State
    value: float | None
    curve: Mapping[int, float]
    began: float | None
    ended: float | None
    attributes: Mapping[str, Any] = field(default_factory=dict)


def write_optuna(
    path: Path,
    name: str,
    *,
    mode: str,
    metric: str,
    space: Mapping[str, Distribution],
    trials: Sequence[HandedOver],
    overwrite: bool = False,
) -> None:
    """Write a study into a new SQLite file; it is there wholly or not at all.

    Raises:
        SpecError: Optuna is missing, or there is a file already.
    """
    optuna = load_optuna("shoal export --optuna")
    if path.exists() and not overwrite:
        raise SpecError(
            f"{path} is there already. Choose another file, or replace it with --overwrite."
        )
    if not path.parent.is_dir():
        raise SpecError(f"there is no directory {path.parent} for {path.name}. Make it first.")
    draft = path.with_name(f".{path.name}.tmp")
    draft.unlink(missing_ok=True)
    try:
        _fill(optuna, draft, name, mode, metric, _wide_enough(space, trials), trials)
        with open(draft, "rb") as file:
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


class _Draft(sqlite3.Connection):
    """To a file that nobody reads before it is whole: no trial's commit waits for the disk."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.execute("PRAGMA synchronous = OFF")


def _fill(
    optuna: Any,
    path: Path,
    name: str,
    mode: str,
    metric: str,
    space: Mapping[str, Distribution],
    trials: Sequence[HandedOver],
) -> None:
    how = {"connect_args": {"factory": _Draft}}
    storage = optuna.storages.RDBStorage(f"sqlite:///{path}", engine_kwargs=how)
    try:
        with quiet(optuna):
            direction = {"min": "minimize", "max": "maximize"}[mode]
            study = optuna.create_study(storage=storage, study_name=name, direction=direction)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the call is experimental in Optuna 5
            study.set_metric_names([metric])
        study.add_trials([_frozen(optuna, trial, space) for trial in trials])
    finally:
        storage.remove_session()
        storage.engine.dispose()


def _frozen(optuna: Any, trial: HandedOver, space: Mapping[str, Distribution]) -> Any:
    has_value = trial.value is not None and math.isfinite(trial.value)
    state = "FAIL" if trial.state == "COMPLETE" and not has_value else trial.state
    value = trial.value if state == "COMPLETE" else None
    told = {name: _told_apart(space[name], own) for name, own in trial.point.items()}
    frozen = optuna.trial.create_trial(
        state=optuna.trial.TrialState[state],
        value=_last_value(trial) if state == "PRUNED" else value,
        params={name: own for name, (_, own) in told.items()},
        distributions={name: to_optuna(optuna, of) for name, (of, _) in told.items()},
        intermediate_values=dict(trial.curve),
        user_attrs=dict(trial.attributes),
    )
    began = trial.ended if trial.began is None else trial.began  # it failed as it was made
    if began is not None and state != "WAITING":
        frozen.datetime_start = datetime.fromtimestamp(began)
    if trial.ended is not None and frozen.datetime_complete is not None:
        frozen.datetime_complete = datetime.fromtimestamp(trial.ended)
    return frozen


def _last_value(trial: HandedOver) -> float | None:
    """The last of a trial's curve, if it is a number."""
    last = trial.curve[max(trial.curve)] if trial.curve else math.nan
    return None if math.isnan(last) else last


def _wide_enough(
    space: Mapping[str, Distribution], trials: Sequence[HandedOver]
) -> dict[str, Distribution]:
    """What each name is drawn from; a clone may have been given a value outside of that."""
    known: dict[str, Distribution] = {}
    for name, entry in entries(space):
        assert isinstance(entry, Uniform | Integer | Choice)
        known[name] = entry
    values: dict[str, list[Scalar]] = {}
    for trial in trials:
        for name, value in trial.point.items():
            values.setdefault(name, []).append(value)
    return {name: _with(known.get(name), found) for name, found in values.items()}


def _with(distribution: Distribution | None, values: Sequence[Scalar]) -> Distribution:
    """A distribution that has all of ``values``; a range, if it was one and all are numbers."""
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if isinstance(distribution, Uniform | Integer) and len(numbers) == len(values):
        low, high = min(distribution.lo, *numbers), max(distribution.hi, *numbers)
        is_log = distribution.log and low > 0
        if isinstance(distribution, Uniform):
            wide = replace(distribution, lo=low, hi=high, log=is_log)
            is_on = all(wide.has(number) and wide.nearest(number) == number for number in numbers)
            return wide if is_on else replace(wide, step=None)
        if all(isinstance(n, int) for n in numbers):
            whole = replace(distribution, lo=int(low), hi=int(high), log=is_log)
            return whole if all(map(whole.has, numbers)) else replace(whole, step=1)
        return Uniform(low, high, is_log)
    known = distribution.values if isinstance(distribution, Choice) else ()
    return Choice(tuple({(type(value), value): value for value in (*known, *values)}.values()))


def _told_apart(distribution: Distribution, value: Scalar) -> tuple[Distribution, Scalar]:
    """A choice and its value as Optuna has them: as text, where it would take two for one."""
    if isinstance(distribution, Choice) and find_equal(distribution.values):
        return Choice(tuple(map(repr, distribution.values))), repr(value)
    return distribution, value
