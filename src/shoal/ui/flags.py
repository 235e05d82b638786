"""What the command line says about devices."""

from __future__ import annotations

from typing import NamedTuple


class HardwareFlags(NamedTuple):
    """None is left to ``Hardware.parse``."""

    devices: str | None = None
    device_memory: str | None = None
    host_memory: str | None = None
    spill_dir: str | None = None
