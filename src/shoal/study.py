"""Study: a set of trials with one recipe, one search space, one objective.

What a user makes and runs; how it is run is ``shoal.launch``'s.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import shoal
from shoal.control import CloneTrial, ExtendTrials
from shoal.core.errors import PlanError, SpecError
from shoal.core.event import Event
from shoal.core.plan import Plan
from shoal.core.spec import TrialSpec
from shoal.core.technique import DataParallel, Pipelined, Resident, Spilled, Technique
from shoal.core.units import parse_bytes, parse_seconds
from shoal.execution.floor import Sink
from shoal.execution.run import Limits
from shoal.hardware import Hardware
from shoal.launch.plan import plan_study
from shoal.launch.policy import CheckpointPolicy
from shoal.launch.request import Request, settings_of
from shoal.launch.run import Run
from shoal.launch.sinks import Callback
from shoal.planner.width import MOST
from shoal.planning import Wish, width_wished
from shoal.recipe import Recipe
from shoal.report import Report, read_report
from shoal.runtime.pool import WorkerPool
from shoal.search.wanted import Wanted, check_search

_NAME = re.compile(r"[a-z0-9._-]{1,64}")


class Study:
    """Trials of one recipe over a search space; the object a user makes and runs.

    Args:
        name: Names the study's directory: 1 to 64 of ``a-z 0-9 . _ -``.
        recipe: What every trial builds, reads and minimises.
        space: Name -> distribution or constant, or ``shoal.grid(...)``.
        trials: How many; default: all points of a finite space.
        epochs, steps: How long a trial trains; exactly one of the two.
        metric, mode: What the leaderboard is sorted by: ``"min"`` or ``"max"``.
        sampler: None for grid where the space is finite, else random; ``"grid"``, ``"random"``,
            ``"tpe"`` or a sampler of Optuna's with a seed (the extra ``search``).
        pruner: None, or what ends trials early at their evaluations: ``"asha"``,
            ``"hyperband"``, ``"median"`` or a pruner of Optuna's. They are PRUNED then. Or a
            ``shoal.PBT``: the worst go on there from the states of the best.
        generation: How many trials a sampler is asked for, and a pruner compares, at a time.
        eval_every: Steps between validations; default: each epoch and the end.
        seed: Trial i trains with seed + i unless the space has a ``seed``.
        directory: Where studies live; this one in ``directory/name``.
        checkpoint_every: How often a trial that trains is saved: seconds, or ``"5min"``;
            seldomer where saving would take more than 3 % of its time. 0: each step.
        keep: Saved states of a trial that has not finished; 2 survive damage to one.
        keep_finished: What stays of a finished trial: ``"all"``, its ``"weights"``, or
            everything of the best few and nothing of the others, ``"best:3"``.
        disk_budget: Bytes that saved states may take, or ``"50GiB"``; None: what is free.
        retries: How often a trial that raised goes on from its last saved state.
        time_limit: Of a run; then every trial is saved and the study can be resumed.
        trial_time_limit: Of a trial on its devices; then it is STOPPED, and its state kept.

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
        generation: int | None = None,
        eval_every: int | None = None,
        seed: int = 0,
        directory: str | os.PathLike[str] = "runs",
        checkpoint_every: float | str = "5min",
        keep: int = 2,
        keep_finished: str = "all",
        disk_budget: int | str | None = None,
        retries: int = 0,
        time_limit: float | str | None = None,
        trial_time_limit: float | str | None = None,
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
        known = {"train_loss", "valid_loss", *(f"valid_{name}" for name in recipe.metrics)}
        its_own = recipe.step is not None and metric.startswith(("train_", "valid_"))
        if metric not in known and not its_own:  # a step names its losses when it runs
            raise SpecError(
                f"metric={metric!r} is not measured by this recipe; it has "
                f"{', '.join(sorted(known))}. Add it to Recipe(metrics=...)."
            )
        self.name, self.recipe, self.space = name, recipe, space
        self.epochs, self.steps, self.eval_every = epochs, steps, eval_every
        self.metric, self.mode, self.seed = metric, mode, seed
        self.directory = Path(directory) / name
        self.sampler, self.retries = sampler, retries
        if type(retries) is not int or retries < 0:
            raise SpecError(f"retries is a whole number from 0, got {retries!r}")
        self.policy = CheckpointPolicy(
            every_s=parse_seconds(checkpoint_every),
            keep=keep,
            keep_finished=keep_finished,
            disk_budget=None if disk_budget is None else parse_bytes(disk_budget),
        )
        self.time_limit_s = None if time_limit is None else parse_seconds(time_limit)
        self.trial_time_limit_s = (
            None if trial_time_limit is None else parse_seconds(trial_time_limit)
        )
        self.source = ""  # FILE.py:attribute, set by whoever loaded the study from a file
        self.search: Wanted = check_search(
            name=name,
            space=space,
            sampler=sampler,
            pruner=pruner,
            generation=generation,
            trials=trials,
            seed=seed,
            mode=mode,
            metric=metric,
            evaluations=_evaluations(epochs, steps, eval_every),
        )
        self.trials: tuple[TrialSpec, ...] = self.search.first_trials()

    def plan(
        self,
        *,
        hardware: Hardware | None = None,
        technique: str | Technique | None = None,
        fuse: str | bool | int | None = None,
        progress: bool = True,
        workers: WorkerPool | None = None,
    ) -> Plan:
        """Measure each distinct model on the hardware and decide; nothing is trained.

        Args:
            technique, fuse: As for ``run``.
            progress: Say on standard error what takes long, and what hung or died.

        Raises:
            PlanError: a trial fits in no way, or what is forced cannot be done.
        """
        forced = _technique(technique)
        given = self._hardware(hardware)
        used = given.fewer_trials(self.search.trials or len(self.trials), forced)
        with ExitStack() as stack:
            pool = workers or stack.enter_context(WorkerPool())
            stack.callback(pool.release)
            _, planned = plan_study(
                self,
                pool,
                used,
                forced,
                trials=self.trials,
                settings=settings_of(self, timeline=False),
                sink=_lines(progress),
                fuse=_fuse(fuse, technique),
                idle=given.idle(used, forced),
            )
        words = self.search.explain(len(self.trials))
        return replace(
            planned.plan, notes=(*planned.plan.notes, self.policy.explain(planned.plan), *words)
        )

    def run(
        self,
        *,
        hardware: Hardware | None = None,
        technique: str | Technique | None = None,
        callbacks: Sequence[Callback] = (),
        progress: bool = True,
        workers: WorkerPool | None = None,
        overwrite: bool = False,
        resume: bool | None = None,
        extend: int | ExtendTrials = 0,
        clones: Sequence[CloneTrial] = (),
        retry_failed: bool = False,
        accept_numerics: bool = False,
        timeline: bool = True,
        plan: Plan | None = None,
        fuse: str | bool | int | None = None,
        exact: str = "auto",
    ) -> Report:
        """Train all trials; returns the report, which can be read again from the directory.

        A study that was interrupted goes on where it was, to the same bits. One whose
        space, trials or length grew trains what is new.

        Args:
            hardware: Default: the GPUs there are, else one virtual device per core.
            technique: Forces what the planner would choose: ``"resident"``, ``"spilled"``,
                ``"pipelined"``, ``"data_parallel"``, or a ``shoal.Resident()``,
                ``shoal.Spilled(...)``, ``shoal.Pipelined(...)``, ``shoal.DataParallel(...)`` that
                says more. A pipelined trial has a device for each of its stages. Its bits are
                those of training alone, but with ``schedule="2bw"``. A data-parallel one has a
                device for each of its replicas, and adds up in another order.
            callbacks: Called in this process with every event, in order. One that raises
                is warned about and not called again.
            progress: Show a live table, or plain lines when not on a terminal.
            workers: A pool of warm workers to use and leave running.
            overwrite: Delete what an earlier run of this study left.
            resume: True: there must be an earlier run to go on with; False: there must be
                none; None: either.
            extend: Train so many more trials of the space than ``trials``. Asked for once
                more before they have ended, it goes on with them.
            clones: Trials to add that are like others with some hyperparameters changed.
            retry_failed: Train FAILED trials again, from their last saved state.
            accept_numerics: Go on though the software or the devices are others than before,
                to other bits; the change is recorded.
            timeline: Record every action for ``shoal trace``.
            fuse: ``"auto"`` trains trials of one shape as arrays, as wide as was measured to
                be quickest; a number is that width; False is none. ``"16 compiled"`` also says
                how passes run: eager, traced or compiled. Trials that trained before stay what
                they were. None: as the study did before, and a new one not at all,
                since an array's kernels round in other ways than a trial's alone.
            plan, exact: Only None and ``"auto"``: following a plan made before and the strict
                mode are refused until they are there.

        Raises:
            SpecError, PlanError: before anything is trained.
            StorageError: the disk is full or failing; says what is intact.
            TrialError: the first trials failed in the same way.
            SystemExit: code 75, on Ctrl-C and SIGTERM, when all trials are saved; at a prompt
                and in a notebook Ctrl-C raises KeyboardInterrupt instead.
        """
        _refuse_future(plan=plan, exact=exact)
        with ExitStack() as stack:
            pool = workers or stack.enter_context(WorkerPool())
            request = Request(
                hardware=self._hardware(hardware),
                technique=_technique(technique),
                callbacks=[*callbacks, *_progress(stack, progress)],
                overwrite=overwrite,
                resume=resume,
                extend=extend,
                clones=clones,
                retry_failed=retry_failed,
                accept_numerics=accept_numerics,
                timeline=timeline,
                fuse=_fuse(fuse, technique),
                versions={"shoal": shoal.__version__},
            )
            self.source = self.source or _script_source(self)
            Run(self, request, pool).run()
        return read_report(self.directory, recipe=self.recipe)

    def report(self) -> Report:
        """The report of the last run, read from the study's directory."""
        return read_report(self.directory, recipe=self.recipe)

    def _hardware(self, hardware: Hardware | None) -> Hardware:
        chosen = hardware or Hardware.detect()
        if not isinstance(chosen, Hardware):
            raise SpecError(f"hardware is a shoal.Hardware, got {type(chosen).__name__}")
        return chosen

    def limits(self) -> Limits:
        """When a run of this study gives up."""
        return Limits(
            retries=self.retries,
            time_limit_s=self.time_limit_s,
            trial_time_limit_s=self.trial_time_limit_s,
        )


def open(path: str | os.PathLike[str], recipe: Recipe | None = None) -> Report:
    """The report of a study directory, without running anything."""
    return read_report(path, recipe=recipe)


def _evaluations(epochs: int | None, steps: int | None, eval_every: int | None) -> int | None:
    """How often a trial is evaluated, where that follows from its length alone."""
    if eval_every is None:
        return epochs
    return None if steps is None else -(-steps // eval_every)


def _script_source(study: Study) -> str:
    """FILE.py:attribute of a study that the script being run defines, else nothing."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    names = [name for name, value in vars(main).items() if value is study] if file else []
    return f"{Path(str(file)).resolve()}:{names[0]}" if names else ""


def _technique(technique: str | Technique | None) -> Technique | None:
    if technique is None or isinstance(technique, Technique):
        return technique
    named: dict[object, Technique] = {
        "resident": Resident(),
        "spilled": Spilled(),
        "pipelined": Pipelined(),
        "data_parallel": DataParallel(),
    }
    if isinstance(technique, str) and technique in named:
        return named[technique]
    raise SpecError(
        f"technique is 'resident', 'spilled', 'pipelined', 'data_parallel', shoal.Resident(), "
        f"shoal.Spilled(...), shoal.Pipelined(...) or shoal.DataParallel(...), got {technique!r}."
    )


def _lines(wanted: bool) -> Sink:
    """Lines on standard error, when they are wanted."""
    if not wanted:
        return lambda happened: None
    from shoal.ui.dashboard import PlainLines  # an arrow up, as below

    lines = PlainLines(sys.stderr)

    def tell(happened: Sequence[Event]) -> None:
        for event in happened:
            lines(event)

    return tell


def _progress(stack: ExitStack, wanted: bool) -> list[Callback]:
    """The live table, when it is wanted."""
    if not wanted:
        return []
    from shoal.ui.dashboard import make_screen  # the one arrow up: a screen is the default
    from shoal.ui.notebook import NotebookTable, in_notebook

    return [stack.enter_context(NotebookTable() if in_notebook() else make_screen())]


def _fuse(fuse: str | bool | int | None, technique: object) -> Wish:
    """What is asked for, as the planner has it."""
    if fuse is None or fuse == "auto":
        return fuse
    if fuse is False:
        return 0
    try:
        width, _ = width_wished(fuse) or (0, None)
    except (SpecError, AttributeError):
        width = 0
    if isinstance(fuse, bool) or not 1 <= width <= MOST:
        raise SpecError(
            f"fuse is 'auto', False, or the width of arrays from 1 to {MOST}, which may say how "
            f"passes run ('16 compiled'), got {fuse!r}."
        )
    if width > 1 and (technique == "spilled" or isinstance(technique, Spilled)):
        raise PlanError(
            f"fuse={fuse} with a spilled technique: what trains as an array stays on the device. "
            "Leave one of them out."
        )
    if width > 1 and (technique == "pipelined" or isinstance(technique, Pipelined)):
        raise PlanError(
            f"fuse={fuse} with a pipeline: what trains as an array has one device. Leave one of "
            "them out."
        )
    if width > 1 and (technique == "data_parallel" or isinstance(technique, DataParallel)):
        raise PlanError(
            f"fuse={fuse} with a data-parallel technique: what trains as an array has one device. "
            "Leave one of them out."
        )
    return fuse


def _refuse_future(*, plan: object, exact: str) -> None:
    """Say no to what cannot be done yet, rather than do something else."""
    asked = {
        "plan=...": plan is not None,
        f"exact={exact!r}": exact != "auto",
    }
    refused = [name for name, wanted in asked.items() if wanted]
    if refused:
        raise PlanError(f"{', '.join(refused)} cannot be done yet. Leave it out.")
