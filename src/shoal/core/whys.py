"""Why trials that were to share arrays do not, as their plans say it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from shoal.core.units import counted

UNFUSED = "unfused: "
"""How a plan says why a trial is in no array."""
_MOST = 3  # reasons; of more, how many there were


def unfused_counts(whys: Iterable[str]) -> tuple[str, ...]:
    """``"8 trials: REASON"`` for each reason, the most common first.

    ``whys`` are all lines of the trials' plans.
    """
    found = Counter(why.removeprefix(UNFUSED) for why in whys if why.startswith(UNFUSED))
    said = [f"{counted(count, 'trial')}: {why}" for why, count in found.most_common(_MOST)]
    left = len(found) - _MOST
    return (*said, *[f"... and {counted(left, 'more reason')}"] * (left > 0))
