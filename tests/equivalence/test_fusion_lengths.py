"""Arrays of trials whose batches are padded to their longest row, and so of many lengths."""

from __future__ import annotations

import pytest
import texts
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import shoal
from shoal.fusion import Array, Declined, Member, StackedBackend
from shoal.fusion.batches import layout_of
from shoal.fusion.graphs.compiled import CompiledBackend
from shoal.fusion.graphs.traced import TracedBackend
from shoal.fusion.passes.loop import LoopBackend
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.recipes.optimizers import build_optimizer_of
from shoal.recipes.recipe import build_model
from shoal.rng import capture_rng, seed_all
from shoal.testing import array_loop, plain_loop, same_bits
from shoal.verify import verify_trials

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, CPU = 4, torch.device("cpu")


class Texts(nn.Module):
    """Words, an encoder layer with dropout, statistics of their mean, two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(texts.WORDS, 8, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, ids):
        is_there = (ids > 0).unsqueeze(-1)
        rows = self.layer(self.words(ids), src_key_padding_mask=ids == 0) * is_there
        return self.head(self.norm(rows.sum(1) / is_there.sum(1)))


class Skipping(texts.Skipping, Texts):
    """One that has a part for long texts alone."""


def recipe(model=Texts, **changes):
    return texts.recipe(model, **changes)


def member(made, seed):
    seed_all(seed)
    model = build_model(made, {"lr": 0.01})
    optimizer = build_optimizer_of(made, model, {"lr": 0.01})
    return Member(
        recipe=made,
        hp={"lr": 0.01},
        module=model,
        optimizer=optimizer,
        schedule=None,
        rng=capture_rng(CPU),
    )


def ids(length, seed):
    draws = torch.Generator().manual_seed(seed)
    shape = (4, length)
    return torch.randint(1, texts.WORDS, shape, generator=draws), torch.tensor([0, 1, 1, 0])


def step(array, lengths, seed=0):
    """A step for each group of lengths, one for each slot; None waits."""
    return array.step(
        *(
            [None if n is None else ids(n, seed + 10 * at + slot) for slot, n in enumerate(group)]
            for at, group in enumerate(lengths)
        )
    )


def array_of(made, backend=StackedBackend, slots=range(WIDTH)):
    members = [member(made, seed) for seed in range(WIDTH)]
    array = Array(members, backend=backend(), any_layout=True)
    for slot in set(range(WIDTH)) - set(slots):
        array.retire(slot)
    return array


def bits(array, slot):
    state = array.extract(slot)
    tensors = {**state["model"], "rng": state["rng"].torch}
    for name, entries in state["optimizer"]["state"].items():
        tensors |= {f"{name} {key}": value for key, value in entries.items()}
    return tensors


def unequal(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not same_bits(one[name], other[name])]


STEPS = [[(9, 9, 6, 6)], [(5, 9, 7, 12)], [(8, 8, 8, 8)], [(9, 4, 9, 9)], [(9, 9, 6, None)]]


@pytest.mark.slow
@pytest.mark.parametrize("backend", [StackedBackend, TracedBackend])
def test_a_slots_bits_do_not_depend_on_whose_batches_are_as_long(backend):
    array = array_of(recipe(), backend)
    for at, lengths in enumerate(STEPS * 2):
        step(array, lengths, 100 * at)
    for slot in range(WIDTH):
        lone = array_of(recipe(), slots=[slot])
        for at, lengths in enumerate(STEPS * 2):
            mine = [[n if s == slot else None for s, n in enumerate(g)] for g in lengths]
            step(lone, mine, 100 * at)
        assert unequal(bits(array, slot), bits(lone, slot)) == []


def test_a_step_of_several_batches_adds_up_what_is_each_slots_own():
    groups = [[(9, 9, 6, 6), (5, 9, 9, 6)], [(7, 7, 7, 7), (7, 9, None, 9)]]
    made = recipe(accumulate=2, clip_grad_norm=0.5)
    array = array_of(made)
    for at, lengths in enumerate(groups * 3):
        step(array, lengths, 100 * at)
    for slot in range(WIDTH):
        lone = array_of(made, slots=[slot])
        for at, lengths in enumerate(groups * 3):
            mine = [[n if s == slot else None for s, n in enumerate(g)] for g in lengths]
            step(lone, mine, 100 * at)
        assert unequal(bits(array, slot), bits(lone, slot)) == []


def test_a_neighbour_whose_numbers_are_not_finite_is_nobodys():
    made, found = recipe(on_nonfinite="ignore"), []
    for poison in (0.0, float("inf")):
        array = array_of(made)
        with torch.no_grad():
            array.member(1).module.head.weight.add_(poison)
        for at, lengths in enumerate(STEPS):
            step(array, lengths, 100 * at)
        found.append([bits(array, slot) for slot in (0, 2, 3)])
    for clean, poisoned in zip(*found, strict=True):
        assert unequal(clean, poisoned) == []


def test_slots_of_one_length_are_one_pass(monkeypatch):
    seen, train = [], StackedBackend.train

    def spy(self, crew, batches, active, scale):
        seen.append(tuple(slot for slot, takes_part in enumerate(active) if takes_part))
        return train(self, crew, batches, active, scale)

    def by_itself(*args):
        raise AssertionError("a slot ran by itself")

    monkeypatch.setattr(StackedBackend, "train", spy)
    monkeypatch.setattr(LoopBackend, "train", by_itself)
    array = array_of(recipe())
    step(array, [(9, 6, 9, 7)])
    step(array, [(12, 12, 12, 12)])
    assert seen == [(0, 2), (1,), (3,), (0, 1, 2, 3)]


def test_a_part_that_only_some_lengths_use_breaks_the_array_up():
    """Alone an optimizer passes over what has no gradient, and does not step it with zeros."""
    array = array_of(recipe(Skipping))
    step(array, [(9, 6, 9, 7)])
    step(array, [(12, 11, 10, 10)])
    with pytest.raises(Declined, match=r"some lengths use 'late\.weight' and others do not: slot"):
        step(array, [(12, 9, 12, 9)])


def test_whether_a_batch_is_large_goes_by_the_trials_own_first_one(monkeypatch):
    array, seen = array_of(recipe()), []
    for slot, first in enumerate((4, 4, 12, 12)):
        array.member(slot).usual = layout_of(ids(first, 0))
    large = tuple(torch.cat([part] * 8) for part in ids(6, 0))  # 224 elements; 20 and 52 there
    evaluate_alone = Array._evaluate_alone

    def spy(self, slot, batch):
        seen.append(slot)
        return evaluate_alone(self, slot, batch)

    monkeypatch.setattr(Array, "_evaluate_alone", spy)
    with array.evaluating():
        found = array.evaluate([large] * WIDTH)
        assert seen == [0, 1]
        assert not array.evaluates_as_one([large] * WIDTH)
        assert array.evaluates_as_one([None, None, large, large])
    assert all(row is not None and row["valid_loss"] > 0 for row in found)


def test_compiled_code_is_of_one_length():
    with pytest.raises(Declined, match="pad all batches to one length"):
        array_of(recipe(), CompiledBackend)


def test_gradients_that_add_up_from_step_to_step_are_declined():
    def headless(named, hp):
        return torch.optim.AdamW([p for name, p in named if "head" not in name], lr=0.01)

    with pytest.raises(Declined, match=r"the gradient of 'head\.weight', which no optimizer has"):
        array_of(recipe(optimizer=headless))


def test_the_reference_is_near_the_trial_alone():
    options = {"steps": 22, "eval_every": 11}
    plain = plain_loop(recipe(), {"lr": 0.001}, 3, **options)
    fused = array_loop(recipe(), {"lr": 0.001}, 3, slot=1, width=3, any_layout=True, **options)
    assert torch.allclose(torch.tensor(fused.losses), torch.tensor(plain.losses), atol=1e-4)


SPACES = {
    "one order": {"lr": [0.01, 0.003, 0.001, 0.0003], "seed": [5]},
    "orders of their own": {"lr": [0.01, 0.003, 0.001, 0.0003]},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("space", SPACES)
def test_trials_whose_lengths_vary_share_an_array_and_verify(space, devices, run_study):
    made = recipe()
    report = run_study(made, shoal.grid(**SPACES[space]), epochs=2, fuse=WIDTH, devices=devices)
    assert [trial.error for trial in report.trials] == [""] * WIDTH
    rows = Snapshot.of(read_outline(report.directory)).trials
    keys = [row.numerics for row in rows]
    assert len({key["array_group"] for key in keys}) == 1
    assert {key["array_batches"] for key in keys} == {"tuple(int64 [4, ~], int64 [4])"}
    assert {key["array_layouts"] for key in keys} == {"all"}
    assert {key["array"].partition(" of ")[2] for key in keys} == {str(WIDTH)}
    verdicts = [*verify_trials(report.directory, rows, recipe=made)]
    assert [(v.first_difference, v.failure, v.skipped) for v in verdicts] == [("", "", "")] * WIDTH


def sometimes_weighed(some):
    """Batches of which some have an item more, which is for the loss."""
    found, label = texts.padded(some)
    return (found, label, torch.ones(len(some))) if found.shape[1] == 12 else (found, label)


def weighed(output, batch):
    each = F.cross_entropy(output, batch[1], reduction="none")
    return (each * batch[2] if len(batch) > 2 else each).mean()


@pytest.mark.slow
def test_batches_of_which_some_have_an_item_more_train_in_an_array_too(run_study):
    def loaders(hp):
        train = DataLoader(texts.rows(), 4, shuffle=True, collate_fn=sometimes_weighed)
        return train, DataLoader(texts.rows()[:16], 4, collate_fn=sometimes_weighed)

    made = shoal.Recipe(model=lambda hp: Texts(), data=loaders, loss=weighed)
    report = run_study(made, shoal.grid(lr=[0.01, 0.003]), epochs=2, fuse=2)
    assert [trial.error for trial in report.trials] == [""] * 2
    found = Snapshot.of(read_outline(report.directory)).trials
    assert {row.numerics["array"].partition(" of ")[2] for row in found} == {"2"}
    verdicts = [*verify_trials(report.directory, found, recipe=made)]
    assert [(v.first_difference, v.failure, v.skipped) for v in verdicts] == [("", "", "")] * 2
