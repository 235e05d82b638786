"""Properties of programs with copies of a pipeline: who computes what, and what is added up."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ProgramError, SpecError
from shoal.core.technique import SCHEDULES
from shoal.core.units import Seconds
from shoal.pipeline.check import check_pipeline
from shoal.pipeline.schedule import Pipeline
from shoal.pipeline.validate import validation
from shoal.pipeline.wide import mean_in_order, micros_of, shares
from shoal.program.costs import JobCosts
from shoal.program.ir import Action, Op, Part, Program, parse_program
from shoal.program.needs import matching_sends
from shoal.program.replay import Run, replay
from shoal.testing import make_shard

quick = settings(max_examples=50, deadline=None)
UNITS = (Op.F, Op.B, Op.I, Op.W)


@st.composite
def wide_of(draw, *, stages, width, steps, micros):
    schedule = draw(st.sampled_from(SCHEDULES))
    depth, copies = draw(st.integers(1, stages)), draw(st.integers(2, width))
    least = copies * (depth if schedule == "2bw" else 1)
    sizes = st.integers(least, max(micros, least + 1))
    pairs = [(a, b) for a in range(depth) for b in range(a + 1, depth)]
    ties = draw(st.sets(st.sampled_from(pairs), max_size=2)) if pairs else set()
    draws = draw(st.booleans())
    return Pipeline(
        schedule=schedule,
        stages=depth,
        groups=tuple(draw(st.lists(sizes, min_size=draw(st.integers(1, steps)), max_size=steps))),
        recompute=draw(st.booleans()),
        lag=draw(st.integers(0, 2)),
        clip=draw(st.booleans()),
        ties=tuple(sorted(ties)),
        draws=draws,
        foretold=draws,
        whole=tuple(sorted({stage for pair in ties for stage in pair})),
        begun=draw(st.integers(0, 1)) if schedule == "2bw" else 0,
        follows=draw(st.booleans()),
        width=copies,
    )


wide = wide_of(stages=4, width=3, steps=4, micros=9)
small = wide_of(stages=2, width=3, steps=2, micros=5)


def passes(pipeline: Pipeline, program: Program) -> bool:
    try:
        check_pipeline(pipeline, program)
    except ProgramError:
        return False
    return True


def changed(program: Program, device: int, actions: list[Action]) -> Program:
    devices = list(program.devices)
    devices[device] = tuple(actions)
    return Program(tuple(devices))


# -- what is generated ------------------------------------------------------------------------


@quick
@given(wide)
def test_copies_pass_the_checker_which_finds_deadlocks_and_wrong_versions(pipeline):
    program = pipeline.program()
    assert len(check_pipeline(pipeline, program)) == pipeline.stages * pipeline.width
    assert parse_program(str(program)) == program


@quick
@given(wide)
def test_each_micro_batch_is_one_copys_at_every_stage(pipeline):
    program = pipeline.program()
    taken: dict[int, set[int]] = {}
    for device, actions in enumerate(program.devices):
        copy = device // pipeline.stages
        mine = [a for a in actions if a.op in UNITS]
        assert all(a.trial == copy for a in mine)
        backwards = [a.micro for a in mine if a.op in (Op.B, Op.I)]
        assert backwards == sorted(set(backwards))
        for micro in backwards:
            taken.setdefault(micro, set()).add(copy)
    assert sorted(taken) == list(range(pipeline.num_micros))
    assert all(len(copies) == 1 for copies in taken.values())
    for group, size in enumerate(pipeline.groups):
        first = sum(pipeline.groups[:group])
        counts = Counter(min(taken[micro]) for micro in range(first, first + size))
        assert max(counts.values()) - min(counts[c] for c in range(pipeline.width)) <= 1


class Paper:
    """The program run on symbols: gradients are the micro-batches that are in them, in order."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline, self.copies = pipeline, pipeline.copies
        self.grads: dict[tuple[int, int], list[tuple[int, ...]]] = {}  # device, step -> summands
        self.boxes: dict[tuple[int, int, int], list[tuple[int, ...]]] = {}
        self.stepped: list[tuple[int, int, tuple[tuple[int, ...], ...]]] = []

    def run(self, program: Program) -> None:
        heads = [0] * len(program.devices)
        while any(h < len(a) for h, a in zip(heads, program.devices, strict=True)):
            before = list(heads)
            for device, actions in enumerate(program.devices):
                while heads[device] < len(actions) and self.act(device, actions[heads[device]]):
                    heads[device] += 1
            assert heads != before, "deadlock"

    def act(self, device: int, a: Action) -> bool:
        copy, _ = self.copies.place(device)
        if a.op in (Op.B, Op.W):
            step = self.pipeline.group_of(a.micro)
            (mine,) = self.grads.get((device, step), [()])
            self.grads[device, step] = [(*mine, a.micro)]
        elif a.op is Op.SEND and Part.SUM in a.parts:
            (mine,) = self.grads[device, a.version]
            self.boxes.setdefault((device, a.peer, a.version), []).append(mine)
        elif a.op is Op.RECV and Part.SUM in a.parts:
            box = self.boxes.get((a.peer, device, a.version))
            if not box:
                return False
            self.grads[device, a.version].append(box.pop())
        elif a.op is Op.STEP:
            mine, *others = self.grads.pop((device, a.version))
            others.insert(copy, mine)
            self.stepped.append((device, a.version, tuple(others)))
        return True


@quick
@given(wide)
def test_every_step_adds_each_micro_batch_once_in_the_order_of_the_copies(pipeline):
    paper = Paper(pipeline)
    paper.run(pipeline.program())
    first = 0
    for group, size in enumerate(pipeline.groups):
        step = pipeline.begun + group
        own = [range(first + copy, first + size, pipeline.width) for copy in range(pipeline.width)]
        due = tuple(map(tuple, own))
        found = {d: sums for d, version, sums in paper.stepped if version == step}
        assert found == dict.fromkeys(range(pipeline.copies.devices), due)
        first += size
    assert not any(paper.boxes.values())


@quick
@given(wide)
def test_gradients_are_sent_before_a_stage_waits_and_2bw_computes_meanwhile(pipeline):
    for device, actions in enumerate(pipeline.program().devices):
        copy, stage = pipeline.copies.place(device)
        alone = pipeline.of_copy(copy)
        for step in range(pipeline.begun, pipeline.begun + len(pipeline.groups)):
            sums = [i for i, a in enumerate(actions) if Part.SUM in a.parts and a.version == step]
            went = [i for i in sums if actions[i].op is Op.SEND]
            came = [i for i in sums if actions[i].op is Op.RECV]
            assert len(went) == len(came) == pipeline.width - 1
            assert max(went) < min(came)
            last = max(
                i
                for i, a in enumerate(actions)
                if a.op in (Op.B, Op.W) and pipeline.group_of(a.micro) == step
            )
            assert last < min(went)
            between = [a for a in actions[max(went) : min(came)] if a.op in UNITS]
            is_last = step == pipeline.begun + len(pipeline.groups) - 1
            if pipeline.schedule != "2bw" or is_last:
                assert not between
            elif alone.ahead(stage) < min(alone.groups):
                assert between


@quick
@given(wide)
def test_a_replay_runs_every_action_once(pipeline):
    timeline = replay_of(pipeline)
    spans = sorted(str(span.action) for span in timeline.spans)
    assert spans == sorted(map(str, pipeline.program()))


# -- validation -------------------------------------------------------------------------------


@pytest.mark.parametrize(("stages", "width"), [(1, 2), (2, 1), (2, 3), (4, 2)])
def test_a_validation_batch_goes_through_all_stages_of_one_copy_alone(stages, width):
    for copy in range(width):
        program = validation(stages, width, copy)
        units = [
            (d, a.shard) for d, part in enumerate(program.devices) for a in part if a.op is Op.F
        ]
        assert units == [(copy * stages + stage, stage) for stage in range(stages)]
        sends = sum(a.op is Op.SEND for a in program)
        assert len(matching_sends(program)) == sends == stages - 1 + (copy > 0)
        assert parse_program(str(program)) == program


# -- what is refused --------------------------------------------------------------------------


@pytest.mark.full
@settings(max_examples=25, deadline=None)
@given(small)
def test_copies_without_one_action_are_refused(pipeline):
    program = pipeline.program()
    for device, actions in enumerate(program.devices):
        for index, action in enumerate(actions):
            without = changed(program, device, [*actions[:index], *actions[index + 1 :]])
            assert not passes(pipeline, without), f"without {action} at {index} of {device}"


@settings(max_examples=25, deadline=None)
@given(small)
def test_a_sum_that_is_sent_or_received_twice_is_refused(pipeline):
    program = pipeline.program()
    for device, actions in enumerate(program.devices):
        for index, action in enumerate(actions):
            if Part.SUM in action.parts:
                twice = changed(program, device, [*actions[:index], action, *actions[index:]])
                assert not passes(pipeline, twice), f"{action} twice at {index} of {device}"


@settings(max_examples=60, deadline=None)
@given(small, st.data())
def test_another_version_or_micro_batch_is_refused(pipeline, data):
    program = pipeline.program()
    device = data.draw(st.integers(0, len(program.devices) - 1), "device")
    actions = list(program.devices[device])
    index = data.draw(st.integers(0, len(actions) - 1), "action")
    action = actions[index]
    names = ["version", "micro"] if action.micro is not None else ["version"]
    which = data.draw(st.sampled_from(names))
    actions[index] = dataclasses.replace(action, **{which: getattr(action, which) + 1})
    assert not passes(pipeline, changed(program, device, actions)), f"{action}: {actions[index]}"


@settings(max_examples=80, deadline=None)
@given(small, st.data())
def test_moving_an_action_is_refused_or_changes_no_sum(pipeline, data):
    program = pipeline.program()
    right = Paper(pipeline)
    right.run(program)
    device = data.draw(st.integers(0, len(program.devices) - 1), "device")
    actions = list(program.devices[device])
    moved = actions.pop(data.draw(st.integers(0, len(actions) - 1), "from"))
    actions.insert(data.draw(st.integers(0, len(actions)), "to"), moved)
    after = changed(program, device, actions)
    if passes(pipeline, after):
        found = Paper(pipeline)
        found.run(after)
        assert sorted(found.stepped) == sorted(right.stepped)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"groups": (4, 1)}, "got width=2 and a step of 1"),
        ({"width": 0}, "got width=0"),
        ({"schedule": "2bw", "groups": (5,), "stages": 3}, "in each of 2 copies needs 6"),
        ({"draws": True}, "cannot be foretold: 2 copies would wait for each other"),
    ],
)
def test_what_copies_cannot_be_is_refused_with_the_numbers(changes, said):
    with pytest.raises(SpecError, match=said):
        Pipeline(**({"schedule": "flush", "stages": 2, "groups": (4,), "width": 2} | changes))


# -- on paper ---------------------------------------------------------------------------------


def replay_of(pipeline: Pipeline, *, sum_s: float = 0.0):
    shards = tuple(make_shard(stage) for stage in range(pipeline.stages))
    run = Run(
        program=pipeline.program(),
        costs=dict.fromkeys(range(pipeline.width), JobCosts(shards=shards)),
        devices=tuple(range(pipeline.copies.devices)),
    )
    seconds = {Op.F: 1.0, Op.I: 1.0, Op.W: 1.0, Op.B: 2.0, Op.STEP: 0.25}

    def lasts(action: Action) -> Seconds | None:
        if action.op is Op.SEND and Part.SUM in action.parts:
            return Seconds(sum_s)
        again = action.op in (Op.B, Op.I) and action.shard == pipeline.stages - 1
        known = seconds.get(action.op)
        return None if known is None else Seconds(known + again)

    return replay([run], durations=lasts)


@pytest.mark.sample(5)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [2, 4])
def test_two_copies_are_nearly_twice_as_quick_where_messages_are(schedule, stages):
    """With as many micro-batches in each copy they take the time of one, for twice the work."""
    plain = {"schedule": schedule, "stages": stages}
    micros, steps = 4 * stages, 10
    one = replay_of(Pipeline(**plain, groups=(micros,) * steps)).makespan_s
    two = replay_of(Pipeline(**plain, groups=(2 * micros,) * steps, width=2)).makespan_s
    assert two == pytest.approx(one, rel=1e-3)


@pytest.mark.full
def test_1f1b_waits_for_a_sum_and_2bw_for_at_most_what_it_keeps_from_boundaries():
    """They share a link on paper: what runs further ahead does not wait for those either."""

    def step_s(sum_s, **how):
        plain = {"stages": 4, "width": 2, "clip": True} | how
        few, many = (
            replay_of(Pipeline(groups=(32,) * n, **plain), sum_s=sum_s).makespan_s for n in (4, 8)
        )
        return (many - few) / 4

    for sum_s in (1.0, 3.0):
        flush = {"schedule": "flush"}
        assert step_s(sum_s, **flush) == pytest.approx(step_s(0.0, **flush) + sum_s)
        stale = {"schedule": "2bw"}
        assert step_s(sum_s, **stale) < step_s(0.0, **stale) + sum_s
        ahead = {"schedule": "2bw", "lag": 3}
        assert step_s(sum_s, **ahead) == pytest.approx(step_s(0.0, **ahead))


# -- numbers ----------------------------------------------------------------------------------


def test_micro_batches_are_dealt_out_in_turns_of_each_step():
    assert shares((5, 3), 2) == ((3, 2), (2, 1))
    assert micros_of((5, 3), 2, 0) == (0, 2, 4, 5, 7)
    assert micros_of((5, 3), 2, 1) == (1, 3, 6)


def test_a_mean_is_taken_in_the_order_of_the_micro_batches():
    values = [0.1, 0.2, 0.7, 1e16, -1e16]
    total = 0.0
    for value in values:
        total += value
    assert mean_in_order([values[::2], values[1::2]]) == total / 5
    assert mean_in_order([values]) == total / 5
