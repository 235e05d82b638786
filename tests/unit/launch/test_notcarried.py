"""What holds in a study's process and cannot in its workers is refused before anything trains."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode

import shoal
from shoal.launch.notcarried import refuse_what_stays


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def watch(*args):
    return None


@contextmanager
def registered(register):
    handle = register(watch)
    yield
    handle.remove()


STAYING = {
    "is in no_grad": torch.no_grad,
    "is in inference mode": torch.inference_mode,
    "default device is meta": lambda: torch.device("meta"),
    "autocast is on for cpu": lambda: torch.autocast("cpu", torch.bfloat16),
    "the mode Doubling is on": Doubling,
    "saved tensors go through watch": lambda: torch.autograd.graph.saved_tensors_hooks(watch, abs),
    "watch is a hook of all modules": lambda: registered(register_module_forward_hook),
    "watch is a hook of all optimizers": lambda: registered(register_optimizer_step_post_hook),
}


@pytest.mark.parametrize("words", STAYING)
def test_what_workers_would_train_without_is_refused(words):
    with STAYING[words](), pytest.raises(shoal.SpecError, match=words):
        refuse_what_stays()
    refuse_what_stays()


def test_a_default_device_that_changes_nothing_is_taken():
    with torch.device("cpu"):
        refuse_what_stays()


@pytest.mark.parametrize("verb", ["run", "plan"])
def test_a_study_is_refused_so_and_leaves_nothing(verb, tmp_path):
    recipe = shoal.Recipe(model=abs, data=abs, loss=lambda output, batch: output)
    study = shoal.Study("staying", recipe, space={"lr": 0.1}, steps=1, directory=tmp_path / "runs")
    with torch.no_grad(), pytest.raises(shoal.SpecError, match="is in no_grad where the study"):
        getattr(study, verb)(hardware=shoal.Hardware.virtual(devices=1), progress=False)
    assert not (tmp_path / "runs").exists()
