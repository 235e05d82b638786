"""Arrays in shards on a GPU end on the bits of the array on it as a whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.core.arraykeys import has_one_base
from shoal.core.event import PeakMeasured
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.plain import array_loop
from shoal.planning import array_place
from shoal.testing import assert_same
from shoal.verify import read_losses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

WIDTH = 256  # a layer is 256 KiB, and five of them are enough for one base
WAYS = {
    "all travel": shoal.Spilled(shards=3, optimizer="device", keep=()),
    "one stays": shoal.Spilled(shards=3, optimizer="device", keep=(1,)),
    "inputs wait on the host": shoal.Spilled(
        shards=4, optimizer="device", keep=(), boundaries="host"
    ),
}


class Adapted(nn.Module):
    """A frozen layer with a low-rank addition."""

    def __init__(self, drop):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(drop)

    def forward(self, x):
        return self.norm(self.base(x) + self.up(self.drop(self.down(x)))).tanh()


def trained(hp):
    return nn.Sequential(*[Adapted(hp["drop"]) for _ in range(5)], nn.Linear(WIDTH, 3))


def adapted(hp):
    """The same frozen weights in every trial."""
    model, random = trained(hp), torch.Generator().manual_seed(7)
    for layer in model[:-1]:
        layer.base.weight.data.normal_(0.0, 0.05, generator=random)
        layer.base.bias.data.zero_()
    return model


def all_trained(hp):
    return trained(hp).requires_grad_(True)


def data(hp):
    """The last batch is short: its slots run by themselves."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(22, WIDTH, generator=random)
    rows = TensorDataset(x, torch.randint(3, (22,), generator=random))
    return DataLoader(rows, batch_size=4, shuffle=True), DataLoader(rows, batch_size=8)


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


def adamw(named, hp):
    return torch.optim.AdamW([p for _, p in named if p.requires_grad], lr=hp["lr"])


@pytest.mark.sample(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", [adapted, all_trained])
def test_an_array_in_shards_is_the_array(model, way, tmp_path, warm_workers):
    check(model, WAYS[way], tmp_path, warm_workers)


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["host", "device"])
def test_a_trial_that_was_saved_steps_on_where_its_shard_stays(optimizer, tmp_path, warm_workers):
    way = shoal.Spilled(shards=3, optimizer=optimizer, keep=(1,))
    check(all_trained, way, tmp_path, warm_workers, checkpoint_every=0)


def check(model, way, tmp_path, warm_workers, **options):
    recipe = shoal.Recipe(model=model, data=data, loss=loss, optimizer=adamw, clip_grad_norm=0.5)
    space, heard = shoal.grid(lr=[1e-2, 1e-3, 3e-3], drop=[0.1]), []
    study = shoal.Study("gpu", recipe, space=space, epochs=2, directory=tmp_path, **options)
    report = study.run(
        hardware=shoal.Hardware.parse("cuda:0", "1GiB", threads=1),
        **{"technique": way, "fuse": "3-eager", "workers": warm_workers},
        **{"progress": False, "timeline": False, "callbacks": [heard.append]},
    )
    losses = read_losses(report.directory)
    rows = Snapshot.of(read_outline(report.directory)).trials
    assert {row.technique for row in rows} == {"Spilled"}
    for trial, row in zip(report.trials, rows, strict=True):
        assert not trial.error, trial.error
        one_base = has_one_base(row.numerics)
        assert one_base == (model is adapted)
        slot, width = array_place(row.numerics)
        loop = {"epochs": 2, "device": "cuda", "one_base": one_base}
        plain = array_loop(recipe, trial.hp, trial.seed, slot=slot, width=width, **loop)
        assert_same(plain, trial, losses=losses[trial.number])
    peaks = [event for event in heard if isinstance(event, PeakMeasured)]
    assert peaks
    assert all(event.peak_bytes <= event.predicted_bytes for event in peaks)
