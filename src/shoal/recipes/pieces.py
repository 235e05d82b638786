"""Batches in pieces: several micro-batches of equal rows out of one batch of the data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.core.errors import TrialError
from shoal.recipes.recipe import HP, Batch, Recipe, epoch_length


def in_pieces(recipe: Recipe, count: int) -> Recipe:
    """The recipe with each training batch cut in ``count``; as many more of them in a step."""
    if count == 1:
        return recipe
    accumulate = recipe.accumulate * count
    return replace(recipe, data=_CutData(recipe, count), accumulate=accumulate)


@dataclass(frozen=True)
class _CutData:
    recipe: Recipe
    count: int

    def __call__(self, hp: HP) -> tuple[Iterable[Batch], Iterable[Batch] | None]:
        train, valid = self.recipe.data(hp)
        return _Cut(train, self.count), valid


@dataclass(frozen=True)
class _Cut:
    batches: Iterable[Batch]
    count: int

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            yield from cut_rows(batch, self.count)

    def __len__(self) -> int:
        length = epoch_length(self.batches)
        if length is None:
            raise TypeError("the length of the data is not known")
        return length * self.count


def cut_rows(batch: Batch, count: int) -> list[Batch]:
    """A batch in ``count`` pieces of equal rows, which are views of it.

    Raises:
        TrialError: its tensors do not have rows in common that can be divided so.
    """
    leaves, tree = pytree.tree_flatten(batch)
    rows = {leaf.shape[0] if leaf.dim() else 0 for leaf in leaves if isinstance(leaf, Tensor)}
    if len(rows) != 1 or next(iter(rows)) % count:
        found = ", ".join(map(str, sorted(rows))) or "no tensor"
        raise TrialError(
            f"a batch whose tensors have {found} rows cannot be cut into {count} micro-batches of "
            f"equal rows. Give batches of a multiple of {count} rows (drop_last=True), or another "
            "Pipelined(micro_batches=...)."
        )
    size = next(iter(rows)) // count
    return [
        pytree.tree_unflatten(
            [
                leaf[i * size : (i + 1) * size] if isinstance(leaf, Tensor) else leaf
                for leaf in leaves
            ],
            tree,
        )
        for i in range(count)
    ]
