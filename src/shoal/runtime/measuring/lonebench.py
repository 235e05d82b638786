"""A trial alone, beside which an array is timed: as the plain loop trains it, or captured."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.fusion import Declined, Member
from shoal.fusion.finish import clip_alone
from shoal.fusion.likeness import copies
from shoal.fusion.passes.fused import is_out_of_memory
from shoal.fusion.passes.loop import lone_pass
from shoal.kernels.kernelstep import step_whole
from shoal.recipes.ownstep import OwnStep, own_evaluation
from shoal.recipes.recipe import evaluate_metrics, tensors_of, to_device
from shoal.recipes.several import entries_of
from shoal.runtime.capture.captured import PROOFS, CapturedUnits
from shoal.runtime.capture.captures import Captures
from shoal.runtime.measuring.meter import Meter
from shoal.runtime.placing.binding import is_stored
from shoal.runtime.units import Micro


@dataclass(slots=True)
class LoneTrial:
    """A trial on its device, with a step's batches, and one to evaluate, if there are any.

    They are where their source has them, and go to the device in every step, as when it trains.
    ``held_bytes`` are there between steps, ``peak_bytes`` the most in one. Where batches vary in
    length it ``learns`` the passes of some steps' and is timed on those of others, ``timed``.
    """

    member: Member
    group: Sequence[Any]
    valid: Any
    device: torch.device
    held_bytes: int = 0
    peak_bytes: int = 0
    units: CapturedUnits | None = None
    own: OwnStep | None = None  # of a trial with a step of its own
    learns: Sequence[Sequence[Any]] = ()
    timed: Sequence[Sequence[Any]] = ()

    def capture(self, captures: Captures) -> None:
        """Have its passes captured from here on, where they can be and there is room for it."""
        if self.units is None and self.member.modes is None:
            self.units = captures.units(self.member.module, self.member.recipe)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it trains on as ever
                try:
                    for _ in range(PROOFS):
                        self._train_all(self.learns or (self.group,))
                except (torch.OutOfMemoryError, MemoryError):
                    self.units.let_go()
                    self.units = None

    def steps(self) -> None:
        """What is timed: a step, or several."""
        self._train_all(self.timed or (self.group,))

    def _train_all(self, groups: Sequence[Sequence[Any]]) -> None:
        for group in groups:
            self.group = group
            self.step()

    def step(self) -> None:
        """An optimizer step as the plain loop does it."""
        member = self.member
        if member.modes is not None:
            if self.own is None:  # made once, as a session makes it
                args = member.recipe, member.module, member.optimizer, member.hp, member.modes
                self.own = OwnStep(*args, by_kernel=True)
            self.own(to_device(self.group[0], self.device), member.step)
            if member.schedule:
                member.schedule.step()
            return
        member.optimizer.zero_grad(set_to_none=True)
        accumulate = member.recipe.accumulate
        for fetched in self.group:
            batch = to_device(fetched, self.device)
            if self.units is not None:
                found = self.units.backward(0, Micro(batch))
                assert found is not None
                float(found.detach())
                continue
            _, loss = lone_pass(member, batch, self.device)
            (loss if accumulate == 1 else loss / accumulate).backward()
            float(loss.detach())
        clip_alone(member)
        step_whole(member.optimizer)
        if member.schedule:
            member.schedule.step()

    def evaluate(self) -> None:
        """A validation batch as the plain loop does it."""
        member, batch = self.member, to_device(self.valid, self.device)
        member.train(False)
        with torch.no_grad():
            if member.recipe.evaluate is not None:
                own_evaluation(member.recipe, member.module, batch, member.hp)
            else:
                output, loss = lone_pass(member, batch, self.device)
                evaluate_metrics(member.recipe, loss, output, batch)
        member.train()


def one_that_can(
    members: Sequence[Member],
    groups: Sequence[Sequence[Any]],
    valid: Sequence[Any],
    meter: Meter,
    *,
    several: Sequence[Sequence[Sequence[Any]]] = (),
) -> LoneTrial | None:
    """The first trial whose own code does not raise, on the device; None if it has no room.

    All that is given is in host memory, and stays as it is. ``several``: of each the groups of the
    steps that it is to do, where batches vary in length; from half of them on it is timed.

    Raises:
        Declined: there is none.
    """
    each = several or [[group] for group in groups]
    for member, steps, one in zip(members, each, valid, strict=True):
        try:
            return _placed(member, steps, one, meter)
        except Exception as error:
            if is_out_of_memory(error):
                return None
            failure = f"{type(error).__name__}: {error}"  # in words, as the error holds its trial
    words = f"none of the trials can do a step: {failure}"
    if meter.device.type != "cpu" and (name := _left_on_host(members[0].optimizer)):
        words = (
            f"the optimizer {type(members[0].optimizer).__name__} keeps {name!r}, made of weights "
            f"while they were in host memory, and an array's are on {meter.device}: {words}. What "
            "it keeps in its state[parameter] goes with them"
        )
    raise Declined(words)


def _left_on_host(optimizer: torch.optim.Optimizer) -> str:
    """An attribute with tensors that are no part of the optimizer's state; empty without any."""
    known = {"state", "param_groups", "defaults"}
    kept = {name: value for name, value in vars(optimizer).items() if name not in known}
    return next((n for n, v in kept.items() if any(t.dim() for t in tensors_of([v]))), "")


def _placed(member: Member, steps: Sequence[Sequence[Any]], valid: Any, meter: Meter) -> LoneTrial:
    where = meter.device
    with meter.counting() as tracker:
        (lone,) = on_device(copies([member]), where)
        found = LoneTrial(lone, steps[0], valid, where)
        if len(steps) > 1:
            found.learns, found.timed = steps[: len(steps) // 2], steps[len(steps) // 2 :]
        found.step()
        found.held_bytes = tracker.current_bytes
        found.step()
        for group in steps[1:]:
            found.group = group
            found.step()
        if valid is not None:
            found.evaluate()
    found.peak_bytes = tracker.peak_bytes
    return found


def on_device(members: Sequence[Member], device: torch.device) -> Sequence[Member]:
    """Fresh trials, moved there; their optimizers hold the same parameter objects."""
    for member in members:
        member.module.to(device)
    return states_on_device(members, device)


def states_on_device(members: Sequence[Member], device: torch.device) -> Sequence[Member]:
    """What optimizers have before a first step, moved there: Adagrad's sums. No weights."""
    for member in members:
        for state in entries_of(member.optimizer):
            there = {key: v.to(device) for key, v in state.items() if is_stored(v)}
            state.update(there)
    return members
