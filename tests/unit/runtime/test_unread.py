"""Which hyperparameters no code of a recipe reads."""

from __future__ import annotations

import torch
from torch import nn

from shoal.core.spec import TrialSpec
from shoal.recipes.recipe import Recipe
from shoal.runtime.measuring.describe import describe
from shoal.runtime.wire.messages import Describe, Noticed

HP = {"lr": 0.1, "width": 4, "weight_decya": 0.1, "w_1": 0.5, "seed": 3}


def net(hp):
    return nn.Linear(4, hp["width"])


def total(output, batch):
    return output.sum()


def names_of(hp=HP, arrays=False, **recipe) -> Noticed:
    given = {"model": net, "data": lambda hp: ([torch.zeros(2, 4)], None), "loss": total}
    order = Describe((TrialSpec(number=0, hp=hp, seed=0),), arrays)
    found = describe(Recipe(**{**given, **recipe}), order, lambda trial: None)
    assert not found.errors
    return found.noticed[0]


def test_a_name_that_nobody_reads_is_found_and_what_was_asked_for_in_its_place():
    for arrays in (False, True):
        found = names_of(arrays=arrays)
        assert found.unread == {"weight_decya", "w_1"}
        assert found.missing == {"weight_decay"}


def test_an_argument_of_that_name_is_no_reading():
    def fixed(named, hp):
        return torch.optim.Adam([p for _, p in named], lr=1e-3, betas=(0.9, 0.99))

    def reads(named, hp):
        return torch.optim.Adam([p for _, p in named], **{"lr": hp["lr"]})

    assert "lr" in names_of(optimizer=fixed).unread
    assert "lr" not in names_of(optimizer=reads).unread


def test_a_model_that_keeps_them_may_read_what_its_code_spells():
    class Keeps(nn.Linear):
        def __init__(self, hp):
            super().__init__(4, hp["width"])
            self.hp = hp

        def forward(self, x):
            return super().forward(x) * self.hp["w_1"]

    assert names_of(model=Keeps).unread == {"weight_decya"}


def test_attributes_of_an_object_that_keeps_them_count():
    class Wrapped:
        def __init__(self, hp):
            self._hp = hp

        def __getattr__(self, name):
            return self._hp[name]

    class Keeps(nn.Linear):
        def __init__(self, hp):
            super().__init__(4, hp["width"])
            self.of = Wrapped(hp)

        def forward(self, x):
            return super().forward(x) * self.of.w_1

    assert names_of(model=Keeps).unread == {"weight_decya"}


def test_a_part_of_a_name_counts_where_code_may_come_to_read_it():
    class Keeps(nn.Linear):
        def __init__(self, hp):
            super().__init__(4, hp["width"])
            self.hp, self.number = hp, 1

        def forward(self, x):
            return super().forward(x) * self.hp[f"w_{self.number}"]

    def weighted(output, batch, hp):
        return sum(hp[f"w_{i}"] for i in (1,)) * output.sum()

    assert names_of(model=Keeps).unread == {"weight_decya"}
    assert names_of(loss=weighted).unread == {"weight_decya"}


def test_a_part_of_a_name_does_not_count_in_code_that_never_sees_them_again():
    def build(hp):
        return nn.Linear(4, hp["width"], bias="weight" not in hp)

    assert "weight_decya" in names_of(model=build).unread


def test_what_a_loss_a_metric_a_schedule_or_a_limit_reads_is_read():
    def loss(output, batch, hp):
        return hp["w_1"] * output.sum()

    def schedule(optimizer, hp):
        return torch.optim.lr_scheduler.ConstantLR(optimizer, hp["w_1"])

    assert "w_1" not in names_of(loss=loss).unread
    assert "w_1" not in names_of(metrics={"one": loss}).unread
    assert "w_1" not in names_of(schedule=schedule).unread
    assert "w_1" not in names_of(clip_grad_norm=lambda hp: hp["w_1"]).unread


def test_whoever_asks_for_all_of_them_reads_them():
    def build(hp):
        return nn.Linear(4, dict(hp)["width"])

    def steps(optimizer, hp):
        raise ValueError("told of when it trains")

    assert not names_of(model=build).unread
    assert not names_of(schedule=steps).unread, "nobody knows what it would have read"


def test_a_step_of_ones_own_may_read_what_it_spells():
    def step(models, batch, optimizers, hp):
        return models(batch).sum() * hp["w_1"]

    assert names_of(loss=None, step=step).unread == {"weight_decya"}


def test_the_seed_is_shoals_own():
    assert "seed" not in names_of().unread
