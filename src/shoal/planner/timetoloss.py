"""Schedules by the time to the loss: the seconds of a step over what the step is worth.

[Note: time to the loss]
A step with weights that are one step old has no bubbles but where the pipeline stops, which is
priced (``steptime``), and comes less far. What is compared is
when all trials have come as far as one synchronous step takes them: the seconds of a step, over
the efficiency that the recipe says. Where there are more trials than the devices have room for at
once, several pipelines compute in each other's bubbles; then their steps are replayed together,
and there is little left that stale weights could win.

"2bw" changes a trial's bits, and its efficiency is somebody's word for a whole training: so it has
to be clearly sooner than every synchronous way. "zb-h1" has the bits of "flush", and takes more
memory: so it has to be clearly quicker, with the seconds that its half backwards were measured to
take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from shoal.core.errors import SpecError
from shoal.core.spec import NO_SECONDS
from shoal.core.stale import Stale
from shoal.core.technique import Pipelined, Schedule
from shoal.core.units import Bytes, Seconds, format_seconds
from shoal.memory.layout import TrialLayout
from shoal.planner.need import fits
from shoal.planner.pipeline import WORTH, Alternative, Staged, together
from shoal.planner.steptime import StepTime, Terms

RIVALS: tuple[Schedule, ...] = ("zb-h1", "2bw")
"""What is weighed against "flush"; the second where stale weights are allowed."""
MOST_TOGETHER = 3
"""Pipelines that compute in each other's bubbles, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where trials run: the bytes of each device, how many devices and how many trials."""

    budget: Bytes
    devices: int
    trials: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How quickly trials come to a loss in one of the ways that they could train.

    ``step_s`` is a step of one trial alone on its devices; ``turn_s`` one of ``together`` that
    have the same devices, and ``rounds`` how many such turns it takes until all have done one.
    ``stops_s`` of ``turn_s`` is for stops, of which a step has ``stops``.
    """

    name: str
    step_s: Seconds
    turn_s: Seconds
    together: int = 1
    rounds: int = 1
    efficiency: float = 1.0
    is_stale: bool = False
    stops: float = 0.0
    stops_s: Seconds = NO_SECONDS

    @property
    def loss_s(self) -> float:
        """Seconds until all trials have come as far as a synchronous step takes them."""
        return self.rounds * self.turn_s / self.efficiency


def rival(asked: Pipelined, schedule: Schedule, stale: Stale | None) -> Pipelined | str:
    """What was asked for with another schedule; in words, why it cannot have that."""
    if asked.is_spilled:
        return "stages that are spilled have neither half backwards nor a second weight version"
    is_stale = schedule == "2bw"
    if asked.lag and not is_stale:
        return f"its stages do not run ahead, and lag={asked.lag} was asked for"
    lag = asked.lag if is_stale else 0  # what it hides is there in "flush" and "2bw"
    try:
        predict = is_stale and stale is not None and stale.predict
        return replace(asked, schedule=schedule, predict=predict, lag=lag)
    except SpecError as error:
        return str(error).rstrip(".")


def pace_of(
    staged: Staged, layout: TrialLayout | None, terms: Terms, place: Place, stale: Stale | None
) -> Pace:
    """The pace of a pipeline, guessed or measured."""
    technique = staged.technique
    rounds = ceil(place.trials / max(1, place.devices // staged.gang))
    sharing = range(min(MOST_TOGETHER, rounds), 1, -1)
    count = next((n for n in sharing if fits([staged.need], place.budget, n)), 1)
    turn: Staged | StepTime = staged
    if count > 1 and not technique.is_spilled:
        turn = together(staged, terms, layout, count)
    return Pace(
        name=technique.known_schedule,
        step_s=staged.step_s,
        turn_s=turn.step_s,
        together=count,
        rounds=rounds,
        stops=turn.stops,
        stops_s=turn.stops_s,
        efficiency=stale.efficiency if stale is not None and technique.is_stale else 1.0,
        is_stale=technique.is_stale,
    )


def pace_on_one(other: Alternative, place: Place) -> Pace:
    """The pace of trials that have a device each."""
    rounds = ceil(place.trials / place.devices)
    name = f"{other.name} on one device"
    return Pace(name=name, step_s=other.step_s, turn_s=other.step_s, rounds=rounds)


def soonest(first: Pace, others: Sequence[Pace]) -> Pace:
    """``first``, or what is clearly sooner; stale weights where nothing synchronous is near."""
    synchronous = [first, *(pace for pace in others if not pace.is_stale)]
    stale = [pace for pace in others if pace.is_stale]
    least_s = min(pace.loss_s for pace in synchronous)
    for pace in sorted(stale, key=lambda one: one.loss_s)[:1]:
        if pace.loss_s < WORTH * least_s:
            return pace
    for pace in sorted(synchronous[1:], key=lambda one: one.loss_s)[:1]:
        if pace.loss_s < WORTH * first.loss_s:
            return pace
    return first


def in_words(
    chosen: Pace, paces: Sequence[Pace], refused: Mapping[str, str], stale: Stale | None
) -> list[str]:
    """What each way takes to the loss, the chosen one first, and why the others lose."""
    if stale is None:
        return _in_words_of_steps(chosen, paces)
    lines = [f"{_taken(chosen, paces)}: {_said(chosen)}"]
    for pace in sorted(paces, key=lambda one: one.loss_s):
        if pace is not chosen:
            lines.append(f"{pace.name} is not taken: {_said(pace)}; {_lost(pace, chosen)}")
    lines += [f"{name} is not taken: {why}" for name, why in refused.items()]
    if (most := max((chosen, *paces), key=lambda one: one.together)).together > 1:
        lines.append(
            f"{most.together} trials share the devices and each computes while the others wait, "
            "which leaves stale weights little to win; the seconds are one trial's share"
        )
    if chosen.is_stale and stale.efficiency < 1:
        lines.append(
            f"steps with stale weights come about as far as {stale.efficiency:.0%} of as many "
            "with new ones: for the loss that a synchronous training reaches give "
            f"{1 / stale.efficiency:.3g} times the steps"
        )
    return lines


def _in_words_of_steps(chosen: Pace, paces: Sequence[Pace]) -> list[str]:
    """Of schedules whose steps are worth the same."""
    line = f"{chosen.name} is taken: {_said(chosen)}"
    for pace in paces:
        if pace is not chosen:
            times = pace.loss_s / chosen.loss_s if chosen.loss_s else 1.0
            near = ", not clearly less" if times < 1 else ""
            line += f"; {pace.name}, to the same bits, would take {times:.2f} times that{near}"
    return [line]


def _taken(chosen: Pace, paces: Sequence[Pace]) -> str:
    others = [pace for pace in paces if pace is not chosen]
    if chosen.is_stale:
        return "2bw is taken, as Recipe(stale=...) allows, since it reaches the loss soonest"
    if any(pace.loss_s < chosen.loss_s for pace in others):
        return f"{chosen.name} is taken, since no other way reaches the loss clearly sooner"
    return f"{chosen.name} is taken, since it reaches the loss soonest"


def _said(pace: Pace) -> str:
    said = f"{format_seconds(pace.turn_s)} a step"
    if pace.stops:
        said += f" ({format_seconds(pace.stops_s)} of it since it runs empty at stops)"
    if pace.efficiency != 1.0 or pace.is_stale:
        worth_s = Seconds(pace.turn_s / pace.efficiency)
        said += (
            f", which at an efficiency of {pace.efficiency:g} is {format_seconds(worth_s)} for "
            "the progress of a synchronous one"
        )
    return said


def _lost(pace: Pace, chosen: Pace) -> str:
    times = pace.loss_s / chosen.loss_s if chosen.loss_s else 1.0
    whose = "all trials reach" if max(pace.rounds, chosen.rounds) > 1 else "it reaches"
    less = ", which is not clearly less" if times < 1 else ""
    return f"{whose} the loss in {times:.2f} times the time of {chosen.name}{less}"
