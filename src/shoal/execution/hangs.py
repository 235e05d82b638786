"""A worker that hangs is ended, and its last words say where its threads stood."""

from __future__ import annotations

from shoal.execution.watchdog import Watchdog, words_of_hang
from shoal.runtime.pool import Worker
from shoal.runtime.wire.messages import Order


def end_if_hung(
    worker: Worker,
    watchdog: Watchdog,
    now: float,
    *,
    order: Order | None,
    is_busy: bool,
    is_patient: bool = True,
) -> None:
    """Look at a worker; its end, if it comes to that, arrives as ``Gone``.

    Args:
        now: On the watchdog's clock.
        order: The planner's that it answers. Each order, and each trial that is built for
            it, has the whole time to itself.
        is_busy: It has something to do.
        is_patient: It may be building or measuring a model.
    """
    device, work = worker.name, worker.work_done
    progress = work if order is None else (work, order, worker.running)
    still_s = watchdog.look(device, progress, now, leased=is_busy, patient=is_patient)
    if still_s is None or not worker.alive:
        return
    limit_s = watchdog.limit_s(device, patient=is_patient)
    worker.last_words = words_of_hang(still_s, limit_s, worker.stacks())
    watchdog.forget(device)
    worker.end()
