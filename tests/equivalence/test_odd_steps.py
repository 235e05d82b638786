"""Optimizers that give parameters other data, or draw; globals that factories set."""

from __future__ import annotations

import pytest
import squads
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.testing import assert_same, plain_loop
from shoal.ui.show import planned_reasons

HARDWARE = shoal.Hardware.virtual(devices=1, memory="64MiB")
SPACE = shoal.grid(lr=[0.03, 0.1, 0.2, 0.3])


class MaxNorm(torch.optim.SGD):
    """Replaces the data of its parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data * (1.5 / parameter.data.norm()).clamp(max=1)


class Noisy(torch.optim.SGD):
    """Draws in its step."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(torch.randn_like(parameter), alpha=1e-2)


class Counting(torch.optim.SGD):
    """Keeps something beside what torch's optimizers keep."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.calls = []

    def step(self, closure=None):
        self.calls.append(len(self.calls))
        super().step()


def clamps(optimizer, args, kwargs):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.data = parameter.data.clamp(-0.2, 0.2)


def hooked(parameters, lr):
    optimizer = torch.optim.SGD(parameters, lr=lr)
    optimizer.register_step_post_hook(clamps)
    return optimizer


class Clamped(nn.Sequential):
    """Gives a parameter other data in its forward."""

    def forward(self, x):
        self[0].weight.data = self[0].weight.data.clamp(-0.2, 0.2)
        return super().forward(x)


def layers():
    return nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2)


def data(hp):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(192, 16, generator=generator, dtype=torch.float64)
    y = (x[:, :4].sum(1) > 0).long()
    train, valid = TensorDataset(x[:128], y[:128]), TensorDataset(x[128:], y[128:])
    return DataLoader(train, 16, shuffle=True), DataLoader(valid, 32)


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def recipe(optimizer=None, model=nn.Sequential, **more):
    made = None
    if optimizer is not None:
        made = lambda named, hp: optimizer([p for _, p in named], lr=hp["lr"])  # noqa: E731
    build = lambda hp: model(*layers()).double()  # noqa: E731
    return shoal.Recipe(**{"model": build, "data": data, "loss": loss, "optimizer": made, **more})


@pytest.fixture
def run(tmp_path, warm_workers):
    def runs(of, fuse, **options):
        settings = {"space": SPACE, "epochs": 4, "directory": tmp_path / str(fuse), **options}
        study = shoal.Study("it", of, **settings)
        how = {"hardware": HARDWARE, "fuse": fuse, "workers": warm_workers}
        return study.run(**how)

    return runs


ODD = {
    "data replaced": recipe(MaxNorm),
    "data replaced by a hook": recipe(hooked),
    "draws": recipe(Noisy),
    "data replaced in the forward": recipe(MaxNorm, Clamped),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("fuse", [False, 4])
@pytest.mark.parametrize("of", ODD.values(), ids=ODD)
def test_what_is_saved_is_what_was_trained_and_as_alone(of, fuse, run):
    report = run(of, fuse)
    for trial in report.trials:
        assert not trial.error
        alone = plain_loop(of, trial.hp, trial.seed, epochs=4)
        state = trial.load_state()["model"]
        for name, tensor in alone.state()["model"].items():
            assert torch.allclose(state[name], tensor, rtol=0, atol=0 if not fuse else 1e-10), name
        found = trial.metrics["valid_loss"]
        assert found == pytest.approx(alone.history[-1]["metrics"]["valid_loss"], abs=1e-9)


class Tempered(nn.Sequential):
    """With a learned temperature, a parameter that has no dimensions."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.t = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        return super().forward(x) * self.t.exp()


@pytest.mark.parametrize(
    "of", [recipe(Counting), recipe(model=Tempered, clip_grad_norm=0.1)], ids=["keeps", "clips"]
)
def test_what_once_kept_trials_from_arrays_does_not(of, run):
    report = run(of, 4)
    assert set(squads.widths(report)) == {4}
    for trial in report.trials:
        alone = plain_loop(of, trial.hp, trial.seed, epochs=4).state()["model"]
        state = trial.load_state()["model"]
        assert all(torch.allclose(state[n], t, rtol=0, atol=1e-10) for n, t in alone.items())


CONFIG = {"scale": 1.0}


class Reads(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * CONFIG["scale"]


def sets(hp):
    CONFIG["scale"] = hp["scale"]
    return Reads(*layers()).double()


def weighs(hp):
    CONFIG["weights"] = torch.tensor([1.0, hp["scale"]], dtype=torch.float64)
    return data(hp)


def weighted(output, batch):
    return F.cross_entropy(output, batch[1], weight=CONFIG["weights"])


@pytest.mark.parametrize(
    ("of", "name"),
    [
        (shoal.Recipe(model=sets, data=data, loss=loss), "scale"),
        (recipe(data=weighs, loss=weighted), "weights"),
    ],
    ids=["model", "data"],
)
def test_trials_whose_making_sets_a_global_share_no_array_and_end_as_alone(of, name, run):
    report = run(of, 4, space=shoal.grid(lr=[0.1], scale=[1, 2]))
    snapshot = Snapshot.of(read_outline(report.directory))
    assert not snapshot.warnings
    assert {trial.numerics.get("array", "none") for trial in snapshot.trials} == {"none"}
    reasons = planned_reasons(report.directory)
    for trial in report.trials:
        (why,) = (line for line in reasons[trial.number] if line.startswith("unfused"))
        assert f"CONFIG.{name}', which its step reads, for all slots at once" in why
        assert_same(plain_loop(of, trial.hp, trial.seed, epochs=4), trial)


def test_trials_that_come_one_by_one_share_no_array_either(run):
    pytest.importorskip("optuna")
    of = shoal.Recipe(model=sets, data=data, loss=loss)
    space = {"lr": 0.1, "scale": shoal.uniform(1, 2)}
    report = run(of, 4, space=space, trials=5, sampler="tpe", generation=1)
    assert set(squads.widths(report)) == {1}


class Numbered(nn.Sequential):
    """Counts its instances, which no step reads."""

    made = 0

    def __init__(self, *layers):
        super().__init__(*layers)
        Numbered.made += 1
        CONFIG["made"] = Numbered.made


def test_what_only_making_a_model_reads_keeps_nobody_from_an_array(run):
    report = run(recipe(model=Numbered), 4)
    assert set(squads.widths(report)) == {4}
    assert not Snapshot.of(read_outline(report.directory)).warnings


class Counts(nn.Linear):
    """Keeps a number that is in its state dict, and in its forward."""

    def __init__(self):
        super().__init__(16, 2)
        self.seen = 0

    def forward(self, x):
        self.seen += self.training
        return super().forward(x) * (1 + 0.01 * self.seen)

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def test_what_modules_add_to_their_state_goes_on_with_the_trial(run, tmp_path, assert_alone):
    of = recipe(MaxNorm, lambda *layers: Counts())
    run(of, False, time_limit=0.1, checkpoint_every=0, epochs=8)
    report = run(of, False, checkpoint_every=0, epochs=8)
    assert_alone(report, report.trials, of, epochs=8)
