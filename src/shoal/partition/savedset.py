"""What a shard's forward saved for its backward, so that it may wait on the host meanwhile.

[Note: saved sets]
Autograd asks of every tensor that it saves how it shall be kept, and when the backward wants it
asks for it again (``torch.autograd.graph.saved_tensors_hooks``). So what it keeps is ours:

    a parameter, or a view of one   its name, and how the view lies in it. The backward finds the
                                    parameter where it is then: it may have left and come back.
                                    Between F and B of one step nobody changes its value
    an input of the shard           its wire, likewise: it may wait on the host by itself. Until
                                    the forward is over also itself: its own code may ask for it
    any other tensor                a cell: its storage, which goes to the host and comes back as
                                    a whole, once, however many saved tensors are views of it; so
                                    they lie in memory, and alias each other, as before
    what somebody else holds too    itself: a buffer, the batch, a table that a module keeps.
                                    Moving it would free nothing
    what is not plain memory        itself: a subclass, sparse, of another device, zeros of
                                    which no byte is held, a few bytes;
                                    but a parameter of a subclass is found by its name

The shard's own output is a cell although others hold it: the next shard's input is theirs to move.
Tensors that a custom Function keeps as attributes of its ``ctx`` are not seen, and stay. One that
is a view of a parameter would stay in memory that is given away: ``rehearsal`` finds out.

torch does not look whether a tensor that went through hooks was changed in place since. That is
done here: with the version of each when it was saved, and when it leaves or is used.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from shoal.partition.dataread import address_of
from shoal.partition.wires import Wire, Wires, storage_key

LEAST_BYTES = 64
"""Smaller storages stay: seeds and counters, whose copies would take longer than their bytes."""


class Cell:
    """A storage that a forward saved, on the device or away.

    ``memory`` is all of it as bytes, None while it is away; ``num_bytes`` is how many.
    """

    __slots__ = ("__weakref__", "key", "memory", "num_bytes", "saved")

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.key, self.num_bytes = storage_key(tensor), storage.nbytes()
        self.memory: Tensor | None = None  # until it is back: those in ``saved`` hold it
        self.saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def bytes_now(self) -> Tensor:
        """The storage as bytes, while it has not left."""
        return _all_of(next(saved.alias for saved in self.saved if saved.alias is not None))

    @property
    def held_by_others(self) -> bool:
        """Whether more than what was saved holds the storage, so that it would not be freed."""
        aliases = [saved.alias for saved in self.saved if saved.alias is not None]
        storage = aliases[0].untyped_storage()  # one holder more
        holders: int = torch._C._storage_Use_Count(storage._cdata)
        return holders > len(aliases) + 1

    def leave(self) -> None:
        """Let go of the storage; whoever copies it holds it."""
        for saved in self.saved:
            if saved.alias is not None:
                saved.changed = saved.alias._version != saved.version
                saved.alias = None
        self.memory = None


class _Saved:
    """What autograd keeps of one tensor: an alias of it, or where to find it again."""

    __slots__ = ("__weakref__", "alias", "changed", "place", "source", "version")

    def __init__(
        self, alias: Tensor | None, version: int, source: object, place: _Place | None
    ) -> None:
        self.alias, self.version, self.source, self.place = alias, version, source, place
        self.changed = False


class _Place:
    """How a strided tensor lies in a storage, from ``start`` bytes on, and how it is read."""

    __slots__ = ("conj", "dtype", "neg", "shape", "start", "stride")

    def __init__(self, tensor: Tensor, base_bytes: int) -> None:
        at = tensor.storage_offset() * tensor.element_size()
        self.dtype, self.shape, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.start = at - base_bytes
        self.conj, self.neg = tensor.is_conj(), tensor.is_neg()

    def of(self, base: Tensor) -> Tensor:
        """The tensor that lies so after the first byte of ``base``; a view of it."""
        start = base.storage_offset() * base.element_size() + self.start
        if base.dtype is not self.dtype:
            flat, size = _all_of(base), self.dtype.itemsize
            base = flat[: flat.numel() // size * size].view(self.dtype)
        with _disable_current_modes():  # who counts a step refuses this of a user's code
            found = base.as_strided(self.shape, self.stride, start // base.element_size())
        found = found.conj() if found.is_conj() is not self.conj else found
        return torch._neg_view(found) if found.is_neg() is not self.neg else found


class SavedSet:
    """What autograd saves in one forward. Use ``saving`` around it, ``using`` around its backward.

    Args:
        model: Whose parameters are found by name again.
        names: Those that the forward reads.
        wires: The inputs of the shard, on the device now.
    """

    def __init__(self, model: nn.Module, names: Iterable[str], wires: Wires) -> None:
        self._model = model
        with torch._C.DisableTorchFunction():  # a look at where a weight is, is no use of it
            here = sorted((address_of(p), p.nbytes, n) for n, p in _parameters(model, names))
        self._starts = [start for start, _, _ in here]
        self._here = here
        plain = {w: tensor for w, tensor in wires.items() if tensor.layout is torch.strided}
        self._wires_at = {storage_key(tensor): wire for wire, tensor in plain.items()}
        self._bases = {wire: _start(tensor) for wire, tensor in plain.items()}
        self._of_inputs: weakref.WeakSet[_Saved] = weakref.WeakSet()
        self._device = torch.device("cpu")
        self._cells: weakref.WeakValueDictionary[int, Cell] = weakref.WeakValueDictionary()
        self._wires: Mapping[Wire, Tensor] = {}  # while the backward runs
        self.moved: weakref.WeakSet[Cell] = weakref.WeakSet()

    @contextmanager
    def saving(self, device: torch.device) -> Iterator[None]:
        """The forward on ``device``: what it saves is kept here."""
        self._device = device
        hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with hooks:
            yield
        for saved in self._of_inputs:
            assert saved.alias is not None
            saved.changed = saved.alias._version != saved.version
            saved.alias = None  # it may leave too

    @contextmanager
    def using(self, wires: Mapping[Wire, Tensor]) -> Iterator[None]:
        """The backward, with the parameters bound, and the shard's inputs on the device again."""
        self._wires = wires
        try:
            yield
        finally:
            self._wires = {}

    def movable(self, outputs: Collection[int] = ()) -> list[Cell]:
        """What can wait on the host, the largest first; ``outputs`` are storages others hold too.

        Ask when the forward is over and before anything has left.
        """
        cells = [c for c in self._cells.values() if c.num_bytes >= LEAST_BYTES and c.saved]
        able = [c for c in cells if c.key in outputs or not c.held_by_others]
        return sorted(able, key=lambda cell: -cell.num_bytes)

    def here(self) -> list[Tensor]:
        """What came back from the host."""
        return [cell.memory for cell in self.moved if cell.memory is not None]

    def _pack(self, tensor: Tensor) -> _Saved:
        with torch._C.DisableTorchFunction():
            return self._kept(tensor)

    def _kept(self, tensor: Tensor) -> _Saved:
        alias = tensor.detach()
        if not self._is_memory(tensor):
            return _Saved(alias, tensor._version, None, None)
        if (name := self._name_of(tensor)) is not None:
            base = self._model.get_parameter(name)
            return _Saved(None, base._version, name, _Place(tensor, _start(base)))
        if type(tensor) not in (Tensor, nn.Parameter):
            return _Saved(alias, tensor._version, None, None)
        key = storage_key(tensor)
        if (wire := self._wires_at.get(key)) is not None:
            saved = _Saved(alias, tensor._version, wire, _Place(tensor, self._bases[wire]))
            self._of_inputs.add(saved)
            return saved
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = Cell(tensor)
        saved = _Saved(alias, tensor._version, cell, _Place(tensor, 0))
        cell.saved.add(saved)
        return saved

    def _is_memory(self, tensor: Tensor) -> bool:
        """Whether it is elements in a storage of the device, and nothing that computes them."""
        return (
            type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
            and tensor.layout is torch.strided
            and tensor.device == self._device
            and tensor.numel() > 0
            and not tensor._is_zerotensor()  # zeros without memory, as forward derivatives have
        )

    def _name_of(self, tensor: Tensor) -> str | None:
        """The parameter in whose memory a tensor begins."""
        at = address_of(tensor)
        number = bisect_right(self._starts, at) - 1
        if number < 0:
            return None
        start, size, name = self._here[number]
        return name if at < start + size else None

    def _unpack(self, saved: _Saved) -> Tensor:
        with torch._C.DisableTorchFunction():
            return self._found(saved)

    def _found(self, saved: _Saved) -> Tensor:
        if saved.alias is not None:
            _require_unchanged(saved.changed or saved.alias._version != saved.version, saved)
            return saved.alias
        source, place = saved.source, saved.place
        assert place is not None, "what has no place stays itself"
        if isinstance(source, Cell):
            _require_unchanged(saved.changed, saved)
            assert source.memory is not None, "what F saved is not on the device"
            return place.of(source.memory)
        if isinstance(source, Wire):
            _require_unchanged(saved.changed, saved)
            return place.of(self._wires[source])
        assert isinstance(source, str)
        parameter = self._model.get_parameter(source)
        _require_unchanged(parameter._version != saved.version, saved)
        return place.of(parameter.data)


def _require_unchanged(changed: bool, saved: _Saved) -> None:
    """As torch does where no hooks are.

    Raises:
        RuntimeError: the tensor was modified in place after it had been saved.
    """
    if changed:
        what = saved.place or saved.alias
        assert what is not None
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of {what.dtype} and shape {tuple(what.shape)}, after the "
            "forward had saved it. The plain loop fails on it too: use the operation that is not "
            "in place."
        )


def _parameters(model: nn.Module, names: Iterable[str]) -> Iterator[tuple[str, nn.Parameter]]:
    for name in dict.fromkeys(names):
        yield name, model.get_parameter(name)


def _all_of(tensor: Tensor) -> Tensor:
    """The storage of a tensor as bytes."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat.set_(storage, 0, (storage.nbytes(),), (1,))
    return flat


def _start(tensor: Tensor) -> int:
    """Where a tensor begins in its storage, in bytes."""
    return int(tensor.storage_offset()) * tensor.element_size()
