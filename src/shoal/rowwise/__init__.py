"""A loss over a large vocabulary, some rows at a time, in models that know nothing of it."""

from shoal.rowwise.mode import LossByRows

__all__ = ["LossByRows"]
