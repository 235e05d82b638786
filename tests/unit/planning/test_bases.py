"""Which trials of a plan are known to share what they do not train."""

from __future__ import annotations

from shoal.planning.bases import with_frozen
from shoal.runtime.wire.messages import Noticed
from shoal.testing import make_job, make_shard


def frozen_of(*found, signatures=None, size=5):
    """By trial what is in the job, of trials of which this was found."""
    jobs = [make_job(number, [make_shard(0)]) for number in range(len(found))]
    noticed = {n: Noticed(frozen_bytes=size, frozen=bits) for n, bits in enumerate(found)}
    alike = dict(enumerate(signatures or "s" * len(found)))
    made = with_frozen(jobs, alike, noticed)
    assert {job.frozen_bytes for job in made} == {size}
    return [job.frozen for job in made]


def test_where_several_have_the_same_the_others_are_taken_to():
    assert frozen_of("a", "a", "", "") == ["a", "a", "a", "a"]


def test_of_one_or_of_several_that_differ_nothing_follows():
    assert frozen_of("a", "", "") == ["a", "", ""]
    assert frozen_of("a", "b", "") == ["a", "b", ""]
    assert frozen_of("a", "a", "b", "") == ["a", "a", "b", ""]


def test_nor_for_trials_that_are_described_otherwise():
    assert frozen_of("a", "a", "", "", signatures="sstt") == ["a", "a", "", ""]
