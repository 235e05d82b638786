"""A model as a chain of layers: prologue, blocks, joints, epilogue; shards are ranges of them.

Layer 0 is the prologue P, everything the forward does before its first block. The blocks
follow in calling order, with a joint wherever the forward computes between two of them (see
``sections``). The last layer is the epilogue E with the recipe's loss. Between two shards
nothing stays alive but the wires (see ``callsheet``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from shoal.core.errors import TrialError
from shoal.partition.callsheet import CallSheet, leaf_wires
from shoal.partition.evaluated import may_stand_for
from shoal.partition.glue import Skeleton, run_epilogue, run_head
from shoal.partition.owners import AwayGuard, Owners
from shoal.partition.preserve import same_values
from shoal.partition.record import Record
from shoal.partition.template import Constant, Shape, Template, flatten, is_same_constant
from shoal.partition.unwritten import Unwritten, WeightPlace, weight_places, weights_stay
from shoal.partition.wires import Touch, Wire, Wires, storage_key
from shoal.recipes.recipe import Batch, Output, Recipe, loss_and_output


@dataclass(slots=True)
class Micro:
    """One micro-batch on its way through a chain; holds no tensor but the batch.

    A section's part of the call sheet is written when its head runs, and again when that is
    recomputed. ``touched`` are the forward's looks at blocks' outputs, at shape or type, before
    the block had run.
    """

    batch: Batch
    sheet: CallSheet | None = None
    touched: set[Touch] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Chain:
    """Runs ranges of a model's layers; made by ``build.build_chain``.

    Gradient mode, autocast, random state, changing buffers and the parameters' memory are
    the caller's; ``units`` has the two units a worker runs. ``around`` is entered for each layer
    while it runs: for who has the weights of one layer at a time. ``finders`` are fields of
    the recipe whose code finds the model by itself: it must read no weights that are away.
    ``places`` are those of each layer's weights, where one of them has to stay as it is.
    """

    skeleton: Skeleton
    record: Record
    owners: Owners
    notes: tuple[str, ...] = ()
    caches_off: bool = False
    on_close: list[Callable[[], None]] = field(default_factory=list)
    around: Callable[[int], AbstractContextManager[object]] = nullcontext
    finders: frozenset[str] = frozenset()
    places: Sequence[Sequence[WeightPlace]] = ()

    @property
    def model(self) -> nn.Module:
        return self.skeleton.model

    @property
    def recipe(self) -> Recipe:
        return self.skeleton.recipe

    @property
    def device(self) -> torch.device:
        return self.skeleton.device

    @property
    def num_layers(self) -> int:
        return self.skeleton.sections.num_layers

    @property
    def layer_names(self) -> tuple[str, ...]:
        """``prologue``, the blocks' module names, ``epilogue``; a second use has ``#2``.

        A joint is called after the block that it comes before.
        """
        names: list[str] = []
        uses: Counter[str] = Counter()
        for position, block in enumerate(self.skeleton.blocks):
            uses[block.name] += 1
            name = f"{block.name}#{uses[block.name]}" if uses[block.name] > 1 else block.name
            if position in self.skeleton.sections.joints:
                names.append(f"joint before {name}")
            names.append(name)
        return ("prologue", *names, "epilogue")

    def parameters_of(self, layer: int) -> tuple[str, ...]:
        """Names of the parameters that ``layer`` owns, each owned by one layer only."""
        return self.owners.owned[layer]

    def borrowed_by(self, layer: int) -> tuple[str, ...]:
        """Names of the tied parameters that ``layer`` uses and an earlier layer owns."""
        return self.owners.borrowed[layer]

    def parameters_in(self, start: int, stop: int) -> tuple[str, ...]:
        """Names of the parameters that layers [start, stop) own or borrow, each once."""
        layers = range(start, stop)
        names = (n for i in layers for n in (*self.parameters_of(i), *self.borrowed_by(i)))
        return tuple(dict.fromkeys(names))

    @property
    def shared_casts(self) -> tuple[frozenset[str], ...]:
        """Per layer, the parameters that autocast casts in this and in another layer."""
        return self.owners.shared_casts

    def changing_buffers(self, layer: int) -> tuple[str, ...]:
        """Names of the buffers that a training forward of ``layer`` changes."""
        return self.record.changing_buffers.get(layer, ())

    def watched(self) -> Chain:
        """This chain, whose forwards are not to write to weights but as the pilot's did."""
        each = (self.parameters_in(layer, layer + 1) for layer in range(self.num_layers))
        return replace(self, places=[weight_places(self.model, names) for names in each])

    def unwritten(self, start: int, stop: int) -> Unwritten:
        """The buffers that no training forward of layers [start, stop) was seen to change."""
        sections = self.skeleton.sections
        layers = [at for at in range(start, stop) if sections.headed_by(at) is None]
        blocks = (self.skeleton.blocks[sections.position_of(layer)] for layer in layers)
        changing = [name for layer in layers for name in self.changing_buffers(layer)]
        return Unwritten(
            {block.name: block.module for block in blocks}, map(self.model.get_buffer, changing)
        )

    def written_parameters(self, layer: int) -> tuple[str, ...]:
        """Names of the parameters of ``layer`` that a forward writes to, as max_norm does.

        Where parameters are copied in and out, what a forward wrote must be copied out too.
        """
        return tuple(name for name in self.parameters_of(layer) if name in self.record.written)

    def live_wires(self, boundary: int, micro: Micro | None = None) -> tuple[Wire, ...]:
        """Wires alive when a shard starts at layer ``boundary``.

        Of the pilot's batch, or of ``micro``, whose wires may be others: a mask that is None
        where nothing is padded.
        """
        sheet = micro.sheet if micro is not None and micro.sheet else self.record.sheet
        return sheet.live(boundary)

    def read_by(self, micro: Micro, start: int, stop: int) -> frozenset[Wire]:
        """Wires that layers [start, stop) read themselves."""
        read: set[Wire] = set()
        for layer in range(start, stop):
            section = self.skeleton.sections.headed_by(layer)
            if section is not None:
                read |= self.skeleton.reads.by_head[section]
            else:
                position = self.skeleton.sections.position_of(layer)
                read.update(_sheet_of(micro).call(position).wires)
        return frozenset(read)

    def needs_grad(self, wire: Wire) -> bool:
        """Did this wire need a gradient in the pilot?"""
        return wire in self.record.needs_grad

    def begin(self, batch: Batch) -> Micro:
        """A micro-batch to run; ``batch`` is on the chain's device.

        Raises:
            TrialError: parameters were frozen or unfrozen since the pilot.
        """
        if tuple(p.requires_grad for p in self.model.parameters()) != self.record.trained:
            raise TrialError(
                "parameters were frozen or unfrozen after the model was cut into shards, which "
                "planned for the gradients it saw. Freeze them in Recipe(model=...), or train "
                "this model unsharded."
            )
        return Micro(batch)

    def forward(
        self,
        micro: Micro,
        start: int,
        stop: int,
        wires: Mapping[Wire, Tensor],
        *,
        on_resume: Callable[[], None] | None = None,
    ) -> Wires:
        """Run layers [start, stop), without the epilogue; the new wires that live at ``stop``.

        ``wires`` are those alive at ``start``; they are not changed, also where a layer works
        in place. ``on_resume`` is told when a joint has skipped what comes before it.

        Raises:
            TrialError: this batch makes the forward do other things than the pilot's did.
        """
        assert 0 <= start < stop < self.num_layers, (start, stop)
        alive = self._enter(micro, start, wires)
        for layer in range(start, stop):
            self._run_layer(micro, layer, alive, on_resume)
        return {wire: alive[wire] for wire in _sheet_of(micro).live(stop) if wire not in wires}

    def loss(
        self,
        micro: Micro,
        start: int,
        wires: Mapping[Wire, Tensor],
        *,
        on_resume: Callable[[], None] | None = None,
    ) -> tuple[Tensor, Output]:
        """Run layers from ``start`` to the end: the recipe's loss and the model's output.

        ``on_resume`` is told when the blocks are done and the epilogue proper begins.

        Raises:
            TrialError: this batch makes the forward do other things than the pilot's did.
        """
        if start == 0:
            with ExitStack() as stack:
                for layer in range(self.num_layers):
                    stack.enter_context(self._weights_stay(layer))
                return loss_and_output(self.recipe, self.model, micro.batch)
        alive = self._enter(micro, start, wires)
        for layer in range(start, self.num_layers - 1):
            self._run_layer(micro, layer, alive, None)
        with self.around(self.num_layers - 1), self._weights_stay(self.num_layers - 1):
            return run_epilogue(
                self.skeleton,
                _sheet_of(micro),
                micro.batch,
                alive,
                on_resume=on_resume,
                guard=self._guard("loss", start, self.num_layers),
            )

    def _guard(self, field: str, start: int, stop: int) -> AwayGuard | None:
        """For code that finds the model, and may read what layers [start, stop) do."""
        if field not in self.finders:
            return None
        here = set(self.parameters_in(start, stop))
        return AwayGuard(field, {n: p for n, p in self.model.named_parameters() if n not in here})

    def on(self, device: torch.device) -> Chain:
        """This chain for a model that has moved to ``device``."""
        return replace(self, skeleton=replace(self.skeleton, device=device))

    def with_recipe(self, recipe: Recipe) -> Chain:
        """This chain for a recipe that differs in no function."""
        return replace(self, skeleton=replace(self.skeleton, recipe=recipe))

    def with_around(self, around: Callable[[int], AbstractContextManager[object]]) -> Chain:
        """This chain with ``around`` entered for each layer while it runs."""
        return replace(self, around=around)

    def backward_watched(self, start: int, stop: int) -> AbstractContextManager[None]:
        """Hooks that a backward through layers [start, stop) calls write to no weights either.

        Raises:
            TrialError: one did.
        """
        places = {p[2]: p for each in self.places[start:stop] for p in each}
        return weights_stay(places.values(), self.record.written, "a hook in the backward")

    def close(self) -> None:
        """Put back what was switched off on the model."""
        while self.on_close:
            self.on_close.pop()()

    def _enter(self, micro: Micro, start: int, wires: Mapping[Wire, Tensor]) -> Wires:
        """The tensors that a shard starts from: the boundary's."""
        if start == 0:
            micro.sheet = micro.sheet or self.skeleton.blank_sheet()
            return {}
        cloned = self.record.cloned
        alive = _sheet_of(micro).live(start)
        return {wire: wires[wire].clone() if wire in cloned else wires[wire] for wire in alive}

    def _run_layer(
        self, micro: Micro, layer: int, alive: Wires, on_resume: Callable[[], None] | None
    ) -> None:
        """Run one layer; what it makes comes alive, what nothing reads any more goes."""
        section = self.skeleton.sections.headed_by(layer)
        with self.around(layer), self._weights_stay(layer):
            if section is None:
                self._run_block(micro, layer, alive)
                return
            self._run_head(micro, section, alive, on_resume)
        _let_go(_sheet_of(micro), layer, alive)

    def _weights_stay(self, layer: int) -> AbstractContextManager[None]:
        """What a layer does to its weights is nothing that it did not do in the pilot.

        Raises:
            TrialError: it writes to others.
        """
        places = self.places[layer] if self.places else ()
        return weights_stay(places, self.record.written)

    def _run_head(
        self, micro: Micro, section: int, alive: Wires, on_resume: Callable[[], None] | None
    ) -> None:
        sheet = _sheet_of(micro)
        guard = None if section else self._guard("inputs", 0, 1)
        part, made, touched = run_head(
            self.skeleton, section, sheet, micro.batch, alive, on_resume=on_resume, guard=guard
        )
        micro.sheet = sheet.with_part(section, part)
        micro.touched |= touched
        for wire, tensor in made.items():
            alive[wire] = tensor.clone() if wire in self.record.cloned else tensor
        missing = [
            wire
            for wire in micro.sheet.last_reader
            if wire.layer == self.skeleton.sections.head(section) and wire not in alive
        ]
        if missing:
            raise TrialError(
                "the forward goes another way than in the pilot, as where a router picks other "
                f"experts for another batch: layer {self.layer_names[missing[0].layer]!r} made no "
                f"tensor {missing[0]}, which later layers read. Train this model unsharded."
            )

    def _run_block(self, micro: Micro, layer: int, alive: Wires) -> None:
        sheet = _sheet_of(micro)
        position = self.skeleton.sections.position_of(layer)
        call = sheet.call(position)
        args, kwargs = call.arguments(alive)
        handed = {id(alive[wire]) for wire in call.wires}
        _let_go(sheet, layer, alive)
        output = self.skeleton.blocks[position](*args, **kwargs)
        leaves, spec = flatten(output)
        template = self._found_output(micro, position, leaves, spec)
        self._require_handed_on(position, template, leaves, (args, kwargs))
        del args, kwargs
        if template is not sheet.output(position):
            micro.sheet = sheet.with_output(position, template)
        changing = {storage_key(self.model.get_buffer(n)) for n in self.changing_buffers(layer)}
        for wire, leaf in zip(leaf_wires(layer, template), leaves, strict=True):
            if isinstance(leaf, Tensor) and wire in sheet.last_reader:
                copies = id(leaf) in handed and wire in self.record.cloned  # passed over this time
                copies |= bool(changing) and storage_key(leaf) in changing
                alive[wire] = leaf.clone() if copies else leaf

    def _found_output(
        self, micro: Micro, position: int, leaves: Sequence[Any], spec: TreeSpec
    ) -> Template:
        """A block's output as it turned out; what the forward was told, if it is like that.

        Raises:
            TrialError: it was told otherwise, and may rely on it.
        """
        layer = self.skeleton.sections.layer_of(position)
        told = _sheet_of(micro).output(position)
        if spec != told.spec:
            raise self._unlike_pilot(layer, "its output has another structure")
        for index, first in enumerate(told.firsts):
            if leaves[index] is not leaves[first]:
                words = f"its outputs {first} and {index} are one tensor no more"
                raise self._unlike_pilot(layer, words)
        found = list(told.leaves)
        for index, (leaf, wanted) in enumerate(zip(leaves, told.leaves, strict=True)):
            if isinstance(wanted, Constant):
                found[index] = self._found_constant(position, index, leaf, wanted)
                continue
            if not isinstance(leaf, Tensor) or not self._may_be(leaf.dtype, position, index):
                raise self._unlike_pilot(layer, f"an output is no {wanted.dtype} tensor")
            if leaf.dtype != wanted.dtype and self._looked_at_type(micro, position, index):
                raise self._of_another_type(layer, leaf.dtype, wanted.dtype)
            if leaf.shape != wanted.size and self._may_rely_on_size(micro, position, index):
                raise self._unlike_pilot(
                    layer,
                    f"an output has shape {tuple(leaf.shape)} where the forward between the "
                    f"blocks was told {wanted.size}",
                )
            found[index] = _as_found(wanted, leaf)
        as_told = all(map(is_, found, told.leaves))
        return told if as_told else replace(told, leaves=tuple(found))

    def _require_handed_on(
        self, position: int, template: Template, leaves: Sequence[Any], arguments: Any
    ) -> None:
        """Raise TrialError where a block returns another tensor than its argument."""
        told = {i: one.argument for i, one in enumerate(template.leaves) if isinstance(one, Shape)}
        handed = {index: at for index, at in told.items() if at is not None}
        values = flatten(arguments)[0] if handed else []
        for index, at in handed.items():
            if leaves[index] is not values[at] and not same_values(leaves[index], values[at]):
                layer = self.skeleton.sections.layer_of(position)
                raise self._unlike_pilot(layer, f"output {index} is its argument no more")

    def _found_constant(self, position: int, index: int, leaf: Any, wanted: Constant) -> Constant:
        """What a block returned that is no tensor; behind a section's last block nobody was told.

        Raises:
            TrialError: it is another one than the forward was told, which may have gone by that.
        """
        sections = self.skeleton.sections
        layer = sections.layer_of(position)
        if isinstance(leaf, Tensor):
            raise self._unlike_pilot(layer, f"output {index} is a tensor")
        if position + 1 == sections.blocks_of(sections.of_block(position)).stop:
            return wanted if leaf is wanted.value else Constant(leaf)
        if is_same_constant(leaf, wanted.value):
            return wanted
        words = f"output {index} is {leaf!r:.80}, and was {wanted.value!r:.80}"
        raise self._unlike_pilot(layer, words)

    def _may_rely_on_size(self, micro: Micro, position: int, index: int) -> bool:
        """May the forward have looked at the shape that it was told of a block's output?"""
        if self.skeleton.glue_free:
            return False
        wire = self._wire_of(micro, position, index)
        looked = any(touch.wire == wire for touch in micro.touched)
        return index not in self.skeleton.blocks[position].unsure or looked

    def _may_be(self, found: torch.dtype, position: int, index: int) -> bool:
        """May a block's output be of this type, where nothing looked at the one in training?"""
        block = self.skeleton.blocks[position]
        told = block.output.leaves[index]
        assert isinstance(told, Shape)
        varies = self.skeleton.glue_free or index in block.retyped
        return may_stand_for(found, told.dtype) if varies else found == told.dtype

    def _looked_at_type(self, micro: Micro, position: int, index: int) -> bool:
        wire = self._wire_of(micro, position, index)
        return Touch(wire, size_only=False) in micro.touched

    def _wire_of(self, micro: Micro, position: int, index: int) -> Wire:
        layer = self.skeleton.sections.layer_of(position)
        return leaf_wires(layer, _sheet_of(micro).output(position))[index]

    def _of_another_type(self, layer: int, found: torch.dtype, told: torch.dtype) -> TrialError:
        return TrialError(
            f"block {self.layer_names[layer]!r} returns {found} where the forward between the "
            f"blocks was told {told}, which it is in training, and looked. On a CPU in bf16 torch "
            "computes its encoder layers by one kernel in evaluation, which leaves bfloat16: "
            "torch.backends.mha.set_fastpath_enabled(False) where the model is made switches that "
            "off. Or train this model unsharded."
        )

    def _unlike_pilot(self, layer: int, found: str) -> TrialError:
        return TrialError(
            f"block {self.layer_names[layer]!r} behaves unlike in the pilot: {found}. Give "
            "batches of one shape (but for the batch dimension), or train this model unsharded."
        )


def _as_found(told: Shape, leaf: Tensor) -> Shape:
    """The same object where it turned out as told."""
    if leaf.shape == told.size and leaf.dtype == told.dtype:
        return told
    return replace(told, size=tuple(leaf.shape), dtype=leaf.dtype)


def _let_go(sheet: CallSheet, layer: int, alive: Wires) -> None:
    """Drop the wires that no later layer reads."""
    for wire in [wire for wire in alive if sheet.last_reader.get(wire, 0) <= layer]:
        del alive[wire]


def _sheet_of(micro: Micro) -> CallSheet:
    assert micro.sheet is not None, "layer 0 of this micro-batch has not run yet"
    return micro.sheet
