"""The ways to run an array's pass, by name."""

from __future__ import annotations

from shoal.core.errors import SpecError
from shoal.core.spec import PassKind
from shoal.fusion.branches import BranchesBackend
from shoal.fusion.compiled import CompiledBackend
from shoal.fusion.crew import ArrayBackend
from shoal.fusion.fused import StackedBackend
from shoal.fusion.launcher import Launcher
from shoal.fusion.traced import TracedBackend


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
