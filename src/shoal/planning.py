"""From trials to a plan: workers measure, the planner decides, for each shape once.

Trials whose models, batches and optimizers have equal signatures cost the same; the first
of each is measured, on whichever worker is free, and speaks for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shoal.core.errors import PlanError, ShoalError, WorkerError
from shoal.core.event import Event
from shoal.core.plan import Job, Plan, Resident, Spilled, Technique
from shoal.core.spec import DeviceSpec, JobMeasure, Scalar, TrialSpec
from shoal.core.units import Bytes, Seconds, format_bytes
from shoal.memory.layout import TrialLayout
from shoal.planner.choose import (
    Choice,
    Need,
    Request,
    choices,
    fits,
    make_job,
    need,
    refuse,
)
from shoal.planner.growth import grown
from shoal.recipe import Recipe
from shoal.runtime.messages import (
    Broken,
    Describe,
    Described,
    Happened,
    Measure,
    Measured,
    MeasureShards,
    Order,
    Refused,
)
from shoal.runtime.pool import Gone, Worker, WorkerPool

MAX_DEATHS = 3
"""A trial that ends its worker so often while it is measured has failed."""


class Abandoned(WorkerError):
    """Nobody needs the plan any more: the run ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, and what only the run needs beside it."""

    plan: Plan
    layouts: Mapping[int, TrialLayout]
    num_batches: Mapping[int, int | None]
    failures: Mapping[int, str]  # trial -> traceback: cannot even be built


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settled:
    """The technique of one signature, with the measure and layout that prove it."""

    measure: JobMeasure
    layout: TrialLayout
    technique: Technique
    why: tuple[str, ...]
    active: int


_ANSWERS = (Described, Measured, Refused, Gone)
_Question = Generator[Order, Measured, _Settled]
Receive = Callable[[], tuple[Worker | None, object] | None]


class Planner:
    """Asks the workers, decides, and collects the plan of one study.

    Raises from ``plan``:
        PlanError: a trial fits in no way, or what was forced cannot be done.
        SpecError, WorkerError: no trial can be built at all.
    """

    def __init__(
        self,
        name: str,
        pool: WorkerPool,
        devices: Sequence[DeviceSpec],
        recipe: Recipe,
        technique: Technique | None,
        sink: Callable[[Sequence[Event]], None],
        growth: float = 1.0,
    ) -> None:
        self._sink, self._growth = sink, growth
        self._next: Receive | None = None
        self.asked: set[Worker] = set()
        self._deaths: dict[int, int] = {}
        self._name, self._pool, self._devices, self._recipe = name, pool, tuple(devices), recipe
        self._budget = Bytes(min(device.memory for device in devices))
        on_gpu = devices[0].kind == "cuda"
        self._request = Request(
            micro_batches=recipe.accumulate,
            clip=recipe.clip_grad_norm is not None,
            technique=technique,
            prefers="device" if on_gpu else "host",
        )

    def forced(self, technique: Technique, growth: float) -> Planner:
        """The same, with a technique that is not to be chosen.

        ``growth``: batches take so many times what the first one takes.
        """
        args = (self._name, self._pool, self._devices, self._recipe)
        return Planner(*args, technique, self._sink, growth)

    def plan(self, trials: Sequence[TrialSpec], *, receive: Receive | None = None) -> Planned:
        """Measure one trial of each shape and decide for all.

        ``receive`` is where messages come from, when a run goes on meanwhile.
        """
        self._next, self.asked, self._deaths = receive, set(), {}
        signatures, failures = self._describe(trials)
        alike: dict[str, list[TrialSpec]] = {}
        for trial in trials:
            if trial.number in signatures:
                alike.setdefault(signatures[trial.number], []).append(trial)
        crowd = len(signatures) > len(self._devices)
        settled = self._settle_all(alike, crowd, failures)
        active = self._active(settled.values()) if crowd else 1
        if active == 1:  # what was settled for two at a time may do better alone
            again = {s: alike[s] for s, found in settled.items() if found.active == 2}
            settled |= self._settle_all(again, False, failures)
        able = {
            t.number: settled[signatures[t.number]] for t in trials if t.number not in failures
        }
        plan = Plan(
            study=self._name,
            devices=self._devices,
            jobs=tuple(self._job(t, able[t.number]) for t in trials if t.number in able),
            active=active,
            seconds=Seconds(0.0),
            failures={
                number: error.strip().splitlines()[-1] for number, error in failures.items()
            },
        )
        return Planned(
            plan=plan,
            layouts={number: found.layout for number, found in able.items()},
            num_batches={number: found.measure.num_batches for number, found in able.items()},
            failures=failures,
        )

    # -- asking ---------------------------------------------------------------------------

    def _describe(self, trials: Sequence[TrialSpec]) -> tuple[dict[int, str], dict[int, str]]:
        failures: dict[int, str] = {}
        reply: object = None
        while not isinstance(reply, Described):
            able = [trial for trial in trials if trial.number not in failures]
            if not able:
                raise _none_can_run(trials, failures)
            worker, reply = self._ask_one(Describe(tuple(able)))
            if isinstance(reply, Gone):
                self._blame(worker, reply, able, failures)
        if not reply.signatures and reply.cause:
            raise reply.cause
        failures |= reply.errors
        if not reply.signatures:
            raise _none_can_run(trials, failures)
        return dict(reply.signatures), failures

    def _ask_one(self, order: Order) -> tuple[Worker, object]:
        """Ask whichever worker is there, and wait for its answer or its end."""
        while not self._pool.workers:
            self._receive()
        worker = next(iter(self._pool.workers.values()))
        self._ask(worker, order)
        while True:
            answer = self._receive()
            if answer and answer[0] is worker:
                return answer

    def _ask(self, worker: Worker, order: Order) -> None:
        self.asked.add(worker)
        worker.send(order)

    def _settle_all(
        self, alike: Mapping[str, Sequence[TrialSpec]], crowd: bool, failures: dict[int, str]
    ) -> dict[str, _Settled]:
        """Measure one trial of each signature, as many at a time as there are workers.

        A trial whose own code raises goes to ``failures``, and the next of its shape speaks
        for the others.
        """
        waiting = [(signature, list(trials)) for signature, trials in alike.items()]
        running: dict[Worker, tuple[str, list[TrialSpec], _Question]] = {}
        settled: dict[str, _Settled] = {}
        try:
            while waiting or running:
                for worker in [w for w in self._pool.workers.values() if w not in running]:
                    if waiting:
                        signature, trials = waiting.pop(0)
                        question = self._settle(trials[0], crowd)
                        running[worker] = signature, trials, question
                        self._ask(worker, next(question))
                answer = self._receive()
                if answer is None or answer[0] not in running:
                    continue
                worker, reply = answer
                signature, trials, question = running[worker]
                if isinstance(reply, Measured):
                    try:
                        self._ask(worker, question.send(self._grown(reply)))
                        continue
                    except StopIteration as end:
                        settled[signature] = end.value
                elif isinstance(reply, Refused):
                    self._note_failure(reply, failures)
                else:
                    assert isinstance(reply, Gone)
                    self._blame(worker, reply, trials[:1], failures)
                del running[worker]
                left = [trial for trial in trials if trial.number not in failures]
                if left and signature not in settled:
                    waiting.insert(0, (signature, left))
        except ShoalError as error:
            if not isinstance(error, Abandoned):
                self._drain(set(running))
            raise
        if alike and not settled:
            raise _none_can_run([t for trials in alike.values() for t in trials], failures)
        return settled

    def _grown(self, reply: Measured) -> Measured:
        return replace(reply, measure=grown(reply.measure, self._growth))

    def _note_failure(self, reply: Refused, failures: dict[int, str]) -> None:
        """A trial that cannot be measured fails alone; a wrong request stops the study."""
        if isinstance(reply.cause, ShoalError):
            raise reply.cause
        failures[reply.trial] = reply.error

    def _blame(
        self, worker: Worker, end: Gone, asked: Sequence[TrialSpec], failures: dict[int, str]
    ) -> None:
        """A trial whose code ended its worker too often while it was measured fails alone."""
        for trial in asked:
            if trial.number in worker.running:
                deaths = self._deaths[trial.number] = self._deaths.get(trial.number, 0) + 1
                if deaths >= MAX_DEATHS:
                    failures[trial.number] = (
                        f"{WorkerError.__name__}: the worker died {deaths} times while it "
                        f"measured this trial, last: {end.reason}\n{worker.last_words}".strip()
                    )

    def _drain(self, running: set[Worker]) -> None:
        """Have no answer under way that somebody could take for another one."""
        while running & self.asked:
            self._receive()

    def _receive(self) -> tuple[Worker, object] | None:
        """An answer to an order, or the end of a worker that was asked; None: nothing of that.

        Events of starting workers go to the sink.
        """
        received = self._next() if self._next else self._pool.receive(timeout=5.0)
        worker, reply = received or (None, None)
        if worker is None:
            if self._next is None:
                self._pool.check_alive()
            return None
        if isinstance(reply, Broken):
            worker.last_words = reply.error
        if isinstance(reply, Gone) and self._next is None:
            self._replace(worker, reply)
        if isinstance(reply, Happened):
            self._sink(reply.events)
        if worker not in self.asked or not isinstance(reply, _ANSWERS):
            return None
        self.asked.discard(worker)
        return worker, reply

    def _replace(self, worker: Worker, end: Gone) -> None:
        """Before a study runs, only a trial's own code may end a worker."""
        if worker.device is None or not worker.running:
            words = worker.last_words or f"{end.reason}. Its messages are above."
            raise WorkerError(
                f"the worker of {worker.name} cannot work, it died while the study was being "
                f"planned: {words}"
            )
        self._pool.replace(worker.device)

    # -- deciding -------------------------------------------------------------------------

    def _settle(self, trial: TrialSpec, crowd: bool) -> _Question:
        """Order measures until the technique of one trial is decided."""
        forced = self._request.technique
        measured = yield Measure(trial, cut=isinstance(forced, Spilled))
        if not isinstance(forced, Spilled):
            whole = self._resident(measured)
            if whole.total <= self._budget:
                return self._settled(measured, Resident(), 1, self._why_resident(whole))
            if isinstance(forced, Resident):
                raise PlanError(
                    f"trial {trial.number} was asked to train resident, which needs "
                    f"{format_bytes(whole.total)} on a device of {format_bytes(self._budget)}. "
                    "Leave technique= out to have it spilled, or give the device more memory."
                )
            measured = yield Measure(trial, cut=True)
        whole = self._resident(measured)
        if not measured.measure.cuttable:
            return self._settle_uncut(trial, measured, whole)
        return (yield from self._settle_spilled(trial, measured, whole, crowd))

    def _settle_uncut(self, trial: TrialSpec, measured: Measured, whole: Need) -> _Settled:
        """A model in one piece: it trains resident if it fits."""
        forced = self._request.technique
        if isinstance(forced, Spilled) and forced.shards not in (None, 1):
            raise PlanError(
                f"trial {trial.number} was asked to train in {forced.shards} shards, but its "
                f"model cannot be cut: {'; '.join(measured.measure.notes)}. "
                "Use technique='resident'."
            )
        if whole.total > self._budget:
            raise refuse(trial, measured.measure, self._budget)
        why = self._why_resident(whole)
        return self._settled(measured, Resident(), 1, [*why, *measured.measure.notes])

    def _settle_spilled(
        self, trial: TrialSpec, measured: Measured, whole: Need, crowd: bool
    ) -> Generator[Order, Measured, _Settled]:
        forced = self._request.technique
        self._refuse_too_many(trial, measured, forced)
        closest: Need | None = None
        for active in (2, 1) if crowd else (1,):
            for choice in choices(measured.measure, self._budget, active, self._request):
                exact = yield MeasureShards(trial, choice.cuts)
                assert exact.layout is not None
                bytes_ = need(
                    exact.measure,
                    exact.measure.shards,
                    choice.technique,
                    self._request,
                    exact.layout,
                )
                closest = bytes_
                if fits([bytes_], self._budget, active):
                    why = self._why_spilled(whole, choice, bytes_, active)
                    why += exact.measure.notes
                    return self._settled(exact, choice.technique, active, why)
        if isinstance(forced, Spilled) and forced.shards and closest is not None:
            raise PlanError(
                f"trial {trial.number} was asked to train in {forced.shards} shards, which needs "
                f"{format_bytes(closest.total)} on a device of {format_bytes(self._budget)}. Ask "
                "for more shards, or leave shards= out to have the fewest that fit."
            )
        raise refuse(trial, measured.measure, self._budget)

    def _refuse_too_many(
        self, trial: TrialSpec, measured: Measured, forced: Technique | None
    ) -> None:
        layers = measured.measure.layers
        pieces = sum(layer.cut_after for layer in layers[:-1]) + 1
        if isinstance(forced, Spilled) and (forced.shards or 1) > pieces:
            raise PlanError(
                f"trial {trial.number} was asked to train in {forced.shards} shards, but its "
                f"model has {pieces} pieces that may stand alone. Ask for at most {pieces}."
            )

    def _resident(self, measured: Measured) -> Need:
        assert measured.layout is not None
        measure = measured.measure
        shards = measure.shards
        return need(measure, shards, Resident(), self._request, measured.layout)

    def _settled(
        self, measured: Measured, technique: Technique, active: int, why: Iterable[str]
    ) -> _Settled:
        assert measured.layout is not None
        return _Settled(
            measure=measured.measure,
            layout=measured.layout,
            technique=technique,
            why=(*why, measured.measure.data),
            active=active,
        )

    def _why_resident(self, whole: Need) -> list[str]:
        return [
            f"it fits: resident it needs {format_bytes(whole.total)} of "
            f"{format_bytes(self._budget)}, and then nothing moves"
        ]

    def _why_spilled(self, whole: Need, choice: Choice, need_: Need, active: int) -> list[str]:
        technique = choice.technique
        forced = self._request.technique
        reasons = [
            f"resident it would need {format_bytes(whole.total)} of {format_bytes(self._budget)}"
        ]
        if isinstance(forced, Spilled) and forced.shards:
            reasons.append(f"{forced.shards} shards were asked for")
        else:
            share = "two trials share the device" if active == 2 else "it fits the device"
            reasons.append(f"{technique.shards} shards are the fewest with which {share}")
        reasons.append(
            f"the step on the {technique.optimizer} moves "
            f"{format_bytes(choice.moved_bytes)} a step"
            + ("" if forced else ", the least of what fits")
        )
        hides = "the other trial's units" if active == 2 else "the unit before"
        if technique.lookahead or active == 2:
            reasons.append(f"its loads hide behind {hides}")
        return reasons

    def _active(self, settled: Iterable[_Settled]) -> int:
        """How many trials share a device: two where copies can hide and any two fit."""
        all_ = list(settled)
        if not any(isinstance(s.technique, Spilled) for s in all_):
            return 1
        needs = [
            need(s.measure, s.measure.shards, s.technique, self._request, s.layout) for s in all_
        ]
        return 2 if fits(needs, self._budget, 2) else 1

    def _job(self, trial: TrialSpec, settled: _Settled) -> Job:
        numerics = self._numerics(settled)
        return make_job(
            trial,
            settled.measure,
            settled.layout,
            settled.technique,
            self._request,
            settled.why,
            numerics,
        )

    def _numerics(self, settled: _Settled) -> dict[str, Scalar]:
        """All that may change a trial's bits, fixed before its first step."""
        device, technique = self._devices[0], settled.technique
        place = technique.optimizer if isinstance(technique, Spilled) else "device"
        cache_off = any("use_cache was switched off" in note for note in settled.why)
        return {
            **({"use_cache": "off"} if cache_off else {}),
            "torch": torch.__version__,
            "device": "cpu" if device.kind == "virtual" else torch.cuda.get_device_name(0),
            "threads": device.threads,
            "precision": self._recipe.precision,
            "optimizer": settled.measure.optimizer,
            "optimizer_place": place if device.kind == "cuda" else "cpu",
            "matmul": torch.get_float32_matmul_precision(),
            "accumulate": self._recipe.accumulate,
            "cut": "bitwise in the pilot" if settled.measure.bitwise else "none",
        }


def _none_can_run(trials: Sequence[TrialSpec], failures: Mapping[int, str]) -> WorkerError:
    return WorkerError(
        f"none of the {len(trials)} trials can run; the first one says:\n"
        + failures[trials[0].number]
    )


def with_seconds(plan: Plan, seconds: float) -> Plan:
    """The plan with its predicted duration."""
    return replace(plan, seconds=Seconds(seconds))
