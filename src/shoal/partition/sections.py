"""Where a forward is entered again, and which number each layer has. Pure data.

[Note: sections]
Where the forward itself computes from the blocks' outputs between two of them, there is a
**joint**: a layer of its own, in which the forward is entered again with the real outputs.

    blocks             0   1   2       3   4           by position, in calling order
    layers         P   1   2   3   J   5   6   E       P is 0, J is 4, E is 7
    sections       0------------   1--------   2

A **section** begins at its head: the prologue, a joint, or the epilogue. One run of the head
says what all the section's blocks are called with.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Sections:
    """``joints`` are the positions of the blocks right behind a joint, ascending, none 0."""

    num_blocks: int
    joints: tuple[int, ...] = ()

    @property
    def epilogue(self) -> int:
        """The number of the last section, which has no blocks."""
        return len(self.joints) + 1

    @property
    def num_layers(self) -> int:
        return self.num_blocks + len(self.joints) + 2

    def head(self, section: int) -> int:
        """The layer in which a section's forward is entered."""
        if section == 0:
            return 0
        if section == self.epilogue:
            return self.num_layers - 1
        return self.joints[section - 1] + section

    def of_block(self, position: int) -> int:
        """The section of a block; of the part of the forward right before it, too."""
        return (
            self.epilogue if position == self.num_blocks else bisect_right(self.joints, position)
        )

    def layer_of(self, position: int) -> int:
        """The layer that a block is."""
        return 1 + position + bisect_right(self.joints, position)

    def blocks_of(self, section: int) -> range:
        """The positions of a section's blocks."""
        edges = (0, *self.joints, self.num_blocks, self.num_blocks)
        return range(edges[section], edges[section + 1])

    def headed_by(self, layer: int) -> int | None:
        """The section whose head ``layer`` is, if it is one."""
        return self._heads.get(layer)

    def position_of(self, layer: int) -> int:
        """The position of the block that ``layer`` is."""
        return layer - 1 - bisect_right(self._joint_layers, layer)

    @cached_property
    def _heads(self) -> dict[int, int]:
        return {self.head(section): section for section in range(self.epilogue + 1)}

    @cached_property
    def _joint_layers(self) -> tuple[int, ...]:
        return tuple(joint + number for number, joint in enumerate(self.joints, 1))
