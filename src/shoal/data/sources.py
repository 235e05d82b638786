"""What is known of a source of batches from the outside: how it can be led to a position.

Pure: a source is looked at and never read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)

from shoal.core.units import Bytes
from shoal.data.inside import Inside, look_inside
from shoal.data.position import Way
from shoal.data.states import is_stateful
from shoal.recipes.recipe import Batch

ORDERS_WITHOUT_DRAWS = (SequentialSampler, DistributedSampler, list, tuple, range)
KNOWN_ORDERS = (
    *ORDERS_WITHOUT_DRAWS,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
"""What a loader may draw its order from so that the order is settled when an epoch begins."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How a source is led to a position, and in words, for the plan, why so."""

    way: Way
    why: str

    def __str__(self) -> str:
        return f"place in the data: {self.why}"


def rule_of(source: Iterable[Batch]) -> Rule:
    """The cheapest way to a position that is exact for this source."""
    if type(source) in (list, tuple):
        return Rule("index", f"index into a {type(source).__name__}")
    if type(source) is DataLoader:
        return _loader_rule(source)
    if is_stateful(source):
        lacks = _what_state_lacks(source) if isinstance(source, DataLoader) else ""
        found = Rule("state", f"state_dict() of the {type(source).__name__}")
        return _replay(f"its state_dict() does not hold {lacks}") if lacks else found
    advice = "give it state_dict() and load_state_dict() to be there at once"
    return _replay(f"{type(source).__name__} may keep anything; {advice}")


def _what_state_lacks(loader: DataLoader[Any]) -> str:
    """What the state of a stateful loader, torchdata's, leaves out; empty if nothing."""
    if loader.num_workers:
        return "the random streams of its processes"
    order = getattr(order_of(loader), "sampler", order_of(loader))  # a batch sampler of its own
    keeps = is_stateful(order) or type(order).__module__.startswith("torchdata.")
    if keeps or type(order) in ORDERS_WITHOUT_DRAWS or isinstance(loader.dataset, IterableDataset):
        return ""
    return f"what the {type(order).__name__} drew"


def _loader_rule(loader: DataLoader[Any]) -> Rule:
    processes = "its process" if loader.num_workers == 1 else f"its {loader.num_workers} processes"
    if loader.persistent_workers:
        return _replay(f"the random streams of {processes} go on from epoch to epoch")
    if isinstance(loader.dataset, IterDataPipe | MapDataPipe):
        return _replay("a data pipe may keep anything")
    if torch.default_generator in order_generators(loader).values():
        return _replay("its generator is torch's own, which others draw from")
    if isinstance(loader.dataset, IterableDataset):
        if not loader.num_workers:
            return _replay(f"{type(loader.dataset).__name__} may keep anything")
    elif type(order_of(loader)) not in KNOWN_ORDERS:
        return _replay(f"{type(order_of(loader)).__name__} may keep anything")
    if loader.num_workers:
        return Rule("epoch", f"replay of the epoch, for the random streams of {processes}")
    return _index_rule(loader)


def _index_rule(loader: DataLoader[Any]) -> Rule:
    inside = inside_of(loader)
    for name, generator in order_generators(loader).items():
        if id(generator) in inside.owners:
            return _replay(f"{inside.owners[id(generator)]} and {name} are one generator")
    return Rule("sampler", "index into a seeded sampler")


def _replay(why: str) -> Rule:
    return Rule("replay", f"replay from the first epoch, with a few numbers kept of each: {why}")


def replay_rule(changed: str) -> Rule:
    """The rule for a loader whose dataset was seen to change while it was read."""
    advice = "a random.Random or torch.Generator in its place would be kept"
    return _replay(f"{changed} changes as it is read; {advice}")


def draws_at_start_only(source: Iterable[Batch]) -> bool:
    """Whether, after the first batch of an epoch, fetching surely draws from no stream of the
    process: no code of the user's runs then, or it runs in other processes."""
    if type(source) in (list, tuple):
        return True
    if type(source) is not DataLoader or type(order_of(source)) not in KNOWN_ORDERS:
        return False
    if type(source.batch_sampler) not in (BatchSampler, type(None)):
        return False
    if torch.default_generator in order_generators(source).values():
        return False
    reads_plainly = type(source.dataset) in (TensorDataset, list, tuple)
    return bool(source.num_workers) or (
        reads_plainly and source.collate_fn in (default_collate, default_convert)
    )


def order_of(loader: DataLoader[Any]) -> Any:
    """What the order of a loader's examples comes from."""
    index = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return index.sampler if type(index) is BatchSampler else index


def order_generators(source: Iterable[Batch]) -> dict[str, torch.Generator]:
    """The generators that a loader's order and its processes' seeds come from, each once."""
    if not isinstance(source, DataLoader):
        return {}
    found: dict[str, torch.Generator] = {}
    holders = {
        "generator": source,
        "batch_sampler.generator": source.batch_sampler,
        "sampler.generator": order_of(source),
    }
    for name, holder in holders.items():
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and generator not in found.values():
            found[name] = generator
    return found


def draws_order_late(loader: DataLoader[Any]) -> bool:
    """Whether a loader's order is drawn from a generator of its own while it is read."""
    order = order_of(loader)
    if type(order) is not RandomSampler or order.generator is None:
        return False
    return bool(order.replacement or order.num_samples > len(order.data_source))


def inside_of(loader: DataLoader[Any]) -> Inside:
    """What may change when this process fetches from a loader's dataset."""
    return look_inside(dataset=loader.dataset, collate_fn=loader.collate_fn)


def starts_as_new(source: Iterable[Batch]) -> bool:
    """Whether a loader that was read, and is closed, can be read again as if it were new.

    So it is where only its processes touch the dataset, and the order keeps nothing but
    generators.
    """
    return (
        type(source) is DataLoader
        and source.num_workers > 0
        and not isinstance(source.dataset, IterDataPipe | MapDataPipe)
        and (isinstance(source.dataset, IterableDataset) or type(order_of(source)) in KNOWN_ORDERS)
    )


def name_of(source: Iterable[Batch]) -> str:
    """What to call a source in a message."""
    kind = type(source).__name__
    if not isinstance(source, DataLoader):
        return kind
    processes = f", {source.num_workers} processes" if source.num_workers else ""
    return f"{kind} over {type(source.dataset).__name__}{processes}"


def host_bytes(source: Iterable[Batch], batch: Batch) -> Bytes:
    """Host memory for batches of a source, by the size of one: those fetched ahead, and one."""
    ahead = 0
    if isinstance(source, DataLoader):
        ahead = source.num_workers * (source.prefetch_factor or 0)
    return Bytes((ahead + 1) * batch_bytes(batch))


def _sparse_bytes(tensor: Tensor) -> int:
    """Of its numbers and of where they stand, at most 16 bytes for each."""
    values = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    return values.nbytes + 16 * values.numel()


def batch_bytes(value: Any) -> int:
    """Bytes of the tensors in a batch."""
    if isinstance(value, Tensor):
        return value.nbytes if value.layout is torch.strided else _sparse_bytes(value)
    if isinstance(value, Mapping):
        return sum(map(batch_bytes, value.values()))
    if isinstance(value, tuple | list):
        return sum(map(batch_bytes, value))
    return 0
