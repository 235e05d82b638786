"""A slot ends on the bits of its trial alone in it, whoever comes, waits, fails or leaves."""

from __future__ import annotations

import companies
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

WIDTHS = st.integers(2, 3)
PLACES = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.1, 0.03]),
        "drop": st.sampled_from([0.2, 0.5]),
        "data": st.integers(0, 9),
    }
)


@st.composite
def trials(draw, width, letters="uuszmnb", most=2):
    """Some for each slot, the first batch of which is of the usual layout."""
    found = []
    for slot in range(width):
        for _ in range(draw(st.integers(1, most))):
            first, rest = draw(st.sampled_from("uzm")), draw(st.text(letters, max_size=6))
            pauses = draw(st.frozensets(st.integers(0, 5), max_size=2))
            hp = draw(PLACES) | {"word": first + rest}
            found.append(companies.Trial(slot, hp, draw(st.integers(0, 3)), pauses))
    return found


def recipes():
    return st.builds(
        companies.recipe,
        st.sampled_from([companies.sgd, companies.adam, companies.slow_adam]),
        accumulate=st.integers(1, 3),
        clip=st.sampled_from([None, 0.3]),
        on_nonfinite=st.sampled_from(["ignore", "fail"]),
    )


def some(count):
    """Examples that are not made smaller: each is half a second."""
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
    phases = [Phase.explicit, Phase.reuse, Phase.generate]
    return settings(max_examples=count, deadline=None, phases=phases, suppress_health_check=quiet)


@pytest.mark.parametrize("kind", ["eager", "traced", "branches"])
def test_statistics_that_the_first_batch_left_as_they_were_stay_a_waiting_slots_own(
    kind, one_thread
):
    """The mean of zeros is 0; the graph of that step writes to it all the same."""
    recipe = companies.recipe(companies.adam, accumulate=3, clip=None, on_nonfinite="fail")
    hp = {"lr": 0.1, "drop": 0.5, "data": 2}
    trials = [
        companies.Trial(1, hp | {"word": "mu"}, joins=1),
        companies.Trial(2, hp | {"word": "z"}, pauses=frozenset({1, 2})),
    ]
    companies.assert_each_as_alone(recipe, 3, kind, trials)


@pytest.mark.usefixtures("one_thread")
class TestSlots:
    @some(12)
    @given(st.data(), recipes(), WIDTHS)
    def test_whoever_is_there_a_slot_has_its_own_bits(self, data, recipe, width):
        found = data.draw(trials(width))
        companies.assert_each_as_alone(recipe, width, "eager", found)

    @some(2)
    @given(st.data(), recipes())
    def test_so_it_is_where_passes_are_graphs(self, data, recipe):
        found = data.draw(trials(2, most=1))
        companies.assert_each_as_alone(recipe, 2, "traced", found)

    @some(4)
    @given(st.data(), recipes())
    def test_so_it_is_where_each_slots_own_pass_is_captured(self, data, recipe):
        found = data.draw(trials(2))
        companies.assert_each_as_alone(recipe, 2, "branches", found)

    @some(4)
    @given(st.data(), st.sampled_from([companies.sgd, companies.adam]), WIDTHS)
    def test_so_it_is_where_steps_are_ones_own(self, data, optimizer, width):
        found = data.draw(trials(width, letters="uuszm"))
        companies.assert_each_as_alone(companies.own_recipe(optimizer), width, "eager", found)
