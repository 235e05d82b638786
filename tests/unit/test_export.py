"""An exported model is read back, by others, to the same bits; a failed export leaves nothing."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn

import shoal
import shoal.export
from shoal.core.errors import SpecError, StorageError
from shoal.core.event import Event, StudyStarted, TrialFinished, TrialPlanned
from shoal.export import export_trial, import_of_build, is_pretrained
from shoal.observe import Database
from shoal.observe.rows import TrialState
from shoal.observe.snapshot import Snapshot
from shoal.report import Report, TrialResult
from shoal.testing import same_bits

HISTORY = [
    {"step": 5, "epoch": 1, "seconds": 1.0, "metrics": {"train_loss": 2.0, "valid_loss": 1.5}},
    {"step": 9, "epoch": 2, "seconds": 2.0, "metrics": {"train_loss": 1.0, "valid_loss": 1.25}},
]


class Trained(TrialResult):
    """A trial whose model is there already."""

    def load(self) -> nn.Module:
        model: Any = self._recipe
        return model  # type: ignore[no-any-return]

    def kept_in_python(self) -> list[str]:
        return []

    def load_state(self) -> dict[str, Any]:
        return {"step": 5}


def trained(model: Any, **changes: Any) -> TrialResult:
    known: dict[str, Any] = {
        "number": 3,
        "hp": {"lr": 0.1, "width": 8},
        "seed": 11,
        "state": TrialState.FINISHED,
        "metrics": {"valid_loss": 1.25},
        "history": HISTORY,
        "seconds": 2.0,
        "error": "",
        "checkpoint": Path("there"),
    }
    return Trained(**(known | changes), _recipe=model)


def _events() -> Iterator[Event]:
    yield StudyStarted(
        time=0.0,
        study="digits",
        metric="valid_loss",
        mode="min",
        trials=4,
        devices=(),
        source="/home/ada/digits.py:study",
        versions={"shoal": "0.1.0", "torch": "2.13.0"},
    )
    yield TrialPlanned(
        time=0.0,
        trial=3,
        hp={"lr": 0.1, "width": 8},
        seed=11,
        technique="Spilled",
        shards=2,
        steps=9,
        peak_bytes=1,
        numerics={"torch": "2.13.0", "device": "cpu", "threads": 1},
    )
    yield TrialFinished(time=9.0, trial=3, step=9, metrics={}, checkpoint="there", seconds=2.0)


@pytest.fixture
def report(tmp_path: Path) -> Report:
    with Database(tmp_path / "digits") as log:
        log.write(_events())
    return Report(
        study="digits",
        directory=tmp_path / "digits",
        metric="valid_loss",
        mode="min",
        trials=[],
        wall_seconds=1.0,
        peaks={},
    )


def assert_equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not same_bits(first[name], second[name])] == []


# ---------------------------------------------------------------- plain modules


class Tied(nn.Module):
    """An embedding that is also the head, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


class Sliced(nn.Module):
    """Two parameters that are parts of one storage, and one that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(4, 6)
        self.upper, self.lower = nn.Parameter(whole[:2]), nn.Parameter(whole[2:])
        self.turned = nn.Parameter(torch.randn(5, 3).t())


@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), Tied])
def test_plain_safetensors_loads_the_weights_into_the_users_module(
    make: Any, report: Report, tmp_path: Path
) -> None:
    model, fresh = make(), make()

    done = export_trial(trained(model), report, tmp_path / "out")
    load_model(fresh, tmp_path / "out" / "model.safetensors")

    assert_equal(fresh.state_dict(), model.state_dict())
    assert (done.kind, done.trial, done.step) == ("torch", 3, 9)


def test_a_shared_tensor_is_written_once_and_its_other_name_noted(
    report: Report, tmp_path: Path
) -> None:
    export_trial(trained(Tied()), report, tmp_path / "out")

    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        names, noted = set(file.keys()), file.metadata()
    assert ("embedding.weight" in names) != ("head.weight" in names)
    assert noted["head.weight"] == "embedding.weight"


def test_parts_of_one_storage_are_written_in_full(report: Report, tmp_path: Path) -> None:
    model, fresh = Sliced(), Sliced()

    export_trial(trained(model), report, tmp_path / "out")
    fresh.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))

    assert_equal(fresh.state_dict(), model.state_dict())
    assert "load_state_dict(load_file(" in (tmp_path / "out" / "README.md").read_text()


def test_the_readme_is_code_that_works(report: Report, tmp_path: Path) -> None:
    export_trial(trained(nn.Linear(8, 2)), report, tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "digits.py").write_text(
        "import torch\nclass study:\n class recipe:\n"
        "  def model(hp): return torch.nn.Linear(hp['width'], 2)\n"
    )

    subprocess.run(
        [sys.executable, "-c", f"{code}\nassert not model.training"],
        cwd=tmp_path / "out",
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        check=True,
    )

    assert code.splitlines()[0] == "from digits import study  # in /home/ada"
    assert len(code.strip().splitlines()) <= 8
    assert "Trial 3 of study digits (lr=0.1, width=8; seed 11), finished" in text


@pytest.mark.parametrize(
    ("source", "recipe", "line"),
    [
        ("", {"model": {"name": "/home/ada/nets.py:wide"}}, "from nets import wide as build  #"),
        ("", {}, "# build: the function that was Recipe(model=...)"),
        ("/home/ada/my-nets.py:study", {}, "# build: the function that was Recipe(model=...)"),
    ],
)
def test_where_the_model_is_built_is_said_as_far_as_it_is_known(source, recipe, line) -> None:
    assert import_of_build(Snapshot(source=source, recipe=recipe)).startswith(line)


def test_state_that_is_no_tensor_is_refused(report: Report, tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"count": 3}

    with pytest.raises(SpecError, match=r"more than tensors: _extra_state .*get_extra_state"):
        export_trial(trained(Extra(2, 2)), report, tmp_path / "out")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits"]


# ---------------------------------------------------------------- what stands beside it


def test_everything_that_is_known_of_the_model_stands_beside_it(
    report: Report, tmp_path: Path
) -> None:
    done = export_trial(trained(nn.Linear(2, 2)), report, tmp_path / "out")

    def read(name: str) -> Any:
        return json.loads((tmp_path / "out" / name).read_text())

    assert set(done.files) == {
        *("model.safetensors", "hyperparameters.json", "metrics.json"),
        *("provenance.json", "README.md"),
    }
    assert read("hyperparameters.json") == {"lr": 0.1, "width": 8}
    assert read("metrics.json") == {
        "metric": "valid_loss",
        "mode": "min",
        "step": 9,
        "evaluated": 9,
        "final": {"train_loss": 1.0, "valid_loss": 1.25},
        "history": HISTORY,
    }
    found = read("provenance.json")
    digests = found.pop("sha256")
    assert found == {
        "format": "shoal-export-1",
        "kind": "torch",
        "study": "digits",
        "trial": 3,
        "parent": None,
        "state": "FINISHED",
        "step": 9,
        "seed": 11,
        "numerics": {"torch": "2.13.0", "device": "cpu", "threads": 1},
        "source": "/home/ada/digits.py:study",
        "versions": {"shoal": "0.1.0", "torch": "2.13.0"},
        "exported_by": {"shoal": shoal.__version__},
    }
    assert digests == {
        name: hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest()
        for name in ("model.safetensors", "hyperparameters.json", "metrics.json", "README.md")
    }


def test_of_a_trial_that_has_not_ended_the_metrics_end_where_the_weights_do(
    report: Report, tmp_path: Path
) -> None:
    trial = trained(nn.Linear(2, 2), state=TrialState.RUNNING)

    done = export_trial(trial, report, tmp_path / "out")

    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert done.step == metrics["step"] == metrics["evaluated"] == 5
    assert metrics["final"] == {"train_loss": 2.0, "valid_loss": 1.5}


# ---------------------------------------------------------------- the directory


def test_a_directory_that_is_not_empty_is_refused(report: Report, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    (tmp_path / "file").write_text("x")

    with pytest.raises(SpecError, match=r"out is not empty. Choose another directory, or pass ov"):
        export_trial(trained(nn.Linear(2, 2)), report, tmp_path / "out")
    with pytest.raises(SpecError, match="file is a file; an export is a directory"):
        export_trial(trained(nn.Linear(2, 2)), report, tmp_path / "file")


def test_an_earlier_export_is_replaced_when_asked(report: Report, tmp_path: Path) -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    export_trial(trained(first), report, tmp_path / "out")

    export_trial(trained(second), report, tmp_path / "out", overwrite=True)

    assert_equal(load_file(tmp_path / "out" / "model.safetensors"), second.state_dict())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits", "out"]


def test_nothing_but_an_export_is_replaced(report: Report, tmp_path: Path) -> None:
    export_trial(trained(nn.Linear(2, 2)), report, tmp_path / "out")
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")

    with pytest.raises(SpecError, match=r"holds what no export wrote \(tokenizer.json\)"):
        export_trial(trained(nn.Linear(2, 2)), report, tmp_path / "out", overwrite=True)
    with pytest.raises(SpecError, match=r"holds what no export wrote \(thesis.tex\)"):
        export_trial(trained(nn.Linear(2, 2)), report, tmp_path / "home", overwrite=True)

    assert (tmp_path / "home" / "thesis.tex").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failed_export_leaves_what_was_there(
    overwrite: bool, report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if overwrite:
        export_trial(trained(nn.Linear(2, 2)), report, tmp_path / "out")
    before = sorted(tmp_path.rglob("*"))

    def full(path: Path, record: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shoal.export, "_write", full)

    with pytest.raises(StorageError, match=r"cannot write the export .*out: .*No space left"):
        export_trial(trained(nn.Linear(2, 2)), report, tmp_path / "out", overwrite=overwrite)

    assert sorted(tmp_path.rglob("*")) == before


def test_an_export_that_cannot_be_put_in_place_puts_the_earlier_one_back(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_trial(trained(nn.Linear(2, 2)), report, tmp_path / "out")
    before = sorted(tmp_path.rglob("*"))
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)

    with pytest.raises(StorageError, match="Input/output error"):
        export_trial(trained(nn.Linear(2, 2)), report, tmp_path / "out", overwrite=True)

    assert sorted(tmp_path.rglob("*")) == before


def test_its_files_are_as_readable_as_any_that_are_made_there(
    report: Report, tmp_path: Path
) -> None:
    (tmp_path / "plain").touch()
    export_trial(trained(nn.Linear(2, 2)), report, tmp_path / "model")
    modes = {path.stat().st_mode for path in (tmp_path / "model").iterdir()}
    assert modes == {(tmp_path / "plain").stat().st_mode}


def test_it_makes_the_directories_above(report: Report, tmp_path: Path) -> None:
    done = export_trial(trained(nn.Linear(2, 2)), report, tmp_path / "a" / "b" / "out")

    assert done.directory == tmp_path / "a" / "b" / "out"
    assert done.num_bytes == sum(path.stat().st_size for path in done.directory.iterdir())


# ---------------------------------------------------------------- Hugging Face


def _gpt2() -> Any:
    import transformers

    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8)
    return transformers.GPT2LMHeadModel(config)


def _bert() -> Any:
    import transformers

    config = transformers.BertConfig(
        num_hidden_layers=1,
        num_attention_heads=2,
        hidden_size=8,
        intermediate_size=16,
        vocab_size=16,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config)


def _llama(tied: bool) -> Any:
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        hidden_size=8,
        intermediate_size=16,
        vocab_size=16,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("make", [_gpt2, _bert, lambda: _llama(False), lambda: _llama(True)])
def test_a_hugging_face_model_is_the_folder_that_from_pretrained_reads(
    make: Any, report: Report, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    model = make().eval()

    done = export_trial(trained(model), report, tmp_path / "out")
    found = type(model).from_pretrained(tmp_path / "out")

    assert_equal(found.state_dict(), model.state_dict())
    assert done.kind == "transformers"
    assert {"config.json", "model.safetensors", "provenance.json", "metrics.json"} <= set(
        done.files
    )
    readme = (tmp_path / "out" / "README.md").read_text()
    assert f"from transformers import {type(model).__name__}" in readme
    assert f'{type(model).__name__}.from_pretrained(".").eval()' in readme


def test_a_model_that_save_pretrained_refuses_is_told_in_words(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    model = _gpt2()

    def refuse(path: Path) -> None:
        raise RuntimeError("shared tensors that the config does not tie")

    monkeypatch.setattr(model, "save_pretrained", refuse, raising=False)

    with pytest.raises(SpecError, match=r"GPT2LMHeadModel.save_pretrained refuses .*shared"):
        export_trial(trained(model), report, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_telling_a_hugging_face_model_imports_nothing() -> None:
    program = (
        "import sys, torch; from shoal.export import is_pretrained; "
        "assert not is_pretrained(torch.nn.Linear(1, 1)); "
        "sys.exit('transformers' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_module_that_holds_a_hugging_face_model_is_a_plain_one() -> None:
    pytest.importorskip("transformers")

    assert not is_pretrained(nn.ModuleDict({"body": _gpt2()}))


# ---------------------------------------------------------------- adapters


class Adapted(nn.Module):
    """As peft's: saves the adapter, and nothing of the base."""

    def __init__(self, error: str = "") -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 1)
        self.error = error

    def save_pretrained(self, folder: Path) -> None:
        if self.error:
            raise ValueError(self.error)
        folder.mkdir()
        save_file(self.adapter.state_dict(), folder / "adapter_model.safetensors")


OF_PEFT: Any = type("PeftModel", (Adapted,), {"__module__": "peft.peft_model"})


def test_an_adapter_is_exported_by_itself_beside_the_whole_model(
    report: Report, tmp_path: Path
) -> None:
    model = OF_PEFT()

    done = export_trial(trained(model), report, tmp_path / "out")
    export_trial(trained(model), report, tmp_path / "out", overwrite=True)

    there = "adapter/adapter_model.safetensors"
    assert there in done.files
    assert_equal(load_file(tmp_path / "out" / there), model.adapter.state_dict())
    assert_equal(load_file(tmp_path / "out" / "model.safetensors"), model.state_dict())
    readme = (tmp_path / "out" / "README.md").read_text()
    assert 'PeftModel.from_pretrained(base, "adapter").eval()' in readme
    assert there in json.loads((tmp_path / "out" / "provenance.json").read_text())["sha256"]


def test_an_adapter_that_cannot_be_saved_is_told_in_words(report: Report, tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match=r"PeftModel.save_pretrained refuses .*no config.*\n.*load"
    ):
        export_trial(trained(OF_PEFT("no config")), report, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_module_with_an_adapter_in_it_is_a_plain_one(report: Report, tmp_path: Path) -> None:
    assert "README.md" in export_trial(trained(Adapted()), report, tmp_path / "out").files
    assert not (tmp_path / "out" / "adapter").exists()
