"""Sources of every kind, by the way that leads them to a position."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

COUNT = 11

# ---------------------------------------------------------------- datasets


class Plain(Dataset):
    """Examples that are their index; counts who looks, in a list that is no number of its own."""

    def __init__(self, count: int = COUNT) -> None:
        self.count, self.looks = count, []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):
        self.looks.append(index)
        return torch.tensor([float(index)])


class Augmented(Plain):
    """Noise from each global stream."""

    def __getitem__(self, index: int):
        return super().__getitem__(index) + torch.rand(1) * random.random() * np.random.rand()


class OwnGenerators(Plain):
    """Noise from generators of the dataset's own, one of each kind, some of them deep inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first = random.Random(1)
        self.others = {"numpy": np.random.default_rng(2), "old": np.random.RandomState(3)}
        self.noise = Noise(torch.Generator().manual_seed(4))

    def __getitem__(self, index: int):
        x = super().__getitem__(index) + self.first.random() * self.others["numpy"].random()
        return self.noise(x * self.others["old"].rand())


class Noise:
    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __call__(self, x):
        return x + torch.rand(1, generator=self.generator)


class Counting(Plain):
    """Every look changes the next one."""

    calls = 0

    def __getitem__(self, index: int):
        self.calls += 1
        return super().__getitem__(index) + 100 * self.calls


class Stream(IterableDataset):
    """A stream of examples with noise, dealt out to the loader's processes."""

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for index in range(first, 13, step):
            yield torch.tensor([float(index)]) + torch.rand(1) * random.random()


class Everlasting(IterableDataset):
    """Goes on, with each epoch, where the last one was left."""

    def __init__(self) -> None:
        self.served = 0

    def __iter__(self):
        for _ in range(7):
            self.served += 1
            yield torch.tensor([self.served + torch.rand(())])


class KilledOnce(Dataset):
    """Pairs with noise; where no flag is, it kills the process that looks for the 14th time."""

    def __init__(self, flag: str) -> None:
        self.flag, self.looks = Path(flag), 0

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int):
        self.looks += 1
        if self.looks == 14 and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((4,), index / 30) + torch.rand(4), torch.rand(1)


def killed_once_data(hp):
    loader = DataLoader(KilledOnce(hp["flag"]), 3, shuffle=True, num_workers=1)
    return loader, None


def linear_model(hp):
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))


def squared_error(output, batch):
    return torch.nn.functional.mse_loss(output, batch[1])


# ---------------------------------------------------------------- sources of one's own


class Drawing:
    """A generator that draws from each stream with each batch, and before and after."""

    def __iter__(self):
        torch.rand(2)
        for index in range(5):
            yield torch.tensor([index + torch.rand(()) + random.random() + np.random.randn()])
        random.random()
        torch.randn(3)


class Epochs:
    """A counter that each epoch advances, and an order that each epoch shuffles further."""

    def __init__(self) -> None:
        self.epoch, self.items = 0, list(range(5))

    def __iter__(self):
        random.shuffle(self.items)
        for item in self.items:
            yield torch.tensor([100.0 * self.epoch + item])
        self.epoch += 1


class SetsEpoch:
    """What is done where a sampler wants set_epoch()."""

    def __init__(self) -> None:
        self.epoch = 0
        self.sampler = distributed()
        self.loader = DataLoader(Augmented(), batch_size=2, sampler=self.sampler)

    def __iter__(self):
        self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        yield from self.loader


class Stateful:
    """Says where it is, torchdata's way; draws from the global streams all the same."""

    def __init__(self) -> None:
        self.epoch = self.index = 0
        self.looks: list[int] = []
        self.order: list[int] = []

    def __iter__(self):
        if not self.order:
            self.order = torch.randperm(6).tolist()
        while self.index < len(self.order):
            self.index += 1
            item = self.order[self.index - 1]
            self.looks.append(item)
            yield torch.tensor([100.0 * self.epoch + item]) + torch.rand(1)
        self.index, self.order = 0, []
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "index": self.index, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.index, self.order = state["epoch"], state["index"], state["order"]


class TorchdataLike(DataLoader):
    """torchdata's loader in small: an iterator draws when it is made, also for a state."""

    def __init__(self) -> None:
        super().__init__(Augmented(), batch_size=2, generator=own())
        self.reading: TorchdataLikeIterator | None = None
        self.loaded: dict[str, Any] = {}
        self.is_early = False

    def __iter__(self):
        if not self.is_early:
            self.reading = TorchdataLikeIterator(self)
        self.is_early = False
        if self.reading.is_finished:
            self.reading = TorchdataLikeIterator(self)
        return self.reading

    def state_dict(self) -> dict[str, Any]:
        if self.reading is None:
            self.reading, self.is_early = TorchdataLikeIterator(self), True
        return {name: getattr(self.reading, name) for name in ("index", "order", "is_finished")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reading, self.is_early, self.loaded = None, False, state


class TorchdataLikeIterator:
    def __init__(self, source: TorchdataLike) -> None:
        self.dataset, loaded, source.loaded = source.dataset, source.loaded, {}
        torch.rand(1)
        drawn = torch.randperm(len(source), generator=source.generator).tolist()
        self.index, self.order = loaded.get("index", 0), loaded.get("order", drawn)
        self.is_finished = loaded.get("is_finished", False)

    def __iter__(self):
        return self

    def __next__(self):
        if self.index == len(self.order):
            self.is_finished = True
            raise StopIteration
        self.index += 1
        return self.dataset[self.order[self.index - 1]]


class Odd(Sampler):
    """A sampler of one's own: draws as it goes, and remembers."""

    def __init__(self) -> None:
        self.rounds = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self):
        self.rounds += 1
        for index in range(6):
            yield (index * self.rounds + int(torch.randint(3, ()))) % COUNT


# ---------------------------------------------------------------- kinds


def distributed() -> DistributedSampler:
    return DistributedSampler(range(COUNT), num_replicas=2, rank=1)


def own(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def stack_twice(items):
    return torch.stack(items) * 2 + torch.rand(1)


def loader(dataset: Callable[[], Any] = Augmented, **options: Any) -> Callable[[], Any]:
    """A function that builds a loader; callables among its options are called."""

    def build() -> DataLoader:
        made = {
            key: value() if key in ("generator", "sampler", "batch_sampler") else value
            for key, value in options.items()
        }
        return DataLoader(dataset(), **({"batch_size": 3} | made))

    return build


def weighted(**options: Any) -> Callable[[], Sampler]:
    return lambda: WeightedRandomSampler([1.0, 2.0, 3.0] * 3, 8, **options)


def replacing(**options: Any) -> Callable[[], Sampler]:
    return lambda: RandomSampler(range(COUNT), replacement=True, num_samples=70, **options)


def one_generator() -> DataLoader:
    """The loader's order and the dataset's noise from one generator."""
    dataset = OwnGenerators()
    return DataLoader(dataset, 2, shuffle=True, generator=dataset.noise.generator)


class WithState(DataLoader):
    """Has the methods; what its processes drew is not in them."""

    def state_dict(self):
        raise AssertionError("asked, and cannot know")

    def load_state_dict(self, state):
        raise AssertionError("told, and cannot do it")


def loader_with_state() -> WithState:
    return WithState(Augmented(), 3, shuffle=True, num_workers=1)


def batches(count: int = 5) -> list[torch.Tensor]:
    return [torch.tensor([float(index)]) for index in range(count)]


def batch_sampler(sampler: Callable[[], Any], drop_last: bool) -> Callable[[], BatchSampler]:
    return lambda: BatchSampler(sampler(), 4, drop_last)


BATCHED = {"batch_size": 1}
INDEX = {"list": batches, "tuple": lambda: tuple(batches())}
SAMPLER = {
    "in order": loader(),
    "shuffled": loader(shuffle=True),
    "shuffled, own generator": loader(shuffle=True, generator=own),
    "replacing": loader(sampler=replacing()),
    "replacing, own generator": loader(sampler=lambda: replacing(generator=own())()),
    "more than there is": loader(
        sampler=lambda: RandomSampler(range(4), num_samples=9, generator=own())
    ),
    "weighted": loader(sampler=weighted()),
    "weighted, own generator": loader(sampler=lambda: weighted(generator=own())()),
    "subset": loader(sampler=lambda: SubsetRandomSampler([1, 4, 9, 2])),
    "distributed": loader(sampler=distributed),
    "batch sampler": loader(batch_sampler=batch_sampler(weighted(), False), **BATCHED),
    "batch sampler, drop last": loader(batch_sampler=batch_sampler(replacing(), True), **BATCHED),
    "a list of indices": loader(sampler=lambda: [3, 1, 2]),
    "unbatched": loader(batch_size=None, shuffle=True),
    "drop last": loader(shuffle=True, drop_last=True),
    "collate": loader(shuffle=True, collate_fn=stack_twice),
    "dataset with generators": loader(OwnGenerators, shuffle=True),
}
STATE = {"stateful": Stateful, "as torchdata's": TorchdataLike}
EPOCH = {
    "one process": loader(shuffle=True, num_workers=1),
    "two processes": loader(shuffle=True, num_workers=2, prefetch_factor=3),
    "two processes, own generator": loader(
        sampler=lambda: replacing(generator=own())(), generator=lambda: own(5), num_workers=2
    ),
    "stream, two processes": loader(Stream, num_workers=2),
}
REPLAY = {
    "drawing": Drawing,
    "hidden state": Epochs,
    "set_epoch": SetsEpoch,
    "stream": loader(Stream),
    "stream that goes on": loader(Everlasting),
    "dataset that counts": loader(Counting, shuffle=True),
    "sampler of one's own": loader(sampler=Odd),
    "sampler of one's own, processes": loader(sampler=Odd, num_workers=1),
    "one generator for all": one_generator,
    "torch's own generator": loader(shuffle=True, generator=lambda: torch.default_generator),
    "stateful, processes": loader_with_state,
    "persistent processes": loader(shuffle=True, num_workers=2, persistent_workers=True),
    "persistent, own generator": loader(
        shuffle=True, generator=own, num_workers=1, persistent_workers=True
    ),
    "persistent stream": loader(Stream, num_workers=2, persistent_workers=True),
}
KINDS = {
    "index": INDEX, "sampler": SAMPLER, "state": STATE, "epoch": EPOCH, "replay": REPLAY
}  # fmt: skip
