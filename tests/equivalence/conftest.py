"""Studies whose trials are held to the plain loop, and watched."""

from __future__ import annotations

import pytest
import zoo
from watching import STEPS, Watched


@pytest.fixture
def watch(run_study, assert_alone):
    """A function that trains, compares with the plain loop, and returns what happened.

    ``exact``: no peak is above what was predicted; so where all batches are alike.
    """

    def run(recipe, space, technique, *, steps=STEPS, exact=False, **options):
        seen = Watched()
        options = {"technique": technique, "callbacks": [seen], "timeline": True, **options}
        report = run_study(recipe, space, steps=steps, **options)
        assert_alone(report, report.trials, recipe, steps=steps)
        if exact or recipe.data is zoo.data:
            seen.assert_no_peak_was_above_what_was_predicted()
        return seen

    return run
