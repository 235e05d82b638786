"""Programs on paper: what happens when, without a device.

[Note: replay]
The interpreter's rules, with durations in place of work. Every trial issues its actions
in list order and does not wait for them, but a compute action is issued only when it
is chosen. An action starts when it is issued, its needs are complete (``needs.py``), the
action before it in its trial's stream is complete, and the stream's resource is free:

    F B STEP SYNC   the device: one at a time; ``policy`` says whose when several are ready
    LOAD            the device's link up: one transfer at a time, in order of readiness; those
                    of activations have a stream of their own, and pass some that are under way
                    (``core.turns.Upload``), which are over as much later
    STORE, SEND     the link down, the link to the other devices: likewise
    STEP@host       the host's memory: one step of a shard at a time; ``policy`` says whose, and
                    again after each of its chunks, so a step may be gone on with later
    RECV            none, it ends when its SEND ends
    DROP, CKPT      take no time here

A trial may run its program many times; the next run is issued as soon as all of the run
before is issued, and needs of the run before are honoured. Where there are fewer places than
runs, the next one begins when one is through: with its last steps on the host, and its last
copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Literal, NamedTuple

from shoal.core.errors import ProgramError
from shoal.core.seams import Candidate, UnitPolicy
from shoal.core.turns import DEFAULT, Upload, rule_of
from shoal.core.units import Bytes, Seconds
from shoal.program.costs import Costs, Durations, action_seconds, moved_bytes
from shoal.program.ir import Action, Kept, Op, Program, lone_part
from shoal.program.needs import computes, find_needs, matching_sends
from shoal.program.slots import assign_slots

Stream = Literal["compute", "up", "down", "host", "peer", "receive"]
Queue = Stream | Literal["activations"]

_STREAMS: dict[Op, Stream] = {
    Op.LOAD: "up",
    Op.STORE: "down",
    Op.SEND: "peer",
    Op.RECV: "receive",
    Op.STEP: "host",  # those on the device compute
}
_LINKS: dict[Queue, Stream] = {
    "up": "up",
    "activations": "up",
    "down": "down",
    "host": "host",
    "peer": "peer",
}
_LONGEST_LEFT = rule_of(DEFAULT)


class Span(NamedTuple):
    """One action in time."""

    device: int
    stream: Stream
    trial: int
    action: Action
    start_s: Seconds
    end_s: Seconds
    moved: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A program that a trial repeats; ``devices[i]`` is where its i-th list runs.

    ``start`` is what is on the device from the beginning.
    ``trial`` is what candidates and spans call it; None for the program's own number.
    """

    program: Program
    costs: Costs
    steps: int = 1
    devices: tuple[int, ...] = (0,)
    start: Kept = field(default_factory=dict)
    trial: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What happened when. ``spans`` are in order of start, and empty if not asked for."""

    spans: tuple[Span, ...]
    makespan_s: Seconds
    busy_s: Mapping[tuple[int, Stream], Seconds]  # per device and stream
    up_bytes: Bytes
    down_bytes: Bytes


def replay(
    runs: Sequence[Run],
    *,
    policy: UnitPolicy = _LONGEST_LEFT,
    durations: Durations | None = None,
    keep_spans: bool = True,
    active: int | None = None,
) -> Timeline:
    """Run the programs on paper, from time 0 until all are done.

    The programs must have passed the checks. ``durations`` is asked once for every
    action of a program. Ties go to the run that is named first. ``active`` is how many runs
    there are at a time, of programs of one device; None for all of them.

    Raises:
        ProgramError: the programs wait for each other; names the actions that wait.
    """
    clockwork = _Replay(runs, policy, durations, keep_spans, active)
    clockwork.run()
    return clockwork.timeline()


@dataclass(slots=True)
class _Line:
    """One action of a list, compiled."""

    action: Action
    trial: int
    stream: Stream | None  # None: takes no time
    seconds: float
    moved: Bytes
    now: list[int] = field(default_factory=list)  # who needs this in the same run
    next: list[int] = field(default_factory=list)  # who needs this in the next run
    remote: tuple[_Lane, int] | None = None  # the RECV of this SEND
    chunks: tuple[float, ...] = ()  # seconds of each, of a step on the host
    queue: Queue | None = None  # what it is in order with, of its trial


@dataclass(slots=True, eq=False)
class _Round:
    """One run of a list: how many needs of each action are still open."""

    number: int
    missing: list[int]
    ticket: int = -1


@dataclass(slots=True, eq=False)
class _Lane:
    """One trial's list on one device.

    ``queues`` hold what is issued, per stream; the first is next, or running. Of a step on the
    host ``chunk`` is the one that is next, or running, and ``since_s`` when it began or went on.
    ``open`` counts the actions of all its steps that take time and are not complete.
    ``passes``: its activations pass another upload now.
    """

    device: _Device
    trial: int
    steps: int
    lines: list[_Line]
    missing_first: list[int]
    missing: list[int]
    step_s: float  # of the device and the host
    rounds: dict[int, _Round] = field(default_factory=dict)
    head: int = 0
    round: _Round | None = None
    queues: dict[Queue, deque[tuple[_Round, int]]] = field(default_factory=dict)
    chunk: int = 0
    since_s: float = 0.0
    open: int = 0
    passes: bool = False

    def __post_init__(self) -> None:
        self.open = self.steps * sum(line.stream is not None for line in self.lines)

    def at(self, number: int) -> _Round:
        """The run with this number, made when somebody first speaks of it."""
        found = self.rounds.get(number)
        if found is None:
            missing = self.missing if number else self.missing_first
            found = self.rounds[number] = _Round(number, missing.copy())
        return found

    def candidate(self, round_: _Round) -> Candidate:
        """Its next action of a run, for whoever chooses."""
        left_s = (self.steps - round_.number) * self.step_s
        return Candidate(self.trial, round_.ticket, left_s, False, self.step_s)

    def upload(self, round_: _Round, index: int) -> Upload:
        """An action of a run, among all uploads."""
        return Upload(self.trial, round_.number * len(self.lines) + index)


@dataclass(slots=True, eq=False)
class _Link:
    """A resource that one transfer or step at a time uses; who waits, in order of readiness.

    ``carries`` are weights on their way up, since ``since_s``: activations have passed them until
    ``passed_until_s``, for ``passed_s`` that they are not later for yet.
    """

    busy: bool = False
    ready: list[tuple[_Lane, Queue]] = field(default_factory=list)
    carries: Upload | None = None
    since_s: float = 0.0
    passed_until_s: float = 0.0
    passed_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Device:
    """The compute stream's candidates, and the links."""

    number: int
    busy: bool = False
    candidates: list[Candidate] = field(default_factory=list)
    lanes: list[_Lane] = field(default_factory=list)  # of the candidates
    links: dict[Stream, _Link] = field(default_factory=dict)


class _Replay:
    """The event loop. An event is the end of an action: (time, order, lane, run, index)."""

    def __init__(
        self,
        runs: Sequence[Run],
        policy: UnitPolicy,
        durations: Durations | None,
        keep_spans: bool,
        active: int | None,
    ) -> None:
        self._policy = policy
        self._keep_spans = keep_spans
        self._now = 0.0
        self._order = count()
        self._tickets = count()
        self._events: list[tuple[float, int, _Lane, _Round, int]] = []
        self._spans: list[Span] = []
        self._touched: list[_Device] = []  # where somebody may now get the device
        self._devices: dict[int, _Device] = {}
        self._lanes = [lane for run in runs for lane in self._compile(run, durations)]
        self._outside = [] if active is None else self._lanes[active:]  # they wait for a place

    def timeline(self) -> Timeline:
        """What happened; every line of every lane ran once a step."""
        busy: dict[tuple[int, Stream], float] = {}
        moved = {"up": 0, "down": 0}
        for lane, line in self._all_lines():
            if line.stream is not None:
                key = (lane.device.number, line.stream)
                busy[key] = busy.get(key, 0.0) + line.seconds * lane.steps
            if line.stream in moved:
                moved[line.stream] += line.moved * lane.steps
        return Timeline(
            spans=tuple(sorted(self._spans, key=lambda span: span.start_s)),
            makespan_s=Seconds(self._now),
            busy_s={key: Seconds(seconds) for key, seconds in busy.items()},
            up_bytes=Bytes(moved["up"]),
            down_bytes=Bytes(moved["down"]),
        )

    def _all_lines(self) -> Iterator[tuple[_Lane, _Line]]:
        for lane in self._lanes:
            for line in lane.lines:
                yield lane, line

    def run(self) -> None:
        for lane in self._lanes[: len(self._lanes) - len(self._outside)]:
            self._begin(lane)
            self._issue(lane)
        self._dispatch()
        events = self._events
        while events:
            self._now = events[0][0]
            while events and events[0][0] == self._now:
                _, _, lane, round_, index = heappop(events)
                self._finish(lane, round_, index)
            self._dispatch()
        stuck = [lane for lane in self._lanes if lane.round is not None]
        if stuck:
            raise ProgramError(_stuck(stuck))

    # Compiling

    def _compile(self, run: Run, durations: Durations | None) -> list[_Lane]:
        lanes = [
            self._lane(run, actions, self._device(number), durations)
            for actions, number in zip(run.program.devices, run.devices, strict=True)
        ]
        for (to, receive), (source, send) in matching_sends(run.program).items():
            lanes[source].lines[send].remote = (lanes[to], receive)
        return lanes

    def _device(self, number: int) -> _Device:
        return self._devices.setdefault(number, _Device(number))

    def _lane(
        self,
        run: Run,
        actions: tuple[Action, ...],
        device: _Device,
        durations: Durations | None,
    ) -> _Lane:
        lines = [_line(action, run, durations) for action in actions]
        needs = find_needs(actions, assign_slots(actions, start=run.start))
        receives = [int(action.op is Op.RECV) for action in actions]
        first = [len(n.now) + sends for n, sends in zip(needs, receives, strict=True)]
        later = [count_ + len(n.before) for count_, n in zip(first, needs, strict=True)]
        for index, need in enumerate(needs):
            for needed in need.now:
                lines[needed].now.append(index)
            for needed in need.before:
                lines[needed].next.append(index)
        trial = run.trial if run.trial is not None else min((a.trial for a in actions), default=0)
        queues: dict[Queue, deque[tuple[_Round, int]]] = {
            line.queue: deque() for line in lines if line.queue is not None
        }
        step_s = sum(line.seconds for line in lines if line.stream in ("compute", "host"))
        return _Lane(device, trial, run.steps, lines, first, later, step_s, queues=queues)

    # Issuing

    def _begin(self, lane: _Lane) -> None:
        """Begin the lane's next run of its list, or end the lane."""
        number = 0 if lane.round is None else lane.round.number + 1
        lane.head = 0
        lane.round = lane.at(number) if number < lane.steps and lane.lines else None
        if lane.round is not None:
            lane.round.ticket = next(self._tickets)
        elif not lane.open:  # it had nothing to do that takes time
            self._let_in()

    def _let_in(self) -> None:
        """The first of those that wait for a place begins."""
        if self._outside:
            following = self._outside.pop(0)
            self._begin(following)
            self._issue(following)

    def _issue(self, lane: _Lane) -> None:
        """Issue the lane's actions up to the next one that computes."""
        while lane.round is not None:
            if lane.head == len(lane.lines):
                self._begin(lane)
                continue
            name = lane.lines[lane.head].queue
            if name == "compute":
                if not lane.round.missing[lane.head]:
                    self._offer(lane, lane.round)
                return
            if name is not None:
                self._enqueue(lane, name, lane.round)
            lane.head += 1

    def _enqueue(self, lane: _Lane, name: Queue, round_: _Round) -> None:
        queue = lane.queues[name]
        queue.append((round_, lane.head))
        if len(queue) == 1 and not round_.missing[lane.head]:
            self._transfer(lane, name)

    def _offer(self, lane: _Lane, round_: _Round) -> None:
        """The lane's next compute action could start: it is a candidate."""
        device = lane.device
        device.candidates.append(lane.candidate(round_))
        device.lanes.append(lane)
        self._touched.append(device)

    def _dispatch(self) -> None:
        """Give free devices to candidates; what is issued after that may add some."""
        while self._touched:
            device = self._touched.pop()
            if device.busy or not device.candidates:
                continue
            index = self._choose(device.candidates)
            del device.candidates[index]
            lane = device.lanes.pop(index)
            assert lane.round is not None, "a candidate has a run"
            device.busy = True
            self._start(lane, lane.round, lane.head)
            lane.head += 1
            self._issue(lane)

    def _transfer(self, lane: _Lane, name: Queue) -> None:
        """The first of the lane's queue is ready: start it, or wait for the link."""
        if (stream := _LINKS.get(name)) is not None:
            link = lane.device.links.setdefault(stream, _Link())
            if link.busy:
                if name != "activations" or not self._pass_by(lane, link):
                    link.ready.append((lane, name))
                return
            link.busy = True
        self._start(lane, *lane.queues[name][0])

    def _pass_by(self, lane: _Lane, link: _Link) -> bool:
        """Start the lane's activations now, or behind others that pass, if they may pass."""
        round_, index = lane.queues["activations"][0]
        if link.carries is None or not lane.upload(round_, index).may_pass(link.carries):
            return False
        line, start = lane.lines[index], max(self._now, link.passed_until_s)
        link.passed_until_s = end = start + line.seconds
        link.passed_s += line.seconds
        lane.passes = True
        heappush(self._events, (end, next(self._order), lane, round_, index))
        self._note(lane, line, start, end)
        return True

    def _start(self, lane: _Lane, round_: _Round, index: int) -> None:
        line = lane.lines[index]
        if line.chunks:
            lane.since_s = self._now
            self._start_chunk(lane, round_, index)
            return
        end = self._now + line.seconds
        heappush(self._events, (end, next(self._order), lane, round_, index))
        if line.queue == "up":  # noted when it is over: others may pass
            link = lane.device.links["up"]
            link.carries, link.since_s = lane.upload(round_, index), self._now
        else:
            self._note(lane, line, self._now, end)

    def _finish_upload(self, lane: _Lane, round_: _Round, index: int) -> bool:
        """Whether others have passed it, so that it is over only later."""
        link = lane.device.links["up"]
        if link.passed_s:
            end, link.passed_s = self._now + link.passed_s, 0.0
            heappush(self._events, (end, next(self._order), lane, round_, index))
            return True
        link.carries = None
        self._note(lane, lane.lines[index], link.since_s, self._now)
        return False

    def _note(self, lane: _Lane, line: _Line, start: float, end: float) -> None:
        if self._keep_spans and line.stream is not None:
            place = lane.device.number, line.stream, line.trial, line.action
            self._spans.append(Span(*place, Seconds(start), Seconds(end), line.moved))

    def _start_chunk(self, lane: _Lane, round_: _Round, index: int) -> None:
        end = self._now + lane.lines[index].chunks[lane.chunk]
        heappush(self._events, (end, next(self._order), lane, round_, index))

    def _finish_chunk(self, lane: _Lane, round_: _Round, index: int) -> bool:
        """Whether a step on the host has more chunks: the next one begins, or another turn."""
        line, ready = lane.lines[index], lane.device.links["host"].ready
        lane.chunk += 1
        is_over = lane.chunk == len(line.chunks)
        following = 0 if is_over or not ready else self._next_of([(lane, "host"), *ready])
        if not is_over and not following:
            self._start_chunk(lane, round_, index)
            return True
        self._note(lane, line, lane.since_s, self._now)
        if is_over:
            lane.chunk = 0
            return False
        other, _ = ready.pop(following - 1)
        ready.append((lane, "host"))
        self._start(other, *other.queues["host"][0])
        return True

    # Finishing

    def _finish(self, lane: _Lane, round_: _Round, index: int) -> None:
        line = lane.lines[index]
        if line.chunks and self._finish_chunk(lane, round_, index):
            return
        if line.queue == "up" and self._finish_upload(lane, round_, index):
            return
        if line.queue == "compute":
            lane.device.busy = False
            self._touched.append(lane.device)
        elif line.queue is not None:
            self._leave(lane, line.queue)
        for waiting in line.now:
            self._meet(lane, round_, waiting)
        if line.next and round_.number + 1 < lane.steps:
            following = lane.at(round_.number + 1)
            for waiting in line.next:
                self._meet(lane, following, waiting)
        if line.remote is not None:
            target, receive = line.remote
            self._meet(target, target.at(round_.number), receive)
        lane.open -= 1
        if not lane.open:
            self._let_in()

    def _leave(self, lane: _Lane, name: Queue) -> None:
        """The first of the lane's queue is done: the link, and the next in the queue, go on."""
        queue = lane.queues[name]
        queue.popleft()
        goes_on = bool(queue) and not queue[0][0].missing[queue[0][1]]
        if name == "activations" and lane.passes:
            lane.passes = False
        elif (stream := _LINKS.get(name)) is not None:
            link = lane.device.links[stream]
            link.busy = False
            if goes_on and name == "host":  # it keeps its turn, but for whom the rule has go first
                link.ready.insert(0, (lane, name))
                goes_on = False
            if link.ready:
                link.busy = True
                other, its = link.ready.pop(self._next_of(link.ready))
                self._start(other, *other.queues[its][0])
        if goes_on:
            self._transfer(lane, name)

    def _next_of(self, waiting: Sequence[tuple[_Lane, Queue]]) -> int:
        """Whose turn it is on a link, or at the host's memory."""
        if len(waiting) == 1 or waiting[0][1] != "host":
            return 0
        return self._choose([lane.candidate(lane.queues["host"][0][0]) for lane, _ in waiting])

    def _choose(self, candidates: Sequence[Candidate]) -> int:
        return candidates.index(self._policy.choose(candidates))

    def _meet(self, lane: _Lane, round_: _Round, index: int) -> None:
        """One need of an action is met; with the last one it is ready, if it is its turn."""
        round_.missing[index] -= 1
        if round_.missing[index]:
            return
        name = lane.lines[index].queue
        assert name is not None, "nothing is needed for an action that takes no time"
        if name == "compute":
            if lane.round is round_ and lane.head == index:
                self._offer(lane, round_)
            return
        queue = lane.queues[name]
        if queue and queue[0][1] == index and queue[0][0] is round_:
            self._transfer(lane, name)


def _line(action: Action, run: Run, durations: Durations | None) -> _Line:
    job = run.costs[action.trial]
    seconds = durations(action) if durations is not None else None
    if seconds is None:
        seconds = action_seconds(action, job)
    trial = action.trial if run.trial is None else run.trial
    stream: Stream | None = "compute" if computes(action) else _STREAMS.get(action.op)
    shard = job.shards[action.shard]
    total = sum(shard.step_chunks) if stream == "host" else 0
    chunks = tuple(seconds * part / total for part in shard.step_chunks) if total else ()
    moved = moved_bytes(action, shard)
    is_back = stream == "up" and lone_part(action) is not None
    queue: Queue | None = "activations" if is_back else stream
    return _Line(action, trial, stream, seconds, moved, chunks=chunks, queue=queue)


def _stuck(lanes: Sequence[_Lane]) -> str:
    heads = [f"device {lane.device.number} at {lane.lines[lane.head].action!s}" for lane in lanes]
    return (
        f"the programs wait for each other: {'; '.join(heads)}. Run them through "
        "shoal.program.check first: it says which action breaks which rule."
    )
