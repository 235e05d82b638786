"""Generations written behind the trials' backs: one thread of a worker, trials in turn.

The device's thread takes a trial's state at a step boundary; this thread writes it while the
trial goes on. The next one is due no sooner than ``interval_s`` says, so that saving takes at
most a few percent of the time, whatever the disk does.

[Note: what the record has not heard of]
A generation may be on the disk before the steps that it holds are in the database, and a kill of
all processes takes what is on its way. Nobody goes on from it then, lest the record had a gap. So
the newest generation whose steps are on record stays beside those that ``keep`` asks for, until
the study's process has acknowledged a newer one, which as a rule it has within a tenth of a
second.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace

from shoal.core.errors import StorageError
from shoal.core.event import CheckpointWritten, Event, StorageFailed
from shoal.core.studyfiles import generation_name
from shoal.runtime.saving import checkpoint
from shoal.runtime.saving.checkpoint import Content
from shoal.runtime.wire.messages import LeaseOver, Settings
from shoal.storage.generations import Generations
from shoal.storage.manifest import APART
from shoal.storage.shared import Shared

SHARE = 1 / 33
"""Of a trial's time, at most this much may pass between a step boundary and a durable state."""

_TICK_S = 1.0
NEVER = 1 << 62


def interval_s(every_s: float, seconds: float) -> float:
    """Seconds until the next generation, when the last one took ``seconds``; 0 is every step."""
    return max(every_s, seconds / SHARE) if every_s else 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a generation: where it is, or why it is nowhere."""

    step: int
    path: str = ""  # relative to the study
    trouble: str = ""


class Saver:
    """Writes generations; used by the device's thread only.

    ``tell`` sends an event at once and may be called from the writing thread; ``on_wait`` is
    called each second while the device's thread waits for the disk. ``said`` is how many
    messages of events were sent, ``heard`` of how many the record is safe. ``notify`` is called
    by the writing thread when a generation is written, or is not to be.
    """

    def __init__(
        self,
        settings: Settings,
        tell: Callable[[Event], None],
        on_wait: Callable[[], None] = lambda: None,
        *,
        said: Callable[[], int] = lambda: 0,
        heard: Callable[[], int] = lambda: 0,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings, self._tell, self._on_wait = settings, tell, on_wait
        self._said, self._heard, self._notify = said, heard, notify
        self._unheard: dict[int, dict[str, int]] = {}  # trial -> generation -> messages by then
        self.waits = 0  # seconds for which the disk was waited for: no hang of the worker's
        self._shared = Shared(APART)  # used by the writing thread only
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._writing: dict[int, Future[Outcome]] = {}
        self._copied: Future[Outcome] | None = None  # the last one of a copy
        self._due: dict[int, float] = {}  # trial -> on the monotonic clock
        self._best: dict[int, float] = {}  # trial -> rank of its best evaluation
        self._wanted: set[int] = set()  # trials whose best evaluation is to be saved

    def expect(self, trial: int, in_s: float) -> None:
        """The trial came to this device; its next generation is due ``in_s`` from now."""
        self._due[trial] = time.monotonic() + in_s

    def is_due(self, trial: int, *, copies: bool = False) -> bool:
        """Whether it is time, and the last one is written; with an interval of 0, always.

        Where it ``copies`` the state, the last copy of any trial too. What was evaluated best is
        due at once.
        """
        if not self._settings.checkpoint_every_s or trial in self._wanted:
            return True
        if copies and self._copied is not None and not self._copied.done():
            return False
        return not self.is_writing(trial) and time.monotonic() >= self._due[trial]

    def is_best(self, trial: int, metrics: Mapping[str, float]) -> bool:
        """Whether a trial's evaluation now is the best yet and to be kept: then it is due."""
        aim = self._settings.best
        if aim is None:
            return False
        if trial not in self._best:  # it may have been evaluated elsewhere
            found = self._place(trial).best()
            self._best[trial] = (
                math.inf if found is None else checkpoint.rank_of(found, trial, aim)
            )
        rank = aim.rank(metrics)
        if not rank < self._best[trial]:
            return False
        self._best[trial] = rank
        self._wanted.add(trial)
        return True

    def is_writing(self, trial: int) -> bool:
        """Whether the trial's last generation is not written yet."""
        writing = self._writing.get(trial)
        return writing is not None and not writing.done()

    def save(
        self, take: Callable[[], Content], *, copies: bool = False, waits: bool = False
    ) -> None:
        """Take a state now, and write it while the caller goes on, unless that ``waits``.

        One that it ``copies`` is as large as a trial's state, and the host has room for one.
        """
        began = time.perf_counter()
        if copies and self._copied is not None:
            self._sit_out(self._copied)
        what = take()
        self._wanted.discard(what.trial)
        self.wait(what.trial)
        writing = self._thread.submit(self._write, what, began)
        self._writing[what.trial] = writing
        if copies:
            self._copied = writing
        writing.add_done_callback(lambda _: self._notify())
        if waits:
            self._sit_out(writing)

    def wait(self, trial: int) -> Outcome | None:
        """What became of the trial's last generation, once it is written; None: there is none."""
        writing = self._writing.get(trial)
        if writing is None:
            return None
        self._sit_out(writing)
        return writing.result()

    def with_generation(self, over: LeaseOver) -> LeaseOver:
        """The word of a trial that has ended, with its last generation, once that is written."""
        outcome = self.wait(over.trial)
        assert outcome is not None
        return replace(over, checkpoint=outcome.path, trouble=outcome.trouble)

    def _sit_out(self, writing: Future[Outcome]) -> None:
        """Wait until it is over; how it went is told to its own trial."""
        while not wait([writing], timeout=_TICK_S).done:
            self.waits += 1
            self._on_wait()

    def forget(self, trial: int) -> None:
        """Wait for the trial's last generation, and keep nothing of it."""
        with suppress(Exception):  # that it could not be written is why, or matters no more
            self.wait(trial)
        self._writing.pop(trial, None)
        for known in (self._due, self._best):
            known.pop(trial, None)
        self._wanted.discard(trial)

    def close(self) -> None:
        """Finish what was taken."""
        self._thread.shutdown()

    def _write(self, what: Content, began: float) -> Outcome:
        place = self._place(what.trial)
        try:
            _check_is_there(self._settings.directory)
            self._collect(what.trial, place)
            written, num_bytes = checkpoint.write(what, place, self._shared)
            unheard = self._unheard.setdefault(what.trial, {})
            unheard[written.path.name] = NEVER
            self._collect(what.trial, place)
        except StorageError as error:
            self._schedule(what.trial, time.perf_counter() - began)
            self._report(what, str(place.directory), str(error))
            return Outcome(what.step, trouble=str(error))
        seconds = time.perf_counter() - began
        self._schedule(what.trial, seconds)
        path = generation_name(what.trial, written.path.name)
        self._tell(
            CheckpointWritten(
                time=time.time(),
                trial=what.trial,
                step=what.step,
                path=path,
                bytes=num_bytes,
                seconds=seconds,
            )
        )
        unheard[written.path.name] = self._said()
        return Outcome(what.step, path)

    def _place(self, trial: int) -> Generations:
        settings = self._settings
        return checkpoint.generations(settings.directory, trial, settings.keep, settings.best)

    def _collect(self, trial: int, place: Generations) -> None:
        """Let older generations go, but for the newest one that is on record."""
        heard, unheard = self._heard(), self._unheard.get(trial, {})
        for name in [name for name, said in unheard.items() if said <= heard]:
            del unheard[name]
        place.collect(unrecorded=unheard)

    def _schedule(self, trial: int, seconds: float) -> None:
        wait_s = interval_s(self._settings.checkpoint_every_s, seconds)
        self._due[trial] = time.monotonic() + wait_s

    def _report(self, what: Content, path: str, error: str) -> None:
        self._tell(
            StorageFailed(
                time=time.time(),
                path=path,
                error=error,
                trial=what.trial,
                action=f"trial {what.trial} goes on without a generation of step {what.step}; "
                "earlier ones are as they were",
            )
        )


def _check_is_there(directory: str) -> None:
    """Refuse to make a study's directory anew: what was saved before is not in it."""
    if not os.path.isdir(directory):
        raise StorageError(
            f"{directory} is gone: the study's directory was moved or removed while it ran. Put "
            "it back."
        )
