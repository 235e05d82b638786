"""Draw what ``convergence.py`` found: held-out loss over steps, and over seconds.

    python benchmarks/pipeline/picture.py [--results FILE] [--picture FILE]

Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
# Clock: the rule that it is of, its colour, its line. The first of a rule is drawn over steps.
STYLES = {
    "synchronous, flush": ("synchronous", "tab:blue", "-"),
    "synchronous, zb-h1": ("synchronous", "tab:blue", "--"),
    "2bw": ("2bw", "tab:red", "-"),
    "2bw predicted": ("2bw predicted", "tab:green", "-"),
}


def draw(found: dict[str, Any], path: Path) -> None:
    """A column per learning rate; above over steps, below over seconds."""
    rates = sorted({curve["rate"] for curve in found["curves"]})
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    axes = figure.subplots(2, len(rates), sharey=True, sharex="row", squeeze=False)
    for column, rate in enumerate(rates):
        above, below = axes[:, column]
        for clock, (rule, colour, line) in STYLES.items():
            seeds = seeds_of(found, rule, rate)
            if line == "-":
                curve(above, seeds, found["every"], label=rule, color=colour)
            step_s = found["every"] * found["seconds_per_step"][clock]
            curve(below, seeds, step_s, label=clock, color=colour, linestyle=line)
        for axis in (above, below):
            axis.axhline(found["loss_of_frequencies"], color="0.6", linewidth=0.8, linestyle=":")
            axis.grid(alpha=0.25)
        below.axvline(found["horizon_s"], color="0.6", linewidth=0.8)
        above.set_title(f"learning rate {rate:g}")
        above.set_xlabel("steps")
        below.set_xlabel("seconds, emulated, four stages")
    for axis in axes[:, 0]:
        axis.set_ylabel("held-out loss, nats a byte")
        axis.legend(fontsize="small")
    axes[0, 0].set_ylim(2.0, 4.0)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def seeds_of(found: dict[str, Any], rule: str, rate: float) -> list[list[float]]:
    """The curves of one point; what is not finite in them lies above every picture."""
    (seeds,) = (c["seeds"] for c in found["curves"] if (c["rule"], c["rate"]) == (rule, rate))
    return [[float("inf") if loss is None else loss for loss in curve] for curve in seeds]


def curve(axis: Axes, seeds: list[list[float]], unit: float, **style: Any) -> None:
    """The median of the seeds as a line, in a band from the least to the most."""
    at = [unit * number for number in range(1, len(seeds[0]) + 1)]
    points = list(zip(*seeds, strict=True))
    axis.plot(at, [statistics.median(p) for p in points], linewidth=1.5, **style)
    if style.get("linestyle", "-") == "-":
        least, most = [min(p) for p in points], [max(p) for p in points]
        axis.fill_between(at, least, most, color=style["color"], alpha=0.15, linewidth=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=HERE / "convergence.json")
    parser.add_argument("--picture", type=Path, default=DOCS / "pipeline-convergence.png")
    asked = parser.parse_args()
    draw(json.loads(asked.results.read_text()), asked.picture)


if __name__ == "__main__":
    main()
