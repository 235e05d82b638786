"""What arrays take of a GPU beside what was planned for them: nothing."""

from __future__ import annotations

import gc
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import shoal
from shoal.core.arraykeys import has_one_base
from shoal.core.spec import TrialSpec
from shoal.core.units import Bytes
from shoal.device import open_device
from shoal.device.allocator import held_by_libraries
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.plain import array_loop
from shoal.runtime.measuring.measure import Measurer
from shoal.runtime.wire.messages import MeasureArray, TimeArray, TimedArray
from shoal.testing import assert_same
from shoal.verify import read_losses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

WIDTH, LAYERS = 1024, 6
BASE = LAYERS * WIDTH * WIDTH * 4  # 24 MiB of frozen weights
HARDWARE = shoal.Hardware.parse("cuda:0", "1GiB", threads=1) if torch.cuda.is_available() else None


class Adapted(nn.Module):
    """A frozen layer with a low-rank addition."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return (self.base(x) + self.up(self.down(x))).tanh()


def adapted(hp):
    """The same frozen weights in every trial."""
    model = nn.Sequential(*[Adapted() for _ in range(LAYERS)], nn.Linear(WIDTH, 3))
    random = torch.Generator().manual_seed(7)
    for layer in model[:-1]:
        layer.base.weight.data.normal_(0.0, 0.05, generator=random)
    return model


def data(hp):
    random = torch.Generator().manual_seed(0)
    rows = [torch.randn(2, WIDTH, generator=random) for _ in range(3)]
    batches = [(x, torch.zeros(2, dtype=torch.long)) for x in rows]
    return batches, batches[:1]


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


def adamw(named, hp):
    return torch.optim.AdamW([p for _, p in named if p.requires_grad], lr=hp["lr"])


RECIPE = shoal.Recipe(model=adapted, data=data, loss=loss, optimizer=adamw)


def in_use():
    gc.collect()
    return torch.cuda.memory_allocated()


def test_an_array_that_was_timed_makes_room_for_the_trials():
    device = open_device(HARDWARE.devices[0])
    trials = tuple(TrialSpec(number=n, hp={"lr": 0.1}, seed=n) for n in range(3))
    with device.active():
        own = held_by_libraries(device.torch_device, torch.cuda.memory_allocated)
        measurer = Measurer(RECIPE, device)
        order = MeasureArray(trials, 3, "eager", one_base=True)
        assert not measurer.answer(order).found.declined
        assert in_use() - own > BASE
        order = TimeArray(trials[0], time.monotonic(), (0.01, 0.01, 0.0, 0.0), 1)
        assert isinstance(measurer.answer(order), TimedArray)
        measurer.forget()
        assert in_use() - own < BASE / 2


def test_trials_come_into_an_array_without_their_own_copy_of_its_base(tmp_path):
    """The process may have the base once, and half of it: twice would be out of memory."""
    (spec,) = HARDWARE.devices
    device, before = open_device(spec), in_use()
    with device.active():
        libraries = held_by_libraries(device.torch_device, torch.cuda.memory_allocated) - before
    room = Bytes(2 * libraries + 3 * BASE // 2)
    spec = replace(spec, memory=room, share_bytes=room)
    study = shoal.Study(
        "base", RECIPE, space=shoal.grid(lr=[1e-2, 1e-3, 2e-3, 3e-3]), epochs=1, directory=tmp_path
    )
    hardware = shoal.Hardware(devices=(spec,))
    report = study.run(hardware=hardware, fuse=3, progress=False, timeline=False)
    losses = read_losses(report.directory)
    rows = Snapshot.of(read_outline(report.directory)).trials
    for trial, row in zip(report.trials, rows, strict=True):
        assert not trial.error, trial.error
        assert has_one_base(row.numerics)
        assert "alone" not in row.numerics["array"]
        loop = {"epochs": 1, "device": "cuda", "one_base": True}
        slot = trial.number % 3
        plain = array_loop(RECIPE, trial.hp, trial.seed, slot=slot, width=3, **loop)
        assert_same(plain, trial, losses=losses[trial.number])
