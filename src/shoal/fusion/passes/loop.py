"""Slot by slot: each model runs as it would alone, on its rows. Right for every model.

It is what an array falls back to where slots' batches differ in shape, what finds the slot
whose code raised, and what the stacked backend is compared with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.fusion.crew import Crew, Evaluated, Steps, Trained, taking_part
from shoal.fusion.declined import Declined
from shoal.fusion.member import Member, in_streams
from shoal.fusion.rows.installed import freeze_again, frozen_stay, require_parameters
from shoal.fusion.rows.laidup import put_back
from shoal.recipes.habits import kept_in_place
from shoal.recipes.recipe import autocast, loss_and_output
from shoal.rng import RngState


class LoopBackend:
    """One model after the other; the bits are those of a trial alone."""

    notes: Sequence[str] = ()
    by_data: Sequence[str] = ()
    stacks_gradients = False
    steps: Steps | None = None

    def train(
        self, crew: Crew, batches: Sequence[Any], active: Sequence[bool], scale: float
    ) -> Trained:
        """Forward and backward of each slot that takes part, in its own random streams."""
        losses = torch.full((crew.width,), math.nan, dtype=torch.float64)
        failures: dict[int, BaseException] = {}
        for slot in taking_part(active):
            try:
                losses[slot] = _train_one(crew, slot, batches[slot], scale)
            except Declined:
                raise
            except (Exception, SystemExit) as error:
                failures[slot] = error
        return Trained(losses, failures)

    def evaluate(self, crew: Crew, batches: Sequence[Any], active: Sequence[bool]) -> Evaluated:
        """Forward of each slot that takes part."""
        losses = torch.full((crew.width,), math.nan, dtype=torch.float64)
        outputs: list[Any] = [None] * crew.width
        for slot in taking_part(active):
            with torch.no_grad(), alone(crew, slot) as member:
                outputs[slot], loss = lone_pass(member, batches[slot], crew.device)
            losses[slot] = loss.item()
        return Evaluated(losses, outputs)

    def changed(self, crew: Crew) -> None:
        """Nothing is kept between calls."""

    def require(self, member: Member) -> None:
        """Any trial will do."""

    def hand_out(self, crew: Crew, slots: Sequence[int]) -> None:
        """Gradients are where autograd put them."""


def lone_pass(member: Member, batch: Any, device: torch.device) -> tuple[Any, Tensor]:
    """Output and loss of a trial's own module, as in the plain loop."""
    with autocast(member.recipe, device):
        loss, output = loss_and_output(member.recipe, member.module, batch)
    return output, loss


@contextmanager
def alone(crew: Crew, slot: int, *, is_whole: bool = True) -> Iterator[Member]:
    """A slot's member with its random streams in place; streams and buffers stay its own.

    What is given to weights by ``.data`` is in their rows afterwards, and what its model lays up
    is gone (``laidup.py``), but where it is no whole pass.

    Raises:
        Declined: it put another parameter in one's place.
    """
    member = crew.members[slot]
    is_own = member.recipe.step is not None  # which may set what it likes
    holders = crew.holders(slot) if is_whole and not is_own else ()
    weights = dict(member.module.named_parameters()) if is_whole else {}
    with torch_streams_of(crew, slot), put_back(holders), kept_in_place(weights):
        yield member
    if is_whole and not is_own:
        require_parameters(member.module, weights.values())
    crew.stacked.put_buffers(slot, member.module)


@contextmanager
def torch_streams_of(crew: Crew, slot: int, *, puts_back: bool = True) -> Iterator[None]:
    """All of a slot's random streams in the process's place, and kept afterwards."""
    member = crew.members[slot]
    member.rng = current_rng(crew, slot)
    with in_streams(member, crew.device, puts_back=puts_back):
        yield
    crew.streams.set(slot, member.rng)


def current_rng(crew: Crew, slot: int) -> RngState:
    """The slot's random streams as the array has drawn from them."""
    return crew.streams.state(slot)


@contextmanager
def _given_back(module: nn.Module) -> Iterator[None]:
    """It has its own parameters afterwards, in their own memory: code may give it others.

    And with their values, whatever wrote to them.
    """
    own = [(parameter, parameter.data) for parameter in module.parameters()]
    values = [data.clone() for _, data in own]
    stores = [(child._parameters, dict(child._parameters)) for child in module.modules()]
    try:
        yield
    finally:
        for (parameter, data), value in zip(own, values, strict=True):
            parameter.data = data.copy_(value)
        for store, before in stores:
            store.clear()
            store.update(before)


def error_alone(crew: Crew, slot: int, batch: Any) -> BaseException | None:
    """What a slot's forward raises alone, if it does; nothing is changed by it."""
    member, rng = crew.members[slot], current_rng(crew, slot)
    before = [(buffer, buffer.clone()) for buffer in member.module.buffers()]
    frozen = [p for p in member.module.parameters() if not p.requires_grad]
    try:
        with torch.no_grad(), alone(crew, slot), _given_back(member.module):
            lone_pass(member, batch, crew.device)
    except (Exception, SystemExit) as error:
        return error
    finally:
        freeze_again(frozen)
        for buffer, value in before:
            buffer.copy_(value)
        member.rng = rng
        crew.streams.set(slot, rng)
    return None


def _train_one(crew: Crew, slot: int, batch: Any, scale: float) -> float:
    with alone(crew, slot) as member:
        with frozen_stay(member.module.parameters()):
            _, loss = lone_pass(member, batch, crew.device)
        (loss * scale if scale != 1 else loss).backward()
    return float(loss.detach())
