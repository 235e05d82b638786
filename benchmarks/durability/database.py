"""What a row of the study's database costs: to write as rows come, and to read again.

    python benchmarks/durability/database.py --json benchmarks/durability/database.json

Arms of writing, the same events in the same batches: ``database``, ``shoal.observe.Database``;
``json lines``, an object a line appended to a file, which survives a kill and no power cut.
CPU seconds are of this process, which in a study shares its cores with the training.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import common
from shoal.core.event import (
    Evaluated,
    Event,
    StepFinished,
    StudyFinished,
    StudyStarted,
    TrialFinished,
    TrialPlanned,
    TrialStarted,
)
from shoal.observe import Database, DatabaseReader, Snapshot, read_events, read_trial
from shoal.ui.show import read_summary

STEP_S = 0.003  # a small trial's step
TRIALS = 8
Writer = Callable[[Sequence[Event]], None]


def steps(count: int, start: int = 0) -> list[Event]:
    """Steps of eight trials on two devices, as they come in."""
    return [
        StepFinished(
            time=1.7e9 + index * STEP_S / 2,
            trial=index % TRIALS,
            step=index // TRIALS + 1,
            epoch=index // 5000,
            loss=random.random(),
            seconds=STEP_S,
            device=f"cpu:{index % 2}",
            steps_per_epoch=100,
        )
        for index in range(start, start + count)
    ]


def evaluations(count: int) -> list[Event]:
    """Each with two metrics, which are two rows."""
    return [
        Evaluated(
            time=1.7e9 + index,
            trial=index % TRIALS,
            step=index,
            epoch=index,
            metrics={"valid_loss": random.random(), "valid_accuracy": random.random()},
        )
        for index in range(count)
    ]


def transitions(count: int) -> list[Event]:
    return [TrialStarted(time=1.7e9, trial=index, device="cpu:0") for index in range(count)]


class JsonLines:
    """The baseline: append a batch of lines."""

    def __init__(self, directory: Path) -> None:
        self._file = open(directory / "events.jsonl", "ab", buffering=0)  # noqa: SIM115

    def write(self, events: Iterable[Event]) -> None:
        lines = [json.dumps({"event": type(e).__name__, **asdict(e)}) + "\n" for e in events]
        self._file.write("".join(lines).encode())

    def close(self) -> None:
        self._file.close()


def write_all(make: Callable[[Path], Any], events: list[Event], batch: int) -> dict[str, float]:
    """Write ``events`` in batches; what an event cost, and the longest waits for a batch."""
    with tempfile.TemporaryDirectory() as place:
        writer = make(Path(place))
        waits = []
        cpu = time.process_time()
        for first in range(0, len(events), batch):
            began = time.perf_counter()
            writer.write(events[first : first + batch])
            waits.append(time.perf_counter() - began)
        cpu = time.process_time() - cpu
        writer.close()
        size = sum(f.stat().st_size for f in Path(place).iterdir() if f.name != "timeline.jsonl")
    waits.sort()
    return {
        "events_per_s": len(events) / sum(waits),
        "cpu_ms_per_1000": cpu / len(events) * 1e6,
        "bytes_per_event": size / len(events),
        "batch_ms_median": waits[len(waits) // 2] * 1e3,
        "batch_ms_p99": waits[int(len(waits) * 0.99)] * 1e3,
        "batch_ms_max": waits[-1] * 1e3,
    }


def measure_writing(rounds: int) -> dict[str, Any]:
    arms: dict[str, Callable[[Path], Any]] = {"database": Database, "json lines": JsonLines}
    cases = {
        "7 steps a batch (20 ms of one device)": (steps(35_000), 7),
        "50 steps a batch (20 ms of eight devices)": (steps(100_000), 50),
        "1000 steps a batch": (steps(200_000), 1000),
        "7 evaluations of 2 metrics a batch": (evaluations(14_000), 7),
        "one transition a batch": (transitions(300), 1),
    }
    result: dict[str, Any] = {}
    for case, (events, batch) in cases.items():
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
        for _ in range(rounds):
            for name, make in arms.items():
                rows[name].append(write_all(make, events, batch))
        result[case] = {
            name: {key: common.spread([row[key] for row in found]) for key in found[0]}
            for name, found in rows.items()
        }
    return result


def make_long_study(place: Path, count: int) -> None:
    """A finished study of ``count`` steps."""
    with Database(place) as database:
        database.write(beginning(count))
        for first in range(0, count, 10_000):
            database.write(steps(min(10_000, count - first), first))
        database.write(evaluations(count // 1000))
        database.write(ending(count))


def beginning(count: int) -> list[Event]:
    started = StudyStarted(
        time=1.7e9, study="long", metric="valid_loss", mode="min", trials=TRIALS, devices=(),
        source="", versions={},
    )  # fmt: skip
    return [started, *(planned(trial, count // TRIALS) for trial in range(TRIALS))]


def planned(trial: int, count: int) -> Event:
    return TrialPlanned(
        time=1.7e9, trial=trial, hp={"lr": 0.1}, seed=trial, technique="Resident", shards=1,
        steps=count, peak_bytes=1, numerics={"threads": 1},
    )  # fmt: skip


def ending(count: int) -> list[Event]:
    now = 1.7e9 + count * STEP_S
    finished = [
        TrialFinished(
            time=now, trial=trial, step=count // TRIALS, metrics={"valid_loss": 1.0 + trial},
            checkpoint="trials", seconds=9.0,
        )
        for trial in range(TRIALS)
    ]  # fmt: skip
    return [*finished, StudyFinished(time=now, finished=TRIALS, failed=0, seconds=9.0)]


def measure_reading(rounds: int, count: int) -> dict[str, Any]:
    """Seconds for what readers do with a study of ``count`` steps."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        make_long_study(place, count)
        reader = DatabaseReader(place)
        for _ in reader.poll():
            pass
        arms = {
            "ls": lambda: read_summary(place),
            "show --trial": lambda: Snapshot.of(read_trial(place, 3)),
            "all events": lambda: sum(1 for _ in read_events(place)),
            "report (all into a Snapshot)": lambda: Snapshot.of(read_events(place)),
            "a poll that finds nothing": lambda: list(reader.poll()),
            "open for writing (every page checked)": lambda: Database(place).close(),
        }
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
        for _ in range(rounds):
            for name, arm in arms.items():
                spent[name].append(time_of(arm))
        size = (place / "study.db").stat().st_size
    seconds = {
        name: {
            "wall": common.spread([wall for wall, _ in times]),
            "cpu": common.spread([cpu for _, cpu in times]),
        }
        for name, times in spent.items()
    }
    return {"steps": count, "bytes": size, "seconds": seconds}


def time_of(action: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the clock and of this process's CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1_000_000, help="of the study that is read")
    parser.add_argument("--json")
    options = parser.parse_args()
    random.seed(0)
    result = {
        "writing": measure_writing(options.rounds),
        "reading": measure_reading(options.rounds, options.steps),
    }
    common.finish(result, options.json)


if __name__ == "__main__":
    main()
