"""The tables of README.md, from a file of results.

python benchmarks/residency/tables.py benchmarks/residency/results.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

MIB = 2**20
POOLS = ("lru", "belady")
FREE = "the planner's lookahead"
Row = dict[str, Any]


def main() -> None:
    results = json.loads(Path(sys.argv[1]).read_text())
    paper, measured = results["paper"], results["measured"]
    show("few shards", small(paper["small"]))
    for model in dict.fromkeys(row["model"] for row in paper["large"]):
        show(model, large(row for row in paper["large"] if row["model"] == model))
        show(f"four, {model}", four(r for r in paper["four_trials"] if r["model"] == model))
    show("the planner's choice", chosen(paper["planners_choice"]))
    show("four micro-batches", accumulated(paper.get("accumulated", ())))
    show("measured", real(measured["real_steps"]))
    print("\n".join(summary(paper)))


def show(title: str, lines: Iterable[Sequence[str]]) -> None:
    head, *rows = lines
    print(f"\n{title}\n")
    for line in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(line)} |")


def small(rows: Iterable[Row]) -> Iterator[list[str]]:
    yield [
        *("state over budget", "step on", "clipping", "shards", "optimum, MiB"),
        *("shoal: MiB, over it", "one ahead", "none ahead", "LRU over it", "Belady over it"),
        *("bound over it",),
    ]
    for row in rows:
        best, shoal = row["optimum"], row["shoal"]
        free = shoal[FREE]
        found = [mib(free.get("bytes")), ratio(free.get("over_least"))]
        yield [
            *case_of(row),
            str(row["shards"]),
            mib(best),
            ", ".join(found) if free else "does not fit",
            over(shoal["lookahead 1"]),
            over(shoal["lookahead 0"]),
            *(ratio(row[p] / best) if best else f"{mib(row[p])} MiB" for p in POOLS),
            ratio(row["bound"] / best) if best else "",
        ]


def large(rows: Iterable[Row]) -> Iterator[list[str]]:
    yield [
        *("state over budget", "step on", "clipping", "least, MiB", "shoal: MiB"),
        *("over the least", "room lent: over the least", "over Hydra"),
        *("one ahead: over the least", "slots set aside", "none ahead"),
        *("no shard steps on the device", "LRU over the least", "Belady over the least"),
    ]
    for row in rows:
        shoal, free = row["shoal"], row["shoal"][FREE]
        no_mix = shoal.get("no shard steps on the device")
        yield [
            *case_of(row),
            mib(row["least"]),
            mib(free.get("bytes")),
            ratio(free.get("over_least")),
            ratio(free.get("over_lent")),
            ratio(free.get("over_hydra")),
            over(shoal["lookahead 1"]),
            ratio(shoal["lookahead 1"].get("over_least_beside_slots")),
            over(shoal["lookahead 0"]),
            over(no_mix) if no_mix else "",
            *(ratio(row[p] / row["least"]) if row[p] and row["least"] else "" for p in POOLS),
        ]


def four(rows: Iterable[Row]) -> Iterator[list[str]]:
    yield [
        *("state over budget", "step on", "clipping", "one at a time: MiB a step", "MiB a visit"),
        *("two share: MiB a step", "over the least of two", "over Hydra", "LRU, two share: MiB"),
        *("Belady, two share: MiB",),
    ]
    for row in rows:
        one, two = row["one at a time"], row["two share"]
        yield [
            *case_of(row),
            mib(one.get("bytes")),
            mib(one.get("bytes_a_visit")),
            mib(two.get("bytes")) if two else "does not fit",
            ratio(two.get("over_least")),
            ratio(two.get("over_hydra")),
            mib(row["lru_two"]),
            mib(row["belady_two"]),
        ]


def chosen(rows: Sequence[Row]) -> Iterator[list[str]]:
    models = list(dict.fromkeys(row["model"] for row in rows))
    yield [
        *("state over budget", "clipping"),
        *(f"{m.split(',')[0]}: at a time, step on, MiB, over Hydra" for m in models),
        *(f"the fewest, {m.split(',')[0]}: MiB, over Hydra; time of a step" for m in models),
    ]
    for row in (r for r in rows if r["model"] == models[0]):
        alike = [r for r in rows if case_of(r) == case_of(row)]
        cells = [
            f"{r['active']}, {r['step_on']}, {mib(r['bytes'])}, {ratio(r['over_hydra'])}"
            for r in alike
        ]
        cells += [
            f"{mib(few['bytes'])}, {ratio(few['over_hydra'])}; {ratio(few['times'])}"
            for few in (r["fewest"] for r in alike)
        ]
        yield [f"{row['state_over_budget']:g}", "yes" if row["clip"] else "no", *cells]


def accumulated(rows: Iterable[Row]) -> Iterator[list[str]]:
    arms = ("one after another", "the planner's choice")
    yield ["model", "clipping", *(f"{arm}: shards, step on, MiB" for arm in arms), "times less"]
    for row in rows:
        cells = [f"{r['shards']}, {r['step_on']}, {mib(r['bytes'])}" for r in map(row.get, arms)]
        less = row[arms[0]]["bytes"] / row[arms[1]]["bytes"]
        model = row["model"].split(",")[0]
        yield [model, "yes" if row["clip"] else "no", *cells, f"{less:.1f}"]


def real(rows: Iterable[Row]) -> Iterator[list[str]]:
    yield [
        *("trials", "state over budget", "step on", "clipping", "at a time", "shards", "kept"),
        *("parameters kept", "over the turn", "gradients wait", "head, MiB", "MiB a step"),
        *("steps as planned", "peak over budget"),
    ]
    for row in rows:
        yield [
            str(row["trials"]),
            *case_of(row),
            *(str(row[key]) for key in ("active", "shards", "kept", "weights_kept", "turned")),
            *(str(row["gradients_kept"]), f"{row['head_bytes'] / MIB:.1f}"),
            f"{sum(row['predicted'].values()) / MIB:.1f}",
            f"{row['steps_equal']} of {row['steps']}",
            ratio(row["measured_peak"] / row["budget"]),
        ]


def summary(paper: Row) -> Iterator[str]:
    """How many rows are within 1.1, and over Hydra's rule at four times."""
    for name, rows in (("few", paper["small"]), *_by_model(paper["large"])):
        for arm in (FREE, "lookahead 1", "lookahead 0"):
            yield f"{name}, {arm}: {_within(r['shoal'][arm].get('over_least') for r in rows)}"
        lent = [r["shoal"][FREE].get("over_lent") for r in rows]
        yield f"{name}, {FREE}, room lent: {_within(lent)}"
    for name, rows in _by_model(paper["four_trials"]):
        yield f"{name}, two share: {_within(r['two share'].get('over_least') for r in rows)}"
    for name, rows in (("few", paper["small"]), *_by_model(paper["large"])):
        best = "optimum" if name == "few" else "least"
        beside = [r["shoal"][FREE].get("bytes") for r in rows]
        pairs = [(b, r["belady"]) for b, r in zip(beside, rows, strict=True) if b and r["belady"]]
        less = sorted(shoal / belady for shoal, belady in pairs)
        over = sorted(r["belady"] / r[best] for r in rows if r["belady"] and r[best])
        yield f"{name}: shoal over Belady {_spread(less)}; Belady over the {best} {_spread(over)}"
    for place in ("device", "host"):
        at_four = [r for r in paper["large"] if r["state_over_budget"] == 4]
        alone = [r["shoal"][FREE]["over_hydra"] for r in at_four if r["step_on"] == place]
        two = [
            r["two share"].get("over_hydra")
            for r in paper["four_trials"]
            if r["state_over_budget"] == 4 and r["step_on"] == place
        ]
        yield f"over Hydra at 4, {place}: alone {sorted(alone)}, two share {sorted(two)}"


def _spread(found: Sequence[float]) -> str:
    return f"{found[0]:.2f} to {found[-1]:.2f}, median {found[len(found) // 2]:.2f}"


def _within(found: Iterable[float | None]) -> str:
    known = sorted(value for value in found if value is not None)
    if not known:
        return "none"
    within = sum(value <= 1.1 for value in known)
    middle = f"median {known[len(known) // 2]:.2f}, worst {known[-1]:.2f}"
    return f"{within} of {len(known)} within 1.1, {middle}"


def _by_model(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    models = dict.fromkeys(row["model"] for row in rows)
    return [(model, [row for row in rows if row["model"] == model]) for model in models]


def case_of(row: Row) -> list[str]:
    case = [
        f"{row['state_over_budget']:g}",
        row.get("step_on", ""),
        "yes" if row["clip"] else "no",
    ]
    return case


def mib(value: float | None) -> str:
    if value is None:
        return "does not fit"
    return f"{value / MIB:,.0f}" if value >= 100 * MIB else f"{value / MIB:.1f}"


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def over(found: Row) -> str:
    return ratio(found.get("over_least")) if found else "does not fit"


if __name__ == "__main__":
    main()
