"""The generations of a trial equal a dict of what was committed and not damaged since."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shoal.core.errors import StorageError
from shoal.storage.generations import Generation, Generations

KEEP = 2
STEPS = st.sampled_from([0, 5, 10, 15, 20])
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
Key = tuple[int, int]


class GenerationsAgainstDict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir=MEMORY)
        self.generations = Generations(Path(self.folder.name) / "trials/0000", KEEP)
        self.good: dict[Key, bytes] = {}
        self.damaged: set[Key] = set()
        self.draft = None
        self.drafted: tuple[Key, bytes] = ((0, 0), b"")

    def teardown(self) -> None:
        self.folder.cleanup()

    @rule(step=STEPS, data=st.binary(max_size=20))
    def begin(self, step: int, data: bytes) -> None:
        """An earlier draft was left by a crash: it goes."""
        self.draft = self.generations.begin(step)
        used = [revision for found, revision in self.good.keys() | self.damaged if found == step]
        self.drafted = (step, max(used, default=-1) + 1), data
        assert [path.suffix for path in self.generations.directory.glob("*.tmp")] == [".tmp"]

    @precondition(lambda self: self.draft)
    @rule()
    def commit(self) -> None:
        name, data = self.drafted
        self.draft.tensors("weights.safetensors", [("w", "U8", (len(data),), data)])
        done = self.draft.commit(first=list(data[:1]), size=len(data))
        assert key(done) == name
        self.good[name] = data
        self.draft = None

    @precondition(lambda self: self.draft)
    @rule()
    def abandon(self) -> None:
        self.draft.abandon()
        try:
            self.draft.commit()
        except StorageError:
            self.draft = None

    @precondition(lambda self: self.draft)
    @rule()
    def crash(self) -> None:
        """The process is gone; what it wrote stays."""
        self.draft.tensors("weights.safetensors", [("w", "U8", (1,), b"x")])
        self.draft = None

    @precondition(lambda self: self.good)
    @rule(data=st.data(), how=st.sampled_from(["flip", "cut", "lose", "lose the manifest"]))
    def damage(self, data: st.DataObject, how: str) -> None:
        chosen = data.draw(st.sampled_from(sorted(self.good)))
        (path,) = (g.path for g in self.generations.all() if key(g) == chosen)
        is_manifest = how == "lose the manifest" or data.draw(st.booleans())
        spoil(path / ("manifest.json" if is_manifest else "weights.safetensors"), how)
        del self.good[chosen]
        self.damaged.add(chosen)

    @rule()
    def collect(self) -> None:
        """As many as are to be kept stay: those that verify by manifest and size."""
        before = {key(generation) for generation in self.generations.all()}
        sound = sorted(k for k in before if self.is_sound(k))
        removed = before - self.present_after_collect()
        expected = {k for k in before if len(sound) >= KEEP and k < sound[-KEEP]}
        assert removed == expected
        self.good = {k: v for k, v in self.good.items() if k not in removed}
        self.damaged -= removed

    def present_after_collect(self) -> set[Key]:
        self.generations.collect()
        return {key(generation) for generation in self.generations.all()}

    def is_sound(self, chosen: Key) -> bool:
        (found,) = (g for g in self.generations.all() if key(g) == chosen)
        try:
            found.verify(quick=True)
        except StorageError:
            return False
        return True

    @invariant()
    def the_newest_is_the_newest_good_one(self) -> None:
        reports: list[Path] = []
        found = self.generations.newest(lambda path, _: reports.append(path))
        expected = max(self.good, default=None)
        assert (found and key(found)) == expected
        later = [k for k in self.damaged if expected is None or k > expected]
        assert len(reports) == len(later)
        if found:
            with found.open("weights.safetensors") as file:
                data = bytes(file.read("w"))
            assert data == self.good[expected]
            assert found.manifest.meta == {"size": len(data), "first": list(data[:1])}

    @invariant()
    def all_are_there_in_order(self) -> None:
        assert [key(g) for g in self.generations.all()] == sorted(self.good.keys() | self.damaged)


def key(generation: Generation) -> Key:
    return generation.step, generation.revision


def spoil(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how.startswith("lose"):
        path.unlink()
    elif how == "cut":
        path.write_bytes(data[:-1])
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


TestGenerationsAgainstDict = GenerationsAgainstDict.TestCase
TestGenerationsAgainstDict.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None
)
