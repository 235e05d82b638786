"""The ledger: promises, refusals, the high-water mark."""

import pytest

from shoal.core.errors import CapacityError
from shoal.core.units import Bytes
from shoal.memory.ledger import Ledger

GIB = 2**30


def make_ledger(capacity: int = 100, **held: int) -> Ledger:
    ledger = Ledger("cuda:0", Bytes(capacity))
    for owner, size in held.items():
        ledger.reserve(owner, Bytes(size))
    return ledger


def test_a_reservation_is_used_and_no_longer_free():
    ledger = make_ledger(100, a=30)
    assert (ledger.used, ledger.free, ledger.held("a")) == (30, 70, 30)


def test_an_owner_who_reserves_twice_holds_the_sum():
    ledger = make_ledger(100, a=30)
    ledger.reserve("a", Bytes(5))
    assert ledger.held("a") == 35


def test_release_gives_back_everything_the_owner_holds():
    ledger = make_ledger(100, a=30, b=20)
    assert ledger.release("a") == 30
    assert (ledger.used, ledger.held("a"), ledger.held("b")) == (20, 0, 20)


def test_releasing_an_owner_who_holds_nothing_is_harmless():
    assert make_ledger(100).release("nobody") == 0


def test_the_last_byte_can_be_reserved():
    assert make_ledger(100, a=99, b=1).free == 0


def test_peak_remembers_the_most_that_was_used():
    ledger = make_ledger(100, a=60, b=30)
    ledger.release("a")
    ledger.reserve("c", Bytes(10))
    assert (ledger.used, ledger.peak) == (40, 90)


def test_a_refusal_leaves_the_ledger_as_it_was():
    ledger = make_ledger(100, a=60)
    with pytest.raises(CapacityError):
        ledger.reserve("b", Bytes(41))
    assert (ledger.used, ledger.peak, ledger.held("b")) == (60, 60, 0)


def test_refusal_names_the_tier_the_holders_and_the_way_out():
    ledger = Ledger("cuda:0", Bytes(80 * GIB))
    ledger.reserve("gpt-b/shard0", Bytes(75 * GIB))
    with pytest.raises(CapacityError) as refusal:
        ledger.reserve("bert-a/shard3", Bytes(6 * GIB))
    assert str(refusal.value) == (
        "cannot reserve 6.0 GiB on cuda:0 for 'bert-a/shard3': 5.0 GiB of 80.0 GiB are free.\n"
        "Largest holders: 'gpt-b/shard0' 75.0 GiB. Evict one of them first, or cut this trial "
        "into smaller shards."
    )


def test_refusal_names_the_three_largest_holders_largest_first():
    ledger = make_ledger(100, a=10, b=40, c=20, d=30)
    with pytest.raises(CapacityError, match=r"'b' 40 B, 'd' 30 B, 'c' 20 B\. Evict"):
        ledger.reserve("e", Bytes(1))


def test_refusal_of_what_never_fits_does_not_advise_eviction():
    with pytest.raises(CapacityError, match="can never fit on cuda:0, even alone") as refusal:
        make_ledger(100, a=10).reserve("b", Bytes(101))
    assert "Evict" not in str(refusal.value)


def test_refusal_by_a_few_bytes_says_how_many_are_missing():
    ledger = make_ledger(2 * GIB, a=GIB + 3)
    with pytest.raises(CapacityError, match=r"are free \(3 bytes are missing\)"):
        ledger.reserve("b", Bytes(GIB))
