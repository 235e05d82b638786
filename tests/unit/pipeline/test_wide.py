"""Programs with copies of a pipeline, as text; and gradients that are added in order."""

from __future__ import annotations

import pytest
import torch

from shoal.core.errors import ProgramError, SpecError
from shoal.core.technique import Pipelined
from shoal.pipeline.check import check_pipeline
from shoal.pipeline.schedule import Pipeline
from shoal.pipeline.sums import InOrder, Sum
from shoal.pipeline.wide import called
from shoal.program.ir import parse_program
from shoal.testing import same_bits

FLUSH = Pipeline(schedule="flush", stages=2, groups=(3,), width=2, clip=True)


def test_what_two_copies_of_two_stages_do():
    found = [[str(action) for action in actions] for actions in FLUSH.program().devices]
    assert found[0] == [
        "SEND s0 m1 d2 t1",
        "F s0 m0 saved",
        "SEND s1 m0 d1",
        "F s0 m2 saved",
        "SEND s1 m2 d1",
        "RECV s1 m0 grad d1",
        "B s0 m0 saved",
        "RECV s1 m2 grad d1",
        "B s0 m2 saved",
        "SEND s0 sum d2",
        "RECV s0 sum d2 t1",
        "RECV s1 norm d1",
        "SYNC s0",
        "SEND s0 norm d1",
        "STEP s0",
    ]
    assert found[3] == [
        "RECV s1 m1 d2 t1",
        "B s1 m1 t1",
        "SEND s1 m1 grad d2 t1",
        "SEND s1 sum d1 t1",
        "RECV s1 sum d1",
        "SEND s1 norm d2 t1",
        "RECV s0 norm d2 t1",
        "STEP s1 t1",
    ]


def test_2bw_steps_right_before_it_needs_the_version():
    pipeline = Pipeline(schedule="2bw", stages=2, groups=(4, 4, 4), width=2)
    last = [str(action) for action in pipeline.program().devices[1]]
    assert last.index("SEND s1 sum d3") < last.index("B s1 m4") < last.index("RECV s1 sum d3 t1")
    assert last.index("STEP s1") == last.index("RECV s1 sum d3 t1") + 1
    assert last.index("STEP s1") < last.index("B s1 m8 v1")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "RECV s0 sum d2 t1\n",
            "sum of the gradients of s0 for step 0 is sent to device 0, which never receives",
        ),
        ("SEND s0 sum d2\n", "never sends the sum of the gradients of s0 for step 0"),
    ],
)
def test_a_sum_that_is_missing_is_named(line, words):
    text = str(FLUSH.program())
    assert line in text
    with pytest.raises(ProgramError, match=words):
        check_pipeline(FLUSH, parse_program(text.replace(line, "", 1)))


def test_a_step_before_the_sum_is_named():
    text = str(Pipeline(schedule="flush", stages=1, groups=(2,), width=2).program())
    early = text.replace("RECV s0 sum d1 t1\nSTEP s0", "STEP s0\nRECV s0 sum d1 t1", 1)
    assert early != text
    with pytest.raises(
        ProgramError, match="at STEP s0, the gradients of step 0 are to be received"
    ):
        check_pipeline(
            Pipeline(schedule="flush", stages=1, groups=(2,), width=2), parse_program(early)
        )


@pytest.mark.parametrize("copy", [0, 1, 2])
def test_gradients_are_added_in_the_order_of_the_copies_wherever_that_is(copy):
    torch.manual_seed(0)
    each = [{"a": torch.randn(50), "b": torch.randn(3)} for _ in range(3)]
    del each[1]["b"]
    due = {"a": (each[0]["a"] + each[1]["a"]) + each[2]["a"], "b": each[0]["b"] + each[2]["b"]}
    mine = {name: grad.clone() for name, grad in each[copy].items()}
    found = InOrder(copy, mine)
    for other in range(3):
        if other != copy:
            found.take(other, {name: grad.clone() for name, grad in each[other].items()})
    grads = found.grads()
    assert sorted(grads) == ["a", "b"]
    assert all(same_bits(grads[name], due[name]) for name in due)


def test_nothing_is_added_to_nothing():
    found = Sum()
    found.add({})
    found.add({})
    assert found.grads == {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"width": 0}, r"Pipelined\(width=...\) is a whole number from 1, got 0"),
        ({"width": None}, r"Pipelined\(width=...\) is a whole number from 1, got None"),
        ({"width": 2.0}, r"Pipelined\(width=...\) is a whole number from 1, got 2.0"),
        ({"width": 3, "micro_batches": 2}, "3 copies of a pipeline need 3 micro-batches a step"),
        (
            {"stages": 3, "width": 2, "micro_batches": 5, "schedule": "2bw"},
            "2bw with 3 stages in each of 2 copies needs 6 micro-batches .* got micro_batches=5",
        ),
    ],
)
def test_a_width_that_cannot_be_is_refused_with_the_numbers(options, words):
    with pytest.raises(SpecError, match=words):
        Pipelined(**options)


def test_errors_call_a_device_by_its_stage_and_of_several_copies_by_its_copy():
    assert [called(device, 2, 1) for device in range(2)] == ["stage 0", "stage 1"]
    assert called(3, 2, 2) == "stage 1 of copy 1"
