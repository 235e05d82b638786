"""Where the ranks of a pipeline compute, and which way their messages go.

On devices of their own NCCL carries what lies there; two ranks on one device, a machine without
NCCL, or a check that fails leave it to gloo and host memory, and the reason is kept. All ranks
come to the same: what each found is told to all.

[Note: the check]
Before the first frame every pair of ranks that will send each other something sends a frame of
known bytes each way, and compares. Broken peer-to-peer transfers are known to hang, and to bring
other bytes than were sent; so the check ends after CHECK_S, on a thread of its own, which is left
behind where it does not.
"""

from __future__ import annotations

import datetime
import socket
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.pipeline.direct import Direct
from shoal.pipeline.packing import Bundle
from shoal.pipeline.post import Routes
from shoal.program.ir import Op, Program

DeviceKind = Literal["cpu", "cuda"]
CHECK_S = 60.0
_CHECK_BYTES = 2**20
_CHECK_KIND = 63  # no line's
_PATIENCE = datetime.timedelta(days=1)  # whoever started the ranks looks after those that hang
_ABORT_S = 10.0
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}  # on CPUs to run the same code, for tests
HOST = "gloo, through host memory"

Pairs = Sequence[tuple[int, int]]


class Met(NamedTuple):
    """Which way a rank's messages go, and that in words."""

    routes: Routes
    carried: str


class _Seat(NamedTuple):
    """What a rank says of itself."""

    place: str  # host and device, for people
    key: str
    has_backend: bool


def device_of(kind: DeviceKind, local: int) -> torch.device:
    """Where the rank with this number on its machine computes."""
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", local % torch.cuda.device_count())


def on(device: torch.device) -> AbstractContextManager[object]:
    """Have this thread's device be this one, meanwhile."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def pairs_of(program: Program) -> Pairs:
    """Ranks that send each other something, the lower one first, in an order for all."""
    actions = [(rank, action) for rank, list_ in enumerate(program.devices) for action in list_]
    found = {
        (min(rank, action.peer), max(rank, action.peer))
        for rank, action in actions
        if action.op is Op.SEND and action.peer is not None
    }
    return sorted(found)


@contextmanager
def met(
    host: dist.ProcessGroup | None,
    device: torch.device,
    pairs: Pairs,
    direct: bool | None,
    *,
    limit_s: float = CHECK_S,
) -> Iterator[Met]:
    """The routes between all ranks, each of which calls this at once.

    ``host`` is a group of gloo's with all ranks, None for the default one. ``direct`` is whether
    device memory is sent without the host; None where the devices are no CPUs. What was opened is
    closed when all ranks have come to the end; after an error they never may, and it is left.
    """
    by_host = Routes(host, device)
    if not (device.type != "cpu" if direct is None else direct):
        yield Met(by_host, HOST)
        return
    backend = _BACKENDS[device.type]
    reason = _unfit(_told(host, _seat_of(device)), backend)
    carrier = None
    if not reason:
        carrier, found = _opened(host, device, backend, pairs, limit_s)
        reason = next(filter(None, _told(host, found)), "")
    if reason or carrier is None:
        _abandon(carrier)
        if dist.get_rank() == 0:
            warnings.warn(f"stages send each other host memory: {reason}.", stacklevel=2)
        yield Met(by_host, f"{HOST}: {reason}")
        return
    yield Met(Routes(host, device, carrier), f"{backend}, from device to device")
    dist.barrier(group=host)
    dist.destroy_process_group(carrier.group)


def _seat_of(device: torch.device) -> _Seat:
    machine = socket.gethostname()
    if device.type == "cpu":  # as many as there are ranks
        return _Seat(f"{device} of {machine}", f"{machine}/{dist.get_rank()}", True)
    unique = torch.cuda.get_device_properties(device).uuid
    return _Seat(f"{device} of {machine}", f"{machine}/{unique}", dist.is_nccl_available())


def _unfit(seats: Sequence[_Seat], backend: str) -> str:
    """Why device memory cannot be sent by itself; empty where it may be tried."""
    sharing = defaultdict(list)
    for rank, seat in enumerate(seats):
        sharing[seat.key].append(rank)
    crowded = [ranks for ranks in sharing.values() if len(ranks) > 1]
    if crowded:
        ranks = " and ".join(map(str, crowded[0]))
        return f"ranks {ranks} share {seats[crowded[0][0]].place}, and {backend} takes one on each"
    without = [rank for rank, seat in enumerate(seats) if not seat.has_backend]
    return f"torch of rank {without[0]} has no {backend}" if without else ""


def _told(host: dist.ProcessGroup | None, mine: Any) -> list[Any]:
    """What each rank says, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine, group=host)
    return found


def _opened(
    host: dist.ProcessGroup | None,
    device: torch.device,
    backend: str,
    pairs: Pairs,
    limit_s: float,
) -> tuple[Direct | None, str]:
    """A carrier that was checked, or what is wrong with it."""
    rank = dist.get_rank()
    opened: list[Direct] = []

    def work() -> str:
        with on(device):
            group = dist.new_group(backend=backend, timeout=_PATIENCE)
            assert group is not None
            opened.append(Direct(group, host, rank, device))
            return check_bytes(opened[0], rank, pairs)

    reason = _within(limit_s, work)
    if reason is None:
        reason = f"rank {rank} waited {limit_s:g} s for its {backend} check"
    return (opened[0] if opened else None), reason


def check_bytes(carrier: Direct, rank: int, pairs: Pairs) -> str:
    """Send a frame each way between this rank's pairs; what came otherwise, in words."""
    wrong = ""
    for pair in pairs:
        if rank not in pair:
            continue
        peer = pair[1 - pair.index(rank)]
        for sender in pair:
            if sender == rank:
                loaded = carrier.load(Bundle((_known(rank, peer),), (0,), _CHECK_BYTES))
                loaded.wait()
                carrier.send(loaded.frame, peer, _CHECK_KIND)
            elif not _is_known(carrier.receive(_CHECK_BYTES, peer, _CHECK_KIND), peer, rank):
                wrong = f"other bytes came to rank {rank} than rank {peer} sent"
    return wrong


def _known(sender: int, receiver: int) -> Tensor:
    generator = torch.Generator().manual_seed(2 * (sender * 2**16 + receiver) + 1)
    return torch.randint(256, (_CHECK_BYTES,), dtype=torch.uint8, generator=generator)


def _is_known(frame: Tensor, sender: int, receiver: int) -> bool:
    return torch.equal(frame.cpu(), _known(sender, receiver))


def _within(limit_s: float, work: Callable[[], str]) -> str | None:
    """What it returned, or raised; None where it was not through in time."""
    said: list[str] = []

    def run() -> None:
        try:
            said.append(work())
        except BaseException as error:
            said.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=run, name="check", daemon=True)
    thread.start()
    thread.join(limit_s)
    return said[0] if said else None


def _abandon(carrier: Direct | None) -> None:
    """Have the device end what still waits there, if it can be reached."""
    if carrier is None:
        return
    carrier.give_up()

    def abort() -> str:
        carrier.group.abort()
        return ""

    _within(_ABORT_S, abort)
