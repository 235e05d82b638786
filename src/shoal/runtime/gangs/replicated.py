"""A trial with replicas, as its first replica reads its data: see ``leader``."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from shoal.core.errors import TrialError
from shoal.core.technique import DataParallel
from shoal.partition.build import clone_batch
from shoal.program.ir import Program
from shoal.recipes.recipe import Batch, build_model, to_device
from shoal.rng import capture_rng, restore_rng, seed_all
from shoal.runtime.gangs.leader import GangSession
from shoal.runtime.saving.extrastate import extra_state
from shoal.runtime.task import Task


class ReplicaSession(GangSession):
    """A trial admitted to several devices, as one of its replicas."""

    @property
    def technique(self) -> DataParallel:
        """With everything settled."""
        assert isinstance(self.job.technique, DataParallel)
        return self.job.technique

    def _units(self) -> Any:
        """Nothing: what computes is ``replica``, for the time of a lease.

        Raises:
            TrialError: modules keep more than tensors, and each shard's model would have its own.
        """
        key = next(iter(extra_state(self.model)), "")
        if key and self.technique.shard:
            raise TrialError(
                f"the model keeps {key!r} beside its tensors, and shoal.DataParallel("
                "shard=True) trains another copy of it. Use shard=False."
            )
        return self.technique

    def twin(self) -> Any:
        """The model built once more, for FSDP2, which leaves no module as it was.

        Its buffers are this session's.
        """
        before = capture_rng(self.device)
        seed_all(self.job.seed)
        model = build_model(self.recipe, self.hp)
        restore_rng(before, self.device)
        for aliases in self._buffer_aliases.values():
            for owner, leaf in aliases:
                mine = next(n for n, m in self.model.named_modules() if m is owner)
                model.get_submodule(mine)._buffers[leaf] = owner._buffers[leaf]
        return model.to(self.device)

    # -- steps --------------------------------------------------------------------------

    def _train_group(self, first: Any) -> Iterator[Task]:
        self.epoch_number = self.epoch + 1
        self._ahead: deque[Batch] = deque()
        self.keep_ahead(first)
        size = self._group_size()
        if size is None:
            size = self._read_group()
        yield Task(Program(()), "step", groups=(size,))

    def keep_ahead(self, batch: Any) -> None:
        self._ahead.append(clone_batch(to_device(batch, self.device)))  # a source may reuse it

    def next_batch(self) -> Batch:
        """The next batch of a step."""
        if not self._ahead:
            self.keep_ahead(self._next_of_group())
        return self._ahead.popleft()
