"""The report: the best trial, the leaderboard, and models that come back."""

import json
import math
import random
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from shoal import Recipe, SpecError
from shoal.core.event import (
    StepFinished,
    StudyFinished,
    StudyPaused,
    TrialPlanned,
    TrialRestarted,
    TrialStarted,
)
from shoal.observe import Database, Snapshot, read_events
from shoal.observe.rows import TrialState
from shoal.observe.states import study_state
from shoal.report import read_report
from shoal.rng import capture_rng, same_rng, seed_all
from shoal.runtime.saving import checkpoint
from shoal.ui.show import leaderboard

GOLDEN = Path(__file__).parents[2] / "golden" / "leaderboard.txt"


class Net(nn.Module):
    """A tied weight, a buffer, and dropout, which tells train from eval."""

    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 8, bias=False)
        self.head.weight = self.embed.weight
        self.drop = nn.Dropout(0.5)


def make_recipe(seen=None):
    def build(hp):
        if seen is not None:
            seen.append((hp["width"], torch.rand(1).item(), random.random()))
        return Net(hp["width"])

    return Recipe(model=build, data=lambda hp: ([], None))


@pytest.fixture
def trained():
    """The weights that trial 1 ended with."""
    torch.manual_seed(99)
    model = Net(128)
    model.norm.running_mean += 3
    return model


@pytest.fixture
def with_checkpoint(make_dir, trained, monkeypatch):
    """A study whose trial 1 has those weights, however checkpoints are written."""

    def make(**changes):
        directory = make_dir(**changes)
        place = directory / "trials" / "0001" / "step-00000010"
        place.mkdir(parents=True)
        found = {place: trained.state_dict()}
        states = {place: {"model": trained.state_dict(), "step": 10}}
        monkeypatch.setattr(checkpoint, "read_weights", found.__getitem__)
        monkeypatch.setattr(checkpoint, "read_state", states.__getitem__)
        monkeypatch.setattr(checkpoint, "read_attributes", lambda path: {})
        return directory

    return make


def test_the_report_has_what_each_trial_came_to(make_dir):
    report = read_report(make_dir())

    first, failed = report.trials[0], report.trials[2]
    assert (first.number, first.seed, first.state, first.seconds) == (0, 0, "FINISHED", 20.34)
    assert first.hp == {"lr": 1e-3, "width": 64}
    assert first.metrics["valid_loss"] == 0.5
    (row,) = first.history
    assert (row["step"], row["epoch"], row["seconds"]) == (10, 1, 19.0)
    assert row["metrics"] == {"train_loss": 2.5, "valid_loss": 0.5, "valid_accuracy": 0.75}
    assert first.checkpoint == report.directory / "trials/0000/step-00000010"
    assert failed.state == "FAILED"
    assert "Traceback" in failed.error
    assert failed.checkpoint is None
    assert report.wall_seconds == 65.5
    assert report.peaks["cpu:0"].peak_bytes == 11 << 20


def test_hyperparameters_are_read_only_and_know_their_names(make_dir):
    hp = read_report(make_dir()).trials[0].hp

    with pytest.raises(SpecError, match="'momentum'"):
        hp["momentum"]
    with pytest.raises(TypeError):
        hp["lr"] = 1


def test_the_best_is_the_finished_trial_with_the_best_finite_metric(make_dir):
    assert read_report(make_dir()).best.number == 1


def test_the_best_follows_metric_and_mode(make_dir):
    assert read_report(make_dir(metric="valid_accuracy", mode="max")).best.number == 0


def test_without_a_best_the_refusal_names_the_metrics_and_a_failure(make_dir):
    report = read_report(make_dir(metric="valid_bleu"))

    with pytest.raises(
        SpecError,
        match=r"'digits' has no best trial: 3 of 4 trials finished, and none with a finite "
        r"'valid_bleu'\. Metrics there are: train_loss, valid_accuracy, valid_loss\. "
        r"Trial 2 failed: ValueError: width 96",
    ):
        _ = report.best


def test_where_the_pruner_left_none_the_refusal_says_where_the_others_are(make_dir):
    report = read_report(make_dir())
    report.trials[:] = [replace(trial, state=TrialState.PRUNED) for trial in report.trials]

    words = r"no best trial: none of its 4 trials finished\. Metrics there are: train_loss, .*"
    words += "4 trials did not finish since the pruner ended them"
    with pytest.raises(SpecError, match=words):
        _ = report.best


def test_a_directory_without_a_study_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"there is no study in .*: it is not there .*runs/NAME"):
        read_report(tmp_path / "nothing")


def test_what_stands_where_a_study_was_looked_for_is_told(make_dir, tmp_path, monkeypatch):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    make_dir().joinpath("study.db").rename(tmp_path / "runs" / "mine" / "study.db")
    (tmp_path / "mine.py").touch()
    monkeypatch.chdir(tmp_path)
    for place, words in {
        "mine": r"in mine: the one of that name is in runs/mine\.",
        "runs": r"it holds studies: mine\. Give the directory of one: runs/mine\.",
        "mine.py": r"it is a file\. Give",
    }.items():
        with pytest.raises(SpecError, match=words):
            read_report(place)


def test_the_leaderboard_is_the_golden_one(make_dir):
    report = read_report(make_dir())
    words = str(report).replace(str(report.directory), "runs/digits")
    assert words + "\n" == GOLDEN.read_text()


def test_the_json_is_valid_for_other_readers(make_dir):
    text = read_report(make_dir()).to_json()

    record = json.loads(text, parse_constant=pytest.fail)
    assert record["trials"][3]["metrics"]["valid_loss"] == "NaN"
    assert record["trials"][0]["hp"] == {"lr": 1e-3, "width": 64}
    assert record["peaks"]["cpu:0"]["budget_bytes"] == 12 << 20


def test_the_frame_has_a_row_per_trial(make_dir):
    frame = read_report(make_dir()).to_frame()

    assert isinstance(frame, pd.DataFrame)
    assert list(frame["number"]) == [0, 1, 2, 3]
    assert list(frame["width"]) == [64, 128, 96, 64]
    assert math.isnan(frame["valid_loss"][2])
    assert frame["error"][2] == "ValueError: width 96 does not divide 128"


def test_without_pandas_the_frame_says_what_to_install(make_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)

    with pytest.raises(SpecError, match="pip install 'pandas>=2'"):
        read_report(make_dir()).to_frame()


def test_a_loaded_model_has_the_trained_weights_and_is_in_eval_mode(with_checkpoint, trained):
    model = read_report(with_checkpoint(), make_recipe()).best.load()

    assert not model.training
    assert model.head.weight is model.embed.weight
    for name, tensor in trained.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_a_trial_s_whole_state_can_be_loaded(with_checkpoint):
    state = read_report(with_checkpoint()).best.load_state()

    assert state["step"] == 10
    assert "head.weight" in state["model"]


def test_a_model_is_built_under_the_trial_s_seed_and_leaves_no_trace(with_checkpoint):
    seen = []
    best = read_report(with_checkpoint(), make_recipe(seen)).best
    before = capture_rng()

    best.load()

    assert same_rng(capture_rng(), before)
    seed_all(best.seed)
    assert seen == [(128, torch.rand(1).item(), random.random())]


def test_a_model_is_built_without_what_the_one_before_set_for_the_process(
    with_checkpoint,
):
    kinds = iter((torch.float64, None))

    def model(hp):
        if (kind := next(kinds)) is not None:
            torch.set_default_dtype(kind)
        return Net(hp["width"])

    recipe = Recipe(model=model, data=lambda hp: ([], None))
    best, usual = read_report(with_checkpoint(), recipe).best, torch.get_default_dtype()
    try:
        wide, left = best.load(), torch.get_default_dtype()
        with np.errstate(all="ignore"):  # something else is set since
            usual_again = best.load()
    finally:
        torch.set_default_dtype(usual)

    assert {p.dtype for p in wide.parameters()} == {torch.float64}
    assert left == torch.float64  # as its forward has found it
    assert {p.dtype for p in usual_again.parameters()} == {usual}


def test_a_recipe_with_other_weights_is_refused_with_their_names(with_checkpoint):
    recipe = Recipe(model=lambda hp: nn.Linear(2, 2), data=lambda hp: ([], None))

    with pytest.raises(SpecError, match=r"not fit the weights of trial 1(.|\n)*embed\.weight"):
        read_report(with_checkpoint(), recipe).best.load()


def test_a_study_made_interactively_asks_for_its_recipe(with_checkpoint):
    with pytest.raises(SpecError, match=r"shoal\.open\(path, recipe=recipe\)"):
        read_report(with_checkpoint()).best.load()


def test_a_study_from_a_file_imports_its_recipe_again_with_its_arguments(
    with_checkpoint, tmp_path_factory, monkeypatch
):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__shoal_main__", None)
    script = tmp_path_factory.mktemp("elsewhere") / "train.py"
    script.write_text(SCRIPT)
    monkeypatch.setitem(sys.modules, "shoal.study", FakeStudyModule)
    before = list(sys.argv)

    given = {"source": f"{script}:study", "arguments": ("--tied",)}
    model = read_report(with_checkpoint(**given)).best.load()

    assert type(model).__name__ == "Tied"
    assert sys.argv == before


SCRIPT = textwrap.dedent("""
    import sys
    from torch import nn
    from shoal.recipes.recipe import Recipe
    from shoal.study import Study

    class Tied(nn.Module):
        def __init__(self, width):
            super().__init__()
            assert sys.argv[1:] == ["--tied"]
            self.embed = nn.Embedding(8, width)
            self.norm = nn.BatchNorm1d(width)
            self.head = nn.Linear(width, 8, bias=False)
            self.head.weight = self.embed.weight

    study = Study(Recipe(model=lambda hp: Tied(hp["width"]), data=lambda hp: ([], None)))
""")


class FakeStudyModule:
    """Stands for ``shoal.study``: what is imported needs a recipe, not an engine."""

    class Study:
        def __init__(self, recipe):
            self.recipe = recipe


FakeStudyModule.Study.__module__ = "shoal.study"
FakeStudyModule.Study.__qualname__ = FakeStudyModule.Study.__name__ = "Study"


def test_a_failed_trial_has_nothing_to_load_and_says_why(make_dir):
    failed = read_report(make_dir(), make_recipe()).trials[2]

    with pytest.raises(SpecError, match=r"trial 2 is FAILED: ValueError: width 96.*no checkpoint"):
        failed.load()
    with pytest.raises(SpecError, match="trial 2 is FAILED"):
        failed.load_state()


def test_a_checkpoint_that_is_gone_is_named(make_dir):
    with pytest.raises(SpecError, match=r"checkpoint of trial 0 is not at .*step-00000010"):
        read_report(make_dir(), make_recipe()).trials[0].load()


@pytest.mark.parametrize("state", ["RUNNING", "PENDING"])
def test_a_checkpoint_of_a_trial_that_trains_on_may_have_given_way(make_dir, state):
    trial = replace(read_report(make_dir(), make_recipe()).trials[0], state=TrialState(state))
    with pytest.raises(SpecError, match="where it trains, a newer one has taken its place"):
        trial.load()


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        (StudyPaused(time=50.0, reason="shoal pause"), {4: "paused", 5: "not begun"}),
        (StudyFinished(time=50.0, finished=0, failed=0, seconds=9.0, stopped="shoal stop"),
         {4: "paused", 5: "not begun"}),
        (None, {4: "interrupted", 5: "not begun"}),
    ],
    ids=["paused", "stopped", "killed"],
)  # fmt: skip
def test_a_trial_that_stands_is_called_so_by_the_report_and_by_show(
    make_dir, tmp_path, ending, words
):
    begun = [one for one in read_events(make_dir()) if not isinstance(one, StudyFinished)]
    for trial in (4, 5):
        begun.append(TrialPlanned(
            time=9.0, trial=trial, hp={"lr": 0.5, "width": 64}, seed=trial, technique="Spilled",
            shards=3, steps=10, peak_bytes=9, numerics={},
        ))  # fmt: skip
    begun.append(TrialStarted(time=30.0, trial=4, device="cpu:0"))
    begun.append(
        StepFinished(time=31.0, trial=4, step=1, epoch=0, loss=2.5, seconds=1.0, device="cpu:0")
    )
    if ending is not None:
        begun += [TrialRestarted(time=40.0, trial=4, step=1, reason="it was parked"), ending]
    place = tmp_path / "again"
    with Database(place) as database:
        database.write(begun)
    snapshot = Snapshot.of(read_events(place))
    shown = leaderboard(snapshot, study_state(snapshot, place))
    for trial, word in words.items():
        for table in (str(read_report(place)), shown):
            (line,) = (row for row in table.splitlines() if row.split()[:1] == [str(trial)])
            assert f" {word} " in line
