"""2BW ends on the bits of one process that follows its rule, W(t+1) = W(t) - step(g(W(t-1)))."""

from __future__ import annotations

import pytest
import torch
import traps
import zoo
from pipelining import LR, animal, assert_alike, decay, sequence, trap

from shoal.testing import plain_2bw_loop, plain_loop, same_bits

SIZES = [(2, 2), (4, 5), *(pytest.param(*s, marks=pytest.mark.full) for s in [(2, 3), (4, 8)])]
KEEPING = pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])


@KEEPING
@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("micro_batches", [4, 5, 8])
def test_four_stages_with_dropout(micro_batches, clip, recompute, stage_processes):
    recipe = trap(traps.Chain, micro_batches, clip_grad_norm=clip, schedule=decay)
    assert_alike(
        recipe, LR, stage_processes, stages=4, schedule="2bw", recompute=recompute, steps=5
    )


@pytest.mark.slow
@pytest.mark.parametrize("predict", [False, True])
@pytest.mark.parametrize(("clip", "precision"), [(None, "fp32"), (0.01, "fp32"), (0.01, "bf16")])
@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_tied_weights_of_the_version_that_is_computed_with(
    stages, micro_batches, clip, precision, predict, stage_processes
):
    hp = {**LR, "model": "gpt", "optimizer": "adamw"}
    recipe = animal(micro_batches, clip_grad_norm=clip, precision=precision)
    trained = assert_alike(
        recipe, hp, stage_processes, stages=stages, schedule="2bw", predict=predict, steps=5
    )
    assert trained.pipeline.ties == ((0, stages - 1),)


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_running_ahead_changes_no_bit(lag, stage_processes):
    trained = assert_alike(
        sequence(4, clip_grad_norm=0.01),
        LR,
        stage_processes,
        stages=4,
        schedule="2bw",
        lag=lag,
        steps=6,
    )
    assert max(trained.most_in_flight) == min(4 + lag, 5)


@KEEPING
@pytest.mark.parametrize("model", [traps.Skips, traps.SharedLayer, traps.LateGradient])
def test_boundaries_and_weights_of_any_form(model, recompute, stage_processes):
    assert_alike(
        trap(model, 4), LR, stage_processes, stages=3, schedule="2bw", recompute=recompute, steps=5
    )


def test_layers_whose_backward_reads_their_weights_again(stage_processes):
    """Normalisations and convolutions: a version that is switched too late is another gradient."""
    hp = {**LR, "model": "resnet", "optimizer": "sgd"}
    assert_alike(animal(4), hp, stage_processes, stages=4, schedule="2bw", steps=5)


def test_the_first_two_steps_use_the_first_weights(one_thread):
    recipe = sequence(2)
    first = plain_loop(recipe, LR, 5, steps=1)
    stale = plain_2bw_loop(recipe, LR, 5, steps=1)
    assert first.losses == stale.losses
    for name, parameter in first.parameters.items():
        assert same_bits(parameter, stale.parameters[name])
    both = plain_loop(recipe, LR, 5, steps=2), plain_2bw_loop(recipe, LR, 5, steps=2)
    assert both[0].losses != both[1].losses


def test_a_guess_is_exact_where_steps_repeat(one_thread):
    """With SGD on a constant gradient the guess is the weights that a plain loop would have."""
    recipe = sequence(2, model=Line, loss=slope, optimizer=plain_sgd)
    guessed = plain_2bw_loop(recipe, LR, 5, steps=5, predict=True)
    plain = plain_loop(recipe, LR, 5, steps=5)
    stale = plain_2bw_loop(recipe, LR, 5, steps=5)
    assert guessed.losses[2:] == pytest.approx(plain.losses[2:], rel=1e-6)
    assert stale.losses[2:] != pytest.approx(plain.losses[2:], rel=1e-6)


def test_who_looks_after_a_step_sees_the_newest_weights_and_changes_nothing(one_thread):
    recipe, seen = sequence(2), []

    def look(step, model):
        torch.rand(3)
        model.eval()
        seen.append((step, {name: p.clone() for name, p in model.named_parameters()}))

    watched = plain_2bw_loop(recipe, LR, 5, steps=3, after_step=look)
    assert watched.losses == plain_2bw_loop(recipe, LR, 5, steps=3).losses
    assert [step for step, _ in seen] == [1, 2, 3]
    for step, weights in seen:
        alone = plain_2bw_loop(recipe, LR, 5, steps=step)
        assert all(same_bits(weights[name], p) for name, p in alone.parameters.items())


class Line(torch.nn.Module):
    def __init__(self, hp) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.weight * torch.ones(())


def slope(output, batch):
    return output


def plain_sgd(named_parameters, hp):
    return torch.optim.SGD([p for _, p in named_parameters], lr=hp["lr"])


@pytest.mark.full
@pytest.mark.parametrize("predict", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@KEEPING
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_the_zoo(name, stages, recompute, precision, predict, stage_processes):
    hp = {**LR, "model": name, "optimizer": "adamw"}
    recipe = animal(stages + 1, clip_grad_norm=0.01, precision=precision)
    how = {"stages": stages, "schedule": "2bw", "recompute": recompute, "predict": predict}
    assert_alike(recipe, hp, stage_processes, steps=5, **how)
