"""Whether what was saved of a trial is of the model, optimizer and schedule that its recipe makes.

It is not where a study goes on with another recipe (``accept_recipe``), and where a clone's
hyperparameters make something else than its parent's. That is no damage: the files are whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.core.errors import TrialError
from shoal.core.spec import Scalar
from shoal.core.units import counted
from shoal.memory.layout import TensorSpec, TrialLayout
from shoal.runtime.wire.messages import Grant, Progress, Settings
from shoal.storage.generations import Generation

_NAMED = 3
_EVERY_STEP = "each step"
_SAME_STATE = {"AdamW": "Adam"}  # a clone of the one may go on as the other


class Fit:
    """One trial, its generation, and what to say where they are not of one kind."""

    def __init__(self, generation: Generation, grant: Grant, settings: Settings) -> None:
        self._generation, self._grant, self._settings = generation, grant, settings
        self._meta = generation.manifest.meta

    def require_tensors(self, weights: Sequence[str], state: str) -> None:
        """The generation's files have the tensors of the model and the optimizer, before any is
        read.

        Raises:
            TrialError: they have not; says what was saved, and what is made.
            StorageError: the generation is damaged.
        """
        self._require_kind()
        layout = self._grant.layout
        saved = {name: shape for file in weights for name, shape in self._shapes(file).items()}
        beside = self._shapes(state)
        params = {f.spec.name: f.spec for shard in layout.shards for f in shard.param.fields}
        buffers = {f.spec.name: f.spec for f in layout.buffers.fields}
        buffered = {n: saved.get(n, beside.get(f"buffer|{n}")) for n in buffers}
        found = {**saved, **{n: shape for n, shape in buffered.items() if shape is not None}}
        if difference := _difference(found, params | buffers):
            self._refuse(difference)
        self._require_state(beside, layout)

    def _shapes(self, file_name: str) -> dict[str, Sequence[int]]:
        """What a file's tensors are, by its header."""
        with self._generation.open(file_name) as file:
            return {name: entry.shape for name, entry in file.entries.items()}

    def counts_otherwise(self, batches: int | None) -> bool:
        """Whether an epoch had another number of batches: a place in it means nothing then.

        Of data without a length, and of what an older shoal wrote, that is not known.
        """
        then = self._meta.get("batches")
        return then is not None and batches is not None and then != batches

    def _require_kind(self) -> None:
        """By the numerics keys of then and of now."""
        then, now = self._meta.get("numerics", {}), self._grant.job.numerics
        was, kind = kind_of(then), kind_of(now)
        if self._grant.warm:
            was, kind = (" + ".join(map(state_of, k.split(" + "))) for k in (was, kind))
        if was and kind and was != kind:
            self._refuse(f"it was saved with the optimizer {was}, and {kind} is made")

    def _require_state(self, beside: Mapping[str, Sequence[int]], layout: TrialLayout) -> None:
        """What the optimizer kept for each parameter has its place."""
        places = {
            f"state|{f.spec.name}|{f.spec.key}": f.spec.shape
            for shard in layout.shards
            for f in shard.state.fields
        }
        for name, shape in sorted(beside.items()):
            kind, _, rest = name.partition("|")
            if kind != "state" or places.get(name) == tuple(shape):
                continue
            param, _, key = rest.partition("|")
            made = f"of shape {places[name]}" if name in places else "no such state"
            self._refuse(
                f"its optimizer kept {key!r} of shape {tuple(shape)} for {param!r}, and the one "
                f"that is made keeps {made}"
            )

    def require_groups(self, then: Progress, now: Sequence[Mapping[str, Any]]) -> None:
        """The optimizer's groups, as ``Binding.groups`` has them, are of the same parameters.

        Raises:
            TrialError: they are not.
        """
        if self._grant.warm:  # which has the options of its own
            self._require_flags(then, now)
            return
        groups = [[sorted(group["params"]) for group in some] for some in (then.groups, now)]
        if groups[0] != groups[1]:
            was, made = (f"{len(some)} ({', '.join(map(_of, some))})" for some in groups)
            self._refuse(f"its optimizer had groups of parameters, {was}, and has {made} now")

    def require_pace(self, then: Progress, schedule: Any) -> None:
        """A schedule that there was goes by what ``schedule`` goes by, if there are both.

        Raises:
            TrialError: it does not.
        """
        if self._grant.warm or not schedule or then.schedule is None:
            return
        keys = self._meta.get("numerics", {}), self._grant.job.numerics
        paced, pace = (key.get("schedule", _EVERY_STEP) for key in keys)
        if keys[0] and paced != pace:
            self._refuse(f"its schedule was stepped after {paced}, and is after {pace} now")

    def _require_flags(self, then: Progress, now: Sequence[Mapping[str, Any]]) -> None:
        """Flags decide what an optimizer keeps: another one may miss what it has to find."""
        if not (missing := self._missing(then)):
            return
        was, made = _flags(then.groups), _flags(now)
        for name in made:
            if was.get(name) != made[name]:
                self._refuse(
                    f"it was saved with {name}={was.get(name)} in the optimizer's groups, and "
                    f"{name}={made[name]} needs {missing!r}, which was not kept then"
                )

    def _missing(self, then: Progress) -> str:
        """A kind of state that some parameter has a place for, and has saved others than that."""
        for shard in self._grant.layout.shards:
            for field in shard.state.fields:
                keys = then.stored.get(field.spec.name, ())
                if keys and field.spec.key not in keys:
                    return field.spec.key
        return ""

    def _refuse(self, difference: str) -> None:
        job, step = self._grant.job, self._generation.step
        source = self._meta.get("source", self._meta.get("trial"))
        if self._grant.warm and self._settings.varied:
            whose = f"the state of trial {source} after step {step}"
            advice = "Leave what changes that out of shoal.PBT(vary=...)."
        elif self._grant.warm:
            whose = f"the state of trial {source} after step {step}"
            advice = (
                f"Its hyperparameters are others than those of trial {source}: clone it cold "
                "(--cold, warm=False)."
            )
        else:
            whose = f"its own state of step {step}"
            advice = (
                "The recipe is another one than it trained with: put that back "
                "(accept_recipe=True, retry_failed=True goes on then), or train this one from the "
                f"start, in a study of another name or as shoal clone STUDY {job.trial} --cold. "
                "What was saved stays as it is."
            )
        raise TrialError(f"trial {job.trial} cannot go on from {whose}: {difference}. {advice}")


def kind_of(numerics: Mapping[str, Scalar]) -> str:
    """The classes of the optimizers of a numerics key, whichever implementation they use."""
    parts = str(numerics.get("optimizer", "")).split(" + ")
    return " + ".join(part.split(" ")[-1] for part in parts)


def state_of(kind: str) -> str:
    """The class whose state one keeps."""
    return _SAME_STATE.get(kind, kind)


def _flags(groups: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    ways = {"foreach", "fused", "capturable", "differentiable", "maximize", "params"}
    return {
        name: value
        for group in groups
        for name, value in group.items()
        if isinstance(value, bool) and name not in ways
    }


def _of(names: Sequence[str]) -> str:
    return counted(len(names), "parameter") + (f" from {names[0]!r} on" if names else "")


def _difference(saved: Mapping[str, Sequence[int]], made: Mapping[str, TensorSpec]) -> str:
    """What tensors of a model differ in; empty where they are of the same shapes."""
    gone, new = sorted(saved.keys() - made.keys()), sorted(made.keys() - saved.keys())
    for name in sorted(saved.keys() & made.keys()):
        if tuple(saved[name]) != made[name].shape:
            return (
                f"{name!r} was saved with the shape {tuple(saved[name])}, and the model that is "
                f"made has {made[name].shape}"
            )
    parts = [f"the model that was saved has {_some(gone)}, which the one that is made lacks"]
    parts = parts * bool(gone) + [
        f"the model that is made has {_some(new)}, which the one that was saved lacked"
    ] * bool(new)
    return "; ".join(parts)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" * (len(names) > _NAMED)
    return ", ".join(map(repr, names[:_NAMED])) + more
