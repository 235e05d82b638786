"""What a pass needs that no graph of its operations can hold: what is drawn, checks, answers.

A rule asks for them here. An eager pass has them at once; a pass that is made into a graph is
given what was drawn, masks of dropout for the most part, and what its code was answered where it
asked a tensor for a number (``if mask.all():``). It leaves checks, to be looked at when the graph
has run (``graph.py``): of what it refuses, and of whether these would be the answers again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.fusion.declined import Untraceable
from shoal.fusion.passes.streams import SlotStreams
from shoal.fusion.rows.level import plainly
from shoal.fusion.rows.perslot import values_of
from shoal.kernels.bernoulli import dropout_mask_


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


class Numbers(NamedTuple):
    """Random numbers of all slots to be drawn: of one trial's shape and strides, by a method.

    ``method`` fills a tensor in place (``"normal_"``) with ``numbers`` for its arguments; or is
    ``"randperm"``.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    width: int
    method: str
    numbers: tuple[float, ...]

    @classmethod
    def like(
        cls, one: Tensor, device: torch.device, width: int, method: str, numbers: tuple[float, ...]
    ) -> Numbers:
        """Of the shape, strides and type of ``one``, on ``device``."""
        return cls(tuple(one.shape), one.stride(), one.dtype, device, width, method, numbers)

    @property
    def shape(self) -> tuple[object, ...]:
        """All of it."""
        return tuple(self)


Ask = Mask | Numbers
"""What is drawn outside of a pass. Two of one ``shape`` differ in nothing but rates."""


Answer = bool | int | float


class Outside(Protocol):
    """Where a pass has what is drawn from, and where its checks go."""

    def masks(self, ask: Ask) -> Tensor:
        """For every slot [N, ...]: zeros and 1 / (1 - rate), or random numbers."""
        ...

    def require(self, holds: Tensor, otherwise: Callable[[], Exception]) -> None:
        """Refuse what torch refuses of one trial; ``holds`` is a truth of all slots.

        Raises:
            Exception: what ``otherwise`` makes, where that is not so.
        """
        ...

    def holds(self, truth: Tensor) -> bool:
        """Whether a truth of all slots is one: code that checks its numbers goes on if it is."""
        ...

    def answer(self, asked: Tensor, ask: Callable[[], Answer]) -> Answer:
        """What code gets that asks a tensor, [N, 1, ...] or all slots', for one truth or number.

        ``ask`` asks each slot; all of them say the same, or it raises.
        """
        ...

    def loops(self, name: str) -> None:
        """An operation is about to run slot by slot."""
        ...


class AtOnce:
    """What an eager pass has."""

    def __init__(self, streams: SlotStreams) -> None:
        self._streams = streams

    def masks(self, ask: Ask) -> Tensor:
        """Drawn from every slot's own generator."""
        return draw(self._streams, ask)

    def require(self, holds: Tensor, otherwise: Callable[[], Exception]) -> None:
        """Checked here; on a GPU there is no wait for the device."""
        if holds.is_cuda:
            torch._assert_async(holds)
        elif not holds:
            raise otherwise()

    def holds(self, truth: Tensor) -> bool:
        """Asked here, as the trial alone does."""
        return bool(truth)

    def answer(self, asked: Tensor, ask: Callable[[], Answer]) -> Answer:
        """Asked here, as the trial alone does."""
        return ask()

    def loops(self, name: str) -> None:
        """It may."""


class Heard(AtOnce):
    """The same, and what was drawn and answered is kept: a graph of this pass would be given it.

    Attributes:
        asked, drawn: the masks and numbers, in the order of the pass.
        answers: the same of what code asked.
    """

    def __init__(self, streams: SlotStreams) -> None:
        super().__init__(streams)
        self.asked: list[Ask] = []
        self.drawn: list[Tensor] = []
        self.answers: list[Answer] = []

    def restart(self) -> None:
        """What was drawn until now is undone; the pass begins anew."""
        self.asked, self.drawn, self.answers = [], [], []

    def masks(self, ask: Ask) -> Tensor:
        """Drawn, and kept."""
        found = super().masks(ask)
        self.asked.append(ask)
        self.drawn.append(found)
        return found

    def answer(self, asked: Tensor, ask: Callable[[], Answer]) -> Answer:
        """Asked, and kept."""
        found = super().answer(asked, ask)
        self.answers.append(found)
        return found


class Given:
    """What a pass has that is made into a graph: what is drawn is an input, checks are outputs.

    ``answers``: what its code was told; None where there is no other graph for other answers.

    Attributes:
        checks: for each, whether it holds: a tensor of no dimensions.
    """

    def __init__(self, masks: Sequence[Tensor], answers: Sequence[Answer] | None) -> None:
        self._masks: Iterator[Tensor] = iter(masks)
        self._answers = None if answers is None else iter(answers)
        self.checks: list[Tensor] = []

    def masks(self, ask: Ask) -> Tensor:
        """The next one that was given."""
        found = next(self._masks, None)
        if found is None or tuple(found.shape[1:]) != ask.size:
            raise Untraceable("it draws other masks when it is run again")
        return found

    def require(self, holds: Tensor, otherwise: Callable[[], Exception]) -> None:
        """To be looked at when the graph has run."""
        self.checks.append(holds)

    def holds(self, truth: Tensor) -> bool:
        """It is taken to; the graph's checks tell."""
        self.checks.append(truth)
        return True

    def answer(self, asked: Tensor, ask: Callable[[], Answer]) -> Answer:
        """As the pass was told; whether that is so of another batch, the graph's checks tell."""
        if self._answers is None:
            raise Untraceable("it asks a tensor for a number, by which its code may go other ways")
        found = next(self._answers, None)
        if found is None:
            raise Untraceable("it asks tensors for other numbers when it is run again")
        with plainly():
            same = (asked != 0) == found if isinstance(found, bool) else asked == found
            self.checks.append(same.all())
        return found

    def loops(self, name: str) -> None:
        """What draws by the values of a tensor, or runs for each slot, has no place in a graph."""
        raise Untraceable(f"{name} runs slot by slot, which a graph does not hold")


def draw(streams: SlotStreams, ask: Ask) -> Tensor:
    """Masks or numbers [N, ...], each from its slot's own generator."""
    return _numbers(streams, ask) if isinstance(ask, Numbers) else _masks(streams, ask)


def _numbers(streams: SlotStreams, ask: Numbers) -> Tensor:
    size, stride, dtype, device, width, method, numbers = ask
    elements = max(1, torch.Size(size).numel())
    drawn = torch.empty_strided((width, *size), (elements, *stride), dtype=dtype, device=device)
    for slot in range(width):
        generator = streams.generator(slot, device)
        if method == "randperm":
            drawn[slot] = torch.randperm(*size, generator=generator, device=device, dtype=dtype)
        else:
            getattr(drawn[slot], method)(*numbers, generator=generator)
    return drawn


def _masks(streams: SlotStreams, mask: Mask) -> Tensor:
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
