"""The plain loop against a loop written by hand, and the comparison against planted faults."""

import contextlib
import dataclasses
import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from shoal.core.errors import SpecError, TrialError
from shoal.recipes import steppers
from shoal.recipes.recipe import Recipe, autocast
from shoal.rng import capture_rng, same_rng
from shoal.testing import (
    ManualClock,
    assert_same,
    compare,
    make_device,
    make_job,
    make_layer,
    plain_loop,
    same_bits,
)

HP = {"lr": 0.1}


def build(hp):
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
    )


def batches(count=5, size=4, start=0):
    generator = torch.Generator().manual_seed(100 + start)
    return [
        (
            torch.randn(size, 6, generator=generator),
            torch.randint(3, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def data(hp):
    return batches(), batches(2, start=1)


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def sgd(named, hp):
    return torch.optim.SGD([p for _, p in named], lr=hp["lr"], momentum=0.9)


def cosine(optimizer, hp):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


def accuracy(output, batch):
    return (output.argmax(-1) == batch[1]).float().mean().item()


def make_recipe(**changes):
    return Recipe(**{"model": build, "data": data, "loss": loss, "optimizer": sgd, **changes})


def seed_by_hand(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_plain_loop_is_the_loop_one_writes_by_hand():
    seed_by_hand(7)
    model = build(HP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = cosine(optimizer, HP)
    losses = []
    for _ in range(2):
        for x, y in batches():
            optimizer.zero_grad()
            value = F.cross_entropy(model(x), y)
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            losses.append(value.item())
    rng = capture_rng()

    plain = plain_loop(make_recipe(schedule=cosine, clip_grad_norm=0.5), HP, 7, epochs=2)

    assert plain.losses == tuple(losses)
    assert plain.step == 10
    assert same_rng(plain.rng, rng)
    for name, tensor in model.state_dict().items():
        assert same_bits(tensor, plain.model.state_dict()[name]), name
    momenta = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    ours = [plain.optimizer.state[p]["momentum_buffer"] for p in plain.model.parameters()]
    assert all(map(same_bits, momenta, ours))
    assert plain.schedule.state_dict() == schedule.state_dict()


def test_a_short_last_group_is_divided_by_accumulate_and_its_loss_by_its_length():
    seed_by_hand(3)
    model = build(HP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for group in (batches()[:3], batches()[3:]):
        optimizer.zero_grad()
        values = []
        for x, y in group:
            value = F.cross_entropy(model(x), y)
            (value / 3).backward()
            values.append(value.item())
        optimizer.step()
        losses.append(sum(values) / len(group))

    plain = plain_loop(make_recipe(accumulate=3), HP, 3, epochs=1)

    assert plain.losses == tuple(losses)
    for name, tensor in model.state_dict().items():
        assert same_bits(tensor, plain.model.state_dict()[name]), name


def test_a_loss_of_one_number_in_brackets_is_a_scalar():
    def bracketed(output, batch):
        return F.cross_entropy(output, batch[1]) + torch.zeros(1)

    def trained(loss):
        recipe = Recipe(model=build, data=lambda hp: (batches(2), batches(1)), loss=loss)
        return plain_loop(recipe, HP, 3, epochs=1)

    found, asked = trained(bracketed), trained(lambda o, batch: F.cross_entropy(o, batch[1]))
    assert compare(asked, found.state(), losses=found.losses).equal
    assert found.metrics == asked.metrics


def test_when_one_evaluates_never_changes_training():
    drawing = make_recipe(data=lambda hp: (batches(), _shuffled(batches(2, start=1))))
    often = plain_loop(drawing, HP, 1, steps=7, eval_every=1)
    seldom = plain_loop(drawing, HP, 1, steps=7)
    never = plain_loop(make_recipe(data=lambda hp: (batches(), None)), HP, 1, steps=7)

    assert compare(often, seldom.state(), losses=seldom.losses).equal
    assert compare(often, never.state(), losses=never.losses).equal
    assert [row["step"] for row in often.history] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["step"] for row in seldom.history] == [5, 7]
    assert [row["epoch"] for row in seldom.history] == [1, 2]


def test_the_end_is_evaluated_once_and_metrics_are_unweighted_batch_means():
    recipe = make_recipe(metrics={"accuracy": accuracy})
    plain = plain_loop(recipe, HP, 1, steps=4, eval_every=2)

    assert [row["step"] for row in plain.history] == [2, 4]
    assert plain.metrics == plain.history[-1]["metrics"]
    assert plain.metrics["train_loss"] == sum(plain.losses[2:]) / 2
    model = plain.model.eval()
    with torch.no_grad():
        expected = [accuracy(model(batch[0]), batch) for batch in batches(2, start=1)]
    assert plain.metrics["valid_accuracy"] == sum(expected) / 2


def _shuffled(items, batch_size=None):
    return DataLoader(items, batch_size=batch_size, shuffle=True)


def test_a_shuffling_loader_draws_from_the_same_streams_as_the_model():
    x, y = (torch.cat(column) for column in zip(*batches(), strict=True))

    def shuffled(hp):
        return DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True), None

    seed_by_hand(11)
    model = build(HP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    losses = []
    for _ in range(2):
        for inputs, labels in loader:
            optimizer.zero_grad()
            value = F.cross_entropy(model(inputs), labels)
            value.backward()
            optimizer.step()
            losses.append(value.item())
    rng = capture_rng()

    plain = plain_loop(make_recipe(data=shuffled), HP, 11, epochs=2)

    assert plain.losses == tuple(losses)
    assert same_rng(plain.rng, rng)


class CountingData:
    """Batches that draw a random number each, and count how many were fetched."""

    def __init__(self):
        self.fetched = 0

    def __iter__(self):
        for x, y in batches():
            self.fetched += 1
            yield x + torch.rand(1) * random.random() * np.random.rand(), y


@pytest.mark.parametrize(("accumulate", "steps", "fetched"), [(1, 3, 3), (2, 2, 4), (2, 4, 7)])
def test_no_batch_is_fetched_before_its_turn_nor_after_the_last_step(accumulate, steps, fetched):
    source = CountingData()
    plain_loop(
        make_recipe(data=lambda hp: (source, None), accumulate=accumulate), HP, 0, steps=steps
    )
    assert source.fetched == fetched


def test_data_and_model_draw_in_turn():
    order = []

    class Source:
        def __iter__(self):
            for index, batch in enumerate(batches(4)):
                order.append(f"data {index}")
                yield batch

    class Model(nn.Linear):
        def forward(self, x):
            order.append("model")
            return super().forward(x)

    recipe = make_recipe(
        model=lambda hp: Model(6, 3), data=lambda hp: (Source(), None), accumulate=2
    )
    plain_loop(recipe, HP, 0, epochs=1)
    assert order == ["data 0", "model", "data 1", "model", "data 2", "model", "data 3", "model"]


def test_seeding_model_data_optimizer_schedule_come_in_that_order():
    order = []

    def noted(name, function):
        def call(*arguments):
            order.append((name, torch.rand(1).item()))
            return function(*arguments)

        return call

    recipe = make_recipe(
        model=noted("model", build),
        data=noted("data", data),
        optimizer=noted("optimizer", sgd),
        schedule=noted("schedule", cosine),
    )
    plain_loop(recipe, HP, 5, steps=1)
    seed_by_hand(5)
    assert [name for name, _ in order] == ["model", "data", "optimizer", "schedule"]
    assert order[0][1] == torch.rand(1).item()


def test_bf16_is_autocast_over_float32_parameters():
    plain = plain_loop(make_recipe(precision="bf16"), HP, 2, steps=3)
    full = plain_loop(make_recipe(), HP, 2, steps=3)

    assert {p.dtype for p in plain.model.parameters()} == {torch.float32}
    assert plain.losses != full.losses
    assert plain.losses == pytest.approx(full.losses, rel=0.1)


@pytest.mark.parametrize("asked", [{}, {"threads": 2}])
def test_the_callers_streams_and_threads_are_put_back(asked):
    torch.set_num_threads(3)
    before, during = capture_rng(), []

    def told(hp):
        during.append(torch.get_num_threads())
        return build(hp)

    plain_loop(make_recipe(model=told), HP, 2, steps=2, **asked)
    assert same_rng(before, capture_rng())
    assert (set(during), torch.get_num_threads()) == ({asked.get("threads", 1)}, 3)


def test_a_loss_that_is_not_finite_ends_the_loop_before_its_step_unless_ignored():
    def poisoned(hp):
        return [
            *batches(2),
            (torch.full((4, 6), torch.nan), torch.zeros(4, dtype=torch.long)),
        ], None

    recipe = make_recipe(data=poisoned)
    with pytest.raises(TrialError, match=r"loss of step 3 is nan\. Lower the learning rate"):
        plain_loop(recipe, HP, 2, steps=3)
    assert np.isnan(plain_loop(recipe, HP, 2, steps=3, on_nonfinite="ignore").losses[-1])


def test_one_end_is_asked_for():
    with pytest.raises(SpecError, match="give steps or epochs, one of them"):
        plain_loop(make_recipe(), HP, 0)
    with pytest.raises(SpecError, match="give steps or epochs, one of them"):
        plain_loop(make_recipe(), HP, 0, steps=1, epochs=1)
    with pytest.raises(SpecError, match="at least one step"):
        plain_loop(make_recipe(), HP, 0, steps=0)
    with pytest.raises(SpecError, match="validation data yielded no batch"):
        plain_loop(make_recipe(data=lambda hp: (batches(), [])), HP, 0, steps=1)
    with pytest.raises(SpecError, match="train data has no batches in epoch 1"):
        plain_loop(make_recipe(data=lambda hp: ([], None)), HP, 0, steps=1)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_an_optimizer_on_host_copies_gives_the_same_bits(clip, monkeypatch):
    recipe = make_recipe(clip_grad_norm=clip, schedule=cosine)
    here = plain_loop(recipe, HP, 4, steps=6)
    monkeypatch.setattr(steppers, "_DeviceStepper", steppers._HostStepper)
    on_host = plain_loop(recipe, HP, 4, steps=6)

    assert compare(here, on_host.state(), losses=on_host.losses).equal


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.unused = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x):
        return self.head(self.embedding(x) * self.scale)


def tied_data(hp):
    return [(torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3]))], None


def plain_tied():
    recipe = make_recipe(model=lambda hp: Tied(), data=tied_data, optimizer=None)
    return plain_loop(recipe, HP, 0, steps=3)


def copied(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else value


def test_a_tied_weight_may_stand_under_any_of_its_names():
    plain = plain_tied()
    state = copied(plain.state())
    assert compare(plain, state).equal
    del state["model"]["head.weight"]
    state["model"]["scale"] = torch.ones(1)
    assert compare(plain, state).equal
    del state["model"]["embedding.weight"]
    assert compare(plain, state).first_difference == "model: 'embedding.weight' is missing"


def test_parameters_without_a_gradient_have_no_optimizer_state():
    assert sorted(plain_tied().state()["optimizer"]["state"]) == ["embedding.weight"]


PLANTED = [
    (lambda s: s["model"]["unused.bias"].neg_(), "model 'unused.bias': 4 of 4 elements differ"),
    (lambda s: s["model"].pop("unused.bias"), "model: 'unused.bias' is missing"),
    (lambda s: s["model"].update(other=torch.ones(1)), "'other' is no parameter or buffer"),
    (
        lambda s: s["optimizer"]["state"]["embedding.weight"]["exp_avg"].add_(1),
        "optimizer 'state' 'embedding.weight' 'exp_avg': 20 of 20 elements differ",
    ),
    (lambda s: s["optimizer"]["groups"][0].update(lr=0.2), "'lr': 0.1 expected, 0.2 found"),
    (
        lambda s: s["optimizer"]["state"].clear(),
        "'embedding.weight' exists in the plain loop only",
    ),
    (lambda s: s.update(step=4), "step: 3 expected, 4 found"),
    (lambda s: s.update(schedule={}), "schedule: None expected"),
    (lambda s: s.update(rng=capture_rng()), "random stream 'torch'"),
    (
        lambda s: s.update(rng=dataclasses.replace(s["rng"], python=random.getstate())),
        "random stream 'python'",
    ),
]


@pytest.mark.parametrize(("plant", "words"), PLANTED, ids=[words for _, words in PLANTED])
def test_a_planted_difference_is_found_and_named(plant, words):
    plain = plain_tied()
    state = copied(plain.state())
    plant(state)
    found = compare(plain, state)
    assert not found.equal
    assert words in found.first_difference


def test_a_number_of_numpy_is_compared_as_it_is_saved():
    """As DINO's schedules of learning rate and weight decay leave it in the groups."""
    plain = plain_tied()
    plain.optimizer.param_groups[0]["lr"] = np.float64(0.25)
    state = copied(plain.state())
    state["optimizer"]["groups"][0]["lr"] = 0.25
    assert compare(plain, state).equal
    state["optimizer"]["groups"][0]["lr"] = 0.125
    assert "0.125 found" in compare(plain, state).first_difference


def test_a_zeros_sign_and_a_nans_payload_are_bits_too():
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert not same_bits(torch.zeros(2), torch.zeros(2, 1))
    assert same_bits(torch.zeros(()), torch.zeros(()))


@dataclasses.dataclass
class FakeTrial:
    history: list
    state: dict
    number: int = 3

    def load_state(self):
        return self.state


def test_a_complex_difference_is_told_with_its_imaginary_part():
    model = nn.ParameterList([torch.zeros(2, dtype=torch.cfloat)])
    plain = dataclasses.replace(plain_tied(), model=model)
    found = compare(plain, plain.state() | {"model": {"0": torch.tensor([0j, 2j])}})
    assert "1 of 2 elements differ, the largest by 2" in found.first_difference


def test_a_trials_losses_and_validation_metrics_are_compared_too():
    plain = plain_loop(make_recipe(), HP, 0, steps=3, eval_every=2)
    history, state = list(plain.history), plain.state()
    assert_same(plain, FakeTrial(history, state), losses=plain.losses)

    with pytest.raises(AssertionError, match=r"trial 3 differs from the loop: losses: 3 entries"):
        assert_same(plain, FakeTrial(history, state), losses=plain.losses[1:])
    wrong = [history[0], {**history[1], "metrics": {"valid_loss": 9.0}}]
    with pytest.raises(AssertionError, match=r"trial 3: metrics 3 'valid_loss': .* expected, 9.0"):
        assert_same(plain, FakeTrial(wrong, state))
    with pytest.raises(AssertionError, match="metrics 2 exists in the plain loop only"):
        assert_same(plain, FakeTrial(history[1:], state))


def test_a_manual_clock_moves_only_when_turned():
    clock = ManualClock(5.0)
    assert clock.now() == 5.0
    clock.advance(1.5)
    clock.sleep(0.5)
    assert clock.now() == 7.0
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1)


def test_the_loops_seconds_come_from_the_clock_it_is_given():
    ticks = itertools.count()
    plain = plain_loop(make_recipe(), HP, 0, steps=2, eval_every=1, clock=lambda: next(ticks))
    assert [row["seconds"] for row in plain.history] == [1, 2]


def test_builders_make_consistent_records():
    assert make_device(memory=10).memory == 10
    assert make_layer(parameter_bytes=8).state_bytes == 16
    assert make_job(shards=[]).shards[0].parameter_bytes == 1024


def test_full_precision_means_what_a_disabled_autocast_means():
    """Also for a model that opens one of its own, whose casts live as long as the outer one."""

    def grads(context):
        torch.manual_seed(0)
        layer = nn.Linear(64, 64)
        with context:
            total = torch.zeros(())
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16):
                    total = total + layer(torch.randn(32, 64)).float().square().mean()
            assert not torch.is_autocast_enabled("cpu")
        assert torch.autocast_increment_nesting() == 1
        assert torch.autocast_decrement_nesting() == 0
        total.backward()
        return [p.grad for p in layer.parameters() if p.grad is not None]

    recipe = Recipe(model=lambda hp: nn.Linear(1, 1), data=lambda hp: ([], None))
    ours = grads(autocast(recipe, torch.device("cpu")))
    literal = grads(torch.autocast("cpu", torch.bfloat16, enabled=False))
    none = grads(contextlib.nullcontext())
    assert all(torch.equal(a, b) for a, b in zip(ours, literal, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(none, literal, strict=True))
