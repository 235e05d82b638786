"""A process group of torch's over the sockets of a gang: what DDP and FSDP2 send each other.

[Note: why not gloo]
A gang lives for one lease, and its workers have sockets to each other already, whose ends are
seen at once when a worker dies or a replica fails. gloo meets over a port, notices a lost peer
when an operation times out, and blocks where nobody can end it; and the order in which it adds is
its own. Here whoever waits does so in Python: it sees who is gone, says that it waits, and sums
are taken in the order of the replicas, so that their bits are those of one process. Between GPUs
messages go through host memory too.

[Note: going different ways]
All replicas call the same operations in the same order, unless a model goes another way for
other rows. Then what meets is about another block (``about``), of another operation or size, or
a replica is through with its batch (``END``) while one waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    HashStore,
    _register_process_group,
    _unregister_all_process_groups,
)
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import _disable_current_modes

from shoal.core.errors import TrialError, WorkerError
from shoal.pipeline.links import Links

EXCHANGE, MEET, SPREAD, ADD, END = 32, 33, 34, 35, 36  # kinds of messages
GATHERS, REDUCES = 0, 1  # operations for which replicas meet


class PeerLost(WorkerError):
    """Another replica is gone: its worker died, or it failed and says so elsewhere."""


def other_way(peer: int) -> TrialError:
    """Another replica did not do what this one did."""
    return TrialError(
        f"replica {peer} did not use the same parameters as this one in a step or a validation "
        "batch: with other rows the model goes another way, so that what they send each other "
        "does not fit together. "
        "shoal.DataParallel(shard=False) can do that, shard=True cannot; or train on one device."
    )


class Ways(Protocol):
    """How a group's messages travel."""

    def put(self, peer: int, kind: int, tensor: Tensor, about: int) -> None:
        """Hand a tensor over, which may be changed afterwards."""

    def get(self, peer: int, kind: int, numel: int, about: int) -> Tensor:
        """The next flat tensor of a kind, waited for."""


class LinkedWays:
    """Over the sockets between workers.

    Args:
        wait: Holds the device up until what it is given is true.
    """

    def __init__(self, links: Links, wait: Callable[[Callable[[], bool]], None]) -> None:
        self._links, self._wait = links, wait

    def put(self, peer: int, kind: int, tensor: Tensor, about: int) -> None:
        self._links.send(peer, kind, (about, tensor.reshape(-1)))

    def get(self, peer: int, kind: int, numel: int, about: int) -> Tensor:
        """As in ``Ways``.

        Raises:
            PeerLost: it is gone.
            TrialError: it went another way through the model.
        """
        self._wait(lambda: self._is_over(peer, kind))
        if self._links.has(peer, kind):
            theirs, came = self._links.take(peer, kind)
            if theirs == about and came.numel() == numel:
                return cast(Tensor, came)
        elif not self._links.has(peer, END):
            raise PeerLost(f"replica {peer} is gone")
        raise other_way(peer)

    def tell_end(self, peers: Sequence[int], value: Any) -> None:
        """Say that this replica is through with its operations for now."""
        for peer in peers:
            self._links.send(peer, END, value)

    def hear_end(self, peer: int) -> Any:
        """What another replica said so; raises PeerLost where it will not."""
        self._wait(lambda: self._links.has(peer, END) or self._links.gone(peer))
        if not self._links.has(peer, END):
            raise PeerLost(f"replica {peer} is gone")
        return self._links.take(peer, END)

    def _is_over(self, peer: int, kind: int) -> bool:
        links = self._links
        return links.has(peer, kind) or links.gone(peer) or links.has(peer, END)


class NoWays:
    """To nobody: for measuring. What others would send is a copy of what was last sent to them."""

    def __init__(self) -> None:
        self._last: dict[int, Tensor] = {}

    def put(self, peer: int, kind: int, tensor: Tensor, about: int) -> None:
        with _disable_current_modes():  # as ``Links``: it is no memory of the device's
            self._last[kind] = tensor.reshape(-1).clone()

    def get(self, peer: int, kind: int, numel: int, about: int) -> Tensor:
        last = self._last[kind]
        return last.clone() if last.numel() == numel else last.new_zeros(numel)


class Later(dist.Work):
    """What is left to do of an operation, which is done when it is waited for."""

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._finish = finish

    def wait(self, timeout: Any = None) -> bool:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        return self._finish is None


class GangGroup(dist.ProcessGroup):
    """The operations that DDP, FSDP2 and ``replica`` use, of flat tensors, sums in rank order.

    Attributes:
        about: The number of the block that the next operation is about, the same everywhere.
    """

    about = 0

    def __init__(self, rank: int, width: int, ways: Ways) -> None:
        super().__init__(rank, width)  # type: ignore[call-arg]  # torch's stub lacks this one
        self._rank, self._width, self._ways = rank, width, ways
        self._peers = [peer for peer in range(width) if peer != rank]
        self._name = self._description = ""

    def fall_silent(self) -> None:
        """Nothing goes to anybody any more, whoever keeps this: torch's caches of meshes do."""
        self._ways = NoWays()

    # What torch asks of a group, by torch's names.

    def getBackendName(self) -> str:
        return "shoal"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def all_to_all_single(
        self, output: Tensor, given: Tensor, takes: list[int], gives: list[int], opts: Any = None
    ) -> Later:
        """Everybody's part for everybody; what is sent goes at once, what comes when waited."""
        sent = given.split(gives) if gives else given.chunk(self._width)
        places = output.split(takes) if takes else output.chunk(self._width)
        for peer in self._peers:
            self._put(peer, EXCHANGE, sent[peer])
        places[self._rank].copy_(sent[self._rank])

        def finish() -> None:
            for peer in self._peers:
                came = self._get(peer, EXCHANGE, places[peer].numel())
                places[peer].copy_(came.view_as(places[peer]))

        return Later(finish)

    alltoall_base = all_to_all_single  # type: ignore[assignment]  # its name before 2.13

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Later:
        """Everybody's, one after the other."""
        places = output.view(self._width, -1)
        for peer in self._peers:
            self._put(peer, MEET, given, GATHERS)
        places[self._rank].copy_(given.reshape(-1))  # may be the place itself
        for peer in self._peers:
            places[peer].copy_(self._get(peer, MEET, given.numel(), GATHERS))
        return Later()

    _allgather_base = all_gather_single  # type: ignore[assignment]  # its name before 2.13

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Later:
        """The sum of this replica's part of everybody's."""
        parts = given.view(self._width, -1)
        for peer in self._peers:
            self._put(peer, MEET, parts[peer], REDUCES)
        came = {p: self._get(p, MEET, output.numel(), REDUCES) for p in self._peers}
        came[self._rank] = parts[self._rank]
        self._sum_into(output.view(-1), came)
        return Later()

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]  # so is this one

    def allreduce(  # type: ignore[override]  # torch calls it so
        self, tensors: list[Tensor], opts: Any = None
    ) -> Later:
        """The sums of whole tensors; for DDP's small notes of who used what."""
        for tensor in tensors:
            for peer in self._peers:
                self._put(peer, ADD, tensor)
            came = {p: self._get(p, ADD, tensor.numel()) for p in self._peers}
            came[self._rank] = tensor.reshape(-1).clone()
            self._sum_into(tensor.view(-1), came)
        return Later()

    def broadcast(  # type: ignore[override]  # torch calls it so
        self, tensors: list[Tensor], opts: Any
    ) -> Later:
        """One replica's, for everybody."""
        root = opts.rootRank
        for tensor in tensors if root == self._rank else ():
            for peer in self._peers:
                self._put(peer, SPREAD, tensor)

        def finish() -> None:
            for tensor in tensors:
                tensor.copy_(self._get(root, SPREAD, tensor.numel()).view_as(tensor))

        return Later(finish if root != self._rank else None)

    def barrier(self, opts: Any = None) -> Later:
        return Later()  # nobody's sockets need one

    def _put(self, peer: int, kind: int, tensor: Tensor, what: int = 0) -> None:
        self._ways.put(peer, kind, tensor, 2 * self.about + what)

    def _get(self, peer: int, kind: int, numel: int, what: int = 0) -> Tensor:
        return self._ways.get(peer, kind, numel, 2 * self.about + what)

    def _sum_into(self, place: Tensor, parts: Mapping[int, Tensor]) -> None:
        total = parts[0]
        for rank in range(1, self._width):
            total = total + parts[rank]
        place.copy_(total)


_joining: list[GangGroup] = []  # torch makes a group from a name alone


def _made(store: Any, rank: int, width: int, timeout: Any) -> GangGroup:
    return _joining.pop()


@contextmanager
def joined(group: GangGroup) -> Iterator[None]:
    """This process in a group of torch's, as its default one, and out of it at the end.

    Raises:
        TrialError: the process is in one already, of the trial's own making.
    """
    if dist.is_initialized():
        raise TrialError(
            "torch.distributed is initialized in this worker already, by the recipe: replicas "
            "need a group of their own. Leave init_process_group out of the recipe."
        )
    if "shoal" not in dist.Backend.backend_list:
        dist.Backend.register_backend("shoal", _made, devices=["cpu", "cuda"])
    _joining.append(group)
    dist.init_process_group("shoal", store=HashStore(), rank=group.rank(), world_size=group.size())
    try:
        yield
    finally:
        dist.destroy_process_group()
        group.fall_silent()


@contextmanager
def put_aside() -> Iterator[None]:
    """Have a gang's group, if this process is in one, out of torch's sight for now.

    For measuring between two units of a replica, which computes in its own group afterwards. A
    group of the trial's own making stays where it is.
    """
    if not isinstance(dist.group.WORLD, GangGroup):
        yield
        return
    world = c10d._world
    group, count = world.default_pg, world.group_count
    tables: list[dict[Any, Any]] = [
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.tags_to_pg,
        world.pg_coalesce_state,
    ]
    kept = [dict(table) for table in tables]
    names = dict(world.pg_names)
    for table in tables:
        table.clear()
    _unregister_all_process_groups()
    c10d._update_default_pg(None)
    world.group_count = 0
    try:
        yield
    finally:
        for table, content in zip(tables, kept, strict=True):
            table.clear()
            table.update(content)
        for each, name in names.items():
            _register_process_group(name, each)
        c10d._update_default_pg(group)
        world.group_count = count
