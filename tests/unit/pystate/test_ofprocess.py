"""Settings of the process that a recipe's code sets: each trial's own."""

from __future__ import annotations

import decimal
import importlib
import sys

import numpy as np
import pytest
import torch
from torch import nn

import shoal
from shoal.kernels.kernelchoice import KernelChoice
from shoal.pystate import Ambient


@pytest.fixture(autouse=True)
def settings():
    before = KernelChoice.here()
    yield
    before.take()


def doubles(hp):
    torch.set_default_dtype(torch.float64)
    decimal.getcontext().prec = 7
    np.seterr(over="raise")
    return nn.Linear(1, 1)


def lazy(hp):
    torch.set_float32_matmul_precision("high")
    importlib.import_module("sets_a_type")
    return nn.Linear(1, 1)


def plain(hp):
    return nn.Linear(1, 1)


def data(hp):
    return [], None


def ambient_of(model):
    return Ambient(shoal.Recipe(model=model, data=data, loss=lambda output, batch: output.sum()))


def test_trials_that_alternate_have_each_its_own():
    ambient, study = ambient_of(doubles), KernelChoice.here()
    ambient.begin()
    doubles({})
    first, chosen = ambient.settle(), KernelChoice.here()
    ambient.begin()
    second = ambient.settle()

    ambient.put(first)
    assert KernelChoice.here() == chosen != study
    assert torch.zeros(1).dtype == torch.float64
    assert decimal.getcontext().prec == 7
    ambient.put(second)
    assert KernelChoice.here() == study


def test_a_trial_is_made_with_those_of_its_study():
    ambient = ambient_of(doubles)
    doubles({})
    ambient.settle()
    ambient.begin()
    ambient.end()

    assert torch.get_default_dtype() == torch.float32
    assert ambient.has("torch's default_dtype")


def test_what_an_import_set_stays(tmp_path, monkeypatch):
    (tmp_path / "sets_a_type.py").write_text(
        "import torch\ndef sets(to):\n    to(torch.float64)\nsets(torch.set_default_dtype)"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    ambient = ambient_of(lazy)
    ambient.begin()
    lazy({})
    ambient.settle()
    ambient.begin()
    ambient.end()
    del sys.modules["sets_a_type"]

    assert torch.get_default_dtype() == torch.float64
    assert torch.get_float32_matmul_precision() == "highest"  # which the factory set
    assert importlib._bootstrap._find_and_load.__module__ == "_frozen_importlib"


def test_what_each_step_sets_again_is_nobodys_warning():
    ambient = ambient_of(doubles)
    before = ambient.take()
    torch.set_float32_matmul_precision("high")

    assert ambient.changed(before, ambient.take()) == ({}, [])


def test_where_no_code_names_any_nobody_looks():
    assert "this process" not in ambient_of(plain).take()
    assert not ambient_of(plain).has("torch's default_dtype")
