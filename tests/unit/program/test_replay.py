"""Programs on paper: one device, shared links, several trials, several devices."""

import dataclasses
import itertools

import pytest

from shoal.core.errors import ProgramError
from shoal.core.units import Seconds
from shoal.program.ir import Op, Part, parse_program
from shoal.program.replay import Run, replay
from shoal.spill.generate import resident_step, spilled_step

RESIDENT = {0: (Part.PARAM, Part.STATE)}
LINKS = {"up_bytes_per_s": 100.0, "down_bytes_per_s": 100.0}


@pytest.fixture
def run_of(make_costs):
    """A run of a program, given as text or as a program, with links of 100 bytes a second."""

    def build(program, num_shards=2, trial=0, shard=None, **options):
        if isinstance(program, str):
            program = parse_program(program)
        costs = make_costs(num_shards, trials=(trial,), shard=shard, **LINKS)
        return Run(program=program, costs=costs, **options)

    return build


def for_trial(program, trial):
    lines = str(program).splitlines()
    return "\n".join(f"{line} t{trial}" if trial else line for line in lines)


def times(timeline, stream=None):
    """Action text to (start, end)."""
    return {
        str(span.action): (span.start_s, span.end_s)
        for span in timeline.spans
        if stream in (None, span.stream)
    }


def test_a_unit_starts_when_its_load_is_complete(run_of):
    found = times(replay([run_of("LOAD s0 param\nF s0 m0\nDROP s0 param")]))
    assert found == {"LOAD s0 param": (0, 1), "F s0 m0": (1, 2)}


def test_a_prefetch_goes_on_while_the_unit_before_computes(run_of):
    found = times(replay([run_of(spilled_step(2))]))
    assert found["F s0 m0"] == (1, 2)
    assert found["LOAD s1 param+state"] == (1, 4)


def test_a_load_waits_until_its_slot_is_empty(run_of):
    text = "LOAD s0 param\nF s0 m0\nDROP s0 param\nLOAD s1 param\nF s1 m0\nDROP s1 param"
    assert times(replay([run_of(text)]))["LOAD s1 param"] == (2, 3)


def test_a_store_waits_for_what_writes_and_the_next_tenant_for_the_store(run_of):
    found = times(replay([run_of(spilled_step(2, lookahead=0))]))
    step, store, load = (
        found[name] for name in ("STEP s1", "STORE s1 param+state", "LOAD s0 param+state")
    )
    assert store == (step[1], pytest.approx(step[1] + 2.9))
    assert load[0] == store[1]


def test_a_host_step_waits_for_its_gradients_and_the_device_does_not(run_of):
    found = times(replay([run_of(spilled_step(2, optimizer="host"), shard={"step_s": 9.0})]))
    assert found["STEP@host s1"][0] == found["STORE s1 grad"][1]
    assert found["B s0 m0"][0] < found["STEP@host s1"][1]


def test_clipped_host_steps_wait_for_the_sync(run_of):
    timeline = replay([run_of(spilled_step(2, optimizer="host", clip=True))])
    found = times(timeline)
    assert found["STEP@host s0"][0] >= found["SYNC s0"][1]


def test_the_next_run_loads_what_this_run_wrote(run_of):
    program = spilled_step(1)
    one, two = (replay([run_of(program, 1, steps=steps)]).makespan_s for steps in (1, 2))
    assert two == pytest.approx(2 * one)


def test_transfers_in_one_direction_share_the_link(run_of):
    runs = [run_of(for_trial(spilled_step(1), trial), 1, trial) for trial in (0, 1)]
    loads = [span for span in replay(runs).spans if span.stream == "up"]
    assert [(span.trial, span.start_s, span.end_s) for span in loads] == [(0, 0, 3), (1, 3, 6)]


AWAY = """F s0 m0
STORE s1 m0 boundary
DROP s1 m0 boundary
LOAD s1 m0 boundary
F s1 m0"""
"""What s1 gets leaves from 1.0 to 2.5 where it is of 150 bytes, and would be back at 4.0."""


def test_activations_pass_weights_of_another_trial(run_of):
    other = "F s0 m0\nF s0 m1\nLOAD s1 param+state"
    runs = [run_of(AWAY, shard={"private_bytes": 150}), run_of(for_trial(other, 1), trial=1)]
    found = times(replay(runs))
    assert found["LOAD s1 m0 boundary"] == (2.5, 4.0)
    assert found["LOAD s1 param+state t1"] == (2.0, 6.5)  # 3 seconds by itself


def test_activations_pass_weights_of_their_own_that_are_needed_later(run_of):
    ahead = AWAY.replace("\nF s1 m0", "\nLOAD s2 param+state\nF s1 m0")
    found = times(replay([run_of(ahead, 3, shard={"private_bytes": 150})]))
    assert found["LOAD s1 m0 boundary"] == (2.5, 4.0)
    assert found["LOAD s2 param+state"] == (0.0, 4.5)  # it was ready first


def test_activations_do_not_pass_what_is_needed_sooner(run_of):
    text = AWAY.replace("\nLOAD s1 m0 b", "\nLOAD s1 param+state\nLOAD s1 m0 b")
    found = times(replay([run_of(text, shard={"private_bytes": 150})]))
    assert found["LOAD s1 param+state"] == (0.0, 3.0)
    assert found["LOAD s1 m0 boundary"] == (3.0, 4.5)


def test_activations_do_not_wait_behind_weights_that_wait_for_a_slot(run_of):
    text = """LOAD s0 param
F s0 m0
STORE s1 m0 boundary
DROP s1 m0 boundary
STORE s0 param
DROP s0 param
LOAD s2 param
LOAD s1 m0 boundary
F s1 m0"""
    found = times(replay([run_of(text, 3, shard={"private_bytes": 50})]))
    assert found["LOAD s1 m0 boundary"][0] == found["STORE s1 m0 boundary"][1]
    assert found["LOAD s2 param"][0] == found["STORE s0 param"][1]
    assert found["LOAD s1 m0 boundary"][1] < found["LOAD s2 param"][0]


def test_activations_that_pass_go_one_after_the_other(run_of):
    runs = [
        run_of(for_trial(AWAY, trial), trial=trial, shard={"private_bytes": size})
        for trial, size in enumerate((150, 50))
    ]
    other = "F s0 m0\n" * 3 + "LOAD s1 param+state"
    found = times(replay([*runs, run_of(for_trial(other, 2), trial=2)]))
    assert found["LOAD s1 m0 boundary"][0] < found["LOAD s1 m0 boundary t1"][0]
    assert found["LOAD s1 m0 boundary"][1] <= found["LOAD s1 m0 boundary t1"][0]


def test_a_second_trial_computes_while_the_first_one_waits(run_of):
    runs = [run_of(for_trial(spilled_step(3), trial), 3, trial, steps=5) for trial in (0, 1)]
    alone = replay(runs[:1])
    both = replay(runs)
    computing = [one.busy_s[0, "compute"] / one.makespan_s for one in (alone, both)]
    assert computing[1] > computing[0]
    assert both.makespan_s < 2 * alone.makespan_s


def test_the_device_computes_one_thing_at_a_time(run_of):
    runs = [run_of(for_trial(spilled_step(2), trial), 2, trial, steps=3) for trial in range(3)]
    spans = [span for span in replay(runs).spans if span.stream == "compute"]
    assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(spans))


def test_the_oldest_step_goes_first_by_default(run_of):
    runs = [
        run_of(for_trial(resident_step(micro_batches=2), trial), 1, trial, start=RESIDENT)
        for trial in (0, 1)
    ]
    order = [span.trial for span in replay(runs).spans]
    assert order == [0, 0, 0, 1, 1, 1]


def test_a_policy_chooses_among_the_trials_that_are_ready(run_of):
    seen = []

    class Youngest:
        def choose(self, ready):
            seen.append([candidate.trial for candidate in ready])
            return max(ready, key=lambda candidate: candidate.ticket)

    runs = [
        run_of(for_trial(resident_step(), trial), 1, trial, start=RESIDENT) for trial in (0, 1)
    ]
    order = [span.trial for span in replay(runs, policy=Youngest()).spans]
    assert order == [1, 1, 0, 0]
    assert seen == [[0, 1], [0, 1], [0], [0]]


def test_one_program_may_be_run_under_several_trial_numbers(run_of):
    run = run_of(resident_step(), 1, start=RESIDENT)
    spans = replay([dataclasses.replace(run, trial=number) for number in (7, 9)]).spans
    assert [span.trial for span in spans] == [7, 7, 9, 9]


def test_durations_override_the_costs(run_of):
    def slow_forward(action):
        return Seconds(10.0) if action.op is Op.F else None

    timeline = replay([run_of(spilled_step(2))], durations=slow_forward)
    assert times(timeline)["F s0 m0"] == (1, 11)
    assert times(timeline)["LOAD s0 param"] == (0, 1)


def test_the_timeline_adds_up_bytes_and_seconds(run_of):
    timeline = replay([run_of(spilled_step(2), steps=3)])
    assert timeline.up_bytes == 3 * (200 + 400)
    assert timeline.down_bytes == 3 * 580
    assert timeline.busy_s[0, "compute"] == pytest.approx(3 * (1 + 3 + 3 + 0.5 + 0.5))
    assert timeline.busy_s[0, "up"] == pytest.approx(3 * 6)


def test_spans_are_left_out_when_nobody_asks(run_of):
    run = run_of(spilled_step(2))
    without = replay([run], keep_spans=False)
    assert without.spans == ()
    assert without.makespan_s == replay([run]).makespan_s


def test_an_empty_replay_takes_no_time():
    assert replay([]).makespan_s == 0


PIPELINE = """
device 0
LOAD s0 param+state
F s0 m0
SEND s1 m0 d1
RECV s1 m0 grad d1
B s0 m0
STEP s0
STORE s0 param+state
DROP s0 param+state
device 1
LOAD s1 param+state
RECV s1 m0 d0
B s1 m0
SEND s1 m0 grad d0
STEP s1
STORE s1 param+state
DROP s1 param+state
"""


def test_a_receive_ends_with_its_send(run_of):
    def by_message(action):
        if action.op is not Op.SEND:
            return None
        return Seconds(1.1 if action.parts else 1.0)

    found = times(replay([run_of(PIPELINE, devices=(0, 1))], durations=by_message))
    assert found["F s0 m0"] == (3, 4)
    assert found["SEND s1 m0 d1"] == (4, 5)
    assert found["B s1 m0"] == (5, 8)
    assert found["B s0 m0"] == (pytest.approx(9.1), pytest.approx(12.1))


def test_two_devices_are_counted_apart(run_of):
    timeline = replay([run_of(PIPELINE, devices=(4, 2))])
    assert timeline.busy_s[4, "compute"] == pytest.approx(4.5)
    assert timeline.busy_s[2, "compute"] == pytest.approx(3.5)


def test_programs_that_wait_for_each_other_are_named(run_of):
    broken = PIPELINE.replace("SEND s1 m0 d1\n", "")
    with pytest.raises(ProgramError, match="device 0 at B s0 m0; device 1 at B s1 m0") as error:
        replay([run_of(broken, devices=(0, 1))])
    assert "shoal.program.check" in str(error.value)


def test_a_trial_with_more_steps_left_is_not_left_alone_at_the_end(run_of):
    runs = [
        run_of(for_trial(resident_step(), trial), 1, trial, start=RESIDENT, steps=steps)
        for trial, steps in ((0, 2), (1, 4))
    ]
    order = [span.trial for span in replay(runs).spans if str(span.action).startswith("B")]
    assert order[:2] == [1, 1]
    assert sorted(order) == [0, 0, 1, 1, 1, 1]


def test_a_run_that_waits_for_a_place_begins_when_one_is_through(run_of):
    runs = [
        run_of(for_trial(resident_step(), trial), 1, trial, start=RESIDENT, steps=2)
        for trial in range(3)
    ]
    spans = replay(runs, active=1).spans
    assert [span.trial for span in spans] == sorted(span.trial for span in spans)
    assert replay(runs, active=3).makespan_s == replay(runs).makespan_s


def stepping(run_of, trial, steps, step_s, chunks=()):
    """One shard that steps on the host; units take no time."""
    shard = {"step_s": step_s, "step_chunks": chunks, "forward_s": 0.0, "backward_s": 0.0}
    return run_of(spilled_step(1, optimizer="host"), 1, shard=shard, trial=0, steps=steps)


def test_a_place_is_given_on_when_the_last_step_on_the_host_and_the_last_copy_are_over(run_of):
    runs = [dataclasses.replace(stepping(run_of, t, 2, 4.0), trial=t) for t in range(3)]
    spans = replay(runs, active=2).spans
    ends = [max(s.end_s for s in spans if s.trial == trial) for trial in range(3)]
    assert min(s.start_s for s in spans if s.trial == 2) == min(ends[:2])
    assert len([s for s in spans if s.trial == 2]) == len([s for s in spans if s.trial == 0])


def test_a_run_that_has_nothing_to_do_hands_its_place_on_at_once(run_of):
    idle = dataclasses.replace(stepping(run_of, 0, 0, 4.0), trial=0)
    runs = [idle, *(dataclasses.replace(stepping(run_of, t, 2, 4.0), trial=t) for t in (1, 2))]
    spans = replay(runs, active=1).spans
    assert [s.trial for s in spans] == sorted(s.trial for s in spans)
    assert {s.trial for s in spans} == {1, 2}


def two_at_the_host(run_of, chunks):
    """Trial 0 has less left than trial 1, whose gradients come a little later."""
    small = dataclasses.replace(stepping(run_of, 0, 1, 8.0, chunks), trial=0)
    large = dataclasses.replace(stepping(run_of, 1, 9, 4.0), trial=1)
    spans = [s for s in replay([small, large]).spans if s.stream == "host" and s.start_s < 20]
    return [(span.trial, span.end_s - span.start_s) for span in spans]


def test_a_trial_that_has_the_hosts_memory_keeps_it_but_for_whom_the_rule_has_go_first(run_of):
    shard = {"step_s": 4.0, "forward_s": 0.0, "backward_s": 0.0}
    two = [
        dataclasses.replace(
            run_of(spilled_step(2, optimizer="host", clip=True), 2, shard=shard, trial=0),
            trial=trial,
        )
        for trial in range(2)
    ]
    at_host = [s.trial for s in replay(two).spans if s.stream == "host"]
    assert at_host == [0, 0, 1, 1]


def test_a_step_on_the_host_in_one_piece_keeps_the_more_urgent_one_waiting(run_of):
    assert two_at_the_host(run_of, ())[:2] == [(0, 8.0), (1, 4.0)]


def test_a_step_in_chunks_gives_way_after_each_to_the_more_urgent_one(run_of):
    found = two_at_the_host(run_of, (30, 30, 30, 30))
    assert found[:2] == [(0, pytest.approx(2.0)), (1, 4.0)]
    rest = [seconds for trial, seconds in found if trial == 0]
    assert sum(rest) == pytest.approx(8.0)
    assert len(rest) > 1


def test_chunks_that_nobody_interrupts_are_one_span_of_the_same_length(run_of):
    whole, cut = (replay([stepping(run_of, 0, 3, 8.0, c)]) for c in ((), (30, 60, 30)))
    assert [s for s in cut.spans if s.stream == "host"] == [
        s for s in whole.spans if s.stream == "host"
    ]
    assert cut.makespan_s == whole.makespan_s
    assert cut.busy_s == whole.busy_s
