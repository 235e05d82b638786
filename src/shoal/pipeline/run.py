"""Train one model over several processes, one stage in each."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from shoal.core.errors import PlanError, SpecError
from shoal.core.spec import Scalar
from shoal.core.technique import Schedule
from shoal.kernels import rounding
from shoal.pipeline.build import Training
from shoal.pipeline.launched import device_of_group, is_launched, run_launched
from shoal.pipeline.meeting import DeviceKind
from shoal.pipeline.processes import HANG_S, StageProcesses
from shoal.pipeline.schedule import Pipeline
from shoal.pipeline.stage import Ran
from shoal.pipeline.train import Part, train_stage
from shoal.pipeline.wide import called, mean_in_order
from shoal.program.ir import Program
from shoal.recipes.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a training over several stages ended with.

    ``losses`` has one float per optimizer step, the mean over its micro-batches. ``state`` has
    the layout of ``TrialResult.load_state()``: everything by parameter name. ``ran`` says when
    each stage of each copy computed what, ``most_in_flight`` how many micro-batches it held
    activations of. ``carried`` says which way messages went, and why where another was to be
    expected.
    """

    losses: tuple[float, ...]
    state: Mapping[str, Any]
    pipeline: Pipeline
    program: Program
    ran: tuple[list[Ran], ...]
    most_in_flight: tuple[int, ...]
    carried: str


def run_stages(
    recipe: Recipe,
    hp: Mapping[str, Scalar],
    seed: int,
    *,
    steps: int,
    stages: int,
    schedule: Schedule = "flush",
    cuts: tuple[int, ...] | None = None,
    recompute: bool = False,
    lag: int = 0,
    predict: bool = False,
    width: int = 1,
    draws: bool | None = None,
    foretell: bool = True,
    threads: int = 1,
    device: DeviceKind | None = None,
    direct: bool | None = None,
    hang_s: float = HANG_S,
    processes: StageProcesses | None = None,
) -> Trained:
    """Train a recipe for ``steps`` optimizer steps, its model in ``stages`` processes.

    The micro-batches of a step are the recipe's ``accumulate`` batches. Every schedule but "2bw"
    ends on the bits of ``shoal.testing.plain_loop``, that one on those of
    ``shoal.testing.plain_2bw_loop``; with ``predict`` it computes with a guess of the weights that
    its gradients will meet. ``width`` copies of the pipeline share the micro-batches of each step,
    and end on the bits of the same loop with ``copies=width``. ``cuts`` are the layers of the
    model's chain at which the later stages begin; None for the quickest slowest stage, by
    measurement. ``recompute`` runs forwards again rather than keep what they save. ``draws`` says
    whether the model draws random numbers; None to find out on the first batch; with ``foretell``
    the first stage draws ahead what later ones will draw, where that can be done, and forwards
    overlap. ``processes`` are kept for the next run.
    Nothing is evaluated. In a process that torchrun started, or that is in a group of gloo's or
    NCCL's, the stages are the group's processes: each calls this, and each gets the result.

    Processes that it starts get the recipe as cloudpickle sends it, and not what a study sends
    beside that: your other modules hold there what their import makes, and no
    ``config.WIDTH = 128``, and what your file put into other modules (``F.gelu = mine``) is not
    there. Do such things inside the recipe's functions, run a study, or have ``torchrun`` start
    the ranks, each of which runs your file.

    ``device`` is "cpu" or "cuda": rank by rank the GPUs of each machine, in turn where there are
    fewer; None for "cuda" in a group of NCCL's alone, else "cpu". With ``direct`` what lies on a
    device goes to the other device without the host: None for that on GPUs. It needs a GPU for
    each rank, and is checked before the first step; where it cannot be, messages go through host
    memory, ``Trained.carried`` says why, and stage 0 warns.

    Raises:
        SpecError: fewer micro-batches than the schedule needs, more stages than there are
            processes or another number than were started, cuts that make another number of
            stages, no such device.
        PlanError: the model cannot be cut so.
        TrialError: a loss is not finite, or data and model turned out otherwise than at first.
        WorkerError: a stage died, or has stood still for ``hang_s`` seconds; none is left then.
    """
    training = Training(
        recipe=recipe,
        hp=dict(hp),
        seed=seed,
        steps=steps,
        stages=stages,
        schedule=schedule,
        cuts=cuts,
        recompute=recompute,
        lag=lag,
        predict=predict,
        width=width,
        draws=draws,
        foretell=foretell,
        threads=threads,
        device=device or device_of_group(),
        direct=direct,
    )
    _require_possible(training)
    work, world = functools.partial(train_stage, training=training), stages * width
    if processes is None and is_launched():
        return _joined(run_launched(work, world, hang_s=hang_s), stages)
    with ExitStack() as stack:
        crew = processes or stack.enter_context(StageProcesses(world))
        name = functools.partial(called, stages=stages, width=width)
        return _joined(crew.run(work, world, hang_s=hang_s, name=name), stages)


def _require_possible(training: Training) -> None:
    """Refuse what can be seen to be impossible before a process is started."""
    if training.steps < 1:
        raise SpecError(f"train at least one step, got steps={training.steps}.")
    _require_device(training.device)
    Pipeline(
        schedule=training.schedule,
        stages=training.stages,
        groups=(training.recipe.accumulate,),
        lag=training.lag,
        width=training.width,
    )
    if training.cuts is not None and len(training.cuts) != training.stages - 1:
        raise SpecError(
            f"{training.stages} stages need {training.stages - 1} cuts, got "
            f"{len(training.cuts)}: {training.cuts}."
        )
    if training.predict and training.schedule != "2bw":
        raise SpecError(
            f"predict=True guesses the weights that stale gradients will meet; those of "
            f"{training.schedule!r} are not stale. Leave it out, or use schedule='2bw'."
        )
    if training.recipe.precision == rounding.NAME:
        raise PlanError(
            f"precision={rounding.NAME!r} cannot be pipelined: its steps round weights by chance, "
            "which no test holds to the plain loop over stages yet. Use 'bf16' or 'fp32'."
        )


def _require_device(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise SpecError(f"stages train on device='cpu' or 'cuda', got {device!r}.")
    if device == "cuda" and not torch.cuda.is_available():
        raise SpecError(
            "stages were to train on device='cuda', and torch sees no CUDA device in this "
            "process. Use device='cpu', or look at CUDA_VISIBLE_DEVICES, and at torch's version."
        )


def _joined(all_parts: list[Part], stages: int) -> Trained:
    """The parts of all stages as one state: those of copy 0, all copies having the same."""
    parts, ends = all_parts[:stages], all_parts[stages - 1 :: stages]
    first = parts[0]
    last = ends[(first.pipeline.groups[-1] - 1) % len(ends)]  # it had the last micro-batch
    each = zip(*(part.losses for part in ends), strict=True)
    losses = tuple(map(mean_in_order, each))
    state = {
        "model": {name: tensor for part in parts for name, tensor in part.model.items()},
        "optimizer": {
            "state": {name: entry for part in parts for name, entry in part.optimizer.items()},
            "groups": _groups(parts),
        },
        "schedule": first.schedule,
        "rng": (last if last.pipeline.draws else first).rng,
        "step": len(losses),
    }
    return Trained(
        losses=losses,
        state=state,
        pipeline=first.pipeline,
        program=first.program,
        ran=tuple(part.ran for part in all_parts),
        most_in_flight=tuple(part.most_in_flight for part in all_parts),
        carried=first.carried,
    )


def _groups(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """The optimizer's groups, each with the options of a stage that has stepped it."""
    return [
        next((p.groups[i] for p in parts if not p.model.keys().isdisjoint(group["params"])), group)
        for i, group in enumerate(parts[0].groups)
    ]
