"""Search spaces, samplers and pruners: which trials there are, and which train on."""

from shoal.search.pbt import PBT, Exploit
from shoal.search.population import Population
from shoal.search.ranks import Rank, Ranks
from shoal.search.sampler import sample, trials_of
from shoal.search.search import Search
from shoal.search.space import choice, grid, integer, is_finite, log_uniform, uniform

__all__ = [
    "PBT",
    "Exploit",
    "Population",
    "Rank",
    "Ranks",
    "Search",
    "choice",
    "grid",
    "integer",
    "is_finite",
    "log_uniform",
    "sample",
    "trials_of",
    "uniform",
]
