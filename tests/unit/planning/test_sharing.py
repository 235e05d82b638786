"""How many trials of different kinds share a device."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.spec import TrialSpec
from shoal.core.technique import Spilled
from shoal.core.turns import DEFAULT, LongestLeftFirst
from shoal.core.units import Bytes, Seconds
from shoal.memory.layout import TensorSpec, lay_out
from shoal.planner.job import make_job
from shoal.planner.keep import ALIKE
from shoal.planner.need import Request
from shoal.planner.predict import predict_shards
from shoal.planner.price import (
    LEAST_STEPS,
    MOST_ACTIONS,
    Speeds,
    _some_steps,
    mix_s,
    run_of,
)
from shoal.planning.planned import Settled
from shoal.planning.sharing import MOST, share
from shoal.program.replay import replay
from shoal.testing import make_layer, make_measure

MIB = 2**20
SPEEDS = Speeds(up_bytes_per_s=1e12, down_bytes_per_s=1e12)
_SPEC = TensorSpec("", (MIB // 4,), (1,), "float32", MIB)
CLIPPED = Request(micro_batches=1, clip=True, technique=None, prefers="host")


def kind(blocks, compute_s, host_s):
    """A trial that steps on the host: seconds of a step's kernels, and of the host's memory."""
    layers = [
        make_layer(
            f"layer {index}",
            MIB,
            forward_s=Seconds(compute_s / blocks / 4),
            backward_s=Seconds(3 * compute_s / blocks / 4),
            step_s=Seconds(host_s / blocks),
        )
        for index in range(blocks)
    ]
    measure = make_measure(layers, predict_shards(layers, tuple(range(1, blocks))))
    names = [[f"{index}.weight"] for index in range(blocks)]
    specs = {n: replace(_SPEC, name=n) for part in names for n in part}
    layout = lay_out(names, [[] for _ in names], specs, {}, [])
    technique = Spilled(
        shards=blocks,
        optimizer="host",
        lookahead=1,
        keep=(),
        order="micro",
        boundaries="device",
        transfer="fp32",
        recompute=True,
    )
    return Settled(measure=measure, layout=layout, technique=technique, why=("w",), active=3)


@pytest.fixture
def mix():
    """Six kinds, bound by the host and by the device, of long and short steps."""
    rates = [
        (8, 1.0, 4.0),
        (8, 4.0, 1.0),
        (12, 0.5, 2.0),
        (6, 2.0, 0.5),
        (10, 1.0, 1.0),
        (8, 3, 3),
    ]
    return {f"kind {index}": kind(*rate) for index, rate in enumerate(rates)}


def again(settled, active):
    return replace(settled, active=active)


def test_a_mix_has_more_places_where_it_takes_less_time_then(mix):
    found, places, _ = share(mix, list(mix), 2, again, CLIPPED, Bytes(1000 * MIB), SPEEDS)
    assert 2 < places <= MOST
    assert all(one.active == places for one in found.values())
    assert all("of the time that 2 at a time take" in one.why[1] for one in found.values())


def test_no_more_places_than_fit(mix):
    shared = share(mix, list(mix), 2, again, CLIPPED, Bytes(9 * MIB), SPEEDS)
    assert shared.places == 2
    assert {name: one.technique for name, one in shared.kinds.items()} == {
        name: one.technique for name, one in mix.items()
    }


def test_no_more_places_than_a_kind_can_do_with(mix):
    def refuse(settled, active):
        return None if active > 3 else replace(settled, active=active)

    _, places, _ = share(mix, list(mix), 2, refuse, CLIPPED, Bytes(1000 * MIB), SPEEDS)
    assert places in (2, 3)


def test_trials_of_one_kind_share_as_that_kind_does(mix):
    same = {"kind 0": mix["kind 0"]}
    present = ["kind 0"] * 6
    shared = share(same, present, 2, again, CLIPPED, Bytes(1000 * MIB), SPEEDS)
    assert shared == (same, 2, DEFAULT)


def test_no_more_places_than_trials(mix):
    two = {name: mix[name] for name in list(mix)[:2]}
    assert share(two, list(two), 2, again, CLIPPED, Bytes(1000 * MIB), SPEEDS).places == 2


def cut(settled, chunks):
    """With steps on the host in so many chunks."""
    shards = tuple(
        replace(shard, step_chunks=(Bytes(512),) * chunks) for shard in settled.measure.shards
    )
    return replace(settled, measure=replace(settled.measure, shards=shards))


def has_chunks(found):
    return {name: bool(one.measure.shards[0].step_chunks) for name, one in found.items()}


def test_steps_stay_in_one_piece_where_their_mix_is_sooner_through_so():
    # The longer one takes the host from the other at every chunk, and is hardly sooner for it.
    two = {"long": kind(7, 0.8, 2.0), "short": kind(2, 1.2, 1.2)}
    lengths = {"long": 3, "short": 6}
    two = {
        name: replace(one, measure=replace(one.measure, num_batches=lengths[name]))
        for name, one in ((name, cut(one, 4)) for name, one in two.items())
    }
    args = (["long", "short"], 2, again, CLIPPED, Bytes(1000 * MIB), SPEEDS)
    found, places, _ = share(two, *args, by_epochs=True)
    assert places == 2
    assert has_chunks(found) == {"long": False, "short": False}
    assert "in one piece" in found["long"].why[-1]


def test_chunks_stay_where_they_cost_nothing_and_where_one_trial_is_there_at_a_time(mix):
    chunked = {name: cut(one, 4) for name, one in list(mix.items())[1:3]}
    for places in (1, 2):
        args = (list(chunked), places, again, CLIPPED, Bytes(9 * MIB), SPEEDS)
        found, _, _ = share(chunked, *args)
        assert all(has_chunks(found).values())


def usual_and_other_s(kinds, shared):
    """What the mix takes by the usual rule, and by the one that was chosen."""
    runs = [
        run_of(one.measure.shards, one.measure.batch_bytes, one.technique, CLIPPED, SPEEDS)
        for one in shared.kinds.values()
    ]
    return [mix_s(runs, shared.places, rule) for rule in (DEFAULT, shared.rule)]


@pytest.mark.parametrize(
    ("rates", "rule"),
    [
        ([(2, 0.3, 1.8), (6, 3.6, 1.0)], "most steps left first"),
        ([(4, 0.4, 0.4), (2, 0.9, 2.9), (2, 2.6, 1.2)], "shortest step first"),
    ],
)
def test_another_rule_is_taken_where_the_mix_is_through_sooner_by_it(rates, rule):
    kinds = {f"kind {index}": kind(*rate) for index, rate in enumerate(rates)}
    shared = share(kinds, list(kinds), 2, again, CLIPPED, Bytes(9 * MIB), SPEEDS)
    assert shared.rule == rule
    usual_s, other_s = usual_and_other_s(kinds, shared)
    why = f"go {rule}: on paper they take {other_s / usual_s:.0%} of the time that they take "
    assert all(f"{why}{DEFAULT}" in one.why[-1] for one in shared.kinds.values())


_RATES = st.tuples(st.integers(2, 4), st.floats(0.2, 4.0), st.floats(0.2, 4.0))


@settings(max_examples=30, deadline=None)
@given(st.lists(_RATES, min_size=2, max_size=3))
def test_no_rule_is_taken_by_which_the_mix_takes_longer(rates):
    kinds = {f"kind {index}": kind(*rate) for index, rate in enumerate(rates)}
    shared = share(kinds, list(kinds), 2, again, CLIPPED, Bytes(9 * MIB), SPEEDS)
    usual_s, other_s = usual_and_other_s(kinds, shared)
    assert shared.rule == DEFAULT or other_s * ALIKE <= usual_s


@pytest.mark.parametrize("micros", [1, 4])
def test_the_worker_ranks_trials_by_the_seconds_that_the_replay_does(micros):
    one = kind(3, 1.0, 2.0)
    request = replace(CLIPPED, micro_batches=micros)
    speeds = replace(SPEEDS, host_step=10.0)
    job = make_job(
        TrialSpec(number=0, hp={}, seed=0),
        one.measure,
        one.layout,
        one.technique,
        request,
        (),
        {},
        speeds,
    )
    seen = []

    class Spy(LongestLeftFirst):
        def choose(self, candidates):
            seen.extend(candidates)
            return super().choose(candidates)

    run = run_of(one.measure.shards, one.measure.batch_bytes, one.technique, request, speeds)
    replay([replace(run, trial=trial) for trial in range(2)], policy=Spy())
    assert [one.step_s for one in seen] == pytest.approx([job.step_s] * len(seen))
    assert job.step_s > 20.0


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 10**6)), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_however_long_trials_are_a_replay_is_of_no_more_actions_than_a_plan_has_time_for(mix):
    runs = []
    for blocks, steps in mix:
        one = kind(blocks, 1.0, 2.0)
        args = (one.measure.shards, one.measure.batch_bytes, one.technique, CLIPPED, SPEEDS)
        runs.append(replace(run_of(*args), steps=steps))
    found = _some_steps(runs)
    total = sum(n * len(run.program.devices[0]) for n, run in zip(found, runs, strict=True))
    assert total <= MOST_ACTIONS
    assert min(found) >= LEAST_STEPS
    lengths = [run.steps for run in runs]
    assert found[lengths.index(max(lengths))] == max(found)
