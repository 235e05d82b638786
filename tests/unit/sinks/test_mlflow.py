"""MLflow's runs: one per trial, every step once.

What is decided is tested with a client that keeps runs in memory; where MLflow is installed the
same tests run on a database of its own.
"""

from __future__ import annotations

import builtins
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from inmemory import (
    BEGAN,
    Server,
    Store,
    begun,
    ended,
    evaluated,
    finished,
    give,
    over,
    planned,
    resumed,
    saved,
    started,
    step,
    steps,
)

import shoal
from shoal.core.errors import SpecError
from shoal.core.event import (
    Event,
    TrialExploited,
    TrialFailed,
    TrialPruned,
    TrialReplanned,
    TrialRestarted,
    TrialStopped,
)
from shoal.observe.snapshot import Snapshot
from shoal.sinks import MLflowSink, mlflowruns, sender

# ---------------------------------------------------------------- what a run has


def test_each_trial_is_a_run_with_params_metrics_and_tags(store: Store) -> None:
    trials = [planned(0), planned(3, lr=0.25), begun(0), begun(3)]
    sink = MLflowSink(store.uri, every=2)

    give(sink, [started(), *trials, *steps(0, 1, 4), *steps(3, 1, 2), saved(3, 2)])
    give(sink, [finished(0, 4), over()])

    runs = store.runs()
    assert sorted(runs) == ["trial-0000", "trial-0003"]
    run = runs["trial-0000"]
    assert run.data.params == {"lr": "0.5", "norm": "None"}
    assert run.history == {
        "train_loss": [(2, 2.0), (4, 4.0)],
        "valid_loss": [(2, 0.2), (4, 0.4)],
    }
    tags = {n: v for n, v in run.data.tags.items() if n.startswith("shoal.")}
    assert tags == {
        "shoal.study": "lr",
        "shoal.study_id": "lr 2023-11-14T22:13:20+00:00",
        "shoal.trial": "0",
        "shoal.seed": "40",
        "shoal.technique": "Resident",
        "shoal.shards": "1",
        "shoal.numerics": '{"torch": "2.13.0"}',
        "shoal.state": "FINISHED",
        "shoal.checkpoint": "trials/0000/step-00000004",
    }
    assert run.info.status == "FINISHED"
    assert (run.info.start_time, run.info.end_time) == (1_700_000_002_000, 1_700_000_090_000)
    assert runs["trial-0003"].data.tags["shoal.checkpoint"] == "trials/0003/step-00000002"


@pytest.mark.parametrize(
    ("end", "state", "status"),
    [
        (finished(0, 2), "FINISHED", "FINISHED"),
        (TrialPruned(reason="others did better", **ended(0, 2)), "PRUNED", "FINISHED"),
        (TrialStopped(reason="by hand", **ended(0, 2)), "STOPPED", "KILLED"),
        (TrialFailed(time=BEGAN + 9, trial=0, step=2, error="ValueError: no"), "FAILED", "FAILED"),
        (over(stopped="it was interrupted"), "PENDING", "KILLED"),
    ],
)
def test_a_run_ends_as_its_trial_does(server: Server, end: Event, state: str, status: str) -> None:
    give(MLflowSink("http://there"), [started(), begun(0), *steps(0, 1, 2), end, over()])

    (run,) = server.runs.values()
    assert (run.tags["shoal.state"], run.info.status) == (state, status)
    assert run.tags.get("shoal.error", "") == ("ValueError: no" if state == "FAILED" else "")


def test_a_trial_that_was_planned_and_never_began_has_no_run(server: Server) -> None:
    give(MLflowSink("http://there"), [started(), planned(0), planned(1), begun(0), over()])

    assert [run.info.run_name for run in server.runs.values()] == ["trial-0000"]


def test_names_that_mlflow_does_not_take_are_spelled_with_underlines(store: Store) -> None:
    sink = MLflowSink(store.uri)

    give(sink, [started(), planned(0, **{"lr (max)": 1}), evaluated(0, 1, **{"valid_f1@5%": 0.5})])
    sink.close()

    run = store.runs()["trial-0000"]
    assert run.data.params == {"lr _max_": "1"}
    assert run.history == {"valid_f1_5_": [(1, 0.5)]}
    assert sink.dropped == 0


def test_what_changes_while_a_trial_trains_is_a_tag(server: Server) -> None:
    key = {"array": 4}
    again = TrialReplanned(
        time=BEGAN, trial=0, step=3, reason="", technique="Fused", shards=1, peak_bytes=1,
        numerics=key,
    )  # fmt: skip
    took = TrialExploited(
        time=BEGAN, trial=0, step=2, source=5, before={"lr": 0.5, "width": 8},
        hp={"lr": 0.6, "width": 8}, checkpoint="trials/0005/step-00000002",
    )  # fmt: skip

    give(MLflowSink("http://there"), [started(), planned(0, lr=0.5, width=8), took, again, over()])

    (run,) = server.runs.values()
    assert run.params == {"lr": "0.5", "width": "8"}
    assert run.tags["shoal.hp.lr"] == "0.6"
    assert "shoal.hp.width" not in run.tags
    assert run.tags["shoal.source"] == "trial 5 at step 2"
    assert run.tags["shoal.technique"] == "Fused"
    assert run.tags["shoal.numerics"] == '{"array": 4}'


def test_more_than_a_request_holds_goes_in_several(store: Store) -> None:
    sink = MLflowSink(store.uri, every=1)
    wide = planned(0, **{f"x{number}": number for number in range(130)})

    give(sink, [started(), wide, *(step(0, number) for number in range(1, 2002)), over()])

    run = store.runs()["trial-0000"]
    assert len(run.data.params) == 130
    assert [number for number, _ in run.history["train_loss"]] == list(range(1, 2002))


# ---------------------------------------------------------------- again


def test_steps_that_are_done_again_are_logged_once(store: Store) -> None:
    back = TrialRestarted(time=BEGAN, trial=0, step=3)
    sink = MLflowSink(store.uri, every=1)

    give(sink, [started(), begun(0), *steps(0, 1, 6), back, *steps(0, 4, 8), over()])

    history = store.runs()["trial-0000"].history
    assert [number for number, _ in history["train_loss"]] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [number for number, _ in history["valid_loss"]] == [2, 4, 6, 8]


def test_a_resumed_study_goes_on_in_the_same_runs(store: Store) -> None:
    first = [started(), planned(0), planned(1), planned(2), begun(0), begun(1), begun(2)]
    first += [*steps(0, 1, 5), *steps(1, 1, 2), *steps(2, 1, 2)]
    killed = give(MLflowSink(store.uri, every=1), first)
    killed.close()  # without the study's end, as after kill -9: all that was known was sent

    sink = resumed(store, first, every=1)
    give(sink, [started(BEGAN + 1000), planned(0, lr=0.75), begun(0), *steps(0, 4, 6)])
    give(sink, [finished(0, 6), over(stopped="it was interrupted")])

    runs = store.runs()
    assert sorted(runs) == ["trial-0000", "trial-0001", "trial-0002"]
    run = runs["trial-0000"]
    assert [number for number, _ in run.history["train_loss"]] == [1, 2, 3, 4, 5, 6]
    assert [number for number, _ in run.history["valid_loss"]] == [2, 4, 6]
    assert run.data.params["lr"] == "0.5"
    assert run.info.status == "FINISHED"
    assert runs["trial-0001"].info.status == "KILLED"  # nobody went on with it
    assert sink.dropped == 0


def test_what_a_kill_kept_from_mlflow_is_logged_by_the_next_process(store: Store) -> None:
    sent = [started(), planned(0), planned(1), begun(0), begun(1), *steps(0, 1, 2)]
    give(MLflowSink(store.uri), sent).close()
    unsent = [*steps(0, 3, 4), finished(0, 4), *steps(1, 1, 3)]

    give(resumed(store, [*sent, *unsent]), [started(BEGAN + 1000), begun(1), over()])

    runs = store.runs()
    assert runs["trial-0000"].info.status == "FINISHED"
    assert runs["trial-0000"].history["valid_loss"] == [(2, 0.2), (4, 0.4)]
    assert runs["trial-0000"].data.tags["shoal.checkpoint"] == "trials/0000/step-00000004"
    assert runs["trial-0001"].history["valid_loss"] == [(2, 0.2)]
    assert runs["trial-0001"].data.params == {"lr": "0.5", "norm": "None"}


def test_a_study_with_nothing_left_to_do_brings_mlflow_up_to_date(server: Server) -> None:
    whole = [started(), planned(0), begun(0), *steps(0, 1, 4), finished(0, 4), over()]

    sink = resumed(Store("http://there", server), whole)  # no event comes after it
    assert [run.info.status for run in server.runs.values()] == ["FINISHED"]

    give(sink, [started(BEGAN + 1000), planned(1), begun(1), *steps(1, 1, 2), over()])
    assert len({run.tags["shoal.study_id"] for run in server.runs.values()}) == 1


def test_a_study_that_is_begun_anew_has_runs_of_its_own(server: Server) -> None:
    events = [begun(0), *steps(0, 1, 2), finished(0, 2), over()]

    for began in (BEGAN, BEGAN + 1000):
        sink = MLflowSink("http://there", experiment="mine")
        sink.look_back(Snapshot())  # of an empty directory
        give(sink, [started(began), *events])

    assert list(server.experiments) == ["mine"]
    assert [run.info.run_name for run in server.runs.values()] == ["trial-0000"] * 2


def test_a_failure_is_no_longer_told_of_a_trial_that_was_tried_again(server: Server) -> None:
    store, error = Store("http://there", server), "ValueError: no"
    failed = TrialFailed(time=BEGAN, trial=0, step=2, error=error)
    before = [started(), planned(0), begun(0), *steps(0, 1, 2), failed, over()]
    give(MLflowSink("http://there"), before)

    give(resumed(store, before), [started(), begun(0), *steps(0, 3, 4), finished(0, 4), over()])

    (run,) = server.runs.values()
    assert (run.info.status, run.tags["shoal.error"]) == ("FINISHED", "")


def test_a_run_is_made_with_the_time_at_which_its_trial_began(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread may be as quick as the study, or a busy machine's study as slow as that."""
    put = sender.Sender.put

    def wait(self: sender.Sender, *what: Any) -> None:
        put(self, *what)
        while self._has_work():
            time.sleep(0.001)

    monkeypatch.setattr(sender, "_GATHER_S", 0.0)
    monkeypatch.setattr(sender.Sender, "put", wait)
    give(MLflowSink("http://there"), [started(), planned(0), begun(0), finished(0, 4), over()])
    (run,) = server.runs.values()
    assert (run.info.start_time, run.params) == (1_700_000_002_000, {"lr": "0.5", "norm": "None"})


def test_times_never_go_back(server: Server) -> None:
    late = [replace(event, time=BEGAN + 5000) for event in (step(0, 1), step(0, 2))]

    give(MLflowSink("http://there", every=1), [started(), *late, *steps(0, 3, 4), over()])

    (run,) = server.runs.values()
    times = [m.timestamp for m in run.values if m.key == "train_loss"]
    assert times == [(1_700_000_000 + 5000) * 1000] * 4


def test_a_real_study_that_goes_on_later_has_one_run_per_trial(
    server: Server, tmp_path: Path
) -> None:
    def rows(hp: Any) -> Any:
        x = torch.randn(16, 2, generator=torch.Generator().manual_seed(0))
        rows = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        return torch.utils.data.DataLoader(rows, batch_size=4), [rows[:]]

    def loss(output: Any, batch: Any) -> Any:
        return (output - batch[1]).square().mean()

    recipe = shoal.Recipe(model=lambda hp: torch.nn.Linear(2, 1), data=rows, loss=loss)
    device = shoal.Hardware.virtual(devices=1, memory="4MiB")
    for epochs in (1, 2):
        study = shoal.Study(
            "lr",
            recipe,
            space=shoal.grid(lr=[0.01, 0.1]),
            epochs=epochs,
            directory=tmp_path / "lr",
        )
        sink = MLflowSink("http://there", every=2)
        report = study.run(hardware=device, callbacks=[sink], progress=False)

    runs = Store("http://there", server).runs()
    assert sorted(runs) == ["trial-0000", "trial-0001"]
    for trial, run in zip(report.trials, runs.values(), strict=True):
        assert [number for number, _ in run.history["train_loss"]] == [2, 4, 6, 8]
        assert run.history["valid_loss"] == [
            (line["step"], line["metrics"]["valid_loss"]) for line in trial.history
        ]
        assert run.info.status == "FINISHED"
        assert run.params == {"lr": str(trial.hp["lr"])}
        assert run.tags["shoal.checkpoint"] == f"trials/000{trial.number}/step-00000008"


# ---------------------------------------------------------------- what is refused at once


def test_without_mlflow_the_sink_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **options: Any) -> Any:
        if name.startswith("mlflow"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)

    with pytest.raises(SpecError, match=r"MLflowSink needs MLflow, .* pip install mlflow"):
        MLflowSink()


def test_a_place_on_this_machine_that_cannot_be_used_is_refused_at_once(server: Server) -> None:
    def fails(name: str) -> None:
        raise OSError("read-only file system")

    server.trouble = fails

    for place in ("sqlite:////no/m.db", "file:/no", Path("/no")):
        with pytest.raises(SpecError, match=r"cannot use .*/no.*: OSError: read-only file"):
            MLflowSink(place)
    MLflowSink("http://there")  # a server may come back


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 0}, r"every=\.\.\.\) is a whole number from 1, got 0"),
        ({"room": 1.5}, r"room=\.\.\.\) is a whole number from 1, got 1\.5"),
        ({"wait_s": -1}, r"wait_s=\.\.\.\) is a number of seconds, got -1"),
        ({"wait_s": float("inf")}, r"wait_s=\.\.\.\) is a number of seconds, got inf"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        MLflowSink(**options)


def test_without_a_place_it_is_mlflows_own(server: Server) -> None:
    assert mlflowruns.MLflow(None).place == "http://default"
