"""What is measured of one trial until its technique is settled, and why that one."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace

import torch

from shoal.core.errors import PlanError
from shoal.core.plan import Job, Resident, Spilled, Technique, kept_shards, kept_weights
from shoal.core.spec import DeviceSpec, Place, Scalar, TrialSpec
from shoal.core.units import Bytes, format_bytes, format_seconds
from shoal.planner.choose import (
    choices,
    make_job,
    may_go_by_shard,
    refuse,
)
from shoal.planner.need import Need, Request, fits, keep_most, need
from shoal.planner.price import price
from shoal.planning.planned import Settled
from shoal.planning.speeds import speeds_of
from shoal.recipe import Recipe
from shoal.runtime.messages import Measure, Measured, MeasureShards, Order

MOST_ACTIVE = 3
"""Trials that share a device at most: more would leave each too little of it."""

Question = Generator[Order, Measured, Settled]
"""Orders to measure, one after the other; it is sent the answer to each, and returns the end."""


class Deciding:
    """Decides for one trial after the other, on the smallest of the devices.

    Args:
        technique: Forced, or None to choose.
        place: Where the trials that go on stepped, if that is part of their bits.
    """

    def __init__(
        self,
        devices: Sequence[DeviceSpec],
        recipe: Recipe,
        technique: Technique | None,
        place: Place | None,
    ) -> None:
        self._device, self._recipe = devices[0], recipe
        self._budget = Bytes(min(device.memory for device in devices))
        self._speeds = speeds_of(self._device)
        self._request = Request(
            micro_batches=recipe.accumulate,
            clip=recipe.clip_grad_norm is not None,
            technique=technique,
            prefers="device" if self._device.kind == "cuda" else "host",
            place=place,
            # On a GPU which shards step where is part of a trial's bits: another budget, or
            # less memory, must not change that.
            mixes=self._device.kind == "virtual",
        )

    def settle(self, trial: TrialSpec, crowd: bool) -> Question:
        """Order measures until the technique of one trial is decided.

        ``crowd``: there are more trials than devices.

        Raises:
            PlanError: it fits in no way, or what was forced cannot be done.
        """
        forced = self._request.technique
        measured = yield Measure(trial, cut=isinstance(forced, Spilled))
        if not isinstance(forced, Spilled):
            whole = self._resident(measured)
            if whole.total <= self._budget:
                return _settled(measured, Resident(), 1, self._why_resident(whole))
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

    def _settle_uncut(self, trial: TrialSpec, measured: Measured, whole: Need) -> Settled:
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
        return _settled(measured, Resident(), 1, [*why, *measured.measure.notes])

    def _settle_spilled(
        self, trial: TrialSpec, measured: Measured, whole: Need, crowd: bool
    ) -> Question:
        forced = self._request.technique
        _refuse_too_many(trial, measured, forced)
        self._refuse_order(trial, measured)
        request, closest = self._spilled_request(whole), None
        actives = range(1, MOST_ACTIVE + 1) if crowd else (1,)
        for choice in choices(measured.measure, self._budget, actives, request, self._speeds):
            exact = yield MeasureShards(trial, choice.cuts)
            _refuse_borrowers(trial, exact, choice.technique)
            active = choice.active
            found = self._keep_most(exact, choice.technique, request, active)
            if found:
                why = self._why_spilled(whole, exact, *found, active)
                return _settled(exact, found[0], active, [*why, *exact.measure.notes])
            closest = self._need(exact, _all_travel(choice.technique), request)
        if isinstance(forced, Spilled) and forced.shards and closest is not None:
            kept = f", {len(forced.keep)} of them kept on the device," if forced.keep else ""
            raise PlanError(
                f"trial {trial.number} was asked to train in {forced.shards} shards{kept} which "
                f"needs {format_bytes(closest.total)} or more on a device of "
                f"{format_bytes(self._budget)}. Ask for more shards, or leave shards= out to have "
                "the fewest that fit."
            )
        raise refuse(trial, measured.measure, self._budget)

    def _spilled_request(self, whole: Need) -> Request:
        """Who asks for spilling where the whole model would fit wants to see it travel."""
        forced = self._request.technique
        if isinstance(forced, Spilled) and forced.keep is None and whole.total <= self._budget:
            return replace(self._request, technique=_all_travel(forced))
        return self._request

    def _keep_most(
        self, exact: Measured, technique: Spilled, request: Request, active: int
    ) -> tuple[Spilled, Need] | None:
        measure = exact.measure
        return keep_most(
            measure, measure.shards, technique, request, self._budget, active, exact.layout
        )

    def _need(self, exact: Measured, technique: Spilled, request: Request) -> Need:
        return need(exact.measure, exact.measure.shards, technique, request, exact.layout)

    def _resident(self, measured: Measured) -> Need:
        assert measured.layout is not None
        measure = measured.measure
        return need(measure, measure.shards, Resident(), self._request, measured.layout)

    def _why_resident(self, whole: Need) -> list[str]:
        return [
            f"it fits: resident it needs {format_bytes(whole.total)} of "
            f"{format_bytes(self._budget)}, and then nothing moves"
        ]

    def _why_spilled(
        self, whole: Need, exact: Measured, technique: Spilled, found: Need, active: int
    ) -> list[str]:
        forced = self._request.technique
        reasons = [
            f"resident it would need {format_bytes(whole.total)} of {format_bytes(self._budget)}"
        ]
        if isinstance(forced, Spilled) and forced.shards:
            reasons.append(f"{forced.shards} shards were asked for")
        else:
            share = f"{active} trials share the device" if active > 1 else "it fits the device"
            reasons.append(
                f"with {technique.shards} shards {share}, and other numbers of them move no less"
            )
        reasons.append(
            f"the step on the {technique.optimizer} moves {format_bytes(found.moved)} a step"
            + ("" if forced else ", the least of what fits")
        )
        if technique.keep or technique.keep_weights:
            none = self._need(exact, _all_travel(technique), self._request)
            weights = f", of {len(w)} the parameters" if (w := kept_weights(technique)) else ""
            reasons.append(
                f"{len(technique.keep or ())} shards stay on the device{weights}, for which there "
                f"is room; if all travelled {format_bytes(none.moved)} would move"
            )
        if self._request.micro_batches > 1:
            reasons.append(self._why_order(exact, technique))
        found_price = price(
            exact.measure.shards,
            exact.measure.batch_bytes,
            technique,
            self._request,
            self._speeds,
            active,
        )
        company = f"{active} such trials on a device" if active > 1 else "one trial on a device"
        reasons.append(
            f"with {company} a step of one takes {format_seconds(found_price.step_s)} of it and "
            f"it computes {found_price.busy:.0%} of the time, replayed with {self._speeds.source}"
        )
        return reasons

    def _refuse_order(self, trial: TrialSpec, measured: Measured) -> None:
        forced, measure = self._request.technique, measured.measure
        if not isinstance(forced, Spilled) or forced.order != "shard":
            return
        if self._request.micro_batches > 1 and not may_go_by_shard(measure, self._request):
            why = (
                "the model draws random numbers while it trains, and would draw them in another "
                "order"
                if measure.draws
                else "its data does not say how many batches it has"
            )
            raise PlanError(
                f"trial {trial.number} was asked to run all {self._request.micro_batches} "
                f"micro-batches of a step shard by shard, but {why}. Use order='micro', or leave "
                "it out."
            )

    def _why_order(self, exact: Measured, technique: Spilled) -> str:
        count = self._request.micro_batches
        if technique.order == "shard":
            return f"a shard runs all {count} micro-batches of a step while it is there"
        plain = f"the {count} micro-batches of a step go through the model one after another"
        if may_go_by_shard(exact.measure, self._request):
            return f"{plain}; where no two layers share statistics, order='shard' loads less"
        why = "it draws random numbers" if exact.measure.draws else "their number is not known"
        return f"{plain}, since {why}"

    # -- of what is settled ---------------------------------------------------------------

    def active(self, settled: Iterable[Settled]) -> int:
        """How many trials share a device: as many as is best for one kind, and as any fit."""
        all_ = list(settled)
        most = max((s.active for s in all_ if isinstance(s.technique, Spilled)), default=1)
        needs = [
            need(s.measure, s.measure.shards, s.technique, self._request, s.layout) for s in all_
        ]
        fitting = (n for n in range(most, 1, -1) if fits(needs, self._budget, n))
        return next(fitting, 1)

    def job(self, trial: TrialSpec, settled: Settled) -> Job:
        """The job of a trial of a signature that is settled."""
        return make_job(
            trial,
            settled.measure,
            settled.layout,
            settled.technique,
            self._request,
            settled.why,
            self._numerics(settled),
        )

    def _numerics(self, settled: Settled) -> dict[str, Scalar]:
        """All that may change a trial's bits, fixed before its first step."""
        device, technique = self._device, settled.technique
        place = _step_place(technique)
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


def _all_travel(technique: Spilled) -> Spilled:
    return replace(technique, keep=(), keep_weights=())


def _refuse_borrowers(trial: TrialSpec, exact: Measured, technique: Spilled) -> None:
    for shard in (*kept_shards(technique), *kept_weights(technique)):
        spec = exact.measure.shards[shard]
        borrowed = spec.parameter_bytes - spec.owned_bytes
        if borrowed:
            raise PlanError(
                f"trial {trial.number} was asked to keep shard {shard} of {technique.shards} on "
                f"the device, but it borrows {format_bytes(borrowed)} of tied parameters from "
                "another shard, whose step would leave it an old copy. Leave it out of keep=."
            )


def _step_place(technique: Technique) -> str:
    if not isinstance(technique, Spilled):
        return "device"
    if technique.optimizer == "host" and technique.keep:
        kept = "+".join(map(str, technique.keep))
        return f"host, of {technique.shards} shards {kept} on the device"
    return str(technique.optimizer)


def _settled(measured: Measured, technique: Technique, active: int, why: Iterable[str]) -> Settled:
    assert measured.layout is not None
    return Settled(
        measure=measured.measure,
        layout=measured.layout,
        technique=technique,
        why=(*why, measured.measure.data),
        active=active,
    )


def _refuse_too_many(trial: TrialSpec, measured: Measured, forced: Technique | None) -> None:
    layers = measured.measure.layers
    pieces = sum(layer.cut_after for layer in layers[:-1]) + 1
    if isinstance(forced, Spilled) and (forced.shards or 1) > pieces:
        raise PlanError(
            f"trial {trial.number} was asked to train in {forced.shards} shards, but its "
            f"model has {pieces} pieces that may stand alone. Ask for at most {pieces}."
        )
