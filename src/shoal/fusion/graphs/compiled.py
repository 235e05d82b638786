"""A step's pass as compiled code: its graph, compiled by torch's Inductor.

[Note: what compiled bits depend on]
Compiled code sums in other orders than the eager pass, so a trial trains by it from its first step
to its last, or not at all: which it is, and the compiler, are in its numerics key. One graph holds
for all slots, so that its code depends on no neighbour: the floats of the slots' code have to be
equal (rates of dropouts aside, whose masks are drawn outside), and a trial with others is declined
when it comes. Evaluations, and batches of another layout than the usual one, run as in any array.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.core.arraykeys import INPUTS
from shoal.fusion.crew import Crew, Trained
from shoal.fusion.declined import Declined, Untraceable
from shoal.fusion.graphs.constants import constants_of
from shoal.fusion.graphs.graph import Graph, Inputs
from shoal.fusion.graphs.traced import Kept, TracedBackend
from shoal.fusion.member import Member
from shoal.fusion.passes.fused import filled, is_out_of_memory, masked
from shoal.fusion.passes.idle import add_gradients
from shoal.fusion.passes.template import told_of

NEAR, NEAR_BF16 = 1e-3, 1e-1
"""By how much a compiled pass's losses may differ from the eager pass's: by rounding."""


class CompiledBackend(TracedBackend):
    """Steps by compiled code; evaluates as ``TracedBackend`` does.

    ``constants``: the floats that every trial's code has to have (``constants_of``); those of the
    first that comes, if nothing is said.
    """

    quickens = False  # the compiler does that, and knows torch's operations alone

    def __init__(self, constants: str = "") -> None:
        super().__init__()
        self._wanted = constants
        self._steps = Kept()

    def require(self, member: Member) -> None:
        """Refuse a trial whose code has other floats, or a step of one's own.

        Raises:
            Declined: it has.
        """
        if member.recipe.step is not None:
            raise Declined("its recipe has a step of its own, which is no graph to compile.")
        found = constants_of(member.recipe, member.module)
        self._wanted = self._wanted or found
        if found != self._wanted:
            raise Declined(
                "the code of its array is compiled, with floats (an eps, a momentum, a smoothing) "
                "that are others in this trial."
            )

    def train(
        self, crew: Crew, batches: Sequence[Any], active: Sequence[bool], scale: float
    ) -> Trained:
        """By compiled code, always.

        Raises:
            Declined: there is none for this model, or its floats differ between the slots.
        """
        with self._fed(crew, batches, active) as ready:
            found = self._compiled(crew, ready, active, scale)
        return found or self.train(crew, batches, active, scale)

    def _compiled(
        self, crew: Crew, batches: Sequence[Any], active: Sequence[bool], scale: float
    ) -> Trained | None:
        """None where it has turned out that inputs are made slot by slot."""
        if self._lacks_inputs(crew, batches):
            raised = RuntimeError("what makes the model's inputs raised")
            return self._without_those_that_fail(crew, batches, active, scale, raised)
        kept, full = self._steps, filled(batches, active)
        if kept.graph is None or not self._knows_masks(kept):
            try:
                self._make_ready(kept, crew, batches, active)
            except Untraceable as error:
                raise Declined(f"its steps cannot be compiled: {error}") from error
            except (Exception, SystemExit) as error:
                return self._without_those_that_fail(crew, batches, active, scale, error)
            if self._lacks_inputs(crew, batches):
                return None
        inputs = self._inputs(crew, kept.masks, full, active, scale)
        ran = self._replay(kept, crew, inputs, active)
        if ran is None:
            lost = IndexError("an index that no row has, or an operation that raised")
            return self._without_those_that_fail(crew, batches, active, scale, lost)
        add_gradients(crew.stacked.parameters, ran.gradients, active, adds=scale != 1)
        return Trained(masked(ran.losses, active), {})

    def _without_those_that_fail(
        self,
        crew: Crew,
        batches: Sequence[Any],
        active: Sequence[bool],
        scale: float,
        error: BaseException,
    ) -> Trained:
        if is_out_of_memory(error):
            raise error
        self._tries_again = True  # nothing here is a passing trouble
        try:
            found = self._those_that_fail(crew, batches, active, error)
        finally:
            self._tries_again = False
        return self._train_others(crew, batches, active, scale, found)

    def _make_ready(
        self, kept: Kept, crew: Crew, batches: Sequence[Any], active: Sequence[bool]
    ) -> None:
        """Hear which masks a pass draws, and compile it if that was not done yet."""
        for member in crew.members:
            self.require(member)
        with torch.no_grad(), self._listening(crew) as heard:
            losses, _ = self._forward(crew, batches, active)
            crew.streams.undo()
            self._undo.put_back(crew.stacked)
        if self._lacks_inputs(crew, batches):
            return
        if looped := [part for part in self._known_of(crew).looped if part != INPUTS]:
            raise Untraceable(f"{told_of(looped[0])} runs slot by slot, which no graph holds")
        masks = tuple(heard.asked)
        inputs = replace(self._inputs(crew, (), batches, active, 1.0), masks=heard.drawn)
        if kept.graph is None:
            with torch.enable_grad():
                one = filled(batches, active)[0]  # with other answers a step would have no code
                graph, _ = self._captured(crew, inputs, one, active, None)
            kept.graph = _compiled(graph, inputs)
        elif [m.shape for m in masks] != [m.shape for m in kept.masks]:
            raise Untraceable("which masks it draws depends on more than its settings")
        self._require_near(kept.graph, crew, inputs, active, losses)
        kept.masks, kept.crew, kept.rates = masks, self._crews, self._rates

    def _require_near(
        self, graph: Graph, crew: Crew, inputs: Inputs, active: Sequence[bool], losses: Tensor
    ) -> None:
        """Hold it against the eager pass: code may read a rate for more than its masks."""
        limit = NEAR if crew.members[0].recipe.precision == "fp32" else NEAR_BF16
        found, eager = graph(inputs.copied()).losses[list(active)], losses[list(active)]
        if not torch.allclose(found, eager, rtol=limit, atol=limit, equal_nan=True):
            raise Untraceable("its compiled code is not the pass with these settings")


def _compiled(graph: Graph, inputs: Inputs) -> Graph:
    """The same with compiled code.

    One process compiles, since those of a pool would outlive a study in a worker's name.
    """
    options = {"compile_threads": 1}
    some: Any = inputs.copied().flat()
    if all(x.device.type == "cpu" for x in some if isinstance(x, Tensor)) and not compiler():
        raise Untraceable("there is no C++ compiler: install g++, or let CXX name one")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about itself
            import torch._inductor as inductor  # seconds that nobody else need spend

            with _whole_files():
                run: Any = inductor.compile(graph.module, some, options=options)
        found = replace(graph, run=run)
        found.look(inputs)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        words = (str(error).strip().splitlines() or [""])[0][:160]
        raise Untraceable(f"the compiler says {type(error).__name__}: {words}") from error
    return found


@contextmanager
def _whole_files() -> Iterator[None]:
    """What torch has compiled inside has its name once it is whole.

    Torch (2.13) loads what is there of that name in its cache, for good: of a compiler that was
    killed with its study a part, at which a worker dies with a bus error. A torch that runs its
    compiler in another way is left to it.
    """
    from torch._inductor import cpp_builder  # seconds that nobody else need spend

    run = getattr(cpp_builder, "run_compile_cmd", None)
    if run is None:
        yield
        return

    def renamed(cmd_line: str, cwd: str) -> None:
        words = shlex.split(cmd_line)
        if "-o" not in words:
            run(cmd_line, cwd)
            return
        at = words.index("-o") + 1
        target = words[at]
        words[at] = f"{target}.{os.getpid()}"
        run(shlex.join(words), cwd)
        os.replace(words[at], target)

    cpp_builder.run_compile_cmd = renamed
    try:
        yield
    finally:
        cpp_builder.run_compile_cmd = run


@functools.cache
def compiler() -> str:
    """What compiles for the CPU of this machine, in words; empty if nothing does.

    As Inductor looks for it: what CXX names, or g++.
    """
    command = os.environ.get("CXX", "g++")
    if not command or not shutil.which(command):
        return ""
    try:
        told = subprocess.run(
            [command, "-dumpfullversion", "-dumpversion"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    version = (told.stdout.split() or [""])[0]
    width = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "")
    return f"{command} {version}, {width}" if version else ""
