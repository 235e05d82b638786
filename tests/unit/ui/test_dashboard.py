"""The screens of a running study, from made-up events."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from rich.console import Console

from shoal.core.event import (
    CheckpointDamaged,
    EmulationMeasured,
    Evaluated,
    Event,
    LoaderRestarted,
    PlanningGoesOn,
    PlanningWaited,
    SamplerEnded,
    StateLeftOut,
    StepFinished,
    StorageFailed,
    StudyChanged,
    StudyContinued,
    StudyFinished,
    StudyPaused,
    StudyPlanned,
    StudyStarted,
    TrialExploited,
    TrialFinished,
    TrialPruned,
    TrialStopped,
    WorkerDied,
    WorkerStalled,
)
from shoal.observe.machines import TrialFold
from shoal.observe.snapshot import Folder, Snapshot
from shoal.ui.dashboard import LiveTable, choose_rows, make_screen, render
from shoal.ui.lines import PLAIN_EVALUATIONS, PlainLines, describe

Events = Callable[..., Iterator[Event]]


def _draw(snapshot: Snapshot, width: int = 80, height: int = 24) -> list[str]:
    console = Console(record=True, width=width, height=height, file=io.StringIO())
    console.print(render(snapshot, width, height))
    return console.export_text().splitlines()


@pytest.mark.parametrize("trials", [1, 8, 64])
@pytest.mark.parametrize(("width", "height"), [(50, 12), (80, 24), (160, 50)])
def test_the_screen_fits_the_terminal(
    study_events: Events, trials: int, width: int, height: int
) -> None:
    snapshot = Snapshot.of(study_events(trials, upto=37, failing=(0,)))

    lines = _draw(snapshot, width, height)

    assert len(lines) <= height - 1
    assert max(map(len, lines)) <= width
    assert all("…" not in line for line in lines[1:3])


def test_a_wide_screen_has_every_column(study_events: Events) -> None:
    header = _draw(Snapshot.of(study_events(upto=50)), width=120)[2]

    assert header.split() == [
        *("#", "lr", "width", "dropout"),
        *("how", "device", "state", "step", "loss", "steps/s", "best", "valid_loss"),
    ]


def test_a_narrow_screen_drops_columns_but_not_what_matters(study_events: Events) -> None:
    header = _draw(Snapshot.of(study_events(upto=50)), width=44)[2]

    assert header.split() == ["#", "state", "step", "loss", "best", "valid_loss"]


def test_a_setting_that_all_trials_share_has_no_column(study_events: Events) -> None:
    assert "depth" not in "\n".join(_draw(Snapshot.of(study_events(upto=50)), width=200))


def test_of_many_trials_those_that_run_and_those_that_lead_are_shown(study_events: Events) -> None:
    snapshot = Snapshot.of(study_events(64, upto=700, failing=(9,)))

    shown = choose_rows(snapshot, 9)

    assert [row.number for row in shown] == [33, 34, 35, 0, 1, 2, 9, 3, 4]
    assert "... and " in "\n".join(_draw(snapshot))


def test_a_failure_is_named_under_the_table(study_events: Events) -> None:
    text = "\n".join(_draw(Snapshot.of(study_events(failing=(3,)))))

    assert "trial 3 failed at step 3: ValueError: the label 7 is unknown" in text


def test_devices_show_peak_budget_and_busy(study_events: Events) -> None:
    text = "\n".join(_draw(Snapshot.of(study_events(upto=50))))

    assert "cpu:0  peak 11.3 MiB of 12.0 MiB  busy 45 %  5.0 steps/s  trials 0, 2" in text
    assert "ETA" in text


def test_devices_of_a_study_that_is_over_have_no_speed(study_events: Events) -> None:
    lines = [line for line in _draw(Snapshot.of(study_events())) if line.startswith("cpu:")]

    assert lines
    assert not any("steps/s" in line for line in lines)


def test_before_the_first_event_it_says_what_is_going_on() -> None:
    assert "planning" in _draw(Folder().snapshot())[0]


def test_what_no_checkpoint_holds_is_told_once_a_place(study_events: Events) -> None:
    of = lambda trial, *places: StateLeftOut(time=2e9, trial=trial, step=9, places=places)  # noqa: E731
    told = [of(0, "'it' of the model"), of(1, "'it' of the model"), of(1, "'a' of 'b'")]
    out = io.StringIO()
    lines = PlainLines(out)
    for event in (*study_events(upto=50), *told):
        lines(event)

    words = [line for line in out.getvalue().splitlines() if "checkpoint holds" in line]
    assert [word[:38] for word in words] == [
        "WARNING: a step changes 'it' of the mo",
        "WARNING: a step changes 'a' of 'b', wh",
    ]
    shown = "\n".join(_draw(Snapshot.of([*study_events(upto=50), *told]), width=200))
    assert shown.count("warning: a step changes") == 2


def test_a_reader_of_data_that_died_is_a_line() -> None:
    event = LoaderRestarted(time=2e9, trial=3, step=9, reason="training data: gone")

    assert describe(event) == (
        "a process that reads trial 3's data died at step 9 (training data: gone); another one "
        "reads on"
    )


def test_a_worker_that_gets_nothing_done_is_a_line_until_it_does(study_events: Events) -> None:
    stall = WorkerStalled(
        time=2e9,
        device="cpu:0",
        trials=(0, 2),
        trial=2,
        seconds=20.0,
        limit_s=60.0,
        place="/home/ada/words.py:7 in __iter__",
    )
    words = (
        "cpu:0 got nothing done for 20.0 s, trial 2's code at /home/ada/words.py:7 in __iter__; "
        "after 1m 00s that counts as a hang; trials on it: 0, 2"
    )
    events = list(study_events(upto=50))
    stalled = [*events, stall]

    assert describe(stall) == words
    assert words in "\n".join(_draw(Snapshot.of(stalled), width=200))
    last = next(e for e in reversed(events) if isinstance(e, StepFinished) and e.device == "cpu:0")
    assert "nothing done" not in "\n".join(_draw(Snapshot.of([*stalled, last]), width=200))
    unknown = replace(stall, trial=None, place="")
    assert describe(unknown).startswith("cpu:0 got nothing done for 20.0 s; after 1m 00s")


WAITS = (
    PlanningWaited(
        time=60.0, device="cpu:1", trial=3, work="measure", seconds=60.0, limit_s=1800.0
    ),
    PlanningWaited(
        time=61.0, device="cpu:0", trial=None, work="start", seconds=61.0, limit_s=1800.0
    ),
    PlanningWaited(time=120.0, device="cpu:1", trial=4, work="build", seconds=9.0, limit_s=1800.0),
)


def test_what_takes_long_while_it_is_planned_is_a_line() -> None:
    doing = [
        "trial 3 is being measured on cpu:1, for 1m 00s",
        "the worker of cpu:0 is starting, for 1m 01s",
        "trial 4 is being built on cpu:1, for 9.0 s",
    ]
    assert [describe(wait) for wait in WAITS] == [
        f"planning: {words} so far; after 30m 00s it counts as a hang" for words in doing
    ]


def test_the_screen_of_a_study_that_is_planned_says_what_it_waits_for(
    study_events: Events,
) -> None:
    started, planned, *_ = study_events(8)

    lines = _draw(Snapshot.of([started, *WAITS]), 120)

    assert lines[0].startswith("sweep: 8 trials; planning")
    assert lines[1:] == [
        f"after 1m 01s  {describe(WAITS[1])}",
        f"after 2m 00s  {describe(WAITS[2])}",
    ]
    assert Snapshot.of([started, *WAITS, planned]).waits == ()


def test_a_worker_that_dies_while_it_is_planned_is_counted_and_waited_for_no_more(
    study_events: Events, a_worker_death: WorkerDied
) -> None:
    started, *_ = study_events(8)

    lines = _draw(Snapshot.of([started, *WAITS, replace(a_worker_death, trials=())]), 120)

    assert lines[1] == f"after 1m 01s  {describe(WAITS[1])}"
    assert lines[2].startswith("cpu:1")
    assert "worker restarts 1" in lines[2]


def test_a_terminal_gets_the_table_and_a_pipe_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)

    assert isinstance(make_screen(Terminal()), LiveTable)
    assert isinstance(make_screen(io.StringIO()), PlainLines)


def test_lines_report_evaluations_ends_and_progress(study_events: Events) -> None:
    stream = io.StringIO()

    with PlainLines(stream) as screen:
        for event in study_events(4, failing=(2,)):
            screen(event)

    text = stream.getvalue()
    assert "trial 0 step 20: valid_loss 3.1000" in text
    assert "trial 0 finished after 20 steps" in text
    assert "trial 2 FAILED at step 3: ValueError: the label 7 is unknown" in text
    assert "3 trials finished, 1 failed" in text
    assert text.count("sweep: step ") == 1  # 6.3 seconds of events
    assert "ETA" in text


def test_the_line_of_a_trial_that_ended_looks_at_no_other(
    study_events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Folder] = []
    stream = io.StringIO()
    screen = PlainLines(stream)
    screen.look_back(Snapshot.of(study_events(8, upto=50)))
    monkeypatch.setattr(Folder, "snapshot", drawn.append)
    ended = TrialFinished(time=9.0, trial=3, step=20, metrics={}, checkpoint="", seconds=1.0)
    for metrics in ({"valid_loss": 1.0}, {}):
        screen(replace(ended, metrics=metrics))
    assert stream.getvalue().count("trial 3 finished after 20 steps and 8.0 s: ") == 2
    assert not drawn


def test_of_many_evaluations_a_log_has_some_and_the_count_of_the_others() -> None:
    stream = io.StringIO()
    with PlainLines(stream) as screen:
        for number in range(100):  # ten a second
            at = number / 10
            screen(Evaluated(time=at, trial=0, step=number, epoch=1, metrics={"valid_loss": 2.0}))
            screen(
                StepFinished(
                    time=at, trial=0, step=number, epoch=1, loss=2.0, seconds=0.1, device="cpu:0"
                )
            )

    lines = stream.getvalue().splitlines()
    assert len([line for line in lines if "valid_loss" in line]) <= 2 * PLAIN_EVALUATIONS
    assert lines[PLAIN_EVALUATIONS].endswith("more evaluations")


def test_a_table_that_is_drawn_again_copies_no_trials(
    study_events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[TrialFold] = []
    screen = LiveTable(Console(width=120, height=24, file=io.StringIO(), force_terminal=True))
    monkeypatch.setattr(TrialFold, "copy", copied.append)
    screen.catch_up(study_events(4, upto=50))
    screen.catch_up(study_events(4))
    assert not copied


@pytest.mark.parametrize("screen_of", [LiveTable, PlainLines])
def test_a_screen_of_a_resumed_study_goes_on_from_what_was_before(
    study_events: Events, screen_of: type
) -> None:
    events = list(study_events(4))
    half = len(events) // 2
    before = Snapshot.of(events[:half])
    console = Console(width=120, height=24, file=io.StringIO(), force_terminal=True)
    screen = screen_of(console if screen_of is LiveTable else console.file)
    screen.look_back(before)
    with screen:
        for event in events[half:]:
            screen(event)

    assert screen._folder.snapshot() == Snapshot.of(events)
    assert before == Snapshot.of(events[:half])


def test_a_worker_that_died_is_reported_with_its_trials(a_worker_death: WorkerDied) -> None:
    assert describe(a_worker_death) == (
        "the worker of cpu:1 died (killed by signal 9); trials on it: 1, 3"
    )


def test_of_a_worker_s_own_exception_a_line_says_which(a_worker_death: WorkerDied) -> None:
    words = "process 17 ended by an exception while it measured trial 2"
    traceback = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nKeyError: 5'
    assert describe(replace(a_worker_death, reason=f"{words}\n{traceback}")) == (
        f"the worker of cpu:1 died ({words}: KeyError: 5); trials on it: 1, 3"
    )


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            TrialStopped(
                time=1.0,
                trial=3,
                step=9,
                reason="by hand",
                checkpoint="c",
                metrics={},
                seconds=1.0,
            ),
            "trial 3 stopped at step 9: by hand",
        ),
        (
            TrialPruned(
                time=1.0,
                trial=3,
                step=9,
                reason="others did better",
                checkpoint="c",
                metrics={},
                seconds=1.0,
            ),
            "trial 3 pruned at step 9: others did better",
        ),
        (
            TrialExploited(
                time=1.0,
                trial=3,
                step=9,
                source=1,
                before={"lr": 0.1, "width": 8},
                hp={"lr": 0.08, "width": 8},
                checkpoint="c",
            ),
            "trial 3 goes on from trial 1's state after step 9, with lr=0.08 (was 0.1)",
        ),
        (
            StudyPaused(time=1.0, reason="the disk is full"),
            "the study is paused: the disk is full",
        ),
        (StudyContinued(time=1.0), "the study goes on"),
        (StudyPlanned(time=1.0, trials=8, seconds=41.2), "planned 8 trials: predicted 41.2 s"),
        (
            StudyChanged(time=1.0, changes=("2 trials more", "steps 20 instead of 10")),
            "the study goes on with changes: 2 trials more; steps 20 instead of 10",
        ),
        (
            CheckpointDamaged(time=1.0, trial=3, path="trials/0003/step-9", reason="a digest"),
            "trials/0003/step-9 of trial 3 is damaged: a digest",
        ),
        (
            StorageFailed(
                time=1.0, path="trials/0003", error="no space\nleft", action="trains on"
            ),
            "trials/0003 could not be written: no space; trains on",
        ),
    ],
)
def test_what_befalls_a_durable_study_is_told_in_a_line(event: Event, line: str) -> None:
    assert describe(event) == line


def test_a_sampler_without_more_points_is_told_of_once_and_counted() -> None:
    ended = SamplerEnded(time=1.0, sampler="GridSampler", trials=3, asked=8)
    of = {"study": "s", "metric": "m", "mode": "min", "devices": (), "source": "", "versions": {}}
    started = StudyStarted(time=0.0, trials=8, **of)
    stream = io.StringIO()
    lines = PlainLines(stream)
    for event in (started, ended, StateLeftOut(time=2.0, trial=0, step=1, places=("a",))):
        lines(event)
    assert stream.getvalue().count("GridSampler has no more points: there are 3 of the 8") == 1
    assert Snapshot.of([started, ended]).total == 3


def test_a_warning_is_told_with_the_plan_and_stays_on_the_screen(study_events: Events) -> None:
    warned = StudyPlanned(time=1.0, trials=8, seconds=41.2, warnings=("nobody reads 'q'",))
    stream = io.StringIO()
    screen = PlainLines(stream)
    screen(warned)

    lines = _draw(Snapshot.of([*study_events(upto=50), warned]), width=120)

    assert "WARNING: nobody reads 'q'" in stream.getvalue().splitlines()
    assert "warning: nobody reads 'q'" in map(str.strip, lines)


def test_why_trials_share_no_array_is_told_with_the_plan(study_events: Events) -> None:
    planned = StudyPlanned(time=1.0, trials=8, seconds=41.2, unfused=("8 trials: slots differ",))
    stream = io.StringIO()
    PlainLines(stream)(planned)

    snapshot = Snapshot.of([*study_events(upto=50), planned])

    said = stream.getvalue().splitlines()
    assert said[0].startswith("planned 8 trials")
    assert said[1:] == ["unfused 8 trials: slots differ"]
    assert "unfused 8 trials: slots differ" in map(str.strip, _draw(snapshot, width=120))
    over = Snapshot.of([*study_events(), planned, finished()])
    assert not any("unfused" in line for line in _draw(over, width=120))


def test_planning_that_goes_on_for_some_seconds_is_a_line() -> None:
    line = describe(PlanningGoesOn(time=1.0, seconds=3.2))

    assert line == "planning: each distinct model is measured once ..."


def finished() -> StudyFinished:
    return StudyFinished(time=2.0, finished=8, failed=0, seconds=1.0)


def test_a_stopped_trial_and_a_paused_study_are_called_so(study_events: Events) -> None:
    stop = TrialStopped(
        time=9.0, trial=3, step=9, reason="by hand", checkpoint="c", metrics={}, seconds=1.0
    )
    snapshot = Snapshot.of([*study_events(upto=50), stop, StudyPaused(time=9.5, reason="r")])

    lines = _draw(snapshot, width=120)

    assert any(line.split()[:1] == ["3"] and " stopped " in line for line in lines)
    assert "1 stopped" in lines[-1]
    assert lines[-1].rstrip().endswith("paused")


def test_a_pruned_trial_is_called_so(study_events: Events) -> None:
    end = TrialPruned(
        time=9.0, trial=3, step=9, reason="r", checkpoint="c", metrics={}, seconds=1.0
    )
    lines = _draw(Snapshot.of([*study_events(upto=50), end]), width=120)

    assert any(line.split()[:1] == ["3"] and " pruned " in line for line in lines)
    assert "1 pruned" in lines[-1]


def test_the_table_is_drawn_only_as_often_as_a_reader_can_see(study_events: Events) -> None:
    stream, now = io.StringIO(), [0.0]
    console = Console(file=stream, force_terminal=True, width=80, height=24)

    with LiveTable(console, clock=lambda: now[0]) as screen:
        drawn = []
        for event in study_events(4, upto=20):
            before = stream.tell()
            screen(event)
            drawn.append(stream.tell() > before)
            now[0] += 0.05

    assert drawn[0]
    assert 0 < sum(drawn) <= len(drawn) / 5 + 1


@pytest.mark.parametrize("kind", [LiveTable, PlainLines])
def test_a_screen_that_breaks_says_so_once_and_training_goes_on(
    kind: type, study_events: Events, capsys: pytest.CaptureFixture[str]
) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("gone")

    screen = kind(Console(file=Closed(), force_terminal=True) if kind is LiveTable else Closed())

    for event in study_events(2, failing=(0,)):
        screen(event)

    assert capsys.readouterr().err.count("the study goes on") == 1


def test_steps_alone_make_no_line(study_events: Events) -> None:
    step = next(event for event in study_events() if isinstance(event, StepFinished))

    assert describe(step) == ""


def _emulated(behind_s: float, stream: str = "compute") -> EmulationMeasured:
    kept = {"works": 9, "emulated_s": 1.0, "overruns": 3, "overrun_s": behind_s}
    return EmulationMeasured(time=50.0, device="cpu:0", stream=stream, behind_s=behind_s, **kept)


def test_an_emulation_that_fell_behind_is_not_to_be_believed_and_says_so(study_events) -> None:
    late = [*study_events(upto=37), _emulated(0.01), _emulated(0.5), _emulated(0.01, "up")]
    told = " ".join(_draw(Snapshot.of(late), width=160))
    assert "cpu:0 compute fell behind the emulated times by 510 ms of 2.0 s" in told
    for width, height in ((50, 12), (80, 24)):
        lines = _draw(Snapshot.of(late), width, height)
        assert len(lines) <= height - 1
        assert max(map(len, lines)) <= width
    assert "cpu:0 up" not in told
    kept = " ".join(_draw(Snapshot.of([*study_events(upto=37), _emulated(0.01)]), width=160))
    assert "emulated" not in kept


def test_the_lines_of_a_log_end_with_it(study_events) -> None:
    stream = io.StringIO()
    lines = PlainLines(stream)
    over = StudyFinished(time=99.0, finished=1, failed=0, seconds=9.0)
    for event in (*study_events(upto=37), _emulated(0.5), over):
        lines(event)
    *_, behind, advice, end = stream.getvalue().splitlines()
    assert behind.startswith("cpu:0 compute fell behind the emulated times by")
    assert "emulate a slower device" in advice
    assert end.startswith("1 trial finished")


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("SIGINT was received", "; stopped: SIGINT was received; the same command goes on"),
        ("no step for 9 s\nand more", "; stopped: no step for 9 s"),
        ("", ""),
    ],
)
def test_a_study_that_was_interrupted_says_how_it_goes_on(reason: str, words: str) -> None:
    event = StudyFinished(time=2e9, finished=1, failed=0, seconds=9.0, stopped=reason)
    assert describe(event) == f"1 trial finished, 0 failed, in 9.0 s{words}"


def test_no_time_is_foretold_where_nobody_knows_how_long_trials_are() -> None:
    planned = StudyPlanned(time=2e9, trials=2, seconds=0.0, warnings=())
    assert describe(planned).endswith("predicted no time: how long trials are is not known")
    assert describe(replace(planned, seconds=9.0)).endswith("predicted 9.0 s")
