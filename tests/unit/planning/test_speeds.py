"""Whose word a plan takes for how fast links are."""

from __future__ import annotations

import torch
from torch import nn

import shoal
from shoal.planner.price import Speeds
from shoal.planning import speeds as speeds_
from shoal.planning.speeds import corrected

SAID = Speeds(up_bytes_per_s=8e9, down_bytes_per_s=6e9, source="what somebody said")


def test_a_link_that_is_about_what_it_is_said_to_be_is_left_alone():
    assert corrected(SAID, None) is SAID
    assert corrected(SAID, (4.1e9, 9e9)) is SAID


def test_a_link_far_slower_is_planned_with_as_it_is_and_the_plan_says_so():
    found = corrected(SAID, (1e9, 9e9))
    assert (found.up_bytes_per_s, found.down_bytes_per_s) == (1e9, 6e9)
    assert "measured just now" in found.source
    assert "what somebody said" in found.source
    assert "953.7 MiB/s up" in found.source


def model(hp):
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])


def data(hp):
    return [(torch.ones(2, 64), torch.tensor([0, 1]))] * 2, None


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


def test_a_study_whose_links_were_said_to_be_faster_is_planned_with_what_they_are(
    tmp_path, warm_workers, monkeypatch
):
    fast = Speeds(up_bytes_per_s=1e15, down_bytes_per_s=1e15, source="a dream")
    monkeypatch.setattr("shoal.planning.deciding.speeds_of", lambda device: fast)
    recipe = shoal.Recipe(model=model, data=data, loss=loss)
    study = shoal.Study("s", recipe, space={"lr": 0.1}, trials=1, steps=2, directory=tmp_path)
    hardware = shoal.Hardware.virtual(devices=1, memory="150KiB")
    plan = study.plan(hardware=hardware, workers=warm_workers)
    assert type(plan.jobs[0].technique).__name__ == "Spilled"
    assert "far less than a dream" in plan.explain()


def test_a_link_whose_speed_was_given_is_what_it_was_given(tmp_path, warm_workers):
    recipe = shoal.Recipe(model=model, data=data, loss=loss)
    study = shoal.Study("s", recipe, space={"lr": 0.1}, trials=1, steps=2, directory=tmp_path)
    hardware = shoal.Hardware.virtual(devices=1, memory="150KiB", link="1GiB")
    plan = study.plan(hardware=hardware, workers=warm_workers)
    assert speeds_.speeds_of(plan.devices[0]).source in plan.explain()
