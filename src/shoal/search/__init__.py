"""Search spaces and the samplers that need no other library."""

from shoal.search.sampler import sample, trials_of
from shoal.search.space import (
    Choice,
    Distribution,
    Integer,
    Space,
    Uniform,
    choice,
    grid,
    integer,
    is_finite,
    log_uniform,
    uniform,
)

__all__ = [
    "Choice",
    "Distribution",
    "Integer",
    "Space",
    "Uniform",
    "choice",
    "grid",
    "integer",
    "is_finite",
    "log_uniform",
    "sample",
    "trials_of",
    "uniform",
]
