"""Retraining finished trials alone: which ones, and what counts as different."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shoal
import shoal.verify.compare
import shoal.verify.proof
from shoal import verify
from shoal.core.errors import SpecError, StorageError
from shoal.core.event import (
    Evaluated,
    Event,
    StepFinished,
    StudyStarted,
    TrialFailed,
    TrialFinished,
    TrialPlanned,
    TrialRestarted,
    TrialStarted,
    TrialStopped,
)
from shoal.observe import Database, Snapshot, read_events
from shoal.observe.rows import TrialState
from shoal.recipes.recipe import Recipe
from shoal.testing import PlainResult, plain_loop
from shoal.ui.failures import ExitCode
from shoal.ui.verify import verify_study
from shoal.verify.choose import named_trials
from shoal.verify.mainblock import main_note

STEPS = 5
NUMERICS = {"threads": 1, "device": "cpu", "torch": torch.__version__, "accumulate": 1}


def _data(hp: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    random = torch.Generator().manual_seed(0)
    batches = [(torch.randn(8, 4, generator=random), torch.arange(8) % 2) for _ in range(4)]
    return batches[:3], batches[3:]


def _loss(output: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(output, batch[1])


COUNTS = {"calls": 0}


def _counted(output: Tensor, batch: Any) -> Tensor:
    COUNTS["calls"] += 1
    return _loss(output, batch)


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
class _Broken:
    """A TrialResult whose state cannot be read."""

    number: int
    error: Exception

    def load_state(self) -> Mapping[str, Any]:
        raise self.error


def _planned(number: int, **changes: Any) -> TrialPlanned:
    planned = TrialPlanned(
        time=0.0,
        trial=number,
        hp={"lr": 0.1},
        seed=number,
        technique="Resident",
        shards=1,
        steps=STEPS,
        peak_bytes=1,
        numerics=NUMERICS,
    )
    return replace(planned, **changes)


def _step(number: int, step: int, loss: float, epoch: int = 1) -> StepFinished:
    return StepFinished(
        time=float(step),
        trial=number,
        step=step,
        epoch=epoch,
        loss=loss,
        seconds=1.0,
        device="cpu:0",
    )


def _ended(number: int, plain: PlainResult) -> TrialFinished:
    return TrialFinished(
        time=9.0,
        trial=number,
        step=plain.step,
        metrics=plain.metrics,
        checkpoint="there",
        seconds=5.0,
    )


def _training(number: int, plain: PlainResult, per_epoch: int = 3) -> Iterator[Event]:
    """What a trial's training writes, evaluations where ``plain`` evaluated."""
    evaluations = {row["step"]: row for row in plain.history}
    for step, loss in enumerate(plain.losses, start=1):
        epoch = -(-step // per_epoch)
        yield _step(number, step, loss, epoch)
        if step in evaluations:
            metrics = {
                name: value
                for name, value in evaluations[step]["metrics"].items()
                if name.startswith("valid_")
            }
            yield Evaluated(time=9.0, trial=number, step=step, epoch=epoch, metrics=metrics)


@dataclass
class _Study:
    """A study's directory, and the states of its trials, to be tampered with."""

    place: Path
    results: dict[int, Any] = field(default_factory=dict)
    trials: int = 3

    def write(self, events: Iterable[Event], source: str = "", arguments: Any = ()) -> None:
        (self.place / "there").mkdir(parents=True, exist_ok=True)
        with Database(self.place) as log:
            log.write(
                [
                    StudyStarted(
                        time=0.0,
                        study="s",
                        metric="valid_loss",
                        mode="min",
                        trials=self.trials,
                        devices=(),
                        source=source,
                        arguments=arguments,
                        versions={},
                    ),
                    *events,
                ]
            )

    def append(self, *events: Event) -> None:
        with Database(self.place) as log:
            log.write(events)

    def add(self, number: int, plain: PlainResult, **plan: Any) -> list[Event]:
        """The events of a whole trial; its state is the plain loop's."""
        self.results[number] = _Trial(number, plain.state())
        started = TrialStarted(time=0.0, trial=number, device="cpu:0")
        training = list(_training(number, plain))
        return [_planned(number, **plan), started, *training, _ended(number, plain)]

    def state(self, number: int) -> dict[str, Any]:
        state: dict[str, Any] = self.results[number].state
        return state

    def verdicts(self, *numbers: int, recipe: Recipe = RECIPE) -> list[verify.TrialVerdict]:
        snapshot = Snapshot.of(read_events(self.place))
        rows = named_trials(snapshot, numbers)
        return list(verify.verify_trials(self.place, rows, recipe=recipe))


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Study:
    """A study without events."""
    made = _Study(tmp_path / "s")
    (tmp_path / "s").mkdir()

    @dataclass
    class Report:
        trials: list[Any]

    monkeypatch.setattr(
        shoal.verify.compare,
        "read_report",
        lambda place, recipe: Report(list(made.results.values())),
    )
    return made


@pytest.fixture
def study(empty: _Study) -> _Study:
    """Three trials that trained as alone."""
    empty.write(event for number in range(3) for event in empty.add(number, _trained(number)))
    return empty


def _trained(seed: int, recipe: Recipe = RECIPE, **options: Any) -> PlainResult:
    options = options or {"steps": STEPS}
    return plain_loop(recipe, {"lr": 0.1}, seed=seed, **options)


def test_a_trial_that_trained_as_alone_is_equal_in_everything(study: _Study) -> None:
    verdicts = study.verdicts(0, 1, 2)

    assert [verdict.equal for verdict in verdicts] == [True] * 3
    # 4 parameters, 2 moments and a step count each, and torch's random stream
    assert verdicts[0].tensors == 4 + 3 * 4 + 1
    assert (verdicts[0].losses, verdicts[0].metrics) == (STEPS, 2)
    assert verdicts[0].compared == (
        *("weights", "optimizer state", "schedule", "random numbers", "losses", "metrics"),
    )
    assert verdicts[0].notes == ()


def test_one_flipped_bit_is_found_and_named(study: _Study) -> None:
    weight = study.state(1)["model"]["2.weight"].clone()
    weight.view(torch.int32)[0, 0] ^= 1
    study.state(1)["model"]["2.weight"] = weight

    zero, one, two = study.verdicts(0, 1, 2)

    assert not one.equal
    assert "model '2.weight': 1 of 16 elements differ" in one.first_difference
    assert zero.equal
    assert two.equal


def test_a_loss_that_differs_is_found(study: _Study) -> None:
    study.append(_step(2, 3, loss=0.125))

    assert "losses[2]" in study.verdicts(2)[0].first_difference


def test_a_loss_that_is_missing_is_found(empty: _Study) -> None:
    events = empty.add(0, _trained(0))
    empty.write(event for event in events if getattr(event, "step", 0) != 3)

    assert "5 entries expected, 4 found" in empty.verdicts(0)[0].first_difference


def test_a_metric_on_the_way_that_differs_is_found(study: _Study) -> None:
    study.append(Evaluated(time=9.5, trial=0, step=3, epoch=1, metrics={"valid_loss": 7.0}))

    assert "metric 'valid_loss' of step 3" in study.verdicts(0)[0].first_difference


# ---------------------------------------------------------------- any study


class _Advancing:
    """Validation data with a state of its own: each pass yields other batches."""

    def __init__(self) -> None:
        self._passes = 0

    def __iter__(self) -> Iterator[Any]:
        self._passes += 1
        yield torch.full((8, 4), float(self._passes)), torch.arange(8) % 2


class _DrawsAtItsEnd:
    """Training data that draws a random number when it is read to its end."""

    def __iter__(self) -> Iterator[Any]:
        yield from _data({})[0]
        torch.rand(1)


@pytest.mark.parametrize(
    ("length", "times"),
    [({"steps": 7, "eval_every": 2}, 4), ({"steps": 7}, 3), ({"steps": 2, "eval_every": 9}, 1)],
)
def test_evaluations_are_repeated_as_often_as_there_were(
    empty: _Study, length: dict[str, int], times: int
) -> None:
    recipe = replace(RECIPE, data=lambda hp: (_data(hp)[0], _Advancing()))
    empty.write(empty.add(0, _trained(0, recipe, **length)))

    (verdict,) = empty.verdicts(0, recipe=recipe)

    assert verdict.first_difference == ""
    assert verdict.metrics == times


def test_a_study_of_epochs_reads_its_data_to_the_end(
    empty: _Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(RECIPE, data=lambda hp: (_DrawsAtItsEnd(), _data(hp)[1]))
    empty.write(empty.add(0, _trained(0, recipe, epochs=2)), source="defined.py:study")

    rows = Snapshot.of(read_events(empty.place)).trials
    found = {}
    for epochs in (2, None):
        monkeypatch.setattr(
            shoal.verify.compare,
            "recorded_recipe",
            lambda *recorded, epochs=epochs: (recipe, epochs is not None),
        )
        (found[epochs],) = verify.verify_trials(empty.place, rows)

    assert found[2].equal
    assert "random stream 'torch'" in found[None].first_difference


def test_steps_done_again_after_a_restart_count_as_done_last(empty: _Study) -> None:
    plain = _trained(0)
    planned, started, *training, ended = empty.add(0, plain)
    lost = [_step(0, step, loss=0.5) for step in (3, 4, 5)]
    restarted = TrialRestarted(time=5.0, trial=0, step=2)
    empty.write([planned, started, *training[:2], *lost, restarted, *training[2:], ended])

    assert empty.verdicts(0)[0].equal


def test_an_extended_trial_is_compared_where_it_would_be_evaluated(empty: _Study) -> None:
    events = empty.add(0, _trained(0, steps=6, eval_every=2))
    end_before = Evaluated(time=3.0, trial=0, step=3, epoch=1, metrics={"valid_loss": 0.5})
    empty.write([*events[:-1], end_before, events[-1]])  # it had ended after 3 steps once

    (verdict,) = empty.verdicts(0)

    assert (verdict.first_difference, verdict.metrics) == ("", 3)


def test_a_stopped_trial_is_compared_at_its_last_step(empty: _Study) -> None:
    *events, _ = empty.add(0, _trained(0, steps=4))
    stopped = TrialStopped(
        time=9.0,
        trial=0,
        step=4,
        reason="by hand",
        checkpoint="there",
        metrics={},
        seconds=4.0,
    )
    empty.write([*events, stopped])

    assert empty.verdicts(0)[0].equal


def test_a_failed_trial_is_skipped_with_a_sentence(study: _Study) -> None:
    study.append(TrialFailed(time=99.0, trial=1, step=3, error="Traceback\nValueError: no\n"))

    (verdict,) = study.verdicts(1)

    assert verdict.skipped == "it failed at step 3: ValueError: no"
    assert not verdict.equal
    assert verdict.first_difference == ""


def test_a_trial_that_has_not_finished_is_skipped(empty: _Study) -> None:
    *events, _ = empty.add(0, _trained(0))
    empty.write(events)

    assert empty.verdicts(0)[0].skipped == "it has not finished; it is at step 5"


def test_a_warm_clone_is_skipped_and_a_cold_one_is_compared(empty: _Study) -> None:
    events = [*empty.add(0, _trained(0)), *empty.add(1, _trained(1), parent=0)]
    empty.write([*events, *empty.add(2, _trained(2), parent=0, warm=True)])

    _, cold, warm = empty.verdicts(0, 1, 2)

    assert cold.equal
    assert warm.skipped == (
        "it began from the state of trial 0, which the plain loop does not have; verify trial 0"
    )
    assert verify.warm_clones(empty.place) == {2}


def test_of_weights_alone_the_weights_are_compared_and_it_says_so(study: _Study) -> None:
    for number in (0, 1):
        study.state(number).update(optimizer=None, schedule=None, rng=None)
    study.state(1)["model"]["0.bias"] = study.state(1)["model"]["0.bias"] + 1

    equal, different = study.verdicts(0, 1)

    assert equal.equal
    assert (equal.tensors, equal.losses) == (4, STEPS)
    assert equal.compared == ("weights", "losses", "metrics")
    assert equal.notes == ("only its weights were kept: no optimizer state or random numbers",)
    assert "model '0.bias'" in different.first_difference


def test_a_damaged_checkpoint_is_a_difference_and_the_others_go_on(study: _Study) -> None:
    study.results[0] = _Broken(0, StorageError("weights is damaged: its digest is 1, not 2"))
    study.results[1] = _Broken(1, SpecError("the checkpoint of trial 1 is not at there any more"))

    damaged, gone, whole = study.verdicts(0, 1, 2)

    assert damaged.first_difference.startswith("weights is damaged")
    assert gone.skipped.startswith("the checkpoint of trial 1 is not at")
    assert whole.equal


def test_a_checkpoint_that_is_let_go_while_it_is_read_is_no_difference(study: _Study) -> None:
    errors = [
        StorageError("no such file: weights"),
        SpecError("the checkpoint is not there any more"),
    ]
    trial = _Broken(0, errors[0])
    trial.load_state = lambda: _raise(errors.pop(0))  # type: ignore[method-assign]
    study.results[0] = trial

    (verdict,) = study.verdicts(0)

    assert verdict.skipped == "the checkpoint is not there any more"
    assert not verdict.first_difference


def _raise(error: Exception) -> Any:
    raise error


def test_a_trial_that_cannot_be_trained_alone_does_not_differ_and_is_not_equal(
    study: _Study,
) -> None:
    def broken(hp: Mapping[str, Any]) -> Any:
        raise ValueError("no such data")

    (verdict,) = study.verdicts(0, recipe=replace(RECIPE, data=broken))

    assert re.match(r"ValueError: no such data \(at \S*test_verify.py:\d+\)", verdict.failure)
    assert not verdict.first_difference
    assert not verdict.equal
    assert not verdict.notes


def test_a_relative_path_that_is_not_found_is_told_where_it_was_looked_for(
    study: _Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def notes(path: str) -> str:
        recipe = replace(RECIPE, data=lambda hp: torch.load(path))
        (verdict,) = study.verdicts(0, recipe=recipe)
        assert verdict.failure.startswith("FileNotFoundError: ")
        return " ".join(verdict.notes)

    assert f"where the study ran, and this is {tmp_path}: verify from there" in notes("data/d.pt")
    assert not notes(f"{tmp_path}/d.pt")


def test_a_recipe_of_another_study_is_refused(study: _Study) -> None:
    other = replace(RECIPE, model=lambda hp: nn.Linear(4, hp["width"]))

    with pytest.raises(SpecError, match="unknown hyperparameter 'width'"):
        study.verdicts(0, recipe=other)


def test_what_changed_of_the_numerics_key_is_told(empty: _Study) -> None:
    numerics = NUMERICS | {"torch": "2.10.0", "device": "Some GPU", "matmul": "highest"}
    empty.write(empty.add(0, _trained(0), numerics=numerics))

    (verdict,) = empty.verdicts(0, recipe=replace(RECIPE, accumulate=2))

    (note,) = verdict.notes
    assert note.startswith("bits may differ, since the numerics key does: torch 2.10.0 then, ")
    assert "device Some GPU then, " in note
    assert "accumulate 1 then, 2 now" in note
    assert "matmul" not in note
    assert not verdict.equal  # compared all the same


# ---------------------------------------------------------------- which trials, which file


def test_the_best_trial_is_among_the_chosen_and_the_rest_repeat_with_the_seed(
    study: _Study,
) -> None:
    snapshot = Snapshot.of(read_events(study.place))
    best = min(snapshot.trials, key=lambda row: row.metrics["valid_loss"]).number

    chosen = [row.number for row in verify.choose_trials(snapshot, 2)]

    assert chosen[0] == best
    assert chosen == [row.number for row in verify.choose_trials(snapshot, 2)]
    assert len(verify.choose_trials(snapshot, 99)) == 3
    assert best not in [r.number for r in verify.choose_trials(snapshot, 9, leave_out={best})]


def test_one_that_was_interrupted_is_chosen_before_others(study: _Study) -> None:
    snapshot = Snapshot.of(read_events(study.place))
    best, *others = sorted(snapshot.trials, key=lambda row: row.metrics["valid_loss"])
    for again in others:
        rows = [replace(row, restarts=row is again) for row in snapshot.trials]
        chosen = verify.choose_trials(replace(snapshot, trials=tuple(rows)), 2)
        assert [row.number for row in chosen] == [best.number, again.number]


def test_what_was_pruned_is_chosen_where_too_few_finished(study: _Study) -> None:
    snapshot = Snapshot.of(read_events(study.place))
    best, other, pruned = snapshot.trials
    trials = (best, other, replace(pruned, state=TrialState.PRUNED))
    snapshot = replace(snapshot, trials=trials)

    assert pruned.number not in [row.number for row in verify.choose_trials(snapshot, 2)]
    assert len(verify.choose_trials(snapshot, 9)) == 3
    gone = {pruned.number}
    assert len(verify.choose_trials(snapshot, 9, leave_out=gone)) == 2
    alone = replace(snapshot, trials=trials[2:])
    assert [row.number for row in verify.choose_trials(alone, 9)] == [pruned.number]


def test_a_study_without_a_finished_trial_is_refused(empty: _Study) -> None:
    empty.trials = 1
    empty.write([TrialFailed(time=1.0, trial=0, step=1, error="ValueError: no")])

    with pytest.raises(SpecError, match=r"no finished trial to verify: 1 failed, 0 not done"):
        verify.choose_trials(Snapshot.of(read_events(empty.place)), 2)


def test_verifying_no_trial_is_refused() -> None:
    with pytest.raises(SpecError, match="verify at least one trial, got 0"):
        verify.choose_trials(Snapshot(), 0)


def test_a_trial_that_is_not_there_is_refused(study: _Study) -> None:
    with pytest.raises(SpecError, match=r"s has no trial 7 to verify; it has 3, numbered from 0"):
        study.verdicts(7)


def test_a_study_made_interactively_says_how_to_verify_it(study: _Study) -> None:
    rows = verify.choose_trials(Snapshot.of(read_events(study.place)), 1)

    with pytest.raises(SpecError, match=r"made interactively.*--file.*report\(\)\.verify\(\)"):
        next(verify.verify_trials(study.place, rows))


def test_a_file_that_moved_is_asked_for(empty: _Study, tmp_path: Path) -> None:
    empty.write(empty.add(0, _trained(0)), source=f"{tmp_path}/old.py:study")
    rows = Snapshot.of(read_events(empty.place)).trials

    with pytest.raises(SpecError, match=r"s was defined in .*old\.py, .* not there any more.*--f"):
        next(verify.verify_trials(empty.place, rows))


# ---------------------------------------------------------------- in Python


def test_a_report_verifies_its_trials(study: _Study) -> None:
    report = shoal.open(study.place, recipe=RECIPE)

    two, one = report.verify(), report.verify([2])
    study.append(_step(2, 3, loss=0.125))
    different = report.verify([2])

    assert len(two.verdicts) == 2
    assert two
    assert "the same bits as training alone" in str(one)
    assert str(one).startswith("EQUAL      trial 2")
    assert not different
    assert "1 of 1 trial differs" in str(different)


def test_a_verification_leaves_the_process_as_it_was(
    study: _Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COUNTS, "calls", 5)
    state = torch.get_rng_state()

    assert shoal.open(study.place, recipe=replace(RECIPE, loss=_counted)).verify(1)

    assert COUNTS == {"calls": 5}
    assert torch.equal(torch.get_rng_state(), state)


def test_trials_are_a_number_or_numbers_of_any_kind(study: _Study) -> None:
    report = shoal.open(study.place, recipe=RECIPE)

    def verified(trials: Any) -> list[int]:
        return sorted(verdict.number for verdict in report.verify(trials).verdicts)

    assert len(verified(np.int64(1))) == 1
    assert verified(np.array([2, 1])) == [1, 2]
    assert len(verified([])) == 2
    for wrong in ("1", True, [True, False], 1.0, ["1"], {1: 2}, np.True_):
        with pytest.raises(SpecError, match=r"verify\(3\), or the numbers .*; got "):
            report.verify(wrong)


def test_a_recipe_finds_its_arguments_whenever_it_looks(
    empty: _Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "late.py"
    file.write_text(
        "import sys, shoal\nsys.argv.remove('--quiet')\n"
        "recipe = shoal.Recipe(model=lambda hp: None, data=lambda hp: None)\n"
        "study = shoal.Study('s', recipe, space={'lr': 0.1}, steps=1)\n"
    )
    empty.write(empty.add(0, _trained(0)), f"{file}:study", ("--quiet", "--width", "5"))
    monkeypatch.setattr(sys, "argv", ["notebook", "--mine"])
    found: list[list[str]] = []
    same = verify.TrialVerdict(number=0, steps=STEPS)
    monkeypatch.setattr(
        shoal.verify.proof, "verify_trials", lambda *_, **__: found.append([*sys.argv]) or [same]
    )

    assert shoal.open(empty.place).verify()
    assert found == [[str(file), "--width", "5"]]
    assert sys.argv == ["notebook", "--mine"]


def test_a_notebook_shows_reports_and_verifications_as_print_does(study: _Study) -> None:
    report = shoal.open(study.place, recipe=RECIPE)

    for shown in (report, report.verify(1)):
        words: list[str] = []
        shown._repr_pretty_(SimpleNamespace(text=words.append), False)
        assert words == [str(shown)]


def test_a_report_without_a_recipe_says_what_to_give(study: _Study) -> None:
    with pytest.raises(SpecError, match="made interactively"):
        shoal.open(study.place).verify()
    with pytest.raises(SpecError, match="at least one trial, got 0"):
        shoal.open(study.place, recipe=RECIPE).verify(0)


# ---------------------------------------------------------------- the verb


@pytest.fixture
def recorded(study: _Study, monkeypatch: pytest.MonkeyPatch) -> _Study:
    """The study as the verb finds it: its file defines ``RECIPE``."""
    monkeypatch.setattr(shoal.verify.compare, "recorded_recipe", lambda *recorded: (RECIPE, False))
    return study


def test_the_verb_compares_those_that_were_named_and_as_many_more(
    recorded: _Study, capsys: pytest.CaptureFixture[str]
) -> None:
    place = recorded.place

    verify_study(str(place), place, trials=[2, 2], as_json=True)
    named = json.loads(capsys.readouterr().out)
    verify_study(str(place), place, trials=[2], count=1, as_json=True)
    more = json.loads(capsys.readouterr().out)
    verify_study(str(place), place, as_json=True)
    default = json.loads(capsys.readouterr().out)

    assert [verdict["number"] for verdict in named] == [2]
    assert named[0]["equal"] is True
    assert "random numbers" in named[0]["compared"]
    assert len({verdict["number"] for verdict in more}) == 2
    assert more[0]["number"] == 2
    assert len(default) == 2


def test_the_exit_code_says_whether_any_bit_differs(
    recorded: _Study, capsys: pytest.CaptureFixture[str]
) -> None:
    place = recorded.place
    recorded.append(TrialFailed(time=99.0, trial=1, step=3, error="ValueError: no"))

    skipped_and_equal = verify_study(str(place), place, trials=[0, 1])
    out = capsys.readouterr().out
    recorded.append(_step(2, 3, loss=0.125))
    different = verify_study(str(place), place, trials=[2])

    assert skipped_and_equal == ExitCode.DONE
    assert "SKIPPED    trial 1: it failed at step 3: ValueError: no" in out
    assert "the same bits as training alone" in out
    assert different == ExitCode.TRIALS_FAILED
    assert "DIFFERENT  trial 2" in capsys.readouterr().out


def test_a_trial_that_differs_from_itself_alone_is_told_so(recorded: _Study) -> None:
    place = recorded.place
    unsteady = replace(RECIPE, loss=lambda output, batch: output.sum() * time.perf_counter())
    rows = [row for row in Snapshot.of(read_events(place)).trials if row.number == 2]

    (other,) = verify.verify_trials(place, rows, recipe=replace(RECIPE, loss=_twice))
    (random,) = verify.verify_trials(place, rows, recipe=unsteady)

    assert other.first_difference
    assert not any("once more" in note for note in other.notes)
    assert random.first_difference
    assert "trained alone once more" in random.notes[-1]


def _twice(output: Tensor, batch: Any) -> Tensor:
    return 2 * _loss(output, batch)


def test_the_exit_code_says_that_a_trial_could_not_be_trained(
    recorded: _Study, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = replace(RECIPE, data=lambda hp: torch.load("data/d.pt"))
    found = (broken, False)
    monkeypatch.setattr(shoal.verify.compare, "recorded_recipe", lambda *recorded: found)

    assert verify_study(str(recorded.place), recorded.place, trials=[2], as_json=True) == 1
    (verdict,) = json.loads(capsys.readouterr().out)

    assert verdict["failure"].startswith("FileNotFoundError")
    assert (verdict["equal"], verdict["first_difference"]) == (False, "")


def test_nothing_to_compare_is_bad_usage(recorded: _Study) -> None:
    recorded.append(TrialFailed(time=99.0, trial=1, step=3, error="ValueError: no"))

    with pytest.raises(SpecError, match=r"nothing was compared. trial 1: it failed.*--trial N"):
        verify_study(str(recorded.place), recorded.place, trials=[1])


def test_no_number_of_trials_is_bad_usage(recorded: _Study) -> None:
    with pytest.raises(SpecError, match=r"verify at least one trial, got 0"):
        verify_study(str(recorded.place), recorded.place, count=0)


PATCHED = """
import os
import mine
from torch import nn

mine.here = None  # shoal does that too

if __name__ == "__main__":
    made = nn.Linear(2, 2)
    made.bias = None
    nn.GELU.forward = made
    setattr(mine, "scale", made)
    mine.TABLE["gelu"] += 1
"""


def test_what_a_file_replaces_under_main_is_said_of_a_trial_that_differs(
    study: _Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``python FILE.py`` trained with it; a command that imports the file does not."""
    file = tmp_path / "patched.py"
    file.write_text(PATCHED)
    words = main_note(f"{file}:study")
    assert (
        "nn.GELU.forward (line 11), mine.scale (line 12), mine.TABLE['gelu'] (line 13), and"
        in (words)
    )
    rows = [row for row in Snapshot.of(read_events(study.place)).trials if row.number == 2]
    for recipe, notes in ((replace(RECIPE, loss=_twice), [words]), (RECIPE, [])):
        monkeypatch.setattr(
            shoal.verify.compare, "recorded_recipe", lambda *_, it=recipe: (it, False)
        )
        (verdict,) = verify.verify_trials(study.place, rows, file=f"{file}:study")
        assert [note for note in verdict.notes if "__main__" in note] == notes
    file.write_text(PATCHED.replace("__main__", "elsewhere"))
    assert main_note(str(file)) == main_note("a.module:study") == ""
