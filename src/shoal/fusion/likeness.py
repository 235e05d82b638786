"""What trials are compared by: copies, wide numbers, closeness; a model's code with itself."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shoal.fusion.batches import changed_by
from shoal.fusion.declined import Declined
from shoal.fusion.member import Member
from shoal.fusion.rows.blend import HIDDEN
from shoal.recipes.modelcopy import deepcopied


def copies(members: Sequence[Member]) -> list[Member]:
    """Independent copies; recipes are shared."""
    shared = {id(member.recipe): member.recipe for member in members}
    try:
        return [_copied(member, dict(shared)) for member in members]
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise Declined(f"the model cannot be copied: {error}") from error


def _copied(member: Member, memo: dict[int, Any]) -> Member:
    """A copy, whose optimizer has what its class keeps beside torch's own: torch leaves it out."""
    made = deepcopied(member, memo)
    there = vars(made.optimizer)
    for name, value in vars(member.optimizer).items():
        if name not in there and name != "step":  # a schedule's wrapper, bound to the original
            there[name] = copy.deepcopy(value, memo)
    return made


APART = 2**-5
"""By what part of itself a trained weight is less from one equal member to the next."""


def set_apart(members: Sequence[Member]) -> bool:
    """Have trained weights with which several members begin be others in each; whether any were.

    What goes from one slot to another shows where slots differ: trials of one seed do from their
    second step on, and so do biases and gates that begin at 0.
    """
    found = False
    rest = [dict(member.module.named_parameters()) for member in members[1:]]
    for name, weight in members[0].module.named_parameters():
        others = [parameters[name] for parameters in rest]
        if not weight.requires_grad or not any(torch.equal(weight, other) for other in others):
            continue
        found = True
        with torch.no_grad():
            for slot, other in enumerate(others, 1):
                part = 1 / (1 + slot * APART)
                other.copy_(torch.where(other == 0, 1 - part, other * part))
    return found


class Comparison(NamedTuple):
    """How an array differs from training alone, in words; whether every slot's numbers told."""

    words: str
    is_told: bool


def told(compare: Callable[[], Comparison]) -> str | None:
    """What members that were set apart tell, in words; None where their code goes by what others
    begin with, and does not run with such weights.

    Raises:
        torch.OutOfMemoryError, MemoryError: there is no room for it.
    """
    try:
        found = compare()
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception:  # whatever that code raises
        return None
    return found.words if found.is_told else None


def as_double(batch: Any) -> Any:
    """A batch with its floating-point tensors in float64."""
    return changed_by(lambda t: t.double() if t.is_floating_point() else t, batch)


def close(alone: Tensor, found: Tensor, limit: float, scale: float) -> bool:
    """Equal where not numbers, and else up to ``limit`` times the largest, at least ``scale``."""
    if alone.shape != found.shape or alone.dtype != found.dtype:
        return False
    if alone.is_complex():
        one, other = (torch.view_as_real(tensor.resolve_conj()) for tensor in (alone, found))
        return close(one, other, limit, scale)
    if not alone.is_floating_point():
        return torch.equal(alone, found)
    if torch.equal(alone, found):
        return True
    off = _largest(alone.double() - found.double())
    if math.isfinite(off):  # so are all of them; else infinities and NaN have to be the same
        return off <= limit * max(_largest(alone), scale)
    finite = alone.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return False
    one, other = alone[finite].double(), found[finite].double()
    if not one.numel():
        return True
    return _largest(one - other) <= limit * max(_largest(one), scale)


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal in every bit, NaN and the sign of zero included.

    Where one is in host memory they are compared there: a device may have no room for it.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.device != other.device:
        one, other = one.cpu(), other.cpu()
    pair = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(*pair)


def numpy_stream() -> str:
    """The state of NumPy's global stream."""
    state: Any = np.random.get_state()
    return f"{state[1].tobytes()!r} {state[2:]}"


# ---------------------------------------------------------------- a model's code, later


class Snapshot:
    """What a module's code was when this was made: attributes, parts, hooks, parameters.

    Not its modes, and not what its parameters and buffers hold. Whoever has a copy of the code
    asks whether the copy is still good. It looks at identities first, in C: some ten microseconds
    for 50 modules that did not change.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = [_Part(path, child) for path, child in module.named_modules()]
        self._parameters = list(module.parameters())
        held = [one for part in self._parts for one in part.held()]
        self._empty = [value for _, value in held if not value]
        self._names = [words for words, value in held if not value]
        self._full = [(words, value, _items(value)) for words, value in held if value]
        self._occupied = [one for one in self._full if isinstance(one[1], _Occupied)]
        self._plain = [value for _, value, _ in self._full if not isinstance(value, _Occupied)]
        self._dicts = [vars(child) for child in module.modules()]
        self._dicts += [value for value in self._plain if isinstance(value, dict)]
        self._tensors = [one for part in self._parts for one in part.tensors()]
        self._good: dict[
            int, list[Any]
        ] = {}  # what stood there when nothing was another, by count

    def change(self) -> str:
        """The first thing that is another now, in words; empty if nothing is."""
        now = [*chain.from_iterable(map(dict.values, self._dicts))]
        now += chain.from_iterable(self._plain)
        good = self._good.get(len(now))
        if good is None or not all(map(is_, now, good)):
            words = self._looked_at_one_by_one()
            if words:
                return words
            self._good[len(now)] = now  # modes change, and a forward that asks comes and goes
        if any(self._empty):
            return next(n for n, v in zip(self._names, self._empty, strict=True) if v)
        for words, value, before in self._occupied:
            if not _all_equal(_items(value), before):
                return words
        for words, tensor, version in self._tensors:
            if tensor._version != version:
                return words
        if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self._parameters):
            return "the hooks of a parameter"
        return ""

    def _looked_at_one_by_one(self) -> str:
        """The first attribute, or what one holds, that is another."""
        for part in self._parts:
            words = part.change()
            if words:
                return words
        for words, value, before in self._full:
            if not _all_equal(_items(value), before):
                return words
        return ""


class _Part:
    """One module of it, without its children's own."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self._path, self._now = path, vars(module)
        self._then = dict(self._now)
        self._own = {key: value for key, value in self._then.items() if key not in HIDDEN}

    def held(self) -> list[tuple[str, Any]]:
        """What attributes hold besides themselves, each with its name in words.

        Of buffers only which there are: what stands there may be replaced.
        """
        own, buffers = self._own.items(), self._now["_buffers"]
        found: list[tuple[str, Any]] = [(k, v) for k, v in own if isinstance(v, dict | list | set)]
        found += [(key, self._now[key]) for key in ("_parameters", "_modules")]
        found += [("_buffers", _Occupied(buffers) if buffers else buffers)]
        return [(self._words(key), value) for key, value in found]

    def tensors(self) -> list[tuple[str, Tensor, int]]:
        """Those that are no buffers, with their versions."""
        own = self._own.items()
        return [(self._words(k), v, v._version) for k, v in own if isinstance(v, Tensor)]

    def change(self) -> str:
        """The first attribute that is another."""
        now, then = self._now, self._then
        then["training"] = now.get("training")
        if len(now) == len(then) and all(map(is_, now.values(), then.values())):
            return ""
        for key in {**then, **now}:
            if key in HIDDEN or (key == "forward" and not self._path):  # which asks for passes
                continue
            if not _equal(now.get(key, self), then.get(key, self)):
                return self._words(key)
        return ""

    def _words(self, key: str) -> str:
        kinds = {"_parameters": "parameters", "_modules": "parts", "_buffers": "buffers"}
        if key in kinds:
            return f"the {kinds[key]} of {self._path!r}" if self._path else f"the {kinds[key]}"
        return f"the attribute {f'{self._path}.{key}' if self._path else key!r}"


class _Occupied:
    """The names of a module's buffers that are there, whenever it is asked."""

    def __init__(self, store: Mapping[str, Any]) -> None:
        self._store = store

    def __iter__(self) -> Iterator[str]:
        return iter([key for key, buffer in self._store.items() if buffer is not None])


def _items(value: Any) -> list[Any]:
    return [*value, *value.values()] if isinstance(value, dict) else list(value)


def _all_equal(now: Sequence[Any], then: Sequence[Any]) -> bool:
    if len(now) != len(then):
        return False
    return all(map(is_, now, then)) or all(map(_equal, now, then))


def _equal(now: Any, then: Any) -> bool:
    """The same object, or an equal number, word, or list of some."""
    if now is then:
        return True
    if type(now) is not type(then):
        return False
    if isinstance(now, bool | int | float | complex | str | bytes):
        return repr(now) == repr(then)  # which tells -0.0 from 0.0, and not NaN from NaN
    if type(now) in (tuple, list, dict):
        return _all_equal(_items(now), _items(then))
    return isinstance(now, torch.dtype | torch.device | torch.Size) and bool(now == then)


class RowAt(NamedTuple):
    """Where a module looks up a buffer, and the address of the buffer's row in an array."""

    store: dict[str, Any]
    key: str
    address: int

    def is_there(self) -> bool:
        """Whether it is the row that stands there."""
        found = self.store.get(self.key)
        try:
            return found is not None and found.data_ptr() == self.address
        except RuntimeError:  # a tensor of torch.func's, which has no address
            return False


def row_at(block: Tensor, slot: int) -> int:
    """The address of a row."""
    return block.data_ptr() + slot * block.stride(0) * block.element_size()
