"""The ways to run an array's pass, by name."""

from __future__ import annotations

from shoal.core.errors import SpecError
from shoal.core.spec import PassKind
from shoal.fusion.compiled import CompiledBackend
from shoal.fusion.crew import ArrayBackend
from shoal.fusion.fused import StackedBackend
from shoal.fusion.traced import TracedBackend


def backend_of(kind: PassKind, constants: str = "") -> ArrayBackend:
    """What runs passes in this way; ``constants``: see ``CompiledBackend``."""
    if kind == "compiled":
        return CompiledBackend(constants)
    if kind == "traced":
        return TracedBackend()
    if kind == "eager":
        return StackedBackend()
    raise SpecError(f"an array's pass is eager, traced or compiled, not {kind!r}.")
