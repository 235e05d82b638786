"""What a broken pipeline is told: the device, the action, the rule and the way out."""

from __future__ import annotations

import dataclasses
import re

import pytest

from shoal.core.errors import ProgramError
from shoal.core.spec import Halves
from shoal.core.units import Bytes, Seconds
from shoal.pipeline.check import check_pipeline
from shoal.pipeline.schedule import Pipeline
from shoal.program.costs import JobCosts, unit_seconds
from shoal.program.ir import Program, parse_action
from shoal.testing import make_shard


def refusal(pipeline, device, *, drop=(), put=(), swap=()):
    """What is said of a program with actions dropped, replaced (text: text) or swapped."""
    devices = [[str(action) for action in actions] for actions in pipeline.program().devices]
    actions = devices[device]
    for first, second in swap:
        i, j = actions.index(first), actions.index(second)
        actions[i], actions[j] = actions[j], actions[i]
    for old, new in put:
        actions[actions.index(old)] = new
    for text in drop:
        actions.remove(text)
    program = Program(tuple(tuple(map(parse_action, actions)) for actions in devices))
    with pytest.raises(ProgramError) as caught:
        check_pipeline(pipeline, program)
    assert re.search(r"\ndevice \d, action \d+ of \d+:\n", str(caught.value))
    return str(caught.value)


FLUSH = Pipeline(schedule="flush", stages=2, groups=(2, 2))
STALE = Pipeline(schedule="2bw", stages=2, groups=(2, 2, 2), clip=True, ties=((0, 1),))
SPLIT = Pipeline(schedule="zb-h1", stages=2, groups=(3,))


def test_a_backward_with_another_version_than_its_group_has():
    said = refusal(STALE, 1, put=[("B s1 m2", "B s1 m2 v1")])
    assert "at B s1 m2 v1, m2 is of group 1, which runs with version 0 where 2 versions" in said


def test_a_version_that_does_not_exist_yet():
    said = refusal(FLUSH, 0, swap=[("STEP s0", "F s0 m2 v1 saved")])
    assert "version 1 of s0 does not exist yet" in said


def test_a_step_that_would_miss_gradients():
    said = refusal(FLUSH, 1, swap=[("STEP s1", "B s1 m1")])
    assert "1 B of s1 come later, and their gradients would miss this step" in said


def test_a_deadlock_names_who_waits_for_whom():
    naive = dataclasses.replace(FLUSH, schedule="naive")
    said = refusal(naive, 1, swap=[("SEND s1 m0 grad d0", "RECV s1 m1 d0")])
    assert "deadlock: device 0 waits at RECV s1 m0 grad d1 for device 1" in said


def test_more_in_flight_than_the_bound():
    forward = Pipeline(schedule="gpipe", stages=2, groups=(4,)).program()
    pipeline = dataclasses.replace(FLUSH, groups=(4,))
    with pytest.raises(ProgramError, match="would hold activations of 3 micro-batches, m0 first"):
        check_pipeline(pipeline, forward)


def test_borrowed_weights_that_did_not_come():
    said = refusal(STALE, 1, put=[("RECV s1 v1 param d0", "RECV s1 v2 param d0")])
    assert "device 0 sent version 1 of the parameters that s1 borrows first" in said
    devices = [list(actions) for actions in STALE.program().devices]
    without = [[a for a in actions if "param" not in str(a)] for actions in devices]
    with pytest.raises(ProgramError, match="version 1 of what stage 1 borrows of device 0 is not"):
        check_pipeline(STALE, Program(tuple(map(tuple, without))))


def test_weights_that_are_sent_before_their_step():
    said = refusal(STALE, 0, swap=[("STEP s0", "SEND s1 v1 param d1")])
    assert "s0, which is stepped here, is at version 0. Send version 1 after the STEP" in said


def test_a_factor_before_the_norms_are_known():
    said = refusal(STALE, 0, swap=[("SYNC s0", "SEND s0 norm d1")])
    assert "the factor is known only after SYNC" in said
    said = refusal(STALE, 0, swap=[("SYNC s0", "RECV s1 norm d1")])
    assert "the norm that s1 has to tell for step 0 is on another device. RECV it" in said


def test_a_step_before_its_factor_came():
    said = refusal(STALE, 1, swap=[("STEP s1", "RECV s0 norm d0")])
    assert "at STEP s1, the clipping factor of step 0 is on device 0. Put RECV" in said


def test_a_norm_that_misses_gradients():
    said = refusal(STALE, 1, swap=[("SEND s1 norm d0", "B s1 m1")])
    assert "gradients are still to come, and the norm would miss them" in said


def test_half_a_backward():
    said = refusal(SPLIT, 1, drop=["W s1 m2"])
    assert (
        "the gradients of its parameters are never computed. Add its W" in said or "STEP" in said
    )
    said = refusal(SPLIT, 1, swap=[("W s1 m0", "I s1 m0")])
    assert "W needs I s1 m0 to have run here" in said


def test_a_random_state_that_did_not_come():
    pipeline = dataclasses.replace(FLUSH, draws=True)
    said = refusal(pipeline, 0, swap=[("RECV s1 m0 rng d1", "F s0 m1 saved")])
    assert "the random state after m0 is not here. Put its RECV before" in said


def test_a_message_of_two_kinds():
    said = refusal(FLUSH, 1, put=[("SEND s1 m0 grad d0", "SEND s1 m0 grad+norm d0")])
    assert "a message is of one kind" in said


def test_bytes_count_both_versions_and_what_is_in_flight():
    shards = tuple(make_shard(stage, saved_bytes=Bytes(10**6)) for stage in range(2))
    costs = {0: JobCosts(shards=shards)}
    peaks = {}
    for schedule in ("naive", "gpipe", "flush", "2bw"):
        pipeline = Pipeline(schedule=schedule, stages=2, groups=(4, 4))
        found = check_pipeline(pipeline, pipeline.program(), costs)
        peaks[schedule] = found[0].peak_bytes
    assert peaks["gpipe"] - peaks["flush"] >= 1.9 * 10**6
    assert peaks["flush"] - peaks["naive"] >= 0.9 * 10**6
    assert peaks["2bw"] - peaks["flush"] == shards[0].parameter_bytes


def halved(index, **changes):
    values = {
        "left_bytes": Bytes(1000),
        "keeps_boundary": False,
        "keeps_carry": False,
        "first_peak_bytes": Bytes(3000),
        "second_peak_bytes": Bytes(500),
        "making_peak_bytes": Bytes(600),
    }
    return make_shard(index, 64, halves=Halves(**(values | changes)), saved_bytes=Bytes(2000))


def running(shard, *, recompute=False):
    """What the middle one of three stages holds at its last I and W, above what it keeps."""
    pipeline = Pipeline(schedule="zb-h1", stages=3, groups=(6,), recompute=recompute)
    shards = (make_shard(0, 64, saved_bytes=Bytes(2000)), shard, halved(2))
    costs = {0: JobCosts(shards=shards, batch_bytes=Bytes(7))}
    found = check_pipeline(pipeline, pipeline.program(), costs)[1]
    actions = [str(action) for action in pipeline.actions(1)]
    saved = "" if recompute else " saved"
    inputs, weights = actions.index(f"I s1 m3{saved}"), actions.index("W s1 m2")
    kept = found.kept_bytes + shard.gradient_bytes
    return [found.running_bytes[place] - kept for place in (inputs, weights)]


def test_bytes_between_the_halves_of_a_backward():
    message, carry = 256 + 7, 256
    inputs, weights = running(halved(1))
    # m4 has run forward; m2 has one half left; m3, with its message, is inside its first
    assert inputs == 2000 + message + 1000 + (message + carry + 3000)
    assert weights == 2000 + message + 2 * 1000 + 500


def test_messages_wait_with_what_is_read_of_them():
    message, carry = 256 + 7, 256
    least = running(halved(1))
    assert running(halved(1, keeps_boundary=True)) == [
        least[0] + message,
        least[1] + 2 * message,
    ]
    assert running(halved(1, keeps_carry=True)) == [least[0] + carry, least[1] + 2 * carry]


def test_a_first_half_that_runs_its_forward_again():
    message, carry = 256 + 7, 256
    inputs, weights = running(halved(1), recompute=True)
    assert inputs == message + 1000 + (message + carry + 3000)
    assert weights == message + 2 * 1000 + 500


def test_seconds_of_the_halves_are_those_that_were_measured():
    shard = halved(1, first_s=Seconds(0.005), second_s=Seconds(0.003))
    action = parse_action("I s1 m0")
    assert unit_seconds(action, shard) == 0.005
    assert unit_seconds(parse_action("I s1 m0 saved"), shard) == 0.005 - shard.forward_s
    assert unit_seconds(parse_action("W s1 m0"), shard) == 0.003
