"""A resident trial's passes without the code that they come from, once that is known to be right.

[Note: trust]
A pass runs as the plain loop's until it has been captured: beside two passes on two batches the
capture is run from the same state, and has to leave the same bits as each of them in the loss,
every gradient, every buffer and every random stream. Only then does it take over. Where the pass
itself leaves other bits each time, as many convolutions on a GPU do, both are run with kernels
that repeat themselves, and those are in the capture. Where the code asks whether it is captured,
and goes another way then, as the masks of Hugging Face's models do, it is not told. It gives way
to the eager pass wherever it might be another one: for a batch of another layout, while somebody
counts allocations, where the code's own settings are no longer those it was captured with. Since
both leave the same bits, nobody can tell from a trial which of its steps was which.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from shoal.core.spec import CAPTURED_LAYOUTS
from shoal.fusion.batches import holds_floats, layout_of, leaves_of, rebuilt
from shoal.fusion.graphs.launcher import Ready
from shoal.kernels.kernelchoice import repeatable
from shoal.memory.store import same_bits
from shoal.partition.compiled import compiles
from shoal.recipes.bound import code_of
from shoal.recipes.recipe import Recipe
from shoal.rng import RngState, capture_rng, restore_rng, same_rng
from shoal.runtime.capture.codewatch import CodeWatch
from shoal.runtime.capture.replay import (
    Found,
    Moved,
    OtherBits,
    Pass,
    Replay,
    Untraceable,
    in_words,
    told_of_capture,
)
from shoal.runtime.units import Micro, ResidentUnits

PROOFS = 2
"""Passes beside which a capture is run before it is trusted."""
FORGETS = 2
"""Layouts that may give way to others, since they came once: such as the end of an epoch."""


class _Way(NamedTuple):
    """How a pass is captured, and what it is held against."""

    repeats: bool  # both with kernels that repeat themselves
    tells: bool  # its code, when that asks, that it is captured


WAYS = tuple(_Way(repeats, tells) for repeats in (False, True) for tells in (True, False))
"""In turn, where one comes to other bits."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Maker = Callable[[Pass, Sequence[Tensor], Hashable], Replay]
"""Captures a pass over such leaves, of that key; what it draws and writes is put back after."""


@dataclass(slots=True)
class _Kept:
    """What is known of passes of one key."""

    key: Hashable
    replay: Replay | None = None
    proofs: int = 0
    way: int = 0  # of WAYS
    asked: bool = False  # by its code: whether it is captured
    declined: str = ""
    draws: bool = False  # random numbers, in a pass that was compared


class CapturedUnits(ResidentUnits):
    """The whole module in one unit; training passes by a capture, once there is one.

    Of ``layouts`` of batches, the first ones that come twice; of others, and evaluations, they run
    as ever. It ``goes_on`` as ever, too, where there is no room to capture a pass.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        device: torch.device,
        make: Maker,
        layouts: int = CAPTURED_LAYOUTS,
        *,
        goes_on: bool = False,
    ) -> None:
        super().__init__(model, recipe, device)
        self._device, self._make = device, make
        self._layouts, self._goes_on = layouts, goes_on
        self._forgets = FORGETS
        self._modules = list(model.modules())
        self._parameters = list(model.parameters())
        self._kept: dict[Hashable, _Kept] = {}
        self._watch: CodeWatch | None = None
        self.why_eager = _obstacle(model)

    @property
    def is_captured(self) -> bool:
        """Whether passes of some layout are run by a capture."""
        return any(kept.proofs >= PROOFS for kept in self._kept.values())

    @property
    def why_not(self) -> str:
        """Why some passes are not captured; empty if all are, or may get to be."""
        told = (kept.declined for kept in self._kept.values() if kept.declined)
        return self.why_eager or next(told, "")

    def backward(self, shard: int, micro: Micro) -> Tensor | None:
        """As ``ResidentUnits.backward``, to the same bits."""
        kept = self._kept_for(micro.batch)
        if kept is None:
            return super().backward(shard, micro)
        if kept.proofs < PROOFS:
            return self._learn(kept, micro)
        loss = self._replayed(kept, micro)
        return self._learn(kept, micro) if loss is None else loss

    def ready(self, batch: Any) -> Ready | None:
        """The pass over such a batch, if a capture of it is trusted."""
        kept = self._kept_for(batch)
        if kept is None or kept.proofs < PROOFS:
            return None
        return Ready(functools.partial(self._replayed, kept, Micro(batch)), kept.draws)

    def _replayed(self, kept: _Kept, micro: Micro) -> Tensor | None:
        """The loss, not divided, as ``ResidentUnits`` returns it; None: it is to be made again."""
        assert kept.replay is not None
        try:
            found = kept.replay.run(leaves_of(micro.batch))
        except Moved:
            kept.replay, kept.proofs = None, 0
            return None
        except Exception as error:
            if not isinstance(error, torch.OutOfMemoryError | MemoryError):
                super().backward(0, micro)  # which says where in the code that is
            raise
        self._give(found)
        return found.loss

    def let_go(self) -> None:
        """Hold on to no memory of the device, until the next pass."""
        for kept in self._kept.values():
            if kept.replay is not None:
                kept.replay.let_go()

    def _kept_for(self, batch: Any) -> _Kept | None:
        """What is known of passes over such a batch; None where they run as ever."""
        hooked = any(getattr(nn_module, f"_global{name}", None) for name in HOOKS)
        if hooked and not self.why_eager:
            self._decline("there are hooks of all modules")
        if self.why_eager or torch._C._len_torch_dispatch_stack() or holds_floats(batch):
            return None
        key = (
            layout_of(batch),
            tuple((leaf.stride(), leaf.requires_grad) for leaf in leaves_of(batch)),
            tuple(module.training for module in self._modules),
            tuple(parameter.requires_grad for parameter in self._parameters),
        )
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) >= self._layouts and not self._forget_one():
                return None
            kept = self._kept[key] = _Kept(key)
        if kept.declined:
            return None
        if self._watch is not None and (words := self._watch.change()):
            self._decline(f"{words} is another one than before")
            return None
        return kept

    def _forget_one(self) -> bool:
        """Have room for another layout in the place of one that has come once."""
        for key, kept in self._kept.items():
            if self._forgets and kept.proofs < PROOFS and not kept.declined:
                self._forgets -= 1
                del self._kept[key]
                return True
        return False

    def _give(self, found: Found) -> None:
        """Add the gradients where autograd does. A later pass may write to those of a replay."""
        trained, sums = self._trained, self._recipe.accumulate > 1
        for index, gradient in found.gradients.items():
            parameter = trained[index]
            if parameter.grad is None:
                parameter.grad = gradient.clone() if sums else gradient
            else:
                parameter.grad.add_(gradient)

    @property
    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._parameters if parameter.requires_grad]

    # -- how a capture is made, and held against the eager pass ----------------------------

    def _learn(self, kept: _Kept, micro: Micro) -> Tensor | None:
        """The pass as ever; and beside it the capture, made if there is none yet."""
        if any(parameter.grad is not None for parameter in self._parameters):
            return super().backward(0, micro)  # a step's later batch: gradients are sums
        before = self._moment()
        if self._watch is None:
            functions = {"loss": code_of(self._recipe.loss), "inputs": self._recipe.inputs}
            self._watch = CodeWatch(self._model, functions)
        weights = [parameter.detach().clone() for parameter in self._parameters]
        leaves = leaves_of(micro.batch)
        versions = [leaf._version for leaf in leaves]
        loss = super().backward(0, micro)
        assert loss is not None
        after = self._moment()
        words = self._unlike_again(before, after)
        if not all(map(same_bits, weights, self._parameters)):
            words = "its forward writes to its parameters"
        if [leaf._version for leaf in leaves] != versions:
            words = "its forward writes to the batch"
        del weights
        if words:
            self._decline(words)
            return loss
        try:
            self._prove(kept, micro, loss, before, after)
        except Untraceable as error:
            kept.declined, kept.replay = str(error), None
            self._say(kept.declined)
        except (torch.OutOfMemoryError, MemoryError):
            if not self._goes_on:
                raise
            kept.declined, kept.replay = "there is no room to compare it with a pass", None
            self._say(kept.declined)
        finally:
            after.put_back(self._device)
        return loss

    def _prove(
        self, kept: _Kept, micro: Micro, loss: Tensor, before: _Moment, after: _Moment
    ) -> None:
        """Hold the capture against the pass; where they differ, captured in another way.

        Raises:
            Untraceable: there is none, or they differ in all of them.
        """
        first: OtherBits | None = None
        while True:
            try:
                return self._prove_so(kept, micro, loss, before, after)
            except Untraceable as error:
                if first is None:
                    if not isinstance(error, OtherBits):
                        raise
                    first = error
                if not self._goes_another_way(kept):
                    raise first from None

    def _goes_another_way(self, kept: _Kept) -> bool:
        """Whether there is one more that may come to something else."""
        kept.replay, kept.proofs = None, 0
        for way in range(kept.way + 1, len(WAYS)):
            differs = WAYS[way].tells or kept.asked
            if differs and (self._device.type == "cuda" or not WAYS[way].repeats):
                kept.way = way
                return True
        return False

    def _prove_so(
        self, kept: _Kept, micro: Micro, loss: Tensor, before: _Moment, after: _Moment
    ) -> None:
        """Hold the capture against the pass that was run, or one with repeatable kernels."""
        if not WAYS[kept.way].repeats:
            return self._compare(kept, micro.batch, loss, before, after)
        gradients = [parameter.grad for parameter in self._parameters]
        try:
            with repeatable(self._device):
                before.put_back(self._device)
                for parameter in self._parameters:
                    parameter.grad = None
                again = super().backward(0, micro)
                assert again is not None
                self._compare(kept, micro.batch, again, before, self._moment())
        finally:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient

    def _compare(
        self, kept: _Kept, batch: Any, loss: Tensor, before: _Moment, after: _Moment
    ) -> None:
        """Run the capture from where the eager pass began; all bits have to be the same.

        Raises:
            Untraceable: there is none, or it comes to something else.
        """
        leaves, trained = leaves_of(batch), self._trained
        gradients = {i: p.grad for i, p in enumerate(trained) if p.grad is not None}
        if kept.replay is None:
            before.put_back(self._device)
            for parameter in trained:
                parameter.grad = None
            try:
                with told_of_capture(tells=WAYS[kept.way].tells) as asked:
                    kept.replay = self._make(self._pass_over(batch, trained), leaves, kept.key)
            finally:
                kept.asked |= asked()
                for index, parameter in enumerate(trained):
                    parameter.grad = gradients.get(index)
        before.put_back(self._device)
        try:
            with in_words():
                found = kept.replay.run(leaves)
        except Moved:
            kept.replay, kept.proofs = None, 0
            return
        now = self._moment()
        if found.gradients.keys() != gradients.keys():
            raise Untraceable("its capture finds other gradients than the pass")
        pairs = [(found.loss, loss), *zip(now.buffers, after.buffers, strict=True)]
        pairs += [(found.gradients[index], gradients[index]) for index in gradients]
        if not same_rng(now.rng, after.rng):
            raise OtherBits("its capture draws other random numbers than the pass")
        if not all(same_bits(*pair) for pair in pairs):
            raise OtherBits("its capture comes to other bits than the pass")
        kept.proofs += 1
        kept.draws |= not same_rng(before.rng, after.rng)

    def _pass_over(self, batch: Any, trained: Sequence[nn.Parameter]) -> Pass:
        assert self._watch is not None
        form = rebuilt(batch, iter([leaf.new_empty(0) for leaf in leaves_of(batch)]))
        return Pass(
            model=self._model,
            compute=lambda leaves: self._loss(rebuilt(form, iter(leaves)))[0],
            trained=trained,
            accumulate=self._recipe.accumulate,
            known=self._watch.tensors,
        )

    def _unlike_again(self, before: _Moment, after: _Moment) -> str:
        """Why a pass cannot be run again without its code, in words; empty if it can."""
        assert self._watch is not None
        if words := self._watch.change():
            return f"its forward changes {words}"
        if self._watch.draws:
            return f"{self._watch.draws} is a random generator of its own"
        if self._watch.too_much:
            return f"{self._watch.too_much} reads too much to be looked at before each pass"
        if any(map(is_not, before.objects, after.objects)):
            return "its forward puts a new tensor in the place of a buffer"
        one, other = before.rng, after.rng
        again = RngState(one.torch, other.python, other.numpy, one.cuda)
        if not same_rng(one, again):
            return "its forward draws from Python's or NumPy's generator"
        return ""

    def _moment(self) -> _Moment:
        buffers = list(self._model.buffers())
        return _Moment(capture_rng(self._device), buffers, [b.clone() for b in buffers])

    def _decline(self, words: str) -> None:
        """All passes run as ever from here on."""
        self.why_eager = words
        self._kept.clear()
        self._say(words)

    def _say(self, words: str) -> None:
        warnings.warn(f"a pass of this trial is not captured: {words}.", stacklevel=2)


class _Moment(NamedTuple):
    """The random streams and the buffers, before or after a pass; ``objects`` are the latter."""

    rng: RngState
    objects: Sequence[Tensor]
    buffers: Sequence[Tensor]

    def put_back(self, device: torch.device) -> None:
        """Have them so again."""
        restore_rng(self.rng, device)
        with torch.no_grad():
            for buffer, value in zip(self.objects, self.buffers, strict=True):
                buffer.copy_(value)


def _obstacle(model: nn.Module) -> str:
    """What keeps any pass of a model from being captured, in words; empty if nothing does."""
    if compiles(model):
        return "its model is compiled"
    for path, child in model.named_modules():
        if any(getattr(child, name, None) for name in HOOKS):
            return f"{path!r} has hooks" if path else "the model has hooks"
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return f"the parameter {name!r} has hooks"
    if any(getattr(nn_module, f"_global{name}", None) for name in HOOKS):
        return "there are hooks of all modules"
    return ""
