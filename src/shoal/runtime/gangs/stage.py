"""One stage of a trial on its device: its shard, its weights, and what computes with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shoal.device import Device
from shoal.memory.layout import GUESS, PREVIOUS
from shoal.memory.store import same_bits, state_views
from shoal.partition.chain import Chain
from shoal.partition.track import AllocationTracker
from shoal.pipeline.build import shares_of, ties_of, whole_stages
from shoal.pipeline.compute import StageCompute
from shoal.pipeline.copies import CopyCompute, Dealer, Dealt
from shoal.pipeline.foretell import Foretelling
from shoal.pipeline.schedule import Pipeline
from shoal.pipeline.stage import Compute
from shoal.pipeline.validate import Validation
from shoal.pipeline.weights import Weights
from shoal.recipes.recipe import Batch, evaluate_metrics
from shoal.rng import capture_rng, restore_rng
from shoal.runtime.gangs.pipelined import PipelineSession
from shoal.runtime.placing.placed import place_in_slot, place_on_host

COUNTED_STEPS = 2
"""Steps whose allocations are counted together: with "2bw" two are under way at a time."""


class BufferWatch:
    """Which of a model's buffers have changed since they were looked at last."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def changed(self) -> set[str]:
        """Their names; they are as they are now for the next time."""
        found = set()
        for name, buffer in self._model.named_buffers():
            if not same_bits(buffer, self._seen[name]):
                self._seen[name] = buffer.clone()
                found.add(name)
        return found


def look_at_draws(session: PipelineSession, chain: Chain, stop: int) -> None:
    """Find out on the first batch whether the model draws, and if that can be foretold.

    What is foretold is what layers from ``stop`` on draw; with copies of a pipeline, what all do.
    The device has those of the model's weights that stay there, and one more layer at a time.
    """
    if session.draws is not None:
        return
    session.model.train()  # a lease may begin with an evaluation
    session.python.put_away()
    batch, rng = session.pieces[0], capture_rng(session.device)
    whole = session.technique.width > 1
    foretelling = Foretelling(chain, stop, session.lent, whole=whole)
    session.draws, foretold = foretelling.look(batch)
    if session.draws and foretold:
        session.foretelling = foretelling
    session.python.put()  # this forward counts for nothing
    restore_rng(rng, session.device)


class Stage:
    """A shard that is brought from the host region to its device, trained there, and stored.

    Args:
        session: The trial, placed in its region and at the step that it goes on from.
        index: Which stage it is, of copy ``copy``.
        on_loss: Told the losses of each step's micro-batches, on the last stage.
        on_metrics: Told each validation batch's metrics, on the last stage.
    """

    def __init__(
        self,
        session: PipelineSession,
        index: int,
        device: Device,
        *,
        on_loss: Callable[[Sequence[float]], None],
        on_metrics: Callable[[dict[str, float]], None],
        copy: int = 0,
    ) -> None:
        self._session, self._index, self._device = session, index, device
        self._copy, self._leads = copy, not (copy or index)
        self._on_loss, self._on_metrics = on_loss, on_metrics
        self._chain: Chain = session.units.chain
        self._shares = shares_of(self._chain, session.technique.cuts or (), session.stages)
        self._share = self._shares[index]
        self._ties = ties_of(self._shares)
        layout = session.layout.shards[index]
        size = layout.loaded.num_bytes + layout.borrowed_bytes + layout.state.num_bytes
        self._memory = device.empty(size)
        device.poison(self._memory)
        self._placed = place_in_slot(self._memory, layout, ("state",))
        self._host = place_on_host(session.region, session.layout, index)
        self._load()
        self._weights = self._made_weights()
        self._compute: StageCompute | CopyCompute | None = None
        self._tracker: AllocationTracker | None = None
        self._steps_counted = 0

    # -- the shard ------------------------------------------------------------------------

    def _load(self) -> None:
        copy, here, there = self._device.copy, self._placed, self._host
        copy(here.param_bytes, there.param_bytes, "up")
        copy(here.state_bytes, there.state_bytes, "up")
        for name, tensor in here.borrowed.items():
            copy(tensor, there.borrowed[name], "up")
        self._session.binding.bind(self._index, here)
        self._buffers = BufferWatch(self._session.model)

    def store(self, *, leaves: bool) -> None:
        """Bring all that changed to the host region; the device's memory is free if it leaves.

        All copies have the same, and the first one brings it.
        """
        session, copy, here, there = self._session, self._device.copy, self._placed, self._host
        self._weights.rest()
        self._note_versions()
        if not self._copy:
            copy(there.param_bytes, here.param_bytes, "down")
            copy(there.state_bytes, here.state_bytes, "down")
            session.put_buffers_back(self._buffers.changed())
        if leaves:
            session.binding.bind(self._index, there)
            session.evict_everything()
            self._memory = self._memory[:0]

    def _made_weights(self) -> Weights:
        session, technique = self._session, self._session.technique
        stale = technique.is_stale
        stepped = self._moving
        keys = (PREVIOUS, GUESS)[: stale + technique.predict]
        states = self._placed.states
        weights = Weights(
            session.binding.params,
            session.optimizer,
            self._share.owned,
            [name for names in self._share.borrowed.values() for name in names],
            versions=1 + stale,
            predict=technique.predict,
            places=[{name: states[name][key] for name in stepped} for key in keys],
        )
        self._fill(keys, stepped)
        if stale and session.step:
            weights.resume([self._borrowed(key) for key in self._kept_versions])
        return weights

    @property
    def _moving(self) -> list[str]:
        """The parameters that steps change; the optimizer may hold frozen ones too."""
        params = self._session.binding.params
        names = self._session.binding.stepped(self._index)
        return [name for name in names if params[name].requires_grad]

    def _fill(self, keys: Sequence[str], stepped: Sequence[str]) -> None:
        """Parameters that have no other version on record have been the same so far."""
        for name in stepped:
            known = self._session.binding.stateful.get(name, set())
            for key in keys:
                if key not in known:
                    self._placed.states[name][key].copy_(self._placed.params[name])

    @property
    def _kept_versions(self) -> tuple[str, ...]:
        """Under which names the older and the newer version lie; "" are the parameters."""
        return (PREVIOUS, GUESS) if self._session.technique.predict else (PREVIOUS, "")

    def _borrowed(self, key: str) -> Mapping[str, Tensor]:
        """A version of what is borrowed, from the owners' places in the region."""
        session, found = self._session, {}
        for owner, names in self._share.borrowed.items():
            shard = session.layout.shards[owner]
            states = state_views(session.region.bytes, shard.state, shard.state_at)
            for name in names:
                is_there = key and key in session.binding.stateful.get(name, ())
                found[name] = states[name][key] if is_there else self._host.borrowed[name]
        return found

    def _note_versions(self) -> None:
        """The other versions are part of what is saved.

        Not of a parameter that has never been stepped: its optimizer has yet to make its state,
        and looks whether there is any.
        """
        session, technique = self._session, self._session.technique
        if not technique.is_stale:
            return
        binding, keys = session.binding, (PREVIOUS, GUESS)[: 1 + technique.predict]
        for name in self._moving:
            places, here = self._placed.states[name], self._placed.params[name]
            state = session.optimizer.state.get(binding.params[name])
            if not state and torch.equal(places[PREVIOUS], here):
                continue
            for key in keys:
                session.optimizer.state[binding.params[name]][key] = places[key]
                binding.stateful.setdefault(name, set()).add(key)

    # -- programs -------------------------------------------------------------------------

    def pipeline(self, groups: tuple[int, ...]) -> Pipeline:
        """What all stages run for the next steps; of the first stage."""
        session, technique = self._session, self._session.technique
        look_at_draws(session, self._chain, self._share.stop)
        session.refuse_mixed_draws()
        return session.pipeline(
            groups,
            ties=self._ties,
            whole=whole_stages(self._shares, bool(technique.recompute)),
            begun=int(technique.is_stale and session.step > 0),
            width=technique.width,
        )

    def begin(self, pipeline: Pipeline, steps_before: int) -> Compute:
        """What computes this stage's list of a program."""
        session = self._session
        session.model.train()
        if self._compute is None and pipeline.width == 1:
            fetch = self._fetch
            self._compute = self._alone(pipeline, fetch, foretelling=session.foretelling)
        elif self._compute is None:
            self._compute = self._one_of_several(pipeline)
        self._compute.begin(pipeline, steps_before)
        return self._compute

    def _fetch(self, group: int) -> Batch:
        return self._session.fetch_micro()

    def _alone(
        self,
        pipeline: Pipeline,
        fetch: Callable[[int], Batch],
        foretelling: Foretelling | None = None,
    ) -> StageCompute:
        return StageCompute(
            pipeline,
            self._chain,
            self._share,
            self._weights,
            fetch=fetch,
            after_step=self._stepped,
            foretelling=foretelling,
            on_loss=self._on_loss,
        )

    def _one_of_several(self, pipeline: Pipeline) -> CopyCompute:
        """With what copies of the pipeline send each other; the leader reads for all of them."""
        session = self._session
        dealt, device = Dealt(session.device), session.device
        return CopyCompute(
            pipeline,
            self._alone(pipeline.of_copy(self._copy), dealt.fetch),
            self._copy,
            self._share,
            self._weights,
            session.model,
            dealt=dealt,
            dealer=Dealer(self._fetch, session.foretelling, device) if self._leads else None,
        )

    def end(self, pipeline: Pipeline) -> None:
        """The list is through."""
        assert self._compute is not None
        if self._leads and pipeline.draws:
            restore_rng(self._compute.end_rng, self._session.device)
        self._weights.turn(pipeline.begun + len(pipeline.groups))

    def validation(self, batch: Batch | None) -> Validation:
        """What runs this stage's part of a validation batch; of the first stage its batch too."""
        session = self._session
        session.model.eval()
        self._weights.bind_newest()
        return Validation(self._chain, self._share, lambda: batch, self._tell_metrics)

    def _tell_metrics(self, loss: Tensor, output: Any, batch: Batch) -> None:
        self._on_metrics(evaluate_metrics(self._session.recipe, loss, output, batch))

    def _stepped(self) -> None:
        self._session.binding.keep_state(self._index, self._placed)
        self._session.advance_schedule()
        self._steps_counted += 1

    # -- bytes ----------------------------------------------------------------------------

    def count(self) -> None:
        """Count allocations from now on, until ``counted_peak`` is asked for."""
        self._tracker, self._steps_counted = AllocationTracker(as_alone=True), 0

    def counted(self) -> AbstractContextManager[object]:
        """Counts what is allocated inside, while that is on."""
        return self._tracker or nullcontext()

    @property
    def has_counted_enough(self) -> bool:
        """Whether as many steps were counted as may overlap."""
        return self._tracker is not None and self._steps_counted >= COUNTED_STEPS

    def counted_peak(self) -> int | None:
        """The most bytes that were here since ``count``; None if they were not counted."""
        tracker, self._tracker = self._tracker, None
        if tracker is None:
            return None
        buffers = sum(buffer.nbytes for buffer in self._session.model.buffers())
        return self._memory.nbytes + buffers + tracker.peak_bytes
