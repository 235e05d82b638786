"""What F and B compute for an array: one shard of its chain, for all of its slots.

A shard's part of the model's code runs for all slots as a whole pass does (``fusion.sharded``);
what enters and leaves it are stacked tensors. As in ``ChainUnits`` a shard's backward runs its
forward again, with the random numbers and the buffers that the first one saw.

[Note: who takes part]
Slots whose batch has the usual layout run together. One with a batch of another layout, the
short last one, runs by itself (``oddslots``). Where batches vary in length there is no usual one:
who calls brings those of one layout at a time. A slot whose
code or data raises takes no part from then on: where a part raises, the slots are tried one by
one, everybody with that one's batch and inputs; what was found to raise gets somebody else's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from shoal.fusion.crew import Crew, idle_slots
from shoal.fusion.declined import Declined, leaving
from shoal.fusion.passes.fused import filled, first_line, is_out_of_memory, masked
from shoal.fusion.passes.gathered import require_even
from shoal.fusion.passes.idle import nothing_for_idle
from shoal.fusion.passes.outputs import put_together, taken_apart
from shoal.fusion.passes.sharded import Inside, Packed, ShardBackend, backward
from shoal.fusion.passes.streams import States
from shoal.partition.chain import Chain
from shoal.partition.chain import Micro as Context
from shoal.partition.measure import private_wires
from shoal.partition.savedset import Cell
from shoal.partition.ties import TiedParts
from shoal.partition.transplant import transplanted
from shoal.partition.units import (
    Boundary,
    handed_on,
    require_known_gradients,
    wire_roots,
)
from shoal.partition.wires import Wire, storage_key
from shoal.program.ir import Program
from shoal.runtime.arrays.micro import Apart, Result, StackedMicro
from shoal.runtime.arrays.oddslots import OddSlots
from shoal.runtime.units import Micro
from shoal.spill.generate import Route

LOSS = "loss"


class StackedUnits:
    """The shards of an array.

    Args:
        crew: Who is there now.
        chain: Of a model of the members' code.
        spans: Layers of each shard.
        usual: Whether a batch is of the layout of those that run together; None: all are.
    """

    def __init__(
        self,
        crew: Callable[[], Crew],
        backend: ShardBackend,
        chain: Chain,
        spans: Sequence[tuple[int, int]],
        route: Route,
        usual: Callable[[Any], bool] | None,
    ) -> None:
        self._crew, self._backend, self._chain = crew, backend, chain
        self._spans, self._route, self._usual = spans, route, usual
        self.num_shards, self.frozen = len(spans), route.frozen
        self._changing = [
            list(dict.fromkeys(n for layer in range(*span) for n in chain.changing_buffers(layer)))
            for span in spans
        ]
        self._chains: tuple[Any, Chain] | None = None  # of which template
        self._odd = OddSlots(crew, chain, spans, route)
        self._to_come = 1  # micro-batches of the step
        self._are_alone = False  # whether slots are evaluated by themselves, on whatever batch
        self._received: dict[str, set[int]] = {}  # slots with a gradient, by parameter
        self._took_part: set[int] = set()
        self.scale = 1.0 / chain.recipe.accumulate

    def written(self, shard: int) -> Sequence[str]:
        """None: such models are declined."""
        return ()

    def movable(self, shard: int, micro: Micro) -> list[Cell]:
        """Nothing: every shard recomputes."""
        return []

    def private(self, shard: int, micro: Micro) -> dict[Any, Tensor]:
        """Of a shard's input, what no other shard reads; of slots by themselves too."""
        assert isinstance(micro, StackedMicro)
        found: dict[Any, Tensor] = {}
        if micro.wires:
            before, here = self._spans[shard - 1 : shard + 1]
            wires = private_wires(self._chain, micro.context, before, here, micro.wires)
            there = {storage_key(b) for b in self._crew().stacked.buffers.values()}
            found |= {w: t for w, t in wires.items() if storage_key(t) not in there}
        for slot, own in micro.apart.items():
            alone = self._odd.private(shard, slot, own)
            found |= {Apart(slot, wire): tensor for wire, tensor in alone.items()}
        return found

    def restart(self, micro_batches: int, *, alone: bool = False) -> None:
        """A step of so many micro-batches begins, or an evaluation of one batch.

        ``alone``: of each slot by itself, whatever the layout of its batch.
        """
        self._to_come, self._are_alone = micro_batches, alone
        self._odd.restart()
        self._received.clear()
        self._took_part.clear()

    def lacking(self, slot: int | None) -> AbstractSet[str]:
        """As ``OddSlots.lacking``."""
        return self._odd.lacking(slot)

    def begin(self, batch: Sequence[Any]) -> StackedMicro:
        """Take up a batch of each slot; None of one that waits.

        A batch that cannot be taken up is its slot's failure, and no other's.
        """
        self._to_come -= 1
        micro = StackedMicro(batch, context=Context(None), active=[False] * len(batch))
        micro.is_last = self._to_come <= 0
        for slot, one in enumerate(batch):
            if one is not None:
                self._take_up(slot, one, micro)
        self._odd.ran_together(micro.taking)
        return micro

    def _take_up(self, slot: int, batch: Any, micro: StackedMicro) -> None:
        try:
            if not self._are_alone and (self._usual is None or self._usual(batch)):
                micro.active[slot] = True
            else:
                micro.apart[slot] = self._odd.begin(slot, batch)
        except (Exception, SystemExit) as error:
            if is_out_of_memory(error):
                raise
            micro.failures[slot] = error

    def step_program(self, micro_batches: int, clip: bool) -> Program:
        """One optimizer step."""
        return self._route.step(micro_batches, clip)

    def micro_program(self, micro: int) -> Program:
        """A micro-batch of a step of an unknown number of them."""
        return self._route.micro(micro)

    def finish_program(self, clip: bool) -> Program:
        """The step after those."""
        return self._route.finish(clip)

    def evaluation_program(self) -> Program:
        """One validation batch."""
        return self._route.evaluation()

    # -- forward ----------------------------------------------------------------------

    def forward(self, shard: int, micro: StackedMicro) -> Result | None:
        """A forward without gradients; losses and outputs when it is the last shard's."""
        result = None
        if any(micro.active):
            result = self._guarded(shard, micro, lambda: self._forward(shard, micro))
        found: dict[int, tuple[Tensor, Any]] = {}
        for slot in list(micro.apart):
            with self._by_itself(slot, micro):
                alone = self._odd.forward(shard, slot, micro.apart[slot])
                if alone is not None:
                    found[slot] = alone
        return Result.of_each(self._crew().width, found) if found else result

    def _forward(self, shard: int, micro: StackedMicro) -> Result | None:
        crew, last = self._crew(), shard == self.num_shards - 1
        before = self._buffers_now(crew, shard)
        if last:
            with torch.no_grad():
                result = self._evaluated(micro)
            self._keep_idle(crew, micro, before)
            return result
        goes_back = crew.members[0].module.training and shard >= self.frozen
        if goes_back:
            micro.buffers[shard] = before
        start, stop = self._spans[shard]
        layers = [(start, stop)]
        in_graphs = self._chain.skeleton.graph_kernels and crew.members[0].module.training
        if in_graphs:  # the kernels that torch takes for gradients, a layer's graph at a time
            layers = [(layer, layer + 1) for layer in range(start, stop)]
        made: dict[Wire, Packed] = {}
        given = self._given(micro, start)
        for first, end in layers:
            with torch.set_grad_enabled(in_graphs):
                inside = self._as_leaves(given) if in_graphs else given
                new = self._run(micro, first, end, inside, shard)
            if goes_back and (states := crew.streams.begun) is not None:
                micro.streams.setdefault(shard, states)
            new = {wire: Packed(t.detach(), dim) for wire, (t, dim) in new.items()}
            alive = self._chain.live_wires(end, micro.context)
            given = {wire: new[wire] if wire in new else given[wire] for wire in alive}
        made = {wire: packed for wire, packed in given.items() if wire not in micro.wires}
        self._note(micro, self._outside_parameters(crew, made))
        self._keep_idle(crew, micro, before)
        if not goes_back:
            self._keep(micro, [stop])
        return None

    def _as_leaves(self, given: Mapping[Wire, Packed]) -> dict[Wire, Packed]:
        return {
            wire: Packed(t.detach().requires_grad_(self._chain.needs_grad(wire)), dim)
            for wire, (t, dim) in given.items()
        }

    def _evaluated(self, micro: StackedMicro) -> Result:
        start, _ = self._spans[-1]
        crew = self._crew()
        form: list[Any] = []
        given = self._given(micro, start)

        def work(inside: Inside) -> dict[Any, Tensor]:
            loss, output = self._loss(inside, micro, start, given)
            tensors, left = taken_apart(output)
            form[:] = [left]
            return {LOSS: loss, **dict(enumerate(tensors))}

        made = self._part(crew, micro, self.num_shards - 1, work)
        losses = self._by_slot(made.pop(LOSS))
        outputs = [
            put_together(form[0], slot, lambda index, slot=slot: made[index].row(slot))  # type: ignore[misc]
            for slot in range(crew.width)
        ]
        return Result(masked(losses, micro.active), outputs)

    # -- backward ---------------------------------------------------------------------

    def backward(self, shard: int, micro: StackedMicro) -> Result | None:
        """A forward with gradients and the backward; losses when it is the last shard's.

        Gradients are added to those of the stacked parameters, also of slots by themselves.
        """
        last = shard == self.num_shards - 1
        losses = torch.full((self._crew().width,), math.nan, dtype=torch.float64)
        counted = set[int]()
        if any(micro.active):
            work = self._backward_last if last else self._backward
            with self._noting(shard, micro):
                found = self._guarded(shard, micro, lambda: work(shard, micro))
            losses = losses if found is None else found
            counted = set(micro.taking)
        for slot in list(micro.apart):
            with self._by_itself(slot, micro):
                mine, is_last = micro.apart[slot], micro.is_last
                loss = self._odd.backward(shard, slot, mine, is_last=is_last)
                if loss is not None:
                    losses[slot] = loss
                    counted.add(slot)
        if micro.is_last:
            self._odd.settle(shard)
        if not last:
            return None
        return Result(losses, counted=[slot in counted for slot in range(len(losses))])

    @contextmanager
    def _noting(self, shard: int, micro: StackedMicro) -> Iterator[None]:
        """A backward inside: which slots have a gradient of which parameters after it."""
        blocks = self._trained_in(shard) if self._usual is None else {}
        hooks = [
            block.register_hook(self._receiver(name, micro)) for name, block in blocks.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._took_part.update(micro.taking)

    def _receiver(self, name: str, micro: StackedMicro) -> Callable[[Tensor], None]:
        return lambda grad: self._received.setdefault(name, set()).update(micro.taking)

    def _trained_in(self, shard: int) -> dict[str, Tensor]:
        """Those that it owns: what a later shard makes for one comes to it on the way back."""
        blocks = self._crew().stacked.parameters
        names = (
            n for layer in range(*self._spans[shard]) for n in self._chain.parameters_of(layer)
        )
        return {name: blocks[name] for name in names if blocks[name].requires_grad}

    def require_even(self, without: Collection[int], shards: Iterable[int]) -> None:
        """Check, before these shards step, that slots have gradients of the same parameters.

        Where batches vary in length. Those that do not step are ``without`` them.

        Raises:
            Declined: one lacks a gradient that others have.
        """
        for shard in shards if self._usual is None else ():
            there = {n: self._received[n] for n in self._trained_in(shard) if n in self._received}
            require_even(there, self._took_part.difference(without))

    def _backward_last(self, shard: int, micro: StackedMicro) -> Tensor:
        crew, (start, stop) = self._crew(), self._spans[shard]
        before = self._buffers_now(crew, shard)
        entries, given = self._entries(micro, start)
        parts = self._parts(crew, start, stop)

        def work(inside: Inside) -> dict[Any, Tensor]:
            return {LOSS: self._loss(inside, micro, start, given)[0]}

        with torch.enable_grad():
            losses = self._by_slot(self._part(crew, micro, shard, work)[LOSS])
        weights = torch.tensor(micro.active, dtype=losses.dtype, device=losses.device)
        parts.arrive({})
        with self._nothing_for_idle(shard, micro), parts:
            backward([losses], [weights * self.scale])
        self._hand_on(shard, micro, entries, parts)
        self._keep_idle(crew, micro, before)
        return masked(losses.detach(), micro.active)

    def _backward(self, shard: int, micro: StackedMicro) -> None:
        states, before = micro.streams.pop(shard, None), micro.buffers.pop(shard)
        if not micro.grads and not micro.tied:
            return
        crew, (start, stop) = self._crew(), self._spans[shard]
        self._fill_returned(micro, start)
        streams, after = crew.streams.now(), self._buffers_now(crew, shard)
        if states is not None:
            crew.streams.put(states)
        self._write_buffers(crew, before)
        entries, given = self._entries(micro, start)
        parts = self._parts(crew, start, stop)
        with torch.enable_grad():
            made = self._run(micro, start, stop, given, shard)
        tensors = {wire: packed.tensor for wire, packed in made.items()}
        require_known_gradients(self._chain, tensors)
        inside = {wire: packed.tensor for wire, packed in given.items()}
        edges = {w: get_gradient_edge(t) for w, t in (inside | tensors).items() if t.requires_grad}
        del made, tensors, inside, given
        parts.arrive(micro.tied)
        roots = list(parts.roots)
        read = self._chain.read_by(micro.context, start, stop)
        roots += wire_roots(entries, edges, micro.grads, read)
        micro.grads = {}
        if roots:
            with self._nothing_for_idle(shard, micro), parts:
                backward([edge for edge, _ in roots], [grad for _, grad in roots])
        self._hand_on(shard, micro, entries, parts)
        self._write_buffers(crew, after)  # only now: batch_norm saves its statistics
        crew.streams.put(streams)

    def _nothing_for_idle(self, shard: int, micro: StackedMicro) -> AbstractContextManager[None]:
        adds = self.scale != 1 or self._usual is None
        return nothing_for_idle(self._trained_in(shard).values(), micro.active, adds=adds)

    def _hand_on(
        self, shard: int, micro: StackedMicro, entries: Mapping[Wire, Boundary], parts: TiedParts
    ) -> None:
        micro.grads, micro.tied = handed_on(entries), parts.carried
        self._keep(micro, [first for first, _ in self._spans[max(1, self.frozen) : shard]])

    def _entries(
        self, micro: StackedMicro, start: int
    ) -> tuple[dict[Wire, Boundary], dict[Wire, Packed]]:
        given = self._given(micro, start)
        needs = self._chain.needs_grad
        entries = {wire: Boundary(packed.tensor, needs(wire)) for wire, packed in given.items()}
        return entries, {w: Packed(entries[w].tensor, packed.dim) for w, packed in given.items()}

    def _parts(self, crew: Crew, start: int, stop: int) -> TiedParts:
        return TiedParts(self._chain, start, stop, crew.stacked.parameters.__getitem__)

    # -- a part of the model's code ---------------------------------------------------

    def _given(self, micro: StackedMicro, start: int) -> dict[Wire, Packed]:
        """What is alive where a shard starts."""
        alive = self._chain.live_wires(start, micro.context) if start else ()
        return {wire: Packed(micro.wires[wire], micro.dims[wire]) for wire in alive}

    def _run(
        self,
        micro: StackedMicro,
        start: int,
        stop: int,
        given: Mapping[Wire, Packed],
        shard: int,
    ) -> dict[Wire, Packed]:
        def work(inside: Inside) -> dict[Any, Tensor]:
            chain = self._chain_of(inside)
            micro.context.batch = inside.batch
            wires = {wire: packed.within(inside.level) for wire, packed in given.items()}
            return dict(chain.forward(micro.context, start, stop, wires))

        return self._part(self._crew(), micro, shard, work)

    def _loss(
        self, inside: Inside, micro: StackedMicro, start: int, given: Mapping[Wire, Packed]
    ) -> tuple[Tensor, Any]:
        chain = self._chain_of(inside)
        micro.context.batch = inside.batch
        wires = {wire: packed.within(inside.level) for wire, packed in given.items()}
        return chain.loss(micro.context, start, wires)

    def _part(
        self,
        crew: Crew,
        micro: StackedMicro,
        shard: int,
        work: Callable[[Inside], Mapping[Any, Tensor]],
    ) -> dict[Any, Packed]:
        try:
            batches = filled(micro.batch, micro.active)
            return self._backend.part(crew, batches, micro.active, self._changing[shard], work)
        finally:
            micro.context.batch = None  # it was of the level

    def _chain_of(self, inside: Inside) -> Chain:
        """The chain with the modules of the code that runs."""
        template = inside.template
        if self._chains is None or self._chains[0] is not template:
            chain = transplanted(self._chain, template.module, template.recipe)
            self._chains = template, chain
        return self._chains[1]

    def _by_slot(self, packed: Packed) -> Tensor:
        """[N], of a loss of no dimensions."""
        tensor, dim = packed
        if dim is None:
            return tensor.unsqueeze(0).expand(self._crew().width, *tensor.shape)
        return tensor if dim == 0 else tensor.movedim(dim, 0)

    def _note(self, micro: StackedMicro, made: Mapping[Wire, Packed]) -> None:
        for wire, (tensor, dim) in made.items():
            micro.wires[wire], micro.dims[wire] = tensor, dim

    def _outside_parameters(self, crew: Crew, made: Mapping[Wire, Packed]) -> dict[Wire, Packed]:
        """Those that share memory with a shard's weights, which leave, as copies."""
        owned = {p.untyped_storage().data_ptr() for p in crew.stacked.parameters.values()}
        return {
            wire: Packed(t.clone(), dim)
            if t.untyped_storage().data_ptr() in owned
            else Packed(t, dim)
            for wire, (t, dim) in made.items()
        }

    def _keep(self, micro: StackedMicro, boundaries: Iterable[int]) -> None:
        """Forget the wires that no shard starting at one of ``boundaries`` reads."""
        alive = {w for layer in boundaries for w in self._chain.live_wires(layer, micro.context)}
        micro.wires = {wire: tensor for wire, tensor in micro.wires.items() if wire in alive}

    def _buffers_now(self, crew: Crew, shard: int) -> dict[str, Tensor]:
        return {name: crew.stacked.buffers[name].clone() for name in self._changing[shard]}

    def _write_buffers(self, crew: Crew, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            crew.stacked.buffers[name].data.copy_(value)

    def _keep_idle(self, crew: Crew, micro: StackedMicro, before: Mapping[str, Tensor]) -> None:
        """Slots that take no part keep their buffers."""
        idle = idle_slots(micro.active)
        for name, value in before.items() if idle else ():
            for slot in idle:
                crew.stacked.buffers[name].data[slot] = value[slot]

    # -- slots that raise -------------------------------------------------------------

    def _guarded(self, shard: int, micro: StackedMicro, unit: Callable[[], Any]) -> Any:
        """Run a unit without the slots whose code or data raise.

        Raises:
            Declined: the array raises, and no slot does.
        """
        again = _Beginning.of(self._crew(), micro, self._changing[shard])
        while any(micro.active):
            try:
                return unit()
            except (Exception, SystemExit) as error:
                if is_out_of_memory(error):
                    raise
                again.put_back(self._crew(), micro)
                self._leave_out(shard, micro, error, again)
        return None

    def _leave_out(
        self, shard: int, micro: StackedMicro, error: BaseException, again: _Beginning
    ) -> None:
        found = {}
        for slot in micro.taking:
            failure = self._error_of(shard, slot, micro)
            again.put_back(self._crew(), micro)
            if failure is not None:
                found[slot] = failure
        if not found:  # of shards before this one they may have run together already
            found |= leaving(error)
        if not found:
            if isinstance(error, Declined):
                raise error
            raise Declined(
                "the trials run one by one and fail as one array, shard by shard: "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error
        for slot, failure in found.items():
            micro.failures[slot], micro.active[slot] = failure, False
        if not any(micro.active):  # nobody is left to read what is there
            micro.wires = {}
            return
        for slot in found:
            self._note(micro, self._with_row(micro, slot, micro.active.index(True)))

    def _fill_returned(self, micro: StackedMicro, start: int) -> None:
        """Slots that failed while their rows waited elsewhere have somebody else's there too."""
        here = micro.returned.intersection(self._chain.live_wires(start, micro.context))
        for wire in here if micro.failures else ():
            packed, other = Packed(micro.wires[wire], micro.dims[wire]), micro.active.index(True)
            for slot in micro.failures if packed.dim is not None else ():
                packed.row(slot).copy_(packed.row(other))

    def _error_of(self, shard: int, slot: int, micro: StackedMicro) -> BaseException | None:
        """What a shard's forward raises where every slot has this one's batch and inputs."""
        start, stop = self._spans[shard]
        width = self._crew().width
        probe = replace(micro, batch=[micro.batch[slot]] * width, context=replace(micro.context))
        probe.wires, probe.dims = dict(micro.wires), dict(micro.dims)
        probe.active = [other == slot for other in range(width)]
        for other in range(width):
            self._note(probe, self._with_row(probe, other, slot))
        try:
            with torch.no_grad():
                if shard == self.num_shards - 1:
                    self._evaluated(probe)
                else:
                    self._run(probe, start, stop, self._given(probe, start), shard)
        except (Exception, SystemExit) as error:
            return error
        return None

    def _with_row(self, micro: StackedMicro, slot: int, other: int) -> dict[Wire, Packed]:
        return {
            wire: Packed(tensor, micro.dims[wire]).with_row(slot, other)
            for wire, tensor in micro.wires.items()
        }

    # -- slots by themselves: see ``OddSlots`` ------------------------------------------

    @contextmanager
    def _by_itself(self, slot: int, micro: StackedMicro) -> Iterator[None]:
        """What is raised inside is the slot's failure."""
        try:
            yield
        except (Exception, SystemExit) as error:
            if is_out_of_memory(error):
                raise
            micro.failures[slot] = error
            del micro.apart[slot]


class _Beginning(NamedTuple):
    """Random streams, buffers and gradients before a unit, which may have to begin again."""

    streams: States
    buffers: Mapping[str, Tensor]
    grads: Mapping[str, Tensor | None]
    kept: Mapping[str, Any]

    @classmethod
    def of(cls, crew: Crew, micro: StackedMicro, changing: Sequence[str]) -> _Beginning:
        """As it is now. Gradients are not copied: a backward that fails loses them."""
        kept = {n: getattr(micro, n) for n in ("wires", "dims", "grads", "tied", "context")}
        kept["context"] = replace(micro.context)
        kept |= {n: dict(getattr(micro, n)) for n in ("wires", "dims", "streams", "buffers")}
        return cls(
            crew.streams.now(),
            {name: crew.stacked.buffers[name].clone() for name in changing},
            {name: block.grad for name, block in crew.stacked.parameters.items()},
            kept,
        )

    def put_back(self, crew: Crew, micro: StackedMicro) -> None:
        """As it was then."""
        crew.streams.put(self.streams)
        for name, value in self.buffers.items():
            crew.stacked.buffers[name].data.copy_(value)
        for name, block in crew.stacked.parameters.items():
            block.grad = self.grads[name]
        for name, value in self.kept.items():
            copied = replace(value) if name == "context" else value
            if name in ("wires", "dims", "streams", "buffers"):
                copied = dict(value)
            setattr(micro, name, copied)
