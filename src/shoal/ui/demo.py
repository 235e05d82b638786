"""``shoal demo``: run the demo's study and show what came of it."""

from __future__ import annotations

import sys
from pathlib import Path

import shoal.study
from shoal.core.units import format_seconds
from shoal.demo import (
    DEVICE_MEMORY,
    DEVICES,
    Sample,
    make_hardware,
    make_study,
    remove_earlier,
    steps_for,
    write_sample,
)
from shoal.examples.gpt import GPT
from shoal.observe import jsonl, write_gantt, write_trace
from shoal.ui.show import best_trial, read_snapshot, study_record, trial_record
from shoal.ui.train import describe_ending, ending_code


def run_demo(minutes: float, directory: str, *, as_json: bool) -> int:
    """Train, then print the leaderboard, a sample of the best model, and where all of it is.

    An earlier demo in ``directory`` is replaced; anything else there is left alone.
    """
    steps = steps_for(minutes)
    removed = remove_earlier(directory)
    if removed is not None:
        print(f"replacing the earlier demo in {removed}", file=sys.stderr)
    study = make_study(steps, directory)
    print(
        f"8 GPTs of 39 to 57 MiB of training state on {DEVICES} devices of {DEVICE_MEMORY} each, "
        f"{steps} steps of 256 bytes",
        file=sys.stderr,
    )
    study.run(hardware=make_hardware())
    place = study.directory
    snapshot = read_snapshot(place, with_actions=True)
    if snapshot.steps_done:  # else every trial failed before its first one
        write_trace(place, place / "trace.json")
        write_gantt(place, place / "gantt.svg")
    sample = _sample(place) if best_trial(snapshot) else None
    if as_json:
        record = study_record(place, snapshot)
        record["trials"] = [trial_record(row) for row in snapshot.trials]
        record["sample"] = sample.text if sample else None
        print(jsonl.dumps(record))
    else:
        print(describe_ending(snapshot, place))
        if snapshot.steps_done:
            print(_where(place))
        if sample:
            print(describe_sample(sample))
        print(f"\n{format_seconds(snapshot.seconds)} in all. Is it the same as training alone?")
        print("next      shoal verify   trains two of these models again with plain PyTorch, and")
        print(
            "                         compares weights, optimizer state and random numbers bitwise"
        )
    return ending_code(snapshot)


def _where(place: Path) -> str:
    return "\n".join(
        [
            f"timeline  {place / 'trace.json'}  (open it at https://ui.perfetto.dev)",
            f"chart     {place / 'gantt.svg'}  (open it in a browser)",
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
