"""A study's record: what is asked for, from the study itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import shoal
from shoal.core.spec import TrialSpec
from shoal.resume import TrialRecord, describe_study, record_from_json, record_to_json


def _build(hp: object) -> None:
    """Never called."""


def _study(directory: Path, **options: object) -> shoal.Study:
    recipe = shoal.Recipe(model=_build, data=_build)  # type: ignore[arg-type]
    usual = {"space": {"lr": shoal.choice(0.1, 0.2), "width": 8}, "steps": 5, "seed": 3}
    return shoal.Study("sweep", recipe, directory=directory, **{**usual, **options})  # type: ignore[arg-type]


def test_a_study_is_described_with_all_that_tells_it_from_another(tmp_path: Path) -> None:
    record = describe_study(_study(tmp_path), {"keep": 2})

    assert record.trials == (
        TrialRecord(number=0, hp={"lr": 0.1, "width": 8}, seed=3),
        TrialRecord(number=1, hp={"lr": 0.2, "width": 8}, seed=4),
    )
    assert record.space == "lr=Choice(values=(0.1, 0.2)), width=8"
    assert (record.name, record.unit, record.length, record.seed) == ("sweep", "steps", 5, 3)
    assert (record.metric, record.mode, record.eval_every) == ("valid_loss", "min", None)
    assert record.recipe.fields == {"model": "_build", "data": "_build"}
    assert record.checkpoint == {"keep": 2}


def test_where_it_runs_is_not_in_the_record(tmp_path: Path) -> None:
    assert describe_study(_study(tmp_path)) == describe_study(_study(tmp_path / "elsewhere"))


def test_the_same_file_gives_the_same_record_another_time(tmp_path: Path) -> None:
    record = describe_study(_study(tmp_path, epochs=3, steps=None))

    assert record_from_json(record_to_json(record)) == record
    assert (record.unit, record.length) == ("epochs", 3)


def test_a_clone_is_recorded_with_its_parent(tmp_path: Path) -> None:
    study = _study(tmp_path)
    clone = TrialSpec(number=2, hp={"lr": 9.0, "width": 8}, seed=5, parent=1, warm=True)
    study.trials = (*study.trials, clone)

    record = describe_study(study)

    assert (record.trials[2].origin, record.trials[2].parent, record.sampled) == ("cloned", 1, 2)
    assert record.trials[2].to_spec() == clone


def test_a_record_is_made_and_read_without_torch() -> None:
    program = "import sys, shoal.resume, shoal.control; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
