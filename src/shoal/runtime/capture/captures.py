"""What captures the passes of a worker's trials, and keeps what several trials can have."""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.closures import contents_of
from shoal.fusion import Member, signature_of
from shoal.fusion.crew import Steps
from shoal.fusion.graphs.constants import RATES, constants_of
from shoal.fusion.graphs.graph import Run
from shoal.fusion.graphs.launcher import LonePass, Ready
from shoal.fusion.matching.signature import DEEPEST
from shoal.fusion.rows.blend import HIDDEN
from shoal.recipes.bound import unspelled_reads
from shoal.recipes.recipe import Recipe
from shoal.runtime.capture.captured import CapturedUnits, Maker
from shoal.runtime.capture.cudagraph import (
    CapturedPass,
    CapturedRun,
    CapturedSteps,
    CudaGraphs,
    Lanes,
)
from shoal.runtime.capture.operations import OperationList, Operations, list_operations
from shoal.runtime.capture.replay import Pass, Replay
from shoal.runtime.units import Micro

MOST = 16  # lists of operations that are kept
TOLD: tuple[type, ...] = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    Tensor,
    torch.dtype,
    torch.device,
    type,
)
TOLD += (types.ModuleType, types.BuiltinFunctionType)


class Captures:
    """Of one device, for the trials of one recipe.

    A list of operations is made once for all trials whose code is the same to the last number;
    each of them compares it with its own eager passes before it trusts it. A CUDA graph is one
    trial's.
    """

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self._recipe, self._device = recipe, device
        self._cuda: CudaGraphs | None = None  # of passes that run on the device's own stream
        self._lanes: Lanes | None = None  # of slots
        self._steps: CudaGraphs | None = None  # of the optimizers of arrays
        self._lists: dict[Hashable, OperationList] = {}

    @property
    def cuda(self) -> CudaGraphs | None:
        """What captures passes that run one after the other on a GPU; None on a CPU."""
        if self._cuda is None and self._device.type == "cuda":
            self._cuda = CudaGraphs(self._device)
        return self._cuda

    @property
    def steps(self) -> CudaGraphs:
        """What captures optimizers' steps on a GPU, whose kernels need no memory of cuBLAS's."""
        if self._steps is None:
            self._steps = CudaGraphs(self._device, apart=True)
        return self._steps

    def units(self, model: nn.Module, recipe: Recipe | None = None) -> CapturedUnits:
        """What computes the passes of a trial; ``recipe``: as it is for that trial."""
        own = recipe or self._recipe
        return CapturedUnits(model, own, self._device, self._maker(own, model, self.cuda))

    def slot_units(
        self, model: nn.Module, recipe: Recipe, cuda: CudaGraphs | None
    ) -> CapturedUnits:
        """The same of a trial in a slot; it trains on where there is no room for a capture.

        Of each slot's capture a GPU holds the memory for good, so there is one.
        """
        make = self._maker(recipe, model, cuda)
        return CapturedUnits(model, recipe, self._device, make, layouts=1, goes_on=True)

    def _maker(self, recipe: Recipe, model: nn.Module, cuda: CudaGraphs | None) -> Maker:
        code: list[Hashable] = []

        def make(what: Pass, leaves: Sequence[Tensor], key: Hashable) -> Replay:
            if cuda is not None:
                return CapturedPass(what, leaves, cuda)
            if not code:
                code.append(_code_of(recipe, model) if _is_told(model) else None)
            return Operations(what.model, what.trained, self._list((code[0], key), what, leaves))

        return make

    def launcher(self) -> Launching:
        """Who captures the passes of an array that is on the device."""
        if self._lanes is None and self._device.type == "cuda":
            self._lanes = Lanes(self._device)
        return Launching(self, self._lanes)

    def _list(
        self, key: tuple[Hashable, Hashable], what: Pass, leaves: Sequence[Tensor]
    ) -> OperationList:
        if key[0] is None:
            return list_operations(what, leaves)
        known = self._lists.get(key)
        if known is not None:
            return known
        with unspelled_reads() as unspelled:  # which the key does not have
            made = list_operations(what, leaves)
        if made.shares and not unspelled and len(self._lists) < MOST:
            self._lists[key] = made
        return made


class Launching:
    """Captures the passes of one array; see ``shoal.fusion.graphs.launcher.Launcher``."""

    def __init__(self, captures: Captures, lanes: Lanes | None) -> None:
        self._captures, self._lanes = captures, lanes

    def of_graph(self, run: Run, held: int, written: Sequence[int], *, hands_out: bool) -> Run:
        """As a CUDA graph."""
        cuda = self._captures.cuda
        return CapturedRun(run, held, written, cuda, hands_out=hands_out) if cuda else run

    def of_steps(self) -> Steps | None:
        """As a CUDA graph."""
        return None if self._lanes is None else CapturedSteps(self._captures.steps)

    def capture(self, member: Member, slot: int) -> LonePass:
        """As a trial alone is captured; on a GPU for the slot's lane."""
        cuda = self._lanes.graphs(slot) if self._lanes else None
        return _SlotPass(self._captures.slot_units(member.module, member.recipe, cuda))

    def together(self) -> AbstractContextManager[Any]:
        """Lanes, on a GPU."""
        return nullcontext() if self._lanes is None else self._lanes.together()

    def lane(self, slot: int, *, beside: bool) -> AbstractContextManager[Any]:
        """A stream of its own, on a GPU."""
        return nullcontext() if self._lanes is None else self._lanes.lane(slot, beside=beside)


class _SlotPass:
    """A slot's own pass."""

    def __init__(self, units: CapturedUnits) -> None:
        self._units = units

    def ready(self, batch: Any) -> Ready | None:
        """A replay, where it is trusted."""
        return self._units.ready(batch)

    def backward(self, batch: Any) -> Tensor:
        """As ever; what there is of a capture is compared with it, or replayed."""
        loss = self._units.backward(0, Micro(batch))
        assert loss is not None
        return loss

    @property
    def why_not(self) -> str:
        """In words."""
        return self._units.why_not

    def let_go(self) -> None:
        """Free its memory on the device."""
        self._units.let_go()


def _code_of(recipe: Recipe, model: nn.Module) -> Hashable:
    """All of the code that a list of its operations holds: what it is, and its numbers."""
    rates = tuple(
        (path, getattr(child, RATES[type(child)]))
        for path, child in model.named_modules()
        if type(child) in RATES
    )
    kinds = tuple(type(child) for child in model.modules())  # one made in a function has closures
    return kinds, signature_of(recipe, model), constants_of(recipe, model), rates


def _is_told(model: nn.Module) -> bool:
    """Whether the words for a model's code say all of what its modules keep."""
    inside = {id(child) for child in model.modules()}
    return all(
        name.endswith("_hooks") or name in HIDDEN or _told(value, inside)
        for child in model.modules()
        for name, value in vars(child).items()
    )


def _told(value: Any, inside: Set[int], depth: int = 0) -> bool:
    if value is None or isinstance(value, TOLD) or id(value) in inside:
        return True
    if depth >= DEEPEST or isinstance(value, nn.Module):
        return False
    parts: list[Any]
    if isinstance(value, dict):
        if not all(isinstance(key, str | int) for key in value):
            return False
        parts = list(value.values())
    elif isinstance(value, tuple | list):
        parts = list(value)
    elif isinstance(value, set | frozenset):
        return all(isinstance(item, str | int) for item in value)
    elif isinstance(value, functools.partial):
        parts = [value.func, value.args, value.keywords]
    elif isinstance(value, types.MethodType):
        parts = [value.__func__, value.__self__]
    elif isinstance(value, types.FunctionType):
        parts = contents_of(value.__closure__)
        parts += [value.__defaults__, value.__kwdefaults__]
    elif type(type(value)) is type and hasattr(value, "__dict__") and not _slotted(type(value)):
        parts = list(vars(value).values())
    else:
        return False
    return all(_told(part, inside, depth + 1) for part in parts)


def _slotted(kind: type) -> bool:
    return any(getattr(base, "__slots__", ()) for base in kind.__mro__)
