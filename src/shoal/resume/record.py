"""What was asked for, as text that lasts: a study's record, of its recipe and its trials.

The record is what ``study.json`` holds. What runs it, devices and memory, is not in it:
that may be different each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from shoal.core.errors import SpecError
from shoal.core.spec import Scalar, TrialSpec
from shoal.resume.recipe import RecipeRecord, describe_recipe

Origin = Literal["asked", "extended", "cloned", "searched"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """One trial, and why there is one.

    ``asked``: the study's file asks for it; ``searched``: its sampler came to it from the
    results of others; ``extended``, ``cloned``: it was added later, by hand. ``parent`` is the
    trial it is a clone of, ``warm`` whether it began from that one's state.
    """

    number: int
    hp: Mapping[str, Scalar]
    seed: int
    origin: Origin = "asked"
    parent: int | None = None
    warm: bool = False

    def to_spec(self) -> TrialSpec:
        """What the planner and the workers are told of it."""
        return TrialSpec(
            number=self.number, hp=self.hp, seed=self.seed, parent=self.parent, warm=self.warm
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """The trials that one order added, and when, by the wall clock.

    What was ordered is what they are: so many ``extended`` ones, or a clone of a trial.
    """

    time: float
    trials: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecord:
    """What a study was asked for; exactly one of ``epochs`` and ``steps`` is set.

    ``checkpoint`` is what is saved and what is kept, by name; it changes no bit.
    ``additions`` are what an order that is repeated is held against, the oldest first.
    ``search`` is which sampler and pruner, where trials depend on results; else empty.
    ``fuse`` is what was asked of arrays last, as ``planning.Wish``; None: nothing was.
    ``older`` are the recipes that trials were trained with before, the oldest first: a trial's
    events name one by its number among these, and the recipe of now by ``recipe_number``.
    """

    name: str
    space: str
    trials: tuple[TrialRecord, ...]
    epochs: int | None
    steps: int | None
    eval_every: int | None
    metric: str
    mode: str
    seed: int
    recipe: RecipeRecord
    checkpoint: Mapping[str, Scalar] = field(default_factory=dict)
    additions: tuple[Addition, ...] = ()
    search: Mapping[str, str] = field(default_factory=dict)
    fuse: str | int | None = None
    older: tuple[RecipeRecord, ...] = ()

    @property
    def recipe_number(self) -> int:
        """How many recipes trials were trained with before this one."""
        return len(self.older)

    @property
    def recipes(self) -> tuple[RecipeRecord, ...]:
        """All of them by number, that of now the last."""
        return (*self.older, self.recipe)

    @property
    def length(self) -> int:
        """How long a trial trains, in ``unit``."""
        length = self.epochs if self.steps is None else self.steps
        assert length is not None
        return length

    @property
    def unit(self) -> str:
        """What its length is counted in."""
        return "epochs" if self.steps is None else "steps"

    @property
    def is_adaptive(self) -> bool:
        """Whether a sampler chose trials by the results of others."""
        return self.search.get("sampler", "grid") not in ("grid", "random")

    @property
    def sampled(self) -> int:
        """How many trials are points of the space: all but the clones."""
        return sum(trial.origin != "cloned" for trial in self.trials)

    def trial(self, number: int) -> TrialRecord:
        """The trial of that number.

        Raises:
            SpecError: there is none; names those there are.
        """
        for trial in self.trials:
            if trial.number == number:
                return trial
        numbers = ", ".join(str(trial.number) for trial in self.trials[:20])
        raise SpecError(
            f"study {self.name!r} has no trial {number}; it has {len(self.trials)}: {numbers}"
            f"{', ...' if len(self.trials) > 20 else ''}."
        )


class Asked(Protocol):
    """What a record is made from: a ``shoal.Study``."""

    @property
    def name(self) -> str: ...
    @property
    def recipe(self) -> Any: ...
    @property
    def space(self) -> Mapping[str, Any]: ...
    @property
    def trials(self) -> Sequence[TrialSpec]: ...
    @property
    def epochs(self) -> int | None: ...
    @property
    def steps(self) -> int | None: ...
    @property
    def eval_every(self) -> int | None: ...
    @property
    def metric(self) -> str: ...
    @property
    def mode(self) -> str: ...
    @property
    def seed(self) -> int: ...


def describe_study(
    study: Asked,
    checkpoint: Mapping[str, Scalar] | None = None,
    search: Mapping[str, str] | None = None,
    fuse: str | int | None = None,
) -> StudyRecord:
    """The record of a study as it is asked for now."""
    return StudyRecord(
        name=study.name,
        space=", ".join(f"{name}={entry!r}" for name, entry in study.space.items()),
        trials=tuple(map(_record_trial, study.trials)),
        epochs=study.epochs,
        steps=study.steps,
        eval_every=study.eval_every,
        metric=study.metric,
        mode=study.mode,
        seed=study.seed,
        recipe=describe_recipe(study.recipe),
        checkpoint=dict(checkpoint or {}),
        search=dict(search or {}),
        fuse=fuse,
    )


def _record_trial(trial: TrialSpec) -> TrialRecord:
    return TrialRecord(
        number=trial.number,
        hp=dict(trial.hp),
        seed=trial.seed,
        origin="asked" if trial.parent is None else "cloned",
        parent=trial.parent,
        warm=trial.warm,
    )
