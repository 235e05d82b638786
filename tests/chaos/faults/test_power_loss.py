"""The plug is pulled between any two calls: what was promised is there."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from faults.injector import memory
from faults.mutants import collect_then_sync, mutated
from faults.recording import Recording, calls_of, collect_again, go_on, judge, record
from faults.scenarios import FIRST, KEEP_ONE, LINKED, NEXT

from shoal.storage import files
from shoal.storage.tensors import TensorFile

BOTH = ("posix", "ordered")


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory(dir=memory()) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def recordings(folder) -> dict[str, Recording]:
    """What is worth a look; two of them were killed where a sync was about to be made."""
    place = folder / "recorded"
    renamed = calls_of(KEEP_ONE, place).index("rename") + 1
    made = [n + 1 for n, call in enumerate(calls_of(FIRST, place)) if call == "mkdir"][:2]
    found = (
        record("next", NEXT, place, ["800", "1200"]),
        record("linked", LINKED, place, ["800", "1200"]),
        record("first", FIRST, place, ["-1", "400"]),
        record("collected", KEEP_ONE, place, ["800", "1200"], collect_again, kill_at=renamed),
        *(
            record(f"begun again at {point}", FIRST, place, ["-1", "1600"], go_on, kill_at=point)
            for point in made
        ),
    )
    return {recording.name: recording for recording in found}


@pytest.mark.parametrize("model", BOTH)
def test_a_power_failure_takes_nothing_that_was_promised(recordings, folder, model):
    for recording in recordings.values():
        count, wrong = judge(recording, model, folder / "state")
        assert wrong == [], recording.name
        assert count > 20


def test_each_sync_is_needed_in_one_of_the_recordings(recordings, folder):
    needed: dict[str, bool] = {}
    for recording in reversed(recordings.values()):  # the short ones first
        for number, who in recording.syncs().items():
            if not needed.get(who):
                mutant = recording.without(number)
                _, wrong = judge(mutant, "posix", folder / "state", first_only=True)
                needed[who] = bool(wrong)

    assert [who for who, is_needed in needed.items() if not is_needed] == []
    assert needed.keys() == {
        "Generations.collect of trials/N",
        "NewFile.__exit__ of trials/N/step-N.tmp/manifest.json",
        "NewFile.__exit__ of trials/N/step-N.tmp/state.safetensors",
        "NewFile.__exit__ of trials/N/step-N.tmp/weights.safetensors",
        "_sync_name of the study",
        "_sync_name of trials",
        "make_directory of the study",
        "make_directory of trials",
        "publish of trials/N",
        "publish of trials/N/step-N.tmp",
    }


def test_the_model_sees_when_older_ones_go_before_the_sync(folder):
    with mutated([(files, "publish", collect_then_sync)]):
        recording = record("mutant", KEEP_ONE, folder / "recorded", ["800", "1200"])

    assert judge(recording, "posix", folder / "state", first_only=True)[1]


def test_the_model_sees_when_digests_are_not_compared(recordings, folder):
    unsynced = recordings["first"]
    number = next(n for n, who in unsynced.syncs().items() if "weights" in who)
    patches = [(TensorFile, name, lambda *_: None) for name in ("_check_tensor", "verify")]
    with mutated(patches):
        _, wrong = judge(unsynced.without(number), "posix", folder / "state")

    assert any("-2" in line for line in wrong)  # wrong bytes were taken for good


def test_promises_that_were_not_kept_would_be_seen(recordings, folder):
    early = [("say", "1200"), *recordings["next"].trace]
    _, wrong = judge(replace(recordings["next"], trace=early), "ordered", folder / "state")

    assert wrong


@pytest.mark.full
@pytest.mark.parametrize("scenario", [FIRST, KEEP_ONE], ids=lambda s: s.name)
def test_a_process_killed_anywhere_and_then_a_power_failure(folder, scenario):
    order = ["-1", "400", "1600"] if scenario is FIRST else ["800", "1200", "1600"]
    count = 0
    for point in range(1, len(calls_of(scenario, folder / "recorded")) + 1):
        recording = record("killed", scenario, folder / "recorded", order, go_on, kill_at=point)
        for model in BOTH:
            states, wrong = judge(recording, model, folder / "state")
            assert wrong == [], point
            count += states

    assert count > 1000
