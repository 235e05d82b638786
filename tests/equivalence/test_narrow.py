"""Weights that travel as the bfloat16 autocast makes of them: the same bits, half the bytes."""

from __future__ import annotations

import pytest
import torch
import zoo
from torch import nn
from watching import space_of

import shoal
from shoal.core.event import TrialReplanned
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.verify import verify_trials


@pytest.fixture
def train(watch, jobs):
    """Train; the jobs and the bytes that moved, per action kind."""

    def run(*asked, **options):
        seen = watch(*asked, **options)
        assert seen.peaks
        return jobs, seen.bytes_by_kind()

    return run


def narrow(**settings):
    return shoal.Spilled(transfer="bf16", **settings)


@pytest.mark.sample(1)
@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_two_trials_whose_weights_travel_narrow_have_the_plain_bits(
    accumulate, clip, lookahead, train
):
    recipe = zoo.recipe(precision="bf16", clip=clip, accumulate=accumulate)
    technique = narrow(shards=4, lookahead=lookahead, keep=())
    jobs, _ = train(recipe, space_of("gpt"), technique, poison=True)
    assert all(job.technique.transfer == "bf16" for job in jobs)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("keep", [(1,), (0, 2)])
@pytest.mark.parametrize("model", zoo.MODELS)
def test_every_model_beside_shards_that_stay(model, keep, train):
    recipe = zoo.recipe(precision="bf16", clip=0.5, accumulate=2)
    technique = narrow(shards=4, keep=keep)
    jobs, _ = train(recipe, space_of(model), technique, poison=True)
    for job in jobs:
        wide = [s.parameter_bytes >= s.owned_bytes for s in job.shards]
        assert all(wide[shard] for shard in keep)
        assert not all(wide)


def test_they_are_verified(run_study):
    recipe = zoo.recipe(precision="bf16", clip=0.5, accumulate=2)
    technique = narrow(shards=4, keep=())
    report = run_study(recipe, space_of("gpt"), steps=3, technique=technique)
    rows = Snapshot.of(read_outline(report.directory)).trials
    for verdict in verify_trials(report.directory, rows, recipe=recipe):
        assert verdict.equal, verdict


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_half_the_bytes_of_a_model_of_products_move(accumulate, train):
    recipe = recipe_of(products, accumulate=accumulate)
    moved = {}
    for transfer in ("bf16", "fp32"):
        technique = shoal.Spilled(shards=4, optimizer="host", keep=(), transfer=transfer)
        _, moved[transfer] = train(recipe, SPACE, technique)
    ups = moved["bf16"]["LOAD"] / moved["fp32"]["LOAD"]
    downs = moved["bf16"]["STORE"] / moved["fp32"]["STORE"]
    if accumulate == 1:
        assert (ups, downs) == (pytest.approx(0.5, abs=0.02), pytest.approx(0.5, abs=0.02))
    else:  # sums of gradients are float32, and travel both ways
        assert 0.5 < ups < 0.8
        assert downs == 1.0


def test_the_order_by_shards(train):
    recipe = recipe_of(products, accumulate=3)
    technique = narrow(shards=3, keep=(), order="shard")
    jobs, _ = train(recipe, SPACE, technique, poison=True)
    assert all(job.technique.transfer == "bf16" for job in jobs)


@pytest.mark.full
def test_shards_next_to_the_turn_that_keep_their_activations(train):
    recipe = zoo.recipe(precision="bf16", clip=0.5)
    technique = narrow(shards=5, lookahead=2, keep=(1,), keep_activations=(1, 2, 3))
    train(recipe, space_of("gpt"), technique, poison=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (shoal.Spilled(shards=4, optimizer="host", keep=()), "bf16"),
        (shoal.Spilled(shards=4, optimizer="host", keep=(), transfer="fp32"), "fp32"),
        (shoal.Spilled(shards=4, optimizer="device", keep=()), "fp32"),
    ],
)
def test_they_travel_narrow_to_a_step_on_the_host_unless_somebody_forbids_it(asked, found, train):
    jobs, _ = train(zoo.recipe(precision="bf16"), space_of("gpt"), asked)
    assert all(job.technique.transfer == found for job in jobs)


def test_what_was_asked_for_and_cannot_be_is_said(run_study):
    technique = shoal.Spilled(shards=4, transfer="bf16")
    with pytest.raises(shoal.PlanError, match=r"trains in fp32.*precision='bf16'"):
        run_study(zoo.recipe(), space_of("gpt"), steps=1, technique=technique)
    with pytest.raises(shoal.SpecError, match="which needs the weights whole"):
        shoal.Spilled(shards=4, transfer="bf16", optimizer="device")
    with pytest.raises(shoal.SpecError, match="transfer is 'bf16' or 'fp32', got 'half'"):
        shoal.Spilled(shards=4, transfer="half")


class Curious(nn.Module):
    """Products whose weights are read otherwise too: each in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.blocks = nn.ModuleList(
            kind() for kind in (_Plain, _Penalty, _Dtype, _Twice, _OnlyInEvaluation, _Frozen)
        )
        self.last = nn.Linear(32, 5)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class _Plain(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


class _Penalty(_Plain):
    def forward(self, x):
        return super().forward(x) + 1e-3 * self.inner.weight.square().mean()


class _Dtype(_Plain):
    def forward(self, x):
        if self.inner.weight.dtype == torch.float32:
            x = x * 1.5
        return super().forward(x)


class _Twice(_Plain):
    def forward(self, x):
        return super().forward(torch.sigmoid(self.inner(x)))


class _OnlyInEvaluation(_Plain):
    def forward(self, x):
        x = super().forward(x)
        return x if self.training else x + self.inner.weight.mean()


class _Frozen(_Plain):
    def __init__(self) -> None:
        super().__init__()
        self.inner.weight.requires_grad_(False)


def batches(hp):
    random = torch.Generator().manual_seed(1)
    made = [
        (torch.randn(6, 16, generator=random), torch.randint(0, 5, (6,), generator=random))
        for _ in range(4)
    ]
    return made, made[:2]


def entropy(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


def curious(hp):
    return Curious()


def products(hp):
    return nn.Sequential(nn.Linear(16, 128), *(_Plain(128) for _ in range(5)), nn.Linear(128, 5))


def recipe_of(model, **more):
    more = {"clip_grad_norm": 0.5, "precision": "bf16", **more}
    return shoal.Recipe(model=model, data=batches, loss=entropy, **more)


SPACE = shoal.grid(lr=[1e-2, 3e-3])


@pytest.mark.sample(1)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_that_something_else_reads_travel_whole(accumulate, train):
    technique = narrow(shards=8, keep=())
    jobs, _ = train(recipe_of(curious, accumulate=accumulate), SPACE, technique, poison=True)
    blocks = jobs[0].shards[1:-1]
    whole = {s.index for s in blocks if s.parameter_bytes >= s.owned_bytes - 1024}
    # one adds a penalty, one looks at the type, one reads it in evaluation
    sums_in_bfloat16 = {4} if accumulate > 1 else set()
    assert whole == {2, 3, 5} | sums_in_bfloat16


class _Writes(_Plain):
    """A forward that writes to a parameter, which lies beside a narrow weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32), requires_grad=False)

    def forward(self, x):
        x = super().forward(x)
        if not self.training:
            return x * self.scale.to(x.dtype)
        with torch.no_grad():
            self.scale.mul_(0.9)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("master", ["float32", "split"])
def test_what_a_forward_writes_to_beside_a_narrow_weight(master, accumulate, train):
    recipe = recipe_of(with_block(_Writes), accumulate=accumulate)
    technique = narrow(shards=5, keep=(), keep_turn=0, lookahead=0, master=master)
    train(recipe, SPACE, technique, poison=True)


class _Later(_Plain):
    """After some steps it adds a penalty, and so another product's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.count += 1
        x = super().forward(x)
        return x + 1e-3 * self.inner.weight.square().mean() if self.count > 40 else x


class _Clamped(_Plain):
    def __init__(self) -> None:
        super().__init__()
        self.inner.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))


class _Demanding(_Plain):
    def forward(self, x):
        assert self.inner.weight.dtype == torch.float32
        return super().forward(x)


class _ByRate(_Plain):
    """One of the trials does what the one that was measured does not."""

    def __init__(self, hp) -> None:
        super().__init__()
        self.settings = {"penalty": hp["lr"] < 5e-3}

    def forward(self, x):
        x = super().forward(x)
        return x + self.inner.weight.square().mean() if self.settings["penalty"] else x


def with_block(kind):
    def model(hp):
        block = kind(hp) if kind is _ByRate else kind()
        return nn.Sequential(nn.Linear(16, 32), _Plain(), block, _Plain(), nn.Linear(32, 5))

    return model


@pytest.mark.parametrize("kind", [_Clamped, _Demanding])
def test_a_weight_whose_gradient_or_type_somebody_looks_at_travels_whole(kind, train):
    jobs, _ = train(recipe_of(with_block(kind)), SPACE, narrow(shards=5, keep=()), poison=True)
    whole = [s.index for s in jobs[0].shards[1:-1] if s.parameter_bytes >= s.owned_bytes]
    assert whole == [2]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [_Later, _ByRate])
@pytest.mark.parametrize("asked", ["bf16", None])
def test_who_reads_otherwise_than_the_measured_one_goes_on_with_whole_weights(
    asked, kind, run_study, assert_alone
):
    recipe, replanned = recipe_of(with_block(kind)), []

    def note(event):
        if isinstance(event, TrialReplanned):
            replanned.append(event)

    technique = shoal.Spilled(shards=5, optimizer="host", keep=(), transfer=asked)
    report = run_study(recipe, SPACE, steps=48, technique=technique, callbacks=[note])
    assert_alone(report, report.trials, recipe, steps=48)
    assert len(replanned) == (2 if kind is _Later else 1)
    assert all("read '2.inner.weight' by square" in event.reason for event in replanned)


class _ClampedByRate(_Plain):
    def __init__(self, hp) -> None:
        super().__init__()
        if hp["lr"] < 5e-3:
            self.inner.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))


def hooked_by_rate(hp):
    block = _ClampedByRate(hp)
    return nn.Sequential(nn.Linear(16, 32), _Plain(), block, _Plain(), nn.Linear(32, 5))


def test_a_trial_with_a_hook_that_the_measured_one_had_not(run_study, assert_alone):
    technique = shoal.Spilled(shards=5, optimizer="host", keep=())
    report = run_study(recipe_of(hooked_by_rate), SPACE, steps=8, technique=technique)
    assert_alone(report, report.trials, recipe_of(hooked_by_rate), steps=8)
