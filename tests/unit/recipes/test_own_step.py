"""A step of one's own: what people get wrong, and what is around a call of it."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

import shoal
from shoal.core.errors import SpecError, TrialError
from shoal.core.spec import DeviceSpec, TrialSpec
from shoal.device import open_device
from shoal.recipes.ownstep import Losses, Tally, losses_of
from shoal.recipes.recipe import Recipe
from shoal.recipes.several import Models, Named, Optimizers, as_one_optimizer
from shoal.runtime.measuring.measure import Measurer
from shoal.runtime.wire.messages import Measure, Measured, Refused
from shoal.testing import plain_loop


def build(hp):
    return {"one": nn.Linear(3, 3), "other": nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1))}


def data(hp):
    return [torch.ones(2, 3)] * 3, None


def step(models, batch, optimizers, hp):
    loss = models["other"](models.one(batch)).square().mean()
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers.values():
        optimizer.step()
    return loss


def make(**changes) -> Recipe:
    return Recipe(**{"model": build, "data": data, "step": step, **changes})


def train(recipe, steps=2, **options):
    return plain_loop(recipe, {"lr": 0.1}, 0, steps=steps, **options)


# -- what a recipe may ask for ----------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"accumulate": 2}, "accumulate=2.* is called once for each batch. Give larger batches"),
        ({"clip_grad_norm": 1.0}, "clip_grad_norm=1.0.* clips its gradients itself"),
        ({"precision": "bf16"}, "precision='bf16'.* opens torch.autocast around its forwards"),
        ({"precision": "bf16-sr"}, "precision='bf16-sr'.* cannot be asked for with step="),
        ({"loss_rows": 4}, "loss_rows=4.* computes its losses itself"),
        ({"step": 3}, r"Recipe\(step=...\) is a callable, got int: 3"),
        ({"step": None, "evaluate": print}, r"evaluate=...\) belongs to a step of one's own"),
        ({"evaluate": print, "metrics": {"a": print}}, "so metrics would not be used"),
        ({"evaluate": print, "loss": print, "inputs": print}, "so loss, inputs would not be"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, words):
    with pytest.raises(SpecError, match=words):
        make(**changes)


def frozen(hp):
    return {name: module.requires_grad_(False) for name, module in build(hp).items()}


WRONG_MODELS = {
    "no step": (build, {"step": None}, "a mapping of 2 modules, which are trained by a step"),
    "a loss": (build, {"loss": print}, r"loss=...\) is about one model, .* Give Recipe\(eval"),
    "no modules": (lambda hp: {"one": 3}, {}, "returned int under 'one'; every value"),
    "empty": (lambda hp: {}, {}, "returned an empty mapping"),
    "a dot": (lambda hp: {"a.b": nn.Linear(1, 1)}, {}, "under the name 'a.b', which cannot"),
    "a number": (lambda hp: {1: nn.Linear(1, 1)}, {}, "under the name 1, which cannot be one"),
    "a method": (lambda hp: {"train": nn.Linear(1, 1)}, {}, "under the name 'train', which"),
    "a list": (lambda hp: [nn.Linear(1, 1)], {}, "returned list; return an nn.Module"),
    "nothing to train": (frozen, {}, "none of the modules has a parameter that requires"),
    "validation": (
        build,
        {"data": lambda hp: (data(hp)[0], data(hp)[0])},
        r"validation data and Recipe\(model=...\) a mapping.* Give Recipe\(evaluate=",
    ),
}


@pytest.mark.parametrize(("model", "changes", "words"), WRONG_MODELS.values(), ids=WRONG_MODELS)
def test_models_that_are_refused(model, changes, words):
    with pytest.raises(SpecError, match=words):
        train(make(model=model, **changes))


def with_a_step(function):
    return make(step=function)


def unknown_optimizer(models, batch, optimizers, hp):
    return optimizers["genarator"]


def unknown_model(models, batch, optimizers, hp):
    return models.genarator


def no_loss(models, batch, optimizers, hp):
    return None


def a_vector(models, batch, optimizers, hp):
    return {"one": models.one(batch)[0]}


def not_finite(models, batch, optimizers, hp):
    return {"one": step(models, batch, optimizers, hp), "other": float("inf")}


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (unknown_optimizer, SpecError, "no optimizer 'genarator'; there are one, other"),
        (unknown_model, SpecError, "there is no model 'genarator'; there are one, other"),
        (no_loss, SpecError, r"step=...\) returned NoneType; return the step's loss"),
        (a_vector, SpecError, r"returned shape \(3,\) under 'one'; return the step's loss"),
        (lambda *_: {}, SpecError, "returned an empty mapping"),
        (
            lambda models: 0,
            SpecError,
            r"called as \(models, batch, optimizers, hp\), got <lambda>",
        ),
        (not_finite, TrialError, "the loss 'other' is inf in step 1. A step of one's own has"),
    ],
)
def test_steps_that_are_refused(function, error, words):
    with pytest.raises(error, match=words):
        train(with_a_step(function))


def test_the_metric_of_a_study_may_be_one_that_the_step_names(tmp_path):
    make_study = functools.partial(
        shoal.Study, "k", make(), space={"lr": 0.1}, steps=1, directory=tmp_path
    )
    assert make_study(metric="train_generator").metric == "train_generator"
    assert make_study(metric="valid_gap").metric == "valid_gap"
    with pytest.raises(SpecError, match="metric='gap' is not measured"):
        make_study(metric="gap")


def test_the_plain_loop_knows_what_a_step_cannot():
    with pytest.raises(SpecError, match="takes whole batches and the newest weights"):
        train(make(), pieces=2)
    with pytest.raises(SpecError, match="takes whole batches and the newest weights"):
        train(make(), weights="one step old")


# -- what the planner finds out ---------------------------------------------------------


def measured(recipe):
    device = open_device(DeviceSpec(name="cpu:0", kind="virtual", memory=1 << 30, threads=1))
    trial = TrialSpec(number=0, hp={"lr": 0.1}, seed=0)
    return Measurer(recipe, device).answer(Measure(trial, cut=False))


@pytest.fixture
def refusal(one_thread):
    """What measuring a recipe is refused with."""

    def measure(recipe):
        reply = measured(recipe)
        assert isinstance(reply, Refused), reply
        return str(reply.cause or reply.error)

    return measure


def trains_nothing(models, batch, optimizers, hp):
    return models.one(batch).sum()


def never_cleared(models, batch, optimizers, hp):
    loss = models["other"](models.one(batch)).square().mean()
    loss.backward()
    optimizers.one.step()
    return loss


def lbfgs(models, batch, optimizers, hp):
    def closure():
        optimizers.zero_grad()
        loss = models["one"](batch).square().mean()
        loss.backward()
        return loss

    return optimizers.step(closure)


def test_a_step_that_trains_nothing(refusal):
    words = "was called 3 times and trained nothing: it called step() of none of its 2 optimizers"
    assert words in refusal(with_a_step(trains_nothing))


def steps_by_hand(models, batch, optimizers, hp):
    """Behind autograd's back, which counts no writes to ``data``."""
    loss = models.one(batch).square().mean()
    models.one.zero_grad()
    loss.backward()
    for parameter in models.one.parameters():
        parameter.data.add_(parameter.grad, alpha=-0.1)
    return loss


def test_one_that_changes_parameters_without_an_optimizer_is_taken():
    assert isinstance(measured(with_a_step(steps_by_hand)), Measured)


def steps_later(models, batch, optimizers, hp, number):
    for optimizer in optimizers.values() if number > 9 else ():
        optimizer.step()
    return sum(p.square().sum() for model in models.values() for p in model.parameters())


def test_one_that_begins_to_train_later_is_taken():
    assert isinstance(measured(with_a_step(steps_later)), Measured)


def test_a_step_that_goes_on_from_gradients_of_the_one_before(refusal):
    words = "goes on from gradients that the step before left, and gradients do not outlive"
    assert words in refusal(with_a_step(never_cleared))


def test_an_optimizer_whose_state_grows(refusal):
    recipe = make(
        step=lbfgs,
        optimizer=lambda named, hp: torch.optim.LBFGS([p for _, p in named], lr=0.1, max_iter=2),
    )
    assert "LBFGS keeps 'old_dirs', a list of tensors that grows" in refusal(recipe)


def test_a_step_that_keeps_something_of_its_own_is_said_to(one_thread):
    kept = []

    def remembers(models, batch, optimizers, hp):
        kept.append(batch)
        return step(models, batch * len(kept), optimizers, hp)

    notes = measured(make(step=remembers)).measure.notes
    assert any("two runs of the step from one state end on different bits" in n for n in notes)
    assert "it is not cut: a step of one's own is one unit, what runs in it is not known" in notes


def test_an_optimizer_that_steps_now_and_then_has_room_for_its_state(one_thread):
    def seldom(models, batch, optimizers, hp, number):
        loss = models["other"](models.one(batch)).square().mean()
        optimizers.one.zero_grad()
        optimizers.other.zero_grad()
        loss.backward()
        optimizers["other" if number == 100 else "one"].step()
        return loss

    layout = measured(make(step=seldom)).layout
    stateful = {field.spec.name for field in layout.shards[0].state.fields}
    assert stateful == {"one.weight", "one.bias", "other.1.weight", "other.1.bias"}


# -- what is around a call --------------------------------------------------------------


def test_modules_keep_the_modes_that_the_factory_left_them_in():
    seen = []

    def teacher_first(hp):
        models = build(hp)
        models["one"].eval()
        return models

    def looks(models, batch, optimizers, hp):
        seen.append((models.one.training, models["other"][0].training))
        models.one.train()
        return step(models, batch, optimizers, hp)

    train(make(model=teacher_first, step=looks), steps=4)
    assert seen == [(False, True)] * 4


def test_gradients_are_cleared_before_each_call_and_its_number_is_told():
    seen = []

    def looks(models, batch, optimizers, hp, *, number):
        seen.append((number, [p.grad for m in models.values() for p in m.parameters()]))
        return step(models, batch, optimizers, hp)

    train(make(step=looks), steps=3)
    assert seen == [(number, [None] * 4) for number in range(3)]


def test_what_a_bare_module_and_one_optimizer_are_given_as():
    def looks(models, batch, optimizers, hp):
        assert isinstance(models, nn.Linear)
        assert isinstance(optimizers, torch.optim.SGD)
        loss = models(batch).sum()
        optimizers.zero_grad()
        loss.backward()
        optimizers.step()
        return loss

    sgd = lambda named, hp: torch.optim.SGD([p for _, p in named], lr=0.1)  # noqa: E731
    train(make(model=lambda hp: nn.Linear(3, 3), step=looks, optimizer=sgd))


def test_losses_as_numbers():
    assert losses_of(torch.tensor(2.0)) == Losses(2.0)
    assert losses_of({"a": 1, "b": torch.tensor([2.0])}) == Losses(3.0, {"a": 1.0, "b": 2.0})
    assert losses_of({"loss": 5.0, "b": 2.0}) == Losses(5.0, {"b": 2.0})
    assert Losses(float("nan")).nonfinite() == "the loss is nan"
    assert Losses(1.0, {"b": float("inf")}).nonfinite() == "the loss 'b' is inf"


def test_a_tally_is_the_mean_and_goes_on_where_it_was():
    tally = Tally()
    tally.add({"a": 1.0})
    tally = Tally.unpack(tally.pack())
    tally.add({"a": 2.0, "b": 4.0})
    assert tally.take() == {"train_a": 1.5, "train_b": 4.0}
    assert tally.take() == {}


# -- several as one ---------------------------------------------------------------------


def test_a_mapping_is_read_only_and_survives_a_copy():
    named = Named({"a": 1}, "model")
    assert copy.deepcopy(named).a == 1
    assert dict(named) == {"a": 1}
    with pytest.raises(AttributeError, match="read-only"):
        named.a = 2


def test_models_have_the_names_of_their_parameters_and_ties_once():
    shared = nn.Linear(2, 2)
    models = Models({"a": shared, "b": shared})
    assert [name for name, _ in models.named_parameters()] == ["a.weight", "a.bias"]
    assert models["b"] is models.named().b is shared


def test_optimizers_as_one_survive_a_copy():
    model = nn.Linear(2, 2)
    given = {"a": torch.optim.Adam([model.weight]), "b": torch.optim.SGD(model.parameters(), 0.1)}
    one = as_one_optimizer(given)
    model(torch.ones(1, 2)).sum().backward()
    one.step()
    twin, other = copy.deepcopy((model, one))
    assert isinstance(other, Optimizers)
    assert other.param_groups[0]["params"][0] is twin.weight
    assert set(other.state[twin.weight]) == {"a/step", "a/exp_avg", "a/exp_avg_sq"}
    other.state[twin.weight] = {"a/step": 3}
    assert other.members["a"].state[twin.weight]["step"] == 3
    assert list(one.state) == [model.weight] or len(one.state) == 2
