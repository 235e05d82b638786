"""All slots at once: one pass of the model's code, ordinary autograd over stacked tensors.

[Note: a pass]
The template's code runs in a ``Level`` under a ``SlotMode``; what it leaves is each slot's loss,
a stacked tensor [N] of ordinary autograd. The backward runs after the level has ended, on plain
tensors and their usual kernels. Where the code cannot run for all slots at once, what the pass
has drawn and written is undone, the smallest part that the error came from is looped, and the
pass is run again. An error that is not about this is some slot's own: the slots are tried one
by one, and the pass is run without those that fail.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from shoal.core.arraykeys import INPUTS, LOSS
from shoal.frames import user_line
from shoal.fusion.batches import combined
from shoal.fusion.crew import Crew, Evaluated, Steps, Trained, Undo, idle_slots, taking_part
from shoal.fusion.declined import Declined, Disagreement, Draws, OfMemory, Unbatched
from shoal.fusion.member import Member
from shoal.fusion.passes.feeding import are_fed, fed
from shoal.fusion.passes.hooked import HOOKED, tensor_hooks
from shoal.fusion.passes.idle import nothing_for_idle
from shoal.fusion.passes.loop import error_alone
from shoal.fusion.passes.mode import SlotMode
from shoal.fusion.passes.outputs import by_slot, taken_apart
from shoal.fusion.passes.outside import Outside
from shoal.fusion.passes.ownfunctions import RUNS_AGAIN
from shoal.fusion.passes.slots import Slots
from shoal.fusion.passes.template import Template, told_of
from shoal.fusion.rows.level import Level, entered
from shoal.fusion.rows.perslot import OF_EACH, in_words
from shoal.fusion.rows.stacked import owners
from shoal.recipes.recipe import autocast, loss_and_output

SMALL = 4096  # elements of a stacked buffer that is kept before every pass, changed or not


@dataclass(slots=True)
class Learnt:
    """What one kind of pass cannot do for all slots at once, and why."""

    looped: list[str] = field(default_factory=list)
    by_data: list[str] = field(default_factory=list)  # those of them that slots disagreed in
    draws_python: bool = False  # inputs and loss, from streams that are each slot's own
    own_factories: bool = False
    own_base: bool = False  # each slot has for itself what is in memory once (``Stacked.given``)
    replaced: tuple[str, ...] = ()  # buffers that the code makes anew
    own_buffers: bool = False  # of which it is given copies, since its backward needs the old ones
    notes: list[str] = field(default_factory=list)

    def copy(self) -> Learnt:
        looped, by_data, notes = list(self.looped), list(self.by_data), list(self.notes)
        return replace(self, looped=looped, by_data=by_data, notes=notes)


def _known_before(module: nn.Module, looped: Sequence[str]) -> Learnt:
    """What is ``looped``, and norms without a rate: they count their batches in Python.

    Slots that have counted as far agree on the number, and others come to them later.
    """
    learnt = Learnt(list(looped))
    for path, child in module.named_modules() if module.training else ():
        counts = isinstance(child, _BatchNorm) and child.track_running_stats
        if path and counts and child.momentum is None and path not in looped:
            learnt.looped.append(path)
            learnt.notes.append(f"{path!r} runs slot by slot: it counts its batches in Python")
    return learnt


class StackedBackend:
    """Runs all slots as one, and loops the parts that cannot."""

    stacks_gradients = True
    steps: Steps | None = None  # its gradients are elsewhere in every step

    def __init__(self) -> None:
        self._templates: dict[tuple[bool, tuple[str, ...]], Template] = {}  # by what they loop
        self._learnt: dict[Hashable, Learnt] = {}  # by kind of pass
        self._constant: dict[Hashable, tuple[str, ...]] = {}  # the same
        self._undo = Undo()
        self._doubted: str | None = None
        self._tries_again = False

    @property
    def notes(self) -> Sequence[str]:
        every = (note for learnt in self._learnt.values() for note in learnt.notes)
        return tuple(dict.fromkeys(every))

    @property
    def by_data(self) -> Sequence[str]:
        """Parts that run slot by slot because slots came to decide otherwise there."""
        return tuple({part: None for known in self._learnt.values() for part in known.by_data})

    def changed(self, crew: Crew) -> None:
        """The next pass makes the template anew; what was learnt to be looped stays so."""
        self._templates.clear()

    def require(self, member: Member) -> None:
        """Any trial of the array's signature will do."""

    def _kind(self, crew: Crew) -> Hashable:
        """What the next pass is: what one kind learns is nothing to the others."""
        return crew.members[0].module.training

    def _known_of(self, crew: Crew) -> Learnt:
        kind = self._kind(crew)
        if kind not in self._learnt:
            self._learnt[kind] = _known_before(crew.members[0].module, crew.looped or ())
        return self._learnt[kind]

    def _current(self, crew: Crew) -> Template:
        known = self._known_of(crew)
        key = known.draws_python, tuple(known.looped)
        if key not in self._templates:
            self._templates[key] = self._made(crew, known)
        return self._templates[key]

    def _made(self, crew: Crew, known: Learnt) -> Template:
        draws, is_open = known.draws_python, crew.looped is None
        return Template(crew.members, known.looped, draws_python=draws, is_open=is_open)

    @contextmanager
    def _fed(
        self, crew: Crew, batches: Sequence[Any], active: Sequence[bool]
    ) -> Iterator[Sequence[Any]]:
        """``batches`` as passes take them that are graphs; what was drawn is undone by an error.

        They are as they were where what makes the inputs raises: an eager pass finds out whose.
        """
        if not self._lacks_inputs(crew, batches):
            yield batches
            return
        before, made = crew.streams.now(), batches
        crew.streams.begin(active)
        try:
            made = self._with_inputs(crew, batches, active)
        except Exception as error:
            crew.streams.put(before)
            if is_out_of_memory(error):
                raise
        try:
            yield made
        except BaseException:
            crew.streams.put(before)
            raise

    def _lacks_inputs(self, crew: Crew, batches: Sequence[Any]) -> bool:
        """Whether inputs are made slot by slot, and those of ``batches`` are still to be."""
        return INPUTS in self._known_of(crew).looped and not are_fed(batches)

    def _with_inputs(
        self, crew: Crew, batches: Sequence[Any], active: Sequence[bool]
    ) -> Sequence[Any]:
        """All slots' batches, with their inputs; a pass has begun, and draws nothing before."""
        known = self._known_of(crew)
        try:
            made = fed(crew, batches, active, draws_python=known.draws_python)
        except Draws:
            if known.draws_python:
                raise
            known.draws_python = True
            crew.streams.undo()
            crew.streams.begin(active)
            made = fed(crew, batches, active, draws_python=True)
        return filled(made, active)

    def train(
        self, crew: Crew, batches: Sequence[Any], active: Sequence[bool], scale: float
    ) -> Trained:
        """One forward and one backward for all slots."""
        try:
            losses, _ = self._forward(crew, batches, active)
        except (Exception, SystemExit) as error:
            if is_out_of_memory(error):
                raise
            found = self._those_that_fail(crew, batches, active, error)
            if not found:  # a passing trouble, maybe
                return self._try_again(crew, batches, active, scale)
            return self._train_others(crew, batches, active, scale, found)
        blocks = crew.stacked.parameters.values()
        holds = scale != 1 and any(block.grad is not None for block in blocks)
        weights = torch.tensor(active, dtype=losses.dtype, device=losses.device) * scale
        try:
            with nothing_for_idle(blocks, active, adds=scale != 1):
                torch.autograd.backward([losses], [weights])
        except RuntimeError as error:
            if holds:  # gradients of the step's earlier micro-batches, which would be lost
                raise
            self._take_back(crew)
            if is_out_of_memory(error):
                raise
            if self._keeps_old_buffers(crew, error):
                return self.train(crew, batches, active, scale)
            raise Declined(of_backward(error)) from error
        self._keep_idle(crew, active)
        return Trained(masked(losses.detach(), active), {})

    def _keeps_old_buffers(self, crew: Crew, error: BaseException) -> bool:
        """Whether another try may do: a hidden state that the next batch begins with, say."""
        known = self._known_of(crew)
        if known.own_buffers or not known.replaced or "an inplace operation" not in str(error):
            return False
        known.own_buffers = True
        known.notes.append("its backward needs buffers as they were: passes have copies of them")
        return True

    def _keep_idle(self, crew: Crew, active: Sequence[bool]) -> None:
        """Buffers of slots that took no part; autograd needs them as they are until now."""
        if idle := idle_slots(active):
            self._undo.put_back(crew.stacked, idle)

    def _take_back(self, crew: Crew) -> None:
        crew.streams.undo()
        self._undo.put_back(crew.stacked)
        for block in crew.stacked.parameters.values():
            block.grad = None

    def evaluate(self, crew: Crew, batches: Sequence[Any], active: Sequence[bool]) -> Evaluated:
        """One forward for all slots."""
        with torch.no_grad():
            losses, outputs = self._forward(crew, batches, active)
            self._keep_idle(crew, active)
        return Evaluated(masked(losses, active), outputs)

    def hand_out(self, crew: Crew, slots: Sequence[int]) -> None:
        """Gradients' rows become the parameters' gradients; what is there already is added."""
        for name, block in crew.stacked.parameters.items() if slots else ():
            if block.grad is None:
                continue
            rows = block.grad.unbind(0)
            for slot in slots:
                parameter = crew.members[slot].module.get_parameter(name)
                give(parameter, rows[slot])

    # -- a pass, and what to do when it fails ------------------------------------------

    def _forward(
        self, crew: Crew, batches: Sequence[Any], active: Sequence[bool]
    ) -> tuple[Tensor, Sequence[Any]]:
        kind, constant = self._kind(crew), self._constant
        full = filled(batches, active)
        undo = self._undo = Undo.of(crew.stacked, constant.get(kind, ()), idle_slots(active))
        versions = {name: b._version for name, b in crew.stacked.buffers.items()}
        with self._forgetting(crew):
            result = self._tried(crew, full, active)
        found = [
            name
            for name, b in crew.stacked.buffers.items()
            if b.numel() > SMALL and b._version == versions[name]
            if name not in undo.kept or torch.equal(b, undo.kept[name])
        ]
        silent = written_silently(crew.members[0].module) if found else ()
        constant[kind] = tuple(name for name in found if name not in silent)
        return result

    def _tried(
        self, crew: Crew, batches: Sequence[Any], active: Sequence[bool]
    ) -> tuple[Tensor, Sequence[Any]]:
        """A pass, again and again until all that it cannot do is looped."""
        while True:
            crew.streams.begin(active)
            made = batches
            try:
                if self._lacks_inputs(crew, batches):
                    made = self._with_inputs(crew, batches, active)
                self._current(crew).train(crew.members[0].module.training)
                return self._pass(crew, made, active)
            except (Exception, SystemExit) as error:
                crew.streams.undo()
                self._undo.put_back(crew.stacked)
                if is_out_of_memory(error):
                    raise
                self._learn(error, crew)

    @contextmanager
    def _forgetting(self, crew: Crew) -> Iterator[None]:
        """What is learnt inside is forgotten where it ends in an error.

        It may be about the slot that raised: the others train as if that had never been there.
        """
        kind, known = self._kind(crew), self._known_of(crew).copy()
        try:
            yield
        except BaseException:
            self._learnt[kind] = known
            raise
        finally:
            self._doubted = None

    def _pass(
        self, crew: Crew, batches: Sequence[Any], active: Sequence[bool]
    ) -> tuple[Tensor, Sequence[Any]]:
        blocks = {**crew.stacked.given, **crew.stacked.buffers}
        with entered(crew.width) as level:
            slots = Slots(level, crew.streams, active, self._outside())
            batch = combined(batches, level.slotted)
            output, losses = self._code(crew, slots, blocks, batch)
            outputs = [] if torch.is_grad_enabled() else _outputs(level, output)
        return losses, outputs

    def _outside(self) -> Outside | None:
        """Where the next pass has its masks from."""
        return None

    def _code(
        self, crew: Crew, slots: Slots, blocks: Mapping[str, Tensor], batch: Any
    ) -> tuple[Any, Tensor]:
        """Run the model's code on ``blocks``, as of ``Stacked.given``: output and losses [N].

        Buffers that it makes anew are copied into their blocks.
        """
        template, level = self._current(crew), slots.level
        recipe = template.recipe
        tensors = self._within(crew, level, blocks)
        slots.are_rows = functools.partial(shares_memory, blocks.values())
        slots.is_trained = lambda found: next(
            (p.requires_grad for n, p in crew.stacked.parameters.items() if tensors[n] is found),
            None,
        )
        with (
            template.running(slots, crew.stacked, tensors) as replaced,
            SlotMode(slots, own_factories=self._known_of(crew).own_factories),
            autocast(recipe, crew.device),
            tensor_hooks() as hooked,
        ):
            loss, output = loss_and_output(recipe, template.module, batch)
        if hooked:
            raise Declined(HOOKED)
        self._known_of(crew).replaced = tuple(replaced)
        for name, value in replaced.items():
            blocks[name].copy_(level.stacked(value.detach()))
        return output, level.stacked(loss)

    def _within(self, crew: Crew, level: Level, blocks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``blocks``, as of ``Stacked.given``, as the model's code sees them."""
        base, known = crew.stacked.base, self._known_of(crew)
        copied = known.replaced if known.own_buffers else ()
        blocks = {**blocks, **{name: blocks[name].clone() for name in copied}}
        tensors = {n: b if n in base else level.slotted(b) for n, b in blocks.items()}
        for name in base if known.own_base else ():
            one = blocks[name]
            tensors[name] = level.slotted(one.expand(crew.width, *one.shape))
        return tensors

    def _learn(self, error: BaseException, crew: Crew) -> None:
        """Loop the part that failed, so that the pass can be run again; or let the error go up.

        An error that is not known to be about many slots may be: its part is looped on trial,
        and if it comes again it is some slot's own.
        """
        reason, known = _reason(error), self._known_of(crew)
        if isinstance(error, OfMemory) or (reason is None and self._doubted is not None):
            raise error
        part = self._current(crew).innermost(error.__traceback__)
        if isinstance(error, Draws) and part in known.looped and not known.draws_python:
            known.draws_python = True
            return
        is_by_data = isinstance(error, Disagreement) and not isinstance(error, Unbatched)
        if crew.looped is not None and is_by_data:
            raise error  # to loop a part now would round otherwise in all slots
        writes = _writes_what_is_shared(error, reason)
        if writes and not known.own_factories:
            known.own_factories = True
            known.notes.append("what torch.zeros and its like make has a value per slot")
            return
        if writes and crew.stacked.base and not known.own_base:
            known.own_base = True
            known.notes.append(
                "products with frozen weights are each slot's own: code writes a slot's values "
                "into what it makes of them"
            )
            return
        if part == LOSS and reason is None and isinstance(error, Declined):
            raise error  # it reads what no signature tells, in this step or in a later one
        if not part or part in known.looped:
            if reason is None:
                raise error
            line = user_line(error)
            where = f", at {line}" if line else ""
            raise Declined(f"the trials cannot train as one array{where}: {reason}") from error
        known.looped.append(part)
        self._doubted = part if reason is None else None
        words = reason or f"{type(error).__name__}: {first_line(error)}"
        if is_by_data:
            known.by_data.append(part)
        known.notes.append(f"{told_of(part)} runs slot by slot: {words}")

    def _those_that_fail(
        self, crew: Crew, batches: Sequence[Any], active: Sequence[bool], error: BaseException
    ) -> dict[int, BaseException]:
        """Find the slots whose own code or data raise.

        Also where the pass was declined: code that asks a tensor whether to raise answers
        otherwise in the slot that does. Nothing where it is worth another try.

        Raises:
            Declined: there is none.
        """
        found = {
            slot: failure
            for slot in taking_part(active)
            if (failure := error_alone(crew, slot, batches[slot])) is not None
        }
        if found:
            return found
        if isinstance(error, Declined):
            raise error
        if not self._tries_again:
            return {}
        # Alone every slot can do it: the error was the array's.
        line = user_line(error)
        where = f", at {line}" if line else ""
        raise Declined(
            f"the trials run alone and fail as one array{where}: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error

    def _try_again(
        self, crew: Crew, batches: Sequence[Any], active: Sequence[bool], scale: float
    ) -> Trained:
        self._tries_again = True
        try:
            return self.train(crew, batches, active, scale)
        finally:
            self._tries_again = False

    def _train_others(
        self,
        crew: Crew,
        batches: Sequence[Any],
        active: Sequence[bool],
        scale: float,
        found: dict[int, BaseException],
    ) -> Trained:
        """Train the slots that do not fail, as ever."""
        others = [is_active and slot not in found for slot, is_active in enumerate(active)]
        if not any(others):
            return Trained(torch.full((crew.width,), math.nan, dtype=torch.float64), found)
        trained = self.train(crew, batches, others, scale)
        return Trained(trained.losses, {**trained.failures, **found})


def shares_memory(blocks: Iterable[Tensor], stacked: Tensor) -> bool:
    """Whether it is a view of one of these."""
    dense = (block for block in blocks if block.layout == torch.strided)
    memory = stacked.untyped_storage().data_ptr()
    return any(block.untyped_storage().data_ptr() == memory for block in dense)


def written_silently(module: nn.Module) -> frozenset[str]:
    """Names of buffers whose writes leave their version as it is: those of BatchNorm's kernel."""
    norms = [(path, m) for path, m in module.named_modules() if isinstance(m, _NormBase)]
    if not norms:
        return frozenset()
    first = owners(module)
    keys = [f"{path}.{key}" if path else key for path, m in norms for key in m._buffers]
    return frozenset(first[key] for key in keys if key in first)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no room: nobody's code is to blame then."""
    found = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return found or "allocate memory" in str(error)


def _reason(error: BaseException) -> str | None:
    """Why code cannot run for all slots at once; None if the error is about something else."""
    if isinstance(error, Disagreement):
        return str(error)
    text = first_line(error)
    words = ("vmap", "atching rule", "functorch", "BatchedTensor", "Batched", "PerSlot", OF_EACH)
    if isinstance(error, Declined) or not any(word in str(error) for word in words):
        return None
    return f"{type(error).__name__}: {text}"


def _writes_what_is_shared(error: BaseException, reason: str | None) -> bool:
    """Whether a slot's values were to be written into a tensor that all slots have.

    Torch says of a plain ``+=`` only that N times as much does not fit there.
    """
    if reason is None:
        return isinstance(error, RuntimeError) and "match the broadcast shape" in str(error)
    return "inplace" in reason or "all slots share" in reason or "is not possible" in reason


def of_backward(error: BaseException) -> str:
    """Why a backward failed, in words: where Python ran in it, the model's code did."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    is_code = trace is not None and trace.tb_frame.f_code.co_filename != graph.__file__
    said = RUNS_AGAIN.removesuffix(".") if is_code else "the backward of all slots at once fails"
    return f"{said}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """An error's words, or their beginning."""
    return (in_words(error).splitlines() or [""])[0][:200]


def filled(batches: Sequence[Any], active: Sequence[bool]) -> Sequence[Any]:
    """For all slots: those that take no part see the batch of one that does."""
    some = next(batch for batch, is_active in zip(batches, active, strict=True) if is_active)
    pairs = zip(batches, active, strict=True)
    return [batch if is_active else some for batch, is_active in pairs]


def masked(losses: Tensor, active: Sequence[bool]) -> Tensor:
    """Off the device, with NaN where a slot took no part."""
    found = losses.double().cpu()
    if not all(active):
        found = torch.where(torch.tensor(active), found, math.nan)
    return found


def _outputs(level: Level, output: Any) -> Sequence[Any]:
    tensors, form = taken_apart(output)
    return by_slot(form, [level.stacked(tensor) for tensor in tensors], level.width)


def give(parameter: Tensor, row: Tensor) -> None:
    """Add a row of stacked gradients to a parameter's gradient."""
    held = parameter.grad
    if held is None:
        parameter.grad = row
    elif held.data_ptr() != row.data_ptr():
        parameter.grad = row.add_(held)
