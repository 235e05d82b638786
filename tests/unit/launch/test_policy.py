"""What the disk has to hold, and what is refused before anything is trained."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

import pytest
from generating import generate

from shoal.core.errors import PlanError, SpecError
from shoal.core.plan import Plan
from shoal.core.units import Bytes, Seconds
from shoal.launch.policy import (
    Beside,
    CheckpointPolicy,
    as_saved_in,
    bytes_on_disk,
    shared_on_disk,
)
from shoal.runtime.saving import checkpoint
from shoal.storage.manifest import APART
from shoal.storage.shared import likeness
from shoal.testing import make_device, make_job, make_shard

MIB = 2**20


def policy(**changes) -> CheckpointPolicy:
    values = {"every_s": Seconds(300), "keep": 2, "keep_finished": "all", "disk_budget": None}
    return CheckpointPolicy(**(values | changes))


def plan(trials: int = 4, *, active: int = 1, devices: int = 1) -> Plan:
    """Trials of 1 MiB of weights and 2 MiB of state."""
    return Plan(
        study="s",
        devices=tuple(make_device(f"cpu:{n}") for n in range(devices)),
        jobs=tuple(make_job(n, [make_shard(0, MIB)]) for n in range(trials)),
        active=active,
        seconds=Seconds(1.0),
        failures={},
    )


def generation(job) -> int:
    return policy(keep_finished="best:1", keep=1).finished_bytes(
        Plan(
            study="s",
            devices=(make_device(),),
            jobs=(job,),
            active=1,
            seconds=Seconds(1.0),
            failures={},
        )
    )


ONE = generation(plan().jobs[0])


def test_a_generation_is_weights_and_state():
    assert 3 * MIB < ONE < 3.2 * MIB


@pytest.mark.parametrize(("devices", "active", "at_once"), [(1, 1, 1), (2, 1, 2), (2, 2, 4)])
def test_trials_that_train_have_what_is_kept_and_one_that_is_being_written(
    devices, active, at_once
):
    assert (
        policy(keep=2).running_bytes(plan(9, active=active, devices=devices)) == 3 * at_once * ONE
    )
    assert (
        policy(keep=5).running_bytes(plan(9, active=active, devices=devices)) == 6 * at_once * ONE
    )
    assert (  # the one on record stays until the newest is
        policy(keep=1).running_bytes(plan(9, active=active, devices=devices)) == 3 * at_once * ONE
    )


def test_finished_trials_have_what_keep_finished_says():
    assert policy(keep=2).finished_bytes(plan(4)) == 8 * ONE
    assert policy(keep=1).finished_bytes(plan(4)) == 4 * ONE
    assert policy(keep_finished="best:3").finished_bytes(plan(4)) == 6 * ONE
    assert policy(keep_finished="best:9").finished_bytes(plan(4)) == 8 * ONE
    with pytest.raises(SpecError, match="Use keep_finished='all' or 'weights'"):
        policy(keep_finished="best:3", keep_best=True)
    assert policy(keep=1, keep_best=True).finished_bytes(plan(4)) == 8 * ONE
    assert 4 * MIB < policy(keep_finished="weights").finished_bytes(plan(4)) < 5 * MIB


def with_base(plan, *digests, size=MIB // 2):
    """Half of each trial's weights frozen; of trials with the same digest, to the same bits."""
    pairs = zip(plan.jobs, digests, strict=True)
    jobs = tuple(replace(job, frozen_bytes=Bytes(size), frozen=digest) for job, digest in pairs)
    return replace(plan, jobs=jobs)


def test_what_a_trials_generations_share_counts_twice_and_where_one_is_kept_once():
    base = MIB // 2
    own = with_base(plan(4), "", "a", "b", "c")  # of the first nobody knows
    assert policy(keep=3).running_bytes(own) == 4 * (ONE - base) + 2 * base
    assert policy(keep=3).finished_bytes(own) == 4 * (3 * (ONE - base) + 2 * base)
    assert policy(keep=1).finished_bytes(own) == 4 * ONE
    assert policy(keep=1).running_bytes(own) == 3 * (ONE - base) + base
    weights = policy(keep_finished="weights")
    assert weights.finished_bytes(own) == weights.finished_bytes(plan(4))


def test_what_all_trials_share_counts_twice_in_all():
    base = MIB // 2
    shared = with_base(plan(4), "a", "a", "a", "a")
    assert policy().running_bytes(shared) == 3 * (ONE - base)
    assert policy().finished_bytes(shared) == 8 * (ONE - base) + 2 * base
    assert policy(keep=1).finished_bytes(shared) == 4 * (ONE - base) + base
    assert policy(keep_finished="best:1").finished_bytes(shared) == 2 * (ONE - base) + 2 * base
    weights = policy(keep_finished="weights").finished_bytes(plan(4))
    assert policy(keep_finished="weights").finished_bytes(shared) == weights - 4 * base + 2 * base
    two = with_base(plan(4), "a", "a", "b", "b")
    assert policy().finished_bytes(two) == 8 * (ONE - base) + 4 * base


def test_trials_to_come_have_the_base_that_several_have_and_else_one_each():
    base, later = MIB // 2, Beside(to_come=4)
    shared, own = with_base(plan(2), "a", "a"), with_base(plan(2), "a", "b")
    assert policy().finished_bytes(shared, later) == 12 * (ONE - base) + 2 * base
    assert policy().finished_bytes(own, later) == 6 * (2 * (ONE - base) + 2 * base)


def test_without_links_nothing_is_shared(tmp_path, monkeypatch):
    shared = with_base(plan(2), "a", "a")
    assert as_saved_in(tmp_path, shared) == shared

    def link(*_, **__):
        raise OSError(errno.EPERM, "no")

    monkeypatch.setattr(os, "link", link)
    assert as_saved_in(tmp_path, shared) == plan(2)
    assert list(tmp_path.iterdir()) == []


def test_files_that_several_generations_have_count_once(tmp_path):
    for trial in (0, 1):
        place = tmp_path / "trials" / f"{trial:04d}" / "step-00000001"
        place.mkdir(parents=True)
        (place / "weights.safetensors").write_bytes(bytes(10))
    (tmp_path / "base").write_bytes(bytes(100))
    for trial in (0, 1):
        os.link(
            tmp_path / "base",
            tmp_path / "trials" / f"{trial:04d}" / "step-00000001" / "frozen.safetensors",
        )
    assert bytes_on_disk(tmp_path, [0, 1]) == 120
    seen = set()
    assert [bytes_on_disk(tmp_path, [n], seen=seen) for n in (0, 1)] == [110, 10]


def test_of_a_base_that_earlier_trials_have_so_many_files_are_shared_as_one_needs(tmp_path):
    """The others, of a study that was copied without its links, are these trials' own."""
    rows = [("base", "F32", (4,), bytes(16))]
    for trial in range(3):
        with checkpoint.generations(tmp_path, trial).begin(1) as draft:
            record = draft.tensors(APART, rows)
            draft.commit()
    shared = with_base(plan(2), likeness(record.header, record.tensors), "another")
    for copies in (1, 2):
        seen = set()
        found = shared_on_disk(tmp_path, range(3), shared, copies, seen)
        assert found == {shared.jobs[0].frozen: copies * record.bytes}
        assert len(seen) == copies
    assert shared_on_disk(tmp_path, range(3), plan(2), 2, set()) == {}


def test_trials_that_a_search_will_ask_for_count_as_if_they_were_like_the_others():
    later = Beside(to_come=6)

    for kind in ("all", "weights", "best:3"):
        keeps = policy(keep_finished=kind)
        assert keeps.finished_bytes(plan(4), later) == keeps.finished_bytes(plan(10))
        assert keeps.running_bytes(plan(4, devices=5), later) == 15 * ONE


def test_trials_that_wait_for_each_other_have_what_is_kept_until_they_end():
    weights = policy(keep_finished="weights").finished_bytes(plan(1))

    for waiting in (4, None):
        beside = Beside(waiting=waiting)
        assert policy(keep_finished="best:1").running_bytes(plan(4), beside) == (3 + 3 * 2) * ONE
        of_weights = policy(keep_finished="weights").running_bytes(plan(4), beside)
        assert of_weights == (3 + 3 * 2) * ONE - 3 * weights
        assert policy().running_bytes(plan(4), beside) == 3 * ONE
    some = Beside(waiting=3)
    assert policy(keep_finished="best:1").running_bytes(plan(9), some) == (3 + 2 * 2) * ONE
    assert "while trials train, and 2 wait for others" in policy().explain(plan(9), some)


def test_the_best_of_earlier_runs_are_among_the_best():
    best, all_ = policy(keep_finished="best:2"), policy()
    ended = Beside(ended=(Bytes(2 * ONE), Bytes(2 * ONE)))

    assert best.finished_bytes(plan(4), ended) == best.finished_bytes(plan(4))
    assert all_.finished_bytes(plan(4), ended) == all_.finished_bytes(plan(6))
    needed = Bytes(best.running_bytes(plan()) + best.finished_bytes(plan()))
    policy(keep_finished="best:2", disk_budget=needed).check(plan(), needed, beside=ended)
    best.check(plan(), Bytes(needed - 4 * ONE), beside=ended)  # theirs are not free


def test_what_fits_is_not_refused():
    needed = policy().running_bytes(plan()) + policy().finished_bytes(plan())

    policy().check(plan(), Bytes(needed))
    policy(disk_budget=Bytes(needed)).check(plan(), Bytes(needed))


def test_a_plan_that_the_disk_cannot_hold_is_refused_with_the_numbers():
    with pytest.raises(PlanError) as error:
        policy().check(plan(), Bytes(9 * MIB))

    words = str(error.value)
    assert "9.0 MiB are free" in words
    assert "keep=2" in words
    assert "keep_finished='all'" in words
    assert "'best:3'" in words


def test_what_a_run_keeps_for_the_end_is_not_for_checkpoints():
    needed = policy().running_bytes(plan()) + policy().finished_bytes(plan())
    reserve = Bytes(MIB)

    policy().check(plan(), Bytes(needed + MIB), reserve=reserve)
    with pytest.raises(PlanError, match=r"of which a run keeps 1\.0 MiB to end well on a full"):
        policy().check(plan(), Bytes(needed + MIB - 1), reserve=reserve)


def test_a_plan_over_the_budget_is_refused_though_the_disk_has_room():
    with pytest.raises(PlanError, match=r"5\.0 MiB disk_budget allows"):
        policy(disk_budget=Bytes(5 * MIB)).check(plan(), Bytes(2**40))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, "Keep less with keep_finished='weights' or keep_finished='best:3', train fewer"),
        ({"keep_finished": "weights"}, "Keep less with keep_finished='best:3', train fewer"),
        ({"keep_finished": "best:2"}, "Keep less with fewer than 2 of the best, train fewer"),
        ({"keep_finished": "best:1"}, "disk_budget allows. Train fewer"),
        ({"keep_finished": "weights", "keep_best": True}, "Keep less with keep_best=False, train"),
    ],
)
def test_what_would_keep_less_is_neither_asked_for_already_nor_refused_beside_it(asked, words):
    with pytest.raises(PlanError) as refused:
        policy(disk_budget=Bytes(1), **asked).check(plan(), Bytes(10**9))
    assert words in str(refused.value)


def test_what_the_trials_have_on_disk_already_is_not_asked_for_again():
    needed = policy().running_bytes(plan()) + policy().finished_bytes(plan())

    policy().check(plan(), Bytes(needed - 5 * MIB), theirs=Bytes(5 * MIB))
    with pytest.raises(PlanError):
        policy().check(plan(), Bytes(needed - 5 * MIB), theirs=Bytes(4 * MIB))


def test_what_other_trials_have_counts_against_the_budget():
    needed = policy().running_bytes(plan()) + policy().finished_bytes(plan())
    tight = policy(disk_budget=Bytes(needed + 5 * MIB))

    tight.check(plan(), Bytes(2**40), others=Bytes(5 * MIB))
    with pytest.raises(PlanError, match="disk_budget allows"):
        tight.check(plan(), Bytes(2**40), others=Bytes(6 * MIB))


def test_bytes_on_disk_are_those_of_the_trials_asked_for(tmp_path):
    for trial in (0, 1):
        generate(tmp_path, trial, 5)
    (tmp_path / "trials/0000/log.txt").write_text("x" * 10**6)

    one = bytes_on_disk(tmp_path, [0])

    assert 0 < one < 10**5
    assert bytes_on_disk(tmp_path, [0, 1, 7]) == 2 * one
    generate(tmp_path, 0, 6)
    assert bytes_on_disk(tmp_path, [0], newest=1) == one
    assert bytes_on_disk(tmp_path, [0]) == 2 * one


@pytest.mark.parametrize("keep", [0, -1, 2.0, "2", True, None])
def test_a_study_keeps_at_least_one_generation(keep):
    with pytest.raises(SpecError, match="from 1, got"):
        policy(keep=keep)


@pytest.mark.parametrize("value", ["best", "best:0", "best:-1", "best:x", "none", "", None, 3])
def test_keep_finished_is_one_of_three(value):
    with pytest.raises(SpecError, match="'all', 'weights' or 'best:N'"):
        policy(keep_finished=value)


def test_the_record_has_plain_values():
    assert policy(keep_finished="best:3", disk_budget=Bytes(7)).record() == {
        "checkpoint_every_s": 300.0,
        "keep": 2,
        "keep_finished": "best:3",
        "disk_budget": 7,
    }


def test_the_plan_says_what_the_disk_will_hold():
    words = policy(keep_finished="weights").explain(plan())

    assert "while trials train" in words
    assert "keep_finished='weights'" in words
