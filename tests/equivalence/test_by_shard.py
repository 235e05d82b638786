"""A shard may run all micro-batches of a step also where the model draws random numbers.

What a micro-batch draws is drawn ahead, so that the next one begins where the plain loop has it.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import traps
import zoo
from torch import nn
from torch.nn import functional as F
from watching import space_of

import shoal
from shoal.partition.build import clone_batch
from shoal.partition.draws import Recordings
from shoal.runtime.pool import WorkerPool

STEPS = 7  # of 5 batches: with three a step, groups of 3, 2, 3, 2 ...
RATES = shoal.grid(lr=[1e-2, 3e-3])
RATE = {"lr": 1e-2}


def by_shard(**how: Any) -> shoal.Spilled:
    return shoal.Spilled(**({"shards": 4, "order": "shard"} | how))


def trap(model: type[nn.Module] = traps.Chain, **changes: Any) -> shoal.Recipe:
    settings = {"model": traps.Build(model), "data": traps.data, "loss": traps.loss}
    return shoal.Recipe(**(settings | {"accumulate": 3, "optimizer": traps.adamw} | changes))


@pytest.fixture
def train(watch, jobs):
    """Train two trials, hold them to the plain loop; they are planned and went by shard."""

    def run(recipe, technique, space=None, *, steps=STEPS, exact=True, **options):
        seen = watch(recipe, space or RATES, technique, steps=steps, exact=exact, **options)
        assert all(job.technique.order == "shard" and job.foretells for job in jobs)
        assert any("drawn ahead" in why for why in jobs[0].why)
        units = [word for word in seen.first_step if word[0] in "FB"]
        last = technique.shards - 1
        recorded = [f"F s{shard} m0" for shard in range(technique.shards)]
        assert units[: last + 1] == recorded
        assert units[last + 1 : last + 3] == ["F s0 m0", "F s0 m1"]
        return seen

    return run


# -- the plain loop's bits --------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("accumulate", [2, 3, 4])
@pytest.mark.parametrize(("place", "clip"), [("host", 0.5), ("device", None)])
def test_a_gpt_with_dropout_tied_weights_and_a_short_batch(place, clip, accumulate, train):
    recipe = zoo.recipe(clip=clip, accumulate=accumulate, schedule=True)
    train(recipe, by_shard(optimizer=place), space_of("gpt"))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("place", "clip"), [("host", None), ("device", 0.5)])
@pytest.mark.parametrize("keep", [(), (1, 2)])
def test_the_same_under_poison_and_delays_with_shards_that_stay(keep, place, clip, train):
    recipe = zoo.recipe(clip=clip, accumulate=3)
    train(recipe, by_shard(optimizer=place, keep=keep), space_of("gpt"), poison=True)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bert", "resnet"])
def test_shuffled_padded_text_and_batch_statistics(model, train):
    train(zoo.recipe(accumulate=3, clip=0.5), by_shard(shards=3), space_of(model))


@pytest.mark.slow
def test_inputs_may_wait_on_the_host(train):
    technique = by_shard(shards=6, boundaries="host", optimizer="host", lookahead=0)
    train(zoo.recipe(accumulate=3), technique, space_of("gpt"), poison=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("transfer", ["bf16", "fp32"])
def test_in_bf16_with_weights_that_travel_as_that_or_whole(transfer, train):
    recipe = zoo.recipe(accumulate=3, precision="bf16")
    technique = by_shard(optimizer="host", keep=(), transfer=transfer)
    train(recipe, technique, space_of("gpt"), poison=True)


def test_all_that_travels_may_stay_from_forward_to_backward(train):
    technique = by_shard(optimizer="host", keep=(0,), keep_turn=1, lookahead=0)
    train(zoo.recipe(accumulate=2), technique, space_of("gpt"), poison=True)


@pytest.mark.slow
@pytest.mark.parametrize("data", [traps.shuffled_data, traps.worker_data])
def test_data_that_draws_sees_the_numbers_of_the_plain_loop(data, train):
    train(trap(data=data), by_shard(), poison=True)


def test_with_no_byte_more_than_was_planned(train, jobs):
    recipe, technique = zoo.recipe(accumulate=3, clip=0.5), by_shard(optimizer="host", keep=())
    space = {"model": "gpt", "optimizer": "adamw", "lr": 1e-2}
    train(recipe, technique, space, steps=2)
    memory = jobs[0].held_bytes + jobs[0].unit_bytes
    train(recipe, jobs[0].technique, space, steps=4, poison=True, memory=memory)
    assert jobs[-1].technique == jobs[0].technique


class OneBuffer:
    """Fills the same tensors for every batch, as the generator of the process says."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        x, y = torch.empty(4, 12), torch.empty(4, dtype=torch.long)
        for _ in range(5):
            yield x.normal_(), y.random_(3)


def test_a_source_that_fills_one_buffer_may_be_read_ahead(train):
    train(trap(data=lambda hp: (OneBuffer(), None)), by_shard())


def test_evaluations_between_the_steps_are_those_of_the_plain_loop(run_study, assert_alone):
    options = {"steps": STEPS, "eval_every": 2}
    report = run_study(trap(), RATES, technique=by_shard(), **options)
    assert_alone(report, report.trials, trap(), **options)


class Written(traps.Chain):
    """Batch statistics and a forward that shrinks its weights, beside dropout."""

    def make_block(self, index: int) -> nn.Module:
        norm = nn.BatchNorm1d(traps.WIDTH)
        return nn.Sequential(nn.Linear(traps.WIDTH, traps.WIDTH), norm, nn.Dropout(0.2))

    def __init__(self) -> None:
        super().__init__()
        self.enter = Rows()


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, traps.WIDTH, max_norm=0.5)
        self.linear = nn.Linear(12, traps.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(0.99)
        return self.linear(x) + self.rows((x[:, 0].abs() * 7).long() % 5)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [(), (0, 1)])
def test_a_recorded_forward_leaves_no_statistics_and_no_rows_behind(keep, train):
    train(trap(Written), by_shard(keep=keep), exact=False)


# -- forms of batches -------------------------------------------------------------------------


def uneven(hp: Any) -> tuple[Any, None]:
    """A new size comes in the middle of a step, and one larger than all before."""
    return traps.batches([3, 3, 2, 3, 4, 3]), None


def test_a_new_form_is_recorded_when_it_is_met_and_but_once(train):
    seen = train(trap(data=uneven), by_shard(), steps=6, exact=False)
    by_step = [
        sum(e.action == "F s3 m0" and e.trial == 0 and e.step == step for e in seen.actions)
        for step in range(1, 7)
    ]
    assert by_step == [1, 1, 0, 0, 0, 0]  # nobody draws after a step's last batch: not of 2 rows


def test_a_lone_batch_at_the_end_of_an_epoch_is_not_recorded(train):
    four = trap(data=lambda hp: (traps.batches([4, 4, 4, 2]), None))
    seen = train(four, by_shard(), steps=4)
    assert sum(e.action == "F s3 m0" and e.trial == 0 for e in seen.actions) == 1


# -- leases, ends and beginnings --------------------------------------------------------------


def test_trials_that_take_turns_on_a_device(run_study, assert_alone, impatient):
    space = shoal.grid(lr=[1e-2, 3e-3, 1e-3])
    report = run_study(trap(), space, technique=by_shard(), epochs=4)
    assert_alone(report, report.trials, trap(), epochs=4)


@pytest.mark.slow
def test_a_study_that_was_stopped_goes_on(interrupted, assert_alone):
    recipe = zoo.recipe(accumulate=3, clip=0.5, schedule=True)
    space = {"model": "gpt", "optimizer": "adamw", "lr": 1e-2}
    report = interrupted(recipe, by_shard(), by_shard(), devices=1, space=space)
    assert_alone(report, report.trials, recipe, epochs=6)


@pytest.mark.parametrize("then", [shoal.Spilled(shards=3, order="micro"), "resident"])
def test_and_goes_on_in_another_order(then, interrupted, assert_alone):
    report = interrupted(trap(), by_shard(), then, devices=1, epochs=4)
    assert_alone(report, report.trials, trap(), epochs=4)


class Deadly(list):
    """Batches whose reader dies once, in the second epoch, in the middle of a step."""

    epoch = 0

    def __init__(self, flag: str) -> None:
        super().__init__(traps.batches([4, 4, 4, 4, 3]))
        self.flag = Path(flag)

    def __iter__(self) -> Any:
        self.epoch += 1
        for index, batch in enumerate(super().__iter__()):
            if (self.epoch, index) == (2, 1) and not self.flag.exists():
                self.flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch


def deadly(hp: Any) -> tuple[Any, None]:
    return Deadly(hp["flag"]), None


def test_a_worker_that_was_killed_in_mid_step(run_study, assert_alone, tmp_path):
    recipe, space = trap(data=deadly), {"lr": 1e-2, "flag": str(tmp_path / "flag")}
    report = run_study(recipe, space, technique=by_shard(), epochs=3, checkpoint_every=0)
    assert (tmp_path / "flag").exists()
    assert_alone(report, report.trials, recipe, epochs=3)


# -- what cannot be foretold ------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(traps.WIDTH, traps.WIDTH), draw
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.draw(self, torch.tanh(self.linear(x)))


def pythons(block: Block, x: torch.Tensor) -> torch.Tensor:
    return x * random.random()


def values(block: Block, x: torch.Tensor) -> torch.Tensor:
    x = F.dropout(x, 0.1)
    return x + torch.rand(2)[0] if float(x.detach().sum()) > 0 else x


def later(block: Block, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(F.dropout(x, 0.1), 0.1) if int(block.calls) > 9 else F.dropout(x, 0.1)


class Odd(traps.Chain):
    draw: Any = None

    def make_block(self, index: int) -> nn.Module:
        return Block(type(self).draw)


class Python(Odd):
    draw = staticmethod(pythons)


class Values(Odd):
    draw = staticmethod(values)


class Later(Odd):
    draw = staticmethod(later)


def test_draws_of_pythons_generator_are_refused_when_it_is_planned(run_study):
    with pytest.raises(shoal.PlanError, match=r"cannot be foretold: .*NumPy's.*order='micro'"):
        run_study(trap(Python), RATES, steps=2, technique=by_shard())


def test_and_unasked_the_plan_says_why_it_goes_by_micro_batch(watch, jobs):
    watch(trap(Python), RATES, shoal.Spilled(shards=3), steps=2)
    assert jobs[0].technique.order == "micro"
    assert not jobs[0].foretells
    assert "since it draws random numbers that cannot be foretold" in " ".join(jobs[0].why)


@pytest.mark.parametrize("model", [Values, Later])
def test_draws_that_depend_on_values_fail_before_anything_steps(model, run_study):
    report = run_study(trap(model), RATE, steps=20, technique=by_shard())
    assert report.trials[0].state == "FAILED"
    assert "its draws depend on what it computes" in report.trials[0].error
    assert "order='micro'" in report.trials[0].error


def test_one_after_another_they_have_the_plain_bits(watch):
    watch(trap(Values), RATES, shoal.Spilled(shards=4, order="micro"))


def test_compiled_code_is_refused(run_study):
    words = r"those of compiled code cannot be foretold"
    with WorkerPool() as own, pytest.raises(shoal.PlanError, match=words):  # it compiled something
        run_study(trap(Compiled), RATES, steps=2, technique=by_shard(), workers=own)


class Compiled(traps.Chain):
    def make_block(self, index: int) -> nn.Module:
        return torch.compile(super().make_block(index), backend="eager")


# -- what is recorded -------------------------------------------------------------------------


def test_a_recording_is_of_a_form_of_batches():
    from torch.utils import _pytree as pytree
    from transformers import BatchEncoding

    assert pytree.tree_leaves(BatchEncoding({})) != []  # pytree does not look inside
    found = Recordings()
    one, other = torch.zeros(3, 4), torch.ones(3, 4)
    found.keep({"x": one, "mask": None}, [])
    assert found.knows({"x": other, "mask": None})
    assert not found.knows({"x": other[:2], "mask": None})
    assert not found.knows({"x": other.double(), "mask": None})
    found.keep(BatchEncoding({"x": one}), [])
    assert found.knows(BatchEncoding({"x": other}))
    assert not found.knows(BatchEncoding({"x": other[:2]}))
    copied = clone_batch(BatchEncoding({"x": other}))
    other.zero_()
    assert bool(copied["x"].all())
