"""Where trials go on: what counts of what is on the disk, given what is on record."""

from __future__ import annotations

import shutil

import pytest
from generating import generate, planned, steps

from shoal.core.event import (
    CheckpointDamaged,
    CheckpointWritten,
    StepFinished,
    TrialFinished,
    TrialRestarted,
    TrialStopped,
)
from shoal.launch.starts import (
    progress_of,
    remove_strays,
    restart,
)
from shoal.observe.snapshot import Snapshot
from shoal.runtime.saving import checkpoint


def stepped(last: int, first: int = 1, epoch: int = 1) -> list[StepFinished]:
    return [
        StepFinished(
            time=float(n), trial=0, step=n, epoch=epoch, loss=1.0, seconds=1.0, device="cpu:0"
        )
        for n in range(first, last + 1)
    ]


def saved(step: int, name: str = "") -> CheckpointWritten:
    path = f"trials/0000/{name or f'step-{step:08d}'}"
    return CheckpointWritten(time=0.0, trial=0, step=step, path=path, bytes=1, seconds=0.1)


def ended(kind, step: int, checkpoint: str = ""):
    more = {"reason": "by hand"} if kind is TrialStopped else {}
    return kind(
        time=0.0, trial=0, step=step, metrics={}, checkpoint=checkpoint, seconds=1.0, **more
    )


def found(study, *events, length=4, trials=(0,), **options):
    snapshot = Snapshot.of([planned(), *events])
    return restart(study, snapshot, trials, length=length, **options)


# -- what counts ------------------------------------------------------------------------------


def test_a_trial_goes_on_from_its_newest_generation_on_record(tmp_path):
    generate(tmp_path, 0, 2)
    newest = generate(tmp_path, 0, 4)

    what = found(tmp_path, *stepped(4), saved(2), saved(4))

    assert (what.starts[0].step, what.starts[0].restore) == (4, str(newest.path))
    assert what.starts[0].has_run
    assert [type(event) for event in what.happened] == [TrialRestarted]
    assert not what.strays


def test_a_generation_whose_steps_the_record_lacks_does_not_count(tmp_path):
    """Killed between the rename and the commit: the step after the last is done again."""
    generate(tmp_path, 0, 2)
    late = generate(tmp_path, 0, 4)

    what = found(tmp_path, *stepped(3), saved(2))

    assert what.starts[0].step == 2
    assert what.strays == [late]
    remove_strays(what.strays)
    assert steps(tmp_path, 0) == [2]


def test_a_generation_counts_without_a_word_once_a_later_step_is_on_record(tmp_path):
    generate(tmp_path, 0, 2)
    generate(tmp_path, 0, 4)

    assert found(tmp_path, *stepped(5), saved(2)).starts[0].step == 4


def test_a_first_generation_that_does_not_count_means_to_begin_anew(tmp_path):
    late = generate(tmp_path, 0, 4)

    what = found(tmp_path, *stepped(3))

    assert (what.starts[0].step, what.starts[0].restore) == (0, "")
    assert what.strays == [late]


def test_with_the_ones_on_record_gone_the_newest_there_is_counts(tmp_path):
    generate(tmp_path, 0, 4)  # keep=1: the one of step 2 was collected already

    what = found(tmp_path, *stepped(3), saved(2))

    assert what.starts[0].step == 4
    assert not what.strays


def test_without_a_database_generations_are_what_there_is(tmp_path):
    generate(tmp_path, 0, 4)

    what = restart(tmp_path, Snapshot(), [0], length=9)

    assert what.starts[0].step == 4
    assert not what.strays


def test_an_old_copy_of_the_database_throws_no_training_away(tmp_path):
    generate(tmp_path, 0, 5000)

    assert found(tmp_path, *stepped(3)).starts[0].step == 5000


def test_after_a_fallback_the_generations_of_the_first_try_are_strays_no_more(tmp_path):
    generate(tmp_path, 0, 2)
    generate(tmp_path, 0, 4)
    generate(tmp_path, 0, 4)  # a second name: the first try was left in place

    what = found(tmp_path, *stepped(4), saved(2), saved(4, "step-00000004.1"))

    assert what.starts[0].restore.endswith("step-00000004.1")


def test_a_damaged_generation_is_told_and_the_one_before_is_used(tmp_path):
    generate(tmp_path, 0, 2)
    bad = generate(tmp_path, 0, 4)
    (bad.path / "manifest.json").write_text("{}")

    what = found(tmp_path, *stepped(4), saved(2), saved(4))

    assert what.starts[0].step == 2
    assert [type(event) for event in what.happened] == [CheckpointDamaged, TrialRestarted]
    assert bad.path.exists(), "it stays for whoever wants to look"


def test_a_trial_that_never_ran_begins_without_a_word(tmp_path):
    what = found(tmp_path, trials=(0, 1))

    assert not what.starts[0].has_run
    assert not what.happened


# -- the end ----------------------------------------------------------------------------------


def test_a_last_generation_without_its_event_is_a_finished_trial(tmp_path):
    generate(tmp_path, 0, 4, ended=True, metrics={"valid_loss": 0.5})

    what = found(tmp_path, *stepped(4), saved(4))

    assert not what.starts
    (event,) = what.finished
    assert (event.step, event.metrics) == (4, {"valid_loss": 0.5})
    assert event.checkpoint == "trials/0000/step-00000004"


def test_a_last_generation_that_is_not_on_record_is_done_again(tmp_path):
    generate(tmp_path, 0, 2)
    generate(tmp_path, 0, 4, ended=True)

    what = found(tmp_path, *stepped(3), saved(2))

    assert not what.finished
    assert what.starts[0].step == 2


def test_the_end_of_a_shorter_study_is_no_end(tmp_path):
    """Extended from 4 to 8, and killed before the first step of the rest."""
    generate(tmp_path, 0, 4, ended=True, length=4)

    what = found(tmp_path, *stepped(4), ended(TrialFinished, 4), planned(), saved(4), length=8)

    assert not what.finished
    assert what.starts[0].step == 4


@pytest.mark.parametrize("kind", [TrialFinished, TrialStopped])
def test_an_ended_trial_was_to_train_as_long_as_its_generation_says(tmp_path, kind):
    """The study's record may be longer by now, if a kill came when it had just been written."""
    generate(tmp_path, 0, 4, ended=True, length=4)
    snapshot = Snapshot.of([planned(), *stepped(4), ended(kind, 4)])

    progress = progress_of(tmp_path, snapshot, "steps")[0]

    assert progress.target == 4
    assert progress.has_full_state


def test_a_finished_trial_without_generations_was_to_train_as_long_as_it_did(tmp_path):
    snapshot = Snapshot.of([planned(), *stepped(4, epoch=2), ended(TrialFinished, 4)])

    assert progress_of(tmp_path, snapshot, "steps")[0].target == 4
    assert progress_of(tmp_path, snapshot, "epochs")[0].target == 2
    assert not progress_of(tmp_path, snapshot, "epochs")[0].has_full_state


def test_a_trial_that_the_database_lost_has_the_steps_of_its_own_generations(tmp_path):
    generate(tmp_path, 0, 4, ended=True, length=2)
    generate(tmp_path, 1, 3, batches=4, numerics={"accumulate": 2})
    generate(tmp_path, 4, 4, state=False, ended=True, length=2)
    trials = checkpoint.generations(tmp_path, 0).directory.parent
    shutil.copytree(trials / "0000", trials / "0002")  # a clone's first state is another's

    progress = progress_of(tmp_path, Snapshot(), "epochs", range(5))

    assert [progress[n].step for n in range(5)] == [4, 3, 0, 0, 4]
    assert [progress[n].epoch for n in range(5)] == [2, 2, 0, 0, 2]
    assert [progress[n].has_full_state for n in range(5)] == [True, True, True, True, False]
    assert [progress[n].target for n in range(5)] == [2, None, None, None, 2]


def test_weights_alone_are_no_full_state(tmp_path):
    generate(tmp_path, 0, 4, state=False, ended=True)
    snapshot = Snapshot.of([planned(), *stepped(4), ended(TrialFinished, 4)])

    assert not progress_of(tmp_path, snapshot, "steps")[0].has_full_state
