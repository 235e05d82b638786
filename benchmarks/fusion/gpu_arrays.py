"""Arrays on a GPU, in each of their ways, beside what else a user would run there.

python benchmarks/fusion/gpu_arrays.py [--widths 1,4,16,64] [--only NAME ...] [--device cpu]
    [--kinds eager,traced,branches] [--rounds 3] [--limit SECONDS] [--json FILE]

Full steps in wall time, arms in turns: one model after another, eagerly and with each pass
captured as a CUDA graph; arrays whose passes are eager, a graph of their operations, or every
slot's own captured pass side by side (branches); and processes that share the device. It runs on a
CPU too, where nothing is a CUDA graph: so the script is known to work before a GPU is there.
Widths of 16 and 64 come first; what the limit leaves no time for is not there.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from rivals import Cost, Processes, Step, batches, cost, models, rate
from run import array_step, recipe_of
from workloads import WORKLOADS, Workload

import common
from shoal.core.spec import PassKind
from shoal.fusion import Declined
from shoal.runtime.capture.captured import PROOFS
from shoal.runtime.capture.captures import Captures
from shoal.runtime.units import Micro, ResidentUnits

KINDS: tuple[PassKind, ...] = ("eager", "traced", "branches")
CHOSEN = (
    *("tabular MLP", "PointNet", "DCGAN generator", "DCGAN discriminator"),
    *("Transformer LM of width 128", "BERT-mini", "ResNet-18", "MobileNetV3-large"),
)
PROCESSES = 4
SECONDS, WARM_UPS = 0.2, 6
BEST = ("serial", "serial, captured", f"{PROCESSES} processes")


def serial(workload: Workload, width: int, device: str, *, captured: bool) -> Step:
    """A step of each model in turn, every loss read."""
    where, recipe = torch.device(device), recipe_of(workload)
    made, data = models(workload, range(width), device), batches(workload, range(width), device)
    captures = Captures(recipe, where)
    units = [
        captures.units(model) if captured else ResidentUnits(model, recipe, where)
        for model in made
    ]
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=rate(slot), fused=True)
        for slot, model in enumerate(made)
    ]

    def step() -> None:
        for one, optimizer, batch in zip(units, optimizers, data, strict=True):
            optimizer.zero_grad(set_to_none=True)
            loss = one.backward(0, Micro(batch))
            assert loss is not None
            optimizer.step()
            loss.item()

    for _ in range(PROOFS + 1 if captured else 1):
        step()
    if captured and any(words := [one.why_not for one in units]):  # type: ignore[union-attr]
        raise Declined(next(filter(None, words)))
    return step


def measure(
    name: str,
    width: int,
    rounds: int,
    device: str,
    processes: Processes,
    kinds: Sequence[PassKind],
) -> dict[str, Any]:
    """Milliseconds of a step of all models by arm, and how much quicker arrays are."""
    workload, declined = WORKLOADS[name], {}
    gc.collect()
    gc.freeze()  # as shoal's workers do: before a capture garbage is collected
    arms: dict[str, Callable[[int], Cost]] = {}
    builders: dict[str, Callable[[], Step]] = {
        "serial": lambda: serial(workload, width, device, captured=False),
        "serial, captured": lambda: serial(workload, width, device, captured=True),
        **{
            f"array, {kind}": (lambda kind=kind: array_step(workload, width, kind, device))
            for kind in kinds
        },
    }
    for arm, build in builders.items():
        try:
            step = build()
            for _ in range(WARM_UPS):
                step()
        except (Declined, RuntimeError) as error:  # no room is an answer too
            declined[arm] = str(error).splitlines()[0]
        else:
            arms[arm] = lambda repeats, step=step: cost(step, repeats)  # type: ignore[misc]
    if width >= PROCESSES:
        processes.take(name, width)
        arms[BEST[-1]] = processes.cost
    repeats = {arm: max(1, int(SECONDS / run(2).wall_s)) for arm, run in arms.items()}
    found: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(rounds):
        for arm, run in arms.items():
            found[arm].append(run(repeats[arm]).wall_s * 1e3)
    if width >= PROCESSES:
        processes.take("", 0)
    rivals = [[found[arm][at] for arm in BEST if arm in found] for at in range(rounds)]
    return {
        "ms": {arm: common.spread(values) for arm, values in found.items()},
        "times_serial": {
            arm: common.spread([s / v for s, v in zip(found["serial"], values, strict=True)])
            for arm, values in found.items()
        },
        "times_best": {
            arm: common.spread([min(r) / v for r, v in zip(rivals, values, strict=True)])
            for arm, values in found.items()
            if arm.startswith("array")
        },
        "declined": declined,
    }


def fused(
    widths: list[int],
    rounds: int,
    device: str,
    only: Sequence[str] = ("",),
    limit_s: float = 1e9,
    keep: Callable[[dict[str, Any]], Any] = lambda found: None,
    kinds: Sequence[PassKind] = KINDS,
) -> dict[str, Any]:
    """All chosen workloads; ``keep`` is given what there is so far."""
    names = [name for name in CHOSEN if any(part in name for part in only)]
    began = time.monotonic()
    result: dict[str, Any] = {name: {} for name in names}
    processes = Processes(PROCESSES if max(widths) >= PROCESSES else 0, device)
    for width in sorted(widths, key=lambda width: (width not in (16, 64), width)):
        for name in names:
            if time.monotonic() - began > limit_s:
                continue
            found = measure(name, width, rounds, device, processes, kinds)
            result[name][str(width)] = found
            gc.collect()
            if device.startswith("cuda"):
                torch.cuda.empty_cache()
            told = {arm: round(times["median"], 2) for arm, times in found["times_best"].items()}
            at = f"{time.monotonic() - began:.0f} s"
            words = f"{at}: {name}, {width} models: {told} {found['declined']}"
            print(words, file=sys.stderr, flush=True)
            keep(result)
    processes.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", default="1,4,16,64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[""])
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--limit", type=float, default=1e9)
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("no GPU here: nothing to measure (--device cpu tries the script).")
        return
    torch.set_num_threads(1)
    widths = [int(width) for width in options.widths.split(",")]

    def keep(found: dict[str, Any]) -> str:
        return common.keep({"device": options.device, "workloads": found}, options.json)

    kinds = options.kinds.split(",")
    args = widths, options.rounds, options.device, options.only, options.limit, keep, kinds
    print(keep(fused(*args)))


if __name__ == "__main__":
    main()
