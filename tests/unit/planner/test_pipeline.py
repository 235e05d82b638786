"""A pipeline on paper: what stages need, where they are cut, which is the best."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from shoal.core.spec import JobMeasure
from shoal.core.technique import SCHEDULES, Pipelined
from shoal.core.units import Bytes, Seconds
from shoal.memory.layout import TensorSpec, lay_out
from shoal.pipeline.check import check_pipeline
from shoal.planner.need import Request
from shoal.planner.pipeline import (
    Alternative,
    candidates,
    is_worth,
    staged,
    study_s,
)
from shoal.planner.price import Speeds
from shoal.planner.stages import Split, as_stages, predicted
from shoal.planner.steptime import Terms, pipeline_of
from shoal.program.costs import JobCosts
from shoal.testing import make_layer, make_shard

KIB, MIB = 2**10, 2**20
FAST = Speeds(up_bytes_per_s=1e15, down_bytes_per_s=1e15, source="a test")
LARGE = Bytes(2**40)


def measure(layers, **changes):
    values = {
        "layers": tuple(layers),
        "shards": (),
        "batch_bytes": Bytes(KIB),
        "buffer_bytes": Bytes(0),
        "resident_bytes": Bytes(0),
        "num_batches": 64,
        "valid_scale": 1.0,
        "optimizer": "AdamW",
        "cuttable": True,
        "bitwise": True,
        "draws": False,
    }
    return JobMeasure(**(values | changes))


def alike(count, **changes):
    """Layers of a mebibyte that take 40 ms, a third of it forward."""
    values = {
        "boundary_bytes": Bytes(MIB // 8),
        "carry_bytes": Bytes(MIB // 8),
        "private_bytes": Bytes(MIB // 8),
        "saved_bytes": Bytes(MIB),
        "forward_peak_bytes": Bytes(MIB // 2),
        "backward_peak_bytes": Bytes(3 * MIB),
        "forward_s": Seconds(0.012),
        "backward_s": Seconds(0.040),
        "step_s": Seconds(0.001),
    }
    return [make_layer(f"block {i}", MIB, **(values | changes)) for i in range(count)]


def terms(found, *, micro_batches=4, clip=False, speeds=FAST, casts=False):
    request = Request(
        micro_batches=micro_batches, clip=clip, technique=None, prefers="host", varies=False
    )
    return Terms(measure=found, request=request, speeds=speeds, casts=casts)


def best(found, budget=LARGE, *, devices=4, trials=1, asked=None, **options):
    return candidates(
        asked or Pipelined(), terms(found, **options), Bytes(budget), devices, trials
    )[0]


# -- messages ----------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["flush", "2bw"])
def test_stages_run_ahead_where_messages_are_slow(schedule):
    slow = alike(8, boundary_bytes=Bytes(8 * MIB), carry_bytes=Bytes(8 * MIB))
    asked = Pipelined(schedule=schedule, stages=4, recompute=False)

    def best_of(layers, budget=LARGE, **changes):
        return best(measure(layers), budget, micro_batches=8, asked=replace(asked, **changes))

    chosen, not_ahead, some = (best_of(slow, **how) for how in ({}, {"lag": 0}, {"lag": 1}))
    assert (chosen.technique.lag, not_ahead.technique.lag) == (3, 0)
    assert chosen.step_s < 0.95 * not_ahead.step_s
    assert chosen.step_s < some.step_s
    assert chosen.need.total > not_ahead.need.total
    assert best_of(slow, budget=chosen.need.total - 1).technique.lag == 0
    assert best_of(alike(8, boundary_bytes=Bytes(0), carry_bytes=Bytes(0))).technique.lag == 0


def test_half_backwards_do_not_run_ahead():
    slow = alike(8, boundary_bytes=Bytes(8 * MIB), carry_bytes=Bytes(8 * MIB))
    for schedule in ("naive", "gpipe", "zb-h1"):
        assert best(measure(slow), asked=Pipelined(schedule=schedule)).technique.lag == 0


# -- bytes -------------------------------------------------------------------------------------


def test_what_passes_through_a_stage_is_held_by_all_after_it():
    shards = [
        make_shard(0),
        make_shard(1, boundary_bytes=Bytes(100), private_bytes=Bytes(70)),
        make_shard(2, boundary_bytes=Bytes(80), private_bytes=Bytes(80)),
        make_shard(3, boundary_bytes=Bytes(60), private_bytes=Bytes(60)),
    ]
    assert [s.boundary_bytes for s in as_stages(shards)] == [0, 100, 110, 90]


def test_a_piece_of_a_batch_has_its_rows_and_all_of_the_weights():
    split = Split(pieces=4, casts=True)
    shard = make_shard(
        1,
        4000,
        boundary_bytes=Bytes(101),
        carry_bytes=Bytes(1000),
        saved_bytes=Bytes(10_000),
        backward_peak_bytes=Bytes(16_000),
        forward_s=Seconds(0.4),
    )
    (stage,) = as_stages([replace(shard, index=0)], split, [600])
    assert stage.boundary_bytes == 26  # rounded up
    assert stage.carry_bytes == 600 + 100
    assert stage.saved_bytes == 2000 + 2000  # bfloat16 copies of the weights
    assert stage.backward_peak_bytes == 2000 + 4000 + 2500
    assert stage.forward_s == pytest.approx(0.1)
    assert stage.parameter_bytes == stage.gradient_bytes == 4000
    assert as_stages([shard])[0] == shard


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_no_stage_needs_more_than_is_reserved_on_each_device(schedule, clip, recompute):
    found = measure(alike(9), buffer_bytes=Bytes(100))
    asked = Pipelined(
        schedule=schedule,
        stages=3,
        cuts=(2, 6),
        micro_batches=4,
        recompute=recompute,
        predict=schedule == "2bw",
    )
    some = terms(found, clip=clip)
    one = staged(asked, predicted(found.layers, (2, 6)), some, None)
    pipeline = pipeline_of(asked, one.stages, some, (4,) * 4)
    costs = {0: JobCosts(shards=one.stages, batch_bytes=Bytes(KIB))}
    prints = check_pipeline(pipeline, pipeline.program(), costs)
    reserved = one.need
    for stage, (need, found_) in enumerate(zip(one.needs, prints, strict=True)):
        guess = one.stages[stage].owned_bytes if schedule == "2bw" else 0
        assert need.peak >= found_.peak_bytes + 100 + guess
        assert need.held + need.unit >= need.peak
        assert reserved.held >= need.held
        assert reserved.total >= need.total
        assert reserved.peak >= need.peak
    assert one.needs[one.neediest].total == reserved.total


def test_two_versions_and_a_guess_are_copies_of_the_weights():
    layers = alike(6)
    plain = {"stages": 3, "cuts": (2, 4), "micro_batches": 4, "recompute": True}
    shards, some = predicted(layers, (2, 4)), terms(measure(layers))

    def held(**how):
        return staged(Pipelined(**plain, **how), shards, some, None).needs[2].held

    once, twice = held(), held(schedule="2bw")
    assert twice - once >= 2 * MIB  # its last stage has one micro-batch in flight in both
    assert held(schedule="2bw", predict=True) == twice + 2 * MIB
    clipped = staged(
        Pipelined(**plain, schedule="2bw"), shards, terms(measure(layers), clip=True), None
    )
    assert clipped.needs[2].held >= twice + 2 * MIB  # gradients of two steps


def test_a_model_that_draws_has_its_first_stage_run_the_others_forwards():
    layers = alike(6)
    layers[-1] = replace(layers[-1], forward_peak_bytes=Bytes(64 * MIB))
    technique = Pipelined(stages=2, cuts=(3,), micro_batches=4, recompute=False)
    still, draws = (
        staged(technique, predicted(layers, (3,)), terms(measure(layers, draws=d)), None)
        for d in (False, True)
    )
    assert still.needs[0].total < 64 * MIB < draws.needs[0].total
    assert draws.needs[1].total == still.needs[1].total


def test_tied_weights_come_back_with_the_gradients_of_every_stage_between():
    names = [["a"], ["b"], ["c"]]
    specs = {n: TensorSpec(n, (128,), (1,), "float32", 512) for n in "abc"}
    layout = lay_out(names, [[], [], ["a"]], specs, {}, [])
    shards = [make_shard(i, 512, carry_bytes=Bytes(i and 1024)) for i in range(3)]
    technique = Pipelined(stages=3, cuts=(1, 2), micro_batches=8, recompute=False)
    one = staged(technique, shards, terms(measure([])), layout)
    assert [stage.carry_bytes for stage in one.stages] == [0, 512 + 256, 512 + 256]


# -- cuts --------------------------------------------------------------------------------------


def test_the_slowest_stage_is_as_quick_as_can_be():
    layers = alike(6)
    layers[0] = replace(layers[0], backward_s=Seconds(0.150), forward_s=Seconds(0.05))
    one = best(measure(layers), asked=Pipelined(stages=2))
    assert one.technique.cuts == (2,)  # 190 ms and 160 ms, not 230 ms and 120 ms


def test_a_cut_that_does_not_fit_is_not_the_answer_where_another_one_does():
    layers = alike(8, saved_bytes=Bytes(8 * MIB), backward_peak_bytes=Bytes(10 * MIB))
    free = best(measure(layers), asked=Pipelined(stages=2, recompute=False))
    assert free.technique.cuts == (4,)
    assert free.needs[0].total > free.needs[1].total  # it has more in flight
    budget = Bytes(free.needs[0].total - 1)
    tight = best(measure(layers), budget, asked=Pipelined(stages=2, recompute=False))
    assert tight.technique.cuts == (3,)
    assert tight.need.total <= budget


def test_forwards_run_again_only_where_what_they_save_does_not_fit():
    layers = alike(8, saved_bytes=Bytes(8 * MIB), backward_peak_bytes=Bytes(10 * MIB))
    found, asked = measure(layers), Pipelined(stages=2)
    roomy = best(found, asked=asked)
    assert roomy.technique.recompute is False
    kept = best(found, asked=Pipelined(stages=2, recompute=False))
    again = best(found, asked=Pipelined(stages=2, recompute=True))
    assert again.need.total < kept.need.total
    assert best(found, again.need.total, asked=asked).technique.recompute is True


def test_layers_that_belong_together_are_never_parted():
    layers = alike(6)
    layers[2] = replace(layers[2], cut_after=False)
    for stages in (2, 3, 4, 5):
        cuts = best(measure(layers), devices=8, asked=Pipelined(stages=stages)).technique.cuts
        assert 3 not in cuts
    asked = Pipelined(stages=6)
    assert not candidates(asked, terms(measure(layers)), LARGE, 8, 1)


def test_what_should_not_fit_comes_last_and_the_nearest_of_it_first():
    found = candidates(Pipelined(), terms(measure(alike(8))), Bytes(1), 4, 1)
    totals = [one.need.total for one in found]
    assert totals == sorted(totals)
    assert {len(one.stages) for one in found} == {2, 3, 4}


# -- time --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("micros", [4, 16, 64])
def test_bubbles_are_those_of_the_formula(stages, micros):
    layers = alike(8, step_s=Seconds(0.0))
    asked = Pipelined(stages=stages, recompute=False, micro_batches=micros)
    one = best(measure(layers), micro_batches=micros, asked=asked)
    # A last stage has no forward of its own, so a step ends a little sooner.
    assert one.bubbles == pytest.approx((stages - 1) / (micros + stages - 1), rel=0.25)
    whole_s = micros * 8 * 0.040
    assert one.step_s * stages * (1 - one.bubbles) == pytest.approx(whole_s, rel=0.02)


def test_a_long_step_goes_on_as_the_end_of_a_shorter_one():
    layers, asked = alike(8), Pipelined(stages=4, recompute=False)
    short, long = (
        best(measure(layers), micro_batches=m, asked=replace(asked, micro_batches=m))
        for m in (48, 480)
    )
    assert long.step_s == pytest.approx(short.step_s + 432 * 2 * 0.040, rel=0.01)


def test_2bw_has_no_bubbles_and_is_never_chosen():
    layers = alike(8)
    stale = best(measure(layers), asked=Pipelined(stages=4, schedule="2bw"))
    plain = best(measure(layers), asked=Pipelined(stages=4))
    assert stale.bubbles < 0.1 < plain.bubbles
    every = candidates(Pipelined(), terms(measure(layers)), LARGE, 4, 1)
    assert {one.technique.schedule for one in every} == {"flush"}


def test_2bw_has_no_more_stages_than_micro_batches():
    asked = Pipelined(schedule="2bw")
    found = candidates(asked, terms(measure(alike(8)), micro_batches=3), LARGE, 8, 1)
    assert {len(one.stages) for one in found} == {2, 3}
    short = replace(terms(measure(alike(8)), micro_batches=8), shortest=2)
    assert {len(one.stages) for one in candidates(asked, short, LARGE, 8, 1)} == {2}
    pieces = replace(asked, micro_batches=16)
    assert len(candidates(pieces, short, LARGE, 8, 1)[0].stages) == 4


def test_one_trial_has_all_devices_and_many_have_as_few_as_do():
    found = measure(alike(8))
    assert len(best(found, devices=4, trials=1).stages) == 4
    assert len(best(found, devices=4, trials=20).stages) == 2  # the fewest bubbles


def test_where_stages_gain_nothing_the_fewest_devices_are_taken():
    lone = [make_layer("long", backward_s=Seconds(1.0)), *alike(3, backward_s=Seconds(1e-6))]
    assert len(best(measure(lone), devices=4).stages) == 2


def test_a_slow_link_makes_messages_count():
    slow = Speeds(up_bytes_per_s=1e7, down_bytes_per_s=1e7, source="a test")
    fast_s, slow_s = (best(measure(alike(8)), speeds=s).step_s for s in (FAST, slow))
    assert slow_s > 1.2 * fast_s


def test_a_pipeline_has_to_be_clearly_better_than_one_device():
    one = best(measure(alike(8)), asked=Pipelined(stages=2), devices=2)
    for trials, devices in itertools.product((1, 2, 5), (2, 3, 4)):
        seconds = study_s(one, devices, trials)
        alone = Seconds(seconds / -(-trials // devices))
        same = Alternative(name="spilled", step_s=alone)
        slower = Alternative(name="spilled", step_s=Seconds(1.2 * alone))
        assert not is_worth(one, same, devices, trials)
        assert is_worth(one, slower, devices, trials)


def test_as_many_trials_as_devices_are_spilled_unless_that_takes_all_devices_time():
    one = best(measure(alike(8)), asked=Pipelined(stages=2), devices=2)
    times = {n: Alternative(name="spilled", step_s=Seconds(n * one.step_s)) for n in (1.5, 2.5)}
    assert is_worth(one, times[1.5], 2, 1)
    assert not is_worth(one, times[1.5], 2, 2)
    assert is_worth(one, times[2.5], 2, 2)


# -- copies ------------------------------------------------------------------------------------


def test_two_copies_take_half_the_time_where_messages_are_quick():
    found = measure(alike(8))
    one = best(found, micro_batches=32, asked=Pipelined(stages=2))
    two = best(found, micro_batches=32, asked=Pipelined(stages=2, width=2))
    assert two.technique.width == 2
    assert len(two.stages) == 2
    assert two.step_s == pytest.approx(one.step_s / 2, rel=0.1)
    assert two.bubbles < 0.15


def test_as_many_stages_as_devices_allow_each_copy():
    found = measure(alike(8))
    two = best(found, devices=9, micro_batches=32, asked=Pipelined(width=2))
    assert len(two.stages) == 4
    assert study_s(two, 9, 4) == 4 * two.step_s


def test_a_slow_link_makes_sums_count():
    found = measure(alike(8))

    def part(speeds):
        each = [Pipelined(stages=2, width=width) for width in (1, 2)]
        one, two = (best(found, micro_batches=8, asked=a, speeds=speeds).step_s for a in each)
        return two / one

    assert part(replace(FAST, down_bytes_per_s=2e7)) > part(FAST) + 0.05


def test_adding_up_the_copies_gradients_takes_its_part_of_a_step():
    """A step moves 2 of parameters and 1 of gradients and takes a second: so does a sum of two."""

    def step_s(width, seconds):
        layers = alike(8, step_s=Seconds(seconds), state_bytes=Bytes(0))
        asked = Pipelined(stages=2, width=width)
        return best(measure(layers), micro_batches=8, asked=asked).step_s

    adding_s = [step_s(width, 0.1) - step_s(width, 0.0) for width in (1, 2)]
    assert adding_s[1] == pytest.approx(2 * adding_s[0])


@pytest.mark.parametrize("schedule", ["flush", "2bw"])
def test_gradients_of_other_copies_are_among_what_a_stage_needs(schedule):
    found = measure(alike(8))
    asked = {"stages": 2, "schedule": schedule}
    one, two = (best(found, micro_batches=8, asked=Pipelined(**asked, width=w)) for w in (1, 2))
    more = two.needs[1].total - one.needs[1].total
    sets = 3 if schedule == "2bw" else 2  # a second step's, one that comes and one that goes
    assert more == pytest.approx(sets * one.stages[1].gradient_bytes, rel=0.01)
