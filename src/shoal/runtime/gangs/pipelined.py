"""A trial in stages, as its first stage reads its data: see ``leader``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import TrialError
from shoal.core.technique import Pipelined, kept_shards, saving_shards, spans_of
from shoal.memory.layout import GUESS, PREVIOUS, TrialLayout
from shoal.memory.store import Region
from shoal.partition.build import clone_batch
from shoal.partition.chain import Chain
from shoal.pipeline.foretell import Foretelling
from shoal.pipeline.schedule import Pipeline
from shoal.pipeline.stops import steps_together
from shoal.program.ir import Program
from shoal.recipes.pieces import cut_rows
from shoal.recipes.recipe import Batch, to_device
from shoal.runtime.gangs.leader import GangSession
from shoal.runtime.placing.placed import place_on_host
from shoal.runtime.saving.extrastate import extra_state
from shoal.runtime.task import Task
from shoal.runtime.units import ChainUnits
from shoal.spill.generate import Route


def without_versions(state: Mapping[str, Any]) -> dict[str, Any]:
    """A trial's state without them: what a plain loop ends with."""
    optimizer = state["optimizer"]
    entries = {
        name: {key: value for key, value in entry.items() if key not in (PREVIOUS, GUESS)}
        for name, entry in optimizer["state"].items()
        if not entry or set(entry) - {PREVIOUS, GUESS}
    }
    return {**state, "optimizer": {**optimizer, "state": entries}}


class StageUnits:
    """The chain of a model in stages; what computes is ``pipeline.compute``."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain


class PipelineSession(GangSession):
    """A trial admitted to several devices, at one of its stages.

    Attributes:
        pieces: Micro-batches that were read and not used yet.
        foretelling: What later stages draw, where the first one can know that.
        before_lent: Called before parameters point elsewhere: nobody else may step meanwhile.
    """

    foretelling: Foretelling | None = None
    before_lent: Callable[[], None] = staticmethod(lambda: None)

    @property
    def technique(self) -> Pipelined:
        """How the trial is cut, with everything settled."""
        assert isinstance(self.job.technique, Pipelined)
        return self.job.technique

    @property
    def stages(self) -> int:
        """How many there are of each copy."""
        return self.members // self.technique.width

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Per stage its shards."""
        return spans_of(self.technique, self.job.shards)

    def pipeline(self, groups: tuple[int, ...], **more: Any) -> Pipeline:
        """What all stages run for the next steps, with what a seat knows ``more`` of it."""
        technique = self.technique
        return Pipeline(
            schedule=technique.known_schedule,
            stages=self.stages,
            groups=groups,
            recompute=bool(technique.recompute),
            lag=technique.lag or 0,
            clip=self.recipe.clip_grad_norm is not None,
            draws=bool(self.draws),
            foretold=self.foretelling is not None,
            follows=True,
            **more,
        )

    def _units(self) -> Any:
        """The chain of the whole model.

        Raises:
            TrialError: modules keep more than tensors, and each stage would keep its own.
        """
        if key := next(iter(extra_state(self.model)), ""):
            raise TrialError(
                f"the model keeps {key!r} beside its tensors, and every stage would have its "
                "own. Train it with technique='spilled'."
            )
        count = self.recipe.accumulate * self._pieces_of_a_batch
        recipe = replace(self.recipe, accumulate=count)
        chain = self._chain().with_recipe(recipe)
        if not self.technique.is_spilled:
            return StageUnits(chain)
        spans = [shard.layers for shard in self.job.shards]
        route = Route(len(spans), saves=saving_shards(self.technique))
        return ChainUnits(chain, recipe, spans, self.device, route)

    def place(self, layout: TrialLayout, region: Region, *, fresh: bool) -> None:
        """As every trial; and where in the region each shard's parameters are."""
        super().place(layout, region, fresh=fresh)
        shards = range(len(layout.shards))
        self._homes = [place_on_host(region, layout, shard).params for shard in shards]

    @property
    def _staying(self) -> tuple[int, ...]:
        """The shards of the first stage whose parameters are there all the time."""
        if not self.technique.is_spilled:
            return (0,)
        return tuple(s for s in kept_shards(self.technique) if s < self.spans[0][1])

    @contextmanager
    def lent(self, layers: range) -> Iterator[None]:
        """At the first stage the parameters of these layers, others as the region has them.

        Each is on the device for as long as this is: of a model that fits no device a layer at a
        time. Nothing of a lease is held on to: what foretells draws outlives it.
        """
        self.before_lent()
        here = {name for shard in self._staying for name in self.owned[shard]}
        params = self.binding.params
        before = {}
        for name, tensor in self._on_host(layers):
            if name not in here:
                before[name] = params[name].data
                params[name].data = tensor.to(self.device, copy=True)
        try:
            yield
        finally:
            for name, tensor in before.items():
                params[name].data = tensor
            torch.clear_autocast_cache()  # which has a cast of each weight that was there

    def _on_host(self, layers: range) -> Iterator[tuple[str, Tensor]]:
        """The parameters of some layers in the region."""
        wanted = set(self.units.chain.parameters_in(layers.start, layers.stop))
        for index, shard in enumerate(self.job.shards):
            if set(range(*shard.layers)) & set(layers):
                places = self._homes[index]
                yield from ((name, places[name]) for name in places.keys() & wanted)
                wanted -= places.keys()

    # -- steps --------------------------------------------------------------------------

    def _train_group(self, first: Any) -> Iterator[Task]:
        """Steps that stages run as one program: one, or with "2bw" all up to the next stop."""
        self.epoch_number = self.epoch + 1
        self.pieces: deque[Batch] = deque(self._cut(first))
        groups = self._groups()
        yield Task(Program(()), "step", groups=groups)

    def _groups(self) -> tuple[int, ...]:
        """How many micro-batches each of the next steps takes."""
        accumulate, pieces = self.recipe.accumulate, self._pieces_of_a_batch
        if self.feed.num_batches is None:
            return (self._read_group() * pieces,)
        left = self.feed.num_batches - (self.feed.batch - 1)
        steps = min(-(-left // accumulate), self._steps_at_once())
        sizes = (min(accumulate, left - step * accumulate) for step in range(steps))
        return tuple(size * pieces for size in sizes)

    def _steps_at_once(self) -> int:
        """Between two of "2bw" nobody waits; so they are run together, up to the next stop."""
        if not self.job.runs_on or not self.settings.checkpoint_every_s:
            return 1
        return steps_together(
            self.step,
            self.job.step_s,
            left=self.steps_left,
            lease_left=None if self.until is None else self.until - self.step,
            eval_every=self.settings.eval_every,
        )

    def keep_ahead(self, batch: Any) -> None:
        self.pieces += self._cut(batch)

    def fetch_micro(self) -> Batch:
        """The next micro-batch, the caller's own."""
        if not self.pieces:
            self.pieces += self._cut(self._next_of_group())
        return self.pieces.popleft()

    @property
    def _pieces_of_a_batch(self) -> int:
        return (self.technique.micro_batches or 1) // self.recipe.accumulate or 1

    def _cut(self, batch: Any) -> Sequence[Batch]:
        """A batch on the device, in pieces of equal rows if it is to be cut."""
        moved = clone_batch(to_device(batch, self.device))  # a source may use its buffer again
        count = self._pieces_of_a_batch
        return [moved] if count == 1 else cut_rows(moved, count)
