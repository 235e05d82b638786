"""The demo's study: what it promises about sizes, time and the directory it replaces."""

from __future__ import annotations

import math
from pathlib import Path

import cloudpickle
import pytest

from shoal import demo
from shoal.core.errors import SpecError
from shoal.core.event import StudyStarted
from shoal.core.units import parse_bytes
from shoal.observe import Database
from shoal.source import load_study


def _started(source: str) -> StudyStarted:
    return StudyStarted(
        time=0.0,
        study="demo",
        metric="valid_loss",
        mode="min",
        trials=8,
        devices=(),
        source=source,
        versions={},
    )


def _write_study(place: Path, source: str) -> None:
    with Database(place) as log:
        log.write([_started(source)])


def test_every_model_needs_three_times_the_memory_of_a_device() -> None:
    budget = parse_bytes(demo.DEVICE_MEMORY)
    shapes = {(t.hp["width"], t.hp["depth"]): t.hp for t in demo.study.trials}

    assert len(demo.study.trials) == 8
    assert len(shapes) == 4
    for hp in shapes.values():
        model = demo.build_model(hp)
        state = 4 * sum(p.numel() * p.element_size() for p in model.parameters())
        assert state >= 3 * budget


def test_a_step_reads_at_least_256_tokens() -> None:
    train, valid = demo.build_data({"steps": 2})

    assert all(x.numel() >= 256 for x, _ in train)
    assert len(list(train)) == 2
    assert valid is not None


def test_the_recorded_source_loads_the_study_again() -> None:
    assert load_study(demo.SOURCE).study is demo.study
    assert demo.make_study(7).source == demo.SOURCE


def test_the_recipe_travels_to_a_worker_by_name() -> None:
    assert len(cloudpickle.dumps(demo.recipe)) < 2000


@pytest.mark.parametrize(
    ("minutes", "steps"), [(1, demo.STEPS), (20, 20 * demo.STEPS), (0.001, 2)]
)
def test_more_minutes_are_more_steps(minutes: float, steps: int) -> None:
    assert demo.steps_for(minutes) == steps


@pytest.mark.parametrize("minutes", [0, -1, math.nan, math.inf])
def test_minutes_that_are_no_time_are_refused(minutes: float) -> None:
    with pytest.raises(SpecError, match="more than 0 and at most a week"):
        demo.steps_for(minutes)


def test_the_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    factor = demo.WarmupCosine(100)

    assert factor(0) == pytest.approx(0.05)
    assert factor(19) == factor(20) == pytest.approx(1.0)
    assert factor(100) == pytest.approx(0.1)
    assert max(map(factor, range(101))) <= 1.0


def test_an_earlier_demo_is_replaced(tmp_path: Path) -> None:
    _write_study(tmp_path / "demo", demo.SOURCE)

    assert demo.remove_earlier(tmp_path) == tmp_path / "demo"
    assert not (tmp_path / "demo").exists()


def test_nothing_is_removed_where_there_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()

    assert demo.remove_earlier(tmp_path) is None
    assert demo.remove_earlier(tmp_path / "elsewhere") is None


def test_another_study_of_that_name_is_left_alone(tmp_path: Path) -> None:
    _write_study(tmp_path / "demo", "mine.py:study")

    with pytest.raises(SpecError, match="no earlier demo wrote"):
        demo.remove_earlier(tmp_path)
    assert (tmp_path / "demo" / "study.db").exists()


def test_files_of_the_user_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "thesis.tex").write_text("...")

    with pytest.raises(SpecError, match="no earlier demo wrote"):
        demo.remove_earlier(tmp_path)
    assert (tmp_path / "demo" / "thesis.tex").exists()


def test_a_demo_that_is_running_is_not_replaced(tmp_path: Path) -> None:
    with Database(tmp_path / "demo") as log:
        log.write([_started(demo.SOURCE)])

        with pytest.raises(SpecError, match="has another writer"):
            demo.remove_earlier(tmp_path)


def test_a_sample_begins_with_the_prompt_and_repeats() -> None:
    model = demo.build_model({"width": 32, "depth": 1}).eval()

    first, second = (demo.write_sample(model, math.log(2), count=20) for _ in range(2))

    assert first == second
    assert first.text.startswith("def ")
    assert first.bits_per_byte == pytest.approx(1.0)
