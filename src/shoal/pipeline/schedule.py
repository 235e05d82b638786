"""Pipelines as programs: one model over several devices, one stage a device.

[Note: schedules]
Stage s of d holds shard s. Its forwards (F) and backwards (B) of the micro-batches of a step,
shown for d = 3 and three micro-batches; the last stage's B begins with its forward.

    naive    one micro-batch at a time through all stages
    gpipe    all forwards, then all backwards
    flush    1F1B: d - 1 - s forwards ahead, then by turns, and empty at the end of each step
    zb-h1    as flush, B in two: I hands on what the stage before waits for, W, the gradients
             of the parameters, fills the gaps; stage s is s micro-batches behind with it
    2bw      as flush, never empty: a step's gradients are those of the version before

    flush    0  F0 F1 F2       B0       B1       B2 STEP
             1     F0 F1    B0    F2 B1       B2 STEP
             2        B0    B1       B2 STEP

Source of the ideas: GPipe (NeurIPS 2019), PipeDream-Flush and PipeDream-2BW (ICML 2021), ZB-H1
(ICLR 2024).

[Note: two versions]
With "2bw" the step t -> t + 1 starts from version t and takes gradients that were computed with
version t - 1: W(t+1) = W(t) - step(grad f(W(max(t-1, 0)))), the same delay at every stage. When
a stage ends the last backward of group t, all that is in flight there is of group t + 1; so
version t - 1 is read no more, and t + 1 takes its place. That is so while a stage has no more
micro-batches in flight than a group has, which is why a group has at least d.

[Note: what else crosses stages]
    norm     with clipping, every stage sends its gradients' norms to stage 0 and gets the factor.
             With "2bw" nobody waits for it: a stage steps right before it first reads the new
             version
    param    parameters that a later stage borrows are sent to it when they have stepped
    sum      with copies of the pipeline: see [Note: copies] in ``wide``
    rng      where the model draws random numbers, those of a micro-batch continue those of the
             one before: the last stage hands the random state back to stage 0. Before its next
             forward; or, if stage 0 can foretell it, before its backward, to be compared
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate

from shoal.core.errors import SpecError
from shoal.core.technique import SCHEDULES, Schedule
from shoal.pipeline.wide import Copies, shares, widened
from shoal.program.ir import Action, Op, Part, Program

Order = Iterator[tuple[Op, int]]
"""What a stage computes, in order: F, B, I or W of a micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Which program trains one model over ``stages`` devices for ``len(groups)`` steps.

    ``groups`` is how many micro-batches each step takes. With ``recompute`` a backward runs its
    forward again, else what the forward saved is kept. ``lag`` is how many more micro-batches
    than 1F1B needs a stage of "flush" or "2bw" runs ahead, as far as there are stages after it: it
    hides the time that messages take. ``clip`` has one factor for all gradients. ``ties`` are
    pairs of stages, the owner of a parameter and one that borrows it. ``draws`` says that the
    model draws random numbers, ``foretold`` that stage 0 knows which. Stages in ``whole`` do not
    cut their backward in two. ``begun`` is 1 where "2bw" goes on after a step: version 1 is the
    newest at the start, with version 0 beside it. ``follows`` says that another program goes on
    from the end, so that all that is borrowed, and the random state, are where it begins.
    ``width`` copies of it share the micro-batches of each step: see [Note: copies] in ``wide``.

    Raises:
        SpecError: no such pipeline; says what is too few, with the numbers.
    """

    schedule: Schedule
    stages: int
    groups: tuple[int, ...]
    recompute: bool = False
    lag: int = 0
    clip: bool = False
    ties: tuple[tuple[int, int], ...] = ()
    draws: bool = False
    foretold: bool = False
    whole: tuple[int, ...] = ()
    begun: int = 0
    follows: bool = False
    width: int = 1
    _ends: tuple[int, ...] = field(init=False, default=(), repr=False)

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            known = ", ".join(map(repr, SCHEDULES))
            raise SpecError(f"schedule is one of {known}, got {self.schedule!r}.")
        if self.stages < 1 or not self.groups or min(self.groups) < 1 or self.lag < 0:
            raise SpecError(
                f"a pipeline has 1 stage or more, a step of 1 micro-batch or more, and lag=0 or "
                f"more; got stages={self.stages}, groups={self.groups}, lag={self.lag}."
            )
        self._require_enough()
        object.__setattr__(self, "_ends", tuple(accumulate(self.groups)))

    def _require_enough(self) -> None:
        """Raises SpecError where a step has too few micro-batches."""
        if self.width < 1 or min(self.groups) < self.width:
            raise SpecError(
                f"a pipeline has 1 copy or more, and each takes 1 micro-batch of a step or more; "
                f"got width={self.width} and a step of {min(self.groups)}. Give the recipe a "
                "larger accumulate=, or ask for fewer copies."
            )
        if self.width > 1 and self.draws and not self.foretold:
            raise SpecError(
                f"the model draws random numbers, and what it draws cannot be foretold: "
                f"{self.width} copies would wait for each other before every micro-batch. Use "
                "width=1."
            )
        least = self.stages * self.width
        if self.schedule == "2bw" and min(self.groups) < least:
            each = f" in each of {self.width} copies" if self.width > 1 else ""
            raise SpecError(
                f"2bw with {self.stages} stages{each} needs {least} micro-batches a step or more, "
                f"got {min(self.groups)}: else more than two weight versions would be in use. "
                f"Give Recipe(accumulate={least}), fewer stages, or schedule='flush'."
            )

    @property
    def versions(self) -> int:
        """How many weight versions a stage keeps."""
        return 2 if self.schedule == "2bw" else 1

    @property
    def num_micros(self) -> int:
        """Micro-batches of all steps."""
        return self._ends[-1]

    def group_of(self, micro: int) -> int:
        """The step that takes a micro-batch's gradients: the version that it starts from."""
        return self.begun + bisect_right(self._ends, micro)

    def version_of(self, micro: int) -> int:
        """The weight version of a micro-batch's forward and backward, at every stage."""
        return max(self.group_of(micro) - self.versions + 1, 0)

    def is_last_of_group(self, micro: int) -> bool:
        """Is it the last micro-batch of its step?"""
        return micro + 1 == self._ends[self.group_of(micro) - self.begun]

    def ahead(self, stage: int) -> int:
        """Forwards that a stage runs before its first backward, not counting that one's."""
        after = self.stages - 1 - stage
        if self.schedule == "naive":
            return 0
        if self.schedule == "gpipe":
            return max(self.groups) - 1 if after else 0
        if self.schedule == "zb-h1":
            return after
        ahead = after + min(self.lag, after)
        return min(ahead, min(self.groups)) if self.schedule == "2bw" else ahead

    def bound(self, stage: int) -> int:
        """The most micro-batches of which a stage may hold activations at a time."""
        if self.width > 1:
            return self.of_copy(0).bound(stage)
        if self.schedule == "gpipe":
            return self.ahead(stage) + 1
        behind = stage if self._splits(stage) else 0
        most = max(self.groups) if self.schedule != "2bw" else self.num_micros
        return min(self.ahead(stage) + behind + 1, most)

    def program(self) -> Program:
        """The program; see ``check.check_pipeline`` for its proof."""
        if self.width > 1:
            return widened([self.of_copy(c).program() for c in range(self.width)], self.copies)
        return Program(tuple(map(self.actions, range(self.stages))))

    def actions(self, device: int) -> tuple[Action, ...]:
        """One device's list of the program; lists of other devices are made for copies alone."""
        if self.width > 1:
            return self.program().devices[device]
        return tuple(_Stage(self, device).actions())

    def order(self, stage: int) -> Order:
        """What a stage computes; forwards of the last stage are in its backwards."""
        return self._order(stage)

    def of_copy(self, copy: int) -> Pipeline:
        """What one of the copies would run alone: its micro-batches, counted from 0.

        What it draws is always compared with what was foretold, to the end.
        """
        groups = shares(self.groups, self.width)[copy]
        return replace(self, width=1, groups=groups, follows=self.follows or self.draws)

    @property
    def copies(self) -> Copies:
        """Which copies there are."""
        late = self.versions > 1
        return Copies(stages=self.stages, groups=self.groups, width=self.width, late=late)

    @property
    def gradient_sets(self) -> int:
        """Gradients of a stage that are there at a time: of two steps, and of other copies.

        Those of others come, and its own go to them, a message for each.
        """
        has_two = self.versions > 1 and (self.clip or self.width > 1)
        return 1 + has_two + 2 * (self.width - 1)

    def _splits(self, stage: int) -> bool:
        return self.schedule == "zb-h1" and stage > 0 and stage not in self.whole

    def _order(self, stage: int) -> Order:
        """What a stage computes; forwards of the last stage are in its backwards."""
        ends = (self._ends[-1],) if self.schedule == "2bw" else self._ends
        first = 0
        for end in ends:
            for op, micro in self._order_of_group(stage, first, end):
                if op is not Op.F or stage < self.stages - 1:
                    yield op, micro
            first = end

    def _order_of_group(self, stage: int, first: int, end: int) -> Order:
        if self._splits(stage):
            yield from _split_in_turns(first, end, self.ahead(stage), stage)
        elif self.schedule == "gpipe":
            yield from ((Op.F, micro) for micro in range(first, end))
            yield from ((Op.B, micro) for micro in range(first, end))
        else:
            yield from _in_turns(first, end, self.ahead(stage))


def _in_turns(first: int, end: int, ahead: int) -> Order:
    """1F1B, with so many forwards ahead."""
    for micro in range(first, end + ahead):
        if micro < end:
            yield Op.F, micro
        if micro - ahead >= first:
            yield Op.B, micro - ahead


def _split_in_turns(first: int, end: int, ahead: int, behind: int) -> Order:
    """1F1B with backwards in two, the second so many micro-batches behind the first."""
    for micro in range(first, end + ahead):
        if micro < end:
            yield Op.F, micro
        done = micro - ahead
        if done >= first:
            yield Op.I, done
            if done - behind >= first:
                yield Op.W, done - behind
    for micro in range(max(end - behind, first), end):
        yield Op.W, micro


class _Stage:
    """One device's list: what the stage computes, with its messages and steps."""

    def __init__(self, pipeline: Pipeline, stage: int) -> None:
        self._pipeline, self._stage = pipeline, stage
        self._is_last = stage == pipeline.stages - 1
        self._lenders = sorted({a for a, b in pipeline.ties if b == stage})
        self._borrowers = sorted({b for a, b in pipeline.ties if a == stage})
        self._end = pipeline.begun + len(pipeline.groups)  # the newest version then
        last_used = pipeline.version_of(pipeline.num_micros - 1)
        self._newest_used = self._end if pipeline.follows else last_used
        self._known = pipeline.begun  # the version of what is borrowed
        self._late: list[int] = []  # steps that wait for the factor

    def actions(self) -> Iterator[Action]:
        for op, micro in self._pipeline._order(self._stage):
            if op is not Op.W:
                yield from self._before(op, micro)
            yield self._unit(op, micro)
            yield from self._after(op, micro)
            if op in (Op.B, Op.W) and self._pipeline.is_last_of_group(micro):
                yield from self._end_of_group(self._pipeline.group_of(micro))
        yield from self._late_steps(self._end)
        if self._pipeline.follows:
            yield from self._borrow(self._end)
            if not self._pipeline.foretold:
                yield from self._rng_of(self._pipeline.num_micros - 1, True)

    def _unit(self, op: Op, micro: int) -> Action:
        keeps = not (self._pipeline.recompute or self._is_last or op is Op.W)
        parts = (Part.SAVED,) if keeps else ()
        return Action(op, self._stage, micro, self._pipeline.version_of(micro), parts)

    def _before(self, op: Op, micro: int) -> Iterator[Action]:
        """What has to be here: weights, the random state, the boundary or the gradients."""
        version, stage = self._pipeline.version_of(micro), self._stage
        yield from self._late_steps(version)
        yield from self._borrow(version)
        is_first_unit = op is Op.F or self._is_last
        yield from self._rng_of(micro - 1 if op is Op.F else micro, is_first_unit)
        if is_first_unit and stage:
            yield Action(Op.RECV, stage, micro, version, peer=stage - 1)
        elif not is_first_unit:
            yield Action(Op.RECV, stage + 1, micro, version, (Part.GRAD,), peer=stage + 1)

    def _rng_of(self, micro: int, is_first_unit: bool) -> Iterator[Action]:
        """The random state after a micro-batch, at stage 0."""
        due = is_first_unit != self._pipeline.foretold and micro >= 0
        if due and self._hands_rng_on and self._stage == 0 and self._goes_on(micro):
            last, version = self._pipeline.stages - 1, self._pipeline.version_of(micro)
            yield Action(Op.RECV, last, micro, version, (Part.RNG,), peer=last)

    def _goes_on(self, micro: int) -> bool:
        return self._pipeline.follows or micro + 1 < self._pipeline.num_micros

    def _borrow(self, newest: int) -> Iterator[Action]:
        """Versions of borrowed parameters that are not here yet."""
        while self._known < newest:
            self._known += 1
            for lender in self._lenders:
                yield Action(Op.RECV, self._stage, None, self._known, (Part.PARAM,), peer=lender)

    def _after(self, op: Op, micro: int) -> Iterator[Action]:
        version, stage = self._pipeline.version_of(micro), self._stage
        if op is Op.F:
            yield Action(Op.SEND, stage + 1, micro, version, peer=stage + 1)
            return
        if op is Op.W:
            return
        if self._hands_rng_on and self._is_last and self._goes_on(micro):
            yield Action(Op.SEND, stage, micro, version, (Part.RNG,), peer=0)
        if stage:
            yield Action(Op.SEND, stage, micro, version, (Part.GRAD,), peer=stage - 1)

    @property
    def _hands_rng_on(self) -> bool:
        return self._pipeline.draws and self._pipeline.stages > 1

    def _end_of_group(self, group: int) -> Iterator[Action]:
        if not self._pipeline.clip:
            yield from self._step(group)
        elif self._stage == 0:
            yield from self._sync(group)
            yield from self._step(group)
        else:
            yield Action(Op.SEND, self._stage, None, group, (Part.NORM,), peer=0)
            self._late.append(group)
            if self._pipeline.versions == 1:
                yield from self._late_steps(group + 1)

    def _sync(self, group: int) -> Iterator[Action]:
        others = range(1, self._pipeline.stages)
        for other in others:
            yield Action(Op.RECV, other, None, group, (Part.NORM,), peer=other)
        yield Action(Op.SYNC, version=group)
        for other in others:
            yield Action(Op.SEND, 0, None, group, (Part.NORM,), peer=other)

    def _late_steps(self, version: int) -> Iterator[Action]:
        """The steps up to a version that have waited for the factor."""
        while self._late and self._late[0] < version:
            group = self._late.pop(0)
            yield Action(Op.RECV, 0, None, group, (Part.NORM,), peer=0)
            yield from self._step(group)

    def _step(self, group: int) -> Iterator[Action]:
        yield Action(Op.STEP, self._stage, version=group)
        if group + 1 <= self._newest_used:
            for borrower in self._borrowers:
                yield Action(Op.SEND, borrower, None, group + 1, (Part.PARAM,), peer=borrower)
