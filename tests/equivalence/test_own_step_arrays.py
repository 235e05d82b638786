"""Trials with a step of their own in arrays: each slot's bits, and what cannot be an array."""

from __future__ import annotations

import threading
from dataclasses import replace

import companies
import numpy as np
import ownsteps
import pytest
import squads
import torch
from listening import Heard
from processes import Runner
from test_own_step import nan_in_step_3, with_short_leases
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.core.event import PeakMeasured, TrialParked, TrialReplanned
from shoal.core.spec import HyperParameters
from shoal.fusion import Array, Declined, Member, dry_run
from shoal.recipes.optimizers import build_optimizer_of
from shoal.recipes.ownstep import Modes, OwnStep
from shoal.recipes.recipe import build_model, read_data
from shoal.recipes.schedules import build_schedule
from shoal.rng import capture_rng, seed_all
from shoal.testing import array_loop, plain_loop, same_bits

KINDS = (*ownsteps.KINDS, "penalty")
FULL = [pytest.param(kind, marks=pytest.mark.full) for kind in ("distillation", "target")]
SOME = ["gan", "actor-critic", "penalty", "autocast", *FULL]
RATES = (1e-2, 2e-2, 3e-2)


@pytest.fixture
def train(run_study):
    """Run a study as arrays of three, and hold each trial to its slot's loop."""

    def run(kind, *, recipe=None, space=None, loop=None, width=3, **options):
        recipe = recipe or ownsteps.recipe(kind)
        loop = loop or {"epochs": 2}
        options.setdefault("metric", ownsteps.METRICS.get(kind, "valid_loss"))
        space = space or shoal.grid(lr=list(RATES))
        report = run_study(recipe, space, fuse=width, **loop, **options)
        squads.assert_arrayed(report, report.trials, recipe, width, **loop)
        return report

    return run


# -- bits ---------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", SOME)
def test_each_slot_ends_on_its_own_bits(kind, train):
    heard = Heard()
    train(kind, loop={"steps": 7, "eval_every": 3}, callbacks=[heard])
    peaks = heard.of(PeakMeasured)
    assert peaks
    assert all(peak.peak_bytes <= peak.predicted_bytes for peak in peaks)
    assert not heard.of(TrialReplanned)


@pytest.mark.slow
def test_more_trials_than_slots_in_short_leases_on_two_devices(train, monkeypatch):
    with_short_leases(monkeypatch)
    heard = Heard()
    rates = [1e-2 * (i + 1) for i in range(5)]
    train("gan", space=shoal.grid(lr=rates), width=2, devices=2, callbacks=[heard])
    assert heard.of(TrialParked)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slot", [0, 2])
def test_but_for_rounding_it_is_the_plain_loop(kind, slot, one_thread):
    """In float64, to 1e-9 of the largest."""
    recipe = widened(ownsteps.recipe(kind))
    loop = {"steps": 7, "eval_every": 3}
    alone = plain_loop(recipe, {"lr": 0.01}, 4, **loop)
    found = array_loop(recipe, {"lr": 0.01}, 4, slot=slot, width=3, **loop)
    assert torch.equal(alone.rng.torch, found.rng.torch)
    for name, tensor in alone.model.state_dict().items():
        torch.testing.assert_close(
            found.model.state_dict()[name], tensor, rtol=1e-9, atol=1e-9, msg=name
        )
    for mine, its in zip(alone.history, found.history, strict=True):
        assert mine["metrics"] == pytest.approx(its["metrics"], rel=1e-7, abs=1e-9)


def widened(recipe):
    """The recipe in float64."""

    def model(hp):
        found = recipe.model(hp)
        for module in found.values() if isinstance(found, dict) else [found]:
            module.double()
        return found

    def data(hp):
        train, valid = ownsteps.pictures(hp)
        tensors = [source.dataset.tensors for source in (train, valid)]
        sets = [TensorDataset(x.double(), y) for x, y in tensors]
        return DataLoader(sets[0], 8, shuffle=True), DataLoader(sets[1], 4)

    evaluate = Wide(recipe.evaluate) if recipe.evaluate else None
    return replace(recipe, model=model, data=data, step=Wide(recipe.step), evaluate=evaluate)


class Wide:
    """A step that makes float64 tensors."""

    def __init__(self, function):
        self.function = function
        self.__wrapped__ = function  # its arguments are the function's

    def __call__(self, *args, **kwargs):
        torch.set_default_dtype(torch.float64)
        try:
            return self.function(*args, **kwargs)
        finally:
            torch.set_default_dtype(torch.float32)


# -- slots that differ --------------------------------------------------------------------


def test_slots_that_do_different_things_are_right_all_the_same(train):
    """The generators step in every, every second and every third step."""
    space = shoal.grid(lr=[0.01], every=[1, 2, 3])
    train("penalty", space=space, width=3, loop={"steps": 7}, recipe=by_floats())


@pytest.mark.parametrize(
    "words", [("uuuuu", "uuuuu", "uuuuu"), ("uumsu", "zuzzu", "suuzm")], ids=["usual", "roots"]
)
def test_a_slot_has_gradients_of_the_models_that_its_loss_comes_from_alone(words, one_thread):
    """Not zeros of others, and nothing of what a neighbour's weights make of its tensors."""
    recipe = companies.own_recipe(companies.sgd)
    hps = [{"lr": 0.1, "drop": 0.2, "data": at, "word": word} for at, word in enumerate(words)]
    trials = [companies.Trial(slot, hp, joins=slot % 2) for slot, hp in enumerate(hps)]
    companies.assert_each_as_alone(recipe, 3, "eager", trials)


@pytest.mark.parametrize("nodes", [0, 700, 20_000])
def test_bits_do_not_depend_on_what_a_thread_has_computed_before(nodes):
    """Of equally ready nodes autograd runs first what its thread has numbered higher."""
    found = []

    def work(before: int) -> None:
        weight = torch.ones((), requires_grad=True)
        for _ in range(before):
            weight.view(())
        hp = {"lr": 0.01, "every": 1}
        found.append(array_loop(by_floats(), hp, 0, slot=0, width=3, steps=4).model)

    for before in (0, nodes):  # each in a thread that has no number yet
        thread = threading.Thread(target=work, args=(before,))
        thread.start()
        thread.join()
    first, second = (model.state_dict() for model in found)
    assert all(same_bits(first[name], second[name]) for name in first)


def gradient_penalty(models, batch, optimizers, hp):
    """WGAN-GP: what the discriminator's gradient at made rows is, is in its loss."""
    rows = batch[0]
    fake = models.generator(torch.randn(len(rows), 4))
    share = torch.rand(len(rows), 1)
    mixed = (share * rows + (1 - share) * fake.detach()).requires_grad_()
    (slope,) = torch.autograd.grad(models.discriminator(mixed).sum(), mixed, create_graph=True)
    loss = models.discriminator(fake.detach()).mean() - models.discriminator(rows).mean()
    loss = loss + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()
    optimizers.discriminator.zero_grad()
    loss.backward()
    optimizers.discriminator.step()
    return loss


def two_models(hp):
    rows = [nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(16, 1)]
    return {"generator": nn.Linear(4, 8), "discriminator": nn.Sequential(*rows)}


def one_optimizer(parameters, hp):
    some = [p for name, p in parameters if name.startswith("discriminator")]
    return {"discriminator": torch.optim.Adam(some, lr=hp["lr"])}


def rows_of_eight(hp):
    drawn = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(drawn), 16), None


@pytest.mark.slow
def test_gradients_of_gradients_are_summed_alike_in_slots_that_were_filled_again(train):
    """A newcomer's thread has numbered less: its neighbours' nodes came in between."""
    recipe = shoal.Recipe(
        model=two_models, data=rows_of_eight, optimizer=one_optimizer, step=gradient_penalty
    )
    space = shoal.grid(lr=[1e-2, 3e-3], k=[0.0, 1.0], j=[0.0, 1.0])
    train("gan", recipe=recipe, space=space, width=4, loop={"epochs": 5}, metric="train_loss")


def by_floats():
    """What differs in a step's counts is told apart in planning; as a float it is not."""
    recipe = ownsteps.recipe("penalty")
    return replace(recipe, step=every_as_a_float)


def every_as_a_float(models, batch, optimizers, hp, number):
    times = {"every": round(hp["lr"] * 100)}
    return ownsteps.penalty_step(models, batch, optimizers, times, number)


def test_a_slot_whose_loss_is_no_number_leaves_its_neighbours_alone(run_study):
    recipe = replace(ownsteps.recipe("distillation"), step=nan_in_step_3)
    report = run_study(recipe, shoal.grid(lr=[1e-2, 0.5, 3e-2]), steps=5, fuse=3)
    first, bad, last = report.trials
    assert bad.state == "FAILED"
    assert "the loss is nan in step 3" in bad.error
    squads.assert_arrayed(report, [first, last], recipe, 3, steps=5)


def raises_in_step_3(models, batch, optimizers, hp, number):
    if hp["lr"] == 0.5 and number == 2:
        models.student(batch[0][:, :, :3])  # inside a pass of the model
    return ownsteps.distillation_step(models, batch, optimizers, hp)


def test_a_slot_whose_call_of_a_model_raises_fails_alone(run_study):
    recipe = replace(ownsteps.recipe("distillation"), step=raises_in_step_3)
    report = run_study(recipe, shoal.grid(lr=[1e-2, 0.5, 3e-2]), steps=5, fuse=3)
    first, bad, last = report.trials
    assert bad.state == "FAILED"
    assert "shapes cannot be multiplied" in bad.error
    squads.assert_arrayed(report, [first, last], recipe, 3, steps=5)


@pytest.mark.full
def test_killed_and_run_again_in_arrays(tmp_path):
    runner = Runner(tmp_path, maker="ownsteps", kind="gan", lr=RATES)
    words = ("--fuse", "3")
    for instant in ("kill after CheckpointWritten", "kill before TrialFinished"):
        process = runner.start(instant, words=words, SHOAL_TEST_PACE_S="0.05")
        assert process.wait() == -9, runner.words()
    assert runner.start(words=words).wait() == 0, runner.words()
    recipe = ownsteps.recipe("gan")
    report = shoal.open(runner.place, recipe)
    squads.assert_arrayed(report, report.trials, recipe, 3, epochs=3)


# -- what is declined ---------------------------------------------------------------------


def members_of(recipe, count=2):
    """Trials as they begin, and a batch for each."""
    members, batches = [], []
    for number in range(count):
        hp = HyperParameters({"lr": 0.01 * (number + 1)})
        seed_all(number)
        model = build_model(recipe, hp)
        modes = Modes(recipe, model)
        train, _ = read_data(recipe, hp)
        optimizer = build_optimizer_of(recipe, model, hp)
        member = Member(
            recipe=recipe, hp=hp, module=model, optimizer=optimizer, modes=modes,
            schedule=build_schedule(recipe, optimizer, hp, train),
            rng=capture_rng(torch.device("cpu")),
        )  # fmt: skip
        members.append(member)
        batches.append(next(iter(train)))
    return members, batches


@pytest.mark.parametrize("kind", KINDS)
def test_a_dry_run_trusts_them(kind, one_thread):
    members, batches = members_of(ownsteps.recipe(kind))
    before = [p.clone() for member in members for p in member.module.parameters()]
    assert dry_run(members, batches) == ""
    after = [p for member in members for p in member.module.parameters()]
    assert all(map(same_bits, before, after))


def normed(hp):
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())


def normed_step(model, batch, optimizer, hp):
    loss = (model(batch[0]).mean((2, 3)) - batch[1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def normed_data(hp):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(16, 3, 8, 8, generator=random)
    return DataLoader(TensorDataset(x, x[:, :1].mean((2, 3)).expand(-1, 8)), batch_size=16), None


NORMED = shoal.Recipe(model=normed, data=normed_data, step=normed_step)


def test_what_rounding_alone_makes_of_a_bias_before_a_norm_declines_nothing(one_thread):
    """Its gradient is 0 but for rounding, and Adam's step is as long for that as for any."""
    assert dry_run(*members_of(NORMED, count=3)) == ""


def test_a_weight_that_ends_elsewhere_for_another_reason_is_found(one_thread, monkeypatch):
    given = Array.step

    def steps_twice(self, batches):
        found = given(self, batches)
        with torch.no_grad():  # of one slot, by a thousandth of Adam's step
            self.member(1).module[0].bias.add_(2e-5)
        return found

    monkeypatch.setattr(Array, "step", steps_twice)
    words = dry_run(*members_of(NORMED, count=3))
    assert words == "one step as an array is not the step alone: slot 1: '0.bias' is another one."


def with_graph(models, batch, optimizers, hp):
    loss = models.student(batch[0]).square().mean()
    optimizers.student.zero_grad()
    loss.backward(create_graph=True)
    optimizers.student.step()
    return loss.detach()


def draws_from_numpy(models, batch, optimizers, hp):
    x = batch[0] + float(np.random.rand())
    return ownsteps.distillation_step(models, (x, batch[1]), optimizers, hp)


def writes_into_an_output(models, batch, optimizers, hp):
    output = models.student(batch[0])
    output.mul_(2)
    loss = output.square().mean()
    optimizers.student.zero_grad()
    loss.backward()
    optimizers.student.step()
    return loss


def imports_grad(models, batch, optimizers, hp):
    loss = models.student(batch[0]).square().mean()
    parameters = list(models.student.parameters())
    for parameter, gradient in zip(parameters, grad(loss, parameters), strict=True):
        parameter.grad = gradient
    optimizers.student.step()
    return loss


grad = torch.autograd.grad  # before anybody looks


def keeps_to_float32(models, batch, optimizers, hp):
    models.student(torch.ones(2, 1, 8, 8, dtype=torch.float32))
    return ownsteps.distillation_step(models, batch, optimizers, hp)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (with_graph, "a backward with create_graph= or inputs= cannot be done for all slots"),
        (draws_from_numpy, "draws from random or NumPy, which have one stream for all slots"),
        (writes_into_an_output, "slot 0 fails as part of an array: RuntimeError: Output 0 of"),
        (imports_grad, "slot 0 fails as part of an array: RuntimeError: "),
        (keeps_to_float32, "none of the trials can do a step in float64"),
    ],
)
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_what_is_declined_in_words(step, words, one_thread):
    recipe = replace(ownsteps.recipe("distillation"), step=step)
    assert words in dry_run(*members_of(recipe))


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_what_is_declined_trains_unfused(run_study, assert_alone):
    recipe = replace(ownsteps.recipe("distillation"), step=writes_into_an_output)
    report = run_study(recipe, shoal.grid(lr=list(RATES)), steps=3, fuse=3)
    assert_alone(report, report.trials, recipe, steps=3)


def late(models, batch, optimizers, hp):
    """What cannot be done in an array comes with a batch of its own."""
    if batch[1].min() >= 0:
        return ownsteps.distillation_step(models, batch, optimizers, hp)
    loss = models.student(batch[0]).square().mean()
    optimizers.student.zero_grad()
    loss.backward(inputs=list(models.student.parameters()))
    nn.utils.clip_grad_norm_(models.student.parameters(), 1.0)
    optimizers.student.step()
    return loss


def with_one_such_batch(hp):
    generator = torch.Generator().manual_seed(3)
    x, y = torch.rand(7, 8, 1, 8, 8, generator=generator), torch.arange(8) % 3
    return [(x[i], y if i != 4 else y - 9) for i in range(6)], None


def test_what_turns_out_later_sends_the_trials_home(run_study):
    heard = Heard()
    recipe = ownsteps.recipe("distillation")
    recipe = replace(recipe, step=late, data=with_one_such_batch, evaluate=None)
    options = {"fuse": 3, "metric": "train_loss", "checkpoint_every": 0, "callbacks": [heard]}
    report = run_study(recipe, shoal.grid(lr=list(RATES)), steps=6, **options)
    assert [trial.state for trial in report.trials] == ["FINISHED"] * 3, report
    moved = heard.of(TrialReplanned)
    assert len(moved) == 3
    assert "a backward with create_graph= or inputs=" in moved[0].reason


# -- what a pass for all slots does not see --------------------------------------------------


class Raises(nn.Module):
    """A part that asks its input whether to raise."""

    def forward(self, x):
        if bool(x.isnan().any()):
            raise ValueError("no number in a batch")
        return x


class Scaled(nn.Module):
    """A model whose code has a number; ``kept_*`` is what its last part was at the beginning."""

    def __init__(self):
        super().__init__()
        self.guard = Raises()
        self.register_buffer("shift", torch.zeros(3))
        self.first, self.last, self.scale = nn.Linear(8, 8), nn.Linear(8, 3), 1.0
        self.register_buffer("kept_weight", self.last.weight.detach().clone())
        self.register_buffer("kept_bias", self.last.bias.detach().clone())

    def forward(self, x):
        x = self.guard(x)
        if bool((x > 100).any()):
            raise ValueError("a large number in a batch")
        return self.last(torch.tanh(self.first(x)) * self.scale) + self.shift


def descend(model, batch, optimizer, more=0.0):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1]) + more
    loss.backward()
    optimizer.step()
    return loss


def scales(model, batch, optimizer, hp, number):
    model.scale = 1.0 + number // 2
    return descend(model, batch, optimizer)


def gets_a_hook(model, batch, optimizer, hp, number):
    if number == 2:
        model.first.register_forward_hook(lambda module, given, output: output * 2)
    return descend(model, batch, optimizer)


def gets_a_parameter(model, batch, optimizer, hp, number):
    if number == 2:
        model.first.weight = nn.Parameter(torch.zeros(8, 8))
    return descend(model, batch, optimizer)


def hooks_for_a_while(model, batch, optimizer, hp, number):
    hook = model.first.register_forward_hook(lambda module, given, output: output * number)
    loss = descend(model, batch, optimizer)
    hook.remove()
    return loss


def calls_with_other_tensors(model, batch, optimizer, hp):
    others = {"last.weight": model.kept_weight, "last.bias": model.kept_bias}
    with torch.no_grad():
        aim = torch.func.functional_call(model, others, (batch[0],))
    loss = descend(model, batch, optimizer, (model(batch[0]) - aim).square().mean())
    with torch.no_grad():
        model.kept_weight.lerp_(model.last.weight, 0.1)
    return loss


def calls_with_other_buffers(model, batch, optimizer, hp):
    others = {"shift": torch.tensor([1.0, 2.0, 3.0])}
    moved = torch.func.functional_call(model, others, (batch[0],))
    return descend(model, batch, optimizer, moved.square().mean())


def puts_a_buffer(model, batch, optimizer, hp):
    model.shift = model.shift + torch.tensor([0.1, 0.0, 0.0])
    return descend(model, batch, optimizer)


def scaled(step):
    return shoal.Recipe(
        model=lambda hp: Scaled(), data=lambda hp: ([], None), step=step,
        optimizer=lambda parameters, hp: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip


def scaled_members(recipe, count=3):
    members = []
    for number in range(count):
        seed_all(number)
        hp = HyperParameters({})
        model = build_model(recipe, hp)
        member = Member(
            recipe=recipe, hp=hp, module=model, modes=Modes(recipe, model), schedule=None,
            optimizer=build_optimizer_of(recipe, model, hp), rng=capture_rng(torch.device("cpu")),
        )  # fmt: skip
        members.append(member)
    return members


def some_batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 8, generator=generator), torch.arange(16) % 3


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (scales, "changes the attribute 'scale' of a model, which a pass for all slots does not"),
        (gets_a_hook, "changes the attribute 'first._forward_hooks' of a model"),
        (gets_a_parameter, "changes the parameters of 'first' of a model"),
    ],
)
def test_a_step_that_leaves_other_code_is_declined_when_it_does(step, words, one_thread):
    array = Array(scaled_members(scaled(step)))
    for _ in range(2):
        assert not array.step([some_batch()] * 3).failures
    with pytest.raises(Declined, match=words):
        array.step([some_batch()] * 3)


def test_a_dry_run_finds_it_in_the_first_step(one_thread):
    def step(model, batch, optimizer, hp):
        model.scale = 2.0
        return descend(model, batch, optimizer)

    found = dry_run(scaled_members(scaled(step)), [some_batch()] * 3)
    assert "changes the attribute 'scale'" in found


@pytest.mark.parametrize(
    "step",
    [hooks_for_a_while, calls_with_other_tensors, calls_with_other_buffers, puts_a_buffer],
)
def test_what_is_there_for_a_while_is_seen(step, one_thread):
    recipe = scaled(step)
    array, (alone, *_) = Array(scaled_members(recipe)), scaled_members(recipe)
    own = OwnStep(recipe, alone.module, alone.optimizer, alone.hp, alone.modes)
    for number in range(5):
        found = array.step([some_batch()] * 3)
        assert not found.failures
        assert found.losses[0] == pytest.approx(own(some_batch(), number).total, rel=1e-5)
    mine = array.member(0).module.state_dict()
    for name, tensor in alone.module.state_dict().items():
        torch.testing.assert_close(mine[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad_number", [torch.nan, 1000.0])  # a part raises, the whole does
def test_a_neighbour_that_raises_teaches_nothing(bad_number, one_thread):
    def trained(bad_at):
        array = Array(scaled_members(scaled(lambda *args: descend(*args[:3]))))
        batch = some_batch()
        bad = torch.full_like(batch[0], bad_number), batch[1]
        for number in range(5):
            alive = [None if slot in array._failed else batch for slot in range(3)]
            if number == bad_at:
                alive[1] = bad
            found = array.step(alive)
            assert list(found.failures) == ([1] if number == bad_at else [])
        return array.member(0).module.state_dict(), array.notes

    (calm, notes), (beside, notes_beside) = trained(-1), trained(2)
    assert notes == notes_beside
    assert all(same_bits(calm[name], beside[name]) for name in calm)
