"""One trial's state as another one takes it over: a generation of two trials.

    trials/0007/step-00000400.1/weights.safetensors   links to those of the source,
                                state.safetensors     trials/0002/step-00000400, and frozen
                                own.safetensors       random streams, of trial 7
                                manifest.json         hyperparameters, seed, position in the data,
                                                      of trial 7

It is a file's name for each byte of the source, and so costs next to nothing. Whoever goes on from
it builds optimizer and schedule from the new hyperparameters (``Session.resume``, warm), and takes
from the source what the optimizer keeps per parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shoal.core.errors import StorageError
from shoal.core.spec import Scalar
from shoal.runtime.saving.checkpoint import OWN, STATE, progress_record, weight_files
from shoal.runtime.saving.packing import Packer
from shoal.runtime.saving.tensorfile import row
from shoal.runtime.wire.messages import Progress
from shoal.storage.generations import Generation, Generations


@dataclass(frozen=True, slots=True, kw_only=True)
class Heir:
    """What stays a trial's own when it takes over another one's state."""

    trial: int
    hp: Mapping[str, Scalar]
    seed: int
    numerics: Mapping[str, Scalar]
    progress: Progress  # its random streams and its place in the data are what is used


def inherit(source: Generation, place: Generations, heir: Heir) -> Generation:
    """A generation of ``heir`` with the state of ``source``; durable when this returns.

    Raises:
        StorageError: the disk refuses, or the two were not at the same step.
    """
    if heir.progress.step != source.step:
        raise StorageError(
            f"trial {heir.trial} is at step {heir.progress.step} and cannot go on from "
            f"{source.path}, which is of step {source.step}."
        )
    tensors: dict[str, Tensor] = {}
    meta = _meta(source, heir, Packer(tensors, prefix="own|"))
    with place.begin(source.step) as draft:
        for name in (*weight_files(source), STATE):
            draft.link(source, name)
        draft.tensors(OWN, [row(name, tensor) for name, tensor in tensors.items()])
        return draft.commit(**meta)


def _meta(source: Generation, heir: Heir, packer: Packer) -> dict[str, Any]:
    """The source's words, but for what is the heir's."""
    found = source.manifest.meta
    own = dict(packer.pack(progress_record(heir.progress))["dict"])
    theirs = found["progress"]["dict"]
    mine = ("rng", "position", "valid")
    progress = [[key, own[key] if key in mine else value] for key, value in theirs]
    return {
        **found,
        "trial": heir.trial,
        "hp": dict(heir.hp),
        "seed": heir.seed,
        "numerics": dict(heir.numerics),
        "progress": {"dict": progress},
        "ended": False,
        "metrics": {},
        "source": found["trial"],
    }
