"""Many models larger than a device, against model parallelism: the workload of Hydra.

    python benchmarks/hydra/run.py [--repeats 3] [--json results.json]

Kernels and copies SLEEP (devices.py says what is real). See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devices import Kernels, compile_step, run_pipeline, run_study
from emulate import GPT2_XL, SHARDS, EmulatedTrial, Profile, job_costs, workload
from schedules import pipelined_step, visiting

from shoal.program.check import JobCosts, check
from shoal.program.ir import Program
from shoal.program.replay import Run, replay
from shoal.spill.generate import spilled_step

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import facts, spread

DEVICES = 8
SCALE = 1 / 40  # one second of the profile sleeps 25 ms; no sleep is then below a millisecond
SAMPLES = 384  # of each trial in the arms of eight devices
SERIAL_SAMPLES = 96  # in the arms where the trials run one after another, or on one device
REAL_STEPS = 12
LEASE_S = 0.3  # real seconds
SLOW_LINK = Profile(link_bytes_per_s=2.7e9)  # uploads of batch 8 take as long as its kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to train the workload; ``run`` gives real seconds for all of its samples.

    ``paper`` gives what those seconds would be without a late thread or a slow decision:
    the replay of a pipeline, the lower bound of a study.
    """

    name: str
    samples: int
    run: Callable[[tuple[EmulatedTrial, ...]], float]
    paper: Callable[[tuple[EmulatedTrial, ...]], float]

    def seconds(self) -> float:
        """Per ``SAMPLES`` samples of each trial, so that arms can be compared."""
        seconds = self.run(workload(self.samples)) * SAMPLES / self.samples
        print(
            f"  {self.name}: {seconds:.2f} s, {seconds / self.paper_s():.3f} of paper", flush=True
        )
        return seconds

    def paper_s(self) -> float:
        return self.paper(workload(self.samples)) * SAMPLES / self.samples


def shoal_arm(
    name: str, *, devices: int, active: int, lookahead: int, profile: Profile | None = None
) -> Arm:
    profile = profile or Profile()
    kernels = {batch: spilled(batch, lookahead, profile) for batch in SHARDS}

    def run(trials: tuple[EmulatedTrial, ...]) -> float:
        result = run_study(trials, kernels, devices=devices, active=active, lease_s=LEASE_S)
        print(
            f"  {result.busy:.1%} compute, {result.leases} leases, {result.moves} moves;", end=""
        )
        return result.seconds

    def bound(trials: tuple[EmulatedTrial, ...]) -> float:
        """All kernels on all devices, or the longest trial: copies hidden, nobody idle."""
        work = [trial.steps * kernels[trial.batch].compute_s for trial in trials]
        return max(sum(work) / devices, max(work))

    samples = SAMPLES if devices > 1 else SERIAL_SAMPLES
    return Arm(name=name, samples=samples, run=run, paper=bound)


def spilled(batch: int, lookahead: int, profile: Profile) -> Kernels:
    """The generated step of a spilled trial, after the checker has proved that it fits."""
    costs = job_costs(batch, SHARDS[batch], profile=profile)
    program = spilled_step(SHARDS[batch], lookahead=lookahead)
    assert check(program, {0: costs}).peak_bytes <= profile.memory_bytes
    return compile_step(program, costs, SCALE)


def pipeline_arm(name: str, *, micro_batches: int) -> Arm:
    """One trial after another, each on all devices."""
    program = pipelined_step(DEVICES, micro_batches=micro_batches)
    costs = {b: job_costs(b, DEVICES, micro_batches=micro_batches) for b in SHARDS}
    for batch in SHARDS:
        peak = check(visiting(program), {0: costs[batch]}).peak_bytes
        assert peak <= Profile().memory_bytes

    def run(trials: tuple[EmulatedTrial, ...]) -> float:
        return sum(
            run_pipeline(program, costs[trial.batch], steps=trial.steps, scale=SCALE)
            for trial in trials
        )

    def replayed(trials: tuple[EmulatedTrial, ...]) -> float:
        return sum(_replayed_s(program, costs[trial.batch], trial.steps) for trial in trials)

    return Arm(name=name, samples=SERIAL_SAMPLES, run=run, paper=replayed)


def _replayed_s(program: Program, costs: JobCosts, steps: int) -> float:
    run = Run(program=program, costs={0: costs}, steps=steps, devices=tuple(range(DEVICES)))
    return replay([run], keep_spans=False).makespan_s * SCALE


def arms() -> tuple[Arm, ...]:
    return (
        pipeline_arm("naive model parallelism", micro_batches=1),
        pipeline_arm("GPipe, 4 micro-batches", micro_batches=4),
        shoal_arm("shoal, 1 device", devices=1, active=2, lookahead=1),
        shoal_arm("shoal, 8 devices", devices=DEVICES, active=2, lookahead=1),
        shoal_arm("lookahead 1, active 1", devices=DEVICES, active=1, lookahead=1),
        shoal_arm("lookahead 0, active 2", devices=DEVICES, active=2, lookahead=0),
        shoal_arm("lookahead 0, active 1", devices=DEVICES, active=1, lookahead=0),
        shoal_arm("slow link, on", devices=DEVICES, active=2, lookahead=1, profile=SLOW_LINK),
        shoal_arm("slow link, off", devices=DEVICES, active=1, lookahead=0, profile=SLOW_LINK),
    )


RATIOS = {  # name -> (slower arm, faster arm, target)
    "shoal over naive": ("naive model parallelism", "shoal, 8 devices", 7.0),
    "shoal over GPipe": ("GPipe, 4 micro-batches", "shoal, 8 devices", 1.8),
    "8 devices over 1": ("shoal, 1 device", "shoal, 8 devices", 0.95 * DEVICES),
    "double buffering": ("lookahead 0, active 1", "shoal, 8 devices", None),
    "  lookahead alone": ("lookahead 0, active 1", "lookahead 1, active 1", None),
    "  a second trial alone": ("lookahead 0, active 1", "lookahead 0, active 2", None),
    "double buffering, slow link": ("slow link, off", "slow link, on", None),
}


def emulated(repeats: int) -> dict[str, Any]:
    """Every arm ``repeats`` times, in turn; ratios are taken within a round."""
    print(f"{GPT2_XL.parameters / 1e9:.2f} B parameters; kernels and copies sleep, x {SCALE}")
    rounds = [{arm.name: arm.seconds() for arm in arms()} for _ in range(repeats)]
    times = {
        arm.name: {**spread([each[arm.name] for each in rounds]), "paper": arm.paper_s()}
        for arm in arms()
    }
    ratios = {
        name: {**spread([each[slow] / each[fast] for each in rounds]), "target": target}
        for name, (slow, fast, target) in RATIOS.items()
    }
    return {"seconds": times, "ratios": ratios, "scale": SCALE, "samples": SAMPLES}


def real_compute(repeats: int) -> dict[str, Any]:
    """Two devices against one with kernels that compute: eight spilled GPTs of the demo.

    Wall seconds of the training alone, from the first step to the last, of both arms in
    turn. Nothing sleeps here: two idle cores are needed, and the load is in the facts.
    """
    import tempfile

    import shoal
    from shoal.core.event import Event, StepFinished
    from shoal.demo import make_study
    from shoal.runtime.pool import WorkerPool

    def seconds(devices: int, pool: WorkerPool) -> float:
        times: list[float] = []

        def watch(event: Event) -> None:
            if isinstance(event, StepFinished):
                times.append(event.time)

        with tempfile.TemporaryDirectory() as directory:
            study = make_study(steps=REAL_STEPS, directory=directory)
            hardware = shoal.Hardware.virtual(devices=devices, memory="12MiB")
            study.run(hardware=hardware, callbacks=[watch], progress=False, workers=pool)
        assert len(times) == REAL_STEPS * len(study.trials)
        return max(times) - min(times)

    ones, twos = [], []
    with WorkerPool() as pool:
        for _ in range(repeats):
            ones.append(seconds(1, pool))
            twos.append(seconds(2, pool))
    ratios = [one / two for one, two in zip(ones, twos, strict=True)]
    return {
        "one_device_s": spread(ones),
        "two_devices_s": spread(twos),
        "ratio": spread(ratios),
        "steps": REAL_STEPS,
    }


def print_tables(results: Mapping[str, Any]) -> None:
    print(f"\n{'arm':<34}{'seconds':>9}{'spread':>18}{'on paper':>10}")
    for name, times in results["seconds"].items():
        low, high = times["min"], times["max"]
        measured = f"{times['median']:>9.2f}{f'{low:.2f} to {high:.2f}':>18}"
        print(f"{name:<34}{measured}{times['paper']:>10.2f}")
    print(f"\n{'ratio':<34}{'measured':>9}{'spread':>18}{'target':>9}")
    for name, ratio in results["ratios"].items():
        low, high, target = ratio["min"], ratio["max"], ratio["target"]
        aim = f"{target:.1f}" if target else ""
        print(f"{name:<34}{ratio['median']:>9.2f}{f'{low:.2f} to {high:.2f}':>18}{aim:>9}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--real", action="store_true", help="only the part that computes")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args()
    results = None if args.real else emulated(args.repeats)
    if results:
        print_tables(results)
    real = real_compute(args.repeats)
    ratio = real["ratio"]
    print(
        f"\nreal compute, 2 devices over 1: {ratio['median']:.2f} "
        f"({ratio['min']:.2f} to {ratio['max']:.2f})"
    )
    if args.json:
        record = {**facts(), "emulated": results, "real": real}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
