"""Lists of actions are made once for steps that are alike, and not all are kept."""

from __future__ import annotations

import dataclasses

from shoal.pipeline.lists import Lists
from shoal.pipeline.schedule import Pipeline

STEP = Pipeline(schedule="flush", stages=3, groups=(4,), clip=True)


def test_a_list_is_that_of_the_program():
    for pipeline in (STEP, dataclasses.replace(STEP, width=2)):
        for device, actions in enumerate(pipeline.program().devices):
            assert Lists().of(pipeline, device) == actions


def test_steps_that_are_alike_run_one_list():
    lists = Lists()
    first = lists.of(STEP, 1)
    assert lists.of(dataclasses.replace(STEP), 1) is first
    assert lists.of(STEP, 2) is not first


def test_of_long_lists_only_the_newest_stays():
    lists = Lists(most=500)
    for steps in range(1, 30):
        pipeline = Pipeline(schedule="2bw", stages=2, groups=(4,) * steps)
        newest = lists.of(pipeline, 0)
        assert lists.of(pipeline, 0) is newest
        assert lists.num_actions <= max(500, len(newest))


def test_what_was_used_last_is_let_go_last():
    lists = Lists(most=2 * len(STEP.actions(1)))
    first, other = lists.of(STEP, 1), dataclasses.replace(STEP, begun=0, groups=(3,))
    lists.of(other, 1)
    assert lists.of(STEP, 1) is first
    lists.of(dataclasses.replace(STEP, groups=(2,)), 1)
    lists.of(dataclasses.replace(STEP, groups=(1,)), 1)
    assert lists.of(STEP, 1) is first
