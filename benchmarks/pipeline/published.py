"""What the authors of PipeDream-2BW published, beside shoal's schedules and on paper.

    python benchmarks/pipeline/published.py [--json FILE]

Eight stages whose kernels are slept, as in ``run.py``: naive keeps what its one micro-batch saved,
the others recompute. Then, *simulated*, the baselines of the "20 times": nothing of it was run.
"""

from __future__ import annotations

import argparse
import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from emulate import Kernels, run_ours
from run import Overheads, on_paper

import common
from shoal.core.technique import Schedule
from shoal.pipeline.processes import StageProcesses
from shoal.pipeline.schedule import Pipeline
from shoal.program.ir import Op

STAGES = 8
MICROS = (12, 24, 48)
STEPS = {"naive": 2, "flush": 4, "2bw": 4}
FORWARD_S = 0.02


# ---------------------------------------------------------------- eight stages


def kernels(schedule: str) -> Kernels:
    """A backward is two forwards long, and one more where it recomputes."""
    return Kernels(
        forward_s=FORWARD_S,
        inputs_s=FORWARD_S,
        weights_s=FORWARD_S,
        step_s=0.002,
        boundary=16384,
        recompute=schedule != "naive",
    )


def steady(crew: StageProcesses, schedule: Schedule, micros: int) -> float:
    """Seconds from one step of the first stage to the next, filling and draining left out."""
    groups = (micros,) * STEPS[schedule]
    what = Pipeline(schedule=schedule, stages=STAGES, groups=groups, recompute=schedule != "naive")
    run = functools.partial(run_ours, pipeline=what, kernels=kernels(schedule))
    ran = crew.run(run, STAGES)[0]
    actions = what.program().devices[0]
    ends = [one.end_s for one in ran if actions[one.place].op is Op.STEP]
    return float((ends[-1] - ends[0]) / (len(ends) - 1))


def eight(crew: StageProcesses) -> dict[str, dict[str, float]]:
    """Seconds a step by the number of micro-batches, and the two published ratios."""
    rows = {}
    for micros in MICROS:
        took = {schedule: steady(crew, schedule, micros) for schedule in ("naive", "flush", "2bw")}
        rows[f"m={micros}"] = {
            **took,
            "2bw over naive": took["naive"] / took["2bw"],
            "2bw over flush": took["flush"] / took["2bw"],
            "closed form over flush": (micros + STAGES - 1) / micros,
        }
    return rows


# ---------------------------------------------------------------- the "20 times", on paper


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Servers of eight V100: what their links and kernels do, in a second."""

    flops: float = 45e12  # of a GPU, mixed precision, in large products
    inside: float = 130e9  # bytes of an all-reduce's ring, within a server
    between: float = 25e9 / 8  # bytes that leave a server, all its GPUs together
    server: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A GPT; a sample is ``tokens`` tokens, boundaries and gradients are in two bytes."""

    blocks: int
    width: int
    tokens: int = 512

    @property
    def parameters(self) -> float:
        return 12.0 * self.blocks * self.width**2

    @property
    def forward(self) -> float:
        """FLOP of a sample's forward."""
        return 2 * self.parameters * self.tokens

    @property
    def boundary(self) -> float:
        """Bytes of a sample between two blocks."""
        return 2.0 * self.tokens * self.width


def tensor_parallel(model: Model, on: Cluster, ways: int, replicas: int, batch: int) -> float:
    """Seconds a step where ``ways`` GPUs share each product, and recompute.

    Two all-reduces a block in each of forward, recompute and backward, which nothing hides.
    Where a ring leaves its server its bytes cross the server's link.
    """
    samples = batch / replicas
    ring = 2 * (ways - 1) / ways * model.boundary
    speed = on.inside if ways <= on.server else on.between
    sample_s = 4 * model.forward / (ways * on.flops) + 6 * model.blocks * ring / speed
    gradients = 2 * model.parameters / ways * 2 * (replicas - 1) / replicas
    sharing = min(ways, on.server)  # GPUs of a server, whose rings leave it one beside another
    return samples * sample_s + (gradients * sharing / on.between if replicas > 1 else 0.0)


def pipelined(
    schedule: Schedule, model: Model, on: Cluster, stages: int, width: int, batch: int, rows: int
) -> float:
    """Seconds a step of ``width`` copies, by the replay of the program; all recompute but naive.

    A boundary leaves its server, beside those of the other copies. The copies of a stage are in
    one server: the sum of their gradients is small, and left out.
    """
    sample_s = model.forward / stages / on.flops
    half = rows * sample_s
    share = Kernels(
        forward_s=half,
        inputs_s=half,
        weights_s=half,
        step_s=0.0,
        boundary=0,
        recompute=schedule != "naive",
    )
    over = Overheads(unit_s=0.0, message_s=width * rows * model.boundary / on.between)
    micros = batch // width // rows

    def makespan(steps: int) -> float:
        what = Pipeline(
            schedule=schedule,
            stages=stages,
            groups=(micros,) * steps,
            recompute=share.recompute,
            lag=0 if schedule == "naive" else stages,
        )
        return on_paper(what, over, share)

    return makespan(3) - makespan(2)


def twenty() -> dict[str, Any]:
    """GPT of 3.8 billion parameters on 64 GPUs, 512 samples a step: seconds, simulated."""
    model, on, batch = Model(blocks=48, width=2560), Cluster(), 512
    rows = {
        "tensor parallel, 16 GPUs over two servers": tensor_parallel(model, on, 16, 4, batch),
        "tensor parallel, 8 GPUs of one server": tensor_parallel(model, on, 8, 8, batch),
        "flush, 16 stages, 4 copies": pipelined("flush", model, on, 16, 4, batch, 4),
        "2bw, 16 stages, 4 copies": pipelined("2bw", model, on, 16, 4, batch, 4),
    }
    ours = rows["2bw, 16 stages, 4 copies"]
    return {
        name: {"seconds": seconds, "2bw is quicker": seconds / ours}
        for name, seconds in rows.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    asked = parser.parse_args()
    simulated = twenty()
    with StageProcesses(STAGES) as crew:
        measured = eight(crew)
    common.finish({"eight_stages": measured, "simulated": simulated}, asked.json)


if __name__ == "__main__":
    main()
