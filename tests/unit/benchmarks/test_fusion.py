"""The arms of benchmarks/fusion compute the same thing."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[3] / "benchmarks" / "fusion"


@pytest.fixture(scope="module")
def run():
    for folder in (FOLDER, FOLDER.parent):
        sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location("fusion_run", FOLDER / "run.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        for folder in (FOLDER, FOLDER.parent):
            sys.path.remove(str(folder))


@pytest.mark.parametrize("name", ["tabular MLP", "small LSTM", "DCGAN generator", "DCGAN"])
def test_an_array_and_the_serial_loop_take_the_same_steps(run, name, monkeypatch):
    workload, made = run.WORKLOADS[name], []
    right = run.models

    def remembered(*args):
        made.append(right(*args))
        return made[-1]

    for module in (run, sys.modules["rivals"]):
        monkeypatch.setattr(module, "models", remembered)

    for step in (run.array_step(workload, 2), run.serial_step(workload, range(2), fused=True)):
        step()

    for mine, theirs in zip(*made, strict=True):
        for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            # Adam's first step is the rate times a sign, where a gradient is not all but zero.
            assert ((one - other).abs() < 1e-6).double().mean() > 0.99
            assert torch.isfinite(one).all()


def test_ratios_are_taken_within_a_round(run):
    costs = {
        "array": [run.Cost(1.0, 2.0), run.Cost(2.0, 2.0)],
        "serial": [run.Cost(3.0, 2.0), run.Cost(4.0, 2.0)],
    }

    found = run._times(costs, "cpu_s")

    assert found == {"serial": {"median": 2.5, "min": 2.0, "max": 3.0}}
