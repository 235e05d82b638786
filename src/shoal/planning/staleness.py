"""Which trials train with stale weights: who began so, and the others of a study like them.

[Note: one study, one rule]
A step with stale weights comes less far than one without, so trials of both kinds cannot be
compared step by step. A trial that has begun goes on as it began, whatever is quicker today. The
trials of a study that begin together train with stale weights if that is best for each of their
shapes; those that come later train as the others do, where their model allows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from shoal.core.plan import Job
from shoal.core.spec import Scalar, TrialSpec
from shoal.core.technique import Pipelined, Technique
from shoal.planning.gangs import technique_on_record
from shoal.planning.planned import Settled

Key = Mapping[str, Scalar]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How trials of one shape are settled.

    ``technique`` is what they train as; None: what was asked for, or is chosen. Where that cannot
    be they train synchronous, if ``falls_back``. ``why`` is a line of the plan.
    """

    technique: Technique | None = None
    may_be_stale: bool = True
    falls_back: bool = False
    why: str = ""


OPEN = Way()
ALIKE = Way(
    may_be_stale=False,
    why="2bw is not taken: other trials of the study train with new weights, and all train alike",
)


def is_stale(key: Key) -> bool:
    """Whether a numerics key is of a trial that trains with stale weights."""
    return "weights" in key


def agree_on_weights(keys: Iterable[Key]) -> bool:
    """Whether all of these trials train with stale weights, or none."""
    return len({is_stale(key) for key in keys}) < 2


class Staleness:
    """What the trials of a study train with, as far as it is known.

    Args:
        asked: What all of them were asked to train as; None: it is chosen.
        keys: The numerics keys of those that were planned before, by trial.
        may_be_stale: The recipe allows it.
    """

    def __init__(
        self, asked: Technique | None, keys: Mapping[int, Key], *, may_be_stale: bool
    ) -> None:
        self._asked, self._may_be_stale = asked, may_be_stale
        self._keys = {number: key for number, key in keys.items() if key}

    def way_of(self, trial: TrialSpec) -> Way:
        """How a trial is settled."""
        if not self._is_open:
            return OPEN
        number = trial.number
        if number not in self._keys and trial.warm and trial.parent is not None:
            number = trial.parent  # whose state it begins with
        key, others = self._keys.get(number), self._others()
        if key is None and others is None:
            return OPEN
        like = key or others or {}
        technique, stale = self._as(like), is_stale(like)
        if not stale and key is None:
            return replace(ALIKE, technique=technique)
        why = "2bw is not weighed: it began with a synchronous schedule, and goes on so"
        if stale:
            whose = "those of the other trials" if key is None else "when it began"
            why = f"its weights are one step old, as {whose}"
        return Way(technique=technique, may_be_stale=stale, falls_back=key is None, why=why)

    def odd(self, settled: Mapping[str, Settled]) -> list[str]:
        """Kinds that were settled with stale weights where others of a new study were not."""
        if not self._is_open or self._keys:
            return []
        stale = [kind for kind, one in settled.items() if _is_stale_pipeline(one.technique)]
        return stale if len(stale) < len(settled) else []

    def add(self, jobs: Iterable[Job]) -> None:
        """These have been planned; those that come will train as they do."""
        self._keys |= {job.trial: job.numerics for job in jobs if job.trial not in self._keys}

    @property
    def _is_open(self) -> bool:
        """Whether trials may differ in it, or have it chosen."""
        asked = self._asked
        left_open = asked is None or (isinstance(asked, Pipelined) and asked.schedule is None)
        return left_open and (self._may_be_stale or any(map(is_stale, self._keys.values())))

    def _others(self) -> Key | None:
        """A trial that new ones are to train like: a synchronous one, if there is one."""
        keys = list(self._keys.values())
        return next((key for key in keys if not is_stale(key)), keys[0] if keys else None)

    def _as(self, key: Key) -> Technique | None:
        """What a trial with this key trains as; None where it says nothing of that."""
        found = technique_on_record([key])
        if not isinstance(self._asked, Pipelined):
            return found
        if isinstance(found, Pipelined) and found.is_stale:
            return replace(self._asked, schedule=found.schedule, predict=found.predict)
        return None


def _is_stale_pipeline(technique: Technique) -> bool:
    return isinstance(technique, Pipelined) and technique.is_stale
