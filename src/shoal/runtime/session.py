"""One trial in a worker: its objects, its random streams, and the programs it asks for.

A session is a generator of program runs: the device loop advances it action by action, beside
others. Between units nothing of a trial is on the device but what its program holds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import NarrowError, TrialError
from shoal.core.plan import Job
from shoal.core.spec import HyperParameters
from shoal.core.technique import (
    Captured,
    Spilled,
    asks_by_shard,
    kept_shards,
    steps_on_host,
)
from shoal.data import Feed
from shoal.device.losses import Losses, not_finite, readback_of
from shoal.memory.chunks import chunk_names
from shoal.memory.layout import TrialLayout, lenders
from shoal.memory.split import write_params
from shoal.memory.store import Region, keep, state_views, views
from shoal.partition.build import clone_batch
from shoal.partition.chain import Chain
from shoal.partition.compiled import compiles
from shoal.partition.narrow import UseWatch, has_hooks
from shoal.partition.preserve import place_of
from shoal.recipes import schedules
from shoal.recipes.bound import bound
from shoal.recipes.habits import habits_of, trained, unfreezes
from shoal.recipes.optimizers import build_optimizer_of
from shoal.recipes.ownstep import Losses as OwnLosses
from shoal.recipes.ownstep import (
    Modes,
    OwnStep,
    Tally,
    refuse_nonfinite,
    require_evaluation,
    require_metric,
)
from shoal.recipes.recipe import Found, Recipe, build_model, read_data, rounding_of, to_device
from shoal.rng import RngState, capture_rng, restore_rng, seed_all
from shoal.runtime.ahead import Ahead, Counted
from shoal.runtime.capture.captured import CapturedUnits
from shoal.runtime.capture.captures import Captures
from shoal.runtime.measuring.chains import Chains, chain_of
from shoal.runtime.placing.binding import Binding
from shoal.runtime.placing.layouts import sum_whole
from shoal.runtime.placing.making import weights_where_they_step
from shoal.runtime.placing.unplaced import require_places
from shoal.runtime.saving.extrastate import extra_state, give_extra_state
from shoal.runtime.saving.pythonstate import PythonState
from shoal.runtime.task import Task
from shoal.runtime.units import (
    Buffer,
    ChainUnits,
    OwnUnits,
    ResidentUnits,
    Units,
)
from shoal.runtime.validating import Validating
from shoal.runtime.wire.messages import Progress, Settings
from shoal.spill.generate import route_of


class Session:
    """A trial admitted to a device. Built inside its own random streams, as the plain loop does.

    ``trains``: the parameters that were not frozen then.
    """

    def __init__(
        self,
        recipe: Recipe,
        job: Job,
        settings: Settings,
        device: torch.device,
    ) -> None:
        self.hp = HyperParameters(job.hp)
        self.recipe = recipe = bound(recipe, self.hp)
        self.job, self.settings, self.device = job, settings, device
        self._by_shard = asks_by_shard(job.technique)
        seed_all(job.seed)
        self.model = build_model(recipe, self.hp)
        self.modes = Modes(recipe, self.model)
        self.compiled = compiles(self.model)
        self.before_data = before_data = capture_rng(device)
        self.train, self.valid = read_data(recipe, self.hp)
        require_evaluation(recipe, self.model, self.valid)
        with weights_where_they_step(job, device, self.model):
            self.optimizer = build_optimizer_of(recipe, self.model, self.hp)
            self.schedule = schedules.build_schedule(recipe, self.optimizer, self.hp, self.train)
        self.python = PythonState(self.model, self.optimizer, self.schedule)
        self.habits, self.trains = habits_of(self.schedule), trained(self.model)
        self.rng = capture_rng(device)
        self.feed = self._feed(before_data, "training")
        self.valid_feed = self._feed(before_data, "validation") if self.valid is not None else None
        self.step, self.evaluated_at, self.is_best = 0, -1, False
        self.validating = Validating()
        self.until: int | None = 0
        self._readback = readback_of(device, recipe.accumulate)
        self.begin_losses()
        self.tally = Tally()  # of what a step of one's own returns by name
        self.on_step: Callable[[float], None] = lambda loss: None
        self.on_boundary: Callable[[], None] = lambda: None
        self.on_loader_lost: Callable[[str], None] = lambda reason: None
        self.on_evaluated: Callable[[dict[str, float]], bool] = lambda metrics: False
        self.counted: Counted = lambda work, what: work()
        self.metrics: dict[str, float] = {}  # of the last evaluation
        self.epoch_number = 1  # of the last batch that was trained on, counted from 1
        self.units: Any = None  # Units, once placed
        self.captures: Captures | None = None  # of the worker; without it nothing is captured
        self.chains: Chains | None = None  # of the worker
        self._foretold: Ahead | None = None  # where what is drawn is foretold
        self._buffer_aliases: dict[str, list[Buffer]] = {}
        first: dict[int, str] = {}
        for name, buffer in self.model.named_buffers(remove_duplicate=False):
            owner = first.setdefault(id(buffer), name)
            self._buffer_aliases.setdefault(owner, []).append(place_of(self.model, name))
        self.modes.train()

    def _feed(self, before_data: RngState, what: str) -> Feed:
        index = ("training", "validation").index(what)

        def renew() -> Any:
            """The source as it was built, for one that has to be read again from its start."""
            restore_rng(before_data, self.device)
            return read_data(self.recipe, self.hp)[index]

        source = (self.train, self.valid)[index]
        assert source is not None
        lost = functools.partial(self._loader_lost, what)
        return Feed(source, self.device, on_restart=lost, renew=renew, what=what)

    def _loader_lost(self, what: str, reason: str) -> None:
        self.on_loader_lost(f"{what} data: {reason}")

    @property
    def owner(self) -> str:
        """By which its memory is reserved."""
        return f"trial {self.job.trial}"

    def close(self) -> None:
        """End the loaders' processes."""
        self.feed.close()
        if self.valid_feed is not None:
            self.valid_feed.close()

    def place(self, layout: TrialLayout, region: Region, *, fresh: bool) -> None:
        """Cut the model as the job says and let its tensors live in ``region``.

        A fresh trial's initial values are written there; otherwise they are there.
        """
        self.layout, self.region = layout, region
        if self.units is None:
            self.units = self._units()
        self.owned = [[f.spec.name for f in shard.param.fields] for shard in layout.shards]
        rounding = rounding_of(self.recipe, dict(self.model.named_parameters()), self.job.seed)
        chunks = self._host_chunks()
        self.binding = Binding(
            self.model, self.optimizer, self.owned, self.device, rounding, chunks
        )
        self.binding.keeps_gradients = self.habits.touches
        if unfreezes(self.recipe, self.habits):
            self.binding.frozen.clear()
        if fresh:
            self._write_initial()
        for parameter in self.model.parameters():
            parameter.grad = None
        self.evict_everything()
        self._take_buffers()
        sum_whole(self.binding.params, layout)

    def _host_chunks(self) -> dict[int, tuple[tuple[str, ...], ...]]:
        """The chunks in which shards step on the host."""
        technique = self.job.technique
        if not isinstance(technique, Spilled) or technique.optimizer != "host":
            return {}
        if self.job.array is not None:  # whose trials step one after another
            return {}
        trained = {name for name, p in self.model.named_parameters() if p.requires_grad}
        pairs = enumerate(zip(self.job.shards, self.layout.shards, strict=True))
        return {i: chunk_names(*pair, trained) for i, pair in pairs if pair[0].step_chunks}

    def _units(self) -> Units:
        technique = self.job.technique
        if self.recipe.step is not None:
            step = OwnStep(
                self.recipe, self.model, self.optimizer, self.hp, self.modes, by_kernel=True
            )
            number = functools.partial(getattr, self, "step")
            return OwnUnits(self.model, self.recipe, self.device, step, number, self.hp)
        if not isinstance(technique, Spilled) or self.job.array is not None:
            if isinstance(technique, Captured) and self.captures is not None:
                return self.captures.units(self.model, self.recipe)
            return ResidentUnits(self.model, self.recipe, self.device)
        spans = [shard.layers for shard in self.job.shards]
        route = route_of(technique, self.job.shards, lenders(self.layout))
        uses = UseWatch(narrow) if (narrow := self._narrow()) else None
        units = ChainUnits(self._chain(), self.recipe, spans, self.device, route, uses)
        if self.job.foretells and self._by_shard:
            count: Counted = lambda work, what: self.counted(work, what)  # noqa: E731
            self._foretold = Ahead(units, self.device, self._next_of_group, count=count)
        return units

    def _narrow(self) -> dict[str, nn.Parameter]:
        """The parameters that travel as bfloat16 and step as float32.

        Raises:
            NarrowError: somebody is told the gradient of one, or nobody can see who reads it.
        """
        found = {
            field.spec.name: self.model.get_parameter(field.spec.name)
            for shard in self.layout.shards
            for field, whole in zip(shard.loaded.fields, shard.param.fields, strict=True)
            if field.spec.dtype != whole.spec.dtype
        }
        if found and self.compiled:
            raise NarrowError(
                "this trial's model is compiled, and the one that was measured for it was not: "
                "what reads its weights cannot be watched. Train with "
                "shoal.Spilled(transfer='fp32')."
            )
        hooked = next((name for name, p in found.items() if has_hooks(p)), None)
        if hooked is not None:
            raise NarrowError(
                f"{hooked!r} has a gradient hook, which would see bfloat16, and had none in the "
                "trial that was measured. Train with shoal.Spilled(transfer='fp32')."
            )
        return found

    def _chain(self) -> Chain:
        """The model's chain for this trial's device: that of one like it, or found on the CPU."""
        caches_off = self.job.numerics.get("use_cache") == "off"
        batch = next(iter(read_data(self.recipe, self.hp)[0]))  # not the trial's own source
        known = None if self.compiled else self.chains
        chain = chain_of(self.model, self.recipe, self.hp, batch, known, caches_off, self.device)
        if chain.num_layers != self.job.shards[-1].layers[1]:
            raise TrialError(
                f"this trial's model has {chain.num_layers} layers, the one that was measured "
                f"for it {self.job.shards[-1].layers[1]}: they differ in what no parameter "
                "shows. Make the difference an attribute of a module, or train it in a study of "
                "its own."
            )
        return chain.on(self.device)

    def _write_initial(self) -> None:
        for shard in self.layout.shards:
            write_params(self.region.bytes, shard, self.binding.params)
        self.put_buffers_back()
        self._settle_states()

    def rest(self) -> None:
        """Let go of what is on the device; the host region has all of it."""
        self._settle_states()
        self.evict_everything()

    def _settle_states(self) -> None:
        for shard in self.layout.shards:
            stored = state_views(self.region.bytes, shard.state, shard.state_at)
            for field_ in shard.param.fields:
                self.binding.settle(field_.spec.name, stored.get(field_.spec.name, {}))

    def evict_everything(self) -> None:
        """Poison all parameters."""
        for name, parameter in self.binding.params.items():
            parameter.data = self.binding.poison[name]

    def _take_buffers(self) -> None:
        """Buffers stay on the device for the whole lease; the host copy is current between."""
        places = views(self.region.bytes, self.layout.buffers, self.layout.buffers_at)
        for name, aliases in self._buffer_aliases.items():
            here = places[name].to(self.device, copy=True)
            for owner, leaf in aliases:
                owner._buffers[leaf] = here

    def put_buffers_back(self, names: Collection[str] | None = None) -> None:
        """Write the model's buffers, or those of these names, to the host region."""
        places = views(self.region.bytes, self.layout.buffers, self.layout.buffers_at)
        for name, place in places.items():
            if names is None or name in names:
                owner, leaf = place_of(self.model, name)
                keep(name, place, owner._buffers.get(leaf))

    def park(self) -> None:
        """Let go of the device's memory: all of the trial is in its region, until ``place``."""
        self.binding.let_go()
        if isinstance(self.units, CapturedUnits):
            self.units.let_go()
        places = views(self.region.bytes, self.layout.buffers, self.layout.buffers_at)
        for name, aliases in self._buffer_aliases.items():
            for owner, leaf in aliases:
                owner._buffers[leaf] = places[name]

    def leave(self) -> None:
        """Let go of what the device loop hung on this trial."""
        self.on_step = lambda loss: None
        self.on_boundary = lambda: None
        self.on_loader_lost = lambda reason: None
        self.on_evaluated = lambda metrics: False
        self.counted = lambda work, what: work()

    def progress(self) -> Progress:
        """The state beside the tensors; at a step boundary, with the trial's RNG saved."""
        return Progress(
            step=self.step,
            position=self.feed.position(),
            valid=self.valid_feed.position() if self.valid_feed else None,
            rng=self.rng,
            scalars=self.binding.scalars(),
            stored=self.binding.stored_keys(),
            groups=self.binding.groups(),
            schedule=schedules.state_of_schedule(self.schedule, self.model),
            scheduled=schedules.kind_of_schedule(self.schedule),
            tally=self.tally.pack(),
            extra=extra_state(self.model),
            python=self.python.pack(),
        )

    def enter(self) -> None:
        """Put the trial's random streams and globals in place."""
        restore_rng(self.rng, self.device)
        self.python.put()

    def put_away(self) -> None:
        """Note them as they are."""
        self.rng = capture_rng(self.device)
        self.python.put_away()

    def resume(self, progress: Progress, *, warm: bool = False, reads: bool = True) -> None:
        """Continue from ``progress``; the tensors are in the region already.

        ``warm``: it is another trial's, and this one's own hyperparameters stay. One that reads
        no data does not go where its next batch is.
        """
        self.step = progress.step
        self.tally = Tally() if warm else Tally.unpack(progress.tally)
        require_places(self.binding.params, self.layout, varies=bool(self.settings.varied))
        give_extra_state(self.model, progress.extra)
        if warm:  # what the other one kept holds, as in the plain loop
            schedules.catch_up(self.schedule, progress.step)
        self.python.give(progress.python, self.device, warm=warm)
        self.binding.restore(progress.scalars, progress.stored, self._step_places())
        if warm and self.settings.varied:  # it was evaluated before it took this state over
            self.evaluated_at = progress.step
        if not warm:
            own = schedules.options_of_new(self.schedule, progress.schedule)
            self.binding.restore_groups(progress.groups, but=own)
            schedules.give_state(self.schedule, progress.schedule, progress.scheduled)
            if progress.schedule is None:
                schedules.begin_at(self.schedule, progress.step)
        if reads:
            self._seek(progress)
        self.rng = progress.rng

    def _seek(self, progress: Progress) -> None:
        self.epoch_number = max(1, progress.position.epoch + bool(progress.position.batch))
        if not self.feed.is_at(progress.position):
            self.feed.seek(progress.position)
        if self.valid_feed and progress.valid and not self.valid_feed.is_at(progress.valid):
            self.valid_feed.seek(progress.valid)

    def _step_places(self) -> dict[str, torch.device]:
        """Where each parameter is stepped."""
        technique, host = self.job.technique, torch.device("cpu")
        on_host, kept = steps_on_host(technique), kept_shards(technique)
        return {
            name: host if on_host and shard not in kept else self.device
            for shard, names in enumerate(self.owned)
            for name in names
        }

    # -- the training loop ----------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self.feed.epoch

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of one epoch, where the data's length is known."""
        count = self.feed.num_batches
        return None if count is None else math.ceil(count / self.recipe.accumulate)

    @property
    def steps_left(self) -> int:
        """Optimizer steps to the trial's end, or its lease's where the data has no length."""
        steps, epochs = self.settings.steps, self.settings.epochs
        if steps is None and epochs is not None and self.steps_per_epoch is not None:
            steps = epochs * self.steps_per_epoch
        return max(0, (steps if steps is not None else self.until or self.step + 1) - self.step)

    @property
    def ended(self) -> bool:
        """Whether the trial has run all its steps or epochs."""
        if self.settings.steps is not None:
            return self.step >= self.settings.steps
        assert self.settings.epochs is not None
        return self.epoch >= self.settings.epochs

    def tasks(self) -> Iterator[Task]:
        """The programs of a whole lease, one after another; ends at the lease's last step.

        The caller has this trial's random streams in place whenever it advances this.
        """
        while not self.ended and (self._lease_lasts() or self.feed.at_end):
            first = self.feed.next()
            if first is None:
                yield from self._end_epoch()
                continue
            yield from self._train_group(first)
            if self.epoch >= self.epoch_number:  # a group of unknown size read to the end
                yield from self._end_epoch()
            if self._evaluation_is_due() and self.evaluated_at != self.step:
                yield from self._evaluate()
            yield from self._boundary()
        if self.ended and self.evaluated_at != self.step:
            yield from self._evaluate()

    def draws_nothing_before(self, task: Task) -> bool:
        """Whether what ``tasks`` does after ``task`` surely draws no random number.

        That is when it fetches the next batch of the epoch, and neither begins nor ends an
        evaluation.
        """
        if task.kind == "evaluation":
            return self.valid_feed is not None and self.valid_feed.draws_nothing
        step, every, steps = self.step + 1, self.settings.eval_every, self.settings.steps
        evaluates = every is not None and step % every == 0
        return not (evaluates or step == steps) and self.feed.draws_nothing

    def _boundary(self) -> Iterator[Task]:
        """Between two steps."""
        self.on_boundary()
        return iter(())

    def _lease_lasts(self) -> bool:
        return self.until is None or self.step < self.until

    def _end_epoch(self) -> Iterator[Task]:
        if self.settings.eval_every is None and self.evaluated_at != self.step:
            yield from self._evaluate()
            if self.is_best and not self.ended:  # as it is now
                yield from self._boundary()

    def _evaluation_is_due(self) -> bool:
        every = self.settings.eval_every
        return every is not None and self.step % every == 0

    @property
    def steps_to_evaluation(self) -> int | None:
        """Steps whose batches are not fetched yet, before it is evaluated; None: unknown.

        Of a trial that trains; for who would rather evaluate several trials at a time.
        """
        every = self.settings.eval_every
        if every is not None:
            return -(self.step + 1) % every
        if self.feed.num_batches is None:
            return None
        return math.ceil((self.feed.num_batches - self.feed.batch) / self.recipe.accumulate)

    def _train_group(self, first: Any) -> Iterator[Task]:
        """One optimizer step over up to ``accumulate`` batches of one epoch."""
        self.begin_losses()
        self.epoch_number = self.epoch + 1
        size = self._group_size()
        if size is None:
            yield from self._train_lazily(first)
        else:
            program = self.units.step_program(size, self.recipe.clip_grad_norm is not None)
            task = Task(program, "step", batches={0: first})
            if self._foretold is not None:
                yield from self._foretold.fill(task, size)
            yield task
        losses = self.losses.values()
        self.step += 1
        self.on_step(sum(losses) / len(losses))

    def _group_size(self) -> int | None:
        """How many batches the group has, where that is known before it is read."""
        accumulate = self.recipe.accumulate
        if accumulate == 1:
            return 1
        if self.feed.num_batches is None:
            self._refuse_order()
            return None
        left = self.feed.num_batches - (self.feed.batch - 1)
        return min(accumulate, left)

    def _refuse_order(self) -> None:
        """Shard by shard a step's batches are all there at once, so their number is known."""
        if self._by_shard:
            raise TrialError(
                "the training data does not say how many batches it has, and shards run all "
                "micro-batches of a step one after another. Give it a __len__, or train with "
                "technique=shoal.Spilled(order='micro')."
            )

    def _train_lazily(self, first: Any) -> Iterator[Task]:
        """A step over a source of unknown length: a program a batch, then the step."""
        clip = self.recipe.clip_grad_norm is not None
        batch, index = first, 0
        while batch is not None:
            program = self.units.micro_program(index)
            yield Task(program, "micro", batches={index: batch})
            index += 1
            batch = self.feed.next() if index < self.recipe.accumulate else None
        yield Task(self.units.finish_program(clip), "step")

    def fetch(self, task: Task, micro: int) -> Any:
        """The batch of one micro-batch, on the device, fetched when its first unit runs."""
        batch = task.batches.pop(micro, None)
        if batch is None:
            batch = self._next_of_group()
        moved = to_device(batch, self.device)
        if self._by_shard:
            return clone_batch(moved)  # a source may fill one buffer again and again
        return moved

    def _next_of_group(self) -> Any:
        """One more batch of a step that the data promised.

        Raises:
            TrialError: there is none.
        """
        batch = self.feed.next()
        if batch is None:
            raise TrialError(
                f"the training data says len() = {self.feed.num_batches} batches but ended "
                "earlier. Correct its __len__, or leave it out."
            )
        return batch

    def begin_losses(self) -> None:
        """Those of another step."""
        fails = self.recipe.on_nonfinite == "fail"
        self.losses = Losses(self._readback, self._nonfinite if fails else None)

    def _nonfinite(self, value: float) -> TrialError:
        return not_finite(value, self.step + 1)

    def told(self, error: BaseException) -> BaseException:
        """What its code raised, which says so if that was in a validation."""
        return self.validating.told(error, self.job.trial, self.step)

    def note_loss(self, loss: Tensor) -> None:
        """Keep a micro-batch's loss; a loss that is not finite fails the trial before its step."""
        self.losses.note(loss)

    @property
    def require_finite(self) -> Callable[[], None]:
        return self.losses.require_finite

    def note_losses(self, losses: OwnLosses) -> None:
        """The same of a step of one's own, which has stepped already."""
        refuse_nonfinite(self.recipe, losses, self.step + 1)
        self.tally.add(losses.named)
        self.losses.add(losses.total)

    def advance_schedule(self, found: Mapping[str, float] | None = None) -> None:
        if self.schedule and (found is None or self.recipe.schedule_interval == "evaluation"):
            with self.binding.around_schedule():
                ends, each = self.settings, self.steps_per_epoch
                schedules.advance(self.schedule, found, self.step, ends, each)

    def _evaluate(self) -> Iterator[Task]:
        """A validation pass; whatever it draws is undone."""
        self.evaluated_at = self.step
        if self.valid_feed is None:
            self._evaluated([])
            return
        saved = capture_rng(self.device)
        self.model.eval()
        found = []
        for batch in self.validating.batches(self.valid_feed):
            task = Task(self.units.evaluation_program(), "evaluation", batches={0: batch})
            yield task
            found.append(task.metrics)
        self.modes.train()
        restore_rng(saved, self.device)
        self._evaluated(found)

    def _evaluated(self, found: Sequence[Found]) -> None:
        """A validation pass found these metrics, one mapping a batch."""
        self.metrics = {**self.tally.take(), **self.validating.summed_up(self.recipe, found)}
        if self.recipe.step is not None:
            require_metric(self.settings.metric, self.metrics, has_valid=bool(self.valid_feed))
        self.advance_schedule(self.metrics)
        self.is_best = self.on_evaluated(self.metrics)
