"""Words and tables about what the arms measured. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

CLOSE = {"fp32": 1e-5, "bf16": 1e-2}
"""How far a peer's losses may be from the reference's, relative, by precision."""

LONGEST = 160  # characters of a reason


def agreement(
    found: Sequence[float], reference: Sequence[float], *, within: float
) -> tuple[bool, str]:
    """Whether two runs had the same losses at every step, and how nearly, in words."""
    if len(found) != len(reference):
        return False, f"has {len(found)} losses, not {len(reference)}"
    if list(found) == list(reference):
        return True, "bitwise"
    gaps = [abs(a - b) / abs(b) for a, b in zip(found, reference, strict=True)]
    if all(math.isfinite(gap) and gap <= within for gap in gaps):
        return True, f"within {max(gaps):.1e}"
    step = next(n for n, gap in enumerate(gaps) if not gap <= within)
    return False, f"differs at step {step + 1}: {found[step]:.7g}, not {reference[step]:.7g}"


def reason(text: str) -> str:
    """The last line of an error output, without folders, and not longer than a table bears."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [
        line for line in lines if re.match(r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception)\b", line)
    ]
    last = (errors or lines or ["no output"])[-1]
    last = re.sub(r"^(\[rank\d+\]: ?)?([a-z_]\w*\.)*(?=[A-Z])", "", without_folders(last))
    return last if len(last) <= LONGEST else last[: LONGEST - 3] + "..."


def without_folders(text: str) -> str:
    """Paths with only their last part left."""
    return re.sub(r"(?<![\w.:/])(?:/[\w.+@-]+)+/", "", text)


COLUMNS = (
    "arm",
    "steps a second",
    "over checkpointing",
    "CPU s a step",
    "over checkpointing",
    "device peak, MiB",
    "host, bytes a parameter",
    "own memory, bytes a parameter",
    "peak RSS, MiB",
    "first step, s",
    "losses",
)


def table(arms: Mapping[str, Mapping[str, Any]]) -> str:
    """The figures of all arms in Markdown; what was not run says why."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(_row(name, arm) for name, arm in arms.items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(name: str, arm: Mapping[str, Any]) -> tuple[str, ...]:
    if "not_run" in arm:
        return (name, f"not run: {arm['not_run']}", *[""] * (len(COLUMNS) - 2))
    return (
        name,
        _spread(arm["steps_per_s"], 2),
        _spread(arm["steps_per_s_over_base"], 3),
        _spread(arm["cpu_seconds_a_step"], 3),
        _spread(arm["cpu_over_base"], 3),
        f"{arm['device_peak_bytes'] / 2**20:.1f}",
        f"{arm['host_bytes_a_parameter']:.1f}" if "host_bytes_a_parameter" in arm else "",
        f"{arm['own_bytes_a_parameter']['median']:.1f}",
        f"{arm['peak_rss_mib']['median']:.0f}",
        f"{arm['first_step_s']['median']:.1f}",
        arm["losses"],
    )


def _spread(values: Mapping[str, float], digits: int) -> str:
    median, least, most = (f"{values[k]:.{digits}f}" for k in ("median", "min", "max"))
    return median if least == most else f"{median} ({least} to {most})"
