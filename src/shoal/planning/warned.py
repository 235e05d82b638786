"""What of a study is probably not what its user meant."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from shoal.core.spec import TrialSpec
from shoal.runtime.messages import Noticed


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


def _words(name: str, missing: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, missing, n=1)
    line = (
        f"no code of the recipe seems to read the hyperparameter {name!r}, so trials that differ "
        "in it alone differ in their seeds alone"
    )
    if close:
        return f"{line}. Did you mean {close[0]!r}, which is read if a study has it?"
    if missing:
        return f"{line}. Read if a study has them: {', '.join(map(repr, missing))}."
    return f"{line}."
