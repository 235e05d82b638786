"""Word that a worker leaves of itself, for whoever finds it dead or hanging."""

from __future__ import annotations

from shoal.runtime.printing.output import TrialOutput


class Word:
    """Writes into memory that the study's process shares; see ``RECORDER``.

    Args:
        recorder: That memory.
        output: Where what a trial prints goes, which follows whose code runs.
    """

    def __init__(self, recorder: memoryview, output: TrialOutput) -> None:
        self._recorder, self._output = recorder, output

    def computing(self, trial: int | None) -> None:
        """Whose code runs on the device's thread, and prints."""
        self.note(trial)
        self._output.set(trial)

    def note(self, trial: int | None) -> None:
        """Whose code runs on the device's thread."""
        self._recorder[0] = -1 if trial is None else trial

    def stepping(self, trial: int) -> None:
        """Whose optimizer steps on the host; -1: nobody's."""
        self._recorder[1] = trial

    def work_done(self, count: int) -> None:
        """How much was done; a count that stands still is a hang."""
        self._recorder[2] = count

    @property
    def heard(self) -> int:
        """Of how many messages of events the record is safe."""
        return int(self._recorder[3])
