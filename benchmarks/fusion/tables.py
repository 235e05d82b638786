"""The tables of this folder's README, from the results of run.py.

    python benchmarks/fusion/tables.py [FILE]

The first has each way of the array against the best eager serial loop; the second the best of
these ways against each of the others.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

BEST = "serial, fused AdamW"
KINDS = ("array", "array, traced", "array, compiled")
OTHERS = (BEST, "serial, default AdamW", "serial, compiled", "two processes")


def first(workloads: dict[str, Any]) -> list[str]:
    """Times the best eager serial loop."""
    ways = (*KINDS, "array, ms a step", *OTHERS[1:3], "two processes, wall")
    rows = [_row("times the best serial loop", "models", *ways, "aim"), _row(*["---"] * 10)]
    for name, width, found in _each(workloads):
        serial, times = found["ms_cpu"][BEST]["median"], found["best_serial_times"]
        cells = [_spread(times[kind]) if kind in times else "-" for kind in KINDS]
        cells.append(f"{found['ms_cpu']['array']['median']:.1f}")
        for other in OTHERS[1:3]:
            ms = found["ms_cpu"].get(other)
            cells.append(f"{serial / ms['median']:.2f}" if ms else "-")
        wall = found["ms_wall"]
        cells.append(f"{wall[BEST]['median'] / wall['two processes']['median']:.2f}")
        one = workloads[name]
        aim = str(one["bar"]) if width == max(filter(str.isdigit, one), key=int) else ""
        rows.append(_row(name, width, *cells, aim))
    return rows


def second(workloads: dict[str, Any]) -> list[str]:
    """CPU time of each of the others over the array's, in its best way."""
    rows = [_row("CPU time over the array's", "models, passes", *OTHERS), _row(*["---"] * 6)]
    for name, width, found in _each(workloads):
        kind = max(
            found["best_serial_times"], key=lambda k: found["best_serial_times"][k]["median"]
        )
        mine = found["ms_cpu"][kind]["median"]
        cells = [
            f"{found['ms_cpu'][other]['median'] / mine:.2f}" if other in found["ms_cpu"] else "-"
            for other in OTHERS
        ]
        passes = kind.removeprefix("array, ").replace("array", "eager")
        rows.append(_row(name, f"{width}, {passes}", *cells))
    return rows


def _each(workloads: dict[str, Any]) -> list[tuple[str, str, Any]]:
    return [
        (name, width, found[width])
        for name, found in workloads.items()
        for width in found
        if width.isdigit()
    ]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _spread(times: dict[str, float]) -> str:
    return f"{times['median']:.2f} ({times['min']:.2f} to {times['max']:.2f})"


def main() -> None:
    default = Path(__file__).with_name("results.json")
    result = json.loads(Path(sys.argv[1] if len(sys.argv) > 1 else default).read_text())
    print(*first(result["workloads"]), "", *second(result["workloads"]), sep="\n")


if __name__ == "__main__":
    main()
