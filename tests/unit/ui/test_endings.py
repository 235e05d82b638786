"""What a run, the demo and a verification print at their end."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from shoal.core.event import (
    Evaluated,
    Event,
    StepFinished,
    StudyFinished,
    StudyStarted,
    TrialFinished,
    TrialPlanned,
    TrialReplanned,
    TrialRestarted,
    TrialResumed,
)
from shoal.demo import Sample
from shoal.observe import Snapshot
from shoal.ui.demo import describe_sample, printable
from shoal.ui.failures import ExitCode
from shoal.ui.lines import PlainLines
from shoal.ui.show import (
    describe_ending,
    describe_study,
    describe_trial,
    ending_code,
    leaderboard,
)
from shoal.verify import TrialVerdict, describe_verdict, describe_verdicts

Events = Callable[..., Iterator[Event]]


def _verdict(number: int = 3, first_difference: str = "", failure: str = "") -> TrialVerdict:
    return TrialVerdict(
        number=number,
        steps=100,
        tensors=571,
        losses=100,
        metrics=1,
        first_difference=first_difference,
        plain_s=9.0,
        failure=failure,
    )


def test_the_exit_code_says_whether_all_trials_finished(study_events: Events) -> None:
    assert ending_code(Snapshot.of(study_events(4))) == ExitCode.DONE
    assert ending_code(Snapshot.of(study_events(4, failing=(1,)))) == ExitCode.TRIALS_FAILED


def test_a_study_that_stopped_early_is_paused(study_events: Events) -> None:
    stop = StudyFinished(time=9.0, finished=0, failed=0, seconds=9.0, stopped="disk is full")

    assert ending_code(Snapshot.of([*study_events(4, upto=9), stop])) == ExitCode.PAUSED
    assert ending_code(Snapshot.of(study_events(4, upto=9))) == ExitCode.PAUSED


def test_where_no_metric_is_a_number_there_is_no_best_trial(study_events: Events) -> None:
    events = [
        replace(event, metrics={"valid_loss": math.nan})
        if isinstance(event, Evaluated | TrialFinished)
        else event
        for event in study_events(2)
    ]
    snapshot = Snapshot.of(events)

    assert ending_code(snapshot) == ExitCode.TRIALS_FAILED
    text = describe_ending(snapshot, Path("runs/sweep"))
    assert "no best   valid_loss of 2 trials is no finite number" in text
    assert "no best" in describe_study(snapshot, Path("runs/sweep"))
    assert "no best" not in describe_ending(Snapshot.of(study_events(2)), Path("runs/sweep"))


def replanned(trial: int, reason: str) -> TrialReplanned:
    return TrialReplanned(
        time=9.0,
        trial=trial,
        step=4,
        reason=reason,
        technique="Resident",
        shards=1,
        peak_bytes=7,
    )


def test_a_trial_that_was_planned_again_says_why_but_not_for_a_seat(study_events: Events) -> None:
    why = "shoal.fusion.declined.Declined: the slots differ in it"
    seat = "others were pruned: slot 0 of 2"
    again = [replanned(0, why), replanned(1, why), replanned(2, seat)]
    snapshot = Snapshot.of([*study_events(4), *again])

    assert "replanned 2 trials: the slots differ in it" in describe_ending(snapshot, Path("sweep"))
    told = describe_trial(snapshot, snapshot.trial(1), Path("sweep"))
    assert "after step 4 it was planned again: the slots differ in it" in told
    assert "planned again" not in describe_trial(snapshot, snapshot.trial(2), Path("sweep"))


def test_lines_say_once_why_trials_in_a_row_are_planned_again() -> None:
    stream = io.StringIO()
    screen = PlainLines(stream)
    for event in [
        replanned(0, "a.B: why"),
        replanned(1, "a.B: why"),
        replanned(2, "ValueError: 3"),
    ]:
        screen(event)

    assert stream.getvalue().splitlines() == [
        "trial 0 is planned again: why",
        "trial 2 is planned again: 3",
    ]


def test_a_leaderboard_fits_the_terminal_and_names_what_has_no_room(study_events: Events) -> None:
    snapshot = Snapshot.of(study_events(4))
    wide = leaderboard(snapshot)
    narrow = leaderboard(snapshot, width=50)

    assert max(map(len, wide.splitlines())) > 50 >= max(map(len, narrow.splitlines()[:-1]))
    assert "took" in wide.splitlines()[0]
    assert "took" not in narrow.splitlines()[0]
    assert narrow.splitlines()[-1].startswith("(no room for took, how")
    assert narrow.splitlines()[0].split()[-1] == "valid_loss"
    assert leaderboard(snapshot, width=200) == wide


def test_a_study_that_was_stopped_has_no_trial_that_waits_and_says_how_it_goes_on(
    study_events: Events, tmp_path: Path
) -> None:
    begun = list(study_events(6, upto=10))
    ending = StudyFinished(time=9.0, finished=0, failed=0, seconds=9.0, stopped="SIGTERM was ...")
    snapshot = Snapshot.of([*begun, ending])

    board, text = leaderboard(snapshot, "stopped"), describe_ending(snapshot, tmp_path)

    assert (board.count("paused"), board.count("not begun"), board.count("waiting")) == (4, 2, 0)
    assert leaderboard(Snapshot.of(begun)).count("waiting") == 2
    assert f"goes on   6 trials from where they stand: shoal resume {tmp_path}" in text
    assert "goes on" not in describe_ending(Snapshot.of(study_events(6)), tmp_path)


def test_what_a_resumed_run_says_is_of_all_runs_and_no_trial_trains_while_it_plans(
    study_events: Events,
) -> None:
    begun = list(study_events(2, upto=10))
    before = Snapshot.of(begun).trial(0).seconds
    now = begun[-1].time + 1000.0
    again = next(event for event in begun if isinstance(event, StudyStarted))
    events = [
        *begun,
        replace(again, time=now),
        TrialRestarted(time=now + 0.1, trial=0, step=5, reason="the study was stopped"),
        TrialResumed(time=now + 60.0, trial=0, step=5, device="cpu:0"),
        StepFinished(
            time=now + 62.0, trial=0, step=6, epoch=1, loss=1.0, seconds=2.0, device="cpu:0"
        ),
        TrialFinished(
            time=now + 62.0, trial=0, step=6, metrics={}, checkpoint="trials/0", seconds=2.0
        ),
        StudyFinished(time=now + 63.0, finished=1, failed=0, seconds=63.0),
    ]
    stream = io.StringIO()
    screen = PlainLines(stream)
    for event in events:
        screen(event)

    assert abs(Snapshot.of(events).trial(0).seconds - (before + 2.0)) < 1.0
    told = stream.getvalue()
    assert f"trial 0 finished after 6 steps and {before + 2.0:.1f} s" in told
    assert "of all 2 trials in 2 runs: 1 paused, 1 finished" in told


def test_hyperparameters_called_as_columns_of_the_leaderboard_stay(study_events: Events) -> None:
    def named(event: Event) -> Event:
        if not isinstance(event, TrialPlanned):
            return event
        return replace(event, hp={"how": "a", "loss": 0.5, "from": event.trial})

    board = leaderboard(Snapshot.of(map(named, study_events(3))))

    assert board.splitlines()[0].split()[:2] == ["trial", "from"]
    assert board.splitlines()[0].split().count("how") == 1


def test_the_end_of_a_run_says_where_the_best_weights_are(study_events: Events) -> None:
    text = describe_ending(Snapshot.of(study_events(4, failing=(2,))), Path("runs/sweep"))

    assert "best      trial 0, the least valid_loss; weights in runs/sweep/trials/0" in text
    assert "trial 2 failed at step 3" in text
    assert "events    runs/sweep/study.db" in text


def test_the_end_of_a_run_says_why_trials_share_no_array(
    tmp_path: Path, study_events: Events
) -> None:
    jobs = [{"trial": n, "why": ["it fits", "unfused: the slots differ"]} for n in range(2)]
    (tmp_path / "plan.json").write_text(json.dumps({"jobs": jobs}))
    snapshot = Snapshot.of(study_events(2))

    assert "unfused   2 trials: the slots differ" in describe_ending(snapshot, tmp_path)
    assert "unfused   2 trials: the slots differ" in describe_study(snapshot, tmp_path)
    assert "- unfused: the slots differ" in describe_trial(snapshot, snapshot.trial(1), tmp_path)

    (tmp_path / "plan.json").write_text("{")  # torn by a crash
    assert "unfused" not in describe_ending(snapshot, tmp_path)


def test_a_run_whose_trials_all_failed_has_no_best(study_events: Events) -> None:
    text = describe_ending(Snapshot.of(study_events(1, failing=(0,))), Path("runs/sweep"))

    assert "best " not in text


def test_a_sample_stands_beside_its_loss() -> None:
    text = describe_sample(Sample("def f():\n", "def ", 2.0))

    assert "(valid_loss 2.0000, 2.89 bits per byte)" in text
    assert "\ndef f():\n" in text


def test_what_a_terminal_would_obey_is_shown_as_a_dot() -> None:
    assert printable("a\x1b[31m\tb\nc\x00") == "a.[31m.b\nc."


def test_equal_bits_are_said_with_what_was_compared() -> None:
    assert describe_verdict(_verdict(), "lr=0.1") == (
        "EQUAL      trial 3 (lr=0.1): 100 steps, 571 tensors, 100 losses, 1 metric; "
        "alone it took 9.0 s"
    )
    assert "the same bits as training alone" in describe_verdicts([_verdict()])


def test_a_difference_is_said_with_the_first_tensor() -> None:
    verdict = _verdict(first_difference="model 'w': 1 of 16 elements differ")

    text = describe_verdict(verdict, "lr=0.1")

    assert text.startswith("DIFFERENT  trial 3")
    assert text.endswith("\n           first: model 'w': 1 of 16 elements differ")
    assert describe_verdicts([verdict, _verdict()]) == "1 of 2 trials differ from training alone"


def test_a_trial_that_cannot_be_trained_alone_is_not_called_different() -> None:
    verdict = replace(_verdict(failure="ValueError: no"), notes=("look there",))
    different = _verdict(first_difference="model 'w': 1 of 16 elements differ")

    assert describe_verdict(verdict, "lr=0.1") == (
        "FAILED     trial 3 (lr=0.1): it could not be trained alone: ValueError: no\n"
        "           note: look there"
    )
    assert describe_verdicts([verdict, _verdict()]) == "1 of 2 trials could not be trained alone"
    assert describe_verdicts([verdict, different]) == (
        "1 of 2 trials differ from training alone; 1 of 2 trials could not be trained alone"
    )


def test_a_trial_says_why_it_trains_so_whatever_was_planned_since(
    tmp_path: Path, study_events: Events
) -> None:
    events = [
        replace(event, why=("it fits",)) if isinstance(event, TrialPlanned) else event
        for event in study_events()
    ]
    snapshot = Snapshot.of(events)
    assert "- it fits" in describe_trial(snapshot, snapshot.trial(0), tmp_path)
