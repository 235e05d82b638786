"""``shoal export``, ``verify`` and ``logs`` of a study that a file defines, as a user does it."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import shoal
from shoal.core.errors import SpecError
from shoal.export import export_trial
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.report import Report
from shoal.runtime.pool import WorkerPool
from shoal.source import load_study
from shoal.ui.cli import app
from shoal.ui.export import choose_trial

FILE = """
import torch
import shoal

def build(hp):
    print("a model that talks")
    if hp["lr"] > 1:
        raise ValueError("too steep")
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))

def data(hp):
    random = torch.Generator().manual_seed(0)
    batches = [(torch.randn(8, 4, generator=random), torch.arange(8) % 2) for _ in range(4)]
    return batches[:3], batches[3:]

def loss(output, batch):
    return torch.nn.functional.cross_entropy(output, batch[1])

recipe = shoal.Recipe(model=build, data=data, loss=loss)
study = shoal.Study(
    "steep", recipe, space=shoal.grid(lr=[0.1, 0.01, 10.0]), epochs=3, directory={place!r}
)
"""


def _invoke(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    return result.exit_code, result.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, warm_workers: WorkerPool) -> Path:
    """A directory with a study of epochs, one of whose three trials failed, and its file."""
    place = tmp_path_factory.mktemp("steep")
    file = place / "steep.py"
    file.write_text(FILE.replace("{place!r}", repr(str(place / "runs"))))
    loaded = load_study(str(file))
    loaded.study.source = loaded.source
    loaded.study.run(
        hardware=shoal.Hardware.virtual(devices=1, memory="64MiB"),
        progress=False,
        workers=warm_workers,
    )
    return place


def test_the_best_model_is_exported(place: Path, tmp_path: Path) -> None:
    words = ("--directory", str(place / "runs"))

    code, text = _invoke("export", "steep", "best", str(tmp_path / "model"), *words)

    best = shoal.open(place / "runs" / "steep").best
    assert code == 0
    assert f"trial {best.number} of steep, step 9, is in {tmp_path / 'model'}" in text
    assert "model.safetensors" in text
    found = load_file(tmp_path / "model" / "model.safetensors")
    expected = best.load().state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_model_finds_its_files_arguments_where_it_is_exported(place, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["shoal", "export", "steep", "best"])
    seen: list[str] = []

    def spying(*args, **options):
        seen.extend(sys.argv)
        return export_trial(*args, **options)

    monkeypatch.setattr("shoal.ui.export.export_trial", spying)
    words = ("--directory", str(place / "runs"))

    assert _invoke("export", "steep", "best", str(tmp_path / "m"), *words)[0] == 0

    recorded = Snapshot.of(read_outline(place / "runs" / "steep")).arguments
    assert seen == [str(place / "steep.py"), *recorded]


def test_a_study_that_cannot_go_on_says_which_arguments_it_was_given(place, tmp_path, monkeypatch):
    shutil.copytree(place, tmp_path / "moved")
    file = tmp_path / "moved" / "steep.py"
    text = file.read_text().replace("torch.nn.Linear(4, 8)", "torch.nn.Linear(4, 8, False)")
    file.write_text(text.replace(str(place), str(tmp_path / "moved")))
    study = load_study(str(file), ("--width", "a b")).study

    with pytest.raises(SpecError, match="Changed: ") as refused:
        study.run(hardware=shoal.Hardware.virtual(devices=1, memory="64MiB"), progress=False)

    last = str(refused.value).splitlines()[-1]
    assert last.endswith("file other arguments: none; this one: --width 'a b'.")


def test_a_trial_is_exported_by_its_number_and_told_as_json(place: Path, tmp_path: Path) -> None:
    words = ("--directory", str(place / "runs"), "--json")

    record = json.loads(_invoke("export", "steep", "1", str(tmp_path / "one"), *words)[1])

    assert (record["study"], record["trial"], record["step"]) == ("steep", 1, 9)
    assert (record["kind"], record["directory"]) == ("torch", str(tmp_path / "one"))
    assert record["files"]["model.safetensors"] > 0


def test_a_trial_that_failed_has_nothing_to_export(place: Path, tmp_path: Path) -> None:
    words = ("--directory", str(place / "runs"))

    with pytest.raises(SpecError, match=r"trial 2 is FAILED.*no checkpoint"):
        _invoke("export", "steep", "2", str(tmp_path / "two"), *words)

    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def edited(place: Path) -> Iterator[Path]:
    """The same study, after another rate of dropout came into its file."""
    file = place / "steep.py"
    text = file.read_text()
    file.write_text(text.replace("Dropout(0.5)", "Dropout(0.25)"))
    yield place
    file.write_text(text)


def test_a_recipe_that_changed_since_is_told_wherever_it_is_used(edited, tmp_path, capsys):
    words = ("--directory", str(edited / "runs"))
    told = r"the recipe has changed since it trained \(build\)"

    with pytest.warns(UserWarning, match=told):
        shoal.open(edited / "runs" / "steep").best.load()
    result = CliRunner().invoke(app, ["export", "steep", "best", str(tmp_path / "m"), *words])
    assert result.exit_code == 0
    assert re.search(told, result.stderr)
    assert "the recipe changed: build." in (tmp_path / "m" / "README.md").read_text()
    provenance = json.loads((tmp_path / "m" / "provenance.json").read_text())
    assert provenance["recipe_changed"] == ["build"]

    code, text = _invoke("verify", "steep", *words, "--trials", "1")
    assert code == 1
    assert re.search(f"note: {told}", text)
    assert "1 of 1 trial differs from training alone, with a recipe that has changed" in text


def test_a_trial_that_is_not_there_is_named(place: Path) -> None:
    report: Report = shoal.open(place / "runs" / "steep")

    with pytest.raises(
        SpecError, match=r"steep has no trial '9'; give 'best' or a number below 3"
    ):
        choose_trial(report, "9")


def test_a_study_of_epochs_is_verified_bit_for_bit(place: Path) -> None:
    words = ("--directory", str(place / "runs"))

    code, text = _invoke("verify", "steep", "--trial", "0", "--trial", "2", *words)

    assert code == 0
    assert "EQUAL      trial 0 (lr=0.1): 9 steps, 17 tensors, 9 losses, 3 metrics, random" in text
    assert "SKIPPED    trial 2 (lr=10): it failed at step 0: ValueError: too steep" in text
    assert "a model that talks" not in text


def test_what_a_model_prints_is_kept_out_of_the_json(place: Path) -> None:
    words = ("--directory", str(place / "runs"), "--json")

    (verdict,) = json.loads(_invoke("verify", "steep", "--trial", "0", *words)[1])

    assert verdict["equal"] is True


def test_a_file_that_moved_is_passed_to_export_and_verify(place: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.move(place / "steep.py", moved.with_suffix(".py"))
    words = ("--directory", str(place / "runs"))
    try:
        for verb in (("verify", "steep"), ("export", "steep", "best", str(tmp_path / "m"))):
            with pytest.raises(SpecError, match=r"steep\.py, and that file is not there any more"):
                _invoke(*verb, *words)
            assert _invoke(*verb, *words, "--file", str(moved.with_suffix(".py")))[0] == 0
    finally:
        shutil.move(moved.with_suffix(".py"), place / "steep.py")
