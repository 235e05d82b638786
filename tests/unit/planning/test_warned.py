"""What a plan warns of."""

from __future__ import annotations

from shoal.core.spec import TrialSpec
from shoal.planning.warned import mixed_warnings, unread_warnings
from shoal.runtime.wire.messages import Noticed


def trial(number, **hp):
    return TrialSpec(number=number, hp=hp, seed=0)


def test_a_name_that_one_trial_reads_is_read():
    trials = [trial(0, lr=1, kind="a", depth=2), trial(1, lr=1, kind="b", depth=2)]
    reads = {0: Noticed(frozenset({"depth"})), 1: Noticed()}
    assert unread_warnings(trials, reads) == ()
    assert len(unread_warnings(trials[:1], reads)) == 1


def test_a_name_that_only_some_trials_have_counts_in_those():
    trials = [trial(0, kind="a"), trial(1, kind="b", depth=2)]
    reads = {0: Noticed(), 1: Noticed(frozenset({"depth"}))}
    (line,) = unread_warnings(trials, reads)
    assert line.startswith("no code of the recipe seems to read the hyperparameter 'depth'")


def test_a_likely_name_is_proposed_and_else_what_is_read_if_it_is_there():
    found = Noticed(frozenset({"weight_decya"}), frozenset({"weight_decay", "beta"}))
    (line,) = unread_warnings([trial(0, lr=1, weight_decya=2)], {0: found})
    assert line.endswith("Did you mean 'weight_decay', which is read if a study has it?")
    found = Noticed(frozenset({"q"}), frozenset({"weight_decay", "beta"}))
    (line,) = unread_warnings([trial(0, lr=1, q=2)], {0: found})
    assert line.endswith("What it looks for and does not find: 'beta', 'weight_decay'.")


def test_of_trials_that_cannot_be_built_nothing_is_known():
    assert unread_warnings([trial(0, lr=1, q=2)], {}) == ()


def test_members_of_a_population_with_data_of_their_own_are_told_of_by_what_it_is_made_of():
    folds = [trial(0, lr=1, fold=0), trial(1, lr=2, fold=1)]
    made = dict.fromkeys((0, 1), Noticed(data_reads=frozenset({"fold", "rows"})))
    (line,) = mixed_warnings(folds, made)
    assert line.startswith("Recipe(data=...) reads 'fold', in which trials of this population")
    assert mixed_warnings([trial(0, fold=1), trial(1, fold=1)], made) == ()
    assert mixed_warnings(folds, dict.fromkeys((0, 1), Noticed())) == ()
    assert mixed_warnings(folds, {}) == ()
