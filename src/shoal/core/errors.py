"""The exception tree.

ShoalError
+-- SpecError        the request itself is wrong; nothing has started
+-- PlanError        no plan fits, or a plan fails its checks
|   +-- TooLarge     a trial fits in no way, of all that was asked for
|   +-- NotCuttable  a model cannot be a chain of shards (partition)
|   +-- CutError     no cut of the chain satisfies what was asked (partition)
|   +-- Declined     trials cannot train as one array (fusion)
+-- ProgramError     a program breaks a rule of its format (checked before it runs)
+-- CapacityError    a tier cannot hold what was asked of it
+-- TransitionError  a state machine got an event it cannot take
+-- WorkerError      a device worker failed; carries the original traceback
+-- TrialError       one trial cannot go on; the others do
|   +-- NarrowError  a weight that travelled as bfloat16 has to travel whole
|   +-- OrderError   micro-batches that went by shard have to go one after another
+-- StorageError     the disk is full or failing, or what is on it is damaged

A message has three parts: what was asked, what was found, what to do; with the
numbers. Every class has a section in docs/errors.md.
"""

from __future__ import annotations

import re
from itertools import pairwise


class ShoalError(Exception):
    """Base class: ``except ShoalError`` catches everything this package raises."""


class SpecError(ShoalError, ValueError):
    """The request itself is wrong; nothing has started."""


class PlanError(ShoalError):
    """No plan fits, or a plan fails its checks; no device was touched."""


class TooLarge(PlanError):
    """A trial fits its device in no way that was asked for; others of the study may."""


class ProgramError(ShoalError):
    """A program breaks a rule of its format; names the action and the rule."""


class CapacityError(ShoalError):
    """A tier cannot hold what was asked of it.

    Attributes:
        growth: How many times what was promised a unit took; 1.0 where that is not known.
        is_anothers: Whether it was a batch of another trial that had no room, in a step of both.
    """

    growth = 1.0
    is_anothers = False


class TransitionError(ShoalError):
    """A state machine got an event it cannot take."""


class WorkerError(ShoalError):
    """A device worker failed; carries the original traceback."""


class TrialError(ShoalError):
    """One trial cannot go on: its loss is not finite, its data failed, its model raised."""


class NarrowError(TrialError):
    """A weight that travelled as bfloat16 was read by something else than a product.

    Nothing has stepped on it: the trial is planned again, with whole weights.
    """


class OrderError(TrialError):
    """A model whose shards run all micro-batches of a step in one visit drew other random numbers.

    Some where it drew none when it was measured, or others than were foretold.

    Nothing has stepped on them: unless that order was asked for, the trial is planned again in
    the plain one.
    """


class StorageError(ShoalError):
    """The disk is full or failing, or what lies on it is damaged or not shoal's."""


def last_words(error: str) -> str:
    """What the last error of a traceback says, in a line; without the kind of shoal's own.

    Of a message of several lines the first, which says what happened.
    """
    lines = error.rstrip().splitlines()
    begins = [at for at, line in enumerate(lines) if line.startswith(_IN_A_TRACEBACK)]
    rest = lines[begins[-1] + 1 :] if begins else lines
    said = [line for line in rest if line[:1].strip()][:1]
    for blank, line in pairwise(rest):  # what was made of it, in a paragraph of its own
        said += [line] * bool(not blank and _KIND.match(line))
    return _OWN_KIND.sub("", said[-1] if said else "", count=1)


_IN_A_TRACEBACK = ("Traceback", "  File ")
_KIND = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Declined|NotCuttable): ")
_OWN_KIND = re.compile(r"^shoal(?:\.\w+)+: ")
