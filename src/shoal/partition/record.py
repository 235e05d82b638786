"""What a watched forward says about a chain: its wires, and who reads and changes what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from shoal.partition.callsheet import CallSheet, Part, Reads, output_wires
from shoal.partition.discover import NotCuttable
from shoal.partition.glue import Block
from shoal.partition.handed import Keepers
from shoal.partition.sections import Sections
from shoal.partition.spy import Seen
from shoal.partition.taint import CHANCE, BlockOutput, Derived
from shoal.partition.wires import Wire, Wires, storage_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a plain training forward did.

    ``cloned`` are wires that a later layer changes in place, or that share memory with one: a
    shard that receives one works on a copy; and those that are memory of a buffer. ``recomputes``
    says that a section reads what was computed in an earlier one and has no name, so that it is
    computed again. ``made`` are the wires as they were made.
    """

    blocks: tuple[Block, ...]
    sheet: CallSheet
    keepers: Keepers  # hooks by which they and others hand over what the forward reads
    outside: Mapping[str, nn.Module]  # outermost modules called before the last block
    called: tuple[tuple[int, nn.Module], ...]  # all outermost modules, with the layer
    uses: frozenset[tuple[int, str]]  # a layer, a parameter that it reads outside of blocks
    needs_grad: frozenset[Wire]
    cloned: frozenset[Wire]
    changing_buffers: Mapping[int, tuple[str, ...]]  # layer -> names
    recomputes: bool
    draws: bool  # random numbers, outside of all modules
    by_gradients: bool  # whether operators ran whose bits may depend on them
    trained: tuple[bool, ...]  # requires_grad of every parameter
    written: frozenset[str]  # parameters that the forward itself writes to
    made: Wires

    @property
    def sections(self) -> Sections:
        return self.sheet.sections


def make_record(model: nn.Module, seen: Seen) -> Record:
    """What was seen of ``model``, in terms of layers.

    Raises:
        NotCuttable: no chain of these blocks could do that.
    """
    last = len(seen.blocks)
    if last < 2:
        raise NotCuttable(
            f"the forward calls {last} of the {last + len(seen.skipped)} listed blocks; two or "
            "more are needed (block(x) is a call, block.forward(x) is none)"
        )
    _require_blind(seen)
    sections = Sections(last, seen.joints)
    sheet = _sheet(sections, seen)
    return Record(
        blocks=tuple(seen.blocks),
        sheet=sheet,
        keepers=seen.keepers,
        outside={name: m for gap in seen.gaps[:last] for name, m in gap.modules},
        called=tuple(
            (_head_of(sections, position), module)
            for position, gap in enumerate(seen.gaps)
            for _, module in gap.modules
        ),
        uses=frozenset(
            (_head_of(sections, position), source)
            for position, gap in enumerate(seen.gaps)
            for source in gap.read
            if isinstance(source, str)
        ),
        needs_grad=_needing_gradients(sections, seen, sheet),
        cloned=frozenset(
            _handed_buffers(model, sections, seen, sheet) | _cloned(sections, seen, sheet)
        ),
        changing_buffers=_changing_buffers(model, sections, seen),
        recomputes=any(
            sections.of_block(source.position) != sections.of_block(position)
            for position, gap in enumerate(seen.gaps)
            for source in gap.read
            if isinstance(source, Derived)
        ),
        draws=seen.draws,
        by_gradients=seen.by_gradients,
        trained=tuple(parameter.requires_grad for parameter in model.parameters()),
        written=seen.written,
        made={wire: seen.made[wire].detach() for wire in sheet.last_reader},
    )


def _head_of(sections: Sections, position: int) -> int:
    """The layer that runs the gap before the block at ``position``."""
    return sections.head(sections.of_block(position))


def _require_blind(seen: Seen) -> None:
    """Raise NotCuttable if the forward may choose its blocks by what it computed."""
    for position, gap in enumerate(seen.gaps[:-1]):
        looked = [s.position for s in gap.looked_at if isinstance(s, BlockOutput)]
        if looked:
            raise NotCuttable(
                "the forward reads a value of the output of block "
                f"{seen.blocks[max(looked)].name!r} between blocks"
                f"{f', at {gap.line}' if gap.line else ''}, and may choose by it which comes next"
            )
        if CHANCE in gap.looked_at and (position or seen.skipped):
            raise NotCuttable(
                f"the forward looks at a random number before block "
                f"{seen.blocks[position].name!r}, and may skip blocks by it, as layerdrop does"
            )


def _handed_buffers(
    model: nn.Module, sections: Sections, seen: Seen, sheet: CallSheet
) -> set[Wire]:
    """Wires by which the forward itself hands on a buffer that changes, as it is when it has.

    Raises:
        NotCuttable: it changes elsewhere too. Where the forward is run again, and where shards
            take turns, it has other values than at first.
    """
    handed: set[Wire] = set()
    changing = {name: model.get_buffer(name) for name in sorted(seen.rewritten)}
    for wire in sheet.last_reader if changing else ():
        section = sections.headed_by(wire.layer)
        tensor = seen.made[wire]
        of = [name for name, b in changing.items() if section is not None and _overlap(b, tensor)]
        for name in of:
            if "<" in wire.slot or not _changes_first(model, name, section or 0, sections, seen):
                raise NotCuttable(
                    f"its forward hands the buffer {name!r}, which changes in each forward, from "
                    "one layer to another, and where one runs again the buffer has changed again. "
                    "Where the block that it is in runs before the others, have it return the "
                    "buffer"
                )
            handed.add(wire)
    return handed


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Does one begin before the other ends, in one memory?"""
    if storage_key(one) != storage_key(other):
        return False
    (start, stop), (first, last) = _extent(one), _extent(other)
    return start < last and first < stop


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its memory between which it lies."""
    size, start = tensor.element_size(), int(tensor.storage_offset())
    steps = ((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start * size, (start + int(sum(steps)) + 1) * size


def _changes_first(
    model: nn.Module, name: str, section: int, sections: Sections, seen: Seen
) -> bool:
    """Do modules alone change a buffer, all of them before the first block of a section?"""
    start = sections.blocks_of(section).start
    if _layers_of_buffer(model, name, sections, seen) != {sections.head(section)}:
        return False
    if any(name in gap.buffers for at, gap in enumerate(seen.gaps) if at != start):
        return False
    held = (b for _, module in seen.gaps[start].modules for b in module.buffers())
    return any(model.get_buffer(name) is buffer for buffer in held)


def _sheet(sections: Sections, seen: Seen) -> CallSheet:
    parts = []
    for section, calls in enumerate(seen.calls):
        outputs = tuple(seen.blocks[p].output for p in sections.blocks_of(section))
        parts.append(Part(calls=tuple(calls), outputs=outputs, returned={}, rng=None))
    return CallSheet(sections=sections, reads=_reads(sections, seen), parts=tuple(parts))


def _reads(sections: Sections, seen: Seen) -> Reads:
    by_head: list[set[Wire]] = [set() for _ in range(sections.epilogue + 1)]
    for position, gap in enumerate(seen.gaps):
        section = sections.of_block(position)
        wires = {source for source in gap.read if isinstance(source, Wire)}
        by_head[section] |= {w for w in wires if w.layer < sections.head(section)}
    last = len(seen.blocks) - 1
    by_head[-1] -= seen.gaps[-1].made
    block, layer = seen.blocks[last], sections.layer_of(last)
    by_head[-1].update(output_wires(layer, block.output, block.num_returned))
    by_section = [set(reads) for reads in by_head]
    for section, calls in enumerate(seen.calls):
        wires = {wire for call in calls for wire in call.wires}
        by_section[section] |= {w for w in wires if w.layer < sections.head(section)}
    return Reads(
        by_head=tuple(map(frozenset, by_head)), by_section=tuple(map(frozenset, by_section))
    )


def _needing_gradients(sections: Sections, seen: Seen, sheet: CallSheet) -> frozenset[Wire]:
    """The wires with a gradient in this forward, and those that have one in others.

    A block with stochastic depth returns what it was given where it is passed over (``if
    random.random() < p: return x``): that has no gradient where nothing before it is trained.
    """
    found = {wire for wire in sheet.last_reader if seen.made[wire].requires_grad}
    passed: set[Wire] = set()
    for layer in range(1, sections.num_layers - 1):
        floats = {w for w in sheet.last_reader if w.layer == layer and _is_float(seen.made[w])}
        section = sections.headed_by(layer)
        if section is not None:
            may = not passed.isdisjoint(sheet.reads.by_head[section])
        else:
            position = sections.position_of(layer)
            trains = any(p.requires_grad for p in seen.blocks[position].module.parameters())
            read = not (found | passed).isdisjoint(sheet.call(position).wires)
            may = (trains or read) and found.isdisjoint(floats)
        if may:
            passed |= floats
    return frozenset(found | passed)


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _cloned(sections: Sections, seen: Seen, sheet: CallSheet) -> set[Wire]:
    """Wires that share memory with one that a layer changes.

    Raises:
        NotCuttable: something that runs later reads the changed memory.
    """
    storages = {wire: storage_key(seen.made[wire]) for wire in sheet.last_reader}
    cloned: set[Wire] = set()
    for storage, layer, culprit in _changes(sections, seen):
        for wire, last in sheet.last_reader.items():
            if storages[wire] != storage or wire.layer >= layer:
                continue
            if last > layer:
                raise NotCuttable(f"{culprit} changes a tensor in place that later blocks read")
            cloned.add(wire)
    return cloned


def _changes(sections: Sections, seen: Seen) -> Iterator[tuple[int, int, str]]:
    """Storage, layer, and who changed it there."""
    for storage, position in seen.changed:
        yield storage, sections.layer_of(position), f"block {seen.blocks[position].name!r}"
    for position, gap in enumerate(seen.gaps):
        for storage in gap.changed:
            yield storage, _head_of(sections, position), "the forward between the blocks"


def _changing_buffers(
    model: nn.Module, sections: Sections, seen: Seen
) -> dict[int, tuple[str, ...]]:
    """The buffers that a forward changes, by the layers that change or share them."""
    by_layer: dict[int, set[str]] = {}
    for name in seen.buffers | _statistics(model):
        for layer in _layers_of_buffer(model, name, sections, seen):
            by_layer.setdefault(layer, set()).add(name)
    return {layer: tuple(sorted(names)) for layer, names in by_layer.items()}


def _statistics(model: nn.Module) -> set[str]:
    """Those of norms: blocks may pass them over in one forward and not in others.

    As stochastic depth does, by a random number of the block's own.
    """
    return {
        f"{path}.{key}" if path else key
        for path, module in model.named_modules()
        if isinstance(module, _NormBase) and module.training
        for key, buffer in module._buffers.items()
        if buffer is not None
    }


def _layers_of_buffer(model: nn.Module, name: str, sections: Sections, seen: Seen) -> set[int]:
    tensor = model.get_buffer(name)
    layers = {
        sections.layer_of(position)
        for position, block in enumerate(seen.blocks)
        if any(tensor is buffer for buffer in block.module.buffers())
    }
    between = [position for position, gap in enumerate(seen.gaps) if name in gap.buffers]
    return layers | {_head_of(sections, position) for position in between}
