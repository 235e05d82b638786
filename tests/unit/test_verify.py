"""Retraining finished trials alone: which ones, and what counts as different."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal import verify
from shoal.core.errors import SpecError
from shoal.core.event import (
    Event,
    StepFinished,
    StudyStarted,
    TrialFailed,
    TrialFinished,
    TrialPlanned,
    TrialStarted,
)
from shoal.observe import EventLog, Snapshot, read_events
from shoal.recipe import Recipe
from shoal.testing import PlainResult, plain_loop

STEPS = 5


def _data(hp: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    random = torch.Generator().manual_seed(0)
    batches = [(torch.randn(8, 4, generator=random), torch.arange(8) % 2) for _ in range(4)]
    return batches[:3], batches[3:]


def _loss(output: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(output, batch[1])


RECIPE = Recipe(
    model=lambda hp: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)),
    data=_data,
    loss=_loss,
)


@dataclass
class _Trial:
    """What ``verify`` needs of a TrialResult."""

    number: int
    state: Mapping[str, Any]

    def load_state(self) -> Mapping[str, Any]:
        return self.state


@dataclass
class _Report:
    trials: list[_Trial]


def _trained(number: int) -> PlainResult:
    return plain_loop(RECIPE, {"lr": 0.1}, seed=number, steps=STEPS)


def _events(results: Mapping[int, PlainResult]) -> Iterator[Event]:
    yield StudyStarted(
        time=0.0,
        study="s",
        metric="valid_loss",
        mode="min",
        trials=len(results),
        devices=(),
        source="",
        versions={},
    )
    for number, plain in results.items():
        yield TrialPlanned(
            time=0.0,
            trial=number,
            hp={"lr": 0.1},
            seed=number,
            technique="Resident",
            shards=1,
            steps=STEPS,
            peak_bytes=1,
            numerics={"threads": 1, "device": "cpu", "optimizer": "cpu"},
        )
        yield TrialStarted(time=0.0, trial=number, device="cpu:0")
        for step, loss in enumerate(plain.losses, start=1):
            yield StepFinished(
                time=float(step),
                trial=number,
                step=step,
                epoch=1,
                loss=loss,
                seconds=1.0,
                device="cpu:0",
            )
        yield TrialFinished(
            time=9.0,
            trial=number,
            step=STEPS,
            metrics=plain.metrics,
            checkpoint="there",
            seconds=5.0,
        )


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[int, Any]]:
    """A directory with the events of three trials, and their states, to be tampered with."""
    results = {number: _trained(number) for number in range(3)}
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write(_events(results))
    states = {number: plain.state() for number, plain in results.items()}
    report = _Report([_Trial(number, state) for number, state in states.items()])
    monkeypatch.setattr(verify, "read_report", lambda place, recipe: report)
    return tmp_path, states


def _verdicts(place: Path, count: int = 3) -> dict[int, verify.TrialVerdict]:
    rows = verify.choose_trials(Snapshot.of(read_events(place)), count)
    return {v.number: v for v in verify.verify_trials(place, rows, recipe=RECIPE)}


def test_a_trial_that_trained_as_alone_is_equal_in_everything(
    study: tuple[Path, dict[int, Any]],
) -> None:
    verdicts = _verdicts(study[0])

    assert [verdict.equal for verdict in verdicts.values()] == [True] * 3
    # 4 parameters, 2 moments and a step count each, and torch's random stream
    assert verdicts[0].tensors == 4 + 3 * 4 + 1
    assert (verdicts[0].losses, verdicts[0].metrics) == (STEPS, 1)


def test_one_flipped_bit_is_found_and_named(study: tuple[Path, dict[int, Any]]) -> None:
    place, states = study
    states[1]["model"]["2.weight"] = states[1]["model"]["2.weight"].clone()
    states[1]["model"]["2.weight"].view(torch.int32)[0, 0] ^= 1

    verdicts = _verdicts(place)

    assert not verdicts[1].equal
    assert "model '2.weight': 1 of 16 elements differ" in verdicts[1].first_difference
    assert verdicts[0].equal
    assert verdicts[2].equal


def test_a_loss_that_differs_is_found(study: tuple[Path, dict[int, Any]]) -> None:
    place, _ = study
    with EventLog(place / "events.jsonl") as log:
        log.write(
            [
                StepFinished(
                    time=99.0,
                    trial=2,
                    step=3,
                    epoch=1,
                    loss=0.125,
                    seconds=1.0,
                    device="cpu:0",
                )
            ]
        )

    verdicts = _verdicts(place)

    assert "losses[2]" in verdicts[2].first_difference


def test_the_best_trial_is_among_the_chosen_and_the_rest_repeat_with_the_seed(
    study: tuple[Path, dict[int, Any]],
) -> None:
    snapshot = Snapshot.of(read_events(study[0]))
    best = min(snapshot.trials, key=lambda row: row.metrics["valid_loss"]).number

    chosen = [row.number for row in verify.choose_trials(snapshot, 2)]

    assert chosen[0] == best
    assert chosen == [row.number for row in verify.choose_trials(snapshot, 2)]
    assert len(verify.choose_trials(snapshot, 99)) == 3


def test_a_study_without_a_finished_trial_is_refused(tmp_path: Path) -> None:
    started, *_ = _events({0: _trained(0)})
    failed = TrialFailed(time=1.0, trial=0, step=1, error="ValueError: no")

    with pytest.raises(SpecError, match=r"no finished trial to verify: 1 failed, 0 not done"):
        verify.choose_trials(Snapshot.of([started, failed]), 2)


def test_verifying_no_trial_is_refused() -> None:
    with pytest.raises(SpecError, match="verify at least one trial, got 0"):
        verify.choose_trials(Snapshot(), 0)


def test_a_study_made_interactively_says_how_to_verify_it(
    study: tuple[Path, dict[int, Any]],
) -> None:
    rows = verify.choose_trials(Snapshot.of(read_events(study[0])), 1)

    with pytest.raises(SpecError, match=r"made interactively.*shoal\.testing\.plain_loop"):
        next(verify.verify_trials(study[0], rows))
