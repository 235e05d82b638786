"""Study: a set of trials with one recipe, one search space, one objective.

What a user makes and runs; how it is run is ``shoal.launch``'s.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import shoal
from shoal.control import CloneTrial, ExtendTrials
from shoal.core.arguments import names_what_is_meant
from shoal.core.errors import SpecError
from shoal.core.event import Event, PlanningGoesOn
from shoal.core.plan import Plan
from shoal.core.spec import TrialSpec
from shoal.core.technique import Technique
from shoal.core.units import Seconds, parse_bytes, parse_seconds
from shoal.core.values import flag, optional_whole, whole
from shoal.execution.floor import Sink
from shoal.execution.run import Limits
from shoal.frames import UsersFrames
from shoal.hardware import Hardware
from shoal.kernels.kernelchoice import only_deterministic
from shoal.launch.checks import (
    check_directory,
    check_length,
    check_metric,
    check_name,
    num_evaluations,
)
from shoal.launch.following import hardware_of, require_its_plan
from shoal.launch.plan import plan_study
from shoal.launch.policy import USUAL_S, Beside, CheckpointPolicy
from shoal.launch.request import Request, settings_of
from shoal.launch.run import Run
from shoal.launch.saving import interval_of, with_interval
from shoal.launch.sinks import Callback
from shoal.launch.wishes import refuse_useless, strictly, technique_of, wish_of
from shoal.recipes.recipe import Recipe
from shoal.report import Report, TrialResult, read_report
from shoal.runtime.pool import WorkerPool
from shoal.search.wanted import Wanted, check_search
from shoal.source import given_arguments, stop_reading


@names_what_is_meant(
    **dict.fromkeys(
        ("points_to_evaluate", "enqueue", "enqueue_trial", "initial_points"), "points"
    ),
    **dict.fromkeys(("direction", "directions", "optimize", "goal"), "mode"),
    **dict.fromkeys(("metrics", "metric_name", "monitor"), "metric"),
    **dict.fromkeys(("n_trials", "num_trials", "max_trials", "num_samples"), "trials"),
    **dict.fromkeys(("config", "param_space", "search_space", "params", "hp"), "space"),
    **dict.fromkeys(("scheduler", "early_stopping"), "pruner"),
    **dict.fromkeys(("search_alg", "searcher", "algorithm"), "sampler"),
    **dict.fromkeys(("study_name", "project"), "name"),
    **dict.fromkeys(("storage", "storage_path", "local_dir", "save_dir"), "directory"),
    **dict.fromkeys(("timeout", "time_budget_s", "max_time"), "time_limit"),
    **dict.fromkeys(("n_epochs", "num_epochs", "max_epochs"), "epochs"),
    **dict.fromkeys(("n_steps", "num_steps", "max_steps"), "steps"),
    **dict.fromkeys(("val_check_interval", "eval_steps"), "eval_every"),
    **dict.fromkeys(("objective", "trainable"), "recipe"),
)
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
        points: What is tried first, as ``[{"lr": 1e-3}, ...]``: trials 0, 1, ... of ``trials``
            have these values, and the sampler draws what one leaves out, and learns of them. A
            grid does not come to them again; one that is there twice is two trials. Trials of a
            report stand for their hyperparameters: ``points=report.ranking()[:5]``.
        pruner: None, or what ends trials early at their evaluations: ``"asha"``,
            ``"hyperband"``, ``"median"`` or a pruner of Optuna's. They are PRUNED then. Or a
            ``shoal.PBT``: the worst go on there from the states of the best.
        generation: How many trials a sampler is asked for, and a pruner compares, at a time.
        eval_every: Steps between validations; default: each epoch and the end.
        seed: Trial i trains with seed + i unless the space has a ``seed``.
        directory: Where studies live; this one in ``directory/name``.
        checkpoint_every: How often a trial that trains is saved: seconds, or ``"30s"``;
            seldomer where saving would take more than 3 % of its time. 0: each step. None:
            5 minutes, or more where the disk is too slow for that; the plan says so.
        keep: Saved states of a trial that has not finished; 2 survive damage to one.
        keep_finished: What stays of a finished trial: ``"all"``, its ``"weights"``, or
            everything of the best few and nothing of the others, ``"best:3"``.
        keep_best: Save each trial when an evaluation of it is its best by ``metric``, and keep the
            last one of these beside the others, also while it trains on: ``report.at_best()``.
        disk_budget: Bytes that saved states may take, or ``"50GiB"``; None: what is free.
        retries: How often a trial that raised goes on from its last saved state.
        time_limit: Of a run from its plan on, since one that is over before a step is done would
            come no further the next time; then every trial is saved and the study can be resumed.
        trial_time_limit: Of a trial on its devices, of which it has a share where others compute
            there too or in one array with it; then it is STOPPED, and its state kept.

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
        points: Sequence[Mapping[str, Any] | TrialResult] = (),
        pruner: Any = None,
        generation: int | None = None,
        eval_every: int | None = None,
        seed: int = 0,
        directory: str | os.PathLike[str] = "runs",
        checkpoint_every: float | str | None = None,
        keep: int = 2,
        keep_finished: str = "all",
        keep_best: bool = False,
        disk_budget: int | str | None = None,
        retries: int = 0,
        time_limit: float | str | None = None,
        trial_time_limit: float | str | None = None,
    ) -> None:
        check_name(name)
        if not isinstance(recipe, Recipe):
            raise SpecError(
                f"recipe is a shoal.Recipe(model=..., data=..., loss=...), got "
                f"{type(recipe).__name__}."
            )
        epochs, steps, eval_every = check_length(epochs, steps, eval_every)
        check_metric(recipe, metric, mode)
        self.name, self.recipe, self.space = name, recipe, space
        self.epochs, self.steps, self.eval_every = epochs, steps, eval_every
        self.metric, self.mode, self.seed = metric, mode, whole("seed", seed, 0)
        self.directory = check_directory(directory) / name
        self.sampler, self.retries = sampler, whole("retries", retries, 0)
        self.time_limit_s = _seconds(time_limit)
        self.trial_time_limit_s = _seconds(trial_time_limit)
        self.policy = CheckpointPolicy(
            every_s=USUAL_S if checkpoint_every is None else parse_seconds(checkpoint_every),
            is_named=checkpoint_every is not None,
            keep=keep,
            keep_finished=keep_finished,
            keep_best=keep_best,
            disk_budget=None if disk_budget is None else parse_bytes(disk_budget),
        )
        if self.policy.keep_best and metric == "train_loss":
            raise SpecError(
                "keep_best=True goes by what evaluations find, and train_loss is the mean of the "
                "steps before. Rank by another metric, such as valid_loss, or leave keep_best out."
            )
        self.arguments = given_arguments()  # of the command line, to its file
        self.source = ""  # FILE.py:attribute, set by whoever loaded the study from a file
        self.search: Wanted = check_search(
            name=name,
            space=space,
            sampler=sampler,
            points=points,
            pruner=pruner,
            generation=generation,
            trials=optional_whole("trials", trials, 1),
            seed=self.seed,
            mode=mode,
            metric=metric,
            evaluations=num_evaluations(epochs, steps, eval_every),
        )
        self.trials: tuple[TrialSpec, ...] = self.search.first_trials()

    def plan(
        self,
        *,
        hardware: Hardware | None = None,
        technique: str | Technique | None = None,
        fuse: str | bool | int | None = None,
        exact: str = "auto",
        progress: bool = True,
        workers: WorkerPool | None = None,
    ) -> Plan:
        """Measure each distinct model on the hardware and decide; nothing is trained.

        Args:
            technique, fuse, exact: As for ``run``.
            progress: Say on standard error what takes long, and what hung or died.

        Raises:
            PlanError: a trial fits in no way, or what is forced cannot be done.
        """
        forced = technique_of(technique)
        refuse_useless(forced, self.recipe)
        given = self._hardware(hardware)
        used = given.fewer_trials(self.search.total or len(self.trials), forced)
        strict = strictly(exact, forced, fuse, self.recipe)
        with UsersFrames(), ExitStack() as stack:
            stack.enter_context(only_deterministic(strict))
            pool = _pool(workers, stack)
            stack.callback(pool.release)
            _, planned = plan_study(
                self,
                pool,
                used,
                forced,
                trials=self.trials,
                settings=settings_of(self, timeline=False),
                sink=_lines(flag("progress", progress)),
                fuse=wish_of(fuse, forced),
                idle=given.idle(used, forced),
            )
        search, known, plan = self.search, len(self.trials), planned.plan
        words = search.explain(known)
        to_come = max(0, (search.total or 0) - known)
        beside = Beside(to_come=to_come, waiting=search.num_waiting)
        plan = replace(plan, notes=(*plan.notes, self.policy.explain(plan, beside)))
        plan = with_interval(plan, interval_of(self.policy, plan, self.directory))
        return replace(plan, notes=(*plan.notes, *words))

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
        accept_recipe: bool = False,
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
            technique: Forces what the planner would choose: ``"resident"``, ``"captured"``,
                ``"spilled"``, ``"pipelined"``, ``"data_parallel"``, or a ``shoal.Resident()``,
                ``shoal.Captured()``, ``shoal.Spilled(...)``, ``shoal.Pipelined(...)``,
                ``shoal.DataParallel(...)`` that says more. A pipelined trial has a device for
                each of its stages. Its bits are those of training alone, but with
                ``schedule="2bw"``. A data-parallel one has a device for each of its replicas,
                and adds up in another order.
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
                to other bits; the change is recorded. With it ``fuse`` holds for trials under
                way too: they go on in arrays of that width, or by themselves.
            accept_recipe: Go on with the recipe as it is now, though trials trained with another
                one: after a mistake in a metric or a loss was mended. Trials that have not ended
                train on from their last state, failed ones with ``retry_failed``; those that
                ended keep what they have. Each trial's record says with which recipe it trained
                since which step; one that trained with two cannot be verified. Once on record
                the recipe stays, without this option. So does a sampler of Optuna's that was made
                with other values: trials on record keep their points.
            timeline: Record every action for ``shoal trace``.
            fuse: ``"auto"`` trains trials of one shape as arrays, as wide as was measured to
                be quickest; a number is that width; ``"off"`` is none. ``"16-compiled"`` also
                says how passes run: eager, traced, compiled or branches (each slot's own kernels).
                ``"16/4/1"``: where a pruner leaves 4 trials of a generation or fewer, they go
                on in arrays of 4, and the last one by itself. Where a sampler is asked for no
                more than 2 at a time (``generation=2``), all begin in arrays of 4.
                Trials that trained before stay what they were (see ``accept_numerics``). None:
                as was asked of the study last, and a new one not at all, since an array's
                kernels round in other ways than a trial's alone.
            plan: One that ``plan`` made, here or elsewhere (``shoal.Plan.from_json``), to be
                followed: on its devices, each trial as there. What was chosen then is measured
                again, and nothing else. Trials that have begun go on as they are; those that a
                search asks for later train like the others. Without ``hardware`` the devices
                have the memory that they had.
            exact: ``"strict"`` trains with deterministic kernels alone, as
                ``torch.use_deterministic_algorithms(True)`` would, and refuses a model with an
                operation that has none; arrays and all else that trains to other bits than
                training alone are refused. A study that began so goes on so, but with
                ``accept_numerics``. ``"auto"``: with the kernels that this process has chosen.

        Raises:
            SpecError, PlanError: before anything is trained.
            StorageError: the disk is full or failing; says what is intact.
            TrialError: the first trials failed in the same way.
            SystemExit: code 75, on Ctrl-C and SIGTERM, when all trials are saved; at a prompt
                and in a notebook Ctrl-C raises KeyboardInterrupt instead.
        """
        if stop_reading(self):
            return read_report(self.directory, recipe=self.recipe)
        if plan is not None:
            require_its_plan(self, plan, {"technique=": technique, "fuse=": fuse})
            hardware = hardware_of(plan, None if hardware is None else self._hardware(hardware))
        forced = technique_of(technique)
        refuse_useless(forced, self.recipe)
        strict = strictly(exact, forced, fuse, self.recipe)
        with UsersFrames(), ExitStack() as stack:
            pool = _pool(workers, stack)
            request = Request(
                hardware=self._hardware(hardware),
                plan=plan,
                strict=strict,
                technique=forced,
                callbacks=callbacks,
                overwrite=overwrite,
                resume=resume,
                extend=extend,
                clones=clones,
                retry_failed=retry_failed,
                accept_numerics=accept_numerics,
                accept_recipe=accept_recipe,
                timeline=timeline,
                fuse=wish_of(fuse, forced),
                versions={"shoal": shoal.__version__},
            )
            shown = _progress(stack, flag("progress", progress))
            request = replace(request, callbacks=(*request.callbacks, *shown))
            self.source = self.source or _script_source(self)
            Run(self, request, pool).run()
        return read_report(self.directory, recipe=self.recipe)

    def report(self) -> Report:
        """The report of the last run, read from the study's directory."""
        return read_report(self.directory, recipe=self.recipe)

    def _hardware(self, hardware: Hardware | None) -> Hardware:
        chosen = Hardware.detect() if hardware is None else hardware
        if not isinstance(chosen, Hardware):
            raise SpecError(
                f"hardware is a shoal.Hardware, got {type(chosen).__name__}. Write "
                "shoal.Hardware.detect(), or shoal.Hardware.virtual(devices=2, memory='2GiB')."
            )
        return chosen.with_host_limit()

    def limits(self) -> Limits:
        """When a run of this study gives up."""
        return Limits(
            retries=self.retries,
            time_limit_s=self.time_limit_s,
            trial_time_limit_s=self.trial_time_limit_s,
        )


def _pool(workers: WorkerPool | None, stack: ExitStack) -> WorkerPool:
    """The workers that were given, or some of the run's own."""
    if workers is not None and not isinstance(workers, WorkerPool):
        raise SpecError(
            f"workers is a pool of warm workers or None, got {workers!r}. How many there are, the "
            "hardware says: hardware=shoal.Hardware.virtual(devices=2)."
        )
    return workers or stack.enter_context(WorkerPool())


def open(path: str | os.PathLike[str], recipe: Recipe | None = None) -> Report:
    """The report of a study directory, without running anything."""
    return read_report(path, recipe=recipe)


def _script_source(study: Study) -> str:
    """FILE.py:attribute of a study that the script being run defines, else nothing."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)  # of standard input one that is none
    there = file is not None and Path(str(file)).is_file()
    names = [name for name, value in vars(main).items() if value is study] if there else []
    return f"{Path(str(file)).resolve()}:{names[0]}" if names else ""


def _lines(wanted: bool) -> Sink:
    """Lines on standard error, when they are wanted."""
    if not wanted:
        return lambda happened: None
    from shoal.ui.lines import PlainLines  # an arrow up, as below

    lines = PlainLines(sys.stderr)

    def tell(happened: Sequence[Event]) -> None:
        for event in happened:
            if not isinstance(event, PlanningGoesOn):  # whoever asks for a plan knows
                lines(event)

    return tell


def _progress(stack: ExitStack, wanted: bool) -> list[Callback]:
    """The live table, when it is wanted."""
    if not wanted:
        return []
    from shoal.ui.dashboard import Screen, make_screen  # the one arrow up: a screen is the default
    from shoal.ui.notebook import NotebookTable, in_notebook

    screen: Screen = NotebookTable() if in_notebook() else make_screen()
    return [stack.enter_context(screen)]


def _seconds(limit: float | str | None) -> Seconds | None:
    return None if limit is None else parse_seconds(limit)
