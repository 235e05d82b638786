"""Shards that run all micro-batches of a step because the planner says so: the plain bits.

Links are slow on paper, so that loads are what a step takes; trials train at full speed.
"""

from __future__ import annotations

from typing import Any

import pytest
import test_by_shard
import test_residency
import torch
import traps
from torch import Tensor, nn
from watching import Watched

import shoal
from shoal.planner.need import Request, footprints
from shoal.planner.price import Speeds
from shoal.planning import deciding

STEPS = 7
SLOW = Speeds(up_bytes_per_s=1e5, down_bytes_per_s=1e5, source="a slow link")


class Silent(traps.Chain):
    """Nothing random, and statistics of its own in each block."""

    def make_block(self, index: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(traps.WIDTH, traps.WIDTH), nn.BatchNorm1d(traps.WIDTH), nn.Tanh()
        )


class SharedNorm(traps.Chain):
    """Two blocks far apart keep the same statistics."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(traps.WIDTH)
        for index in (0, self.depth - 1):
            self.blocks[index].append(norm)

    def make_block(self, index: int) -> nn.Module:
        return nn.Sequential(nn.Linear(traps.WIDTH, traps.WIDTH), nn.Tanh())


class Reads(nn.Module):
    """A block that subtracts what another one has as its running mean."""

    def __init__(self, norm: nn.BatchNorm1d) -> None:
        super().__init__()
        self.linear = nn.Linear(traps.WIDTH, traps.WIDTH)
        self.others = [norm]  # no part of it

    def forward(self, x: Tensor) -> Tensor:
        mean = self.others[0].running_mean
        assert mean is not None
        return torch.tanh(self.linear(x - mean.clone()))


class ReadsOther(Silent):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = Reads(self.blocks[0][1])


class Leaves(nn.Module):
    """A block that leaves its mean in Python for another one."""

    def __init__(self, shelf: list[Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(traps.WIDTH, traps.WIDTH)
        self.shelf = shelf

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        self.shelf[0] = x.detach().mean()
        return x


class Takes(Leaves):
    def __init__(self, shelf: list[Tensor], gate: float) -> None:
        super().__init__(shelf)
        self.gate = nn.Parameter(torch.full((), gate))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + self.gate * self.shelf[0]


class ThroughPython(Silent):
    """What the first block leaves the third one reads; a gate is closed at the beginning."""

    gate = 1.0

    def __init__(self) -> None:
        super().__init__()
        shelf: list[Tensor] = [torch.zeros(())]
        self.blocks[0] = Leaves(shelf)
        self.blocks[2] = Takes(shelf, self.gate)


class ThroughAGate(ThroughPython):
    gate = 0.0


class Renormed(Silent):
    """An embedding that shrinks its own weight in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Embedding(12, traps.WIDTH, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.argmax(-1))


def recipe(model: type[nn.Module], **changes: Any) -> shoal.Recipe:
    settings = {"data": traps.data, "loss": traps.loss, "optimizer": traps.adamw}
    settings |= {"model": traps.Build(model), "accumulate": 3, "clip_grad_norm": 0.5}
    return shoal.Recipe(**(settings | changes))


@pytest.fixture
def slow(monkeypatch):
    """Links that carry next to nothing, on paper."""
    monkeypatch.setattr(deciding, "speeds_of", lambda device: SLOW)


@pytest.fixture
def check(run_study, assert_alone, slow):
    """Train, compare with the plain loop, and return what happened."""

    def run(recipe, technique=None, *, lr=(1e-2,), steps=STEPS, **options):
        seen = Watched()
        report = run_study(
            recipe,
            shoal.grid(lr=list(lr)),
            steps=steps,
            technique=technique or shoal.Spilled(shards=4, keep=()),
            timeline=True,
            callbacks=[seen],
            **options,
        )
        assert_alone(report, report.trials, recipe, steps=steps)
        return seen

    return run


def of(job: Any) -> str:
    (why,) = [words for words in job.why if "micro-batches" in words and "step" in words]
    return str(why)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("place", ["device", "host"])
def test_loads_are_paid_once_a_step_and_what_was_predicted_moves(place, clip, check, jobs):
    asked = shoal.Spilled(shards=4, optimizer=place, keep=())
    silent = recipe(Silent, clip_grad_norm=clip, data=never_validated)
    seen = check(silent, asked, poison=True)
    job = jobs[0]
    assert job.technique.order == "shard"
    assert "if they went one after another" in of(job)
    request = Request(micro_batches=3, clip=clip is not None, technique=None, prefers="host")
    step = footprints(job.shards, job.batch_bytes, job.technique, request)[0]
    loaded, stored = (seen.bytes_a_step(word) for word in ("LOAD", "STORE"))
    assert {loaded[2], loaded[4]} == {loaded[3]}  # groups of 3 and of 2 in turns
    assert stored[3] <= step.down_bytes
    if place == "host":  # what is loaded besides may be less than its room
        assert loaded[3] == step.up_bytes == sum(shard.parameter_bytes for shard in job.shards)


def never_validated(hp: Any) -> Any:
    return traps.data(hp)[0], None


def test_a_tight_budget_alone_is_enough(run_study, assert_alone, slow, jobs):
    """No technique is named: tied weights, and statistics between the blocks and the head."""
    tight = test_residency.recipe()
    space = shoal.grid(lr=[1e-2, 3e-3])
    report = run_study(tight, space, memory=600_000, steps=STEPS)
    assert_alone(report, report.trials, tight, steps=STEPS)
    assert {job.technique.order for job in jobs} == {"shard"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (SharedNorm, "the forwards of 2 shards change 'blocks.0.2"),
        (ReadsOther, "would have other bits"),
        (ThroughPython, "would have other bits"),
        (ThroughAGate, "would have other bits"),
    ],
)
def test_layers_that_share_something_keep_the_plain_order_and_the_plan_says_what(
    model, words, check, jobs
):
    check(recipe(model))
    assert jobs[0].technique.order == "micro"
    assert words in of(jobs[0])


def test_a_forward_that_writes_its_own_weights_goes_by_shard(check, jobs):
    check(recipe(Renormed))
    assert jobs[0].technique.order == "shard"


def test_who_names_the_plain_order_has_it(check, jobs):
    check(recipe(Silent), shoal.Spilled(shards=4, keep=(), order="micro"))
    assert jobs[0].technique.order == "micro"
    assert "order='shard' loads less" in of(jobs[0])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_whose_draws_can_be_foretold_goes_by_shard(precision, check, jobs):
    check(recipe(traps.Chain, precision=precision))
    assert jobs[0].technique.order == "shard"
    assert jobs[0].foretells
    assert "what each draws at random is drawn ahead" in of(jobs[0])


@pytest.mark.parametrize("model", [test_by_shard.Values, test_by_shard.Later])
def test_one_whose_draws_depend_on_values_goes_on_in_the_plain_order(model, check, jobs):
    check(recipe(model), shoal.Spilled(shards=3, keep=()), steps=9, checkpoint_every=0)
    assert jobs[-1].technique.order == "micro"
    assert not jobs[-1].foretells


def test_other_draws_and_data_without_a_length_keep_the_plain_order(check, jobs):
    check(recipe(test_by_shard.Python))
    assert "since it draws random numbers that cannot be foretold" in of(jobs[0])
    unknown = recipe(Silent, data=unknown_data)
    check(unknown)
    assert "since their number is not known" in of(jobs[-1])
    assert {job.technique.order for job in jobs} == {"micro"}


def unknown_data(hp: Any) -> Any:
    return test_residency.known_or_not({"known": False})


def test_a_model_that_begins_to_draw_goes_on_in_the_plain_order(check, jobs):
    late = recipe(test_residency.Late, accumulate=2, clip_grad_norm=None)
    check(late, shoal.Spilled(shards=3, keep=()), steps=9, checkpoint_every=0)
    assert [job.technique.order for job in jobs] == ["shard", "micro"]


def test_an_epoch_of_one_batch_has_the_plain_order(check, jobs):
    check(recipe(Silent, data=one_batch))
    assert jobs[0].technique.order == "micro"


def one_batch(hp: Any) -> Any:
    train, valid = traps.data(hp)
    return train[:1], valid


def test_links_that_are_quick_leave_the_plain_order(run_study, assert_alone, monkeypatch, jobs):
    endless = Speeds(up_bytes_per_s=1e15, down_bytes_per_s=1e15)
    monkeypatch.setattr(deciding, "speeds_of", lambda device: endless)
    technique, options = shoal.Spilled(shards=4, keep=()), {"steps": 3}
    report = run_study(recipe(Silent), {"lr": 1e-2}, technique=technique, **options)
    assert_alone(report, report.trials, recipe(Silent), **options)
    assert jobs[0].technique.order == "micro"
