"""Buffers and weights to which no forward wrote so far: who runs one again hears of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import TrialError
from shoal.partition.dataread import DataReads, plain_data
from shoal.partition.discover import NotCuttable
from shoal.partition.preserve import evaluating, has_other, place_of, preserved, same_values
from shoal.recipes.modelchecks import switches_by_code


class Unwritten:
    """The buffers of blocks of which nobody has copies, since no forward wrote to them so far.

    A forward that runs again in the backward would write twice. Blocks that pass some of their
    code over at first, as by a random number, may begin to write later.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], but: Iterable[Tensor]) -> None:
        known = {id(buffer) for buffer in but}  # which blocks may share, each by its own name
        self._places = [
            (owner._buffers, key, f"{path}.{key}")
            for block, module in blocks.items()
            for path, owner in module.named_modules(prefix=block)
            for key, buffer in owner._buffers.items()
            if id(buffer) not in known
        ]

    @contextmanager
    def required(self) -> Iterator[None]:
        """A forward that will run again. One that makes a buffer of another size may: a cache.

        Raises:
            TrialError: it wrote to one of them.
        """
        before = [(b, b._version if b is not None else 0) for b in map(_held_in, self._places)]
        held = [(at, was) for at, (was, _) in enumerate(before) if was is not None]
        reads = DataReads([was for _, was in held])
        with reads:
            yield
        written = {at for place, (at, _) in enumerate(held) if reads and reads.wrote_to(place)}
        for at, (was, version) in enumerate(before):
            place, now = self._places[at], _held_in(self._places[at])
            is_as_it_was = now is was and at not in written
            if was is None or now is None or (is_as_it_was and was._version == version):
                continue
            if now is was or (now.shape == was.shape and not same_values(now, was)):
                raise TrialError(
                    f"the forward wrote to the buffer {place[2]!r}, which it did not in the first "
                    "forward, and the model is cut: a forward that runs again in the backward "
                    "writes once more, and of this buffer there is no copy to begin from. Have "
                    "each training forward write to it, also what it holds, or train this model "
                    "unsharded."
                )


WeightPlace = tuple[dict[str, Any], str, str]
"""Where a module keeps a parameter: ``store[key]``, and its whole name."""


def weight_places(model: nn.Module, names: Iterable[str]) -> tuple[WeightPlace, ...]:
    """Where these parameters are."""
    placed = ((*place_of(model, name), name) for name in names)
    return tuple((owner._parameters, key, name) for owner, key, name in placed)


_AWAY = (
    "If that was to write to the weight of another layer: the model is cut, and such a weight is "
    "elsewhere while this layer runs. Train with technique='resident'."
)


@contextmanager
def weights_watched(places: Iterable[WeightPlace], but: Collection[str]) -> Iterator[list[str]]:
    """Which weights code inside writes to, gives values or hooks, or puts others in the place of.

    Their names are there at the end; of those in ``but`` without the ones that it wrote to.
    What a kernel of the user's own writes into their memory is not seen.
    """
    with torch._C.DisableTorchFunction():  # this is no reading that who watches is to see
        before: list[tuple[WeightPlace, Any, Tensor, int, int]] = [
            (place, weight, plain_data(weight), weight._version, _count_hooks(weight))
            for place in places
            if (weight := place[0].get(place[1])) is not None
        ]
        reads = DataReads([data for _, _, data, *_ in before])
    found: list[str] = []
    try:
        with reads:
            yield found
    except RuntimeError as error:
        if "single memory location" in str(error):  # as stands for a weight that is away
            error.add_note(_AWAY)
        raise
    for place, ((store, key, name), weight, data, version, hooks) in enumerate(before):
        with torch._C.DisableTorchFunction():
            is_written = weight._version != version or (bool(reads) and reads.wrote_to(place))
            is_another = has_other(weight, data) or _count_hooks(weight) > hooks
        if (is_written and name not in but) or is_another or store.get(key) is not weight:
            found.append(name)


def _count_hooks(weight: Tensor) -> int:
    """Those that a forward may have registered: one that runs again registers another."""
    some = weight._backward_hooks, getattr(weight, "_post_accumulate_grad_hooks", None)
    return sum(len(hooks) for hooks in some if hooks)


@contextmanager
def weights_stay(
    places: Iterable[WeightPlace], but: Collection[str], by: str = "the forward"
) -> Iterator[None]:
    """Code of the user's on weights with a home elsewhere, where only ``but`` are taken back.

    Raises:
        TrialError: it did any of that to another one.
    """
    with weights_watched(places, but) as found:
        yield
    for name in found:
        raise TrialError(
            f"{by} wrote to the weight {name!r}, or gave it other values or a hook, and the "
            "model is cut: that would be lost, or done twice where a forward runs again. Do that "
            "after the optimizer's step, in a class or a hook of the optimizer's, or train with "
            "technique='resident'."
        )


def require_quiet_switch(model: nn.Module, device: torch.device) -> None:
    """Raise NotCuttable if the model's own ``train()`` or ``eval()`` writes to its weights."""
    if not switches_by_code(model):
        return
    places = weight_places(model, (name for name, _ in model.named_parameters()))
    with preserved(model, device), weights_watched(places, ()) as found, evaluating(model):
        model.train()
    if found:
        raise NotCuttable(
            f"its own train() or eval() writes to the weight {found[0]!r}, as to merge LoRA's, "
            "and between the steps of a trial in shards weights are elsewhere"
        )


def _held_in(place: tuple[dict[str, Tensor | None], str, str]) -> Tensor | None:
    buffers, key, _ = place
    return buffers.get(key)
