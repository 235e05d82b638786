"""A step of torch's fused Adam and AdamW as the call of one kernel, which is what it comes to.

The Python around that kernel costs a narrow model more than the kernel does. The kernel, its
settings and the state are the optimizer's own, so the bits are those of its ``step()``.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import optimizer as base

from shoal.core.errors import TrialError

KNOWN = frozenset((torch.optim.Adam, torch.optim.AdamW))
TORCHS = frozenset((("torch.optim.adam", "Adam.step"), ("torch.optim.sgd", "SGD.step")))


class _Columns(NamedTuple):
    """What the kernel takes of the parameters that have a gradient, in one order."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    averages: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]


def is_one_kernel(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer.step()``, but for the first, is the kernel and nothing else."""
    if type(optimizer) not in KNOWN or _is_watched(optimizer):
        return False
    return all(
        group["fused"] is True
        and not (group["amsgrad"] or group["maximize"])
        and not (group["capturable"] or group["differentiable"])
        and _are_numbers(group["lr"], *group["betas"], group["weight_decay"], group["eps"])
        for group in optimizer.param_groups
    )


def is_plain_sgd(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer.step()`` is torch's SGD on numbers, and nothing else."""
    if type(optimizer) is not torch.optim.SGD or _is_watched(optimizer):
        return False
    return all(
        _are_numbers(*(group[name] for name in ("lr", "momentum", "dampening", "weight_decay")))
        and not group["differentiable"]
        for group in optimizer.param_groups
    )


def _are_numbers(*values: object) -> bool:
    """And no tensors, which a kernel reads later, or texts."""
    return all(type(value) is float or isinstance(value, Real) for value in values)


def step_by_kernel(
    optimizer: torch.optim.Optimizer,
    groups: Iterable[tuple[Mapping[str, Any], Iterable[Tensor]]],
) -> bool:
    """Step those parameters of an optimizer that ``is_one_kernel``, with their groups' settings.

    Returns:
        False, and nothing is done, where torch has to: where there is no state yet, or a gradient
        is sparse or complex.
    """
    lists = []
    for settings, parameters in groups:
        columns = _columns(optimizer.state, parameters)
        if columns is None:
            return False
        lists.append((settings, columns))
    with torch.no_grad():
        for settings, columns in lists:
            if columns.parameters:
                _call(settings, columns)
    optimizer._opt_called = True  # type: ignore[attr-defined]  # a schedule asks for it
    return True


def step_whole(optimizer: torch.optim.Optimizer) -> None:
    """``optimizer.step()``, by the kernel where it is one."""
    groups = ((group, group["params"]) for group in optimizer.param_groups)
    if not (is_one_kernel(optimizer) and step_by_kernel(optimizer, groups)):
        optimizer.step()


@contextmanager
def steps_by_kernel(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Inside, ``optimizer.step()`` in anybody's code is the kernel, of those whose step it is."""
    known = [o for o in optimizers if is_one_kernel(o)]
    ours = [(o.__dict__, o.__dict__.get("step"), _stepping(o)) for o in known]
    for attributes, _, step in ours:
        attributes["step"] = step
    try:
        yield
    finally:
        for attributes, before, step in ours:
            if attributes.get("step") is not step:  # the code has put another one there
                continue
            if before is None:
                del attributes["step"]
            else:
                attributes["step"] = before


def _stepping(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """What stands in for its ``step``; torch's own for a closure, and for what has changed."""
    torchs = optimizer.step

    @functools.wraps(torchs)  # a schedule looks for its mark
    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None or not is_one_kernel(self):
            return torchs(closure)
        groups = ((group, group["params"]) for group in self.param_groups)
        return None if step_by_kernel(self, groups) else torchs()

    step.__dict__["__wrapped__"] = type(optimizer).step  # see _is_watched
    return types.MethodType(step, optimizer)  # a schedule that is made inside wants its function


def steps_as_its_class(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step()`` is its class's, without hooks."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    if base._global_optimizer_pre_hooks or base._global_optimizer_post_hooks:
        return False
    own = optimizer.__dict__.get("step")  # a schedule counts calls by one that wraps it
    return own is None or getattr(own, "__wrapped__", None) is type(optimizer).step


def _is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody else's code runs in ``step()``: hooks, a scaler, another function."""
    if hasattr(optimizer, "grad_scale") or hasattr(optimizer, "found_inf"):
        return True
    step = type(optimizer).step
    if (step.__module__, step.__qualname__) not in TORCHS:
        return True
    return not steps_as_its_class(optimizer)


def _columns(state: Mapping[Tensor, Any], parameters: Iterable[Tensor]) -> _Columns | None:
    found = _Columns([], [], [], [], [])
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        entry = state.get(parameter)
        if not entry or gradient.layout is not torch.strided or gradient.is_complex():
            return None
        row = (parameter, gradient, entry["exp_avg"], entry["exp_avg_sq"], entry["step"])
        for column, value in zip(found, row, strict=True):
            column.append(value)
    return found


def _call(settings: Mapping[str, Any], columns: Sequence[list[Tensor]]) -> None:
    alike: Mapping[Any, Any] = torch.optim.Optimizer._group_tensors_by_device_and_dtype(
        list(columns)  # type: ignore[arg-type]  # a list of lists of tensors, as it says elsewhere
    )
    for (parameters, gradients, averages, squares, steps), _ in alike.values():
        torch._foreach_add_(steps, 1)
        run_kernel(settings, parameters, gradients, averages, squares, steps)


def run_kernel(
    settings: Mapping[str, Any],
    parameters: list[Tensor],
    gradients: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
) -> None:
    """Torch's kernel over tensors of one device and dtype; ``steps`` count this one already."""
    decoupled = settings.get("decoupled_weight_decay", False)
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
    beta1, beta2 = settings["betas"]
    kernel(
        parameters,
        gradients,
        averages,
        squares,
        [],
        steps,
        lr=settings["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=settings["weight_decay"],
        eps=settings["eps"],
        amsgrad=False,
        maximize=False,
    )


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step is torch's own, which writes into what parameters have."""
    own = type(optimizer).__module__.partition(".")[0] == "torch"
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return own and not any(getattr(optimizer, name, None) for name in hooks)


@torch.no_grad()
def put_back(name: str, parameter: nn.Parameter, place: Tensor) -> None:
    """Give a parameter its place again, with the data that code has given it instead.

    Raises:
        TrialError: that has another shape or type.
    """
    if parameter.data_ptr() == place.data_ptr() and parameter.shape == place.shape:
        return
    if parameter.shape != place.shape or parameter.dtype != place.dtype:
        raise TrialError(
            f"the step made {name!r} {parameter.dtype} {tuple(parameter.shape)}, which was "
            f"{place.dtype} {tuple(place.shape)}. A trial's parameters keep their shapes and "
            "types."
        )
    place.copy_(parameter.data)
    parameter.data = place
