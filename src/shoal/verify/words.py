"""What came of a verification, in words."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.core.spec import varying_names
from shoal.core.units import counted, format_seconds, format_value
from shoal.observe.snapshot import Snapshot
from shoal.verify.compare import TrialVerdict

_WHOLE = ("weights", "optimizer state", "schedule", "random numbers", "losses", "metrics")


def settings_of(snapshot: Snapshot) -> dict[int, str]:
    """By trial the hyperparameters that tell it from others."""
    names = varying_names(row.hp for row in snapshot.trials)
    return {
        row.number: ", ".join(f"{n}={format_value(row.hp[n])}" for n in names if n in row.hp)
        for row in snapshot.trials
    }


def describe_verdict(verdict: TrialVerdict, settings: str) -> str:
    """A trial's verdict in one line, and under it its first difference and its notes."""
    trial = f"trial {verdict.number} ({settings})" if settings else f"trial {verdict.number}"
    if verdict.skipped:
        return f"SKIPPED    {trial}: {verdict.skipped}"
    notes = [f"           note: {note}" for note in verdict.notes]
    if verdict.failure:
        why = f"FAILED     {trial}: it could not be trained alone: {verdict.failure}"
        return "\n".join([why, *notes])
    word = "EQUAL" if verdict.equal else "DIFFERENT"
    random = ", random numbers" if "random numbers" in verdict.compared else ""
    lines = [
        f"{word:9}  {trial}: {counted(verdict.steps, 'step')}, "
        f"{counted(verdict.tensors, 'tensor')}, {counted(verdict.losses, 'loss', 'losses')}, "
        f"{counted(verdict.metrics, 'metric')}{random}{_of_best(verdict)}; alone it took "
        f"{format_seconds(verdict.plain_s)}"
    ]
    if not verdict.equal:
        lines.append(f"           first: {verdict.first_difference}")
    return "\n".join([*lines, *notes])


def _of_best(verdict: TrialVerdict) -> str:
    """What was compared of the state that ``Study(keep_best=True)`` kept beside the last one."""
    if verdict.best_step is None:
        return ""
    tensors = counted(verdict.best_tensors, "tensor")
    return f"; of its best evaluation, after step {verdict.best_step}, {tensors}"


def describe_verdicts(verdicts: Sequence[TrialVerdict]) -> str:
    """What all of it says."""
    done = [verdict for verdict in verdicts if not verdict.skipped]
    if wrong := _wrong(done):
        changed = any("has changed since" in note for verdict in done for note in verdict.notes)
        why = ", with a recipe that has changed since" if changed else ""
        return f"{wrong}{why}"
    has_rule = any("by the rule of" in note for verdict in done for note in verdict.notes)
    has_array = any(note.startswith("in its array") for verdict in done for note in verdict.notes)
    alone = "training alone" + ", by the rule in the notes" * has_rule
    alone += ", each trial in its slot of an array with nobody beside it" * has_array
    common = [name for name in _WHOLE if all(name in (v.compared or _WHOLE) for v in done)]
    if "optimizer state" in common:
        return (
            "weights, buffers, optimizer state, schedule, random numbers and every loss: "
            f"the same bits as {alone}"
        )
    return f"{', '.join(common)}: the same bits as {alone}"


def _wrong(done: Sequence[TrialVerdict]) -> str:
    """How many trials are not proved, and why; empty if all are."""
    different = sum(bool(verdict.first_difference) for verdict in done)
    failed = sum(bool(verdict.failure) for verdict in done)
    words = []
    if different:
        trials = counted(len(done), "trial differs", "trials differ")
        words.append(f"{different} of {trials} from training alone")
    if failed:
        words.append(f"{failed} of {counted(len(done), 'trial')} could not be trained alone")
    return "; ".join(words)


def nothing_compared(verdicts: Sequence[TrialVerdict]) -> str:
    """Why a verification says nothing."""
    reasons = "; ".join(f"trial {v.number}: {v.skipped}" for v in verdicts)
    return (
        f"nothing was compared. {reasons}. Choose a trial that finished: --trial N, or in Python "
        "report.verify([N])."
    )
