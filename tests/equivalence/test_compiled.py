"""What the user compiled runs compiled, in one piece or in shards: the plain loop's bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import zoo
from torch import nn

import shoal
from shoal.core.errors import PlanError
from shoal.runtime.pool import WorkerPool

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's compiler
STEPS = 4
TECHNIQUES = {
    "resident": "resident",
    "host": shoal.Spilled(shards=3, optimizer="host", lookahead=0, keep_turn=1),
    "device": shoal.Spilled(shards=3, optimizer="device", keep=(0, 1)),
    "moved": shoal.Spilled(shards=5, optimizer="host", keep=(), spill_activations=(0, 1, 2)),
}


class Counted:
    """A backend whose code has other bits than eager code, and writes down that it runs."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs

    def __call__(self, graph, examples):
        def run(*values):
            with self.runs.open("a") as file:
                file.write("x")
            return tuple(_shifted(value) for value in graph.forward(*values))

        return run


class Compilations(Counted):
    """Writes down that it compiles."""

    def __call__(self, graph, examples):
        with self.runs.open("a") as file:
            file.write("x")
        return graph.forward


def _shifted(value):
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value * (1 + 2**-18) if is_float else value


class Net(nn.Module):
    def __init__(self, blocks) -> None:
        super().__init__()
        self.tokens = nn.Embedding(zoo.VOCABULARY, 32)
        self.blocks = blocks
        self.head = nn.Linear(32, zoo.VOCABULARY)

    def forward(self, tokens_BT):
        x = self.tokens(tokens_BT)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Calls(nn.Module):
    """A block that calls a function."""

    def __init__(self, function) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(32, 32), function

    def forward(self, x):
        return x + self.function(self.linear(x))


class Build:
    """``kind`` says what is compiled."""

    def __init__(self, backend, kind="block.compile()") -> None:
        self.backend, self.kind = backend, kind

    def __call__(self, hp):
        blocks = [zoo.Block(32, 4, hp.get("dropout", 0.1)) for _ in range(4)]
        if self.kind == "torch.compile(block)":
            blocks = [torch.compile(block, backend=self.backend) for block in blocks]
        elif self.kind == "a function":
            function = torch.compile(nn.functional.gelu, backend=self.backend)
            blocks = [Calls(function) for _ in range(4)]
        elif self.kind == "a list of blocks":
            body = nn.Sequential(*blocks)
            body.compile(backend=self.backend)
            tokens, head = nn.Embedding(zoo.VOCABULARY, 32), nn.Linear(32, zoo.VOCABULARY)
            return nn.Sequential(tokens, body, head)
        for block in blocks:
            if self.kind == "block.compile()":
                block.compile(backend=self.backend)
            elif self.kind == "forward":
                block.forward = torch.compile(block.forward, backend=self.backend)
        net = Net(nn.ModuleList(blocks))
        if self.kind == "the model":
            net.compile(backend=self.backend)
        return net


class Loss:
    """A loss that is compiled."""

    def __init__(self, backend) -> None:
        self.backend, self.compiled = backend, None

    def __call__(self, output, batch):
        if self.compiled is None:
            self.compiled = torch.compile(nn.functional.cross_entropy, backend=self.backend)
        return self.compiled(output.flatten(0, 1), batch[1].flatten())

    def __getstate__(self):
        return {"backend": self.backend, "compiled": None}


def batches(hp):
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(zoo.VOCABULARY, (4, 9), generator=generator) for _ in range(5)]
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows], None


def loss(output, batch):
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def recipe_of(build, **changes):
    options = {"model": build, "data": batches, "loss": loss, "clip_grad_norm": 0.5}
    return shoal.Recipe(**options | changes)


@pytest.fixture
def check(run_study, assert_alone):
    """Train in workers of its own, then alone, as in a process that compiled nothing before."""

    def run(recipe, space, technique):
        with WorkerPool() as workers:
            options = {"technique": technique, "workers": workers}
            report = run_study(recipe, space, steps=STEPS, **options)
        for trial in report.trials:
            torch._dynamo.reset()
            assert_alone(report, [trial], recipe, steps=STEPS)

    return run


KINDS = ("block.compile()", "torch.compile(block)", "forward", "a function", "a list of blocks")
CASES = [
    *((kind, where, "fp32") for kind in KINDS for where in ("resident", "host")),
    (KINDS[0], "device", "fp32"),
    (KINDS[0], "device", "bf16"),
    (KINDS[0], "moved", "bf16"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "where", "precision"), CASES)
def test_every_call_of_what_is_compiled_is_compiled(kind, where, precision, tmp_path, check):
    runs = tmp_path / "runs"
    recipe = recipe_of(Build(Counted(runs), kind), precision=precision)
    check(recipe, shoal.grid(lr=[1e-2, 3e-3]), TECHNIQUES[where])
    assert runs.exists()


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("where", ["resident", "host", "device", "moved"])
def test_parameters_that_come_and_go_make_nothing_compile_again(where, tmp_path, run_study):
    """A longer study calls the compiler as often as a short one."""
    counts = []
    for steps in (2, 4):
        made = tmp_path / f"made {steps}"
        recipe = recipe_of(Build(Compilations(made)))
        with WorkerPool() as workers:
            options = {"technique": TECHNIQUES[where], "workers": workers}
            run_study(recipe, {"lr": 1e-2}, steps=steps, **options)
        counts.append(len(made.read_text()))
    assert counts[0] == counts[1] > 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("technique", ["resident", TECHNIQUES["host"]], ids=["resident", "host"])
def test_a_compiled_loss(technique, tmp_path, check):
    backend = Counted(tmp_path / "runs")
    recipe = recipe_of(Build(backend, "nothing"), loss=Loss(backend))
    check(recipe, {"lr": 1e-2}, technique)


@pytest.mark.full
def test_many_trials_that_compile_differently_share_a_worker(tmp_path, check):
    recipe = recipe_of(Build(Counted(tmp_path / "runs")))
    space = shoal.grid(lr=[1e-2], dropout=[0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
    check(recipe, space, TECHNIQUES["host"])


def test_a_compiled_trial_after_one_that_was_measured_and_is_not(tmp_path, check):
    backend = Counted(tmp_path / "runs")
    recipe = recipe_of(Sometimes(backend), precision="bf16")
    technique = shoal.Spilled(shards=3, optimizer="host", keep=())
    check(recipe, shoal.grid(lr=[1e-2], compiled=[False, True]), technique)


class Sometimes:
    def __init__(self, backend) -> None:
        self.backend = backend

    def __call__(self, hp):
        return Build(self.backend, "block.compile()" if hp["compiled"] else "nothing")(hp)


def test_what_is_compiled_whole_is_not_cut(tmp_path):
    recipe = recipe_of(Build("aot_eager", "the model"))
    with pytest.raises(PlanError, match=r"compiled as a whole.*block.compile\(\)"):
        plan_of(recipe, tmp_path, shoal.Spilled(shards=3))


def test_the_plan_says_what_is_compiled(tmp_path):
    plan = plan_of(recipe_of(Build("aot_eager")), tmp_path, shoal.Spilled(shards=3))
    assert "4 modules are compiled: measured as if they were not" in plan.explain()
    assert plan.jobs[0].numerics["compiled modules"] == 4


def test_their_weights_do_not_travel_narrow(tmp_path):
    recipe = recipe_of(Build("aot_eager"), precision="bf16")
    with pytest.raises(PlanError, match="it is compiled, and nobody sees what reads its weights"):
        plan_of(recipe, tmp_path, shoal.Spilled(shards=3, transfer="bf16"))


def plan_of(recipe, directory, technique):
    study = shoal.Study("study", recipe, space={"lr": 1e-2}, steps=2, directory=directory)
    hardware = shoal.Hardware.virtual(devices=1, memory="64MiB")
    return study.plan(hardware=hardware, technique=technique)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("one_thread")  # torch's code is made for so many
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs one for C++")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("technique", TECHNIQUES.values(), ids=TECHNIQUES)
def test_code_that_torch_made_has_the_plain_bits(technique, precision, check):
    recipe = recipe_of(Build("inductor"), precision=precision)
    check(recipe, shoal.grid(lr=[1e-2, 3e-3]), technique)
