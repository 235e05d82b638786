"""Trials over one frozen base: an array has it in memory once, and each is its slot alone."""

from __future__ import annotations

import copy

import fusing
import pytest
import squads
import torch
from listening import Heard
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.core import arraykeys
from shoal.core.event import PeakMeasured
from shoal.fusion import Member, dry_run
from shoal.fusion.array import Array
from shoal.fusion.likeness import copies
from shoal.fusion.rows.stacked import is_of_base
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.plain import array_loop
from shoal.planning.based import BASE
from shoal.recipes.recipe import HyperParameters, build_model, read_data
from shoal.rng import capture_rng, seed_all
from shoal.testing import assert_same
from shoal.verify.record import read_losses

WIDTH = 384  # two such layers in float64 are more than the MiB from which a base is looked at


class Adapted(nn.Module):
    """A frozen layer with a low-rank addition."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, dtype=torch.float64).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False, dtype=torch.float64)
        self.up = nn.Linear(2, WIDTH, bias=False, dtype=torch.float64)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        return (self.base(x) + self.up(self.drop(self.down(x)))).tanh()


def layers(hp):
    made = [Adapted(hp["drop"]), Adapted(hp["drop"])]
    return nn.Sequential(*made, nn.Linear(WIDTH, 3, dtype=torch.float64))


def pretrained(hp):
    """The same base for every trial, with adapters of its own."""
    model = layers(hp)
    random = torch.Generator().manual_seed(7)
    for layer in model[:-1]:
        layer.base.weight.data.normal_(0.0, 0.05, generator=random)
        layer.base.bias.data.zero_()
    return model


def rows(count, seed):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, WIDTH, generator=random, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (count,), generator=random))


def data(hp):
    return DataLoader(rows(20, 0), batch_size=4, shuffle=True), DataLoader(rows(8, 1), 4)


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


def adam(named, hp):
    return torch.optim.AdamW([p for _, p in named if p.requires_grad], lr=hp["lr"])


class Shrinking(torch.optim.AdamW):
    """Writes to what is frozen too, by code that no counter of torch's sees."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.data.mul_(0.99)


def shrinking(named, hp):
    return Shrinking([p for _, p in named], lr=hp["lr"])


def recipe(**changes):
    settings = {"model": pretrained, "data": data, "loss": loss, "optimizer": adam}
    return shoal.Recipe(**(settings | changes))


SPACE = shoal.grid(lr=[1e-2, 1e-3, 3e-3], drop=[0.0, 0.2])


def keys(report):
    return [dict(row.numerics) for row in Snapshot.of(read_outline(report.directory)).trials]


def assert_slots(report, of, **loop):
    """Each trial is its slot with nobody beside it, bit for bit, and near the plain loop."""
    losses, slots = read_losses(report.directory), squads.slots_of(report)
    for trial in report.trials:
        assert not trial.error, trial.error
        slot, width = slots[trial.number]
        plain = array_loop(of, trial.hp, trial.seed, slot=slot, width=width, one_base=True, **loop)
        assert_same(plain, trial, losses=losses[trial.number])
    squads.assert_near(report.trials, of, 1e-9, **loop)


@pytest.mark.parametrize("fuse", ["3-eager", "3-traced"])
@pytest.mark.parametrize("changes", [{}, {"clip_grad_norm": 0.5, "accumulate": 2}])
def test_each_trial_is_its_slot_alone_and_near_the_plain_loop(changes, fuse, run_study):
    """Six trials in arrays of three: the last three come into slots that were others'."""
    of, heard = recipe(**changes), Heard()
    report = run_study(of, SPACE, epochs=2, fuse=fuse, callbacks=[heard])

    assert {key["array_weights"] for key in keys(report)} == {"frozen ones once"}
    assert len({key[BASE] for key in keys(report)}) == 1
    assert set(squads.widths(report)) == {3}
    assert_slots(report, of, epochs=2)
    assert all(peak.peak_bytes <= peak.predicted_bytes for peak in heard.of(PeakMeasured))


@pytest.mark.sample(5)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", fusing.MODELS)
def test_a_frozen_backbone_of_any_architecture_is_there_once(name, monkeypatch):
    """One step is the step alone, and no part of it runs slot by slot for that."""
    monkeypatch.setattr(arraykeys, "LEAST_BASE_BYTES", 1)  # these models are small
    recipe, hps = fusing.recipe(name, clip_grad_norm=None), fusing.hps(name)
    members, batches, base = [], [], None
    for seed, values in enumerate(hps):
        hp = HyperParameters(values)
        seed_all(seed)
        module = build_model(recipe, hp)
        base = base or copy.deepcopy(module.state_dict())
        module.load_state_dict(base)
        named = dict(module.named_parameters())
        for parameter in list(named.values())[:-2]:
            parameter.requires_grad_(False)
        optimizer = fusing.optimizer([(n, p) for n, p in named.items() if p.requires_grad], hp)
        rng = capture_rng(torch.device("cpu"))
        members.append(
            Member(
                recipe=recipe, hp=hp, module=module, optimizer=optimizer, schedule=None, rng=rng
            )
        )
        batches.append(next(iter(read_data(recipe, hp)[0])))

    assert dry_run(members, batches, one_base=True) == ""
    notes = {}
    for one_base in (False, True):
        array = Array(copies(members), one_base=one_base)
        assert bool(array.crew.stacked.base) == one_base
        array.step(batches)
        notes[one_base] = list(array.notes)
    assert notes[True] == notes[False]


@pytest.mark.slow
def test_it_is_verified(run_study):
    of = recipe(clip_grad_norm=0.5)

    report = run_study(of, SPACE, epochs=2, fuse=3, checkpoint_every=0)
    squads.assert_verified(report, of)


class Merged(Adapted):
    """Adds what it has learnt to a copy of the frozen weight, in place."""

    def forward(self, x):
        weight = self.base.weight.clone()
        weight += self.up.weight @ self.down.weight
        return self.drop(nn.functional.linear(x, weight, self.base.bias)).tanh()


def merged(hp):
    model = pretrained(hp)
    for layer in model[:-1]:
        layer.__class__ = Merged
    return model


@pytest.mark.slow
def test_what_is_written_into_a_copy_of_the_base_is_each_slots_own(run_study):
    of = recipe(model=merged)
    report = run_study(of, SPACE, epochs=2, fuse=3)
    assert {key["array_weights"] for key in keys(report)} == {"frozen ones once"}
    assert set(squads.widths(report)) == {3}
    assert_slots(report, of, epochs=2)


class Headed(nn.Module):
    """Keeps a head that is drawn anew for each trial beside the trained one, as peft does."""

    def __init__(self, model) -> None:
        super().__init__()
        self.model, self.before = model, nn.Linear(WIDTH, 3, dtype=torch.float64)
        self.before.requires_grad_(False)

    def forward(self, x):
        return self.model(x) + 0.1 * self.before(x)


def headed(hp):
    return Headed(pretrained(hp))


@pytest.mark.slow
def test_a_small_frozen_tensor_that_is_each_trials_own_parts_nobody(run_study):
    of = recipe(model=headed)
    report = run_study(of, SPACE, epochs=2, fuse=3)
    assert len({key[BASE] for key in keys(report)}) == 1
    heads = [trial.load_state()["model"]["before.weight"] for trial in report.trials]
    assert not torch.equal(heads[0], heads[1])
    assert_slots(report, of, epochs=2)


@pytest.mark.full
def test_compiled_code_has_it_once_too(run_study):
    of = recipe(clip_grad_norm=0.5)
    report = run_study(of, shoal.grid(lr=[1e-2, 1e-3], drop=[0.1]), epochs=2, fuse="2-compiled")
    assert {key["array_weights"] for key in keys(report)} == {"frozen ones once"}
    assert set(squads.kinds(report)) == {"compiled"}
    squads.assert_near(report.trials, of, 1e-9, epochs=2)
    squads.assert_verified(report, of)


@pytest.mark.slow
def test_a_population_goes_on_over_one_base(tmp_path, warm_workers):
    of = recipe()
    study = shoal.Study(
        "population",
        of,
        space={"lr": shoal.log_uniform(1e-4, 1e-2), "drop": shoal.choice(0.1)},
        trials=4,
        epochs=4,
        pruner=shoal.PBT(quantile=0.5, vary=("lr",)),
        directory=tmp_path,
    )
    hardware = shoal.Hardware.virtual(devices=1, memory="64MiB")
    report = study.run(hardware=hardware, workers=warm_workers, progress=False, fuse=2)
    assert [trial.error for trial in report.trials] == [""] * 4
    assert {key["array_weights"] for key in keys(report)} == {"frozen ones once"}
    assert any(trial.inherited for trial in report.trials)
    squads.assert_verified(report, of)


def of_two(hp):
    """One of two bases."""
    model = layers(hp)
    random = torch.Generator().manual_seed(hp["init"])
    for layer in model[:-1]:
        layer.base.weight.data.normal_(0.0, 0.05, generator=random)
    return model


@pytest.mark.slow
def test_a_population_of_two_bases_has_a_row_each(tmp_path, warm_workers):
    """One that goes on from another's state has the base that is in it."""
    of = recipe(model=of_two)
    study = shoal.Study(
        "population",
        of,
        space={
            "lr": shoal.log_uniform(1e-4, 1e-2),
            "drop": shoal.choice(0.1),
            "init": shoal.choice(1, 2),
        },
        trials=6,
        epochs=3,
        pruner=shoal.PBT(quantile=0.5, vary=("lr",)),
        directory=tmp_path,
    )
    hardware = shoal.Hardware.virtual(devices=1, memory="64MiB")
    report = study.run(hardware=hardware, workers=warm_workers, progress=False, fuse=3)
    first = [trial.hp["init"] for trial in report.trials]
    taken = [(t.hp["init"], first[one["source"]]) for t in report.trials for one in t.inherited]
    assert any(mine != sources for mine, sources in taken)
    assert not any("array_weights" in key for key in keys(report))
    squads.assert_verified(report, of)


def test_an_array_of_four_holds_the_base_once(tmp_path):
    held = {}
    for name, model in (("one", pretrained), ("own", layers)):
        study = shoal.Study(
            name, recipe(model=model), space=SPACE, epochs=1, directory=tmp_path, seed=3
        )
        hardware = shoal.Hardware.virtual(devices=1, memory="256MiB")
        plan = study.plan(hardware=hardware, fuse="4-eager")
        assert {job.array.width for job in plan.jobs} == {4}
        assert {BASE in job.numerics for job in plan.jobs} == {name == "one"}
        held[name] = plan.jobs[0].held_bytes
    frozen = sum(p.nbytes for p in layers({"drop": 0.0}).parameters() if is_of_base(p))
    assert held["own"] - held["one"] == 3 * frozen


def test_who_writes_to_the_base_is_refused_and_nothing_of_it_is_saved(run_study):
    report = run_study(recipe(optimizer=shrinking), SPACE, epochs=2, fuse=3)

    for trial in report.trials:
        assert trial.state == "FAILED"
        assert (
            "'0.base.weight' is frozen, and the trials of its array have it in memory once"
            in trial.error_line
        )
