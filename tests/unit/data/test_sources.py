"""Which way leads a source to a position, and why; and what else is seen from outside."""

from __future__ import annotations

import kinds
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from shoal.data import host_bytes, rule_of
from shoal.data.sources import name_of, replay_rule
from shoal.recipes.recipe import epoch_length

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

REPLAY = "place in the data: replay from the first epoch, with a few numbers kept of each: "


def test_that_a_dataset_counts_is_seen_only_when_it_is_read():
    """Each kind's way once it is read: tests/equivalence/test_positions.py."""
    assert rule_of(kinds.REPLAY["dataset that counts"]()).way == "sampler"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (kinds.batches, "place in the data: index into a list"),
        (kinds.SAMPLER["weighted"], "place in the data: index into a seeded sampler"),
        (kinds.Stateful, "place in the data: state_dict() of the Stateful"),
        (
            kinds.EPOCH["one process"],
            "place in the data: replay of the epoch, for the random streams of its process",
        ),
        (
            kinds.EPOCH["two processes"],
            "place in the data: replay of the epoch, for the random streams of its 2 processes",
        ),
        (
            kinds.Drawing,
            REPLAY + "Drawing may keep anything; give it state_dict() and load_state_dict() to "
            "be there at once",
        ),
        (
            kinds.REPLAY["persistent processes"],
            REPLAY + "the random streams of its 2 processes go on from epoch to epoch",
        ),
        (kinds.REPLAY["sampler of one's own"], REPLAY + "Odd may keep anything"),
        (kinds.REPLAY["stream that goes on"], REPLAY + "Everlasting may keep anything"),
        (
            kinds.one_generator,
            REPLAY + "dataset.noise.generator and generator are one generator",
        ),
        (
            kinds.loader_with_state,
            REPLAY + "its state_dict() does not hold the random streams of its processes",
        ),
        (
            lambda: WithState(range(3), sampler=kinds.weighted()()),
            REPLAY + "its state_dict() does not hold what the WeightedRandomSampler drew",
        ),
    ],
)
def test_a_rule_says_why(source, reason):
    assert str(rule_of(source())) == reason


class WithState(kinds.WithState):
    pass


def test_a_rule_that_reading_changed_says_why():
    assert str(replay_rule("dataset.calls")) == (
        REPLAY + "dataset.calls changes as it is read; a random.Random or torch.Generator in its "
        "place would be kept"
    )


def test_a_rule_reads_nothing_and_draws_nothing():
    before = torch.get_rng_state()
    source = kinds.SAMPLER["replacing, own generator"]()
    state = source.sampler.generator.get_state()

    rule_of(source)

    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(source.sampler.generator.get_state(), state)
    assert source.dataset.looks == []


class Guessing(IterableDataset):
    def __iter__(self):
        return iter([1])

    def __len__(self):
        return 5


class Unsized:
    def __iter__(self):
        return iter([1])


@pytest.mark.parametrize(
    ("source", "length"),
    [
        ([1, 2], 2),
        (DataLoader(range(7), 2), 4),
        (DataLoader(Guessing(), 2), None),
        (Unsized(), None),
    ],
)
def test_a_length_is_known_where_it_is_more_than_a_guess(source, length):
    assert epoch_length(source) == length


def test_a_source_is_called_by_what_it_reads():
    assert name_of(kinds.EPOCH["two processes"]()) == "DataLoader over Augmented, 2 processes"
    assert name_of([1]) == "list"


@pytest.mark.parametrize(
    ("options", "batches"),
    [({}, 1), ({"num_workers": 2}, 5), ({"num_workers": 2, "prefetch_factor": 4}, 9)],
)
def test_loader_processes_hold_batches_ahead(options, batches):
    batch = {"x": torch.zeros(4, 5), "y": (torch.zeros(4, dtype=torch.int64), "name")}

    assert host_bytes(DataLoader(range(9), **options), batch) == batches * (80 + 32)


def test_a_sparse_batch_is_counted_by_its_numbers_and_their_places():
    sparse = torch.eye(4).to_sparse()
    assert host_bytes([sparse], [sparse]) == 4 * (4 + 16)
