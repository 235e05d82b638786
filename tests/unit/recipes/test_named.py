"""Recipes by the names of their functions, and files that run their study themselves."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import commands
import pytest

import shoal
from shoal.core.errors import SpecError
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.recipes.named import Origin, name_recipe, recall_recipe
from shoal.ui.verify import verify_study

SCRIPT = """
    import torch, shoal
    from pathlib import Path
    from torch import nn
    {helper}

    def build(hp):
        return nn.Linear(4, 2)

    def data(hp):
        return [(torch.ones(2, 4), torch.zeros(2, dtype=torch.long))], None

    def loss(output, batch):
        return nn.functional.cross_entropy(output, batch[1])

    def mean(output, batch):
        return float(output.mean())

    def make(name="s"):
        recipe = shoal.Recipe(
            model={model}, data=data, loss=loss, metrics={{"mean": mean}}, clip_grad_norm=0.5
        )
        space, metric = shoal.grid(lr=[0.1]), "train_loss"
        return shoal.Study(name, recipe, space=space, steps=2, metric=metric, directory={runs!r})

    def run(study):
        with (Path(__file__).parent / "ran").open("a") as file:
            file.write("once ")
        study.run(hardware=shoal.Hardware.virtual(devices=1, memory="64MiB"), progress=False)

    {end}
"""
GUARDED = 'if __name__ == "__main__": run(make())'
ENDS = {
    "a function, guarded": GUARDED,
    "a function": "run(make())",
    "the top level": "study = make(); run(study); raise RuntimeError('it was run')",
}


def ran(folder: Path, end: str, model: str = "build", helper: str = "") -> Path:
    """A script that was run as Python runs scripts; its study's directory."""
    runs = str(folder / "runs")
    text = SCRIPT.format(end=end, runs=runs, model=model, helper=helper)
    (folder / "train.py").write_text(textwrap.dedent(text))
    done = commands.run("train.py", cwd=folder)
    assert "it was run" in done.stderr or not done.returncode, done.stderr
    return folder / "runs" / "s"


@pytest.mark.sample(1)
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_study_that_its_script_runs_is_verified_and_loaded_and_not_run_again(
    end, tmp_path, monkeypatch, capsys
):
    place = ran(tmp_path, end)
    monkeypatch.chdir("/")  # where a path of the script's would lead elsewhere
    assert verify_study("s", place.parent) == 0
    assert "EQUAL" in capsys.readouterr().out
    assert set(shoal.open(place).best.load().state_dict()) == {"weight", "bias"}
    written = (tmp_path / "ran").read_text().split()
    asked = 0 if end == GUARDED else 2  # how often the file came to that line again
    assert len(written) == 1 + asked
    assert Snapshot.of(read_outline(place)).runs == 1


def test_a_study_that_runs_before_is_read_and_not_trained_again(tmp_path, capsys):
    two = "first = make('first'); run(first); study = make(); run(study)"
    place = ran(tmp_path, two)
    before = (place.parent / "first" / "study.db").stat().st_mtime_ns
    assert verify_study("s", place.parent) == 0
    assert "EQUAL" in capsys.readouterr().out
    assert len((tmp_path / "ran").read_text().split()) == 2 + 2
    assert (place.parent / "first" / "study.db").stat().st_mtime_ns == before
    assert Snapshot.of(read_outline(place.parent / "first")).runs == 1


@pytest.mark.slow
def test_functions_of_modules_beside_the_script_are_found(tmp_path, monkeypatch):
    (tmp_path / "besides.py").write_text(
        "from torch import nn\ndef net(hp): return nn.Linear(4, 2)"
    )
    place = ran(tmp_path, GUARDED, model="besides.net", helper="import besides")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(tmp_path)])
    assert shoal.open(place).best.load().out_features == 2


def score(output, batch):
    return output.mean()


def build(hp):
    raise NotImplementedError


def data(hp):
    raise NotImplementedError


def recipe(**changes):
    return shoal.Recipe(**{"model": build, "data": data, "loss": len} | changes)


def test_what_has_no_name_is_not_recorded():
    def inside(hp):
        raise NotImplementedError

    assert name_recipe(recipe(loss=score))["data"] == {"name": f"{__name__}:data"}
    for nameless in (inside, lambda hp: None, score.__get__(1)):
        assert name_recipe(recipe(loss=score, model=nameless)) == {}
    assert Origin().recipe("/nowhere") is None


def test_a_recipe_is_recalled_as_it_was_with_its_plain_values():
    made = recipe(loss=score, accumulate=3, metrics={"a": score}, clip_grad_norm=0.5)
    named = name_recipe(made) | {"script": ""}
    assert recall_recipe(named, "/nowhere", "s") == made


def test_a_function_that_is_gone_is_named():
    named = name_recipe(recipe(loss=score)) | {"script": "", "model": {"name": f"{__name__}:old"}}
    with pytest.raises(SpecError, match=r"was made with old of .*, and there is no old any more"):
        recall_recipe(named, "/nowhere", "s")
