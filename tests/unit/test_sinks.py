"""The sinks' files: every step once, whatever was killed and done again."""

from __future__ import annotations

import builtins
import csv
import math
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from shoal.core.errors import SpecError
from shoal.core.event import (
    Evaluated,
    Event,
    StepFinished,
    StudyFinished,
    TrialFinished,
    TrialPlanned,
    TrialRestarted,
)
from shoal.sinks import CsvSink, TensorBoardSink


def step(trial: int, number: int, loss: float | None = None) -> StepFinished:
    return StepFinished(
        time=100.0 + number,
        trial=trial,
        step=number,
        epoch=1,
        loss=float(number) if loss is None else loss,
        seconds=0.5,
        device="cpu:0",
    )


def evaluated(trial: int, number: int, **metrics: float) -> Evaluated:
    metrics = metrics or {"valid_loss": number / 10}
    return Evaluated(time=200.0 + number, trial=trial, step=number, epoch=1, metrics=metrics)


def steps(trial: int, first: int, last: int) -> list[Event]:
    """Steps, and an evaluation after every second one."""
    events: list[Event] = []
    for number in range(first, last + 1):
        events.append(step(trial, number))
        if number % 2 == 0:
            events.append(evaluated(trial, number))
    return events


@pytest.fixture
def feed() -> Iterator[Callable[[Any, Iterable[Event]], None]]:
    """A function that gives events to a sink, as a study does; closes the sinks afterwards."""
    fed: list[Any] = []

    def give(sink: Any, events: Iterable[Event]) -> None:
        fed.append(sink)
        for event in events:
            sink(event)

    yield give
    for sink in fed:
        sink.close()


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


PAGE = Path(__file__).parents[2] / "docs" / "callbacks.md"
Feed = Callable[[Any, Iterable[Event]], None]

# ---------------------------------------------------------------- CSV


def test_metrics_have_a_row_per_evaluation(feed: Feed, tmp_path: Path) -> None:
    sink = CsvSink(tmp_path / "study")

    feed(sink, [*steps(0, 1, 4), *steps(7, 1, 2)])

    assert rows(tmp_path / "study" / "metrics.csv") == [
        _row(0, 2, "202.0", "1.5", "0.2"),
        _row(0, 4, "204.0", "3.5", "0.4"),
        _row(7, 2, "202.0", "1.5", "0.2"),
    ]
    assert not (tmp_path / "study" / "steps.csv").exists()


def _row(trial: int, step: int, time: str, train: str, valid: str) -> dict[str, str]:
    values = (str(trial), str(step), "1", time, train, valid)
    names = ("trial", "step", "epoch", "time", "train_loss", "valid_loss")
    return dict(zip(names, values, strict=True))


def test_steps_have_their_own_file_when_asked_for(feed: Feed, tmp_path: Path) -> None:
    feed(CsvSink(tmp_path / "curve.csv", steps=True), steps(0, 1, 3))

    assert [row["loss"] for row in rows(tmp_path / "curve-steps.csv")] == ["1.0", "2.0", "3.0"]
    assert rows(tmp_path / "curve-steps.csv")[0]["device"] == "cpu:0"
    assert len(rows(tmp_path / "curve.csv")) == 1


def test_a_row_is_on_its_way_to_the_disk_at_once(feed: Feed, tmp_path: Path) -> None:
    sink = CsvSink(tmp_path, steps=True)

    feed(sink, steps(0, 1, 2))  # neither closed nor flushed by anybody

    assert len(rows(tmp_path / "metrics.csv")) == 1
    assert len(rows(tmp_path / "steps.csv")) == 2


def test_steps_that_are_done_again_replace_those_before(feed: Feed, tmp_path: Path) -> None:
    sink = CsvSink(tmp_path, steps=True)
    restart = TrialRestarted(time=150.0, trial=0, step=3)

    feed(sink, [*steps(0, 1, 6), *steps(1, 1, 6), restart, *steps(0, 4, 8)])

    assert [(r["trial"], r["step"]) for r in rows(tmp_path / "metrics.csv")] == [
        *(("0", "2"), ("1", "2"), ("1", "4"), ("1", "6")),
        *(("0", "4"), ("0", "6"), ("0", "8")),
    ]
    losses = {r["step"]: r["train_loss"] for r in rows(tmp_path / "metrics.csv")}
    assert losses == {"2": "1.5", "4": "3.5", "6": "5.5", "8": "7.5"}
    mine = [row["step"] for row in rows(tmp_path / "steps.csv") if row["trial"] == "0"]
    assert mine == [str(number) for number in range(1, 9)]


def test_another_process_goes_on_in_the_same_files(feed: Feed, tmp_path: Path) -> None:
    feed(CsvSink(tmp_path, steps=True), steps(0, 1, 5))

    feed(CsvSink(tmp_path, steps=True), steps(0, 4, 6))  # from a state saved after step 3

    assert [row["step"] for row in rows(tmp_path / "steps.csv")] == list("123456")
    metrics = rows(tmp_path / "metrics.csv")
    assert [row["step"] for row in metrics] == ["2", "4", "6"]
    assert [row["train_loss"] for row in metrics] == ["1.5", "", "5.5"]  # step 3 was not seen


def test_a_row_torn_by_a_kill_is_cut_off(feed: Feed, tmp_path: Path) -> None:
    feed(CsvSink(tmp_path), steps(0, 1, 4))
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("0,6,1,20")

    feed(CsvSink(tmp_path), steps(0, 5, 6))

    assert [row["step"] for row in rows(tmp_path / "metrics.csv")] == ["2", "4", "6"]


def test_a_metric_that_comes_later_gets_a_column(feed: Feed, tmp_path: Path) -> None:
    sink = CsvSink(tmp_path)

    feed(sink, [evaluated(0, 1, valid_loss=0.5), evaluated(0, 2, valid_loss=0.25, valid_f1=1.0)])

    assert [row["valid_f1"] for row in rows(tmp_path / "metrics.csv")] == ["", "1.0"]


def test_values_come_back_with_every_bit(feed: Feed, tmp_path: Path) -> None:
    feed(CsvSink(tmp_path), [evaluated(0, 1, valid_loss=0.1 + 0.2, valid_x=math.inf)])

    (row,) = rows(tmp_path / "metrics.csv")
    assert float(row["valid_loss"]) == 0.1 + 0.2
    assert float(row["valid_x"]) == math.inf


def test_a_file_that_is_no_csv_of_a_sink_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("name,salary\n")

    with pytest.raises(SpecError, match=r"begins with 'name,salary' and is not of a CsvSink"):
        CsvSink(tmp_path)


def test_the_end_of_the_study_closes_the_files(feed: Feed, tmp_path: Path) -> None:
    sink = CsvSink(tmp_path, steps=True)
    end = StudyFinished(time=9.0, finished=1, failed=0, seconds=9.0)

    feed(sink, [*steps(0, 1, 2), end])

    assert sink._metrics._file is None
    feed(sink, steps(0, 3, 4))  # of the next run
    sink.close()
    assert [row["step"] for row in rows(tmp_path / "metrics.csv")] == ["2", "4"]


# ---------------------------------------------------------------- TensorBoard


def planned(trial: int, hp: Mapping[str, Any]) -> TrialPlanned:
    return TrialPlanned(
        time=1.0,
        trial=trial,
        hp=hp,
        seed=trial,
        technique="Resident",
        shards=1,
        steps=4,
        peak_bytes=1,
        numerics={},
    )


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads."""
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(directory)).Reload()
    return {
        tag: [(scalar.step, scalar.value) for scalar in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    pytest.importorskip("tensorboard")
    return tmp_path / "tb"


def test_each_trial_is_a_run_that_tensorboard_reads(feed: Feed, logs: Path) -> None:
    sink = TensorBoardSink(logs)

    feed(sink, [planned(0, {}), *steps(0, 1, 2), *steps(3, 1, 2)])

    assert sorted(path.name for path in logs.iterdir()) == ["trial-0000", "trial-0003"]
    found = scalars(logs / "trial-0003")
    assert found["train_loss"] == [(1, 1.0), (2, 2.0)]
    assert found["valid_loss"] == [(2, pytest.approx(0.2))]


def test_the_training_loss_can_be_thinned(feed: Feed, logs: Path) -> None:
    feed(TensorBoardSink(logs, every=2), steps(0, 1, 5))

    assert scalars(logs / "trial-0000")["train_loss"] == [(2, 2.0), (4, 4.0)]


def test_a_trial_that_went_back_is_shown_once(feed: Feed, logs: Path) -> None:
    sink = TensorBoardSink(logs)

    feed(sink, [*steps(0, 1, 5), step(0, 4, loss=40.0), step(0, 5, loss=50.0)])

    train = scalars(logs / "trial-0000")["train_loss"]
    assert train == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0)]


def test_the_last_step_done_again_is_shown_once(feed: Feed, logs: Path) -> None:
    feed(TensorBoardSink(logs), [step(0, 1), step(0, 2), step(0, 2, loss=20.0)])

    assert scalars(logs / "trial-0000")["train_loss"] == [(1, 1.0), (2, 20.0)]


def test_a_resumed_study_goes_on_in_the_same_runs(feed: Feed, logs: Path) -> None:
    feed(TensorBoardSink(logs), steps(0, 1, 5))
    (old,) = (logs / "trial-0000").iterdir()
    old.write_bytes(old.read_bytes()[:-3])  # killed in the middle of a record

    feed(TensorBoardSink(logs), steps(0, 4, 6))

    found = scalars(logs / "trial-0000")
    assert [number for number, _ in found["train_loss"]] == [1, 2, 3, 4, 5, 6]
    assert [number for number, _ in found["valid_loss"]] == [2, 4, 6]


def test_hyperparameters_are_there_for_the_hparams_tab(feed: Feed, logs: Path) -> None:
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    plugin = pytest.importorskip("tensorboard.plugins.hparams.metadata")
    hp = {"lr": 0.5, "width": 8, "norm": True, "name": "a", "none": None}

    feed(TensorBoardSink(logs), [planned(0, hp), *steps(0, 1, 2)])

    events = module.EventAccumulator(str(logs / "trial-0000")).Reload()
    content = events.SummaryMetadata(plugin.SESSION_START_INFO_TAG).plugin_data.content
    found = plugin.parse_session_start_info_plugin_data(content)
    assert found.hparams["lr"].number_value == 0.5
    assert found.hparams["width"].number_value == 8
    assert found.hparams["norm"].bool_value is True
    assert found.hparams["none"].string_value == "None"
    assert found.group_name == "trial-0000"


def test_no_more_files_are_open_than_a_process_may(feed: Feed, logs: Path) -> None:
    sink = TensorBoardSink(logs)

    for number in (1, 2):
        feed(sink, [step(trial, number) for trial in range(40)])

    assert len(sink._open) <= 32
    assert sum(run._writer is not None for run in sink._runs.values()) <= 32
    assert scalars(logs / "trial-0000")["train_loss"] == [(1, 1.0), (2, 2.0)]
    assert len(list((logs / "trial-0000").iterdir())) == 1


def test_a_trial_that_ended_is_closed(feed: Feed, logs: Path) -> None:
    sink = TensorBoardSink(logs)
    end = TrialFinished(time=9.0, trial=0, step=2, metrics={}, checkpoint="there", seconds=1.0)

    feed(sink, [*steps(0, 1, 2), end])

    assert not sink._open


def test_without_tensorboard_the_sink_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **options: Any) -> Any:
        if name.startswith("tensorboard"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)

    with pytest.raises(SpecError, match="pip install tensorboard"):
        TensorBoardSink(tmp_path)


def test_every_is_a_number_of_steps(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"every=\.\.\.\) is a whole number from 1, got 0"):
        TensorBoardSink(tmp_path, every=0)


# ---------------------------------------------------------------- the page about callbacks


def test_the_pages_example_interrupts_the_study_once(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(next(block for block in blocks if "class StopBelow" in block), names)
    pressed: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", pressed.append)
    callback = names["StopBelow"](0.25)

    for number in (4, 3, 2, 1):
        callback(step(0, number))
        callback(evaluated(0, number))

    assert pressed == [signal.SIGINT]


def test_the_page_names_every_event() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE.read_text()))

    assert {kind.__name__ for kind in get_args(Event)} - named == set()
