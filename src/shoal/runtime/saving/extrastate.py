"""What modules add to their state dict beside parameters and buffers (``get_extra_state``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

SUFFIX = "_extra_state"


def adds_state(model: nn.Module) -> bool:
    """Whether any module of it does."""
    usual = nn.Module.get_extra_state
    return any(type(module).get_extra_state is not usual for module in model.modules())


def extra_state(model: nn.Module) -> dict[str, Any]:
    """By the key that a state dict has it under."""
    if not adds_state(model):
        return {}
    state = model.state_dict(keep_vars=True)
    return {key: value for key, value in state.items() if key.endswith(SUFFIX)}


def give_extra_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Have modules take what they once added, as ``load_state_dict`` would."""
    for key, value in state.items():
        module = model.get_submodule(key.removesuffix(SUFFIX).removesuffix("."))
        module.set_extra_state(value)
