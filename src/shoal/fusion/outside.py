"""What a pass needs that no graph of its operations can hold: masks that are drawn, and checks.

A rule asks for both here. An eager pass has them at once; a pass that is made into a graph is
given the masks, and leaves its checks to be looked at when the graph has run (``graph.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.bernoulli import dropout_mask_
from shoal.fusion.declined import Untraceable
from shoal.fusion.perslot import values_of
from shoal.fusion.streams import SlotStreams


class Mask(NamedTuple):
    """Masks of all slots to be drawn: of one trial's shape and strides, with a rate for each."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    rates: tuple[float, ...]

    @classmethod
    def like(cls, one: Tensor, rate: float, width: int) -> Mask:
        """Of the shape of ``one``, which a trial alone would drop from."""
        row = torch.empty_like(one, requires_grad=False)
        rates = values_of(rate, width)
        return cls(tuple(row.shape), tuple(row.stride()), row.dtype, row.device, rates)

    @property
    def shape(self) -> tuple[object, ...]:
        """All but the rates."""
        return self[:4]


class Outside(Protocol):
    """Where a pass has its masks from, and where its checks go."""

    def masks(self, mask: Mask) -> Tensor:
        """Zeros and 1 / (1 - rate) for every slot: [N, ...]."""
        ...

    def require_range(self, index: Tensor, size: int) -> None:
        """Refuse an index that would read a neighbour's rows in a table of all slots.

        Raises:
            IndexError: as torch does for one trial.
        """
        ...

    def loops(self, name: str) -> None:
        """An operation is about to run slot by slot."""
        ...


class AtOnce:
    """What an eager pass has."""

    def __init__(self, streams: SlotStreams) -> None:
        self._streams = streams

    def masks(self, mask: Mask) -> Tensor:
        """Drawn from every slot's own generator."""
        return draw(self._streams, mask)

    def require_range(self, index: Tensor, size: int) -> None:
        """Checked here; on a GPU there is no wait for the device."""
        if not index.numel():
            return
        least, most = torch.aminmax(index)
        if index.is_cuda:
            torch._assert_async((least >= 0) & (most < size))
        elif least < 0 or most >= size:
            raise IndexError(f"index out of range: {int(least)} to {int(most)}, of {size} rows")

    def loops(self, name: str) -> None:
        """It may."""


class Heard(AtOnce):
    """The same, and what was drawn is kept: a graph of this pass would be given it.

    Attributes:
        asked, drawn: the masks, in the order of the pass.
    """

    def __init__(self, streams: SlotStreams) -> None:
        super().__init__(streams)
        self.asked: list[Mask] = []
        self.drawn: list[Tensor] = []

    def restart(self) -> None:
        """What was drawn until now is undone; the pass begins anew."""
        self.asked, self.drawn = [], []

    def masks(self, mask: Mask) -> Tensor:
        """Drawn, and kept."""
        found = super().masks(mask)
        self.asked.append(mask)
        self.drawn.append(found)
        return found


class Given:
    """What a pass has that is made into a graph: masks are inputs, checks are outputs.

    Attributes:
        checks: for each, whether it holds: a tensor of no dimensions.
    """

    def __init__(self, masks: Sequence[Tensor]) -> None:
        self._masks: Iterator[Tensor] = iter(masks)
        self.checks: list[Tensor] = []

    def masks(self, mask: Mask) -> Tensor:
        """The next one that was given."""
        found = next(self._masks, None)
        if found is None or tuple(found.shape[1:]) != mask.size:
            raise Untraceable("it draws other masks when it is run again")
        return found

    def require_range(self, index: Tensor, size: int) -> None:
        """To be looked at when the graph has run."""
        if index.numel():
            least, most = torch.aminmax(index)
            self.checks.append((least >= 0) & (most < size))

    def loops(self, name: str) -> None:
        """What draws by itself, or for each slot, has no place in a graph."""
        raise Untraceable(f"{name} runs slot by slot, which a graph does not hold")


def draw(streams: SlotStreams, mask: Mask) -> Tensor:
    """Masks [N, ...], each from its slot's own generator.

    On the CPU what ``torch.dropout`` draws; elsewhere its kernel draws itself, once per slot.
    A slot whose rate is 0 or 1 draws nothing, as alone.
    """
    size, stride, dtype, device, rates = mask
    elements = max(1, torch.Size(size).numel())
    drawn = torch.empty_strided(
        (len(rates), *size), (elements, *stride), dtype=dtype, device=device
    )
    for slot, rate in enumerate(rates):
        if rate in (0, 1):
            drawn[slot].fill_(1 - rate)
        elif device.type == "cpu":
            dropout_mask_(drawn[slot], rate, streams.generator(slot))
        else:
            with streams.as_default(slot):
                drawn[slot] = torch.dropout(torch.ones_like(drawn[slot]), rate, True)
    return drawn
