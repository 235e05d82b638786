"""Steps of the users' own as an array: each slot's code, and one pass of each model for all.

[Note: where slots meet]
Every slot's step runs as it does alone, on the slot's own modules, optimizers and batch; its
parameters and buffers are rows of the array's. Two things are done for all slots at a time:

    models.generator(z)    a pass of the stacked models; each slot has its row of the output, with
                           autograd's graph of the pass behind it
    loss.backward()        one backward from all slots' losses through these graphs; each slot's
                           parameters have their rows of the gradients

Losses, clipping and the optimizers' steps are each slot's own, in its own random streams. What is
not seen (a method of a model, one of its parts) runs on the slot's rows, and is right too; so does
a model with other tensors or hooks in it for a while (``functional_call``). Slots that ask for
different things are answered one after another, each by a pass of the whole width, so that a
slot's bits depend on its slot and the width alone. A step that leaves a model's code another than
it was (an attribute, a hook, a parameter) is declined: a pass has a copy of the code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from shoal.core.errors import TrialError
from shoal.fusion.batches import combined, layout_of
from shoal.fusion.crew import Crew, Undo
from shoal.fusion.declined import Declined, answers_of
from shoal.fusion.likeness import RowAt, Snapshot, row_at
from shoal.fusion.passes.fused import Learnt, StackedBackend, first_line, give, is_out_of_memory
from shoal.fusion.passes.meeting import Lanes, Run, current_run, in_turns
from shoal.fusion.passes.mode import SlotMode
from shoal.fusion.passes.numbering import Numbers
from shoal.fusion.passes.reach import by_passes, rows_of
from shoal.fusion.passes.slots import Slots
from shoal.fusion.passes.template import Template
from shoal.fusion.rows.installed import places_of
from shoal.fusion.rows.level import entered
from shoal.fusion.rows.stacked import owners
from shoal.recipes.ownstep import Losses, OwnStep
from shoal.recipes.several import Models

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a model's forward."""


class OwnStepped(NamedTuple):
    """What one call in each slot came to."""

    losses: Mapping[int, Losses]
    failures: Mapping[int, BaseException]


class _How(NamedTuple):
    """How a pass runs; equal in slots that share one."""

    name: str
    grad: bool
    autocast: tuple[bool, torch.dtype]
    modes: tuple[bool, ...]  # of the model's modules
    trains: tuple[bool, ...]  # which parameters require a gradient


class _Backward(NamedTuple):
    """The arguments of ``torch.autograd.backward``."""

    tensors: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    retain: bool


class OwnSteps:
    """Runs the steps of one crew's slots; see [Note: where slots meet]."""

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}
        self._seats: list[_Seat] = []
        self._crew: Crew | None = None
        self._lanes = Lanes()
        self._numbers = Numbers()

    @property
    def notes(self) -> Sequence[str]:
        """In words, what runs slot by slot and why."""
        found = [
            f"in {name!r} {note}" if name else note
            for name, model in self._models.items()
            for note in model.notes
        ]
        return "what a step does between its models runs slot by slot", *found

    @property
    def by_data(self) -> Sequence[str]:
        """Parts that run slot by slot because slots came to decide otherwise there."""
        every = [(name, part) for name, model in self._models.items() for part in model.by_data]
        return tuple(f"{name}.{part}" if name else part for name, part in every)

    def changed(self, crew: Crew) -> None:
        """The crew has other members than before."""
        self._crew = None

    def _take(self, crew: Crew) -> None:
        if self._crew is crew:
            return
        self._crew = crew
        first = crew.members[0].module
        for name in first.named() if isinstance(first, Models) else ("",):
            self._models.setdefault(name, _Model()).take(_part(crew, name))
        before = {id(seat.module): seat for seat in self._seats}  # the trials that stay
        self._seats = [
            _Seat(crew, slot, list(self._models), before.get(id(member.module)))
            for slot, member in enumerate(crew.members)
        ]

    def step(self, crew: Crew, batches: Sequence[Any], active: Sequence[bool]) -> OwnStepped:
        """Call the recipe's step once in each slot that takes part.

        Raises:
            Declined: the models cannot run as one array; some optimizers may have stepped.
        """
        self._take(crew)
        self._numbers.lead()
        inside = _like_this_thread(crew.device, self._numbers)
        taking = [seat for seat in self._seats if active[seat.slot]]
        with ExitStack() as stack:
            stack.enter_context(_backwards_seen(self._seats))
            for seat in taking:
                stack.enter_context(seat.asking())
            runs = [
                Run(seat.slot, seat.work(batches[seat.slot]), inside, self._lanes)
                for seat in taking
            ]
            in_turns(runs, self._answer, crew.streams.turn)
        return self._stepped(runs)

    def _stepped(self, runs: Sequence[Run]) -> OwnStepped:
        losses, failures = {}, {}
        for run in runs:
            if isinstance(run.failure, Declined):  # what no array can do is nobody's failure
                raise run.failure
            failure = run.failure or self._seats[run.slot].end()
            if failure is not None:
                failures[run.slot] = failure
            else:
                losses[run.slot] = run.result
        return OwnStepped(losses, failures)

    # -- answers ----------------------------------------------------------------------

    def _answer(self, group: Sequence[Run], are_all: bool) -> None:
        assert self._crew is not None
        if isinstance(group[0].asked, _Backward):
            self._backward(self._crew, group, retain=not are_all)
            return
        how = group[0].key[0]  # type: ignore[index]  # of a pass it is a pair
        group = [run for run in group if self._is_settled(run)]
        if not group:
            return
        model, slots = self._models[how.name], [run.slot for run in group]
        calls: list[Call | None] = [None] * self._crew.width
        for run in group:
            calls[run.slot] = run.asked
        try:
            outputs = model.call(how, calls, slots)
        except (Exception, SystemExit) as error:
            for alike in (answers := answers_of(error)):
                self._answer([run for run in group if run.slot in alike], are_all)
            if answers:
                return
            is_declined = isinstance(error, Declined)
            if is_out_of_memory(error) or (is_declined and len(group) == 1):
                raise
            # Declined may be one that asks a tensor whether to raise: the others answer otherwise.
            if not _one_by_one(model, how, calls, group) and is_declined:
                raise
            return
        for run in group:
            run.answer(outputs[run.slot])

    def _is_settled(self, run: Run) -> bool:
        """Whether a pass reads what the slot has; a run of which it cannot fails."""
        error = self._seats[run.slot].settle_parameters()
        if error is not None:
            run.fail(error)
        return error is None

    def _backward(self, crew: Crew, group: Sequence[Run], *, retain: bool) -> None:
        """One backward from the tensors of all; gradients become the slots' parameters'.

        Slots whose tensors come from other passes are another backward: of a parameter that only
        others' passes read a slot gets no gradient, as alone, and not one of zeros.
        """
        alike = by_passes(group)
        for at, some in enumerate(alike):
            self._backward_of(crew, some, retain=retain or at + 1 < len(alike))

    def _backward_of(self, crew: Crew, group: Sequence[Run], *, retain: bool) -> None:
        tensors = [t for run in group for t in run.asked.tensors]
        gradients = [g for run in group for g in run.asked.gradients]
        retain = retain or group[0].asked.retain
        try:
            torch.autograd.backward(tensors, gradients, retain_graph=retain)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise Declined(f"a backward of all slots raised: {first_line(error)}") from error
        for name, block in crew.stacked.parameters.items():
            if block.grad is None:
                continue
            rows = block.grad.unbind(0)
            block.grad = None
            for run in group:
                parameter = self._seats[run.slot].parameters[name]
                if parameter.requires_grad:
                    give(parameter, rows[run.slot])


def _one_by_one(
    model: _Model, how: _How, calls: Sequence[Call | None], group: Sequence[Run]
) -> bool:
    """Whose call it is that raises fails, and no other; whether there is one."""
    has_failed = False
    for run in group:
        try:
            run.answer(model.call(how, calls, [run.slot])[run.slot])
        except Declined:
            raise
        except (Exception, SystemExit) as error:
            run.fail(error)
            has_failed = True
    return has_failed


# ---------------------------------------------------------------- one model of all slots


class _Model(StackedBackend):
    """A model that all slots have, called with each slot's own arguments."""

    def __init__(self) -> None:
        super().__init__()
        self._of: Crew | None = None
        self._how: _How | None = None

    def take(self, crew: Crew) -> None:
        """The slots' models from now on."""
        self._of = crew
        self.changed(crew)

    def _kind(self, crew: Crew) -> Hashable:
        assert self._how is not None
        return self._how.modes

    def _made(self, crew: Crew, known: Learnt) -> Template:
        with _as_ever(member.module for member in crew.members):  # it is a copy of them
            return super()._made(crew, known)

    def call(self, how: _How, calls: Sequence[Call | None], slots: Sequence[int]) -> list[Any]:
        """The outputs of ``slots``; the others' random streams and buffers stay as they are."""
        assert self._of is not None
        crew, self._how = self._of, how
        active = [slot in slots for slot in range(crew.width)]
        idle = [slot for slot in range(crew.width) if slot not in slots]
        before = Undo.of(crew.stacked) if idle else Undo()
        enabled, dtype = how.autocast
        kind = crew.device.type
        with torch.set_grad_enabled(how.grad), torch.autocast(kind, dtype, enabled=enabled):
            outputs, _ = self._forward(crew, calls, active)
        before.put_back(crew.stacked, idle)
        return list(outputs)

    def _pass(self, crew: Crew, batches: Sequence[Any], active: Sequence[bool]) -> Any:
        template, how = self._current(crew), self._how
        assert how is not None
        for module, training in zip(template.module.modules(), how.modes, strict=True):
            module.training = training
        blocks: dict[str, Tensor] = dict(crew.stacked.buffers)
        for (name, block), trains in zip(crew.stacked.parameters.items(), how.trains, strict=True):
            blocks[name] = block.requires_grad_() if trains else block.detach()
        with entered(crew.width) as level:
            slots = Slots(level, crew.streams, active)
            tensors = {name: level.slotted(block) for name, block in blocks.items()}
            inputs: list[Any] = []

            def join(stacked: Tensor) -> Tensor:
                if stacked.grad_fn is not None:
                    inputs.append(stacked.grad_fn)
                return level.slotted(stacked)

            arguments, keywords = combined(batches, join, active)
            with (
                template.running(slots, crew.stacked, tensors) as replaced,
                SlotMode(slots, own_factories=self._known_of(crew).own_factories),
            ):
                output = template.module(*arguments, **keywords)
            for name, value in replaced.items():
                crew.stacked.buffers[name].data.copy_(level.stacked(value.detach()))
            outputs = rows_of(level, output, inputs)
        return outputs, ()


def _part(crew: Crew, name: str) -> Crew:
    """The crew as if this model were all it had."""
    if not name:
        return crew
    prefix = f"{name}."
    child = _child(crew.members[0].module, name)
    owner = owners(crew.members[0].module)
    stacked = crew.stacked.part(
        {key: owner[prefix + key] for key, _ in child.named_parameters()},
        {key: owner[prefix + key] for key, _ in child.named_buffers()},
    )
    members = [dataclasses.replace(m, module=_child(m.module, name)) for m in crew.members]
    looped = crew.looped and [p.removeprefix(prefix) for p in crew.looped if p.startswith(prefix)]
    return Crew(members, stacked, crew.streams, crew.device, looped)


def _child(module: nn.Module, name: str) -> nn.Module:
    return module.named()[name] if name and isinstance(module, Models) else module


# ---------------------------------------------------------------- within a slot's code


class _Seat:
    """A slot: its trial's step, and its models, which ask for passes while it runs."""

    def __init__(
        self, crew: Crew, slot: int, names: Sequence[str], before: _Seat | None = None
    ) -> None:
        self.slot, self._crew, self._member = slot, crew, crew.members[slot]
        module = self.module = self._member.module
        self.parameters = dict(module.named_parameters())
        blocks = crew.stacked.parameters
        self.blocks = {id(p): blocks[name] for name, p in self.parameters.items()}
        self._at = [(p, row_at(blocks[name], slot)) for name, p in self.parameters.items()]
        places = places_of(module, owners(module)).buffers
        buffers = crew.stacked.buffers
        self._buffers_at = [RowAt(p.store, p.key, row_at(buffers[p.owner], slot)) for p in places]
        models = [(name, _child(module, name)) for name in names]
        self._known: dict[str, Snapshot] = (
            before._known if before else {name: Snapshot(model) for name, model in models}
        )
        self._asking = [
            (model, _Asking(name, model, self._known[name], self._buffers_of(model)))
            for name, model in models
        ]
        self._own: OwnStep | None = None

    def work(self, batch: Any) -> Callable[[], Losses]:
        """A call of its step."""
        member = self._member
        assert member.modes is not None
        if self._own is None:
            self._own = OwnStep(
                member.recipe,
                member.module,
                member.optimizer,
                member.hp,
                member.modes,
                by_kernel=True,
            )
        own = self._own

        return lambda: own(batch, member.step)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Have its models' forwards ask for passes inside."""
        before = [model.__dict__.get("forward") for model, _ in self._asking]
        for model, forward in self._asking:
            model.__dict__["forward"] = forward
        try:
            yield
        finally:
            for (model, _), was in zip(self._asking, before, strict=True):
                if was is None:
                    del model.__dict__["forward"]
                else:
                    model.__dict__["forward"] = was

    def _buffers_of(self, model: nn.Module) -> list[RowAt]:
        stores = {id(module._buffers) for module in model.modules()}
        return [at for at in self._buffers_at if id(at.store) in stores]

    def end(self) -> TrialError | None:
        """Have what a step put in the place of its tensors in its rows, or why it cannot be.

        Raises:
            Declined: the step has changed what a pass has a copy of.
        """
        for name, known in self._known.items():
            change = known.change()
            if change:
                model = f"the model {name!r}" if name else "a model"
                raise Declined(
                    f"the step changes {change} of {model}, "
                    "which a pass for all slots does not see."
                )
        if all(place.is_there() for place in self._buffers_at):
            return self.settle_parameters()
        return _settled(lambda: self._crew.stacked.settle(self.slot, self.module))

    def settle_parameters(self) -> TrialError | None:
        """The same of parameters' data, in the middle of a step.

        A model with other buffers runs on its slot's: they may be there for a while only.
        """
        if all(p.data_ptr() == at for p, at in self._at):
            return None
        return _settled(self._put_parameters)

    def _put_parameters(self) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                row = self._crew.stacked.parameters[name].data[self.slot]
                if parameter.data_ptr() != row.data_ptr():
                    row.copy_(parameter)
                    parameter.data = row

    # -- backwards of its code ----------------------------------------------------------

    def backward(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        """``torch.autograd.backward``, for all slots.

        Raises:
            Declined: what only a graph of its own could do.
        """
        if create_graph or inputs is not None or grad_variables is not None:
            raise Declined(
                "a backward with create_graph= or inputs= cannot be done for all slots at once."
            )
        some = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        given = (grad_tensors,) if isinstance(grad_tensors, Tensor) else grad_tensors
        gradients = tuple(given) if given is not None else (None,) * len(some)
        run = current_run()
        assert run is not None
        key: Hashable = ("backward", len(some), bool(retain_graph))
        run.ask(key, _Backward(some, gradients, bool(retain_graph)))

    def grad(self, real: Any, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """``torch.autograd.grad``, slot by slot: the graph of all stays for the others."""
        some = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        blocks = [self.blocks.get(id(tensor)) for tensor in some]
        read = [t if block is None else block for t, block in zip(some, blocks, strict=True)]
        names = ("grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused")
        options = {**dict(zip(names, args, strict=False)), **kwargs, "retain_graph": True}
        found = real(outputs, read, **options)
        return tuple(
            gradient if block is None or gradient is None else gradient[self.slot]
            for gradient, block in zip(found, blocks, strict=True)
        )


def _settled(put: Callable[[], None]) -> TrialError | None:
    try:
        put()
    except RuntimeError as error:
        return TrialError(
            "the step put a tensor of another shape in the place of a parameter or buffer: "
            f"{first_line(error)}. A trial's tensors keep their shapes."
        )
    return None


class _Asking:
    """A model's forward that asks for a pass, in code that runs in turns."""

    def __init__(
        self, name: str, module: nn.Module, known: Snapshot, buffers: Sequence[RowAt]
    ) -> None:
        self._name, self._alone = name, module.forward
        self._known, self._buffers = known, buffers
        self._modules, self._parameters = list(module.modules()), list(module.parameters())
        self._kind = self._parameters[0].device.type if self._parameters else "cpu"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output; its own forward's where a pass for all would not see what it is.

        That is code that does not run in turns, and a model with other tensors or hooks in it.
        """
        run = current_run()
        if run is None or self._known.change() or not self._has_its_buffers():
            return self._alone(*args, **kwargs)
        kind = self._kind
        how = _How(
            name=self._name,
            grad=torch.is_grad_enabled(),
            autocast=(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
            modes=tuple(module.training for module in self._modules),
            trains=tuple(parameter.requires_grad for parameter in self._parameters),
        )
        return run.ask((how, layout_of((args, kwargs))), (args, kwargs))

    def _has_its_buffers(self) -> bool:
        return all(place.is_there() for place in self._buffers)


@contextmanager
def _as_ever(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Modules without the forwards that ask."""
    found = [
        (module.__dict__, forward)
        for each in modules
        for module in each.modules()
        if isinstance(forward := module.__dict__.get("forward"), _Asking)
    ]
    for attributes, _ in found:
        attributes.pop("forward", None)
    try:
        yield
    finally:
        for attributes, forward in found:
            attributes["forward"] = forward


@contextmanager
def _backwards_seen(seats: Sequence[_Seat]) -> Iterator[None]:
    """Have backwards of code that runs in turns go to its seat; ``Tensor.backward`` is one.

    A mode that sees every operation would see these too, at the price of a microsecond for each
    other operation. Code that has imported ``grad`` by itself is not seen: then the array's step
    is not the step alone, which the dry run finds.
    """
    backward, grad = torch.autograd.backward, torch.autograd.grad

    def seen_backward(*args: Any, **kwargs: Any) -> Any:
        run = current_run()
        return (backward if run is None else seats[run.slot].backward)(*args, **kwargs)

    def seen_grad(*args: Any, **kwargs: Any) -> Any:
        run = current_run()
        if run is None:
            return grad(*args, **kwargs)
        return seats[run.slot].grad(grad, *args, **kwargs)

    torch.autograd.backward, torch.autograd.grad = seen_backward, seen_grad
    try:
        yield
    finally:
        torch.autograd.backward, torch.autograd.grad = backward, grad


def _like_this_thread(device: torch.device, numbers: Numbers) -> Callable[[], Any]:
    """What a thread of a run has of the one that drives it: threads, stream, who is counting."""
    threads, modes = torch.get_num_threads(), list(_get_current_dispatch_mode_stack())
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextmanager
    def inside() -> Iterator[None]:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            if stream is not None:
                stack.enter_context(torch.cuda.device(device))
                stack.enter_context(torch.cuda.stream(stream))
            numbers.follow()
            stack.callback(numbers.note)
            for mode in modes:
                stack.enter_context(mode)
            yield

    return inside
