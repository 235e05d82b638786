"""Where trials go on: what counts of what is on the disk, given what is on record."""

from __future__ import annotations

import shutil

import pytest
from generating import generate, steps

from shoal.core.errors import SpecError
from shoal.core.event import (
    CheckpointDamaged,
    CheckpointWritten,
    StepFinished,
    TrialFinished,
    TrialPlanned,
    TrialRestarted,
    TrialStopped,
)
from shoal.core.plan import Plan
from shoal.core.units import Seconds
from shoal.launch.cloning import begin_warm, clear
from shoal.launch.starts import (
    check_numerics,
    progress_of,
    refuse_numerics,
    remove_strays,
    restart,
)
from shoal.observe.snapshot import Snapshot
from shoal.runtime import checkpoint
from shoal.testing import make_device, make_job


def planned(trial: int = 0) -> TrialPlanned:
    return TrialPlanned(
        time=0.0,
        trial=trial,
        hp={},
        seed=0,
        technique="Resident",
        shards=1,
        steps=4,
        peak_bytes=0,
        numerics={},
    )


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


def test_weights_alone_are_no_full_state(tmp_path):
    generate(tmp_path, 0, 4, state=False, ended=True)
    snapshot = Snapshot.of([planned(), *stepped(4), ended(TrialFinished, 4)])

    assert not progress_of(tmp_path, snapshot, "steps")[0].has_full_state


# -- clones -----------------------------------------------------------------------------------


def test_a_warm_clone_begins_with_its_parents_state(tmp_path):
    generate(tmp_path, 0, 4, ended=True)

    start = begin_warm(tmp_path, 0, 3)

    assert (start.step, start.warm) == (4, True)
    what = restart(tmp_path, Snapshot.of([planned(3)]), [3], length=9, warm={3})
    assert what.starts[3].warm
    assert what.starts[3].restore == start.restore


def test_what_a_clone_that_never_ran_left_is_nobodys_start(tmp_path):
    generate(tmp_path, 0, 4)
    begin_warm(tmp_path, 0, 3)

    for snapshot in (Snapshot(), Snapshot.of([planned(3)])):
        what = restart(tmp_path, snapshot, [3], length=9)
        assert what.starts[3].step == 0
        assert [stray.step for stray in what.strays] == [4]
    clear(tmp_path, 3)
    assert steps(tmp_path, 3) == []


def test_a_second_clone_in_the_same_place_begins_with_its_own_parent(tmp_path):
    generate(tmp_path, 0, 9)
    generate(tmp_path, 1, 4)
    begin_warm(tmp_path, 0, 3)

    assert begin_warm(tmp_path, 1, 3).step == 4
    assert steps(tmp_path, 3) == [4]


@pytest.mark.parametrize("state", [None, False])
def test_a_parent_without_state_is_refused_with_the_way_out(tmp_path, state):
    if state is not None:
        generate(tmp_path, 0, 4, state=state)

    with pytest.raises(SpecError, match="Clone it cold"):
        begin_warm(tmp_path, 0, 3)


def test_a_clone_outlives_its_parents_generations(tmp_path):
    generate(tmp_path, 0, 4)
    begin_warm(tmp_path, 0, 3)
    shutil.rmtree(tmp_path / "trials" / "0000")

    newest = checkpoint.latest(tmp_path, 3)

    assert newest is not None
    newest.verify()


# -- the numerics key -------------------------------------------------------------------------


def key_of(**numerics) -> Plan:
    job = make_job(0, numerics=numerics)
    return Plan(
        study="s",
        devices=(make_device(),),
        jobs=(job,),
        active=1,
        seconds=Seconds(1.0),
        failures={},
    )


def test_other_software_or_devices_are_named_and_refused():
    changes = check_numerics(key_of(torch="3", threads=2), {0: {"torch": "2", "threads": 2}})

    assert changes == ["torch of trial 0 was '2' and is '3'"]
    with pytest.raises(SpecError, match="torch of trial 0 was '2' and is '3'") as error:
        refuse_numerics(changes)
    assert "--accept-numerics" in str(error.value)


def test_many_differences_are_shown_in_part():
    with pytest.raises(SpecError) as error:
        refuse_numerics([f"difference {n}" for n in range(9)])

    assert "difference 4; ..." in str(error.value)
    assert "difference 5" not in str(error.value)


def test_the_same_key_how_it_was_cut_and_new_trials_are_no_change():
    before = {0: {"torch": "2", "cut": "none"}}

    assert check_numerics(key_of(torch="2", cut="bitwise in the pilot"), before) == []
    assert check_numerics(key_of(torch="2", new="entry"), before) == []
    assert check_numerics(key_of(torch="9"), {}) == []
    refuse_numerics([])
