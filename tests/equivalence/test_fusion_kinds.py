"""However an array's passes run, a slot ends on the bits that its kind has with nobody beside it.

A graph has the bits of the eager pass; compiled code has its own.
"""

from __future__ import annotations

import contextlib
import math

import fusing
import pytest
import torch
from torch import nn

from shoal.fusion import Array, Declined, Member, StackedBackend
from shoal.fusion.batches import layout_of
from shoal.fusion.graphs.compiled import CompiledBackend, compiler
from shoal.fusion.graphs.traced import TracedBackend
from shoal.recipes.recipe import Recipe
from shoal.rng import capture_rng, seed_all
from shoal.testing import array_loop, plain_loop, same_bits

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = list(fusing.MODELS)
GRAPHLESS = ("cnn", "discriminator", "bert")
"""They make a Python value of a tensor, or have a slope that differs."""
COMPILES_LONG = [pytest.mark.full, pytest.mark.timeout(900)]
compiles = pytest.mark.skipif(not compiler(), reason="there is no C++ compiler")
STEPS = 6


def make(name, backend, width=3, hps=None, **changes):
    recipe = fusing.recipe(name, **changes)
    made = fusing.trials(recipe, hps or fusing.hps(name, width))
    return Array([trial.member for trial in made], backend=backend), made


def bits(array, slot):
    return {name: t.clone() for name, t in fusing.tensors(array.extract(slot)).items()}


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    assert [name for name, tensor in one.items() if not same_bits(tensor, other[name])] == []


def alone_in_slot(name, backend, slot, steps, hps, width=3, **changes):
    """The trial of a slot with nobody beside it, after so many steps."""
    recipe = fusing.recipe(name, **changes)
    trial = fusing.trials(recipe, hps)[slot]
    array = Array([trial.member], backend=backend)
    array.widen(slot, width)
    made = [trial if at == slot else None for at in range(width)]
    for _ in range(steps):
        fusing.step(array, made)
    return bits(array, slot)


# ------------------------------------------------------------------ traced


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NAMES)
def test_a_graph_has_the_bits_of_the_eager_pass(name):
    eager, made = make(name, StackedBackend())
    traced, also = make(name, TracedBackend())
    for _ in range(STEPS):
        assert fusing.step(eager, made).losses == fusing.step(traced, also).losses
    assert bool(traced.backend.why_eager) == (name in GRAPHLESS)
    for slot in range(3):
        assert_same_bits(bits(eager, slot), bits(traced, slot))
        assert torch.equal(eager.extract(slot)["rng"].torch, traced.extract(slot)["rng"].torch)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["mlp", "generator", "language", "lstm"])
def test_under_autocast_it_has_them_too(name):
    how = {"hps": fusing.hps(name, 3, dtype="float32"), "precision": "bf16"}
    eager, made = make(name, StackedBackend(), **how)
    traced, also = make(name, TracedBackend(), **how)
    for _ in range(STEPS):
        assert fusing.step(eager, made).losses == fusing.step(traced, also).losses
    assert not traced.backend.why_eager
    for slot in range(3):
        assert_same_bits(bits(eager, slot), bits(traced, slot))


def test_a_graph_is_what_runs(monkeypatch):
    traced, made = make("language", TracedBackend())
    for _ in range(3):
        fusing.step(traced, made)
    monkeypatch.setattr(StackedBackend, "_pass", None)  # no eager pass from here on
    for _ in range(3):
        fusing.step(traced, made)


def test_a_trial_with_the_same_settings_takes_the_graph_over(monkeypatch):
    found = []
    for backend in (StackedBackend(), TracedBackend()):
        array, made = make("language", backend)
        for _ in range(3):
            fusing.step(array, made)
        array.retire(1)
        (made[1],) = fusing.trials(fusing.recipe("language"), fusing.hps("language", 3)[1:2], 9)
        array.refill(1, made[1].member)
        if isinstance(backend, TracedBackend):
            monkeypatch.setattr(StackedBackend, "_pass", None)  # no eager pass from here on
        for _ in range(3):
            fusing.step(array, made)
        found.append([bits(array, slot) for slot in range(3)])
    for one, other in zip(*found, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("name", ["mlp", "generator"])
def test_slots_that_wait_fail_leave_and_come_do_not_show_in_a_graph(name):
    found = []
    for backend in (StackedBackend(), TracedBackend()):
        array, made = make(name, backend, 4, on_nonfinite="fail")
        _live(array, made, name)
        found.append([bits(array, slot) for slot in (0, 1, 3)])
    for one, other in zip(*found, strict=True):
        assert_same_bits(one, other)


def _live(array, made, name):
    """A life with everything in it; other rates of dropout come with the trial that comes."""
    for at in range(14):
        if at == 5:
            with torch.no_grad():
                next(array.member(2).module.parameters()).fill_(math.nan)
        if at == 8:
            array.retire(2)
        if at == 10:
            (last,) = fusing.trials(fusing.recipe(name), fusing.hps(name, 1, drop=0.7), 9)
            array.refill(2, last.member)
            made[2] = last
        if at in (3, 9):
            groups = [[None] * array.width]
            with array.streams(0):
                (groups[0][0],) = next(made[0].groups)
            array.step(*groups)
            continue
        fusing.step(array, made)


@pytest.mark.parametrize("width", [2])
def test_a_graph_adds_up_micro_batches_and_evaluates_as_the_eager_pass(width):
    found = []
    for backend in (StackedBackend(), TracedBackend()):
        array, made = make("generator", backend, width, accumulate=3)
        told = []
        for _ in range(4):
            told.append(fusing.step(array, made).losses)
            with array.evaluating():
                batches = [next(iter(next(made[slot].groups))) for slot in range(width)]
                told.append(array.evaluate(batches))
        found.append((told, bits(array, 1)))
    assert found[0][0] == found[1][0]
    assert_same_bits(found[0][1], found[1][1])


class Turning(nn.Module):
    """Its way depends on its data."""

    def __init__(self, limit):
        super().__init__()
        self.body, self.limit = nn.Linear(12, 5), limit

    def forward(self, x):
        y = self.body(x)
        return y if x.abs().sum().item() > self.limit else -y


class Leaky(nn.Module):
    """A float of its own, which a graph would hold."""

    def __init__(self, slope):
        super().__init__()
        self.enter, self.slope, self.leave = nn.Linear(12, 8), slope, nn.Linear(8, 5)

    def forward(self, x):
        return self.leave(torch.tanh(self.enter(x)) * self.slope)


def leaky(hp):
    return Leaky(hp["slope"]).double()


def test_what_depends_on_the_data_runs_eagerly_and_says_so():
    def turning(hp):
        return nn.Sequential(nn.Identity(), Turning(0.0)).double()

    traced, made = make("mlp", TracedBackend(), model=turning)
    eager, also = make("mlp", StackedBackend(), model=turning)
    for _ in range(4):
        assert fusing.step(traced, made).losses == fusing.step(eager, also).losses
    assert traced.backend.why_eager


def test_a_trial_with_other_floats_is_not_given_the_graph_of_those_before_it():
    found = []
    for backend in (StackedBackend(), TracedBackend()):
        array, made = make("mlp", backend, hps=_sloped(0.5, 0.5, 0.5), model=leaky)
        for _ in range(4):
            fusing.step(array, made)
        array.retire(1)
        (made[1],) = fusing.trials(fusing.recipe("mlp", model=leaky), _sloped(2.0), 7)
        array.refill(1, made[1].member)
        for _ in range(40):
            fusing.step(array, made)
        found.append([bits(array, slot) for slot in range(3)])
    for one, other in zip(*found, strict=True):
        assert_same_bits(one, other)


def _sloped(*slopes):
    hps = fusing.hps("mlp", len(slopes))
    return [type(hp)({**hp, "slope": slope}) for hp, slope in zip(hps, slopes, strict=True)]


@pytest.mark.parametrize("backend", [StackedBackend, TracedBackend])
def test_wide_statistics_of_a_slot_that_waits_stay(backend):
    """More of them than are kept by default: BatchNorm writes them and does not say so."""

    def wide(hp):
        layers = (nn.Linear(12, 2100), nn.BatchNorm1d(2100), nn.ReLU(), nn.Linear(2100, 5))
        return nn.Sequential(*layers).double()

    array, made = make("mlp", backend(), model=wide, clip_grad_norm=None)
    for at in range(4):
        fusing.step(array, made)
        if at == 2:  # where they do not change
            with array.evaluating():
                array.evaluate([next(iter(next(trial.groups))) for trial in made])
    before = array.extract(1)["model"]["1.running_mean"].clone()
    for _ in range(3):
        batches = [None] * 3
        with array.streams(0):
            (batches[0],) = next(made[0].groups)
        array.step(batches)
    assert same_bits(array.extract(1)["model"]["1.running_mean"], before)


def test_an_index_out_of_range_is_its_own_slots_alone():
    found = []
    for backend in (StackedBackend(), TracedBackend()):
        array, made = make("language", backend)
        for at in range(5):
            batches = []
            for slot, trial in enumerate(made):
                with array.streams(slot):
                    (batch,) = next(trial.groups)
                batches.append(batch)
            if at == 4:
                batches[1] = [batches[1][0].clone().fill_(fusing.WORDS + 1), batches[1][1]]
            stepped = array.step(batches)
        assert set(stepped.failures) == {1}
        found.append([bits(array, slot) for slot in (0, 2)])
    for one, other in zip(*found, strict=True):
        assert_same_bits(one, other)


# ------------------------------------------------------------------ compiled


@pytest.mark.slow
@pytest.mark.sample(1)
@compiles
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("mlp", "fp32"),
        ("mlp", "bf16"),
        ("generator", "fp32"),
    ],
)
def test_compiled_slots_have_their_own_bits_whoever_is_beside_them(name, precision):
    hps = fusing.hps(name, 3, dtype="float32")
    backend = CompiledBackend()
    array, made = make(name, backend, hps=hps, precision=precision)
    for at in range(STEPS):
        if at == 3:
            array.retire(2)
        fusing.step(array, made)
    for slot in (0, 1):
        how = {"precision": precision}
        lone = alone_in_slot(name, CompiledBackend(), slot, STEPS, hps, **how)
        assert_same_bits(bits(array, slot), lone)


@compiles
@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=COMPILES_LONG) for n in ("language", "lstm")), "generator"]
)
def test_compiled_code_comes_to_what_the_eager_pass_comes_to(name):
    """In float64, where rounding is no excuse."""
    eager, made = make(name, StackedBackend())
    compiled, also = make(name, CompiledBackend())
    for _ in range(3):
        one, other = fusing.step(eager, made), fusing.step(compiled, also)
        assert other.losses == pytest.approx(one.losses, rel=1e-9)
    for slot in range(3):
        mine, theirs = eager.extract(slot)["model"], compiled.extract(slot)["model"]
        for key, tensor in mine.items():
            torch.testing.assert_close(theirs[key], tensor, rtol=1e-6, atol=1e-9, msg=key)
        assert torch.equal(eager.extract(slot)["rng"].torch, compiled.extract(slot)["rng"].torch)


@compiles
def test_other_floats_are_declined_where_code_is_compiled():
    array, _ = make("mlp", CompiledBackend(), hps=_sloped(0.5, 0.5), model=leaky)
    array.retire(1)
    (other,) = fusing.trials(fusing.recipe("mlp", model=leaky), _sloped(2.0), 7)
    with pytest.raises(Declined, match="compiled, with floats"):
        array.refill(1, other.member)
    (same,) = fusing.trials(fusing.recipe("mlp", model=leaky), _sloped(0.5), 7)
    array.refill(1, same.member)
    with pytest.raises(Declined, match="compiled, with floats"):
        make("mlp", CompiledBackend(), hps=_sloped(0.5, 2.0), model=leaky)


@compiles
def test_what_cannot_be_compiled_is_declined_and_nothing_is_changed():
    def turning(hp):
        return nn.Sequential(nn.Identity(), Turning(0.0)).double()

    array, made = make("mlp", CompiledBackend(), model=turning)
    before = bits(array, 1)
    with pytest.raises(Declined, match="compiled"):
        fusing.step(array, made)
    after = bits(array, 1)
    assert_same_bits(before, after)


@pytest.mark.parametrize(
    ("name", "value"), [("PATH", "/nowhere"), ("CXX", ""), ("CXX", "no-such")]
)
def test_without_a_compiler_there_is_none_to_name(name, value, monkeypatch):
    compiler.cache_clear()
    monkeypatch.setenv(name, value)
    assert compiler() == ""
    array, made = make("mlp", CompiledBackend())
    with pytest.raises(Declined, match=r"there is no C\+\+ compiler: install g"):
        fusing.step(array, made)
    compiler.cache_clear()


def test_a_batch_of_another_layout_is_no_graphs_business():
    one, other = torch.zeros(2, 3), torch.zeros(2, 4)
    assert layout_of((one,)) != layout_of((other,))


# ------------------------------------------------------------------ what a graph cannot know


class Undone(nn.Module):
    """Reads its dropout's rate for more than the masks."""

    def __init__(self, rate):
        super().__init__()
        self.drop, self.out = nn.Dropout(rate), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.drop(x) * (1 - self.drop.p))


class Indexed(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.table, self.drop, self.out = nn.Embedding(10, 8), nn.Dropout(rate), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.drop(self.table(x)))


def lone(kind, seed, rate):
    recipe = Recipe(
        model=lambda hp: kind(hp["rate"]),
        data=lambda hp: ([], None),
        loss=lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
    )
    seed_all(seed)
    model = kind(rate)
    return Member(
        recipe=recipe,
        hp={"rate": rate},
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        schedule=None,
        rng=capture_rng(),
    )


def weights(array, slot):
    return dict(array.member(slot).module.state_dict())


def test_a_rate_that_code_reads_is_seen_when_its_trial_comes():
    batch = torch.randn(33, 8), torch.randint(0, 3, (33,))
    eager = Array([lone(Undone, 9, 0.5)])
    eager.widen(1, 3)
    traced = Array([lone(Undone, seed, 0.1) for seed in range(3)], backend=TracedBackend())
    for _ in range(4):
        traced.step([batch] * 3)
    traced.retire(1)
    traced.refill(1, lone(Undone, 9, 0.5))
    for _ in range(6):
        eager.step([None, batch, None])
        traced.step([batch] * 3)
    assert_same_bits(weights(eager, 1), weights(traced, 1))


@compiles
def test_compiled_code_that_is_not_the_pass_with_a_new_rate_is_declined():
    batch = torch.randn(33, 8), torch.randint(0, 3, (33,))
    array = Array([lone(Undone, seed, 0.1) for seed in range(3)], backend=CompiledBackend())
    array.step([batch] * 3)
    array.retire(1)
    array.refill(1, lone(Undone, 9, 0.5))
    with pytest.raises(Declined, match="is not the pass with these settings"):
        array.step([batch] * 3)


def test_a_neighbours_bad_validation_batch_rewinds_nobodys_random_numbers():
    good = torch.randint(0, 10, (6,)), torch.randint(0, 3, (6,))
    bad = good[0] + 20, good[1]

    def train(valid):
        members = [lone(Indexed, seed, 0.5) for seed in range(3)]
        array = Array(members, backend=TracedBackend())
        for _ in range(6):
            array.step([good] * 3)
        array.set_training(False)
        for _ in range(3):
            array.evaluate([good] * 3)
        array.set_training(True)
        array.step([good] * 3)
        array.set_training(False)
        with contextlib.suppress(IndexError):
            array.evaluate([None, valid, None])
        array.set_training(True)
        for _ in range(3):
            array.step([good] * 3)
        return weights(array, 0)

    assert_same_bits(train(good), train(bad))


class Dropped(nn.Module):
    """Its recurrent weight is an attribute of the layer that each forward makes anew."""

    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)
        weight = self.rnn.weight_hh_l0
        del self.rnn._parameters["weight_hh_l0"]
        self.rnn.register_parameter("raw", nn.Parameter(weight.data))

    def forward(self, x):
        self.rnn.weight_hh_l0 = nn.functional.dropout(self.rnn.raw, 0.2, self.training)
        return self.out(self.rnn(x)[0][:, -1])


def test_dropped_weights_of_recurrent_layers_are_each_slots_own():
    batches = [(torch.randn(4, 5, 3), torch.tensor([0, 1, 1, 0])) for _ in range(3)]
    recipe = Recipe(
        model=lambda hp: Dropped(),
        data=lambda hp: (batches, None),
        loss=lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
    )
    alone = plain_loop(recipe, {"lr": 0.01}, 0, epochs=1)
    in_a_slot = array_loop(recipe, {"lr": 0.01}, 0, slot=1, width=2, epochs=1)
    assert in_a_slot.losses == pytest.approx(alone.losses, rel=1e-5)
