"""``shoal plan --measured``: a plan beside what its run came to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.core.errors import SpecError, StorageError
from shoal.core.event import Event, StepFinished, StudyFinished, StudyStarted, TrialPlanned
from shoal.core.plan import Job, Plan
from shoal.core.units import Seconds
from shoal.observe import Database
from shoal.testing import make_device, make_job, make_shard
from shoal.ui.cli import app
from shoal.ui.measured import Steps, compare_plan, planned_place

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
    assert (first["planned_step_s"], second["planned_step_s"]) == (0.5, 0.25)
    assert first["measured_step_s"] > 0
    assert found["planned_s"] == 0.5 * first["steps"] + 0.25 * second["steps"]
    assert 0 < found["measured_s"] <= found["whole_run_s"]


def test_the_text_has_a_line_for_the_study_each_device_and_each_trial(place: Path) -> None:
    words = ["plan", "sweep", "--measured", "--directory", str(place.parent)]

    result = CliRunner().invoke(app, words, catch_exceptions=False)

    firsts = [line.split()[0] for line in result.stdout.splitlines() if line]
    assert result.exit_code == 0
    assert firsts == ["study", "time", "steps", "peak", "cpu:0", "cpu:1", "trial", "0", "1", "the"]


def test_a_trial_of_which_no_step_ran_has_a_dash(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan.from_json((place / "plan.json").read_text())
    more = replace(plan, jobs=(*plan.jobs, _job(2, 1.0)))
    (place / "plan.json").write_text(more.to_json())

    compare_plan(place, as_json=False)

    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("    2 "))
    assert line.split()[2:] == ["0", "1.0", "s", "-", "-"]


def test_a_run_that_plans_begins_anew_and_one_with_nothing_to_do_does_not() -> None:
    started = StudyStarted(
        time=1.0, study="s", metric="m", mode="min", trials=1, devices=(), source="", versions={}
    )
    planned = TrialPlanned(
        time=1.0,
        trial=0,
        hp={},
        seed=0,
        technique="",
        shards=1,
        steps=2,
        peak_bytes=0,
        numerics={},
    )
    step = StepFinished(time=2.0, trial=0, step=1, epoch=1, loss=1.0, seconds=0.5, device="cpu:0")
    over = StudyFinished(time=3.0, finished=1, failed=0, seconds=2.0)
    steps = Steps()

    for event in (started, planned, step, replace(step, time=4.0), over, started, over):
        steps.add(event)
    assert (steps.seconds, steps.lasted_s) == ({0: [0.5, 0.5]}, 2.5)

    for event in (started, planned, replace(step, seconds=0.25)):
        steps.add(event)
    assert (steps.seconds, steps.lasted_s) == ({0: [0.25]}, 0.25)


def test_what_there_is_nothing_to_compare_for_is_refused(place: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="Leave out --devices"):
        planned_place("sweep", tmp_path, given=(None, "1MiB"))
    with pytest.raises(SpecError, match="no study 'other'"):
        planned_place("other", tmp_path, given=())

    (place / "plan.json").write_text("{")
    with pytest.raises(StorageError, match=r"plan\.json cannot be read"):
        compare_plan(place, as_json=False)
    (place / "plan.json").unlink()
    with pytest.raises(SpecError, match="has made a plan yet"):
        compare_plan(place, as_json=False)


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
