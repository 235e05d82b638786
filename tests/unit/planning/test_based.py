"""Which trials share a base: those that were built with the same bits, whoever comes when."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.core.arraykeys import Base
from shoal.fusion.matching.match import Signature
from shoal.planning.based import base_in, based, without_base

ONE, OTHER = Signature((("model", "a"),)), Signature((("model", "b"),))


def of(bits):
    return {trial: Base(one, 2**20) for trial, one in bits.items()}


def bases_of(found):
    return {trial: base_in(signature) for trial, signature in found.items()}


def test_several_trials_with_the_same_bits_share_them_and_a_single_one_has_its_own():
    found = based(dict.fromkeys(range(4), ONE), of({0: "x", 1: "y", 2: "x", 3: ""}), {})
    assert bases_of(found) == {0: "x", 1: "", 2: "x", 3: ""}
    assert found[0] == found[2] != found[1] == found[3] == ONE


def test_trials_of_two_shapes_share_none():
    found = based({0: ONE, 1: OTHER}, of({0: "x", 1: "x"}), {})
    assert bases_of(found) == {0: "", 1: ""}


def test_who_was_planned_before_keeps_what_he_had_and_who_comes_later_joins():
    facts = dict.fromkeys(range(3), ONE)
    found = based(facts, of(dict.fromkeys(range(3), "x")), {0: "", 1: "x"})
    assert bases_of(found) == {0: "", 1: "x", 2: "x"}
    alone = based({7: ONE}, of({7: "x"}), {}, {3: "x"})
    assert bases_of(alone) == {7: "x"}
    without = based({7: ONE}, of({7: "x"}), {0: ""})
    assert bases_of(without) == {7: ""}


def test_a_population_shares_a_base_that_all_of_it_has():
    facts = dict.fromkeys(range(4), ONE)
    same = based(facts, of(dict.fromkeys(range(4), "x")), {}, exchanges=True)
    assert bases_of(same) == dict.fromkeys(range(4), "x")
    two = of({0: "x", 1: "x", 2: "y", 3: "y"})
    assert bases_of(based(facts, two, {}, exchanges=True)) == dict.fromkeys(range(4), "")
    assert bases_of(based(facts, two, {})) == {0: "x", 1: "x", 2: "y", 3: "y"}
    grown = based(facts, two, {0: "x", 1: "x"}, exchanges=True)
    assert bases_of(grown) == {0: "x", 1: "x", 2: "", 3: ""}


def test_a_trial_that_begins_with_a_state_shares_what_its_parent_shared():
    facts = dict.fromkeys((3, 4, 5), ONE)
    bases = {3: Base("x", 1, 0), 4: Base("x", 1, 1), 5: Base("x", 1, 2)}
    found = based(facts, bases, {}, {0: "x", 1: "y"})
    assert bases_of(found) == {3: "x", 4: "", 5: ""}


@given(st.dictionaries(st.integers(0, 9), st.sampled_from(["", "x", "y"])))
def test_a_base_is_shared_by_two_at_least_and_taken_off_again(bases):
    facts = dict.fromkeys(bases, ONE)
    found = based(facts, of(bases), {})
    for trial, signature in found.items():
        mine = base_in(signature)
        assert mine in ("", bases[trial])
        assert not mine or sum(one == signature for one in found.values()) > 1
        assert without_base(signature) == ONE
    assert based(facts, of(bases), bases_of(found)) == found
