"""Cuts into stages, against all cuts there are; and what they need, against their programs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import inf

from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.core.spec import Halves, JobMeasure
from shoal.core.technique import SCHEDULES, Pipelined
from shoal.core.units import Bytes, Seconds
from shoal.planner.need import Request
from shoal.planner.pipeline import _bounding, staged
from shoal.planner.price import Speeds
from shoal.planner.stages import Cutter, Split, legal_cuts, predicted
from shoal.planner.steptime import Terms, pipeline_of
from shoal.testing import make_layer

quick = settings(max_examples=80, deadline=None)
BATCH = Bytes(64)
SIZES = st.integers(0, 4096)


@st.composite
def halves_of(draw, saved):
    """Of a layer that saves so much; those of one that cannot be cut leave nothing."""
    cut = draw(st.booleans())
    return Halves(
        left_bytes=Bytes(draw(SIZES) if cut else 0),
        keeps_boundary=cut and draw(st.booleans()),
        keeps_carry=cut and draw(st.booleans()),
        first_peak_bytes=Bytes(saved + draw(SIZES)),
        second_peak_bytes=Bytes(draw(SIZES) if cut else 0),
        making_peak_bytes=Bytes(draw(SIZES) if cut else 0),
        first_s=Seconds(draw(st.integers(1, 100)) / 1000),
        second_s=Seconds(draw(st.integers(0, 50)) / 1000),
    )


@st.composite
def layers_of(draw, most=7):
    count = draw(st.integers(2, most))
    made = []
    for index in range(count):
        parameters, boundary = draw(SIZES), draw(SIZES)
        saved, forward_s = draw(SIZES), draw(st.integers(1, 50)) / 1000
        made.append(
            make_layer(
                f"layer {index}",
                parameters,
                boundary_bytes=Bytes(boundary),
                carry_bytes=Bytes(boundary if index else 0),
                private_bytes=Bytes(draw(st.integers(0, made[-1].boundary_bytes)) if made else 0),
                saved_bytes=Bytes(saved),
                forward_peak_bytes=Bytes(boundary),
                backward_peak_bytes=Bytes(saved + parameters + draw(SIZES)),
                forward_s=Seconds(forward_s),
                backward_s=Seconds(forward_s + draw(st.integers(1, 100)) / 1000),
                halves=draw(halves_of(saved)) if index else None,
                cut_after=draw(st.booleans()) or draw(st.booleans()),
            )
        )
    return tuple(made)


@st.composite
def cases(draw):
    layers = draw(layers_of())
    pieces = len(legal_cuts(layers)) + 1
    stages = draw(st.integers(2, max(2, min(4, pieces))))
    schedule = draw(st.sampled_from(SCHEDULES))
    technique = Pipelined(
        stages=stages,
        schedule=schedule,
        micro_batches=draw(st.integers(stages, 7)),
        recompute=draw(st.booleans()),
        predict=schedule == "2bw" and draw(st.booleans()),
    )
    return layers, technique, draw(st.booleans())


def terms_of(layers, technique, clip):
    measure = JobMeasure(
        layers=layers,
        shards=(),
        batch_bytes=BATCH,
        buffer_bytes=Bytes(32),
        resident_bytes=Bytes(0),
        num_batches=None,
        valid_scale=0.0,
        optimizer="AdamW",
        cuttable=True,
        bitwise=True,
        draws=False,
    )
    request = Request(
        micro_batches=technique.micro_batches, clip=clip, technique=None, prefers="host"
    )
    return Terms(
        measure=measure,
        request=request,
        speeds=Speeds(up_bytes_per_s=inf, down_bytes_per_s=inf),
    )


def slowest(layers, technique, cuts):
    bounds = [0, *cuts, len(layers)]
    times = []
    for start, stop in itertools.pairwise(bounds):
        again = technique.recompute and stop < len(layers)
        times.append(sum(c.backward_s + again * c.forward_s for c in layers[start:stop]))
    return max(times)


def with_cuts(technique, cuts):
    return Pipelined(
        stages=technique.stages,
        schedule=technique.schedule,
        micro_batches=technique.micro_batches,
        recompute=technique.recompute,
        predict=technique.predict,
        cuts=cuts,
    )


@quick
@given(cases())
def test_without_a_bound_no_cut_has_a_quicker_slowest_stage(case):
    layers, technique, clip = case
    terms = terms_of(layers, technique, clip)
    pipeline = pipeline_of(technique, (), terms, _bounding(technique))
    found = Cutter(layers, BATCH, Split()).quickest(pipeline, Bytes(2**50))
    every = list(itertools.combinations(legal_cuts(layers), technique.stages - 1))
    assert (found is None) == (not every)
    if found is None:
        return
    assert found in every
    least = min(slowest(layers, technique, cuts) for cuts in every)
    assert slowest(layers, technique, found) <= least * (1 + 1e-9)


@quick
@given(cases(), st.floats(0.3, 1.2))
def test_with_a_bound_what_is_cut_fits_and_nothing_that_surely_fits_is_quicker(case, share):
    layers, technique, clip = case
    terms = terms_of(layers, technique, clip)
    every = list(itertools.combinations(legal_cuts(layers), technique.stages - 1))
    if not every:
        return
    pipeline = pipeline_of(technique, (), terms, _bounding(technique))
    cutter = Cutter(layers, BATCH, Split(), fixed=32)
    tables = [cutter._bytes(pipeline, s, technique.predict) for s in range(technique.stages)]
    edges = (0, *legal_cuts(layers), len(layers))

    def needs(cuts):
        bounds = [edges.index(place) for place in (0, *cuts, len(layers))]
        spans = itertools.pairwise(bounds)
        return max(tables[stage][span] for stage, span in enumerate(spans))

    budget = share * max(map(needs, every))
    found = cutter.quickest(pipeline, Bytes(int(budget)), predict=technique.predict)
    fitting = [cuts for cuts in every if needs(cuts) <= int(budget)]
    assert (found is None) == (not fitting)
    if found is not None:
        assert found in fitting
        least = min(slowest(layers, technique, cuts) for cuts in fitting)
        assert slowest(layers, technique, found) <= least * (1 + 1e-9)
    smallest = cutter.smallest(pipeline, predict=technique.predict)
    assert needs(smallest) <= min(map(needs, every)) * (1 + 1e-9)


def _a_peak_only_in_the_whole_backward():
    """Two layers, the second with nothing in either half of its backward."""
    none = Halves(
        left_bytes=Bytes(0),
        keeps_boundary=False,
        keeps_carry=False,
        first_peak_bytes=Bytes(0),
        second_peak_bytes=Bytes(0),
        making_peak_bytes=Bytes(0),
    )
    first = make_layer("0", 0, boundary_bytes=Bytes(0), saved_bytes=Bytes(0))
    second = replace(first, carry_bytes=Bytes(0), backward_peak_bytes=Bytes(258), halves=none)
    return (first, second), Pipelined(stages=2, schedule="zb-h1", micro_batches=2), False


@quick
@given(cases())
@example(_a_peak_only_in_the_whole_backward())
def test_what_the_cutter_reckons_with_is_about_what_the_program_needs(case):
    """Messages and zb-h1's first gradients apart it is the same bytes: what it cuts does fit."""
    layers, technique, clip = case
    terms = terms_of(layers, technique, clip)
    every = list(itertools.combinations(legal_cuts(layers), technique.stages - 1))
    cutter = Cutter(layers, BATCH, Split(), fixed=32)
    pipeline = pipeline_of(technique, (), terms, _bounding(technique))
    edges = (0, *legal_cuts(layers), len(layers))
    for cuts in every[:3]:
        one = staged(with_cuts(technique, cuts), predicted(layers, cuts), terms, None)
        bounds = [edges.index(place) for place in (0, *cuts, len(layers))]
        for stage, span in enumerate(itertools.pairwise(bounds)):
            reckoned = cutter._bytes(pipeline, stage, technique.predict)[span]
            spec = one.stages[stage]
            passing = max(s.boundary_bytes + s.carry_bytes for s in one.stages)
            slack = 4 * (passing + BATCH) + spec.step_peak_bytes + 1  # halves are whole bytes
            if technique.schedule == "zb-h1" and spec.halves:  # the first gradients
                slack += spec.gradient_bytes + spec.halves.making_peak_bytes
            assert one.needs[stage].total <= reckoned + slack


@quick
@given(cases())
def test_what_is_reserved_on_every_device_is_enough_for_each_stage(case):
    layers, technique, clip = case
    terms = terms_of(layers, technique, clip)
    for cuts in list(itertools.combinations(legal_cuts(layers), technique.stages - 1))[:2]:
        one = staged(with_cuts(technique, cuts), predicted(layers, cuts), terms, None)
        assert all(one.need.held >= need.held for need in one.needs)
        assert all(one.need.total >= max(need.peak, need.total) for need in one.needs)
        assert 0 <= one.bubbles <= 1
        assert one.step_s > 0
