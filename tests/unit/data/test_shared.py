"""What a data function made is another trial's only where that one would be given the same."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Subset, TensorDataset

from shoal.core.errors import SpecError
from shoal.core.spec import HyperParameters
from shoal.data.shared import KEPT, SharedData
from shoal.rng import seed_all

CPU = torch.device("cpu")


def rows(count=12, by=1.0):
    return TensorDataset(torch.arange(count * 2.0).reshape(count, 2) * by, torch.arange(count) % 3)


def loaders(*, batch=4, by=1.0, **options):
    return DataLoader(rows(by=by), batch, shuffle=True, **options), DataLoader(rows(5), 5)


class Calls:
    """A data function that counts its calls, and what trials are given."""

    def __init__(self, make, said=lambda: 0):
        self.count, self.make = 0, make
        self.shared = SharedData(self._made, CPU, said)

    def _made(self, hp):
        self.count += 1
        return self.make(hp)

    def of(self, *trials):
        """What these trials are given, each with a seed of its own."""
        found = []
        for seed, hp in enumerate(trials):
            seed_all(seed)
            found.append(self.shared(HyperParameters(hp)))
        return found


def test_after_two_equal_results_of_two_seeds_nobody_calls_again():
    calls = Calls(lambda hp: loaders())
    first, second, third, fourth = calls.of(*[{"lr": 0.1 * n} for n in range(4)])
    assert calls.count == 2
    assert first is not second
    assert third is first
    assert fourth is first


def test_one_trial_that_is_built_again_and_again_proves_nothing():
    calls = Calls(lambda hp: loaders())
    for _ in range(4):
        seed_all(7)
        calls.shared(HyperParameters({"lr": 0.1}))
    assert calls.count == 4


@pytest.mark.parametrize(
    "read",
    [
        lambda hp: hp["batch"],
        lambda hp: hp.get("batch", 4),
        lambda hp: dict(hp)["batch"],
        lambda hp: {**hp}["batch"],
        lambda hp: 4 if "batch" in hp else 3,
        lambda hp: len(repr(hp)),
        lambda hp: next(value for name, value in hp.items() if name == "batch"),
    ],
)
def test_trials_that_differ_in_what_it_read_share_nothing(read):
    calls = Calls(lambda hp: loaders(batch=int(read(hp))))
    kinds = [{"batch": 2}, {"batch": 3}, {"batch": 2.0}, {"batch": True}]
    calls.of(*kinds)
    assert calls.count == 4
    calls.of(*kinds)  # of the same seeds
    assert calls.count == 8


def test_one_that_it_looked_for_in_vain_is_read_too():
    def make(hp):
        try:
            return loaders(by=hp["by"])
        except Exception:
            return loaders(by=0.5)

    calls = Calls(make)
    found = calls.of({}, {}, {"by": 2.0})
    assert calls.count == 3
    assert found[2][0].dataset.tensors[0].max() == 46


def test_rows_that_torch_does_not_watch_are_not_shared():
    def make(hp):
        with torch.inference_mode():
            return DataLoader(TensorDataset(torch.ones(4, 2)), 2), None

    calls = Calls(make)
    calls.of({}, {}, {})
    assert calls.count == 3


def test_one_that_it_did_not_find_is_read_too():
    calls = Calls(lambda hp: loaders(batch=hp.get("batch", 4)))
    found = calls.of({}, {}, {"batch": 3}, {}, {"lr": 0.1})
    assert calls.count == 3
    assert found[3] is found[0]
    assert found[4] is found[0]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(1),
        random.random,
        np.random.rand,
        lambda: torch.manual_seed(3),
        lambda: random.seed(3),
    ],
)
def test_what_drew_or_seeded_is_each_trials_own(draw):
    def make(hp):
        draw()
        return loaders()

    calls = Calls(make)
    calls.of({}, {}, {}, {})
    assert calls.count == 4


def test_what_depends_on_the_seed_without_a_draw_is_found_out():
    calls = Calls(lambda hp: loaders(by=float(torch.initial_seed())))
    calls.of({}, {}, {}, {})
    assert calls.count == 4


def test_what_changes_from_call_to_call_is_found_out():
    count = iter(range(9))
    calls = Calls(lambda hp: loaders(by=float(next(count) > 0)))
    calls.of({}, {}, {}, {})
    assert calls.count == 4


def test_what_prints_prints_for_every_trial():
    said = [0]

    def make(hp):
        said[0] += 1
        return loaders()

    calls = Calls(make, said=lambda: said[0])
    calls.of({}, {}, {})
    assert calls.count == 3


class Own(TensorDataset):
    pass


def with_note(dataset):
    dataset.note = 3
    return dataset


@pytest.mark.parametrize(
    "source",
    [
        lambda: [torch.ones(2, 2)],
        lambda: DataLoader([(torch.ones(2), 1)] * 4, 2),
        lambda: DataLoader(Subset(rows(), [1, 2, 3]), 2),
        lambda: DataLoader(Own(torch.ones(4, 2)), 2),
        lambda: DataLoader(with_note(rows()), 2),
        lambda: DataLoader(rows(), 2, generator=torch.Generator().manual_seed(1)),
        lambda: DataLoader(rows(), 2, collate_fn=list),
        lambda: DataLoader(rows(), 2, sampler=[1, 2, 3]),
        lambda: DataLoader(rows(), 2, sampler=RandomSampler(range(3))),
        lambda: DataLoader(rows(), 2, num_workers=1),
    ],
)
def test_what_might_be_changed_by_who_reads_it_is_made_for_each(source):
    calls = Calls(lambda hp: (source(), None))
    calls.of({}, {}, {})
    assert calls.count == 3
    calls = Calls(lambda hp: (DataLoader(rows(), 2), source()))
    calls.of({}, {}, {})
    assert calls.count == 3


def test_what_is_no_pair_is_handed_on():
    calls = Calls(lambda hp: 3)
    assert calls.of({}, {}) == [3, 3]


def test_an_error_is_the_callers():
    calls = Calls(lambda hp: loaders(batch=hp["bach"]))
    with pytest.raises(SpecError, match="unknown hyperparameter 'bach'"):
        calls.of({"batch": 3})


def test_few_are_kept_that_nobody_uses_now():
    calls = Calls(lambda hp: loaders(batch=hp["batch"]))
    calls.of(*[{"batch": 2 + n} for n in range(KEPT + 3)])
    assert len(calls.shared._made) == KEPT


def test_a_shared_loader_gives_each_trial_the_order_that_it_would_have_alone():
    calls = Calls(lambda hp: loaders())
    calls.of({}, {})
    for seed in (3, 4):
        found = []
        for source in (calls.shared, lambda hp: loaders()):
            seed_all(seed)
            train, _ = source(HyperParameters({}))
            found.append([batch[0] for _ in range(2) for batch in train])
        assert torch.equal(torch.cat(found[0]), torch.cat(found[1]))
    assert calls.count == 2


def test_what_somebody_has_written_to_is_nobody_elses():
    calls = Calls(lambda hp: loaders())
    *_, last = calls.of({}, {}, {})
    assert calls.count == 2
    last[0].dataset.tensors[0].add_(1)
    found, _ = calls.shared(HyperParameters({}))
    assert calls.count == 3
    assert not torch.equal(found.dataset.tensors[0], last[0].dataset.tensors[0])
    for _ in range(2):
        calls.shared(HyperParameters({}))
    assert calls.count == 5
