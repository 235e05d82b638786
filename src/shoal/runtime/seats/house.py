"""What the desks of a device share with its loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.device import Device
from shoal.memory.ledger import Ledger
from shoal.recipes.recipe import Recipe
from shoal.runtime.capture.captures import Captures
from shoal.runtime.reports import Reports
from shoal.runtime.saving.saver import Saver
from shoal.runtime.session import Session
from shoal.runtime.wire.messages import LeaseOver, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """The device and the study, and whom to tell of trials that come and go.

    Attributes:
        captures: Captures passes of trials and of arrays.
        record: Leaves word whose code runs.
        fail: Tells the study of a trial that cannot go on, and why.
        room: Called when somebody came, or a unit needs more: units are reserved anew.
        went: Called when somebody went: that, and others may come.
        waits: Called now and then while a unit is held up by other devices: no hang of this one.
        handed_over: Called with a session that left, and what is said of it; None of a
            gang's member that does not lead, which says nothing.
    """

    recipe: Recipe
    device: Device
    ledger: Ledger
    reports: Reports
    saver: Saver
    settings: Settings
    captures: Captures
    record: Callable[[int | None], None]
    fail: Callable[[int, BaseException], None]
    room: Callable[[], None]
    went: Callable[[], None]
    waits: Callable[[], None]
    handed_over: Callable[[Session, LeaseOver | None], None]
