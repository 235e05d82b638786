"""Recipes that allow stale weights: what is chosen for them, and what never is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.core.errors import PlanError
from shoal.core.technique import Pipelined, Spilled
from shoal.launch.plan import plan_study
from shoal.launch.request import settings_of
from shoal.planner import timetoloss
from shoal.planner.price import Price
from shoal.planning import weighing
from shoal.planning.deciding import Deciding

WIDTH, ROWS = 64, 120
FULL, WORTHLESS = shoal.Stale(efficiency=1.0), shoal.Stale(efficiency=1e-6)
SMALL = "4MiB"  # half of a model


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.outer(torch.relu(self.inner(x)))


class Chain(nn.Module):
    def __init__(self, blocks=6, tied=False):
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        if tied:
            self.leave.weight = self.enter.weight

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def build(hp):
    return Chain(hp.get("blocks", 6), bool(hp.get("tied", 0)))


def data(hp):
    batch = (torch.ones(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.long))
    return [batch] * 8, [batch]


class Unending:
    def __iter__(self):
        return iter(data(None)[0])


def no_length(hp):
    return Unending(), None


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def make_study(tmp_path, *, stale=FULL, space=None, study=None, **changes):
    recipe = {"model": build, "data": data, "loss": loss, "accumulate": 4, **changes}
    options = {"space": space or {"lr": 1e-3}, "epochs": 2, **(study or {})}
    return shoal.Study("s", shoal.Recipe(stale=stale, **recipe), directory=tmp_path, **options)


@pytest.fixture
def plan(tmp_path, warm_workers):
    """The jobs of a study; ``keys`` are those on record of its trials."""

    def make(technique="pipelined", *, devices=2, memory="16MiB", idle=False, keys=None, **of):
        study = make_study(tmp_path, **of)
        hardware = shoal.Hardware.virtual(devices=devices, memory=memory)
        used = replace(hardware, devices=hardware.devices[: 1 if idle else devices])
        rest = hardware.devices[1:] if idle else ()
        asked = Pipelined() if technique == "pipelined" else technique
        try:
            _, planned = plan_study(
                study,
                warm_workers,
                used,
                asked,
                trials=study.trials,
                settings=settings_of(study, timeline=False),
                sink=lambda happened: None,
                recorded=keys or {},
                idle=rest,
            )
        finally:
            warm_workers.release()
        return planned.plan.jobs

    return make


@pytest.fixture(autouse=True)
def much_sooner(monkeypatch):
    """Whatever steps of milliseconds take on a loaded machine, a whole step's worth wins."""
    monkeypatch.setattr(weighing, "RIVALS", ("2bw",))
    monkeypatch.setattr(timetoloss, "WORTH", 100.0)


def why(job):
    return "\n".join(job.why)


# -- allowed -----------------------------------------------------------------------------------


def test_stale_weights_are_taken_where_they_are_allowed_and_sooner(plan):
    (job,) = plan()
    assert job.technique.schedule == "2bw"
    assert job.numerics["weights"] == "one step old"
    assert "2bw is taken, as Recipe(stale=...) allows" in why(job)
    assert "flush is not taken: " in why(job)
    assert "which at an efficiency of 1 is " in why(job)
    (job,) = plan(stale=shoal.Stale(efficiency=0.8))
    assert "for the loss that a synchronous training reaches give 1.25 times the steps" in why(job)


def test_a_guess_is_part_of_what_the_recipe_allows(plan):
    (job,) = plan(stale=shoal.Stale(efficiency=1.0, predict=True))
    assert job.technique.predict
    assert job.numerics["weights"] == "one step old, guessed"


def test_a_recipe_that_does_not_allow_them_has_none(plan):
    (job,) = plan(stale=None)
    assert job.technique.schedule == "flush"
    assert "weights" not in job.numerics
    assert "is taken" not in why(job)


def test_steps_that_are_worth_little_are_not_taken_and_the_plan_says_so(plan):
    (job,) = plan(stale=WORTHLESS)
    assert job.technique.schedule == "flush"
    assert "2bw is not taken: " in why(job)
    assert "which at an efficiency of 1e-06 is " in why(job)


def test_a_schedule_that_was_named_is_not_weighed(plan):
    (job,) = plan(Pipelined(schedule="flush"))
    assert job.technique.schedule == "flush"
    assert "is taken" not in why(job)


@pytest.mark.slow
def test_idle_devices_are_a_stale_pipeline_where_that_is_sooner_than_spilling(plan, monkeypatch):
    monkeypatch.setattr(Deciding, "_price", lambda self, settled: Price(100.0, 1.0))
    options = {"memory": SMALL, "devices": 3, "idle": True}
    (stale,) = plan(None, **options)
    assert stale.technique.schedule == "2bw"
    (job,) = plan(None, stale=None, **options)
    assert job.technique.schedule == "flush"


def test_where_spilling_is_sooner_it_is_said_beside_what_lost(plan, monkeypatch):
    monkeypatch.setattr(Deciding, "_price", lambda self, settled: Price(1e-9, 1.0))
    (job,) = plan(None, memory=SMALL, devices=3, idle=True)
    assert isinstance(job.technique, Spilled)
    assert "spilled on one device is taken" in why(job)
    assert "2bw is not taken: " in why(job)


# -- what it cannot be -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"accumulate": 1}, "2bw is not taken: 2bw with 2 stages needs 2 micro-batches"),
        ({"accumulate": 7}, "the last step of an epoch has 1"),
        ({"data": no_length, "study": {"epochs": None, "steps": 4}}, "does not say how many"),
        (
            {"space": {"lr": 1e-3, "tied": 1}, "stale": shoal.Stale(efficiency=1, predict=True)},
            "stages have weights in common",
        ),
    ],
)
def test_what_2bw_refuses_trains_synchronous_and_says_why(changes, words, plan):
    (job,) = plan(**changes)
    assert job.technique.schedule == "flush"
    assert words in why(job)


@pytest.mark.full
def test_stages_that_are_spilled_are_synchronous(plan):
    (job,) = plan(memory="2MiB")
    assert job.technique.is_spilled
    assert job.technique.schedule == "flush"
    (job,) = plan(Pipelined(stages=2, shards=4))
    assert "stages that are spilled have neither" in why(job)


def test_a_population_is_synchronous(plan):
    space = {"lr": shoal.log_uniform(1e-4, 1e-2)}
    settings = {"trials": 4, "pruner": shoal.PBT(vary=("lr",)), "epochs": 4}
    for job in plan(space=space, study=settings):
        assert job.technique.schedule == "flush"


# -- on record ---------------------------------------------------------------------------------

STALE, NEW = {"weights": "one step old", "accumulate": 4}, {"accumulate": 4}
GUESSED = {"weights": "one step old, guessed", "accumulate": 4}


def test_a_trial_goes_on_as_it_began_whatever_is_sooner_now(plan):
    assert plan(stale=WORTHLESS, keys={0: STALE})[0].technique.schedule == "2bw"
    assert plan(stale=WORTHLESS, keys={0: GUESSED})[0].technique.predict
    (job,) = plan(keys={0: NEW})
    assert job.technique.schedule == "flush"
    assert "it began with a synchronous schedule, and goes on so" in why(job)
    (job,) = plan(stale=None, keys={0: STALE})
    assert job.technique.schedule == "2bw"


def test_trials_of_both_kinds_go_on_each_as_it_began(plan):
    space = shoal.grid(lr=[1e-3, 1e-2, 1e-1])
    jobs = plan(space=space, keys={0: NEW, 1: STALE})
    assert [job.technique.schedule for job in jobs] == ["flush", "2bw", "flush"]
    assert "other trials of the study train with new weights" in why(jobs[2])
    jobs = plan(None, memory="16MiB", space=space, keys={0: NEW, 1: STALE})
    assert [job.gang for job in jobs] == [1, 2, 1]


def test_trials_that_come_later_train_as_the_others_do_if_they_can(plan):
    space = shoal.grid(lr=[1e-3, 1e-2])
    jobs = plan(stale=WORTHLESS, space=space, keys={0: STALE})
    assert [job.technique.schedule for job in jobs] == ["2bw", "2bw"]
    tied = shoal.grid(tied=[0, 1], lr=[1e-3])
    jobs = plan(space=tied, keys={0: GUESSED})
    assert [job.technique.schedule for job in jobs] == ["2bw", "flush"]
    assert "it cannot train with stale weights as the other trials do" in why(jobs[1])


def test_shapes_of_one_study_all_have_stale_weights_or_none(plan):
    guess = shoal.Stale(efficiency=1.0, predict=True)
    jobs = plan(stale=guess, space=shoal.grid(tied=[0, 1], lr=[1e-3]))
    assert [job.technique.schedule for job in jobs] == ["flush", "flush"]
    assert "other trials of the study train with new weights" in why(jobs[0])


def test_a_trial_that_began_stale_needs_its_devices(plan):
    with pytest.raises(PlanError, match="a device for each, and there is 1"):
        plan(None, devices=1, keys={0: STALE})
