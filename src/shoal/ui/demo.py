"""``shoal demo``: run the demo's study and show what came of it."""

from __future__ import annotations

import sys
from pathlib import Path

import shoal.study
from shoal.core.units import format_seconds
from shoal.demo import (
    CONTEXT,
    DEVICE_MEMORY,
    DEVICES,
    WINDOWS,
    Sample,
    can_go_on,
    make_hardware,
    make_study,
    remove_earlier,
    steps_for,
    write_sample,
)
from shoal.examples.gpt import GPT
from shoal.observe import jsonl, write_gantt, write_trace
from shoal.observe.snapshot import Snapshot
from shoal.study import Study
from shoal.ui.show import best_trial, describe_ending, ending_code, full_record, read_snapshot

TRACE, CHART = "trace.json", "gantt.svg"


def run_demo(minutes: float, directory: str, *, as_json: bool) -> int:
    """Train, then print the leaderboard, a sample of the best model, and where all of it is.

    A demo that was stopped goes on, an earlier one that ended is replaced; anything else in
    ``directory`` is left alone.
    """
    steps = steps_for(minutes)
    if can_go_on(steps, directory):
        print("going on with the demo that was stopped", file=sys.stderr)
    elif (removed := remove_earlier(directory)) is not None:
        print(f"replacing the earlier demo in {removed}", file=sys.stderr)
    study = make_study(steps, directory)
    print(_introduction(study, steps), file=sys.stderr)
    study.run(hardware=make_hardware())
    place = study.directory
    snapshot = read_snapshot(place, with_actions=True)
    if snapshot.steps_done:  # else every trial failed before its first one
        write_trace(place, place / TRACE)
        write_gantt(place, place / CHART)
    sample = _sample(place) if best_trial(snapshot) else None
    print(_record(snapshot, place, sample) if as_json else _text(snapshot, place, sample))
    return ending_code(snapshot)


def _introduction(study: Study, steps: int) -> str:
    return (
        f"{len(study.trials)} GPTs whose training state is 39 to 57 MiB, on {DEVICES} devices of "
        f"{DEVICE_MEMORY};\n{steps} steps of {WINDOWS * CONTEXT} bytes each"
    )


def _record(snapshot: Snapshot, place: Path, sample: Sample | None) -> str:
    text = sample.text if sample else None
    return jsonl.dumps(full_record(place, snapshot) | {"sample": text}, indent=2)


def _text(snapshot: Snapshot, place: Path, sample: Sample | None) -> str:
    parts = [describe_ending(snapshot, place)]
    if snapshot.steps_done:
        parts.append(f"timeline  {place / TRACE}  (open it at https://ui.perfetto.dev)")
        parts.append(f"chart     {place / CHART}  (open it in a browser)")
    if sample:
        parts.append(describe_sample(sample))
    where = "" if place.parent == Path("runs") else f" {place}"
    return "\n".join(
        [
            *parts,
            "",
            f"{format_seconds(snapshot.seconds)} in all. Is it what training alone would have "
            "given? Next:",
            f"  shoal verify{where}   (or make verify) trains two of these again with plain",
            "  PyTorch and compares weights, optimizer state and random numbers, every bit",
        ]
    )


def _sample(place: Path) -> Sample:
    """Text of the best model, read back from its directory as any script would."""
    best = shoal.study.open(place).best
    model = best.load()
    assert isinstance(model, GPT)
    return write_sample(model, best.metrics["valid_loss"])


def describe_sample(sample: Sample) -> str:
    """The text between two rules, the model's validation loss beside it."""
    title = (
        f"what the best model writes after {sample.prompt!r} "
        f"(valid_loss {sample.loss:.4f}, {sample.bits_per_byte:.2f} bits per byte)"
    )
    rule = "-" * len(title)
    return f"\n{title}\n{rule}\n{printable(sample.text)}\n{rule}"


def printable(text: str) -> str:
    """``text`` with what a terminal would obey shown as a dot."""
    return "".join(c if c == "\n" or c.isprintable() else "." for c in text)
