"""A trained model as files for other programs: no shoal, and no pickle, to read them.

[Note: all or nothing]
Everything is written into a new hidden directory beside the target, synced, and renamed to
it. An export that fails leaves what was there before and nothing else. One whose process is
killed may leave its hidden directory, .NAME.export-*, which nothing takes for an export.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

import shoal
from shoal.core.errors import SpecError, StorageError
from shoal.core.units import Bytes
from shoal.observe import jsonl
from shoal.observe.reader import read_trial
from shoal.observe.rows import TrialState
from shoal.observe.snapshot import Snapshot
from shoal.report import Report, TrialResult

WEIGHTS, HYPERPARAMETERS, METRICS = "model.safetensors", "hyperparameters.json", "metrics.json"
PROVENANCE, README, ADAPTER = "provenance.json", "README.md", "adapter"
FORMAT = "shoal-export-1"
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written where; ``files`` are bytes by name. ``kind``: "torch" or "transformers"."""

    directory: Path
    trial: int
    step: int
    kind: str
    files: Mapping[str, int]

    @property
    def num_bytes(self) -> Bytes:
        """Bytes of all files."""
        return Bytes(sum(self.files.values()))


def export_trial(
    trial: TrialResult,
    report: Report,
    directory: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    changed: Sequence[str] = (),
) -> Exported:
    """Write a trial's model and what is known of it into ``directory``.

    ``changed`` names what of the recipe is not what it was when the trial was trained.

    The weights of a plain module are ``model.safetensors``, under the module's own names, a
    shared tensor once. A Hugging Face model is the folder that ``from_pretrained`` reads. Of
    several models each has a file of its own, "generator.safetensors". A model of peft has its
    adapter, what ``PeftModel.from_pretrained(base, ...)`` reads, in a folder beside the whole.

    Raises:
        SpecError: no checkpoint or recipe, a directory that holds something else, or a
            model that keeps more than tensors. Nothing was written.
        StorageError: the disk is full or failing. Nothing is left of it.
    """
    target = Path(directory).resolve()
    _check_target(target, overwrite)
    step = _step(trial)
    model = trial.load()
    several = isinstance(model, dict)
    kind = "transformers" if not several and is_pretrained(model) else "torch"
    is_tuned = not several and has_adapter(model)
    with _published(target) as scratch:
        save = _save_several if several else _save if kind == "torch" else _save_pretrained
        call = save(model, scratch)
        if is_tuned:
            _save_adapter(model, scratch / ADAPTER)
        history = [dict(row) for row in trial.history if row["step"] <= step]
        _write(scratch / HYPERPARAMETERS, dict(trial.hp))
        _write(scratch / METRICS, _metrics(report, history, step))
        origin = Snapshot.of(read_trial(report.directory, trial.number))
        left = trial.kept_in_python()
        readme = _readme(trial, origin, call, changed, left) + _OF_ADAPTER * is_tuned
        (scratch / README).write_text(readme, encoding="utf-8")
        digests = {name: digest(path) for name, path in _files(scratch).items()}
        provenance = _provenance(trial, origin, step) | {"kind": kind, "sha256": digests}
        if changed:
            provenance["recipe_changed"] = list(changed)
        if left:
            provenance["left_out"] = left
        _write(scratch / PROVENANCE, provenance)
        files = {name: path.stat().st_size for name, path in _files(scratch).items()}
    return Exported(directory=target, trial=trial.number, step=step, kind=kind, files=files)


# ---------------------------------------------------------------- weights


def is_pretrained(model: nn.Module) -> bool:
    """Whether ``model`` is a transformers ``PreTrainedModel``; imports nothing to tell."""
    return ("transformers.modeling_utils", "PreTrainedModel") in _homes(model)


def has_adapter(model: nn.Module) -> bool:
    """Whether ``model`` is one of peft's, an adapter around a base; imports nothing to tell."""
    return ("peft.peft_model", "PeftModel") in _homes(model)


def _homes(model: nn.Module) -> set[tuple[str, str]]:
    return {(kind.__module__, kind.__name__) for kind in type(model).__mro__}


def _save_pretrained(model: Any, scratch: Path) -> str:
    """The standard folder, as safetensors; returns how to read it, as code."""
    name, home = type(model).__name__, type(model).__module__
    _write_standard(model, scratch, "config say what the model is")
    home = "transformers" if home.startswith("transformers.") else home
    return f'from {home} import {name}\n\nmodel = {name}.from_pretrained(".").eval()'


def _save_adapter(model: Any, folder: Path) -> None:
    """The adapter alone, as peft reads it."""
    _write_standard(model, folder, "peft_config say what the adapter is")


def _write_standard(model: Any, folder: Path, advice: str) -> None:
    """What the model's own library writes."""
    try:
        model.save_pretrained(folder)
    except (RuntimeError, ValueError) as error:
        raise SpecError(
            f"{type(model).__name__}.save_pretrained refuses this model: {error}\nMake its "
            f"{advice}, or take it with report.best.load()."
        ) from error


_OF_ADAPTER = f"""
`{ADAPTER}` has the adapter without its base:

```python
from peft import PeftModel

model = PeftModel.from_pretrained(base, "{ADAPTER}").eval()
```
"""


def _save(model: nn.Module, scratch: Path) -> str:
    """Write the state dict; returns how to read it, as code.

    A tensor that is a part of a larger storage has no place of its own in what
    ``save_model`` can say; such a model is written with every tensor in full.
    """
    state = model.state_dict()
    _check_tensors(state)
    try:
        save_model(model, str(scratch / WEIGHTS), metadata={"format": "pt"})
    except RuntimeError:
        _save_in_full(state, scratch / WEIGHTS)
        return _LOAD.format(how="load_file", call=f'model.load_state_dict(load_file("{WEIGHTS}"))')
    return _LOAD.format(how="load_model", call=f'load_model(model, "{WEIGHTS}")')


_LOAD = """import json
from safetensors.torch import {how}

hp = json.load(open("hyperparameters.json"))
model = build(hp).eval()
{call}"""


def _save_several(models: Mapping[str, nn.Module], scratch: Path) -> str:
    """A file for each model; returns how to read them, as code."""
    for name, model in models.items():
        state = model.state_dict()
        _check_tensors(state)
        _save_in_full(state, scratch / f"{name}.safetensors")
    return _LOAD_SEVERAL


_LOAD_SEVERAL = """import json
from safetensors.torch import load_file

hp = json.load(open("hyperparameters.json"))
models = build(hp)
for name, model in models.items():
    model.eval().load_state_dict(load_file(f"{name}.safetensors"))"""


def _save_in_full(state: Mapping[str, Tensor], path: Path) -> None:
    """Every tensor by itself, whatever storage it is a part of."""
    whole = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
    save_file(whole, path, metadata={"format": "pt"})


def _check_tensors(state: Mapping[str, Any]) -> None:
    others = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if others:
        raise SpecError(
            f"the model's state dict holds more than tensors: {', '.join(others[:5])} (of "
            "get_extra_state). safetensors has no place for it, and without it the model would "
            "not be whole. Return a tensor from get_extra_state, or load the model with "
            "report.best.load()."
        )


# ---------------------------------------------------------------- what is known of it


def _step(trial: TrialResult) -> int:
    """The step that the weights are of; a trial that has not ended may be ahead of them."""
    if trial.state is TrialState.FINISHED and trial.history:
        return int(trial.history[-1]["step"])
    return int(trial.load_state()["step"])


def _metrics(report: Report, history: list[dict[str, Any]], step: int) -> dict[str, Any]:
    last: dict[str, float] = {}
    for row in history:
        last |= row["metrics"]
    return {
        "metric": report.metric,
        "mode": report.mode,
        "step": step,
        "evaluated": history[-1]["step"] if history else None,
        "final": last,
        "history": history,
    }


def _provenance(trial: TrialResult, origin: Snapshot, step: int) -> dict[str, Any]:
    """Where the model comes from."""
    row = origin.trial(trial.number)
    return {
        "format": FORMAT,
        "study": origin.study,
        "trial": trial.number,
        "parent": row.parent,
        "state": str(trial.state),
        "step": step,
        "seed": trial.seed,
        "numerics": dict(row.numerics),
        "source": origin.source,
        "versions": dict(origin.versions),
        "exported_by": {"shoal": shoal.__version__},
        **({"inherited": [dict(one) for one in trial.inherited]} if trial.inherited else {}),
    }


def digest(path: Path) -> str:
    """The SHA-256 of a file, as ``sha256sum`` prints it."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()


def import_of_build(origin: Snapshot) -> str:
    """Lines that have the function which builds the model, where a file is known that has it."""
    named = origin.recipe.get("model")
    written = named.get("name", "") if isinstance(named, Mapping) else origin.source
    place, _, name = str(written).rpartition(":")
    file = Path(place)
    if not (name.isidentifier() and file.stem.isidentifier()):
        return "# build: the function that was Recipe(model=...) of the study"
    if named:
        return f"from {file.stem} import {name} as build  # in {file.parent}"
    return f"from {file.stem} import {name}  # in {file.parent}\nbuild = {name}.recipe.model"


def _readme(
    trial: TrialResult,
    origin: Snapshot,
    call: str,
    changed: Sequence[str],
    left: Sequence[str],
) -> str:
    if "build(hp)" in call:
        call = f"{import_of_build(origin)}\n{call}"
    settings = ", ".join(f"{name}={value!r}" for name, value in trial.hp.items())
    since = f" Since it was trained the recipe changed: {', '.join(changed)}." if changed else ""
    lacks = (
        f"These files lack what the model keeps in Python: {', '.join(left)}. It is as it is when "
        "the model is built; `load()` of the trial of `shoal.open(DIRECTORY)` has it as then.\n\n"
    ) * bool(left)
    return (
        f"Trial {trial.number} of study {origin.study} ({settings}; seed {trial.seed}), "
        f"{str(trial.state).lower()}; {origin.source or 'an interactive study'}.{since}\n\n"
        f"```python\n{call}\n```\n\n{lacks}"
        f"`{METRICS}` has its learning curve, `{PROVENANCE}` where it comes from and the SHA-256 "
        "of each file.\n"
    )


def _write(path: Path, record: Mapping[str, Any]) -> None:
    path.write_text(jsonl.dumps(record, indent=2) + "\n", encoding="utf-8")


# ---------------------------------------------------------------- the directory


def _check_target(target: Path, overwrite: bool) -> None:
    """Refuse to write over anything but, when asked, an earlier export and nothing else."""
    if target.exists() and not target.is_dir():
        raise SpecError(f"{target} is a file; an export is a directory. Choose another name.")
    if not target.exists() or not any(target.iterdir()):
        return
    if not overwrite:
        raise SpecError(
            f"{target} is not empty. Choose another directory, or pass overwrite=True "
            "(--overwrite) to replace an earlier export."
        )
    strange = _not_exported(target)
    if strange:
        raise SpecError(
            f"{target} holds what no export wrote ({', '.join(strange[:5])}), and shoal deletes "
            "nothing that it did not write. Choose another directory, or move that away."
        )


def _not_exported(target: Path) -> list[str]:
    """The names in a directory that its own provenance does not list."""
    try:
        record = jsonl.loads((target / PROVENANCE).read_text(encoding="utf-8"))
        names = {*record["sha256"], PROVENANCE} if record["format"] == FORMAT else set()
        known = {Path(name).parts[0] for name in names}
    except (OSError, ValueError, KeyError, TypeError):
        known = set()
    return sorted(path.name for path in target.iterdir() if path.name not in known)


@contextmanager
def _published(target: Path) -> Iterator[Path]:
    """A directory to write into, which becomes ``target`` at the end, or goes away."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.export-", dir=target.parent))
        try:
            (work / "new").mkdir()
            yield work / "new"
            (work / "mode").touch()
            mode = (work / "mode").stat().st_mode  # safetensors' own files are its user's alone
            for path in (*(work / "new").rglob("*"), work / "new"):
                if path.is_file():
                    path.chmod(mode)
                _sync(path)
            _replace(target, work / "new", work / "old")
            _sync(target.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"cannot write the export {target}: {error}. Nothing is left of it, and what was "
            "there before stays. Free space, or choose another directory."
        ) from error


def _replace(target: Path, new: Path, old: Path) -> None:
    """Put ``new`` in the place of ``target``, or leave it as it was."""
    if target.exists():
        target.rename(old)
    try:
        new.rename(target)
    except BaseException:
        if old.exists():
            old.rename(target)
        raise


def _files(directory: Path) -> dict[str, Path]:
    """All files below a directory, by their names in it."""
    found = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path for path in found}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
