"""A plan whose trials do not fit the host says how much they need, and which would."""

from __future__ import annotations

import pytest

from shoal.core.errors import PlanError
from shoal.core.plan import Plan
from shoal.core.units import Bytes, Seconds
from shoal.launch.plan import check_host_memory, fits_host
from shoal.testing import make_device, make_job, make_shard

MIB = 2**20


def plan(*sizes: int) -> Plan:
    shard = make_shard(0, 2**10)
    jobs = [
        make_job(trial, [shard], host_bytes=Bytes(size * MIB)) for trial, size in enumerate(sizes)
    ]
    return Plan(
        study="s", devices=(make_device(),), jobs=tuple(jobs), active=1, seconds=Seconds(1.0)
    )


def test_what_fits_or_has_no_bound_is_not_refused():
    check_host_memory(plan(5, 5), 11 * MIB)
    check_host_memory(plan(5, 5), None)


def test_a_refusal_names_the_bytes_and_the_trials_that_fit_together():
    with pytest.raises(PlanError) as refused:
        check_host_memory(plan(9, 2, 3, 4), 10 * MIB)
    words = str(refused.value)
    assert "4 trials keep 18." in words
    assert "the largest is trial 0 with 9.0 MiB" in words
    assert "Together fit trials 1 to 3." in words


def test_trials_of_a_search_wait_for_room_but_one_of_them_has_to_fit():
    check_host_memory(plan(9, 2, 3, 4), 10 * MIB, may_wait=True)
    with pytest.raises(PlanError, match="Not even the smallest fits"):
        check_host_memory(plan(9, 2, 3, 4), 1 * MIB, may_wait=True)
    assert fits_host(plan(5, 5).jobs, plan(5, 5), 11 * MIB)
    assert fits_host(plan(5, 5).jobs, plan(5, 5), None)
    assert not fits_host(plan(5, 5).jobs, plan(5, 5), 9 * MIB)


def test_where_none_fits_it_says_so():
    with pytest.raises(PlanError, match="Not even the smallest fits"):
        check_host_memory(plan(9, 8), MIB)
