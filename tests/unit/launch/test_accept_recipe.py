"""A mistake that shows late is mended, and its study goes on with the recipe as it is then."""

from __future__ import annotations

import pytest
import studies
from typer.testing import CliRunner

import shoal
from shoal.core.errors import SpecError
from shoal.core.event import StepFinished, StudyChanged, TrialPlanned
from shoal.launch.directory import read_record
from shoal.observe import read_outline
from shoal.observe.rows import Inherited, TrainedWith, TrialRow
from shoal.observe.snapshot import Snapshot
from shoal.report import read_report
from shoal.resume.since import two_recipes
from shoal.source import load_study
from shoal.ui.cli import app
from shoal.verify import with_two_recipes

FILE = """
import torch
from torch import nn
from torch.utils.data import DataLoader

import shoal

seen = [0]


def build(hp):
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2))


def data(hp):
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(16, 4, generator=random), torch.arange(16) % 2
    rows = torch.utils.data.TensorDataset(*rows)
    return DataLoader(rows, 4, shuffle=True), DataLoader(rows, 16)


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


def sure(output, batch, hp):
    seen[0] += 1
    if seen[0] > 2 and hp["lr"] > 0.05:
        MISTAKE
    return output.softmax(-1).max(-1).values.mean().item()


recipe = shoal.Recipe(model=build, data=data, loss=loss, metrics={"sure": sure})
study = shoal.Study(
    "late", recipe, space=shoal.grid(lr=[0.01, 0.1, 0.2]), epochs=4, directory="PLACE",
    checkpoint_every=EVERY,
)
"""


@pytest.fixture
def late(tmp_path, warm_workers):
    """What runs the study of a file with this in place of the mistake; the study."""
    file = tmp_path / "late.py"

    def run(mistake: str, *, checkpoint_every: int = 0, **options) -> shoal.Study:
        text = FILE.replace("PLACE", str(tmp_path / "runs")).replace("MISTAKE", mistake)
        text = text.replace("EVERY", str(checkpoint_every))
        file.write_text(text)
        loaded = load_study(str(file))
        loaded.study.source = loaded.source
        studies.run(loaded.study, warm_workers, **options)
        return loaded.study

    return run


WRONG, RIGHT = "raise ValueError('late')", "hp = dict(hp)"


def written(study, kind, trial):
    return [event for event in studies.written(study, kind) if event.trial == trial]


def states(study):
    return [str(trial.state) for trial in read_report(study.directory).trials]


def verify(study, *words):
    place = study.directory
    result = CliRunner().invoke(
        app, ["verify", str(place), *words], catch_exceptions=False, env={"COLUMNS": "200"}
    )
    return result.exit_code, result.stdout


def test_failed_trials_go_on_with_the_mended_recipe_and_the_finished_one_stays(late):
    study = late(WRONG)
    assert states(study) == ["FINISHED", "FAILED", "FAILED"]
    trained = len(written(study, StepFinished, 0))
    with pytest.raises(SpecError, match="--accept-recipe"):
        late(RIGHT, retry_failed=True)

    study = late(RIGHT, retry_failed=True, accept_recipe=True)

    assert states(study) == ["FINISHED"] * 3
    assert len(written(study, StepFinished, 0)) == trained
    (change,) = studies.written(study, StudyChanged)
    assert "another recipe from here on, as was accepted (changed: sure)" in change.changes[0]
    recipes = [trial.recipes for trial in read_report(study.directory).trials]
    assert [r[-1]["recipe"] for r in recipes] == [0, 1, 1]
    late(RIGHT)  # which is on record: nothing is said, and nothing done
    assert studies.written(study, StudyChanged) == [change]


def test_what_is_retried_later_says_that_it_trained_with_the_accepted_recipe(late):
    late(WRONG)
    study = late(RIGHT, accept_recipe=True)
    assert states(study) == ["FINISHED", "FAILED", "FAILED"]

    late(RIGHT, retry_failed=True)

    assert states(study) == ["FINISHED"] * 3
    planned = studies.written(study, TrialPlanned)
    assert [(p.trial, p.recipe) for p in planned] == [(0, 0), (1, 0), (2, 0), (1, 1), (2, 1)]


def test_a_trial_of_two_recipes_is_neither_equal_nor_different(late):
    late(WRONG)
    study = late(RIGHT, retry_failed=True, accept_recipe=True)
    (begun, after) = read_report(study.directory).trials[1].recipes
    assert begun == {"step": 0, "recipe": 0}

    code, said = verify(study, "--trial", "0", "--trial", "1")

    assert code == 0
    assert "EQUAL      trial 0" in said
    assert "note: the recipe has changed since it trained (sure)" in said
    two = f"it trained with 2 recipes: another one after step {after['step']} (changed: sure)"
    assert f"SKIPPED    trial 1 (lr=0.1): {two}; with one recipe it cannot be" in said
    shown = CliRunner().invoke(app, ["show", str(study.directory), "--trial", "1"])
    assert two in shown.stdout


def test_a_failed_trial_that_had_saved_nothing_trains_with_the_new_recipe_alone(late):
    late(WRONG, checkpoint_every=600)
    study = late(RIGHT, checkpoint_every=600, retry_failed=True, accept_recipe=True)

    code, said = verify(study, "--trial", "1")

    assert (code, said.count("EQUAL"), said.count("note:")) == (0, 1, 0)


def test_a_recipe_that_is_put_back_before_anything_trained_with_another_is_one(late):
    late(WRONG)
    late(RIGHT, accept_recipe=True)
    study = late(WRONG, accept_recipe=True)
    assert len(read_record(study.directory).recipes) == 3

    study = late(WRONG, retry_failed=True)

    assert states(study) == ["FINISHED", "FAILED", "FAILED"]
    row = Snapshot.of(read_outline(study.directory)).trial(1)
    assert [one.recipe for one in row.recipes] == [0, 2]
    assert two_recipes(study.directory, row.recipes) == ""


def test_weights_of_the_older_recipe_are_told_from_those_of_the_one_of_now(late):
    late(WRONG)
    study = late(RIGHT, retry_failed=True, accept_recipe=True)
    first, second, _ = shoal.open(study.directory).trials

    with pytest.warns(UserWarning, match=r"has changed since it trained \(sure\)"):
        first.load()
    second.load()


@pytest.mark.parametrize("verb", ["run", "resume"])
def test_the_flag_is_one_of_run_and_of_resume(late, tmp_path, verb):
    place, file = late(WRONG).directory, tmp_path / "late.py"
    file.write_text(file.read_text().replace(WRONG, RIGHT))
    what = str(file if verb == "run" else place)
    words = [verb, what, "--devices", "cpu:1", "--device-memory", studies.MEMORY]

    refused = CliRunner().invoke(app, [*words, "--retry-failed"])
    assert isinstance(refused.exception, SpecError)
    done = CliRunner().invoke(app, [*words, "--retry-failed", "--accept-recipe"])

    assert done.exit_code == 0, done.output
    assert [str(trial.state) for trial in read_report(place).trials] == ["FINISHED"] * 3


def test_where_trials_copied_each_other_no_recipe_trains_one_again(tmp_path):
    taken = Inherited(step=4, source=1, before={}, hp={})
    first = TrialRow(number=0, recipes=(TrainedWith(0, 0),), inherited=(taken,))
    second = TrialRow(number=1, recipes=(TrainedWith(0, 0), TrainedWith(8, 1)))
    third = TrialRow(number=2, recipes=(TrainedWith(0, 1),))

    found = with_two_recipes(tmp_path, Snapshot(trials=(first, second, third)))

    assert found == {
        0: "its population trained with more than one recipe",
        1: "it trained with 2 recipes: another one after step 8",
    }
    assert with_two_recipes(tmp_path, Snapshot(trials=(first,))) == {}


def test_verification_says_that_it_leaves_trials_of_two_recipes_out(late):
    late(WRONG)
    study = late(RIGHT, retry_failed=True, accept_recipe=True)
    result = CliRunner().invoke(app, ["verify", str(study.directory)], catch_exceptions=False)
    assert "left out: 2 of two recipes (--trial N takes one)" in result.stderr
