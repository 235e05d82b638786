"""One plain forward, watched: which modules run when, and what passes between the blocks."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.partition.callsheet import (
    Call,
    CallSheet,
    CallWriter,
    Part,
    Reads,
    argument_name,
    argument_wire,
    module_wire,
    output_wires,
)
from shoal.partition.discover import Candidate, NotCuttable, ancestors_of
from shoal.partition.glue import Block, ReplacedCalls, own_call
from shoal.partition.preserve import BufferWatch
from shoal.partition.sections import Sections
from shoal.partition.taint import CHANCE, BlockOutput, Derived, Source, Taint
from shoal.partition.template import Shape, Template, flatten, output_template
from shoal.partition.wires import Names, TouchWatch, Wire, Wires, storage_key
from shoal.recipe import Batch, Recipe, autocast, compute_loss, model_inputs
from shoal.rng import RngState, capture_rng, same_rng


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a plain training forward did.

    ``cloned`` are wires that a later layer changes in place, or that share memory with one: a
    shard that receives one works on a copy. ``recomputes`` says that a section reads what was
    computed in an earlier one and has no name, so that it is computed again. ``made`` are the
    wires as they were made.
    """

    blocks: tuple[Block, ...]
    sheet: CallSheet
    outside: Mapping[str, nn.Module]  # outermost modules called before the last block
    called: tuple[tuple[int, nn.Module], ...]  # all outermost modules, with the layer
    uses: frozenset[tuple[int, str]]  # a layer, a parameter that it reads outside of blocks
    needs_grad: frozenset[Wire]
    cloned: frozenset[Wire]
    changing_buffers: Mapping[int, tuple[str, ...]]  # layer -> names
    recomputes: bool
    draws: bool  # random numbers, outside of all modules
    trained: tuple[bool, ...]  # requires_grad of every parameter
    written: frozenset[str]  # parameters that the forward itself writes to
    made: Wires

    @property
    def sections(self) -> Sections:
        return self.sheet.sections


@dataclass(slots=True)
class _Gap:
    """What a forward does before one of its blocks, or after the last one."""

    read: frozenset[Source] = frozenset()
    looked_at: frozenset[Source] = frozenset()
    buffers: frozenset[str] = frozenset()  # those that it changed
    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    made: set[Wire] = field(default_factory=set)
    changed: list[int] = field(default_factory=list)  # storages of wires, in place


class Spy:
    """Watches one forward of a model whose joints are taken to be ``joints``.

    ``found`` are those that it turned out to need. Where they are others, watch again.
    """

    def __init__(
        self,
        model: nn.Module,
        candidate: Candidate,
        device: torch.device,
        joints: tuple[int, ...] = (),
    ) -> None:
        self.found: list[int] = []
        self._model, self._device = model, device
        self._sections = Sections(sys.maxsize, joints)
        self._ancestors = ancestors_of(model, iter(candidate.blocks))
        self._block_names = {m: name for name, m in reversed(candidate.blocks.items())}
        self._names = Names()
        self._taint = Taint(dict(model.named_parameters()))
        self._touch = TouchWatch()
        self._writers: list[CallWriter] = []
        self._blocks: list[Block] = []
        self._gaps = [_Gap()]
        self._made: Wires = {}
        self._unsure: set[Wire | None] = set()
        self._free: set[Wire] = set()  # made of the batch alone
        self._early: dict[Wire, int] = {}  # computed from blocks, by a module before a position
        self._in_blocks: list[tuple[int, int]] = []  # storage changed in place, position
        self._outer_buffers = BufferWatch(model, without=candidate.blocks.values())
        self._buffers = BufferWatch(model)
        self._versions = {name: p._version for name, p in model.named_parameters()}
        self._counts: Counter[str] = Counter()
        self._depth = 0
        self._ambient: Any = None
        self._rng: RngState = capture_rng(device)  # when the last block returned
        self._last_rng = self._rng  # when the last module did
        self._draws = False

    def watch(self, recipe: Recipe, batch: Batch) -> None:
        """Run the forward, with gradients. Buffers and random state change as in any.

        Raises:
            NotCuttable: it does something that no chain of these blocks could do.
        """
        calls = ReplacedCalls(self._replacements())
        grads, cast = torch.enable_grad(), autocast(recipe, self._device)
        with grads, cast, calls, self._taint, self._touch:
            self._ambient = self._mode()
            args, kwargs = model_inputs(recipe, batch)
            output = self._model(*args, **kwargs)
            loss = compute_loss(recipe, output, batch)
            with self._aside():
                self._end_gap()
                leaves = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]
                self._gaps[-1].read |= self._taint.of_all([loss, *leaves])
                self._find_late_joints()

    # -- while the forward runs -----------------------------------------------------------

    def _mode(self) -> tuple[Any, ...]:
        kind = self._device.type
        cast = torch.is_autocast_enabled(kind)
        return torch.is_grad_enabled(), cast, torch.get_autocast_dtype(kind) if cast else None

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Nothing is noted of what is done inside."""
        self._taint.paused = self._touch.paused = True
        try:
            yield
        finally:
            self._taint.paused = self._touch.paused = False

    def _replacements(self) -> dict[nn.Module, Callable[..., Any]]:
        containers = set(self._ancestors.values())
        return {
            module: self._replace(name, module, own_call(module))
            for name, module in self._model.named_modules()
            if module not in containers
        }

    def _replace(self, name: str, module: nn.Module, call: Callable[..., Any]) -> Any:
        def spied(*args: Any, **kwargs: Any) -> Any:
            if self._depth and module in self._block_names:
                raise NotCuttable(f"block {name!r} is called from inside another module")
            if self._depth:
                return call(*args, **kwargs)
            self._depth += 1
            try:
                with self._aside():
                    self._note_draws()
                    if module in self._block_names:
                        return self._call_block(module, call, args, kwargs)
                    self._note_handed(name, args, kwargs)
                output = call(*args, **kwargs)
                with self._aside():
                    self._note_module(name, module, output)
                    self._last_rng = capture_rng(self._device)
                return output
            finally:
                self._depth -= 1

        return spied

    def _note_draws(self) -> None:
        """Note whether random numbers were drawn since the last module returned."""
        now = capture_rng(self._device)
        self._draws = self._draws or not same_rng(now, self._last_rng)

    def _note_handed(self, name: str, args: Any, kwargs: Any) -> None:
        """Know again what a module outside of the blocks is called with."""
        head = self._sections.head(self._sections.of_block(len(self._blocks)))
        for index, leaf in enumerate(flatten((args, kwargs))[0]):
            if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter):
                wire = argument_wire(head, name, self._counts[name], index)
                if self._names.of(leaf) is None and self._taint.of(leaf):
                    self._note_made(leaf, wire)
                    self._taint.name(leaf, wire)

    def _note_made(self, tensor: Tensor, wire: Wire) -> None:
        """``tensor`` is made here, outside of the blocks."""
        if self._is_computed(tensor):
            self._early[wire] = len(self._blocks)
        self._gaps[-1].made.add(wire)
        self._made[wire] = tensor

    def _note_module(self, name: str, module: nn.Module, output: Any) -> None:
        """Name what a module outside of the blocks returned."""
        head = self._sections.head(self._sections.of_block(len(self._blocks)))
        gap, call = self._gaps[-1], self._counts[name]
        self._counts[name] += 1
        gap.modules.append((name, module))
        for index, leaf in enumerate(flatten(output)[0]):
            if isinstance(leaf, Tensor) and self._names.of(leaf) is None:
                wire = module_wire(head, name, call, index)
                self._note_made(leaf, wire)
                self._name(leaf, wire)

    def _call_block(
        self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        name, position = self._block_names[module], len(self._blocks)
        if self._mode() != self._ambient:
            raise NotCuttable(
                f"the forward calls block {name!r} in another gradient or autocast mode than it "
                "was called in itself"
            )
        self._end_gap()
        writer = self._writer(position)
        if position and self._needs_joint(flatten((args, kwargs))[0]):
            self.found.append(position)
        values = writer.write(module, name, args, kwargs)
        self._name_arguments(writer.calls[-1], values)
        output = call(*args, **kwargs)
        self._note_changes(module, args, kwargs, values)
        tensors = [value for value in values if isinstance(value, Tensor)]
        template = output_template(output, tensors, owner=f"block {name!r}")
        unsure = frozenset(self._find_unsure(template, tensors))
        self._name_outputs(position, output, unsure)
        self._blocks.append(Block(name, module, template, unsure))
        self._rng = self._last_rng = capture_rng(self._device)
        self._gaps.append(_Gap())
        self._taint.position = position + 1
        self._touch.touched.clear()
        return output

    def _writer(self, position: int) -> CallWriter:
        """Of the section that the block at ``position`` is in, which may begin here."""
        section = self._sections.of_block(position)
        if section == len(self._writers):
            self._names.forget(self._free)
            self._free.clear()
            head = self._sections.head(section)
            self._writers.append(CallWriter(self._names, head, position))
        return self._writers[section]

    def _name(self, tensor: Tensor, wire: Wire, *, position: int | None = None) -> None:
        self._names.give(tensor, wire)
        self._taint.name(tensor, wire, position=position)
        self._made[wire] = tensor

    def _name_arguments(self, call: Call, values: Sequence[Any]) -> None:
        """Take up what was named as an argument; what is made of the batch alone stays free."""
        for leaf, value in zip(call.leaves, values, strict=True):
            if isinstance(leaf, Wire) and leaf not in self._made:
                self._made[leaf] = value
                sources = self._taint.of(value)
                self._gaps[-1].read |= sources
                if sources:
                    self._taint.name(value, leaf)
                else:
                    self._free.add(leaf)

    def _find_unsure(self, template: Template, arguments: Sequence[Tensor]) -> Iterator[int]:
        """The leaves that look like no argument, or like one whose size is unsure itself."""
        for index, leaf in enumerate(template.leaves):
            if isinstance(leaf, Shape) and (
                leaf.like is None
                or leaf.size != leaf.like_size
                or self._names.of(arguments[leaf.like]) in self._unsure
            ):
                yield index

    def _name_outputs(self, position: int, output: Any, unsure: frozenset[int]) -> None:
        """Name a block's output, and watch what has no size that is known beforehand."""
        layer = self._sections.layer_of(position)
        for index, leaf in enumerate(flatten(output)[0]):
            if isinstance(leaf, Tensor):
                wire = Wire(layer, f"out.{index}")
                self._name(leaf, wire, position=position)
                if index in unsure:
                    self._unsure.add(wire)
                    self._touch.watch(leaf, wire)

    def _note_changes(self, module: nn.Module, args: Any, kwargs: Any, values: list[Any]) -> None:
        """Note what a block did to its arguments.

        Raises:
            NotCuttable: it put something else into one of them.
        """
        for index, leaf in enumerate(flatten((args, kwargs))[0]):
            if index >= len(values) or leaf is not values[index]:
                argument = argument_name(module, args, kwargs, index)
                name = self._block_names[module]
                raise NotCuttable(f"block {name!r} changes its argument {argument!r}")
        position = len(self._blocks)
        self._in_blocks += [(storage_key(t), position) for t in self._names.changed()]

    def _end_gap(self) -> None:
        """Note what was done since the last block ended."""
        gap, taint = self._gaps[-1], self._taint
        gap.read, gap.looked_at = frozenset(taint.read), frozenset(taint.looked_at)
        taint.read.clear()
        taint.looked_at.clear()
        gap.changed = [storage_key(tensor) for tensor in self._names.changed()]
        gap.buffers = frozenset(self._outer_buffers.changed())
        self._outer_buffers.restart()

    def _needs_joint(self, values: Sequence[Any]) -> bool:
        """Must the forward be entered again before the next block, to have what it needs?

        Raises:
            NotCuttable: it draws from generators that cannot be told from control flow.
        """
        now = capture_rng(self._device)
        if now.python != self._rng.python or not _same_numpy(now, self._rng):
            before = self._blocks[-1].name
            raise NotCuttable(
                "the forward draws from Python's or NumPy's random numbers after block "
                f"{before!r}, and may decide by them which block comes next"
            )
        if not same_rng(now, self._rng):
            return True
        touched = (self._sections.position_of(wire.layer) for wire in self._touch.touched)
        if any(position >= self._start for position in touched):
            return True
        tensors = [v for v in values if isinstance(v, Tensor) and not isinstance(v, nn.Parameter)]
        return any(self._is_computed(tensor) for tensor in tensors)

    @property
    def _start(self) -> int:
        """The first block of the section that the forward is in, as far as that is known."""
        return self.found[-1] if self.found else 0

    def _is_computed(self, tensor: Tensor) -> bool:
        """Was it computed from a block's output of this section, outside of any block?"""
        name = self._names.of(tensor)
        if name is not None and name.slot.startswith("out."):
            return False
        sources = self._taint.of(tensor)
        return any(isinstance(s, BlockOutput) and s.position >= self._start for s in sources)

    def _find_late_joints(self) -> None:
        """Also those where a module computes what only later sections read, as a pooler does."""
        late = {
            position
            for wire, position in self._early.items()
            if position < len(self._blocks)
            and any(wire in gap.read for gap in self._gaps[position + 1 :])
        }
        self.found = sorted({*self.found, *late})

    # -- when it is over ------------------------------------------------------------------

    def record(self) -> Record:
        """What was seen. ``found`` are the joints that it was watched with.

        Raises:
            NotCuttable: no chain of these blocks could do that.
        """
        last = len(self._blocks)
        if last < 2:
            raise NotCuttable(
                f"the forward calls {last} of the {len(self._block_names)} listed blocks; "
                "two or more are needed"
            )
        self._require_blind()
        sections = Sections(last, self._sections.joints)
        sheet = self._sheet(sections)
        outside = {name: m for gap in self._gaps[:last] for name, m in gap.modules}
        return Record(
            blocks=tuple(self._blocks),
            sheet=sheet,
            outside=outside,
            called=tuple(
                (self._head_of(sections, position), module)
                for position, gap in enumerate(self._gaps)
                for _, module in gap.modules
            ),
            uses=frozenset(
                (self._head_of(sections, position), source)
                for position, gap in enumerate(self._gaps)
                for source in gap.read
                if isinstance(source, str)
            ),
            needs_grad=frozenset(w for w in sheet.last_reader if self._made[w].requires_grad),
            cloned=frozenset(self._cloned(sections, sheet)),
            changing_buffers=self._changing_buffers(sections),
            recomputes=any(
                sections.of_block(source.position) != sections.of_block(position)
                for position, gap in enumerate(self._gaps)
                for source in gap.read
                if isinstance(source, Derived)
            ),
            written=frozenset(
                name
                for name, parameter in self._model.named_parameters()
                if parameter._version != self._versions[name]
            ),
            draws=self._draws,
            trained=tuple(p.requires_grad for p in self._model.parameters()),
            made={wire: self._made[wire].detach() for wire in sheet.last_reader},
        )

    def _head_of(self, sections: Sections, position: int) -> int:
        """The layer that runs the gap before the block at ``position``."""
        return sections.head(sections.of_block(position))

    def _require_blind(self) -> None:
        """Raise NotCuttable if the forward may choose its blocks by what it computed."""
        skipped = {*self._block_names} - {block.module for block in self._blocks}
        for position, gap in enumerate(self._gaps[:-1]):
            seen = [s.position for s in gap.looked_at if isinstance(s, BlockOutput)]
            if seen:
                raise NotCuttable(
                    "the forward reads a value of the output of block "
                    f"{self._blocks[max(seen)].name!r} between blocks"
                )
            if CHANCE in gap.looked_at and (position or skipped):
                raise NotCuttable(
                    f"the forward looks at a random number before block "
                    f"{self._blocks[position].name!r}, and may skip blocks by it, as layerdrop "
                    "does"
                )

    def _sheet(self, sections: Sections) -> CallSheet:
        parts = []
        for section, writer in enumerate(self._writers):
            outputs = tuple(self._blocks[p].output for p in sections.blocks_of(section))
            parts.append(Part(calls=tuple(writer.calls), outputs=outputs, returned={}, rng=None))
        return CallSheet(sections=sections, reads=self._reads(sections), parts=tuple(parts))

    def _reads(self, sections: Sections) -> Reads:
        by_head: list[set[Wire]] = [set() for _ in range(sections.epilogue + 1)]
        for position, gap in enumerate(self._gaps):
            section = sections.of_block(position)
            wires = {source for source in gap.read if isinstance(source, Wire)}
            by_head[section] |= {w for w in wires if w.layer < sections.head(section)}
        final = by_head[sections.epilogue]
        final -= self._gaps[-1].made
        final.update(
            output_wires(sections.layer_of(len(self._blocks) - 1), self._blocks[-1].output)
        )
        by_section = [set(reads) for reads in by_head]
        for section, writer in enumerate(self._writers):
            wires = {wire for call in writer.calls for wire in call.wires}
            by_section[section] |= {w for w in wires if w.layer < sections.head(section)}
        return Reads(
            by_head=tuple(map(frozenset, by_head)), by_section=tuple(map(frozenset, by_section))
        )

    def _cloned(self, sections: Sections, sheet: CallSheet) -> set[Wire]:
        """Wires that share memory with one that a layer changes.

        Raises:
            NotCuttable: something that runs later reads the changed memory.
        """
        storages = {wire: storage_key(self._made[wire]) for wire in sheet.last_reader}
        cloned: set[Wire] = set()
        for storage, layer, culprit in self._changes(sections):
            for wire, last in sheet.last_reader.items():
                if storages[wire] != storage or wire.layer >= layer:
                    continue
                if last > layer:
                    raise NotCuttable(
                        f"{culprit} changes a tensor in place that later blocks read"
                    )
                cloned.add(wire)
        return cloned

    def _changes(self, sections: Sections) -> Iterator[tuple[int, int, str]]:
        """Storage, layer, and who changed it there."""
        for storage, position in self._in_blocks:
            yield storage, sections.layer_of(position), f"block {self._blocks[position].name!r}"
        for position, gap in enumerate(self._gaps):
            for storage in gap.changed:
                yield storage, self._head_of(sections, position), "the forward between the blocks"

    def _changing_buffers(self, sections: Sections) -> dict[int, tuple[str, ...]]:
        """The buffers that this forward changed, by the layers that change or share them."""
        if self._buffers.added():
            names = ", ".join(sorted(self._buffers.added()))
            raise NotCuttable(f"the forward adds buffers: {names}")
        by_layer: dict[int, set[str]] = {}
        for name in self._buffers.changed():
            for layer in self._layers_of_buffer(name, sections):
                by_layer.setdefault(layer, set()).add(name)
        return {layer: tuple(sorted(names)) for layer, names in by_layer.items()}

    def _layers_of_buffer(self, name: str, sections: Sections) -> set[int]:
        tensor = self._model.get_buffer(name)
        layers = {
            sections.layer_of(position)
            for position, block in enumerate(self._blocks)
            if any(tensor is buffer for buffer in block.module.buffers())
        }
        between = [position for position, gap in enumerate(self._gaps) if name in gap.buffers]
        return layers | {self._head_of(sections, position) for position in between}


def _same_numpy(first: RngState, second: RngState) -> bool:
    return bool((first.numpy[1] == second.numpy[1]).all()) and first.numpy[2:] == second.numpy[2:]
