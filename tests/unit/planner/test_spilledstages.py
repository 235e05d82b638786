"""Pipelines of spilled stages on paper: where shards are, what stays, what it needs and takes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from shoal.core.spec import JobMeasure
from shoal.core.technique import Pipelined, spans_of
from shoal.core.units import Bytes, Seconds
from shoal.planner import spilledstages
from shoal.planner.choose import about_s, choices
from shoal.planner.need import Request
from shoal.planner.paper import Paper
from shoal.planner.price import Speeds
from shoal.planner.spilledstages import fitted, smallest, spilled_candidates
from shoal.planner.steptime import Terms
from shoal.testing import make_layer

KIB, MIB = 2**10, 2**20
FAST = Speeds(up_bytes_per_s=1e15, down_bytes_per_s=1e15, source="a test")


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
    """Layers of a mebibyte with two of state, that take 40 ms, a third of it forward."""
    values = {
        "state_bytes": Bytes(2 * MIB),
        "boundary_bytes": Bytes(16 * KIB),
        "carry_bytes": Bytes(16 * KIB),
        "private_bytes": Bytes(16 * KIB),
        "saved_bytes": Bytes(64 * KIB),
        "forward_peak_bytes": Bytes(32 * KIB),
        "backward_peak_bytes": Bytes(MIB + 128 * KIB),
        "forward_s": Seconds(0.012),
        "backward_s": Seconds(0.040),
        "step_s": Seconds(0.001),
    }
    return [make_layer(f"block {i}", MIB, **(values | changes)) for i in range(count)]


def terms(found, *, micro_batches=4, clip=False, speeds=FAST):
    request = Request(
        micro_batches=micro_batches, clip=clip, technique=None, prefers="host", varies=False
    )
    return Terms(measure=found, request=request, speeds=speeds)


def found(asked=None, *, budget=8 * MIB, layers=None, devices=2, trials=1, **options):
    some = terms(measure(layers or alike(12)), **options)
    return spilled_candidates(asked or Pipelined(), some, Bytes(budget), devices, trials)


def best(*args, **options):
    return found(*args, **options)[0]


def test_every_candidate_fits_and_leaves_nothing_open():
    for one in found(devices=3):
        technique = one.technique
        assert one.need.total <= 8 * MIB
        assert technique.shards == len(one.stages)
        assert None not in (technique.optimizer, technique.lookahead, technique.keep)
        assert None not in (technique.keep_gradients, technique.recompute, technique.cuts)
        assert one.gang == technique.stages == len(spans_of(technique, one.stages))
        assert one.step_s > 0


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("schedule", ["naive", "gpipe", "flush"])
def test_no_stage_needs_more_than_is_reserved_on_each_device(schedule, clip):
    for one in found(Pipelined(schedule=schedule), clip=clip):
        for need in one.needs:
            assert one.need.held >= need.held
            assert one.need.total >= max(need.total, need.peak)


def test_room_keeps_shards_and_gradients_on_their_devices():
    small, large = (best(Pipelined(stages=2), budget=size * MIB) for size in (7, 40))
    assert len(small.technique.keep) < small.technique.shards
    assert len(large.technique.keep) == large.technique.shards
    assert large.technique.recompute is False
    moved = [sum(need.moved for need in one.needs) for one in (small, large)]
    assert moved[1] == 0 < moved[0]


def test_what_borrows_is_never_kept():
    layers = alike(8)
    layers[-1] = replace(layers[-1], borrowed_bytes=Bytes(MIB))
    for one in found(Pipelined(stages=2), layers=layers, budget=60 * MIB):
        assert one.technique.shards - 1 not in one.technique.keep


def test_where_memory_is_shorter_there_are_more_shards():
    def fewest(size):
        return min(len(one.stages) for one in found(Pipelined(stages=2), budget=size * MIB))

    assert fewest(20) < fewest(7)


def test_no_other_number_of_shards_is_clearly_quicker():
    """The few that are tried, against all; over a link of 400 MB/s, with large ends."""
    layers = alike(12)
    layers[0] = replace(layers[0], parameter_bytes=Bytes(3 * MIB), backward_s=Seconds(0.16))
    layers[-1] = replace(layers[-1], parameter_bytes=Bytes(4 * MIB))
    speeds = Speeds(up_bytes_per_s=4e8, down_bytes_per_s=4e8, source="a test")
    open_ = Pipelined(stages=2, optimizer="host")
    options = {"layers": layers, "budget": 16 * MIB, "speeds": speeds, "micro_batches": 2}
    some = found(open_, **options)
    counts = range(min(one.technique.shards for one in some), 13)
    each = [one for n in counts for one in found(replace(open_, shards=n), **options)]
    assert min(one.step_s for one in some) <= 1.05 * min(one.step_s for one in each)


def test_stages_are_as_quick_as_each_other_and_shards_as_small():
    layers = alike(12)
    layers[0] = replace(layers[0], forward_s=Seconds(0.06), backward_s=Seconds(0.2))
    one = best(Pipelined(stages=2, shards=6), layers=layers, budget=30 * MIB)
    (_first, stop), _ = spans_of(one.technique, one.stages)
    assert one.stages[stop - 1].layers[1] <= 5  # the slow layer counts for five
    sizes = [shard.layers[1] - shard.layers[0] for shard in one.stages]
    assert max(sizes) - min(sizes) <= 1


def test_slow_links_make_gpipe_worth_its_activations():
    """A load is paid once a step for all forwards, instead of once for each of them."""
    slow = Speeds(up_bytes_per_s=2e7, down_bytes_per_s=2e7, source="a test")
    times = {
        schedule: best(
            Pipelined(schedule=schedule, stages=2, keep=()),
            micro_batches=12,
            speeds=slow,
        ).step_s
        for schedule in ("flush", "gpipe")
    }
    assert times["gpipe"] < 0.7 * times["flush"]


def test_the_time_is_no_less_than_the_work_and_the_links_allow():
    slow = Speeds(up_bytes_per_s=5e7, down_bytes_per_s=5e7, source="a test")
    for one in found(speeds=slow, devices=3):
        micros = one.technique.micro_batches
        units = sum(shard.backward_s for shard in one.stages) * micros / one.gang
        moved = max(need.moved for need in one.needs) / 2 / 5e7
        assert one.step_s >= 0.9 * max(units, moved)


def test_what_is_asked_for_is_what_is_settled():
    asked = Pipelined(stages=2, shards=7, optimizer="device", lookahead=0, keep=(1, 5))
    (one, *_) = found(asked, budget=30 * MIB)
    technique = one.technique
    assert (technique.shards, technique.optimizer, technique.lookahead) == (7, "device", 0)
    assert technique.keep == (1, 5)
    assert found(asked, budget=3 * MIB) == []


def test_to_stop_at_the_first_stage_that_does_not_fit_changes_no_choice(monkeypatch):
    options = {"budget": 9 * MIB, "layers": alike(8), "micro_batches": 2}
    quickly = found(**options)

    def fits(self, budget):
        return all([need.most <= budget for need in self.needs])

    monkeypatch.setattr(spilledstages._Paper, "fits", fits)
    assert quickly == found(**options)


def test_what_one_device_would_take_is_told_about_right():
    """Of the fewest shards, where the search would find better ones."""
    some, budget = terms(measure(alike(8))), Bytes(8 * MIB)
    args = (some.measure, budget, some.request, some.speeds)
    best = next(choices(some.measure, budget, (1,), some.request, some.speeds))
    least_s = Paper(some.measure, some.request).step_s(best, some.speeds, budget)
    assert least_s <= about_s(*args) <= 1.25 * least_s
    assert about_s(some.measure, Bytes(MIB), some.request, some.speeds) is None


def test_cuts_that_were_asked_for_are_the_stages_ends():
    one = best(Pipelined(cuts=(3,), shards=6), budget=30 * MIB)
    assert one.technique.cuts == (3,)
    assert 3 in [shard.layers[0] for shard in one.stages]


def test_measured_shards_say_anew_what_stays():
    asked, some = Pipelined(stages=2), terms(measure(alike(12)))
    one = best(asked, budget=16 * MIB)
    larger = [replace(s, backward_peak_bytes=Bytes(2 * MIB)) for s in one.stages]
    again = fitted(asked, one, larger, some, None, Bytes(16 * MIB))
    assert again is not None
    assert len(again.technique.keep) <= len(one.technique.keep)
    assert again.need.total <= 16 * MIB
    assert fitted(asked, one, larger, some, None, Bytes(2 * MIB)) is None


def test_the_finest_cut_says_what_is_needed_at_least():
    some = terms(measure(alike(12)))
    least = smallest(Pipelined(), some, 2)
    assert len(least.stages) == 12
    assert found(budget=least.need.total)
    assert not found(budget=MIB)


def test_layers_that_may_not_part_stay_together():
    layers = [replace(x, cut_after=i % 3 == 2) for i, x in enumerate(alike(12))]
    for one in found(layers=layers, budget=60 * MIB):
        cuts = [b.layers[0] for _, b in itertools.pairwise(one.stages)]
        assert all(cut % 3 == 0 for cut in cuts)
    assert found(Pipelined(shards=5), layers=layers, budget=60 * MIB) == []
