"""Trials over several devices: what is known of them before anything is measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shoal.core.errors import PlanError
from shoal.core.spec import DeviceSpec, Scalar, shared_gpus
from shoal.core.technique import DataParallel, Pipelined, Technique
from shoal.planning import pipelining, replicating
from shoal.recipes.recipe import Recipe


def early(technique: Technique | None, recipe: Recipe, devices: Sequence[DeviceSpec]) -> None:
    """Refuse a pipeline or replicas that are impossible whatever the model is.

    Raises:
        PlanError: says what was asked, what there is, and the way out.
    """
    if isinstance(technique, (DataParallel, Pipelined)) and (gpus := shared_gpus(devices)):
        what = "the stages of a pipeline" if isinstance(technique, Pipelined) else "replicas"
        raise PlanError(
            f"{what} over devices that share a GPU gain nothing, and several of these are parts "
            f"of {' and of '.join(gpus)}: {', '.join(device.name for device in devices)}. Name "
            "each GPU once, or train each trial on one device."
        )
    pipelining.early(technique, recipe, devices)
    replicating.early(technique, recipe, devices)


def technique_on_record(keys: Iterable[Mapping[str, Scalar]]) -> Technique | None:
    """The technique that trials with such numerics keys go on with; None for any other one."""
    known = list(keys)
    return replicating.technique_on_record(known) or pipelining.technique_on_record(known)
