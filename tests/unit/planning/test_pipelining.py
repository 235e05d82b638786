"""Pipelines as a study plans them: real models, measured on virtual devices."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.core.errors import PlanError
from shoal.core.plan import Plan
from shoal.core.technique import Pipelined, Resident, Spilled
from shoal.launch.plan import plan_study
from shoal.launch.request import settings_of
from shoal.memory.layout import PREVIOUS
from shoal.planner import timetoloss
from shoal.planning import Planner, technique_on_record, weighing

WIDTH, ROWS, BATCHES = 64, 120, 8
SMALL = "4MiB"  # the chain in no way, half of it


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.outer(torch.relu(self.inner(x)))


class Chain(nn.Module):
    def __init__(self, blocks=6):
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Tied(Chain):
    """The first and the last layer share a weight."""

    def __init__(self):
        super().__init__()
        self.leave.weight = self.enter.weight


class Normed(Chain):
    """The blocks share a BatchNorm, whose statistics each of them changes."""

    def __init__(self, shared=True):
        super().__init__(3)
        norms = [nn.BatchNorm1d(WIDTH) for _ in range(3)]
        for index, block in enumerate(self.blocks):
            block.outer = nn.Sequential(block.outer, norms[0 if shared else index])


class Renormed(nn.Module):
    """The last layer shrinks its own weight in its forward."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.names = nn.Embedding(4, WIDTH, max_norm=1.0)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x @ self.names(torch.arange(4)).T


class OnePiece(nn.Module):
    def __init__(self):
        super().__init__()
        self.only = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.only(self.only(x))


class Dropping(Chain):
    def __init__(self):
        super().__init__(4)
        self.blocks[2].outer = nn.Sequential(self.blocks[2].outer, nn.Dropout(0.2))


MODELS = {
    "chain": Chain,
    "tied": Tied,
    "normed": Normed,
    "renormed": Renormed,
    "piece": OnePiece,
    "dropping": Dropping,
    "batched": functools.partial(Normed, shared=False),
}


def build(hp):
    return MODELS[hp["model"]]()


def data(hp):
    batch = (torch.ones(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.long))
    return [batch] * BATCHES, [batch]


def no_length(hp):
    return Unending(), None


class Unending:
    def __iter__(self):
        return iter(data(None)[0])


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def recipe(**changes):
    settings = {"model": build, "data": data, "loss": loss, "accumulate": 4}
    return shoal.Recipe(**(settings | changes))


@pytest.fixture
def study(tmp_path):
    def make(model="chain", *, trials=1, length=None, **changes):
        space = {"model": model, "lr": shoal.log_uniform(1e-4, 1e-2)}
        length = length or {"epochs": 2}
        return shoal.Study(
            "s", recipe(**changes), space=space, trials=trials, directory=tmp_path, **length
        )

    return make


@pytest.fixture
def plan(study, warm_workers):
    def make(technique="pipelined", model="chain", *, devices=2, memory="16MiB", **changes):
        hardware = shoal.Hardware.virtual(devices=devices, memory=memory)
        return study(model, **changes).plan(
            hardware=hardware,
            technique=technique,
            workers=warm_workers,
            progress=False,
        )

    return make


@pytest.fixture(autouse=True)
def flush_it_is(monkeypatch):
    """Whichever schedule steps of milliseconds would be quicker with."""
    monkeypatch.setattr(weighing, "RIVALS", ())


def sizes(job):
    return [stage.parameter_bytes for stage in job.shards]


# -- what is planned ---------------------------------------------------------------------------


@pytest.mark.parametrize(("worth", "schedule"), [(100.0, "zb-h1"), (0.0, "flush")])
def test_half_backwards_are_taken_where_they_are_clearly_quicker(
    worth, schedule, plan, monkeypatch
):
    monkeypatch.setattr(weighing, "RIVALS", timetoloss.RIVALS)
    monkeypatch.setattr(timetoloss, "WORTH", worth)
    (job,) = plan().jobs
    assert job.technique.schedule == schedule
    assert "weights" not in job.numerics
    assert f"{schedule} is taken: " in "\n".join(job.why)
    assert "to the same bits, would take" in "\n".join(job.why)


def test_a_pipeline_is_planned_with_nothing_left_open(plan):
    found = plan()
    (job,) = found.jobs
    technique = job.technique
    assert job.gang == len(job.shards) == technique.stages == 2
    assert technique.schedule == "flush"
    assert technique.micro_batches == job.micro_batches == 4
    assert technique.recompute is False
    assert [stage.layers[0] for stage in job.shards[1:]] == list(technique.cuts)
    assert sum(stage.owned_bytes for stage in job.shards) == sum(sizes(job))
    assert job.held_bytes + job.unit_bytes >= job.peak_bytes
    assert Plan.from_json(found.to_json()) == found
    assert len(found.devices) == 2


def test_it_has_the_numerics_key_of_a_trial_that_trains_alone(plan):
    piped, alone = (plan(technique).jobs[0].numerics for technique in ("pipelined", "resident"))
    assert piped["cut"] == "bitwise in the pilot"
    assert {**piped, "cut": ""} == {**alone, "cut": ""}


def test_stale_and_guessed_weights_and_cut_batches_are_in_the_key(plan):
    stale = plan(Pipelined(schedule="2bw")).jobs[0].numerics
    assert stale["weights"] == "one step old"
    guessed = plan(Pipelined(schedule="2bw", predict=True), devices=3).jobs[0].numerics
    assert guessed["weights"] == "one step old, guessed"
    cut = plan(Pipelined(micro_batches=8), splittable=True).jobs[0]
    assert cut.numerics["micro_batches"] == 8
    assert cut.micro_batches == 4  # batches, of which a step has as many as ever


@pytest.mark.slow
def test_how_many_stages_there_are_is_placement(plan):
    keys = [
        plan(Pipelined(schedule="2bw", stages=stages), devices=4).jobs[0].numerics
        for stages in (2, 3, 4)
    ]
    assert keys[0] == keys[1] == keys[2]


def test_the_version_before_is_part_of_the_state_with_2bw(study, warm_workers):
    def layout(technique):
        asked = study(length={"steps": 2})
        hardware = shoal.Hardware.virtual(devices=2, memory="16MiB")
        _, planned = plan_study(
            asked,
            warm_workers,
            hardware,
            technique,
            trials=asked.trials,
            settings=settings_of(asked, timeline=False),
            sink=lambda happened: None,
        )
        warm_workers.release()
        job, found = planned.plan.jobs[0], planned.layouts[0]
        assert job.host_bytes >= found.num_bytes
        return found

    plain, stale = layout(Pipelined()), layout(Pipelined(schedule="2bw"))
    keys = {field.spec.key for shard in stale.shards for field in shard.state.fields}
    assert keys == {"exp_avg", "exp_avg_sq", PREVIOUS}
    assert stale.num_bytes > plain.num_bytes
    named = {f.spec.name for s in stale.shards for f in s.state.fields if f.spec.key == PREVIOUS}
    assert named == {name for name, _ in Chain().named_parameters()}


def test_a_stage_may_borrow_tied_parameters(plan):
    job = plan(model="tied").jobs[0]
    last = job.shards[-1]
    assert last.parameter_bytes - last.owned_bytes == 4 * WIDTH * WIDTH


def test_where_memory_is_short_forwards_run_again_and_then_it_is_refused(plan):
    roomy, again = (plan(Pipelined(cuts=(4,), lag=0, recompute=r)).jobs[0] for r in (False, True))
    assert again.peak_bytes < roomy.peak_bytes
    short = again.held_bytes + again.unit_bytes
    assert short < roomy.held_bytes + roomy.unit_bytes
    assert plan(Pipelined(cuts=(4,), lag=0), memory=short).jobs[0].technique.recompute is True
    with pytest.raises(PlanError, match=r"stage [01], layers .* needs .* on a device of") as found:
        plan(Pipelined(cuts=(4,), lag=0), memory=short - 1)
    assert "leave cuts= out" in str(found.value)


def test_pieces_of_batches_take_less_room(plan):
    whole = plan(Pipelined(stages=2, recompute=False)).jobs[0]
    pieces = plan(
        Pipelined(stages=2, recompute=False, micro_batches=16, cuts=whole.technique.cuts),
        splittable=True,
    ).jobs[0]
    assert pieces.peak_bytes < whole.peak_bytes
    assert pieces.shards[1].boundary_bytes == whole.shards[1].boundary_bytes // 4


def test_a_model_that_draws_is_planned_and_its_first_stage_has_room_to_foretell(plan):
    job = plan(model="dropping").jobs[0]
    assert job.shards[0].forward_peak_bytes >= job.shards[1].forward_peak_bytes


def test_a_growing_batch_is_planned_for(study, warm_workers):
    """As the ladder asks: the same technique for batches twice as large."""
    asked = study(length={"steps": 2})
    hardware = shoal.Hardware.virtual(devices=2, memory="16MiB")
    settings = settings_of(asked, timeline=False)
    common = (asked, warm_workers, hardware, Pipelined())
    planner, planned = plan_study(
        *common, trials=asked.trials, settings=settings, sink=lambda happened: None
    )
    assert isinstance(planner, Planner)
    first = planned.plan.jobs[0]
    larger = planner.forced(first.technique, 2.0)
    again = larger.plan(asked.trials, receive=lambda: warm_workers.receive(timeout=0.5))
    warm_workers.release()
    assert again.plan.jobs[0].technique == first.technique
    assert again.plan.jobs[0].peak_bytes > first.peak_bytes
    assert again.plan.jobs[0].numerics == first.numerics


# -- what is chosen ----------------------------------------------------------------------------


def slow(monkeypatch, step_s):
    """Have a spilled step cost so many seconds, whatever it is."""
    from shoal.planner.price import Price
    from shoal.planning.deciding import Deciding

    monkeypatch.setattr(Deciding, "_price", lambda self, settled: Price(step_s, 1.0))


def test_devices_that_would_idle_are_a_pipeline_where_that_is_clearly_quicker(plan, monkeypatch):
    slow(monkeypatch, 100.0)
    found = plan(None, memory=SMALL, devices=3)
    (job,) = found.jobs
    assert isinstance(job.technique, Pipelined)
    assert job.technique.schedule == "flush"
    assert len(found.devices) == 3
    assert "on one device, spilled, a step would take about 1m 40s" in found.explain()
    assert "weights" not in job.numerics


def test_nothing_idles_where_there_are_as_many_trials_as_devices(plan, monkeypatch):
    slow(monkeypatch, 100.0)
    found = plan(None, memory=SMALL, devices=2, trials=2)
    assert {type(job.technique) for job in found.jobs} == {Spilled}
    assert "as a pipeline of 2 stages a step would take about" in found.explain()
    assert "on 2 devices; spilled it takes 1m 40s on one" in found.explain()


def test_one_device_is_enough_where_a_pipeline_gains_nothing(plan, monkeypatch):
    slow(monkeypatch, 1e-9)
    found = plan(None, memory=SMALL, devices=3)
    assert isinstance(found.jobs[0].technique, Spilled)
    assert len(found.devices) == 1
    assert "as a pipeline of" in found.explain()


def test_what_fits_one_device_stays_on_it(plan):
    found = plan(None, devices=3)
    assert isinstance(found.jobs[0].technique, Resident)
    assert len(found.devices) == 1


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("technique", "options", "words"),
    [
        (Pipelined(stages=3), {}, r"3 stages takes a device for each, and there are 2"),
        ("pipelined", {"devices": 1}, r"2 stages takes a device for each, and there is 1"),
        ("pipelined", {"precision": "bf16-sr"}, "cannot be pipelined"),
        (Pipelined(micro_batches=6), {}, r"no multiple of the 4 batches .* Ask for 4 or 8\."),
        (Pipelined(micro_batches=8), {}, r"Give Recipe\(splittable=True\), or ask for"),
        (
            Pipelined(micro_batches=28),
            {"splittable": True},
            r"into 7 pieces of equal rows, and the first one has 120.* micro_batches=24 or 32,",
        ),
        (Pipelined(schedule="2bw"), {"accumulate": 1}, r"needs 2 micro-batches .* step has 1"),
        (Pipelined(schedule="2bw"), {"accumulate": 7}, r"last step of an epoch has 1: 8 batches"),
        (Pipelined(schedule="2bw"), {"data": no_length}, "does not say how many batches it has"),
        (Pipelined(stages=2), {"model": "piece"}, "cannot be cut"),
        ("pipelined", {"model": "renormed"}, r"writes to the parameter 'names.weight'"),
        (Pipelined(cuts=(0,)), {}, r"no stage may begin at layer 0 of its 8.* Nearby are 1, 2, 3"),
        (Pipelined(cuts=(30,)), {}, r"no stage may begin at layer 30 .* Nearby are 5, 6, 7;"),
        (
            Pipelined(stages=2, width=2),
            {},
            r"2 copies of a pipeline of 2 stages .*, which is 4, and there are 2",
        ),
        (
            Pipelined(width=3),
            {"devices": 4},
            r"3 copies .* which is 6, and there are 4: .* fewer copies or stages",
        ),
        (
            Pipelined(width=2),
            {"devices": 4, "accumulate": 1},
            r"2 copies of a pipeline need 2 .* a step has 1",
        ),
        (
            Pipelined(width=2),
            {"devices": 4, "accumulate": 7},
            r"2 copies .* last step of an epoch has 1: 8",
        ),
        (
            Pipelined(width=2),
            {"devices": 4, "data": no_length},
            r"2 copies of a pipeline need\. .* use width=1",
        ),
        (
            Pipelined(schedule="2bw", width=2),
            {"devices": 4, "accumulate": 3},
            r"2bw with 2 stages in each of 2 copies needs 4 .* a step has 3 \(accumulate=3\)",
        ),
        (
            Pipelined(schedule="2bw", width=2),
            {"devices": 4, "model": "batched"},
            r"change buffers, as BatchNorm.* Use schedule='flush', or width=1",
        ),
        pytest.param(
            Pipelined(stages=9),
            {"devices": 9},
            r"8 pieces that may stand alone. Ask for at most 8",
            marks=pytest.mark.full,
        ),
    ],
)
def test_what_cannot_be_is_refused_with_numbers_and_a_way_out(technique, options, words, plan):
    with pytest.raises(PlanError, match=words):
        plan(technique, **options)


def test_2bw_needs_no_whole_epochs_where_training_ends_before_the_short_step(plan):
    options = {"technique": Pipelined(schedule="2bw"), "accumulate": 7}
    assert plan(**options, length={"steps": 1}).jobs
    with pytest.raises(PlanError, match="has 1"):
        plan(**options, length={"steps": 2})


def test_two_stages_may_not_change_one_buffer(plan):
    with pytest.raises(PlanError, match="would change the same buffer"):
        plan(Pipelined(cuts=(2,)), model="normed")


# -- copies ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_copies_are_planned_with_stages_and_cuts(plan):
    found = plan(Pipelined(width=2), devices=5)
    (job,) = found.jobs
    assert job.technique.width == 2
    assert job.technique.stages == len(job.shards) == 2
    assert job.gang == 4
    assert job.numerics["copies"] == 2
    assert Plan.from_json(found.to_json()) == found
    words = found.explain()
    assert "2 copies of 2 stages, a device each, schedule flush" in words
    assert "2 copies were asked for: each takes 2 of a step's 4 micro-batches" in words
    assert "on 4 devices" in words


def test_nobody_has_copies_unasked(plan):
    assert plan(devices=4).jobs[0].technique.width == 1
    assert "copies" not in plan(devices=4).jobs[0].numerics


def test_copies_go_on_as_copies():
    key = {"copies": 3, "weights": "one step old"}
    assert technique_on_record([key]) == Pipelined(schedule="2bw", width=3)
    assert technique_on_record([{"copies": 2}]) == Pipelined(width=2)


def test_gradients_of_other_copies_need_room(plan):
    # Cut alike, whatever the two plans measured.
    one, two = (plan(Pipelined(cuts=(2,), lag=0, width=w), devices=4).jobs[0] for w in (1, 2))
    assert two.held_bytes >= one.held_bytes + max(s.gradient_bytes for s in one.shards)


# -- several trials ----------------------------------------------------------------------------


def test_many_trials_have_as_few_devices_each_as_do(plan):
    many = plan(devices=4, trials=9)
    assert {job.gang for job in many.jobs} == {2}
    assert many.active == 3  # one computes where another waits
    assert [job.trial for job in many.jobs] == list(range(9))
    one = many.jobs[0]
    assert all(replace(job, trial=0, hp=one.hp, seed=one.seed) == one for job in many.jobs)
