"""The snapshot: what the screens see, whatever happened."""

import math
import time
from dataclasses import replace

import pytest

from shoal.core.event import (
    PeakMeasured,
    StudyFinished,
    StudyPlanned,
    TrialExploited,
    TrialFailed,
    TrialFinished,
    TrialMoved,
    TrialPruned,
    TrialRestarted,
    TrialStopped,
    WorkerDied,
    WorkerStarted,
)
from shoal.observe.rows import TrialState
from shoal.observe.snapshot import Folder, Snapshot


def fold(snapshot, *events):
    return snapshot.folder().add_all(events).last_snapshot()


def finished(tell, trial, step, **metrics):
    return TrialFinished(
        time=tell.time, trial=trial, step=step, metrics=metrics,
        checkpoint=f"trials/{trial:04d}", seconds=7.0,
    )  # fmt: skip


def rows(snapshot, trial=0):
    return [(row.step, dict(row.metrics)) for row in snapshot.trial(trial).history]


def test_before_anything_happened_there_is_nothing():
    snapshot = Snapshot.of([])

    assert snapshot.trials == ()
    assert snapshot.eta_seconds is None
    assert snapshot.best is None


def test_a_trial_goes_from_pending_to_running_to_finished(tell):
    snapshot = Snapshot.of([tell.study(trials=3), tell.planned(0, lr=0.5)])
    assert snapshot.trial(0).state is TrialState.PENDING
    assert snapshot.count(TrialState.PENDING) == 3

    snapshot = fold(snapshot, tell.started(0), tell.step(0, 1, loss=2.0))
    row = snapshot.trial(0)
    assert (row.state, row.device, row.step, row.steps, row.loss) == (
        TrialState.RUNNING, "cpu:0", 1, 4, 2.0,
    )  # fmt: skip
    assert row.hp == {"lr": 0.5}
    assert snapshot.devices[0].trials == (0,)

    snapshot = fold(snapshot, finished(tell, 0, 4, valid_loss=0.5))
    row = snapshot.trial(0)
    assert (row.state, row.checkpoint, row.seconds) == (TrialState.FINISHED, "trials/0000", 7.0)
    assert snapshot.devices[0].trials == ()
    assert snapshot.count(TrialState.PENDING) == 2


def test_a_failed_trial_keeps_its_traceback_and_shows_its_last_line(tell):
    error = "Traceback (most recent call last):\n  ...\nValueError: no\n"
    snapshot = Snapshot.of(
        [tell.study(), tell.started(0), TrialFailed(time=1.0, trial=0, step=2, error=error)]
    )

    assert snapshot.trial(0).state is TrialState.FAILED
    assert snapshot.trial(0).error == error
    assert snapshot.trial(0).error_line == "ValueError: no"


def test_a_trial_that_was_stopped_between_two_evaluations_has_no_row_there(tell):
    stopped = TrialStopped(
        time=tell.time, trial=0, step=3, reason="enough", checkpoint="trials/0000/step-00000003",
        metrics={"valid_loss": 1.0}, seconds=7.0,
    )  # fmt: skip
    first = {"train_loss": 3.0, "valid_loss": 1.0}
    snapshot = Snapshot.of(
        [
            tell.study(), tell.planned(0),
            tell.step(0, 1, loss=4.0), tell.step(0, 2, loss=2.0),
            tell.evaluated(0, 2, valid_loss=1.0),
            tell.step(0, 3, loss=1.0), stopped,
        ]
    )  # fmt: skip
    row = snapshot.trial(0)
    assert (row.state, row.step, row.checkpoint[-1]) == (TrialState.STOPPED, 3, "3")
    assert rows(snapshot) == [(2, first)]
    assert (row.metrics, row.ended) == (first, "enough")

    goes_on = [tell.planned(0), tell.step(0, 4, loss=2.0), tell.evaluated(0, 4, valid_loss=0.5)]
    snapshot = fold(snapshot, *goes_on)
    assert rows(snapshot) == [(2, first), (4, {"train_loss": 1.5, "valid_loss": 0.5})]
    assert snapshot.trial(0).ended == ""


def test_a_row_has_the_mean_loss_of_the_steps_since_the_row_before(tell):
    snapshot = Snapshot.of(
        [
            tell.study(), tell.planned(0),
            tell.step(0, 1, loss=4.0), tell.step(0, 2, loss=2.0),
            tell.evaluated(0, 2, valid_loss=1.0),
            tell.step(0, 3, loss=1.0),
            tell.evaluated(0, 3, valid_loss=2.0),
            finished(tell, 0, 3, valid_loss=2.0),
        ]
    )  # fmt: skip

    assert rows(snapshot) == [
        (2, {"train_loss": 3.0, "valid_loss": 1.0}),
        (3, {"train_loss": 1.0, "valid_loss": 2.0}),
    ]
    assert [row.seconds for row in snapshot.trial(0).history] == [2.0, 3.0]
    assert snapshot.trial(0).best == 1.0
    assert snapshot.trial(0).metrics["valid_loss"] == 2.0


def test_without_validation_there_is_a_row_for_each_epoch_and_one_at_the_end(tell):
    losses = [4.0, 2.0, 3.0, 1.0, 8.0]
    steps = [tell.step(0, n, loss=x, epoch=(n - 1) // 2) for n, x in enumerate(losses, 1)]
    snapshot = Snapshot.of(
        [tell.study(metric="train_loss"), tell.planned(0), *steps, finished(tell, 0, 5)]
    )

    assert rows(snapshot) == [
        (2, {"train_loss": 3.0}),
        (4, {"train_loss": 2.0}),
        (5, {"train_loss": 8.0}),
    ]
    assert snapshot.trial(0).best == 2.0


def test_a_first_evaluation_after_some_epochs_counts_from_the_first_step(tell):
    steps = [tell.step(0, n, loss=float(n), epoch=(n - 1) // 2) for n in range(1, 6)]
    snapshot = Snapshot.of([tell.study(), *steps, tell.evaluated(0, 5, epoch=2, valid_loss=1.0)])

    assert rows(snapshot) == [(5, {"train_loss": 3.0, "valid_loss": 1.0})]


def test_a_resumed_trial_ends_with_the_history_of_one_that_never_stopped(tell):
    def step(n):
        return tell.step(0, n, loss=1 / n)

    def evaluated(n):
        return tell.evaluated(0, n, valid_loss=1.0 / n)

    begin = [tell.study(), tell.planned(0, steps=6), tell.started(0)]
    straight = Snapshot.of(
        [*begin, step(1), step(2), step(3), evaluated(3), step(4), step(5), step(6), evaluated(6)]
    )
    broken = Snapshot.of(
        [*begin, step(1), step(2), step(3), evaluated(3), step(4), tell.study(),
         TrialRestarted(time=tell.time, trial=0, step=1), tell.started(0),
         step(2), step(3), evaluated(3), step(4), step(5), step(6), evaluated(6)]
    )  # fmt: skip

    assert rows(broken) == rows(straight)
    assert broken.trial(0).restarts == 1
    assert broken.runs == 2
    assert broken.trial(0).best == straight.trial(0).best


def test_steps_that_come_again_replace_what_was_there_without_a_restart_event(tell):
    snapshot = Snapshot.of(
        [tell.study(), tell.step(0, 1, loss=9.0), tell.step(0, 2, loss=9.0),
         tell.step(0, 1, loss=1.0), tell.step(0, 2, loss=2.0),
         tell.evaluated(0, 2, valid_loss=0.0)]
    )  # fmt: skip

    assert rows(snapshot) == [(2, {"train_loss": 1.5, "valid_loss": 0.0})]


def test_the_time_between_a_kill_and_a_resume_counts_for_nobody(tell):
    events = [tell.study(), tell.planned(0, steps=9), tell.started(0), tell.step(0, 1)]
    tell.time += 3600
    events += [tell.study(), tell.started(0), tell.step(0, 2)]
    snapshot = Snapshot.of(events)

    assert snapshot.seconds == 2.0
    assert snapshot.trial(0).seconds == 2.0
    assert snapshot.started == 1000.0


def test_a_dead_worker_leaves_its_trials_waiting(tell):
    died = WorkerDied(time=tell.time, device="cpu:0", pid=7, reason="signal 9", trials=(0,))
    begin = [
        tell.study(), WorkerStarted(time=tell.time, device="cpu:0", pid=7), tell.started(0), died
    ]  # fmt: skip
    snapshot = Snapshot.of(begin)

    assert snapshot.trial(0).state is TrialState.PENDING
    assert snapshot.devices[0].restarts == 1

    snapshot = fold(snapshot, tell.started(0))
    assert snapshot.trial(0).state is TrialState.RUNNING


def test_a_restarted_trial_waits_at_its_saved_step_until_a_device_takes_it(tell):
    restarted = TrialRestarted(time=tell.time, trial=0, step=1)
    snapshot = Snapshot.of(
        [tell.study(), tell.started(0), tell.step(0, 1), tell.step(0, 2), restarted]
    )
    row = snapshot.trial(0)
    assert (row.state, row.step, row.device) == (TrialState.PENDING, 1, "")

    row = fold(snapshot, tell.step(0, 2)).trial(0)
    assert (row.state, row.step, row.device) == (TrialState.RUNNING, 2, "cpu:0")


def test_in_a_study_that_was_stopped_nothing_runs_any_more(tell):
    stop = StudyFinished(time=tell.time, finished=0, failed=0, seconds=1.0, stopped="Ctrl-C")
    snapshot = Snapshot.of([tell.study(), tell.step(0, 1), stop])

    assert (snapshot.stopped, snapshot.is_finished) == ("Ctrl-C", True)
    assert snapshot.trial(0).state is TrialState.PENDING


def test_a_late_step_of_an_ended_trial_changes_nothing(tell):
    snapshot = Snapshot.of([tell.study(), tell.step(0, 1), finished(tell, 0, 1)])

    assert fold(snapshot, tell.step(0, 1, loss=9.0)).trial(0) == snapshot.trial(0)


def test_a_trial_that_moved_is_shown_on_its_new_device(tell):
    moved = TrialMoved(time=tell.time, trial=0, device="cpu:1", step=1)
    snapshot = Snapshot.of([tell.study(devices=2), tell.started(0), tell.step(0, 1), moved])

    assert snapshot.trial(0).device == "cpu:1"
    assert [device.trials for device in snapshot.devices] == [(), (0,)]


def test_a_device_shows_its_highest_peak_beside_budget_and_prediction(tell):
    def peak(size):
        return PeakMeasured(
            time=tell.time, device="cpu:0", peak_bytes=size, budget_bytes=500, predicted_bytes=90
        )

    (device,) = Snapshot.of([tell.study(), peak(80), peak(100), peak(70)]).devices

    assert (device.peak_bytes, device.budget_bytes, device.predicted_bytes) == (100, 500, 90)


def test_busy_leaves_out_what_lies_between_runs_and_counts_a_device_that_has_no_work_yet(tell):
    first = [tell.study(), tell.action(0, 4), tell.action(2, 4, device="cpu:1")]
    again = tell.study()
    later = [replace(again, time=2000.0), tell.action(1100, 1104)]
    one, two = Snapshot.of([*first, *later]).devices

    assert one.busy == pytest.approx(8 / 8)
    assert two.busy == pytest.approx(2 / 8)


def test_busy_is_the_share_of_compute_from_first_to_last_action(tell):
    events = [tell.study(), tell.action(0, 2), tell.action(1, 9, stream="up"), tell.action(9, 10)]

    assert Snapshot.of(events).devices[0].busy == pytest.approx(0.3)
    assert Snapshot.of(events[:1]).devices[0].busy is None


def test_the_eta_is_the_steps_left_over_the_devices_speed(tell):
    events = [tell.study(trials=3), tell.planned(0, steps=4), tell.planned(1, steps=10)]
    events += [tell.started(0), *(tell.step(0, n, seconds=0.5) for n in (1, 2, 3))]
    snapshot = Snapshot.of(events)

    assert snapshot.devices[0].speed == pytest.approx(2.0)
    assert snapshot.eta_seconds == pytest.approx((1 + 10 + 7) / 2.0)  # 7: the mean of 4 and 10
    done = StudyFinished(time=tell.time, finished=3, failed=0, seconds=1.0)
    assert fold(snapshot, done).eta_seconds == 0.0


def test_where_a_rule_ends_trials_the_eta_counts_what_they_do_on_average(tell):
    events = [tell.study(trials=9)]
    events += [StudyPlanned(time=tell.time, trials=9, seconds=1.0, part=0.25)]
    events += [tell.planned(number, steps=8) for number in range(9)]
    events += [tell.started(0), *(tell.step(0, n, seconds=0.5) for n in (1, 2))]
    left = 6 * (0.25 + 0.75 * 2 / 8) + 8 * 8 * 0.25  # who is further on is likelier to go on
    assert Snapshot.of(events).eta_seconds == pytest.approx(left / 2.0)
    events += [*(tell.step(0, n, seconds=0.5) for n in range(3, 8))]
    end = {"step": 2, "reason": "rung", "checkpoint": "", "metrics": {}, "seconds": 1.0}
    events += [TrialPruned(time=tell.time, trial=n, **end) for n in range(1, 9)]
    assert Snapshot.of(events).eta_seconds == pytest.approx((0.25 + 0.75 * 7 / 8) / 2.0)


def test_the_best_trial_follows_the_mode_and_ignores_what_is_not_finite(tell):
    events = [tell.study(mode="max", metric="valid_accuracy", trials=3)]
    for trial, value in enumerate([0.5, 0.9, math.nan]):
        events.append(tell.evaluated(trial, 1, valid_accuracy=value))

    assert Snapshot.of(events).best.number == 1


def test_a_loss_that_is_not_finite_does_not_stay_in_the_mean(tell):
    losses = [1.0, math.nan, math.inf, 3.0]
    snapshot = Snapshot.of(
        [tell.study(), *(tell.step(0, n, loss=x) for n, x in enumerate(losses, 1))]
    )

    assert snapshot.trial(0).smooth_loss == 3.0


def restarted(tell, step):
    return TrialRestarted(time=tell.time, trial=0, step=step)


@pytest.mark.parametrize("back_to", [2, 4])
def test_the_mean_of_a_trial_that_goes_on_is_that_of_the_step_it_goes_on_from(tell, back_to):
    steps = [tell.step(0, n, loss=float(n)) for n in range(1, 5)]
    events = [tell.study(), *steps, tell.study(), restarted(tell, back_to)]

    found, alone = Snapshot.of(events).trial(0), Snapshot.of(events[: 1 + back_to]).trial(0)

    assert found.smooth_loss == alone.smooth_loss
    assert found.smooth_loss == pytest.approx({2: 1.1, 4: 1.561}[back_to])
    more = tell.step(0, back_to + 1, loss=7.0)
    assert fold(Snapshot.of(events), more).trial(0).smooth_loss == pytest.approx(
        0.9 * found.smooth_loss + 0.7
    )


def test_of_an_outline_it_is_the_last_that_is_known_and_of_a_trial_begun_anew_none(tell):
    events = [tell.study(), tell.step(0, 9, loss=3.0), tell.study()]

    assert Snapshot.of([*events, restarted(tell, 8)]).trial(0).smooth_loss == 3.0
    assert Snapshot.of([*events, restarted(tell, 0)]).trial(0).smooth_loss is None


def test_folding_does_not_change_the_snapshot_it_starts_from(tell):
    first = Snapshot.of([tell.study(), tell.started(0), tell.step(0, 1)])
    before = repr(first)

    one = fold(first, tell.step(0, 2, loss=5.0))
    other = fold(first, tell.step(0, 2, loss=7.0))

    assert repr(first) == before
    assert (one.trial(0).loss, other.trial(0).loss) == (5.0, 7.0)


def test_a_hundred_thousand_events_fold_in_seconds_of_cpu(tell):
    events = [tell.study(trials=100)]
    events += [tell.step(n % 100, n // 100 + 1) for n in range(100_000)]
    began = time.process_time()

    Folder().add_all(events).snapshot()

    assert time.process_time() - began < 4.0


def exploited(tell, step, source, before, now):
    return TrialExploited(
        time=tell.time, trial=0, step=step, source=source, before={"lr": before}, hp={"lr": now},
        checkpoint=f"trials/0000/step-{step}.1",
    )  # fmt: skip


def test_a_trial_shows_from_whom_it_went_on_and_what_it_has_now(tell):
    begun = [tell.planned(0, lr=0.5), tell.started(0), tell.step(0, 1), tell.step(0, 2)]
    snapshot = Snapshot.of([tell.study(trials=1), *begun, exploited(tell, 2, 3, 0.5, 0.4)])
    row = snapshot.trial(0)
    assert (dict(row.hp), row.checkpoint) == ({"lr": 0.4}, "trials/0000/step-2.1")
    (taken,) = row.inherited
    assert (taken.step, taken.source, taken.changes) == (2, 3, {"lr": (0.5, 0.4)})

    later = fold(snapshot, tell.step(0, 3), tell.step(0, 4), exploited(tell, 4, 1, 0.4, 0.3))
    assert [one.step for one in later.trial(0).inherited] == [2, 4]
    assert later.trial(0).hp == {"lr": 0.3}


def test_who_goes_back_to_before_it_took_over_has_what_it_had_then(tell):
    steps = [tell.planned(0, lr=0.5), *(tell.step(0, n) for n in (1, 2, 3, 4))]
    taken = [exploited(tell, 2, 3, 0.5, 0.4), exploited(tell, 4, 1, 0.4, 0.3)]
    snapshot = Snapshot.of([tell.study(trials=1), *steps, *taken])

    back = fold(snapshot, TrialRestarted(time=tell.time, trial=0, step=3))
    assert [one.step for one in back.trial(0).inherited] == [2]
    assert back.trial(0).hp == {"lr": 0.4}
    anew = fold(snapshot, TrialRestarted(time=tell.time, trial=0, step=0))
    assert anew.trial(0).inherited == ()
    assert anew.trial(0).hp == {"lr": 0.5}
    again = fold(back, tell.step(0, 4), taken[1], taken[1])
    assert [one.step for one in again.trial(0).inherited] == [2, 4]


def test_a_trial_shows_which_recipe_it_trained_with_since_when(tell):
    first = [tell.study(), tell.planned(0), tell.step(0, 1), tell.step(0, 2), tell.step(0, 3)]
    back = TrialRestarted(time=tell.time, trial=0, step=2)
    again = [tell.study(), replace(tell.planned(0), recipe=1), back, tell.step(0, 3)]
    snapshot = Snapshot.of([*first, *again])
    assert snapshot.trial(0).recipes == ((0, 0), (2, 1))

    assert fold(snapshot, replace(back, step=1)).trial(0).recipes == ((0, 0), (1, 1))
    assert fold(snapshot, replace(back, step=0)).trial(0).recipes == ((0, 1),)
    assert fold(snapshot, tell.planned(0), back).trial(0).recipes == ((0, 0), (2, 0))
    assert snapshot.trial(0).recipes == ((0, 0), (2, 1))
