"""The eager pass without the Python between its operations: a graph of it, run again and again.

[Note: traced and eager are one]
A graph runs the kernels of the eager pass in the eager order, so its bits are the eager pass's.
That is looked at, not believed: a graph is made beside an eager pass, and it and a second eager
pass have to be equal in every bit before graphs take over. So whoever trains here may at any step
go back to the eager pass, and nobody can tell: where a check fails, an operation raises, the slots
have other floats in their code, or a graph cannot be made at all. Where kernels of a GPU leave
other bits each time, both are compared by kernels that do not (``kernels/kernelchoice.py``).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from shoal.fusion.batches import holds_floats, layout_of, rebuilt, stacked_leaves
from shoal.fusion.crew import Crew, Evaluated, Trained, Undo, idle_slots, taking_part
from shoal.fusion.declined import Untraceable
from shoal.fusion.graphs.constants import constants_of
from shoal.fusion.graphs.graph import Graph, Inputs, Left, Ran, capture
from shoal.fusion.graphs.launcher import Launcher
from shoal.fusion.likeness import same_bits
from shoal.fusion.member import Member
from shoal.fusion.passes.fused import (
    StackedBackend,
    filled,
    is_out_of_memory,
    masked,
    written_silently,
)
from shoal.fusion.passes.idle import add_gradients
from shoal.fusion.passes.outputs import by_slot, taken_apart
from shoal.fusion.passes.outside import Answer, Ask, Given, Heard, Outside, draw
from shoal.fusion.passes.slots import Slots
from shoal.fusion.rows.level import entered
from shoal.kernels.kernelchoice import repeatable

MOST = 6
"""Passes of which graphs are kept: of steps, and of evaluations of batches of a few layouts."""
MOST_WAYS, MOST_STRAYS = 2, 8
"""Graphs of one such pass, for other answers; passes of which none held, until it has none."""
PATIENCE = 32
"""Eager passes between two tries to make a graph again, where slots' floats have changed."""


@dataclass(slots=True, eq=False)
class Kept:
    """One pass's graph, and how far it is trusted."""

    constants: tuple[str, ...] = ()  # of the slots it was made for
    graph: Graph | None = None
    form: Sequence[Any] = ()  # of its output, alone; nothing where nobody reads it
    answers: tuple[Answer, ...] = ()  # that its code had of tensors
    masks: tuple[Ask, ...] = ()
    crew: int = -1  # the members whose rates the masks have
    rates: tuple[str, ...] = ()  # of the slots then, with all other floats
    proven: bool = False  # equal to a second eager pass
    waits: int = 0  # eager passes until the next try
    declined: str = ""

    def forget(self) -> None:
        """Begin anew, after a while."""
        self.graph, self.proven, self.waits = None, False, PATIENCE


@dataclass(slots=True)
class Ways:
    """Graphs of one pass, the last that held first: one for each answer of code that asks.

    A transformer's code asks whether a batch is padded at all, and goes on in another way.
    """

    kept: list[Kept]
    strays: int = 0  # passes of which none held, less those of which one did
    repeats: bool = False  # compared by kernels that repeat themselves, as others do not

    def first(self, kept: Kept) -> None:
        """This one held."""
        self.strays = max(0, self.strays - 1)
        if self.kept[0] is not kept:
            self.kept.remove(kept)
            self.kept.insert(0, kept)

    def for_answers(self, answers: Sequence[Answer]) -> Kept | None:
        """The one that an eager pass with these answers tells of; None: of no graph."""
        if self.strays > MOST_STRAYS:
            self.kept[:] = [Kept(declined="its code goes another way in nearly every batch")]
        for kept in self.kept:
            if kept.graph is None or kept.answers == tuple(answers):
                return kept
        if len(self.kept) == MOST_WAYS:
            return None
        self.kept.append(Kept())
        return self.kept[-1]


class TracedBackend(StackedBackend):
    """Runs graphs of its own eager passes.

    Args:
        launcher: Has a training pass's operations launched as one, where it can; one graph's.

    Attributes:
        is_paused: It trains eagerly, and makes no graphs, for now.
        makes_more: Whether it makes graphs of passes over batches of other layouts.
        quickens: Whether its graphs do without what they need not do.
    """

    quickens = True
    makes_more = True

    def __init__(self, launcher: Launcher | None = None) -> None:
        super().__init__()
        self._launcher = launcher
        self.steps = launcher.of_steps() if launcher else None
        self._launched: Hashable = None  # whose graph that is
        self._ways: dict[Hashable, Ways] = {}
        self._crews = 0
        self._constants: tuple[str, ...] = ()  # of the slots' code now
        self._rates: tuple[str, ...] = ()  # the same with what masks have
        self._known: dict[int, tuple[Any, str, str]] = {}  # both by id of a module
        self._listener: Heard | None = None
        self._dtype = torch.float32  # of losses
        self._weights: tuple[Hashable, Tensor] | None = None  # the last ones, and of what
        self.is_paused = False

    def changed(self, crew: Crew) -> None:
        """Rates may be others now; graphs stay good where the floats of the code are the same."""
        super().changed(crew)
        self._crews += 1
        self._known = {  # keeps the modules, so that no other gets one's id
            id(m.module): self._known.get(id(m.module)) or _told(m) for m in crew.members
        }
        told = [self._known[id(m.module)] for m in crew.members]
        self._constants, self._rates = (tuple(one[at] for one in told) for at in (1, 2))

    def rest(self) -> None:
        """Hold on to no trial; graphs stay, for an array of the same trials' kind."""
        self._templates.clear()
        self._known.clear()
        self._undo = Undo()

    @property
    def why_eager(self) -> str:
        """Why some pass has no graph; empty if all have one, or may get one yet."""
        return next((kept.declined for kept in self._all() if kept.declined), "")

    @property
    def learns(self) -> bool:
        """Whether some pass has a graph that is to be compared still, or may get one."""
        return any(not (kept.proven or kept.declined) for kept in self._all())

    @property
    def nodes(self) -> int:
        """Of the largest graph there is."""
        return max((k.graph.nodes for k in self._all() if k.graph is not None), default=0)

    def _all(self) -> Iterator[Kept]:
        return chain.from_iterable(ways.kept for ways in self._ways.values())

    def train(
        self, crew: Crew, batches: Sequence[Any], active: Sequence[bool], scale: float
    ) -> Trained:
        """By a graph where there is one, else eagerly."""
        if self.is_paused:
            return super().train(crew, batches, active, scale)
        with self._fed(crew, batches, active) as ready:
            return self._train(crew, ready, active, scale)

    def _train(
        self, crew: Crew, batches: Sequence[Any], active: Sequence[bool], scale: float
    ) -> Trained:
        ways = self._ways_for(crew, filled(batches, active))
        replayed = self._replayed(ways, crew, batches, active, scale) if ways else None
        if replayed is not None:
            ran, _ = replayed
            add_gradients(crew.stacked.parameters, ran.gradients, active, adds=scale != 1)
            return Trained(masked(ran.losses, active), {})
        is_first = all(block.grad is None for block in crew.stacked.parameters.values())
        with self._listening(crew) as heard, _kernels(ways, crew), _unwritten(ways, crew):
            trained = super().train(crew, batches, active, scale)
        lacks = self._lacks_inputs(crew, batches)  # as it turned out
        if ways is not None and is_first and not trained.failures and not lacks:
            blocks = crew.stacked.parameters
            gradients = {k: b.grad for k, b in blocks.items() if b.grad is not None}
            inputs = self._inputs(crew, (), batches, active, scale)
            eager = Ran(trained.losses, gradients, (), True)
            self._learn_from(ways, crew, inputs, filled(batches, active)[0], active, heard, eager)
        return trained

    def evaluate(self, crew: Crew, batches: Sequence[Any], active: Sequence[bool]) -> Evaluated:
        """By a graph where there is one, else eagerly."""
        with torch.no_grad(), self._fed(crew, batches, active) as ready:
            return self._evaluate(crew, ready, active)

    def _evaluate(self, crew: Crew, batches: Sequence[Any], active: Sequence[bool]) -> Evaluated:
        ways = self._ways_for(crew, filled(batches, active))
        replayed = self._replayed(ways, crew, batches, active, None) if ways else None
        if replayed is not None:
            ran, form = replayed
            outputs = _unstacked(form, ran.others, crew.width)
            return Evaluated(masked(ran.losses, active), outputs)
        with self._listening(crew) as heard, _kernels(ways, crew), _unwritten(ways, crew):
            found = super().evaluate(crew, batches, active)
        if ways is not None and not self._lacks_inputs(crew, batches):
            inputs = self._inputs(crew, (), batches, active, None)
            others = _stacked(found.outputs) if crew.members[0].recipe.metrics else ()
            eager = Ran(found.losses, {}, others, True)
            one = filled(batches, active)[0]
            self._learn_from(ways, crew, inputs, one, active, heard, eager)
        return found

    # -- which graph ----------------------------------------------------------------------

    def _ways_for(self, crew: Crew, batches: Sequence[Any]) -> Ways | None:
        """What is known of a pass over such batches; None where there can be no graph."""
        if holds_floats(batches[0]) or self._lacks_inputs(crew, batches):
            return None
        is_training = crew.members[0].module.training
        key = (torch.is_grad_enabled(), is_training, layout_of(batches[0]))
        if key not in self._ways and (len(self._ways) >= MOST or not self.makes_more):
            return None
        return self._ways.setdefault(key, Ways([Kept()]))

    def _is_ready(self, kept: Kept) -> bool:
        if kept.graph is None or not kept.proven or kept.constants != self._constants:
            return False
        return self._knows_masks(kept)

    def _knows_masks(self, kept: Kept) -> bool:
        """Whether slots have the rates that they had when an eager pass drew these masks."""
        return kept.crew == self._crews or kept.rates == self._rates

    def _inputs(
        self,
        crew: Crew,
        masks: Sequence[Ask],
        batches: Sequence[Any],
        active: Sequence[bool],
        scale: float | None,
    ) -> Inputs:
        """What a graph runs on; draws the masks. ``scale``: of losses, None without a backward."""
        crew.streams.begin(active)  # also without masks: from here it is undone
        weights = None if scale is None else self._weights_of(crew, active, scale)
        return Inputs(
            crew.stacked.given,
            crew.stacked.buffers,
            stacked_leaves(filled(batches, active)),
            [draw(crew.streams, mask) for mask in masks],
            weights,
        )

    def _weights_of(self, crew: Crew, active: Sequence[bool], scale: float) -> Tensor:
        """[N], of the slots' losses; a GPU would be waited for to have them anew."""
        key = (tuple(active), self._dtype, crew.device, scale)
        if self._weights is None or self._weights[0] != key:
            found = torch.tensor(active, dtype=self._dtype, device=crew.device) * scale
            self._weights = key, found
        return self._weights[1]

    def _replayed(
        self,
        ways: Ways,
        crew: Crew,
        batches: Sequence[Any],
        active: Sequence[bool],
        scale: float | None,
    ) -> tuple[Ran, Sequence[Any]] | None:
        """By the graph whose answers are those of these batches, with the form of its output."""
        ready = [kept for kept in ways.kept if self._is_ready(kept)]
        for kept in ready:
            inputs = self._inputs(crew, kept.masks, batches, active, scale)
            if (ran := self._replay(kept, crew, inputs, active)) is not None:
                ways.first(kept)
                return ran, kept.form
        ways.strays += bool(ready)
        return None

    def _replay(
        self, kept: Kept, crew: Crew, inputs: Inputs, active: Sequence[bool]
    ) -> Ran | None:
        """Run the graph; None where it cannot say what the eager pass would, and all is undone."""
        assert kept.graph is not None
        writes = kept.graph.writes
        undo = Undo.of(crew.stacked, [name for name in crew.stacked.buffers if name not in writes])
        try:
            ran = kept.graph(inputs)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            ran = None
        if ran is None or not ran.holds:
            crew.streams.undo()
            undo.put_back(crew.stacked)
            return None
        if idle := idle_slots(active):
            undo.put_back(crew.stacked, idle)
        return ran

    # -- how one is made ------------------------------------------------------------------

    @contextmanager
    def _listening(self, crew: Crew) -> Iterator[Heard]:
        heard = self._listener = Heard(crew.streams)
        try:
            yield heard
        finally:
            self._listener = None

    def _outside(self) -> Outside | None:
        if self._listener is not None:
            self._listener.restart()  # what an earlier try drew was undone
        return self._listener

    def _learn_from(
        self,
        ways: Ways,
        crew: Crew,
        inputs: Inputs,
        batch: Any,
        active: Sequence[bool],
        heard: Heard,
        eager: Ran,
    ) -> None:
        """Make a graph beside this eager pass, or hold the one that there is against it."""
        kept = ways.for_answers(heard.answers)
        if kept is None or kept.declined:
            return
        if kept.waits and kept.constants != self._constants:
            kept.waits -= 1
            return
        before = {**crew.stacked.buffers, **self._undo.kept}
        inputs = replace(inputs, buffers=before, masks=heard.drawn)
        try:
            if kept.graph is not None and kept.constants != self._constants:
                kept.forget()
                return
            with _kernels(ways, crew):
                if kept.graph is None:
                    self._make(kept, crew, inputs, batch, active, heard.answers)
                elif kept.proven:  # by other members, whose rates may have gone elsewhere too
                    self._require_masks(kept, heard)
                self._hold_against(kept, crew, inputs, active, eager)
        except _OtherBits as error:
            kept.graph, kept.proven = None, False
            if ways.repeats or not _varies(crew.device):
                kept.declined = str(error)
            ways.repeats = True
        except Untraceable as error:
            kept.declined, kept.graph = str(error), None
        kept.masks, kept.crew, kept.rates = tuple(heard.asked), self._crews, self._rates

    def _make(
        self,
        kept: Kept,
        crew: Crew,
        inputs: Inputs,
        batch: Any,
        active: Sequence[bool],
        answers: Sequence[Answer],
    ) -> None:
        kept.constants, kept.waits, kept.answers = self._constants, 0, tuple(answers)
        kept.graph, kept.form = self._captured(crew, inputs, batch, active, answers)
        kept.crew = -1

    def _captured(
        self,
        crew: Crew,
        inputs: Inputs,
        batch: Any,
        active: Sequence[bool],
        answers: Sequence[Answer] | None,
    ) -> tuple[Graph, Sequence[Any]]:
        """A graph of the pass, and the form of its output; ``answers`` as of ``Given``.

        Raises:
            Untraceable: there is none.
        """
        form: list[Any] = []
        wants_outputs = inputs.weights is None and bool(crew.members[0].recipe.metrics)

        def code(
            blocks: Mapping[str, Tensor], leaves: Sequence[Tensor], masks: Sequence[Tensor]
        ) -> Left:
            outside, others = Given(masks, answers), []
            with entered(crew.width) as level:
                slots = Slots(level, crew.streams, active, outside)
                mine = rebuilt(batch, iter([level.slotted(leaf) for leaf in leaves]))
                output, losses = self._code(crew, slots, blocks, mine)
                if wants_outputs:
                    tensors, left = taken_apart(output)
                    others = [level.stacked(tensor) for tensor in tensors]
                    form.append(left)
            return Left(losses, outside.checks, others)

        graph = capture(code, inputs)
        if self.quickens:
            graph.quicken()
        if (module := crew.members[0].module).training:  # this batch may leave them as they were
            graph.writes = tuple(dict.fromkeys((*graph.writes, *written_silently(module))))
        graph.look(inputs)
        way = layout_of(batch), tuple(answers or ())
        self._launch(graph, inputs, way, sums=crew.members[0].recipe.accumulate > 1)
        return graph, form[-1:]

    def _launch(self, graph: Graph, inputs: Inputs, way: Hashable, *, sums: bool) -> None:
        """Of the batches that are met first; what it holds of a GPU's memory is held for good."""
        is_first = self._launched is None or self._launched == way
        if self._launcher is None or inputs.weights is None or not is_first:
            return
        self._launched, held = way, len(inputs.parameters)
        written = [held + at for at, name in enumerate(inputs.buffers) if name in graph.writes]
        graph.run = self._launcher.of_graph(graph.run, held, written, hands_out=sums)

    def _code(self, crew: Crew, slots: Slots, blocks: Any, batch: Any) -> tuple[Any, Tensor]:
        output, losses = super()._code(crew, slots, blocks, batch)
        self._dtype = losses.dtype
        return output, losses

    def _require_masks(self, kept: Kept, heard: Heard) -> None:
        if [mask.shape for mask in kept.masks] != [mask.shape for mask in heard.asked]:
            raise Untraceable("which masks it draws depends on more than its settings")

    def _hold_against(
        self, kept: Kept, crew: Crew, inputs: Inputs, active: Sequence[bool], eager: Ran
    ) -> None:
        """Run the graph from where the eager pass began; both have to leave the same bits."""
        assert kept.graph is not None
        copies = inputs.copied()
        ran = kept.graph(copies)
        if ran.gradients.keys() != eager.gradients.keys() or not ran.holds:
            raise Untraceable("its graph finds other gradients than the pass")
        pairs = [(masked(ran.losses, active), eager.losses)]
        pairs += list(zip(ran.others, eager.others, strict=True))
        blocks = [(copies.buffers[name], crew.stacked.buffers[name]) for name in copies.buffers]
        blocks += [(ran.gradients[name], eager.gradients[name]) for name in ran.gradients]
        if not all(same_bits(*pair) for pair in pairs) or not _same_rows(blocks, active):
            raise _OtherBits("its graph comes to other bits than the pass")
        kept.proven = kept.crew != -1  # the second time


class _OtherBits(Untraceable):
    """A graph computes what the pass does, but for some bits."""


def _varies(device: torch.device) -> bool:
    """Whether one pass may leave other bits each time."""
    return device.type == "cuda"


def _kernels(ways: Ways | None, crew: Crew) -> AbstractContextManager[None]:
    """Those by which a pass and its graph are compared; for passes that are not launched."""
    if ways is None or not ways.repeats or all(kept.declined for kept in ways.kept):
        return nullcontext()
    return repeatable(crew.device)


@contextmanager
def _unwritten(ways: Ways | None, crew: Crew) -> Iterator[None]:
    """No graph is made of an eager pass, run in here, that wrote to parameters.

    To make one, and to compare it, is to write to them again.
    """
    blocks = crew.stacked.parameters.items() if ways is not None else ()
    versions = [block._version for _, block in blocks]
    yield
    written = [n for (n, b), before in zip(blocks, versions, strict=True) if b._version != before]
    for kept in ways.kept if ways is not None and written else ():
        kept.graph, kept.declined = None, f"its forward writes to the parameter {written[0]!r}"


def _told(member: Member) -> tuple[Any, str, str]:
    """A member's module, the floats of its code, and the same with its masks' rates."""
    recipe, module = member.recipe, member.module
    return module, constants_of(recipe, module), constants_of(recipe, module, rates=True)


def _same_rows(pairs: Sequence[tuple[Tensor, Tensor]], active: Sequence[bool]) -> bool:
    """Whether stacked tensors have the same bits in the slots that take part."""
    if all(active):
        return all(same_bits(*pair) for pair in pairs)
    rows = taking_part(active)
    return all(same_bits(one[slot], other[slot]) for one, other in pairs for slot in rows)


def _stacked(outputs: Sequence[Any]) -> list[Tensor]:
    """The tensors of all slots' outputs, put back into one for each."""
    columns = zip(*(taken_apart(output)[0] for output in outputs), strict=True)
    return [torch.stack(column) for column in columns]


def _unstacked(form: Sequence[Any], leaves: Sequence[Tensor], width: int) -> Sequence[Any]:
    """Each slot's output; nothing where nobody reads it."""
    return by_slot(form[0], leaves, width) if form else [None] * width
