"""The plan of a study, made on its workers and held against the host's memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from shoal.core.errors import PlanError
from shoal.core.plan import OWN_DIRECTORY, Job, Plan
from shoal.core.spec import NO_BYTES, DeviceSpec, Place, Scalar, TrialSpec
from shoal.core.technique import Spilled, Technique
from shoal.core.units import Bytes, counted, format_bytes, format_enough, list_some
from shoal.execution.firstplan import FirstPlan
from shoal.execution.floor import Sink
from shoal.execution.rungs import check_moments, check_population, check_rungs, check_validated
from shoal.execution.trial import total_steps
from shoal.hardware import Hardware, free_memory, is_in_memory
from shoal.kernels.kernelchoice import KernelChoice
from shoal.launch.checks import doubt_of_mode
from shoal.launch.duration import foretold_s
from shoal.launch.following import NO_PINS, Pins, require_followed
from shoal.launch.notcarried import refuse_what_stays
from shoal.launch.packing import pack_recipe
from shoal.launch.policy import generation_bytes
from shoal.launch.replaced import find_changes
from shoal.launch.request import Asked
from shoal.launch.searching import plan_known_first
from shoal.pipeline.stops import Stops
from shoal.planning import (
    Fusing,
    HomeRoom,
    Planned,
    Planner,
    Times,
    Wish,
    changes_of,
    early,
    with_homes_in_files,
    with_seconds,
    with_split_masters,
)
from shoal.runtime.pool import WorkerPool
from shoal.runtime.wire.messages import Settings
from shoal.search.rules import ETA
from shoal.storage.files import free_bytes

NOTHING: Mapping[int, Mapping[str, Scalar]] = {}


def plan_study(
    study: Asked,
    pool: WorkerPool,
    hardware: Hardware,
    technique: Technique | None,
    *,
    trials: Sequence[TrialSpec],
    settings: Settings,
    sink: Sink,
    before: Mapping[int, Mapping[str, Scalar]] = NOTHING,
    place: Place | None = None,
    fuse: Wish = None,
    fused: Wish = None,
    recorded: Mapping[int, Mapping[str, Scalar]] = NOTHING,
    steps: Mapping[int, int] = MappingProxyType({}),
    reseats: bool = False,
    idle: Sequence[DeviceSpec] = (),
    pins: Pins = NO_PINS,
    new: Collection[int] = (),
    built: Sequence[TrialSpec] = (),
    packed: bytes | None = None,
) -> tuple[Planner, Planned]:
    """Measure and decide; the pool is configured for the study afterwards.

    Args:
        before: The numerics keys of trials that go on.
        place: Where the optimizer steps, as is on record.
        fuse: How wide arrays are to be.
        fused: The same as it was asked for before; it holds where nothing else is asked for.
        recorded: The numerics keys of all trials that were planned before.
        steps: Where trials that were planned before go on.
        reseats: Whether ``fuse`` holds for those under way too, though their bits change.
        idle: Devices beside the hardware's, for a trial that is a pipeline over them too.
        pins: How a plan that is followed has trials train.
        new: Trials of a search that nobody planned before; they fail alone.
        built: A trial that was planned in an earlier run, if there was one.
        packed: The recipe for workers, if it is there already.

    Raises:
        PlanError: a trial fits in no way, or not as it was planned, what is forced cannot be
            done, a pruner has no known moments to prune at, or the trials of a population differ
            in shape.
        SpecError, TrialError, WorkerError: no trial can be built at all, or something holds here
            that workers would train without.
    """
    early(technique, study.recipe, hardware.devices)
    refuse_what_stays()
    served = packed or packed_recipe(study), settings, KernelChoice.here()
    pool.configure(hardware.devices, *served)
    hardware, idle = without_libraries(hardware, idle, pool.library_bytes())
    times = _times_of(study, settings)
    fusing = Fusing(
        fuse,
        hardware.devices,
        {**pins.keys, **recorded},
        times,
        before,
        steps,
        on_record=fused,
        reseats=reseats,
    )
    recipe, varied = study.recipe, study.search.varied
    if varied:  # who goes on from another's state would need its versions too
        recipe = replace(recipe, stale=None)
    planner = Planner(
        study.name,
        pool,
        hardware.devices,
        recipe,
        technique,
        place,
        steps=settings.steps,
        stops=stops_of(settings),
        fusing=fusing,
        idle=idle,
        host_memory=hardware.host_memory,
        keys={**recorded, **before},
        total=times.total,
        pins=pins.techniques,
        varied=study.search.varied_space if varied else None,
        home_room=HomeRoom(
            hardware.host_memory if hardware.spill_dir is None else None,
            free=free_memory(),
            each_alone=not study.search.is_plain,
        ),
    )
    limits = study.limits()
    planner.in_files = asks_for_files(technique, pins)
    first, alone = (
        FirstPlan(who, pool, limits.watchdog, slow_s=limits.slow_s, sink=sink)
        for who in (planner, planner.forced(technique, 1.0))
    )

    def make(some: Sequence[TrialSpec]) -> Planned:
        found = first.make(some)
        if study.search.pruner is not None:
            check_moments(found, settings)
        return found

    planned = plan_known_first(
        make,
        trials,
        new if built else (),
        try_built=lambda: alone.make(built),
    )
    require_followed(pins, planned.plan, recorded.keys() | before.keys())
    if more := planned.plan.devices[len(hardware.devices) :]:
        pool.warm(len(planned.plan.devices))
        pool.configure(more, *served)
    planned = _checked(planned, study, settings, begun=bool(recorded))
    planned = _fitted(planner, planned, study, hardware)
    there = {*recorded, *(trial.number for trial in trials)}
    seconds = foretold_s(planned, settings, study.search, steps, len(there))
    return planner, replace(planned, plan=with_seconds(planned.plan, seconds))


def packed_recipe(study: Asked) -> bytes:
    """The recipe for workers, with what files have put into modules, and these hold.

    Raises:
        SpecError: something of it cannot travel.
    """
    return pack_recipe(study.recipe, find_changes())


def _times_of(study: Asked, settings: Settings) -> Times:
    """When trials of the study are evaluated, stop, and may be pruned or changed."""
    search = study.search
    return Times(
        total=lambda batches, each: total_steps(settings, batches, each),
        eval_every=settings.eval_every,
        by_epochs=settings.epochs is not None,
        eta=ETA if search.halves else None,
        prunes=search.pruner is not None and not search.varied,
        generation=search.generation,
        at_once=search.num_waiting or None,  # whatever the number of trials: that may grow
        changes=changes_of(search.varied_space) if search.varied else None,
    )


def _checked(planned: Planned, study: Asked, settings: Settings, *, begun: bool) -> Planned:
    """A plan that can tell what the search reads, with a warning where that may be mistaken.

    Raises:
        PlanError: nothing measures the metric, or a pruner or population has no known moments.
    """
    search = study.search
    planned = check_validated(planned, study.metric, searches=not search.is_plain, begun=begun)
    if doubt := doubt_of_mode(study.metric, study.mode):
        warnings = (*planned.plan.warnings, doubt)
        planned = replace(planned, plan=replace(planned.plan, warnings=warnings))
    if search.pruner is not None:
        check_rungs(planned, settings)
    if search.varied:
        check_population(planned, settings)
    return planned


def _fitted(planner: Planner, planned: Planned, study: Asked, hardware: Hardware) -> Planned:
    """A plan whose trials' states the host has room for, or the disk.

    Raises:
        PlanError: neither has.
    """
    budget, may_wait = hardware.host_memory, not study.search.is_plain
    planned = with_less_on_host(planner, planned, budget, may_wait=may_wait)
    planned = with_less_in_memory(planner, planned, hardware, study.directory)
    planned = with_fewer_at_once(planned, budget)
    check_host_memory(planned.plan, budget, may_wait=may_wait)
    return planned


def without_libraries(
    hardware: Hardware, idle: Sequence[DeviceSpec], found: Mapping[str, Bytes]
) -> tuple[Hardware, tuple[DeviceSpec, ...]]:
    """The devices, those that are idle apart, with what libraries were ``found`` to keep of each.

    Of a GPU that nobody has opened they are taken to keep as much as of any other.
    """
    most = max(found.values(), default=NO_BYTES)

    def known(device: DeviceSpec) -> DeviceSpec:
        if device.kind != "cuda":
            return device
        return replace(device, library_bytes=found.get(device.name, most))

    devices = tuple(map(known, hardware.devices))
    return replace(hardware, devices=devices), tuple(map(known, idle))


def stops_of(settings: Settings) -> Stops:
    """Where the trials of a study stop."""
    return Stops(
        steps=settings.steps,
        epochs=settings.epochs,
        eval_every=settings.eval_every,
        each_step=not settings.checkpoint_every_s,
    )


def with_less_on_host(
    planner: Planner, planned: Planned, budget: int | None, *, may_wait: bool = False
) -> Planned:
    """Where the trials' state is too large for the host, with what makes it smaller.

    That is the float32 of weights that travel as bfloat16, in two parts; what the planner plans
    later has it so too. Where trials ``may_wait`` for room, only if more of them fit then.
    """
    plan = planned.plan
    crowd = _crowd(plan)
    needed = _host_bytes(plan.jobs, crowd)
    if budget is None or needed <= budget:
        return planned
    smaller = with_split_masters(planned, "").plan.jobs
    least = _host_bytes(smaller, crowd)
    fits_as_many = _fitting(smaller, crowd, budget) <= _fitting(plan.jobs, crowd, budget)
    if least == needed or (may_wait and fits_as_many):
        return planned
    planner.why_split = (
        "the host keeps the float32 of weights that travel as bfloat16 as that and what it lacks, "
        f"with the same bits: whole, the study's state would take {format_bytes(needed)} there, "
        f"which may use {format_bytes(budget)}, and so it takes {format_bytes(least)}"
    )
    return with_split_masters(planned, planner.why_split)


def asks_for_files(technique: Technique | None, pins: Pins) -> bool:
    """Whether trials are to be at home in files, wherever else there is room."""
    asked = isinstance(technique, Spilled) and technique.offload == "disk"
    return asked or any(job.disk_bytes for job in pins.jobs.values())


def with_less_in_memory(
    planner: Planner, planned: Planned, hardware: Hardware, directory: Path
) -> Planned:
    """With the trials' homes in files, where that is asked for, or the host has no room for them.

    They are in the hardware's ``spill_dir``, or in the study's ``directory`` if it has none.

    Raises:
        PlanError: the disk has no room either, or is memory.
    """
    budget, plan = hardware.host_memory, planned.plan
    needed = _host_bytes(plan.jobs, _crowd(replace(plan, active=1)))
    why = "as it was asked for"
    if not planner.in_files:
        if budget is None or needed <= budget or hardware.spill_dir is None:
            return planned
        planner.in_files = True
        planned = with_homes_in_files(planned)
        why = (
            f"in the host's memory the study would take {format_bytes(needed)}, of "
            f"{format_bytes(budget)} that it may use"
        )
    planned = replace(
        planned, plan=replace(planned.plan, spill_dir=hardware.spill_dir or OWN_DIRECTORY)
    )
    place = spill_place(planned.plan, directory)
    total = check_disk(planned.plan, directory)
    note = f"  in files in {place}: the trials' states, {format_bytes(total)}; {why}"
    notes = (*planned.plan.notes, note)
    return replace(planned, plan=replace(planned.plan, notes=notes))


def spill_place(plan: Plan, directory: Path) -> Path:
    """Where the homes of a plan's trials are files; ``directory`` is the study's."""
    return directory if plan.spill_dir == OWN_DIRECTORY else Path(plan.spill_dir)


def check_disk(plan: Plan, directory: Path) -> Bytes:
    """What files the trials' homes take, if they are files.

    Raises:
        PlanError: the disk has no room for them, or is memory.
    """
    total = Bytes(sum(job.disk_bytes for job in plan.jobs))
    if not total:
        return total
    place, trials = spill_place(plan, directory), len(plan.jobs)
    while not place.is_dir():  # it is only planned
        place = place.parent
    if is_in_memory(place):
        raise PlanError(
            f"the trials' states are to be in files in {place}, which is in memory (a tmpfs). "
            "Name a directory on a disk: spill_dir=, --spill-dir."
        )
    free = free_bytes(place)
    if total > free:
        raise PlanError(
            f"the states of {counted(trials, 'trial')} take {format_bytes(total)} in files in "
            f"{place}, where {format_bytes(free)} are free. Free some, train fewer trials in one "
            "study, or name another directory: spill_dir=, --spill-dir."
        )
    return total


def with_fewer_at_once(planned: Planned, budget: int | None) -> Planned:
    """Where all trials fit the host only if fewer of them share a device."""
    plan = planned.plan
    if budget is None:
        return planned

    def needed(active: int) -> int:
        return _host_bytes(plan.jobs, _crowd(replace(plan, active=active)))

    fitting = (active for active in range(plan.active, 0, -1) if needed(active) <= budget)
    active = next(fitting, plan.active)
    if active == plan.active:
        return planned
    note = (
        f"up to {active} and not {plan.active} trials share a device: with what waits on the host "
        f"for those that train, {plan.active} at a time would take "
        f"{format_bytes(needed(plan.active))} there, which may use "
        f"{format_bytes(budget)}"
    )
    return replace(planned, plan=replace(plan, active=active, notes=(*plan.notes, note)))


def _fitting(jobs: Sequence[Job], crowd: _Crowd, budget: int) -> int:
    """How many of these trials may be on the host at a time, the smallest first."""
    ordered = sorted(jobs, key=lambda job: (job.host_bytes, job.trial))
    counts = range(len(ordered), 0, -1)
    return next((n for n in counts if _host_bytes(ordered[:n], crowd) <= budget), 0)


def check_host_memory(plan: Plan, budget: int | None, *, may_wait: bool = False) -> None:
    """Every trial's state lives on the host while the study runs; refuse what cannot fit.

    Where trials of a search ``may_wait`` for room, one that fits is enough.

    Raises:
        PlanError: more is needed than ``budget`` bytes; None is any number.
    """
    crowd = _crowd(plan)
    needed = _host_bytes(plan.jobs, crowd)
    smallest = sorted(plan.jobs, key=lambda job: (job.host_bytes, job.trial))
    if budget is None or needed <= budget:
        return
    if may_wait and _host_bytes(smallest[:1], crowd) <= budget:
        return
    fitting = _fitting(plan.jobs, crowd, budget)
    some = sorted(job.trial for job in smallest[:fitting])
    largest, least = smallest[-1], _host_bytes(smallest[:1], crowd)
    fits = f"Together fit trials {list_some(some)}. "
    if len(some) == 1:
        fits = f"Only one fits at a time, trial {some[0]} for example. "
    if not some:
        fits = f"Not even the smallest fits, which needs {format_enough(least)} with its copy. "
    where = "" if plan.spill_dir else ", or spill_dir= (--spill-dir), a directory on a disk"
    raise PlanError(
        f"{counted(len(plan.jobs), 'trial needs', 'trials need')} {format_enough(needed)} on the "
        f"host, of {format_bytes(budget)} that it may use: {_told(_parts(plan.jobs, crowd))}; "
        f"the largest is trial {largest.trial} with {format_bytes(largest.host_bytes)}. "
        f"{fits}Run fewer trials in one study, or give host_memory= more{where}."
    )


def fits_host(jobs: Sequence[Job], plan: Plan, budget: int | None) -> bool:
    """Whether the states of ``jobs`` may be on the host at a time, where ``plan`` runs."""
    return budget is None or _host_bytes(jobs, _crowd(plan)) <= budget


@dataclass(frozen=True, slots=True)
class _Crowd:
    """How many trials train at a time, and of how many there is a copy that is being written.

    A worker has one at a time; an array's trials are written without
    (``runtime/saving/saver.py``).
    """

    trains: int
    copied: int


def _crowd(plan: Plan) -> _Crowd:
    return _Crowd(len(plan.devices) * plan.active, len(plan.devices))


@dataclass(frozen=True, slots=True)
class _Parts:
    """What trials need on the host: states, copies for checkpoints of so many, and what waits."""

    states: Bytes
    copies: Bytes
    copied: int
    waits: Bytes


def _parts(jobs: Sequence[Job], crowd: _Crowd) -> _Parts:
    """Of the largest, where not all of them are written, or train, at a time."""
    in_memory = (generation_bytes(job) for job in jobs if not job.disk_bytes)
    copies = sorted(in_memory, reverse=True)[: crowd.copied]
    waits = sorted((job.waiting_bytes for job in jobs), reverse=True)[: crowd.trains]
    states = sum(job.host_bytes - job.waiting_bytes for job in jobs)
    return _Parts(Bytes(states), Bytes(sum(copies)), len(copies), Bytes(sum(waits)))


def _host_bytes(jobs: Sequence[Job], crowd: _Crowd) -> Bytes:
    """The trials' states, copies of the largest that are being written, and what waits."""
    parts = _parts(jobs, crowd)
    return Bytes(parts.states + parts.copies + parts.waits)


def _told(parts: _Parts) -> str:
    copies = "a copy of one trial's while it is written as a checkpoint"
    if parts.copied > 1:
        copies = f"copies of {parts.copied} trials' while they are written as checkpoints"
    words = f"{format_bytes(parts.states)} of state and {format_bytes(parts.copies)} for {copies}"
    return words + f", {format_bytes(parts.waits)} wait there in a step" * bool(parts.waits)
