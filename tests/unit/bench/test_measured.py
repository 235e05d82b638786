"""The record of a bench: what it says, and that a file gives it back."""

import json
import math

import pytest

from shoal.bench import Measured, Rate


def test_a_rate_is_the_best_of_some_runs_and_their_median() -> None:
    assert Rate.of(10.0, [2.0, 1.0, 4.0]) == Rate(best=10.0, median=5.0, samples=3)


@pytest.mark.parametrize("best", [0.0, -1.0, math.nan, math.inf, "fast", None])
def test_a_rate_that_no_measurement_gives_is_refused(best: float) -> None:
    with pytest.raises(ValueError, match="is no rate"):
        Rate(best=best, median=1.0, samples=1)


def test_a_rate_of_no_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="no number of samples"):
        Rate(best=1.0, median=1.0, samples=0)


def test_what_was_measured_survives_json(measured: Measured) -> None:
    assert Measured.from_dict(json.loads(json.dumps(measured.to_dict()))) == measured


def test_a_machine_without_a_disk_to_measure_survives_json(make) -> None:
    measured = make(disk=None)

    assert Measured.from_dict(json.loads(json.dumps(measured.to_dict()))) == measured


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record.pop("link"),
        lambda record: record.update(format=99),
        lambda record: record["link"]["up"].update(best="fast"),
        lambda record: record["link"].update(sideways=1),
        lambda record: record.update(blocks=3),
        lambda record: record.update(blocks=[]),
        lambda record: record["blocks"][0].update(forward_s="long"),
        lambda record: record["blocks"][0].update(forward_s=0, backward_s=0),
        lambda record: record.update(host=[]),
    ],
)
def test_a_record_that_is_none_is_refused(measured: Measured, damage) -> None:
    record = json.loads(json.dumps(measured.to_dict()))
    damage(record)

    with pytest.raises(ValueError, match=r"result of shoal bench|is no rate|is no figure"):
        Measured.from_dict(record)


def test_what_is_no_record_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="no result of shoal bench of format 1"):
        Measured.from_dict([])  # type: ignore[arg-type]


def test_an_optimizer_s_bandwidth_is_28_bytes_a_parameter(measured: Measured) -> None:
    assert measured.optimizer.bytes_per_s == pytest.approx(150e9)
    assert measured.optimizer.nanoseconds == pytest.approx(28 / 150)


def test_a_block_sustains_what_its_forward_and_backward_do_together(measured: Measured) -> None:
    assert measured.block("bf16").flops_per_s == pytest.approx(550e12)
