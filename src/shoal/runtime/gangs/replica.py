"""A replica on its device: its part of the trial's state, and the model that computes with it.

With DDP each replica holds the whole state, as a resident trial does, and the leader brings it to
the host region. With FSDP2 each holds rows of every tensor and brings those: the region is laid
out as any trial's, and what it holds may go on in any technique.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from shoal.core.errors import TrialError
from shoal.device import Device
from shoal.device.losses import not_finite
from shoal.partition.preserve import place_of
from shoal.partition.track import AllocationTracker
from shoal.recipes.bound import clip_limit
from shoal.recipes.habits import trained
from shoal.recipes.recipe import Batch, evaluate_metrics
from shoal.replicas import Piece, slice_of
from shoal.rng import capture_rng, restore_rng, same_rng
from shoal.runtime.gangs.replicated import ReplicaSession
from shoal.runtime.gangs.wrapped import Sharded, Whole, share_buffers
from shoal.runtime.placing.placed import Placed, place_in_slot, place_on_host
from shoal.runtime.units import get

_TOLD = ("frozen", "trained")


class Replica:
    """One replica for the time of a lease; made, used and let go of inside ``group.joined``.

    Args:
        session: The trial, placed in its region and at the step that it goes on from.
        rank: Which one it is; 0 leads.
    """

    def __init__(self, session: ReplicaSession, rank: int, device: Device) -> None:
        self._session, self._rank, self._device = session, rank, device
        self._width = session.members
        self._host = place_on_host(session.region, session.layout, 0)
        self._tracker: AllocationTracker | None = None
        if session.technique.shard:
            self._engine: Whole | Sharded = Sharded(
                session.twin(), session.recipe, device.torch_device
            )
            self._memory, self._placed = self._placed_shards(self._engine)
        else:
            layout = session.layout.shards[0]
            self._memory = device.empty(layout.loaded.num_bytes + layout.state.num_bytes)
            device.poison(self._memory)
            self._placed = place_in_slot(self._memory, layout, ("state",))
        self._load()
        if not session.technique.shard:
            self._engine = Whole(session.model, session.recipe, device.torch_device)
        self._trained = trained(self._engine.root.model)

    # -- state ----------------------------------------------------------------------------

    def _placed_shards(self, engine: Sharded) -> tuple[Tensor, Placed]:
        """Where its rows are: parameters where FSDP2 has them, state in memory of its own."""
        device, states = self._device.torch_device, {}
        for name, entries in self._host.states.items():
            states[name] = {
                key: torch.empty_like(self._rows(entry), device=device)
                for key, entry in entries.items()
            }
        nothing = self._device.empty(0)
        return nothing, Placed(engine.params, states, {}, nothing, nothing, {})

    def _rows(self, tensor: Tensor) -> Tensor:
        """What of a whole tensor is here."""
        if not self._session.technique.shard:
            return tensor
        return slice_of(tensor, self._width, self._rank)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Tensors here and where they are in the region."""
        here, there = self._placed, self._host
        pairs = [(here.params[name], self._rows(there.params[name])) for name in there.params]
        for name, entries in there.states.items():
            pairs += [(here.states[name][key], self._rows(e)) for key, e in entries.items()]
        return pairs

    def _load(self) -> None:
        for here, there in self._pairs():
            here.copy_(there)
        self._session.binding.bind(0, self._placed)

    def store(self, *, leaves: bool) -> None:
        """Bring what is this replica's to tell to the host region."""
        session = self._session
        if self._rank == 0 or session.technique.shard:
            for here, there in self._pairs():
                there.copy_(here)
        if self._rank == 0:
            self._take_buffers()
            session.put_buffers_back()
        if leaves:
            session.binding.bind(0, self._host)
            session.evict_everything()
            self._drop_state()

    def _take_buffers(self) -> None:
        """Have the session's model have the buffers of the one that trained."""
        model = self._session.model
        for name, buffer in self._engine.root.model.named_buffers():
            mine = get(place_of(model, name))
            if mine is not buffer:
                mine.copy_(buffer)

    def close(self) -> None:
        """Let go of what is on the device; what was not stored with ``leaves`` is lost."""
        if self._placed.params:  # the session, which others may hold on to, refers to them
            for parameter in self._session.binding.params.values():
                parameter.grad = None
            self._session.evict_everything()
            self._session.binding.evict_state(0)
        self._engine.close()
        self._drop_state()

    def _drop_state(self) -> None:
        """Refer to nothing on the device nor in the region; a view would keep all of it."""
        nothing = torch.empty(0, dtype=torch.uint8)
        self._memory = nothing
        self._placed = self._host = Placed({}, {}, {}, nothing, nothing, {})

    # -- steps ----------------------------------------------------------------------------

    def backward(self, piece: Piece, *, last: bool) -> float:
        """A batch's rows: their gradients are added; returns their loss, without weight.

        Raises:
            TrialError: it is not finite; nothing was sent then.
        """
        session, root = self._session, self._engine.root
        root.train()
        share_buffers(root.model)
        before = None if self._rank or not session.drew_ahead else capture_rng(session.device)
        weight = piece.weight / session.recipe.accumulate
        loss = self._engine.backward(piece.batch, weight, last=last, check=self._check)
        if before is not None:
            session.draws = not same_rng(before, capture_rng(session.device))
            session.refuse_mixed_draws()
        return loss

    def _check(self, loss: float) -> None:
        if self._session.recipe.on_nonfinite == "fail" and not math.isfinite(loss):
            whose = f"the rows of replica {self._rank}"
            raise not_finite(loss, self._session.step + 1, whose)

    def used(self) -> object:
        """What of the parameters a batch has used, to be compared with other replicas'."""
        return self._engine.used()

    def finish(self) -> None:
        """All batches are through: the gradients are those of all replicas, and clipped.

        Raises:
            TrialError: what is trained is not what was when the replicas were made.
        """
        self._require_trained()
        self._engine.finish()
        if isinstance(self._engine, Sharded):
            params = self._session.binding.params
            for name, grad in self._engine.gradients().items():
                params[name].grad = grad
        if (limit := clip_limit(self._session.recipe)) is not None:
            self._engine.clip(limit)

    def _require_trained(self) -> None:
        """Gradients are added up of what was trained when torch wrapped the model.

        Its DDP does not send others', and its FSDP2 makes those of what is frozen since.
        """
        named = self._session.model.named_parameters()
        for (name, parameter), was in zip(named, self._trained, strict=True):
            now = parameter.requires_grad
            if now > was or (now < was and self._session.technique.shard):
                raise TrialError(
                    f"{name!r} was {_TOLD[was]} when this trial's replicas were made, and is "
                    f"{_TOLD[now]} in step {self._session.step + 1}: replicas add up the "
                    "gradients of what was trained then. Train it on one device "
                    "(technique='resident'), or have the same parameters trained all the time."
                )

    def step(self) -> None:
        """Step what is here."""
        session = self._session
        session.binding.step_where_it_is(0, self._placed, session.step)
        if isinstance(self._engine, Sharded):
            self._engine.clear()
        session.advance_schedule()

    # -- evaluation -----------------------------------------------------------------------

    def begin_evaluation(self) -> None:
        """All replicas have the first one's buffers."""
        share_buffers(self._engine.root.model)

    def evaluate(self, batch: Batch) -> dict[str, float]:
        """A validation batch's loss and metrics."""
        root, session = self._engine.root, self._session
        root.eval()
        before = capture_rng(session.device)
        with torch.no_grad():
            loss, output = root(batch)
            found = evaluate_metrics(session.recipe, loss, output, batch)
        restore_rng(before, session.device)
        return found

    # -- bytes ----------------------------------------------------------------------------

    def count(self) -> None:
        """Count allocations from now on, until ``counted_peak`` is asked for."""
        self._tracker = AllocationTracker(resized=self._engine.gathered, as_alone=True)

    def counted(self) -> AbstractContextManager[object]:
        """Counts what is allocated inside, while that is on."""
        return self._tracker or nullcontext()

    def counted_peak(self) -> int | None:
        """The most bytes that were here since ``count``; None if they were not counted."""
        tracker, self._tracker = self._tracker, None
        return None if tracker is None else self.held_bytes + tracker.peak_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that are here between steps."""
        placed = self._placed
        states = [entry for entries in placed.states.values() for entry in entries.values()]
        own = [*placed.params.values(), *states] if self._session.technique.shard else []
        buffers = sum(buffer.nbytes for buffer in self._session.model.buffers())
        size = self._memory.nbytes + sum(tensor.nbytes for tensor in own)
        return size + buffers + self._engine.bucket_bytes
