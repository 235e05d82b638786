"""A trial that fits no device is refused in words that are true of it."""

from shoal.core.spec import TrialSpec
from shoal.core.units import Bytes
from shoal.planner.job import least, refuse
from shoal.planner.need import Request
from shoal.testing import make_layer, make_measure

TRIAL = TrialSpec(number=3, seed=3, hp={"lr": 0.1})
ASKED = Request(micro_batches=1, clip=False, technique=None, prefers="host")


def words(measure, budget, exact=0):
    return str(refuse(TRIAL, measure, Bytes(budget), ASKED, Bytes(exact)))


def test_why_a_model_cannot_be_cut_is_one_sentence():
    why = "the model cannot be cut into shards: the forward adds buffers: seen."
    measure = make_measure(cuttable=False, resident_bytes=Bytes(2048), notes=(why,))
    assert "it cannot be cut: the forward adds buffers: seen. Give the" in words(measure, 1024)


def test_validation_batches_are_to_blame_only_where_smaller_ones_would_fit():
    layers = [make_layer(f"layer {n}", 4096, forward_peak_bytes=Bytes(8192)) for n in range(3)]
    alike, large = make_measure(layers), make_measure(layers, valid_scale=9.0)
    budget = least(alike, ASKED).total

    assert "validation batches are 9.0 times as large" in words(large, budget)
    assert "cut as finely as it can be" in words(alike, budget, exact=budget + 1)


def test_large_buffers_are_named_beside_the_largest_layer():
    layers = [make_layer(f"layer {n}", 4096) for n in range(3)]
    without, with_them = make_measure(layers), make_measure(layers, buffer_bytes=Bytes(2**20))

    assert "with the batch and what shards hand on" in words(without, 1024)
    assert "with the batch, 1.0 MiB of buffers, which stay, and what shards" in words(
        with_them, 1024
    )
