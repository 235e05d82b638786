"""Populations in arrays whose settings change on the way, whole numbers and words among them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import searches
import squads
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.core.errors import PlanError
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.recipes.recipe import Recipe
from shoal.verify import verify_trials

SPACE = {
    "lr": shoal.log_uniform(1e-3, 1e-1),
    "period": shoal.integer(1, 4),
    "decay": shoal.choice("step", "cosine"),
    "drop": shoal.choice(0, 0.1, 0.3),
}


def build(hp):
    act = nn.Tanh() if hp.get("act") == "tanh" else nn.ReLU()
    return nn.Sequential(nn.Linear(6, 12), nn.Dropout(hp["drop"]), act, nn.Linear(12, 3))


def schedule(optimizer, hp):
    if hp["decay"] == "step":
        return torch.optim.lr_scheduler.StepLR(optimizer, hp["period"], 0.9)
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4 * hp["period"])


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


RECIPE = Recipe(model=build, data=searches.data, loss=loss, schedule=schedule)


def study_of(place, space, recipe=RECIPE) -> shoal.Study:
    pruner = shoal.PBT(quantile=0.5, resample=0.5)
    loop = {"steps": 9, "eval_every": 3, "trials": 4, "directory": place}
    return shoal.Study("k", recipe, space=space, pruner=pruner, **loop)


def run(study, workers, fuse) -> shoal.Report:
    hardware = shoal.Hardware.virtual(devices=1, memory="64MiB")
    shown = {"progress": False, "timeline": False, "workers": workers}
    return study.run(hardware=hardware, fuse=fuse, **shown)


def test_what_keeps_the_shape_may_change_in_an_array(tmp_path, warm_workers):
    report = run(study_of(tmp_path, SPACE), warm_workers, 4)
    assert squads.widths(report) == [4] * 4
    rows = Snapshot.of(read_outline(report.directory)).trials
    taken = [exploit for row in rows for exploit in row.inherited]
    changed = {
        name
        for exploit in taken
        for name in ("period", "decay", "drop")
        if exploit.hp[name] != exploit.before[name]
    }
    assert {"period", "decay"} <= changed
    verdicts = list(verify_trials(report.directory, rows, recipe=RECIPE))
    assert [verdict.equal for verdict in verdicts] == [True] * 4


class Pull:
    """After each step: to the average of the weights so far, every third time."""

    def __init__(self, parameters) -> None:
        self.parameters, self.steps = parameters, 0
        self.average = [p.detach().clone() for p in parameters]

    def __call__(self, optimizer, args, kwargs) -> None:
        self.steps += 1
        for mean, parameter in zip(self.average, self.parameters, strict=True):
            mean.lerp_(parameter.detach(), 0.2)
            if self.steps % 3 == 2:
                parameter.detach().copy_(mean)


def pulled(named, hp):
    parameters = [parameter for _, parameter in named]
    optimizer = torch.optim.Adam(parameters, lr=hp["lr"])
    optimizer.register_step_post_hook(Pull(parameters))
    return optimizer


@pytest.mark.parametrize("fuse", [False, 4])
def test_what_a_source_keeps_in_python_goes_along_when_it_is_verified(
    fuse, tmp_path, warm_workers
):
    recipe = replace(RECIPE, optimizer=pulled)
    report = run(study_of(tmp_path, SPACE, recipe), warm_workers, fuse)
    assert squads.widths(report) == [4 if fuse == 4 else 1] * 4
    rows = Snapshot.of(read_outline(report.directory)).trials
    assert any(row.inherited for row in rows)
    verdicts = list(verify_trials(report.directory, rows, recipe=recipe))
    assert [v.first_difference or v.failure for v in verdicts] == [""] * 4


def test_what_may_become_another_shape_is_told_before_anything_trains(tmp_path, warm_workers):
    space = {"lr": SPACE["lr"], "period": 2, "decay": "step", "drop": 0.1}
    space["act"] = shoal.choice("relu", "tanh")
    words = r"act='tanh', and be of another shape: module '2': .*ReLU.*in one, .*Tanh"
    with pytest.raises(PlanError, match=words):
        run(study_of(tmp_path, space), warm_workers, 4)
