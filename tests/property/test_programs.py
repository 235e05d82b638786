"""Properties of every generated program, and of what the checker lets pass."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Hashable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ProgramError
from shoal.core.spec import ShardSpec
from shoal.program.check import check
from shoal.program.costs import Costs, JobCosts, action_seconds, unit_peak_bytes
from shoal.program.footprint import Footprint
from shoal.program.ir import (
    Action,
    Kept,
    Op,
    Part,
    Program,
    kept,
    lone_part,
    parse_program,
    single,
)
from shoal.program.replay import Run, replay
from shoal.program.slots import assign_slots, is_unit
from shoal.spill.generate import (
    Route,
    arrival,
    departure,
    kept_of,
    resident_step,
)

quick = settings(max_examples=60, deadline=None)
NUMBERS = [field.name for field in dataclasses.fields(ShardSpec) if field.name.endswith("_bytes")]
RESIDENT = {0: (Part.PARAM, Part.STATE)}


@dataclasses.dataclass(frozen=True)
class Shape:
    """The arguments of a generated step."""

    num_shards: int
    micro_batches: int
    clip: bool
    place: str
    lookahead: int
    keep: tuple[int, ...] = ()
    order: str = "micro"
    weights: tuple[int, ...] = ()
    boundaries: str = "device"
    saves: tuple[int, ...] = ()
    spills: tuple[int, ...] = ()
    turn: tuple[int, ...] = ()
    waits: tuple[int, ...] = ()
    lookbehind: int = 1
    heads: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    frozen: int = 0

    @property
    def route(self) -> Route:
        return Route(
            self.num_shards,
            optimizer=self.place,
            lookahead=self.lookahead,
            keep=self.keep,
            order=self.order,
            weights=self.weights,
            boundaries=self.boundaries,
            saves=self.saves,
            spills=self.spills,
            turn=self.turn,
            waits=self.waits,
            lookbehind=self.lookbehind,
            late=self.late,
            frozen=self.frozen,
        )

    @property
    def kept(self) -> Kept:
        return kept(self.keep, self.weights, self.heads)

    def check(self, costs: Costs) -> Footprint:
        return check(self.program, costs, start=self.kept, end=self.kept)

    @property
    def program(self) -> Program:
        return self.route.step(self.micro_batches, self.clip)


@st.composite
def shapes_of(draw, *, shards, micros, lookahead, freezes=False):
    num_shards = draw(st.integers(1 + freezes, shards))
    some = st.sets(st.integers(0, num_shards - 1))
    keep = draw(some)
    place = draw(st.sampled_from(["device", "host"]))
    weights = draw(some) - keep if place == "device" else ()
    shape = Shape(
        num_shards=num_shards,
        micro_batches=draw(st.integers(1, micros)),
        clip=draw(st.booleans()),
        place=place,
        lookahead=draw(st.integers(0, lookahead)),
        keep=tuple(sorted(keep)),
        weights=tuple(sorted(weights)),
        order=draw(st.sampled_from(["micro", "shard"])),
        boundaries=draw(st.sampled_from(["device", "host"])),
        lookbehind=draw(st.integers(0, 1)),
        frozen=draw(st.integers(1, num_shards - 1)) if freezes else 0,
    )
    travel = sorted(set(range(num_shards)) - keep - set(weights))
    turn = draw(st.sets(st.sampled_from(travel))) if travel and place == "host" else ()
    waits = draw(some) - keep if place == "device" else ()
    shape = dataclasses.replace(shape, turn=tuple(sorted(turn)), waits=tuple(sorted(waits)))
    heads = draw(some) - keep if place == "device" else ()
    shape = dataclasses.replace(shape, heads=tuple(sorted(heads)))
    late = draw(st.sets(st.sampled_from(sorted(weights)))) if weights else ()
    shape = dataclasses.replace(shape, late=tuple(sorted(late)))
    able = shape.route.may_save
    saves = draw(st.sets(st.sampled_from(able))) if able else ()
    able = sorted(set(shape.route.may_spill) - set(saves))
    spills = draw(st.sets(st.sampled_from(able))) if able else ()
    return dataclasses.replace(shape, saves=tuple(sorted(saves)), spills=tuple(sorted(spills)))


shapes = shapes_of(shards=6, micros=4, lookahead=3)
small_shapes = shapes_of(shards=3, micros=2, lookahead=2)
frozen_shapes = shapes_of(shards=6, micros=3, lookahead=3, freezes=True)
small_frozen_shapes = shapes_of(shards=3, micros=2, lookahead=2, freezes=True)
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
        numbers["backward_peak_bytes"] += numbers["saved_bytes"]
        numbers["movable_bytes"] = min(numbers["movable_bytes"], numbers["saved_bytes"])
        numbers["private_bytes"] = min(numbers["private_bytes"], numbers["boundary_bytes"])
        numbers["head_bytes"] = 0
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
def shapes_with_costs(draw, shapes=shapes):
    shape = draw(shapes)
    costs = draw(costs_of(shape.num_shards))
    return shape, {0: dataclasses.replace(costs[0], shards=_with_heads(shape, costs[0].shards))}


def _with_heads(shape, shards):
    """Of a shard's parameters, or where those stay of its state, two thirds."""
    made = list(shards)
    for shard in shape.heads:
        is_state = shard in shape.weights
        bytes_ = made[shard].state_bytes if is_state else made[shard].owned_bytes
        whole = max(made[shard].parameter_bytes, made[shard].owned_bytes)
        made[shard] = dataclasses.replace(
            made[shard],
            parameter_bytes=whole,
            head_bytes=2 * bytes_ // 3,
            head_of_state=is_state,
        )
    return tuple(made)


def freezing(shape, costs):
    """The same costs with the first shards frozen."""
    shards = [
        dataclasses.replace(s, frozen=True, gradient_bytes=0) if s.index < shape.frozen else s
        for s in costs[0].shards
    ]
    return {0: dataclasses.replace(costs[0], shards=tuple(shards))}


def simple_costs(num_shards):
    names = [f.name for f in dataclasses.fields(ShardSpec) if f.name.endswith("_bytes")]
    numbers = dict.fromkeys(names, 1) | {"head_bytes": 0}
    shards = [ShardSpec(index=i, layers=(i, i + 1), **numbers) for i in range(num_shards)]
    return {0: JobCosts(shards=tuple(shards))}


# Generated programs


@quick
@given(shapes_with_costs())
def test_a_generated_step_passes_the_checker_within_its_slots(case):
    shape, costs = case
    footprint = shape.check(costs)
    assert footprint.num_slots <= shape.lookahead + 1
    assert footprint.peak_bytes == max(footprint.running_bytes)
    assert footprint.peak_bytes <= footprint.held_bytes + footprint.unit_bytes
    assert len(footprint.running_bytes) == len(shape.program.devices[0])


@quick
@given(shapes_with_costs())
def test_only_the_peak_inside_a_unit_is_above_what_is_held(case):
    shape, costs = case
    footprint = shape.check(costs)
    for action, running in zip(shape.program, footprint.running_bytes, strict=True):
        peak = unit_peak_bytes(action, costs[0].shards[action.shard])
        assert running - peak <= footprint.held_bytes


@quick
@given(shapes_with_costs())
def test_where_all_that_travel_have_memory_of_their_own_there_are_no_slots(case):
    shape, costs = case
    travel = tuple(shard for shard in range(shape.num_shards) if shard not in shape.keep)
    nothing = dict.fromkeys(("weights", "waits", "heads", "late", "saves", "spills"), ())
    shape = dataclasses.replace(shape, place="host", micro_batches=1, **nothing)
    slotted = dataclasses.replace(shape, turn=travel[: -1 - shape.lookahead])
    alone = dataclasses.replace(shape, turn=travel)
    whole = (dataclasses.replace(s, head_bytes=0) for s in costs[0].shards)
    costs = {0: dataclasses.replace(costs[0], shards=tuple(whole))}
    before, after = slotted.check(costs), alone.check(costs)
    assert after.num_slots == 0
    assert after.peak_bytes <= before.peak_bytes
    assert (after.up_bytes, after.down_bytes) == (before.up_bytes, before.down_bytes)
    tested = check(alone.route.evaluation(), costs, start=alone.kept, end=alone.kept)
    assert tested.num_slots == 0


@quick
@given(shapes)
def test_every_store_of_gradients_outside_the_slots_is_waited_for_or_left_to_the_next(shape):
    actions = shape.program.devices[0]
    slots = assign_slots(actions, start=shape.kept)
    outside = {
        index
        for index, action in enumerate(actions)
        if action.op is Op.STORE and slots.slots[index] is None and Part.STATE not in action.parts
    }
    waited = {
        i for index, action in enumerate(actions) if is_unit(action) for i in slots.waits[index]
    }
    late = {action.shard for action in actions if action.late}
    steps = [i for i, a in enumerate(actions) if a.op is Op.STORE and Part.STATE in a.parts]
    steps = [index for index in steps if actions[index].shard in late]
    left = steps[len(steps) - slots.num_late :]  # what the late slots had in them last
    assert waited | set(slots.stores_left) == outside | set(left)
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
    micros = shape.micro_batches
    shards = [s for s in costs[0].shards if s.index not in shape.keep]
    loaded = [s for s in shards if s.index not in shape.weights]
    params = sum(s.parameter_bytes for s in loaded)
    states = sum(s.state_bytes for s in shards)
    gradients = sum(s.gradient_bytes for s in shards if s.index not in shape.waits)
    updated = sum(s.owned_bytes for s in loaded) + states
    last = costs[0].shards[-1]
    if shape.order == "shard":  # as if there were one
        micros = 1
    up = micros * (2 * params - last.parameter_bytes * (last in loaded)) + (micros - 1) * gradients
    up -= sum(costs[0].shards[shard].parameter_bytes for shard in _joins(shape))
    down = micros * gradients
    if shape.place == "device":
        up += states + (params + gradients if shape.clip else 0)
        down += updated - (0 if shape.clip else gradients)
    inputs = sum(costs[0].shards[shard].private_bytes for shard in shape.route.away)
    inputs += sum(costs[0].shards[shard].movable_bytes for shard in shape.spills)
    inputs *= shape.micro_batches
    heads = Counter(_moves_of_heads(shape))
    footprint = shape.check(costs)
    up -= sum(costs[0].shards[shard].head_bytes * n for (shard, way), n in heads.items() if way)
    down -= sum(
        costs[0].shards[shard].head_bytes * n for (shard, way), n in heads.items() if not way
    )
    assert (footprint.up_bytes, footprint.down_bytes) == (up + inputs, down + inputs)


def _moves_of_heads(shape):
    """The shards whose rest moves, and whether up: once for each time it does."""
    for action in shape.program:
        part = Part.STATE if action.shard in shape.weights else Part.PARAM
        if action.shard in shape.heads and part in action.parts and action.op is not Op.DROP:
            yield action.shard, action.op is Op.LOAD


def _joins(shape):
    """Shards whose parameters are still there when they are needed again."""
    visits = list(_visits(shape))
    for index, (shard, kind) in enumerate(visits):
        earlier = [i for i in range(index) if visits[i][0] == shard]
        if not earlier or shard in shape.weights:
            continue
        before = visits[earlier[-1]][1], visits[earlier[-1] + 1 : index]
        turns = shard in shape.turn and (before[0], kind) == ("F", "B")
        if turns or len({s for s, _ in before[1]}) <= shape.lookahead:
            yield shard


def _visits(shape):
    """The shards of all units for which something is loaded, in order, and what they do."""
    micros = shape.micro_batches if shape.order == "micro" else 1
    stay = shape.keep + shape.weights
    for micro in range(micros):
        yield from ((s, "F") for s in range(shape.num_shards - 1) if s not in stay)
        steps = micro == micros - 1 and not shape.clip and shape.place == "device"
        for shard in reversed(range(shape.num_shards)):
            gradients = micro > 0 and shard not in shape.waits
            state = steps and shard not in shape.late
            if shard not in shape.keep and (gradients or state or shard not in shape.weights):
                yield shard, "B and STEP" if steps else "B"
    if shape.clip and shape.place == "device":
        order = sorted(range(shape.num_shards), key=lambda shard: shard not in shape.waits)
        yield from ((shard, "STEP") for shard in order if shard not in stay)


@quick
@given(shapes_with_costs())
def test_a_kept_shard_moves_nothing_in_a_step(case):
    shape, costs = case
    moved = [a for a in shape.program if a.op in (Op.LOAD, Op.STORE, Op.DROP)]
    moved = [action for action in moved if lone_part(action) is None]
    assert not [action for action in moved if action.shard in shape.keep]
    of = costs[0].shards
    whole = sum(of[s].parameter_bytes + of[s].state_bytes for s in shape.keep)
    weights = sum(of[s].parameter_bytes for s in shape.weights)
    heads = sum(of[s].head_bytes for s in shape.heads)
    assert shape.check(costs).kept_bytes == whole + weights + heads
    params = [a for a in moved if Part.PARAM in a.parts]
    assert not [action for action in params if action.shard in shape.weights]


@quick
@given(shapes)
def test_what_is_kept_arrives_and_departs(shape):
    costs = simple_costs(shape.num_shards)
    kept_bytes = 2 * len(shape.keep) + len(shape.weights)
    here = (shape.keep, shape.weights, shape.heads)
    assert check(arrival(*here), costs, end=shape.kept).up_bytes == kept_bytes
    assert check(departure(*here), costs, start=shape.kept).down_bytes == kept_bytes


@quick
@given(shapes)
def test_a_group_of_unknown_size_is_micros_and_a_finish(shape):
    micros = [shape.route.micro(micro) for micro in range(shape.micro_batches)]
    whole = single(a for p in [*micros, shape.route.finish(shape.clip)] for a in p)
    check(whole, simple_costs(shape.num_shards), start=shape.kept, end=shape.kept)
    assert result_of(whole, shape) == result_of(shape.program, shape)


@quick
@given(shapes)
def test_what_lends_its_parameters_leaves_them_current_on_the_host(shape):
    route = dataclasses.replace(shape.route, lent=(0,))
    program = route.step(shape.micro_batches, shape.clip)
    check(program, simple_costs(shape.num_shards), start=shape.kept, end=shape.kept)
    paper = _Paper(shape)
    paper.run(program)
    newest = paper.device.get((0, Part.PARAM), paper.home[0, Part.PARAM])
    assert repr(paper.home[0, Part.PARAM]) == repr(newest)


@quick
@given(st.integers(1, 40), st.data())
def test_what_travels_is_spread_evenly_and_the_last_shard_first(num_shards, data):
    count = data.draw(st.integers(0, num_shards))
    keep = kept_of(num_shards, count)
    travel = [shard for shard in range(num_shards) if shard not in keep]
    assert len(keep) == count
    if travel:
        assert travel[-1] == num_shards - 1
        gaps = [b - a for a, b in itertools.pairwise([-1, *travel])]
        assert max(gaps) - min(gaps) <= 1


# Frozen shards


@quick
@given(shapes_with_costs(frozen_shapes))
def test_frozen_shards_go_forward_only_and_move_and_hold_no_more(case):
    shape, costs = case
    costs = freezing(shape, costs)
    found = shape.check(costs)
    units = [action for action in shape.program if action.op is not Op.F and is_unit(action)]
    assert min(action.shard for action in units if action.op is not Op.SYNC) == shape.frozen
    forwards = Counter(a.shard for a in shape.program if a.op is Op.F)
    assert all(forwards[shard] == shape.micro_batches for shard in range(shape.frozen))
    assert found.peak_bytes <= found.held_bytes + found.unit_bytes

    # of several micro-batches a shard may stay from its backward to the next one's forward
    one, back = (dataclasses.replace(shape, micro_batches=1, frozen=n) for n in (shape.frozen, 0))
    assert one.check(costs).up_bytes <= back.check(costs).up_bytes
    assert one.check(costs).down_bytes <= back.check(costs).down_bytes


def test_what_is_loaded_for_a_step_is_beside_the_gradients_of_the_one_before():
    """Frozen shards in memory of their own, while the last gradients are on their way."""
    shape = Shape(3, 1, False, "host", 0, turn=(0, 1, 2), frozen=2)
    costs = freezing(shape, simple_costs(3))
    shards = [
        dataclasses.replace(s, **(dict.fromkeys(NUMBERS, 0) | {"parameter_bytes": size}))
        for s, size in zip(costs[0].shards, (5, 7, 3), strict=True)
    ]
    shards[2] = dataclasses.replace(shards[2], gradient_bytes=100)
    found = shape.check({0: dataclasses.replace(costs[0], shards=tuple(shards))})
    first = next(i for i, action in enumerate(shape.program) if is_unit(action))
    assert [str(action) for action in list(shape.program)[:first]] == ["LOAD s0 param own"]
    assert found.running_bytes[0] == 5 + 100
    assert found.running_bytes[first] == 5
    assert found.held_bytes == 105


@quick
@given(frozen_shapes)
def test_frozen_shards_change_no_weight_behind_them(shape):
    shape = dataclasses.replace(shape, clip=False)  # whose norm is of all gradients
    unfrozen = dataclasses.replace(shape, frozen=0)
    one, other = (_Paper(s).run(s.program) for s in (shape, unfrozen))
    behind = [(s, part) for s in range(shape.frozen, shape.num_shards) for part in RESIDENT[0]]
    assert [repr(one[key]) for key in behind] == [repr(other[key]) for key in behind]
    assert [one[s, Part.PARAM] for s in range(shape.frozen)] == [
        (Part.PARAM, s) for s in range(shape.frozen)
    ]


@quick
@given(frozen_shapes)
def test_with_frozen_shards_too_a_group_of_unknown_size_is_micros_and_a_finish(shape):
    costs = freezing(shape, simple_costs(shape.num_shards))
    micros = [shape.route.micro(micro) for micro in range(shape.micro_batches)]
    whole = single(a for p in [*micros, shape.route.finish(shape.clip)] for a in p)
    check(whole, costs, start=shape.kept, end=shape.kept)
    assert result_of(whole, shape) == result_of(shape.program, shape)
    check(shape.route.evaluation(), costs, start=shape.kept, end=shape.kept)


@settings(max_examples=30, deadline=None)
@given(small_frozen_shapes)
def test_a_program_with_frozen_shards_without_one_action_is_refused(shape):
    costs = freezing(shape, simple_costs(shape.num_shards))
    actions = shape.program.devices[0]
    for index, action in enumerate(actions):
        if action.op is Op.SYNC or (action.op is Op.B and shape.frozen == shape.num_shards - 1):
            continue
        without = single(actions[:index] + actions[index + 1 :])
        with pytest.raises(ProgramError):
            check(without, costs, start=shape.kept, end=shape.kept)


@quick
@given(frozen_shapes)
def test_that_nothing_goes_backward_through_a_shard_that_is_trained_is_refused(shape):
    with pytest.raises(ProgramError):
        shape.check(simple_costs(shape.num_shards))


@quick
@given(st.integers(1, 8), st.integers(0, 3))
def test_an_evaluation_passes_the_checker(num_shards, lookahead):
    program = Route(num_shards, lookahead=lookahead).evaluation()
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

    def __init__(self, shape: Shape) -> None:
        self.last, self.spills = shape.num_shards - 1, shape.spills
        self.home: dict[tuple[int, Part], Any] = {
            (s, part): (part, s) for s in range(shape.num_shards) for part in RESIDENT[0]
        }
        self.device: dict[tuple[int, Part], Any] = {
            key: value for key, value in self.home.items() if key[1] in shape.kept.get(key[0], ())
        }
        self.tensors: dict[Hashable, Any] = {}
        self.away: dict[Hashable, Any] = {}
        self.norm: Any = None

    def run(self, program: Program) -> dict[tuple[int, Part], Any]:
        for action in program:
            self.act(action)
        return {**self.home, **self.device}

    def act(self, action: Action) -> None:
        shard, micro = action.shard, action.micro
        keys = [(shard, part) for part in action.parts]
        if (lone := lone_part(action)) is not None:
            self.move(action.op, (str(lone), shard, micro))
        elif action.op is Op.LOAD:
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
            self.unit(action.op, shard, micro, Part.SAVED in action.parts)

    def move(self, op: Op, boundary: Hashable) -> None:
        if op is Op.LOAD:
            self.tensors[boundary] = self.away.get(boundary)
        elif op is Op.STORE:
            self.away[boundary] = self.tensors.get(boundary)
        else:
            self.tensors.pop(boundary, None)

    def unit(self, op: Op, shard: int, micro: int | None, saves: bool) -> None:
        weights = self.device.get((shard, Part.PARAM))
        boundary = self.tensors.get(("boundary", shard, micro))
        if saves and op is Op.F:
            self.tensors["saved", shard, micro] = (weights, boundary)
        elif saves:  # what waited on the host finds parameters and inputs again where they are
            was = self.tensors.pop(("saved", shard, micro), (None, None))
            if shard not in self.spills:
                weights, boundary = was
            elif was != (weights, boundary):
                weights, boundary = None, None
        if op is Op.F:
            self.tensors["boundary", shard + 1, micro] = (weights, boundary)
            return
        carry = self.tensors.get(("carry", shard + 1, micro))
        self.tensors["carry", shard, micro] = made = ("B", weights, boundary, carry, micro)
        earlier = self.device.get((shard, Part.GRAD), ())
        self.device[shard, Part.GRAD] = (*(earlier or ()), made)

    def step(self, memory: dict[tuple[int, Part], Any], shard: int) -> None:
        used = tuple(memory.get((shard, part)) for part in (*RESIDENT[0], Part.GRAD))
        for part in RESIDENT[0]:
            memory[shard, part] = (part, "after", used, self.norm)
        for place in (self.device, self.home):
            place.pop((shard, Part.GRAD), None)


def result_of(program, shape):
    return repr(sorted(_Paper(shape).run(program).items()))


def passes(program, shape):
    try:
        check(program, simple_costs(shape.num_shards), start=shape.kept, end=shape.kept)
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
        assert not passes(without, shape), f"without {action} at {index}"


def _is_another_legal_program(shape: Shape, action: Action) -> bool:
    """Without its SYNC a step is one that does not clip; one shard may skip a batch."""
    return action.op is Op.SYNC or (action.op is Op.B and shape.num_shards == 1)


@settings(max_examples=40, deadline=None)
@given(small_shapes)
def test_swapping_neighbours_is_refused_or_changes_no_weight(shape):
    actions = shape.program.devices[0]
    right = result_of(shape.program, shape)
    for index in range(len(actions) - 1):
        swapped = list(actions)
        swapped[index : index + 2] = reversed(actions[index : index + 2])
        program = single(swapped)
        if passes(program, shape):
            assert result_of(program, shape) == right, f"swapped at {index}"


@settings(max_examples=150, deadline=None)
@given(small_shapes, st.data())
def test_moving_an_action_is_refused_or_changes_no_weight(shape, data):
    actions = list(shape.program.devices[0])
    right = result_of(shape.program, shape)
    for _ in range(data.draw(st.integers(1, 3), "moves")):
        moved = actions.pop(data.draw(st.integers(0, len(actions) - 1), "from"))
        actions.insert(data.draw(st.integers(0, len(actions)), "to"), moved)
    if passes(single(actions), shape):
        assert result_of(single(actions), shape) == right


@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize("place", ["device", "host"])
def test_lookahead_changes_no_weight(place, lookahead):
    shape = Shape(3, 2, True, place, lookahead)
    assert result_of(shape.program, shape) == result_of(Shape(3, 2, True, place, 0).program, shape)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("place", ["device", "host"])
def test_which_loop_is_outside_changes_no_weight(place, clip):
    one, other = (Shape(4, 3, clip, place, 1, (2,), order) for order in ("micro", "shard"))
    assert result_of(one.program, one) == result_of(other.program, one)


@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize("order", ["micro", "shard"])
def test_where_boundaries_wait_changes_no_weight(order, lookahead):
    here = Shape(6, 2, True, "host", lookahead, (2,), order)
    away = dataclasses.replace(here, boundaries="host")
    assert result_of(away.program, here) == result_of(here.program, here)


@quick
@given(shapes_with_costs())
def test_boundaries_on_the_host_take_no_more_of_the_device(case):
    shape, costs = case
    peaks = {
        place: dataclasses.replace(shape, boundaries=place).check(costs).held_bytes
        for place in ("device", "host")
    }
    # one that comes back is another copy of what its shard's forward saved of it
    again = sum(costs[0].shards[shard].saved_output_bytes for shard in shape.saves)
    assert peaks["host"] <= peaks["device"] + again


@pytest.mark.parametrize("saves", [(0,), (0, 2), (0, 2, 4)])
@pytest.mark.parametrize("place", ["device", "host"])
def test_what_forwards_save_changes_no_weight(place, saves):
    none = Shape(6, 2, True, place, 1, (0, 2, 3))
    some = dataclasses.replace(none, saves=saves)
    assert result_of(some.program, some) == result_of(none.program, none)


@quick
@given(shapes_with_costs())
def test_what_forwards_save_is_held_until_their_backward(case):
    shape, costs = case
    running = shape.check(costs).running_bytes
    for index, action in enumerate(shape.program):
        if action.op is Op.F and action.shard in shape.saves:
            after = [a.op for a in list(shape.program)[index:]].index(Op.B) + index
            assert running[after] >= costs[0].shards[action.shard].saved_bytes


@pytest.mark.parametrize("spills", [(0,), (0, 1, 2, 3), (1, 3)])
@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_where_what_was_saved_waits_changes_no_weight(lookahead, place, spills):
    none = Shape(6, 2, True, place, lookahead, (2,), boundaries="host")
    some = dataclasses.replace(none, spills=spills)
    assert result_of(some.program, some) == result_of(none.program, none)


@quick
@given(shapes)
def test_what_was_saved_has_left_before_it_comes_back_and_two_at_most_are_on_their_way(shape):
    actions = list(shape.program)
    slots = assign_slots(actions, start=shape.kept)
    waited, dropped, coming = set(), {}, set()
    for index, action in enumerate(actions):
        waited |= set(slots.waits[index])
        if lone_part(action) is Part.SAVED:
            key = (action.shard, action.micro)
            if action.op is Op.DROP:
                dropped[key] = actions.index(Action(Op.STORE, *key, parts=(Part.SAVED,)))
            elif action.op is Op.LOAD:
                assert dropped[key] in waited
                coming.add(key)
            on_the_way = [store for store in dropped.values() if store not in waited]
            assert len(on_the_way) <= 2
        elif action.op is Op.B:
            coming.discard((action.shard, action.micro))
        assert len(coming) <= 2


@st.composite
def shapes_that_hold_activations_alone(draw):
    """Bytes of inputs and of what is saved, and nothing else; outputs may be saved too."""
    shape = draw(st.one_of(shapes, frozen_shapes))
    names = [f.name for f in dataclasses.fields(ShardSpec) if f.name.endswith("_bytes")]
    shards = []
    for index in range(shape.num_shards):
        stays, moves, output, more = (draw(st.integers(0, 1000)) for _ in range(4))
        saved = stays + moves + output
        numbers = dict.fromkeys(names, 0) | {
            "saved_bytes": saved,
            "movable_bytes": moves + output,
            "saved_output_bytes": output,
            "backward_peak_bytes": saved,
        }
        if index:
            before = shards[-1].saved_output_bytes
            numbers["boundary_bytes"] = numbers["private_bytes"] = before + more
        shards.append(ShardSpec(index=index, layers=(index, index + 1), **numbers))
    return shape, freezing(shape, {0: JobCosts(shards=tuple(shards))})


class _Storages:
    """Who holds which storage, as the runtime has it: each is on the device once."""

    def __init__(self, shards):
        self.shards, self.sizes, self.holders = shards, {}, {}
        self.made = itertools.count()

    def new(self, size):
        name = next(self.made)
        self.sizes[name] = size
        return name

    def total(self):
        held = {name for names in self.holders.values() for name in names}
        return sum(self.sizes[name] for name in held)

    def act(self, index, action):
        key, shard = (action.shard, action.micro), self.shards[action.shard]
        part = lone_part(action)
        if action.op is Op.F:
            self.forward(action, shard)
            if shard.frozen:
                self.holders.pop(("boundary", *key), None)
        elif action.op is Op.B:
            for kind in ("saved", "boundary"):
                self.holders.pop((kind, *key), None)
        elif action.op is Op.STORE and part:
            self.holders["stored", index] = list(self.holders[str(part), *key])
            if part is Part.SAVED:  # what stays is not copied
                self.holders["stored", index].pop(0)
        elif action.op is Op.DROP and part is Part.BOUNDARY:
            del self.holders["boundary", *key]
        elif action.op is Op.DROP and part is Part.SAVED:
            del self.holders["saved", *key][1:]
        elif action.op is Op.LOAD and part is Part.BOUNDARY:
            self.holders["boundary", *key] = [self.new(shard.boundary_bytes)]
        elif action.op is Op.LOAD and part is Part.SAVED:
            self.holders["saved", *key].append(self.new(shard.movable_bytes))

    def forward(self, action, shard):
        following = self.shards[action.shard + 1].boundary_bytes
        output = [self.new(following)]
        if Part.SAVED in action.parts:
            stays = self.new(shard.saved_bytes - shard.movable_bytes)
            moves = self.new(shard.movable_bytes - shard.saved_output_bytes)
            saved = self.new(shard.saved_output_bytes)
            output = [saved, self.new(following - shard.saved_output_bytes)]
            self.holders["saved", action.shard, action.micro] = [stays, moves, saved]
        self.holders["boundary", action.shard + 1, action.micro] = output


@settings(max_examples=200, deadline=None)
@given(shapes_that_hold_activations_alone())
def test_activations_are_counted_as_the_storages_that_somebody_holds(case):
    shape, costs = case
    storages = _Storages(costs[0].shards)
    slots = assign_slots(shape.program.devices[0], start=shape.kept)
    running = shape.check(costs).running_bytes
    for index, action in enumerate(shape.program):
        for store in slots.waits[index]:
            storages.holders.pop(("stored", store), None)
        before = storages.total()
        storages.act(index, action)
        inside = unit_peak_bytes(action, costs[0].shards[action.shard])
        assert running[index] - inside == (before if is_unit(action) else storages.total())


@quick
@given(shapes_with_costs())
def test_gradients_that_are_waited_for_take_no_more_room_and_move_the_same_bytes(case):
    shape, costs = case
    one, none = (dataclasses.replace(shape, lookbehind=n).check(costs) for n in (1, 0))
    assert none.peak_bytes <= one.peak_bytes
    assert none.held_bytes <= one.held_bytes
    assert (none.up_bytes, none.down_bytes) == (one.up_bytes, one.down_bytes)


@quick
@given(shapes)
def test_behind_a_unit_with_lookbehind_zero_no_gradients_are_on_their_way(shape):
    actions = dataclasses.replace(shape, lookbehind=0).program.devices[0]
    slots = assign_slots(actions, start=shape.kept)
    for index, action in enumerate(actions):
        is_waited_for = action.now and Part.GRAD in action.parts
        if action.op is Op.DROP and is_waited_for and slots.slots[index - 1] is None:
            units = [i for i in range(index, len(actions)) if is_unit(actions[i])]
            waited = slots.waits[units[0]] if units else slots.stores_left
            assert index - 1 in waited


@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize("place", ["device", "host"])
def test_how_far_gradients_are_behind_changes_no_weight(place, lookahead):
    one = Shape(4, 2, True, place, lookahead, (1,), boundaries="host")
    none = dataclasses.replace(one, lookbehind=0)
    assert result_of(none.program, none) == result_of(one.program, one)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("waits", [(0,), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("weights", [(), (0,), (1, 2)])
def test_gradients_that_wait_on_the_device_change_no_weight(weights, waits, clip):
    none = Shape(3, 2, clip, "device", 1, weights=weights)
    some = dataclasses.replace(none, waits=waits)
    assert result_of(some.program, some) == result_of(none.program, none)


@quick
@given(shapes_with_costs())
def test_a_late_slot_is_there_after_a_backward_and_no_two_shards_are_in_it_at_once(case):
    shape, _ = case
    actions = shape.program.devices[0]
    slots = assign_slots(actions, start=shape.kept)
    late = [index for index, action in enumerate(actions) if action.late]
    assert bool(late) == (slots.num_late > 0)
    assert slots.num_late <= shape.lookahead + 1
    if shape.clip:
        assert all(index > actions.index(Action(Op.SYNC)) for index in late)
    elif late:
        assert {actions[index].shard for index in late} == set(shape.late)
        behind = [i for i, a in enumerate(actions) if a.op is Op.B and a.shard > max(shape.late)]
        assert all(index > i for index in late for i in behind)
    ends = {}
    for index in late:
        if slots.slots[index] in ends:
            assert ends[slots.slots[index]] in slots.waits[index]
        mine = [i for i, a in enumerate(actions) if a.shard == actions[index].shard]
        ends[slots.slots[index]] = next(i for i in mine if i > index and actions[i].op is Op.STORE)


@quick
@given(shapes_with_costs())
def test_late_slots_take_nothing_before_the_norm_is_known(case):
    shape, costs = case
    clipping = dataclasses.replace(shape, clip=True)
    before = clipping.program.devices[0].index(Action(Op.SYNC))
    bare = {
        0: dataclasses.replace(
            costs[0],
            shards=tuple(
                dataclasses.replace(s, state_bytes=s.head_bytes * s.head_of_state)
                for s in costs[0].shards
            ),
        )
    }
    kept = sum(costs[0].shards[shard].state_bytes for shard in shape.keep)
    with_state, without = clipping.check(costs), clipping.check(bare)
    for one, other in zip(with_state.running_bytes[:before], without.running_bytes, strict=False):
        assert one == other + kept


@pytest.mark.parametrize("weights", [(), (0,), (1, 2)])
def test_keeping_parameters_alone_changes_no_weight(weights):
    some, none = (Shape(3, 2, True, "device", 1, weights=which) for which in (weights, ()))
    assert result_of(some.program, some) == result_of(none.program, none)


@pytest.mark.parametrize("keep", [(0,), (1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("place", ["device", "host"])
def test_what_is_kept_changes_no_weight(place, keep):
    some, none = (Shape(3, 2, True, place, 1, keep=which) for which in (keep, ()))
    assert result_of(some.program, some) == result_of(none.program, none)


def test_device_and_host_step_give_the_same_weights():
    both = [Shape(3, 2, True, place, 1) for place in ("device", "host")]
    results = {result_of(shape.program, shape) for shape in both}
    assert len(results) == 1


# Replay


@settings(max_examples=40, deadline=None)
@given(shapes_with_costs(), st.integers(1, 3), st.integers(1, 3))
def test_the_makespan_lies_between_the_busiest_resource_and_the_sum(case, trials, steps):
    shape, costs = case
    run = Run(program=shape.program, costs=costs, steps=steps, start=shape.kept)
    timeline = replay([run] * trials)
    total = sum(timeline.busy_s.values())
    assert max(timeline.busy_s.values(), default=0) <= timeline.makespan_s * (1 + 1e-9)
    assert timeline.makespan_s <= total * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(shapes_with_costs(), st.integers(1, 3))
def test_a_replay_moves_the_bytes_of_the_footprint(case, steps):
    shape, costs = case
    footprint = shape.check(costs)
    timeline = replay([Run(program=shape.program, costs=costs, steps=steps, start=shape.kept)])
    assert timeline.up_bytes == steps * footprint.up_bytes == _moved(timeline, "up")
    assert timeline.down_bytes == steps * footprint.down_bytes == _moved(timeline, "down")


def _moved(timeline, stream):
    return sum(span.moved for span in timeline.spans if span.stream == stream)


@settings(max_examples=40, deadline=None)
@given(shapes_with_costs(), st.integers(1, 3), st.data())
def test_whatever_is_chosen_every_action_runs_once_a_step(case, trials, data):
    shape, costs = case

    class Anyone:
        def choose(self, ready):
            return data.draw(st.sampled_from(ready))

    run = Run(program=shape.program, costs=costs, start=shape.kept)
    timed = [action for action in shape.program if action.op is not Op.DROP]
    spans = replay([run] * trials, policy=Anyone()).spans
    assert sorted(str(span.action) for span in spans) == sorted(map(str, timed * trials))


@settings(max_examples=40, deadline=None)
@given(shapes_with_costs(), st.integers(1, 3))
def test_no_two_spans_of_a_resource_overlap(case, trials):
    shape, costs = case
    spans = replay(
        [Run(program=shape.program, costs=costs, steps=2, start=shape.kept)] * trials
    ).spans
    activations = [s for s in spans if s.stream == "up" and lone_part(s.action) is not None]
    uploads = [s for s in spans if s.stream == "up" and lone_part(s.action) is None]
    of_streams = [[s for s in spans if s.stream == name] for name in ("compute", "down", "host")]
    for alone in (activations, uploads, *of_streams):
        for before, after in itertools.pairwise(alone):
            assert after.start_s >= before.end_s
    for back, up in itertools.product(activations, uploads):  # what passes is over first
        assert back.end_s <= up.end_s or back.start_s >= up.end_s
    for upload in uploads:  # what passes is all that it is longer for
        within = [min(upload.end_s, a.end_s) - max(upload.start_s, a.start_s) for a in activations]
        own_s = action_seconds(upload.action, costs[upload.action.trial])
        passed_s = sum(seconds for seconds in within if seconds > 0)
        assert upload.end_s - upload.start_s == pytest.approx(own_s + passed_s)
