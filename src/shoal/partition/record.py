"""One plain forward, watched: which modules run when, and what passes between the blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.partition.callsheet import (
    CallSheet,
    CallWriter,
    Wire,
    argument_name,
    flatten,
    module_wires,
    output_template,
    output_wires,
    storage_key,
)
from shoal.partition.discover import Candidate, NotCuttable, ancestors_of
from shoal.partition.glue import Block, ReplacedCalls, own_call
from shoal.partition.preserve import BufferWatch
from shoal.recipe import Batch, Recipe, autocast, compute_loss, model_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a plain training forward did.

    ``cloned`` are wires that a block changes in place, or that share memory with one: a
    shard that receives one works on a copy.
    """

    blocks: tuple[Block, ...]
    sheet: CallSheet
    prologue: Mapping[str, nn.Module]  # outermost modules called before the last block
    epilogue: Mapping[str, nn.Module]  # and after it
    needs_grad: frozenset[Wire]
    cloned: frozenset[Wire]
    changing_buffers: Mapping[int, tuple[str, ...]]  # layer -> names
    trained: tuple[bool, ...]  # requires_grad of every parameter
    written: frozenset[str]  # parameters that the forward itself writes to


def record_forward(
    model: nn.Module,
    recipe: Recipe,
    batch: Batch,
    device: torch.device,
    candidate: Candidate,
    *,
    kept: frozenset[Wire] = frozenset(),
) -> Record:
    """Run the model once, with gradients, and write down what a chain must know.

    ``kept`` are wires of the prologue or the blocks that the epilogue is known to
    read. Buffers and random state change as in any forward.

    Raises:
        NotCuttable: the forward does something that no chain of these blocks could do.
    """
    spy = _Spy(model, candidate, device, kept)
    with torch.enable_grad(), autocast(recipe, device), ReplacedCalls(spy.replacements()):
        spy.ambient = spy.mode()
        args, kwargs = model_inputs(recipe, batch)
        output = model(*args, **kwargs)
        compute_loss(recipe, output, batch)
    return spy.record()


class _Spy:
    def __init__(
        self,
        model: nn.Module,
        candidate: Candidate,
        device: torch.device,
        kept: frozenset[Wire],
    ) -> None:
        self.kept = kept
        self.model = model
        self.device = device
        self.ancestors = ancestors_of(model, iter(candidate.blocks))
        self.names = {module: name for name, module in reversed(candidate.blocks.items())}
        self.writer = CallWriter()
        self.blocks: list[Block] = []
        self.needs_grad: set[Wire] = set()
        self.mutations: list[tuple[int, int]] = []  # (storage, block)
        self.outside: list[tuple[int, str, nn.Module]] = []  # blocks called so far, module
        self.buffers = BufferWatch(model)
        self.changed_before_last: set[str] = set()
        self.versions = {name: p._version for name, p in model.named_parameters()}
        self.depth = 0
        self.ambient: Any = None

    def mode(self) -> tuple[Any, ...]:
        kind = self.device.type
        cast = torch.is_autocast_enabled(kind)
        return torch.is_grad_enabled(), cast, torch.get_autocast_dtype(kind) if cast else None

    def replacements(self) -> dict[nn.Module, Callable[..., Any]]:
        containers = set(self.ancestors.values())
        return {
            module: self._replace(name, module, own_call(module))
            for name, module in self.model.named_modules()
            if module not in containers
        }

    def _replace(self, name: str, module: nn.Module, call: Callable[..., Any]) -> Any:
        def spied(*args: Any, **kwargs: Any) -> Any:
            if self.depth and module in self.names:
                raise NotCuttable(f"block {name!r} is called from inside another module")
            if self.depth:
                return call(*args, **kwargs)
            self.depth += 1
            try:
                if module in self.names:
                    return self._call_block(module, call, args, kwargs)
                return self._call_outside(name, module, call, args, kwargs)
            finally:
                self.depth -= 1

        return spied

    def _call_outside(
        self, name: str, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        number = sum(1 for _, other, _ in self.outside if other == name)
        self.outside.append((len(self.blocks), name, module))
        output = call(*args, **kwargs)
        if self.kept:
            template = output_template(output, (), owner=f"module {name!r}")
            names = module_wires(name, number, template)
            self.writer.write_module_output(names, output, self.kept)
        return output

    def _call_block(
        self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        name = self.names[module]
        if self.mode() != self.ambient:
            raise NotCuttable(
                f"the forward calls block {name!r} in another gradient or autocast mode than it "
                "was called in itself"
            )
        self.changed_before_last = self.buffers.changed()
        values = self.writer.write_call(module, name, args, kwargs)
        self._note_gradients(self.writer.calls[-1].wires)
        tensors = [value for value in values if isinstance(value, Tensor)]
        versions = [tensor._version for tensor in tensors]
        output = call(*args, **kwargs)
        self._note_mutations(module, args, kwargs, values, versions)
        template = output_template(output, tensors, owner=f"block {name!r}")
        self.writer.write_output(template, output)
        self.blocks.append(Block(name, module, template))
        return output

    def _note_gradients(self, wires: tuple[Wire, ...]) -> None:
        self.needs_grad.update(w for w in wires if self.writer.tensors[w].requires_grad)

    def _note_mutations(
        self, module: nn.Module, args: Any, kwargs: Any, values: list[Any], versions: list[int]
    ) -> None:
        block = len(self.blocks) + 1
        for index, leaf in enumerate(flatten((args, kwargs))[0]):
            if index >= len(values) or leaf is not values[index]:
                name = argument_name(module, args, kwargs, index)
                raise NotCuttable(f"block {self.names[module]!r} changes its argument {name!r}")
        tensors = [value for value in values if isinstance(value, Tensor)]
        for tensor, version in zip(tensors, versions, strict=True):
            if tensor._version != version:
                self.mutations.append((storage_key(tensor), block))

    def record(self) -> Record:
        if len(self.blocks) < 2:
            raise NotCuttable(
                f"the forward calls {len(self.blocks)} of the {len(self.names)} listed blocks; "
                "two or more are needed"
            )
        last = len(self.blocks)
        self._note_gradients(output_wires(last, self.writer.outputs[-1]))
        self._note_gradients(tuple(self.kept))
        sheet = self.writer.sheet({}, self.kept)
        return Record(
            blocks=tuple(self.blocks),
            sheet=sheet,
            prologue={name: m for seen, name, m in self.outside if seen < last},
            epilogue={name: m for seen, name, m in self.outside if seen == last},
            needs_grad=frozenset(self.needs_grad),
            cloned=frozenset(self._cloned(sheet)),
            changing_buffers=self._changing_buffers(),
            written=frozenset(
                name
                for name, parameter in self.model.named_parameters()
                if parameter._version != self.versions[name]
            ),
            trained=tuple(p.requires_grad for p in self.model.parameters()),
        )

    def _cloned(self, sheet: CallSheet) -> set[Wire]:
        """Wires that share memory with one that a block changes.

        Raises:
            NotCuttable: something that runs later reads the changed memory.
        """
        storages = {w: storage_key(t) for w, t in self.writer.tensors.items()}
        cloned: set[Wire] = set()
        for storage, block in self.mutations:
            for wire, last in sheet.last_reader.items():
                if storages[wire] != storage or wire.layer >= block:
                    continue
                if last > block:
                    raise NotCuttable(
                        f"block {self.blocks[block - 1].name!r} changes a tensor in place that "
                        "later blocks read"
                    )
                cloned.add(wire)
        return cloned

    def _changing_buffers(self) -> dict[int, tuple[str, ...]]:
        """The buffers that this forward changed, by the layer that changes them."""
        if self.buffers.added():
            names = ", ".join(sorted(self.buffers.added()))
            raise NotCuttable(f"the forward adds buffers: {names}")
        by_layer: dict[int, list[str]] = {}
        for name in sorted(self.buffers.changed()):
            by_layer.setdefault(self._layer_of_buffer(name), []).append(name)
        return {layer: tuple(names) for layer, names in by_layer.items()}

    def _layer_of_buffer(self, name: str) -> int:
        tensor = self.model.get_buffer(name)
        layers = [
            layer
            for layer, block in enumerate(self.blocks, start=1)
            if any(tensor is buffer for buffer in block.module.buffers())
        ]
        if len(layers) > 1:
            raise NotCuttable(
                f"buffer {name!r} is changed by block {self.blocks[layers[0] - 1].name!r}, which "
                "is called more than once"
            )
        if layers:
            return layers[0]
        return 0 if name in self.changed_before_last else len(self.blocks) + 1
