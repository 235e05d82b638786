"""How operations run for all slots at once, where torch's batching is wrong or slow."""

from shoal.fusion.rules.table import RULES

__all__ = ["RULES"]
