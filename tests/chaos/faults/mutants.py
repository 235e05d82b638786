"""shoal.storage with a mistake in it: the harness must catch each. ``python -m faults.mutants``.

Each names the scenario and the faults that show it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from faults import scenarios
from faults.enumeration import PythonInjector, enumerate_points
from faults.injector import Fault
from faults.scenarios import Scenario

from shoal.storage import documents, failures, files, generations
from shoal.storage.failures import reported
from shoal.storage.files import NewFile
from shoal.storage.generations import Draft, Generation, Generations

Patches = list[tuple[Any, str, Any]]


@dataclass(frozen=True)
class Mutant:
    """A mistake, and where it shows; ``patches`` are (place, name, what is there instead).

    It is in the process that meets the fault; ``in_next``: in the one that comes after.
    """

    name: str
    patches: Patches
    scenario: Scenario
    faults: tuple[Fault, ...]
    in_next: bool = False

    def inserted(self) -> Scenario:
        """The scenario with the mistake."""
        if self.in_next:
            return replace(self.scenario, check=_with(self.patches, self.scenario.check))
        return replace(self.scenario, act=_with(self.patches, self.scenario.act))


def _with(patches: Patches, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with mutated(patches):
            return function(*arguments)

    return call


@contextmanager
def mutated(patches: Patches) -> Iterator[None]:
    """The mistake is in the package inside."""
    before = [(place, name, getattr(place, name)) for place, name, _ in patches]
    for place, name, value in patches:
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)


def _write_once(descriptor: int, view: memoryview) -> None:
    with suppress(InterruptedError):
        files.os.write(descriptor, view)


def _leave(sync: Callable[[int], None]) -> Callable[..., None]:
    """An end of ``NewFile`` that syncs like this."""

    def leave(self: NewFile, kind: object, error: object, traceback: object) -> None:
        try:
            if error is None:
                with reported("sync", self.path):
                    sync(self._descriptor)
        finally:
            os.close(self._descriptor)

    return leave


def _sync_again(descriptor: int) -> None:
    try:
        files.os.fsync(descriptor)
    except OSError:
        files.os.fsync(descriptor)


def _sync_and_hope(descriptor: int) -> None:
    with suppress(OSError):
        files.os.fsync(descriptor)


def _begin_in_place(self: Draft, directory: Path, step: int, revision: int) -> None:
    name = f"step-{step:08d}" + (f".{revision}" if revision else "")
    self._target = Generation(step=step, revision=revision, path=directory / name)
    self._scratch, self._files, self._meta, self._is_open = directory / name, {}, {}, True
    files.make_new_directory(self._scratch)


def _publish_in_place(scratch: Path, target: Path) -> None:
    files.sync_directory(scratch)
    files.sync_directory(target.parent)


def _abandon_nothing(self: Draft) -> None:
    self._is_open = False


def _collect_then_publish(scratch: Path, target: Path) -> None:
    _remove_others(target)
    _publish(scratch, target)


def collect_then_sync(scratch: Path, target: Path) -> None:
    """Only a power failure shows this one."""
    files.sync_directory(scratch)
    files.rename(scratch, target)
    _remove_others(target)
    files.sync_directory(target.parent)


def _remove_others(target: Path) -> None:
    for path in sorted(target.parent.glob("step-*")):
        if path.suffix != ".tmp" and path != target:
            files.remove_tree(target.parent, path.name)


def _publish_without_return(scratch: Path, target: Path) -> None:
    files.sync_directory(scratch)
    files.rename(scratch, target)
    files.sync_directory(target.parent)


def _remove_under_its_name(self: Generations, path: Path) -> None:
    files.remove_tree(self.directory, path.name)


def _newest_by_name(self: Generations, on_damage: object = None, quick: bool = False) -> Any:
    return max(self.all(), default=None)


def _overwrite(path: Path, data: bytes) -> None:
    shutil.rmtree(path, ignore_errors=True)
    files.remove_file(path)
    files.write_file(path, data)


@contextmanager
def _unreported(action: str, path: Path, *, needed: int = 0) -> Iterator[None]:
    yield


_publish = files.publish
_NEVER = re.compile(r"(?!)")
_NO_DAMAGE: Callable[..., None] = lambda generation, *, quick: None  # noqa: E731

MUTANTS = (
    Mutant(
        "a short write is taken for a whole one",
        [(files, "_write_all", _write_once)],
        scenarios.NEXT,
        (Fault.SHORT,),
    ),
    Mutant(
        "an interrupted write is not repeated",
        [(files, "_write_all", _write_once)],
        scenarios.NEXT,
        (Fault.EINTR,),
    ),
    Mutant(
        "a failed sync is tried again",
        [(NewFile, "__exit__", _leave(_sync_again))],
        scenarios.NEXT,
        (Fault.LOST,),
    ),
    Mutant(
        "a failed sync is ignored",
        [(NewFile, "__exit__", _leave(_sync_and_hope))],
        scenarios.NEXT,
        (Fault.LOST,),
    ),
    Mutant(
        "a generation is written under its name",
        [
            (Draft, "__init__", _begin_in_place),
            (Draft, "abandon", _abandon_nothing),
            (files, "publish", _publish_in_place),
        ],
        scenarios.NEXT,
        (Fault.KILL,),
    ),
    Mutant(
        "older ones go before the new one has its name",
        [(files, "publish", _collect_then_publish)],
        scenarios.KEEP_ONE,
        (Fault.KILL,),
    ),
    Mutant(
        "what could not be made durable keeps its name",
        [(files, "publish", _publish_without_return)],
        scenarios.NEXT,
        (Fault.EIO,),
    ),
    Mutant(
        "a removal begins under the name",
        [(Generations, "_remove", _remove_under_its_name)],
        scenarios.NEXT,
        (Fault.KILL,),
    ),
    Mutant(
        "leftovers stay",
        [(generations, "_LEFTOVER", _NEVER)],
        scenarios.FIRST,
        (Fault.KILL,),
        in_next=True,
    ),
    Mutant(
        "damaged ones count when older ones go",
        [(generations, "_damage", _NO_DAMAGE)],
        scenarios.COLLECT,
        (Fault.KILL_AFTER,),
    ),
    Mutant(
        "the newest name is believed",
        [(Generations, "newest", _newest_by_name)],
        scenarios.AGAIN,
        (Fault.KILL,),
        in_next=True,
    ),
    Mutant(
        "a document is overwritten",
        [(documents, "replace_file", _overwrite)],
        scenarios.DOCUMENT,
        (Fault.KILL,),
    ),
    Mutant(
        "an OSError gets out",
        [(place, "reported", _unreported) for place in (files, failures, generations)],
        scenarios.NEXT,
        (Fault.EIO,),
    ),
)


def first_catch(mutant: Mutant) -> str:
    """What the harness says of a mutant; "" when it sees nothing wrong."""
    tally = enumerate_points(mutant.inserted(), PythonInjector(), mutant.faults, first_only=True)
    return next(iter(tally.violations), "")


def main() -> int:
    """Print each mutant and how it was caught, as JSON."""
    caught = {mutant.name: first_catch(mutant) for mutant in MUTANTS}
    sys.stdout.write(json.dumps(caught, indent=1) + "\n")
    return not all(caught.values())


if __name__ == "__main__":
    sys.exit(main())
