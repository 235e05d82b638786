"""Runs one device's list of a pipeline's program, in its order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from shoal.pipeline.post import Post, line_of
from shoal.program.ir import Action, Op


class Compute(Protocol):
    """What a stage computes and says: a model's share, or an emulation of one."""

    def run(self, action: Action) -> None:
        """Compute an F, B, I, W, STEP or SYNC."""

    def give(self, action: Action) -> Any:
        """What a SEND is to bring."""

    def take(self, action: Action, tree: Any) -> None:
        """What a RECV brought."""


class Ran(NamedTuple):
    """When an action that computes ran, in seconds of the machine's monotonic clock."""

    place: int  # in the list
    start_s: float
    end_s: float


Watch = Callable[[int, bool], None]
"""Told which action is next, and whether it only waits for another stage."""


def run_stage(actions: Sequence[Action], compute: Compute, post: Post, watch: Watch) -> list[Ran]:
    """Run the actions; what computed, and when. A SEND is not waited for."""
    ran: list[Ran] = []
    for index, action in enumerate(actions):
        watch(index, action.op is Op.RECV)
        if action.op is Op.RECV:
            compute.take(action, post.receive(line_of(action)))
        elif action.op is Op.SEND:
            post.send(line_of(action), compute.give(action))
        else:
            start = time.monotonic()
            compute.run(action)
            ran.append(Ran(index, start, time.monotonic()))
    watch(len(actions), True)
    return ran
