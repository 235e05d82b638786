"""Arrays are measured within the device's budget, whatever they would take as a whole."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.core.spec import TrialSpec
from shoal.core.units import Bytes
from shoal.device import open_device
from shoal.fusion import backend_of
from shoal.fusion.graphs.compiled import CompiledBackend
from shoal.fusion.graphs.traced import TracedBackend
from shoal.recipes.recipe import Recipe
from shoal.runtime.capture.captures import Captures
from shoal.runtime.measuring import crowd, stackedmeasure, widths
from shoal.runtime.measuring.measure import Measurer
from shoal.runtime.measuring.meter import Meter, copied_to, stored_bytes
from shoal.runtime.measuring.stackedmeasure import StackedMeasure
from shoal.runtime.measuring.widths import ArrayBench
from shoal.runtime.wire.messages import MeasureArray, MeasureArrayShards, TimeArray, TimedArray
from shoal.testing import make_device

WIDTH, CUTS, KIB = 4, (3, 5), 1024
TRIALS = tuple(TrialSpec(number=n, hp={"drop": 0.1 + 0.1 * n}, seed=n) for n in range(WIDTH))
CPU = torch.device("cpu")


def build(hp):
    """With statistics, masks, and one weight in the first and the last layer."""
    model = nn.Sequential(
        nn.Linear(24, 24),
        nn.BatchNorm1d(24),
        nn.Dropout(hp["drop"]),
        nn.Linear(24, 24),
        nn.Tanh(),
        nn.Linear(24, 24),
        nn.Linear(24, 24),
    )
    model[6].weight = model[0].weight
    return model


def data(hp):
    draws = torch.Generator().manual_seed(5)
    batch = torch.randn(6, 24, generator=draws), torch.randint(3, (6,), generator=draws)
    return [batch] * 4, [batch]


def adam(named, hp):
    return torch.optim.AdamW([p for _, p in named], lr=0.01)


def recipe():
    return Recipe(
        model=build,
        data=data,
        loss=lambda output, batch: F.cross_entropy(output, batch[1]),
        optimizer=adam,
    )


def bench(memory: int) -> ArrayBench:
    device = open_device(dataclasses.replace(make_device(), memory=Bytes(memory)))
    return ArrayBench(recipe(), device, TRIALS, Captures(recipe(), CPU))


NUM_LAYERS = 9  # the blocks, what is before and what is after them


def spec_bytes(spec):
    return dataclasses.replace(spec, forward_s=0.0, backward_s=0.0)


# -- the meter ----------------------------------------------------------------------------


def test_what_has_no_room_is_refused_before_it_comes():
    meter = Meter(CPU, Bytes(100))
    with meter.hold([torch.zeros(20)]):
        assert meter.held_bytes == 80
        refused = pytest.raises(torch.OutOfMemoryError, match="cannot allocate memory")
        with refused, meter.hold([torch.zeros(6)]):
            raise AssertionError("it came")
    assert (meter.held_bytes, meter.peak_bytes) == (0, 80)


def test_what_is_made_beside_what_is_held_counts_too():
    meter = Meter(CPU, Bytes(100))
    with meter.hold([torch.zeros(10)]), meter.counting():
        kept = torch.zeros(15)
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(1)
        del kept
        torch.zeros(15)
    assert meter.peak_bytes == 100


def test_copies_share_what_was_shared_and_lie_as_it_lay():
    whole = torch.arange(12.0).reshape(3, 4)
    found = copied_to(CPU, {"rows": whole, "turned": whole.t(), "one": whole[0].expand(5, 4)})
    assert stored_bytes(found.values()) == 48
    assert found["turned"].stride() == (1, 4)
    assert found["one"].stride() == (0, 1)
    found["rows"][0, 0] = 7.0
    assert found["one"][3, 0] == 7.0
    assert whole[0, 0] == 0.0


# -- whole arrays -------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["eager", "branches", "traced"])
def test_an_array_that_fits_is_timed_within_the_budget(kind):
    found = (here := bench(400 * KIB)).build(MeasureArray(TRIALS, WIDTH, kind))
    assert not found.is_over
    assert not found.declined
    assert all(found.once_s)
    assert 0 < here.meter.peak_bytes <= 400 * KIB


@pytest.mark.full
def test_slots_own_passes_are_captured_and_their_comparing_has_room():
    here = bench(400 * KIB)
    eager = here.build(MeasureArray(TRIALS, WIDTH, "eager")).unit_bytes
    found = here.build(MeasureArray(TRIALS, WIDTH, "branches"))
    array = here._settled(WIDTH, "branches")[0].array
    assert all(
        passes.ready(here._crowd.batches[0][0]) for _, passes in array.backend._passes.values()
    )
    beside = 2 * sum(p.nbytes for p in array.member(0).module.parameters())
    assert beside < found.unit_bytes < eager + beside
    assert found.pool_bytes == 0  # of a GPU's graphs
    assert not found.overlaps
    lone_bytes = found.unit_bytes - (WIDTH - 1) * beside // 2
    assert here._pool_bytes(array, found.unit_bytes) == WIDTH * lone_bytes


@pytest.mark.sample(1)
@pytest.mark.parametrize("captures", [True, False])
def test_a_trial_alone_is_timed_as_it_would_train(captures):
    device = open_device(dataclasses.replace(make_device(), memory=Bytes(400 * KIB)))
    measurer = Measurer(recipe(), device)
    order = MeasureArray(TRIALS, WIDTH, "eager", captures=captures)
    assert not measurer.answer(order).found.declined
    units = measurer._bench._alone.units
    assert units.is_captured if captures else units is None
    timed = measurer.answer(TimeArray(TRIALS[0], 0.0, (0.01, 0.01, 0.0, 0.0), 1))
    assert all(timed.rounds[0][:2])


def test_one_that_has_no_room_beside_the_array_is_captured_too(monkeypatch):
    here, seen = bench(400 * KIB), []
    here._crowd.grow(WIDTH)
    here._place_alone()
    monkeypatch.setattr(here._alone, "held_bytes", 400 * KIB)
    monkeypatch.setattr(here, "capture_alone", lambda: seen.append(here._alone))
    assert here.build(MeasureArray(TRIALS, WIDTH, "eager", captures=True)).once_s[0] > 0
    assert here._alone is None
    assert len(seen) == 1


def test_one_that_has_no_room_to_be_captured_is_timed_by_its_code(monkeypatch):
    class Full:
        def backward(self, *args):
            raise torch.OutOfMemoryError("no room")

        def let_go(self):
            pass

    here = bench(400 * KIB)
    here._crowd.grow(WIDTH)
    here._place_alone()
    monkeypatch.setattr(here._captures, "units", lambda *args: Full())
    here.capture_alone()
    assert here._alone.units is None
    here._alone.step()


@pytest.mark.parametrize("kind", ["eager", pytest.param("traced", marks=pytest.mark.full)])
@pytest.mark.parametrize("is_whole", [True, False], ids=["by trying", "by its states"])
def test_an_array_that_has_no_room_is_found_out_and_a_trial_alone_is_timed(kind, is_whole):
    here = bench(100 * KIB)
    found = here.build(MeasureArray(TRIALS, WIDTH, kind, is_whole=is_whole))
    assert found.is_over
    assert not found.declined
    assert found.once_s[0] > 0 < found.once_s[2]
    assert found.once_s[1] == found.once_s[3] == 0
    assert 0 < here.meter.peak_bytes <= 100 * KIB
    (row,) = here.time(TimeArray(TRIALS[0], 0.0, (0.01, 0.0, 0.01, 0.0), 1))
    assert row[0] > 0 < row[2]
    assert row[1] == row[3] == 0


def test_a_trial_that_has_no_room_itself_is_not_timed():
    here = bench(30 * KIB)
    found = here.build(MeasureArray(TRIALS, WIDTH, "eager"))
    assert found.is_over
    assert not any(found.once_s)
    assert here.meter.peak_bytes <= 30 * KIB


@pytest.mark.full
def test_a_trial_that_has_no_room_beside_the_array_is_timed_before_it():
    ample = bench(400 * KIB)
    ample.build(MeasureArray(TRIALS, WIDTH, "eager"))
    probe = ample._probed(WIDTH, "eager")
    tight = bench(probe.peak_bytes + 1 * KIB + 6 * 24 * 4 * WIDTH)
    found = tight.build(MeasureArray(TRIALS, WIDTH, "eager"))
    assert not found.is_over
    assert found.once_s[0] > 0
    (row,) = tight.time(TimeArray(TRIALS[0], 0.0, (0.01, 0.01, 0.01, 0.01), 1))
    assert row[0] == row[2] == 0 < row[1]


class Quick(CompiledBackend):
    """Runs graphs in place of compiled code."""

    train = TracedBackend.train


def test_the_graph_of_an_evaluation_is_made_before_one_is_timed(monkeypatch):
    seen, evaluated = [], widths.evaluated

    def spy(array, valid):
        if not isinstance(array.backend, Quick):  # counted in its place
            return evaluated(array, valid)
        seen.append(array.backend.nodes)
        graphs = [kept.graph for kept in array.backend._all() if kept.proven]
        found = evaluated(array, valid)
        assert [kept.graph for kept in array.backend._all()] == graphs
        return found

    monkeypatch.setattr(widths, "evaluated", spy)
    monkeypatch.setattr(
        widths,
        "backend_of",
        lambda kind, **given: Quick() if kind == "compiled" else backend_of(kind, **given),
    )
    found = bench(400 * KIB).build(MeasureArray(TRIALS, 2, "compiled"))
    assert not found.declined, found.declined
    assert seen
    assert all(seen)


def test_on_a_gpu_a_trial_alone_makes_room_for_an_array(monkeypatch):
    here, seen = bench(400 * KIB), []
    here._crowd.grow(WIDTH)
    here._place_alone()
    assert here._alone is not None
    monkeypatch.setattr(here, "_where", SimpleNamespace(type="cuda"))
    monkeypatch.setattr(
        here,
        "_counted",
        lambda *args: (seen.append(here._alone is None), (None, Bytes(0), 0.0))[1],
    )
    assert here._probed(WIDTH, "eager") is not None
    assert seen == [True]


# -- in shards ----------------------------------------------------------------------------


def test_an_array_that_does_not_fit_is_measured_in_shards_within_the_budget():
    ample, tight = bench(10_000 * KIB), bench(72 * KIB)
    whole = ample.build(MeasureArray(TRIALS, WIDTH, "eager"))
    assert not whole.is_over
    assert tight.build(MeasureArray(TRIALS, WIDTH, "eager")).is_over
    before, found = (
        one.shards(MeasureArrayShards(TRIALS, WIDTH, CUTS, NUM_LAYERS)) for one in (ample, tight)
    )
    assert not found.declined, found.declined
    assert not found.is_over
    assert tight.meter.peak_bytes <= 72 * KIB
    assert tight.meter.held_bytes == 0
    assert list(map(spec_bytes, found.shards)) == list(map(spec_bytes, before.shards))


def test_shards_that_are_too_large_are_no_reason_against_smaller_ones():
    found = bench(24 * KIB).shards(MeasureArrayShards(TRIALS, WIDTH, CUTS, NUM_LAYERS))
    assert found.is_over
    assert not found.shards


def measure(monkeypatch):
    """An array in shards that is held against its trials alone, as on a GPU."""
    monkeypatch.setattr(
        "shoal.runtime.measuring.widths.StackedMeasure",
        lambda *args, as_whole, **given: StackedMeasure(*args, as_whole=False, **given),
    )
    return bench(96 * KIB).shards(MeasureArrayShards(TRIALS, WIDTH, CUTS, NUM_LAYERS))


def test_where_there_is_no_room_for_the_whole_it_is_held_against_trials_alone(monkeypatch):
    lone, seen = stackedmeasure.lone_pass_in_shards, []

    def spy(*args):
        seen.append(lone(*args))
        return seen[-1]

    monkeypatch.setattr(stackedmeasure, "lone_pass_in_shards", spy)
    found = measure(monkeypatch)
    assert not found.declined, found.declined
    assert len(found.shards) == 3
    assert len(seen) == WIDTH
    names = {name for name, _ in build(TRIALS[0].hp).named_parameters()}
    assert all(one.grads.keys() == names for one in seen)


@pytest.mark.parametrize("what", ["loss", "grads", "buffers", "rng"])
def test_what_differs_from_a_trial_alone_is_declined(what, monkeypatch):
    lone = stackedmeasure.lone_pass_in_shards

    def other(*args):
        found = lone(*args)
        if what == "loss":
            found.loss *= 1.1
        elif what == "rng":
            found.rng = dataclasses.replace(found.rng, torch=found.rng.torch.flip(0))
        else:
            some = getattr(found, what)
            some[next(iter(some))] += 1
        return found

    monkeypatch.setattr(stackedmeasure, "lone_pass_in_shards", other)
    words = {"grads": "the gradient of", "buffers": "buffer", "rng": "random numbers"}
    assert words.get(what, what) in measure(monkeypatch).declined


def test_a_measurer_answers_with_both():
    device = open_device(dataclasses.replace(make_device(), memory=Bytes(72 * KIB)))
    measurer = Measurer(recipe(), device)
    built = measurer.answer(MeasureArray(TRIALS, WIDTH, "eager", is_whole=False))
    assert built.found.is_over
    order = TimeArray(TRIALS[0], 0.0, (0.01, 0.0, 0.0, 0.0), 1)
    assert isinstance(measurer.answer(order), TimedArray)
    shards = measurer.answer(MeasureArrayShards(TRIALS, WIDTH, CUTS, NUM_LAYERS))
    assert len(shards.shards) == 3
    assert shards.build_s > 0


# -- how many are compared ------------------------------------------------------------------


class Counts(nn.Module):
    """Notes in Python that it ran, in some trials."""

    def __init__(self, flag: float):
        super().__init__()
        self.flag, self.seen = flag, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.flag > 0.5:
            self.seen += 1
        return x


@pytest.mark.parametrize("seconds", [0.0, 100.0])
def test_trials_after_the_first_few_are_compared_where_that_takes_no_time(seconds, monkeypatch):
    monkeypatch.setattr(widths, "COMPARED_S", seconds)
    counting = dataclasses.replace(
        recipe(), model=lambda hp: nn.Sequential(nn.Linear(24, 3), Counts(hp["flag"]))
    )
    flags = (0.0, 0.0, 0.0, 0.0, 1.0, 1.0)
    trials = tuple(TrialSpec(number=n, hp={"flag": f}, seed=n) for n, f in enumerate(flags))
    device = open_device(dataclasses.replace(make_device(), memory=Bytes(400 * KIB)))
    here = ArrayBench(counting, device, trials, Captures(counting, CPU))
    found = here.build(MeasureArray(trials, len(trials), "eager"))
    assert ("seen" in found.declined) == (seconds > 0)


def test_one_that_could_not_go_on_with_fresh_ones_is_said_to_change_as_it_trains():
    def step(model, batch, optimizer, hp):
        model[0].pool.images.append(len(batch[0]))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    def built(hp):
        model = build(hp)
        model[0].pool = SimpleNamespace(images=[])
        return model

    own = Recipe(model=built, data=data, step=step, optimizer=adam, evaluate=lambda *_: 0.0)
    here = ArrayBench(own, open_device(make_device()), TRIALS, Captures(own, CPU))
    found = here.build(MeasureArray(TRIALS, WIDTH, "eager"))
    assert found.declined.startswith("a trial that has trained could not join one that begins: ")
    assert found.declined.endswith("Keep in buffers of the model what its training changes.")


# -- batches that vary in length ----------------------------------------------------------


def drawn(hp):
    """Batches of 3 to 8 rows, in an order of the trial's own; the last one is short."""
    draws = torch.Generator().manual_seed(int(10 * hp["drop"]) if hp.get("own") else 1)
    rows = [*torch.randint(3, 9, (12,), generator=draws).tolist(), 2]
    return [(torch.randn(n, 24), torch.randint(3, (n,))) for n in rows], None


def uneven(**settings):
    made = dataclasses.replace(recipe(), data=drawn)
    trials = [dataclasses.replace(t, hp={**t.hp, **settings}) for t in TRIALS]
    device = open_device(make_device())
    return ArrayBench(made, device, trials, Captures(made, CPU)), tuple(trials)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["eager", "traced"])
def test_an_array_is_timed_on_the_batches_of_several_steps(kind):
    """Those of one order are one pass; of orders of their own one for each length."""
    told = {}
    for own in (False, True):
        here, trials = uneven(own=own)
        found = here.build(MeasureArray(trials, WIDTH, kind, varies=True))
        assert (found.declined, found.steps) == ("", crowd.TIMED)
        timed = here._crowd.steps(WIDTH)[crowd.LEARNS :]
        passes = [len({len(batch[1]) for batch in slots}) for (slots,) in timed]
        assert found.passes == sum(passes) / len(passes)
        told[own] = found
        rounds = here.time(TimeArray(trials[0], 0.0, (0.001, 0.001, 0.0, 0.0), 1))
        assert all(seconds > 0 for seconds in rounds[0][:2])
    assert told[False].passes == 1
    assert told[True].passes > 1.5
    assert told[True].lengths == "[3 to 8, 24], [3 to 8]"


def test_graphs_are_made_of_the_first_steps_batches_and_no_others():
    """What is timed has one where a length comes again, as in training."""
    here, trials = uneven(own=False)
    assert not here.build(MeasureArray(trials, WIDTH, "traced", varies=True)).declined
    backend = here._works[1].args[0].backend
    first = here._crowd.steps(WIDTH)[: crowd.LEARNS]
    lengths = {len(batch[1]) for (slots,) in first for batch in slots}
    assert len(backend._ways) == len(lengths)
    assert all(kept.proven for kept in backend._all())


def test_trials_are_compared_on_the_first_batches_of_one_length():
    """Later ones may be what a trial fails of."""
    here, _ = uneven(own=True)
    here._crowd.varies = True
    here._crowd.grow(WIDTH)
    found = here._crowd.alike(WIDTH)
    lengths = {len(batch[1]) for batch in found}
    assert len(lengths) == 1
    for batch, groups in zip(found, here._crowd.groups, strict=True):
        mine = [b for (b,) in groups if {len(b[1])} == lengths]
        assert not mine or batch is mine[0]


def test_in_shards_the_longest_of_several_steps_batches_is_measured():
    """Not the first one's length, and as many bytes as all slots' batches of it are."""
    here, trials = uneven(own=True)
    order = MeasureArrayShards(trials, WIDTH, CUTS, NUM_LAYERS, varies=True)
    found = here.shards(order)
    assert not found.declined, found.declined
    most = max(len(b[1]) for groups in here._crowd.groups for (b,) in groups)
    assert found.batch_bytes == WIDTH * most * (24 * 4 + 8)
    assert found.batch_bytes > sum(b[0].nbytes + b[1].nbytes for b in here._crowd.first_batches(4))
    assert found.passes > 1.5
    assert found.lengths == "[3 to 8, 24], [3 to 8]"
