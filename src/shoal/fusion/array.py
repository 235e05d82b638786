"""An array: trials of one signature that train as one, each as it would alone.

    reason = dry_run(members, batches)     # before they are trusted to an array
    array = Array(members)
    result = array.step(batches)           # one batch per slot, None for one that waits
    member = array.retire(2)               # a trial leaves, its neighbours' bits unchanged
    array.refill(2, another)               # the next one comes: another membership epoch
    state = array.extract(0)               # what ``plain_loop`` would have, by name

Batches are fetched by the caller, each within ``array.streams(slot)``.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from shoal.device.losses import not_finite
from shoal.fusion.batches import elements_of, layout_of, moved_together
from shoal.fusion.crew import ArrayBackend, Crew, Trained, taking_part
from shoal.fusion.declined import Declined, Disagreement, answers_of
from shoal.fusion.finish import Finisher, advance_schedule, names_held
from shoal.fusion.graphs.compiled import CompiledBackend
from shoal.fusion.lonesteps import LoneSteps
from shoal.fusion.matching.admission import require_signature, shared_signature, shell
from shoal.fusion.member import Member
from shoal.fusion.ownsteps import OwnSteps
from shoal.fusion.passes.fused import StackedBackend
from shoal.fusion.passes.gathered import Gathered
from shoal.fusion.passes.loop import LoopBackend, alone, current_rng, lone_pass, torch_streams_of
from shoal.fusion.passes.streams import SlotStreams
from shoal.fusion.passes.switching import switch
from shoal.fusion.rows.stacked import Stacked
from shoal.recipes.ownstep import own_evaluation, refuse_nonfinite
from shoal.recipes.recipe import evaluate_metrics, to_device
from shoal.rng import RngState

LARGE = 8
"""Batches of so many times a training batch's elements are evaluated slot by slot on a CPU."""

MOST_PARTED = 8
"""Passes of slots that answer otherwise, beyond one for each pass that was planned."""


class Stepped(NamedTuple):
    """One step of all slots: mean losses, NaN where a slot waited, and errors by slot."""

    losses: tuple[float, ...]
    failures: Mapping[int, BaseException]
    named: Mapping[int, Mapping[str, float]] = MappingProxyType({})  # of a step of one's own


def read_now(batches: Sequence[Any] | Callable[[], Sequence[Any]]) -> Sequence[Any]:
    """The batches of a micro-batch by slot, from what reads them when its pass is due."""
    return batches() if callable(batches) else batches


class _Tally:
    """What the micro-batches of one step have come to so far."""

    def __init__(self, width: int) -> None:
        self.totals, self.counts = [0.0] * width, [0] * width
        self.failures: dict[int, BaseException] = {}
        self.together: set[int] = set()  # slots with gradients among the stacked ones
        self.apart: set[int] = set()  # slots with gradients of their own

    def add(self, taking: Sequence[bool], trained: Trained, *, is_alone: bool) -> None:
        self.failures.update(trained.failures)
        losses = trained.losses.tolist()
        for slot in taking_part(taking):
            self.totals[slot] += losses[slot]
            self.counts[slot] += 1
            (self.apart if is_alone else self.together).add(slot)

    def means(self) -> tuple[float, ...]:
        """Mean loss of every slot; NaN where there is none."""
        pairs = zip(self.totals, self.counts, strict=True)
        return tuple(total / count if count else math.nan for total, count in pairs)


def _most_common(layouts: Sequence[Hashable]) -> Hashable:
    return Counter(layout for layout in layouts if layout is not None).most_common(1)[0][0]


class Array:
    """N slots with a trial each; owns the trials' tensors until they are given back.

    Until another trial comes a slot's bits do not depend on whether its neighbours wait, fail
    or have retired; another width rounds in other ways. A slot whose
    trial failed waits until it is retired. ``usual`` is the layout of the batches that run
    stacked (``layout_of``); without one the first batches after a change of members say it.
    With ``any_layout`` all do, in a pass for each layout: of trials whose batches vary in length.
    With ``one_base`` weights that are frozen are there once, for trials that all have the same.
    ``looped`` are parts of the models that run slot by slot (``Crew``); where they are given,
    slots whose code comes to answer otherwise by its data elsewhere run in passes of their own.
    ``stacking`` makes the rows. ``seat`` is the slot of the only member, and how many there are:
    nobody is in the others, and no more than the rows is there at any moment.

    Raises:
        Declined: trials of different signatures, or a recipe that no array can train.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        device: str | torch.device = "cpu",
        backend: ArrayBackend | None = None,
        usual: Hashable = None,
        any_layout: bool = False,
        one_base: bool = False,
        looped: Sequence[str] | None = None,
        stacking: Callable[..., Stacked] = Stacked,
        seat: tuple[int, int] | None = None,
    ) -> None:
        self.device = torch.device(device)
        self._known_usual, self._looped = usual, looped
        self._stacking = functools.partial(stacking, one_base=True) if one_base else stacking
        self.backend: ArrayBackend = StackedBackend() if backend is None else backend
        self._lone = LoopBackend()
        self._own: OwnSteps | LoneSteps | None = None
        if members[0].recipe.step is not None:
            self._own = LoneSteps() if isinstance(self.backend, LoopBackend) else OwnSteps()
        self._signature = shared_signature(members)
        self._names_held = names_held(members[0])
        for member in members:
            self.backend.require(member)
        self._parted_lately = Counter[bool]()  # passes, by whether gradients are made
        self._any_layout = any_layout and self.backend.stacks_gradients and self._own is None
        if self._any_layout:
            self._require_any(members[0])
        if seat is None:
            self._form(members)
        else:
            self._form_around(members[0], *seat)

    def _require_any(self, member: Member) -> None:
        """Refuse what needs batches of one layout."""
        if isinstance(self.backend, CompiledBackend):
            raise Declined(
                "compiled code is of batches of one length, and those of these trials vary: pad "
                "all batches to one length"
            )
        held = set(self._names_held)
        for name, parameter in member.module.named_parameters():
            if parameter.requires_grad and name not in held:
                raise Declined(
                    f"its batches vary in length, and the gradient of {name!r}, which no "
                    "optimizer has, adds up from step to step: freeze it, or pad all batches to "
                    "one length"
                )

    def _form(self, members: Sequence[Member], stacked: Stacked | None = None) -> None:
        self._occupied = [True] * len(members)
        self._failed: set[int] = set()
        self._like: dict[int, Member] = {}  # whose code stands in an empty slot
        self._is_stale = False  # whether somebody came or left since a pass
        for member in members:
            member.train()
        self._crew = Crew(
            members=list(members),
            stacked=stacked or self._stacking([member.module for member in members]),
            streams=SlotStreams([member.rng for member in members], self.device),
            device=self.device,
            looped=self._looped,
        )
        self._finisher = Finisher(self._crew, self.backend, self._names_held)
        self._usual = self._known_usual  # the layout of batches that run stacked
        self._changed()

    def _form_around(self, member: Member, slot: int, width: int) -> None:
        """With one trial, whose code stands in the other slots too."""
        stacked = self._stacking([member.module] * width)
        stacked.take(slot, member.module)
        empty = {at: shell(member, stacked.rows(at)) for at in range(width) if at != slot}
        self._form([empty.get(at, member) for at in range(width)], stacked)
        self._occupied = [at == slot for at in range(width)]
        self._like = dict.fromkeys(empty, member)

    def _changed(self) -> None:
        self._is_stale = True
        self.backend.changed(self._crew)
        if self._own is not None:
            self._own.changed(self._crew)

    def fill_empty_slots(self) -> None:
        """Have the code in empty slots be that of a trial that is here, floats and all.

        What is left of one that is gone would be compared with those that came later: where
        both are asked for a Python value, they might disagree.
        """
        if not self._is_stale:
            return
        self._is_stale = False
        here = self.occupied
        there = [self._crew.members[slot] for slot in here]
        empty = [slot for slot in range(self.width) if not self._occupied[slot]]
        old = [slot for slot in empty if not any(self._like.get(slot) is m for m in there)]
        if not here or not old:
            return
        members = list(self._crew.members)
        for slot in old:
            members[slot] = shell(there[0], self._crew.stacked.rows(slot))
            self._like[slot] = there[0]
        self._crew.members = members
        self._changed()
        self._is_stale = False

    @property
    def notes(self) -> Sequence[str]:
        """In words, what runs slot by slot and why."""
        return self.backend.notes if self._own is None else self._own.notes

    @property
    def by_data(self) -> Sequence[str]:
        """The parts of them in which slots came to decide otherwise by their data."""
        return self.backend.by_data if self._own is None else self._own.by_data

    @property
    def crew(self) -> Crew:
        """Who is there now, for whoever runs parts of a pass by himself."""
        return self._crew

    @property
    def width(self) -> int:
        return self._crew.width

    @property
    def occupied(self) -> tuple[int, ...]:
        """Slots with a trial."""
        return tuple(taking_part(self._occupied))

    @property
    def training(self) -> tuple[int, ...]:
        """Slots that take part in steps: those with a trial that has not failed."""
        return tuple(slot for slot in self.occupied if slot not in self._failed)

    def member(self, slot: int) -> Member:
        """The trial in a slot; its tensors are the array's rows."""
        self._require_occupied(slot)
        return self._crew.members[slot]

    @contextmanager
    def streams(self, slot: int, *, puts_back: bool = True) -> Iterator[None]:
        """The slot's random streams in the process's place: around fetching its batch.

        ``puts_back``: the process has its own again afterwards; else the slot's, to save time.
        """
        self._require_occupied(slot)
        with torch_streams_of(self._crew, slot, puts_back=puts_back):
            yield

    # -- training --------------------------------------------------------------------

    def step(self, *micro_batches: Sequence[Any] | Callable[[], Sequence[Any]]) -> Stepped:
        """One optimizer step: for each micro-batch, the batches of all slots.

        None stands for a slot that takes no part; in a later micro-batch, for a group of
        batches that has ended. A function gives them when their pass is due: data and training
        draw random numbers in turn.

        Raises:
            Declined: the models cannot run as one array after all; nothing has changed, if
                it was the step's first micro-batch.
        """
        self.fill_empty_slots()
        if self._own is not None:
            (batches,) = micro_batches
            return self._step_their_own(self._own, read_now(batches))
        self._finisher.drop_gradients(self.occupied)
        tally, gathered = _Tally(self.width), Gathered(self._crew.stacked.parameters)
        for batches in map(read_now, micro_batches):
            active = self._taking_part(batches, tally.failures)
            if any(active) and self._any_layout:
                self._train_by_layout(batches, active, tally, gathered)
            elif any(active):
                self._train(batches, active, tally, gathered)
        means = tally.means()
        tally.failures.update(self._nonfinite(means, tally))
        stepping = [s for s, count in enumerate(tally.counts) if count and s not in tally.failures]
        gathered.require_even(tally.together.intersection(stepping))
        mixed = tally.apart & tally.together
        tally.failures.update(self._finisher.finish(stepping, tally.apart, mixed))
        self._failed |= set(tally.failures)
        return Stepped(means, tally.failures)

    def _step_their_own(self, own: OwnSteps | LoneSteps, batches: Sequence[Any]) -> Stepped:
        """A call of the recipe's step in each slot, and what follows it."""
        active = self._taking_part(batches, {})
        found = own.step(self._crew, self._moved(batches, active), active)
        failures = dict(found.failures)
        for slot, losses in found.losses.items():
            member = self._crew.members[slot]
            try:
                refuse_nonfinite(member.recipe, losses, member.step + 1)
                advance_schedule(self._crew, slot, may_freeze=isinstance(own, LoneSteps))
                member.step += 1
            except (Exception, SystemExit) as error:
                failures[slot] = error
        self._failed |= set(failures)
        losses_of = found.losses
        totals = [losses_of[s].total if s in losses_of else math.nan for s in range(self.width)]
        named = {slot: losses.named for slot, losses in losses_of.items()}
        return Stepped(tuple(totals), failures, named)

    def _taking_part(
        self, batches: Sequence[Any], failures: Mapping[int, BaseException]
    ) -> list[bool]:
        if len(batches) != self.width:
            raise ValueError(f"{self.width} slots need a batch or None each, got {len(batches)}")
        return [
            batch is not None
            and self._occupied[slot]
            and slot not in self._failed
            and slot not in failures
            for slot, batch in enumerate(batches)
        ]

    def _train(
        self, batches: Sequence[Any], active: Sequence[bool], tally: _Tally, gathered: Gathered
    ) -> None:
        """Batches of the usual layout at once, the others one by one.

        What is usual is settled by the first batches after a change of members, and does not
        depend on who is there later: so a slot's bits do not either.
        """
        moved = self._moved(batches, active)
        layouts = [layout_of(b) if a else None for b, a in zip(moved, active, strict=True)]
        if self._usual is None:
            self._usual = _most_common(layouts)
        stacks = self.backend.stacks_gradients  # else it is one by one anyway
        together = [
            a and (layout == self._usual or not stacks)
            for a, layout in zip(active, layouts, strict=True)
        ]
        apart = [a and not t for a, t in zip(active, together, strict=True)]
        if any(together):
            self._train_together(moved, together, tally, gathered, adds=gathered.is_used)
        if any(apart):
            scale = 1 / self._crew.members[0].recipe.accumulate
            trained = self._lone.train(self._crew, moved, apart, scale)
            tally.add(apart, trained, is_alone=True)

    def _train_together(
        self,
        moved: Sequence[Any],
        taking: Sequence[bool],
        tally: _Tally,
        gathered: Gathered,
        *,
        adds: bool,
    ) -> None:
        """A pass, or one for each answer of code that decides by data, of all rows each.

        So whoever answers otherwise is nothing to a slot's bits. ``adds``: some other pass of the
        step left gradients that are not all slots', or will.
        """
        self._parted_lately[True] = max(0, self._parted_lately[True] - 1)
        scale, todo = 1 / self._crew.members[0].recipe.accumulate, [taking]
        while todo:
            mine = todo.pop(0)
            try:
                with gathered.adding(taking_part(mine)) if adds else nullcontext():
                    trained = self.backend.train(self._crew, moved, mine, scale)
            except Disagreement as error:
                if not answers_of(error):
                    raise
                if not adds:
                    gathered.take(tally.together)
                todo[:0], adds = self._parted(error, trains=True), True
            else:
                tally.add(mine, trained, is_alone=False)

    def _parted(self, error: Disagreement, *, trains: bool) -> list[list[bool]]:
        """Who takes part in a pass of those that answer alike, for each answer.

        Raises:
            Declined: they do so in nearly every step: one after the other they would be quicker.
        """
        answers = answers_of(error)
        self._parted_lately[trains] += len(answers) - 1
        if self._parted_lately[trains] > MOST_PARTED:
            raise Declined(
                "its slots go other ways nearly every time, and each is a pass of its own: "
                f"{error}"
            ) from error
        return [[slot in some for slot in range(self.width)] for some in answers]

    def _train_by_layout(
        self, batches: Sequence[Any], active: Sequence[bool], tally: _Tally, gathered: Gathered
    ) -> None:
        """A pass for each layout that there is, of all rows: also where one slot alone has it.

        So a slot's bits do not depend on whether another one's batch is as long.
        """
        moved = self._moved(batches, active)
        layouts = [layout_of(b) if a else None for b, a in zip(moved, active, strict=True)]
        for layout in dict.fromkeys(layout for layout in layouts if layout is not None):
            taking = [mine == layout for mine in layouts]
            self._train_together(moved, taking, tally, gathered, adds=True)

    def _moved(self, batches: Sequence[Any], active: Sequence[bool]) -> Sequence[Any]:
        if self.device.type == "cpu":
            return batches
        pairs = zip(batches, active, strict=True)
        taking = [batch if is_active else None for batch, is_active in pairs]
        if self.backend.stacks_gradients:
            return moved_together(taking, self.device)
        return [to_device(batch, self.device) for batch in taking]  # each as it is alone

    def _nonfinite(self, means: Sequence[float], tally: _Tally) -> dict[int, BaseException]:
        """Errors of slots whose loss is not finite, where the recipe does not ignore that."""
        if all(map(math.isfinite, means)):
            return {}
        failures: dict[int, BaseException] = {}
        for slot, mean in enumerate(means):
            member = self._crew.members[slot]
            counts = tally.counts[slot] and slot not in tally.failures
            if counts and not math.isfinite(mean) and member.recipe.on_nonfinite == "fail":
                failures[slot] = not_finite(mean, member.step + 1)
        return failures

    # -- evaluation --------------------------------------------------------------------

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode inside; whatever is drawn there is undone, as in the plain loop."""
        kept = self.drawn_until_now(range(self.width))
        self.set_training(False)
        try:
            yield
        finally:
            self.set_training(True)
            self.draw_again(kept)

    def drawn_until_now(self, slots: Iterable[int]) -> dict[int, RngState]:
        """The states of these slots' random streams; not to be asked for within ``streams``."""
        return {slot: current_rng(self._crew, slot) for slot in slots}

    def draw_again(self, states: Mapping[int, RngState]) -> None:
        """Have slots draw what they have drawn since then once more."""
        for slot, state in states.items():
            self._crew.members[slot].rng = state
            self._crew.streams.set(slot, state)

    def set_training(self, training: bool) -> None:
        """Put all slots' modules into training or evaluation mode."""
        for slot, member in enumerate(self._crew.members):
            switch(slot, member, self._crew.stacked, training)

    def evaluate(self, batches: Sequence[Any]) -> list[dict[str, float] | None]:
        """Loss and metrics of one validation batch per slot, in evaluation mode.

        What is drawn stays drawn, for the caller to undo (``evaluating``) after the last batch.
        """
        self.fill_empty_slots()
        self._parted_lately[False] = max(0, self._parted_lately[False] - 1)
        active = self._taking_part(batches, {})
        moved = self._moved(batches, active)
        results: list[dict[str, float] | None] = [None] * self.width
        layouts = [layout_of(b) if a else None for b, a in zip(moved, active, strict=True)]
        todo = []
        for layout in {layout for layout in layouts if layout is not None}:
            taking = [mine == layout for mine in layouts]
            for slot in taking_part(taking):
                if self._own is not None or self.is_large(slot, layout):
                    results[slot] = self._evaluate_alone(slot, moved[slot])
                    taking[slot] = False
            todo.append(taking)
        while todo:
            if not any(taking := todo.pop(0)):
                continue
            try:
                found = self.backend.evaluate(self._crew, moved, taking)
            except Disagreement as error:
                if not answers_of(error):
                    raise
                todo += self._parted(error, trains=False)
                continue
            for slot in taking_part(taking):
                recipe = self._crew.members[slot].recipe
                loss = found.losses[slot]
                if not recipe.metrics:
                    results[slot] = {"valid_loss": float(loss)}
                    continue
                with torch.no_grad(), torch_streams_of(self._crew, slot):
                    output, batch = found.outputs[slot], moved[slot]
                    results[slot] = evaluate_metrics(recipe, loss, output, batch)
        return results

    def evaluate_by_itself(self, slot: int, batch: Any) -> dict[str, float]:
        """The same for one slot on its own rows: where a pass of all of them raised.

        Kernels that look at values (``torch.linalg.inv``) refuse all rows for one of them, also
        for one that takes no part.
        """
        only = [batch if at == slot else None for at in range(self.width)]
        moved = self._moved(only, [at == slot for at in range(self.width)])
        return self._evaluate_alone(slot, moved[slot])

    def evaluates_as_one(self, batches: Sequence[Any]) -> bool:
        """Whether evaluating these batches is a pass of all slots, and not one after the other."""
        if self._own is not None or not self.backend.stacks_gradients:
            return False
        there = ((slot, batch) for slot, batch in enumerate(batches) if batch is not None)
        return not any(self.is_large(slot, layout_of(batch)) for slot, batch in there)

    def is_large(self, slot: int, layout: Hashable) -> bool:
        """Whether slots are evaluated one after the other on such batches, by their shapes alone.

        On a CPU what many slots would compute at once of such batches leaves its caches; what
        a pass takes beside computing matters little there.
        """
        usual = self._crew.members[slot].usual if self._any_layout else self._usual
        if self.device.type != "cpu" or usual is None:
            return False
        return elements_of(layout) >= LARGE * max(1, elements_of(usual))

    def _evaluate_alone(self, slot: int, batch: Any) -> dict[str, float]:
        """As the plain loop does it, on the slot's rows."""
        with torch.no_grad(), alone(self._crew, slot) as member:
            if member.recipe.evaluate is not None:
                return own_evaluation(member.recipe, member.module, batch, member.hp)
            output, loss = lone_pass(member, batch, self.device)
            return evaluate_metrics(member.recipe, loss, output, batch)

    # -- the life of a slot ----------------------------------------------------------------

    def extract(self, slot: int) -> dict[str, Any]:
        """A copy of all that a trial is, in the layout of ``PlainResult.state()``; it goes on."""
        member = self.member(slot)
        member.rng = current_rng(self._crew, slot)
        return copy.deepcopy(member.state())

    def retire(self, slot: int, *, whole: bool = True) -> Member:
        """Take a trial out, whole and alone; its slot runs on empty, others keep their bits.

        It is in the modes in which it trains, also where others are being evaluated. Of one that
        is not wanted ``whole`` nothing is copied: it may have failed as there was no memory.
        """
        member = self.member(slot)
        member.rng = current_rng(self._crew, slot)
        member.train()
        self._crew.members = [
            shell(m) if at == slot else m for at, m in enumerate(self._crew.members)
        ]
        if whole:
            self._crew.stacked.let_go(member.module)
        else:
            self._crew.stacked.drop(member.module)
        self._finisher.let_go(member, whole=whole)
        self._occupied[slot] = False
        self._failed.discard(slot)
        self._like.pop(slot, None)
        self._changed()
        return member

    def refill(self, slot: int, member: Member) -> None:
        """Put a trial into an empty slot, fresh or from wherever it was.

        Raises:
            Declined: it has another signature.
        """
        if self._occupied[slot]:
            raise ValueError(f"slot {slot} has a trial; retire it first")
        require_signature(self._signature, member)
        self.backend.require(member)
        member.train()
        self._crew.members = [
            member if at == slot else m for at, m in enumerate(self._crew.members)
        ]
        self._crew.stacked.take(slot, member.module)
        self._crew.streams.set(slot, member.rng)
        self._occupied[slot] = True
        self._usual = self._known_usual
        self._changed()

    def widen(self, slot: int, width: int) -> None:
        """Become ``width`` slots with the only trial in ``slot``, and nobody in the others."""
        (member,) = self.dissolve()
        self._form_around(member, slot, width)

    def dissolve(self) -> list[Member]:
        """Give all trials back, whole and alone."""
        return [self.retire(slot) for slot in self.occupied]

    def _require_occupied(self, slot: int) -> None:
        if not self._occupied[slot]:
            raise ValueError(f"slot {slot} is empty")
