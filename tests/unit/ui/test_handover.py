"""``shoal export --optuna``: what Optuna reads of a study."""

from __future__ import annotations

import math

import pytest
from typer.testing import CliRunner

import shoal
from shoal.core.errors import SpecError
from shoal.core.spec import TrialSpec
from shoal.search import choice, integer, log_uniform, uniform
from shoal.search.handover import HandedOver, write_optuna
from shoal.search.space import check_space
from shoal.source import load_study
from shoal.ui.cli import app
from shoal.ui.export import check_target

optuna = pytest.importorskip("optuna")
FILE = """
import torch
import shoal

def build(hp):
    if hp["lr"] > 1:
        raise ValueError("too steep")
    return torch.nn.Linear(4, 2)

def data(hp):
    random = torch.Generator().manual_seed(0)
    batches = [(torch.randn(8, 4, generator=random), torch.arange(8) % 2) for _ in range(4)]
    return batches[:3], batches[3:]

def loss(output, batch):
    return torch.nn.functional.cross_entropy(output, batch[1])

kind = shoal.choice("a", "b", when={"a": {"extra": 3}})
study = shoal.Study(
    "handed", shoal.Recipe(model=build, data=data, loss=loss), directory={place!r},
    space={"lr": shoal.choice(0.1, 0.01, 1e-7, 10.0), "kind": kind}, epochs=3, pruner="asha",
)
"""


def _invoke(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)
    return result.exit_code, result.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory, warm_workers):
    """A directory with a study that finished, pruned and failed trials, and its file."""
    place = tmp_path_factory.mktemp("handed")
    (place / "handed.py").write_text(FILE.replace("{place!r}", repr(str(place / "runs"))))
    loaded = load_study(str(place / "handed.py"))
    loaded.study.source = loaded.source
    hardware = shoal.Hardware.virtual(devices=1, memory="32MiB")
    loaded.study.run(hardware=hardware, progress=False, workers=warm_workers)
    return place


def test_optuna_reads_trials_parameters_curves_and_states(place, tmp_path):
    code, text = _invoke(
        *("export", "handed", "--optuna", tmp_path / "o.db"), "--directory", place / "runs"
    )

    assert code == 0
    assert "optuna-dashboard sqlite:///" in text
    study = optuna.load_study(study_name="handed", storage=f"sqlite:///{tmp_path / 'o.db'}")
    states = [trial.state.name for trial in study.trials]
    assert len(states) == 8
    assert set(states) == {"COMPLETE", "PRUNED", "FAIL"}
    for trial in study.trials:
        assert ("extra" in trial.params) == (trial.params["kind"] == "a")
        assert trial.distributions["lr"].choices == (0.1, 0.01, 1e-7, 10.0)
        steps = {"COMPLETE": [3, 6, 9], "PRUNED": [3], "FAIL": []}[trial.state.name]
        assert list(trial.intermediate_values) == steps
        if steps:  # as Optuna tells of those that are pruned
            assert trial.value == trial.intermediate_values[steps[-1]]
        if steps == [3, 6, 9]:
            assert trial.datetime_complete >= trial.datetime_start
    assert study.direction.name == "MINIMIZE"
    assert study.best_trial.user_attrs["state"] == "FINISHED"


def test_a_pruned_trial_is_seen_in_every_table(place):
    assert "pruned" in _invoke("ls", "--directory", place / "runs")[1]
    text = _invoke("show", "handed", "--directory", place / "runs")[1]
    assert "pruned" in text.splitlines()[0]
    assert any(" pruned " in line for line in text.splitlines()[2:])


def test_a_file_that_is_there_is_replaced_only_when_told(place, tmp_path):
    target = tmp_path / "o.db"
    target.write_text("mine")
    words = ("export", "handed", "--optuna", target, "--directory", place / "runs")
    with pytest.raises(SpecError, match=r"is there already.*--overwrite"):
        _invoke(*words)
    assert target.read_text() == "mine"
    assert _invoke(*words, "--overwrite", "--json")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["o.db"]


def test_what_is_exported_has_to_be_clear():
    assert check_target("best", "d") == ("best", "d")
    with pytest.raises(SpecError, match=r"--optuna FILE\.db hands over all trials, and trial '3'"):
        check_target("3", with_optuna=True)
    for words in ((None, None), ("3", None)):
        with pytest.raises(SpecError, match="shoal export STUDY best DIR"):
            check_target(*words)


def test_no_trial_of_a_file_that_nobody_reads_yet_waits_for_the_disk(tmp_path, monkeypatch):
    waits: list[int] = []

    class Storage(optuna.storages.RDBStorage):
        def create_new_study(self, *given, **named):
            with self.engine.connect() as connection:
                waits.append(connection.exec_driver_sql("PRAGMA synchronous").scalar())
            return super().create_new_study(*given, **named)

    monkeypatch.setattr(optuna.storages, "RDBStorage", Storage)
    space = check_space({"lr": log_uniform(1e-3, 1e-1)})
    write_optuna(tmp_path / "o.db", "s", mode="min", metric="loss", space=space, trials=[])
    assert waits == [0]


def test_a_clone_outside_the_space_and_values_that_are_no_numbers_are_handed_over(tmp_path):
    space = check_space({"lr": log_uniform(1e-3, 1e-1), "kind": choice("a", "b")})
    spec = TrialSpec(number=0, hp={"lr": 1.0, "kind": "c"}, seed=0)
    rest = {"began": 1.0, "ended": 2.0, "curve": {1: math.nan}}
    trials = [
        HandedOver(point=spec.hp, state="COMPLETE", value=math.nan, **rest),
        HandedOver(point={"lr": 0.01, "kind": "a"}, state="COMPLETE", value=1.0, **rest),
        HandedOver(point={"lr": -1.0, "kind": "a"}, state="WAITING", value=None, **rest),
        HandedOver(point=spec.hp, state="COMPLETE", value=math.inf, **rest),
        HandedOver(point=spec.hp, state="FAIL", value=None, **(rest | {"began": None})),
        *(
            HandedOver(point=spec.hp, state="PRUNED", value=9.0, **(rest | {"curve": curve}))
            for curve in ({2: 0.5, 1: 0.25}, {1: math.nan}, {})
        ),
    ]
    path = tmp_path / "o.db"
    write_optuna(path, "s", mode="max", metric="acc", space=space, trials=trials)

    study = optuna.load_study(study_name="s", storage=f"sqlite:///{path}")
    states = [trial.state.name for trial in study.trials]
    assert states == ["FAIL", "COMPLETE", "WAITING", "FAIL", "FAIL", *["PRUNED"] * 3]
    assert [trial.duration.total_seconds() for trial in study.trials[3:5]] == [1.0, 0.0]
    assert [trial.value for trial in study.trials[5:]] == [0.5, None, None]
    assert study.trials[0].params == {"lr": 1.0, "kind": "c"}
    assert study.best_value == 1.0


@pytest.mark.parametrize(
    ("entry", "values", "read"),
    [
        (uniform(0.0, 1.0), [0.5, None, 0.7], [0.5, None, 0.7]),  # a clone without a norm
        (integer(1, 5), [2, 2.5], [2, 2.5]),
        (integer(1, 5, log=True), [2, 0], [2, 0]),
        (choice(0, 1), [0, True, 1], ["0", "True", "1"]),  # Optuna takes two of them for one
    ],
)
def test_a_clone_of_another_kind_leaves_every_value_to_be_told_apart(
    tmp_path, entry, values, read
):
    rest = {"state": "COMPLETE", "value": 1.0, "began": 1.0, "ended": 2.0, "curve": {1: 1.0}}
    trials = [HandedOver(point={"a": value}, **rest) for value in values]
    path = tmp_path / "o.db"
    write_optuna(path, "s", mode="min", metric="loss", space={"a": entry}, trials=trials)

    study = optuna.load_study(study_name="s", storage=f"sqlite:///{path}")
    assert [trial.params["a"] for trial in study.trials] == read
