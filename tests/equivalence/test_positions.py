"""From any position, by any way, a source yields the bits that it would have yielded."""

from __future__ import annotations

import feeds
import kinds
import pytest
import torch
from feeds import END
from kinds import KINDS, REPLAY, SAMPLER, Stateful

import shoal
from shoal.core.errors import TrialError
from shoal.data.reading import PlainReader
from shoal.rng import same_rng

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # on a machine of one core
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]

STEPS = 18  # two epochs and more of most kinds
MARKS = {0, 1, 3, 4, 5, 6, 7, 9, 10, 14}
FEW_MARKS = {2, 5, 6, 13}  # where each resumption starts processes
ALL = [(way, name) for way, kinds in KINDS.items() for name in kinds]


def assert_same_run(first, second):
    assert len(first.seen) == len(second.seen)
    for index, (expected, found) in enumerate(zip(first.seen, second.seen, strict=True)):
        ends = expected is END, found is END
        assert ends[0] == ends[1], f"step {index}: an epoch ends in one of them only"
        assert ends[0] or torch.equal(expected, found), f"step {index}: {expected}, {found}"
    assert same_rng(first.rng, second.rng)


@pytest.mark.sample(5)
@pytest.mark.parametrize(("way", "name"), ALL, ids=lambda value: value)
def test_a_feed_yields_and_draws_what_the_plain_loop_does(way, name):
    build = KINDS[way][name]

    assert_same_run(feeds.plainly(build, STEPS), feeds.uninterrupted(build, STEPS, {4}))


@pytest.mark.sample(5)
@pytest.mark.parametrize(("way", "name"), ALL, ids=lambda value: value)
def test_what_comes_after_a_position_is_the_same_bits(way, name):
    build = KINDS[way][name]
    has_processes = getattr(build(), "num_workers", 0) > 0

    whole = feeds.uninterrupted(build, STEPS, FEW_MARKS if has_processes else MARKS)

    for mark in whole.marks:
        assert mark.step == 0 or mark.position.way == way
        rest = feeds.Run(whole.seen[mark.step :], rng=whole.rng)
        assert_same_run(rest, feeds.resumed(build, mark, STEPS))


@pytest.mark.slow
@pytest.mark.sample(5)
@pytest.mark.parametrize(("way", "name"), ALL, ids=lambda value: value)
def test_a_trial_that_was_resumed_can_be_resumed_again(way, name):
    """From a position that a resumed feed gave."""
    build = KINDS[way][name]
    whole = feeds.uninterrupted(build, STEPS, {2})

    once = feeds.resumed(build, whole.marks[0], STEPS, marks={8})
    twice = feeds.resumed(build, once.marks[0], STEPS)

    rest = feeds.Run(whole.seen[8:], rng=whole.rng)
    assert_same_run(rest, twice)


@pytest.mark.parametrize("name", SAMPLER)
@pytest.mark.parametrize("step", [3, 9])
def test_passing_over_batches_does_not_look_at_the_dataset(name, step):
    whole = feeds.uninterrupted(SAMPLER[name], STEPS, {step})
    sources = []

    feeds.resumed(feeds.watched(SAMPLER[name], sources), whole.marks[0], STEPS)

    sizes = [len(batch.reshape(-1)) for batch in whole.seen[step:] if batch is not END]
    assert len(sources[0].dataset.looks) == sum(sizes)


@pytest.mark.parametrize("step", [3, 9])
def test_a_source_that_says_its_state_is_not_read_again(step):
    whole = feeds.uninterrupted(Stateful, STEPS, {step})
    sources = []

    feeds.resumed(feeds.watched(Stateful, sources), whole.marks[0], STEPS)

    assert len(sources[0].looks) == sum(batch is not END for batch in whole.seen[step:])


@pytest.mark.parametrize("name", ["in order", "shuffled, own generator", "weighted"])
def test_without_the_attribute_of_torch_batches_are_passed_over_by_fetching(name, monkeypatch):
    build = SAMPLER[name]
    monkeypatch.setattr(PlainReader, "open", lambda reader: (b for b in reader._source))

    whole = feeds.uninterrupted(build, STEPS, {3, 10})

    for mark in whole.marks:
        rest = feeds.Run(whole.seen[mark.step :], rng=whole.rng)
        assert_same_run(rest, feeds.resumed(build, mark, STEPS))


@pytest.mark.parametrize("training", [feeds.draw_much, feeds.draw_pairs, feeds.seed_anew])
@pytest.mark.parametrize("name", ["drawing", "hidden state", "sampler of one's own"])
def test_a_replay_is_exact_whatever_training_draws(name, training):
    build = REPLAY[name]

    whole = feeds.uninterrupted(build, STEPS, {3, 10}, training)

    for mark in whole.marks:
        rest = feeds.Run(whole.seen[mark.step :], rng=whole.rng)
        assert_same_run(rest, feeds.resumed(build, mark, STEPS, training=training))


@pytest.mark.parametrize(
    ("way", "name"),
    [
        ("sampler", "shuffled, own generator"),
        ("sampler", "weighted, own generator"),
        ("replay", "persistent, own generator"),
    ],
)
def test_a_generator_that_another_loader_draws_from_is_put_back_too(way, name):
    """As one that the validation loader shares, and draws from in the middle of an epoch."""
    build = KINDS[way][name]

    whole = feeds.uninterrupted(build, STEPS, {3, 4, 9}, shared=True)

    for mark in whole.marks:
        rest = feeds.Run(whole.seen[mark.step :], rng=whole.rng)
        assert_same_run(rest, feeds.resumed(build, mark, STEPS, shared=True))


def test_an_order_that_is_drawn_as_it_goes_from_a_shared_generator_is_refused():
    build = SAMPLER["replacing, own generator"]
    whole = feeds.uninterrupted(build, STEPS, {3}, shared=True)

    with pytest.raises(TrialError, match=r"and so does something else\. Give each"):
        feeds.resumed(build, whole.marks[0], STEPS, shared=True)


def test_a_trial_whose_loader_was_killed_ends_on_the_bits_of_one_trained_alone(
    tmp_path, run_study, assert_alone
):
    flag = tmp_path / "killed"
    recipe = shoal.Recipe(
        model=kinds.linear_model, data=kinds.killed_once_data, loss=kinds.squared_error
    )

    report = run_study(recipe, shoal.grid(lr=[1e-2], flag=[str(flag)]), epochs=2)

    assert flag.exists()
    assert_alone(report, report.trials, recipe, epochs=2)
