"""The planner: trials in, a plan out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from shoal.core.errors import PlanError, TooLarge, last_words
from shoal.core.plan import Plan
from shoal.core.spec import DeviceSpec, Place, Scalar, TrialSpec
from shoal.core.technique import Technique, asks_by_shard
from shoal.core.units import Seconds
from shoal.fusion.matching.lengths import told_of_lengths
from shoal.fusion.matching.match import told_of
from shoal.pipeline.stops import Stops
from shoal.planning.asking import Asking, Receive
from shoal.planning.bases import with_frozen
from shoal.planning.capturing import Total
from shoal.planning.deciding import Deciding
from shoal.planning.fusing import Fusing
from shoal.planning.homes import ANY_ROOM, HomeRoom
from shoal.planning.paced import Length, length_of, pace_warnings, too_short
from shoal.planning.pipelining import Question, early
from shoal.planning.planned import Planned, Settled, with_homes_in_files, with_split_masters
from shoal.planning.populated import Space, check_members, check_unfreezing, check_ways
from shoal.planning.sharing import Shared
from shoal.planning.staleness import ALIKE, OPEN, Staleness, Way
from shoal.planning.warned import (
    global_warnings,
    lost_warnings,
    mixed_warnings,
    set_by_factories,
    unread_warnings,
    why_unfused,
)
from shoal.recipes.recipe import Recipe
from shoal.runtime.pool import Worker, WorkerPool
from shoal.runtime.wire.messages import Described, Noticed, Order


class Planner:
    """Asks the workers, decides, and collects the plan of one study.

    Args:
        technique: Forced, or None to choose.
        place: Where trials that go on stepped before; they step there again.
        growth: Batches take so many times what the first one takes.
        steps: Of a trial; None where it ends after epochs.
        stops: Where trials stop, if that is known.
        fusing: Which trials train as arrays; None: none.
        idle: Devices beside these, which no trial of the first plan would have: a trial may be
            a pipeline over them, if nothing else is asked for. Then they are the plan's too.
        keys: The numerics keys of all trials that were planned before.
        total: Steps of a trial, of the batches of an epoch and those of a step.
        pins: As what trials are to train, by number; the others: as ``technique``, or chosen.
        home_room: What a trial may have of the host that is not at home in a file.
        varied: What changes while the trials train, which are a population; None: they are none.

    Attributes:
        why_split: Why the host keeps the float32 of what travels as bfloat16 in two parts, from
            now on; "" where it does not.
        in_files: Whether trials are at home in files, from now on.
    """

    def __init__(
        self,
        name: str,
        pool: WorkerPool,
        devices: Sequence[DeviceSpec],
        recipe: Recipe,
        technique: Technique | None,
        place: Place | None = None,
        growth: float = 1.0,
        *,
        steps: int | None = None,
        stops: Stops | None = None,
        fusing: Fusing | None = None,
        idle: Sequence[DeviceSpec] = (),
        host_memory: int | None = None,
        keys: Mapping[int, Mapping[str, Scalar]] = MappingProxyType({}),
        total: Total = lambda batches, each: None,
        pins: Mapping[int, Technique] = MappingProxyType({}),
        home_room: HomeRoom = ANY_ROOM,
        varied: Space | None = None,
    ) -> None:
        self._varied = varied
        self._home_room = home_room
        self._pins, self._noticed = pins, dict[int, Noticed]()  # of all that were described
        self._host_memory, self.why_split, self.in_files = host_memory, "", False
        self._name, self._pool, self._devices, self._recipe = name, pool, tuple(devices), recipe
        self._decide = partial(
            Deciding,
            devices,
            place=place,
            steps=steps,
            stops=stops,
            varies=growth != 1.0,
            idle=idle,
            host_memory=host_memory,
            total=total,
        )
        self._technique, self._decidings = technique, dict[Way, Deciding]()
        self._deciding = self._deciding_of(OPEN)
        may_be_stale = recipe.stale is not None
        self._staleness = Staleness(technique, keys, may_be_stale=may_be_stale)
        self._idle, self._others = tuple(idle), 0
        self._growth, self._steps, self._stops, self._total = growth, steps, stops, total
        self._fusing = fusing or Fusing(0, devices, {})
        self._asking: Asking | None = None  # while it plans

    def forced(
        self,
        technique: Technique | None,
        growth: float,
        devices: Sequence[DeviceSpec] | None = None,
    ) -> Planner:
        """The same for trials by themselves, as ``technique``, for some of the devices or all.

        ``growth``: batches take so many times what the first one takes.
        """
        of = self._devices if devices is None else devices
        made = Planner(
            *(self._name, self._pool, of, self._recipe, technique),
            growth=growth,
            steps=self._steps,
            stops=self._stops,
            host_memory=self._host_memory,
        )
        made.why_split, made.in_files = self.why_split, self.in_files
        return made

    @property
    def is_by_shard(self) -> bool:
        """Whether shards were asked to run all micro-batches of a step in one visit."""
        return asks_by_shard(self._technique)

    @property
    def accumulate(self) -> int:
        """Batches of a step."""
        return self._recipe.accumulate

    @property
    def asked(self) -> Mapping[Worker, Order]:
        """The workers that have an order of the planner's to answer, and which."""
        return self._asking.asked if self._asking is not None else {}

    def plan(self, trials: Sequence[TrialSpec], *, receive: Receive) -> Planned:
        """Measure one trial of each shape and decide for all.

        Args:
            receive: Where messages come from; looks after the workers.

        Raises:
            PlanError: a trial fits in no way, or what was forced cannot be done.
            SpecError, TrialError, WorkerError: no trial can be built at all.
        """
        self._asking = Asking(self._pool, receive, self._growth)
        try:
            planned = self._plan(trials, self._asking)
        finally:
            self._asking = None
        if self.why_split:
            planned = with_split_masters(planned, self.why_split)
        return with_homes_in_files(planned) if self.in_files else planned

    def _plan(self, trials: Sequence[TrialSpec], asking: Asking) -> Planned:
        arrays, shapes = self._fusing.is_wanted, self._varied is not None
        described = asking.describe(trials, arrays=arrays, shapes=shapes)
        lengths = self._lengths(described.noticed)
        described = asking.refuse(described, too_short(described.noticed, lengths))
        changing, mixed = self._check_members(trials, described.noticed, asking)
        if not self.in_files:
            large = self._home_room.refused(described.noticed)
            described = asking.refuse(described, large, TooLarge)
        kinds, ways = self._kinds(trials, described.signatures)
        shared = self._settle(trials, kinds, ways, asking)
        self._take_idle(shared.kinds.values())
        able = [trial for trial in trials if trial.number not in asking.failures]
        found = [(trial, shared.kinds[kinds[trial.number]]) for trial in able]
        planned = self._collect(found, shared.places, shared.rule, asking.failures)
        noticed = described.noticed
        check_unfreezing(changing, planned.layouts)
        self._noticed.update(noticed)
        warnings = (
            *unread_warnings(trials, noticed),
            *pace_warnings(noticed, lengths),
            *mixed,
            *global_warnings(set_by_factories(self._noticed), self._noticed),
            *lost_warnings(one.measure for one in shared.kinds.values()),
            *described.left,
        )
        jobs = with_frozen(planned.plan.jobs, described.signatures, noticed)
        planned = replace(
            planned,
            plan=replace(planned.plan, jobs=jobs, warnings=warnings),
            unvalidated=tuple(sorted(n for n in noticed if not noticed[n].validates)),
        )
        self._staleness.add(jobs)
        return self._with_arrays(planned, trials, described, asking)

    def _check_members(
        self, trials: Sequence[TrialSpec], noticed: Mapping[int, Noticed], asking: Asking
    ) -> tuple[frozenset[str], tuple[str, ...]]:
        """What changes while the trials of a population train, and its warnings.

        Raises:
            PlanError: what was described of them shows that they cannot be one.
        """
        if self._varied is None:
            return frozenset(), ()
        check_members(trials, noticed)
        first = next(trial for trial in trials if trial.number in noticed)
        changing = check_ways(self._varied, first, noticed[first.number], asking)
        self._varied = None  # who comes later is of no population
        return changing, mixed_warnings(trials, noticed)

    def _settle(
        self,
        trials: Sequence[TrialSpec],
        kinds: Mapping[int, str],
        ways: dict[str, Way],
        asking: Asking,
    ) -> Shared:
        """The technique of each kind, and how trials share a device; ``ways`` may be others then.

        Raises:
            PlanError: a trial fits in no way, or what was forced cannot be done.
        """
        decide = self._deciding_of(next(iter(ways.values()), OPEN))
        alike: dict[str, list[TrialSpec]] = {}
        for trial in trials:
            if trial.number in kinds:
                alike.setdefault(kinds[trial.number], []).append(trial)
        crowd = len(kinds) > len(self._devices)
        count = len(kinds) + self._others

        def asks(trial: TrialSpec, crowd: bool = crowd) -> Question:
            return self._question(ways[kinds[trial.number]], trial, crowd, count)

        settled = asking.settle(alike, asks)
        if odd := self._staleness.odd(settled):
            ways.update(dict.fromkeys(odd, ALIKE))
            settled |= asking.settle({kind: alike[kind] for kind in odd}, asks)
        gang = max((found.gang for found in settled.values()), default=1)
        share = crowd or len(kinds) * gang > len(self._devices)
        active = decide.active(settled.values()) if share else 1
        if active == 1:  # what was settled for several at a time may do better alone
            again = {s: alike[s] for s, found in settled.items() if found.active > 1}
            settled |= asking.settle(again, partial(asks, crowd=False))
        elif gang == 1:
            present = [kinds[t.number] for t in trials if kinds.get(t.number) in settled]
            return decide.mix(settled, present[:: len(self._devices)], active)
        return Shared(settled, active)

    def _with_arrays(
        self, planned: Planned, trials: Sequence[TrialSpec], described: Described, asking: Asking
    ) -> Planned:
        """With the places that trials have in arrays, where those are wanted."""
        if not described.arrays:
            return planned
        noticed, shared = described.noticed, set_by_factories(self._noticed)
        if shared and not self._fusing.knows(described.arrays):
            why = why_unfused(shared)
            jobs = tuple(replace(job, why=(*job.why, why)) for job in planned.plan.jobs)
            return replace(planned, plan=replace(planned.plan, jobs=jobs))
        from_state = {trial.number: trial.parent for trial in trials if trial.warm}
        bases = {n: one.base._replace(parent=from_state.get(n)) for n, one in noticed.items()}
        bases = {} if self._recipe.step else bases
        able = [trial for trial in trials if trial.number in planned.layouts]
        facts = self._fusing.alike(described.arrays, described.batches, bases)
        jobs = self._fusing.places(
            planned.plan.jobs,
            able,
            facts,
            asking,
            constants=described.constants,
            num_batches=planned.num_batches,
            spilling=self._deciding.spilling(),
        )
        told = told_of(able, facts)
        notes = (*told, *told_of_lengths(facts[trial.number] for trial in able if told))
        plan = replace(planned.plan, jobs=jobs, notes=notes)
        layouts = {**planned.layouts, **self._fusing.layouts}
        return replace(planned, plan=plan, layouts={j.trial: layouts[j.trial] for j in jobs})

    def _lengths(self, noticed: Mapping[int, Noticed]) -> dict[int, Length]:
        """How long trials are, by number, as far as it is known before they are measured."""
        each, by_epochs = self._recipe.accumulate, self._recipe.schedule_interval == "epoch"
        return {
            number: length_of(
                one.batches,
                each,
                self._steps,
                self._total(one.batches, each),
                by_epochs=by_epochs,
            )
            for number, one in noticed.items()
        }

    def _kinds(
        self, trials: Sequence[TrialSpec], signatures: Mapping[int, str]
    ) -> tuple[dict[int, str], dict[str, Way]]:
        """By trial what tells those that are settled alike, and by that how they are."""
        found = {
            t.number: Way(technique=self._pins[t.number])
            if t.number in self._pins
            else self._staleness.way_of(t)
            for t in trials
            if t.number in signatures
        }
        kinds = {
            n: signatures[n] if way == OPEN else f"{signatures[n]} {way}"
            for n, way in found.items()
        }
        return kinds, {kinds[number]: way for number, way in found.items()}

    def _deciding_of(self, way: Way) -> Deciding:
        """Who decides for trials that train so."""
        if way not in self._decidings:
            recipe = self._recipe if way.may_be_stale else replace(self._recipe, stale=None)
            technique = way.technique or self._technique
            self._decidings[way] = self._decide(recipe=recipe, technique=technique)
        return self._decidings[way]

    def _question(self, way: Way, trial: TrialSpec, crowd: bool, count: int) -> Question:
        """What is measured of a trial that trains so, or as the others do if it can.

        Raises:
            PlanError: it fits in no way, or cannot go on as it began.
        """
        why = way.why
        try:
            early(way.technique, self._recipe, (*self._devices, *self._idle))
            settled = yield from self._deciding_of(way).settle(trial, crowd, count)
        except PlanError as error:
            if not way.falls_back:
                raise
            why = f"it cannot train with stale weights as the other trials do: {error}"
            settled = yield from self._deciding_of(ALIKE).settle(trial, crowd, count)
        return replace(settled, why=(*settled.why, why)) if why else settled

    def _take_idle(self, settled: Iterable[Settled]) -> None:
        """The devices that would idle are the plan's where a pipeline is over them, or nobody's.

        Later plans are of trials beside others, for which none idles.
        """
        if any(one.staged is not None for one in settled):
            self._devices = (*self._devices, *self._idle)
        self._idle, self._others = (), len(self._devices)

    def _collect(
        self,
        found: Sequence[tuple[TrialSpec, Settled]],
        active: int,
        rule: str,
        failures: Mapping[int, str],
    ) -> Planned:
        last_lines = {n: last_words(error) for n, error in failures.items()}
        plan = Plan(
            study=self._name,
            devices=self._devices,
            jobs=tuple(self._deciding.job(trial, settled) for trial, settled in found),
            active=active,
            rule=rule,
            seconds=Seconds(0.0),
            failures=last_lines,
        )
        return Planned(
            plan=plan,
            layouts={trial.number: settled.layout for trial, settled in found},
            num_batches={t.number: settled.measure.num_batches for t, settled in found},
            failures=failures,
        )
