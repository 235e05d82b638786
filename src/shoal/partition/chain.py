"""A model as a chain of layers: prologue, blocks, epilogue; shards are ranges of them.

Layer 0 is the prologue P, everything the forward does before its first block. Layers 1
to n are the blocks, in calling order. Layer n + 1 is the epilogue E with the recipe's
loss. Between two shards nothing stays alive but the wires (see ``callsheet``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import TrialError
from shoal.partition.callsheet import CallSheet, Constant, Shape, Wire, Wires, flatten
from shoal.partition.glue import Skeleton, run_epilogue, run_prologue
from shoal.partition.owners import Owners
from shoal.partition.record import Record
from shoal.partition.taint import Taint
from shoal.recipe import Batch, Output, Recipe, compute_loss, model_inputs


@dataclass(slots=True)
class Micro:
    """One micro-batch on its way through a chain; holds no tensor but the batch.

    The call sheet is written when layer 0 runs, and again when it is recomputed.
    """

    batch: Batch
    sheet: CallSheet | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Chain:
    """Runs ranges of a model's layers; made by ``build.build_chain``.

    Gradient mode, autocast, random state, changing buffers and the parameters' memory are
    the caller's; ``units`` has the two units a worker runs.
    """

    skeleton: Skeleton
    record: Record
    owners: Owners
    notes: tuple[str, ...] = ()
    on_close: list[Callable[[], None]] = field(default_factory=list)

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
        return len(self.skeleton.blocks) + 2

    @property
    def layer_names(self) -> tuple[str, ...]:
        """``prologue``, the blocks' module names, ``epilogue``; a second use has ``#2``."""
        names: list[str] = []
        for block in self.skeleton.blocks:
            uses = sum(1 for name in names if name.split("#")[0] == block.name)
            names.append(f"{block.name}#{uses + 1}" if uses else block.name)
        return ("prologue", *names, "epilogue")

    def parameters_of(self, layer: int) -> tuple[str, ...]:
        """Names of the parameters that ``layer`` owns, each owned by one layer only."""
        return self.owners.owned[layer]

    def borrowed_by(self, layer: int) -> tuple[str, ...]:
        """Names of the tied parameters that ``layer`` uses and an earlier layer owns."""
        return self.owners.borrowed[layer]

    @property
    def shared_casts(self) -> tuple[frozenset[str], ...]:
        """Per layer, the parameters that autocast casts in this and in another layer."""
        return self.owners.shared_casts

    def changing_buffers(self, layer: int) -> tuple[str, ...]:
        """Names of the buffers that a training forward of ``layer`` changes."""
        return self.record.changing_buffers.get(layer, ())

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
        calls = _sheet_of(micro).calls[max(start - 1, 0) : max(stop - 1, 0)]
        return frozenset(wire for call in calls for wire in call.wires)

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

    def forward(self, micro: Micro, start: int, stop: int, wires: Mapping[Wire, Tensor]) -> Wires:
        """Run layers [start, stop), without the epilogue; the new wires that live at ``stop``.

        ``wires`` are those alive at ``start``; they are not changed, also where a block works
        in place.

        Raises:
            TrialError: this batch makes the forward do other things than the pilot's did.
        """
        assert 0 <= start < stop < self.num_layers, (start, stop)
        alive = self._enter(micro, start, wires)
        sheet = _sheet_of(micro)
        for layer in range(max(start, 1), stop):
            self._run_block(sheet, layer, alive)
        return {wire: alive[wire] for wire in sheet.live(stop) if wire not in wires}

    def loss(
        self,
        micro: Micro,
        start: int,
        wires: Mapping[Wire, Tensor],
        *,
        on_resume: Callable[[], None] | None = None,
        taint: Taint | None = None,
    ) -> tuple[Tensor, Output]:
        """Run layers from ``start`` to the end: the recipe's loss and the model's output.

        ``on_resume`` is told when the blocks are done and the epilogue proper begins; ``taint``
        follows the stand-ins.

        Raises:
            TrialError: this batch makes the forward do other things than the pilot's did.
        """
        if start == 0:
            args, kwargs = model_inputs(self.recipe, micro.batch)
            output = self.model(*args, **kwargs)
            return compute_loss(self.recipe, output, micro.batch), output
        alive = self._enter(micro, start, wires)
        sheet = _sheet_of(micro)
        last = len(self.skeleton.blocks)
        for layer in range(start, last + 1):
            self._run_block(sheet, layer, alive)
        return run_epilogue(
            self.skeleton, sheet, micro.batch, alive, on_resume=on_resume, taint=taint
        )

    def on(self, device: torch.device) -> Chain:
        """This chain for a model that has moved to ``device``."""
        return replace(self, skeleton=replace(self.skeleton, device=device))

    def close(self) -> None:
        """Put back what was switched off on the model."""
        while self.on_close:
            self.on_close.pop()()

    def _enter(self, micro: Micro, start: int, wires: Mapping[Wire, Tensor]) -> Wires:
        """The tensors a shard starts from: the boundary's, or the prologue's own."""
        if start > 0:
            cloned = self.record.cloned
            alive = _sheet_of(micro).live(start)
            return {wire: wires[wire].clone() if wire in cloned else wires[wire] for wire in alive}
        micro.sheet, made = run_prologue(self.skeleton, micro.batch)
        owned = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        for wire, tensor in made.items():
            is_parameter = tensor.untyped_storage().data_ptr() in owned
            if wire in self.record.cloned or (is_parameter and not torch.is_grad_enabled()):
                made[wire] = tensor.clone()
        return made

    def _run_block(self, sheet: CallSheet, layer: int, alive: Wires) -> None:
        """Run one block; its outputs come alive, what nothing reads any more goes."""
        block = self.skeleton.blocks[layer - 1]
        args, kwargs = sheet.calls[layer - 1].arguments(alive)
        for wire in [w for w in alive if sheet.last_reader.get(w, 0) <= layer]:
            del alive[wire]
        output = block.module(*args, **kwargs)
        del args, kwargs
        template = sheet.outputs[layer - 1]
        leaves, spec = flatten(output)
        if spec != template.spec:
            raise self._unlike_pilot(layer, "its output has another structure")
        for index, (leaf, wanted) in enumerate(zip(leaves, template.leaves, strict=True)):
            if isinstance(wanted, Constant):
                if isinstance(leaf, Tensor):
                    raise self._unlike_pilot(layer, f"output {index} is a tensor")
                continue
            self._check_shape(layer, leaf, wanted)
            wire = Wire(layer, f"out.{index}")
            if wire in sheet.last_reader:
                alive[wire] = leaf

    def _check_shape(self, layer: int, leaf: Any, wanted: Shape) -> None:
        if not isinstance(leaf, Tensor) or leaf.dtype != wanted.dtype:
            raise self._unlike_pilot(layer, f"an output is no {wanted.dtype} tensor")
        if tuple(leaf.shape) != wanted.size and not self.skeleton.glue_free:
            raise self._unlike_pilot(
                layer,
                f"an output has shape {tuple(leaf.shape)} where the forward between the blocks "
                f"was told {wanted.size}",
            )

    def _unlike_pilot(self, layer: int, found: str) -> TrialError:
        return TrialError(
            f"block {self.layer_names[layer]!r} behaves unlike in the pilot: {found}. Give "
            "batches of one shape (but for the batch dimension), or train this model unsharded."
        )


def _sheet_of(micro: Micro) -> CallSheet:
    assert micro.sheet is not None, "layer 0 of this micro-batch has not run yet"
    return micro.sheet
