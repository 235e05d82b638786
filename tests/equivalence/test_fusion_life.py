"""Slots come and go: neighbours keep their bits, and each trial goes on as it would alone."""

import copy
import math
import operator

import fusing
import pytest
import torch
from torch import nn

from shoal.core.errors import TrialError
from shoal.fusion import Array, Declined, LoopBackend, StackedBackend
from shoal.fusion.array import LARGE
from shoal.fusion.member import in_streams
from shoal.partition.track import AllocationTracker
from shoal.recipes.recipe import Recipe, build_model
from shoal.testing import compare, evaluate, plain_loop, same_bits

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS = ["mlp", "cnn", "language", "lstm", "generator"]
STEPS = 6


@pytest.fixture(params=[StackedBackend, LoopBackend])
def backend(request):
    return request.param


def make(name, width=3, backend=StackedBackend, **changes):
    recipe = fusing.recipe(name, **changes)
    made = fusing.trials(recipe, fusing.hps(name, width))
    return Array([t.member for t in made], backend=backend()), made


def run(array, made, steps=STEPS):
    return [fusing.step(array, made) for _ in range(steps)]


def bits(array, slot):
    """Every tensor of a slot, copied."""
    return {name: t.clone() for name, t in fusing.tensors(array.extract(slot)).items()}


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    assert [name for name, tensor in one.items() if not same_bits(tensor, other[name])] == []


def assert_as_alone(state, recipe, hp, seed, steps):
    plain = fusing.alone(recipe, hp, seed, steps).state()
    moved = fusing.alone(recipe, hp, seed, steps, ulp=True).state()
    assert fusing.drift(state, plain) <= 10 * max(fusing.drift(moved, plain), 1e-15)
    assert torch.equal(state["rng"].torch, plain["rng"].torch)
    assert state["step"] == plain["step"]
    assert state["schedule"] == plain["schedule"]


def test_a_trial_that_leaves_while_others_are_evaluated_is_ready_to_train(backend):
    array, made = make("cnn", backend=backend)
    run(array, made, steps=1)
    array.set_training(False)
    member = array.retire(1)
    assert all(module.training for module in member.module.modules())
    assert not array.member(0).module.training


@pytest.mark.parametrize("name", MODELS)
def test_a_poisoned_slot_leaves_its_neighbours_bitwise_equal(name):
    found = []
    for poison in (0.0, math.nan, math.inf):
        array, made = make(name, on_nonfinite="ignore")
        with torch.no_grad():
            next(array.member(1).module.parameters()).add_(poison)
        run(array, made)
        found.append([bits(array, 0), bits(array, 2)])

    for poisoned in found[1:]:
        for mine, theirs in zip(found[0], poisoned, strict=True):
            assert_same_bits(mine, theirs)


def test_a_slot_whose_loss_is_not_finite_fails_before_its_step_and_the_others_go_on(backend):
    clean, made = make("cnn", backend=backend)
    run(clean, made)
    array, made = make("cnn", backend=backend)
    with torch.no_grad():
        array.member(1).module[-1].weight.fill_(math.nan)

    first = fusing.step(array, made)
    second = fusing.step(array, made)
    run(array, made, STEPS - 2)

    assert isinstance(first.failures[1], TrialError)
    assert "the loss of step 1 is nan; the trial stops before the step" in str(first.failures[1])
    assert second.failures == {}
    assert math.isnan(second.losses[1])
    assert array.member(1).step == 0
    for slot in (0, 2):
        assert_same_bits(bits(array, slot), bits(clean, slot))


@pytest.mark.parametrize("name", MODELS)
def test_a_slot_that_retires_leaves_its_neighbours_bitwise_equal_and_is_whole(name):
    full, made = make(name)
    run(full, made)
    array, made = make(name)
    run(array, made, 2)

    member = array.retire(1)
    run(array, made, STEPS - 2)

    for slot in (0, 2):
        assert_same_bits(bits(array, slot), bits(full, slot))
    assert array.occupied == (0, 2)
    assert_as_alone(member.state(), member.recipe, member.hp, 1, 2)
    member.module.load_state_dict(copy.deepcopy(member.module.state_dict()), strict=True)


def test_a_slot_that_is_not_wanted_whole_leaves_its_neighbours_bitwise_equal(backend):
    full, made = make("cnn", backend=backend)
    run(full, made)
    array, made = make("cnn", backend=backend)
    run(array, made, 2)

    with AllocationTracker() as tracker:
        member = array.retire(1, whole=False)
    run(array, made, STEPS - 2)

    largest = max(block.nbytes for block in array._crew.stacked.parameters.values()) // 3
    assert tracker.peak_bytes < largest
    assert not any(tensor.nbytes for tensor in member.module.state_dict().values())

    for slot in (0, 2):
        assert_same_bits(bits(array, slot), bits(full, slot))


@pytest.mark.parametrize("name", MODELS)
def test_the_last_one_in_an_array_keeps_the_bits_it_would_have_in_company(name):
    full, made = make(name, 2)
    run(full, made)
    array, made = make(name, 2)
    run(array, made, 2)

    array.retire(0)
    run(array, made, STEPS - 2)

    assert_same_bits(bits(array, 1), bits(full, 1))


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_a_neighbours_bad_or_short_batch_changes_no_bit(name):
    found = []
    for spoil in (
        lambda batch: batch,
        lambda batch: (batch[0], batch[1] + 100),
        lambda batch: (batch[0][:3], batch[1][:3]),
        lambda batch: None,
    ):
        array, made = make(name)
        run(array, made, 2)
        batches = [next(next(t.groups)) for t in made]
        batches[1] = spoil(batches[1])
        array.step(batches)
        found.append([bits(array, 0), bits(array, 2)])

    for others in found[1:]:
        for mine, theirs in zip(found[0], others, strict=True):
            assert_same_bits(mine, theirs)


def test_a_trial_that_waits_keeps_every_bit(backend):
    array, made = make("cnn", backend=backend)
    run(array, made, 2)
    before = array.extract(1)
    batches = [next(next(t.groups)) for t in made]

    stepped = array.step([batches[0], None, batches[2]])

    assert math.isnan(stepped.losses[1])
    found = compare_states(before, array.extract(1))
    assert found == ""


def compare_states(one, other):
    class Alone:
        def __init__(self, state):
            self.model, self._state = torch.nn.Module(), state

        def state(self):
            return self._state

    for name, tensor in one["model"].items():
        if not same_bits(tensor, other["model"][name]):
            return name
    alone = Alone({**one, "model": {}})
    return compare(alone, {**other, "model": {}}).first_difference


@pytest.mark.parametrize("name", MODELS)
def test_a_slot_is_refilled_and_a_new_epoch_begins(name):
    array, made = make(name)
    run(array, made, 2)
    array.retire(1)
    late = fusing.Trial(made[0].recipe, fusing.hps(name, 4)[3], 7)

    array.refill(1, late.member)
    made[1] = late
    run(array, made, STEPS)

    assert_as_alone(array.extract(1), late.recipe, late.hp, 7, STEPS)
    for slot in (0, 2):
        trial = made[slot]
        assert_as_alone(array.extract(slot), trial.recipe, trial.hp, slot, 2 + STEPS)


@pytest.mark.parametrize("name", MODELS)
def test_the_survivors_of_an_array_go_on_in_a_narrower_one_as_alone(name):
    wide, made = make(name, 4)
    run(wide, made, 2)

    array = Array([wide.retire(3), wide.retire(0)])
    made = [made[3], made[0]]
    run(array, made, 4)

    for slot, (trial, seed) in enumerate(zip(made, (3, 0), strict=True)):
        assert_as_alone(array.extract(slot), trial.recipe, trial.hp, seed, 6)


def test_a_trial_goes_on_in_an_array_of_another_width():
    narrow, made = make("language", 2)
    run(narrow, made, 3)
    recipe, hps = made[1].recipe, fusing.hps("language", 4)
    wide = fusing.trials(recipe, hps)
    narrow.retire(1)
    wide[1] = made[1]

    array = Array([t.member for t in wide])
    run(array, wide, 3)

    assert_as_alone(array.extract(1), recipe, hps[1], 1, 6)
    assert_as_alone(array.extract(3), recipe, hps[3], 3, 3)


def test_a_trial_taken_out_goes_on_in_the_plain_loop_of_its_user():
    array, made = make("cnn")
    run(array, made, 3)
    member = array.retire(2)
    model, batches = member.module, made[2].groups

    with in_streams(member, torch.device("cpu")):
        for _ in range(3):
            batch = next(next(batches))
            member.optimizer.zero_grad()
            fusing.loss(model(batch[0]), batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            member.optimizer.step()
            member.schedule.step()

    plain = fusing.alone(member.recipe, member.hp, 2, 6)
    moved = fusing.alone(member.recipe, member.hp, 2, 6, ulp=True)
    bound = 10 * fusing.drift(moved.state(), plain.state())
    assert fusing.drift(member.state(), plain.state()) <= bound


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_a_batch_of_another_size_runs_beside_the_others(name):
    array, made = make(name)
    batches = [next(next(t.groups)) for t in made]
    short = (batches[1][0][:4], batches[1][1][:4])
    lone = fusing.Trial(made[1].recipe, made[1].hp, 1).member

    stepped = array.step([batches[0], short, batches[2]])

    alone_array = Array([lone], backend=LoopBackend())
    expected = alone_array.step([short])
    assert stepped.losses[1] == pytest.approx(expected.losses[0], abs=1e-12)
    assert fusing.drift(array.extract(1), alone_array.extract(0)) <= 1e-12
    for slot in (0, 2):
        assert_as_alone(array.extract(slot), made[slot].recipe, made[slot].hp, slot, 1)


class Sums(nn.Module):
    """Begins a sum of losses with a buffer, which it asks to keep its gradient."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4).double()
        self.register_buffer("zero", torch.zeros((), dtype=torch.float64), persistent=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        total = self.zero
        if self.training:
            total.requires_grad_()
        y = self.layer(x)
        self.seen.add_(y.detach().mean())
        return total + y.square().mean()


def test_a_buffer_that_keeps_its_gradient_meets_a_short_batch():
    draws = torch.Generator().manual_seed(0)
    batches = [torch.randn(rows, 4, generator=draws, dtype=torch.float64) for rows in (5, 5, 3)]
    recipe = Recipe(
        model=lambda hp: Sums(),
        data=lambda hp: (batches, None),
        loss=lambda output, batch: output,
        optimizer=lambda named, hp: torch.optim.SGD([p for _, p in named], lr=0.1),
    )
    array, losses = fusing.train(recipe, [{}, {}], 7)
    for slot in range(2):
        plain = fusing.alone(recipe, {}, slot, 7)
        assert losses[slot] == pytest.approx(plain.losses, abs=1e-12)
        assert fusing.drift(array.extract(slot), plain.state()) <= 1e-12


def test_a_slot_whose_data_is_bad_fails_and_the_others_take_their_step():
    array, made = make("language")
    batches = [next(next(t.groups)) for t in made]
    batches[1] = (batches[1][0] + fusing.WORDS, batches[1][1])  # a neighbour's rows, if unchecked

    stepped = array.step(batches)

    assert isinstance(stepped.failures[1], IndexError)
    assert set(stepped.failures) == {1}
    assert [array.member(slot).step for slot in range(3)] == [1, 0, 1]


def test_evaluation_gives_what_the_plain_loop_gives_and_leaves_no_trace(backend):
    metrics = {"top": lambda output, batch: (output.argmax(-1) == batch[1]).double().mean()}
    array, made = make("cnn", backend=backend, metrics=metrics)
    run(array, made, 3)
    before = [array.extract(slot) for slot in range(3)]
    batches = [next(next(t.groups)) for t in made]

    with array.evaluating():
        found = array.evaluate([batches[0], None, batches[2]])

    for slot in (0, 2):
        plain = plain_loop(made[slot].recipe, made[slot].hp, slot, steps=3)
        expected = evaluate(made[slot].recipe, plain.model, [batches[slot]], torch.device("cpu"))
        assert found[slot] == pytest.approx(expected, abs=1e-9)
    assert found[1] is None
    for slot in range(3):
        assert compare_states(before[slot], array.extract(slot)) == ""
        assert array.member(slot).module.training


def test_large_batches_are_evaluated_slot_by_slot_to_the_bits_of_a_trial_alone(backend):
    metrics = {"top": lambda output, batch: (output.argmax(-1) == batch[1]).double().mean()}
    array, made = make("cnn", backend=backend, metrics=metrics)
    run(array, made, 3)
    few = [next(next(t.groups)) for t in made]
    many = [tuple(torch.cat([part] * LARGE) for part in batch) for batch in few]
    assert array.evaluates_as_one(few) == array.backend.stacks_gradients
    assert not array.evaluates_as_one([*many[:2], None])

    with array.evaluating():
        found = array.evaluate([many[0], few[1], None])

    for slot, batch in ((0, many[0]), (1, few[1])):
        model = build_model(made[slot].recipe, made[slot].hp)
        model.load_state_dict(array.member(slot).module.state_dict())
        expected = evaluate(made[slot].recipe, model, [batch], torch.device("cpu"))
        assert found[slot] == (expected if slot == 0 else pytest.approx(expected, abs=1e-9))
    assert found[2] is None


def test_a_trial_of_another_shape_is_refused_with_the_difference():
    array, _ = make("mlp")
    array.retire(0)
    other = fusing.Trial(fusing.recipe("cnn"), fusing.hps("cnn")[0], 0)

    with pytest.raises(Declined, match="these trials cannot share an array: "):
        array.refill(0, other.member)

    assert array.occupied == (1, 2)


def test_slots_are_asked_for_by_what_is_in_them():
    array, _ = make("mlp")

    with pytest.raises(ValueError, match="slot 0 has a trial; retire it first"):
        array.refill(0, array.member(1))
    with pytest.raises(ValueError, match="3 slots need a batch or None each, got 1"):
        array.step([None])
    array.retire(1)
    with pytest.raises(ValueError, match="slot 1 is empty"):
        array.extract(1)


def test_all_trials_leave_with_the_bits_they_came_with():
    before = fusing.trials(fusing.recipe("cnn"), fusing.hps("cnn"))
    states = [copy.deepcopy(t.member.state()) for t in before]

    members = Array([t.member for t in before]).dissolve()

    for state, member in zip(states, members, strict=True):
        assert compare_states(state, member.state()) == ""
        pointers = {p.untyped_storage().data_ptr() for p in member.module.parameters()}
        assert len(pointers) == len(list(member.module.parameters()))


class Gated(torch.nn.Module):
    """Code that asks its own setting what to do, as a whole, and not where one reads it."""

    def __init__(self, scale):
        super().__init__()
        self.scale, self.into, self.out = scale, torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

    def forward(self, x):
        x = self.into(x)
        return self.out(x * self.scale if operator.gt(self.scale, 1.5) else x)


def gated(scale, seed):
    recipe = fusing.Recipe(
        model=lambda hp: Gated(hp["scale"]),
        data=lambda hp: ([(torch.ones(3, 4), torch.zeros(3, dtype=torch.long))] * 4, None),
        loss=fusing.loss,
        inputs=fusing.inputs,
    )
    return fusing.Trial(recipe, fusing.HyperParameters({"scale": scale, "lr": 0.1}), seed)


def test_a_trial_that_is_gone_leaves_no_setting_behind_that_later_ones_are_compared_with():
    """The first one's ``scale`` and the second one's would disagree, were both there."""
    first, second = gated(1.0, 0), gated(2.0, 1)
    array = Array([first.member])
    array.widen(0, 3)
    fusing.step(array, [first, None, None])
    array.retire(0)
    array.refill(1, second.member)
    stepped = fusing.step(array, [None, second, None])
    assert not stepped.failures
    assert array.notes == ()
    together = Array([gated(1.0, 0).member, gated(2.0, 1).member])
    batch = torch.ones(3, 4), torch.zeros(3, dtype=torch.long)
    with pytest.raises(Declined):  # as they would
        together.step([batch] * 2)


def test_an_empty_slot_has_the_settings_of_a_trial_that_is_there_and_its_own_rows():
    array, made = make("mlp")
    fusing.step(array, made)
    array.retire(1)
    array.retire(0)
    fusing.step(array, [None, None, made[2]])
    crew = array.crew
    for slot in (0, 1):
        assert crew.members[slot].module[2].p == made[2].hp["drop"]
        weight = crew.members[slot].module[0].weight
        assert weight.data_ptr() == crew.stacked.parameters["0.weight"][slot].data_ptr()


def test_a_norm_that_counts_its_batches_has_its_bits_whoever_has_counted_as_far():
    recipe = fusing.recipe("cnn")
    found = []
    for refilled in (False, True):
        mine = fusing.trials(recipe, fusing.hps("cnn", 4))
        array = Array([trial.member for trial in mine[:3]], backend=StackedBackend())
        run(array, mine[:3], steps=2)
        if refilled:
            array.retire(1)
            array.refill(1, mine[3].member)
            mine[1] = mine[3]
        run(array, mine[:3], steps=3)
        found.append(bits(array, 0))
    assert_same_bits(*found)
