"""A member of a gang on its device, and what every gang's members tell each other.

[Note: who says what]
The first member leads. It goes through the trial's loop (``Session.tasks``) and tells the others
what comes next. A member is a generator that yields what it waits for, and the device's loop
computes for other trials meanwhile.

The host region is one for all members. The leader fills it before it says Join, and reads it when
all others have said Known.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.core.errors import CapacityError, WorkerError
from shoal.core.units import Bytes, format_bytes
from shoal.device import Device
from shoal.memory.ledger import Ledger
from shoal.memory.store import Region
from shoal.pipeline.links import Links
from shoal.program.ir import Action
from shoal.rng import capture_rng, restore_rng
from shoal.runtime.gangs.leader import GangSession, Scalars, Stored
from shoal.runtime.placing.outgrown import no_room
from shoal.runtime.task import Issued
from shoal.runtime.wire.messages import Progress

CONTROL, NOTE = 16, 17  # kinds of messages that are no action's
Waiting = Callable[[], bool] | None
"""What a member waits for: asked until it is true. None: for nothing but its turn."""


@dataclass(frozen=True, slots=True)
class Join:
    """The region is filled: take your part from it."""

    progress: Progress


@dataclass(frozen=True, slots=True)
class Store:
    """Bring your part to the region and say Known; then leave, if it says so."""

    step: int
    leaves: bool
    ended: bool


@dataclass(frozen=True, slots=True)
class Metrics:
    """Of a validation batch, from who has computed them."""

    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Known:
    """A member's part is in the region; the rest of its optimizer's state, options of the groups
    that it has stepped, and what its code keeps in Python."""

    scalars: Scalars
    stored: Stored
    options: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    python: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failed:
    """A member cannot go on; it has let go of everything."""

    error: str  # the traceback
    cause: Exception | None  # where it is shoal's own


class MemberError(Exception):
    """What another member failed with, as the leader hears it."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.error)
        self.failed = failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Hands:
    """What a seat is given to do by its desk.

    Attributes:
        place: Places another member's session, with what the leader tells it.
        record: Called with every action that ran.
        room: Called when ``unit_bytes`` has grown: the device reserves anew.
        on_peak: Told the most bytes that the member held, where they were counted.
        waits: Called now and then while the device is held up for other members.
    """

    place: Callable[[GangSession, Progress], GangSession]
    record: Callable[[Issued], None]
    room: Callable[[], None]
    on_peak: Callable[[int], None]
    waits: Callable[[], None] = lambda: None


class GangSeat(ABC):
    """A member's place on a device for the time of a lease. Use from the device's own thread.

    Args:
        session: The trial; placed in its region at the leader, at others not yet.
        stage: The member's number; 0 leads.

    Attributes:
        left: Its part is in the region, and its memory on the device is free.
    """

    def __init__(
        self,
        session: GangSession,
        stage: int,
        device: Device,
        ledger: Ledger,
        region: Region,
        links: Links,
        hands: Hands,
    ) -> None:
        self.session, self.stage, self.device, self.links = session, stage, device, links
        self.trial, self.job = session.job.trial, session.job
        self._region, self._hands = region, hands
        self._ledger, self._owner = ledger, f"trial {self.trial}"
        ledger.reserve(self._owner, self.job.held_bytes)
        self.unit_bytes = self.job.unit_bytes
        self.save: Callable[[], None] = lambda: None  # takes the state that is in the region
        self.left = False
        self._has_counted = False  # a step's allocations, in this lease
        self._script = self._lead() if stage == 0 else self._follow()
        self._waiting: Waiting = None

    @property
    @abstractmethod
    def called(self) -> str:
        """What errors call it."""

    # -- for the device's loop --------------------------------------------------------------

    def ready(self) -> bool:
        """Whether it could go on. What a lost member owes never comes: the study sees to that."""
        try:
            return not self.left and (self._waiting is None or self._waiting())
        except WorkerError:
            return True  # whoever asks again fails

    @property
    def waits_here(self) -> bool:
        """Whether something of its own is under way on its device: a copy, a step on the host."""
        return False

    def advance(self) -> None:
        """Go on to the end of a unit, or to where it waits for another member."""
        leads = self.stage == 0
        self.session.python.put()
        if leads:
            restore_rng(self.session.rng, self.device.torch_device)
        try:
            self._waiting = next(self._script)
        except StopIteration:
            self.left = True
        if leads:
            self.session.rng = capture_rng(self.device.torch_device)
        self.session.python.put_away()

    def tell_failure(self, error: str, cause: Exception | None) -> None:
        """Have the leader say what happened here, after all that it has to say before."""
        self.left = True
        try:
            self.links.send(0, NOTE, Failed(error, cause))
        except Exception:  # an error that cannot travel
            self.links.send(0, NOTE, Failed(error, None))

    def close(self) -> None:
        """Give everything back; members that are still here see that this one is gone."""
        self._script.close()
        if self.left:
            self.links.close()
        else:
            self.links.cut()
        self._let_go()
        self.device.synchronize()
        self._region.rest()
        self._ledger.release(self._owner)

    @abstractmethod
    def _let_go(self) -> None:
        """Free what is on the device."""

    @abstractmethod
    def _lead(self) -> Generator[Waiting]:
        """What the leader does in a lease."""

    @abstractmethod
    def _follow(self) -> Generator[Waiting]:
        """What another member does in it."""

    # -- what members tell each other ---------------------------------------------------------

    @property
    def _others(self) -> list[int]:
        return [peer for peer in range(self.session.members) if peer != self.stage]

    def _tell(self, control: object) -> None:
        for peer in self._others:
            self.links.send(peer, CONTROL, control)

    def _is_told(self) -> bool:
        return self.links.has(0, CONTROL)

    def _until(self, done: Callable[[], bool]) -> Iterator[Waiting]:
        """The leader hears what the others say until then."""
        self._hear()
        while not done():
            yield self._has_heard
            self._hear()

    def _has_heard(self) -> bool:
        return any(self.links.has(peer, NOTE) for peer in self._others)

    def _hear(self) -> None:
        for peer in self._others:
            while self.links.has(peer, NOTE):
                note = self.links.take(peer, NOTE)
                if isinstance(note, Failed):
                    raise MemberError(note)
                self._take_note(note)

    @abstractmethod
    def _take_note(self, note: object) -> None:
        """What another member says, to the leader."""

    # -- units ----------------------------------------------------------------------------

    def _compute(self, action: Action, work: Callable[[], None], seconds: float | None) -> None:
        """Run an action's work on the device."""
        event = self.device.compute(work, seconds=seconds)
        step = self._step_of(action)
        self._hands.record(Issued("compute", str(action), event, 0, step, self.trial))
        if event.error is not None:
            raise event.error

    def _step_of(self, action: Action) -> int:
        """The number of the step that an action is of, from 1."""
        return self.session.step + 1

    def _report_peak(self, peak: int | None) -> None:
        """Tell what was counted; reserve more where a unit took more than was measured.

        Raises:
            CapacityError: there is no room for that.
        """
        if peak is None:
            return
        self._has_counted = True
        self._hands.on_peak(peak)
        planned = self.job.held_bytes + self.unit_bytes
        if peak <= planned:
            return
        self.unit_bytes = Bytes(peak - self.job.held_bytes)
        try:
            self._hands.room()
        except CapacityError as error:
            outgrown = CapacityError(
                f"{self.called} of trial {self.trial} took {format_bytes(Bytes(peak))} "
                f"on {self.device.spec.name}, {format_bytes(Bytes(planned))} were reserved for "
                f"it, and {no_room(error)}"
            )
            outgrown.growth = peak / planned
            raise outgrown from None
