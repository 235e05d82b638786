"""torch's own databases of operators and modules, as small models to train as an array and alone.

``torch.testing._internal`` has every operator with samples of its arguments, and every module with
arguments for its constructor and its forward. They are private: who asks is skipped without them.
"""

from __future__ import annotations

import math
import random
import sys
import types
import unittest
import warnings
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.fusion import Array, Declined, Member, dry_run
from shoal.recipes.recipe import Recipe
from shoal.rng import capture_rng, restore_rng, seed_all

DOUBLE = torch.float64
LIMIT = 1e-12  # of a tensor's largest element, and of 1
RATES = (1e-3, 3e-3, 2e-3)  # one for each slot
STEPS = 2
KEPT: dict[str, Any] = {}  # what no module may have as an attribute, by name


def database(of: str) -> list[Any]:
    """``op_db`` or ``module_db``; skips where this torch has none."""
    file = {"op_db": "common_methods_invocations", "module_db": "common_modules"}[of]
    if "expecttest" not in sys.modules:  # a class of which torch's tests inherit, and no more
        stub: Any = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = __import__(f"torch.testing._internal.{file}", fromlist=[of])
        module.wrapper_set_seed = lambda operation, *args, **kwargs: operation(*args, **kwargs)
        return list(getattr(module, of))
    except Exception as error:
        pytest.skip(f"this torch has no such database: {error}")


class Slot(NamedTuple):
    """The place of a tensor among the arguments."""

    at: int


def total(output: Any) -> Tensor:
    """A number that depends on every number that there is in ``output``."""
    found = torch.zeros((), dtype=DOUBLE)
    for count, leaf in enumerate(pytree.tree_leaves(output)):
        if not isinstance(leaf, Tensor):
            continue
        leaf = leaf if leaf.layout == torch.strided else leaf.to_dense()
        leaf = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
        leaf = leaf.to(DOUBLE).nan_to_num(0.0, 0.0, 0.0).clamp(-1e6, 1e6)
        weights = torch.cos(0.7 * torch.arange(leaf.numel(), dtype=DOUBLE) + count)
        weights = weights.reshape(leaf.shape)
        found = found + (leaf * weights).sum() + (leaf.tanh() * weights.square()).sum()
    return found


class Applied(nn.Module):
    """An operation; of its tensors those that can be trained are parameters."""

    def __init__(self, key: str, tensors: list[Tensor], trained: list[bool], in_place: bool):
        super().__init__()
        self.key, self.trained, self.in_place = key, tuple(trained), in_place
        for at, (tensor, is_trained) in enumerate(zip(tensors, trained, strict=True)):
            if is_trained:
                self.register_parameter(f"t{at}", nn.Parameter(tensor.clone()))

    def forward(self, batch: list[Tensor]) -> Tensor:
        operation, after, tree, leaves = KEPT[self.key]
        own = [
            getattr(self, f"t{at}") if is_trained else batch[at]
            for at, is_trained in enumerate(self.trained)
        ]
        filled = [own[leaf.at] if isinstance(leaf, Slot) else leaf for leaf in leaves]
        input, args, kwargs = pytree.tree_unflatten(filled, tree)
        input = input * 1 if self.in_place else input
        found = operation(input, *args, **kwargs)
        return total(after(input if self.in_place else found))


class Whole(nn.Module):
    """With a part that can be looped, and a weight beside it."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.scale = part, nn.Parameter(torch.ones((), dtype=DOUBLE))

    def forward(self, batch: Any) -> Tensor:
        return self.part(batch) * self.scale


class Fed(nn.Module):
    """A module on a batch's tensors in the places that they have among its arguments."""

    def __init__(self, module: nn.Module, key: str) -> None:
        super().__init__()
        self.module, self.key = module, key
        self.scale = nn.Parameter(torch.ones((), dtype=DOUBLE))

    def forward(self, batch: list[Tensor]) -> Tensor:
        tree, leaves = KEPT[self.key]
        mine = [b * self.scale if b.is_floating_point() else b for b in batch]
        filled = [mine[leaf.at] if isinstance(leaf, Slot) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(filled, tree)
        return total(self.module(*args, **kwargs))


def placed(leaves: list[Any]) -> tuple[list[Any], list[Tensor]]:
    """Arguments with places for their tensors, and these."""
    tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
    places = iter(range(len(tensors)))
    return [Slot(next(places)) if isinstance(x, Tensor) else x for x in leaves], tensors


def another(tensor: Tensor, seed: int, by: float) -> Tensor:
    """A tensor of the same kind: a little less, in each slot and step another one."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.clone()
    draws = torch.Generator().manual_seed(seed)
    less = by * torch.rand(tensor.shape, generator=draws, dtype=DOUBLE)
    return tensor * (1 - less).to(tensor.dtype.to_real())


def different(samples: list[Any], most: int) -> list[Any]:
    """Samples each of which brings arguments that those before it have not."""

    def words(sample: Any) -> set[str]:
        every = [sample.input, *sample.args, *sample.kwargs.items()]
        return {f"{x.dtype} {x.dim()}" if isinstance(x, Tensor) else repr(x)[:40] for x in every}

    left, seen, chosen = list(samples), set(), []
    while left and len(chosen) < most:
        best = max(range(len(left)), key=lambda at: (len(words(left[at]) - seen), -at))
        seen |= words(left[best])
        chosen.append(left.pop(best))
    return chosen


def samples_of(operator: Any, most: int) -> list[Any]:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    made = operator.sample_inputs("cpu", DOUBLE, requires_grad=True)
    return different(list(islice(made, 200)), most)


class Case(NamedTuple):
    """How to build the model of a slot, and its batch in a step."""

    name: str
    model: Any
    batch: Any


def cases_of_operator(operator: Any, most: int) -> list[Case]:
    """As a function, as a method and in place, each over some samples."""
    found = []
    ways = (operator.op, operator.method_variant, operator.inplace_variant)
    for number, sample in enumerate(samples_of(operator, most)):
        flat, tree = pytree.tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
        every = [x for x in flat if isinstance(x, Tensor)]
        if any(x.layout != torch.strided for x in every):
            continue
        leaves, tensors = placed(flat)
        trained = [x.requires_grad for x in every]
        for way, operation in zip(("function", "method", "in place"), ways, strict=True):
            if not callable(operation):
                continue
            key = f"{operator.name} {operator.variant_test_name} {number} {way}"
            KEPT[key] = operation, sample.output_process_fn_grad, tree, leaves

            def model(slot, by, key=key, tensors=tensors, trained=trained, way=way):
                mine = [another(tensor, slot, by) for tensor in tensors]
                return Whole(Applied(key, mine, trained, way == "in place"))

            def batch(slot, step, by, tensors=tensors):
                return [another(t, 10 * slot + step + 5, by) for t in tensors] or [torch.ones(1)]

            found.append(Case(key, model, batch))
    return found


def cases_of_module(info: Any, most: int) -> list[Case]:
    torch.manual_seed(0)
    made = info.module_inputs_func(info, "cpu", DOUBLE, requires_grad=False, training=True)
    found = []
    for number, inputs in enumerate(made[:: max(1, len(made) // most)][:most]):
        if (fed := inputs.forward_input) is None:
            continue
        flat, tree = pytree.tree_flatten((tuple(fed.args), dict(fed.kwargs)))
        leaves, tensors = placed(flat)
        key = f"{info.name} {number}"
        KEPT[key] = tree, leaves

        def model(slot, by, of=info.module_cls, given=inputs, key=key):
            torch.manual_seed(slot)
            module = of(*given.constructor_input.args, **given.constructor_input.kwargs).double()
            if any(isinstance(p, nn.UninitializedParameter) for p in module.parameters()):
                with torch.no_grad():
                    module(*given.forward_input.args, **given.forward_input.kwargs)
            return Fed(module, key)

        def batch(slot, step, by, tensors=tensors):
            return [another(t, 10 * slot + step + 5, by) for t in tensors] or [torch.ones(1)]

        found.append(Case(key, model, batch))
    return found


# ------------------------------------------------------------------ training

RECIPE = Recipe(
    model=lambda hp: None,
    data=lambda hp: ([], None),
    inputs=lambda batch: (batch,),
    loss=lambda output, batch: output,
)


def member(module: nn.Module, slot: int) -> Member:
    outer = capture_rng()
    seed_all(100 + slot)
    steps = torch.optim.SGD(module.parameters(), lr=RATES[slot], momentum=0.9)
    made = Member(
        recipe=RECIPE, hp={}, module=module, optimizer=steps, schedule=None, rng=capture_rng()
    )
    restore_rng(outer)
    return made


def trained_alone(case: Case, slot: int, by: float) -> tuple[Member, list[float]]:
    """After some steps of plain torch, in the trial's own streams."""
    found, outer, losses = member(case.model(slot, by), slot), capture_rng(), []
    restore_rng(found.rng)
    try:
        for step in range(STEPS):
            found.optimizer.zero_grad()
            loss = found.module(case.batch(slot, step, by))
            loss.backward()
            found.optimizer.step()
            losses.append(float(loss.detach()))
        found.rng = capture_rng()
    finally:
        restore_rng(outer)
    return found, losses


def off(one: Tensor | None, other: Tensor | None) -> float:
    """How far from each other, as part of the largest number."""
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    one, other = (
        t.detach().to_dense() if t.layout != torch.strided else t.detach() for t in (one, other)
    )
    wide = torch.complex128 if one.is_complex() else DOUBLE
    apart = (one.to(wide) - other.to(wide)).abs()
    apart = apart[~((one == other) | (one.isnan() & other.isnan()))]
    if not apart.numel():
        return 0.0
    finite = one[one.isfinite()].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    return float(apart.max().nan_to_num(math.inf)) / scale


def outcome(case: Case, width: int = 3, backend: Any = None) -> str:
    """Nothing where an array is what its trials are alone, or where these do not run; else why."""
    for by in (0.1, 0.003, 0.0):
        try:
            alone = [trained_alone(case, slot, by) for slot in range(width)]
        except Exception:
            continue
        if all(math.isfinite(loss) for _, losses in alone for loss in losses):
            break
    else:
        return ""
    made = [member(case.model(slot, by), slot) for slot in range(width)]
    try:
        array = Array(made, backend=backend)
        stepped = [
            array.step([case.batch(slot, step, by) for slot in range(width)])
            for step in range(STEPS)
        ]
    except Declined as error:
        return f"declined: {error}"
    words = ""
    for slot, (lone, losses) in enumerate(alone):
        mine = array.member(slot).module
        pairs = [(one.losses[slot], loss) for one, loss in zip(stepped, losses, strict=True)]
        words += "".join(
            f"slot {slot}: loss {b!r}, alone {a!r}; "
            for b, a in pairs
            if not abs(a - b) <= LIMIT * max(1.0, abs(a))
        )
        for name, parameter in lone.module.named_parameters():
            other = mine.get_parameter(name)
            if max(off(parameter.grad, other.grad), off(parameter, other)) > LIMIT:
                words += f"slot {slot}: {name!r}; "
        for name, buffer in lone.module.named_buffers():
            words += (
                f"slot {slot}: {name!r}; " if off(buffer, mine.get_buffer(name)) > LIMIT else ""
            )
        with array.streams(slot):
            same = torch.equal(torch.get_rng_state(), lone.rng.torch)
        words += "" if same else f"slot {slot}: other random numbers; "
    if not words:
        return ""
    batches = [case.batch(slot, 0, by) for slot in range(width)]
    told = dry_run([member(case.model(slot, by), slot) for slot in range(width)], batches)
    return f"declined: {told}" if told else f"SILENT: {words}"
