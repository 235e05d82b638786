"""A stage of zb-h1 holds what its plan said, and its trial ends on the bits of the loop."""

from __future__ import annotations

import halving
import pytest
import staging
from listening import Heard

from shoal import Pipelined
from shoal.core.event import PeakMeasured, TrialReplanned

QUICK = [("tower", 4, 1), ("gpt", 2, 3), ("convolutions", 4, 1)]
CASES = [(name, stages, times) for name in halving.MODELS for stages in (2, 4) for times in (1, 3)]


def cases():
    """Every model over two and four stages, with as many micro-batches and three times that."""
    for case in CASES:
        yield pytest.param(*case, marks=() if case in QUICK else pytest.mark.full)


@pytest.fixture
def peaks_of(run_study):
    """Train a model, hold it to the plain loop, and return each stage's peak, by its device."""

    def run(name, technique, micros):
        heard, recipe = Heard(), halving.recipe(name, micros)
        options = {"technique": technique, "devices": technique.stages, "callbacks": [heard]}
        report = run_study(recipe, {"lr": 1e-2}, memory="256MiB", epochs=2, **options)
        staging.assert_staged(report, recipe, technique, epochs=2)
        assert not heard.of(TrialReplanned)
        found = {event.device: event for event in heard.of(PeakMeasured)}
        assert len(found) == technique.stages
        return list(found.values())

    return run


def assert_as_planned(peaks):
    """No stage holds more than was planned, and the neediest little less."""
    planned = peaks[0].predicted_bytes
    most = max(peak.peak_bytes for peak in peaks)
    assert most <= planned <= 1.15 * most, [planned, *(peak.peak_bytes for peak in peaks)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "stages", "times"), list(cases()))
def test_the_neediest_stage_holds_what_was_planned(name, stages, times, peaks_of):
    technique = Pipelined(schedule="zb-h1", stages=stages, recompute=False)
    assert_as_planned(peaks_of(name, technique, times * stages))


@pytest.mark.parametrize(
    "name", ["tower", *(pytest.param(n, marks=pytest.mark.full) for n in ("gpt", "convolutions"))]
)
def test_also_where_forwards_are_run_again(name, peaks_of):
    technique = Pipelined(schedule="zb-h1", stages=4, recompute=True)
    assert_as_planned(peaks_of(name, technique, 8))
