"""Where a model is compared with its cut: on the GPU if there is room, else on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from shoal.partition.pilot import PilotReport
from shoal.runtime.measuring import measure
from shoal.runtime.measuring.firstbatches import FEW_ROWS
from shoal.runtime.measuring.measure import Measurer

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")
FOUND = PilotReport(chain=object(), bitwise=True, loss=0.0)
NONE = PilotReport(chain=None, bitwise=False, loss=0.0, notes=("the loss differs",))


class Model:
    """Where it was sent."""

    def __init__(self):
        self.went = []

    def to(self, device):
        self.went.append(device)


def compared(monkeypatch, answers, *, device=GPU, here=GPU):
    """The report, where the model went, and per comparison the device, rows and determinism."""
    tried = []

    def pilot(model, recipe, batch, where):
        tried.append((where, len(batch[0]), torch.are_deterministic_algorithms_enabled()))
        answer = answers[len(tried) - 1]
        if answer is None:
            raise torch.OutOfMemoryError
        return answer

    monkeypatch.setattr(measure, "pilot", pilot)
    measurer = object.__new__(Measurer)
    measurer._device, measurer._here = SimpleNamespace(torch_device=device), here
    measurer._recipe = None
    built = SimpleNamespace(model=Model(), batch=(torch.ones(8, 3), torch.ones(8)))
    return measurer._pilot(built), built.model.went, tried


def test_on_a_gpu_with_kernels_that_repeat_themselves(monkeypatch):
    report, went, tried = compared(monkeypatch, [FOUND])

    assert report is FOUND
    assert (went, tried) == ([], [(GPU, 8, True)])


def test_with_few_rows_where_a_gpu_has_no_room_for_all(monkeypatch):
    report, went, tried = compared(monkeypatch, [None, FOUND])

    assert report is FOUND
    assert (went, tried) == ([], [(GPU, 8, True), (GPU, FEW_ROWS, True)])


@pytest.mark.parametrize(
    ("answers", "on_gpu", "words"),
    [
        ([NONE, FOUND], [(GPU, 8, True)], "since on the GPU the loss differs"),
        (
            [None, None, FOUND],
            [(GPU, 8, True), (GPU, FEW_ROWS, True)],
            "since the GPU has no room",
        ),
    ],
)
def test_on_the_cpu_with_few_rows_where_a_gpu_says_no(answers, on_gpu, words, monkeypatch):
    report, went, tried = compared(monkeypatch, answers)

    assert report.chain is FOUND.chain
    assert report.notes == (f"compared with its cut on the CPU, {words}",)
    assert (went, tried) == ([CPU, GPU], [*on_gpu, (CPU, FEW_ROWS, False)])


def test_a_model_that_is_on_the_host_is_compared_there(monkeypatch):
    _, went, tried = compared(monkeypatch, [FOUND], here=CPU)
    assert (went, tried) == ([CPU, CPU], [(CPU, FEW_ROWS, False)])


def test_without_a_gpu_with_all_rows(monkeypatch):
    report, _, tried = compared(monkeypatch, [NONE], device=CPU, here=CPU)
    assert (report, tried) == (NONE, [(CPU, 8, False)])


@pytest.mark.parametrize("here", [GPU, CPU])
def test_a_cut_is_measured_on_the_host_where_a_gpu_has_no_room_for_what_that_takes(
    monkeypatch, here
):
    measurer = object.__new__(Measurer)
    measurer._here, measurer._built, tried = here, "built", []

    def cut_here(built, whole, **options):
        tried.append(measurer._here)
        if len(tried) == 1:
            raise torch.OutOfMemoryError
        return "measured"

    def move(built):
        measurer._here = CPU

    monkeypatch.setattr(measurer, "_cut_here", cut_here)
    monkeypatch.setattr(measurer, "_move_to_host", move)
    options = {"narrow": True, "halves": False}
    if here == CPU:
        with pytest.raises(torch.OutOfMemoryError):
            measurer._measure_cut("built", "whole", **options)
        return
    assert measurer._measure_cut("built", "whole", **options) == "measured"
    assert tried == [GPU, CPU]
