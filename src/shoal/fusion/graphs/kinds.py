"""The ways to run an array's pass, by name."""

from __future__ import annotations

from shoal.core.errors import SpecError
from shoal.core.spec import PassKind
from shoal.fusion.crew import ArrayBackend
from shoal.fusion.graphs.branches import BranchesBackend
from shoal.fusion.graphs.compiled import CompiledBackend
from shoal.fusion.graphs.launcher import Launcher
from shoal.fusion.graphs.traced import TracedBackend
from shoal.fusion.passes.fused import StackedBackend


def backend_of(
    kind: PassKind, constants: str = "", launcher: Launcher | None = None
) -> ArrayBackend:
    """What runs passes in this way.

    ``constants``: see ``CompiledBackend``. ``launcher`` captures passes, where it can.
    """
    if kind == "branches":
        return BranchesBackend(launcher)
    if kind == "compiled":
        return CompiledBackend(constants)
    if kind == "traced":
        return TracedBackend(launcher)
    if kind == "eager":
        return StackedBackend()
    raise SpecError(f"an array's pass is eager, traced, compiled or branches, not {kind!r}.")
