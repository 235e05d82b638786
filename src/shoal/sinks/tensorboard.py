"""Metrics for TensorBoard: a run per trial, with its scalars and hyperparameters.

[Note: event files]
A run's directory has an event file per sink that wrote to it. Records go straight to the
operating system, so that a kill loses none. A record torn by a full disk ends its file for
every reader, so nobody appends to a file of an earlier process. When a trial does steps
again, a record says from which step on TensorBoard should forget.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.core.errors import SpecError
from shoal.core.event import (
    Evaluated,
    Event,
    StepFinished,
    StudyFinished,
    TrialFailed,
    TrialFinished,
    TrialPlanned,
    TrialPruned,
    TrialStopped,
)
from shoal.core.spec import Scalar

_MAX_OPEN = 32  # files; more trials than that take turns
_VERSION = "brain.Event:2"


class TensorBoardSink:
    """A callback that writes event files: ``tensorboard --logdir LOG_DIR`` shows them.

    Each trial is a run, ``trial-0003``: ``train_loss`` of the steps, every validation metric
    and the hyperparameters. A trial that is resumed goes on in its run.

    Args:
        log_dir: A directory of the study's own.
        every: Write the training loss of every so many steps.

    Raises:
        SpecError: TensorBoard is not installed.
    """

    def __init__(self, log_dir: str | os.PathLike[str], *, every: int = 1) -> None:
        if not isinstance(every, int) or every < 1:
            raise SpecError(f"TensorBoardSink(every=...) is a whole number from 1, got {every!r}")
        self._protos = _Protos()
        self._log_dir, self._every = Path(log_dir), every
        self._hp: dict[int, Mapping[str, Scalar]] = {}
        self._runs: dict[int, _Run] = {}
        self._open: OrderedDict[int, None] = OrderedDict()

    def __call__(self, event: Event) -> None:
        """Write what the event says, if it says a metric."""
        match event:
            case TrialPlanned():
                self._hp[event.trial] = event.hp
            case StepFinished():
                run = self._run(event, done_before=event.step - 1)
                if event.step % self._every == 0:
                    run.write_scalars({"train_loss": event.loss}, event.step, event.time)
            case Evaluated():
                run = self._run(event, done_before=event.step)
                run.write_scalars(event.metrics, event.step, event.time)
            case TrialFinished() | TrialFailed() | TrialStopped() | TrialPruned():
                self._close(event.trial)
            case StudyFinished():
                self.close()

    def close(self) -> None:
        """Let go of all files; the next scalar opens its own again."""
        for trial in list(self._open):
            self._close(trial)

    def _run(self, event: StepFinished | Evaluated, *, done_before: int) -> _Run:
        """The trial's run; where it has more than was done before, the trial went back."""
        trial, step, time = event.trial, event.step, event.time
        run = self._runs.get(trial)
        if run is None:
            directory = self._log_dir / f"trial-{trial:04d}"
            run = self._runs[trial] = _Run(directory, self._protos, step, time)
            run.write_hyperparameters(directory.name, self._hp.get(trial, {}), time)
        elif run.step > done_before:
            run.forget_from(step, time)
        run.step = step
        self._open[trial] = None
        self._open.move_to_end(trial)
        if len(self._open) > _MAX_OPEN:
            self._close(next(iter(self._open)))
        return run

    def _close(self, trial: int) -> None:
        if trial in self._open:
            del self._open[trial]
            self._runs[trial].close()


class _Run:
    """One trial's event file; ``step`` is the last one that was written."""

    def __init__(self, directory: Path, protos: _Protos, step: int, time: float) -> None:
        self.step, self._protos = step, protos
        self._writer: Any = None
        is_new = not directory.exists()
        directory.mkdir(parents=True, exist_ok=True)
        self._path = _free_path(directory, int(time))
        self._write(time, file_version=_VERSION)
        if not is_new:
            self.forget_from(step, time)

    def write_scalars(self, values: Mapping[str, float], step: int, time: float) -> None:
        summary = self._protos.Summary()
        for tag, value in values.items():
            summary.value.add(tag=tag, simple_value=value)
        self._write(time, step=step, summary=summary)

    def write_hyperparameters(self, name: str, hp: Mapping[str, Scalar], time: float) -> None:
        values = {key: str(value) if value is None else value for key, value in hp.items()}
        if values:
            summary = self._protos.hparams_pb(values, trial_id=name, start_time_secs=time)
            self._write(time, summary=summary)

    def forget_from(self, step: int, time: float) -> None:
        """What was written of ``step`` and later is to come again."""
        start = self._protos.SessionLog(status=self._protos.SessionLog.START)
        self._write(time, step=step, session_log=start)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, time: float, **fields: Any) -> None:
        if self._writer is None:
            file = open(self._path, "ab", buffering=0)  # noqa: SIM115  # close()
            self._writer = self._protos.RecordWriter(file)
        self._writer.write(self._protos.Event(wall_time=time, **fields).SerializeToString())


class _Protos:
    """What is needed of TensorBoard, imported when a sink is made: it is an extra."""

    def __init__(self) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.plugins.hparams.summary_v2 import hparams_pb
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise SpecError(
                f"TensorBoardSink needs TensorBoard, which cannot be imported here ({error}). "
                "Install it: pip install tensorboard."
            ) from None
        self.Event: Any = Event
        self.SessionLog: Any = SessionLog
        self.Summary: Any = Summary
        self.hparams_pb: Any = hparams_pb
        self.RecordWriter: Any = RecordWriter


def _free_path(directory: Path, seconds: int) -> Path:
    """A new name; TensorBoard reads the files of a run in the order of their names."""
    number = 0
    while True:
        path = directory / f"events.out.tfevents.{seconds:010d}.{number:03d}"
        if not path.exists():
            return path
        number += 1
