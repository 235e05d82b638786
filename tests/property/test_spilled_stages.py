"""Properties of every program of spilled stages, and of what its checker lets pass."""

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ProgramError, SpecError
from shoal.core.technique import SPILLING
from shoal.pipeline.schedule import Pipeline
from shoal.pipeline.spilled import SpilledPipeline
from shoal.pipeline.spilledcheck import check_evaluation, check_spilled
from shoal.program.costs import JobCosts
from shoal.program.ir import Action, Op, Part, Program, parse_program
from shoal.program.replay import Run, replay
from shoal.testing import make_shard

quick = settings(max_examples=60, deadline=None)
PARAM, STATE, GRAD = Part.PARAM, Part.STATE, Part.GRAD
STEPS = 2


@st.composite
def spilled_of(draw, *, stages, shards, micros):
    sizes = draw(st.lists(st.integers(1, shards), min_size=2, max_size=stages))
    edges = [0, *itertools.accumulate(sizes)]
    count, draws = edges[-1], draw(st.booleans())
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    ties = draw(st.sets(st.sampled_from(pairs), max_size=2))
    borrowers = {borrower for _, borrower in ties}
    able = [shard for shard in range(count) if shard not in borrowers]
    pipeline = Pipeline(
        schedule=draw(st.sampled_from(SPILLING)),
        stages=len(sizes),
        groups=(draw(st.integers(1, micros)),),
        recompute=draw(st.booleans()),
        lag=draw(st.integers(0, 2)),
        clip=draw(st.booleans()),
        draws=draws,
        foretold=draws and draw(st.booleans()),
        follows=True,
    )
    return SpilledPipeline(
        pipeline=pipeline,
        spans=tuple(itertools.pairwise(edges)),
        optimizer=draw(st.sampled_from(["device", "host"])),
        lookahead=draw(st.integers(0, 2)),
        keep=tuple(sorted(draw(st.sets(st.sampled_from(able), max_size=3)) if able else ())),
        keep_gradients=draw(st.booleans()),
        ties=tuple(sorted(ties)),
    )


spilled_pipelines = spilled_of(stages=4, shards=4, micros=6)
small = spilled_of(stages=3, shards=2, micros=3)


def costs_of(spilled: SpilledPipeline, size: int = 1000) -> dict[int, JobCosts]:
    shards = tuple(make_shard(shard, size + shard) for shard in range(spilled.num_shards))
    return {0: JobCosts(shards=shards)}


def simple(schedule="flush", micros=4, spans=((0, 2), (2, 4)), **how: Any) -> SpilledPipeline:
    clip = how.pop("clip", False)
    pipeline = Pipeline(
        schedule=schedule, stages=len(spans), groups=(micros,), clip=clip, follows=True
    )
    return SpilledPipeline(pipeline=pipeline, spans=spans, **how)


# Generated programs


@quick
@given(spilled_pipelines)
def test_a_generated_program_passes_the_checker(spilled):
    assert len(check_spilled(spilled, spilled.program())) == len(spilled.spans)
    assert len(check_evaluation(spilled)) == len(spilled.spans)


@quick
@given(spilled_pipelines)
def test_a_program_reads_back_from_its_text(spilled):
    for program in (spilled.program(), spilled.evaluation()):
        assert parse_program(str(program)) == program


@quick
@given(spilled_pipelines)
def test_every_shard_runs_each_micro_batch_forward_once_before_its_backward(spilled):
    all_ = list(range(spilled.pipeline.num_micros))
    for stage, (first, stop) in enumerate(spilled.spans):
        actions = spilled.program().devices[stage]
        for shard in range(first, stop):
            units = [a for a in actions if a.op in (Op.F, Op.B) and a.shard == shard]
            ends = shard + 1 == spilled.num_shards
            assert [a.micro for a in units if a.op is Op.F] == ([] if ends else all_)
            assert [a.micro for a in units if a.op is Op.B] == all_
            for micro in [] if ends else all_:
                assert next(a for a in units if a.micro == micro).op is Op.F


@quick
@given(spilled_pipelines)
def test_no_stage_has_more_slots_than_its_lookahead_allows(spilled):
    for stage, found in enumerate(check_spilled(spilled, spilled.program(), costs_of(spilled))):
        travel = len(range(*spilled.spans[stage])) - len(spilled.stays(stage))
        assert found.num_slots <= min(spilled.lookahead + 1, travel)


@quick
@given(spilled_pipelines)
def test_what_stays_moves_nothing_but_what_it_lends(spilled):
    lent = {owner for owner, _ in spilled.ties}
    for action in spilled.program():
        if action.shard in spilled.keep and action.op in (Op.LOAD, Op.STORE, Op.DROP):
            assert action.op is Op.STORE
            assert action.parts == (PARAM,)
            assert action.shard in lent


@quick
@given(spilled_pipelines)
def test_a_replay_computes_every_action_once(spilled):
    here = {shard: parts for kept in spilled.kept() for shard, parts in kept.items()}
    run = Run(
        program=spilled.program(),
        costs=costs_of(spilled),
        steps=STEPS,
        devices=tuple(range(len(spilled.spans))),
        start=here,
    )
    timeline = replay([run])
    spans = sorted(str(span.action) for span in timeline.spans)
    moved = [str(a) for a in spilled.program() if a.op is not Op.DROP]
    assert spans == sorted(moved * STEPS)


@pytest.mark.parametrize("place", ["device", "host"])
def test_gpipe_loads_as_much_whatever_the_number_of_micro_batches(place):
    def moved(schedule, micros):
        spans = ((0, 4), (4, 8))
        spilled = simple(schedule, micros, spans, optimizer=place, keep_gradients=True)
        prints = check_spilled(spilled, spilled.program(), costs_of(spilled))
        return sum(found.up_bytes + found.down_bytes for found in prints)

    assert moved("gpipe", 2) == moved("gpipe", 9)
    assert moved("flush", 9) > 1.5 * moved("flush", 2)
    assert moved("flush", 9) > 1.5 * moved("gpipe", 9)


def test_gradients_that_wait_on_the_device_do_not_move_between_micro_batches():
    def of(keep_gradients):
        program = simple(keep_gradients=keep_gradients).program()
        return sum(GRAD in a.parts for a in program if a.op in (Op.LOAD, Op.STORE))

    assert of(True) == 4  # each once, for its step
    assert of(False) == 4 * (4 + 3)


# On paper: loads hide behind units


def test_loads_hide_behind_the_units_of_other_shards():
    def makespan(lookahead, speed):
        spilled = simple("gpipe", 8, ((0, 4), (4, 8)), lookahead=lookahead)
        shards = tuple(make_shard(s, 1000, forward_s=1.0, backward_s=3.0) for s in range(8))
        costs = {0: JobCosts(shards=shards, up_bytes_per_s=speed, down_bytes_per_s=speed)}
        run = Run(program=spilled.program(), costs=costs, steps=3, devices=(0, 1))
        return replay([run]).makespan_s

    free = makespan(1, 1e12)
    assert makespan(1, 500.0) < 1.15 * free  # a shard's load takes two of its forwards
    assert makespan(0, 500.0) > makespan(1, 500.0)


# What the checker lets pass gives the same weights


class _Paper:
    """Spilled stages run on symbols: values are the expressions that made them.

    Devices run their lists a few times, each as far as its messages are there, with the host's
    memory in common. ``order`` is who goes first. Knows no rule.
    """

    def __init__(self, spilled: SpilledPipeline, order: tuple[int, ...]) -> None:
        self.spilled, self.order, self.last = spilled, order, spilled.num_shards - 1
        self.chained = spilled.pipeline.draws and not spilled.pipeline.foretold
        self.home: dict[Any, Any] = {
            (shard, part): (part, shard)
            for shard in range(spilled.num_shards)
            for part in (PARAM, STATE)
        }
        self.device = [
            {(s, part): (self.home[s, part], ()) for s, parts in kept.items() for part in parts}
            for kept in spilled.kept()
        ]
        self.made: list[dict[Any, Any]] = [{} for _ in spilled.spans]
        self.told: Any = "start"
        self.norms: dict[int, Any] = {}
        self.factor: list[Any] = [None for _ in spilled.spans]
        self.queues: dict[Any, list[Any]] = {}

    def run(self, program: Program) -> Any:
        lists = [[(n, a) for n in range(STEPS) for a in list_] for list_ in program.devices]
        heads, moved = [0] * len(lists), True
        while moved:
            moved = False
            for device in self.order:
                while heads[device] < len(lists[device]):
                    if not self.act(device, *lists[device][heads[device]]):
                        break
                    heads[device] += 1
                    moved = True
        done = [head == len(list_) for head, list_ in zip(heads, lists, strict=True)]
        return [done, sorted(map(repr, self.final().items()))]

    def final(self) -> dict[Any, Any]:
        kept = {k: v[0] for here in self.device for k, v in here.items() if k[1] is not GRAD}
        return self.home | kept

    def act(self, d: int, step: int, a: Action) -> bool:
        here, shard = self.device[d], a.shard
        if a.op is Op.SEND:
            self.queues.setdefault((d, a.peer, a.parts), []).append(self.value(d, step, a))
        elif a.op is Op.RECV:
            queue = self.queues.get((a.peer, d, a.parts))
            if not queue:
                return False
            self.take(d, step, a, queue.pop(0))
        elif a.op is Op.LOAD:
            owners = [owner for owner, borrower in self.spilled.ties if borrower == shard]
            lent = tuple(self.home.get((owner, PARAM)) for owner in owners)
            for part in a.parts:
                here[shard, part] = (self.home.get((shard, part)), lent if part is PARAM else ())
        elif a.op is Op.STORE:
            for part in a.parts:
                self.home[shard, part] = here.get((shard, part), (None,))[0]
        elif a.op is Op.DROP:
            for part in a.parts:
                here.pop((shard, part), None)
        elif a.op is Op.SYNC:
            first, stop = self.spilled.spans[0]
            mine = {s: self.gradient(d, s) for s in range(first, stop)}
            self.factor[d], self.norms = tuple(sorted((self.norms | mine).items())), {}
        elif a.op is Op.STEP:
            self.step(d, a)
        else:
            self.unit(d, step, a)
        return True

    def gradient(self, d: int, shard: int) -> Any:
        """Wherever it is; a norm is taken when it is made."""
        here = self.device[d].get((shard, GRAD))
        return here[0] if here else self.home.get((shard, GRAD))

    def value(self, d: int, step: int, a: Action) -> Any:
        said = (a.shard, a.micro, step)
        if Part.NORM in a.parts:
            return said, self.factor[0] if d == 0 else self.gradient(d, a.shard)
        if PARAM in a.parts:
            return said, None
        if Part.RNG in a.parts:
            return said, self.made[d].get(("stream", step, a.micro))
        kind = "carry" if GRAD in a.parts else "boundary"
        stream = self.made[d].get(("stream", step, a.micro))
        return said, (self.made[d].get((kind, step, a.shard, a.micro)), stream)

    def take(self, d: int, step: int, a: Action, sent: Any) -> None:
        said, value = sent
        if said != (a.shard, a.micro, step):
            value = ("wrong", value)
        if Part.NORM in a.parts and d == 0:
            self.norms[a.shard] = value
        elif Part.NORM in a.parts:
            self.factor[d] = value
        elif Part.RNG in a.parts:
            self.told = value
        elif GRAD in a.parts:
            self.made[d]["carry", step, a.shard, a.micro] = value[0]
        elif PARAM not in a.parts:
            self.made[d]["boundary", step, a.shard, a.micro] = value[0]
            self.made[d]["stream", step, a.micro] = value[1]

    def unit(self, d: int, step: int, a: Action) -> None:
        made, shard, micro = self.made[d], a.shard, a.micro
        weights = self.device[d].get((shard, PARAM))
        came = made.get(("boundary", step, shard, micro))
        if a.op is Op.F or shard == self.last:
            begun = made.get(("stream", step, micro))
            if shard == 0:
                begun = self.told if self.chained else ("begun", step, micro)
            made["stream", step, micro] = ("drawn", shard, hash(repr(begun)))
        if a.op is Op.F:
            drawn = made["stream", step, micro]
            made["forward", step, shard, micro] = drawn
            made["boundary", step, shard + 1, micro] = ("F", hash(repr((weights, came, drawn))))
            return
        drawn = made.get(("stream" if shard == self.last else "forward", step, micro))
        if shard != self.last:
            drawn = made.get(("forward", step, shard, micro))
        back = made.get(("carry", step, shard + 1, micro))
        whole = ("B", hash(repr((weights, came, drawn, back, micro))))
        made["carry", step, shard, micro] = whole
        before = self.device[d].get((shard, GRAD), ((), ()))[0] or ()
        self.device[d][shard, GRAD] = ((*before, whole), ())

    def step(self, d: int, a: Action) -> None:
        factor = self.factor[d] if self.spilled.pipeline.clip else None
        if a.place == "host":
            parts = {part: self.home.get((a.shard, part)) for part in (PARAM, STATE, GRAD)}
        else:
            found = {part: self.device[d].get((a.shard, part)) for part in (PARAM, STATE, GRAD)}
            parts = {part: value and value[0] for part, value in found.items()}
        after = hash(repr((parts, factor)))
        self.home.pop((a.shard, GRAD), None)
        self.device[d].pop((a.shard, GRAD), None)
        for part in (PARAM, STATE):
            if a.place == "host":
                self.home[a.shard, part] = (part, "after", after)
            else:
                lent = self.device[d].get((a.shard, part), (None, ()))[1]
                self.device[d][a.shard, part] = ((part, "after", after), lent)


def results_of(spilled, program):
    """What comes of it, whichever device is ahead."""
    orders = itertools.permutations(range(len(spilled.spans)))
    return [repr(_Paper(spilled, order).run(program)) for order in orders]


def passes(spilled, program):
    try:
        check_spilled(spilled, program)
    except ProgramError:
        return False
    return True


@quick
@given(small)
def test_where_shards_are_and_when_changes_no_weight(spilled):
    found = set(results_of(spilled, spilled.program()))
    bare = dataclasses.replace(spilled, keep=(), keep_gradients=False, lookahead=0)
    for place, schedule in itertools.product(("host", "device"), SPILLING):
        pipeline = dataclasses.replace(spilled.pipeline, schedule=schedule, lag=0, recompute=True)
        other = dataclasses.replace(bare, optimizer=place, pipeline=pipeline)
        found |= set(results_of(other, other.program()))
    assert len(found) == 1


def _change(program: Program, device: int, actions: list[Action]) -> Program:
    devices = list(program.devices)
    devices[device] = tuple(actions)
    return Program(tuple(devices))


@settings(max_examples=30, deadline=None)
@given(small)
def test_a_program_without_one_action_is_refused(spilled):
    program = spilled.program()
    for device, actions in enumerate(program.devices):
        for index, action in enumerate(actions):
            without = _change(program, device, [*actions[:index], *actions[index + 1 :]])
            assert not passes(spilled, without), f"without {action} at {index} of {device}"


@settings(max_examples=100, deadline=None)
@given(small, st.data())
def test_moving_an_action_is_refused_or_changes_no_weight(spilled, data):
    program = spilled.program()
    right = results_of(spilled, program)
    device = data.draw(st.integers(0, len(spilled.spans) - 1), "device")
    actions = list(program.devices[device])
    for _ in range(data.draw(st.integers(1, 2), "moves")):
        moved = actions.pop(data.draw(st.integers(0, len(actions) - 1), "from"))
        actions.insert(data.draw(st.integers(0, len(actions)), "to"), moved)
    changed = _change(program, device, actions)
    if passes(spilled, changed):
        assert results_of(spilled, changed) == right


# What is refused


@pytest.mark.parametrize(
    ("spilled", "words"),
    [
        (lambda: simple("zb-h1"), "not with 'zb-h1'"),
        (lambda: simple(spans=((0, 2), (3, 4))), "one after another"),
        (lambda: simple(spans=((0, 2), (2, 2))), "one after another"),
        (lambda: simple(keep=(3,), ties=((0, 3),)), "shard 3 borrows"),
    ],
)
def test_what_is_no_pipeline_of_spilled_stages_is_refused(spilled, words):
    with pytest.raises(SpecError, match=words):
        spilled()


def test_a_borrower_is_not_told_before_the_host_has_the_new_parameters():
    spilled = simple(optimizer="device", keep=(0,), ties=((0, 3),), micros=1)
    actions = list(spilled.program().devices[0])
    store = next(a for a in actions if a.op is Op.STORE and a.shard == 0)
    told = next(a for a in actions if a.op is Op.SEND and PARAM in a.parts)
    actions.remove(told)
    actions.insert(actions.index(store), told)
    with pytest.raises(ProgramError, match="does not have the new parameters of s0"):
        check_spilled(spilled, _change(spilled.program(), 0, actions))
