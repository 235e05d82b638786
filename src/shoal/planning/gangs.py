"""Trials over several devices: what is known of them before anything is measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shoal.core.spec import DeviceSpec, Scalar
from shoal.core.technique import Technique
from shoal.planning import pipelining, replicating
from shoal.recipe import Recipe


def early(technique: Technique | None, recipe: Recipe, devices: Sequence[DeviceSpec]) -> None:
    """Refuse a pipeline or replicas that are impossible whatever the model is.

    Raises:
        PlanError: says what was asked, what there is, and the way out.
    """
    pipelining.early(technique, recipe, devices)
    replicating.early(technique, recipe, devices)


def technique_on_record(keys: Iterable[Mapping[str, Scalar]]) -> Technique | None:
    """The technique that trials with such numerics keys go on with; None for any other one."""
    known = list(keys)
    return replicating.technique_on_record(known) or pipelining.technique_on_record(known)
