"""Schedules that are stepped after each epoch: wherever a trial trains, as in a loop by hand."""

from __future__ import annotations

import itertools
import time

import pytest
import squads
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.core.errors import PlanError, SpecError
from shoal.recipes.schedules import EachEpoch
from shoal.testing import assert_same, plain_loop

EPOCHS, BATCHES = 5, 5
TWO_BW = shoal.Pipelined(schedule="2bw", stages=2)
SHARDED = shoal.DataParallel(width=2, shard=True)


def model(hp):
    return nn.Sequential(
        *(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)
    )


def data(hp):
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randn(BATCHES * 8, 6, generator=draws), torch.arange(BATCHES * 8) % 3
    rows = TensorDataset(x, y)
    return DataLoader(rows, 8, shuffle=True), DataLoader(rows, 8)


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def sgd(named, hp):
    return torch.optim.SGD([p for _, p in named], lr=hp["lr"], momentum=0.9)


def two(named, hp):
    named = list(named)
    return [sgd(named[:2], hp), sgd(named[2:], hp)]


def stairs(optimizer, hp):
    return lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def waves(optimizer, hp):
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    last = lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS - 2)
    return lr_scheduler.SequentialLR(optimizer, [first, last], [2])


def each(optimizers, hp):
    return [stairs(optimizers[0], hp), lr_scheduler.ExponentialLR(optimizers[1], 0.7)]


def recipe(schedule=stairs, **options):
    how = {"model": model, "data": data, "loss": loss, "optimizer": sgd, **options}
    return shoal.Recipe(schedule=schedule, schedule_interval="epoch", **how)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("schedule", "optimizer"), [(stairs, sgd), (waves, sgd), (each, two)], ids=lambda f: f.__name__
)
def test_the_plain_loop_is_the_loop_by_hand(schedule, optimizer, accumulate):
    of = recipe(schedule, optimizer=optimizer, accumulate=accumulate)
    found = plain_loop(of, {"lr": 0.1}, 3, epochs=EPOCHS)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    net, (train, _) = model({}), data({})
    made = optimizer(net.named_parameters(), {"lr": 0.1})
    plan, losses = schedule(made, {}), []
    makes, plans = (one if isinstance(one, list) else [one] for one in (made, plan))
    for _ in range(EPOCHS):
        batches = iter(train)
        while group := list(itertools.islice(batches, accumulate)):
            net.zero_grad()
            each_loss = [loss(net(batch[0]), batch) for batch in group]
            for one in each_loss:
                (one / accumulate).backward()
            for one in makes:
                one.step()
            losses.append(sum(one.item() for one in each_loss) / len(group))
        for one in plans:
            one.step()
    torch.set_rng_state(state)
    assert list(found.losses) == losses
    for mine, theirs in zip(found.model.parameters(), net.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.fixture
def run(tmp_path, warm_workers):
    def runs(of, devices=1, lrs=(0.1, 0.05), study=None, **options):
        ends = {"epochs": EPOCHS} if not study or "steps" not in study else {}
        made = shoal.Study(
            *("it", of),
            directory=tmp_path,
            **{"metric": "valid_loss", "space": shoal.grid(lr=list(lrs)), **ends, **(study or {})},
        )
        hardware = shoal.Hardware.virtual(devices=devices, memory="64MiB")
        return made.run(hardware=hardware, workers=warm_workers, **options)

    return runs


WAYS = {
    "resident": {},
    "spilled": {"technique": shoal.Spilled(shards=2)},
    "pipelined": {"technique": shoal.Pipelined(schedule="flush", stages=2), "devices": 2},
    "spilled stages": {"technique": shoal.Pipelined(stages=2, shards=4), "devices": 2},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_trial_ends_as_alone(way, accumulate, run):
    of = recipe(waves, accumulate=accumulate)
    for trial in run(of, **WAYS[way]).trials:
        assert not trial.error
        assert_same(plain_loop(of, trial.hp, trial.seed, epochs=EPOCHS), trial)


def test_with_replicas_too(run):
    of = recipe(splittable=True)
    report = run(of, devices=2, technique=shoal.DataParallel(width=2))
    squads.assert_verified(report, of)


@pytest.mark.parametrize("schedule", [stairs, waves])
def test_each_slot_of_an_array_has_its_own(schedule, run):
    of = recipe(schedule)
    report = run(of, fuse=2, lrs=(0.1, 0.05, 0.2))
    assert set(squads.widths(report)) == {2}
    for trial in report.trials:
        alone = plain_loop(of, trial.hp, trial.seed, epochs=EPOCHS).state()
        assert trial.load_state()["schedule"] == alone["schedule"]
        groups = trial.load_state()["optimizer"]["groups"]
        assert [group["lr"] for group in groups] == [g["lr"] for g in alone["optimizer"]["groups"]]
    squads.assert_verified(report, of)


@pytest.mark.sample(1)
@pytest.mark.parametrize("fuse", [False, 2])
def test_it_goes_on_in_the_middle_of_an_epoch(fuse, run):
    of = recipe()
    for steps in (BATCHES + 2, 2 * BATCHES, 3 * BATCHES + 1):
        report = run(of, fuse=fuse, study={"steps": steps})
        for trial in report.trials:
            alone = plain_loop(of, trial.hp, trial.seed, steps=steps)
            assert trial.load_state()["schedule"] == alone.state()["schedule"]
    squads.assert_verified(report, of)


def test_a_population_goes_on_with_the_epochs_that_it_has_had(run):
    of, pruner = recipe(), shoal.PBT(interval=1, quantile=0.25)
    space = {"lr": shoal.log_uniform(0.01, 0.3)}
    report = run(of, study={"space": space, "trials": 4, "pruner": pruner})
    assert any(trial.inherited for trial in report.trials)
    squads.assert_verified(report, of)


def test_where_an_epoch_has_no_length_it_is_refused(run):
    class Stream:
        def __iter__(self):
            return iter(data({})[0])

    of = recipe(data=lambda hp: (Stream(), None))
    with pytest.raises(
        SpecError, match="how many batches an epoch has, and the training data, St"
    ):
        plain_loop(of, {"lr": 0.1}, 0, epochs=1)


def test_what_is_asked_for_is_checked():
    with pytest.raises(SpecError, match="schedule_interval"):
        shoal.Recipe(model=model, data=data, schedule=stairs, schedule_interval="epochs")
    with pytest.raises(SpecError, match="has no schedule"):
        shoal.Recipe(model=model, data=data, schedule_interval="epoch")


def test_a_study_that_began_with_steps_is_not_gone_on_with_by_epochs(run):
    of = recipe()
    by_steps = shoal.Recipe(model=model, data=data, loss=loss, optimizer=sgd, schedule=stairs)
    run(by_steps, study={"steps": 3})
    with pytest.raises(SpecError, match=r"Changed: Recipe\(schedule_interval=\.\.\.\)"):
        run(of, study={"steps": 6})


def test_a_state_has_the_steps_that_were_counted():
    makes = [sgd(model({}).named_parameters(), {"lr": 0.1}) for _ in range(2)]
    one, other = (EachEpoch(stairs(made, {}), 3) for made in makes)
    for made in makes:
        made.step()  # torch warns of a schedule that is stepped before it
    for _ in range(5):
        one.step()
    other.load_state_dict(one.state_dict())
    for _ in range(4):
        one.step()
        other.step()
    assert one.state_dict() == other.state_dict()
    assert one.members["it"].last_epoch == 3


def plateau(optimizer, hp):
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05)


def by_evaluations(**options):
    how = {"model": model, "data": data, "loss": loss, "optimizer": sgd, "schedule": plateau}
    return shoal.Recipe(**{**how, "schedule_interval": "evaluation", **options})


def test_a_plateau_in_the_plain_loop_is_that_by_hand():
    found = plain_loop(by_evaluations(), {"lr": 0.1}, 3, epochs=EPOCHS)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    net, (train, valid) = model({}), data({})
    made = sgd(net.named_parameters(), {"lr": 0.1})
    plan = plateau(made, {})
    for _ in range(EPOCHS):
        for batch in train:
            net.zero_grad()
            loss(net(batch[0]), batch).backward()
            made.step()
        before = torch.get_rng_state()
        with torch.no_grad():
            values = [float(loss(net(batch[0]), batch)) for batch in valid]
        torch.set_rng_state(before)
        plan.step(sum(values) / len(values))
    torch.set_rng_state(state)
    assert found.optimizer.param_groups[0]["lr"] == made.param_groups[0]["lr"] < 0.1
    for mine, theirs in zip(found.model.parameters(), net.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", ["resident", "spilled", "on the host"])
@pytest.mark.parametrize("every", [None, 3])
def test_a_plateau_is_the_trials_own(way, every, run):
    of = by_evaluations()
    how = {**WAYS, "on the host": {"technique": shoal.Spilled(shards=2, optimizer="host")}}[way]
    for trial in run(of, study={"eval_every": every}, **how).trials:
        assert not trial.error
        alone = plain_loop(of, trial.hp, trial.seed, epochs=EPOCHS, eval_every=every)
        assert alone.optimizer.param_groups[0]["lr"] < trial.hp["lr"]
        assert_same(alone, trial)


def test_a_plateau_in_arrays(run):
    def accuracy(output, batch):
        return float((output.argmax(-1) == batch[1]).float().mean())

    def highest(optimizer, hp):
        return lr_scheduler.ReduceLROnPlateau(optimizer, "max", factor=0.5, patience=0)

    of = by_evaluations(
        metrics={"accuracy": accuracy}, schedule=highest, schedule_metric="valid_accuracy"
    )
    report = run(of, fuse=2, lrs=(0.1, 0.05, 0.2))
    assert set(squads.widths(report)) == {2}
    groups = [trial.load_state()["optimizer"]["groups"][0] for trial in report.trials]
    rates = [trial.hp["lr"] for trial in report.trials]
    assert any(group["lr"] < rate for group, rate in zip(groups, rates, strict=True))
    squads.assert_verified(report, of)


@pytest.mark.sample(1)
@pytest.mark.parametrize("fuse", [False, 2])
def test_a_plateau_goes_on_where_it_was(fuse, run):
    of = by_evaluations()
    for epochs in (2, 3, EPOCHS):
        report = run(of, fuse=fuse, study={"epochs": epochs})
    squads.assert_verified(report, of)


def test_a_plateau_begins_anew_in_a_population(run):
    of, pruner = by_evaluations(), shoal.PBT(interval=1, quantile=0.25)
    space = {"lr": shoal.log_uniform(0.01, 0.3)}
    report = run(of, study={"space": space, "trials": 4, "pruner": pruner})
    assert any(trial.inherited for trial in report.trials)
    squads.assert_verified(report, of)


@pytest.mark.parametrize("technique", [shoal.Pipelined(stages=2), shoal.DataParallel(width=2)])
def test_several_devices_are_refused_with_a_plateau(technique, run):
    with pytest.raises(PlanError, match="each steps one of its own, which hears of no metric"):
        run(by_evaluations(splittable=True), devices=2, technique=technique)


def test_what_a_plateau_goes_by_is_checked(run):
    with pytest.raises(SpecError, match="is none of what evaluations find: valid_loss"):
        by_evaluations(schedule_metric="valid_acc")
    with pytest.raises(SpecError, match="schedule_interval='evaluation' too"):
        recipe(schedule_metric="valid_acc")
    with pytest.raises(SpecError, match=r"step\(\) needs 'metrics'.*schedule_interval='evalua"):
        plain_loop(recipe(plateau), {"lr": 0.1}, 0, epochs=1)
    of = by_evaluations(data=lambda hp: (data(hp)[0], None))
    with pytest.raises(SpecError, match=r"goes by 'valid_loss'.*the evaluation found train_loss"):
        plain_loop(of, {"lr": 0.1}, 0, epochs=1)


def own_step(models, batch, optimizers, hp):
    optimizers.zero_grad()
    found = loss(models(batch[0]), batch)
    found.backward()
    optimizers.step()
    return found


def own_evaluation(models, batch, hp):
    return {"loss": loss(models(batch[0]), batch)}


def even(hp):
    train, valid = data(hp)
    return list(train)[:4], valid


OWN = {"loss": None, "step": own_step, "evaluate": own_evaluation}


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("of", "options"),
    [
        (by_evaluations(**OWN), {"fuse": 2}),
        (recipe(**OWN), {"fuse": 2}),
        (by_evaluations(), {"fuse": 2, "technique": shoal.Spilled(shards=2)}),
        (by_evaluations(), {"fuse": "2-branches"}),
        (recipe(accumulate=2, data=even), {"devices": 2, "technique": TWO_BW}),
        (recipe(splittable=True), {"devices": 2, "technique": SHARDED}),
    ],
    ids=["own step", "own step by epochs", "spilled array", "branches", "2bw", "fsdp"],
)
def test_verification_comes_to_the_same(of, options, run):
    report = run(of, **options)
    assert not any(trial.error for trial in report.trials)
    squads.assert_verified(report, of)


@pytest.mark.sample(1)
@pytest.mark.parametrize("ends", [(5, 11), (7, 20), (BATCHES, 13)])
@pytest.mark.parametrize("every", [None, 2])
def test_an_evaluation_at_the_end_alone_is_none_of_a_longer_trainings(ends, every, run):
    of = by_evaluations()
    for steps in ends:
        report = run(of, study={"steps": steps, "eval_every": every})
    for trial in report.trials:
        alone = plain_loop(of, trial.hp, trial.seed, steps=ends[-1], eval_every=every)
        assert trial.load_state()["schedule"] == alone.state()["schedule"]
        for name, tensor in alone.model.state_dict().items():
            assert torch.equal(trial.load_state()["model"][name], tensor)


def test_other_evaluations_would_be_another_training(run):
    of = by_evaluations()
    run(of, study={"steps": 4, "eval_every": 2})
    with pytest.raises(SpecError, match="Put eval_every=2 back"):
        run(of, study={"steps": 8, "eval_every": 4})


def test_who_asks_for_no_metric_needs_none(run):
    of = by_evaluations(schedule=stairs, data=lambda hp: (data(hp)[0], None))
    for trial in run(of, study={"metric": "train_loss"}).trials:
        assert_same(plain_loop(of, trial.hp, trial.seed, epochs=EPOCHS), trial)


class Late(torch.optim.SGD):
    """A step that takes a while; on the host it is done beside what follows."""

    def step(self, closure=None):
        time.sleep(0.01)
        return super().step(closure)


def test_an_evaluation_of_nothing_waits_for_steps_on_the_host(run):
    """Schedules go on behind it, and changed the rate of what was still to be stepped."""

    def late(named, hp):
        return Late([p for _, p in named], lr=hp["lr"])

    of = by_evaluations(
        schedule=lambda optimizer, hp: lr_scheduler.ExponentialLR(optimizer, 0.5),
        data=lambda hp: (data(hp)[0], None),
        optimizer=late,
    )
    spilled = shoal.Spilled(shards=3, optimizer="host", keep=())
    ends = {"metric": "train_loss", "epochs": 3}
    for trial in run(of, lrs=(0.1,), study=ends, technique=spilled).trials:
        assert_same(plain_loop(of, trial.hp, trial.seed, epochs=3), trial)
