"""One arm of the comparison, in a process of its own, from its first import to its best trial.

    python arm.py ARM TASK --text FILE --directory DIR

Prints one line of JSON: the best trial, its loss, and when each trial's end was known.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

BEGAN = time.time()
sys.path.insert(0, str(Path(__file__).parent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arm", choices=sorted(ARMS))
    parser.add_argument("task", choices=("digits", "table", "text"))
    parser.add_argument("--text", default="")
    parser.add_argument("--directory", required=True)
    parser.add_argument("--asha", action="store_true")
    parser.add_argument("--trials", type=int, default=0, help="of the 64, the first so many")
    asked = parser.parse_args()
    if asked.trials:
        import tasks

        tasks.TRIALS = asked.trials
    found = ARMS[asked.arm](asked)
    print(json.dumps(found))


def _told(values: list[float], ends: list[float] | None = None, **more: Any) -> dict[str, Any]:
    finite = [v if v == v else float("inf") for v in values]
    best = min(range(len(values)), key=finite.__getitem__)
    told = {"best": best, "loss": values[best], "trials": len(values), **more}
    if ends is not None:
        told["best_known_s"] = ends[best] - BEGAN
    return told


def serial(asked: Any) -> dict[str, Any]:
    from tasks import settings, task_of, train

    task, values, ends = task_of(asked.task, asked.text), [], []
    for seed, hp in enumerate(settings()):
        values.append(train(task, hp, seed))
        ends.append(time.time())
    return _told(values, ends)


def joblib(asked: Any) -> dict[str, Any]:
    from joblib import Parallel, delayed
    from tasks import settings, task_of, train

    task = task_of(asked.task, asked.text)
    jobs = (delayed(_timed)(train, task, hp, seed) for seed, hp in enumerate(settings()))
    found = Parallel(n_jobs=2)(jobs)
    return _told([value for value, _ in found], [end for _, end in found])


def _timed(train: Any, task: Any, hp: Any, seed: int) -> tuple[float, float]:
    return train(task, hp, seed), time.time()


def ray(asked: Any, *, reuse_actors: bool | None = None) -> dict[str, Any]:
    import ray as library
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler
    from tasks import settings, task_of, train

    library.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    task, points = task_of(asked.task, asked.text), settings()
    here = str(Path(__file__).parent)

    def trainable(config: dict[str, Any]) -> None:
        sys.path.insert(0, here)
        seed = config["trial"]
        train(task, points[seed], seed, lambda n, v: tune.report({"valid_loss": v, "epoch": n}))

    scheduler = ASHAScheduler(max_t=task.epochs, reduction_factor=3) if asked.asha else None
    tuner = tune.Tuner(
        tune.with_resources(trainable, {"cpu": 1}),
        param_space={"trial": tune.grid_search(list(range(len(points))))},
        tune_config=tune.TuneConfig(
            metric="valid_loss",
            mode="min",
            scheduler=scheduler,
            **({} if reuse_actors is None else {"reuse_actors": reuse_actors}),
        ),
        run_config=tune.RunConfig(storage_path=asked.directory, verbose=0),
    )
    results = {r.config["trial"]: r for r in tuner.fit()}
    values = [results[n].metrics["valid_loss"] for n in range(len(points))]
    ends = [results[n].metrics["timestamp"] for n in range(len(points))]
    library.shutdown()
    return _told(values, ends)


def reusing(asked: Any) -> dict[str, Any]:
    """Ray Tune without a new process for each trial."""
    return ray(asked, reuse_actors=True)


def shoal(asked: Any, fuse: Any = "auto") -> dict[str, Any]:
    from tasks import TRIALS, settings, task_of

    import shoal as library

    task, points = task_of(asked.task, asked.text), settings()
    recipe = library.Recipe(
        model=task.model,
        data=task.data,
        share_data=True,
        loss=task.loss,
        optimizer=lambda named, hp: task.optimizer(named, points[hp["point"]]),
    )
    study = library.Study(
        "search",
        recipe,
        space=library.grid(point=list(range(TRIALS))),
        epochs=task.epochs,
        directory=asked.directory,
        pruner="asha" if asked.asha else None,
    )
    # What Ray Tune and joblib are given: two workers of one thread.
    hardware = library.Hardware.virtual(devices=2, memory="4GiB")
    widths: set[int] = set()
    kinds: set[str] = set()
    told: dict[int, float] = {}

    def see(event: Any) -> None:
        if type(event).__name__ == "TrialPlanned":
            widths.add(int(str(event.numerics.get("array", "1")).split()[-1]))
            kinds.add(str(event.numerics.get("array_pass", "eager")).split(",")[0])
        if type(event).__name__ in ("TrialFinished", "TrialPruned"):
            told[event.trial] = event.time

    report = study.run(
        hardware=hardware, fuse=fuse, progress=False, timeline=False, callbacks=[see]
    )
    values = [trial.metrics.get("valid_loss", float("inf")) for trial in report.trials]
    ends = [told[trial.number] for trial in report.trials]
    return _told(values, ends, widths=sorted(widths), kinds=sorted(kinds))


def compiled(asked: Any) -> dict[str, Any]:
    return shoal(asked, fuse="32 compiled")


def unfused(asked: Any) -> dict[str, Any]:
    return shoal(asked, fuse=False)


ARMS = {
    **{"serial": serial, "joblib": joblib, "ray": ray, "ray-reuse": reusing},
    **{"shoal": shoal, "compiled": compiled, "unfused": unfused},
}

if __name__ == "__main__":
    main()
