"""The zoo on a GPU: resident and in shards, the optimizer on the device and on the host.

Promised is what two lone runs agree on. Where they differ, because a kernel of this GPU is not
deterministic, there is nothing to compare with, and the test is skipped with that reason.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch
import zoo

import shoal
from shoal.core.spec import DeviceSpec
from shoal.core.units import Bytes
from shoal.device import open_device
from shoal.device.allocator import allocator_here, held_by_libraries
from shoal.device.losses import Losses, readback_of
from shoal.kernels.kernelchoice import repeatable
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.partition.track import AllocationTracker
from shoal.runtime.capture.captured import PROOFS
from shoal.runtime.capture.captures import Captures
from shoal.runtime.measuring.meter import free_bytes, reserved_bytes
from shoal.runtime.placing.binding import Binding
from shoal.runtime.pool import WorkerPool
from shoal.runtime.units import Micro, ResidentUnits
from shoal.testing import compare, plain_loop
from shoal.verify import verify_trials

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

MIB = 2**20
STEPS = 4  # with accumulate=3 and five batches an epoch, two of them are short groups
TECHNIQUES = {
    "resident": ("resident", "device"),
    "3 shards, device step": (shoal.Spilled(shards=3, optimizer="device"), "device"),
    "3 shards, host step": (shoal.Spilled(shards=3, optimizer="host"), "host"),
    "3 shards, shard by shard": (
        shoal.Spilled(shards=3, optimizer="device", order="shard"),
        "device",
    ),
}


@pytest.fixture
def run_on_gpu(tmp_path, warm_workers):
    """A function that trains a space on a GPU and returns the report."""

    def run(recipe, space, technique, devices="cuda:0", **options):
        study = shoal.Study("gpu", recipe, space=space, steps=STEPS, directory=tmp_path)
        return study.run(
            hardware=shoal.Hardware.parse(devices, "1GiB", threads=1),
            technique=technique,
            progress=False,
            timeline=False,
            workers=warm_workers,
            **options,
        )

    return run


def skip_unless_repeatable(recipe, trial, **loop):
    first, second = (plain_loop(recipe, trial.hp, trial.seed, **loop) for _ in range(2))
    found = compare(first, second.state(), losses=second.losses)
    if not found.equal:
        pytest.skip(f"two lone runs of {dict(trial.hp)} differ here: {found.first_difference}")


@pytest.mark.sample(6)
@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("model", zoo.MODELS)
def test_a_trial_on_a_gpu_ends_on_the_bits_of_the_plain_loop(
    model, technique, run_on_gpu, assert_alone
):
    chosen, place = TECHNIQUES[technique]
    recipe = zoo.recipe(clip=0.5, accumulate=3)
    space = shoal.grid(model=[model], optimizer=["sgd", "adamw"], lr=[1e-3])
    loop = {"steps": STEPS, "device": "cuda", "optimizer": place}

    report = run_on_gpu(recipe, space, chosen)

    assert [trial.error for trial in report.trials if trial.error] == []
    if model in ("bert", "llama"):
        zoo._transformers()  # whose import draws from Python's generator, as no plain loop does
    for trial in report.trials:
        skip_unless_repeatable(recipe, trial, **loop)
    assert_alone(report, report.trials, recipe, **loop)


def pulled(named, hp):
    """Each step pulls to an average that only a hook has, of weights as they were at first."""
    weights = [weight for _, weight in named]
    optimizer = torch.optim.AdamW(weights, lr=hp["lr"])
    averages = [weight.detach().clone() for weight in weights]

    @torch.no_grad()
    def pull(*_):
        for average, weight in zip(averages, weights, strict=True):
            weight.lerp_(average.lerp_(weight, 0.1), 0.2)

    optimizer.register_step_post_hook(pull)
    return optimizer


def test_what_an_optimizer_keeps_of_the_weights_is_where_they_step(run_on_gpu, assert_alone):
    recipe = replace(zoo.recipe(), optimizer=pulled)
    space = shoal.grid(model=["mlp"], optimizer=["adamw"], lr=[1e-3, 1e-2])

    report = run_on_gpu(recipe, space, "resident")

    assert_alone(report, report.trials, recipe, steps=STEPS, device="cuda")


class Pull:
    """Each step pulls to the average of the weights so far, which only this hook has."""

    def __init__(self, weights):
        self.weights = weights
        self.averages = [weight.detach().clone() for weight in weights]

    def __call__(self, *_):
        for average, weight in zip(self.averages, self.weights, strict=True):
            weight.detach().copy_(average.lerp_(weight.detach(), 0.1))


def pulled_each(named, hp):
    weights = [weight for _, weight in named]
    optimizer = torch.optim.AdamW(weights, lr=hp["lr"])
    optimizer.register_step_post_hook(Pull(weights))
    return optimizer


def test_what_optimizers_of_an_array_keep_of_the_weights_is_where_they_step(run_on_gpu):
    recipe = replace(zoo.recipe(), optimizer=pulled_each)
    space = shoal.grid(model=["mlp"], optimizer=["adamw"], lr=[1e-3, 1e-2])

    report = run_on_gpu(recipe, space, "resident", fuse="2 eager")

    rows = Snapshot.of(read_outline(report.directory)).trials
    assert all("array" in row.numerics for row in rows)
    verdicts = list(verify_trials(report.directory, rows, recipe=recipe))
    assert [v.first_difference or v.failure or v.skipped for v in verdicts] == ["", ""]


@pytest.mark.parametrize("place", ["device", "host"])
def test_weights_that_are_rounded_by_chance_are_rounded_where_they_step(
    place, run_on_gpu, assert_alone
):
    recipe = zoo.recipe(clip=0.5, precision="bf16-sr")
    space = shoal.grid(model=["mlp"], optimizer=["adamw"], lr=[1e-3])

    report = run_on_gpu(recipe, space, shoal.Spilled(shards=3, optimizer=place))

    loop = {"steps": STEPS, "device": "cuda", "optimizer": place}
    assert_alone(report, report.trials, recipe, **loop)


@pytest.mark.skipif("SHOAL_CUDA_STANDIN" in os.environ, reason="no CUDA graphs there")
def test_a_pass_whose_kernels_do_not_repeat_themselves_is_captured_with_some_that_do():
    torch.manual_seed(0)
    device = torch.device("cuda:0")
    model = torch.nn.Sequential(
        *(torch.nn.Conv2d(3, 16, 4, 2, 1), torch.nn.BatchNorm2d(16), torch.nn.ReLU()),
        *(torch.nn.Conv2d(16, 32, 4, 2, 1), torch.nn.Flatten(), torch.nn.Linear(2048, 10)),
    ).to(device)
    recipe = shoal.Recipe(
        model=lambda hp: model, data=lambda hp: ([], None), loss=lambda y, b: y.square().mean()
    )
    units = Captures(recipe, device).units(model)
    batch = (torch.randn(8, 3, 32, 32, device=device),)

    def gradients():
        model.zero_grad(set_to_none=True)
        units.backward(0, Micro(batch))
        return [parameter.grad.clone() for parameter in model.parameters()]

    for _ in range(PROOFS):
        gradients()

    assert units.is_captured, units.why_not
    with repeatable(device):
        alone = ResidentUnits(model, recipe, device)
        captured = gradients()
        model.zero_grad(set_to_none=True)
        alone.backward(0, Micro(batch))
    assert all(map(torch.allclose, captured, [p.grad for p in model.parameters()]))


@pytest.fixture
def waits_are_errors():
    """Whatever waits for the GPU, but an event that is waited for by name, raises."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_come_to_the_host_and_nothing_waits_for_them_until_they_are_asked_for(
    dtype, request
):
    device = torch.device("cuda:0")
    losses = Losses(readback_of(device, 3))
    weight = torch.full((), 1 / 3, dtype=dtype, device=device, requires_grad=True)
    request.getfixturevalue("waits_are_errors")
    for factor in (1.0, 2.0, 3.0):
        losses.note(weight * factor)
    found = losses.values()
    torch.cuda.set_sync_debug_mode("default")
    assert found == [(weight * factor).item() for factor in (1.0, 2.0, 3.0)]


def test_a_worker_that_shares_its_gpu_takes_no_more_than_its_share():
    there = reserved_bytes(torch.device("cuda:0"))  # of tests before this one
    share = Bytes(there + 80 * MIB)
    spec = DeviceSpec(name="cuda:0/1", kind="cuda", memory=Bytes(64 * MIB), share_bytes=share)
    before = free_bytes(torch.device("cuda:0"))

    device = open_device(spec)
    try:
        device.empty(64 * MIB)
        assert free_bytes(device.torch_device) <= 80 * MIB
        with pytest.raises(torch.OutOfMemoryError):
            device.empty(96 * MIB)
    finally:
        device.close()

    assert device.empty(96 * MIB).nbytes == 96 * MIB  # of the next study in this process
    assert before > 96 * MIB


@pytest.mark.parametrize("technique", ["resident", shoal.Spilled(shards=3, optimizer="host")])
def test_two_workers_on_one_gpu_train_trials_to_the_bits_of_the_plain_loop(
    technique, run_on_gpu, assert_alone
):
    place = "device" if technique == "resident" else "host"
    recipe, loop = zoo.recipe(), {"steps": STEPS, "device": "cuda", "optimizer": place}
    space = shoal.grid(model=["gpt"], optimizer=["adamw"], lr=[1e-3, 3e-3])

    report = run_on_gpu(recipe, space, technique, devices="cuda:0,0")

    assert [trial.error for trial in report.trials if trial.error] == []
    assert set(report.peaks) == {"cuda:0/0", "cuda:0/1"}
    assert all(0 < peak.peak_bytes <= peak.budget_bytes for peak in report.peaks.values())
    for trial in report.trials:
        skip_unless_repeatable(recipe, trial, **loop)
    assert_alone(report, report.trials, recipe, **loop)


def test_the_process_that_asks_what_is_free_opens_no_gpu():
    words = (
        "import torch, shoal; (device,) = shoal.Hardware.parse('cuda:0').devices; "
        "print(device.memory, torch.cuda.is_initialized())"
    )
    done = subprocess.run(
        [sys.executable, "-c", words], capture_output=True, text=True, check=True
    )
    memory, is_open = done.stdout.split()
    assert 0 < int(memory) < torch.cuda.get_device_properties(0).total_memory
    assert is_open == "False"


def test_scratch_memory_of_a_kernel_is_in_the_peak_that_is_counted():
    keys = torch.randint(2**30, (2**20,), device="cuda")
    torch.sort(keys)  # whatever is made once
    with AllocationTracker() as tracker:
        values, order = torch.sort(keys)

    assert tracker.scratch_bytes > 0
    assert tracker.peak_bytes == values.nbytes + order.nbytes + tracker.scratch_bytes
    assert allocator_here().peak_bytes >= keys.nbytes + tracker.peak_bytes
    with AllocationTracker() as tracker:
        keys + 1

    assert (tracker.scratch_bytes, tracker.peak_bytes) == (0, keys.nbytes)


def test_libraries_keep_their_workspaces_for_good():
    device = torch.device("cuda:0")
    found = held_by_libraries(device, lambda: torch.cuda.memory_allocated(device))

    assert found > 0
    assert found == held_by_libraries(device, lambda: torch.cuda.memory_allocated(device))


def test_studies_of_one_process_find_a_gpu_as_the_first_did():
    """Each has a stream of its own, and libraries keep a workspace of each."""
    spec, found = DeviceSpec(name="cuda:0", kind="cuda", memory=Bytes(64 * MIB)), []
    for _ in range(3):
        device = open_device(spec)
        with device.active():
            found.append(held_by_libraries(device.torch_device, torch.cuda.memory_allocated))
        device.close()

    assert found[2] == found[1] <= found[0]


KEEPS_AN_ERROR = """
import torch

try:
    import no_such_module
except ImportError as error:
    missing = error


def model(hp):
    return torch.nn.Linear(4, hp["width"])


def data(hp):
    return [(torch.ones(2, 4),)] * 2, None


def loss(output, batch):
    return output.square().mean()
"""


def test_of_a_study_that_was_only_planned_nothing_is_left_for_the_next_one(tmp_path, monkeypatch):
    (tmp_path / "keepsanerror.py").write_text(KEEPS_AN_ERROR)
    monkeypatch.syspath_prepend(tmp_path)
    import keepsanerror as mine

    recipe = shoal.Recipe(model=mine.model, data=mine.data, loss=mine.loss)
    found = []
    with WorkerPool() as pool:
        for width in (MIB, MIB, 8):
            space = shoal.grid(width=[width], lr=[1e-3])
            study = shoal.Study("it", recipe, space=space, steps=2, directory=tmp_path)
            hardware = shoal.Hardware.parse("cuda:0", "1GiB", threads=1)
            plan = study.plan(hardware=hardware, workers=pool)
            found.append(plan.devices[0].library_bytes)
    assert max(found) < found[0] + MIB


@pytest.mark.skipif("SHOAL_CUDA_STANDIN" in os.environ, reason="copies do not overlap there")
def test_activations_pass_weights_that_are_on_their_way_up():
    device = open_device(DeviceSpec(name="cuda:0", kind="cuda", memory=Bytes(2**31)))
    lane = device.lane()
    weights, back = (torch.ones(n, dtype=torch.uint8).pin_memory() for n in (2**30, 2**20))
    there = [device.empty(tensor.nbytes) for tensor in (weights, back)]
    device.synchronize()

    cycles, is_early = 10**8, False
    while not is_early:  # both are on their streams before either begins
        gate = device.compute(lambda some=cycles: torch.cuda._sleep(some))
        up = lane.up.submit(lambda: device.copy(there[0], weights, "up"), [gate])
        passing = lane.activations.submit(
            lambda: device.copy(there[1], back, "up", passes=True), [gate]
        )
        cycles, is_early = 4 * cycles, not gate.done
    up.wait()
    passing.wait()
    assert passing.span()[1] < up.span()[1]
    assert torch.equal(there[0].cpu(), weights)
    assert torch.equal(there[1].cpu(), back)
    lane.close()


def test_what_is_elsewhere_takes_a_number_of_the_gpu_and_not_one_for_each_parameter():
    model = torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(40)])
    names, before = [name for name, _ in model.named_parameters()], torch.cuda.memory_allocated()
    optimizer = torch.optim.SGD(model.parameters())
    binding = Binding(model, optimizer, [names], torch.device("cuda:0"))
    assert len(binding.poison) == 80
    assert torch.cuda.memory_allocated() - before <= 512
