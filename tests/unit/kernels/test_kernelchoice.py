"""Which kernels torch takes: workers take those of the study's process."""

import dataclasses
import operator
import os

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shoal
from shoal.kernels.kernelchoice import (
    BY_BACKEND,
    EXACT,
    OTHERS,
    STRICT,
    TOLD,
    KernelChoice,
    _StrictAttention,
    only_deterministic,
    repeatable,
)

NOT_HERE = "einsum in order", "products by", "linear algebra by"  # libraries
OF_MANY = {
    "settings of inductor": (("fallback_random", True),),
    "autocast of CPUs": torch.float16,
    "autocast of GPUs": torch.bfloat16,
    "order of attentions": [2, 1, 0, 3, 4],
}


@pytest.fixture
def restored():
    before = KernelChoice.here()
    yield before
    before.take()


def changed():
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    torch.set_default_dtype(torch.float64)
    for setting in OTHERS:
        if setting.name not in ("", *NOT_HERE):
            setting.put(OF_MANY.get(setting.name, not setting.usual))


def test_what_was_set_is_told_and_taken_back(restored):
    assert restored.told(on_gpu=True) == {}
    changed()
    there = KernelChoice.here()
    restored.take()

    assert KernelChoice.here() == restored
    there.take()
    assert KernelChoice.here() == there
    told = set(TOLD[1:]) - set(NOT_HERE)
    assert there.told(on_gpu=True).keys() == told
    of_gpu = {setting.name for setting in OTHERS if setting.is_of_gpu} | set(TOLD[2:5])
    assert there.told(on_gpu=False).keys() == told - of_gpu
    assert there.told(on_gpu=True)["autocast of GPUs"] == "bfloat16"
    assert there.told(on_gpu=True)["order of attentions"] == "[2, 1, 0, 3, 4]"
    assert there.matmul == "high"


@pytest.mark.parametrize("path", [*BY_BACKEND, ""])
def test_precisions_of_single_backends_are_taken_too(path, restored):
    """Torch refuses to tell its older settings then."""
    backend = operator.attrgetter(path)(torch.backends) if path else torch.backends
    before = backend.fp32_precision
    backend.fp32_precision = "ieee" if path != "cuda.matmul" else "tf32"
    there = KernelChoice.here()
    restored.take()

    assert KernelChoice.here() == restored
    there.take()
    assert KernelChoice.here() == there
    backend.fp32_precision = before


def test_inductors_settings_are_told_one_by_one():
    """Two that differ are not the same, though neither is the default."""
    name, pairs = "settings of inductor", (("fallback_random", True), ("layout_opt", "0"))
    others = tuple(pairs if one.name == name else one.usual for one in OTHERS)
    told = dataclasses.replace(KernelChoice.here(), others=others).told(on_gpu=True)
    assert told[name] == "fallback_random=True, layout_opt=0"


def test_only_deterministic_kernels_inside_and_told_apart_from_warnings(restored, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with only_deterministic(False):
        assert KernelChoice.here() == restored
    with only_deterministic():
        inside = KernelChoice.here()
        told = inside.told(on_gpu=False)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert KernelChoice.here() == restored
    assert told == {EXACT: STRICT, "deterministic algorithms": "yes"}
    assert inside.cudnn_deterministic
    changed()
    told = KernelChoice.here().told(on_gpu=False)
    assert told["deterministic algorithms"] == "yes"
    assert told["default type"] == "float64"
    assert EXACT not in told


def model(hp):
    words = KernelChoice.here()
    assert words.matmul == "high", words
    assert words.deterministic, words
    assert words.only_warns, words
    assert words.cudnn_deterministic, words
    return torch.nn.Linear(2, 1)


def data(hp):
    return [(torch.ones(4, 2), torch.ones(4, 1))], None


def loss(output, batch):
    return (output - batch[1]).square().mean()


def test_a_trial_trains_with_the_kernels_of_the_studys_process(restored, tmp_path, warm_workers):
    changed()
    recipe = shoal.Recipe(model=model, data=data, loss=loss)
    study = shoal.Study("chosen", recipe, space={"lr": 0.1}, steps=2, directory=tmp_path)

    report = study.run(
        hardware=shoal.Hardware.virtual(devices=1), progress=False, workers=warm_workers
    )

    (trial,) = report.trials
    assert not trial.error
    numerics = study.plan(hardware=shoal.Hardware.virtual(devices=1)).jobs[0].numerics
    assert numerics["matmul"] == "high"
    assert numerics["deterministic algorithms"] == "yes"
    assert "deterministic cuDNN" not in numerics


def test_attentions_backward_is_strict_where_all_else_only_warns(monkeypatch):
    seen = {}

    class Told(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            warns = torch.is_deterministic_algorithms_warn_only_enabled()
            seen[func._schema.name.removeprefix("aten::")] = warns
            return func(*args, **(kwargs or {}))

    of = "_flash_attention_for_cpu_backward"  # as there is no other here
    monkeypatch.setattr(_StrictAttention, "OF", (*_StrictAttention.OF, of))
    q = torch.randn(1, 2, 8, 4, requires_grad=True)
    with Told(), repeatable(torch.device("cuda")):
        nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()
    strict = {name for name, warns in seen.items() if not warns}
    assert strict == {"_scaled_dot_product_flash_attention_for_cpu_backward"}


def test_repeatable_kernels_are_of_a_gpu_only_and_for_as_long_as_asked(restored):
    with repeatable(torch.device("cpu")):
        assert KernelChoice.here() == restored
    with repeatable(torch.device("cuda")):
        inside = KernelChoice.here()
        assert (inside.deterministic, inside.only_warns, inside.cudnn_deterministic) == (True,) * 3
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert KernelChoice.here() == restored
    assert torch.utils.deterministic.fill_uninitialized_memory
