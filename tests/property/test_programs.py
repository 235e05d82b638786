"""Properties of every generated program, and of what the checker lets pass."""

import dataclasses
from collections.abc import Hashable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ProgramError
from shoal.core.spec import ShardSpec
from shoal.program.check import check
from shoal.program.costs import JobCosts, unit_peak_bytes
from shoal.program.ir import Action, Op, Part, Program, parse_program, single
from shoal.program.replay import Run, replay
from shoal.program.slots import assign_slots, is_unit
from shoal.spill.generate import evaluation, resident_step, spilled_step

quick = settings(max_examples=60, deadline=None)
RESIDENT = (Part.PARAM, Part.STATE)


@dataclasses.dataclass(frozen=True)
class Shape:
    """The arguments of a generated step."""

    num_shards: int
    micro_batches: int
    clip: bool
    place: str
    lookahead: int

    @property
    def program(self) -> Program:
        return spilled_step(
            self.num_shards,
            micro_batches=self.micro_batches,
            clip=self.clip,
            optimizer=self.place,
            lookahead=self.lookahead,
        )


shapes = st.builds(
    Shape,
    num_shards=st.integers(1, 6),
    micro_batches=st.integers(1, 4),
    clip=st.booleans(),
    place=st.sampled_from(["device", "host"]),
    lookahead=st.integers(0, 3),
)
small_shapes = st.builds(
    Shape,
    num_shards=st.integers(1, 3),
    micro_batches=st.integers(1, 2),
    clip=st.booleans(),
    place=st.sampled_from(["device", "host"]),
    lookahead=st.integers(0, 2),
)
sizes = st.integers(0, 10**6)


@st.composite
def costs_of(draw, num_shards):
    shards = []
    for index in range(num_shards):
        numbers = {
            field.name: draw(sizes)
            for field in dataclasses.fields(ShardSpec)
            if field.name.endswith("_bytes")
        }
        seconds = {name: draw(st.floats(0, 10)) for name in ("forward_s", "backward_s", "step_s")}
        shards.append(ShardSpec(index=index, layers=(index, index + 1), **numbers, **seconds))
    speeds = st.floats(1e4, 1e7)
    return {
        0: JobCosts(
            shards=tuple(shards),
            batch_bytes=draw(sizes),
            up_bytes_per_s=draw(speeds),
            down_bytes_per_s=draw(speeds),
        )
    }


@st.composite
def shapes_with_costs(draw):
    shape = draw(shapes)
    return shape, draw(costs_of(shape.num_shards))


def simple_costs(num_shards):
    names = [f.name for f in dataclasses.fields(ShardSpec) if f.name.endswith("_bytes")]
    numbers = dict.fromkeys(names, 1)
    shards = [ShardSpec(index=i, layers=(i, i + 1), **numbers) for i in range(num_shards)]
    return {0: JobCosts(shards=tuple(shards))}


# Generated programs


@quick
@given(shapes_with_costs())
def test_a_generated_step_passes_the_checker_within_its_slots(case):
    shape, costs = case
    footprint = check(shape.program, costs)
    assert footprint.num_slots <= shape.lookahead + 1
    assert footprint.peak_bytes == max(footprint.running_bytes)
    assert footprint.peak_bytes <= footprint.held_bytes + footprint.unit_bytes
    assert len(footprint.running_bytes) == len(shape.program.devices[0])


@quick
@given(shapes_with_costs())
def test_only_the_peak_inside_a_unit_is_above_what_is_held(case):
    shape, costs = case
    footprint = check(shape.program, costs)
    for action, running in zip(shape.program, footprint.running_bytes, strict=True):
        peak = unit_peak_bytes(action, costs[0].shards[action.shard])
        assert running - peak <= footprint.held_bytes


@quick
@given(shapes)
def test_every_store_of_gradients_outside_the_slots_is_waited_for_or_left_to_the_next(shape):
    actions = shape.program.devices[0]
    slots = assign_slots(actions)
    outside = {
        index
        for index, action in enumerate(actions)
        if action.op is Op.STORE and slots.slots[index] is None
    }
    waited = {
        i for index, action in enumerate(actions) if is_unit(action) for i in slots.waits[index]
    }
    assert waited | set(slots.stores_left) == outside
    assert not waited & set(slots.stores_left)


@quick
@given(shapes)
def test_a_program_reads_back_from_its_text(shape):
    assert parse_program(str(shape.program)) == shape.program


@quick
@given(shapes)
def test_every_micro_batch_has_two_units_a_shard_less_one(shape):
    units = [action for action in shape.program if action.op in (Op.F, Op.B)]
    assert len(units) == (2 * shape.num_shards - 1) * shape.micro_batches


@quick
@given(shapes_with_costs())
def test_the_bytes_moved_are_those_of_the_formula(case):
    shape, costs = case
    shards, micros = costs[0].shards, shape.micro_batches
    params = sum(s.parameter_bytes for s in shards)
    states = sum(s.state_bytes for s in shards)
    gradients = sum(s.gradient_bytes for s in shards)
    updated = sum(s.owned_bytes for s in shards) + states
    up = micros * (2 * params - shards[-1].parameter_bytes) + (micros - 1) * gradients
    down = micros * gradients
    if shape.place == "device":
        up += states + (params + gradients if shape.clip else 0)
        down += updated - (0 if shape.clip else gradients)
    footprint = check(shape.program, costs)
    assert (footprint.up_bytes, footprint.down_bytes) == (up, down)


@quick
@given(st.integers(1, 8), st.integers(0, 3))
def test_an_evaluation_passes_the_checker(num_shards, lookahead):
    program = evaluation(num_shards, spilled=True, lookahead=lookahead)
    assert check(program, simple_costs(num_shards)).num_slots <= lookahead + 1


@quick
@given(st.integers(1, 4), st.booleans())
def test_a_resident_step_passes_the_checker(micro_batches, clip):
    program = resident_step(micro_batches=micro_batches, clip=clip)
    check(program, simple_costs(1), start=RESIDENT, end=RESIDENT)


# What the checker lets pass gives the same weights


class _Paper:
    """A program run on symbols, in list order: values are the expressions that made them.

    Knows no rule. What is missing reads as None, so a program that reads what is not
    there, or steps without a gradient, ends with other values than the right one.
    """

    def __init__(self, num_shards: int, resident: bool) -> None:
        self.last = num_shards - 1
        self.home: dict[tuple[int, Part], Any] = {
            (s, part): (part, s) for s in range(num_shards) for part in RESIDENT
        }
        self.device: dict[tuple[int, Part], Any] = dict(self.home) if resident else {}
        self.tensors: dict[Hashable, Any] = {}
        self.norm: Any = None

    def run(self, program: Program) -> dict[tuple[int, Part], Any]:
        for action in program:
            self.act(action)
        return {**self.home, **self.device}

    def act(self, action: Action) -> None:
        shard, micro = action.shard, action.micro
        keys = [(shard, part) for part in action.parts]
        if action.op is Op.LOAD:
            self.device.update({key: self.home.get(key) for key in keys})
        elif action.op is Op.STORE:
            self.home.update({key: self.device.get(key) for key in keys})
        elif action.op is Op.DROP:
            for key in keys:
                self.device.pop(key, None)
        elif action.op is Op.SYNC:
            both = {**self.home, **self.device}
            self.norm = tuple(both.get((s, Part.GRAD)) for s in range(self.last + 1))
        elif action.op is Op.STEP:
            self.step(self.device if action.place == "device" else self.home, shard)
        else:
            self.unit(action.op, shard, micro)

    def unit(self, op: Op, shard: int, micro: int | None) -> None:
        weights = self.device.get((shard, Part.PARAM))
        boundary = self.tensors.get(("boundary", shard, micro))
        if op is Op.F:
            self.tensors["boundary", shard + 1, micro] = (weights, boundary)
            return
        carry = self.tensors.get(("carry", shard + 1, micro))
        self.tensors["carry", shard, micro] = made = ("B", weights, boundary, carry, micro)
        earlier = self.device.get((shard, Part.GRAD), ())
        self.device[shard, Part.GRAD] = (*(earlier or ()), made)

    def step(self, memory: dict[tuple[int, Part], Any], shard: int) -> None:
        used = tuple(memory.get((shard, part)) for part in Part)
        for part in RESIDENT:
            memory[shard, part] = (part, "after", used, self.norm)
        for place in (self.device, self.home):
            place.pop((shard, Part.GRAD), None)


def result_of(program, num_shards, resident=False):
    return repr(sorted(_Paper(num_shards, resident).run(program).items()))


def passes(program, num_shards):
    try:
        check(program, simple_costs(num_shards))
    except ProgramError:
        return False
    return True


@settings(max_examples=40, deadline=None)
@given(small_shapes)
def test_a_program_without_one_action_is_refused(shape):
    actions = shape.program.devices[0]
    for index, action in enumerate(actions):
        without = single(actions[:index] + actions[index + 1 :])
        if _is_another_legal_program(shape, action):
            continue
        assert not passes(without, shape.num_shards), f"without {action} at {index}"


def _is_another_legal_program(shape: Shape, action: Action) -> bool:
    """Without its SYNC a step is one that does not clip; one shard may skip a batch."""
    return action.op is Op.SYNC or (action.op is Op.B and shape.num_shards == 1)


@settings(max_examples=40, deadline=None)
@given(small_shapes)
def test_swapping_neighbours_is_refused_or_changes_no_weight(shape):
    actions = shape.program.devices[0]
    right = result_of(shape.program, shape.num_shards)
    for index in range(len(actions) - 1):
        swapped = list(actions)
        swapped[index : index + 2] = reversed(actions[index : index + 2])
        program = single(swapped)
        if passes(program, shape.num_shards):
            assert result_of(program, shape.num_shards) == right, f"swapped at {index}"


@settings(max_examples=150, deadline=None)
@given(small_shapes, st.data())
def test_moving_an_action_is_refused_or_changes_no_weight(shape, data):
    actions = list(shape.program.devices[0])
    right = result_of(shape.program, shape.num_shards)
    for _ in range(data.draw(st.integers(1, 3), "moves")):
        moved = actions.pop(data.draw(st.integers(0, len(actions) - 1), "from"))
        actions.insert(data.draw(st.integers(0, len(actions)), "to"), moved)
    if passes(single(actions), shape.num_shards):
        assert result_of(single(actions), shape.num_shards) == right


@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize("place", ["device", "host"])
def test_lookahead_changes_no_weight(place, lookahead):
    shape = Shape(3, 2, True, place, lookahead)
    assert result_of(shape.program, 3) == result_of(Shape(3, 2, True, place, 0).program, 3)


def test_device_and_host_step_give_the_same_weights():
    results = {result_of(Shape(3, 2, True, place, 1).program, 3) for place in ("device", "host")}
    assert len(results) == 1


# Replay


@settings(max_examples=40, deadline=None)
@given(shapes_with_costs(), st.integers(1, 3), st.integers(1, 3))
def test_the_makespan_lies_between_the_busiest_resource_and_the_sum(case, trials, steps):
    shape, costs = case
    run = Run(program=shape.program, costs=costs, steps=steps)
    timeline = replay([run] * trials)
    shared = [busy for (_, stream), busy in timeline.busy_s.items() if stream != "host"]
    total = sum(timeline.busy_s.values())
    assert max(shared) <= timeline.makespan_s * (1 + 1e-9)
    assert timeline.makespan_s <= total * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(shapes_with_costs(), st.integers(1, 3))
def test_a_replay_moves_the_bytes_of_the_footprint(case, steps):
    shape, costs = case
    footprint = check(shape.program, costs)
    timeline = replay([Run(program=shape.program, costs=costs, steps=steps)])
    assert timeline.up_bytes == steps * footprint.up_bytes == _moved(timeline, "up")
    assert timeline.down_bytes == steps * footprint.down_bytes == _moved(timeline, "down")


def _moved(timeline, stream):
    return sum(span.moved for span in timeline.spans if span.stream == stream)


@settings(max_examples=40, deadline=None)
@given(shapes_with_costs(), st.integers(1, 3), st.data())
def test_whatever_is_chosen_every_action_runs_once_a_step(case, trials, data):
    shape, costs = case

    def anyone(ready):
        return data.draw(st.integers(0, len(ready) - 1))

    run = Run(program=shape.program, costs=costs)
    timed = [action for action in shape.program if action.op is not Op.DROP]
    spans = replay([run] * trials, choose=anyone).spans
    assert sorted(span.action for span in spans) == sorted(timed * trials)


@settings(max_examples=40, deadline=None)
@given(shapes_with_costs(), st.integers(1, 3))
def test_no_two_spans_of_a_resource_overlap(case, trials):
    shape, costs = case
    spans = replay([Run(program=shape.program, costs=costs, steps=2)] * trials).spans
    for stream in ("compute", "up", "down"):
        ends = 0.0
        for span in (span for span in spans if span.stream == stream):
            assert span.start_s >= ends
            ends = span.end_s
