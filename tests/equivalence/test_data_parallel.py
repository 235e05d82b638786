"""Trials with replicas end on the bits of their rule in one process, and near training alone."""

from __future__ import annotations

import gc
import weakref
from dataclasses import MISSING, fields
from types import SimpleNamespace

import numpy as np
import pytest
import staging
import torch
import traps
import twins

import shoal
from shoal import DataParallel
from shoal.core.errors import PlanError, TrialError
from shoal.core.event import PeakMeasured, TrialMoved
from shoal.core.spec import ShardSpec, TrialSpec
from shoal.core.units import Bytes
from shoal.observe import read_timeline
from shoal.replicas import cut_for_replicas
from shoal.runtime.gangs.group import GangGroup, NoWays, joined
from shoal.runtime.gangs.wrapped import Sharded, Whole
from shoal.runtime.measuring.probe import Probe
from shoal.testing import plain_data_parallel_loop, plain_loop
from shoal.verify import verify_trials

DDP, FSDP = DataParallel(width=2), DataParallel(width=2, shard=True)
BOTH = pytest.mark.parametrize("technique", [DDP, FSDP], ids=["ddp", "fsdp"])


def parameters_of(result):
    return dict(result.model.named_parameters())


def furthest(one, other) -> float:
    theirs = parameters_of(other)
    return max((p - theirs[n]).abs().max().item() for n, p in parameters_of(one).items())


# -- the rule -----------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_the_rule_is_training_alone_but_for_rounding(width, sharded):
    """In float64 to 1e-12; without dropout and BatchNorm, of which it has its own."""
    settings = {"data": twins.doubled, "clip_grad_norm": 0.9, "optimizer": traps.momentum}
    recipe = twins.recipe(twins.InDouble, 2, **settings)
    alone = plain_loop(recipe, twins.LR, 0, epochs=3)
    rule = plain_data_parallel_loop(recipe, twins.LR, 0, width=width, sharded=sharded, epochs=3)
    assert furthest(alone, rule) < 1e-12
    assert rule.losses == pytest.approx(alone.losses, abs=1e-12)


def test_in_float32_it_is_within_a_millionth():
    recipe = twins.recipe(twins.Still, optimizer=traps.momentum)
    alone = plain_loop(recipe, twins.LR, 0, epochs=2)
    assert furthest(alone, plain_data_parallel_loop(recipe, twins.LR, 0, width=2, epochs=2)) < 1e-6


def test_of_even_rows_two_replicas_are_two_pieces_to_the_bit():
    recipe = twins.recipe(twins.Still, data=staging.even)
    pieces = plain_loop(recipe, twins.LR, 0, pieces=2, epochs=1)
    rule = plain_data_parallel_loop(recipe, twins.LR, 0, width=2, epochs=1)
    assert furthest(pieces, rule) == 0.0


@pytest.mark.parametrize(
    "beside", [["a", "b", "c", "d"], (1, 2, 3, 4), np.arange(4), {"names": list("abcd")}]
)
def test_values_for_each_row_that_are_no_tensor_are_refused(beside):
    with pytest.raises(TrialError, match=r"has a \w+ of 4 values that are no tensors"):
        cut_for_replicas({"x": torch.arange(4.0), "beside": beside}, 2)


@pytest.mark.parametrize("beside", ["four", 4, ["a", "b"], None])
def test_what_belongs_to_the_batch_as_a_whole_goes_to_each_piece(beside):
    pieces = cut_for_replicas((torch.arange(4.0), beside), 2)
    assert [piece.batch[1] for piece in pieces] == [beside, beside]
    four = tuple(torch.arange(4.0) for _ in range(4))
    assert [len(piece.batch) for piece in cut_for_replicas(four, 2)] == [4, 4]


def test_as_many_values_as_a_short_last_batch_has_rows_belong_to_it_inside_an_object():
    """Names of two classes, and a last batch of two rows: a list alone could be either."""
    for rows in (4, 2):
        batch = torch.arange(float(rows)), SimpleNamespace(classes=["a", "b"])
        pieces = cut_for_replicas(batch, 2)
        assert [piece.batch[1].classes for piece in pieces] == [["a", "b"]] * 2
    with pytest.raises(TrialError, match="give it as an attribute of an object of your own"):
        cut_for_replicas((torch.arange(2.0), ["a", "b"]), 2)


def test_values_for_each_row_are_refused_before_a_study_starts(run_study):
    recipe = twins.recipe(data=twins.named, loss=twins.loss_of_named, inputs=twins.only_x)
    with pytest.raises(PlanError, match="has a list of 4 values that are no tensors"):
        run_study(recipe, twins.LR, technique=DDP, devices=2, epochs=1)


# -- in a study ---------------------------------------------------------------------------


@BOTH
def test_dropout_clipping_accumulation_a_falling_rate_and_validation(technique, run_replicas):
    recipe = twins.rich()
    report = run_replicas(recipe, technique, shoal.grid(lr=[1e-2, 3e-3]))
    found = verify_trials(report.directory, staging.rows(report), recipe=recipe)
    verdicts = list(found)
    assert all(v.equal for v in verdicts)
    assert "by the rule of 2 replicas" in verdicts[0].notes[0]
    assert [key["replicas"] for key in staging.numerics(report)] == [2, 2]


@BOTH
def test_rows_that_do_not_divide_and_a_replica_without_any(technique, run_replicas):
    run_replicas(twins.recipe(data=twins.uneven, clip_grad_norm=0.01), technique)


def test_the_fourth_of_four_replicas_has_no_rows(run_replicas):
    technique = DataParallel(width=4)
    run_replicas(twins.rich(data=twins.uneven), technique, shoal.grid(lr=[1e-2]), epochs=1)


@pytest.mark.full
def test_four_shards_of_parameters_that_do_not_divide(run_replicas):
    technique = DataParallel(width=4, shard=True)
    run_replicas(twins.rich(data=twins.uneven), technique, shoal.grid(lr=[1e-2]), epochs=1)


MODELS = (
    twins.Tied,
    twins.Normal,
    twins.Rebinding,
    traps.Unused,
    traps.LateGradient,
    traps.Scaled,
    traps.FrozenStart,
    traps.Recurrent,
    traps.Stochastic,
    traps.Structured,
    traps.Skips,
    traps.InPlace,
    traps.InnerCheckpoint,
    traps.ChannelsLast,
)
NOT_BY_ROWS = (traps.Scaled, traps.Stochastic, traps.InPlace, traps.ChannelsLast)
SOON = (twins.Tied, twins.Normal, traps.Unused)


def models():
    """Every model with both; FSDP2 does not take them all."""
    for kind in MODELS:
        for technique, name in ((DDP, "ddp"), (FSDP, "fsdp")):
            if technique is FSDP and kind in NOT_BY_ROWS:
                continue
            marks = () if kind in SOON else pytest.mark.full
            yield pytest.param(kind, technique, marks=marks, id=f"{kind.__name__}, {name}")


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize(("kind", "technique"), list(models()))
def test_models_that_break_a_careless_engine(kind, technique, run_replicas):
    data = traps.image_data if kind is traps.ChannelsLast else staging.even
    run_replicas(twins.recipe(kind, 2, clip_grad_norm=0.01, data=data), technique, epochs=1)


def test_replicas_may_use_different_parameters(run_replicas):
    run_replicas(twins.recipe(twins.Branching, data=staging.even), DDP)


@pytest.mark.parametrize("kind", [twins.Branching, traps.Stochastic])
def test_with_fsdp_they_may_not_and_their_trial_fails_alone(kind, run_study):
    """Blocks of one size; a replica waits for a gathering that another one has no use for."""
    recipe = twins.recipe(kind, 2, data=staging.even)
    report = run_study(recipe, twins.LR, technique=FSDP, devices=2, epochs=8)
    (trial,) = report.trials
    assert trial.state == "FAILED"
    assert "did not use the same parameters" in trial.error


def test_neither_may_validation_batches_with_fsdp_and_nobody_waits_for_ever(run_study):
    recipe = twins.recipe(twins.BranchingInEvaluation, data=staging.even)
    (trial,) = run_study(recipe, twins.LR, technique=FSDP, devices=2, epochs=4).trials
    assert trial.state == "FAILED"
    assert "did not use the same parameters" in trial.error


@BOTH
def test_a_validation_source_that_refills_one_buffer(technique, run_replicas):
    run_replicas(twins.recipe(data=twins.refilled), technique, epochs=1)


@pytest.mark.parametrize("technique", [DDP, FSDP, shoal.Pipelined(stages=2)])
def test_the_leader_does_not_keep_the_validation_data(technique, run_study):
    recipe = twins.recipe(data=twins.fleeting)
    (trial,) = run_study(recipe, twins.LR, technique=technique, devices=2, epochs=1).trials
    assert trial.state == "FINISHED", trial.error


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (twins.CountsCalls, "its buffers change while it is evaluated"),
        (twins.Reentrant, r"Use shard=True, or checkpoint\(..., use_reentrant=False\)"),
    ],
)
def test_what_replicas_cannot_have_is_refused_with_a_way_out(kind, words, run_study):
    recipe = twins.recipe(kind, data=twins.refilled)
    with pytest.raises(PlanError, match=words):
        run_study(recipe, twins.LR, technique=DDP, devices=2, epochs=1)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (traps.Scaled, "'scale' has no dimension"),
        (traps.InPlace, "FSDP2 fails with it"),
        (traps.ChannelsLast, "is not contiguous"),
    ],
)
def test_models_that_fsdp_cannot_have_are_refused_with_the_reason(kind, words, run_study):
    data = traps.image_data if kind is traps.ChannelsLast else staging.even
    recipe = twins.recipe(kind, data=data)
    with pytest.raises(PlanError, match=words):
        run_study(recipe, twins.LR, technique=FSDP, devices=2, epochs=1)


def test_data_without_a_length(run_replicas):
    run_replicas(twins.recipe(twins.Still, 3, data=staging.quiet), DDP, epochs=1)


def test_data_that_draws_and_has_no_length_is_refused_where_the_model_draws(run_study):
    recipe = twins.recipe(accumulate=3, data=staging.nameless)
    report = run_study(recipe, shoal.grid(lr=[1e-2]), technique=DDP, devices=2, epochs=1)
    assert "read ahead" in report.trials[0].error


@BOTH
def test_the_smallest_kernels_of_other_optimizers(technique, run_replicas):
    run_replicas(twins.recipe(optimizer=traps.two_rates, data=twins.uneven), technique, epochs=1)


@BOTH
def test_in_bfloat16_with_rows_that_do_not_divide(technique, run_replicas):
    recipe = twins.rich(precision="bf16", data=twins.uneven)
    report = run_replicas(recipe, technique, shoal.grid(lr=[1e-2]), epochs=1)
    for verdict in verify_trials(report.directory, staging.rows(report), recipe=recipe):
        assert verdict.equal, verdict


def test_all_devices_are_used_where_no_width_is_asked_for(run_study):
    recipe = twins.rich()
    report = run_study(recipe, twins.LR, technique="data_parallel", devices=3, epochs=1)
    twins.assert_replicated(report, recipe, DataParallel(width=3), epochs=1)


# -- with other trials, and in other techniques ---------------------------------------------


@pytest.mark.parametrize("sharded", [False, True])
def test_measuring_beside_a_replica_leaves_it_in_its_group(sharded):
    cpu, recipe, batch = torch.device("cpu"), twins.recipe(), traps.batches([4])[0]
    trial = TrialSpec(number=0, hp=twins.LR, seed=1)
    kinds = [f.name for f in fields(ShardSpec) if f.default is MISSING and "bytes" in f.name]
    shard = ShardSpec(index=0, layers=(0, 1), **dict.fromkeys(kinds, Bytes(1)))
    group = GangGroup(0, 2, NoWays())
    with joined(group):
        engine = (Sharded if sharded else Whole)(traps.Chain(), recipe, cpu)
        engine.backward(batch, 0.5, last=True, check=lambda loss: None)
        engine.finish()
        probe = Probe(recipe, trial, cpu, width=3, shard=True)
        found = probe.measure(traps.Chain(), batch, batch, shard)
        assert not found.problem
        assert found.unit_bytes > 0
        assert torch.distributed.group.WORLD is group
        engine.backward(batch, 0.5, last=True, check=lambda loss: None)
        engine.finish()
        engine.close()
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize("technique", [DDP, pytest.param(FSDP, marks=pytest.mark.full)])
def test_a_search_measures_new_shapes_while_replicas_train(technique, tmp_path, warm_workers):
    recipe = twins.recipe(model=twins.of_width, loss=twins.slow_loss, data=staging.even)
    space = {"lr": shoal.log_uniform(1e-3, 1e-2), "width": shoal.integer(4, 40)}
    search = {"trials": 5, "sampler": "tpe", "pruner": "asha", "generation": 3}
    study = shoal.Study("s", recipe, space=space, directory=tmp_path, epochs=9, **search)
    hardware = shoal.Hardware.virtual(devices=2, memory="64MiB")
    shown = {"progress": False, "workers": warm_workers}
    report = study.run(hardware=hardware, technique=technique, **shown)
    assert len(report.trials) == 5
    assert {trial.state for trial in report.trials} <= {"FINISHED", "PRUNED"}


def test_what_fails_a_trial_while_it_is_measured_fails_no_other(run_study):
    recipe = twins.recipe(model=twins.of_width_or_misfit, data=staging.even)
    space = shoal.grid(lr=[1e-2], width=[6, 9])
    fine, misfit = run_study(recipe, space, technique=DDP, devices=2, epochs=1).trials
    assert (fine.state, misfit.state) == ("FINISHED", "FAILED")
    assert "only whole batches, please" in misfit.error


@pytest.mark.sample(1)
@BOTH
def test_a_lease_leaves_no_seat_behind(technique, run_study, monkeypatch):
    monkeypatch.setattr("shoal.execution.floor.LEASE_S", 0.05)
    recipe = twins.recipe(metrics={"alive": twins.seats_alive}, data=staging.even)
    space = shoal.grid(lr=[1e-2, 3e-3])
    report = run_study(recipe, space, technique=technique, devices=2, epochs=4)
    for trial in report.trials:
        assert trial.state == "FINISHED", trial.error
        assert trial.metrics["valid_alive"] <= 2  # this one's, and one that is seen out


@pytest.mark.parametrize("sharded", [False, True])
def test_what_is_wrapped_goes_with_its_group(sharded):
    """All but one: torch's caches keep a mesh of each shape."""
    cpu, batch, seen = torch.device("cpu"), traps.batches([4])[0], []
    for _ in range(6):
        group = GangGroup(0, 2, NoWays())
        with joined(group):
            engine = (Sharded if sharded else Whole)(traps.Chain(), twins.recipe(), cpu)
            engine.backward(batch, 0.5, last=True, check=lambda loss: None)
            engine.finish()
            engine.close()
        seen += [weakref.ref(group), weakref.ref(engine.root)]
        del group, engine
    gc.collect()
    assert sum(ref() is not None for ref in seen) <= sharded


@pytest.fixture
def go_on(tmp_path, warm_workers):
    """Run one study again, for longer, and return its report."""

    def run(recipe, technique, epochs, **options):
        study = shoal.Study("twins", recipe, space=twins.LR, directory=tmp_path, epochs=epochs)
        hardware = shoal.Hardware.virtual(devices=3, memory="64MiB")
        shown = {"progress": False, "workers": warm_workers}
        return study.run(hardware=hardware, technique=technique, **shown, **options)

    return run


def test_trials_take_turns_where_each_needs_the_devices(run_replicas):
    space = shoal.grid(lr=[1e-2, 3e-3, 1e-3])
    report = run_replicas(twins.rich(), DDP, space, devices=2, options={"checkpoint_every": 0})
    names = {device for device, *_ in _actions(report)}
    assert names <= {"cpu:0", "cpu:1"}


def _actions(report):
    return [(row.device, row.action) for row in read_timeline(report.directory)]


def test_two_gangs_of_two_on_four_devices_at_a_time(run_replicas):
    run_replicas(twins.rich(), FSDP, shoal.grid(lr=[1e-2, 3e-3, 1e-3]), devices=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"), [(DDP, FSDP), (FSDP, DDP)], ids=["ddp to fsdp", "fsdp to ddp"]
)
def test_it_goes_on_as_the_other_kind_to_the_same_bits(first, then, go_on):
    """Of a step that neither clips nor accumulates, with an optimizer of element-wise kernels."""
    recipe = twins.recipe(optimizer=traps.momentum, data=staging.even)
    report = go_on(recipe, first, 1)
    report = go_on(recipe, then, 3)
    twins.assert_replicated(report, recipe, DDP, epochs=3)


OTHERS = ("resident", *(pytest.param(n, marks=pytest.mark.full) for n in ("spilled", "pipelined")))


@pytest.mark.parametrize("other", OTHERS)
def test_what_it_saved_goes_on_in_other_techniques(other, go_on):
    """To other bits, which has to be accepted; near what training alone gives."""
    recipe = twins.recipe(twins.Still, optimizer=traps.momentum, data=staging.even)
    go_on(recipe, FSDP, 1)
    report = go_on(recipe, other, 2, accept_numerics=True)
    report = go_on(recipe, DataParallel(width=3), 3, accept_numerics=True)
    (trial,) = report.trials
    assert trial.state == "FINISHED", trial.error
    alone = plain_loop(recipe, trial.hp, trial.seed, epochs=3)
    weights = trial.load_state()["model"]
    for name, parameter in parameters_of(alone).items():
        assert torch.allclose(parameter, weights[name], atol=1e-6), name


def test_who_goes_on_without_saying_how_has_as_many_replicas_as_before(go_on):
    recipe = twins.rich()
    go_on(recipe, FSDP, 1)
    twins.assert_replicated(go_on(recipe, None, 2), recipe, FSDP, epochs=2)


def test_so_has_one_that_was_planned_and_has_saved_nothing(go_on, monkeypatch):
    recipe = twins.rich()
    with monkeypatch.context() as patch:
        patch.setattr("shoal.launch.run.Execution", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            go_on(recipe, FSDP, 2)
    twins.assert_replicated(go_on(recipe, None, 2), recipe, FSDP, epochs=2)


@pytest.mark.full
@BOTH
def test_trials_that_are_parked_are_saved_and_go_on(technique, tmp_path, warm_workers):
    recipe = twins.rich()
    space = shoal.grid(lr=[1e-2, 3e-3])
    options = {"space": space, "directory": tmp_path, "epochs": 40, "checkpoint_every": "1h"}
    study = shoal.Study("p", recipe, time_limit=1.0, **options)
    asked = {
        "hardware": shoal.Hardware.virtual(devices=2, memory="64MiB"),
        "technique": technique,
        "progress": False,
        "workers": warm_workers,
    }
    report, runs = study.run(**asked), 1
    while runs < 20 and any(trial.state != "FINISHED" for trial in report.trials):
        report, runs = study.run(**asked), runs + 1
    assert runs > 1
    report = shoal.Study("p", recipe, **options).run(**asked)  # where others use the machine
    twins.assert_replicated(report, recipe, technique, epochs=40)


# -- bytes --------------------------------------------------------------------------------


@BOTH
def test_a_replica_holds_no_more_than_was_predicted(technique, run_replicas):
    large = twins.rich(1, model=staging.wide, data=staging.many_rows)
    run_replicas(large, technique, epochs=1)
    (heard,) = run_replicas.heard
    peaks = heard.of(PeakMeasured)
    assert {peak.device for peak in peaks} == {"cpu:0", "cpu:1"}
    for peak in peaks:
        assert 0.5 * peak.predicted_bytes < peak.peak_bytes <= peak.predicted_bytes
    assert not heard.of(TrialMoved)
