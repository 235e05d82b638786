"""What stays on the device and which loop is outside are placement: the bits do not change."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import traps
import zoo
from torch import nn

import shoal
from shoal.core.event import ActionFinished

STEPS = 7  # of 5 batches: with three a step, groups of 3, 2, 3, 2 ...


class Quiet(nn.Module):
    """Tied embeddings, batch statistics and nothing random: every sum meets another loop."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(zoo.VOCABULARY, 32)
        self.blocks = nn.ModuleList(zoo.Block(32, 4, 0.0) for _ in range(4))
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, zoo.VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens_BT)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.flatten(0, 1))).unflatten(0, tokens_BT.shape)


class Late(traps.Chain):
    """Begins to draw random numbers in its tenth forward."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def make_block(self, index: int) -> nn.Module:
        return Counting()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(traps.WIDTH, traps.WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = torch.tanh(self.linear(x))
        return nn.functional.dropout(x, 0.1) if int(self.calls) > 9 else x


def quiet(hp: Any) -> nn.Module:
    return Quiet()


def batches(hp: Any) -> tuple[list[Any], None]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(zoo.VOCABULARY, (4, 9), generator=generator) for _ in range(5)]
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows], None


def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def recipe(**changes: Any) -> shoal.Recipe:
    settings = {"model": quiet, "data": batches, "loss": loss, "optimizer": traps.adamw}
    return shoal.Recipe(**(settings | {"accumulate": 3, "clip_grad_norm": 0.5} | changes))


@pytest.fixture
def check(run_study, assert_alone):
    def run(recipe, technique, *, lr=(1e-2, 3e-3), **options):
        space = shoal.grid(lr=list(lr))
        report = run_study(recipe, space, steps=STEPS, technique=technique, **options)
        assert_alone(report, report.trials, recipe, steps=STEPS)
        return report

    return run


BY_SHARD = [
    *itertools.product([(), (0, 2), (0, 1, 2)], ["device", "host"], [None, 0.5], ["fp32"]),
    ((), "host", 0.5, "bf16"),
    ((0, 2), "device", 0.5, "bf16"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("keep", "place", "clip", "precision"), BY_SHARD)
def test_shards_may_run_all_micro_batches_while_they_are_there(
    keep, place, clip, precision, check
):
    technique = shoal.Spilled(shards=4, optimizer=place, keep=keep, order="shard")
    check(recipe(clip_grad_norm=clip, precision=precision), technique)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("place", ["device", "host"])
def test_the_same_under_poison_and_delays_with_two_trials_on_a_device(place, check):
    technique = shoal.Spilled(shards=5, optimizer=place, keep=(1, 3), order="shard")
    check(recipe(), technique, poison=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize("place", ["device", "host"])
def test_what_stays_at_the_turn_has_the_plain_bits_under_poison(place, lookahead, check):
    technique = shoal.Spilled(shards=5, optimizer=place, keep=(2,), lookahead=lookahead)
    check(recipe(accumulate=2), technique, poison=True)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_schedule_acts_on_kept_shards_and_on_those_that_step_on_the_host(precision, check):
    technique = shoal.Spilled(shards=4, optimizer="host", keep=(0, 2))
    changes = {"schedule": traps_schedule, "clip_grad_norm": None, "accumulate": 1}
    check(recipe(precision=precision, **changes), technique)


def traps_schedule(optimizer: Any, hp: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("order", ["micro", "shard"])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_parameters_alone_may_stay(accumulate, clip, order, check):
    technique = shoal.Spilled(
        shards=5, optimizer="device", keep=(1,), keep_weights=(0, 3), order=order
    )
    check(recipe(clip_grad_norm=clip, accumulate=accumulate), technique, poison=True)


def test_the_parameters_of_all_shards_may_stay_with_momentum_made_in_the_first_step(check):
    chain = recipe(
        model=traps.Build(traps.Chain),
        data=traps.data,
        loss=traps.loss,
        optimizer=traps.momentum,
        schedule=traps_schedule,
    )
    technique = shoal.Spilled(shards=3, optimizer="device", keep=(), keep_weights=(0, 1, 2))
    check(chain, technique, checkpoint_every=0, devices=2, poison=True)


def test_all_shards_may_stay(check):
    chain = recipe(model=traps.Build(traps.Chain), data=traps.data, loss=traps.loss)
    for place in ("device", "host"):
        check(chain, shoal.Spilled(shards=3, optimizer=place, keep=(0, 1, 2)))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_trial_with_kept_shards_goes_on_from_its_generation(precision, check):
    technique = shoal.Spilled(shards=4, optimizer="host", keep=(0, 2))
    check(
        recipe(precision=precision),
        technique,
        checkpoint_every=0,
        devices=2,
        lr=(1e-2, 3e-3, 1e-3),
    )


def test_the_planner_keeps_what_there_is_room_for(check, jobs):
    moved: dict[int, int] = {}

    def watch(event: Any) -> None:
        if isinstance(event, ActionFinished) and event.step == 2:
            moved[event.trial] = moved.get(event.trial, 0) + event.bytes

    check(
        recipe(),
        shoal.Spilled(recompute=True, order="micro"),
        memory=600_000,
        timeline=True,
        callbacks=[watch],
        lr=(1e-2,),
    )
    technique = jobs[0].technique
    assert technique.order == "micro"
    assert technique.keep or technique.keep_weights
    assert "order='shard' loads less" in " ".join(jobs[0].why)
    assert "on the device, for which there is room; if all travelled" in " ".join(jobs[0].why)
    assert moved[0] > 0


def test_a_model_that_draws_keeps_the_plain_order_where_that_is_named(check, jobs):
    drawing = shoal.Recipe(
        model=traps.Build(traps.Chain), data=traps.data, loss=traps.loss, accumulate=2
    )
    check(drawing, shoal.Spilled(shards=3, order="micro"), lr=(1e-2,))
    assert jobs[0].technique.order == "micro"
    assert not jobs[0].foretells
    assert "order='shard' loads less" in " ".join(jobs[0].why)


def test_a_model_that_draws_may_be_told_so_where_a_step_has_one_micro_batch(check):
    drawing = shoal.Recipe(model=traps.Build(traps.Chain), data=traps.data, loss=traps.loss)
    report = check(drawing, shoal.Spilled(shards=3, order="shard"), lr=(1e-2,))
    words = (report.directory / "plan.json").read_text()
    assert "order='shard' changes nothing: a step has one micro-batch" in words


def one_buffer(hp: Any) -> tuple[Any, None]:
    return OneBuffer(), None


class OneBuffer:
    """Fills the same tensors for every batch."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        x, y = torch.empty(4, 12), torch.empty(4, dtype=torch.long)
        generator = torch.Generator().manual_seed(5)
        for _ in range(5):
            yield x.normal_(generator=generator), y.random_(3, generator=generator)


class Silent(traps.Chain):
    def make_block(self, index: int) -> nn.Module:
        return nn.Sequential(nn.Linear(traps.WIDTH, traps.WIDTH), nn.Tanh())


class NoisyEvaluation(Silent):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x if self.training else x + torch.randn_like(x)


@pytest.mark.sample(1)
@pytest.mark.parametrize("order", ["micro", "shard"])
def test_a_source_that_fills_one_buffer_may_be_held_a_step_long(order, check):
    silent = recipe(model=traps.Build(Silent), data=one_buffer, loss=traps.loss)
    check(silent, shoal.Spilled(shards=3, order=order))


def test_a_model_that_draws_in_evaluation_alone_may_go_by_shard(check):
    noisy = recipe(model=traps.Build(NoisyEvaluation), data=traps.data, loss=traps.loss)
    check(noisy, shoal.Spilled(shards=3, order="shard"))


def known_or_not(hp: Any) -> tuple[Any, Any]:
    train, valid = traps.data(hp)
    return (train if hp["known"] else Unknown(train)), valid


class Unknown:
    """A source without a length."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def test_a_trial_whose_data_has_no_length_is_planned_for_itself(run_study):
    silent = recipe(model=traps.Build(Silent), data=known_or_not, loss=traps.loss)
    space = shoal.grid(lr=[1e-2], known=[True, False])
    with pytest.raises(shoal.PlanError, match="does not say how many batches"):
        run_study(silent, space, steps=2, technique=shoal.Spilled(shards=3, order="shard"))


def test_an_optimizer_that_counts_on_itself_is_not_stepped_in_parts(check, jobs):
    counting = recipe(
        model=traps.Build(Silent), data=traps.data, loss=traps.loss, optimizer=counting_sgd
    )
    check(counting, None, lr=(1e-2,), memory="64MiB")
    with pytest.raises(shoal.PlanError, match=r"keeps 'steps' beside its state"):
        check(counting, shoal.Spilled(shards=3), lr=(1e-2,))


class CountingSGD(torch.optim.SGD):
    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 1e-2 / self.steps
        super().step(closure)


def counting_sgd(named_parameters: Any, hp: Any) -> Any:
    return CountingSGD([parameter for _, parameter in named_parameters], lr=hp["lr"])


@pytest.mark.parametrize("technique", ["resident", shoal.Spilled(shards=3)])
def test_an_evaluation_at_the_end_of_a_group_that_was_read_to_the_end_is_not_skipped(
    technique, run_study, assert_alone
):
    unknown = recipe(model=traps.Build(Silent), data=unknown_data, loss=traps.loss)
    options = {"steps": 6, "eval_every": 2}
    report = run_study(unknown, shoal.grid(lr=[1e-2]), technique=technique, **options)
    assert_alone(report, report.trials, unknown, **options)


def unknown_data(hp: Any) -> tuple[Any, Any]:
    return known_or_not({"known": False})


def test_a_shard_that_borrows_cannot_be_told_to_stay(run_study):
    technique = shoal.Spilled(shards=4, keep=(3,))
    with pytest.raises(shoal.PlanError, match=r"keep shard 3 of 4 .* borrows .* tied parameters"):
        run_study(recipe(), shoal.grid(lr=[1e-2]), steps=2, technique=technique)


def test_a_model_that_begins_to_draw_later_fails_alone_and_is_told_what_to_do(run_study):
    late = shoal.Recipe(model=traps.Build(Late), data=traps.data, loss=traps.loss, accumulate=2)
    technique = shoal.Spilled(shards=3, order="shard")
    report = run_study(late, shoal.grid(lr=[1e-2]), steps=9, technique=technique)
    assert report.trials[0].state == "FAILED"
    assert "order='micro'" in report.trials[0].error
