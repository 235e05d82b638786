"""What of a trial decides what its steps cost: equal for trials that are measured once."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from shoal.core.arraykeys import NO_BASE
from shoal.core.errors import ShoalError
from shoal.core.reads import Reads
from shoal.core.spec import HyperParameters, TrialSpec
from shoal.frames import own_traceback, user_line
from shoal.fusion import Signature, signature_of
from shoal.fusion.effects.settings import configuration
from shoal.fusion.graphs.constants import constants_of
from shoal.fusion.matching.lengths import LOOKED_AT, kind_of_all
from shoal.fusion.matching.signature import kind_of
from shoal.pystate import ambient
from shoal.pystate.arriving import left_as_imported
from shoal.recipes.bound import LimitOfTrial, OfTrial, bound
from shoal.recipes.habits import habits_of
from shoal.recipes.optimizers import build_optimizer_of
from shoal.recipes.recipe import Batch, Recipe, build_model, epoch_length, read_data
from shoal.recipes.recipechecks import check_loss
from shoal.recipes.schedules import require_measured
from shoal.recipes.several import each_kind, members_of
from shoal.rng import seed_all
from shoal.runtime.measuring.bases import Bases, frozen_bits, frozen_size
from shoal.runtime.measuring.firstbatches import first_batches
from shoal.runtime.measuring.paces import paces_of
from shoal.runtime.measuring.unread import Code, Reading, read_schedule
from shoal.runtime.saving.fitting import state_of
from shoal.runtime.wire.messages import Describe, Described, Made, Noticed

_WITH_MOMENTS = (torch.optim.Adam, torch.optim.AdamW)
"""Optimizers that keep two tensors for each parameter."""

_KEEP_MORE = ("amsgrad", "centered", "momentum")
"""Options of torch's optimizers with which they keep more state."""

_RATE = re.compile(r"(Dropout\w*\()p=([\d.e-]+)")


def describe(recipe: Recipe, order: Describe, note: Callable[[int | None], None]) -> Described:
    """The answer to Describe; ``note`` is called with the trial whose code runs."""
    found: dict[int, _One] = {}
    errors: dict[int, str] = {}
    cause: Exception | None = None
    code, bases = Code(recipe), Bases(recipe)
    for trial in order.trials:
        note(trial.number)
        try:
            ambient.here().begin()
            one = _one(recipe, trial, code, arrays=order.arrays, shapes=order.shapes)
            bits = bases.of(trial, one.signature, one.noticed)
            found[trial.number] = one._replace(noticed=replace(one.noticed, frozen=bits))
        except (Exception, SystemExit) as error:
            errors[trial.number] = own_traceback(error)
            cause = cause or own_error(error)
    note(None)
    return Described(
        signatures={number: one.signature for number, one in found.items()},
        errors=errors,
        cause=cause,
        arrays={number: one.array for number, one in found.items() if one.array},
        constants={number: one.constants for number, one in found.items() if one.array},
        noticed={number: one.noticed for number, one in found.items()},
        batches={number: one.batches for number, one in found.items() if one.array},
        left=left_as_imported(),
    )


class _One(NamedTuple):
    """Of one trial; ``array`` is what the trials of one array agree in, ``constants`` what they do
    where its code is compiled, and ``batches`` of which kind its batches are."""

    signature: str
    noticed: Noticed
    array: Signature | None = None
    constants: str = ""
    batches: str = ""


def _one(recipe: Recipe, trial: TrialSpec, code: Code, *, arrays: bool, shapes: bool) -> _One:
    reading = Reading(trial.hp)
    if arrays:
        seed_all(trial.seed)
        model = build_model(recipe, reading.hp)
    else:
        model = _skeleton(recipe, reading.hp, trial.seed)
    found = _Described(recipe, HyperParameters(trial.hp), reading.hp, model)
    schedule = read_schedule(recipe, found.optimizer, reading.hp, found.train)
    require_measured(schedule, has_valid=found.valid is not None)
    ambient.here().settle()
    settings = configuration(found.recipe, found.model)
    looked = first_batches(found.train, LOOKED_AT if arrays else 1)  # no part of making a trial
    found.batch = looked[0]
    check_loss(found.recipe.loss, found.batch)
    signature, array, constants, kind = _cost_signature(found), None, "", ""
    if arrays:
        facts = signature_of(found.recipe, found.model, found.optimizer, found.batch).facts
        length = "known" if epoch_length(found.train) is not None else "not known"
        array = Signature((*facts, ("the length of the data", length)))
        constants = constants_of(found.recipe, found.model)
        kind = kind_of_all([kind_of(batch) for batch in looked])
    frozen_bytes = 0 if habits_of(schedule).touches else frozen_size(found.model)
    frozen, base = frozen_bits(found.model) if frozen_bytes else ("", NO_BASE)
    noticed = reading.end(code)  # while what keeps them is there
    noticed = replace(
        noticed,
        validates=found.valid is not None,
        globals=settings,
        shared=frozenset(name for name in settings if not ambient.here().has(name)),
        paces=paces_of(schedule),
        batches=epoch_length(found.train),
        state_bytes=_least_state(found.model, found.optimizer),
        made=_made(found) if shapes else None,
        data_reads=found.data_reads,
        frozen_bytes=frozen_bytes,
        frozen=frozen,
        base=base,
    )
    return _One(signature, noticed, array, constants, kind)


def own_error(error: BaseException) -> Exception | None:
    """The error, with the user's line, when it is shoal's own and says all there is to say."""
    if not isinstance(error, ShoalError):
        return None
    if (line := user_line(error)) and len(error.args) == 1 and line not in str(error):
        error.args = (f"{error} (at {line})",)
    return error


class _Described:
    """A trial's objects, to be looked at; its first batch, too, once it is made."""

    batch: Batch

    def __init__(
        self, recipe: Recipe, hp: HyperParameters, reads: Reads, model: nn.Module
    ) -> None:
        self.recipe = recipe = bound(recipe, hp)
        self.model, self.choices = model, _choices(recipe, hp)
        with reads.apart() as of_data:
            self.train, self.valid = read_data(recipe, reads)
        self.data_reads = frozenset(of_data)
        self.optimizer = build_optimizer_of(recipe, model, reads)


def _cost_signature(found: _Described) -> str:
    model, optimizer = found.model, found.optimizer
    names = {id(p): name for name, p in model.named_parameters()}
    parts = [
        _RATE.sub(lambda found: f"{found[1]}p={float(found[2]) != 0}", repr(model)),
        [_scalars_of(module) for module in model.modules()],
        [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in _all_params(model)],
        [(n, tuple(b.shape), str(b.dtype)) for n, b in model.named_buffers()],
        _shape_of(found.batch),
        epoch_length(found.train),  # how many steps there are, and whether that is known
        each_kind(optimizer, lambda each: type(each).__qualname__),
        [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups],
        [_kind_of(group) for group in optimizer.param_groups],
    ]
    parts += [found.choices] if found.choices else []
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _made(found: _Described) -> Made:
    named: list[tuple[str, str, Tensor]] = []
    named += [("parameter", *one) for one in found.model.named_parameters()]
    named += [("buffer", *one) for one in found.model.named_buffers()]
    return Made(
        optimizer=each_kind(found.optimizer, _kept_by),
        shapes={
            f"{what} {name}": (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for what, name, tensor in named
        },
        trained=frozenset(n for n, p in found.model.named_parameters() if p.requires_grad),
    )


def _kept_by(optimizer: torch.optim.Optimizer) -> str:
    """The class of an optimizer, and with which options it keeps more than without.

    AdamW keeps what Adam does, and may go on as that.
    """
    kind = state_of(type(optimizer).__qualname__)
    if not type(optimizer).__module__.startswith("torch.optim."):
        return kind  # whose options mean what they mean there
    groups = optimizer.param_groups
    more = [n for n in _KEEP_MORE if any(group.get(n) for group in groups)]
    return f"{kind} with {' and '.join(more)}" if more else kind


def _least_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes that training keeps of a model at least: what other optimizers keep is not counted."""
    stepped: dict[int, int] = {}  # by parameter the tensors beside it, of its size
    for each in members_of(optimizer):
        count = 3 if type(each) in _WITH_MOMENTS else 1
        stepped |= {id(p): count for group in each.param_groups for p in group["params"]}
    return sum(
        p.nbytes * (1 + stepped.get(id(p), 0) * p.requires_grad) for p in model.parameters()
    )


def _choices(recipe: Recipe, hp: HyperParameters) -> dict[str, Any]:
    """What a step of one's own may cost more by: it may read any hyperparameter, as a count.

    And a loss and metrics by those that they spell, and clipping by whether there is any.
    """
    found: dict[str, Any] = {}
    if recipe.step is not None:
        kinds = (bool, int, str)
        found |= {name: hp[name] for name in hp if type(hp[name]) in kinds and name != "seed"}
    for function in (recipe.loss, *(one for _, one in recipe.metric_functions())):
        if isinstance(function, OfTrial):  # a term of weight 0 may be left out
            values = function.hp.spelled.items()
            found |= {name: bool(v) if isinstance(v, float) else v for name, v in values}
    if isinstance(recipe.clip_grad_norm, LimitOfTrial):
        found["(clips)"] = recipe.clip_grad_norm.limit is not None
    return found


def _skeleton(recipe: Recipe, hp: HyperParameters, seed: int) -> nn.Module:
    """The model without memory where it can be built so, else with."""
    hollow = hollow_model(recipe, hp, seed)
    if hollow is not None:
        return hollow
    seed_all(seed)
    return build_model(recipe, hp)


def hollow_model(recipe: Recipe, hp: HyperParameters, seed: int) -> nn.Module | None:
    """The model without memory; None where it cannot be built so. Leaves random state changed.

    Nor can one that is left in a global, where the optimizer's factory may look for it.
    What it warns of is said when it is built with memory: of weights that are loaded here torch
    says that they are not.
    """
    seed_all(seed)
    try:
        with ambient.tried(), warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            return build_model(recipe, hp)
    except ShoalError:
        raise
    except Exception:
        return None


def _all_params(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))


def _scalars_of(module: nn.Module) -> dict[str, Any]:
    """A module's plain attributes: numbers of heads or passes cost bytes too."""
    plain = (bool, int, float, str, type(None))
    found = {k: v for k, v in vars(module).items() if type(v) in plain and k != "training"}
    if isinstance(module, _DropoutNd):
        found["p"] = found["p"] != 0  # how much is dropped costs the same
    return found


def _kind_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What of a param group's options decides which state and scratch a step needs."""
    values = {"params", "lr", "initial_lr", "betas", "eps"}
    return {key: _matter_of(value) for key, value in group.items() if key not in values}


def _matter_of(value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Tensor | np.ndarray) and value.ndim:
        return _shape_of(value)
    return bool(value)


def _shape_of(value: Any) -> Any:
    """The shapes and types of a batch, without its values."""
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, Mapping):
        return {key: _shape_of(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_shape_of(item) for item in value]
    return type(value).__name__
