"""Losses and clipping that take a trial's hyperparameters: alone, in shards, stages and arrays."""

from __future__ import annotations

import itertools
import re

import pytest
import searched
import squads
import torch
import twins
from searched import SLOTS, SPACE, STEPS

import shoal
from shoal.core.errors import SpecError
from shoal.core.plan import Plan
from shoal.core.spec import HyperParameters
from shoal.fusion import Array, Member, backend_of, dry_run
from shoal.fusion.declined import Declined
from shoal.fusion.graphs.compiled import compiler
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.pipeline.run import run_stages
from shoal.recipes.optimizers import build_optimizer
from shoal.recipes.recipe import build_model
from shoal.rng import capture_rng, seed_all
from shoal.testing import array_loop, assert_same, compare, plain_loop
from shoal.verify import read_losses, verify_trials

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
WAYS = {
    "resident": "resident",
    "captured": "captured",
    "host": shoal.Spilled(shards=3, optimizer="host"),
    "device": shoal.Spilled(shards=3, optimizer="device"),
    "kept": shoal.Spilled(shards=3, optimizer="device", keep=(1,), keep_weights=(0,)),
    "by shard": shoal.Spilled(shards=2, optimizer="host", order="shard"),
}


def rows(report):
    return Snapshot.of(read_outline(report.directory)).trials


def explained(report) -> str:
    return Plan.from_json((report.directory / "plan.json").read_text()).explain()


# -- alone --------------------------------------------------------------------------------


def test_the_trials_of_these_tests_cannot_be_taken_for_each_other():
    """With another's smoothing, weight or clipping a trial would end elsewhere by far."""
    points = searched.points_of(SLOTS, wide=True)
    for point in points:
        mine = searched.by_hand(point, 3)[0]
        for other, name in itertools.product(points, ("smoothing", "weight", "clip")):
            if other is not point:
                theirs = searched.by_hand({**point, name: other[name]}, 3)[0]
                assert searched.furthest(mine, theirs) > 1e-5, (point, name)


@pytest.mark.parametrize("point", searched.points_of(SLOTS), ids=str)
def test_the_plain_loop_does_what_anyone_would_write(point):
    net, losses, metrics = searched.by_hand(point, 7)
    plain = plain_loop(searched.recipe(), point, 7, steps=STEPS)
    assert list(plain.losses) == losses
    assert searched.furthest(net, plain.model) == 0.0
    assert {name: plain.metrics[name] for name in metrics} == metrics


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", WAYS)
def test_a_search_over_smoothing_and_clipping_ends_on_the_bits_of_the_loop(way, run_study):
    """Trials that are clipped beside others that are not."""
    recipe, draws = searched.recipe(), way != "by shard"  # in another order there
    space = SPACE | shoal.grid(drop=[0.1 * draws])
    report = run_study(recipe, space, steps=STEPS, technique=WAYS[way], poison=True)
    assert len(report.trials) == 4
    searched.assert_by_hand(report)
    verdicts = list(verify_trials(report.directory, rows(report), recipe=recipe))
    assert [verdict.equal for verdict in verdicts] == [True] * 4


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "technique",
    [
        shoal.Pipelined(schedule="flush", stages=2),
        shoal.Pipelined(schedule="gpipe", stages=2, recompute=True),
        shoal.Pipelined(stages=2, shards=4, optimizer="host", keep=(), lookahead=1),
    ],
    ids=str,
)
def test_stages_clip_by_the_trials_own_norm(technique, run_study):
    report = run_study(searched.recipe(), SPACE, steps=STEPS, technique=technique, devices=2)
    searched.assert_by_hand(report)


@pytest.mark.parametrize("point", searched.points_of(SLOTS[:2]), ids=str)
@pytest.mark.parametrize("width", [1, 2])
def test_stages_without_a_study_are_told_too(point, width, stage_processes):
    recipe, shape = searched.recipe(), {"steps": 3, "stages": 2, "width": width}
    trained = run_stages(recipe, point, 3, processes=stage_processes, hang_s=60, **shape)
    plain = plain_loop(recipe, point, 3, steps=3, copies=width)
    found = compare(plain, trained.state, losses=trained.losses)
    assert found.equal, found.first_difference


@pytest.mark.sample(1)
@pytest.mark.parametrize("shard", [False, True])
def test_replicas_clip_by_the_trials_own_norm(shard, run_study):
    technique = shoal.DataParallel(width=2, shard=shard)
    recipe = searched.recipe(splittable=True)
    report = run_study(recipe, SPACE, steps=STEPS, technique=technique, devices=2)
    twins.assert_replicated(report, recipe, technique, steps=STEPS)


def test_a_loss_by_rows_reads_them_too(run_study, assert_alone):
    recipe = searched.recipe(loss_rows=2)
    space = shoal.grid(
        lr=[1e-2], smoothing=[0.0, 0.3], weight=[0.5], clip=[0.2], drop=[0.1], note=["a"]
    )
    report = run_study(recipe, space, steps=STEPS, technique=WAYS["host"])
    assert_alone(report, report.trials, recipe, steps=STEPS)


def test_a_study_that_goes_on_has_the_same_loss(tmp_path, warm_workers):
    recipe, options = searched.recipe(), {"space": SPACE, "directory": tmp_path}
    shown = {"progress": False, "timeline": False, "workers": warm_workers}
    hardware = shoal.Hardware.virtual(devices=1, memory="64MiB")
    shoal.Study("k", recipe, steps=STEPS - 3, **options).run(hardware=hardware, **shown)
    study = shoal.Study("k", recipe, steps=STEPS, **options)
    searched.assert_by_hand(study.run(hardware=hardware, **shown))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("fuse", [None, 4])
def test_a_population_that_changes_them_is_what_plain_loops_do(fuse, tmp_path, warm_workers):
    recipe = searched.recipe()
    space = {
        "lr": 1e-2,
        "smoothing": shoal.uniform(0.0, 0.4),
        "weight": shoal.uniform(0.1, 1.0),
        "clip": shoal.uniform(0.05, 0.5),
        "drop": 0.1,
        "note": "a",
    }
    pruner = shoal.PBT(quantile=0.5, vary=("smoothing", "weight", "clip"))
    loop = {"steps": 8, "eval_every": 2, "trials": 4, "directory": tmp_path}
    study = shoal.Study("k", recipe, space=space, pruner=pruner, **loop)
    shown = {"progress": False, "timeline": False, "workers": warm_workers}
    report = study.run(
        hardware=shoal.Hardware.virtual(devices=1, memory="64MiB"), fuse=fuse, **shown
    )
    assert sum(len(trial.inherited) for trial in report.trials) >= 2
    assert squads.widths(report) == [fuse or 1] * 4
    verdicts = list(verify_trials(report.directory, rows(report), recipe=recipe))
    assert [verdict.equal for verdict in verdicts] == [True] * 4


# -- arrays by hand -----------------------------------------------------------------------


def member(recipe, hp, seed=3):
    hp = HyperParameters(hp)
    seed_all(seed)
    model = build_model(recipe, hp)
    model.train()
    optimizer = build_optimizer(recipe, model.named_parameters(), hp)
    return Member(
        recipe=recipe,
        hp=hp,
        module=model,
        optimizer=optimizer,
        schedule=None,
        rng=capture_rng(CPU),
    )


def train(array, slots, first=0):
    batches, _ = searched.data({"wide": True})
    for step in range(first, STEPS):
        each = searched.ACCUMULATE
        micros = [batches[(step * each + m) % len(batches)] for m in range(each)]
        stepped = array.step(*[[b if s in slots else None for s in range(4)] for b in micros])
        assert not stepped.failures


def assert_slot(array, slot, hp, seed=3):
    alone, _, metrics = searched.by_hand(hp, seed)
    found = dict(array.member(slot).module.named_parameters())
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(
            found[name], parameter, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{slot} {n} {m}"
        )
    return metrics


@pytest.mark.parametrize("kind", ["eager", "traced", "branches"])
def test_slots_of_an_array_have_their_own_loss_and_their_own_limit(kind):
    recipe, points = searched.recipe(), searched.points_of(SLOTS, wide=True)
    members = [member(recipe, point) for point in points]
    batches, valid = searched.data({"wide": True})
    assert dry_run(members, [batches[0]] * 4) == ""
    array = Array(members, backend=backend_of(kind))
    train(array, range(4))
    with array.evaluating():
        found = [array.evaluate([batch] * 4) for batch in valid]
    for slot, point in enumerate(points):
        metrics = assert_slot(array, slot, point)
        for name, value in metrics.items():
            mine = sum(one[slot][name] for one in found) / len(found)
            assert mine == pytest.approx(value, rel=1e-10)


@pytest.mark.parametrize("kind", ["eager", "traced", "branches"])
def test_who_comes_into_a_slot_trains_with_its_own(kind):
    """The graph of the one before, if there is one, holds other numbers."""
    recipe, points = searched.recipe(), searched.points_of(SLOTS, wide=True)
    newcomer = {**points[1], "smoothing": 0.05, "weight": 0.7, "clip": 0.02}
    array = Array([member(recipe, point) for point in points], backend=backend_of(kind))
    train(array, range(4))
    array.retire(1)
    array.refill(1, member(recipe, newcomer))
    train(array, [1])
    assert_slot(array, 1, newcomer)
    for slot in (0, 2, 3):
        assert_slot(array, slot, points[slot])


def test_what_differs_in_more_than_floats_is_told_by_name():
    recipe = searched.recipe(loss=searched.by_kind)
    one, other = (
        member(recipe, {**searched.points_of(SLOTS, wide=True)[0], "kind": kind})
        for kind in ("hard", "soft")
    )
    with pytest.raises(
        Declined, match="'kind', which the recipe's loss reads: 'hard' in one, 'soft' in the"
    ):
        Array([one, other])


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (searched.unspelled, "reads the hyperparameter 'weight', and no string in its code"),
        (searched.at_once, "reads all hyperparameters at once"),
    ],
)
@pytest.mark.parametrize("alike", [False, True])
def test_what_a_loss_reads_in_ways_that_no_array_can_know_is_declined(loss, words, alike):
    """Also where the trials that are there agree: the next one may not."""
    recipe, points = searched.recipe(loss=loss), searched.points_of(SLOTS, wide=True)
    if alike:
        points = [points[1]] * 4
    found = dry_run([member(recipe, p) for p in points], [searched.data({"wide": 1})[0][0]] * 4)
    assert re.search(words, found), found


# -- arrays in studies --------------------------------------------------------------------

FUSED = shoal.grid(
    lr=[1e-2],
    smoothing=[0.0, 0.3],
    weight=[0.25, 1.5],
    clip=[None, 0.2],
    drop=[0.1],
    note=["a"],
    wide=[True],
)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("fuse", "kind"), [("4 eager", "eager"), (4, "traced"), ("4 branches", "branches")]
)
def test_a_study_in_arrays_ends_on_the_bits_of_its_slots(fuse, kind, run_study):
    recipe = searched.recipe()
    report = run_study(recipe, FUSED, steps=STEPS, fuse=fuse)
    assert squads.widths(report) == [4] * 8
    assert set(squads.kinds(report)) == {kind}
    squads.assert_arrayed(report, report.trials, recipe, 4, kind, steps=STEPS)
    searched.assert_by_hand(report, near=1e-10)
    verdicts = list(verify_trials(report.directory, rows(report), recipe=recipe))
    assert [verdict.equal for verdict in verdicts] == [True] * 8


@pytest.mark.full
@pytest.mark.parametrize("way", ["host", "device"])
def test_an_array_in_shards_has_a_loss_and_a_limit_for_each_slot(way, run_study):
    recipe = searched.recipe()
    report = run_study(recipe, FUSED, steps=STEPS, fuse=4, technique=WAYS[way])
    assert {row.technique for row in rows(report)} == {"Spilled"}
    squads.assert_arrayed(report, report.trials, recipe, 4, steps=STEPS)
    searched.assert_by_hand(report, near=1e-10)


def test_what_the_loss_does_not_read_keeps_nobody_apart(run_study):
    space = shoal.grid(
        lr=[1e-2], smoothing=[0.0, 0.3], weight=[0.5], clip=[0.2], drop=[0.1], note=["a", "b"]
    )
    report = run_study(searched.recipe(), space, steps=STEPS, fuse=4)
    assert squads.widths(report) == [4] * 4
    assert "4 trials of 1 shape" in explained(report)


@pytest.mark.full
@pytest.mark.skipif(not compiler(), reason="there is no C++ compiler")
def test_trials_that_differ_in_what_no_loss_reads_share_compiled_code(run_study):
    recipe = searched.recipe()
    space = shoal.grid(
        lr=[1e-2, 1e-3], smoothing=[0.1], weight=[0.5], clip=[None, 0.2], drop=[0.1], note=["a"]
    )
    report = run_study(recipe, space, steps=STEPS, fuse="4 compiled")
    assert squads.kinds(report) == ["compiled"] * 4
    assert squads.widths(report) == [4] * 4
    squads.assert_arrayed(report, report.trials, recipe, 4, "compiled", steps=STEPS)
    searched.assert_by_hand(report, near=1e-4)


@pytest.mark.skipif(not compiler(), reason="there is no C++ compiler")
@pytest.mark.full
def test_a_trial_whose_loss_has_other_numbers_trains_beside_the_compiled_ones(run_study):
    recipe = searched.recipe()
    space = shoal.grid(
        lr=[1e-2], smoothing=[0.1, 0.3], weight=[0.5], clip=[None, 0.2], drop=[0.1], note=["a"]
    )
    report = run_study(recipe, space, steps=STEPS, fuse="2 compiled")
    assert sorted(squads.kinds(report)) == ["compiled"] * 2 + ["traced"] * 2
    searched.assert_by_hand(report, near=1e-4)


@pytest.mark.slow
def test_trials_that_a_string_sends_elsewhere_are_of_two_shapes(run_study):
    recipe = searched.recipe(loss=searched.by_kind, metrics={}, clip_grad_norm=None)
    space = shoal.grid(lr=[1e-2], smoothing=[0.1, 0.3], kind=["hard", "soft"], drop=[0.1])
    report = run_study(recipe, space, steps=STEPS, fuse=2)
    assert squads.widths(report) == [2] * 4
    assert "'kind', which the recipe's loss reads" in explained(report)
    squads.assert_arrayed(report, report.trials, recipe, 2, steps=STEPS)


def test_a_loss_that_spells_nothing_trains_unfused_and_the_plan_says_why(run_study, assert_alone):
    recipe = searched.recipe(loss=searched.unspelled)
    report = run_study(recipe, SPACE, steps=STEPS, fuse=2)
    assert squads.widths(report) == [1] * 4
    assert "no string in its code is that name" in explained(report)
    assert_alone(report, report.trials, recipe, steps=STEPS)


# -- errors -------------------------------------------------------------------------------


def test_a_limit_that_is_none_fails_its_trial_alone(run_study):
    recipe = searched.recipe(clip_grad_norm=searched.absurd)
    report = run_study(recipe, SPACE, steps=STEPS, technique="resident")
    failed = [trial for trial in report.trials if trial.error]
    assert [trial.hp["clip"] for trial in failed] == [None, None]
    assert all("returned -1.0 for the trial with {'lr': 0.01" in t.error for t in failed)
    losses = read_losses(report.directory)
    for trial in (one for one in report.trials if not one.error):
        plain = plain_loop(recipe, trial.hp, trial.seed, steps=STEPS)
        assert_same(plain, trial, losses=losses[trial.number])


def test_limits_that_are_all_none_stop_the_study_before_it_trains(run_study):
    recipe = searched.recipe(clip_grad_norm=lambda hp: "much")
    with pytest.raises(SpecError, match=r"clip_grad_norm=\.\.\.\) returned 'much' for the trial"):
        run_study(recipe, SPACE, steps=STEPS)


def test_a_name_that_the_space_lacks_is_said_in_the_words_of_the_space(run_study):
    space = shoal.grid(lr=[1e-2], drop=[0.1], clip=[0.2])
    with pytest.raises(SpecError, match="unknown hyperparameter 'smoothing'; this trial has 'lr'"):
        run_study(searched.recipe(), space, steps=STEPS, technique="resident")


def test_the_reference_of_a_slot_reads_its_own():
    point = searched.points_of(SLOTS, wide=True)[2]
    found = array_loop(searched.recipe(), point, 3, slot=1, width=3, steps=STEPS)
    alone, losses, _ = searched.by_hand(point, 3)
    assert searched.furthest(found.model, alone) < 1e-10
    assert list(found.losses) == pytest.approx(losses, rel=1e-10)


def test_a_trial_with_nobody_beside_it_is_held_to_what_it_spells():
    """Who comes later would find its graph."""
    recipe = searched.recipe(loss=searched.unspelled)
    point = searched.points_of(SLOTS, wide=True)[0]
    with pytest.raises(Declined, match="reads the hyperparameter 'weight', and no string"):
        array_loop(recipe, point, 3, slot=1, width=3, steps=1)
