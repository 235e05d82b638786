"""``shoal plan --measured``: a plan beside what its run came to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from typer.testing import CliRunner

from shoal.core.errors import SpecError, StorageError
from shoal.core.event import (
    Event,
    PeakMeasured,
    StepFinished,
    StudyFinished,
    StudyStarted,
    TrialPlanned,
)
from shoal.core.plan import Job, Plan
from shoal.core.units import Seconds
from shoal.observe import Database, read_events
from shoal.testing import make_device, make_job, make_shard
from shoal.ui.cli import app
from shoal.ui.measured import LastRun, compare_plan, planned_place

Events = Callable[..., Iterator[Event]]


def _job(trial: int, step_s: float) -> Job:
    return replace(make_job(trial, [make_shard(0, 64)]), step_s=Seconds(step_s))


@pytest.fixture
def place(tmp_path: Path, study_events: Events) -> Path:
    """A study of two trials, with a plan that foretold half a second a step."""
    directory = tmp_path / "sweep"
    with Database(directory) as database:
        database.write(study_events(2))
    plan = Plan(
        study="sweep",
        devices=(make_device(),),
        jobs=(_job(0, 0.5), _job(1, 0.25)),
        active=1,
        seconds=Seconds(1.0),
    )
    (directory / "plan.json").write_text(plan.to_json())
    return directory


def test_steps_are_compared_trial_by_trial_and_over_the_study(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare_plan(place, as_json=True) == 0

    found = json.loads(capsys.readouterr().out)
    first, second = found["trials"]
    steps = [e for e in read_events(place) if isinstance(e, StepFinished)]
    mine = [[step.seconds for step in steps if step.trial == n] for n in (0, 1)]
    assert (first["planned_step_s"], second["planned_step_s"]) == (0.5, 0.25)
    assert (first["steps"], second["steps"]) == (len(mine[0]), len(mine[1]))
    assert first["measured_step_s"] == median(mine[0])
    assert found["planned_s"] == 0.5 * len(mine[0]) + 0.25 * len(mine[1])  # one device has both
    assert found["measured_s"] == pytest.approx(sum(mine[0]) + sum(mine[1]))
    assert found["steps_lasted_s"] == steps[-1].time - (steps[0].time - steps[0].seconds)
    assert found["later_trials"] == 0


def test_the_text_has_a_line_for_the_study_each_device_and_each_trial(place: Path) -> None:
    words = ["plan", "sweep", "--measured", "--directory", str(place.parent)]

    result = CliRunner().invoke(app, words, catch_exceptions=False)

    firsts = [line.split()[0] for line in result.stdout.splitlines() if line]
    assert result.exit_code == 0
    assert firsts == ["study", "time", "all", "peak", "cpu:0", "trial", "0", "1", "'all"]
    (line,) = (x for x in result.stdout.splitlines() if x.startswith("    0 "))
    assert line.split()[-1] == f"{_median(place, 0) / 0.5:.2f}"


def _median(place: Path, trial: int) -> float:
    steps = (e for e in read_events(place) if isinstance(e, StepFinished))
    return median(step.seconds for step in steps if step.trial == trial)


def test_trials_that_came_later_are_left_out_and_said_to_be(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan.from_json((place / "plan.json").read_text())
    (place / "plan.json").write_text(replace(plan, jobs=plan.jobs[:1]).to_json())

    compare_plan(place, as_json=True)
    found = json.loads(capsys.readouterr().out)
    compare_plan(place, as_json=False)

    (trial,) = found["trials"]
    assert found["planned_s"] == 0.5 * trial["steps"]
    assert found["later_trials"] == 1
    assert "1 trial came while it ran" in capsys.readouterr().out


def test_a_trial_of_which_no_step_ran_has_a_dash(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan.from_json((place / "plan.json").read_text())
    more = replace(plan, jobs=(*plan.jobs, _job(2, 1.0)))
    (place / "plan.json").write_text(more.to_json())

    compare_plan(place, as_json=False)

    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("    2 "))
    assert line.split()[2:] == ["0", "1.0", "s", "-", "-"]


STARTED = StudyStarted(
    time=1.0, study="s", metric="m", mode="min", trials=1, devices=(), source="", versions={}
)
PLANNED = TrialPlanned(
    time=1.5,
    trial=0,
    hp={},
    seed=0,
    technique="",
    shards=1,
    steps=2,
    peak_bytes=0,
    numerics={},
)
STEP = StepFinished(time=2.0, trial=0, step=1, epoch=1, loss=1.0, seconds=0.5, device="cpu:0")
PEAK = PeakMeasured(time=2.0, device="cpu:0", peak_bytes=9, budget_bytes=99, predicted_bytes=10)
OVER = StudyFinished(time=5.0, finished=1, failed=0, seconds=4.0)


def test_a_run_with_nothing_to_do_leaves_what_the_one_before_came_to() -> None:
    run = LastRun()

    for event in (STARTED, PLANNED, STEP, PEAK, replace(STEP, time=4.0), OVER):
        run.add(event)
    for event in (replace(STARTED, time=90.0), replace(OVER, time=91.0)):
        run.add(event)

    assert (run.steps, run.peaks) == ({0: [0.5, 0.5]}, {"cpu:0": PEAK})
    assert (run.first_step, run.last_step) == (1.5, 4.0)
    assert (run.began, run.ended) == (1.0, 5.0)


def test_a_run_that_plans_begins_anew_and_peaks_keep_the_prediction_beside_them() -> None:
    run, small = LastRun(), replace(PEAK, device="cpu:1", peak_bytes=2, predicted_bytes=3)

    for event in (STARTED, PLANNED, STEP, PEAK, OVER):
        run.add(event)
    for event in (
        replace(STARTED, time=10.0),
        replace(PLANNED, time=11.0),
        replace(STEP, time=12.0, seconds=0.25),
        small,
        replace(small, peak_bytes=1, predicted_bytes=7),
        replace(OVER, time=13.0),
    ):
        run.add(event)

    assert (run.steps, run.peaks) == ({0: [0.25]}, {"cpu:1": small})
    assert (run.began, run.ended) == (10.0, 13.0)


def test_what_there_is_nothing_to_compare_for_is_refused(place: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="Leave out --devices"):
        planned_place("sweep", str(tmp_path), given=(None, "1MiB"))
    with pytest.raises(SpecError, match="no study 'other'"):
        planned_place("other", str(tmp_path), given=())
    with pytest.raises(SpecError, match="Leave out --directory"):
        planned_place("mine.py", str(tmp_path), given=())

    (place / "plan.json").write_text("{")
    with pytest.raises(StorageError, match=r"plan\.json cannot be read"):
        compare_plan(place, as_json=False)
    (place / "plan.json").write_bytes(b"{\xff" * 9000)
    with pytest.raises(StorageError, match=r"can't decode byte 0xff") as told:
        compare_plan(place, as_json=False)
    assert len(str(told.value)) < 600, "not the whole file in words"
    (place / "plan.json").unlink()
    with pytest.raises(SpecError, match="has made a plan yet"):
        compare_plan(place, as_json=False)


def test_a_file_and_a_name_with_dots_name_their_study(
    place: Path, study_events: Events, tmp_path: Path
) -> None:
    dotted = tmp_path / "sweep.python"
    with Database(dotted) as database:
        database.write(study_events(1))
    file = tmp_path / "defines_sweep.py"
    file.write_text(
        "import shoal\n"
        "recipe = shoal.Recipe(model=lambda hp: None, data=lambda hp: ([], None))\n"
        f"study = shoal.Study('sweep', recipe, space={{'lr': 0.1}}, trials=1, steps=1, "
        f"directory={str(tmp_path)!r})\n"
    )

    assert planned_place("sweep.python", str(tmp_path), given=()) == dotted
    assert planned_place(str(file), None, given=()) == place


def test_a_directory_without_measured_is_bad_usage(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["plan", "mine.py", "--directory", str(tmp_path)])

    assert result.exit_code == 2
    assert "--measured" in result.output


def test_a_plan_of_which_nothing_ran_is_refused(
    place: Path, study_events: Events, tmp_path: Path
) -> None:
    fresh = tmp_path / "fresh"
    events = (e for e in study_events(2) if not isinstance(e, StepFinished))
    with Database(fresh) as database:
        database.write(events)
    (place / "plan.json").rename(fresh / "plan.json")

    with pytest.raises(SpecError, match=r"no step of the plan in .*fresh has run yet"):
        compare_plan(fresh, as_json=False)
