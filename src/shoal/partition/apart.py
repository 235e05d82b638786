"""Whether ranges of a chain may run in processes of their own: each with what is handed to it.

In one process a layer may find what an earlier one has left: in an attribute, a global, or a
buffer that is not its own. Stages have each a model of their own, where nobody has left it. So
every range runs once more after a forward of another batch, the last one first, from what was
handed to it: one that finds what others left then finds that of the other batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from shoal.partition.build import clone_batch
from shoal.partition.chain import Chain, Micro
from shoal.partition.drive import Ranges, Visit, as_before, open_visit, run_evaluation
from shoal.partition.preserve import (
    evaluating,
    preserved,
    read_buffers,
    same_values,
    write_buffers,
)
from shoal.partition.template import flatten
from shoal.partition.units import run_forward
from shoal.partition.wires import Wires
from shoal.recipes.recipe import Batch, tensors_of
from shoal.rng import capture_rng, restore_rng

Made = Sequence[Tensor]
"""What a range's forward made."""


def reads_beside(chain: Chain, batch: Batch, cuts: Sequence[int]) -> int | None:
    """A range between cuts that computes something else where others ran on another batch.

    None: there is none, or it cannot be told. The model is in training mode, and afterwards all is
    as before but for attributes, which forwards leave as they do.
    """
    ranges = list(itertools.pairwise([0, *cuts, chain.num_layers]))
    for mode in (nullcontext(), evaluating(chain.model)):
        with preserved(chain.model, chain.device), mode:
            found = _first(chain, batch, ranges)
        if found is not None:
            return found
    return None


def _first(chain: Chain, batch: Batch, ranges: Ranges) -> int | None:
    names = {name for layer in range(chain.num_layers) for name in chain.changing_buffers(layer)}
    buffers, rng = read_buffers(chain.model, names), capture_rng(chain.device)
    micro, visits, made = _forward(chain, clone_batch(batch), ranges)
    try:
        _forward(chain, _another(batch), ranges)
    except Exception:  # of the model's own, on a batch that it would not be given
        return None
    write_buffers(chain.model, buffers)
    found = None
    for index in reversed(range(1, len(ranges))):
        with as_before(chain, visits[index]):
            again = _made(chain, micro, ranges[index], visits[index].wires)[1]
        if not _alike(again, made[index]):
            found = index
    if found is None:
        return None
    restore_rng(rng, chain.device)
    write_buffers(chain.model, buffers)
    repeated = _forward(chain, clone_batch(batch), ranges)[2]
    return found if all(map(_alike, repeated, made)) else None  # else no two runs are alike


def _forward(chain: Chain, batch: Batch, ranges: Ranges) -> tuple[Micro, list[Visit], list[Made]]:
    """One of all ranges: where each began, and what it made."""
    micro, visits, found = chain.begin(batch), list[Visit](), list[Made]()
    wires: Wires = {}
    for span in ranges:
        visits.append(open_visit(chain, *span, wires))
        wires, made = _made(chain, micro, span, wires)
        found.append(made)
    return micro, visits, found


def _made(chain: Chain, micro: Micro, span: tuple[int, int], wires: Wires) -> tuple[Wires, Made]:
    """What is alive behind a range, and what of it its forward made."""
    if span[1] == chain.num_layers:
        loss, output = run_evaluation(chain, micro, span[0], wires)
        return {}, [loss, *(leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor))]
    made = run_forward(chain, micro, *span, wires)
    alive = {w: made[w] if w in made else wires[w] for w in chain.live_wires(span[1], micro)}
    return alive, list(made.values())


def _alike(one: Made, other: Made) -> bool:
    return len(one) == len(other) and all(map(same_values, one, other))


def _another(batch: Batch) -> Batch:
    """Of the same shapes and kinds, with its last row in place of all: each number is a possible
    one where it stands, since an index that is none would end a GPU's process."""
    found = clone_batch(batch)
    for tensor in tensors_of(found):
        if tensor.dim() and len(tensor) != 1:
            tensor.copy_(tensor[-1:].clone())
        elif torch.is_floating_point(tensor):
            tensor.mul_(1.5).add_(0.25)
    return found
