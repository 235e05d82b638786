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
    ) -> None:
        self._sink = sink
        self._next: Receive = lambda: pool.receive(timeout=5.0)
        self._name, self._pool, self._devices, self._recipe = name, pool, tuple(devices), recipe
        self._budget = Bytes(min(device.memory for device in devices))
        on_gpu = devices[0].kind == "cuda"
        self._request = Request(
            micro_batches=recipe.accumulate,
            clip=recipe.clip_grad_norm is not None,
            technique=technique,
            prefers="device" if on_gpu else "host",
        )

    def forced(self, technique: Technique) -> Planner:
        """The same, with a technique that is not to be chosen."""
        args = (self._name, self._pool, self._devices, self._recipe)
        return Planner(*args, technique, self._sink)

    def plan(self, trials: Sequence[TrialSpec], *, receive: Receive | None = None) -> Planned:
        """Measure one trial of each shape and decide for all.

        ``receive`` is where messages come from, when a run goes on meanwhile.
        """
        self._next = receive or self._next
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
        worker = next(iter(self._pool.workers.values()))
        worker.send(Describe(tuple(trials)))
        reply = self._await(worker)
        assert isinstance(reply, Described)
        if not reply.signatures:
            raise reply.cause or WorkerError(
                f"none of the {len(trials)} trials can be built; the first one says:\n"
                + next(iter(reply.errors.values()))
            )
        return dict(reply.signatures), dict(reply.errors)

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
        free = list(self._pool.workers.values())
        while waiting or running:
            while waiting and free:
                worker, (signature, trials) = free.pop(), waiting.pop(0)
                question = self._settle(trials[0], crowd)
                running[worker] = signature, trials, question
                worker.send(next(question))
            worker, reply = self._receive()
            if worker not in running:
                continue
            signature, trials, question = running[worker]
            if isinstance(reply, Refused):
                self._note_failure(reply, failures)
                if trials[1:]:
                    waiting.insert(0, (signature, trials[1:]))
            else:
                assert isinstance(reply, Measured)
                try:
                    worker.send(question.send(reply))
                    continue
                except StopIteration as end:
                    settled[signature] = end.value
            del running[worker]
            free.append(worker)
        if alike and not settled:
            count = sum(map(len, alike.values()))
            raise WorkerError(
                f"none of the {count} trials can run; the first one says:\n"
                + failures[next(iter(alike.values()))[0].number]
            )
        return settled

    def _note_failure(self, reply: Refused, failures: dict[int, str]) -> None:
        """A trial that cannot be measured fails alone; a wrong request stops the study."""
        if isinstance(reply.cause, ShoalError):
            raise reply.cause
        failures[reply.trial] = reply.error

    def _await(self, worker: Worker) -> object:
        while True:
            other, reply = self._receive()
            if other is worker:
                return reply

    def _receive(self) -> tuple[Worker, object]:
        """The next answer to an order; events of starting workers go to the sink."""
        while True:
            received = self._next()
            if received is None:
                self._pool.check_alive()
                continue
            worker, reply = received
            if worker is None:
                continue
            if isinstance(reply, Broken):
                worker.last_words = reply.error
            if isinstance(reply, Gone) and worker.last_words:
                raise WorkerError(f"the worker of {worker.name} cannot work:\n{worker.last_words}")
            if isinstance(reply, Gone):
                raise WorkerError(
                    f"the worker of {worker.name} died while the study was being planned: "
                    f"{reply.reason}. Its messages are above."
                )
            if isinstance(reply, Happened):
                self._sink(reply.events)
            if isinstance(reply, Described | Measured | Refused):
                return worker, reply

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
            why=tuple(why),
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


def with_seconds(plan: Plan, seconds: float) -> Plan:
    """The plan with its predicted duration."""
    return replace(plan, seconds=Seconds(seconds))
