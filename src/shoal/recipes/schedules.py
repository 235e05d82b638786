"""Learning-rate schedules: the recipe's, several as one, by steps or by epochs."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from shoal.core.errors import SpecError, TrialError
from shoal.core.spec import Scalar
from shoal.recipes.modelaliases import refuse_kept
from shoal.recipes.recipe import HP, Batch, Recipe, epoch_length
from shoal.recipes.several import by_name, optimizers_of


def build_schedule(
    recipe: Recipe, optimizer: torch.optim.Optimizer, hp: HP, train: Iterable[Batch]
) -> Any:
    """The recipe's schedule over ``optimizer``, several as one; or None.

    Its ``step`` is called after each step of the trial, whose batches are those of ``train``.

    Raises:
        SpecError: one wants to be told something at each step, cannot be saved, keeps a
            parameter's memory by another tensor, or goes by epochs whose length is not known.
    """
    if recipe.schedule is None:
        return None
    made = as_one_schedule(recipe.schedule(optimizers_of(optimizer), hp))
    _refuse_stateless(made)
    for one in each_schedule(made):
        refuse_kept(one, _parameters_of(optimizer), "schedule", but=("optimizer",))
    if made is not None and recipe.schedule_interval == "evaluation":
        return EachEvaluation(made, recipe.schedule_metric)
    for one in each_schedule(made):
        _refuse_asking(one)
    if made is None or recipe.schedule_interval == "step":
        return made
    steps = steps_of_epoch(recipe, train)
    if not steps:
        raise SpecError(
            "Recipe(schedule_interval='epoch') needs to know how many batches an epoch has, and "
            f"the training data, {type(train).__name__}, does not say: len() of it is not known. "
            "Give a loader over a data set with a length, or a schedule that goes by steps."
        )
    return EachEpoch(made, steps)


def _parameters_of(optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """What it steps, by where that is."""
    return {
        f"param_groups[{number}]['params'][{place}]": parameter
        for number, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
    }


def schedule_numerics(recipe: Recipe) -> dict[str, Scalar]:
    """What a numerics key says of the schedule; nothing where it is stepped after each step."""
    interval = recipe.schedule_interval
    return {} if interval == "step" else {"schedule": f"each {interval}"}


def by_evaluations(recipe: Recipe) -> str:
    """Why a schedule cannot be stepped on several devices; empty where it can."""
    if recipe.schedule_interval != "evaluation":
        return ""
    return (
        "schedule_interval='evaluation' steps the schedule where the trial is evaluated, and of "
        "several devices each steps one of its own, which hears of no metric. Train on one device "
        "(technique='resident' or 'spilled'), or with a schedule that goes by steps or epochs."
    )


def _asks(schedule: Any) -> str:
    """The argument that a schedule's ``step`` needs; empty if none."""
    try:
        parameters = inspect.signature(schedule.step).parameters.values()
    except (AttributeError, TypeError, ValueError):  # of no schedule, or without a signature
        return ""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return next((p.name for p in parameters if p.default is p.empty and p.kind not in kinds), "")


def _refuse_stateless(made: Any) -> None:
    """Raises SpecError for a schedule that cannot be saved, nor go on."""
    for one in made.members.values() if isinstance(made, Schedules) else (made,):
        lacks = [n for n in _STATE if not callable(getattr(one, n, None))]
        if lacks and callable(getattr(one, "step", None)):
            raise SpecError(
                f"Recipe(schedule=...) returned a {type(one).__name__}, which has no "
                f"{' and no '.join(lacks)}: a trial is saved with its schedule, and goes on from "
                "it. Make it a subclass of torch.optim.lr_scheduler.LRScheduler, or give it both."
            )


_STATE = ("state_dict", "load_state_dict")


def _refuse_asking(schedule: Any) -> None:
    """Raises SpecError for a schedule whose ``step`` needs an argument."""
    if needed := _asks(schedule):
        raise SpecError(
            f"Recipe(schedule=...) returned a {type(schedule).__name__}, whose step() needs "
            f"{needed!r}. Schedules are stepped after each optimizer step, or each epoch, and "
            "told nothing. One that goes by a metric is stepped with it after each evaluation: "
            "Recipe(schedule_interval='evaluation', schedule_metric='valid_loss')."
        )


def require_measured(schedule: Any, *, has_valid: bool) -> None:
    """A schedule that is told what evaluations find on validation data needs some.

    Raises:
        SpecError: there is none.
    """
    if has_valid or not isinstance(schedule, EachEvaluation) or not schedule.is_told:
        return
    if schedule.metric.startswith("valid_"):  # a step of one's own may name others
        kind = next(type(one).__name__ for one in schedule.members.values() if _asks(one))
        raise SpecError(
            f"{kind}, which Recipe(schedule=...) returned, goes by {schedule.metric!r} "
            "(schedule_metric=), which is measured on validation batches, and Recipe(data=...) "
            "returned (train, None). Return validation batches, or a schedule that goes by steps "
            "or epochs (schedule_interval='step' or 'epoch')."
        )


class Schedules:
    """Several schedules that step together."""

    def __init__(self, members: Mapping[str, Any]) -> None:
        self.members = dict(members)

    def step(self) -> None:
        """Each member's own, in order."""
        for member in self.members.values():
            member.step()

    def state_dict(self) -> dict[str, Any]:
        """By name."""
        return {name: member.state_dict() for name, member in self.members.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What ``state_dict`` gave."""
        for name, member in self.members.items():
            _load(member, state[name])


class EachEpoch(Schedules):
    """One or several schedules that go on after every so many steps, which are an epoch."""

    def __init__(self, schedule: Any, steps: int) -> None:
        inside = schedule.members if isinstance(schedule, Schedules) else {"it": schedule}
        super().__init__(inside)
        self._steps, self._done = steps, 0

    def step(self) -> None:
        """Count a step; after an epoch's last one each schedule's own."""
        self._done += 1
        if self._done % self._steps == 0:
            super().step()

    def begin_at(self, step: int) -> None:
        """Stand where a trial of so many steps does: its epochs are not over sooner for that."""
        self._done = step

    def state_dict(self) -> dict[str, Any]:
        """By name, and the steps that were counted."""
        return super().state_dict() | {_COUNT: {"steps": self._done}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What ``state_dict`` gave."""
        super().load_state_dict(state)
        self._done = state[_COUNT]["steps"]


class EachEvaluation(Schedules):
    """One or several schedules that go on after each evaluation, told what it found.

    The one at the end of a training counts if a longer one would have it too. One that takes over
    another trial's weights begins anew: nobody knows what it would have seen.
    """

    def __init__(self, schedule: Any, metric: str) -> None:
        super().__init__(schedule.members if isinstance(schedule, Schedules) else {"it": schedule})
        self.metric, self._at = metric, 0

    @property
    def is_told(self) -> bool:
        """Whether any of them asks for the metric."""
        return any(map(_asks, self.members.values()))

    def step(self) -> None:
        """Nothing: a step is no evaluation."""

    def state_dict(self) -> dict[str, Any]:
        """By name, and the step of the evaluation that was counted last."""
        return super().state_dict() | {_COUNT: {"steps": self._at}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What ``state_dict`` gave."""
        super().load_state_dict(state)
        self._at = state[_COUNT]["steps"]

    def measured(self, found: Mapping[str, float], step: int) -> None:
        """Go on after an evaluation at a step, with the metric where ``step`` asks for it.

        Raises:
            SpecError: it was not measured.
        """
        if step == self._at:
            return
        self._at = step
        if self.is_told and self.metric not in found:
            raise SpecError(
                f"the schedule goes by {self.metric!r}, Recipe(schedule_metric=...), and the "
                f"evaluation found {', '.join(sorted(found)) or 'nothing'}. Name one of these, or "
                "return validation data from Recipe(data=...)."
            )
        self.go_on(found.get(self.metric, math.nan))

    def go_on(self, value: float) -> None:
        """Each member's own step, told the metric's value if it asks."""
        for member in self.members.values():
            member.step(value) if _asks(member) else member.step()


class Asked(Protocol):
    """When a trial is evaluated, and where it ends."""

    @property
    def steps(self) -> int | None: ...
    @property
    def eval_every(self) -> int | None: ...


class Ends(NamedTuple):
    """The same as values."""

    steps: int | None
    eval_every: int | None


def advance(
    schedule: Any, found: Mapping[str, float] | None, step: int, asked: Asked, each: int | None
) -> None:
    """After a step; or after an evaluation that ``found`` these metrics at a ``step``.

    ``each``: the steps of an epoch, if they are known.
    """
    if found is None:
        schedule.step()
    elif isinstance(schedule, EachEvaluation) and _is_regular(step, asked, each):
        schedule.measured(found, step)


def _is_regular(step: int, asked: Asked, each: int | None) -> bool:
    """Whether a longer training is evaluated after the step as well."""
    if asked.eval_every:
        return step % asked.eval_every == 0
    return step != asked.steps or bool(each and step % each == 0)


def steps_of_epoch(recipe: Recipe, train: Iterable[Batch]) -> int | None:
    """How many an epoch has, where the data's length is known."""
    batches = epoch_length(train)
    return None if batches is None else -(-batches // recipe.accumulate)


_COUNT = "steps of the trial"  # in a state, beside the names of schedules


def turn(schedule: Any) -> None:
    """Have it go on now, whether or not its epoch is over, or something was measured."""
    if isinstance(schedule, EachEvaluation):
        schedule.go_on(0.0)
    elif isinstance(schedule, EachEpoch):
        Schedules.step(schedule)
    else:
        schedule.step()


def each_schedule(schedule: Any) -> Iterator[Any]:
    """A schedule and those that it is made of."""
    if schedule is None:
        return
    if isinstance(schedule, Schedules):
        inside: Any = schedule.members.values()
    else:
        yield schedule
        inside = vars(schedule).get("_schedulers", ()) if hasattr(schedule, "__dict__") else ()
    for one in inside:
        yield from each_schedule(one)


def state_of_schedule(schedule: Any, model: nn.Module) -> dict[str, Any] | None:
    """Its state dict, without what is the model's: one that was built anew has its own of that.

    torch's schedules give all of their attributes; one that freezes layers keeps some of these.
    """
    if not schedule:
        return None
    state, known = schedule.state_dict(), _of_model(model)
    if isinstance(schedule, Schedules):
        return {name: _without(one, known) for name, one in state.items()}
    return _without(state, known)


def kind_of_schedule(schedule: Any) -> str:
    """Its class, and the classes of those that it is made of; empty of None."""
    return " and ".join(type(one).__name__ for one in each_schedule(schedule))


def options_of_new(schedule: Any, state: Mapping[str, Any] | None) -> frozenset[str]:
    """The options of an optimizer's groups that are a schedule's, where none was saved.

    It begins where the trial stands, and what it reckons from is what it set when it was made.
    """
    return _OPTIONS if schedule is not None and state is None else frozenset()


_OPTIONS = frozenset(
    ("lr", "initial_lr", "max_lr", "min_lr", "betas", "momentum", "base_momentum", "max_momentum")
)


def begin_at(schedule: Any, step: int) -> None:
    """A schedule of a trial of so many steps that had none; its own count begins all the same."""
    if isinstance(schedule, EachEpoch):
        schedule.begin_at(step)


def give_state(schedule: Any, state: Mapping[str, Any] | None, was: str = "") -> None:
    """Have a schedule go on from a state of one like it; nothing where either is none.

    Args:
        was: The kind of the one whose state it is; empty where that is not known. A state of
            another kind may be loaded without an error, and its numbers be taken for those of
            this one.

    Raises:
        TrialError: it is another one's.
    """
    if not schedule or state is None:
        return
    kind = kind_of_schedule(schedule)
    if was and was != kind:
        raise TrialError(
            f"what was saved of this trial's schedule is of {was}, and Recipe(schedule=...) "
            f"returns {kind} now, which has no place in what another one counts by. {_ADVICE}"
        )
    try:
        _load(schedule, state)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise TrialError(
            f"what was saved of this trial's schedule ({', '.join(map(repr, state))}) is not "
            f"what {kind}, which Recipe(schedule=...) returns now, can go on from: "
            f"{type(error).__name__}: {error}. {_ADVICE}"
        ) from error


_ADVICE = (
    "Put that schedule back (accept_recipe=True, retry_failed=True goes on then), or train with "
    "this one from the start, in a study of another name or as a clone --cold. What was saved "
    "stays as it is."
)


def kept_of_model(schedule: Any, model: nn.Module) -> frozenset[str]:
    """The attributes of a schedule that its state lacks: the model is in them."""
    known, named = _of_model(model), getattr(schedule, "__dict__", {})
    ours = {name: value for name, value in named.items() if name not in ("optimizer", _INSIDE)}
    return frozenset(ours.keys() - _without(ours, known).keys())


_INSIDE = "_schedulers"  # where torch's schedules have those that they are made of
_WITHIN = "of the schedule in it"  # in place of one that is an attribute, around its state


def _of_model(model: nn.Module) -> frozenset[int]:
    return frozenset(map(id, (*model.parameters(), *model.buffers(), *model.modules())))


def _without(state: Mapping[str, Any], known: frozenset[int]) -> dict[str, Any]:
    """A state dict without the values that something known is in; in its members' states too."""
    kept: dict[str, Any] = {}
    for key, value in state.items():
        if key == _INSIDE and all(isinstance(one, dict) for one in value):
            kept[key] = [_without(one, known) for one in value]
        elif isinstance(value, LRScheduler):  # what a warm-up goes on with
            kept[key] = {_WITHIN: _without(value.state_dict(), known)}
        elif key == "lr_lambdas" or known.isdisjoint(map(id, (value, *tree_leaves(value)))):
            kept[key] = value
    return kept


def _load(schedule: Any, state: Mapping[str, Any]) -> None:
    """Have it go on from a state of ``_without``."""
    schedule.load_state_dict(state if isinstance(schedule, Schedules) else _own(schedule, state))


def _own(schedule: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state in its own terms; schedules in its attributes go on from theirs on the way."""
    made = dict(state)
    for key, value in state.items():
        if isinstance(value, dict) and value.keys() == {_WITHIN}:
            made[key] = getattr(schedule, key)
            _load(made[key], value[_WITHIN])
        elif key == _INSIDE and all(isinstance(one, dict) for one in value):
            members = zip(getattr(schedule, key, value), value, strict=False)
            made[key] = [_own(member, one) for member, one in members]
    return made


def catch_up(schedule: Any, steps: int) -> None:
    """Bring a new schedule, if there is one, to where it is after ``steps``.

    Raises:
        TrialError: it changes parameters, which hold another trial's weights by then.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's advice on the order of the two steps
        try:
            for _ in range(steps if schedule else 0):
                schedule.step()
        except RuntimeError as error:
            raise TrialError(
                f"the schedule could not be brought to step {steps} for the weights that this "
                f"trial took over from another one: {str(error).rstrip('.')}. One that changes "
                "parameters when it steps cannot go on from another trial's: pruner=shoal.PBT(...)"
                " and warm clones need a schedule that sets numbers."
            ) from error


def as_one_schedule(given: Any) -> Any:
    """What a schedule factory returned, as one schedule; None is none.

    Raises:
        SpecError: something in a list, tuple or mapping cannot step.
    """
    if given is None or not isinstance(given, Mapping | list | tuple):
        return given
    members = {name: one for name, one in by_name(given).items() if one is not None}
    for name, member in members.items():
        if not callable(getattr(member, "step", None)):
            raise SpecError(
                f"Recipe(schedule=...) returned {type(member).__name__} under {name!r}; return a "
                "schedule, or a list, tuple or mapping of some."
            )
    return Schedules(members) if members else None
