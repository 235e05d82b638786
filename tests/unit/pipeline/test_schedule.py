"""Schedules as text, and pipelines that are none."""

from __future__ import annotations

import pytest

from shoal.core.errors import SpecError
from shoal.core.technique import SCHEDULES
from shoal.pipeline.schedule import Pipeline
from shoal.program.ir import Op


def units(schedule, stages, micros, stage, **how):
    pipeline = Pipeline(schedule=schedule, stages=stages, groups=(micros,), **how)
    chosen = (Op.F, Op.B, Op.I, Op.W, Op.STEP)
    words = []
    for action in pipeline.program().devices[stage]:
        if action.op in chosen:
            words.append(action.op if action.micro is None else f"{action.op}{action.micro}")
    return " ".join(words)


@pytest.mark.parametrize(
    ("schedule", "stage", "text"),
    [
        ("naive", 0, "F0 B0 F1 B1 F2 B2 STEP"),
        ("naive", 2, "B0 B1 B2 STEP"),
        ("gpipe", 0, "F0 F1 F2 B0 B1 B2 STEP"),
        ("flush", 0, "F0 F1 F2 B0 B1 B2 STEP"),
        ("flush", 1, "F0 F1 B0 F2 B1 B2 STEP"),
        ("flush", 2, "B0 B1 B2 STEP"),
        ("zb-h1", 0, "F0 F1 F2 B0 B1 B2 STEP"),
        ("zb-h1", 1, "F0 F1 I0 F2 I1 W0 I2 W1 W2 STEP"),
        ("zb-h1", 2, "I0 I1 I2 W0 W1 W2 STEP"),
        ("2bw", 1, "F0 F1 B0 F2 B1 B2 STEP"),
    ],
)
def test_what_three_stages_compute(schedule, stage, text):
    assert units(schedule, 3, 3, stage) == text


def test_2bw_does_not_stop_between_steps():
    pipeline = Pipeline(schedule="2bw", stages=2, groups=(2, 2, 2))
    first = " ".join(
        f"{a.op}{a.micro}v{a.version}" if a.micro is not None else f"STEPv{a.version}"
        for a in pipeline.program().devices[0]
        if a.op in (Op.F, Op.B, Op.STEP)
    )
    assert first == (
        "F0v0 F1v0 B0v0 F2v0 B1v0 STEPv0 F3v0 B2v0 F4v1 B3v0 STEPv1 F5v1 B4v1 B5v1 STEPv2"
    )


def test_a_stage_with_a_tie_does_not_cut_its_backward():
    assert units("zb-h1", 3, 3, 2, whole=(0, 2), ties=((0, 2),)) == "B0 B1 B2 STEP"


def test_running_ahead_goes_no_further_than_a_step():
    pipeline = Pipeline(schedule="2bw", stages=4, groups=(4,) * 3, lag=9)
    assert [pipeline.ahead(stage) for stage in range(4)] == [4, 4, 2, 0]


def test_the_bounds_of_four_stages():
    bounds = {
        schedule: [Pipeline(schedule=schedule, stages=4, groups=(8, 8)).bound(s) for s in range(4)]
        for schedule in SCHEDULES
    }
    assert bounds == {
        "naive": [1, 1, 1, 1],
        "gpipe": [8, 8, 8, 1],
        "flush": [4, 3, 2, 1],
        "zb-h1": [4, 4, 4, 4],
        "2bw": [4, 3, 2, 1],
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schedule": "1f1b"}, "got '1f1b'"),
        ({"stages": 0}, "stages=0"),
        ({"groups": ()}, r"groups=\(\)"),
        ({"groups": (4, 0)}, r"groups=\(4, 0\)"),
        ({"lag": -1}, "lag=-1"),
        ({"schedule": "2bw", "groups": (4, 2)}, "needs 3 micro-batches a step or more, got 2"),
    ],
)
def test_what_is_no_pipeline_is_refused(changes, said):
    settings = {"schedule": "flush", "stages": 3, "groups": (4,)} | changes
    with pytest.raises(SpecError, match=said):
        Pipeline(**settings)
