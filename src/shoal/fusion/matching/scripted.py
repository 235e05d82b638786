"""Modules whose code is TorchScript: no Python that one pass could run for all slots."""

from __future__ import annotations

import torch
from torch import nn


def scripted(model: nn.Module) -> str:
    """In words, the first such module of a model; empty without any."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            return (
                f"{f'module {path!r}' if path else 'the model'} is scripted (torch.jit), and an "
                "array runs modules' Python code, which it has none of. Leave torch.jit out, and "
                "it can be in one."
            )
    return ""
