"""What of a study is probably not what its user meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

from shoal.core.event import left_out_words
from shoal.core.spec import JobMeasure, TrialSpec
from shoal.runtime.wire.messages import Noticed


def unread_warnings(
    trials: Sequence[TrialSpec], noticed: Mapping[int, Noticed]
) -> tuple[str, ...]:
    """A line for each hyperparameter that none of the trials that have it read.

    ``noticed``: by number, of those that could be built.
    """
    built = [(trial, noticed[trial.number]) for trial in trials if trial.number in noticed]
    names = dict.fromkeys(name for trial, _ in built for name in trial.hp)
    missing = sorted({name for _, found in built for name in found.missing} - names.keys())
    return tuple(
        _words(name, missing)
        for name in names
        if all(name in found.unread for trial, found in built if name in trial.hp)
    )


def mixed_warnings(trials: Sequence[TrialSpec], noticed: Mapping[int, Noticed]) -> tuple[str, ...]:
    """That trials of a population have data of their own, and go on from each other's weights."""
    built = [trial for trial in trials if trial.number in noticed]
    read = {name for trial in built for name in noticed[trial.number].data_reads}
    names = [n for n in sorted(read) if len({repr(trial.hp.get(n)) for trial in built}) > 1]
    if not names:
        return ()
    return (
        f"Recipe(data=...) reads {', '.join(map(repr, names))}, in which trials of this "
        "population differ: one that goes on from the weights of another has learnt from that "
        "one's data. If these are folds or splits, it is validated on what it was trained with, "
        "and looks better than it is: leave shoal.PBT out, or run a study for each.",
    )


def set_by_factories(noticed: Mapping[int, Noticed]) -> list[str]:
    """Plain values of globals and classes that are others once another trial is made."""
    names = dict.fromkeys(name for one in noticed.values() for name in one.globals)
    return [
        name
        for name in names
        if len({one.globals[name] for one in noticed.values() if name in one.globals}) > 1
    ]


def global_warnings(names: Sequence[str], noticed: Mapping[int, Noticed]) -> tuple[str, ...]:
    """That trials of a process read what the last one that was made has set."""
    names = [name for name in names if any(name in one.shared for one in noticed.values())]
    if not names:
        return ()
    some = ", ".join(map(repr, names[:4])) + ", ..." * (len(names) > 4)
    return (
        f"making a trial sets {some}, which its step reads, and a process has one of each for all "
        "of its trials: where they alternate, one trains with another's. Keep it in the model, "
        "or read it from hp in Recipe(loss=..., step=...). These trials share no array.",
    )


def lost_warnings(settled: Iterable[JobMeasure]) -> tuple[str, ...]:
    """That some of a trial's state is as it was built, once the trial goes on elsewhere."""
    places = dict.fromkeys(place for measure in settled for place in measure.lost)
    if not places:
        return ()
    return (left_out_words(list(places)),)


def why_unfused(names: Sequence[str]) -> str:
    """Why trials that set such values share no array; for a plan's line."""
    return (
        f"unfused: making a trial sets {names[0]!r}, which its step reads, for all slots at once"
    )


def _words(name: str, missing: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, missing, n=1)
    line = (
        f"no code of the recipe seems to read the hyperparameter {name!r}, so trials that differ "
        "in it alone differ in their seeds alone"
    )
    if close:
        return f"{line}. Did you mean {close[0]!r}, which is read if a study has it?"
    if missing:
        return f"{line}. What it looks for and does not find: {', '.join(map(repr, missing))}."
    return f"{line}."
