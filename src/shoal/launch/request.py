"""What is run, and how it is to be run this time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shoal.control import CloneTrial, ExtendTrials
from shoal.core.aim import Aim
from shoal.core.errors import SpecError
from shoal.core.plan import Plan
from shoal.core.spec import TrialSpec
from shoal.core.technique import Technique
from shoal.core.values import flag, items, optional_flag, whole
from shoal.execution.run import Limits
from shoal.hardware import Hardware
from shoal.launch.growing import Order
from shoal.launch.policy import CheckpointPolicy
from shoal.launch.sinks import Callback
from shoal.planning import Wish
from shoal.recipes.recipe import Recipe
from shoal.runtime.wire.messages import Settings
from shoal.search.wanted import Wanted


class Asked(Protocol):
    """What is run: a ``shoal.Study``."""

    name: str
    recipe: Recipe
    space: Any
    trials: tuple[TrialSpec, ...]
    epochs: int | None
    steps: int | None
    eval_every: int | None
    metric: str
    mode: str
    seed: int
    sampler: Any
    search: Wanted
    directory: Path
    source: str
    arguments: tuple[str, ...]
    policy: CheckpointPolicy

    def limits(self) -> Limits: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """How a study is to be run this time; ``extend`` by so many trials, or as ordered."""

    hardware: Hardware
    technique: Technique | None = None
    callbacks: Sequence[Callback] = ()
    overwrite: bool = False
    resume: bool | None = None
    extend: int | ExtendTrials = 0
    clones: Sequence[CloneTrial] = ()
    retry_failed: bool = False
    accept_numerics: bool = False
    accept_recipe: bool = False
    timeline: bool = True
    fuse: Wish = None
    plan: Plan | None = None  # to be followed
    strict: bool = False  # deterministic kernels alone
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        flags = ("overwrite", "retry_failed", "accept_numerics", "accept_recipe", "timeline")
        for name in flags:
            object.__setattr__(self, name, flag(name, getattr(self, name)))
        object.__setattr__(self, "resume", optional_flag("resume", self.resume))
        for name, example, is_one in (
            ("callbacks", "callbacks=[print]", callable),
            ("clones", "clones=[CloneTrial(...)]", _is_clone),
        ):
            object.__setattr__(self, name, _all(name, getattr(self, name), example, is_one))
        if not isinstance(self.extend, ExtendTrials):
            object.__setattr__(self, "extend", whole("extend", self.extend, 0))

    @property
    def orders(self) -> Sequence[Order]:
        """The trials to add beside the study's own.

        Raises:
            SpecError: a number of trials that cannot be meant.
        """
        extend = self.extend
        if isinstance(extend, int):
            extensions = [ExtendTrials(trials=extend)] if extend else []
        else:
            extensions = [extend]
        return [*extensions, *self.clones]


def _is_clone(value: object) -> bool:
    return isinstance(value, CloneTrial)


def _all(
    name: str, values: object, example: str, is_one: Callable[[object], bool]
) -> tuple[Any, ...]:
    found = items(name, values, example)
    wrong = [value for value in found if not is_one(value)]
    if wrong:
        raise SpecError(f"{name} is a list as in {example}, and {wrong[0]!r} is no such item.")
    return found


def settings_of(study: Asked, *, timeline: bool) -> Settings:
    """What every worker is told of a study."""
    policy = study.policy
    return Settings(
        steps=study.steps,
        epochs=study.epochs,
        eval_every=study.eval_every,
        directory=str(study.directory.resolve()),
        checkpoint_every_s=float(policy.every_s),
        timeline=timeline,
        keep=policy.keep,
        keep_finished="weights" if policy.keep_finished == "weights" else "all",
        varied=study.search.varied,
        metric=study.metric,
        best=Aim(study.metric, study.mode) if policy.keep_best else None,
    )
