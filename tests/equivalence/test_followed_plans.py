"""A plan that was made before is followed: each trial trains as there, to the same bits."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from functools import partial

import commands
import pytest
import squads
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.core.technique import Resident
from shoal.testing import plain_loop

pytestmark = pytest.mark.usefixtures("warm_plans")

WIDE = {"width": shoal.choice(256, 288), "lr": shoal.choice(0.01, 0.003)}
HARDWARE = shoal.Hardware.virtual(devices=2, memory="3MiB")


def build(hp):
    blocks = [
        layer for _ in range(6) for layer in (nn.Linear(hp["width"], hp["width"]), nn.ReLU())
    ]
    return nn.Sequential(nn.Linear(16, hp["width"]), *blocks, nn.Linear(hp["width"], 5))


def data(hp):
    generator = torch.Generator().manual_seed(3)
    batches = [(torch.randn(8, 16, generator=generator), torch.arange(8) % 5) for _ in range(6)]
    return batches, batches[:2]


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


RECIPE = shoal.Recipe(model=build, data=data, loss=loss)


@pytest.fixture
def make(tmp_path):
    def made(place="it", **options):
        settings = {"space": WIDE, "epochs": 3, "directory": tmp_path / place, **options}
        return shoal.Study("it", RECIPE, **settings)

    return made


def ways(plan):
    """How an array in shards moves is chosen anew, by times, and changes no bit."""
    return {
        job.trial: (type(job.technique) if job.array else job.technique, dict(job.numerics))
        for job in plan.jobs
    }


def plan_of(study):
    return shoal.Plan.from_json((study.directory / "plan.json").read_text())


SMALL = {"space": {"width": 16, "lr": shoal.log_uniform(1e-3, 1e-1)}, "trials": 6}
PRUNED = {**SMALL, "trials": 9, "pruner": "asha"}
CASES = {
    "spilled and resident": ({"space": {**WIDE, "width": shoal.choice(32, 288)}}, {}),
    "one of each stage": ({"trials": 2}, {"technique": shoal.Pipelined(stages=2)}),
    "captured": (SMALL, {"technique": "captured"}),
    "arrays": (SMALL, {"fuse": 3}),
    "arrays in shards": ({}, {"fuse": 2}),
    "arrays that close ranks": (PRUNED, {"fuse": "8/3/1"}),
    "all measured": (SMALL, {"fuse": "auto"}),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("study", "how"), CASES.values(), ids=CASES)
def test_trials_train_as_in_the_plan_wherever_it_comes_from(study, how, make, warm_workers):
    how = {**how, "workers": warm_workers}
    first = make("first", **study)
    plan = first.plan(hardware=HARDWARE, **how)
    expected = first.run(hardware=HARDWARE, **how) if how.get("fuse") != "auto" else None

    again = make("again", **study)
    report = again.run(plan=shoal.Plan.from_json(plan.to_json()), workers=warm_workers)

    assert ways(plan_of(again)) == ways(plan)
    assert not any(trial.error for trial in report.trials)
    if expected is not None:
        assert [trial.metrics for trial in report.trials] == [t.metrics for t in expected.trials]
    if not any(job.array or job.began for job in plan.jobs):
        best = report.best
        alone = plain_loop(RECIPE, best.hp, best.seed, epochs=3)
        state = best.load_state()["model"]
        assert all(torch.equal(t, state[name]) for name, t in alone.state()["model"].items())


def test_trials_that_come_later_train_like_those_of_the_plan(make, warm_workers):
    pytest.importorskip("optuna")
    asked = {**SMALL, "trials": 9, "sampler": "tpe", "generation": 3}
    plan = make("first", **asked).plan(hardware=HARDWARE, fuse=3, workers=warm_workers)
    report = make("again", **asked).run(plan=plan, workers=warm_workers)
    assert len(plan.jobs) < 9
    assert set(squads.widths(report)) == {3}


def test_a_run_that_was_stopped_goes_on_with_the_same_plan(make, warm_workers):
    how = {"workers": warm_workers}
    plan = make(**SMALL).plan(hardware=HARDWARE, fuse=3, **how)

    make(**SMALL, time_limit=0.05).run(plan=plan, **how)
    report = make(**SMALL).run(plan=plan, **how)
    assert {trial.state.name for trial in report.trials} == {"FINISHED"}
    assert set(squads.widths(report)) == {3}


def test_a_plan_is_followed_on_the_hardware_that_it_was_made_on(make, warm_workers):
    hardware = replace(shoal.Hardware.virtual(devices=2, memory="64MiB"), shared_cores=2)
    one = {"space": {"width": 16, "lr": 0.1}}
    plan = make("first", **one).plan(hardware=hardware, workers=warm_workers)
    assert [device.threads for device in plan.devices] == [2]
    study = make("again", **one)
    study.run(plan=plan, hardware=hardware, workers=warm_workers)
    assert ways(plan_of(study)) == ways(plan)


def refused(make, plan, match, error=shoal.SpecError, **options):
    study = make("refused")
    with pytest.raises(error, match=match):
        study.run(plan=plan, **options)
    assert not (study.directory / "study.json").exists()


def test_what_does_not_go_with_a_plan_is_refused_and_nothing_is_written(make, warm_workers):
    how = {"workers": warm_workers}
    plan = make().plan(hardware=HARDWARE, **how)
    one, wide = replace(HARDWARE, devices=HARDWARE.devices[:1]), {"devices": 2, "memory": "3MiB"}
    refused(make, "resident", "plan is what study.plan", **how)
    refused(make, plan, "technique= is asked for too", technique="spilled", **how)
    refused(make, plan, "fuse= is asked for too", fuse="auto", **how)
    refused(make, plan, r"the hardware has cpu:0, not cpu:1", hardware=one, **how)
    refused(make, replace(plan, study="other"), "is of study 'other'", **how)
    moved = (replace(plan.jobs[0], seed=9), *plan.jobs[1:])
    refused(make, replace(plan, jobs=moved), "trial 0 was .* seed 9, and is .* seed 0 now", **how)
    wider = shoal.Hardware.virtual(threads=2, **wide)
    refused(make, plan, "threads was 1 and is 2", shoal.PlanError, hardware=wider, **how)
    whole = tuple(replace(job, technique=Resident()) for job in plan.jobs)
    refused(make, replace(plan, jobs=whole), "asked to train resident", shoal.PlanError, **how)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"study": "it", "jobs": 3}', '"plan"'])
def test_what_is_no_plan_is_refused_in_words(text):
    with pytest.raises(shoal.SpecError, match="this is no plan that"):
        shoal.Plan.from_json(text)


FILE = """
    import torch, shoal
    from torch import nn

    def build(hp):
        return nn.Linear(6, 3)

    def data(hp):
        return [(torch.ones(2, 6), torch.tensor([0, 2]))] * 4, None

    def loss(output, batch):
        return nn.functional.cross_entropy(output, batch[1])

    recipe = shoal.Recipe(model=build, data=data, loss=loss)
    space = shoal.grid(lr=[0.1, 0.2, 0.3, 0.4])
    study = shoal.Study("it", recipe, space=space, steps=3, metric="train_loss")
"""


def test_a_plan_of_the_command_line_is_followed_there(tmp_path):
    (tmp_path / "it.py").write_text(textwrap.dedent(FILE))

    shoal_ = partial(commands.run, cwd=tmp_path)
    planned = shoal_("plan", "it.py", "--fuse", "2", "--devices", "cpu:1", "--json")
    (tmp_path / "plan.json").write_text(planned.stdout)
    found = shoal_("run", "it.py", "--plan", "plan.json")
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("array 2") == 4
    refused = shoal_("run", "it.py", "--plan", "it.py", "--overwrite")
    assert refused.returncode == 2
    assert "this is no plan that" in refused.stderr
