"""Gradients and state that come later have no place: each cause has its own words."""

from __future__ import annotations

import inspect
import textwrap

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.core.errors import TrialError
from shoal.core.spec import ALIGNMENT
from shoal.core.units import round_up
from shoal.memory.layout import lay_out
from shoal.memory.store import describe
from shoal.runtime.placing.binding import Binding
from shoal.runtime.placing.unplaced import require_places
from shoal.testing import assert_same, plain_loop

pytestmark = pytest.mark.usefixtures("warm_plans")

CPU = torch.device("cpu")


@pytest.fixture
def binding():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    return Binding(model, optimizer, [list(dict(model.named_parameters()))], CPU)


@pytest.mark.parametrize(
    ("name", "key", "places", "words"),
    [
        ("0.weight", "exp_avg", (), r"^unfreeze '0.weight' in the schedule: .*LRScheduler"),
        ("1.weight", "exp_avg", (3,), r"'exp_avg' of '1.weight' is \(2, 2\) of float32 now, and"),
        ("1.weight", "more", (2, 2), r"state 'more' .* for '1.weight' in a later .* was: exp_avg"),
    ],
)
def test_each_cause_has_its_own_words(binding, name, key, places, words):
    found = {"exp_avg": torch.zeros(places)} if places else {}

    with pytest.raises(TrialError, match=words) as refused:
        binding.check_place(name, key, torch.zeros(2, 2), found)

    assert ("unfreeze" in str(refused.value)) == (name == "0.weight")


class Net(nn.Module):
    """A frozen layer and a head; the forward unfreezes it where ``late`` says when."""

    def __init__(self, late: int = 0) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.layer.requires_grad_(False)
        self.forwards, self.late = 0, late

    def forward(self, x):
        self.forwards += self.training
        if self.forwards == self.late:
            self.layer.requires_grad_(True)
        return self.head(self.layer(x))


def data(hp):
    random = torch.Generator().manual_seed(0)
    rows = TensorDataset(torch.randn(16, 4, generator=random), torch.arange(16) % 2)
    return DataLoader(rows, 4, shuffle=True), None


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


def example() -> type:
    """The class in the help of ``shoal.Recipe``."""
    text = inspect.getdoc(shoal.Recipe)
    lines = text[text.index("class Unfreeze") :].split("\n\n")[0].splitlines()
    found = {"torch": torch, "__name__": "of_the_help"}
    exec(f"{lines[0]}\n{textwrap.indent(textwrap.dedent(chr(10).join(lines[1:])), '    ')}", found)
    return found["Unfreeze"]


@pytest.fixture
def run(tmp_path, warm_workers):
    def run(**options):
        recipe = shoal.Recipe(
            **({"model": lambda hp: Net(), "data": data, "loss": loss} | options)
        )
        space = shoal.grid(lr=[0.01])
        study = shoal.Study("it", recipe, space=space, epochs=5, directory=tmp_path)
        hardware = shoal.Hardware.virtual(devices=1, memory="64MiB")
        report = study.run(hardware=hardware, workers=warm_workers, progress=False)
        return recipe, report.trials[0]

    return run


def test_a_forward_that_unfreezes_later_is_told_of_the_schedule(run):
    _, trial = run(model=lambda hp: Net(late=9))

    assert trial.state == "FAILED"
    assert trial.error_line.startswith("unfreeze 'layer.")


def test_so_is_one_whose_optimizer_has_no_state(run):
    """No room was planned for the gradients alone."""
    sgd = {"optimizer": lambda named, hp: torch.optim.SGD([p for _, p in named], lr=hp["lr"])}

    _, trial = run(model=lambda hp: Net(late=9), **sgd)

    assert trial.state == "FAILED"
    assert trial.error_line.startswith("unfreeze 'layer.weight' in the schedule")
    assert trial.error_line.endswith("no place for its gradient.")


def thawing(models, batch, optimizers, hp):
    """A step of one's own in which what was frozen is trained now and then."""
    (model,) = models.values() if isinstance(models, dict) else (models,)
    model.layer.requires_grad_(bool(batch[1][0]))
    optimizers.zero_grad()
    value = loss(model(batch[0]), batch)
    value.backward()
    optimizers.step()
    return value


def plainly(models, batch, optimizers, hp):
    """A step of one's own that leaves what is frozen as it is."""
    optimizers.zero_grad()
    value = loss(models(batch[0]), batch)
    value.backward()
    optimizers.step()
    return value


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"head.weight", "head.bias"}),
        ({"schedule": lambda o, hp: example()(o, lambda epoch: 1.0)}, None),
        ({"step": thawing, "loss": None}, None),
        ({"step": plainly, "loss": None}, {"head.weight", "head.bias"}),
    ],
)
def test_only_what_may_be_trained_is_planned_with_gradients(options, expected, tmp_path):
    given = {"model": lambda hp: Net(), "data": data, "loss": loss} | options
    study = shoal.Study(
        "it", shoal.Recipe(**given), space=shoal.grid(lr=[0.01]), epochs=1, directory=tmp_path
    )
    plan = study.plan(hardware=shoal.Hardware.virtual(devices=1, memory="64MiB"))

    shapes = {name: p.numel() * 4 for name, p in Net().named_parameters()}
    counted = sum(round_up(shapes[name], ALIGNMENT) for name in expected or shapes)
    (job,) = plan.jobs
    assert job.shards[0].gradient_bytes == counted
    weights_and_state = job.shards[0].owned_bytes + job.shards[0].state_bytes
    assert job.host_bytes < weights_and_state + counted


def test_other_hyperparameters_train_nothing_that_was_frozen():
    model = Net()
    trained = dict(model.head.named_parameters(prefix="head"))
    specs = {name: describe(name, p) for name, p in model.named_parameters()}
    grads = {name: specs[name] for name in trained}
    layout = lay_out([list(specs)], [[]], specs, {}, (), grads)
    require_places(dict(model.named_parameters()), layout, varies=True)

    model.layer.weight.requires_grad_(True)
    with pytest.raises(TrialError, match=r"is trained with the hyperparameters that.*shoal.PBT"):
        require_places(dict(model.named_parameters()), layout, varies=True)
    with pytest.raises(TrialError, match=r"^unfreeze 'layer.weight' in the schedule"):
        require_places(dict(model.named_parameters()), layout, varies=False)


def test_the_example_in_the_help_unfreezes_to_the_bits_of_the_plain_loop(run):
    unfreeze = example()
    options = {"schedule": lambda o, hp: unfreeze(o, lambda epoch: 1.0)}

    recipe, trial = run(**options, schedule_interval="epoch")

    plain = plain_loop(recipe, {"lr": 0.01}, trial.seed, epochs=5)
    assert_same(plain, trial)
    assert set(trial.load_state()["optimizer"]["state"]) == {
        *("layer.weight", "layer.bias", "head.weight", "head.bias")
    }
