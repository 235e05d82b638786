"""Memory of a device that no tensor has: scratch memory of kernels, and what libraries keep."""

from __future__ import annotations

import dataclasses
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shoal
from shoal.core.errors import CapacityError
from shoal.core.event import PeakMeasured
from shoal.core.spec import TrialSpec
from shoal.core.units import Bytes
from shoal.device import VirtualDevice
from shoal.memory.ledger import Ledger
from shoal.program.ir import Action, Op
from shoal.runtime.beside import counted
from shoal.runtime.interpret import Seat
from shoal.runtime.measuring.measure import Measurer
from shoal.runtime.pool import Gone, Worker, WorkerPool
from shoal.runtime.reports import Reports
from shoal.runtime.wire.messages import Happened, Measure, Measured, Opened, Ready
from shoal.runtime.worker import _opened
from shoal.testing import make_device, make_job, make_shard

KIB, MIB = 2**10, 2**20


def seat_with(ledger: Ledger, unit_bytes: int) -> Seat:
    """A seat of a trial that holds 1 KiB, on a device with this ledger."""
    seat = Seat.__new__(Seat)
    job = make_job(3, [make_shard()], held_bytes=Bytes(KIB), unit_bytes=Bytes(unit_bytes))
    seat.session, seat.trial = SimpleNamespace(job=job), 3
    seat.unit_bytes, seat.peak_bytes, seat._saved = unit_bytes, 0, {}
    seat.compute, seat.copies = SimpleNamespace(grew=False), SimpleNamespace(region=torch.ones(1))
    seat.resident_bytes = lambda: KIB
    seat.device = SimpleNamespace(spec=SimpleNamespace(name="cuda:0"))
    ledger.reserve("trial 3", Bytes(KIB))

    def reserve_units():
        ledger.release("the running unit")
        ledger.reserve("the running unit", seat.unit_bytes)

    seat.reserve_units = reserve_units
    reserve_units()
    return seat


def run_backward(seat: Seat, work) -> None:
    task = SimpleNamespace(kind="step", is_counted=True)
    seat._counted(lambda *_: work(), task, Action(Op.B, 0))


def test_a_unit_whose_kernel_takes_more_than_was_reserved_gets_it_reserved(memory, operator):
    ledger = Ledger("cuda:0", Bytes(8 * KIB))
    seat, x = seat_with(ledger, 2 * KIB), torch.ones(KIB // 4)

    run_backward(seat, lambda: operator(x, 3 * KIB))

    assert seat.unit_bytes == 4 * KIB
    assert seat.peak_bytes == 5 * KIB
    assert ledger.held("the running unit") == 4 * KIB


def test_where_there_is_no_room_for_it_the_words_name_the_scratch_memory(memory, operator):
    seat, x = seat_with(Ledger("cuda:0", Bytes(4 * KIB)), 2 * KIB), torch.ones(KIB // 4)

    with pytest.raises(CapacityError) as refused:
        run_backward(seat, lambda: operator(x, 3 * KIB))

    words = str(refused.value)
    assert (
        "trial 3 allocated 4.0 KiB on cuda:0 (3.0 KiB of it scratch memory of a kernel)" in words
    )
    assert "2.0 KiB were reserved for it" in words


def test_of_tensors_alone_the_words_are_as_on_a_cpu(memory):
    seat = seat_with(Ledger("cuda:0", Bytes(4 * KIB)), 2 * KIB)

    with pytest.raises(CapacityError, match=r"allocated 4.0 KiB on cuda:0, 2.0 KiB were"):
        run_backward(seat, lambda: torch.ones(KIB))


def test_what_is_no_action_is_counted_with_its_scratch_memory_too(memory, operator):
    seat = seat_with(Ledger("cuda:0", Bytes(4 * KIB)), 2 * KIB)
    seat.counts = True

    with pytest.raises(CapacityError, match=r"3.0 KiB of it scratch memory"):
        counted(seat, lambda: operator(torch.ones(KIB // 4), 3 * KIB), "drawing ahead")


class Model(nn.Module):
    def __init__(self, operator):
        super().__init__()
        self.first, self.operator = nn.Linear(16, 16), operator

    def forward(self, x):
        return self.operator(self.first(x), 64 * KIB)


def test_a_measure_tells_scratch_memory_by_name_and_has_it_in_its_peaks(memory, operator):
    recipe = shoal.Recipe(
        model=lambda hp: Model(operator),
        data=lambda hp: ([torch.ones(4, 16)], None),
        loss=lambda output, batch: output.square().mean(),
    )
    measurer = Measurer(recipe, VirtualDevice(make_device()))

    reply = measurer.answer(Measure(TrialSpec(number=0, hp={"lr": 0.1}, seed=0), cut=False))
    assert isinstance(reply, Measured), reply.error
    (shard,) = reply.measure.shards

    assert shard.workspace_bytes == 128 * KIB  # of the backward
    assert 64 * KIB < shard.forward_peak_bytes < 66 * KIB
    assert 128 * KIB < shard.backward_peak_bytes < 131 * KIB
    assert shard.step_peak_bytes < 64 * KIB
    assert memory.allocator.peak_bytes > 128 * KIB
    now = memory.given
    measurer._device = SimpleNamespace(spec=SimpleNamespace(kind="cuda"))
    measurer.forget()  # trials come: what measuring took is no peak of theirs
    assert memory.allocator.peak_bytes == now


def test_the_peak_that_is_shown_of_a_gpu_is_the_allocators_through_all_counting(memory, operator):
    sent = []
    spec = dataclasses.replace(make_device("cuda:0"), kind="cuda", library_bytes=Bytes(2 * KIB))
    reports = Reports(SimpleNamespace(spec=spec), sent.append, timeline=False)
    memory.take(2 * KIB)  # the libraries'
    seat = seat_with(Ledger("cuda:0", Bytes(MIB)), 8 * KIB)
    memory.take(KIB)

    run_backward(seat, lambda: operator(torch.ones(KIB // 4), 3 * KIB))
    run_backward(seat, lambda: operator(torch.ones(KIB // 4), 0))
    reports.peak(seat, [])
    reports.send_events()

    (told,) = [event for message in sent for event in message.events]
    assert isinstance(told, PeakMeasured)
    assert told.peak_bytes == (2 + 1 + 1 + 3) * KIB
    assert told.predicted_bytes == seat.session.job.peak_bytes + 2 * KIB


# -- what libraries keep ------------------------------------------------------------------


def test_a_worker_tells_what_libraries_keep_of_the_gpu_that_it_opened(monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 64 * MIB)
    device = VirtualDevice(make_device(memory=256 * MIB))

    assert _opened(device) == Opened(Bytes(64 * MIB))
    assert device.spec.library_bytes == 64 * MIB
    assert device.spec.for_trials == 192 * MIB


def worker_that_says(*messages) -> Worker:
    """A worker of study 2, that said all this and ended."""
    left = list(messages)

    def receive():
        if not left:
            raise EOFError
        return left.pop(0), ()

    worker, told = Worker.__new__(Worker), []
    worker._channel = SimpleNamespace(receive=receive, close=lambda: None)
    worker._process = SimpleNamespace(wait=lambda: 0, pid=1)
    worker._inbox = SimpleNamespace(put=told.append)
    worker.serial, worker.library_bytes = 2, Bytes(0)
    worker.device = dataclasses.replace(make_device("cuda:0"), kind="cuda")
    worker.opened, worker.told = threading.Event(), told
    worker._read()
    return worker


def test_the_studys_process_hears_it_of_its_own_study_alone():
    worker = worker_that_says(
        (0, Ready(1)), (1, Opened(Bytes(9))), (2, Opened(Bytes(7))), (2, Happened(()))
    )

    assert worker.library_bytes == 7
    kinds = [type(message) for _, _, message in worker.told]
    assert kinds == [Happened, Gone]


def test_nobody_waits_for_a_worker_that_ended_or_drives_a_virtual_device():
    pool = WorkerPool()
    virtual = SimpleNamespace(device=make_device(), opened=None)
    pool._workers = {"cuda:0": worker_that_says(), "cpu:0": virtual}

    assert pool.library_bytes() == {"cuda:0": 0}
