"""Search spaces, samplers and pruners: which trials there are, and which train on."""

from shoal.search.sampler import sample, trials_of
from shoal.search.search import Search
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
    "Search",
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
