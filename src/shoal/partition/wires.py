"""Tensors between layers: their names, and which tensor of a running forward is which."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True, order=True)
class Wire:
    """A tensor between layers: the layer that makes it, and its place there.

    ``slot`` is ``out.<leaf>`` for a block's output, ``<module>#<call>.<leaf>`` for what a
    module between the blocks returned, and ``<block>.<leaf>`` for any other tensor that the
    forward hands to a block, after the argument leaf of the block that reads it first. One
    that it hands to a module only, and reads again later, is ``<module>#<call><<leaf>``; a copy
    that it makes itself, of what no block of its section returned, ``clone()#<call>.0``, and so
    what another function computes that several sections read.
    """

    layer: int
    slot: str

    def __str__(self) -> str:
        return f"{self.layer}:{self.slot}"

    @property
    def is_argument(self) -> bool:
        """Is it named after an argument? Then no call of a module returns it."""
        return "<" in self.slot or ("#" not in self.slot and not self.slot.startswith("out."))


Wires = dict[Wire, Tensor]


class _Entry(NamedTuple):
    """A named tensor, as it was then."""

    tensor: weakref.ref[Tensor]
    wire: Wire
    version: int


class Names:
    """Which tensors of one run of a forward are wires. The last name given counts.

    A tensor that was changed in place since has no name any more. Nothing is kept alive.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._renamed: list[weakref.ref[Tensor]] = []  # after they were changed

    def give(self, tensor: Tensor, wire: Wire) -> None:
        """Call ``tensor`` by ``wire`` from now on."""
        before = self._entries.get(id(tensor))
        if before and before.tensor() is tensor and before.version != tensor._version:
            self._renamed.append(before.tensor)
        self._entries[id(tensor)] = _Entry(weakref.ref(tensor), wire, tensor._version)

    def of(self, tensor: Tensor) -> Wire | None:
        """The tensor's name, if it has one."""
        entry = self._entries.get(id(tensor))
        if entry is None or entry.tensor() is not tensor or entry.version != tensor._version:
            return None
        return entry.wire

    def changed(self) -> list[Tensor]:
        """The living tensors that were changed in place since they were named; forgets them."""
        living = {key: entry.tensor() for key, entry in self._entries.items()}
        gone = {
            key: tensor
            for key, tensor in living.items()
            if tensor is None or tensor._version != self._entries[key].version
        }
        for key in gone:
            del self._entries[key]
        renamed = [known() for known in self._renamed]
        self._renamed.clear()
        return [tensor for tensor in (*gone.values(), *renamed) if tensor is not None]

    def forget(self, wires: Collection[Wire]) -> None:
        """Take their names away from the tensors called by ``wires``."""
        for key in [key for key, entry in self._entries.items() if entry.wire in wires]:
            del self._entries[key]


class Substitution(TorchFunctionMode):
    """Gives torch's functions the real tensor where the forward holds only its like.

    [Note: substitution]
    In ``x = x + block(x)`` the sum is made between two blocks and read between the next two.
    A forward that is entered again there has made the sum of stand-ins, and holds that
    object. It is known by its identity, as what the skipped block was called with, and
    whatever is computed from it gets the real sum, which is a wire.
    """

    def __init__(self) -> None:
        super().__init__()
        self.paused = False
        self._real: dict[int, tuple[Tensor, Tensor]] = {}

    def replace(self, tensor: Tensor, real: Tensor) -> None:
        """From now on ``real`` is meant wherever ``tensor``, which is kept alive, is read."""
        self._real[id(tensor)] = (tensor, real)

    def in_leaves(self, tree: Any) -> Any:
        """``tree`` with the real tensors; the same object where there are none."""
        if not self._real or not any(id(leaf) in self._real for leaf in tensors_in(tree)):
            return tree
        return pytree.tree_map(self._meant, tree)

    def _meant(self, leaf: Any) -> Any:
        found = self._real.get(id(leaf))
        return leaf if found is None else found[1]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._real and not self.paused:
            args, kwargs = self.in_leaves(args), self.in_leaves(kwargs or {})
        return func(*args, **(kwargs or {}))


class Touch(NamedTuple):
    """That the forward looked at a tensor; with ``size_only`` at nothing that tells its type."""

    wire: Wire
    size_only: bool


_SIZE_ONLY: frozenset[Any] = frozenset(
    (
        *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "device")),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__),
    )
)


class TouchWatch(TorchFunctionMode):
    """Notes which of the watched tensors the forward looked at, be it only at their shape."""

    def __init__(self) -> None:
        super().__init__()
        self.touched: set[Touch] = set()
        self.paused = False
        self._watched: dict[int, tuple[Tensor, Wire]] = {}

    def watch(self, tensor: Tensor, wire: Wire) -> None:
        """Note a look at ``tensor``, which is kept alive."""
        self._watched[id(tensor)] = (tensor, wire)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not self.paused and self._watched:
            self._note((args, kwargs), size_only=func in _SIZE_ONLY)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def left_for(self, arguments: Any) -> Iterator[None]:
        """Inside, this mode is not there, if none was entered since; ``arguments`` are touched.

        torch has kernels, as that of an encoder layer in evaluation, that it takes only then.
        """
        self._note(arguments, size_only=False)
        if _get_current_function_mode() is not self:
            yield
            return
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def _note(self, tree: Any, *, size_only: bool) -> None:
        self.touched.update(
            Touch(self._watched[id(leaf)][1], size_only)
            for leaf in tensors_in(tree)
            if id(leaf) in self._watched
        )


@dataclass(frozen=True, slots=True)
class OwnCall:
    """A call of one of torch's functions outside of all modules, by how many there have been."""

    function: str
    number: int

    @property
    def is_copy(self) -> bool:
        return self.function == Tensor.clone.__name__


class OwnCalls(TorchFunctionMode):
    """Has ``called`` do what torch's functions are called for, or those of these ``functions``.

    It is given the function's name, what does it, and what that is given.
    """

    def __init__(
        self,
        called: Callable[[str, Callable[[], Any], Any], Any],
        functions: Collection[str] = (),
    ) -> None:
        super().__init__()
        self._called, self._functions = called, functions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        call = functools.partial(func, *args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if self._functions and name not in self._functions:
            return call()
        return self._called(name, call, (args, kwargs))


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors of a structure, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def has_storage(tensor: Tensor) -> bool:
    """Whether it can be asked for its memory: not what is inside of a ``torch.vmap``, say."""
    return tensor.layout is torch.strided and not is_functorch_wrapped_tensor(tensor)


def storage_key(tensor: Tensor) -> int:
    """Equal for two living tensors when they share memory."""
    if not has_storage(tensor):
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)
