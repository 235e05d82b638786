"""Training alone, in plain PyTorch: the definitions that trials of a study are held against.

``plain_loop`` is that of a trial alone, ``array_loop`` of one in its slot of an array,
``plain_population`` of one that went on from others' states. ``shoal.testing`` has them all.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from shoal.alone import Asked, PlainResult, PlainSource, Training, borrowed_process
from shoal.core.errors import SpecError
from shoal.core.seats import Epoch
from shoal.core.spec import HyperParameters, PassKind, Place
from shoal.fusion import Inherited, SlotPlace, train_in_slot
from shoal.pystate import ambient
from shoal.recipes.pieces import in_pieces
from shoal.recipes.recipe import HP, Recipe
from shoal.recipes.steppers import WhichWeights, copy_model, copy_state
from shoal.rng import seed_all


def plain_loop(
    recipe: Recipe,
    hp: HP,
    seed: int,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    threads: int = 1,
    device: str | torch.device = "cpu",
    optimizer: Place = "device",
    eval_every: int | None = None,
    on_nonfinite: Literal["fail", "ignore"] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    inherits: Mapping[int, PlainSource] = MappingProxyType({}),
    weights: WhichWeights = "newest",
    pieces: int = 1,
    replicas: int = 1,
    sharded: bool = False,
    copies: int = 1,
    after_step: Callable[[int, nn.Module], None] | None = None,
) -> PlainResult:
    """Train one model alone, as anyone would: what a trial of a study must equal bit for bit.

    Ends after ``epochs``, or after ``steps`` optimizer steps, in the middle of an epoch if
    need be; no batch is fetched after the last step. Evaluates every ``eval_every`` steps,
    or after each epoch, and at the end. ``optimizer="host"`` steps on copies in host
    memory, which off a GPU is the same thing. ``on_nonfinite`` overrides the recipe's.
    ``inherits`` says after which steps it goes on from another training's state, with other
    hyperparameters, as a trial of a population does: see ``plain_population``.
    ``weights`` are what gradients are computed with: see ``plain_2bw_loop``. ``pieces`` is how
    many micro-batches of equal rows each batch is cut into. ``replicas`` and ``sharded`` are
    those of ``plain_data_parallel_loop``, ``copies`` is the width of ``plain_wide_loop``.
    ``after_step`` is called with the number of each step, from 1, and the model, which it must not
    change.
    The caller's random streams and thread count are put back.

    Raises:
        SpecError: neither or both of ``steps`` and ``epochs``, or no training data.
        TrialError: a loss is not finite and the recipe does not ignore it.
    """
    _require_one_end(steps, epochs)
    where = torch.device(device)
    if type(copies) is not int or copies < 1:
        raise SpecError(f"a pipeline has 1 copy or more, got {copies!r}.")
    if recipe.step is not None and (max(pieces, replicas, copies) > 1 or weights != "newest"):
        raise SpecError("a step of one's own takes whole batches and the newest weights, alone.")
    asked = Asked(
        recipe=in_pieces(recipe, pieces),
        seed=seed,
        steps=steps,
        epochs=epochs,
        eval_every=eval_every,
        device=where,
        place=optimizer if where.type != "cpu" else "device",
        ignores_nonfinite=(on_nonfinite or recipe.on_nonfinite) == "ignore",
        clock=clock,
        inherits=inherits,
        weights=weights,
        replicas=replicas,
        sharded=sharded,
        copies=copies,
        after_step=after_step,
    )
    with borrowed_process(threads, where):
        seed_all(seed)
        training = Training(asked, HyperParameters(hp))
        training.run()
        return training.result()


def array_loop(
    recipe: Recipe,
    hp: HP,
    seed: int,
    *,
    slot: int,
    width: int,
    kind: PassKind = "eager",
    steps: int | None = None,
    epochs: int | None = None,
    threads: int = 1,
    device: str | torch.device = "cpu",
    eval_every: int | None = None,
    inherits: Mapping[int, PlainSource] = MappingProxyType({}),
    later: Sequence[tuple[int, ...]] = (),
    any_layout: bool = False,
    one_base: bool = False,
    looped: Sequence[str] = (),
) -> PlainResult:
    """The plain loop of a trial that trained in an array: in its slot, with nobody beside it.

    Its bits depend on the slot and the width, and on no neighbour. They are those of
    ``plain_loop`` but for the rounding of other kernels. ``kind`` is how the array's passes run;
    traced ones have the bits of eager ones. ``inherits`` is as there. ``later`` has the seats that
    it got on the way: after which step (and its evaluation) which slot of an array of which width;
    of width 1 it trains by itself. ``any_layout``: the array was one of trials whose batches vary
    in length, so that those of every length run stacked, and not of the first one's alone.
    ``one_base``: what is frozen was there once for all of them. ``looped``: the parts of the model
    that ran slot by slot since their code decides by data, as ``array_looped`` of the numerics key
    names them.

    Raises:
        Declined: the trial can be in no array.
    """
    _require_one_end(steps, epochs)
    where = torch.device(device)
    ends: dict[str, Any] = {"steps": steps, "epochs": epochs, "eval_every": eval_every}
    ends["inherits"] = {
        step: Inherited(
            source.hp, functools.partial(_take_over, source.result), source.result.kept
        )
        for step, source in inherits.items()
    }
    with borrowed_process(threads, where):
        seats = tuple(Epoch(seat[0], seat[1], seat[2]) for seat in later)
        place = SlotPlace(slot, width, kind, seats, any_layout, one_base, looped)
        trained = train_in_slot(recipe, hp, seed, place, device=where, **ends)
    member, history = trained.member, trained.history
    return PlainResult(
        model=member.module,
        optimizer=member.optimizer,
        schedule=member.schedule,
        parameters=dict(member.module.named_parameters()),
        losses=trained.losses,
        history=tuple({"seconds": 0.0, **row} for row in history),
        metrics=history[-1]["metrics"],
        rng=member.rng,
        step=len(trained.losses),
        kept=trained.kept,
    )


def _take_over(source: PlainResult, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give a trial that was built anew what another one has learnt."""
    copy_model(source.model, model)
    own = dict(model.named_parameters())
    copy_state(source.optimizer, source.parameters, optimizer, own)


@dataclass(frozen=True, kw_only=True)
class PlainTrial:
    """A trial of a population: how it began, and by step from which trial it went on, with what.

    ``inherits`` is what ``TrialResult.inherited`` lists; ``place`` the slot and width of the
    array that it trained in, if it did, ``kind`` how that array's passes ran, ``later`` the
    seats that it got on the way, ``any_layout`` which batches ran stacked, ``one_base`` whether
    what is frozen was there once, and ``looped`` what ran slot by slot (``array_loop``).
    """

    hp: HP
    seed: int
    inherits: Mapping[int, tuple[int, HP]] = field(default_factory=dict)
    place: tuple[int, int] | None = None
    kind: PassKind = "eager"
    later: Sequence[tuple[int, int, int]] = ()
    any_layout: bool = False
    one_base: bool = False
    looped: Sequence[str] = ()


_NOT_IN_ARRAYS = (
    *("optimizer", "on_nonfinite", "clock", "weights", "pieces", "replicas", "sharded"),
    *("after_step", "copies"),
)
"""Options of ``plain_loop`` alone."""


def plain_population(
    recipe: Recipe, trials: Mapping[int, PlainTrial], number: int, **options: Any
) -> PlainResult:
    """Train one trial of a population with plain loops: what a study's must equal bit for bit.

    Each trial that it went on from is trained alone up to that step, in the same way; nothing is
    shared but trainings that are wanted twice. ``options`` are those of ``plain_loop``. Those that
    trained in arrays are trained by ``array_loop``, each in its slot.
    """
    ends = {name: options.pop(name) for name in ("steps", "epochs") if name in options}
    known: dict[tuple[int, int], PlainResult] = {}

    def until(trial: int, step: int) -> PlainResult:
        if (trial, step) not in known:
            known[trial, step] = run(trial, step, steps=step)
        return known[trial, step]

    def run(trial: int, before: float, **end: Any) -> PlainResult:
        asked = trials[trial]
        inherits = {
            step: PlainSource(result=until(source, step), hp=HyperParameters(hp))
            for step, (source, hp) in sorted(asked.inherits.items())
            if step < before
        }
        told = {**options, **end, "inherits": inherits}
        here.begin()
        if asked.place is None:
            return plain_loop(recipe, asked.hp, asked.seed, **told)
        told = {name: value for name, value in told.items() if name not in _NOT_IN_ARRAYS}
        slot, width = asked.place
        told |= {"kind": asked.kind, "later": asked.later, "any_layout": asked.any_layout}
        told |= {"one_base": asked.one_base, "looped": asked.looped}
        return array_loop(recipe, asked.hp, asked.seed, slot=slot, width=width, **told)

    with ambient.watching(recipe) as here:  # each has what its code keeps in globals for itself
        return run(number, math.inf, **ends)


def plain_2bw_loop(
    recipe: Recipe, hp: HP, seed: int, *, predict: bool = False, **options: Any
) -> PlainResult:
    """The rule of 2BW in one process: W(t+1) = W(t) - step(grad f(W(max(t-1, 0)))).

    What a pipeline with ``schedule="2bw"`` must equal bit for bit. ``predict`` computes the
    gradients at the guess W(t-1) + (W(t-1) - W(t-2)) instead, where there has been a step.
    Evaluated are the newest weights. ``options`` are those of ``plain_loop``.
    """
    weights: WhichWeights = "one step old, guessed" if predict else "one step old"
    return plain_loop(recipe, hp, seed, weights=weights, **options)


def plain_data_parallel_loop(
    recipe: Recipe, hp: HP, seed: int, *, width: int, sharded: bool = False, **options: Any
) -> PlainResult:
    """The rule of data-parallel training in one process, replica after replica.

    What a trial with ``technique=shoal.DataParallel(width)`` must equal bit for bit, and
    ``plain_loop`` to rounding where no row's result depends on other rows, or on random numbers:
    see ``shoal.replicas``. ``sharded`` adds up as FSDP2 does, which is another order where
    gradients are clipped or accumulated. ``options`` are those of ``plain_loop``.
    """
    return plain_loop(recipe, hp, seed, replicas=width, sharded=sharded, **options)


def plain_wide_loop(
    recipe: Recipe, hp: HP, seed: int, *, width: int, **options: Any
) -> PlainResult:
    """The rule of copies of a pipeline in one process: whose gradients are added to whose.

    What a trial with ``technique=shoal.Pipelined(width=width)`` must equal bit for bit, and
    ``plain_loop`` but for the rounding of that sum. Copy c takes the micro-batches c, c + width,
    ... of a step and adds up their gradients; the copies' sums are added in their order. Random
    numbers are those of ``plain_loop``. With ``plain_2bw_loop(..., copies=width)`` so are the
    gradients of "2bw". ``options`` are those of ``plain_loop``.
    """
    return plain_loop(recipe, hp, seed, copies=width, **options)


def _require_one_end(steps: int | None, epochs: int | None) -> None:
    if (steps is None) == (epochs is None):
        raise SpecError(f"give steps or epochs, one of them; got steps={steps}, epochs={epochs}.")
    if (steps or epochs or 0) < 1:
        raise SpecError(f"train at least one step, got steps={steps}, epochs={epochs}.")
