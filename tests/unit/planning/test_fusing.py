"""Which place in an array a job gets: by what is wished, recorded, measured, and what fits."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.arraykeys import stacks_all
from shoal.core.errors import SpecError
from shoal.core.plan import (
    ArrayPlace,
    LoneNeed,
    Plan,
    plan_from_dict,
    seated,
    seated_at,
)
from shoal.core.seats import Epoch, epochs_of
from shoal.core.spec import TrialSpec
from shoal.core.technique import Captured, Resident, Spilled
from shoal.core.units import Bytes, Seconds
from shoal.fusion.matching.match import Signature
from shoal.planning.arrayjobs import seats_taken
from shoal.planning.fusing import ALONE, Fusing, width_wished
from shoal.planning.reseating import array_kind, array_place, recorded_width
from shoal.planning.times import Times
from shoal.runtime.pool import Gone
from shoal.runtime.wire.messages import ArrayTry, MeasuredArray, TimeArray, TimedArray
from shoal.testing import make_device, make_job

ONE, OTHER = Signature((("the model", "one"),)), Signature((("the model", "other"),))
NEED = LoneNeed(held_bytes=Bytes(1), unit_bytes=Bytes(2), peak_bytes=Bytes(3), step_s=Seconds(0.1))
NONE: dict[int, str] = {}
QUICK = 0.002  # of an array's step; three trials alone take longer


def key(number, width, signature=ONE):
    """What is on record of a trial that was planned before."""
    (job,) = place(max(width, 2), [number], facts={number: signature})
    group = job.numerics["array_group"]
    array = {} if width == ALONE else {"array": f"slot {number % width} of {width}"}
    return {"array_group": group, **array}


class Asked:
    """Answers as workers would, and counts the arrays that were asked for."""

    def __init__(
        self,
        declined: str = "",
        step_s: float = QUICK,
        workers: int = 1,
        graphs: bool = False,
        pool: int = 0,
    ) -> None:
        self.declined, self.step_s, self.graphs = declined, step_s, graphs
        self.pool = pool  # bytes that graphs keep for themselves, as on a GPU
        self.workers = [object() for _ in range(workers)]
        self.orders = []

    def measure_arrays(self, order, count, only=()):
        there = [w for w in self.workers if w in list(only)] if only else self.workers[:count]
        return {worker: self.answer(order) for worker in there}

    def answer(self, order):
        if isinstance(order, TimeArray):
            return TimedArray(order.trial.number, ((0.001, self.step_s, 0.0, 0.0),) * order.rounds)
        self.orders.append(order)
        declined, is_kind = self.declined, False
        if not declined and order.kind != "eager" and not self.graphs:
            declined, is_kind = "no graph of this", True
        found = ArrayTry(
            declined=declined,
            is_kind=is_kind,
            unit_bytes=Bytes(4096),
            pool_bytes=Bytes(0 if order.kind == "eager" else self.pool),
            once_s=(0.001, self.step_s, 0.0, 0.0),
            compiler="g++ 1",
            nodes=1,
        )
        return MeasuredArray(order.trial.number, found)


def place(
    wish,
    numbers=range(6),
    *,
    recorded=None,
    facts=None,
    asked=None,
    memory=2**28,
    fusing=None,
    constants=NONE,
    techniques=None,
    steps=None,
):
    """The jobs of trials with these numbers."""
    specs = [TrialSpec(number=n, hp={"lr": 0.1}, seed=n) for n in numbers]
    devices = [make_device(memory=memory)]
    fusing = fusing or Fusing(wish, devices, recorded or {}, steps=steps or {})
    facts = facts or dict.fromkeys(numbers, ONE)
    jobs = [
        replace(make_job(n), technique=techniques[n]) if techniques else make_job(n)
        for n in numbers
    ]
    return fusing.places(jobs, specs, facts, asked or Asked(), constants=constants)


def left(job, step):
    """The job of a trial that left its array for good."""
    seats = (*epochs_of(job.numerics), Epoch(step, 0, ALONE, for_good=True))
    return seated(job, seats if step else seats[-1:])


def widths(jobs):
    return [job.array.width if job.array else ALONE for job in jobs]


@pytest.mark.parametrize("wish", [None, 0, 1])
def test_without_a_wish_nobody_is_in_an_array(wish):
    asked = Asked()
    assert widths(place(wish, asked=asked)) == [ALONE] * 6
    assert not asked.orders


def test_a_wish_for_a_width_is_followed_slot_by_slot():
    jobs = place(4)
    assert widths(jobs) == [4] * 6
    assert [job.array.slot for job in jobs] == [0, 1, 2, 3, 0, 1]
    assert len({job.array.group for job in jobs}) == 1
    assert [recorded_width(job.numerics) for job in jobs] == [4] * 6
    assert jobs[5].numerics["array"] == "slot 1 of 4"
    assert all(job.peak_bytes == job.held_bytes + job.unit_bytes for job in jobs)


def test_automatic_is_measured_once_for_each_shape():
    asked = Asked()
    facts = dict.fromkeys(range(4), ONE) | dict.fromkeys(range(4, 8), OTHER)
    jobs = place("auto", range(8), facts=facts, asked=asked)
    assert widths(jobs) == [4] * 8
    assert [(order.width, order.kind) for order in asked.orders] == 2 * [
        (4, "traced"),
        (4, "eager"),
    ]
    assert len({job.array.group for job in jobs}) == 2


@pytest.mark.parametrize(
    ("captured", "captures", "words"),
    [
        ((), False, "train by their code"),
        (range(6), True, "train captured"),
        ((1, 2, 4, 5), True, "train captured, as 4 of 6 do"),
        ((2, 3), False, "train by their code, as 4 of 6 do"),
        ((3, 4, 5), False, "train by their code, as 3 of 6 do"),
    ],
)
def test_arrays_are_timed_beside_the_way_in_which_trials_would_train_alone(
    captured, captures, words
):
    """Whoever comes first: planning has weighed both ways for each, and taken the quicker."""
    asked, ways = Asked(), {n: Captured() if n in captured else Resident() for n in range(6)}
    jobs = place("auto", asked=asked, techniques=ways)
    assert {order.captures for order in asked.orders} == {captures}
    firsts = [ways[order.trials[0].number] for order in asked.orders]
    assert {isinstance(way, Captured) for way in firsts} == {captures}
    assert f"one by one: timed as trials that {words}" in jobs[0].why


def test_automatic_takes_none_that_gains_nothing():
    jobs = place("auto", asked=Asked(step_s=1.0))
    assert widths(jobs) == [ALONE] * 6
    assert all("gain nothing" in " ".join(job.why) for job in jobs)


@pytest.mark.parametrize("wish", [None, 0, 2, "auto"])
def test_what_trained_in_an_array_stays_there_and_what_did_not_stays_out(wish):
    recorded = {0: key(0, 3), 1: key(1, 3), 2: key(2, ALONE)}
    assert widths(place(wish, range(3), recorded=recorded)) == [3, 3, ALONE]


@pytest.mark.parametrize(("wish", "width"), [(None, 3), (0, ALONE), (2, 3), ("auto", 3)])
def test_trials_that_come_later_train_as_those_before_them(wish, width):
    assert widths(place(wish, range(4), recorded={0: key(0, 3), 1: key(1, 3)})) == [
        *(3, 3, width, width)
    ]


@pytest.mark.parametrize("accepts", [False, True])
@pytest.mark.parametrize(("wish", "before", "new"), [(2, 3, 2), (0, ALONE, ALONE), ("auto", 3, 3)])
def test_a_wish_on_record_is_for_trials_that_begin_and_moves_none(wish, before, new, accepts):
    """Trials 0 and 1 are under way, 2 and 3 are of their shape, and the others of a new one."""
    recorded = {0: key(0, 3), 1: key(1, 3)}
    steps = {0: 5, 1: 5}
    facts = dict.fromkeys(range(4), ONE) | dict.fromkeys(range(4, 7), OTHER)
    fusing = Fusing(
        *(None, [make_device()], recorded),
        now=recorded,
        steps=steps,
        on_record=wish,
        reseats=accepts,
    )
    assert fusing.is_wanted
    jobs = place(None, range(7), facts=facts, fusing=fusing)
    assert widths(jobs) == [3, 3, before, before, new, new, new]


def test_a_wish_goes_before_the_one_on_record():
    fusing = Fusing(2, [make_device()], {}, on_record=4)
    assert widths(place(None, range(3), fusing=fusing)) == [2] * 3


def test_what_was_settled_holds_for_trials_that_come_in_the_same_run():
    fusing, asked = Fusing("auto", [make_device()], {}), Asked()
    first = place("auto", range(3), fusing=fusing, asked=asked)
    later = place("auto", range(3, 9), fusing=fusing, asked=asked)
    assert widths(first + later) == [3] * 9
    assert len(asked.orders) == 2  # as it is, and as a graph


@pytest.mark.parametrize("wish", [4, "auto"])
def test_what_is_declined_trains_alone_and_is_asked_for_once(wish):
    asked = Asked("it is odd")
    jobs = place(wish, asked=asked)
    assert widths(jobs) == [ALONE] * 6
    assert all(job.why[-1] == "unfused: it is odd" for job in jobs)
    assert len(asked.orders) == 1


@pytest.mark.parametrize("wish", [4, "auto"])
def test_what_does_not_fit_the_device_trains_alone(wish):
    jobs = place(wish, memory=4200)
    assert widths(jobs) == [ALONE] * 6
    assert all("fit" in " ".join(job.why) or "budget" in " ".join(job.why) for job in jobs)


def test_spilled_trials_and_those_without_a_signature_are_in_none():
    specs = [TrialSpec(number=n, hp={"lr": 0.1}, seed=n) for n in range(3)]
    jobs = [make_job(0), make_job(1, technique=Spilled(shards=1)), make_job(2)]
    fusing = Fusing(2, [make_device()], {})
    found = fusing.places(jobs, specs, {0: ONE, 1: ONE}, Asked())
    assert widths(found) == [2, ALONE, ALONE]


def test_a_numerics_key_tells_the_place():
    assert array_place({"array": "slot 2 of 7"}) == (2, 7)
    assert array_place({"torch": "2"}) is None
    assert recorded_width({}) == ALONE


def test_a_plan_with_arrays_can_be_written_and_read():
    array = ArrayPlace(group="abcx4", slot=3, width=4, alone=NEED)
    plan = Plan(
        study="k",
        devices=(make_device(),),
        active=1,
        jobs=(make_job(3, array=array), make_job(4)),
        seconds=Seconds(1.0),
    )
    assert plan_from_dict(json.loads(plan.to_json())) == plan
    assert plan.at_once == 4
    assert "seed 3): slot 3 of an array of 4" in plan.explain()
    assert "seed 4): Resident" in plan.explain()


@pytest.mark.parametrize(
    ("technique", "label"),
    [
        (Resident(), "slot 1 of an array of 2, traced"),
        (Captured(), "slot 1 of an array of 2, traced"),
        (Spilled(shards=1), "Spilled, slot 1 of an array of 2, traced"),
    ],
)
def test_a_trial_of_an_array_is_called_so_and_not_what_it_would_be_alone(technique, label):
    array = ArrayPlace(group="abcx2", slot=1, width=2, alone=NEED, kind="traced")
    job = make_job(3, technique=technique, array=array)
    plan = Plan(study="k", devices=(make_device(),), active=1, jobs=(job,), seconds=Seconds(1.0))
    assert f"): {label}\n" in plan.explain()


def test_slots_are_given_by_rank_within_a_shape():
    facts = {n: OTHER if n % 4 else ONE for n in range(16)}  # as a grid numbers them
    jobs = place(4, range(16), facts=facts)
    assert [job.array.slot for job in jobs if job.trial % 4 == 0] == [0, 1, 2, 3]
    assert [job.array.slot for job in jobs if job.trial % 4] == [0, 1, 2, 3] * 3


def test_those_that_come_after_a_resume_get_the_slots_that_they_would_have_got():
    recorded = {job.trial: job.numerics for job in place(4, range(3))}
    later = place(None, [3, 4], recorded=recorded)
    assert [job.array.slot for job in later] == [3, 0]


def test_that_a_shape_has_no_array_is_on_record_too():
    recorded = {job.trial: job.numerics for job in place("auto", asked=Asked(step_s=1.0))}
    asked = Asked()
    assert widths(place("auto", [6, 7], recorded=recorded, asked=asked)) == [ALONE] * 2
    assert not asked.orders


def test_another_shape_does_not_take_over_a_width():
    recorded = {job.trial: job.numerics for job in place(4, range(3))}
    facts = {3: ONE, 4: OTHER}
    assert widths(place(None, [3, 4], recorded=recorded, facts=facts)) == [4, ALONE]


def test_a_trial_that_leaves_its_array_says_since_when_and_stays_out():
    (job,) = place(2, [0])
    lone = left(job, 7)
    assert lone.array is None
    assert (lone.held_bytes, lone.step_s) == (make_job(0).held_bytes, make_job(0).step_s)
    assert lone.numerics["array"] == "slot 0 of 2; for good from step 7 alone"
    for step in (7, 12):
        asked = Asked()
        (again,) = place(2, [0], recorded={0: lone.numerics}, asked=asked, steps={0: step})
        assert again.array is again.began is None
        assert again.numerics["array"] == lone.numerics["array"]
        assert not asked.orders  # nobody needs an array
    assert "array" not in left(job, 0).numerics


def test_one_that_leaves_its_array_later_than_it_goes_on_comes_there_in_it():
    (job,) = place(2, [0])
    (again,) = place(2, [0], recorded={0: left(job, 7).numerics}, steps={0: 5})
    there = seated_at(again, 5)
    assert (there.array.slot, there.array.width) == (0, 2)
    assert there.numerics["array"] == "slot 0 of 2"
    assert seated_at(again, 7).array is None


@given(st.integers(1, 200), st.integers(1, 8), st.integers(2, 64))
def test_slots_that_no_trial_is_for_cost_as_much_as_the_others(trials, devices, width):
    """So many steps of an array as there are rounds of trials on each device."""
    taken = seats_taken(trials, devices, width)
    assert 1 <= taken <= width
    rounds = -(-trials // (devices * width))
    if trials >= devices:
        assert trials / taken / devices == pytest.approx(rounds)


def test_a_trials_part_of_a_step_is_by_those_that_share_it():
    asked = Asked()
    few, all_of_them = place(4, [0, 1], asked=asked), place(4, range(4), asked=asked)
    assert few[0].step_s == 2 * all_of_them[0].step_s


# ------------------------------------------------------------------ how passes run


def kinds(jobs):
    return [job.array.kind if job.array else None for job in jobs]


@pytest.mark.parametrize(
    ("at_once", "begins"),
    [(2, (4, "traced", ((1, 1),))), (4, (4, "traced", ((1, 1),))), (5, None), (None, None)],
)
def test_trials_begin_in_the_narrowest_named_array_that_holds_all_that_train_at_once(
    at_once, begins
):
    asked = width_wished("16/4/1 traced", at_once)
    assert asked == (begins or (16, "traced", ((4, 4), (1, 1))))
    assert width_wished(16, at_once) == (16, None, ())
    times = Times(prunes=True, generation=1, at_once=at_once)
    fusing = Fusing("16/4/1", [make_device(memory=2**28)], {}, times)
    jobs = place("16/4/1", range(2), fusing=fusing)
    assert {job.array.width for job in jobs} == {begins[0] if begins else 16}


def test_words_for_a_width_may_say_how_passes_run():
    assert width_wished(16) == (16, None, ())
    assert width_wished("16 compiled") == (16, "compiled", ())
    assert width_wished("16/4/1 traced") == (16, "traced", ((4, 4), (1, 1)))
    assert width_wished("auto") is None
    for odd in ("16 quick", "compiled", "", "16", "16 ", "4/16", "16//4"):
        with pytest.raises(SpecError, match="the width of arrays"):
            width_wished(odd)
    with pytest.raises(SpecError, match="of one width"):
        width_wished("16/4 compiled")


def test_a_width_that_is_asked_for_runs_as_a_graph_where_there_is_one():
    assert kinds(place(4, asked=Asked(graphs=True))) == ["traced"] * 6
    assert kinds(place(4, asked=Asked())) == ["eager"] * 6
    assert kinds(place("4 eager", asked=Asked(graphs=True))) == ["eager"] * 6


def test_a_graph_is_on_record_and_a_compiler_in_the_numerics_key():
    (job, *_) = place(4, asked=Asked(graphs=True))
    assert job.numerics["array_pass"] == "traced"
    (job, *_) = place(
        "4 compiled", asked=Asked(graphs=True), constants=dict.fromkeys(range(6), "a")
    )
    assert job.numerics["array_pass"] == "compiled, g++ 1"
    assert (job.numerics["array_floats"], job.array.constants) == ("a", "a")
    assert job.numerics["array"] == "slot 0 of 4"
    assert array_kind(job.numerics) == "compiled"
    assert array_kind({"array": "slot 0 of 4"}) == "eager"  # of a study of old
    assert left(job, 3).numerics["array_pass"] == "compiled, g++ 1"
    assert "array_pass" not in left(job, 0).numerics


def test_what_cannot_be_compiled_trains_alone_and_says_so():
    jobs = place("4 compiled", asked=Asked())
    assert widths(jobs) == [ALONE] * 6
    assert jobs[0].why[-1] == "unfused: no graph of this"


@pytest.mark.parametrize("wish", [None, 0, 2, "auto", "2 eager"])
@pytest.mark.parametrize("kind", ["eager", "traced", "compiled", "branches"])
def test_trials_that_go_on_run_as_they_did(wish, kind):
    graphs = Asked(graphs=True)
    before = place(f"3 {kind}", range(3), asked=graphs)
    recorded = {job.trial: job.numerics for job in before}
    again = place(wish, range(4), recorded=recorded, asked=graphs)
    assert kinds(again)[:3] == [kind] * 3
    assert [job.array.group for job in again[:3]] == [job.array.group for job in before]
    if wish != 0:
        assert kinds(again)[3] == kind


def test_what_graphs_keep_for_themselves_is_held():
    without, having = (place(4, asked=Asked(graphs=True, pool=pool)) for pool in (0, 5000))
    assert having[0].held_bytes == without[0].held_bytes + 5000
    assert having[0].peak_bytes == without[0].peak_bytes + 5000


def test_where_only_graphs_have_no_room_trials_run_without_them_to_the_same_bits():
    full = Asked(graphs=True, pool=2**29)
    (job, *_) = place(4, asked=full)
    assert (job.array.kind, job.held_bytes) == ("eager", place("4 eager")[0].held_bytes)
    (job, *_) = place("4 branches", asked=full)
    assert (job.array.kind, job.array.captures) == ("branches", False)
    assert job.peak_bytes < 2**28

    ample = Asked(graphs=True)
    (job, *_) = place("4 branches", asked=ample)
    assert job.array.captures
    recorded = {0: job.numerics}
    (again, *_) = place(None, [0], recorded=recorded, asked=full)
    assert again.numerics == job.numerics
    assert not again.array.captures


def test_a_trial_with_other_floats_is_in_another_array_than_the_compiled_one():
    constants = dict.fromkeys(range(5), "a") | {5: "b"}
    jobs = place("4 compiled", asked=Asked(graphs=True), constants=constants)
    assert kinds(jobs) == ["compiled"] * 5 + ["traced"]
    assert len({job.array.group for job in jobs}) == 2


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_as_many_devices_are_asked_as_the_trials_would_occupy(workers):
    asked = Asked(workers=workers)
    devices = [make_device() for _ in range(workers)]
    place("auto", range(8), asked=asked, fusing=Fusing("auto", devices, {}))
    assert len([o for o in asked.orders if o.kind == "eager"]) % workers == 0
    assert len(asked.orders) >= workers


def test_compiled_code_is_tried_and_taken_where_trials_are_long():
    class Quick(Asked):
        def answer(self, order):
            if isinstance(order, TimeArray):
                self.step_s = QUICK / 2 if self.orders[-1].kind == "compiled" else QUICK
            return super().answer(order)

    for steps, kind in ((100, "traced"), (10**6, "compiled")):
        times = Times(total=lambda batches, each, steps=steps: steps)
        fusing = Fusing("auto", [make_device()], {}, times)
        jobs = place("auto", asked=Quick(graphs=True), fusing=fusing)
        assert kinds(jobs) == [kind] * 6


class Dies(Asked):
    """Whose worker ends at its first answers."""

    def __init__(self, deaths, **options):
        super().__init__(**options)
        self._deaths = deaths

    def answer(self, order):
        if self._deaths:
            self._deaths -= 1
            return Gone("killed")
        return super().answer(order)


@pytest.mark.parametrize("wish", ["4 eager", "auto"])
@pytest.mark.parametrize("deaths", [1, 2])
def test_a_worker_that_ends_while_arrays_are_measured_is_asked_again(wish, deaths):
    asked = Dies(deaths, step_s=0.0001)
    assert widths(place(wish, asked=asked)) == widths(place(wish, asked=Asked(step_s=0.0001)))
    assert place(wish, asked=asked)[0].array is not None


def test_what_ends_a_worker_each_time_trains_alone_and_says_so():
    jobs = place("4 eager", asked=Dies(99))
    assert widths(jobs) == [ALONE] * 6
    assert "a worker ended while arrays were measured: killed" in jobs[0].why[-1]


def test_a_new_trial_joins_the_compiled_array_after_a_resume_too():
    floats, wish = {0: "A", 1: "B", 2: "B"}, "4 compiled"
    jobs = place(wish, range(3), constants=floats, asked=Asked(graphs=True))
    recorded = {job.trial: job.numerics for job in jobs}
    assert [job.array.kind for job in jobs] == ["traced", "compiled", "compiled"]
    later = place(
        wish,
        range(4),
        recorded=recorded,
        facts=dict.fromkeys(range(4), ONE),
        constants={**floats, 3: "B"},
        asked=Asked(graphs=True),
    )
    assert [job.array.kind for job in later] == ["traced", *["compiled"] * 3]


# -- batches that vary in length ----------------------------------------------------------


def of_batches(first):
    return Signature((*ONE.facts, ("batch", first)))


OPEN = "tuple(int64 [8, ~], int64 [8])"
FIRST = {n: of_batches(f"tuple(int64 [8, {30 + n}], int64 [8])") for n in range(4)}
OPEN_ALL = dict.fromkeys(range(4), OPEN)


def test_trials_that_differ_in_how_long_their_first_batches_are_share_an_array():
    fusing, asked = Fusing(4, [make_device(memory=2**28)], {}), Asked()
    facts = fusing.alike(FIRST, OPEN_ALL, {})
    jobs = place(4, range(4), facts=facts, fusing=fusing, asked=asked)
    assert [job.numerics["array"] for job in jobs] == [f"slot {n} of 4" for n in range(4)]
    assert {job.numerics["array_batches"] for job in jobs} == {OPEN}
    assert all(stacks_all(job.numerics) for job in jobs)
    assert all(order.varies for order in asked.orders)


def test_trials_on_record_go_on_with_the_kind_that_their_keys_have():
    """Also where it was not told which sizes vary: those are stacked with the first one's."""
    (before,) = place(4, [0], facts={0: FIRST[0]})
    (later,) = place(4, [1], facts={1: of_batches(OPEN)})
    recorded = {0: before.numerics, 1: later.numerics}
    fusing = Fusing(None, [make_device(memory=2**28)], recorded, on_record=4)
    facts = fusing.alike(FIRST, OPEN_ALL, {})
    jobs = place(None, range(4), facts=facts, fusing=fusing)
    groups = [job.numerics["array_group"] for job in jobs]
    assert groups == [before.numerics["array_group"], *[later.numerics["array_group"]] * 3]
    assert [stacks_all(job.numerics) for job in jobs] == [False, True, True, True]
    assert jobs[0].numerics == before.numerics
    assert jobs[1].numerics == later.numerics


def test_later_trials_come_to_the_kind_of_those_of_their_shape_that_have_ended():
    """Those looked at of trial 1 were of one length by luck; of another model nobody is there."""
    (ended,) = place(4, [0], facts={0: of_batches(OPEN)})
    fusing = Fusing(None, [make_device(memory=2**28)], {0: ended.numerics}, on_record=4)
    batches = FIRST[1].facts[-1]
    facts = {1: FIRST[1], 2: Signature((*OTHER.facts, batches))}
    found = fusing.alike(facts, dict.fromkeys(facts, batches[1]), {})
    assert found == {1: of_batches(OPEN), 2: facts[2]}


def test_who_looks_for_shards_is_told_that_batches_vary_in_length():
    fusing, told = Fusing(4, [make_device(memory=1)], {}), []

    def find(asking, trials, width, *, fits, one_base, varies):
        told.append(varies)
        return "no cut is small enough"

    facts = fusing.alike(FIRST, OPEN_ALL, {})
    specs = [TrialSpec(number=n, hp={"lr": 0.1}, seed=n) for n in range(4)]
    spilling = SimpleNamespace(is_forced=False, find=find)
    jobs = [make_job(n) for n in range(4)]
    jobs = fusing.places(jobs, specs, facts, Asked(), spilling=spilling)
    assert told == [True]
    assert widths(jobs) == [ALONE] * 4
    assert "are no array in shards: no cut is small enough" in jobs[0].why[-1]
