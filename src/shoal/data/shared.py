"""Data that the trials of one worker share, where their recipe allows it: ``share_data=True``.

A search of many small trials calls ``Recipe(data=...)`` once for each of them, and again to
measure them: often that reads one file again and again, into as many copies.

[Note: when it is the same]
A data function is called for a trial as it would be alone, until it has been seen to make the same
bits twice, from two seeds. From then on trials that agree in all the hyperparameters that it read
are given what it made. Everything else is called as ever:

    it drew a random number, or seeded a generator     each trial has its own numbers
    it printed something                               each trial's log has its own lines
    two results differ                                 it depends on what nobody can see
    somebody wrote to what it made                     the others would read that
    anything but loaders over rows of tensors          who reads it might change it

Of the last kind is all of which a batch may be a part of the data itself. A plain ``DataLoader``
over a ``TensorDataset`` copies rows into each batch (``rows.py``), keeps nothing between epochs,
and draws its order from the streams of the trial that reads it.

What the function leaves elsewhere, for the loss maybe, no rows can show: that is why the recipe
has to say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from shoal.core.reads import NAMES, Reads, told
from shoal.core.spec import Scalar
from shoal.data.rows import is_rows_only
from shoal.data.sources import order_generators, order_of
from shoal.recipes.recipe import Batch, Recipe
from shoal.rng import RngState, capture_rng, same_rng

KEPT = 4  # results that no trial may be using now
KEPT_BYTES = 64 * 2**20  # of all but the newest one

Sources = tuple[Iterable[Batch], Iterable[Batch] | None]


def with_shared_data(recipe: Recipe, device: torch.device, said: Callable[[], int]) -> Recipe:
    """The recipe, whose data function is called as often as it makes something new.

    ``said`` counts what the process's trials have printed.
    """
    return replace(recipe, data=SharedData(recipe.data, device, said))


class SharedData:
    """A data function; for the thread that builds a worker's trials."""

    def __init__(
        self,
        data: Callable[[Any], Any],
        device: torch.device,
        said: Callable[[], int],
    ) -> None:
        self._data, self._device, self._said = data, device, said
        self._made: list[_Made] = []  # the newest first

    def __call__(self, hp: Mapping[str, Scalar]) -> Any:
        """What the function makes of ``hp``, or made of what it cannot tell apart from it."""
        for made in self._made:
            if made.is_proven and made.is_of(hp) and made.is_untouched:
                self._keep(made)
                return made.sources
        reads = Reads(hp)
        before, said = capture_rng(self._device), self._said()
        found = self._data(reads)
        if self._said() == said and same_rng(before, capture_rng(self._device)):
            self._learn(reads.seen, before, found)
        return found

    def _learn(self, seen: Mapping[Any, Any], seed: RngState, found: Any) -> None:
        known = next((made for made in self._made if made.seen == seen), None)
        if known is None:
            if (facts := _facts(found)) is not None:
                self._keep(_Made(seen, seed, found, facts, _versions(found)))
        elif known.sources is None or same_rng(known.seed, seed):
            return  # equal results of one seed tell nothing of another's
        elif known.facts == _facts(found) and _same_rows(known.sources, found):
            known.is_proven = True
        else:
            known.sources, known.is_proven = None, False
            self._keep(known)

    def _keep(self, made: _Made) -> None:
        """As the newest; the oldest go where they are too many."""
        others = [other for other in self._made if other is not made][: KEPT - 1]
        self._made = [made]
        held = 0
        for other in others:
            held += other.bytes
            if held <= KEPT_BYTES:
                self._made.append(other)


@dataclass(slots=True, eq=False)
class _Made:
    """What the function once made, and of what."""

    seen: Mapping[Any, Any]  # hyperparameters that it read
    seed: RngState  # the streams when it was called
    sources: Any  # None: another call made something else
    facts: Any
    versions: Sequence[int]  # of the rows, as torch counts who writes to them
    is_proven: bool = False  # made twice, of two seeds

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in _tensors(self.sources or ()))

    @property
    def is_untouched(self) -> bool:
        """Whether nobody has written to the rows by another way than a batch."""
        return _versions(self.sources) == self.versions

    def is_of(self, hp: Mapping[str, Scalar]) -> bool:
        """Whether the function would read the same of ``hp``."""
        for name, value in self.seen.items():
            if name is NAMES:
                if value != tuple(hp):
                    return False
            elif value != told(hp, name):
                return False
        return True


def _facts(sources: Any) -> Any:
    """All of both sources but their rows; None where they are not of the kind that is shared."""
    if not isinstance(sources, tuple | list) or len(sources) != 2 or sources[0] is None:
        return None
    found = [_facts_of(source) for source in sources if source is not None]
    return None if None in found else found


def _facts_of(source: Any) -> Any:
    if not isinstance(source, DataLoader) or not is_rows_only(source):
        return None
    batches, order = source.batch_sampler, order_of(source)
    if type(batches) is not BatchSampler or type(order) not in (RandomSampler, SequentialSampler):
        return None
    if order_generators(source) or getattr(order, "data_source", None) is not source.dataset:
        return None
    tensors = source.dataset.tensors
    if set(vars(source.dataset)) != {"tensors"} or any(map(_is_special, tensors)):
        return None
    return (
        (batches.batch_size, batches.drop_last, source.pin_memory, source.timeout),
        (type(order), len(order), getattr(order, "replacement", False)),
        [(tensor.dtype, tensor.shape) for tensor in tensors],
    )


def _is_special(tensor: torch.Tensor) -> bool:
    """Whether its bits cannot be compared, or its writes counted."""
    return tensor.device.type != "cpu" or tensor.is_inference() or tensor.is_quantized


def _tensors(sources: Iterable[Any]) -> list[torch.Tensor]:
    return [t for source in sources if source is not None for t in source.dataset.tensors]


def _versions(sources: Iterable[Any]) -> list[int]:
    return [tensor._version for tensor in _tensors(sources)]


def _same_rows(first: Sources, second: Sources) -> bool:
    """Bit for bit; of sources of equal facts."""
    pairs = zip(_tensors(first), _tensors(second), strict=True)
    return all(torch.equal(_bits(one), _bits(other)) for one, other in pairs)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
