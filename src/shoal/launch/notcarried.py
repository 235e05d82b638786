"""What holds where a study is run, and cannot hold in the workers that train: refused in words.

Settings go along (``kernelchoice.py``); these are code of the study's process, or say of a trial
what its recipe is to say. A trial would train without them, otherwise than the same model alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from shoal.core.errors import SpecError


def refuse_what_stays() -> None:
    """Look at what holds here beside the recipe.

    Raises:
        SpecError: something that workers would train without; says what to do instead.
    """
    for found, instead in _staying():
        raise SpecError(
            f"{found} where the study is run. Trials train in processes of their own, where it "
            f"does not hold, and would differ from the same model trained alone. {instead}"
        )


def _staying() -> Iterator[tuple[str, str]]:
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        mode = "inference mode" if torch.is_inference_mode_enabled() else "no_grad"
        yield (
            f"torch is in {mode}",
            "Nothing could be trained so: take it out of the head of the file, and put it around "
            "the code that needs it.",
        )
    if (device := torch.get_default_device()).type != "cpu":
        yield (
            f"torch's default device is {device}",
            "Make models on the CPU, as without torch.set_default_device(...): shoal brings them "
            "to a device. Which devices those are is said by hardware= or --devices.",
        )
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            yield (
                f"autocast is on for {kind}",
                'Write Recipe(precision="bf16"), or torch.autocast(...) in the model\'s forward.',
            )
    for mode in (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()):
        if not isinstance(mode, DeviceContext):
            yield f"the mode {type(mode).__name__} is on", "Enter it in the model's forward."
    if hooks := torch._C._autograd._top_saved_tensors_default_hooks(True):
        yield (
            f"saved tensors go through {_named(hooks[0])}",
            "Enter torch.autograd.graph.saved_tensors_hooks(...) in the model's forward.",
        )
    for kind, hook in _hooks_of_all():
        yield (
            f"{_named(hook)} is a hook of all {kind}",
            "Register it with those of the trial, in Recipe(model=...) or Recipe(optimizer=...).",
        )


def _hooks_of_all() -> Iterator[tuple[str, Any]]:
    """Those that torch has not registered itself."""
    for kind, home in (("modules", modules), ("optimizers", optimizers)):
        for name, hooks in vars(home).items():
            if name.startswith("_global_") and isinstance(hooks, dict):
                for hook in hooks.values():
                    if not str(getattr(hook, "__module__", "")).startswith("torch."):
                        yield kind, hook


def _named(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))
