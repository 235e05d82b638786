"""Actions and programs: the one format of everything a worker does.

[Note: programs]
A program is, per device, the list of actions of one training step of one trial (or
of several: every action names its trial). Actions are *issued* in list order, each as
soon as what it needs is complete; copies (LOAD, STORE) and host steps are then in
flight on their own streams while later actions go on. So the position of a LOAD is
the moment its memory is taken, and a LOAD written before the previous unit's F or B
is a prefetch.

    stream    actions             needs complete before it starts
    up        LOAD                the host copy is current (its STEP@host, its STORE)
    compute   F B STEP SYNC       the shard's LOADs; for B the F of its shard and the
                                  B of the next shard; for STEP every B of the shard
    down      STORE               the action that wrote the part
    host      STEP@host           the STORE of the gradients; SYNC when there is one
    (none)    DROP                the STOREs and units that use the parts

Parts of a shard on the device: ``param`` (with tied weights it borrows), ``state`` (the
optimizer's), ``grad``. A shard may have a ``head``: tensors of its parameters, or else of its
state, that stay on the device, while ``param`` or ``state`` is the rest. ``boundary`` is what
enters a shard for one micro-batch, as far as no later shard reads it: it may wait on the host
between F and B (``STORE s1 m0 boundary``, after F(s - 1); DROP, after F(s); LOAD, before B(s)),
and is moved by itself. So is ``saved``, what one forward saved for its backward (``STORE s1 m0
saved``, after F(s); DROP; LOAD, before B(s)). F(s, m) runs a shard's
forward for micro-batch m under no_grad and leaves the boundary into shard s + 1. B(s, m) runs
the forward again with gradients and then the backward; for the last shard, which has no F,
this is the first forward and includes the loss. K shards give 2K - 1 units a micro-batch. B
makes or adds to ``grad``. ``F s1 m0 saved`` keeps what autograd saved until ``B s1 m0 saved``,
which does not run the forward again; the parameters stay meanwhile, or leave once what was saved
is stored, and come back for B. ``LOAD s1 param own`` loads
into memory of its own and not into a slot; it is given back with the DROP. ``LOAD s1 state late``
takes a late slot, beside the parameters: there are none before the first such LOAD, and none
after the program. ``DROP s1 grad now`` has the next unit wait for the STORE, and not the one
after it. STEP on the device consumes ``grad`` and makes ``param`` and ``state`` dirty;
STEP@host updates the host copies from the gradients there. SYNC is the barrier that turns the
per-parameter norms of all shards into one clipping factor. Versions count optimizer steps from
the program's start: F and B of a synchronous step use version 0; see [Note: several steps].

``SEND s1 m0 d1`` is the boundary into shard 1, ``SEND s1 m0 grad d0`` the gradients that
shard 1's B hands back; RECV has the same words with the other device. A SEND never
blocks and its tensor leaves the device; a RECV takes what its peer sent of its kind in the
order sent. Four more kinds leave a copy behind:

    ``norm``    ``SEND s2 v5 norm d0``: the norms of shard 2's gradients for step 5; from the
                device that has the SYNC, the clipping factor that came of all of them
    ``param``   ``SEND s3 v6 param d3``: version 6 of the parameters that shard 3 borrows
    ``rng``     ``SEND s3 m0 rng d0``: the random state after the forwards of micro-batch 0
    ``sum``     ``SEND s1 v5 sum d3``: the gradients of shard 1 for step 5, to a device with a copy
                of it, which adds them to its own

Where there are copies of a pipeline each is a trial of the program, ``t1`` the second one, and
``SEND s0 m1 d2 t1`` brings it a batch: what enters shard 0.

B may be cut in two: ``I s1 m0`` hands on the gradients of its boundary as B does, and
``W s1 m0``, some time later, adds to ``grad``; what was saved stays until then.

[Note: several steps]
A program of several steps has ``groups``, how many micro-batches each takes; micro-batches
count on from step to step. STEP v5 starts from version 5 and takes the gradients of group 5,
also where some of group 6 are there already. With one version kept, group t runs with version
t; with two, with the one before the newest there may be: max(t - 1, 0). A program that goes on
where another one ended may have ``begun`` with a newer version than 0.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from shoal.core.errors import ProgramError
from shoal.core.spec import Place


class Op(StrEnum):
    """What a worker can do."""

    LOAD = "LOAD"  # host to device
    STORE = "STORE"  # device to host
    DROP = "DROP"  # forget the device's copy
    F = "F"  # forward under no_grad
    B = "B"  # forward with gradients, then backward
    I = "I"  # noqa: E741  # as B, without the gradients of parameters
    W = "W"  # these, later
    STEP = "STEP"  # optimizer step of one shard
    SYNC = "SYNC"  # combine gradient norms over all shards
    SEND = "SEND"  # boundary or gradient to another device
    RECV = "RECV"
    CKPT = "CKPT"  # copy of the host state that a resume starts from


class Part(StrEnum):
    """A kind of bytes a shard has on the device."""

    PARAM = "param"
    STATE = "state"
    GRAD = "grad"
    BOUNDARY = "boundary"
    SAVED = "saved"
    HEAD = "head"
    NORM = "norm"  # these three in messages only
    RNG = "rng"
    SUM = "sum"


Kept = Mapping[int, Collection[Part]]
"""Shard -> its parts that are on the device before a program, and after it."""


def kept(shards: Iterable[int], weights: Iterable[int] = (), heads: Iterable[int] = ()) -> Kept:
    """What stays on the device between programs: all but gradients, parameters, or a head."""
    stay: dict[int, tuple[Part, ...]] = {shard: (Part.PARAM,) for shard in weights}
    for shard in heads:
        stay[shard] = (*stay.get(shard, ()), Part.HEAD)
    return stay | {shard: (Part.PARAM, Part.STATE) for shard in shards}


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One action over (trial, shard, micro-batch, weight version).

    ``micro`` is None where the action is about the shard and not one micro-batch.
    ``parts`` are what LOAD, STORE and DROP concern. ``place`` is where a STEP runs.
    ``peer`` is the other device of a SEND or RECV. ``own`` says that a LOAD takes no slot,
    ``late`` that it takes one that is not there before, ``now`` that a DROP is waited for.
    """

    op: Op
    shard: int = 0
    micro: int | None = None
    version: int = 0
    parts: tuple[Part, ...] = ()
    place: Place = "device"
    peer: int | None = None
    trial: int = 0
    own: bool = False
    late: bool = False
    now: bool = False

    def __str__(self) -> str:
        """The text form: ``F s1 m0``, ``LOAD s2 param+state``, ``STEP@host s0``."""
        words = [self.op + ("@host" if self.place == "host" else ""), f"s{self.shard}"]
        if self.micro is not None:
            words.append(f"m{self.micro}")
        if self.version:
            words.append(f"v{self.version}")
        if self.parts:
            words.append("+".join(self.parts))
        words += [word for word in FLAGS if getattr(self, word)]
        if self.peer is not None:
            words.append(f"d{self.peer}")
        if self.trial:
            words.append(f"t{self.trial}")
        return " ".join(words)


_MOVES = frozenset((Op.LOAD, Op.STORE, Op.DROP))


def lone_part(action: Action) -> Part | None:
    """What of one micro-batch a LOAD, STORE or DROP moves, if it does: a boundary, what F saved.

    It lives outside the slots.
    """
    parts = action.parts  # the planner asks this a million times
    if not parts or action.op not in _MOVES:
        return None
    if Part.BOUNDARY in parts:
        return Part.BOUNDARY
    return Part.SAVED if Part.SAVED in parts else None


@dataclass(frozen=True, slots=True)
class Program:
    """Per device, the actions of a step or more, in issue order."""

    devices: tuple[tuple[Action, ...], ...]

    def __iter__(self) -> Iterator[Action]:
        return (action for actions in self.devices for action in actions)

    def __str__(self) -> str:
        """One action a line; a header a device when there are several."""
        if len(self.devices) == 1:
            return "\n".join(map(str, self.devices[0]))
        blocks = []
        for index, actions in enumerate(self.devices):
            blocks.append("\n".join([f"device {index}", *map(str, actions)]))
        return "\n".join(blocks)


def single(actions: Iterable[Action]) -> Program:
    """A program for one device."""
    return Program((tuple(actions),))


_WORD = re.compile(r"(s|m|v|d|t)(\d+)")
FLAGS = ("own", "late", "now")
_FIELDS = {"s": "shard", "m": "micro", "v": "version", "d": "peer", "t": "trial"}


def parse_action(line: str) -> Action:
    """The action of a text form.

    Raises:
        ProgramError: the line is no action; names the word that cannot be read.
    """
    head, *words = line.split()
    name, _, place = head.partition("@")
    if name not in Op.__members__ or place not in ("", "host"):
        raise ProgramError(f"{head!r} in {line!r} is no action; known are {', '.join(Op)}.")
    numbers: dict[str, Any] = {flag: flag in words for flag in FLAGS}
    parts: tuple[Part, ...] = ()
    for word in words:
        match = _WORD.fullmatch(word)
        if match:
            numbers[_FIELDS[match[1]]] = int(match[2])
        elif word in FLAGS:
            continue
        elif set(word.split("+")) <= set(Part):
            parts = tuple(Part(part) for part in word.split("+"))
        else:
            raise ProgramError(f"cannot read {word!r} in the action {line!r}.")
    return Action(
        Op(name),
        parts=parts,
        place="host" if place else "device",
        **numbers,
    )


def parse_program(text: str) -> Program:
    """The program of a text form; blank lines and ``# comments`` are skipped."""
    devices: list[list[Action]] = []
    for raw in text.splitlines():
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        if re.fullmatch(r"device \d+", line):
            devices.append([])
            continue
        if not devices:
            devices.append([])
        devices[-1].append(parse_action(line))
    return Program(tuple(tuple(actions) for actions in devices))
