"""Clones that begin with their parent's state, and what is left of those that never ran."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from generating import generate, planned, steps

from shoal.core.errors import SpecError
from shoal.core.event import TrialFinished
from shoal.core.spec import HyperParameters, TrialSpec
from shoal.execution.trial import Start
from shoal.launch.cloning import begin_warm, clear, refuse_idle
from shoal.launch.starts import restart
from shoal.observe import Database
from shoal.observe.snapshot import Snapshot
from shoal.runtime.saving import checkpoint


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

    with pytest.raises(SpecError, match="with --cold, which begins it anew"):
        begin_warm(tmp_path, 0, 3)


def test_a_parent_whose_state_was_let_go_of_is_told_so(tmp_path):
    ended = TrialFinished(
        time=1.0, trial=0, step=4, seconds=1.0, metrics={}, checkpoint="trials/0000/step-00000004"
    )
    with Database(tmp_path) as database:
        database.write([planned(0), ended, planned(1)])

    with pytest.raises(SpecError, match=r"trial 0 has no state.*was not kept \(keep_finished=\)"):
        begin_warm(tmp_path, 0, 3)
    with pytest.raises(SpecError, match=r"trial 1 has no state.*it has saved none yet"):
        begin_warm(tmp_path, 1, 3)


def test_a_clone_outlives_its_parents_generations(tmp_path):
    generate(tmp_path, 0, 4)
    begin_warm(tmp_path, 0, 3)
    shutil.rmtree(tmp_path / "trials" / "0000")

    newest = checkpoint.latest(tmp_path, 3)

    assert newest is not None
    newest.verify()


def test_a_clone_of_a_trial_that_is_done_is_told_what_to_type():
    parent = TrialSpec(number=0, hp=HyperParameters({"lr": 0.1, "net": "a"}), seed=0)
    clone = replace(parent, number=3, hp=HyperParameters({"lr": 1e-3, "net": "b c"}), parent=0)
    starts = {3: Start(step=4, warm=True)}

    refuse_idle([clone], starts, {3: 5}, [parent, clone], Path("runs/mine"))
    with pytest.raises(SpecError) as caught:
        refuse_idle([clone], starts, {3: 4}, [parent, clone], Path("runs/mine"))
    typed = "shoal clone runs/mine 0 --set lr=0.001 --set 'net=b c' --cold (in Python"
    assert typed in str(caught.value)
