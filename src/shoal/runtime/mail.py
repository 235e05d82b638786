"""Messages of a trial that has several devices, as the interpreter of one of them knows them."""

from __future__ import annotations

from typing import Protocol

from shoal.program.ir import Action
from shoal.runtime.task import Task


class Mail(Protocol):
    """What a trial's seats on several devices tell each other."""

    def has(self, action: Action) -> bool:
        """Whether what a RECV takes is here."""

    def pass_on(self, task: Task, action: Action) -> None:
        """Send what a SEND names, without waiting; or take what a RECV does, which is here."""
