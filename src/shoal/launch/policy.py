"""What is saved of a study, how long it is kept, and what that takes of the disk."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

from shoal.core.errors import PlanError, SpecError, StorageError
from shoal.core.plan import Job, Plan
from shoal.core.spec import Scalar
from shoal.core.units import Bytes, Seconds, format_bytes, format_enough
from shoal.core.values import flag, whole
from shoal.runtime.saving import checkpoint
from shoal.storage.files import has_links
from shoal.storage.generations import bytes_on_disk as files_of
from shoal.storage.manifest import APART
from shoal.storage.shared import likeness

_BEST = re.compile(r"best:([1-9][0-9]{0,6})")
_NO_BYTES = Bytes(0)
USUAL_S = Seconds(300.0)  # between generations, where nobody names an interval
_REST_BYTES = 128 * 2**10  # manifest, random streams, position: what is no flat tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What of a study a plan does not say, and its disk has to hold all the same.

    Attributes:
        to_come: Trials that a search will ask for, as if they were like the plan's.
        waiting: So many may have begun and not ended, where trials wait for each other; None
            for all of them.
        ended: What each trial has on disk that finished or was pruned in earlier runs, but what
            the plan's trials share with it.
        shared: What of these trials' bases others of the study have on disk.
    """

    to_come: int = 0
    waiting: int | None = 0
    ended: Sequence[Bytes] = ()
    shared: Collection[str] = ()


_NOTHING = Beside()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPolicy:
    """When a trial is saved and what stays.

    Attributes:
        every_s: Seconds between generations of a trial that trains; 0 is each step.
        is_named: Whether somebody asked for that; if not, a slow disk may make it longer.
        keep: Generations of a trial that has not finished.
        keep_finished: ``"all"`` state of a finished trial's end, its ``"weights"``, or
            everything of the best N trials and nothing of the others: ``"best:N"``.
        keep_best: Whether the state of each trial's best evaluation stays beside those.
        disk_budget: Bytes that generations may take; None for what is free.
    """

    every_s: Seconds
    keep: int
    keep_finished: str
    disk_budget: Bytes | None
    is_named: bool = True
    keep_best: bool = False

    def __post_init__(self) -> None:
        what = "keep, how many generations of a trial stay (2 survive damage to one),"
        object.__setattr__(self, "keep", whole(what, self.keep, 1))
        object.__setattr__(self, "keep_best", flag("Study(keep_best=...)", self.keep_best))
        if self.keep_best and self.best is not None:
            raise SpecError(
                f"keep_best=True with keep_finished={self.keep_finished!r}, which keeps nothing "
                "of trials whose last evaluation is none of the best: the best one of all may be "
                "among theirs. Use keep_finished='all' or 'weights'."
            )
        if self.keep_finished not in ("all", "weights") and self.best is None:
            raise SpecError(
                "keep_finished is 'all', 'weights' or 'best:N' for a number of trials, got "
                f"{self.keep_finished!r}."
            )

    @property
    def best(self) -> int | None:
        """How many finished trials are kept; None for all."""
        match = _BEST.fullmatch(str(self.keep_finished))
        return int(match[1]) if match else None

    def record(self) -> Mapping[str, Scalar]:
        """Plain values, for the study's record."""
        return {
            "checkpoint_every_s": float(self.every_s),
            "keep": self.keep,
            "keep_finished": self.keep_finished,
            **({"keep_best": True} if self.keep_best else {}),
            "disk_budget": self.disk_budget,
        }

    @property
    def stays(self) -> int:
        """Generations of a trial that has ended, if any of its stay."""
        return (1 if self.keep_finished == "weights" else self.keep) + self.keep_best

    def running_bytes(self, plan: Plan, beside: Beside = _NOTHING) -> Bytes:
        """Generations of the trials that have not ended, with those that are being written.

        Of a trial that trains the newest one on record stays until a newer one is: with
        ``keep=1``, one more. Of the best evaluation there is one too. Of trials that wait for
        each other it is what they have more than when they have ended.
        """
        shared, of_each = _shared(plan, beside), max(self.keep, 2) + self.keep_best
        jobs = [_own(job, shared) for job in _jobs(plan, beside)]
        jobs.sort(key=lambda job: self._held(job, of_each + 1), reverse=True)
        training = sum(self._held(job, of_each + 1) for job in jobs[: plan.at_once])
        waiting = (
            self._held(job, of_each) - (0 if self.best else self._ended_bytes(job))
            for job in jobs[plan.at_once : beside.waiting]
        )
        return Bytes(training + sum(waiting))

    def finished_bytes(self, plan: Plan, beside: Beside = _NOTHING) -> Bytes:
        """What stays when every trial has finished; what many trials share is in it once."""
        shared = _shared(plan, beside)
        sizes = [self._ended_bytes(_own(job, shared)) for job in _jobs(plan, beside)]
        kept = sum(sorted([*sizes, *beside.ended], reverse=True)[: self.best])
        return Bytes(kept + self.copies * sum(shared.values()))

    def _ended_bytes(self, job: _Own) -> int:
        """What stays of one trial."""
        if self.keep_finished != "weights":
            return self._held(job, self.keep + self.keep_best)
        last = job.weight_bytes + self.keep_best * job.changing_bytes
        return last + min(self.copies, 1 + self.keep_best) * job.frozen_bytes

    def _held(self, job: _Own, generations: int) -> int:
        """What so many generations of a trial take."""
        copies = min(self.copies, generations)
        return generations * job.changing_bytes + copies * job.frozen_bytes

    @property
    def copies(self) -> int:
        """On how many files what is not trained is, for all generations that have it."""
        return min(self.keep, 2)

    def check(
        self,
        plan: Plan,
        free: Bytes,
        *,
        reserve: Bytes = _NO_BYTES,
        theirs: Bytes = _NO_BYTES,
        others: Bytes = _NO_BYTES,
        beside: Beside = _NOTHING,
    ) -> None:
        """Refuse a plan whose generations cannot fit.

        Args:
            reserve: What a run keeps free beside them, to end well on a full disk.
            theirs: What the plan's trials have on disk from earlier runs; they replace it.
            others: What trials have there that failed or were stopped, which stays.
            beside: The study's other trials.

        Raises:
            PlanError: more is needed than ``free``, or than the budget.
        """
        running, finished = self.running_bytes(plan, beside), self.finished_bytes(plan, beside)
        needed, theirs = running + finished, Bytes(theirs + sum(beside.ended))
        if self.disk_budget is not None and needed + others > self.disk_budget:
            room, whose = Bytes(max(0, self.disk_budget - others)), "disk_budget allows"
        elif needed + reserve > free + theirs:
            room, whose = Bytes(free + theirs), "are free"
            if reserve:
                whose += (
                    f", of which a run keeps {format_bytes(reserve)} to end well on a full disk"
                )
        else:
            return
        raise PlanError(
            f"the study's checkpoints need {format_enough(needed)} on disk: "
            f"{format_bytes(running)} while trials {self._do(plan, beside)} "
            f"(keep={self.keep}, and one that is being written), "
            f"{format_bytes(finished)} for finished ones "
            f"(keep_finished={self.keep_finished!r}); {format_bytes(room)} {whose}. "
            f"{self._less()} fewer trials, or give it more room."
        )

    def _less(self) -> str:
        """How to keep less, of what is not asked for already and goes with what is."""
        less = ["keep_finished='weights'"] * (self.keep_finished == "all")
        less += ["keep_finished='best:3'"] * (self.best is None and not self.keep_best)
        less += [f"fewer than {self.best} of the best"] * ((self.best or 0) > 1)
        less += ["keep_best=False"] * self.keep_best
        return f"Keep less with {' or '.join(less)}, train" if less else "Train"

    def explain(self, plan: Plan, beside: Beside = _NOTHING) -> str:
        """What the plan says of the disk."""
        return (
            f"  on disk: up to {format_bytes(self.running_bytes(plan, beside))} of generations "
            f"while trials {self._do(plan, beside)}, "
            f"{format_bytes(self.finished_bytes(plan, beside))} when all have finished "
            f"(keep={self.keep}, keep_finished={self.keep_finished!r})"
        )

    def _do(self, plan: Plan, beside: Beside) -> str:
        waiting = len(_jobs(plan, beside)[plan.at_once : beside.waiting])
        return f"train, and {waiting} wait for others" if waiting else "train"


def bytes_on_disk(
    directory: Path,
    trials: Iterable[int],
    newest: int = 0,
    seen: set[tuple[int, int]] | None = None,
) -> Bytes:
    """What generations of ``trials`` take on disk now; what goes meanwhile counts as nothing.

    Of each the ``newest`` so many, or 0 for all. A file that several have counts once; one that
    was ``seen`` before, not at all.
    """
    seen = set() if seen is None else seen
    places = (checkpoint.generations(directory, trial) for trial in trials)
    return Bytes(sum(files_of(place.all()[-newest:], seen) for place in places))


def shared_on_disk(
    directory: Path,
    trials: Iterable[int],
    plan: Plan,
    copies: int,
    seen: set[tuple[int, int]],
) -> dict[str, Bytes]:
    """By what it is, the bytes of what a plan's trials share with ``trials``, which have it.

    Up to ``copies`` files of each: a study that was copied without its links has more. They are
    among those that were ``seen`` then. What cannot be read counts as nothing.
    """
    wanted = {job.frozen for job in plan.jobs if job.frozen}
    found: dict[str, Bytes] = {}
    counts = Counter[str]()
    judged = set[tuple[int, int]]()
    for trial in trials if wanted else ():
        for generation in checkpoint.generations(directory, trial).all():
            with suppress(OSError, StorageError):
                status = (generation.path / APART).stat()
                inode = status.st_dev, status.st_ino
                if inode in judged:
                    continue
                record = generation.manifest.files.get(APART)
                judged.add(inode)
                like = likeness(record.header, record.tensors) if record else ""
                if like in wanted and counts[like] < copies:
                    counts[like] += 1
                    found[like] = Bytes(found.get(like, 0) + status.st_size)
                    seen.add(inode)
    return found


@dataclass(frozen=True, slots=True)
class _Own:
    """What one trial's generations take: what each of them has, and what they share.

    Attributes:
        weight_bytes: Of ``changing_bytes`` those of weights.
        frozen_bytes: Shared among its own generations, and with no other trial.
    """

    weight_bytes: int
    changing_bytes: int
    frozen_bytes: int


def _shared(plan: Plan, beside: Beside) -> dict[str, int]:
    """What several trials have in the same bits, one of the plan among them, and its bytes."""
    count = Counter(job.frozen for job in plan.jobs if job.frozen)
    count.update(frozen for frozen in beside.shared if frozen in count)
    return {job.frozen: job.frozen_bytes for job in plan.jobs if count[job.frozen] > 1}


def _own(job: Job, shared: Collection[str]) -> _Own:
    frozen = job.frozen_bytes
    return _Own(
        weight_bytes=_weight_bytes(job) - frozen,
        changing_bytes=changing_bytes(job),
        frozen_bytes=0 if job.frozen in shared else frozen,
    )


def _jobs(plan: Plan, beside: Beside) -> list[Job]:
    """Those of the plan, and of the trials that are to come."""
    return [*plan.jobs, *islice(cycle(plan.jobs), beside.to_come)]


def generation_bytes(job: Job) -> int:
    """What one generation of a trial takes."""
    state = sum(shard.state_bytes for shard in job.shards)
    return _weight_bytes(job) + state


def changing_bytes(job: Job) -> int:
    """What a generation of a trial adds to those that it has."""
    return generation_bytes(job) - job.frozen_bytes


def as_saved_in(place: Path, plan: Plan) -> Plan:
    """The plan, of which nothing is shared where the file system has no links for that.

    ``place``, or a directory above it, is there.
    """
    if not any(job.frozen_bytes for job in plan.jobs) or has_links(place):
        return plan
    jobs = (replace(job, frozen_bytes=_NO_BYTES, frozen="") for job in plan.jobs)
    return replace(plan, jobs=tuple(jobs))


def _weight_bytes(job: Job) -> int:
    return sum(shard.owned_bytes for shard in job.shards) + job.buffer_bytes + _REST_BYTES
