"""Arrays in shards of trials whose batches are padded to their longest row, to their bits."""

from __future__ import annotations

import pytest
import texts
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import shoal
from shoal.core.technique import Spilled
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.verify import verify_trials

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 3


class Texts(nn.Module):
    """Words, encoder layers with dropout, statistics of their mean, two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(texts.WORDS, 8, padding_idx=0)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True) for _ in range(3)
        )
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, ids):
        is_there = ids > 0
        rows = self.words(ids)
        for layer in self.layers:
            rows = layer(rows, src_key_padding_mask=~is_there)
        rows = rows * is_there.unsqueeze(-1)
        return self.head(self.norm(rows.sum(1) / is_there.sum(1, keepdim=True)))


class Reading(Texts):
    """One whose head reads the words without a gradient, in another shard than theirs."""

    def forward(self, ids):
        return super().forward(ids) + self.words.weight.detach().square().mean()


class Skipping(texts.Skipping, Texts):
    """One that has a part for long texts alone."""


def recipe(model=Texts, **changes):
    return texts.recipe(model, **changes)


HOST = Spilled(shards=3, optimizer="host")
DEVICE = Spilled(shards=3, optimizer="device", keep=(1,))
SPACES = {
    "one order": {"lr": [0.01, 0.003, 0.001], "seed": [5]},
    "orders of their own": {"lr": [0.01, 0.003, 0.001]},
}


def assert_exact(report, rows, made):
    verdicts = [*verify_trials(report.directory, rows, recipe=made)]
    told = [(verdict.first_difference, verdict.failure, verdict.skipped) for verdict in verdicts]
    assert told == [("", "", "")] * len(rows)


def assert_verified(report, made, width=WIDTH):
    assert [trial.error for trial in report.trials] == [""] * len(report.trials)
    found = Snapshot.of(read_outline(report.directory)).trials
    assert {row.technique for row in found} == {"Spilled"}
    assert {row.numerics["array_layouts"] for row in found} == {"all"}
    assert {row.numerics["array"].partition(" of ")[2] for row in found} == {str(width)}
    assert_exact(report, found, made)


@pytest.mark.sample(1)
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("technique", [HOST, DEVICE], ids=["host", "device"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_in_shards_too(space, technique, accumulate, clip, run_study):
    made = recipe(accumulate=accumulate, clip_grad_norm=clip)
    options = {"technique": technique, "poison": True, "timeline": False}
    report = run_study(made, shoal.grid(**SPACES[space]), epochs=2, fuse=WIDTH, **options)
    assert_verified(report, made)
    words = "passes, one for each length" if "own" in space else "one length at each step"
    assert words in (report.directory / "plan.json").read_text()


@pytest.mark.full
def test_weights_that_another_shard_reads_without_a_gradient_part_nobody(run_study):
    made = recipe(Reading)
    space = shoal.grid(**SPACES["orders of their own"])
    assert_verified(run_study(made, space, epochs=1, fuse=WIDTH, technique=HOST), made)


def all_rows_at_once(hp):
    """Validation batches of so many elements that an array evaluates its slots one by one."""
    train, _ = texts.data(hp)
    if hp["fixed"]:
        some = [(ids[:4], label) for ids, label in texts.rows()]
        train = DataLoader(some, batch_size=4, shuffle=True, collate_fn=texts.padded)
    return train, DataLoader(texts.rows(), batch_size=44, collate_fn=texts.padded)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("fixed", [False, True], ids=["many lengths", "one length"])
def test_large_validation_batches_are_evaluated_as_in_a_whole_array(fixed, run_study):
    made = recipe(data=all_rows_at_once, metrics={"square": lambda out, batch: out.square().sum()})
    space = shoal.grid(**SPACES["one order"], fixed=[fixed])
    report = run_study(made, space, epochs=2, fuse=WIDTH, technique=HOST, poison=True)
    found = Snapshot.of(read_outline(report.directory)).trials
    assert {row.numerics["array"].partition(" of ")[2] for row in found} == {str(WIDTH)}
    assert_exact(report, found, made)


def failing(output, batch, hp):
    if hp["bad"] and batch[0].shape[1] == 12 and output.requires_grad:
        raise ValueError("too long a text")
    return F.cross_entropy(output, batch[1])


@pytest.mark.slow
def test_trials_come_to_slots_in_turn_and_one_fails_at_some_length(run_study):
    made = recipe(loss=failing)
    space = shoal.grid(lr=[0.01, 0.003], bad=[0, 1])
    report = run_study(made, space, epochs=2, fuse=2, technique=HOST, timeline=False)
    failed = [trial for trial in report.trials if trial.error]
    assert all("too long a text" in trial.error for trial in failed)
    assert [trial.hp["bad"] for trial in failed] == [1, 1]
    found = [r for r in Snapshot.of(read_outline(report.directory)).trials if not r.hp["bad"]]
    assert {row.numerics["array_layouts"] for row in found} == {"all"}
    assert_exact(report, found, made)


def one_bad(hp):
    """Of one trial every batch of the longest texts has a label that there is not."""
    lost = 9 if hp["lr"] == 0.003 else 0

    def collate(some):
        ids, labels = texts.padded(some)
        return ids, labels + (lost if ids.shape[1] == 12 else 0)

    order = torch.Generator().manual_seed(1)
    return DataLoader(texts.rows(), 4, shuffle=True, collate_fn=collate, generator=order), None


@pytest.mark.full
def test_one_trial_whose_longest_batch_raises_keeps_no_other_from_an_array(run_study):
    made = recipe(data=one_bad)
    space = shoal.grid(**SPACES["orders of their own"])
    report = run_study(made, space, steps=6, fuse=WIDTH, technique=HOST)
    assert [bool(trial.error) for trial in report.trials] == [False, True, False]
    found = Snapshot.of(read_outline(report.directory)).trials
    assert {row.numerics.get("array_layouts") for row in found} == {"all"}
    assert_exact(report, [found[0], found[2]], made)


def long_last(hp):
    """Ten batches in the trial's own order, the last one longer than any that is looked at."""
    draws = torch.Generator().manual_seed(int(1e4 * hp["lr"]))
    last = 5 if hp.get("short") and hp["lr"] < 0.005 else 60
    lengths = [*torch.randint(4, 9, (9,), generator=draws).tolist(), last]
    each = [torch.randint(1, texts.WORDS, (4, length), generator=draws) for length in lengths]
    return [(ids, ids[:, 0] % 2) for ids in each], None


@pytest.mark.slow
def test_a_length_for_which_there_is_no_room_ends_nobody(run_study):
    made = recipe(data=long_last)
    space = shoal.grid(lr=[0.01, 0.003])
    options = {"technique": Spilled(shards=5, optimizer="host"), "memory": "720KiB"}
    report = run_study(made, space, epochs=1, fuse=2, timeline=False, **options)
    assert [trial.error for trial in report.trials] == [""] * 2
    found = Snapshot.of(read_outline(report.directory)).trials
    last = [row.numerics["array"].partition("from step ")[2] for row in found]
    assert (
        max(last) == "9 alone"
    )  # who came to the device later is behind then, and leaves with it
    assert_exact(report, found, made)


@pytest.mark.slow
def test_a_part_that_only_some_lengths_use_has_trials_go_on_alone(run_study):
    made = recipe(Skipping, data=long_last)
    space = shoal.grid(lr=[0.01, 0.003], short=[True])
    report = run_study(made, space, epochs=1, fuse=2, technique=HOST, timeline=False)
    assert [trial.error for trial in report.trials] == [""] * 2
    found = Snapshot.of(read_outline(report.directory)).trials
    assert all("from step 9 alone" in row.numerics["array"] for row in found)
    assert_exact(report, found, made)
