"""An array that is spilled, as its seat sees it: one trial N times as large.

Its tensors are rows of stacked ones, laid out in shards in host memory of the array's own; copies,
slots and programs are those of a spilled trial. What is every trial's own, its optimizer, its
schedule and whether it goes on, is asked of the trials.
"""

from __future__ import annotations

import functools
import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.core.plan import Job
from shoal.device.losses import not_finite
from shoal.fusion.array import read_now
from shoal.fusion.finish import clip_stacked_factor, scale_stacked, stacked_norm
from shoal.fusion.passes.fused import is_out_of_memory
from shoal.fusion.rows.unplaced import Unplaced
from shoal.memory.layout import TrialLayout
from shoal.memory.store import Region, create_region
from shoal.recipes.bound import clip_limit
from shoal.recipes.recipe import Recipe, to_device
from shoal.recipes.subsets import clip_factor
from shoal.runtime.arrays.micro import Result, StackedMicro
from shoal.runtime.compute import Compute, HostPiece
from shoal.runtime.placing.placed import Placed, place_on_host
from shoal.runtime.session import Session
from shoal.runtime.task import Task
from shoal.runtime.units import Micro

Row = Sequence[Any]
"""The batches of one micro-batch by slot, None where there is none."""


class Buffers:
    """What of an array stands where a seat looks for a model: its buffers."""

    def __init__(self, stacked: Unplaced) -> None:
        self._stacked = stacked

    def buffers(self) -> Sequence[Tensor]:
        """Those of all slots."""
        return list(self._stacked.buffers.values())


class StackedBinding:
    """The stacked parameters by name, and where they point; steps are the trials' own."""

    def __init__(self, session: StackedSession) -> None:
        self._session = session
        self._rows: dict[int, tuple[Placed, dict[int, Placed]]] = {}  # by shard, on the device
        self._host: dict[tuple[int, int], Placed] = {}  # by shard and slot

    @property
    def params(self) -> Mapping[str, Tensor]:
        """Leaves of autograd."""
        return self._session.stacked.parameters

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """In a step."""
        return {name: tensor.dtype for name, tensor in self.params.items()}

    def bind(self, shard: int, placed: Placed) -> None:
        """Point the shard's parameters, borrowed ones too, at ``placed``."""
        for name, tensor in placed.params.items():
            self._session.stacked.place(name, tensor)

    def evict(self, shard: int, placed: Placed) -> None:
        """Have them be nowhere, for every trial too."""
        self._session.stacked.evict(placed.params)
        self._rows.pop(shard, None)
        for trial in self._session.trials.values():
            trial.binding.evict(shard, placed)

    def evict_state(self, shard: int) -> None:
        """Let go of the memory that holds the shard's state."""
        self._rows.pop(shard, None)
        for trial in self._session.trials.values():
            trial.binding.evict_state(shard)

    def step(
        self, shard: int, placed: Placed, grads: Mapping[str, Tensor], number: int = 0
    ) -> None:
        """Step every trial that goes on, with its rows of ``placed`` and of the gradients."""
        known = self._rows.get(shard)
        if known is None or known[0] is not placed:
            known = self._rows[shard] = placed, {}
        for slot, trial in self._session.stepping():
            rows = known[1].get(slot)
            if rows is None:
                rows = known[1][slot] = row_of(placed, slot)
            lacking = self._session.units.lacking(slot)
            mine = {name: grad[slot] for name, grad in grads.items() if name not in lacking}
            with self._session.failing(slot):
                trial.binding.step(shard, rows, mine, number)

    def host_step(self, shard: int, host: Placed, grads: Mapping[str, Tensor], slot: int) -> None:
        """The same on the host's copies, of one slot, with these gradients; on its own thread."""
        trial = self._session.trials.get(slot)
        if trial is None:
            return
        rows = self._host.get((shard, slot))
        if rows is None:
            rows = self._host[shard, slot] = row_of(host, slot)
        mine = {name: grad[slot] for name, grad in grads.items()}
        with self._session.failing(slot):
            trial.binding.step_on_host(shard, rows, mine, trial.step)

    def forget(self, slot: int) -> None:
        """A trial has left its slot."""
        for _, rows in self._rows.values():
            rows.pop(slot, None)


def row_of(placed: Placed, slot: int) -> Placed:
    """One slot's tensors of what is placed for all."""
    nothing = placed.param_bytes[:0]
    return Placed(
        params={name: tensor[slot] for name, tensor in placed.params.items()},
        states={
            name: {key: tensor[slot] for key, tensor in states.items()}
            for name, states in placed.states.items()
        },
        grads={},
        param_bytes=nothing,
        state_bytes=nothing,
        borrowed={name: tensor[slot] for name, tensor in placed.borrowed.items()},
    )


class StackedSession:
    """The tenant of an array's seat.

    Args:
        job: Of any of its trials; bytes and shards are the array's.
        layout: Of the stacked tensors.
        stacked: The array's rows.
        width: Slots.

    Attributes:
        trials: Who is here, by slot.
        failures: Why trials cannot go on, by slot.
        losses: Of each micro-batch of the step.
        apart: Slots that ran by themselves in this step.
    """

    def __init__(
        self,
        job: Job,
        recipe: Recipe,
        layout: TrialLayout,
        stacked: Unplaced,
        width: int,
        device: torch.device,
    ) -> None:
        self.job, self.recipe, self.layout, self.stacked = job, recipe, layout, stacked
        self.width, self.device = width, device
        descriptor = create_region(f"array-{job.trial}", layout.num_bytes)
        try:
            self.region = Region(descriptor, layout.num_bytes, pin=device.type == "cuda")
        finally:
            os.close(descriptor)
        self.model = Buffers(stacked)
        self.owned = [[f.spec.name for f in shard.param.fields] for shard in layout.shards]
        self.units: Any = None
        self.step = 0
        self.compiled = False
        self.trials: dict[int, Session] = {}
        self.failures: dict[int, BaseException] = {}
        self.losses: list[Result] = []
        self.apart: set[int] = set()
        self.found: Result | None = None  # of an evaluation
        self._rows: list[Row | Callable[[], Row]] = []  # by micro-batch
        self._with_batch: set[int] = set()  # slots that had one in this step
        self._stepping: list[int] | None = None
        self._advances: deque[list[int]] = deque()  # of steps whose schedules are to go on
        self.binding = StackedBinding(self)
        self.host = [place_on_host(self.region, layout, s) for s in range(len(layout.shards))]

    @property
    def owner(self) -> str:
        """By which its memory is reserved."""
        assert self.job.array is not None
        return f"array {self.job.array.group}"

    @property
    def valid_feed(self) -> Any:
        """A trial's; None where one has none."""
        feeds = [trial.valid_feed for trial in self.trials.values()]
        return None if None in feeds else next(iter(feeds), None)

    # -- a step -----------------------------------------------------------------------

    def begin(self, rows: Sequence[Row | Callable[[], Row]]) -> None:
        """The batches of a step, or of an evaluation: for each micro-batch those by slot."""
        self._rows, self.losses, self.apart = [*rows], [], set()
        self._with_batch = set()
        self._stepping, self.found = None, None

    def add(self, row: Row) -> int:
        """One more micro-batch of the step; which one it is."""
        self._rows.append(row)
        return len(self._rows) - 1

    def fetch(self, task: Task, micro: int) -> list[Any]:
        """The batches of one micro-batch, on the device; read now, if they are not yet."""
        row = read_now(self._rows[micro])
        self._with_batch |= {slot for slot, batch in enumerate(row) if batch is not None}
        return [self._fetched(slot, batch) for slot, batch in enumerate(row)]

    def _fetched(self, slot: int, batch: Any) -> Any:
        """A slot's batch; None where it has none, or one that cannot be moved."""
        if batch is None or slot in self.failures:
            return None
        try:
            return self.fetch_one(batch)
        except (Exception, SystemExit) as error:
            if is_out_of_memory(error):
                raise
            self.failures[slot] = error
            return None

    def fetch_one(self, batch: Any) -> Any:
        """A batch on the device."""
        return to_device(batch, self.device)

    def note_loss(self, result: Result) -> None:
        """Losses of a micro-batch."""
        self.losses.append(result)

    @property
    def require_finite(self) -> Callable[[], None]:
        return _nothing  # who steps is seen slot by slot: see ``stepping``

    def note_losses(self, losses: Any) -> None:
        """A step of one's own is never spilled."""
        raise AssertionError("an array with a step of one's own is not spilled")

    def take(self, micro: StackedMicro) -> None:
        """What a unit found out about its slots."""
        self.failures |= micro.failures
        self.apart |= micro.apart.keys()

    def means(self) -> list[float]:
        """Each slot's mean loss so far, NaN where there is none."""
        totals, counts = [0.0] * self.width, [0] * self.width
        for result in self.losses:
            for slot, loss in enumerate(result.losses.tolist()):
                if result.counted[slot]:
                    totals[slot] += loss
                    counts[slot] += 1
        pairs = zip(totals, counts, strict=True)
        return [total / count if count else math.nan for total, count in pairs]

    def stepping(self) -> list[tuple[int, Session]]:
        """The slots that step, settled when the first shard is to: those with a finite loss."""
        if self._stepping is None:
            self._stepping = self._that_go_on()
        return [(s, self.trials[s]) for s in self._stepping if s not in self.failures]

    def _that_go_on(self) -> list[int]:
        took_part = (self._with_batch & self.trials.keys()) - self.failures.keys()
        means = self.means()
        for slot in sorted(took_part):
            if not math.isfinite(means[slot]) and self.recipe.on_nonfinite == "fail":
                self.failures[slot] = not_finite(means[slot], self.trials[slot].step + 1)
        return sorted(took_part - self.failures.keys())

    def failing(self, slot: int) -> _Failing:
        """What is raised inside is the slot's failure, and no other's."""
        return _Failing(self.failures, slot)

    def end_step(self) -> None:
        """Which schedules are to go on, when the steps are done."""
        self._advances.append([slot for slot, _ in self.stepping()])

    def advance_schedule(self) -> None:
        """Step the schedules of the trials that stepped; maybe on the host's thread."""
        for slot in self._advances.popleft():
            if (trial := self.trials.get(slot)) is not None and slot not in self.failures:
                with self.failing(slot):
                    trial.advance_schedule()


def _nothing() -> None:
    return None


class _Failing:
    """Keeps an error as one slot's."""

    def __init__(self, failures: dict[int, BaseException], slot: int) -> None:
        self._failures, self._slot = failures, slot

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception | SystemExit):
            return False
        self._failures[self._slot] = error
        return True


class ArrayCompute(Compute):
    """The units of an array: what is clipped, stepped and evaluated is each slot's own."""

    _session: StackedSession

    def begin(self, task: Task, action: Any) -> None:
        """Also who runs by himself, and whose batch is none, before anything reads that."""
        super().begin(task, action)
        if (micro := task.micros.get(action.micro)) is not None:
            self._session.take(_stacked(micro))

    def _forward(self, task: Task, action: Any) -> None:
        super()._forward(task, action)
        if (micro := task.micros.get(action.micro or 0)) is not None:
            self._session.take(_stacked(micro))

    def _backward(self, task: Task, action: Any) -> None:
        micro = _stacked(task.micros[action.micro or 0])
        super()._backward(task, action)
        self._session.take(micro)
        if micro.is_last:
            self._session.units.require_even(self._session.failures, [action.shard])

    def evaluated(self, task: Task, micro: Micro, result: Any) -> None:
        """Losses and outputs by slot."""
        self._session.take(_stacked(micro))
        self._session.found = result

    def norms_of(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """[N] of each gradient; of a slot by itself, as a trial alone has it."""
        found = {name: stacked_norm(grad) for name, grad in grads.items()}
        for slot in self._session.apart if grads else ():
            alone = torch._foreach_norm([grad[slot] for grad in grads.values()])
            for name, norm in zip(grads, alone, strict=True):
                found[name][slot] = norm
        return found

    def limits(self) -> Sequence[float | None]:
        """Of each slot; None where nobody is."""
        trials = self._session.trials
        return [
            clip_limit(trials[slot].recipe) if slot in trials else None
            for slot in range(self._session.width)
        ]

    def clip_factor(self, norms: Mapping[str, Tensor]) -> Tensor | None:
        """[N]. Of a gradient that a slot lacks its norm does not count, not even as 0."""
        if not norms:
            return None
        lacking, limits = self._session.units.lacking, self.limits()
        shared = [norm for name, norm in norms.items() if name not in lacking(None)]
        factor = clip_stacked_factor(shared or [*norms.values()], limits)
        for slot in self._session.apart:
            own = {n: norm[slot] for n, norm in norms.items() if n not in lacking(slot)}
            dtypes = [self._session.binding.dtypes[name] for name in own]
            limit = limits[slot]
            mine = None if limit is None else clip_factor(limit, list(own.values()), dtypes)
            if mine is not None:
                factor[slot] = mine
        return factor

    def scale(self, grads: Mapping[str, Tensor], factor: Tensor) -> None:
        """Each slot's by its own factor."""
        scale_stacked(list(grads.values()), factor)

    def host_step(self, shard: int) -> list[HostPiece]:
        """The trials' own steps, one after another, on the gradients that were stored."""
        session, host, clip = self._session, self._host[shard], self._clip
        names = self.has_grad.pop(shard, set())
        who = [slot for slot, _ in session.stepping()]
        grads = {name: grad for name, grad in host.grads.items() if name in names}
        lacking = {slot: session.units.lacking(slot) for slot in who}  # of this step

        def step(slot: int) -> None:
            if clip is not None and grads and slot == who[0]:
                self.scale(grads, clip.cpu())
            mine = {name: grad for name, grad in grads.items() if name not in lacking[slot]}
            session.binding.host_step(shard, host, mine, slot)

        return [HostPiece(functools.partial(step, slot), 1 / len(who)) for slot in who]


def _stacked(micro: Micro) -> StackedMicro:
    assert isinstance(micro, StackedMicro)
    return micro
