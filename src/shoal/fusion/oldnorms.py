"""Weights that a hook makes anew in each forward: torch's norms from before parametrizations."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm


def made_anew(module: nn.Module) -> dict[str, str]:
    """The attributes that such hooks of a module assign, and which norm theirs is."""
    found = dict[str, str]()
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            found[hook.name] = "weight_norm"
        elif isinstance(hook, SpectralNorm):
            found[hook.name] = "spectral_norm"
    return found


def old_norm(module: nn.Module) -> str:
    """In words, the first such norm of a model, and what an array takes; empty without any."""
    for path, child in module.named_modules():
        for attribute, norm in made_anew(child).items():
            name = f"{path}.{attribute}" if path else attribute
            return (
                f"torch.nn.utils.{norm} keeps {name!r} as an attribute that its hook makes anew "
                "in each forward, and an array has no place for those. Use "
                f"torch.nn.utils.parametrizations.{norm}, which an array takes."
            )
    return ""
