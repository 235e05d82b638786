"""What a GPU does, in one call: a probe of the machine, exactness, spilling.

    python benchmarks/gpu.py --probe        # links, host memory, Adam, pinning, repeatability
    python benchmarks/gpu.py --exactness    # the zoo, bitwise against the plain loop
    python benchmarks/gpu.py --spill        # a GPT larger than its budget, beside plain PyTorch
    python benchmarks/gpu.py --captured     # steps as CUDA graphs: bits, and seconds of passes
    python benchmarks/gpu.py --arrays       # many models as one array, in each of its ways
    python benchmarks/gpu.py                # all of it; --json FILE keeps the results

Without a GPU it says so and exits 0.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "equivalence")]
import common

GIB = 2**30


def seconds(work: Callable[[], Any], rounds: int = 5) -> float:
    """Median seconds of some work on the GPU, warmed up once, synchronised."""
    work()
    torch.cuda.synchronize()
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


# ---------------------------------------------------------------- the probe


def links() -> dict[str, float]:
    """GiB/s from host to device, back, and both at once, of 1 GiB of pinned memory."""
    host = [torch.empty(GIB, dtype=torch.uint8).pin_memory() for _ in range(2)]
    device = [torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def up() -> None:
        with torch.cuda.stream(streams[0]):
            device[0].copy_(host[0], non_blocking=True)

    def down() -> None:
        with torch.cuda.stream(streams[1]):
            host[1].copy_(device[1], non_blocking=True)

    def both() -> None:
        up()
        down()

    return {
        "up": 1 / seconds(up),
        "down": 1 / seconds(down),
        "both_each_way": 1 / seconds(both),
    }


def host_memory() -> dict[str, float]:
    """GiB/s that all cores read and write together: a copy, and a triad."""
    a, b, c = (torch.ones(GIB // 4) for _ in range(3))
    copy = seconds(lambda: a.copy_(b))
    triad = seconds(lambda: torch.add(b, c, alpha=2.0, out=a))
    return {"threads": torch.get_num_threads(), "copy": 2 / copy, "triad": 3 / triad}


def host_adam() -> dict[str, float]:
    """Nanoseconds a parameter of fused AdamW on the host: one flat tensor, and many."""
    found = {}
    for name, count in (("flat", 1), ("1024 tensors", 1024)):
        size = 2**26 // count
        params = [nn.Parameter(torch.zeros(size)) for _ in range(count)]
        for parameter in params:
            parameter.grad = torch.ones(size)
        optimizer = torch.optim.AdamW(params, fused=True)
        found[name] = seconds(optimizer.step) / 2**26 * 1e9
    return found


PINNED = """
import mmap, sys, time, torch
fd, size = int(sys.argv[1]), int(sys.argv[2])
flat = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
code = int(torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), size, 1))
device = torch.empty(size, dtype=torch.uint8, device="cuda")
device.copy_(flat, non_blocking=True); torch.cuda.synchronize()
begin = time.perf_counter()
device.copy_(flat, non_blocking=True); torch.cuda.synchronize()
print(code, flat.is_pinned(), size / 2**30 / (time.perf_counter() - begin))
"""


def shared_pinned() -> list[dict[str, Any]]:
    """One memory file registered as pinned by two processes, one after the other alive."""
    descriptor = os.memfd_create("shoal-probe")
    os.posix_fallocate(descriptor, 0, GIB)
    mapped = mmap.mmap(descriptor, GIB)
    flat = torch.frombuffer(mapped, dtype=torch.uint8)
    begin = time.perf_counter()
    code = int(torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), GIB, 1))
    rows: list[dict[str, Any]] = [
        {"process": "first", "code": code, "register_s": time.perf_counter() - begin}
    ]
    out = subprocess.run(
        [sys.executable, "-c", PINNED, str(descriptor), str(GIB)],
        pass_fds=[descriptor],
        capture_output=True,
        text=True,
        check=False,
    )
    words = out.stdout.split()
    if len(words) == 3:
        rows.append({"process": "second", "code": words[0], "pinned": words[1], "up": words[2]})
    else:
        rows.append({"process": "second", "error": out.stderr[-500:]})
    torch.cuda.cudart().cudaHostUnregister(flat.data_ptr())
    return rows


def _attention(x: Tensor) -> Tensor:
    heads = x.view(x.shape[0], x.shape[1], 8, -1).transpose(1, 2)
    return nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


def kernel_families() -> dict[str, Callable[[], list[Tensor]]]:
    """Small trainings, each of one family of kernels; gradients of one step."""

    def family(module: nn.Module, x: Tensor, post: Callable[[Tensor], Tensor]) -> list[Tensor]:
        module = module.cuda()
        post(module(x)).float().square().mean().backward()
        return [p.grad for p in module.parameters() if p.grad is not None]

    def make(build: Callable[[], nn.Module], data: Callable[[], Tensor], post: Any = None) -> Any:
        def run() -> list[Tensor]:
            torch.manual_seed(0)
            return family(build(), data().cuda(), post or (lambda y: y))

        return run

    return {
        "linear": make(lambda: nn.Linear(1024, 1024), lambda: torch.randn(512, 1024)),
        "layer norm": make(lambda: nn.LayerNorm(1024), lambda: torch.randn(4096, 1024)),
        "convolution": make(lambda: nn.Conv2d(32, 64, 3), lambda: torch.randn(32, 32, 64, 64)),
        "batch norm": make(lambda: nn.BatchNorm2d(64), lambda: torch.randn(32, 64, 32, 32)),
        "embedding": make(lambda: nn.Embedding(1000, 256), lambda: torch.randint(1000, (64, 512))),
        "attention fp32": make(
            lambda: nn.Linear(512, 512), lambda: torch.randn(4, 512, 512), _attention
        ),
        "attention bf16": make(
            lambda: nn.Linear(512, 512).bfloat16(),
            lambda: torch.randn(4, 512, 512).bfloat16(),
            _attention,
        ),
        "dropout": make(
            lambda: nn.Sequential(nn.Linear(512, 512), nn.Dropout(0.1)),
            lambda: torch.randn(512, 512),
        ),
    }


def repeatability() -> dict[str, str]:
    """Two lone runs per kernel family: bitwise, or by how much they differ."""
    found = {}
    for name, run in kernel_families().items():
        first, second = run(), run()
        if all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
            found[name] = "bitwise"
        else:
            gaps = [(a - b).abs().max().item() for a, b in zip(first, second, strict=True)]
            found[name] = f"differs by up to {max(gaps):.2e}"
    return found


def probe() -> dict[str, Any]:
    """Everything about the machine that the host store's design rests on."""
    return {
        "links_gib_s": links(),
        "host_memory_gib_s": host_memory(),
        "host_adam_ns_a_parameter": host_adam(),
        "memfd_pinned_by_two_processes": shared_pinned(),
        "two_lone_runs": repeatability(),
    }


# ---------------------------------------------------------------- exactness


PRECISIONS = ("fp32", "bf16", "bf16-sr")


def exactness(models: Sequence[str], limit_s: float) -> dict[str, str]:
    """The zoo of the equivalence tests on the GPU: shards, optimizer places, precisions."""

    import zoo

    import shoal
    from shoal.runtime.pool import WorkerPool
    from shoal.testing import compare, plain_loop

    found: dict[str, str] = {}
    zoo._transformers()  # whose import draws random numbers, which are no model's
    hardware, began = shoal.Hardware.parse("cuda:0", "8GiB"), time.monotonic()
    with WorkerPool() as pool, tempfile.TemporaryDirectory() as directory:
        for model in models:
            for place in ("device", "host"):
                for shards, precision in itertools.product((4, 1, 2), PRECISIONS):
                    if time.monotonic() - began > limit_s:
                        continue
                    recipe = zoo.recipe(clip=0.5, accumulate=1, precision=precision)
                    study = shoal.Study(
                        f"{model}-{place}-{shards}-{precision}".lower(),
                        recipe,
                        space=shoal.grid(model=[model], optimizer=["adamw"], lr=[1e-3, 3e-4]),
                        steps=4,
                        directory=directory,
                    )
                    technique: Any = shoal.Spilled(shards=shards, optimizer=place)
                    if shards == 1:
                        technique = "resident"
                    name = f"{model}, {precision}, {shards} shards, optimizer on the {place}"
                    try:
                        report = study.run(
                            hardware=hardware, technique=technique, progress=False, workers=pool
                        )
                        trial = report.trials[0]
                        if trial.error:
                            found[name] = trial.error.strip().splitlines()[-1]
                            continue
                        on = "device" if shards == 1 else place
                        plain = plain_loop(
                            recipe, trial.hp, trial.seed, steps=4, device="cuda", optimizer=on
                        )
                        same = compare(plain, trial.load_state())
                        found[name] = "bitwise" if same.equal else same.first_difference
                    except shoal.ShoalError as error:
                        found[name] = f"{type(error).__name__}: {error}"
    return found


# ---------------------------------------------------------------- spilling


def spill() -> dict[str, Any]:
    """A GPT of 0.3 B parameters in a budget of a quarter of its state, tokens a second."""
    import shoal
    from shoal.core.event import Event, PeakMeasured, StepFinished
    from shoal.examples.gpt import GPT, next_byte_loss
    from shoal.runtime.pool import WorkerPool

    width, depth, context, batch, steps = 1024, 24, 1024, 8, 12

    def model(hp: Any) -> nn.Module:
        return GPT(width=width, depth=depth, heads=16, context=context, dropout=0.0)

    def data(hp: Any) -> tuple[list[tuple[Tensor, Tensor]], None]:
        generator = torch.Generator().manual_seed(0)
        rows = [torch.randint(256, (batch, context + 1), generator=generator) for _ in range(4)]
        return [(r[:, :-1].contiguous(), r[:, 1:].contiguous()) for r in rows], None

    state = 16 * sum(p.numel() for p in model({}).parameters())
    recipe = shoal.Recipe(model=model, data=data, loss=next_byte_loss, precision="bf16")
    result: dict[str, Any] = {"state_gib": state / GIB, "tokens_a_step": batch * context}
    with WorkerPool() as pool, tempfile.TemporaryDirectory() as directory:
        for name, memory, technique, trials in (
            ("resident", 4 * state, "resident", 1),
            ("spilled, step on the device", state // 4, shoal.Spilled(optimizer="device"), 1),
            ("spilled, step on the host", state // 4, shoal.Spilled(optimizer="host"), 1),
            ("the same, narrow weights", state // 4, shoal.Spilled(transfer="bf16"), 1),
            ("two trials spilled", state // 2, shoal.Spilled(optimizer="host"), 2),
        ):
            times: list[float] = []
            peaks: list[int] = []

            def watch(event: Event, times: Any = times, peaks: Any = peaks) -> None:
                if isinstance(event, StepFinished) and event.step > 2:
                    times.append(event.time)
                if isinstance(event, PeakMeasured):
                    peaks.append(event.peak_bytes)

            study = shoal.Study(
                name.replace(" ", "-").replace(",", ""),
                recipe,
                space={"lr": shoal.choice(*(1e-4 / (i + 1) for i in range(trials)))},
                steps=steps,
                metric="train_loss",
                directory=directory,
            )
            report = study.run(
                hardware=shoal.Hardware.parse("cuda:0", f"{memory}"),
                technique=technique,
                callbacks=[watch],
                progress=False,
                workers=pool,
            )
            errors = [t.error for t in report.trials if t.error]
            if errors:
                result[name] = errors[0].strip().splitlines()[-1]
                continue
            span = max(times) - min(times)
            result[name] = {
                "tokens_a_second": (len(times) - 1) * batch * context / span,
                "peak_gib": max(peaks, default=0) / GIB,
                "budget_gib": memory / GIB,
            }
    return result


# ---------------------------------------------------------------- captured steps


def captured() -> dict[str, Any]:
    """Whole trials that are captured, bitwise; and passes: eager, captured."""
    return {"seconds": {k: _passes(k) for k in ("mlp", "gpt")}, "exactness": _captured_trials()}


def _captured_trials() -> dict[str, str]:
    import zoo

    import shoal
    from shoal.runtime.pool import WorkerPool
    from shoal.testing import compare, plain_loop

    found = {}
    zoo._transformers()  # as above
    hardware = shoal.Hardware.parse("cuda:0", "8GiB")
    with WorkerPool() as pool, tempfile.TemporaryDirectory() as directory:
        for model, precision in itertools.product(zoo.MODELS, ("fp32", "bf16")):
            for accumulate in (1, 2):
                name = f"{model}, {precision}, {accumulate} batches a step"
                recipe = zoo.recipe(clip=0.5, accumulate=accumulate, precision=precision)
                space = shoal.grid(model=[model], optimizer=["adamw"], lr=[1e-3])
                study = shoal.Study(
                    name.replace(", ", "-").replace(" ", "-"),
                    recipe,
                    space=space,
                    epochs=4,
                    directory=directory,
                )
                options: dict[str, Any] = {"progress": False, "workers": pool}
                try:
                    report = study.run(hardware=hardware, technique="captured", **options)
                except shoal.ShoalError as error:
                    found[name] = f"{type(error).__name__}: {error}"
                    continue
                trial = report.trials[0]
                if trial.error:
                    found[name] = trial.error.strip().splitlines()[-1]
                    continue
                plain = plain_loop(recipe, trial.hp, trial.seed, epochs=4, device="cuda")
                same = compare(plain, trial.load_state())
                found[name] = "bitwise" if same.equal else same.first_difference
    return found


def _passes(kind: str) -> dict[str, Any]:
    """Seconds of a forward and a backward of one trial, eager and captured."""
    import shoal
    from shoal.examples.gpt import GPT, next_byte_loss
    from shoal.runtime.capture.captures import Captures
    from shoal.runtime.units import Micro, ResidentUnits

    device = torch.device("cuda")

    def build(hp: Any = None) -> nn.Module:
        if kind == "gpt":
            return GPT(width=128, depth=4, heads=4, context=64, dropout=0.0)
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def class_loss(output: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(output, batch[1])

    if kind == "gpt":
        batch: Any = tuple(torch.randint(256, (8, 64), device=device) for _ in range(2))
    else:
        batch = torch.randn(32, 64, device=device), torch.randint(10, (32,), device=device)
    loss = next_byte_loss if kind == "gpt" else class_loss
    recipe = shoal.Recipe(model=build, data=lambda hp: ([batch], None), loss=loss)
    model = build().to(device)

    def run(units: Any) -> None:
        model.zero_grad(set_to_none=True)
        units.backward(0, Micro(batch))

    eager, captured = ResidentUnits(model, recipe, device), Captures(recipe, device).units(model)
    for _ in range(3):
        run(captured)
    if not captured.is_captured:
        return {"not captured": captured.why_not}
    return {
        "eager": seconds(lambda: run(eager), 50),
        "captured": seconds(lambda: run(captured), 50),
    }


# ---------------------------------------------------------------- arrays


def arrays() -> dict[str, Any]:
    """Many models as one array, in each of its ways (``fusion/gpu_arrays.py``)."""
    sys.path.insert(0, str(HERE / "fusion"))
    from gpu_arrays import fused

    return fused([1, 4, 16, 64], 3, "cuda:0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for part in ("probe", "exactness", "spill", "captured", "arrays"):
        parser.add_argument(f"--{part}", action="store_true")
    parser.add_argument("--models", default="gpt,bert,llama,resnet,mlp", help="of the exactness")
    parser.add_argument("--limit", type=float, default=180, help="its seconds")
    parser.add_argument("--json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"no GPU here (torch {torch.__version__}): nothing to measure.")
        return
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "probe": probe,
        "exactness": lambda: exactness(options.models.split(","), options.limit),
        "spill": spill,
        **{"captured": captured, "arrays": arrays},
    }
    chosen = [name for name in parts if getattr(options, name)] or list(parts)
    found: dict[str, Any] = {}
    for name in chosen:
        found[name] = parts[name]()
        common.keep(found, options.json)
    common.finish(found, options.json)


if __name__ == "__main__":
    main()
