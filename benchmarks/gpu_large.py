"""Models larger than a cap on a GPU's memory: tokens a second beside what is not spilled.

    python benchmarks/gpu_large.py --stages probe,four,recompute --tokens 16384
    python benchmarks/gpu_large.py [--json FILE]      # all of it, for 16384 and 65536 tokens
    python benchmarks/gpu_large.py --depth 8 --cap 2GiB  # a smaller model, as a rehearsal
    python benchmarks/gpu_large.py --tiny             # the script itself, on a CPU
    python benchmarks/gpu_large.py --stages four --trace FILE  # and what ran when, of a few steps

Four trials of a GPT of 1.5 B parameters in bf16 with AdamW and clipping, whose device may use
8 GiB; the same training of one model with all of the GPU, as fast as it goes and with each block
recomputed; the same through FSDP2 with CPU offload, which keeps what it computes with on the
device; through DeepSpeed and RoundPipe where they are installed (gpu_rivals.py); and the largest
single model that trains under the cap, by bisection of its depth.
What is computed and copied at the same time is taken from the timeline's events. The roofline is
the largest of the seconds that kernels take unspilled and recomputing, and that the links take
at the speed that was probed for the bytes that moved. Stages (probe, four, fastest, recompute,
fsdp2, deepspeed, roundpipe, roundpipe-stale, largest) are processes of their own, of 4 minutes at
most. All blocks of a model begin with the same weights: to draw 1.5 B takes half a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))
import common
import shoal
from shoal.core.event import ActionFinished, Event, PeakMeasured, StepFinished
from shoal.core.plan import Plan
from shoal.core.units import parse_bytes
from shoal.examples.gpt import GPT, next_byte_loss
from shoal.launch.policy import CheckpointPolicy

GIB = 2**30
STEPS, WARM_UP = 5, 2
LIMIT_S = 240
RIVALS = ("deepspeed", "roundpipe", "roundpipe-stale")
EACH = ("four", "fastest", "recompute", "fsdp2", *RIVALS)  # for each number of tokens
STAGES = ("probe", *EACH, "largest")
AIMS = {"fastest": 0.75, "recompute": 0.92, "fsdp2": 1.7, "deepspeed": 2.0, "roundpipe": None}
"""Tokens a second of the four trials, over these."""
CONTEXT = 1024


@dataclass(frozen=True)
class Size:
    """The model, the cap, and what is in a micro-batch."""

    width: int = 1600
    depth: int = 48
    heads: int = 25
    context: int = CONTEXT
    rows: int = 8
    cap: int = 8 * GIB
    trials: int = 4
    device: str = "cuda:0"
    host_memory: str | None = "116GiB"  # of 128; a machine whose memory grows says less is free


TINY = Size(
    width=64,
    depth=3,
    heads=4,
    context=32,
    rows=2,
    cap=3 * 2**19,
    trials=2,
    device="cpu:1",
    host_memory=None,
)


class Task:
    """The recipe's parts, importable by workers."""

    def __init__(self, size: Size, tokens: int) -> None:
        self.size, self.tokens = size, tokens
        self.accumulate = max(1, tokens // (size.rows * size.context))

    def model(self, hp: Any) -> nn.Module:
        size = self.size
        depth = hp.get("depth", size.depth) if hp else size.depth
        model = GPT(width=size.width, depth=1, heads=size.heads, context=size.context, dropout=0.0)
        model.blocks.extend(copy.deepcopy(model.blocks[0]) for _ in range(depth - 1))
        return model

    def data(self, hp: Any) -> tuple[list[tuple[Tensor, Tensor]], None]:
        draws = torch.Generator().manual_seed(0)
        shape = self.size.rows, self.size.context + 1
        rows = [torch.randint(256, shape, generator=draws) for _ in range(self.accumulate)]
        return [(r[:, :-1].contiguous(), r[:, 1:].contiguous()) for r in rows], None

    def recipe(self) -> shoal.Recipe:
        return shoal.Recipe(
            model=self.model,
            data=self.data,
            loss=next_byte_loss,
            precision="bf16",
            accumulate=self.accumulate,
            clip_grad_norm=1.0,
        )

    def hardware(self) -> shoal.Hardware:
        size = self.size
        return shoal.Hardware.parse(size.device, str(size.cap), host_memory=size.host_memory)

    def parameters(self, depth: int | None = None) -> int:
        with torch.device("meta"):
            model = self.model({"depth": depth or self.size.depth})
        return sum(parameter.numel() for parameter in model.parameters())


class Watch:
    """Ends of steps, the peak, and what was computed and copied when.

    They are counted once all trials that the plan lets be active have taken ``WARM_UP`` steps.
    ``enough`` is called after ``STEPS`` more for each of ``trials``, whichever took them.
    """

    def __init__(self, trials: int, enough: Callable[[Watch], None], plan: Path) -> None:
        self._trials, self._enough, self._path = trials, enough, plan
        self._began, self._plan = time.monotonic(), None
        self._warm: set[int] = set()
        self.since = float("inf")
        self.steps: list[float] = []
        self.losses: dict[int, float] = {}
        self.peak = 0
        self.actions: list[ActionFinished] = []
        self.spans: dict[str, list[tuple[float, float]]] = {}
        self.moved: dict[str, int] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepFinished):
            self._stepped(event)
        if isinstance(event, PeakMeasured):
            self.peak = max(self.peak, event.peak_bytes)
        if isinstance(event, ActionFinished) and event.start >= self.since:
            self.actions.append(event)
            self.spans.setdefault(event.stream, []).append((event.start, event.end))
            self.moved[event.stream] = self.moved.get(event.stream, 0) + (event.bytes or 0)

    def _stepped(self, event: StepFinished) -> None:
        if self._plan is None:
            self._plan = Plan.from_json(self._path.read_text())
            print(self._plan.explain(), file=sys.stderr, flush=True)
        at = f"{time.monotonic() - self._began:.1f} s"
        print(f"{at}: trial {event.trial}, {event.step}", event.loss, file=sys.stderr, flush=True)
        self.losses[event.trial] = event.loss
        if event.step >= WARM_UP:
            self._warm.add(event.trial)
        if event.time >= self.since:
            self.steps.append(event.time)
        elif len(self._warm) >= min(self._trials, self._plan.active):
            self.since = event.time
            self.steps.append(event.time)
        if len(self.steps) > self._trials * STEPS:
            self._enough(self)


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Their union, in order."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in merged(spans))


def hidden(copies: Sequence[tuple[float, float]], kernels: Sequence[tuple[float, float]]) -> float:
    """The part of copies' time in which something was computed."""
    together = length(copies) + length(kernels) - length([*copies, *kernels])
    return together / length(copies) if copies else 1.0


class _Unsaved(CheckpointPolicy):
    """Nothing is saved, so it does not matter how much the disk has room for."""

    def check(self, plan: Plan, free: Any, **of_others: Any) -> None:
        return None


def train(
    task: Task, space: Any, trials: int, told: Callable[[Watch], dict[str, Any]]
) -> NoReturn:
    """Train until enough was seen, say what was ``told`` of it, and leave.

    Nothing is saved: the states of four trials are 70 GB, and would be on disk for nothing.
    """
    with tempfile.TemporaryDirectory() as directory:

        def leave(watch: Watch) -> None:
            print(json.dumps(told(watch)), flush=True)
            shutil.rmtree(directory, ignore_errors=True)
            os._exit(0)

        study = shoal.Study(
            "large",
            task.recipe(),
            space=space,
            steps=1000,
            metric="train_loss",
            directory=directory,
            checkpoint_every="10h",
        )
        study.policy = _Unsaved(**asdict(study.policy))
        watch = Watch(trials, leave, Path(directory) / "large" / "plan.json")
        report = study.run(hardware=task.hardware(), callbacks=[watch], progress=False)
        errors = [trial.error for trial in report.trials if trial.error]
        raise RuntimeError([*errors, "ended before enough was seen"][0].strip().splitlines()[-1])


def four(size: Size, tokens: int, trace: str | None = None) -> dict[str, Any]:
    """All trials at a time under the cap; ends the process. ``trace``: a file of what ran."""
    task, began = Task(size, tokens), time.monotonic()
    rates = [1e-4 / (number + 1) for number in range(size.trials)]

    def told(watch: Watch) -> dict[str, Any]:
        wall_s = max(watch.steps) - min(watch.steps)
        kernels = watch.spans.get("compute", [])
        busy_s = max(end for _, end in kernels) - min(begin for begin, _ in kernels)
        counted = len(watch.steps) - 1
        if trace:
            rows = [(e.stream, e.trial, e.step, e.action, e.start, e.end) for e in watch.actions]
            Path(trace).write_text(json.dumps(rows))
        return {
            "parameters": task.parameters(),
            "tokens_a_second": counted * task.accumulate * size.rows * size.context / wall_s,
            "step_s": wall_s / counted,
            "peak_gib": watch.peak / GIB,
            "device_busy": length(kernels) / busy_s,
            "copies_hidden": {
                stream: hidden(spans, kernels)
                for stream, spans in watch.spans.items()
                if stream != "compute"
            },
            "gib_a_step": {
                stream: moved / GIB / counted for stream, moved in watch.moved.items() if moved
            },
            "losses": watch.losses,
            "whole_s": time.monotonic() - began,
        }

    train(task, shoal.grid(lr=rates), size.trials, told)


class _Again(nn.Module):
    """A block whose activations are recomputed in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def unspilled(size: Size, tokens: int, *, again: bool) -> dict[str, Any]:
    """One model with all of the device, in a plain loop; with ``again`` blocks recompute."""
    task, where = Task(size, tokens), torch.device(size.device.partition(":")[0])
    torch.manual_seed(0)
    model = task.model(None).to(where)
    if again:
        model.blocks = nn.ModuleList(map(_Again, model.blocks))  # type: ignore[arg-type]
    return _steps(task, model, where)


def fsdp2(size: Size, tokens: int) -> dict[str, Any]:
    """One model in blocks that FSDP2 keeps on the host, on one rank; blocks recompute."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    task, where = Task(size, tokens), torch.device(size.device.partition(":")[0])
    on_gpu = where.type == "cuda"
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh, policy = init_device_mesh(where.type, (1,)), CPUOffloadPolicy(pin_memory=on_gpu)
    torch.manual_seed(0)
    model = task.model(None)
    model.blocks = nn.ModuleList(map(_Again, model.blocks))  # type: ignore[arg-type]
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    return _steps(task, model, where)


def _steps(task: Task, model: nn.Module, where: torch.device) -> dict[str, Any]:
    """The plain loop's steps, timed."""
    size = task.size
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = [tuple(t.to(where) for t in batch) for batch in task.data(None)[0]]

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for batch in batches:
            with torch.autocast(where.type, torch.bfloat16):
                loss = next_byte_loss(model(batch[0]), batch)
            (loss / len(batches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    seconds = [timed(step) for _ in range(WARM_UP + STEPS)][WARM_UP:]
    step_s = statistics.median(seconds)
    peak = torch.cuda.max_memory_allocated() if where.type == "cuda" else 0
    return {
        "tokens_a_second": task.accumulate * size.rows * size.context / step_s,
        "step_s": step_s,
        "peak_gib": peak / GIB,
    }


def rival(name: str, size: Size, tokens: int) -> dict[str, Any]:
    """One model by another program, where that is installed."""
    import gpu_rivals

    task, where = Task(size, tokens), torch.device(size.device.partition(":")[0])
    torch.manual_seed(0)
    model, many = task.model(None), task.accumulate
    if name == "deepspeed":
        model.blocks = nn.ModuleList(map(_Again, model.blocks))  # type: ignore[arg-type]
        made = gpu_rivals.deepspeed(model, many, size.rows, where)
        batches = [tuple(t.to(where) for t in batch) for batch in task.data(None)[0]]
    else:
        made = gpu_rivals.roundpipe(model, many, stale=name.endswith("stale"))
        batches = task.data(None)[0]

    def steps(count: int) -> None:
        for _ in range(count):
            made.step(batches)
        made.finish()

    steps(WARM_UP)
    step_s = timed(lambda: steps(STEPS)) / STEPS
    peak = torch.cuda.max_memory_allocated() if where.type == "cuda" else 0
    return {
        "tokens_a_second": many * size.rows * size.context / step_s,
        "step_s": step_s,
        "peak_gib": peak / GIB,
    }


def timed(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def largest(size: Size, tokens: int) -> dict[str, Any]:
    """The deepest model that can be planned under the cap, by bisection; it trains a few steps."""
    task = Task(size, size.rows * size.context)

    def fits(depth: int) -> bool:
        with tempfile.TemporaryDirectory() as directory:
            study = shoal.Study(
                "fits",
                task.recipe(),
                space=shoal.grid(lr=[1e-4], depth=[depth]),
                steps=1,
                metric="train_loss",
                directory=directory,
            )
            try:
                study.plan(hardware=task.hardware())
            except shoal.ShoalError:
                return False
            return True

    begin = time.monotonic()
    least, most = size.depth, size.depth * 2
    while most <= size.depth * 4 and time.monotonic() - begin < LIMIT_S / 4 and fits(most):
        least, most = most, most * 2
    while most - least > max(1, least // 8) and time.monotonic() - begin < LIMIT_S / 3:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)

    def told(watch: Watch) -> dict[str, Any]:
        return {
            "depth": least,
            "too_deep": most,
            "parameters": task.parameters(least),
            "peak_gib": watch.peak / GIB,
            "steps": STEPS + WARM_UP,
        }

    train(task, shoal.grid(lr=[1e-4], depth=[least]), 1, told)


def probe(size: Size, tokens: int) -> dict[str, Any]:
    """What the links carry, as ``shoal bench`` and ``gpu.py --probe`` measure it."""
    if not size.device.startswith("cuda"):
        return {"links": "none: this is no GPU"}
    from gpu import links

    return {"links_gib_a_second": links()}


def run_stage(stage: str, size: Size, tokens: int, trace: str | None = None) -> dict[str, Any]:
    """In this process."""
    stages: dict[str, Callable[[], dict[str, Any]]] = {
        "probe": lambda: probe(size, tokens),
        "four": lambda: four(size, tokens, trace),
        "fastest": lambda: unspilled(size, tokens, again=False),
        "recompute": lambda: unspilled(size, tokens, again=True),
        "fsdp2": lambda: fsdp2(size, tokens),
        "largest": lambda: largest(size, tokens),
    }
    stages |= {name: lambda name=name: rival(name, size, tokens) for name in RIVALS}  # type: ignore[misc]
    try:
        return stages[stage]()
    except ImportError as error:
        return {"error": f"not installed: {error}"}
    except (RuntimeError, shoal.ShoalError) as error:  # no room is an answer
        return {"error": " ".join(str(error).split())[-600:]}


def apart(stage: str, tokens: int, size: Size, *given: str) -> dict[str, Any]:
    """A stage in a process of its own, for no longer than ``LIMIT_S``; what it starts ends too."""
    sizes = ["--tokens", str(tokens), "--depth", str(size.depth), "--cap", str(size.cap)]
    command = [sys.executable, __file__, "--stage", stage, *sizes, *given]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"not through in {LIMIT_S} s"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        took = time.monotonic() - began
    lines = out.strip().splitlines()
    if process.returncode or not lines:
        return {"error": f"ended with {process.returncode}; see what it said"}
    answer: dict[str, Any] = json.loads(lines[-1])
    return {**answer, "stage_s": took}


def told(found: dict[str, Any]) -> dict[str, Any]:
    """How the trials under the cap compare, where both are there."""
    ratios: dict[str, Any] = {}
    for key in [key for key in found if key.startswith("four")]:
        tokens = key.partition(" ")[2]
        mine = found[key].get("tokens_a_second")
        for other, aim in AIMS.items():
            theirs = found.get(f"{other} {tokens}", {}).get("tokens_a_second")
            if mine and theirs:
                ratios[f"four over {other}, {tokens}"] = {"times": mine / theirs, "aim": aim}
        least_s = roofline_s(found, tokens)
        if mine and least_s:
            ratios[f"roofline over four, {tokens}"] = least_s / found[key]["step_s"]
    return ratios


def roofline_s(found: dict[str, Any], tokens: str) -> float:
    """Seconds that a step takes at least: its kernels unspilled, or a link's bytes; 0 if unknown.

    The host's step is left out: it is what hides behind another trial.
    """
    links = found.get("probe", {}).get("links_gib_a_second", {})
    moved = found[f"four {tokens}"].get("gib_a_step", {})
    known = [
        moved[way] / links[way] for way in ("up", "down") if moved.get(way) and links.get(way)
    ]
    kernels_s = found.get(f"recompute {tokens}", {}).get("step_s", 0.0)
    return max([kernels_s, *known]) if kernels_s and known else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", choices=STAGES, help="in this very process")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--tokens", default="16384,65536")
    parser.add_argument("--depth", type=int)
    parser.add_argument("--cap")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--trace")
    parser.add_argument("--json")
    options = parser.parse_args()
    size = TINY if options.tiny else Size()
    size = replace(size, depth=options.depth or size.depth)
    size = replace(size, cap=parse_bytes(options.cap) if options.cap else size.cap)
    if not options.tiny and not torch.cuda.is_available():
        print("no GPU here: nothing to measure (--tiny tries the script on a CPU).")
        return
    if options.stage:
        print(json.dumps(run_stage(options.stage, size, int(options.tokens), options.trace)))
        return
    wanted, stages = options.stages.split(","), {}
    given = [*["--tiny"] * options.tiny, *(["--trace", options.trace] if options.trace else [])]
    if unknown := set(wanted) - set(STAGES):
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    each = [64, 256] if options.tiny else [int(tokens) for tokens in options.tokens.split(",")]
    for stage in filter(wanted.__contains__, STAGES):
        for tokens in each if stage in EACH else each[:1]:
            name = f"{stage} {tokens}" if stage in EACH else stage
            stages[name] = apart(stage, tokens, size, *given)
            print(name, stages[name], file=sys.stderr, flush=True)
            result = {"size": asdict(size), "stages": stages, "ratios": told(stages)}
            common.keep(result, options.json)
    common.finish(result, options.json)


if __name__ == "__main__":
    main()
