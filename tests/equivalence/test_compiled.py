"""Blocks that the user compiled run compiled, in one piece or in shards: the plain loop's bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import zoo
from torch import nn

import shoal
from shoal.core.errors import PlanError

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's compiler
STEPS = 4
TECHNIQUES = [
    "resident",
    shoal.Spilled(shards=4, optimizer="host", keep_turn=1),
    shoal.Spilled(shards=4, optimizer="device", keep=(0, 1)),
]


class Counted:
    """A backend that compiles nothing, and writes down each time that its code runs."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs

    def __call__(self, graph, examples):
        def run(*values):
            with self.runs.open("a") as file:
                file.write("x")
            return graph.forward(*values)

        return run


class Net(nn.Module):
    def __init__(self, backend, wrap) -> None:
        super().__init__()
        self.tokens = nn.Embedding(zoo.VOCABULARY, 32)
        blocks = [zoo.Block(32, 4, 0.1) for _ in range(4)]
        if wrap:
            blocks = [torch.compile(block, backend=backend) for block in blocks]
        else:
            for block in blocks:
                block.compile(backend=backend)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(32, zoo.VOCABULARY)

    def forward(self, tokens_BT):
        x = self.tokens(tokens_BT)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Build:
    def __init__(self, backend, *, wrap=False) -> None:
        self.backend, self.wrap = backend, wrap

    def __call__(self, hp):
        return Net(self.backend, self.wrap)


def batches(hp):
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(zoo.VOCABULARY, (4, 9), generator=generator) for _ in range(5)]
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows], None


def loss(output, batch):
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def recipe_of(build, **changes):
    return shoal.Recipe(model=build, data=batches, loss=loss, clip_grad_norm=0.5, **changes)


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("technique", TECHNIQUES, ids=["resident", "host", "device"])
def test_every_call_of_a_compiled_block_is_compiled(
    technique, wrap, tmp_path, run_study, assert_alone
):
    runs = tmp_path / "runs"
    recipe = recipe_of(Build(Counted(runs), wrap=wrap))
    report = run_study(recipe, shoal.grid(lr=[1e-2, 3e-3]), steps=STEPS, technique=technique)
    assert len(runs.read_text()) >= 2 * STEPS * 4  # trials, steps, blocks
    assert_alone(report, report.trials, recipe, steps=STEPS)


def test_the_plan_says_what_is_compiled(tmp_path):
    plan = plan_of(recipe_of(Build("aot_eager")), tmp_path, shoal.Spilled(shards=3))
    assert "4 modules are compiled: measured as if they were not" in plan.explain()
    assert plan.jobs[0].numerics["compiled modules"] == 4


def test_their_weights_do_not_travel_narrow(tmp_path):
    recipe = recipe_of(Build("aot_eager"), precision="bf16")
    with pytest.raises(PlanError, match="4 of its modules are compiled, and read what they like"):
        plan_of(recipe, tmp_path, shoal.Spilled(shards=3, transfer="bf16"))


def plan_of(recipe, directory, technique):
    study = shoal.Study("study", recipe, space={"lr": 1e-2}, steps=2, directory=directory)
    hardware = shoal.Hardware.virtual(devices=1, memory="64MiB")
    return study.plan(hardware=hardware, technique=technique)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs one for C++")
@pytest.mark.parametrize("technique", TECHNIQUES, ids=["resident", "host", "device"])
def test_code_that_torch_made_has_the_plain_bits(technique, run_study, assert_alone):
    torch.set_num_threads(1)  # as the trials have: torch's code is made for so many
    recipe = recipe_of(Build("inductor"))
    report = run_study(recipe, shoal.grid(lr=[1e-2, 3e-3]), steps=STEPS, technique=technique)
    assert_alone(report, report.trials, recipe, steps=STEPS)
