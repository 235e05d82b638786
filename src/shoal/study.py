"""Study: a set of trials with one recipe, one search space, one objective.

The one place that wires parts together: trials from the space, workers, planner, run,
log, report.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cloudpickle
import torch

import shoal
from shoal.core import event as events
from shoal.core.errors import PlanError, SpecError
from shoal.core.plan import Plan, Resident, Spilled, Technique
from shoal.core.spec import DeviceSpec, TrialSpec
from shoal.core.units import format_bytes
from shoal.execution import Execution, planned_events, predict_seconds, total_steps
from shoal.hardware import Hardware
from shoal.observe.log import EventLog
from shoal.planning import Planned, Planner, with_seconds
from shoal.recipe import Recipe
from shoal.report import Report, read_report
from shoal.runtime.messages import Settings
from shoal.runtime.pool import WorkerPool
from shoal.search.sampler import trials_of
from shoal.source import MODULE_NAME

Callback = Callable[[events.Event], None]
_NAME = re.compile(r"[a-z0-9._-]{1,64}")
_WARN_PICKLE_BYTES = 16 * 2**20
IDENTITY = "study.json"


class Study:
    """Trials of one recipe over a search space; the object a user makes and runs.

    Args:
        name: Names the study's directory: 1 to 64 of ``a-z 0-9 . _ -``.
        recipe: What every trial builds, reads and minimises.
        space: Name -> distribution or constant, or ``shoal.grid(...)``.
        trials: How many; default: all points of a finite space.
        epochs, steps: How long a trial trains; exactly one of the two.
        metric, mode: What the leaderboard is sorted by: ``"min"`` or ``"max"``.
        sampler: None for grid where the space is finite, else random.
        eval_every: Steps between validations; default: each epoch and the end.
        seed: Trial i trains with seed + i unless the space has a ``seed``.
        directory: Where studies live; this one in ``directory/name``.

    Raises:
        SpecError: something is asked for that cannot be meant.
    """

    def __init__(
        self,
        name: str,
        recipe: Recipe,
        *,
        space: Mapping[str, Any],
        trials: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        metric: str = "valid_loss",
        mode: str = "min",
        sampler: Any = None,
        pruner: Any = None,
        eval_every: int | None = None,
        seed: int = 0,
        directory: str | os.PathLike[str] = "runs",
    ) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name) or set(name) == {"."}:
            raise SpecError(
                f"a study's name names its directory: it is [a-z0-9._-]{{1,64}}, got {name!r}."
            )
        if not isinstance(recipe, Recipe):
            raise SpecError(f"recipe is a shoal.Recipe, got {type(recipe).__name__}")
        if (epochs is None) == (steps is None):
            raise SpecError(
                f"a study trains for epochs or for steps, got epochs={epochs} and steps={steps}. "
                "Give exactly one of them."
            )
        for label, count in (("epochs", epochs), ("steps", steps), ("eval_every", eval_every)):
            if count is not None and (not isinstance(count, int) or count < 1):
                raise SpecError(f"{label} is a whole number from 1, got {count!r}")
        if mode not in ("min", "max"):
            raise SpecError(f"mode is 'min' or 'max', got {mode!r}")
        if pruner is not None:
            raise SpecError(
                f"pruner={pruner!r} cannot be used yet: every trial trains to its end. Leave it "
                "out."
            )
        known = {"train_loss", "valid_loss", *(f"valid_{name}" for name in recipe.metrics)}
        if metric not in known:
            raise SpecError(
                f"metric={metric!r} is not measured by this recipe; it has "
                f"{', '.join(sorted(known))}. Add it to Recipe(metrics=...)."
            )
        self.name, self.recipe, self.space = name, recipe, space
        self.epochs, self.steps, self.eval_every = epochs, steps, eval_every
        self.metric, self.mode, self.seed = metric, mode, seed
        self.directory = Path(directory) / name
        self.source = ""  # FILE.py:attribute, set by whoever loaded the study from a file
        self.trials: tuple[TrialSpec, ...] = trials_of(space, trials, seed, sampler)

    def plan(
        self,
        *,
        hardware: Hardware | None = None,
        technique: str | Technique | None = None,
        workers: WorkerPool | None = None,
    ) -> Plan:
        """Measure each distinct model on the hardware and decide; nothing is trained.

        Raises:
            PlanError: a trial fits in no way, or what is forced cannot be done.
        """
        with ExitStack() as stack:
            pool = workers or stack.enter_context(WorkerPool())
            stack.callback(pool.release)
            planned = self._plan(pool, self._hardware(hardware), _technique(technique))
        return planned.plan

    def run(
        self,
        *,
        hardware: Hardware | None = None,
        technique: str | Technique | None = None,
        callbacks: Sequence[Callback] = (),
        progress: bool = True,
        workers: WorkerPool | None = None,
        overwrite: bool = False,
        checkpoint_every_s: float = 60.0,
        timeline: bool = True,
        plan: Plan | None = None,
        resume: bool = False,
        fuse: str | bool | int = "auto",
        exact: str = "auto",
    ) -> Report:
        """Train all trials; returns the report, which can be read again from the directory.

        Args:
            hardware: Default: the GPUs there are, else one virtual device per core.
            technique: Forces what the planner would choose: ``"resident"``, ``"spilled"``,
                ``Resident()`` or ``Spilled(...)``.
            callbacks: Called in this process with every event, in order. One that raises
                is warned about and not called again.
            progress: Show a live table, or plain lines when not on a terminal.
            workers: A pool of warm workers to use and leave running.
            overwrite: Delete what an earlier run of this study left.
            checkpoint_every_s: Seconds between saved states of a spilled trial, from
                which it goes on when its worker dies.
            timeline: Record every action for ``shoal trace``.
            plan, resume, fuse, exact: Only None, False, ``"auto"`` or False, and ``"auto"``:
                following a plan made before, resuming, fused arrays and the strict mode are
                refused until they are there.

        Raises:
            SpecError, PlanError: before anything is trained.
        """
        _refuse_future(plan=plan, resume=resume, fuse=fuse, exact=exact)
        chosen = self._hardware(hardware)
        devices = chosen.devices
        self._claim_directory(overwrite)
        began = time.time()
        with ExitStack() as stack:
            pool = workers or stack.enter_context(WorkerPool())
            log = stack.enter_context(EventLog(self.directory / "events.jsonl"))
            sink = _Sinks(log, [*callbacks, *_progress(stack, progress)])
            sink.write([self._started(devices, began)])
            settings = self._settings(checkpoint_every_s, timeline)
            try:
                planned = self._plan(pool, chosen, _technique(technique), settings, sink.write)
            except BaseException:
                pool.release()
                stack.close()
                self._give_directory_back()
                raise
            shutil.rmtree(self._replaced, ignore_errors=True)
            try:
                finished, failed = self._execute(pool, planned, settings, sink)
            except BaseException as error:
                pool.release()
                stopped = f"{type(error).__name__}: {error}".strip(": ")
                sink.write([_ended(began, 0, 0, stopped)])
                raise
            sink.write([_ended(began, finished, failed, "")])
            pool.release()
        return read_report(self.directory, recipe=self.recipe)

    def report(self) -> Report:
        """The report of the last run, read from the study's directory."""
        return read_report(self.directory, recipe=self.recipe)

    # -- parts of a run -------------------------------------------------------------------

    def _execute(
        self,
        pool: WorkerPool,
        planned: Planned,
        settings: Settings,
        sink: _Sinks,
    ) -> tuple[int, int]:
        (self.directory / "plan.json").write_text(planned.plan.to_json())
        sink.write(planned_events(planned, self.trials, total_steps(planned, settings)))
        recipe = pack_recipe(self.recipe)
        return Execution(planned, pool, recipe, settings, sink.write).run()

    def _plan(
        self,
        pool: WorkerPool,
        hardware: Hardware,
        technique: Technique | None,
        settings: Settings | None = None,
        sink: Callable[[Sequence[events.Event]], None] = lambda happened: None,
    ) -> Planned:
        settings = settings or self._settings(60.0, False)
        pool.configure(hardware.devices, pack_recipe(self.recipe), settings)
        planner = Planner(self.name, pool, hardware.devices, self.recipe, technique, sink)
        planned = planner.plan(self.trials)
        _check_host_memory(planned.plan, hardware.host_memory)
        seconds = predict_seconds(planned.plan, total_steps(planned, settings))
        plan = with_seconds(planned.plan, seconds)
        return Planned(
            plan=plan,
            layouts=planned.layouts,
            num_batches=planned.num_batches,
            failures=planned.failures,
        )

    def _hardware(self, hardware: Hardware | None) -> Hardware:
        chosen = hardware or Hardware.detect()
        if not isinstance(chosen, Hardware):
            raise SpecError(f"hardware is a shoal.Hardware, got {type(chosen).__name__}")
        return chosen.fewer_trials(len(self.trials))

    def _settings(self, checkpoint_every_s: float, timeline: bool) -> Settings:
        return Settings(
            steps=self.steps,
            epochs=self.epochs,
            eval_every=self.eval_every,
            directory=str(self.directory.resolve()),
            checkpoint_every_s=checkpoint_every_s,
            timeline=timeline,
        )

    def _started(self, devices: Sequence[DeviceSpec], now: float) -> events.StudyStarted:
        return events.StudyStarted(
            time=now,
            study=self.name,
            metric=self.metric,
            mode=self.mode,
            trials=len(self.trials),
            devices=tuple(asdict(device) for device in devices),
            source=self.source or _script_source(self),
            versions={
                "shoal": shoal.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        )

    # -- the directory --------------------------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        """What makes a directory this study's: its name, trials and length."""
        trials = [(t.number, dict(t.hp), t.seed) for t in self.trials]
        digest = hashlib.sha256(json.dumps(trials).encode()).hexdigest()
        return {
            "name": self.name,
            "trials": len(self.trials),
            "epochs": self.epochs,
            "steps": self.steps,
            "digest": digest,
        }

    def _claim_directory(self, overwrite: bool) -> None:
        """Make the directory this study's, or say whose it is."""
        path, mine = self.directory, self._identity()
        if path.exists() and any(path.iterdir()):
            theirs = _read_identity(path)
            if theirs is None:
                raise SpecError(
                    f"{path} is not empty and holds no study. Choose another name or directory; "
                    "shoal deletes nothing that it did not write."
                )
            if not overwrite:
                whose = "this study's results" if theirs == mine else _difference(theirs, mine)
                raise SpecError(
                    f"{path} already holds {whose}. Read it with shoal.open({str(path)!r}), pass "
                    "overwrite=True (--overwrite) to replace them, or choose another name."
                )
            shutil.rmtree(self._replaced, ignore_errors=True)
            with EventLog(path / "events.jsonl"):  # refuses while another process writes it
                path.rename(self._replaced)
        path.mkdir(parents=True, exist_ok=True)
        (path / IDENTITY).write_text(json.dumps(mine, indent=2))

    @property
    def _replaced(self) -> Path:
        """Where the results that are being overwritten wait until the new plan stands."""
        return self.directory.with_name(f".{self.name}.replaced")

    def _give_directory_back(self) -> None:
        """Nothing was trained: leave no trace, and what was there before as it was."""
        shutil.rmtree(self.directory)
        if self._replaced.exists():
            self._replaced.rename(self.directory)


class _Sinks:
    """The log and the callbacks of one run."""

    def __init__(self, log: EventLog, callbacks: Iterable[Callback]) -> None:
        self._log, self._callbacks = log, list(callbacks)

    def write(self, happened: Sequence[events.Event]) -> None:
        """Log first; a callback that raises loses its place and stops nobody."""
        self._log.write(happened)
        for callback in list(self._callbacks):
            try:
                for event in happened:
                    callback(event)
            except Exception as error:
                self._callbacks.remove(callback)
                warnings.warn(
                    f"callback {callback!r} raised {type(error).__name__}: {error}; the study "
                    "goes on without it.",
                    stacklevel=2,
                )


def open(path: str | os.PathLike[str], recipe: Recipe | None = None) -> Report:
    """The report of a study directory, without running anything."""
    return read_report(path, recipe=recipe)


def pack_recipe(recipe: Recipe) -> bytes:
    """The recipe as bytes for a worker; only what ``__main__`` defines travels by value.

    Raises:
        SpecError: something cannot travel; names the field and the object.
    """
    _register_source_module()
    try:
        packed = _dumps(recipe)
    except Exception as error:
        field, reason = _culprit(recipe, error)
        raise SpecError(
            f"Recipe({field}=...) cannot be sent to a worker: {reason}. It refers to an object "
            "that lives in this process only (an open file, a lock, a connection, a generator). "
            "Make that object inside the function, or load it from a path there."
        ) from error
    if len(packed) > _WARN_PICKLE_BYTES:
        warnings.warn(
            f"the recipe is {format_bytes(len(packed))} for every worker: it carries data along. "
            "Load the data inside Recipe(data=...) instead of closing over it.",
            stacklevel=2,
        )
    return packed


def _script_source(study: Study) -> str:
    """FILE.py:attribute of a study that the script being run defines, else nothing."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    names = [name for name, value in vars(main).items() if value is study] if file else []
    return f"{Path(str(file)).resolve()}:{names[0]}" if names else ""


def _dumps(value: object) -> bytes:
    buffer = io.BytesIO()
    cloudpickle.CloudPickler(buffer).dump(value)
    return buffer.getvalue()


def _register_source_module() -> None:
    module = sys.modules.get(MODULE_NAME)
    if module is not None:
        cloudpickle.register_pickle_by_value(module)


def _culprit(recipe: Recipe, error: Exception) -> tuple[str, str]:
    """The first field that cannot be pickled, and why."""
    for name in recipe.__dataclass_fields__:
        try:
            _dumps(getattr(recipe, name))
        except Exception as reason:
            return name, f"{type(reason).__name__}: {reason}"
    return "...", f"{type(error).__name__}: {error}"


def _technique(technique: str | Technique | None) -> Technique | None:
    if technique is None or isinstance(technique, Resident | Spilled):
        return technique
    named: dict[str, Technique] = {"resident": Resident(), "spilled": Spilled()}
    if technique in named:
        return named[technique]
    if technique in ("pipelined", "data_parallel"):
        raise PlanError(
            f"technique={technique!r} cannot be run yet; there are 'resident' and 'spilled'."
        )
    raise SpecError(
        f"technique is 'resident', 'spilled', shoal.Resident() or shoal.Spilled(...), got "
        f"{technique!r}."
    )


def _progress(stack: ExitStack, wanted: bool) -> list[Callback]:
    """The live table, when it is wanted."""
    if not wanted:
        return []
    from shoal.ui.dashboard import make_screen  # the one arrow up: a screen is the default

    return [stack.enter_context(make_screen())]


def _refuse_future(*, plan: object, resume: bool, fuse: object, exact: str) -> None:
    """Say no to what cannot be done yet, rather than do something else."""
    asked = {
        "plan=...": plan is not None,
        f"resume={resume!r}": resume is not False,
        f"fuse={fuse!r}": fuse not in ("auto", False) or (fuse == 0 and fuse is not False),
        f"exact={exact!r}": exact != "auto",
    }
    refused = [name for name, wanted in asked.items() if wanted]
    if refused:
        raise PlanError(f"{', '.join(refused)} cannot be done yet. Leave it out.")


def _check_host_memory(plan: Plan, budget: int | None) -> None:
    """Every trial's state lives on the host while the study runs; refuse what cannot fit."""
    needed = sum(job.host_bytes for job in plan.jobs)
    if budget is not None and needed > budget:
        largest = max(plan.jobs, key=lambda job: job.host_bytes)
        raise PlanError(
            f"{len(plan.jobs)} trials keep {format_bytes(needed)} of state on the host, of "
            f"{format_bytes(budget)} that it may use; the largest is trial {largest.trial} with "
            f"{format_bytes(largest.host_bytes)}. Run fewer trials in one study, or give "
            "host_memory= more."
        )


def _ended(began: float, finished: int, failed: int, stopped: str) -> events.StudyFinished:
    now = time.time()
    return events.StudyFinished(
        time=now, finished=finished, failed=failed, seconds=now - began, stopped=stopped
    )


def _read_identity(path: Path) -> dict[str, Any] | None:
    try:
        identity: dict[str, Any] = json.loads((path / IDENTITY).read_text())
    except (OSError, ValueError):
        return None
    return identity


def _difference(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    changed = [
        f"{key} {theirs.get(key)!r} instead of {mine[key]!r}"
        for key in mine
        if key != "digest" and theirs.get(key) != mine[key]
    ]
    return f"another study ({', '.join(changed) or 'other hyperparameters'})"
