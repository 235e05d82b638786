"""Streams, events and memory of one device: the same calls on CUDA and on a virtual device.

[Note: streams]
A device has one compute stream, and per lane (a trial that is leased to it) an ``up``, a
``down``, an ``activations`` and a ``host`` stream. The third carries up what comes back for a
backward, past weights that are on their way up: of these the link is given on after each piece.
Work is submitted in order; work on a stream starts when
everything before it on that stream is done and every event in ``after`` is complete.

    virtual device   compute is the calling thread; the others are one thread each;
                     an event is complete when the work has run
    CUDA             compute and the copies' are CUDA streams that wait for events on the
                     device; host is a thread

``Event.startable`` is what the scheduler asks before it submits compute: on a virtual device
that the event is complete (else the calling thread would sleep while another trial
could run), on CUDA always, since the stream itself waits. ``Event.ready`` is what it asks besides
where several trials share a GPU: whether the stream would not wait (``runtime/runahead.py``).
"""

from __future__ import annotations

from shoal.device.cuda import CudaDevice
from shoal.device.emulated import EmulatedDevice
from shoal.device.opening import Device, open_device
from shoal.device.pace import Fidelity, trouble
from shoal.device.streams import Event, Lane, Ran, ThreadEvent
from shoal.device.virtual import VirtualDevice

__all__ = [
    "CudaDevice",
    "Device",
    "EmulatedDevice",
    "Event",
    "Fidelity",
    "Lane",
    "Ran",
    "ThreadEvent",
    "VirtualDevice",
    "open_device",
    "trouble",
]
