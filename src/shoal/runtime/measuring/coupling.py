"""What an optimizer does that steps some parameters at a time: its bits, and its bytes.

Both are tried on a model of the trial's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from shoal.core.spec import HyperParameters, TrialSpec
from shoal.core.units import Bytes
from shoal.fusion.passes.fused import first_line
from shoal.kernels.kernelstep import steps_as_its_class
from shoal.kernels.poison import Poison
from shoal.memory.layout import TrialLayout
from shoal.memory.store import same_bits
from shoal.partition.track import peak_of
from shoal.partition.visitors import parameters_on
from shoal.recipes.optimizers import build_optimizer_of
from shoal.recipes.recipe import Recipe, build_model, rounding_of
from shoal.recipes.several import members_of
from shoal.rng import seed_all
from shoal.runtime.measuring.counting import fill_gradients
from shoal.runtime.placing.binding import Binding

ROUNDS = 2
ELEMENTWISE = frozenset(
    {torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop}
    | {torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam}
    | {torch.optim.RAdam, torch.optim.ASGD, torch.optim.Rprop}
)
Parts = Sequence[Sequence[str]]


class Coupling(NamedTuple):
    """Why layers cannot step one after another, empty if they can; and whether tensors can."""

    why: str
    by_tensor: bool


class _Stepped(NamedTuple):
    parameters: dict[str, Tensor]
    kept: str  # what a step left beside the optimizer's state
    kind: str  # of optimizer
    groups: list[dict[str, Any]]  # as the steps left their options
    state: dict[str, Any]  # what they left that is of no parameter
    of_each: dict[str, dict[str, Any]]  # and of each parameter


def coupling_of(
    recipe: Recipe,
    trial: TrialSpec,
    layers: Parts,
    optimizer: torch.optim.Optimizer | None = None,
) -> Coupling:
    """Compare steps by layer, and by tensor, with steps of all at once.

    ``layers`` are the parameters of each; two steps are taken, on random gradients, on the CPU.
    Nothing is compared for an ``optimizer`` of torch's that treats each number for itself: of a
    large model that takes minutes, and three times its memory.
    """
    known = type(optimizer) in ELEMENTWISE
    if known and optimizer is not None and steps_as_its_class(optimizer):
        return Coupling("", by_tensor=True)
    all_at_once = [[name for names in layers for name in names]]

    def step(parts: Parts) -> _Stepped:
        return _stepped(recipe, trial, parts)

    together = step(all_at_once)
    try:
        by_layer = step(layers)
    except MemoryError:
        raise
    except Exception as error:  # all at once they can be stepped
        text = first_line(error).removesuffix(".")
        return Coupling(
            f"the optimizer {together.kind} cannot step the parameters of a shard by themselves: "
            f"{type(error).__name__}: {text}. What it keeps of parameters belongs in its "
            "state[parameter], where each shard finds its own",
            by_tensor=False,
        )
    if by_layer.kept:
        return Coupling(
            f"the optimizer {by_layer.kind} keeps {by_layer.kept!r} beside its state, and each "
            "shard would have one of its own",
            by_tensor=False,
        )
    different = _different(together, by_layer)
    if different:
        return Coupling(
            f"the optimizer {by_layer.kind} couples parameters across layers: stepping them a "
            f"shard at a time changes {different[0]!r} and {len(different) - 1} others",
            by_tensor=False,
        )
    if (entry := _kept_otherwise(together, by_layer)) and (
        entry := _kept_otherwise(together, by_layer, again=step(all_at_once))
    ):
        return Coupling(
            f"what the optimizer {by_layer.kind} keeps of a parameter goes by others: stepping "
            f"them a shard at a time leaves another {entry}",
            by_tensor=False,
        )
    if option := _changed(together, by_layer):
        return Coupling(
            f"the optimizer {by_layer.kind} changes {option} at each step, and each shard would "
            "change it again or otherwise",
            by_tensor=False,
        )
    del by_layer
    return Coupling("", by_tensor=_by_tensor(step, layers, together))


def _by_tensor(step: Callable[[Parts], _Stepped], layers: Parts, together: _Stepped) -> bool:
    """An error is no reason to fail the trial: it will not be stepped so."""
    try:
        alone = step([[name] for names in layers for name in names])
    except Exception:
        return False
    return not (
        alone.kept
        or _different(together, alone)
        or _kept_otherwise(together, alone)
        or _changed(together, alone)
    )


def _stepped(recipe: Recipe, trial: TrialSpec, parts: Parts) -> _Stepped:
    hp = HyperParameters(trial.hp)
    seed_all(trial.seed)
    model = build_model(recipe, hp)
    optimizer = build_optimizer_of(recipe, model, hp)
    rounding = rounding_of(recipe, dict(model.named_parameters()), 0)
    binding = Binding(model, optimizer, parts, torch.device("cpu"), rounding)
    for round_ in range(ROUNDS):
        fill_gradients(model.parameters(), round_)
        for index in reversed(range(len(parts))):  # as a backward comes by
            with _alone(binding.params, parts[index]):
                binding.step_part(index, round_)
    return _Stepped(
        dict(model.named_parameters()),
        binding.kept_beside(),
        _in_words(optimizer),
        binding.groups(),
        _of_no_parameter(optimizer),
        _of_each(optimizer, model),
    )


@contextmanager
def _alone(params: Mapping[str, nn.Parameter], names: Sequence[str]) -> Iterator[None]:
    """With the parameters of one part there, and of the others neither values nor gradients.

    Code that finds these all the same, as a hook does that has the optimizer from its closure,
    finds what it does in a trial.
    """
    poison, others = Poison(), {n: p for n, p in params.items() if n not in frozenset(names)}
    kept = {name: (p.data, p.grad) for name, p in others.items()}
    try:
        for parameter in others.values():
            parameter.grad, parameter.data = None, poison.like(parameter)
        yield
    finally:
        for name, parameter in others.items():
            parameter.data, parameter.grad = kept[name]


def _of_no_parameter(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    states: list[Mapping[Any, Any]] = [member.state for member in members_of(optimizer)]
    return {key: value for one in states for key, value in one.items() if isinstance(key, str)}


def _of_each(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, dict[str, Any]]:
    states: list[Mapping[Any, Any]] = [member.state for member in members_of(optimizer)]
    return {
        name: {key: value for one in states for key, value in one.get(parameter, {}).items()}
        for name, parameter in model.named_parameters()
    }


def _in_words(optimizer: torch.optim.Optimizer) -> str:
    """Its class, and whose hooks run with its steps."""
    hooks = [
        getattr(hook, "__qualname__", type(hook).__name__)
        for one in members_of(optimizer)
        for kept in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        for hook in getattr(one, kept, {}).values()
    ]
    named = f", with the step hook {', '.join(map(repr, hooks))}," if hooks else ""
    return f"{type(optimizer).__name__}{named}"


def _different(one: _Stepped, other: _Stepped) -> list[str]:
    pairs = one.parameters.items()
    return [name for name, p in pairs if not torch.equal(p, other.parameters[name])]


def _kept_otherwise(one: _Stepped, other: _Stepped, again: _Stepped | None = None) -> str:
    """An entry of a parameter's state that steps left otherwise, or one of them only.

    But for what is another one in each run, as a time is; ``again``: the first once more.
    """
    for name, mine in one.of_each.items():
        theirs, anew = other.of_each[name], {} if again is None else again.of_each[name]
        for key in sorted(mine.keys() | theirs.keys(), key=str):
            if key in mine and key in anew and _is_other(mine[key], anew[key]):
                continue
            if key not in mine or key not in theirs or _is_other(mine[key], theirs[key]):
                return f"{key!r} in the state of {name!r}"
    return ""


def _is_other(one: Any, other: Any) -> bool:
    """Of values, also within containers; of objects of other kinds nothing is known."""
    (mine, as_mine), (theirs, as_theirs) = tree_flatten(one), tree_flatten(other)
    return as_mine != as_theirs or any(map(_is_other_leaf, mine, theirs))


def _is_other_leaf(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return True
    if isinstance(one, np.ndarray | np.generic):
        return bool(one.tobytes() != other.tobytes())
    if isinstance(one, Tensor):
        return not same_bits(one, other)
    return isinstance(one, int | float | complex | str) and one == one and one != other


def step_peaks(
    recipe: Recipe, trial: TrialSpec, model: nn.Module, layout: TrialLayout, device: torch.device
) -> list[Bytes]:
    """What the step of each shard allocates: the first one, which makes state, and later.

    The model may be on the host: a shard's parameters are on ``device`` while it steps.
    """
    owned = [[f.spec.name for f in shard.param.fields] for shard in layout.shards]
    binding = _binding(recipe, trial, model, owned, device)
    peaks = []
    for index, names in enumerate(owned):
        with parameters_on(device, model, names):
            fill_gradients(map(model.get_parameter, names), index)
            rounds = [peak_of(lambda i=index: binding.step_part(i)) for _ in range(3)]  # type: ignore[misc]
            peaks.append(max(rounds))
        for name in names:  # it would be beside the next one's
            binding.optimizer.state.pop(model.get_parameter(name), None)
    return peaks


def step_seconds(
    recipe: Recipe,
    trial: TrialSpec,
    model: nn.Module,
    names: Sequence[str],
    device: torch.device,
    clock: Callable[[], float],
) -> float:
    """How long a step of these parameters takes on ``device``, when their state is there."""
    binding = _binding(recipe, trial, model, [names], device)
    with parameters_on(device, model, names):
        fill_gradients(map(model.get_parameter, names), 0)
        binding.step_part(0)
        begin = clock()
        binding.step_part(0)
        return clock() - begin


def _binding(
    recipe: Recipe,
    trial: TrialSpec,
    model: nn.Module,
    owned: Sequence[Sequence[str]],
    device: torch.device,
) -> Binding:
    optimizer = build_optimizer_of(recipe, model, HyperParameters(trial.hp))
    rounding = rounding_of(recipe, dict(model.named_parameters()), 0)
    return Binding(model, optimizer, owned, device, rounding)


def _changed(one: _Stepped, other: _Stepped) -> str:
    """An option of a group, or a part of the state, that steps left otherwise."""
    pairs = [(*groups, "groups") for groups in zip(one.groups, other.groups, strict=True)]
    for mine, theirs, where in (*pairs, (one.state, other.state, "state")):
        for key in {**mine, **theirs}:
            if key not in mine or key not in theirs or not _same(mine[key], theirs[key]):
                return f"{key!r} of its {where}"
    return ""


def _same(one: Any, other: Any) -> bool:
    (mine, kind), (theirs, other_kind) = tree_flatten(one), tree_flatten(other)
    return bool(kind == other_kind) and all(map(_equal, mine, theirs))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(np.all(one == other))
