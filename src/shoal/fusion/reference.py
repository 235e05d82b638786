"""One trial in its slot of an array in which nobody else is: what a fused trial must equal.

A slot's bits depend on the slot and the width. So a trial that trained among others ends on the
bits of this loop, as one that trained alone ends on those of the plain loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from shoal.core.errors import SpecError
from shoal.core.seats import ALONE, Epoch
from shoal.core.spec import HyperParameters, PassKind
from shoal.fusion.array import Array
from shoal.fusion.batches import layout_of
from shoal.fusion.graphs.kinds import backend_of
from shoal.fusion.member import Member
from shoal.fusion.passes.loop import LoopBackend
from shoal.pystate import Attributes, ambient
from shoal.recipes.optimizers import build_optimizer_of
from shoal.recipes.ownstep import Modes, Tally, require_evaluation, summed_up
from shoal.recipes.recipe import (
    HP,
    Found,
    Recipe,
    build_model,
    chunks,
    read_data,
    to_device,
)
from shoal.recipes.schedules import Ends, advance, build_schedule, catch_up, steps_of_epoch
from shoal.rng import capture_rng, restore_rng, seed_all


class Trained(NamedTuple):
    """The trial, whole again; one loss per step, one row per evaluation (step, epoch, metrics).

    ``kept``: what it keeps in Python, as ``Attributes.changed`` has it.
    """

    member: Member
    losses: tuple[float, ...]
    history: tuple[dict[str, Any], ...]
    kept: Mapping[str, Any]


class Inherited(NamedTuple):
    """What a trial goes on from.

    ``take_over`` gives a model and its optimizer what another training has learnt; ``kept`` is
    what that one keeps in Python.
    """

    hp: HP
    take_over: Callable[[nn.Module, torch.optim.Optimizer], None]
    kept: Mapping[str, Any]


Inherits = Mapping[int, Inherited]
"""By the steps after which a trial goes on from another's state."""


class SlotPlace(NamedTuple):
    """A slot of an array of ``width``, and how its passes run; and which seats it has later.

    ``any_layout``: batches of every layout run stacked; ``one_base``: what is frozen is there
    once; ``looped``: parts of the model that run slot by slot (``Array``).
    """

    slot: int
    width: int
    kind: PassKind = "eager"
    later: Sequence[Epoch] = ()
    any_layout: bool = False
    one_base: bool = False
    looped: Sequence[str] = ()


class _Loop:
    """The plain loop, with each step done by an array."""

    def __init__(
        self, recipe: Recipe, hp: HP, seed: int, place: SlotPlace, device: torch.device
    ) -> None:
        slot, width, kind, _, self._any_layout, self._one_base, self._looped = place
        self._recipe, self._slot, self._width, self._kind = recipe, slot, width, kind
        self._seed, self._device = seed, device
        self._later = {epoch.step: epoch for epoch in place.later}
        hp = HyperParameters(hp)
        seed_all(seed)
        model = build_model(recipe, hp).to(device)
        modes = Modes(recipe, model) if recipe.step else None
        before_data = capture_rng(device)
        self._train, self._valid = read_data(recipe, hp)
        optimizer = build_optimizer_of(recipe, model, hp)
        member = Member(
            recipe=recipe,
            hp=hp,
            module=model,
            optimizer=optimizer,
            schedule=build_schedule(recipe, optimizer, hp, self._train),
            rng=capture_rng(device),
            modes=modes,
        )
        self._attributes = Attributes(model, optimizer, member.schedule)
        ambient.built(self._attributes.fixed())
        require_evaluation(recipe, model, self._valid)
        restore_rng(before_data, device)
        first = next(iter(read_data(recipe, hp)[0]), None)
        self._usual = layout_of(to_device(first, device))
        self.array = self._seat(member)
        self._ends = Ends(None, None)
        self.losses: list[float] = []
        self._tally = Tally()
        self.history: list[dict[str, Any]] = []

    def _seat(self, member: Member) -> Array:
        """An array with nobody else in it; by itself a trial is one that runs its own code."""
        is_alone = self._width == ALONE
        backend = LoopBackend() if is_alone else backend_of(self._kind)
        member.usual = self._usual
        array = Array(
            [member],
            device=self._device,
            backend=backend,
            usual=self._usual,
            any_layout=self._any_layout,
            one_base=self._one_base and not is_alone,
            looped=self._looped,
        )
        array.widen(self._slot, self._width)
        return array

    def _change_seat(self) -> None:
        """Into another slot, an array of another width, or none, if it did before this step."""
        epoch = self._later.get(len(self.losses))
        if epoch is not None:
            member = self.array.retire(self._slot)
            self._slot, self._width = epoch.slot, epoch.width
            self.array = self._seat(member)

    def run(
        self,
        steps: int | None,
        epochs: int | None,
        eval_every: int | None,
        inherits: Inherits,
    ) -> None:
        self._ends = Ends(steps, eval_every)
        for epoch in itertools.count(1):
            before = len(self.losses)
            for group in chunks(self._read(self._train), self._recipe.accumulate):
                self._step(group)
                if eval_every and len(self.losses) % eval_every == 0:
                    self._record(epoch)
                    self._go_on(inherits)
                if len(self.losses) == steps:
                    break
            if len(self.losses) == before:
                raise SpecError(f"train data has no batches in epoch {epoch}; it needs one.")
            done = len(self.losses) == steps or epoch == epochs
            if done or not eval_every:
                self._record(epoch)
            if done:
                return
            if not eval_every:
                self._go_on(inherits)

    def _go_on(self, inherits: Inherits) -> None:
        """From another trial's state, if that is what happened after this step."""
        done = len(self.losses)
        if done not in inherits:
            return
        source = inherits[done]
        hp = source.hp
        before = self.array.retire(self._slot)
        outer = capture_rng(self._device)
        seed_all(self._seed)
        model = build_model(self._recipe, hp).to(self._device)
        modes = Modes(self._recipe, model) if self._recipe.step else None
        optimizer = build_optimizer_of(self._recipe, model, hp)
        source.take_over(model, optimizer)
        schedule = build_schedule(self._recipe, optimizer, hp, self._train)
        restore_rng(outer, self._device)
        self._attributes = Attributes(model, optimizer, schedule)
        catch_up(schedule, done)
        self._attributes.give(source.kept, self._device, scheduled=False)
        member = Member(
            recipe=self._recipe,
            hp=hp,
            module=model,
            optimizer=optimizer,
            schedule=schedule,
            rng=before.rng,
            step=done,
            modes=modes,
        )
        epoch = self._later.get(done)
        if epoch is not None:
            self._slot, self._width = epoch.slot, epoch.width
        if epoch is not None or self._width == ALONE:  # what is frozen is another shape
            self.array = self._seat(member)
        else:
            member.usual = self._usual
            self.array.refill(self._slot, member)

    def kept(self) -> Mapping[str, Any]:
        """What the trial keeps in Python now."""
        return self._attributes.changed()[0]

    def _read(self, source: Any) -> Iterator[Any]:
        with self.array.streams(self._slot):
            batches = iter(source)
        while True:
            with self.array.streams(self._slot):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _alone(self, batch: Any) -> list[Any]:
        return [batch if slot == self._slot else None for slot in range(self._width)]

    def _step(self, group: Iterator[Any]) -> None:
        """On batches that are read when their pass is due, in the trial's random streams."""
        self._change_seat()
        due = [lambda: self._alone(next(group, None))] * self._recipe.accumulate
        stepped = self.array.step(*due)
        for failure in stepped.failures.values():
            raise failure
        self.losses.append(stepped.losses[self._slot])
        self._tally.add(stepped.named.get(self._slot, {}))

    def _record(self, epoch: int) -> None:
        if self.history and self.history[-1]["step"] == len(self.losses):
            return
        since = self.history[-1]["step"] if self.history else 0
        some = self.losses[since:]
        named = self._tally.take()
        metrics = {"train_loss": sum(some) / len(some), **named, **self._evaluate()}
        each = steps_of_epoch(self._recipe, self._train)
        schedule = self.array.member(self._slot).schedule
        advance(schedule, metrics, len(self.losses), self._ends, each)
        self.history.append({"step": len(self.losses), "epoch": epoch, "metrics": metrics})

    def _evaluate(self) -> dict[str, float]:
        if self._valid is None:
            return {}
        with self.array.evaluating():
            found = [self._evaluated(batch) for batch in self._read(self._valid)]
        recipe = self.array.member(self._slot).recipe
        return summed_up(recipe, found)

    def _evaluated(self, batch: Any) -> Found:
        before = self.array.drawn_until_now([self._slot])
        try:
            return self.array.evaluate(self._alone(batch))[self._slot] or {}
        except (Exception, SystemExit):
            self.array.draw_again(before)
            return self.array.evaluate_by_itself(self._slot, batch)


def train_in_slot(
    recipe: Recipe,
    hp: HP,
    seed: int,
    place: SlotPlace,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    eval_every: int | None = None,
    device: str | torch.device = "cpu",
    inherits: Inherits = MappingProxyType({}),
) -> Trained:
    """Train one trial in its slot, with nobody beside it; see ``shoal.testing.array_loop``."""
    where = torch.device(device)
    outer = capture_rng(where)
    try:
        loop = _Loop(recipe, hp, seed, place, where)
        loop.run(steps, epochs, eval_every, inherits)
        (member,) = loop.array.dissolve()
    finally:
        restore_rng(outer, where)
    return Trained(member, tuple(loop.losses), tuple(loop.history), loop.kept())
