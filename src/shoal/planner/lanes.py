"""When trials are through, one by one or in arrays: seconds on paper. Pure.

[Note: lanes]
Trials of a shape are given slots in turn, and those of one slot follow each other there, on
whichever device is free first. Where most of them are pruned on the way, those that go on after a
rung are given slots anew, or train by themselves where they are few.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shoal.core.spec import WidthMeasure

LOOKED = 512
"""Trials of a search that are looked at one by one; more take as many times as long."""
MANY = 20_000
"""Evaluations of which the moments are not looked at one by one."""
LIGHT_S = 0.01
"""Of a trial whose step alone takes less, much is Python, which a graph leaves out: that is looked
at first, since a short study ends before there is time for a second look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is to be trained: steps of each trial, on how many devices.

    ``every``: steps between two evaluations, the last one at the end; None: at the end alone.
    ``closes_ranks``: trials whose lengths differ are pruned at rungs, and those that go on get
    new seats there; so many of a ``generation`` wait for each other.
    """

    steps: tuple[int, ...]
    devices: int
    every: int | None = None
    is_known: bool = True  # how long trials are; else only that they are alike
    closes_ranks: bool = False
    generation: int = 0  # 0: all of them
    varies: bool = False  # floats in the trials' code differ, or change on the way
    step_s: float = math.inf  # of a trial alone, about

    @property
    def is_light(self) -> bool:
        """Whether a graph is likely to be quicker than eager passes."""
        return self.step_s <= LIGHT_S

    @property
    def alone_s(self) -> float:
        """Seconds that the steps of all trials take one by one, about."""
        return sum(self.steps) * self.step_s / self.devices

    def evaluations(self, steps: int) -> int:
        """Of one trial of so many steps."""
        return math.ceil(steps / self.every) if self.every else 1


def shortened(steps: int, trials: int, every: int | None, eta: int) -> tuple[int, ...]:
    """Steps of trials of which after 1, eta, eta**2, ... evaluations one of eta goes on.

    Who it will be is not known, and so drawn: those that go on come to lie unevenly in slots.
    """
    found, going = [steps] * trials, list(range(trials))
    draw, rung = random.Random(trials), 1
    while every and rung * every < steps and len(going) > 1:
        draw.shuffle(going)
        cut = -(-len(going) // eta)
        for trial in going[cut:]:
            found[trial] = rung * every
        going, rung = going[:cut], rung * eta
    return tuple(found)


def serial_s(found: WidthMeasure, load: Load, valid_batches: int) -> float:
    """Seconds until all trials are through one by one, a process for each device."""
    costs = [
        steps * found.alone_s + load.evaluations(steps) * valid_batches * found.alone_valid_s
        for steps in load.steps
    ]
    return _spread(costs, load.devices)


def array_s(found: WidthMeasure, load: Load, valid_batches: int) -> float:
    """Seconds until all trials are through in arrays of this width, one on each device."""
    if load.closes_ranks:
        return _closing_s(found, load, valid_batches)
    lanes = _lanes(load, found.width)
    longest = 0.0
    for device in lanes:
        if not any(device):
            continue
        steps = max(sum(lane) for lane in device)
        if found.evaluates_each:
            rounds = sum(load.evaluations(s) for lane in device for s in lane) / found.width
        else:
            rounds = _evaluation_rounds(device, load)
        refills = sum(max(0, len(lane) - 1) for lane in device)
        seconds = found.build_s + steps * found.step_s + refills * found.refill_s
        longest = max(longest, seconds + rounds * valid_batches * found.valid_s)
    return longest


def _closing_s(found: WidthMeasure, load: Load, valid_batches: int) -> float:
    """The same where those that go on after a rung fill the first slots, or go on one by one."""
    every, some = load.every or max(load.steps), load.steps[:LOOKED]
    alone = every * found.alone_s + valid_batches * found.alone_valid_s
    seconds = 0.0
    for training in _Pruned(replace(load, steps=some), found.width, every):
        part = training / found.width if found.evaluates_each else 1.0
        together = every * found.step_s + part * valid_batches * found.valid_s
        seconds += min(together, training * alone)
    refills = max(0.0, len(load.steps) / load.devices - found.width)
    return found.build_s + seconds * len(load.steps) / len(some) + refills * found.refill_s


class _Pruned:
    """Trials that are pruned at rungs, generation by generation, an evaluation at a time.

    Gives how many train on the fullest device, tick by tick. A trial waits at a rung for all of
    its generation, and for the decisions of those before it; of those that may train the ones
    with most before them go first.
    """

    def __init__(self, load: Load, width: int, every: int) -> None:
        self._ends, self._every = load.steps, every
        self._room = width * load.devices
        self._devices = load.devices
        self._rungs = sorted(set(load.steps))
        size = load.generation or len(load.steps)
        numbers = range(len(load.steps))
        self._generations = [numbers[at : at + size] for at in numbers[::size]]

    def __iter__(self) -> Iterator[int]:
        done = [0] * len(self._ends)
        open_to = [0] * len(self._generations)  # how many rungs are decided
        while True:
            able = [
                (done[n] - self._halt(open_to[g]), n)
                for g, members in enumerate(self._generations)
                for n in members
                if done[n] < min(self._ends[n], self._halt(open_to[g]))
            ]
            if not able:
                return
            going = heapq.nsmallest(self._room, able)
            for _, n in going:
                done[n] += self._every
            self._decide(done, open_to)
            yield -(-len(going) // self._devices)

    def _halt(self, decided: int) -> int:
        return self._rungs[min(decided, len(self._rungs) - 1)]

    def _decide(self, done: Sequence[int], open_to: list[int]) -> None:
        before = len(self._rungs)
        for g, members in enumerate(self._generations):
            while open_to[g] < before and all(
                done[n] >= min(self._ends[n], self._halt(open_to[g])) for n in members
            ):
                open_to[g] += 1
            before = open_to[g]


def _spread(costs: Sequence[float], devices: int) -> float:
    """When the last is through, each in turn taken by the device that is free first."""
    free = [0.0] * devices
    for cost in costs:
        heapq.heapreplace(free, free[0] + cost)
    return max(free)


def _lanes(load: Load, width: int) -> list[list[list[int]]]:
    """For each device and slot, the steps of the trials that follow each other there.

    Trials are given slots in turn; of each slot, each is taken by the device that is free first.
    """
    lanes: list[list[list[int]]] = [[[] for _ in range(width)] for _ in range(load.devices)]
    counts = [0] * load.devices
    for rank, steps in enumerate(load.steps):
        slot = rank % width
        device = min(range(load.devices), key=lambda d: (sum(lanes[d][slot]), counts[d], d))
        lanes[device][slot].append(steps)
        counts[device] += 1
    return lanes


def _evaluation_rounds(device: Sequence[Sequence[int]], load: Load) -> int:
    """Evaluations that are not at the same time: those who are evaluated make the others wait."""
    if len(set(load.steps)) == 1:  # all lanes in step
        return max(len(lane) for lane in device) * load.evaluations(load.steps[0])
    if sum(map(load.evaluations, load.steps)) > MANY:
        return min(
            max(sum(lane) for lane in device),
            sum(load.evaluations(steps) for lane in device for steps in lane),
        )
    moments: set[int] = set()
    for lane in device:
        at = 0
        for steps in lane:
            moments.update(range(at + (load.every or steps), at + steps, load.every or steps))
            at += steps
            moments.add(at)
    return len(moments)
