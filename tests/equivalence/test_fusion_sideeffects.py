"""What a forward leaves behind, or reads past what an array knows, keeps its trials apart."""

import contextvars
import math
import random
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from shoal.fusion import Array, Member, dry_run
from shoal.fusion.graphs.traced import TracedBackend
from shoal.fusion.passes.fused import StackedBackend
from shoal.fusion.passes.loop import LoopBackend
from shoal.recipes.recipe import Recipe
from shoal.rng import capture_rng

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """A layer whose forward does something besides, with a number that differs by trial."""

    def __init__(self, does, number=1.0):
        super().__init__()
        self.layer, self.other, self.does, self.number = *pair(), does, number
        self.begun, self.evaluations, self.random = False, 0, random.Random(0)
        self.config, self.table = SimpleNamespace(kind=None, tables={}), np.zeros(2)
        self.register_buffer("bank", torch.zeros(1500, 4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.double()

    def forward(self, x):
        return self.does(self, self.layer(x), x)


def pair():
    return nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)


def averages_weights(net, h, x):
    with torch.no_grad():
        net.other.weight.mul_(0.9).add_(net.layer.weight, alpha=0.1)
    return h


def averages(net, h, x):
    with torch.no_grad():
        net.other.weight.lerp_(net.layer.weight, 0.1)
    return h


def averages_data(net, h, x):
    net.other.weight.data.mul_(0.9).add_(net.layer.weight.data, alpha=0.1)
    return h


def begins(net, h, x):
    if not net.begun:
        net.begun, net.mean = True, x.mean(0)
    return h - net.mean


def lays_up_a_mask(net, h, x):
    if not net.begun:
        net.begun, net.mask = True, torch.ones(4, dtype=h.dtype).cumsum(0)
    return h * net.mask


def names_its_kind(net, h, x):
    """As a classifier of transformers does with ``config.problem_type``."""
    if net.config.kind is None:
        net.config.kind, net.begun = "rows", True
        net.config.tables["sum"] = net.sums = torch.ones(4, dtype=h.dtype)
    return h * net.config.tables["sum"] * net.sums


def hooks_a_tensor(net, h, x):
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient.clamp(-10, 10))
    return h


def counts_evaluations(net, h, x):
    net.evaluations += not net.training
    return h * (1 + net.evaluations)


def writes_its_batch(net, h, x):
    x.mul_(0.5)
    return h


def draws_from_its_own(net, h, x):
    return h * net.random.random()


def counts_in_numpy(net, h, x):
    net.table[0] += 1
    return h * float(net.table[0])


def floors(net, h, x):
    return h * max(0.1, math.exp(-net.number))


def floors_with_torch(net, h, x):
    return h * torch.exp(torch.tensor(-net.number)).clamp(min=0.1)


def scales(net, h, x):
    return h * net.number


def fills_a_bank_now_and_then(net, h, x):
    if net.training:
        net.count += 1
        if net.count % 2 == 0:
            net.bank.copy_(net.bank * 0.9 + h.detach().mean(0))
    return h + net.bank.mean(0)


def hands_on(net, h, x):
    """As RevIN does, in an attribute of a layer too."""
    net.mean, net.layer.spread = x.mean(0), x.std(0) + 1
    return (h - net.mean) * net.layer.spread + net.mean


def hands_on_to_evaluation(net, h, x):
    if net.training:
        net.mean = x.mean(0)
    return h - net.mean


KEPT = contextvars.ContextVar("what a hook keeps", default=None)


def keep(module, args, output):
    if KEPT.get() is not None:
        KEPT.get().append(output)


def hooks_its_layer(net, h, x):
    if not net.layer._forward_hooks:
        net.layer.register_forward_hook(keep)
    token = KEPT.set([])
    net.layer(x)
    (kept,) = KEPT.get()
    KEPT.reset(token)
    return h + kept.tanh()


def hooks_with_a_closure(net, h, x):
    if not net.layer._forward_hooks:
        number = id(net)  # another one in each trial
        net.layer.register_forward_hook(lambda module, args, output: output if number else None)
    return h


def hands_on_to_the_next(net, h, x):
    before = getattr(net, "mean", 0.0)
    net.mean = x.mean(0)
    return h - before


def member(does, number=1.0, change=lambda net: None):
    net = Net(does, number)
    change(net)
    return Member(
        recipe=RECIPE,
        hp={},
        module=net,
        optimizer=torch.optim.SGD(net.layer.parameters(), lr=0.1),
        schedule=None,
        rng=capture_rng(),
    )


def mean(output, batch):
    return output.square().mean()


RECIPE = Recipe(model=lambda hp: None, data=lambda hp: ([], None), loss=mean)


def members(does, numbers=(1.0, 1.0, 1.0), **options):
    torch.manual_seed(0)
    return [member(does, number, **options) for number in numbers]


def batches(width=3, seed=1):
    draws = torch.Generator().manual_seed(seed)
    return [torch.randn(5, 4, generator=draws, dtype=torch.float64) * 3 for _ in range(width)]


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        (averages_weights, "writes to the parameter 'other.weight'"),
        (averages_data, "writes to the parameter 'other.weight'"),
        (begins, "lays up the attribute 'mean', and another one in another trial"),
        (hooks_with_a_closure, "all slots. Register hooks of the same code in all trials, where"),
        (hooks_a_tensor, "puts a hook on a tensor"),
        (counts_evaluations, "a forward in evaluation mode or its loss changes the attribute"),
        (writes_its_batch, "writes to its batch"),
        (draws_from_its_own, "changes the attribute 'random'"),
        (counts_in_numpy, "changes the attribute 'table'"),
        (hands_on_to_evaluation, "changes the attribute 'mean'"),
        (hands_on_to_the_next, "changes the attribute 'mean'"),
    ],
)
def test_a_forward_that_leaves_something_behind_is_declined_with_the_reason(does, reason):
    assert reason in dry_run(members(does), batches())


def test_an_average_that_begins_with_what_it_is_of_is_seen_to_be_written():
    def begin(net):
        net.other.load_state_dict(net.layer.state_dict())

    reason = "writes to the parameter 'other.weight'"
    assert reason in dry_run(members(averages, change=begin), batches())


def test_no_graph_is_made_of_a_forward_that_writes_to_parameters():
    """As one that begins to after a while, when no dry run looks any more."""
    eager, traced = (Array(members(averages_weights), backend=b) for b in (None, TracedBackend()))
    for seed in range(4):
        for array in (eager, traced):
            array.step(batches(seed=seed))
    for slot in range(3):
        states = [array.member(slot).module.state_dict() for array in (eager, traced)]
        assert all(map(torch.equal, *(state.values() for state in states)))


class Carrying(Net):
    """A state from batch to batch, which begins anew where the batch says so."""

    def forward(self, x, begins):
        if begins:
            self.state = torch.zeros_like(x)
        before, self.state = self.state, x.detach()
        return self.layer(x) + before


class Beginning(Net):
    """A state that the first batch of all neither reads nor writes."""

    state = 0.0

    def forward(self, x, begins):
        if not begins:
            self.state = self.state + x.detach().mean()
            x = x + self.state
        return self.layer(x)


@pytest.mark.parametrize("kind", [Carrying, Beginning])
@pytest.mark.parametrize("flag", [bool, torch.tensor])
def test_a_state_that_begins_anew_where_the_batch_says_so_is_declined(flag, kind):
    recipe = replace(RECIPE, inputs=tuple, loss=lambda output, batch: output.square().mean())
    made = [replace(member(None), recipe=recipe) for _ in range(3)]
    for one in made:
        one.module.__class__ = kind

    found = dry_run(made, [(batch, flag(True)) for batch in batches()])

    assert "changes the attribute 'state'" in found


def test_what_a_trial_that_raises_would_lay_up_is_not_asked():
    def raises_or_begins(net, h, x):
        if net.number < 0:
            raise ValueError("of its own")
        return begins(net, h, x)

    found = dry_run(members(raises_or_begins, (-1.0, 1.0, 1.0)), batches())
    assert "lays up the attribute 'mean'" in found


def test_the_trials_and_their_batches_are_not_touched_meanwhile():
    made, given = members(writes_its_batch), batches()

    dry_run(made, given)

    assert all(map(torch.equal, given, batches()))
    assert not any(one.module.begun for one in made)


@pytest.mark.parametrize(
    "does", [lays_up_a_mask, fills_a_bank_now_and_then, hands_on, hooks_its_layer]
)
def test_what_is_alike_in_all_trials_or_a_buffer_keeps_nobody_from_an_array(does):
    assert dry_run(members(does), batches()) == ""


@pytest.mark.parametrize("backend", [StackedBackend, LoopBackend])
def test_a_trial_may_come_to_slots_that_ran_by_themselves(backend):
    made = members(names_its_kind, (1.0,) * 4)
    array = Array(made[:3], backend=backend())
    array.step(batches())
    array.step([batch[: 5 - slot] for slot, batch in enumerate(batches())])  # one or two alone
    array.evaluate([batch[: 5 - slot] for slot, batch in enumerate(batches())])
    array.retire(2)

    array.refill(2, made[3])

    assert not array.step(batches()).failures
    assert not any(one.module.config.kind or one.module.config.tables for one in made)
    assert not any(one.module.begun or hasattr(one.module, "sums") for one in made)


# The floor holds for all of them, for one of them, and for none.
@pytest.mark.parametrize("numbers", [(3.0, 4.0, 5.0), (3.0, 4.0, 0.1), (0.1, 0.2, 0.3)])
def test_a_number_that_code_reads_as_one_and_hides_is_declined(numbers):
    found = dry_run(members(floors, numbers), batches())

    assert "makes one number of a hyperparameter that differs from trial to trial" in found


@pytest.mark.parametrize(
    ("reads", "reason"),
    [
        (float, "makes one number of a hyperparameter of which each trial has its own (1, 2, 3)"),
        (math.floor, "makes one number of a hyperparameter that differs from trial to trial"),
        (lambda number: float(str(number)), "a hyperparameter of which each trial has its own"),
        (lambda number: {1.0: 1.0, 2.0: 4.0, 3.0: 9.0}[number], "KeyError: a hyperparameter of"),
        (lambda number: number * (1.0 if number > 1.5 else 2.0), "a hyperparameter is > 1.5"),
    ],
)
def test_a_reason_speaks_of_hyperparameters_and_their_values(reads, reason):
    found = dry_run(members(lambda net, h, x: h * reads(net.number), (1.0, 2.0, 3.0)), batches())
    assert reason in found
    assert "PerSlot" not in found, found
    assert "NaN" not in found, found


def test_code_that_reads_a_clock_is_not_said_to_read_a_hyperparameter():
    def scales_by_time(net, h, x):
        return h * net.number * (1 + time.perf_counter())

    found = dry_run(members(scales_by_time, (1.0, 2.0, 3.0)), batches())
    assert "something that no seed decides, such as a clock" in found


@pytest.mark.parametrize("does", [floors_with_torch, scales])
def test_a_number_that_torch_or_arithmetic_reads_is_each_trials_own(does):
    assert dry_run(members(does, (0.1, 2.0, 5.0)), batches()) == ""


@pytest.mark.parametrize(("numbers", "passes"), [((1.0, 2.0, 3.0), 3), ((2.0, 2.0, 2.0), 1)])
def test_trials_that_differ_in_a_number_are_tried_with_two_others_for_it(
    numbers, passes, monkeypatch
):
    train, trained = StackedBackend.train, []

    def counted(backend, *args):
        trained.append(args)
        return train(backend, *args)

    monkeypatch.setattr(StackedBackend, "train", counted)

    assert dry_run(members(scales, numbers), batches()) == ""
    assert len(trained) == passes


def test_a_hook_that_closes_over_its_module_is_declined():
    def hooked(net):
        net.layer.register_forward_hook(lambda module, given, made: made * net.number)

    found = dry_run(members(scales, (1.0, 2.0, 3.0), change=hooked), batches())

    assert "closes over a module, which would be one trial's for all" in found


def test_a_hook_that_closes_over_a_number_has_each_trials_own():
    def hooked(net):
        number = net.number
        net.layer.register_forward_hook(lambda module, given, made: made * number)

    assert dry_run(members(scales, (1.0, 2.0, 3.0), change=hooked), batches()) == ""


def test_a_large_buffer_of_a_slot_that_waits_is_not_written():
    array = Array(members(fills_a_bank_now_and_then))
    array.step(batches())  # the first forward does not write it

    before = array.extract(1)["model"]["bank"].clone()
    array.step([batches(seed=2)[0], None, batches(seed=2)[2]])

    assert torch.equal(array.extract(1)["model"]["bank"], before)
    assert not torch.equal(array.extract(0)["model"]["bank"], before)


class Leaving(Net):
    """Leaves where its batch is odd, and writes nothing."""

    def forward(self, x):
        if (x.abs() > 1e20).any():
            raise SystemExit("odd")
        return self.layer(x)


class Counting(Leaving):
    """Writes as well."""

    def forward(self, x):
        self.last = x.shape
        return super().forward(x)


@pytest.mark.parametrize("kind", [Leaving, Counting])
def test_code_that_leaves_where_it_goes_another_way_keeps_nobody_from_an_array(kind):
    recipe = replace(RECIPE, loss=lambda output, batch: output.square().mean())
    made = [replace(member(None), recipe=recipe) for _ in range(3)]
    for one in made:
        one.module.__class__ = kind

    assert dry_run(made, batches()) == ""
