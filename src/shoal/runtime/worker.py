"""One process per device: ``python -m shoal.runtime.worker SOCKET RECORDER``.

Started by the study's process with one end of a socket pair, and a few bytes of shared
memory that say which trial's code runs, should it be the last; ends with it. The recipe
arrives by cloudpickle in the first order. A thread reads orders; the main thread is the
device's compute thread.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable

import cloudpickle
import torch

from shoal.core.event import WorkerStarted, pack_event
from shoal.device import Device, open_device
from shoal.recipe import Recipe
from shoal.runtime.channel import Channel
from shoal.runtime.loop import DeviceLoop
from shoal.runtime.measure import Measurer
from shoal.runtime.messages import (
    RECORDER,
    Broken,
    Configure,
    Happened,
    Order,
    Ready,
    Reply,
    Shutdown,
)
from shoal.scheduler.interleave import Interleaver
from shoal.scheduler.policy import OldestStepFirst

PR_SET_PDEATHSIG = 1
Orders = queue.SimpleQueue[tuple[Order, tuple[int, ...]]]


def main() -> None:
    """Serve studies over the inherited socket until it closes."""
    descriptor, recorder = map(int, sys.argv[1:3])
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the study's process decides
    channel = Channel(socket.socket(fileno=descriptor))
    _warm_up()
    channel.send((0, Ready(os.getpid())))
    running = mmap.mmap(recorder, RECORDER.size)
    while _serve(channel, running):
        pass


def _serve(channel: Channel, running: mmap.mmap) -> bool:
    """One study, from Configure to Shutdown; False when the other end is gone."""
    try:
        order, _ = channel.receive()
    except EOFError:
        return False
    if not isinstance(order, Configure):
        return not isinstance(order, Shutdown)

    def reply(message: Reply) -> None:
        try:
            channel.send((order.serial, message))
        except OSError:
            os._exit(0)  # nobody is there to work for

    try:
        _run(order, channel, reply, running)
    except Exception:
        reply(Broken(traceback.format_exc()))
        return False
    return True


def _run(
    order: Configure, channel: Channel, send: Callable[[Reply], None], running: mmap.mmap
) -> None:
    sys.path[:] = dict.fromkeys([*order.path, *sys.path])
    torch.set_num_threads(order.device.threads)
    device = open_device(order.device)
    recipe: Recipe = cloudpickle.loads(order.recipe)
    measurer = Measurer(recipe, device)
    orders: Orders = queue.SimpleQueue()
    started = WorkerStarted(time=time.time(), device=order.device.name, pid=os.getpid())
    send(Happened((pack_event(started),)))
    loop = DeviceLoop(
        device,
        recipe,
        order.settings,
        Interleaver(OldestStepFirst()),
        send,
        orders,
        others=lambda other: send(measurer.answer(other)),
        forget=measurer.forget,
        running=running,
    )
    reader = threading.Thread(target=_read, args=(channel, orders, device), daemon=True)
    reader.start()
    loop.run()
    reader.join()


def _read(channel: Channel, orders: Orders, device: Device) -> None:
    """Queue a study's orders up to its Shutdown; the process ends when the study's does."""
    while True:
        try:
            order, descriptors = channel.receive()
        except EOFError:
            os._exit(0)
        except Exception:
            traceback.print_exc()
            os._exit(70)  # orders may be lost: better to be replaced
        orders.put((order, descriptors))
        device.notify()
        if isinstance(order, Shutdown):
            return


def _die_with_parent() -> None:
    """Have the kernel end this process when the study's process ends, however it does."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _warm_up() -> None:
    """Pay once for what torch imports at its first optimizer."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


if __name__ == "__main__":
    main()
