"""One suite for every ArrayBackend: what a slot gets, and what it keeps."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.fusion import Array, LoopBackend, Member, StackedBackend
from shoal.fusion.graphs.branches import BranchesBackend
from shoal.recipes.recipe import Recipe
from shoal.rng import capture_rng
from shoal.testing import same_bits

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=[StackedBackend, LoopBackend, BranchesBackend])
def backend(request):
    return request.param()


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def members(width=3):
    torch.manual_seed(3)
    recipe = Recipe(model=lambda hp: None, data=lambda hp: ([], None), loss=loss)
    made = []
    for slot in range(width):
        net = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.1 + slot / 10), nn.Linear(6, 3)
        ).double()
        steps = torch.optim.AdamW(net.parameters(), lr=0.1)
        torch.rand(slot)
        rng = capture_rng()
        made.append(
            Member(recipe=recipe, hp={}, module=net, optimizer=steps, schedule=None, rng=rng)
        )
    return made


def batches(width=3):
    draws = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(5, 4, generator=draws, dtype=torch.float64),
            torch.randint(3, (5,), generator=draws),
        )
        for _ in range(width)
    ]


def test_losses_and_gradients_are_those_alone(backend):
    array, lone = Array(members(), backend=backend), members()
    crew = array._crew

    trained = backend.train(crew, batches(), [True] * 3, 0.5)
    backend.hand_out(crew, range(3))

    for slot, (member, batch) in enumerate(zip(lone, batches(), strict=True)):
        member.module.train()
        torch.set_rng_state(member.rng.torch)
        value = loss(member.module(batch[0]), batch)
        (value * 0.5).backward()
        assert trained.losses[slot].item() == pytest.approx(value.item(), abs=1e-13)
        mine = dict(array.member(slot).module.named_parameters())
        for name, parameter in member.module.named_parameters():
            torch.testing.assert_close(mine[name].grad, parameter.grad, rtol=0, atol=1e-13)


def test_gradients_add_up(backend):
    array, twice = Array(members(), backend=backend), Array(members(), backend=type(backend)())
    for scale in (0.25, 0.75):
        array.backend.train(array._crew, batches(), [True] * 3, scale)
        for slot, member in enumerate(members()):
            array._crew.streams.set(slot, member.rng)  # the same masks again
    twice.backend.train(twice._crew, batches(), [True] * 3, 1.0)
    array.backend.hand_out(array._crew, range(3))
    twice.backend.hand_out(twice._crew, range(3))

    for slot in range(3):
        pairs = zip(
            array.member(slot).module.parameters(),
            twice.member(slot).module.parameters(),
            strict=True,
        )
        for one, other in pairs:
            torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-12)


def test_a_slot_that_takes_no_part_keeps_its_bits(backend):
    array = Array(members(), backend=backend)
    before = copy.deepcopy(array.extract(1))

    trained = backend.train(array._crew, batches(), [True, False, True], 1.0)
    after = array.extract(1)

    assert trained.losses[1].isnan()
    assert all(same_bits(after["model"][name], t) for name, t in before["model"].items())
    assert torch.equal(after["rng"].torch, before["rng"].torch)


def test_an_error_of_one_slot_is_its_own(backend):
    array = Array(members(), backend=backend)
    bad = batches()
    bad[2] = (bad[2][0], bad[2][1] + 3)  # classes that there are none of

    trained = backend.train(array._crew, bad, [True] * 3, 1.0)

    assert set(trained.failures) == {2}
    assert trained.losses[:2].isfinite().all()


def test_evaluation_gives_every_slots_output_as_its_model_does(backend):
    array, lone = Array(members(), backend=backend), members()

    with array.evaluating():
        found = backend.evaluate(array._crew, batches(), [True, True, False])

    for slot in range(2):
        expected = lone[slot].module.eval()(batches()[slot][0])
        torch.testing.assert_close(found.outputs[slot], expected, rtol=0, atol=1e-13)
        assert not found.outputs[slot].requires_grad
    assert found.losses[2].isnan()


class Picky(nn.Module):
    """Asks its input whether to raise."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        if not self.training and bool(x.isnan().any()):
            raise ValueError("no number in a batch")
        return self.layer(x)


def picky_members():
    made = members()
    for member in made:
        member.module.insert(0, Picky().double())
        member.optimizer = torch.optim.SGD(member.module.parameters(), lr=0.1)
    return made


def test_a_slot_that_raises_in_an_evaluation_teaches_nothing():
    array, given = Array(picky_members(), backend=StackedBackend()), batches()
    bad = torch.full_like(given[1][0], torch.nan), given[1][1]
    with array.evaluating(), pytest.raises(ValueError, match="no number"):
        array.evaluate([given[0], bad, given[2]])
    assert array.notes == ()


def test_what_is_known_to_run_slot_by_slot_does_also_where_a_slot_raises_in_its_first_step():
    """Those of the others would else run for all slots at once from then on, to other bits."""
    made = picky_members()
    made[2].module[2].momentum = None  # it counts in Python
    made = [dataclasses.replace(one, module=copy.deepcopy(made[2].module)) for one in made]
    for member in made:
        member.optimizer = torch.optim.SGD(member.module.parameters(), lr=0.1)
    array, given = Array(made, backend=StackedBackend(), looped=["0"]), batches()
    bad = given[1][0], given[1][1] + 5

    assert list(array.step([given[0], bad, given[2]]).failures) == [1]

    assert array.backend._known_of(array._crew).looped == ["0", "2"]


def test_what_an_evaluation_learns_is_nothing_to_the_steps():
    class Torn(Picky):
        def forward(self, x):
            return self.layer(x if self.training or x.sum() > 0 else -x)

    made = picky_members()
    for member in made:
        member.module[0] = Torn().double()
        member.optimizer = torch.optim.SGD(member.module.parameters(), lr=0.1)
    array, given = Array(made, backend=StackedBackend()), batches()
    given = [(x.abs() * sign, y) for (x, y), sign in zip(given, (1, -1, 1), strict=True)]
    with array.evaluating():
        array.evaluate(given)
    assert "'0' runs slot by slot" in array.notes[0]
    assert not array.backend._known_of(array._crew).looped  # it trains again
    assert not array.step(given).failures


def test_statistics_that_stood_still_for_a_pass_are_put_back_in_a_slot_that_waits():
    """BatchNorm's kernel writes them without a word; these are large and move every other pass."""
    made = members()
    for member in made:
        member.module = nn.Sequential(nn.BatchNorm1d(1500), nn.Linear(1500, 3))
        member.module[0].momentum = 0.0
        member.optimizer = torch.optim.SGD(member.module.parameters(), lr=0.1)
    array = Array(made, backend=StackedBackend())
    batch = torch.randn(5, 1500), torch.arange(5) % 3
    array.step([batch] * 3)
    array.step([batch] * 3)
    for template in array.backend._templates.values():
        template.module[0].momentum = 0.1
    before = array.member(0).module[0].running_mean.clone()
    array.step([None, batch, batch])
    assert same_bits(before, array.member(0).module[0].running_mean)
    assert not same_bits(before, array.member(1).module[0].running_mean)
