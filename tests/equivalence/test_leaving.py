"""Trials that their array cannot train any further: after which step they leave it, and how."""

from __future__ import annotations

from signal import SIGTERM, raise_signal

import pytest
import squads
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import shoal
from shoal.core.event import TrialReplanned
from shoal.core.seats import epochs_of
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.verify import read_losses

STEPS = 12
WAYS = ("saved each step", "never saved", "stopped before", "stopped on the way back")


class StopWhereAllLeave:
    """Once it is known of all of them; those for whom memory lacks would leave others room."""

    def __init__(self):
        self.left = 0

    def __call__(self, event):
        self.left += isinstance(event, TrialReplanned)
        if self.left == 3:
            raise_signal(SIGTERM)


@pytest.fixture
def check(tmp_path, warm_workers):
    """Three trials as one array, until a step at which they leave it."""

    def run(recipe, way, leaves, *, memory="64MiB", technique=None):
        def go_to(steps, **more):
            study = shoal.Study(
                *("leaving", recipe),
                space=shoal.grid(lr=[0.03, 0.01, 0.003]),
                steps=steps,
                checkpoint_every=0 if way in ("saved each step", "stopped before") else None,
                directory=tmp_path,
            )
            hardware = shoal.Hardware.virtual(devices=1, memory=memory)
            options = {"technique": technique, "workers": warm_workers, "progress": False}
            return study.run(hardware=hardware, fuse=3, **options, **more)

        if way == "stopped before":
            go_to(leaves - 1)
        if way == "stopped on the way back":
            with pytest.raises(SystemExit):
                go_to(STEPS, callbacks=[StopWhereAllLeave()])
        report = go_to(STEPS)
        rows = Snapshot.of(read_outline(report.directory)).trials
        words = [f"slot {n} of 3; for good from step {leaves} alone" for n in range(3)]
        assert [row.numerics["array"] for row in rows] == words
        squads.assert_verified(report, recipe)
        return rows

    return run


class Turns(LambdaLR):
    """Freezes the first layer after some step, or unfreezes it."""

    def __init__(self, optimizer, at):
        self.at = at
        super().__init__(optimizer, lambda epoch: 1.0)

    def step(self):
        super().step()
        if self.last_epoch == self.at:
            for parameter in self.optimizer.param_groups[0]["params"][:2]:
                parameter.requires_grad_(not parameter.requires_grad)


def small(hp):
    layers = (nn.Linear(8, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 2))
    return nn.Sequential(*layers).double()


def frozen(hp):
    made = small(hp)
    made[0].requires_grad_(False)
    return made


def few(hp):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 16, 8, generator=generator, dtype=torch.float64)
    return [(one, (one.sum(1) > 0).long()) for one in x], None


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(("model", "after"), [(frozen, 9), (small, 5)])
@pytest.mark.parametrize("way", WAYS)
def test_when_it_was_saved_is_no_matter_where_a_schedule_freezes_layers(way, model, after, check):
    """It leaves before the step after which the schedule did so."""
    recipe = shoal.Recipe(
        model=model, data=few, loss=loss, schedule=lambda optimizer, hp: Turns(optimizer, after)
    )
    check(recipe, way, after - 1)


def tall(hp):
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(256, 4))


def uneven(hp):
    """The sixth batch is so large that an array has no room for it, whoever else is there."""
    generator = torch.Generator().manual_seed(0)
    sizes = [8] * 5 + [1500] + [8] * (STEPS - 6)
    xs = [torch.randn(size, 256, generator=generator) for size in sizes]
    return [(x, (x.sum(1) > 0).long()) for x in xs], None


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("technique", "memory"), [(None, "16MiB"), (shoal.Spilled(shards=4), "12MiB")]
)
@pytest.mark.parametrize("way", WAYS)
def test_nor_where_memory_lacks_for_a_batch(way, technique, memory, check):
    """In shards they go on in those that a trial alone has."""
    recipe = shoal.Recipe(model=tall, data=uneven, loss=loss)
    rows = check(recipe, way, 5, memory=memory, technique=technique)
    assert all("annot reserve" in row.replans[0].reason for row in rows)


def cut_short(hp):
    """The same; of the first trial the third one cannot be read."""
    batches, valid = uneven(hp)
    return ([*batches[:2], "no batch"] if hp["lr"] == 0.03 else batches), valid


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("technique", "memory"), [(None, "16MiB"), (shoal.Spilled(shards=4), "12MiB")]
)
def test_who_came_later_goes_on_in_the_array_up_to_its_own_large_batch(
    technique, memory, tmp_path, warm_workers
):
    """The last trial has the slot of the first one when that has failed, two steps behind."""
    recipe = shoal.Recipe(model=tall, data=cut_short, loss=loss)
    study = shoal.Study(
        *("late", recipe),
        space=shoal.grid(lr=[0.03, 0.01, 0.003, 0.001]),
        steps=STEPS,
        checkpoint_every=None,
        directory=tmp_path,
    )
    hardware = shoal.Hardware.virtual(devices=1, memory=memory)
    options = {"technique": technique, "workers": warm_workers, "progress": False}
    report = study.run(hardware=hardware, fuse=3, **options)
    rows = Snapshot.of(read_outline(report.directory)).trials
    words = [f"slot {n} of 3; for good from step 5 alone" for n in (1, 2, 0)]
    assert [row.numerics["array"] for row in rows[1:]] == words
    squads.assert_verified(report, recipe, failed=(0,))


def shuffled(hp):
    x, labels = zip(*few(hp)[0], strict=True)
    rows = torch.utils.data.TensorDataset(torch.cat(x), torch.cat(labels))
    return torch.utils.data.DataLoader(rows, 16, shuffle=True), few(hp)[0]


@pytest.mark.slow
def test_in_a_population_who_leaves_and_takes_over_follows_from_values(tmp_path, warm_workers):
    """Some take over what is frozen already, and leave as they do."""
    recipe = shoal.Recipe(
        model=small,
        data=shuffled,
        loss=loss,
        schedule=lambda optimizer, hp: Turns(optimizer, hp["at"]),
    )
    space = {"lr": shoal.log_uniform(1e-3, 1e-1), "at": shoal.choice(9.0, 14.0, 1000.0)}
    outcomes = []
    for devices in (1, 2):
        study = shoal.Study(
            *("population", recipe),
            space=space,
            trials=8,
            epochs=7,
            seed=1,
            pruner=shoal.PBT(interval=2, quantile=0.25),
            directory=tmp_path / str(devices),
        )
        hardware = shoal.Hardware.virtual(devices=devices, memory="64MiB")
        report = study.run(hardware=hardware, fuse=4, workers=warm_workers, progress=False)
        squads.assert_verified(report, recipe)
        rows = Snapshot.of(read_outline(report.directory)).trials
        losses = read_losses(report.directory)
        outcomes.append([(row.numerics["array"], losses[row.number]) for row in rows])
    assert outcomes[0] == outcomes[1]
    left = [epochs_of({"array": told})[-1] for told, _ in outcomes[0]]
    assert {8, 16} <= {epoch.step for epoch in left if epoch.for_good}


def test_a_trial_may_leave_its_array_at_a_rung(tmp_path, warm_workers):
    """It fell back past where it closed ranks, so that it stops at each rung again."""
    functions = {"data": lambda hp: (few(hp)[0],) * 2, "schedule": lambda o, hp: Turns(o, 7)}
    recipe = shoal.Recipe(model=small, loss=loss, **functions)
    study = shoal.Study(
        *("rungs", recipe),
        space=shoal.grid(lr=[0.03 * 0.8**n for n in range(18)]),
        steps=10,
        eval_every=2,
        pruner="asha",
        checkpoint_every=None,
        time_limit=120,
        directory=tmp_path,
    )
    hardware = shoal.Hardware.virtual(devices=1, memory="64MiB")
    report = study.run(hardware=hardware, fuse="18/6/2", workers=warm_workers, progress=False)
    assert {str(trial.state) for trial in report.trials} == {"FINISHED", "PRUNED"}
    rows = Snapshot.of(read_outline(report.directory)).trials
    left = [row for row in rows if epochs_of(row.numerics)[-1].for_good]
    assert {row.step for row in left} == {10}
    assert {epochs_of(row.numerics)[-1].step for row in left} == {6}
    squads.assert_verified(report, recipe)
