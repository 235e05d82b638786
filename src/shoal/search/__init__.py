"""Search spaces, samplers and pruners: which trials there are, and which train on."""

from shoal.search.pbt import PBT, Exploit
from shoal.search.population import Population
from shoal.search.ranks import Rank, Ranks
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
    "PBT",
    "Choice",
    "Distribution",
    "Exploit",
    "Integer",
    "Population",
    "Rank",
    "Ranks",
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
