"""Attributes in the memory of a parameter: refused where the model's code reads them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from shoal.core.errors import SpecError
from shoal.recipes.modelaliases import refuse_aliases
from shoal.recipes.modelchecks import check_model
from shoal.recipes.optimizers import build_optimizer_of
from shoal.recipes.recipe import Recipe
from shoal.recipes.schedules import build_schedule


class Box:
    def __init__(self, inside):
        self.inside = inside


def closure(weight):
    data = weight.data
    return lambda: data


class Net(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.kept = keep(self.layer.weight)

    def forward(self, x):
        return self.layer(x) + x @ self.kept


@pytest.mark.parametrize(
    "keep",
    [
        lambda w: w.data,
        lambda w: w.detach()[0],
        lambda w: w.t(),
        lambda w: w.detach().numpy(),
        lambda w: [{"a": w.data}],
        lambda w: Box(w.data),
        closure,
    ],
)
def test_what_the_forward_reads_is_refused(keep):
    with pytest.raises(SpecError, match=r"reads 'kept', .*parameter 'layer\.weight'.*\.clone\(\)"):
        check_model(Net(keep))


@pytest.mark.parametrize("keep", [lambda w: w, lambda w: w.data.clone(), lambda w: [w], Box])
def test_the_parameter_itself_and_copies_are_not(keep):
    check_model(Net(keep))


def test_what_is_frozen_is_not_as_it_stays():
    net = Net(lambda w: w.data)
    refuse_aliases(net.requires_grad_(False))


def test_what_only_making_reads_is_not():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.randn(5, 3)
            self.build()

        def build(self):
            self.words = nn.Embedding.from_pretrained(self.table, freeze=False)

        def forward(self, x):
            return self.words(x)

    check_model(Words())


def test_what_lies_beside_a_parameter_is_not():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            both = torch.randn(8)
            self.first, self.second = nn.Parameter(both[:4]), both[4:]

        def forward(self, x):
            return x * self.first + self.second

    check_model(Halves())


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_what_torchs_norms_set_in_each_forward_is_not(norm):
    check_model(nn.Sequential(norm(nn.Linear(3, 3)), nn.LSTM(3, 3)))


HELD = {}
TABLE = torch.ones(3, 3)


class Reading(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        HELD["kept"] = keep(self.layer.weight)

    def forward(self, x):
        return self.layer(x) + x @ HELD["kept"]


def hooked(register):
    net = nn.Sequential(nn.Linear(3, 3))
    register(net, net[0].weight.data)
    return net


@pytest.mark.parametrize(
    "keep", [lambda w: w.data, lambda w: w.detach().numpy(), lambda w: [w.t()]]
)
def test_what_the_forward_reads_in_a_global_is_refused(keep):
    with pytest.raises(SpecError, match=r"code reads a tensor \(3x3\), .*'layer\.weight'"):
        check_model(Reading(keep))


@pytest.mark.parametrize("keep", [lambda w: w, lambda w: w.data.clone()])
def test_the_parameter_itself_in_a_global_is_not(keep):
    check_model(Reading(keep))


@pytest.mark.parametrize(
    "register",
    [
        lambda net, data: net.register_forward_hook(lambda *given: given[2] + data.sum()),
        lambda net, data: net[0].register_full_backward_hook(lambda *given: data.sum()),
        lambda net, data: net[0].bias.register_hook(lambda grad: grad + data[0]),
        lambda net, data: net[0].weight.register_post_accumulate_grad_hook(lambda p: data.zero_()),
    ],
)
def test_what_a_hook_closes_over_is_refused(register):
    with pytest.raises(SpecError, match=r"parameter '0\.weight' \(by \.data"):
        check_model(hooked(register))


def distance(output, batch):
    return output.sum() + HELD["kept"].sum()


class Clamping(torch.optim.SGD):
    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.all = [p.data for group in self.param_groups for p in group["params"]]


def hooking(named, hp):
    data = named[0][1].data
    optimizer = torch.optim.SGD([p for _, p in named], lr=0.1)
    optimizer.register_step_post_hook(lambda *given: data.clamp_(-1, 1))
    return optimizer


def filing(named, hp):
    HELD["kept"] = named[0][1].data
    return torch.optim.SGD([p for _, p in named], lr=0.1)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda named, hp: Clamping([p for _, p in named], lr=0.1), "the Clamping of .* 'all'"),
        (hooking, "the SGD of Recipe.optimizer=.* '_optimizer_step_post_hooks'"),
        (filing, "the recipe's code reads a tensor"),
    ],
)
def test_what_an_optimizer_keeps_is_refused(optimizer, words):
    recipe = Recipe(model=Reading, data=list, loss=distance, optimizer=optimizer)
    with pytest.raises(SpecError, match=f"{words}.* parameter 'weight'"):
        build_optimizer_of(recipe, nn.Linear(3, 3), {})


def test_what_a_schedule_closes_over_is_refused():
    def schedule(optimizer, hp):
        data = optimizer.param_groups[0]["params"][0].data
        return LambdaLR(optimizer, lambda step: 1.0 + 0 * data.clamp_(-1, 1).sum().item())

    recipe = Recipe(model=Reading, data=list, loss=distance, schedule=schedule)
    optimizer = torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)
    with pytest.raises(SpecError, match=r"LambdaLR of Recipe\(schedule=...\) keeps 'lr_lambdas'"):
        build_schedule(recipe, optimizer, {}, [])


class FromTable(nn.Module):
    """``TABLE`` is read as it is made, and never again."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(TABLE)

    def forward(self, x):
        return x @ self.weight


def test_a_table_that_only_making_reads_is_copied():
    net = FromTable()
    check_model(net, vars(Recipe(model=lambda hp: net, data=lambda hp: TABLE, loss=distance)))
    assert net.weight.data_ptr() != TABLE.data_ptr()
