"""From how many tokens spilling is free: the cost model's own examples, and its edges."""

from dataclasses import replace

import pytest

from shoal.bench import SCHEMES, FreeFrom, Link, Measured, Rate, free_from


def _row(
    measured: Measured, precision: str, optimizer: str, *, recompute: bool = True
) -> FreeFrom:
    return next(
        entry
        for entry in free_from(measured)
        if (entry.scheme.precision, entry.scheme.optimizer) == (precision, optimizer)
        and entry.recompute is recompute
    )


def test_an_h200_with_the_optimizer_on_the_host_is_bound_by_its_memory(measured) -> None:
    row = _row(measured, "bf16", "host")

    assert (row.up, row.down, row.host) == (
        pytest.approx(5000),
        pytest.approx(2500),
        pytest.approx(15_583, rel=1e-3),
    )
    assert row.tokens == row.host
    assert row.limit == "host"


def test_an_h200_with_the_optimizer_on_the_device_is_bound_by_its_link(measured) -> None:
    row = _row(measured, "bf16", "device")

    assert (row.up, row.down) == (pytest.approx(20_000), pytest.approx(17_500))
    assert row.host == pytest.approx(13_750)
    assert row.limit == "up"


def test_without_recompute_a_third_more_tokens_are_needed(measured) -> None:
    for scheme in SCHEMES:
        rows = [
            _row(measured, scheme.precision, scheme.optimizer, recompute=recompute).tokens
            for recompute in (True, False)
        ]
        assert rows[1] == pytest.approx(rows[0] * 4 / 3)


def test_directions_that_slow_each_other_down_count_together(measured) -> None:
    both = Rate(best=60e9, median=60e9, samples=1)
    shared = replace(measured, link=Link(up=measured.link.up, down=measured.link.down, both=both))

    row = _row(shared, "bf16", "device")

    assert row.both == pytest.approx(550e12 / 8 * 30 / 60e9)
    assert row.limit == "both"


def test_an_optimizer_that_is_slower_than_the_memory_counts_as_it_is(measured) -> None:
    half = Rate(best=150e9 / 28 / 2, median=1.0, samples=1)
    slow = replace(measured, optimizer=replace(measured.optimizer, all=half))

    row = _row(slow, "bf16", "host")

    assert row.host == pytest.approx(550e12 / 8 * (28 / 75e9 + 6 / 150e9))
    assert row.host_bytes_per_s == pytest.approx(34 / (28 / 75e9 + 6 / 150e9))
    assert _row(slow, "bf16", "device").host_bytes_per_s == 150e9


def test_every_number_that_went_in_is_there(measured) -> None:
    row = _row(measured, "fp32", "host")

    assert row.flops_per_s == pytest.approx(50e12)
    assert (row.up_bytes_per_s, row.down_bytes_per_s, row.both_bytes_per_s) == (55e9, 55e9, 110e9)
    assert (row.scheme.up, row.scheme.down, row.scheme.host) == (8, 4, 40)
    assert row.tokens == pytest.approx(50e12 / 8 * 40 / 150e9)
