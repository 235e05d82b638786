"""A pass whose code asks tensors for truths and numbers is a graph, for each of their answers."""

from __future__ import annotations

import pytest
import squads
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.core.spec import TrialSpec
from shoal.fusion import Array, backend_of
from shoal.fusion.likeness import same_bits
from shoal.runtime.measuring.crowd import Crowd

SPACE = shoal.grid(lr=[1e-2, 1e-3, 3e-3])
ROWS, LONGEST = 4, 6


class Reader(nn.Module):
    """Attention that asks whether anything is padded, as a transformer's masks are made."""

    def __init__(self, ask):
        super().__init__()
        self.words, self.drop = nn.Embedding(20, 8), nn.Dropout(0.1)
        self.head, self.ask = nn.Linear(8, 2), ask

    def forward(self, ids, mask):
        rows = self.drop(self.words(ids))
        hidden = self.ask(mask)
        scores = rows @ rows.transpose(1, 2)
        if hidden is not None:
            scores = scores.masked_fill(hidden[:, None], -1e9)
        return self.head((scores.softmax(-1) @ rows).mean(1))


def all_there(mask):
    return None if mask.all() else ~mask


def how_many(mask):
    if mask.sum().item() == ROWS * LONGEST or torch.is_nonzero((~mask).sum() == 0):
        return None
    return ~mask


def of_its_own(mask):
    """As a decoder does to which no mask is given."""
    there = torch.ones(mask.shape[:2], dtype=torch.bool)
    return ~mask if there.all() and bool(there[:, -1].any()) else None


def raising(mask):
    if bool((mask.sum(1) == 0).any()):
        raise ValueError("a row of nothing")
    longest = int(mask.sum(1).max())
    return F.pad(~mask[:, :longest], (0, LONGEST - longest), value=True)


def texts(seed, batches=8, padded=0.6):
    """Batches of words, some of which have padded rows; the longest is always as long."""
    draws = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(batches):
        ids = torch.randint(1, 20, (ROWS, LONGEST), generator=draws)
        lengths = torch.full((ROWS,), LONGEST)
        if torch.rand((), generator=draws) < padded:
            lengths[1:] = torch.randint(2, LONGEST, (ROWS - 1,), generator=draws)
        made.append((ids, torch.arange(LONGEST) < lengths[:, None], ids[:, 0] % 2))
    return made


def recipe(ask, data=lambda hp: (texts(1), texts(2, batches=3))):
    return shoal.Recipe(
        model=lambda hp: Reader(ask).double(),
        data=data,
        inputs=lambda batch: batch[:2],
        loss=lambda output, batch: F.cross_entropy(output, batch[2]),
        metrics={"sum": lambda output, batch: float(output.sum())},
    )


@pytest.mark.parametrize(
    "ask", [all_there, how_many, of_its_own, raising], ids=lambda ask: ask.__name__
)
def test_it_trains_as_a_graph(ask, run_study):
    made = recipe(ask)
    report = run_study(made, SPACE, epochs=3, fuse="2 traced")
    assert squads.kinds(report) == ["traced"] * 3
    squads.assert_near(report.trials, made, 1e-9, epochs=3)
    squads.assert_verified(report, made)


def test_compiled_it_is_declined(run_study):
    report = run_study(recipe(all_there), SPACE, steps=2, fuse="3 compiled")
    assert all(trial.error == "" for trial in report.trials)
    words = (report.directory / "plan.json").read_text()
    assert "it asks a tensor for a number, by which its code may go other ways" in words


def listed(mask):
    """Whole numbers as a list; others only of a tensor that no slot has for itself."""
    grid = torch.linspace(0, 1, 5)
    assert sum(grid.tolist()) == pytest.approx(2 + 2 * float(grid[1]))
    shortest, longest = torch.stack([mask.sum(1).min(), mask.sum(1).max()]).tolist()
    return None if shortest == longest and grid[-1].item() == 1.0 else ~mask


def test_numbers_in_a_list_are_asked_for_one_by_one():
    one, other = arrays(recipe(listed))
    steps = texts(3, batches=8, padded=0.3)
    assert_same_steps(one, other, [batch for batch in steps if batch[1].all()])
    (ways,) = one.backend._ways.values()
    assert [(len(kept.answers), kept.proven) for kept in ways.kept] == [(9, True)]


def arrays(made):
    """An array of three trials that makes graphs, and one that does not."""
    trials = [TrialSpec(number=n, hp={"lr": 0.01 * (n + 1)}, seed=n) for n in range(3)]
    for kind in ("traced", "eager"):
        crowd = Crowd(made, trials, torch.device("cpu"))
        crowd.grow(3)
        yield Array(crowd.members, device=torch.device("cpu"), backend=backend_of(kind))


def assert_same_steps(one, other, steps):
    for batch in steps:
        found, expected = (array.step([batch] * 3) for array in (one, other))
        assert found == expected
    for name, block in one.crew.stacked.parameters.items():
        assert same_bits(block, other.crew.stacked.parameters[name])


def test_each_answer_has_its_graph_and_the_bits_are_those_of_the_code():
    one, other = arrays(recipe(all_there))
    steps = texts(3, batches=12, padded=0.5)
    there = [bool(batch[1].all()) for batch in steps]
    assert 2 < sum(there) < len(there) - 2
    assert_same_steps(one, other, steps * 2)
    (ways,) = one.backend._ways.values()
    assert {kept.answers for kept in ways.kept} == {(True,), (False,)}
    assert all(kept.proven for kept in ways.kept)
    assert not one.backend.why_eager
    assert ways.strays < 3  # two for each answer are not replayed


def test_where_answers_are_others_in_nearly_every_batch_there_is_no_graph():
    """Each would be made, and run for nothing."""

    def padded(mask):
        return ~mask if int((~mask).sum()) != 1 else None

    one, other = arrays(recipe(padded))
    assert_same_steps(one, other, texts(3, batches=40, padded=0.9))
    assert "another way in nearly every batch" in one.backend.why_eager
