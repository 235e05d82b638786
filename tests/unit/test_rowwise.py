"""The loss by rows: what it cuts, and that nothing else can tell that logits were put off."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.core.errors import SpecError, TrialError
from shoal.partition.track import AllocationTracker
from shoal.recipes.recipe import Recipe, autocast, loss_notes
from shoal.resume.recipe import describe_recipe
from shoal.rowwise import LossByRows
from shoal.verify.compare import environment_notes

B, T, C, V, ROWS = 4, 12, 8, 200, 7
CPU = torch.device("cpu")


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.x = nn.Parameter(torch.randn(B, T, C, generator=generator))
        self.weight = nn.Parameter(torch.randn(V, C, generator=generator))
        self.bias = nn.Parameter(torch.randn(V, generator=generator))

    def forward(self) -> Tensor:
        return F.linear(self.x * 1, self.weight, self.bias)


def labels() -> Tensor:
    target = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))
    target[0, :5] = -100
    return target


def shifted(logits: Tensor) -> Tensor:
    """As transformers compute it."""
    target = F.pad(labels(), (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    return F.cross_entropy(logits.float().view(-1, V), target, ignore_index=-100)


def masked(logits: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.view(-1, V), labels().view(-1), reduction="none")
    return (losses * torch.arange(B * T)).sum()


CUT = {
    "flattened": lambda it: F.cross_entropy(it.flatten(0, 1), labels().flatten()),
    "by its sizes": lambda it: F.cross_entropy(it.view(-1, it.size(-1)), labels().view(-1)),
    "a module": lambda it: nn.CrossEntropyLoss()(it.reshape(B * T, V), labels().reshape(-1)),
    "summed": lambda it: F.cross_entropy(it.view(-1, V), labels().view(-1), reduction="sum"),
    "masked": masked,
    "shifted labels": shifted,
    "shifted logits": lambda it: F.cross_entropy(
        it[..., :-1, :].contiguous().view(-1, V), labels()[..., 1:].contiguous().view(-1)
    ),
    "transposed": lambda it: F.cross_entropy(it.transpose(1, 2), labels()),
    "smoothed": lambda it: F.cross_entropy(it.view(-1, V), labels().view(-1), label_smoothing=0.1),
    "every other": lambda it: F.cross_entropy(
        it[:, 1::2][:, :-1].reshape(-1, V).to(torch.float32), labels()[:, 1::2][:, :-1].flatten()
    ),
    "one position": lambda it: F.cross_entropy(it[:, -1], labels()[:, -1]),
}
WHOLE = {
    "weighted": lambda it: F.cross_entropy(it.view(-1, V), labels().view(-1), torch.ones(V)),
    "soft labels": lambda it: F.cross_entropy(it.view(-1, V), torch.full((B * T, V), 1 / V)),
    "of some classes": lambda it: F.cross_entropy(
        it[..., :50].reshape(-1, 50), labels().view(-1) % 50
    ),
    "softcapped": lambda it: F.cross_entropy(torch.tanh(it).view(-1, V), labels().view(-1)),
    "masked before": lambda it: F.cross_entropy(it[labels() >= 0], labels()[labels() >= 0]),
    "in place": lambda it: F.cross_entropy(it.mul_(2).view(-1, V), labels().view(-1)),
    "narrowed": lambda it: F.cross_entropy(it.bfloat16().view(-1, V).float(), labels().view(-1)),
    "no cross-entropy": lambda it: F.mse_loss(it, torch.zeros_like(it)),
    "a split": lambda it: sum(part.pow(2).mean() for part in it.split(3, dim=1)),
    "a copy, then changed": lambda it: (it.float().clone() + it.add_(1)).pow(2).mean(),
    "bits": lambda it: it.view(torch.int32).sum() * it.sum(),
}


def run(loss, rows: int | None, precision: str = "fp32"):
    """The loss and all gradients; what entering the context gave."""
    head = Head()
    recipe = Recipe(model=dict, data=dict, precision=precision, loss_rows=rows)
    with autocast(recipe, CPU) as entered:
        value = loss(head())
    (value / 3).backward()
    return [value.detach(), *(p.grad for p in head.parameters())], entered


@pytest.mark.parametrize("form", CUT)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loss_over_a_large_vocabulary_is_cut(form, precision):
    expected, _ = run(CUT[form], None, precision)
    found, entered = run(CUT[form], ROWS, precision)

    assert entered.tally.cut
    assert not entered.tally.whole
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        tolerance = 1e-5 if precision == "fp32" else 2e-2
        assert (one - other).abs().max() <= tolerance * other.abs().max()


@pytest.mark.parametrize("form", WHOLE)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_anything_else_finds_the_bits_it_would_have_found(form, precision):
    expected, _ = run(WHOLE[form], None, precision)
    found, entered = run(WHOLE[form], ROWS, precision)

    assert not entered.tally.cut
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_no_more_rows_than_are_taken_at_a_time_are_left_alone():
    expected, _ = run(CUT["flattened"], None)
    found, entered = run(CUT["flattened"], B * T)

    assert not entered.tally.cut
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_the_same_rows_at_a_time_give_the_same_bits():
    first, second = (run(shifted, ROWS)[0] for _ in range(2))

    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_of_ignored_rows_only_is_what_torch_says_it_is(reduction):
    def loss(logits):
        ignored = torch.full((B * T,), -100)
        return F.cross_entropy(logits.view(-1, V), ignored, reduction=reduction).sum()

    for one, other in zip(run(loss, ROWS)[0], run(loss, None)[0], strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


def test_a_second_backward_of_one_graph_gives_the_gradient_again():
    head = Head()
    with LossByRows(ROWS):
        value = CUT["flattened"](head())
    first = torch.autograd.grad(value, list(head.parameters()), retain_graph=True)
    second = torch.autograd.grad(value, list(head.parameters()))

    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other)


def test_only_what_is_trained_gets_a_gradient():
    head = Head()
    head.weight.requires_grad_(False)
    with LossByRows(ROWS):
        CUT["flattened"](head()).backward()

    assert head.weight.grad is None
    assert head.x.grad is not None


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_memory_is_that_of_some_rows(reduction):
    head, big = Head(), 20_000
    head.weight = nn.Parameter(torch.randn(big, C))

    def peak(rows):
        recipe = Recipe(model=dict, data=dict, loss_rows=rows)
        with AllocationTracker() as tracker:
            with autocast(recipe, CPU):
                logits = F.linear(head.x, head.weight)
                rows_of_logits = logits.view(-1, big)
                value = F.cross_entropy(rows_of_logits, labels().view(-1), reduction=reduction)
                del logits, rows_of_logits
            value.sum().backward()
            head.zero_grad()
        return tracker.peak_bytes

    part, weight = 4 * ROWS * big, head.weight.nbytes
    assert peak(None) > 4 * B * T * big * 2
    assert peak(ROWS) < 3 * part + weight + 50_000


def test_without_gradients_there_is_a_loss_and_logits_can_be_read_afterwards():
    head = Head()
    expected = head().detach()
    with torch.no_grad(), LossByRows(ROWS) as mode:
        logits = head()
        value = CUT["flattened"](logits)

    assert mode.tally.cut == [(B * T, V)]
    assert not value.requires_grad
    torch.testing.assert_close(value, CUT["flattened"](expected))
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert torch.equal(logits, expected)


def test_logits_that_were_read_in_a_loss_may_be_read_again():
    def loss(logits):
        return CUT["flattened"](logits) + 1e-3 * logits.logsumexp(-1).pow(2).mean()

    found, entered = run(loss, ROWS)

    assert entered.tally.cut
    assert entered.tally.whole
    for one, other in zip(found, run(loss, None)[0], strict=True):
        torch.testing.assert_close(one, other)


def test_logits_that_nobody_read_are_computed_when_the_forward_ends():
    head = Head()
    with LossByRows(ROWS) as mode:
        logits = head()
    assert mode.tally.whole == [(B * T, V)]

    with torch.no_grad():
        head.weight.zero_()
    assert logits.abs().sum() > 0


def test_reading_logits_late_of_weights_that_changed_is_an_error():
    head = Head()
    with torch.no_grad(), LossByRows(ROWS):
        logits = head()
        CUT["flattened"](logits)
    with torch.no_grad():
        head.weight.mul_(2)

    with pytest.raises(TrialError, match=r"logits of 48 rows and 200 classes.*changed in place"):
        logits.sum()


def test_what_they_are_made_from_may_be_changed_after_the_projection():
    with torch.no_grad(), LossByRows(ROWS):
        x, weight = torch.ones(B * T, C), torch.ones(V, C)
        logits = F.linear(x, weight)
        x.zero_()

    assert torch.equal(logits, torch.full((B * T, V), float(C)))


def test_questions_of_shape_compute_nothing():
    head = Head()
    with LossByRows(ROWS) as mode:
        logits = head()
        assert logits.shape == (B, T, V)
        assert (logits.dtype, logits.device, logits.dim()) == (torch.float32, CPU, 3)
        assert logits.requires_grad
        assert logits.is_contiguous()
        assert isinstance(logits, Tensor)
        assert {logits: 1}[logits] == 1
        assert logits[:, :-1].stride() == (T * V, V, 1)
        assert not mode.tally.whole
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            logits[:, :-1].view(-1, V)


class Scaled(torch.autograd.Function):
    """torch shows the call of this to no mode."""

    @staticmethod
    def forward(ctx, first, second):
        ctx.save_for_backward(first, second)
        return first * second

    @staticmethod
    def backward(ctx, grad):
        first, second = ctx.saved_tensors
        return grad * second, grad * first


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_function_of_ones_own_gets_values_and_gives_gradients(precision):
    def loss(logits):
        return Scaled.apply(logits.view(-1, V), logits.view(-1, V)).float().tanh().sum()

    expected, found = run(loss, None, precision)[0], run(loss, ROWS, precision)[0]

    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_wide_layers_within_a_model_keep_their_bits_and_their_order():
    """Three projections of one input: their gradients are summed in the order of the calls."""

    def step(rows):
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(C, V) for _ in range(3))
        x = torch.randn(B, T, C, requires_grad=True)
        recipe = Recipe(model=dict, data=dict, loss_rows=rows)
        with autocast(recipe, CPU):
            query, key, value = (layer(x) for layer in layers)
            mixed = torch.softmax(key @ query.transpose(1, 2), -1) @ value
            loss = mixed.pow(2).mean()
        loss.backward()
        return [loss.detach(), x.grad, *(p.grad for p in layers.parameters())]

    assert all(torch.equal(a, b) for a, b in zip(step(ROWS), step(None), strict=True))


def test_an_activation_checkpoint_around_a_wide_layer_still_fits_its_recompute():
    from torch.utils.checkpoint import checkpoint

    def step(rows):
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(C, V), nn.GELU(), nn.Linear(V, C))
        x = torch.randn(B, T, C, requires_grad=True)
        with autocast(Recipe(model=dict, data=dict, loss_rows=rows), CPU):
            loss = checkpoint(body, x, use_reentrant=False).pow(2).mean()
        loss.backward()
        return [x.grad, *(p.grad for p in body.parameters())]

    assert all(torch.equal(a, b) for a, b in zip(step(ROWS), step(None), strict=True))


def test_a_loss_within_an_activation_checkpoint_is_left_whole():
    from torch.utils.checkpoint import checkpoint

    def loss(logits_of, x):
        return CUT["flattened"](F.linear(x, logits_of.weight, logits_of.bias))

    def step(rows):
        head = Head()
        with autocast(Recipe(model=dict, data=dict, loss_rows=rows), CPU):
            value = checkpoint(loss, head, head.x * 1, use_reentrant=False)
        value.backward()
        return [value.detach(), *(p.grad for p in head.parameters())]

    assert all(torch.equal(a, b) for a, b in zip(step(ROWS), step(None), strict=True))


def test_a_forward_that_raises_leaves_nothing_behind():
    head = Head()
    mode = LossByRows(ROWS)
    alive: list[weakref.ref[Tensor]] = []

    def fail():
        with mode:
            alive.append(weakref.ref(head()))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    gc.collect()

    assert alive[0]() is None
    assert not torch.overrides._get_current_function_mode_stack()
    with mode:
        CUT["flattened"](head())
    assert mode.tally.cut


def test_without_loss_rows_there_is_no_mode():
    with autocast(Recipe(model=dict, data=dict), CPU):
        assert not torch.overrides._get_current_function_mode_stack()


# -- what is asked for, and told ------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, -1, 1.5, True, "all"])
def test_loss_rows_is_a_whole_number_or_none(rows):
    with pytest.raises(SpecError, match="loss_rows is a whole number from 1"):
        Recipe(model=dict, data=dict, loss_rows=rows)


def test_a_note_says_whether_it_took_effect():
    cut, whole = run(CUT["flattened"], ROWS)[1], run(WHOLE["softcapped"], ROWS)[1]
    with LossByRows(100) as small:
        Head()()

    assert loss_notes(cut) == (
        "the loss over 200 classes for 48 rows is computed 7 rows at a time: loss_rows=7",
    )
    assert "loss_rows=7 took no effect: 200 logits for each of 48 rows" in loss_notes(whole)[0]
    assert "loss_rows=100 took no effect: no F.linear of more than 100" in loss_notes(small)[0]
    assert loss_notes(run(CUT["flattened"], None)[1]) == ()


def test_another_number_of_rows_is_another_recipe():
    records = [describe_recipe(Recipe(model=dict, data=dict, loss_rows=n)) for n in (None, 7, 8)]

    assert "loss_rows" not in records[0].fields
    assert [r.fields["loss_rows"] for r in records[1:]] == ["7", "8"]
    assert not records[1].is_same(records[2])


def test_verify_says_that_the_number_of_rows_is_another():
    recipe = Recipe(model=dict, data=dict, loss_rows=8)

    assert "loss_rows 7 then, 8 now" in environment_notes({"loss_rows": 7}, recipe)[0]
    assert environment_notes({"loss_rows": 8}, recipe) == ()
