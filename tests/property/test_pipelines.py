"""Properties of every pipeline, and of what its checker lets pass."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ProgramError
from shoal.core.technique import SCHEDULES
from shoal.core.units import Seconds
from shoal.pipeline.check import check_pipeline
from shoal.pipeline.schedule import Pipeline
from shoal.program.costs import JobCosts
from shoal.program.ir import Action, Op, Part, Program, parse_program
from shoal.program.replay import Run, replay
from shoal.testing import make_shard

quick = settings(max_examples=60, deadline=None)
FORWARD_S, INPUTS_S, WEIGHTS_S, STEP_S = 1.0, 1.0, 1.0, 0.25


@st.composite
def pipelines_of(draw, *, stages, steps, micros):
    schedule = draw(st.sampled_from(SCHEDULES))
    depth = draw(st.integers(1, stages))
    least = depth if schedule == "2bw" else 1
    sizes = st.integers(least, max(micros, least))
    pairs = [(a, b) for a in range(depth) for b in range(a + 1, depth)]
    ties = draw(st.sets(st.sampled_from(pairs), max_size=2)) if pairs else set()
    return Pipeline(
        schedule=schedule,
        stages=depth,
        groups=tuple(draw(st.lists(sizes, min_size=1, max_size=steps))),
        recompute=draw(st.booleans()),
        lag=draw(st.integers(0, 3)),
        clip=draw(st.booleans()),
        ties=tuple(sorted(ties)),
        draws=draw(st.booleans()),
        foretold=draw(st.booleans()),
        whole=tuple(sorted({stage for pair in ties for stage in pair})),
        begun=draw(st.integers(0, 1)) if schedule == "2bw" else 0,
        follows=draw(st.booleans()),
    )


pipelines = pipelines_of(stages=5, steps=4, micros=7)
small_pipelines = pipelines_of(stages=3, steps=3, micros=4)


def units_of(pipeline: Pipeline, stage: int) -> list[Action]:
    units = (Op.F, Op.B, Op.I, Op.W)
    return [action for action in pipeline.program().devices[stage] if action.op in units]


def replay_of(pipeline: Pipeline, program: Program | None = None, message_s: float = 0.0):
    shards = tuple(make_shard(stage) for stage in range(pipeline.stages))
    run = Run(
        program=program or pipeline.program(),
        costs={0: JobCosts(shards=shards)},
        devices=tuple(range(pipeline.stages)),
    )
    last = pipeline.stages - 1

    def seconds(action: Action) -> Seconds | None:
        first = FORWARD_S if action.shard == last or pipeline.recompute else 0.0
        known = {
            Op.F: FORWARD_S,
            Op.I: first + INPUTS_S,
            Op.W: WEIGHTS_S,
            Op.B: first + INPUTS_S + WEIGHTS_S,
            Op.STEP: STEP_S,
            Op.SEND: message_s,
        }
        found = known.get(action.op)
        return None if found is None else Seconds(found)

    return replay([run], durations=seconds)


# Generated programs


@quick
@given(pipelines)
def test_a_generated_pipeline_passes_the_checker(pipeline):
    assert len(check_pipeline(pipeline, pipeline.program())) == pipeline.stages


@quick
@given(pipelines)
def test_a_pipeline_reads_back_from_its_text(pipeline):
    assert parse_program(str(pipeline.program())) == pipeline.program()


@quick
@given(pipelines)
def test_every_stage_runs_each_micro_batch_forward_once_before_its_backward(pipeline):
    for stage in range(pipeline.stages):
        units = units_of(pipeline, stage)
        forwards = [a.micro for a in units if a.op is Op.F]
        backwards = [a.micro for a in units if a.op in (Op.B, Op.I)]
        all_ = list(range(pipeline.num_micros))
        assert backwards == all_
        assert forwards == ([] if stage == pipeline.stages - 1 else all_)
        assert [a.micro for a in units if a.op is Op.W] in ([], all_)
        for micro in forwards:
            first = next(i for i, a in enumerate(units) if a.micro == micro)
            assert units[first].op is Op.F


@quick
@given(pipelines)
def test_a_micro_batch_has_one_version_at_every_stage(pipeline):
    for action in pipeline.program():
        if action.op in (Op.F, Op.B, Op.I, Op.W):
            step = pipeline.group_of(action.micro)
            stale = pipeline.schedule == "2bw"
            assert action.version == (max(step - 1, 0) if stale else step)


@quick
@given(pipelines)
def test_1f1b_holds_no_more_than_its_bound(pipeline):
    depth, most = pipeline.stages, max(pipeline.groups)
    for stage in range(depth):
        held, peak = set(), 0
        for action in units_of(pipeline, stage):
            held.add(action.micro)
            peak = max(peak, len(held))
            if action.op in (Op.B, Op.W):
                held.discard(action.micro)
        limits = {
            "naive": 1,
            "gpipe": most,
            "flush": min(most, depth - stage + min(pipeline.lag, depth - 1 - stage)),
            "zb-h1": min(most, depth),
            "2bw": depth - stage + min(pipeline.lag, depth - 1 - stage),
        }
        assert peak <= pipeline.bound(stage) <= limits[pipeline.schedule]


@quick
@given(pipelines)
def test_a_replay_computes_every_action_once(pipeline):
    timeline = replay_of(pipeline)
    spans = sorted(str(span.action) for span in timeline.spans)
    assert spans == sorted(map(str, pipeline.program()))
    busy = [timeline.busy_s.get((s, "compute"), 0.0) for s in range(pipeline.stages)]
    assert max(busy) <= timeline.makespan_s + 1e-9 <= sum(busy) + 2e-9


# On paper


def times_of(stages, micro_batches, steps=10):
    plain = {"stages": stages, "groups": (micro_batches,) * steps}
    return {s: replay_of(Pipeline(schedule=s, **plain)).makespan_s for s in SCHEDULES}


@pytest.mark.sample(1)
@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("times", [1, 2, 4])
def test_each_schedule_takes_the_time_of_its_formula(stages, times):
    """f = b = w = 1: the bubbles of the papers, with the step at the end of the last stage."""
    micros, steps = stages * times, 10
    found, one = times_of(stages, micros, steps), FORWARD_S + INPUTS_S + WEIGHTS_S
    flush = (micros + stages - 1) * one + STEP_S
    half = micros * one + (stages - 1) * (FORWARD_S + INPUTS_S - WEIGHTS_S) + STEP_S
    assert found["naive"] == pytest.approx(steps * (micros * stages * one + STEP_S), rel=1e-9)
    assert found["gpipe"] == found["flush"] == pytest.approx(steps * flush, rel=1e-9)
    assert found["zb-h1"] == pytest.approx(steps * half, rel=1e-9)
    steady = steps * (micros * one + STEP_S)
    assert steady <= found["2bw"] <= steady + 2 * stages * one


def test_running_ahead_hides_what_messages_take():
    plain = {"schedule": "2bw", "stages": 4, "groups": (8,) * 10}
    free = replay_of(Pipeline(**plain)).makespan_s
    slow = replay_of(Pipeline(**plain), message_s=0.3).makespan_s
    ahead = replay_of(Pipeline(**plain, lag=3), message_s=0.3).makespan_s
    assert slow > 1.1 * free
    assert ahead < 1.03 * free


@pytest.mark.parametrize("schedule", ["flush", "zb-h1"])
def test_a_short_group_slows_no_other_one(schedule):
    plain = {"schedule": schedule, "stages": 4}
    whole = replay_of(Pipeline(**plain, groups=(8,) * 4)).makespan_s
    mixed = replay_of(Pipeline(**plain, groups=(8, 1) * 4)).makespan_s
    short = replay_of(Pipeline(**plain, groups=(1,) * 4)).makespan_s
    assert mixed <= whole + short + 1e-9


def test_clipping_costs_two_versions_no_flush():
    plain = {"schedule": "2bw", "stages": 4, "groups": (4,) * 10}
    free, clipped = (replay_of(Pipeline(**plain, clip=c)).makespan_s for c in (False, True))
    assert clipped < 1.02 * free


# What the checker lets pass gives the same weights


class _Paper:
    """A pipeline run on symbols: values are the expressions that made them.

    Devices run in turn, each as far as its messages are there. Knows no rule.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline, self.last = pipeline, pipeline.stages - 1
        depth = range(pipeline.stages)
        self.chained = pipeline.draws and not pipeline.foretold
        self.weights: list[dict[int, Any]] = [{0: ("W", s)} for s in depth]
        self.borrowed: list[dict[Any, Any]] = [{} for _ in depth]
        self.grads: list[dict[int, Any]] = [{} for _ in depth]
        self.made: list[dict[Any, Any]] = [{} for _ in depth]
        self.factor: list[dict[int, Any]] = [{} for _ in depth]
        self.norms: dict[Any, Any] = {}
        self.rng: list[Any] = ["start"] * pipeline.stages
        self.queues: dict[Any, list[Any]] = {}

    def run(self, program: Program) -> Any:
        heads = [0] * len(program.devices)
        moved = True
        while moved:
            moved = False
            for device, actions in enumerate(program.devices):
                while heads[device] < len(actions) and self.act(device, actions[heads[device]]):
                    heads[device] += 1
                    moved = True
        return [heads == [len(a) for a in program.devices], self.weights]

    def act(self, s: int, a: Action) -> bool:
        kind = a.parts[0] if a.parts and a.op in (Op.SEND, Op.RECV) else None
        if a.op is Op.SEND:
            self.queues.setdefault((s, a.peer, kind), []).append(self.value(s, a, kind))
        elif a.op is Op.RECV:
            queue = self.queues.get((a.peer, s, kind))
            if not queue:
                return False
            self.take(s, a, kind, queue.pop(0))
        elif a.op is Op.SYNC:
            mine = {(0, a.version): self.grads[0].get(a.version)}
            norms = {key: value for key, value in self.norms.items() if key[1] == a.version}
            self.factor[s][a.version] = tuple(sorted((norms | mine).items()))
        elif a.op is Op.STEP:
            self.step(s, a)
        else:
            self.unit(s, a)
        return True

    def value(self, s: int, a: Action, kind: Any) -> Any:
        if kind is Part.NORM:
            step = (s, a.version)
            mine = (step, self.grads[s].get(a.version))
            return (self.factor[s].get(a.version) if s == 0 else mine, a)
        if kind is Part.PARAM:
            return (self.weights[s].get(a.version), a)
        if kind is Part.RNG:
            return (self.rng[s], a)
        return (self.made[s].get((kind, a.shard, a.micro)), a)

    def take(self, s: int, a: Action, kind: Any, sent: Any) -> None:
        value, said = sent
        if (said.shard, said.micro, said.version) != (a.shard, a.micro, a.version):
            value = ("wrong", value)
        if kind is Part.NORM and s == 0:
            self.norms[value[0]] = value
        elif kind is Part.NORM:
            self.factor[s][a.version] = value
        elif kind is Part.PARAM:
            self.borrowed[s][a.peer, a.version] = value
        elif kind is Part.RNG:
            self.rng[s] = value
        else:
            self.made[s][kind, a.shard, a.micro] = value

    def unit(self, s: int, a: Action) -> None:
        into, made = (None, s, a.micro), self.made[s]
        lenders = [owner for owner, borrower in self.pipeline.ties if borrower == s]
        lent = tuple(self.borrowed[s].get((o, a.version), ("W", o, 0)) for o in lenders)
        weights = (self.weights[s].get(a.version), lent if a.version else ())
        runs_forward = a.op is Op.F or (a.op in (Op.B, Op.I) and s == self.last)
        if runs_forward:
            begun = self.rng[0] if s == 0 else (made.get(into) or (None, None))[-1]
            self.rng[s] = ("drawn", s, a.micro, begun if self.chained else None)
            made["forward", s, a.micro] = (weights, made.get(into), self.rng[s])
            made[None, s + 1, a.micro] = (made["forward", s, a.micro], self.rng[s])
        if a.op in (Op.B, Op.I):
            back = made.get((Part.GRAD, s + 1, a.micro))
            made[Part.GRAD, s, a.micro] = ("B", weights, made.get(("forward", s, a.micro)), back)
        if a.op in (Op.B, Op.W):
            group = self.pipeline.group_of(a.micro)
            whole = made.get((Part.GRAD, s, a.micro))
            self.grads[s][group] = (*self.grads[s].get(group, ()), (weights, whole))

    def step(self, s: int, a: Action) -> None:
        factor = self.factor[s].get(a.version) if self.pipeline.clip else None
        used = (self.weights[s].get(a.version), self.grads[s].pop(a.version, None), factor)
        self.weights[s][a.version + 1] = ("after", hash(repr(used)))
        self.weights[s].pop(a.version + 1 - self.pipeline.versions, None)


def result_of(pipeline, program):
    return repr(_Paper(pipeline).run(program))


def passes(pipeline, program):
    try:
        check_pipeline(pipeline, program)
    except ProgramError:
        return False
    return True


def _change(program: Program, device: int, actions: list[Action]) -> Program:
    devices = list(program.devices)
    devices[device] = tuple(actions)
    return Program(tuple(devices))


@settings(max_examples=40, deadline=None)
@given(small_pipelines)
def test_a_pipeline_without_one_action_is_refused(pipeline):
    program = pipeline.program()
    for device, actions in enumerate(program.devices):
        for index, action in enumerate(actions):
            without = _change(program, device, [*actions[:index], *actions[index + 1 :]])
            assert not passes(pipeline, without), f"without {action} at {index} of {device}"


@settings(max_examples=100, deadline=None)
@given(small_pipelines, st.data())
def test_moving_an_action_is_refused_or_changes_no_weight(pipeline, data):
    program = pipeline.program()
    right = result_of(pipeline, program)
    device = data.draw(st.integers(0, pipeline.stages - 1), "device")
    actions = list(program.devices[device])
    for _ in range(data.draw(st.integers(1, 2), "moves")):
        moved = actions.pop(data.draw(st.integers(0, len(actions) - 1), "from"))
        actions.insert(data.draw(st.integers(0, len(actions)), "to"), moved)
    changed = _change(program, device, actions)
    if passes(pipeline, changed):
        assert result_of(pipeline, changed) == right


@settings(max_examples=100, deadline=None)
@given(small_pipelines, st.data())
def test_another_version_or_micro_batch_is_refused(pipeline, data):
    program = pipeline.program()
    device = data.draw(st.integers(0, pipeline.stages - 1), "device")
    actions = list(program.devices[device])
    index = data.draw(st.integers(0, len(actions) - 1), "action")
    action = actions[index]
    which = data.draw(
        st.sampled_from(["version", "micro"] if action.micro is not None else ["version"])
    )
    changed = dataclasses.replace(action, **{which: getattr(action, which) + 1})
    actions[index] = changed
    assert not passes(pipeline, _change(program, device, actions)), f"{action} as {changed}"


@settings(max_examples=60, deadline=None)
@given(small_pipelines)
def test_the_right_program_computes_what_one_process_would(pipeline):
    """Whatever the schedule: the weights depend on the rule alone, not on the order of actions."""
    other = dataclasses.replace(pipeline, lag=0, recompute=False)
    assert result_of(pipeline, pipeline.program()) == result_of(other, other.program())
    if pipeline.versions == 1:
        naive = dataclasses.replace(other, schedule="naive")
        assert result_of(naive, naive.program()) == result_of(other, other.program())
