"""The pure part of benchmarks/overlap: the device on paper, Hydra's rule, windows, mixes."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
from pathlib import Path

import pytest

from shoal.core.profile import PROFILES
from shoal.core.turns import DEFAULT, RULES
from shoal.program.check import check
from shoal.program.ir import Op
from shoal.program.replay import Run

_PLACE = Path(__file__).parents[3] / "benchmarks" / "overlap" / "paper.py"
_SPEC = importlib.util.spec_from_file_location("overlap_paper", _PLACE)
paper = importlib.util.module_from_spec(_SPEC)
sys.modules["overlap_paper"] = paper
_SPEC.loader.exec_module(paper)

sys.path.append(str(_PLACE.parent))  # turns.py imports what lies beside it
chunks, turns = map(importlib.import_module, ("chunks", "turns"))

H200 = PROFILES["h200"]
BALANCED = round(paper.balanced_tokens(H200))


def trial(**changes):
    settings = {"depth": 6, "width": 1024, "tokens": BALANCED, "clip": True, "steps": 6}
    return paper.Mixed(**settings | changes)


def runs_of(*trials):
    return [
        Run(program=t.program(), costs={0: t.costs(H200)}, steps=t.steps, trial=number)
        for number, t in enumerate(trials)
    ]


def of(spans, stream):
    return sorted((s.start_s, s.end_s) for s in spans if s.stream == stream)


def test_the_host_steps_one_shard_at_a_time_on_paper():
    heavy = trial(tokens=BALANCED // 4)

    spans = paper.on_paper(runs_of(heavy, heavy), H200)

    for (_, end), (start, _) in itertools.pairwise(of(spans, "host")):
        assert start >= end - 1e-12


def test_nothing_on_paper_is_quicker_than_the_roofline():
    heavy = trial(tokens=BALANCED // 4)
    needs = paper.total(t.demand(H200).times(t.steps) for t in (heavy, heavy))

    took_s = max(span.end_s for span in paper.on_paper(runs_of(heavy, heavy), H200))

    assert took_s >= needs.roofline_s


def test_a_copy_is_slower_while_the_other_direction_is_busy():
    one = trial()
    loads = sum(action.op is Op.LOAD for action in one.program())
    alone_s = one.demand(H200).up / loads

    lengths = {
        round((end - start) / alone_s, 3)
        for start, end in of(paper.on_paper(runs_of(one), H200), "up")
    }

    assert lengths == {1.0, round(paper.slower(H200), 3)}


def test_no_more_trials_begin_than_there_are_places():
    spans = paper.on_paper(runs_of(trial(), trial(), trial(steps=3)), H200, active=2)

    computed = [s for s in spans if s.stream == "compute"]
    third = min(s.start_s for s in computed if s.trial == 2)
    first_end = min(max(s.end_s for s in computed if s.trial == t) for t in (0, 1))
    assert {s.trial for s in spans} == {0, 1, 2}
    assert third >= first_end


@pytest.mark.parametrize("everything", [True, False])
def test_hydras_rule_is_a_sound_program(everything):
    one = trial()
    costs = paper.device_costs(one.shards(H200), H200)

    found = check(paper.hydra_step(one.depth, everything=everything), {0: costs})

    params = sum(shard.parameter_bytes for shard in costs.shards)
    forward = params - costs.shards[-1].parameter_bytes
    whole = 3 if everything else 1  # AdamW's state is twice the parameters
    last = 3 * params + params  # parameters, state and gradients of the late step
    assert found.up_bytes == whole * (forward + params) + last
    assert found.down_bytes == whole * (forward + params) + params + 3 * params


def test_the_pace_counts_only_where_that_many_trials_are_past_their_warm_up():
    pieces = [
        piece
        for number, begin in ((0, 0.0), (1, 0.5))
        for step in range(4)
        for piece in (
            paper.Piece(number, Op.B, begin + step, begin + step + 0.4, 0.4),
            paper.Piece(number, Op.SYNC, begin + step + 0.4, begin + step + 0.4, 0.0),
        )
    ]

    both = paper.pace(pieces, active=2, step_s=0.4)
    one = paper.pace(pieces, active=1, step_s=0.4)

    assert both.seconds == pytest.approx(1.5)  # from 1.9 to 3.4
    assert both.busy == pytest.approx(0.8)
    assert both.steps_per_s == pytest.approx(2.0)
    assert one.seconds == pytest.approx(1.0)  # 0.5 before, 0.5 after


def test_work_that_took_the_machine_longer_counts_as_the_profile_says():
    pieces = [
        paper.Piece(0, Op.SYNC, 0.0, 0.0, 0.0),
        paper.Piece(0, Op.B, 0.0, 2.0, 1.0),
        paper.Piece(0, Op.SYNC, 2.0, 2.0, 0.0),
    ]

    assert paper.pace(pieces, active=1, step_s=1.0, warm_up=1).busy == pytest.approx(0.5)


def test_a_pace_needs_a_time_to_count():
    with pytest.raises(ValueError, match="2 trials were past step 2"):
        paper.pace(paper.pieces_of(paper.on_paper(runs_of(trial()), H200)), active=2, step_s=1.0)


def test_with_balanced_tokens_the_host_takes_as_long_as_the_kernels():
    needs = trial(depth=64).demand(H200)

    assert needs.compute == pytest.approx(needs.host, rel=0.01)


def test_a_mix_is_its_seeds():
    assert paper.random_mix(3, H200, length_s=1.0) == paper.random_mix(3, H200, length_s=1.0)
    assert paper.random_mix(3, H200, length_s=1.0) != paper.random_mix(4, H200, length_s=1.0)


def test_a_mix_is_never_quicker_than_its_roofline():
    mix = paper.random_mix(0, H200, trials=3, length_s=0.5)

    for active in (1, 2, 3):
        found = paper.replay_mix(mix, H200, active=active)
        assert 0 < found.whole <= 1
        assert 0 < found.full <= 1 + 1e-9


def test_a_mix_that_was_measured_is_judged_by_the_profiles_seconds():
    works = [
        paper.Work(0, "compute", 10.0, 12.0, 1.0),  # took the machine longer
        paper.Work(0, "host", 12.0, 13.0, 1.0),
        paper.Work(1, "compute", 12.0, 14.0, 2.0),
        paper.Work(1, "host", 14.0, 15.0, 1.0),
    ]

    found = paper.pace_of_mix(works)

    assert found.whole == pytest.approx(3.0 / 5.0)
    assert found.full == pytest.approx(2.0 / 3.0)  # until 13.0: one second, and one of two


def test_no_place_is_empty_while_a_trial_waits_for_one():
    works = [
        paper.Work(0, "compute", 0.0, 1.0, 1.0),
        paper.Work(1, "compute", 1.0, 3.0, 2.0),
        paper.Work(2, "host", 2.0, 4.0, 2.0),  # 0's place
    ]

    found = paper.pace_of_mix(works)

    assert found.whole == pytest.approx(3.0 / 4.0)
    assert found.full == pytest.approx(3.0 / 3.0)


def test_a_copy_on_paper_counts_with_the_seconds_of_a_link_of_its_own():
    one = trial()

    works = paper.works_of(paper.on_paper(runs_of(one), H200), H200)

    found, expected = paper.done_by(works, float("inf")), one.demand(H200).times(one.steps)
    assert found == pytest.approx(tuple(expected))


def test_a_place_stays_empty_when_all_but_so_many_have_ended():
    works = [
        paper.Work(0, "compute", 0.0, 2.0, 2.0),
        paper.Work(1, "compute", 2.0, 3.0, 1.0),
        paper.Work(2, "host", 1.0, 4.0, 3.0),  # it begins before 0 has ended
    ]

    assert paper.pace_of_mix(works).full == pytest.approx(2.0 / 2.0)
    assert paper.pace_of_mix(works, 2).full == pytest.approx(3.0 / 3.0)
    assert paper.pace_of_mix(works, 1).full == pytest.approx(3.0 / 4.0)


def test_every_rule_is_replayed_on_a_mix():
    took = turns.play("few", 0)
    assert set(took) == {*turns.OTHERS, *set(RULES) - {DEFAULT}, turns.PLANNED}
    assert min(took.values()) > 0


def test_what_chunks_are_worth_is_replayed_on_a_mix():
    found = chunks.play(chunks.few_shards(0, H200, length_s=2.0), H200, None)
    assert found.makespan_s > 0
    assert 0.3 < found.roofline <= 1
