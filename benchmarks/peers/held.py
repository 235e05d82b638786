"""Which bytes a step holds, and which of them outlive it: for trainings that are not shoal's."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass


class Change(NamedTuple):
    """A storage has another size from now on; 0 when it is gone."""

    key: int
    num_bytes: int


class Held(NamedTuple):
    """Bytes of tensors in a step.

    ``total`` is the most at any time, ``outliving`` what is there before and after,
    ``passing`` the most at any time beyond what each storage has in the end.
    """

    total: int
    outliving: int
    passing: int


def held(changes: Iterable[Change]) -> Held:
    """The three sums of a step's changes, in order; what is there before comes first."""
    changes = list(changes)
    in_the_end = {change.key: change.num_bytes for change in changes}
    now: dict[int, int] = {}
    total = passing = most = most_passing = 0
    for key, size in changes:
        old, end = now.get(key, 0), in_the_end[key]
        now[key] = size
        total += size - old
        passing += max(0, size - end) - max(0, old - end)
        most, most_passing = max(most, total), max(most_passing, passing)
    return Held(most, sum(in_the_end.values()), most_passing)


class StepWatch(TorchDispatchMode):
    """Follows every storage inside the ``with``, those that were there before included.

    Sizes are read after each operator, since FSDP2 frees a storage by making it smaller.
    Scratch memory inside one operator is not seen. For one step: it takes as long again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[Change] = []
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._number = 0
        self._numbers: dict[int, int] = {}

    def __enter__(self) -> StepWatch:
        for tensor in _all_tensors():
            self._see(tensor)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for tensor in _all_tensors():  # gradients that were never an operator's output
            self._see(tensor)
        self._read_sizes()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        self._read_sizes()
        return output

    def _see(self, tensor: Tensor) -> None:
        for plain in _plain(tensor):
            storage = plain.untyped_storage()
            key = storage._cdata
            if key not in self._alive:
                self._number += 1
                self._numbers[key] = self._number
                gone = weakref.ref(storage, lambda _, key=key: self._gone(key))
                self._alive[key] = (gone, storage.nbytes())
                self.changes.append(Change(self._number, storage.nbytes()))

    def _read_sizes(self) -> None:
        for key, (reference, size) in list(self._alive.items()):
            storage = reference()
            if storage is not None and storage.nbytes() != size:
                self._alive[key] = (reference, storage.nbytes())
                self.changes.append(Change(self._numbers[key], storage.nbytes()))

    def _gone(self, key: int) -> None:
        del self._alive[key]
        self.changes.append(Change(self._numbers.pop(key), 0))


def _all_tensors() -> Iterator[Tensor]:
    """Every tensor that Python knows, and their gradients."""
    gc.collect()
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):
            yield thing
            if thing.is_leaf:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    gradient = thing.grad
                if gradient is not None:
                    yield gradient


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold a tensor's bytes: of a distributed one its local part."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for part in (getattr(tensor, name) for name in names):
            if isinstance(part, Tensor):
                yield from _plain(part)
    elif tensor.layout is torch.strided and tensor.device.type != "meta":
        yield tensor
