"""What is done while the disk fails, and what must be true afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.injector import Fault, Killed, Played, installed, listing

from shoal.storage.documents import read_json, write_json
from shoal.storage.files import Reserve
from shoal.storage.generations import Generation, Generations
from shoal.storage.manifest import APART
from shoal.storage.shared import Shared
from shoal.storage.tensors import digest_of

TRIAL = Path("trials/0003")
RESERVE_BYTES = 1 << 16
SHARED_CONTENT = {APART: {"base": bytes(range(48))}}
Acknowledge = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a process ended: what it had promised, and the name of the error it reported.

    ``lasting``: its disk went on failing, and so refused the way back too.
    """

    promised: tuple[str, ...]
    killed: bool
    lasting: bool
    error: str = ""

    @property
    def may_be_either(self) -> bool:
        """Whether what was not promised may be there all the same."""
        return self.killed or self.lasting


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """``prepare`` and ``act`` on a directory; ``check`` says what is wrong, "" for nothing.

    ``reports_all``: every failure becomes an error, and that of a full disk is ``DiskFull``;
    ``forks``: a process of its own for every run, since it keeps more than files.
    """

    name: str
    prepare: Callable[[Path], None]
    act: Callable[[Path, Acknowledge], None]
    check: Callable[[Path, Ended], str]
    reports_all: bool = True
    forks: bool = False


def content(step: int) -> dict[str, dict[str, bytes]]:
    """The bytes of a checkpoint of ``step``, by file and tensor."""
    names = {"weights.safetensors": ("a", "b"), "state.safetensors": ("m",)}
    return {
        file: {name: bytes((step + ord(name) + i) % 251 for i in range(48)) for name in tensors}
        for file, tensors in names.items()
    }


def commit(generations: Generations, step: int) -> Generation:
    """Write a checkpoint of ``step``."""
    with generations.begin(step) as draft:
        for file, tensors in content(step).items():
            draft.tensors(file, [(name, "U8", (48,), data) for name, data in tensors.items()])
        return draft.commit(position=[step, 0.5], trial=3)


def commit_shared(generations: Generations, step: int) -> Generation:
    """The same, with a file that every step has."""
    tensors = SHARED_CONTENT[APART]
    rows = [(name, "U8", (48,), data) for name, data in tensors.items()]
    with ExitStack() as until_committed, generations.begin(step) as draft:
        digests = {name: digest_of(data) for name, data in tensors.items()}
        Shared(APART).put(draft, generations, rows, digests, until_committed)
        for file, some in content(step).items():
            draft.tensors(file, [(name, "U8", (48,), data) for name, data in some.items()])
        return draft.commit(position=[step, 0.5], trial=3)


def is_exact(generation: Generation) -> bool:
    """Whether a generation has every bit of what was written for its step."""
    shared = SHARED_CONTENT if APART in generation.manifest.files else {}
    for file, tensors in {**content(generation.step), **shared}.items():
        with generation.open(file) as found:
            if {name: bytes(found.read(name)) for name in found.entries} != tensors:
                return False
    meta: Mapping[str, Any] = generation.manifest.meta
    return dict(meta) == {"position": [generation.step, 0.5], "trial": 3}


def newest_step(root: Path, reports: list[str]) -> int:
    """The step a reader would go on from; -1 for none, -2 for one whose bytes are wrong."""
    found = Generations(root / TRIAL).newest(lambda path, _: reports.append(path.name))
    if found is None:
        return -1
    return found.step if is_exact(found) else -2


def _generations(
    name: str,
    old: tuple[int, ...],
    new: int,
    keep: int,
    *,
    leftovers: bool = True,
    commit: Callable[[Generations, int], Generation] = commit,
) -> Scenario:
    """Commit ``new`` where ``old`` are, and collect."""

    def prepare(root: Path) -> None:
        for step in old:
            commit(Generations(root / TRIAL), step)
        if leftovers:
            leave_leftovers(root)

    def act(root: Path, acknowledge: Acknowledge) -> None:
        generations = Generations(root / TRIAL, keep=keep)
        commit(generations, new)
        acknowledge(str(new))
        generations.collect()

    def check(root: Path, ended: Ended) -> str:
        reports: list[str] = []
        found = newest_step(root, reports)
        expected = {new} if ended.promised else {max(old, default=-1)}
        if ended.may_be_either and not ended.promised:
            expected.add(new)
        if found not in expected:
            return f"found step {found}, expected one of {expected}"
        for generation in Generations(root / TRIAL).all():
            generation.verify()  # not one that is seen is half
        return f"a reader was told of damage: {reports}" if reports else _next_is_clean(root, keep)

    return Scenario(name=name, prepare=prepare, act=act, check=check)


def leave_leftovers(root: Path) -> None:
    """What earlier crashes may have left: a draft, and half of a removal."""
    for name in ("step-00000900.tmp", "step-00000100.old.tmp"):
        (root / TRIAL / name).mkdir()
        (root / TRIAL / name / "weights.safetensors").write_bytes(b"half")


def _next_is_clean(root: Path, keep: int) -> str:
    """Whether the next checkpoint succeeds and leaves nothing but generations."""
    generations = Generations(root / TRIAL, keep=keep)
    commit(generations, 2000)
    generations.collect()
    names = {path.name for path in (root / TRIAL).iterdir()}
    if names != {generation.path.name for generation in generations.all()}:
        return f"leftovers: {sorted(names)}"
    if newest_step(root, []) != 2000 or len(names) > keep:
        return f"the next checkpoint is not the newest, or too many are left: {sorted(names)}"
    return ""


def _again() -> Scenario:
    """Step 800 is there but damaged: it is written a second time, and one is kept."""

    def prepare(root: Path) -> None:
        for step in (400, 800):
            commit(Generations(root / TRIAL), step)
        damage(root / TRIAL / "step-00000800" / "manifest.json")

    def act(root: Path, acknowledge: Acknowledge) -> None:
        generations = Generations(root / TRIAL, keep=1)
        commit(generations, 800)
        acknowledge("800")
        generations.collect()

    def check(root: Path, ended: Ended) -> str:
        reports: list[str] = []
        found = newest_step(root, reports)
        expected = {800} if ended.promised else {400, 800} if ended.may_be_either else {400}
        if found not in expected or not set(reports) <= {"step-00000800"}:
            return f"found step {found}, expected {expected}; reports {reports}"
        return _next_is_clean(root, 1)

    return Scenario(name="the same step again", prepare=prepare, act=act, check=check)


def killed_before(point: int) -> Scenario:
    """A process that follows one that was killed at its ``point``-th call."""

    def prepare(root: Path) -> None:
        KEEP_ONE.prepare(root)
        with installed(Played(root, point, Fault.KILL)), suppress(Killed):
            KEEP_ONE.act(root, lambda _: None)

    def act(root: Path, acknowledge: Acknowledge) -> None:
        generations = Generations(root / TRIAL, keep=1)
        generations.newest()
        commit(generations, 1600)
        acknowledge("1600")
        generations.collect()

    def check(root: Path, ended: Ended) -> str:
        reports: list[str] = []
        found = newest_step(root, reports)
        if found not in ({1600} if ended.promised else {800, 1200, 1600}) or reports:
            return f"found step {found}, promised {ended.promised}; reports {reports}"
        return _next_is_clean(root, keep=1)

    return Scenario(name=f"after a kill at {point}", prepare=prepare, act=act, check=check)


def _collect_only() -> Scenario:
    """The newest are damaged, one generation is to be kept: it must be the good one."""

    def prepare(root: Path) -> None:
        for step in (100, 400, 800, 1200):
            commit(Generations(root / TRIAL), step)
        damage(root / TRIAL / "step-00000800" / "manifest.json")
        damage(root / TRIAL / "step-00001200" / "manifest.json")

    def act(root: Path, acknowledge: Acknowledge) -> None:
        acknowledge("400")
        Generations(root / TRIAL, keep=1).collect()

    def check(root: Path, _: Ended) -> str:
        found = newest_step(root, [])
        return "" if found == 400 else f"found step {found}, expected 400"

    return Scenario(name="collect among damage", prepare=prepare, act=act, check=check)


def damage(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def _document() -> Scenario:
    """A JSON document is replaced."""
    old, new = {"version": 1, "text": "old" * 50}, {"version": 2, "text": "new" * 70}

    def prepare(root: Path) -> None:
        write_json(root / "study.json", old)

    def act(root: Path, acknowledge: Acknowledge) -> None:
        write_json(root / "study.json", new)
        acknowledge("2")

    def check(root: Path, ended: Ended) -> str:
        found = read_json(root / "study.json")
        if found not in ([new] if ended.promised else [old, new]):
            return f"found {json.dumps(found)[:60]}"
        write_json(root / "study.json", old)
        left = listing(root)
        return "" if left == ["study.json"] else f"leftovers: {left}"

    return Scenario(name="replace a document", prepare=prepare, act=act, check=check)


def _reserve() -> Scenario:
    """The reserve is given back and taken again."""

    def prepare(root: Path) -> None:
        Reserve(root / "reserve", RESERVE_BYTES).take()

    def act(root: Path, acknowledge: Acknowledge) -> None:
        reserve = Reserve(root / "reserve", RESERVE_BYTES)
        reserve.release()
        reserve.take()
        acknowledge("held")

    def check(root: Path, ended: Ended) -> str:
        reserve = Reserve(root / "reserve", RESERVE_BYTES)
        if ended.promised and not reserve.held:
            return "the reserve was taken and is not there"
        reserve.take()
        size = (root / "reserve").stat().st_blocks * 512
        return "" if reserve.held and size >= RESERVE_BYTES else f"only {size} bytes are set aside"

    return Scenario(name="the reserve", prepare=prepare, act=act, check=check)


NEXT = _generations("the next generation", (400, 800), 1200, keep=2)
FIRST = _generations("the first generation", (), 400, keep=2, leftovers=False)
KEEP_ONE = _generations("one is kept", (800,), 1200, keep=1, leftovers=False)
LINKED = _generations("a file that is shared", (400, 800), 1200, keep=2, commit=commit_shared)
AGAIN, COLLECT, DOCUMENT, RESERVE = _again(), _collect_only(), _document(), _reserve()
SCENARIOS = (NEXT, FIRST, KEEP_ONE, LINKED, AGAIN, COLLECT, DOCUMENT, RESERVE)
