"""The planner: trials in, a plan out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shoal.core.plan import Plan
from shoal.core.spec import DeviceSpec, Place, TrialSpec
from shoal.core.technique import Technique
from shoal.core.units import Seconds
from shoal.planning.asking import Asking, Receive
from shoal.planning.deciding import Deciding
from shoal.planning.fusing import Fusing
from shoal.planning.planned import Planned, Settled
from shoal.recipe import Recipe
from shoal.runtime.messages import Order
from shoal.runtime.pool import Worker, WorkerPool


class Planner:
    """Asks the workers, decides, and collects the plan of one study.

    Args:
        technique: Forced, or None to choose.
        place: Where trials that go on stepped before; they step there again.
        growth: Batches take so many times what the first one takes.
        steps: Of a trial; None where it ends after epochs.
        fusing: Which trials train as arrays; None: none.
        idle: Devices beside these, which no trial of the first plan would have: a trial may be
            a pipeline over them, if nothing else is asked for. Then they are the plan's too.
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
        fusing: Fusing | None = None,
        idle: Sequence[DeviceSpec] = (),
        host_memory: int | None = None,
    ) -> None:
        self._host_memory = host_memory
        self._name, self._pool, self._devices, self._recipe = name, pool, tuple(devices), recipe
        self._deciding = Deciding(
            devices,
            recipe,
            technique,
            place,
            steps=steps,
            varies=growth != 1.0,
            idle=idle,
            host_memory=host_memory,
        )
        self._idle, self._others = tuple(idle), 0
        self._growth, self._steps = growth, steps
        self._fusing = fusing or Fusing(0, devices, {})
        self._asking: Asking | None = None  # while it plans

    def forced(
        self,
        technique: Technique,
        growth: float,
        devices: Sequence[DeviceSpec] | None = None,
    ) -> Planner:
        """The same, with a technique that is not to be chosen, for some of the devices or all.

        ``growth``: batches take so many times what the first one takes.
        """
        of = self._devices if devices is None else devices
        args, host = (self._name, self._pool, of, self._recipe), self._host_memory
        return Planner(*args, technique, growth=growth, steps=self._steps, host_memory=host)

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
            SpecError, WorkerError: no trial can be built at all.
        """
        self._asking = Asking(self._pool, receive, self._growth)
        try:
            return self._plan(trials, self._asking)
        finally:
            self._asking = None

    def _plan(self, trials: Sequence[TrialSpec], asking: Asking) -> Planned:
        described = asking.describe(trials, arrays=self._fusing.is_wanted)
        signatures, decide = described.signatures, self._deciding
        alike: dict[str, list[TrialSpec]] = {}
        for trial in trials:
            if trial.number in signatures:
                alike.setdefault(signatures[trial.number], []).append(trial)
        crowd = len(signatures) > len(self._devices)
        count = len(signatures) + self._others
        settled = asking.settle(alike, lambda trial: decide.settle(trial, crowd, count))
        gang = max((found.gang for found in settled.values()), default=1)
        share = crowd or len(signatures) * gang > len(self._devices)
        active = decide.active(settled.values()) if share else 1
        if active == 1:  # what was settled for several at a time may do better alone
            again = {s: alike[s] for s, found in settled.items() if found.active > 1}
            settled |= asking.settle(again, lambda trial: decide.settle(trial, False, count))
        elif len(settled) > 1 and gang == 1:
            present = [signatures[t.number] for t in trials if signatures.get(t.number) in settled]
            settled, active = decide.mix(settled, present[:: len(self._devices)], active)
        self._take_idle(settled.values())
        able = [trial for trial in trials if trial.number not in asking.failures]
        found = [(trial, settled[signatures[trial.number]]) for trial in able]
        planned = self._collect(found, active, asking.failures)
        if not described.arrays:
            return planned
        jobs = self._fusing.places(
            planned.plan.jobs,
            able,
            described.arrays,
            asking,
            constants=described.constants,
            num_batches=planned.num_batches,
            spilling=self._deciding.spilling(),
        )
        notes = self._fusing.notes(able, described.arrays)
        plan = replace(planned.plan, jobs=jobs, notes=notes)
        layouts = {**planned.layouts, **self._fusing.layouts}
        return replace(planned, plan=plan, layouts={j.trial: layouts[j.trial] for j in jobs})

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
        failures: Mapping[int, str],
    ) -> Planned:
        last_lines = {n: error.strip().splitlines()[-1] for n, error in failures.items()}
        plan = Plan(
            study=self._name,
            devices=self._devices,
            jobs=tuple(self._deciding.job(trial, settled) for trial, settled in found),
            active=active,
            seconds=Seconds(0.0),
            failures=last_lines,
        )
        return Planned(
            plan=plan,
            layouts={trial.number: settled.layout for trial, settled in found},
            num_batches={t.number: settled.measure.num_batches for t, settled in found},
            failures=failures,
        )
