"""One process per device: ``python -m shoal.runtime.worker SOCKET RECORDER STACKS``.

Started by the study's process with one end of a socket pair, a few bytes of shared memory
that say which trial's code runs, should it be the last, and a file that signal USR1 has the
stacks of all threads written to; ends with it. The recipe
arrives by cloudpickle in the first order. A thread reads orders; the main thread is the
device's compute thread.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until all is imported: nothing of that is garbage, and looking costs 0.3 s

import faulthandler
import mmap
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import cloudpickle
import torch

from shoal.core.event import WorkerStarted, pack_event
from shoal.data import with_shared_data
from shoal.device import CudaDevice, Device, open_device
from shoal.device.allocator import allocator_here, held_by_libraries
from shoal.partition.compiled import watch_compiling
from shoal.pystate import ambient
from shoal.recipes.recipe import Recipe, with_fixed_data
from shoal.runtime.loop import DeviceLoop
from shoal.runtime.measuring.describe import own_error
from shoal.runtime.measuring.measure import Measurer
from shoal.runtime.printing.output import TrialOutput
from shoal.runtime.wire.channel import Channel
from shoal.runtime.wire.messages import (
    RECORDER,
    Broken,
    Configure,
    Happened,
    Opened,
    Order,
    Ready,
    Reply,
    Shutdown,
)
from shoal.workerenv import die_with_parent, ignore_interrupts, warm_up

Orders = queue.SimpleQueue[tuple[Order, tuple[int, ...]]]


def __getattr__(name: str) -> Any:
    """For who takes this module, which is ``__main__`` here, for the user's file."""
    raise AttributeError(
        f"{__name__!r}, which is __main__ in a process that trains, has no {name!r}. If your file "
        "defines that: functions of the file find it by its name, or by globals() and a name, and "
        "not in a module __main__, which stays in the study's process."
    )


def main() -> None:
    """Serve studies over the inherited socket until it closes."""
    descriptor, recorder, stacks = map(int, sys.argv[1:4])
    die_with_parent()
    ignore_interrupts()
    signal.signal(signal.SIGTERM, lambda *_: None)  # here too; a loader's children differ
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    channel = Channel(socket.socket(fileno=descriptor))
    _guard_children(channel, [descriptor, recorder, stacks])
    warm_up()
    try:
        channel.send((0, Ready(os.getpid())))
    except OSError:
        return  # who started it is gone
    running = mmap.mmap(recorder, RECORDER.size)
    output, outbox = TrialOutput(), _Outbox(channel)
    while _serve(channel, running, output, outbox):
        pass


class _Outbox:
    """Sends to the study's process, from any thread, and counts what has happened."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._lock = channel, threading.Lock()
        self.happened = 0  # messages of events, since the process began

    def send(self, serial: int, message: Reply) -> None:
        with self._lock:
            try:
                self._channel.send((serial, message))
            except OSError:
                os._exit(0)  # nobody is there to work for
            self.happened += isinstance(message, Happened)


def _serve(channel: Channel, running: mmap.mmap, output: TrialOutput, outbox: _Outbox) -> bool:
    """One study, from Configure to Shutdown; False when the other end is gone."""
    try:
        order, _ = channel.receive()
    except EOFError:
        return False
    if not isinstance(order, Configure):
        return not isinstance(order, Shutdown)

    def reply(message: Reply) -> None:
        outbox.send(order.serial, message)

    output.install(order.settings.directory)
    try:
        _run(order, channel, reply, running, output, outbox)
    except Exception as error:
        reply(Broken(traceback.format_exc(), own_error(error)))
        return False
    finally:
        output.close()
    return True


def _run(
    order: Configure,
    channel: Channel,
    send: Callable[[Reply], None],
    running: mmap.mmap,
    output: TrialOutput,
    outbox: _Outbox,
) -> None:
    sys.path[:] = dict.fromkeys([*order.path, *sys.path])
    torch.set_num_threads(order.device.threads)
    order.kernels.take()
    device = open_device(order.device)
    if device.spec.kind == "cuda":
        send(_opened(device))
    watch_compiling()
    given: Recipe = cloudpickle.loads(order.recipe)
    order.kernels.take()  # again: what was imported just now may have set others
    ambient.watch(given)
    recipe = with_fixed_data(given, order.settings.varied)
    if given.share_data and not order.settings.varied:
        recipe = with_shared_data(recipe, device.torch_device, lambda: output.taken)
    orders: Orders = queue.SimpleQueue()
    started = WorkerStarted(time=time.time(), device=order.device.name, pid=os.getpid())
    send(Happened((pack_event(started),)))
    loop = DeviceLoop(
        device,
        recipe,
        order.settings,
        send=send,
        happened=lambda: outbox.happened,
        orders=orders,
        measurer=Measurer(recipe, device),
        recorder=memoryview(running).cast("q"),
        output=output,
    )
    reader = threading.Thread(target=_read, args=(channel, orders, device), daemon=True)
    reader.start()
    loop.run()
    reader.join()
    ambient.leave()
    if isinstance(device, CudaDevice):
        device.close()  # the next study looks at what is free
    # An error that the recipe's modules kept when they were imported keeps this frame for good.
    del loop, device, reader


def _opened(device: Device) -> Opened:
    """Find out what libraries keep of a GPU, while nothing of a trial is there."""
    with device.active():
        own = held_by_libraries(
            device.torch_device, lambda: torch.cuda.memory_allocated(device.torch_device)
        )
        if (allocator := allocator_here()) is not None:
            allocator.forget()  # the most so far was of another study's trials
    device.spec = replace(device.spec, library_bytes=own)
    return Opened(own)


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


def _guard_children(channel: Channel, descriptors: Sequence[int]) -> None:
    """Processes that a trial's code makes hold nothing of this one, and end with it.

    A loader's process that kept the socket open would hide the worker's end, and one that
    outlived it would read data for nobody.
    """
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    worker = os.getpid()
    forks: list[bool] = []  # is the forking thread one that lives as long as the worker?

    def begin() -> None:
        forks[:] = [threading.current_thread() is threading.main_thread()]

    def child() -> None:
        if os.getppid() != worker:
            return  # a grandchild: its parent has done this
        channel.close()
        if forks == [True]:
            die_with_parent(worker)

    os.register_at_fork(before=begin, after_in_child=child)


if __name__ == "__main__":
    main()
