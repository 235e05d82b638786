"""One stage of one copy of a pipeline: what it computes alone, and what copies send each other.

``wide`` says when; here is what. A stage computes as if its copy were alone (``StageCompute``,
with the copy's micro-batches counted from 0); around that it is handed batches, and adds up
gradients before their step.

[Note: random numbers of copies]
Micro-batch k + 1 begins with the random state that k ends with, and another copy has it. So the
first stage of copy 0, which reads the data, foretells all that the model draws for each
micro-batch (see ``foretell``), and hands a batch out with the state that it begins with and the
one that it must end with. Each copy compares.

[Note: buffers of copies]
What forwards change, BatchNorm's statistics, is each copy's own during a step, and copy 0's for
all of them after it: they come with its gradients. With "2bw" forwards of the next step are under
way then, so that such models are refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.core.errors import TrialError
from shoal.partition.preserve import BufferWatch, read_buffers, write_buffers
from shoal.pipeline.compute import Share, StageCompute
from shoal.pipeline.foretell import Foretelling
from shoal.pipeline.packing import pack_rng, unpack_rng
from shoal.pipeline.schedule import Pipeline
from shoal.pipeline.sums import InOrder
from shoal.pipeline.weights import Weights
from shoal.program.ir import Action, Op, Part
from shoal.program.world import is_batch
from shoal.recipes.recipe import Batch
from shoal.rng import RngState, capture_rng, restore_rng, same_rng


class Handed(NamedTuple):
    """A micro-batch, and the random states that it begins and ends with, if it draws."""

    batch: Batch
    begins: RngState | None = None
    ends: RngState | None = None


class Dealer:
    """Reads the micro-batches of all copies in the order of the data, ahead of their turn.

    Args:
        fetch: The next micro-batch of a step; it has memory of its own.
        foretelling: What the whole model draws for one, where it draws.
        device: Whose random streams there are beside the process's.
    """

    def __init__(
        self,
        fetch: Callable[[int], Batch],
        foretelling: Foretelling | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._fetch, self._foretelling, self._device = fetch, foretelling, device
        self._pipeline: Pipeline | None = None
        self._ready: dict[int, Handed] = {}
        self._next = 0
        self._rng: RngState | None = None  # after the last one that was read

    def begin(self, pipeline: Pipeline) -> None:
        """Go on with another program; all that was read is handed out."""
        assert not self._ready
        self._pipeline, self._next, self._rng = pipeline, 0, None

    def take(self, micro: int) -> Handed:
        """A micro-batch; those before it are read too, if they have not been."""
        while self._next <= micro:
            self._ready[self._next] = self._read(self._next)
            self._next += 1
        return self._ready.pop(micro)

    @property
    def end_rng(self) -> RngState:
        """The random state after the last micro-batch that was read."""
        return self._rng or capture_rng(self._device)

    def _read(self, micro: int) -> Handed:
        pipeline = self._pipeline
        assert pipeline is not None
        if self._rng is not None:
            restore_rng(self._rng, self._device)
        batch = self._fetch(pipeline.group_of(micro))
        if not pipeline.draws:
            return Handed(batch)
        assert self._foretelling is not None
        begins = capture_rng(self._device)
        self._foretelling.draw_on(batch)
        self._rng = capture_rng(self._device)
        return Handed(batch, begins, self._rng)


class Dealt:
    """What a copy's first stage was handed and has not begun, in its order."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._waiting: deque[Handed] = deque()
        self._device = device

    def put(self, handed: Handed) -> None:
        """It is the next one."""
        self._waiting.append(handed)

    def fetch(self, group: int) -> Batch:
        """The next micro-batch; the random state is the one that it begins with."""
        handed = self._waiting.popleft()
        if handed.begins is not None:
            restore_rng(handed.begins, self._device)
        return handed.batch


class CopyCompute:
    """Runs the actions of one stage of one copy.

    Args:
        alone: The stage as it would compute if its copy were alone; it fetches from ``dealt``.
        copy: Which one it is.
        share: The stage's part of the model.
        weights: Its versions.
        model: The whole model, for its buffers.
        dealer: Of the first stage of copy 0.

    Raises:
        TrialError: two steps are under way at a time, and the stage's forwards change buffers.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        alone: StageCompute,
        copy: int,
        share: Share,
        weights: Weights,
        model: nn.Module,
        *,
        dealt: Dealt,
        dealer: Dealer | None = None,
    ) -> None:
        self._alone, self._copy, self._share = alone, copy, share
        self._weights, self._model = weights, model
        self._dealt, self._dealer = dealt, dealer
        self._watch = BufferWatch(model)
        self._ends: dict[int, RngState] = {}
        self._sums: dict[int, tuple[InOrder, int]] = {}  # of a step, and how many are in it
        refuse_buffers(pipeline, share)
        self._set(pipeline)

    def _set(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        micros = pipeline.copies.micros(self._copy)
        self._numbers = {micro: number for number, micro in enumerate(micros)}
        if self._dealer is not None:
            self._dealer.begin(pipeline)

    def begin(self, pipeline: Pipeline, steps_before: int) -> None:
        """Go on with another program, after so many steps; the one before is through."""
        assert not self._sums
        self._set(pipeline)
        self._watch.restart()  # what an evaluation wrote to is no forward's of these steps
        self._ends.clear()
        self._alone.begin(pipeline.of_copy(self._copy), steps_before)

    @property
    def end_rng(self) -> RngState:
        """The random state that training goes on with."""
        return self._alone.end_rng if self._dealer is None else self._dealer.end_rng

    # -- actions --------------------------------------------------------------------------

    def run(self, action: Action) -> None:
        """Compute one action."""
        first = action.op is Op.F or (self._pipeline.stages == 1 and action.op in (Op.B, Op.I))
        if first and self._dealer is not None:
            self._put(action.micro or 0, self._dealer.take(action.micro or 0))
        self._alone.run(self._here(action))
        if first and self._pipeline.stages == 1 and self._pipeline.draws:
            self._compare(action.micro or 0, self._alone.end_rng)

    def give(self, action: Action) -> Any:
        """What a SEND is to bring."""
        if is_batch(action):
            assert self._dealer is not None
            batch, begins, ends = self._dealer.take(action.micro or 0)
            return batch, begins and pack_rng(begins), ends and pack_rng(ends)
        if Part.SUM in action.parts:
            self._refuse_new_buffers()
            grads = self._weights.gradients(action.version)
            return grads, read_buffers(self._model, () if self._copy else self._share.buffers)
        return self._alone.give(self._here(action))

    def take(self, action: Action, tree: Any) -> None:
        """What a RECV brought."""
        if is_batch(action):
            batch, begins, ends = tree
            begins, ends = (state and unpack_rng(state) for state in (begins, ends))
            self._put(action.micro or 0, Handed(batch, begins, ends))
        elif Part.SUM in action.parts:
            self._add(action, *tree)
        elif Part.RNG in action.parts:
            self._compare(action.micro or 0, unpack_rng(tree))
        else:
            self._alone.take(self._here(action), tree)

    def _here(self, action: Action) -> Action:
        """The action as the copy alone would have it."""
        micro = None if action.micro is None else self._numbers[action.micro]
        return replace(action, micro=micro, trial=0)

    def _refuse_new_buffers(self) -> None:
        """Raises TrialError where a forward changed what none did on the first batch."""
        found = sorted(self._watch.changed() - set(self._share.buffers))
        if found:
            raise TrialError(
                f"a forward changed the buffer {found[0]!r}, which it did not on the first batch: "
                f"{self._pipeline.width} copies of the pipeline would each have their own. Use "
                "width=1, or have it change from the first batch on."
            )

    # -- batches --------------------------------------------------------------------------

    def _put(self, micro: int, handed: Handed) -> None:
        self._dealt.put(handed)
        if handed.ends is not None:
            self._ends[micro] = handed.ends

    def _compare(self, micro: int, state: RngState) -> None:
        """Raises TrialError where it is not what was foretold."""
        if not same_rng(self._ends.pop(micro), state):
            raise TrialError(
                f"the model drew other random numbers for micro-batch {micro} than for earlier "
                "ones of its form: its draws depend on what it computes, and copies of a pipeline "
                "have to know them before. Use width=1, or train it spilled."
            )

    # -- sums -----------------------------------------------------------------------------

    def _add(self, action: Action, grads: Mapping[str, Tensor], buffers: Any) -> None:
        """Another copy's gradients of a step; the last ones complete it."""
        step, other = action.version, action.trial
        if step not in self._sums:
            self._sums[step] = InOrder(self._copy, self._weights.gradients(step)), 0
        added, count = self._sums.pop(step)
        added.take(other, grads)
        write_buffers(self._model, buffers)
        if count + 2 < self._pipeline.width:
            self._sums[step] = added, count + 1
        else:
            self._weights.replace_gradients(step, added.grads())


def refuse_buffers(pipeline: Pipeline, share: Share) -> None:
    """Raises TrialError where copies cannot have buffers in common."""
    if pipeline.width > 1 and pipeline.versions > 1 and share.buffers:
        raise TrialError(
            f"a forward changes the buffer {share.buffers[0]!r}, as BatchNorm does, and "
            f"{pipeline.width} copies of a '2bw' pipeline are at no time between two steps to "
            "have the same again. Use schedule='flush', or width=1."
        )
