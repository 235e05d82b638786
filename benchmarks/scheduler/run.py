"""How near to the lower bound the lease machine ends studies, and what a decision costs.

    python benchmarks/scheduler/run.py [--seeds 20] [--json results.json]
    python benchmarks/scheduler/run.py --tune      the settings that were tried

See README.md beside this file for the claim and the numbers.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from simulate import SimTrial, Simulation, lower_bound

from shoal.core.seams import LeasePolicy
from shoal.scheduler.policy import Fifo, LongestRemainingFirst, Random

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import facts

DEVICES = 8
NOISE = 0.2  # of a step's seconds, and of the prediction of their mean
SWITCH = 0.5  # steps that a move costs
POLICIES: Mapping[str, Callable[[int], LeasePolicy]] = {
    "LRTF": lambda seed: LongestRemainingFirst(),
    "FIFO": lambda seed: Fifo(),
    "random": lambda seed: Random(random.Random(seed)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One configuration under one policy, over all seeds."""

    trials: int
    mixed: bool
    active: int
    policy: str
    ratios: tuple[float, ...]  # makespan over lower bound, one per seed
    moves: float  # median
    handle_us: float  # median over calls, then over seeds
    handle_p99_us: float
    choose_us: float

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)


def draw_trials(rng: random.Random, count: int, *, mixed: bool) -> list[SimTrial]:
    """Equal trials of 200 steps of 0.5 s; or 100 to 400 steps of 0.25 to 1 s."""
    trials = []
    for _ in range(count):
        step_s = 0.25 * 4 ** rng.random() if mixed else 0.5
        steps = rng.randint(100, 400) if mixed else 200
        trials.append(
            SimTrial(
                steps_s=[step_s * _noise(rng) for _ in range(steps)],
                predicted_s=step_s * _noise(rng),
                switch_s=SWITCH * step_s,
            )
        )
    return trials


def _noise(rng: random.Random) -> float:
    return max(0.2, rng.gauss(1.0, NOISE))


def measure(count: int, *, mixed: bool, active: int, policy: str, seeds: int) -> Row:
    """Simulate one configuration once per seed; every policy gets the same trials."""
    ratios, moves, handle, p99, choose = [], [], [], [], []
    for seed in range(seeds):
        trials = draw_trials(random.Random(seed), count, mixed=mixed)
        outcome = Simulation(trials, DEVICES, POLICIES[policy](seed), active=active).run()
        ratios.append(outcome.makespan_s / lower_bound(trials, DEVICES))
        moves.append(outcome.moves)
        handle.append(statistics.median(outcome.handle_s) * 1e6)
        p99.append(statistics.quantiles(outcome.handle_s, n=100)[-1] * 1e6)
        choose.append(statistics.median(outcome.choose_s) * 1e6)
    return Row(
        trials=count,
        mixed=mixed,
        active=active,
        policy=policy,
        ratios=tuple(round(ratio, 4) for ratio in ratios),
        moves=statistics.median(moves),
        handle_us=round(statistics.median(handle), 2),
        handle_p99_us=round(statistics.median(p99), 2),
        choose_us=round(statistics.median(choose), 2),
    )


def print_table(rows: Sequence[Row], active: int) -> None:
    print(f"\nactive {active}: makespan / lower bound, median (worst) over seeds")
    head = "".join(f"{name:>16}" for name in POLICIES)
    print(
        f"{'trials x devices':<24}{head}{'LRTF moves':>12}{'handle us (p99)':>18}{'choose us':>11}"
    )
    for count, mixed in sorted({(row.trials, row.mixed) for row in rows}):
        line = {
            row.policy: row
            for row in rows
            if (row.trials, row.mixed, row.active) == (count, mixed, active)
        }
        lrtf = line["LRTF"]
        cells = "".join(f"{f'{r.median:.3f} ({max(r.ratios):.3f})':>16}" for r in line.values())
        timing = f"{lrtf.handle_us:.1f} ({lrtf.handle_p99_us:.0f})"
        name = f"{count} x {DEVICES} {'mixed' if mixed else 'equal'}"
        print(f"{name:<24}{cells}{lrtf.moves:>12.0f}{timing:>18}{lrtf.choose_us:>11.2f}")


def print_tuning(seeds: int) -> None:
    """LRTF under other margins and lease lengths: median (worst) and moves."""
    configurations = [(count, mixed) for count in (12, 24, 64) for mixed in (False, True)]
    names = [f"{count} {'mixed' if mixed else 'equal'}" for count, mixed in configurations]
    print(f"{'margin':<8}{'lease s':<8}" + "".join(f"{name:>20}" for name in names))
    settings = [(margin, 2.0) for margin in (1.0, 2.0, 4.0, 8.0, float("inf"))]
    settings += [(4.0, lease_s) for lease_s in (0.5, 1.0, 4.0, 8.0)]
    for margin, lease_s in settings:
        cells = (_tuned(*which, margin, lease_s, seeds) for which in configurations)
        print(f"{margin:<8}{lease_s:<8}" + "".join(f"{cell:>20}" for cell in cells), flush=True)


def _tuned(count: int, mixed: bool, margin: float, lease_s: float, seeds: int) -> str:
    ratios, moves = [], []
    for seed in range(seeds):
        trials = draw_trials(random.Random(seed), count, mixed=mixed)
        policy = LongestRemainingFirst(margin=margin)
        outcome = Simulation(trials, DEVICES, policy, lease_s=lease_s).run()
        ratios.append(outcome.makespan_s / lower_bound(trials, DEVICES))
        moves.append(outcome.moves)
    return f"{statistics.median(ratios):.3f} ({max(ratios):.3f}) {statistics.median(moves):.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--tune", action="store_true", help="compare settings of LRTF instead")
    args = parser.parse_args()
    if args.tune:
        print_tuning(args.seeds)
        return
    rows = [
        measure(count, mixed=mixed, active=active, policy=policy, seeds=args.seeds)
        for active in (1, 2)
        for count in (12, 24, 64)
        for mixed in (False, True)
        for policy in POLICIES
    ]
    for active in (1, 2):
        print_table(rows, active)
    if args.json:
        results = {"seeds": args.seeds, "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps({**facts(), **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
