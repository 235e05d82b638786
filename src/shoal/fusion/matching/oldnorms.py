"""Weights that a hook makes anew in each forward: torch's norms before parametrizations, masks."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm


def made_anew(module: nn.Module) -> dict[str, str]:
    """The attributes that such hooks of a module assign, and what of torch's does it."""
    found = dict[str, str]()
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            found[hook.name] = "weight_norm"
        elif isinstance(hook, SpectralNorm):
            found[hook.name] = "spectral_norm"
        elif isinstance(hook, BasePruningMethod):
            found[hook._tensor_name] = "prune"
    return found


def old_norm(module: nn.Module) -> str:
    """In words, the first such weight of a model, and what an array takes; empty without any."""
    for path, child in module.named_modules():
        for attribute, norm in made_anew(child).items():
            name = f"{path}.{attribute}" if path else attribute
            instead = f"torch.nn.utils.parametrizations.{norm}"
            if norm == "prune":
                instead = "a parametrization that multiplies by the mask, a buffer of its own"
            return (
                f"torch.nn.utils.{norm} keeps {name!r} as an attribute that its hook makes anew "
                f"in each forward, and an array has no place for those. Use {instead}, which an "
                "array takes."
            )
    return ""
