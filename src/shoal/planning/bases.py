"""What of its generations a trial shares with others, as far as a plan can know."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from shoal.core.plan import Job
from shoal.core.units import Bytes
from shoal.runtime.wire.messages import Noticed


def with_frozen(
    jobs: Iterable[Job], signatures: Mapping[int, str], noticed: Mapping[int, Noticed]
) -> tuple[Job, ...]:
    """The jobs with the bytes that are not trained, and what tells who has the same.

    Of trials that are described alike some were looked at. Where these are several and have the
    same, the others are taken to have it too.
    """
    known: defaultdict[str, list[str]] = defaultdict(list)
    for number, one in noticed.items():
        if one.frozen:
            known[signatures[number]].append(one.frozen)
    alike = {s: found[0] for s, found in known.items() if len(found) > 1 == len(set(found))}
    return tuple(
        replace(
            job,
            frozen_bytes=Bytes(one.frozen_bytes),
            frozen=one.frozen or alike.get(signatures[job.trial], ""),
        )
        for job in jobs
        if (one := noticed[job.trial])
    )
