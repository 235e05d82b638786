"""Losses by rows: not the bits of an uncut loss, and the same wherever a trial runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.partition.measure import measure_layers
from shoal.partition.pilot import pilot
from shoal.recipes.recipe import autocast, compute_loss, model_inputs
from shoal.rng import seed_all
from shoal.rowwise import LossByRows
from shoal.testing import plain_loop

CPU = torch.device("cpu")
STEPS, WIDTH, VOCABULARY, ROWS = 4, 24, 4096, 7  # of 27 rows in a batch


class Text(nn.Module):
    """A language model; ``tied`` is whether its head is its embedding."""

    def __init__(self, tied: bool, vocabulary: int = VOCABULARY, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(zoo.Block(WIDTH, 4, dropout) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.tokens(tokens_BT)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Softcapped(Text):
    """Its loss reads no projection: nothing can be cut."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return 3 * torch.tanh(super().forward(tokens_BT) / 3)


def gpt2(vocabulary: int = VOCABULARY) -> nn.Module:
    import transformers  # four seconds that the other models need not spend

    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=16,
        n_embd=WIDTH,
        n_layer=3,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    return transformers.GPT2LMHeadModel(config)


def example() -> nn.Module:
    from shoal.examples.gpt import GPT

    return GPT(width=WIDTH, depth=3, heads=2, context=16)


MODELS = {
    "tied": lambda: Text(tied=True),
    "untied": lambda: Text(tied=False),
    "softcapped": lambda: Softcapped(tied=True),
    "gpt2": gpt2,
    "example": example,
}


def build(hp: Any) -> nn.Module:
    return MODELS[hp["model"]]()


def batches(offset: int, count: int, vocabulary: int, as_dict: bool) -> list[Any]:
    generator = torch.Generator().manual_seed(offset)
    drawn = [torch.randint(vocabulary, (3, 10), generator=generator) for _ in range(count)]
    if as_dict:
        return [{"input_ids": rows[:, :-1], "labels": rows[:, :-1]} for rows in drawn]
    return [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in drawn]


def data(hp: Any) -> Any:
    words = 256 if hp["model"] == "example" else VOCABULARY
    kind = (words, hp["model"] == "gpt2")
    return batches(1, 3, *kind), batches(2, 1, *kind)


def loss(output: Any, batch: Any) -> Tensor:
    if isinstance(batch, dict):
        return output.loss
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def accuracy(output: Any, batch: Any) -> float:
    logits = output.logits if isinstance(batch, dict) else output
    labels = batch["labels"] if isinstance(batch, dict) else batch[1]
    return (logits.argmax(-1) == labels).float().mean().item()


def recipe(**changes: Any) -> shoal.Recipe:
    settings = {"model": build, "data": data, "loss": loss, "loss_rows": ROWS}
    settings |= {"metrics": {"accuracy": accuracy}, "accumulate": 2, "clip_grad_norm": 0.5}
    return shoal.Recipe(**(settings | changes))


TECHNIQUES = {
    "resident": "resident",
    "2 shards": shoal.Spilled(shards=2, optimizer="device"),
    "4 shards, host step": shoal.Spilled(shards=4, optimizer="host"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_trial_ends_on_the_bits_of_the_plain_loop(technique, precision, run_study, assert_alone):
    by_rows = recipe(precision=precision)
    report = run_study(
        by_rows,
        shoal.grid(model=["tied", "untied", "softcapped", "example"], lr=[1e-2]),
        steps=STEPS,
        technique=TECHNIQUES[technique],
        poison=True,
    )
    assert len(report.trials) == 4
    assert_alone(report, report.trials, by_rows, steps=STEPS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_other_weights_may_travel_as_bfloat16_beside_a_head_by_rows(
    accumulate, run_study, assert_alone
):
    by_rows = recipe(precision="bf16", accumulate=accumulate)
    narrow = shoal.Spilled(shards=4, optimizer="host", transfer="bf16")
    report = run_study(
        by_rows, shoal.grid(model=["untied"], lr=[1e-2]), steps=STEPS, technique=narrow
    )
    assert_alone(report, report.trials, by_rows, steps=STEPS)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_spilled_model_of_transformers_does_too(precision, run_study, assert_alone):
    by_rows = recipe(precision=precision, accumulate=1)
    space = shoal.grid(model=["gpt2"], lr=[1e-2])
    report = run_study(by_rows, space, steps=STEPS, technique=TECHNIQUES["4 shards, host step"])
    assert_alone(report, report.trials, by_rows, steps=STEPS)


@pytest.mark.parametrize("name", ["tied", "untied", "gpt2", "example"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_are_those_of_the_uncut_loss_up_to_rounding(name, precision):
    found = [_one_step(name, precision, rows) for rows in (None, ROWS)]

    tolerance = {"fp32": 1e-5, "bf16": 2e-2}[precision]
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for parameter, expected in found[0][1].items():
        difference = (found[1][1][parameter] - expected).abs().max()
        assert difference <= tolerance * expected.abs().max(), parameter


def _one_step(name: str, precision: str, rows: int | None) -> tuple[float, dict[str, Tensor]]:
    by_rows = recipe(precision=precision, loss_rows=rows)
    hp = {"model": name}
    seed_all(0)
    model, batch = build(hp), data(hp)[0][0]
    with autocast(by_rows, CPU) as entered:
        args, kwargs = model_inputs(by_rows, batch)
        value = compute_loss(by_rows, model(*args, **kwargs), batch)
    value.backward()
    if rows is not None:
        assert isinstance(entered, LossByRows)
        assert len(entered.tally.cut) == 1
        assert not entered.tally.whole
    return value.item(), {n: p.grad for n, p in model.named_parameters()}


def test_what_cannot_be_cut_trains_on_the_bits_of_the_uncut_loss():
    hp = {"model": "softcapped", "lr": 1e-2}
    whole, by_rows = (plain_loop(recipe(loss_rows=n), hp, 0, steps=STEPS) for n in (None, ROWS))

    assert whole.losses == by_rows.losses
    for name, parameter in whole.parameters.items():
        assert torch.equal(parameter, by_rows.parameters[name])


def test_training_by_rows_learns_as_the_uncut_loss_does():
    hp = {"model": "tied", "lr": 1e-2}
    whole, by_rows = (plain_loop(recipe(loss_rows=n), hp, 0, steps=8) for n in (None, ROWS))

    assert by_rows.losses != whole.losses
    assert by_rows.losses == pytest.approx(whole.losses, rel=1e-4)
    assert by_rows.metrics == pytest.approx(whole.metrics, rel=1e-3, abs=0.1)


@pytest.mark.full
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.full)])
def test_the_last_unit_needs_the_logits_of_some_rows_only(tied, precision):
    words, length, rows = 8_192, 512, 32
    text = torch.randint(words, (1, length + 1), generator=torch.Generator().manual_seed(0))
    batch = (text[:, :-1], text[:, 1:])
    peaks = {}
    for cut in (None, rows):
        seed_all(0)
        model = Text(tied, words, dropout=0.0)
        by_rows = recipe(model=lambda hp, m=model: m, precision=precision, loss_rows=cut)
        report = pilot(model, by_rows, batch, CPU)
        assert report.bitwise
        layers = measure_layers(report.chain, batch, {}, timed=lambda unit: 0.0)
        peaks[cut] = (layers[-1].forward_peak_bytes, layers[-1].backward_peak_bytes)

    logits, weight = 4 * length * words, 4 * words * WIDTH
    part = 4 * rows * words
    assert peaks[None][0] > logits
    assert peaks[None][1] > 2 * logits
    assert peaks[rows][0] < 4 * part + weight
    assert peaks[rows][1] < 4 * part + 3 * weight
    assert peaks[rows][1] < peaks[None][1] / 5
