"""Builders for the tests of programs."""

from collections.abc import Callable

import pytest

from shoal.core.spec import ShardSpec
from shoal.program.costs import JobCosts


def make_shard(index: int, **changed: float) -> ShardSpec:
    """A shard whose numbers are all different, so that a mix-up shows."""
    numbers: dict[str, float] = {
        "parameter_bytes": 100,
        "owned_bytes": 90,
        "state_bytes": 200,
        "gradient_bytes": 80,
        "boundary_bytes": 10 if index else 0,
        "carry_bytes": 11 if index else 0,
        "forward_peak_bytes": 50,
        "backward_peak_bytes": 300,
        "step_peak_bytes": 5,
        "forward_s": 1.0,
        "backward_s": 3.0,
        "step_s": 0.5,
    }
    return ShardSpec(index=index, layers=(index, index + 1), **(numbers | changed))


@pytest.fixture(scope="session")
def make_costs() -> Callable[..., dict[int, JobCosts]]:
    """The costs of trial 0 (or ``trials``) with some shards; other keywords as in JobCosts."""

    def make(num_shards: int, *, trials=(0,), shard=None, **job):
        shards = tuple(make_shard(index, **(shard or {})) for index in range(num_shards))
        return dict.fromkeys(trials, JobCosts(shards=shards, **({"batch_bytes": 7} | job)))

    return make
