"""A trial's state on disk: safetensors for tensors, JSON for the rest; never a pickle.

    trials/0003/step-00000100/weights.safetensors   the user's own names, ties once
                              state.safetensors     optimizer, random streams
                              state.json            all that is no tensor, ties, position

A directory is written under a temporary name, synced and renamed, so that one that has
its final name is whole; then older ones are removed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shoal.core.errors import TrialError
from shoal.memory.layout import TrialLayout
from shoal.memory.store import Region, state_views, views
from shoal.rng import RngState
from shoal.runtime.feed import Epoch, Position
from shoal.runtime.messages import Progress
from shoal.runtime.session import Session

WEIGHTS, STATE, META = "weights.safetensors", "state.safetensors", "state.json"
FORMAT = 1


def trial_directory(study: str | os.PathLike[str], trial: int) -> Path:
    """Where a trial's checkpoints lie."""
    return Path(study) / "trials" / f"{trial:04d}"


def latest(study: str | os.PathLike[str], trial: int) -> Path | None:
    """The newest whole checkpoint of a trial, or None."""
    found = sorted(trial_directory(study, trial).glob("step-*[0-9]"))
    return found[-1] if found else None


def write(session: Session) -> Path:
    """Write a session's state; its tensors are current in the host region.

    Returns the checkpoint's directory, which is on disk when this returns.
    """
    parent = trial_directory(session.settings.directory, session.job.trial)
    target = parent / f"step-{session.step:08d}"
    scratch = target.with_suffix(".tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    weights, ties = _weights(session)
    tensors = _stored_state(session)
    packer = _Packer(tensors)
    meta: dict[str, Any] = {
        "format": FORMAT,
        "trial": session.job.trial,
        "ties": ties,
        "extra": packer.pack(_extra_state(session.model)),
        "progress": packer.pack(_progress_record(session.progress())),
    }
    save_file(weights, scratch / WEIGHTS)
    save_file(tensors, scratch / STATE)
    meta["digests"] = {name: _digest(scratch / name) for name in (WEIGHTS, STATE)}
    (scratch / META).write_text(json.dumps(meta))
    _publish(scratch, target)
    return target


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The model's state dict, tied names included, on the CPU."""
    directory = Path(path)
    meta = _read_meta(directory)
    found = _load(directory, WEIGHTS)
    found |= {alias: found[name] for alias, name in meta["ties"].items()}
    extra: dict[str, Any] = _unpack(meta["extra"], _load(directory, STATE))
    return found | extra


def read_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """``{"model", "optimizer", "schedule", "rng", "step"}`` by parameter name."""
    directory = Path(path)
    tensors = _load(directory, STATE)
    progress = _read_progress(directory, tensors)
    state: dict[str, dict[str, Any]] = {n: dict(v) for n, v in progress.scalars.items()}
    for key, tensor in tensors.items():
        kind, _, rest = key.partition("|")
        if kind == "state":
            name, _, entry = rest.partition("|")
            if name in state:
                state[name][entry] = tensor
    return {
        "model": read_weights(path),
        "optimizer": {"state": state, "groups": [dict(g) for g in progress.groups]},
        "schedule": progress.schedule,
        "rng": progress.rng,
        "step": progress.step,
    }


def restore(path: str | os.PathLike[str], layout: TrialLayout, region: Region) -> Progress:
    """Fill a host region from a checkpoint; returns the rest of the state."""
    directory = Path(path)
    tensors = _load(directory, STATE)
    weights = _load(directory, WEIGHTS)
    for shard in layout.shards:
        for name, place in views(region.bytes, shard.param, shard.param_at).items():
            place.copy_(weights[name])
        for name, places in state_views(region.bytes, shard.state, shard.state_at).items():
            for key, place in places.items():
                if f"state|{name}|{key}" in tensors:
                    place.copy_(tensors[f"state|{name}|{key}"])
    for name, place in views(region.bytes, layout.buffers, layout.buffers_at).items():
        place.copy_(weights[name] if name in weights else tensors[f"buffer|{name}"])
    return _read_progress(directory, tensors)


def _weights(session: Session) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The state dict from the host region, ties once; and alias -> stored name."""
    stored = _region_tensors(session)
    names = {id(p): n for n, p in session.model.named_parameters()}
    names |= {id(b): n for n, b in session.model.named_buffers()}
    weights: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    for key, value in session.model.state_dict(keep_vars=True).items():
        name = names.get(id(value))
        if name is None:
            continue  # a module's extra state
        if name != key:
            ties[key] = name
        weights[name] = stored[name].contiguous()
    return weights, ties


def _extra_state(model: nn.Module) -> dict[str, Any]:
    """What modules add to their state dict beside parameters and buffers."""
    state = model.state_dict(keep_vars=True)
    return {key: value for key, value in state.items() if key.endswith("_extra_state")}


def check_rules(session: Session) -> None:
    """Raise now, and not after the last step, for state that no checkpoint could hold."""
    packer = _Packer({})
    packer.pack(_extra_state(session.model))
    packer.pack(_progress_record(session.progress()))


def _digest(path: Path) -> str:
    return xxhash.xxh3_128_hexdigest(path.read_bytes())


def _load(directory: Path, name: str) -> dict[str, Tensor]:
    """The tensors of one file, whose bytes are those that were written.

    Raises:
        TrialError: they are not.
    """
    expected, found = _read_meta(directory)["digests"][name], _digest(directory / name)
    if found != expected:
        raise TrialError(
            f"{directory / name} is damaged: its digest is {found}, {expected} was written. "
            "Restore the file from a copy, or train the trial again."
        )
    return load_file(directory / name)


def _region_tensors(session: Session) -> dict[str, Tensor]:
    layout, flat = session.layout, session.region.bytes
    found = views(flat, layout.buffers, layout.buffers_at)
    for shard in layout.shards:
        found |= views(flat, shard.param, shard.param_at)
    return found


def _stored_state(session: Session) -> dict[str, Tensor]:
    """Optimizer state of the parameters that have some, and buffers no state dict keeps."""
    flat = session.region.bytes
    result: dict[str, Tensor] = {}
    for shard in session.layout.shards:
        for name, places in state_views(flat, shard.state, shard.state_at).items():
            made = session.binding.stateful.get(name, set())
            result |= {f"state|{name}|{k}": places[k].contiguous() for k in made}
    kept = set(session.model.state_dict())
    buffers = views(flat, session.layout.buffers, session.layout.buffers_at)
    result |= {f"buffer|{n}": b.contiguous() for n, b in buffers.items() if n not in kept}
    return result


def _progress_record(progress: Progress) -> dict[str, Any]:
    position = progress.position
    return {
        "step": progress.step,
        "seconds": progress.seconds,
        "rng": progress.rng,
        "epoch": position.epoch,
        "now": _epoch_record(position.now),
        "past": [_epoch_record(epoch) for epoch in position.past],
        "generators": position.generators,
        "scalars": progress.scalars,
        "stored": progress.stored,
        "groups": list(progress.groups),
        "schedule": progress.schedule,
    }


def _epoch_record(epoch: Epoch) -> dict[str, Any]:
    return {"batches": epoch.batches, "rng": epoch.rng, "draws": epoch.draws}


def _read_progress(directory: Path, tensors: Mapping[str, Tensor]) -> Progress:
    record = _unpack(_read_meta(directory)["progress"], tensors)
    return Progress(
        step=record["step"],
        seconds=record["seconds"],
        rng=record["rng"],
        position=Position(
            epoch=record["epoch"],
            now=Epoch(**record["now"]),
            generators=record["generators"],
            past=tuple(Epoch(**epoch) for epoch in record["past"]),
        ),
        scalars=record["scalars"],
        stored=record["stored"],
        groups=record["groups"],
        schedule=record["schedule"],
    )


def _read_meta(directory: Path) -> dict[str, Any]:
    meta: dict[str, Any] = json.loads((directory / META).read_text())
    if meta.get("format") != FORMAT:
        raise TrialError(
            f"{directory} has format {meta.get('format')!r}; this version of shoal reads format "
            f"{FORMAT}. Open it with the version that wrote it."
        )
    return meta


class _Packer:
    """Containers as JSON; tensors go beside it under a number. Types survive."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def pack(self, value: Any) -> Any:
        """``value`` as JSON-ready containers.

        Raises:
            TrialError: a type that has no rule.
        """
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, Tensor):
            return {"tensor": self._keep(value)}
        if isinstance(value, RngState):
            return {"rng": self._rng(value)}
        if isinstance(value, tuple | list):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [self.pack(item) for item in value]}
        if isinstance(value, Mapping):
            kind = "counter" if isinstance(value, Counter) else "dict"
            return {kind: [[self.pack(k), self.pack(v)] for k, v in value.items()]}
        raise TrialError(
            f"a checkpoint has no rule for {type(value).__name__} in the state of the optimizer "
            "or schedule. Use numbers, strings, tensors and containers of them."
        )

    def _keep(self, tensor: Tensor) -> str:
        key = f"packed|{len(self._tensors)}"
        self._tensors[key] = tensor.detach().cpu().contiguous().clone()
        return key

    def _rng(self, state: RngState) -> dict[str, Any]:
        algorithm, keys, *rest = state.numpy
        return {
            "torch": self._keep(state.torch),
            "cuda": None if state.cuda is None else self._keep(state.cuda),
            "python": self.pack(state.python),
            "numpy": [algorithm, self._keep(torch.from_numpy(keys.astype(np.int64))), *rest],
        }


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "rng":
        return _unpack_rng(content, tensors)
    if kind in ("tuple", "list"):
        items = [_unpack(item, tensors) for item in content]
        return tuple(items) if kind == "tuple" else items
    pairs = {_unpack(k, tensors): _unpack(v, tensors) for k, v in content}
    return Counter(pairs) if kind == "counter" else pairs


def _unpack_rng(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> RngState:
    algorithm, keys, *rest = record["numpy"]
    return RngState(
        torch=tensors[record["torch"]],
        python=_unpack(record["python"], tensors),
        numpy=(algorithm, tensors[keys].numpy().astype(np.uint32), *rest),
        cuda=None if record["cuda"] is None else tensors[record["cuda"]],
    )


def _publish(scratch: Path, target: Path) -> None:
    """Make a finished directory durable under its name, then remove older ones."""
    for path in scratch.iterdir():
        _sync(path)
    _sync(scratch)
    shutil.rmtree(target, ignore_errors=True)
    scratch.rename(target)
    _sync(target.parent)
    for old in target.parent.glob("step-*"):
        if old.name < target.name:
            shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_into(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """``model`` with a checkpoint's weights, in eval mode."""
    model.load_state_dict(read_weights(path))
    return model.eval()
