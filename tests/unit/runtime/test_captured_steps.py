"""The steps of an array's optimizers as one launch, by a stand-in for CUDA on the CPU."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import companies
import pytest
import torch

from shoal.fusion import Array, backend_of
from shoal.fusion.batches import layout_of
from shoal.fusion.graphs.launcher import ByCode
from shoal.fusion.optim import FusedSteps
from shoal.runtime.capture.cudagraph import REPEATS, CapturedSteps

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def sgd(named, hp, momentum=0.9):
    parameters = [parameter for _, parameter in named]
    return torch.optim.SGD(parameters, lr=hp["lr"], momentum=momentum, weight_decay=0.1)


class StandIn:
    """A launch does again what was captured; capturing does nothing of it."""

    def __init__(self):
        self.log = []

    def beside(self, parts):
        for part in parts:
            part()

    def capture(self, work, *, collects=True):
        self.log.append("capture")
        found = SimpleNamespace(is_live=True)

        def replay():
            self.log.append("replay")
            work()

        found.replay = replay
        return found


def steps_by(cuda):
    """Where no capture takes longer than it saves, however loaded the machine is."""
    return CapturedSteps(cuda, lambda: 0.0)


class InPlace(ByCode):
    """Gradients stay where they are from step to step, as those of a captured pass do."""

    def __init__(self, cuda):
        super().__init__(CPU)
        self.steps = steps_by(cuda)

    def of_steps(self):
        return self.steps

    def of_graph(self, run, held, written, *, hands_out):
        places = []

        def launched(*flat):
            found = run(*flat)
            if not places:
                places.extend(found)
            for place, value in zip(places, found, strict=True):
                place.copy_(value)
            return places

        return launched


def members(seeds, lr=0.1, optimizer=companies.adam):
    recipe = companies.recipe(optimizer, 1, None, "fail")
    return [companies.member_of(recipe, {"lr": lr, "drop": 0.2, "data": 0}, seed=s) for s in seeds]


def batches(word, seed):
    draws = torch.Generator().manual_seed(seed)
    return [companies.batch_of(letter, draws) for letter in word]


def arrays(launcher, kind="traced", **of):
    """One whose steps are launched as one, and one whose steps are not."""
    usual = layout_of(batches("u", 0)[0])
    return [
        Array(members([3, 4], **of), backend=backend_of(kind, launcher=by), usual=usual)
        for by in (launcher, None)
    ]


def step(array, count, word="uu"):
    return [array.step(batches(word, seed)).losses for seed in range(count)]


def same(one, other, slots=range(2)):
    for slot in slots:
        mine, theirs = one.extract(slot), other.extract(slot)
        assert all(torch.equal(mine["model"][k], v) for k, v in theirs["model"].items())
        for name, moments in theirs["optimizer"]["state"].items():
            for key, value in moments.items():
                assert torch.equal(mine["optimizer"]["state"][name][key], value)
    return True


def test_steps_that_are_alike_are_launched_as_one_to_the_same_bits():
    cuda = StandIn()
    launched, called = arrays(InPlace(cuda))
    assert step(launched, 12) == step(called, 12)
    assert same(launched, called)
    assert cuda.log[0] == "capture"
    assert cuda.log.count("capture") == 1
    assert cuda.log.count("replay") >= 12 - 4 - REPEATS  # the pass is captured first


def test_another_learning_rate_is_another_step():
    cuda = StandIn()
    pair = launched, called = arrays(InPlace(cuda))
    for rate in (0.1, 0.05, 0.025):
        for array in pair:
            for slot in range(2):
                array.member(slot).optimizer.param_groups[0]["lr"] = rate
        assert step(launched, 9) == step(called, 9)
    assert same(launched, called)
    assert cuda.log.count("capture") > 1


def test_numbers_that_are_changed_where_they_are_are_other_numbers():
    cuda = StandIn()
    pair = launched, called = arrays(InPlace(cuda))
    for array in pair:
        for slot in range(2):
            array.member(slot).optimizer.param_groups[0]["betas"] = [0.9, 0.999]
    assert step(launched, 8) == step(called, 8)
    before = cuda.log.count("replay")
    for array in pair:
        array.member(0).optimizer.param_groups[0]["betas"][0] = 0.5
    assert step(launched, 1) == step(called, 1)
    assert cuda.log.count("replay") == before
    assert same(launched, called)


@pytest.mark.parametrize("optimizer", [companies.adam, sgd])
def test_a_step_that_fails_ends_its_slot_alone(optimizer):
    launched, _ = arrays(InPlace(StandIn()), optimizer=optimizer)
    step(launched, 8)
    launched.member(0).optimizer.param_groups[0]["lr"] = "fast"
    stepped = launched.step(batches("uu", 1))
    assert stepped.failures.keys() == {0}
    assert not launched.step(batches("uu", 2)).failures  # slot 0 waits


def test_what_somebody_else_keeps_in_a_group_is_not_looked_at():
    cuda = StandIn()
    launched, called = arrays(InPlace(cuda), optimizer=sgd)
    for _ in range(8):
        group = launched.member(0).optimizer.param_groups[0]
        group["seen"] = torch.ones(3)  # which have no truth together
        assert step(launched, 1) == step(called, 1)
    assert same(launched, called)
    assert "replay" in cuda.log


def test_a_schedule_that_goes_on_at_every_step_leaves_nothing_to_capture():
    cuda = StandIn()
    pair = launched, called = arrays(InPlace(cuda))
    for number in range(10):
        for array in pair:
            array.member(1).optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
        assert step(launched, 1) == step(called, 1)
    assert same(launched, called)
    assert cuda.log == []


def test_who_waits_is_not_stepped_and_who_comes_is():
    cuda = StandIn()
    pair = launched, called = arrays(InPlace(cuda))
    assert step(launched, 8) == step(called, 8)
    for array in pair:
        for seed in range(8):
            array.step([batches("u", seed)[0], None])
    assert same(launched, called)
    for array in pair:
        array.retire(0)
        array.refill(0, members([7])[0])
    assert step(launched, 8) == step(called, 8)
    assert same(launched, called)
    assert cuda.log.count("capture") >= 3


def test_a_state_that_was_loaded_is_elsewhere():
    cuda = StandIn()
    pair = launched, called = arrays(InPlace(cuda))
    assert step(launched, 8) == step(called, 8)
    for array in pair:
        optimizer = array.member(0).optimizer
        optimizer.load_state_dict(optimizer.state_dict())
        for entry in optimizer.state.values():
            for key, value in entry.items():
                entry[key] = value.clone()
    before = cuda.log.count("replay")
    assert step(launched, 1) == step(called, 1)
    assert cuda.log.count("replay") == before
    assert step(launched, 8) == step(called, 8)
    assert same(launched, called)


@pytest.mark.parametrize("kind", ["eager", "branches"])
def test_gradients_that_move_are_stepped_call_by_call(kind):
    launched, called = arrays(InPlace(StandIn()), kind)
    assert step(launched, 10) == step(called, 10)
    assert same(launched, called)


@pytest.mark.parametrize(("optimizer", "is_captured"), [(sgd, True), (companies.slow_adam, False)])
def test_of_other_optimizers_torchs_sgd_is_captured(optimizer, is_captured):
    cuda = StandIn()
    launched, called = arrays(InPlace(cuda), optimizer=optimizer)
    assert step(launched, 10) == step(called, 10)
    assert same(launched, called)
    assert ("replay" in cuda.log) == is_captured


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_first_step_is_torchs_which_makes_the_state(momentum):
    cuda = StandIn()
    fused = FusedSteps(steps_by(cuda))
    one, other = (
        Array(members([3], optimizer=partial(sgd, momentum=momentum)), backend=backend_of("eager"))
        for _ in range(2)
    )
    for number in range(6):
        for array in (one, other):
            for parameter in array.member(0).module.parameters():
                if number == 0:
                    parameter.grad = torch.ones_like(parameter)
        stepped = fused.step(one.crew, [], [0])
        assert bool(stepped) == (number > 0 or not momentum)
        if not stepped:
            one.member(0).optimizer.step()
        other.member(0).optimizer.step()
    assert same(one, other, [0])
    assert "replay" in cuda.log


def test_slots_with_gradients_of_their_own_are_launched_among_the_others():
    cuda = StandIn()
    one, other = (Array(members([3, 4]), backend=backend_of("eager")) for _ in range(2))
    fused = FusedSteps(steps_by(cuda))
    for array in (one, other):
        step(array, 1)  # torch makes the state
        for slot in range(2):
            for parameter in array.member(slot).module.parameters():
                parameter.grad = torch.ones_like(parameter)
    for block in one.crew.stacked.parameters.values():
        block.grad = None
    for _ in range(5):
        assert fused.step(one.crew, [], [0, 1]) == {0, 1}
        for slot in range(2):
            other.member(slot).optimizer.step()
    assert same(one, other)
    assert cuda.log == ["capture", *["replay"] * (5 - REPEATS)]


class Clock:
    """A call takes 3 ms, a launch 1, and a capture 100."""

    def __init__(self):
        self.now = 0.0

    def takes(self, seconds, work=lambda *given, **named: None):
        def done(*given, **named):
            self.now += seconds
            return work(*given, **named)

        return done


@pytest.mark.parametrize(("alike", "captures"), [(4, 2), (12, 3), (40, 5), (80, 9)])
def test_a_graph_that_took_longer_than_it_saved_is_made_later_next_time(alike, captures):
    cuda, clock, done = StandIn(), Clock(), []
    capture = cuda.capture

    def captured(work, **how):
        found = capture(work, **how)
        replay = found.replay

        def launch():
            after = clock.now + 1e-3
            replay()
            clock.now = after

        found.replay = launch
        return found

    cuda.capture = clock.takes(0.1, captured)
    steps = CapturedSteps(cuda, lambda: clock.now)
    for number in range(9):
        call = clock.takes(3e-3, partial(done.append, number))
        for _ in range(alike):
            steps(number, lambda call=call: [call])
    assert done == [number for number in range(9) for _ in range(alike)]
    assert cuda.log.count("capture") == captures


def test_a_graph_that_was_freed_is_made_again():
    cuda, done, made = StandIn(), [], []
    steps, capture = steps_by(cuda), cuda.capture
    cuda.capture = lambda work, **how: made.append(capture(work, **how)) or made[-1]
    for _ in range(4):
        steps("same", lambda: [lambda: done.append(1)])
    made[0].is_live = False
    for _ in range(8):
        steps("same", lambda: [lambda: done.append(1)])
    assert len(made) == 2
    assert len(done) == 12


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("operation not permitted"), "RuntimeError: operation not permitted"),
        (torch.OutOfMemoryError("no room"), "there is no room for its graph"),
    ],
)
def test_steps_that_cannot_be_captured_are_called(error, words):
    class Failing(StandIn):
        def capture(self, work, *, collects=True):
            self.log.append("capture")
            raise error

    cuda, done = Failing(), []
    steps = steps_by(cuda)
    for _ in range(9):
        steps("same", lambda: [lambda: done.append(1)])
    assert len(done) == 9
    assert cuda.log == ["capture"]
    assert steps.why_not.startswith(words)
