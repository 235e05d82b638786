"""Losses of a step: copied behind the work, and waited for once, before anything steps."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from shoal.device.losses import AtOnce, Behind, Losses, readback_of
from shoal.runtime.compute import Compute

GOOD, BAD = torch.tensor(0.5), torch.tensor(float("nan"))


class Event:
    """An event of CUDA that counts who records it, and who waits for it."""

    def __init__(self):
        self.records = self.waits = 0

    def record(self):
        self.records += 1

    def synchronize(self):
        self.waits += 1


class Refused(Exception):
    pass


class Trial:
    """A trial whose unit is a stand-in, as a GPU's; ``stepped`` is what its optimizer did."""

    def __init__(self, on_nonfinite="fail"):
        self.event, self.stepped = Event(), []
        self.readback = Behind(2, self.event, pin=False)
        self.refusal = Refused if on_nonfinite == "fail" else None
        self.recipe = SimpleNamespace(clip_grad_norm=None, step=None)
        self.job = SimpleNamespace(technique=None)
        self.step, self.layout, self.owned = 0, SimpleNamespace(shards=[]), [["w"], ["v"]]
        self.binding = SimpleNamespace(
            params={},
            pieces=[[(0, ["w"])], [(0, ["v"])]],
            poison={name: GOOD for name in "wv"},
            step=lambda shard, *given: self.stepped.append(shard),
            step_on_host=lambda part, host, *given: self.stepped.append(host),
        )
        self.begin_losses()
        hosts = [SimpleNamespace(grads={}, split=(), renew_copies=lambda names: None)] * 2
        self.compute = Compute(self, hosts)
        self.compute.placed = {0: None, 1: None}

    def begin_losses(self):
        self.losses = Losses(self.readback, self.refusal)

    @property
    def require_finite(self):
        return self.losses.require_finite

    def step_shard(self, shard):
        self.compute._step(None, SimpleNamespace(shard=shard))


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_step_waits_once_before_its_first_shard_steps_and_never_for_a_micro_batch(
    micro_batches,
):
    trial = Trial()
    for number in range(1, 4):
        trial.begin_losses()
        for _ in range(micro_batches):
            trial.losses.note(GOOD)
        assert trial.event.waits == number - 1
        for shard in (0, 1):
            trial.step_shard(shard)
            assert trial.event.waits == number
        trial.compute.end_step()
        assert trial.losses.values() == [0.5] * micro_batches
        assert trial.event.waits == number
    assert trial.event.records == 3 * micro_batches
    assert trial.stepped == [0, 1] * 3


@pytest.mark.parametrize("bad", [0, 1])
def test_nothing_steps_on_the_device_for_a_loss_that_is_not_finite(bad):
    trial = Trial()
    for micro in range(2):
        trial.losses.note(BAD if micro == bad else GOOD)
    with pytest.raises(Refused):
        trial.step_shard(0)
    assert (trial.stepped, trial.event.waits) == ([], 1)


def test_nothing_steps_on_the_host_for_it_and_the_step_ends_with_the_refusal():
    trial = Trial()
    trial.losses.note(BAD)
    pieces = [piece for shard in (1, 0) for piece in trial.compute.host_step(shard)]
    assert trial.event.waits == 0  # who serves the device goes on
    for piece in pieces:
        with pytest.raises(Refused):
            piece.work()
    with pytest.raises(Refused):
        trial.compute.end_step()
    assert (trial.stepped, trial.event.waits) == ([], 1)


def test_a_host_step_that_is_late_looks_at_the_losses_of_its_own_step():
    trial = Trial()
    trial.losses.note(GOOD)
    [first, late] = [piece for shard in (1, 0) for piece in trial.compute.host_step(shard)]
    first.work()
    trial.losses.values()
    trial.begin_losses()
    trial.losses.note(BAD)
    late.work()
    assert (len(trial.stepped), trial.event.waits) == (2, 1)


def test_where_any_loss_will_do_the_step_is_over_before_one_is_waited_for():
    trial = Trial("ignore")
    trial.losses.note(BAD)
    trial.step_shard(0)
    for piece in trial.compute.host_step(1):
        piece.work()
    trial.compute.end_step()
    assert (len(trial.stepped), trial.event.waits) == (2, 0)
    assert [str(value) for value in trial.losses.values()] == ["nan"]
    assert trial.event.waits == 1


def test_who_asks_at_the_same_time_waits_together():
    class Slow(Event):
        def synchronize(self):
            super().synchronize()
            both.wait(timeout=0.05)

    event, both, found = Slow(), threading.Event(), []
    losses = Losses(Behind(1, event, pin=False))
    losses.note(GOOD)
    threads = [threading.Thread(target=lambda: found.append(losses.values())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (found, event.waits) == ([[0.5]] * 3, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_loss_of_any_type_is_what_item_says(dtype, shape):
    behind = Losses(Behind(1, Event(), pin=False))
    numbers = [torch.full(shape, 1 / 3 + k, dtype=dtype, requires_grad=True) for k in range(5)]
    for number in numbers:  # more than there was memory for in the beginning
        behind.note(number)
    assert behind.values() == [number.item() for number in numbers]


def test_a_loss_is_what_it_was_when_it_was_noted():
    losses, loss = Losses(Behind(1, Event(), pin=False)), torch.tensor(1.0)
    losses.note(loss)
    loss.fill_(2.0)  # as a captured pass writes its loss again and again
    assert losses.values() == [1.0]


def test_on_a_cpu_a_loss_is_read_and_refused_where_it_is_noted():
    readback = readback_of(torch.device("cpu"), 4)
    assert isinstance(readback, AtOnce)
    losses = Losses(readback, Refused)
    losses.note(GOOD)
    with pytest.raises(Refused):
        losses.note(BAD)
    ignored = Losses(readback)
    ignored.note(BAD)
    assert len(ignored) == 1


def test_a_loss_that_is_on_the_host_already_is_not_waited_for():
    event = Event()
    losses = Losses(Behind(1, event, pin=False), Refused)
    assert not losses
    losses.add(3.0)
    assert (losses.values(), event.waits) == ([3.0], 0)
