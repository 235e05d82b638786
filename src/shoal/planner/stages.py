"""Where a model is cut into stages, so that the slowest is quick and every one fits.

Pure data. A stage needs other bytes than an equal one elsewhere: the first holds activations of
more micro-batches than the last. So each place in the pipeline has a table of its own.

[Note: what crosses]
A stage hands on all that later ones read, and each of them holds what it was handed, with the
batch, from the message to its backward. A shard's ``boundary_bytes`` are only what is new in it:
what passes through is added here, as far as ``private_bytes`` do not say that it ends.

[Note: halves]
Between the two halves of a backward there is what the second one reads. It was measured for each
layer alone; of several in a row it is what each leaves, with what one hands to the next as far as
that one reads it, on the way up or down.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shoal.core.spec import Halves, LayerMeasure, ShardSpec
from shoal.core.units import Bytes, Seconds
from shoal.pipeline.schedule import Pipeline
from shoal.planner.predict import predict_shards

_Table = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Batches are cut in so many pieces of equal rows.

    With ``casts`` the model computes with copies of its weights, which every piece makes again.
    """

    pieces: int = 1
    casts: bool = False

    def of(self, size: int, weights: int = 0) -> Bytes:
        """Bytes of a piece, where ``weights`` of a batch's do not shrink with its rows."""
        fixed = min(weights, size)
        return Bytes(fixed - (fixed - size) // self.pieces)

    def cast_bytes(self, parameters: int) -> int:
        """What the copies of so many bytes of weights take at most."""
        return parameters // 2 if self.casts else 0


WHOLE = Split()


def as_stages(
    shards: Sequence[ShardSpec], split: Split = WHOLE, tied: Sequence[int] = ()
) -> tuple[ShardSpec, ...]:
    """Shards as stages of a pipeline: what enters is all that does, bytes are of a micro-batch.

    ``tied`` are bytes of weights' gradients among what each shard hands back. Seconds are those
    of a micro-batch as well.
    """
    entering = passing = 0
    stages = []
    for shard in shards:
        entering = passing + shard.boundary_bytes
        passing += shard.boundary_bytes - shard.private_bytes
        carried = tied[shard.index] if tied else 0
        stages.append(_as_stage(shard, split, entering, carried))
    return tuple(stages)


def _as_stage(shard: ShardSpec, split: Split, entering: int, tied: int) -> ShardSpec:
    casts = split.cast_bytes(shard.parameter_bytes)
    inside = casts + shard.gradient_bytes
    halves = shard.halves
    saved = shard.saved_bytes
    return replace(
        shard,
        boundary_bytes=split.of(entering),
        private_bytes=Bytes(shard.private_bytes // split.pieces),
        carry_bytes=split.of(shard.carry_bytes, tied),
        forward_peak_bytes=split.of(shard.forward_peak_bytes, casts),
        backward_peak_bytes=split.of(shard.backward_peak_bytes, inside),
        saved_bytes=None if saved is None else split.of(saved, casts),
        saved_output_bytes=Bytes(shard.saved_output_bytes // split.pieces),
        saving_peak_bytes=split.of(shard.saving_peak_bytes, casts),
        forward_s=type(shard.forward_s)(shard.forward_s / split.pieces),
        backward_s=type(shard.backward_s)(shard.backward_s / split.pieces),
        halves=None if halves is None else _split_halves(halves, split, casts, inside),
    )


def _split_halves(halves: Halves, split: Split, casts: int, inside: int) -> Halves:
    """Halves of a micro-batch; of a gradient that is made inside no part shrinks with its rows."""
    return replace(
        halves,
        left_bytes=split.of(halves.left_bytes, casts),
        first_peak_bytes=split.of(
            halves.first_peak_bytes, casts if halves.making_peak_bytes else inside
        ),
        second_peak_bytes=split.of(halves.second_peak_bytes, inside),
        making_peak_bytes=split.of(halves.making_peak_bytes, inside),
        first_s=Seconds(halves.first_s / split.pieces),
        second_s=Seconds(halves.second_s / split.pieces),
    )


def drawing_ahead(
    stages: Sequence[ShardSpec], batch: Bytes, layers: Sequence[LayerMeasure]
) -> tuple[ShardSpec, ...]:
    """With a first stage that has room to run the others' forwards, to see what they draw.

    It has the weights of one of their ``layers`` at a time there.
    """
    most = max(stage.forward_peak_bytes + stage.boundary_bytes for stage in stages)
    first = stages[0]
    weights = max((layer.parameter_bytes + layer.borrowed_bytes for layer in layers), default=0)
    inside = max(most + weights + batch, first.forward_peak_bytes, first.saving_peak_bytes)
    changed = replace(first, forward_peak_bytes=Bytes(inside), saving_peak_bytes=Bytes(inside))
    return (changed, *stages[1:])


def predicted(layers: Sequence[LayerMeasure], cuts: Sequence[int]) -> tuple[ShardSpec, ...]:
    """Shards of layers that keep what their forward saved, before they are measured.

    What one layer hands to the next is then saved too; where a layer saves its own output it is
    counted twice.
    """
    return tuple(_with_inner(layers, shard) for shard in predict_shards(layers, cuts))


def _with_inner(layers: Sequence[LayerMeasure], shard: ShardSpec) -> ShardSpec:
    start, stop = shard.layers
    inner = sum(layer.boundary_bytes for layer in layers[start : stop - 1])
    saved = shard.saved_bytes
    return replace(
        shard,
        saved_bytes=None if saved is None else Bytes(saved + inner),
        saving_peak_bytes=Bytes(shard.saving_peak_bytes + inner),
        backward_peak_bytes=Bytes(shard.backward_peak_bytes + inner),
        halves=_halves_of(layers, start, stop, inner),
    )


def _halves_of(layers: Sequence[LayerMeasure], start: int, stop: int, inner: int) -> Halves | None:
    """A stage's halves from those of its layers; see [Note: halves]."""
    chosen = [layer.halves for layer in layers[start:stop] if layer.halves is not None]
    if len(chosen) < stop - start:
        return None
    left, first = 0, 0
    saved: int = sum(layer.saved_bytes for layer in layers[start:stop])
    for place in reversed(range(start, stop)):
        halves = chosen[place - start]
        saved -= layers[place].saved_bytes
        came = layers[place + 1].carry_bytes if place + 1 < stop else 0
        first = max(first, saved + halves.first_peak_bytes + came + left)
        left += _left_by(layers, place, inside=(place > start, place + 1 < stop))
    return Halves(
        left_bytes=Bytes(left),
        keeps_boundary=chosen[0].keeps_boundary,
        keeps_carry=chosen[-1].keeps_carry,
        first_peak_bytes=Bytes(first + inner),
        second_peak_bytes=max(halves.second_peak_bytes for halves in chosen),
        making_peak_bytes=Bytes(sum(halves.making_peak_bytes for halves in chosen)),
        first_s=Seconds(sum(halves.first_s for halves in chosen)),
        second_s=Seconds(sum(halves.second_s for halves in chosen)),
    )


def _left_by(layers: Sequence[LayerMeasure], place: int, inside: tuple[bool, bool]) -> int:
    """What a layer leaves between the halves, with what comes from the layers beside it.

    ``inside``: whether the layer before, and the one after, are of the same stage.
    """
    halves = layers[place].halves
    if halves is None:
        return 0
    left: int = halves.left_bytes
    if halves.keeps_boundary and inside[0]:
        left += layers[place - 1].boundary_bytes
    if halves.keeps_carry and inside[1]:
        left += layers[place + 1].carry_bytes
    return left


def legal_cuts(layers: Sequence[LayerMeasure]) -> tuple[int, ...]:
    """Layers at which a later stage may begin."""
    return tuple(i + 1 for i, layer in enumerate(layers[:-1]) if layer.cut_after)


def most_pieces(layers: Sequence[LayerMeasure]) -> int:
    """How many shards or stages there are at most."""
    return len(legal_cuts(layers)) + 1


class Cutter:
    """Cuts of one measure for any number of stages.

    Args:
        batch: Bytes of a micro-batch's data, which travels along.
        fixed: What every stage needs besides: buffers.
    """

    def __init__(
        self, layers: Sequence[LayerMeasure], batch: Bytes, split: Split, fixed: int = 0
    ) -> None:
        self._edges = (0, *legal_cuts(layers), len(layers))
        self._batch, self._fixed = batch, fixed
        self._forward_s = self._sums([layer.forward_s for layer in layers])
        self._backward_s = self._sums([layer.backward_s for layer in layers])
        owned = [layer.parameter_bytes for layer in layers]
        read = [layer.parameter_bytes + layer.borrowed_bytes for layer in layers]
        gradients = [layer.trained_bytes for layer in layers]
        self._owned, self._read = self._sums(owned), self._sums(read)
        self._state = self._sums([layer.state_bytes for layer in layers])
        self._gradients = self._sums(gradients)
        saved = [split.of(c.saved_bytes, split.cast_bytes(c.parameter_bytes)) for c in layers]
        inner = self._inner([split.of(layer.boundary_bytes) for layer in layers])
        self._saved = self._sums(saved) + inner
        self._stash = self._sums([layer.stash_bytes for layer in layers])
        self._entering = _entering(layers, split)[list(self._edges)]
        inside = [_in_backward(layer, gradients[i], split) for i, layer in enumerate(layers)]
        self._inside = self._peaks(inside, saved, gradients) + inner
        self._first, self._left, self._second = self._in_two(layers, saved, split)
        self._first += inner

    @property
    def most(self) -> int:
        """Stages at most."""
        return len(self._edges) - 1

    def quickest(
        self, pipeline: Pipeline, budget: Bytes, *, predict: bool = False
    ) -> tuple[int, ...] | None:
        """The cuts with the quickest slowest stage of those whose stages fit; None: none does.

        Of cuts that are equally quick those over which the fewest bytes travel.
        """
        costs = []
        for stage in range(pipeline.stages):
            seconds = self._seconds(pipeline, stage)
            seconds[self._bytes(pipeline, stage, predict) > budget] = np.inf
            costs.append(seconds)
        return self._cut(costs)

    def smallest(self, pipeline: Pipeline, *, predict: bool = False) -> tuple[int, ...] | None:
        """The cuts with the smallest largest stage; None where there are too few pieces."""
        stages = range(pipeline.stages)
        return self._cut([self._bytes(pipeline, stage, predict) for stage in stages])

    # -- tables: row i, column j for the layers from edge i to edge j -----------------------

    def _sums(self, values: Sequence[float]) -> _Table:
        total = np.cumsum([0.0, *values])[list(self._edges)]
        table: _Table = total[None, :] - total[:, None]
        return table

    def _inner(self, boundaries: Sequence[int]) -> _Table:
        """What is handed on between the layers of a stage, and not out of it."""
        left = np.array([0, *boundaries])[list(self._edges)]
        table: _Table = np.triu(self._sums(boundaries) - left[None, :], 1)
        return table

    def _peaks(self, inside: Sequence[int], saved: Sequence[int], after: Sequence[int]) -> _Table:
        """The most inside a layer, with what earlier ones saved and later ones have left."""
        places = {edge: place for place, edge in enumerate(self._edges)}
        table = np.full((len(self._edges), len(self._edges)), -np.inf)
        peak = np.full(len(self._edges), -np.inf)  # of the layers from ``start`` to each edge
        edges, left = np.array(self._edges), np.cumsum([0.0, *after])
        for start in reversed(range(len(inside))):
            behind = np.where(edges > start, left[edges] - left[start + 1], -np.inf)
            peak = np.maximum(inside[start] + behind, saved[start] + peak)
            if start in places:
                table[places[start]] = peak
        return table

    def _in_two(
        self, layers: Sequence[LayerMeasure], saved: Sequence[int], split: Split
    ) -> tuple[_Table, _Table, _Table]:
        """Inside the first half of a backward, between the two, and inside the second."""
        cut = [_in_pieces(layer, split) for layer in layers]
        halves, last = [_halves_or_all(layer) for layer in cut], len(layers) - 1
        left = [_left_by(cut, i, inside=(i > 0, i < last)) for i in range(len(layers))]
        # Of what enters a stage all is there, with the batch, where its first layer keeps any.
        alone = np.array([0, *(layer.boundary_bytes for layer in cut)])[list(self._edges)]
        keeps = np.array([*(half.keeps_boundary for half in halves), False])[list(self._edges)]
        beside = keeps * (self._entering - alone + self._batch)
        came = [*(layer.carry_bytes for layer in cut[1:]), 0]
        first = [half.first_peak_bytes + c for half, c in zip(halves, came, strict=True)]
        nothing = [0] * len(layers)
        return (
            self._peaks(first, saved, left),
            self._sums(left) + beside[:, None],
            self._peaks([half.second_peak_bytes for half in halves], nothing, nothing),
        )

    def _seconds(self, pipeline: Pipeline, stage: int) -> _Table:
        again = pipeline.recompute and stage < pipeline.stages - 1
        seconds: _Table = self._backward_s + (self._forward_s if again else 0.0)
        return seconds

    def _bytes(self, pipeline: Pipeline, stage: int, predict: bool) -> _Table:
        """What a stage needs at its worst moment, on paper."""
        two = pipeline.versions - 1
        weights = self._read * (1 + two) + self._owned * predict + self._state
        weights = weights + self._gradients * pipeline.gradient_sets
        is_last = stage == pipeline.stages - 1
        flights = pipeline.bound(stage)
        entering = (self._entering[:, None] if stage else 0.0) + self._batch
        waits = 0.0 if is_last else self._stash if pipeline.recompute else self._saved
        if pipeline.schedule == "zb-h1" and stage:
            inside = self._in_halves(pipeline, stage, entering, waits)
        else:
            inside = flights * entering + (flights - 1) * waits + self._inside
        frames = 2.0 * (0 if is_last else self._entering[None, :] + self._batch) + entering
        found: _Table = self._fixed + weights + frames + inside
        return found

    def _in_halves(
        self, pipeline: Pipeline, stage: int, entering: _Table | float, waits: _Table | float
    ) -> _Table:
        """Inside the half of inputs, or that of weights which comes after it.

        It is as many halves behind as its number. A forward before the first half counts as no
        less than what a whole backward takes, until its shard is measured.
        """
        ahead = pipeline.ahead(stage) * (entering + waits)
        first = ahead + entering + stage * self._left + np.maximum(self._first, self._inside)
        found: _Table = np.maximum(first, ahead + (stage + 1) * self._left + self._second)
        return found

    # -- dynamic programming ---------------------------------------------------------------

    def _cut(self, costs: Sequence[_Table]) -> tuple[int, ...] | None:
        """The smallest largest cost, each stage with a table of its own; then the fewest bytes."""
        if len(costs) > self.most:
            return None
        upper = np.triu(np.ones_like(costs[0], dtype=bool), 1)
        tables = [np.where(upper, cost, np.inf) for cost in costs]
        best = tables[0][0]
        for table in tables[1:]:
            best = np.min(np.maximum(best[:, None], table), axis=0)
        largest = float(best[-1])
        return None if np.isinf(largest) else self._fewest_bytes(tables, largest)

    def _fewest_bytes(self, tables: Sequence[_Table], largest: float) -> tuple[int, ...]:
        allowed = [table <= largest * (1 + 1e-9) for table in tables]
        best = np.where(allowed[0][0], 0.0, np.inf)
        choices = []
        for table in allowed[1:]:
            totals = np.where(table, (best + self._entering)[:, None], np.inf)
            choices.append(np.argmin(totals, axis=0))
            best = np.min(totals, axis=0)
        place, cuts = len(self._edges) - 1, []
        for choice in reversed(choices):
            place = int(choice[place])
            cuts.append(self._edges[place])
        return tuple(reversed(cuts))


def _in_backward(layer: LayerMeasure, gradients: int, split: Split) -> int:
    weights = gradients + split.cast_bytes(layer.parameter_bytes)
    return split.of(layer.backward_peak_bytes, weights)


def _in_pieces(layer: LayerMeasure, split: Split) -> LayerMeasure:
    """A layer with the bytes of a micro-batch, as far as halves are made of them."""
    casts = split.cast_bytes(layer.parameter_bytes)
    return replace(
        layer,
        boundary_bytes=split.of(layer.boundary_bytes),
        carry_bytes=split.of(layer.carry_bytes),
        halves=_split_halves(_halves_or_all(layer), split, casts, casts + layer.trained_bytes),
    )


def _halves_or_all(layer: LayerMeasure) -> Halves:
    """A layer's halves; where they were not measured, all that a backward takes in each."""
    return layer.halves or Halves(
        left_bytes=layer.saved_bytes,
        keeps_boundary=True,
        keeps_carry=True,
        first_peak_bytes=layer.backward_peak_bytes,
        second_peak_bytes=layer.backward_peak_bytes,
        making_peak_bytes=layer.backward_peak_bytes,
    )


def _entering(layers: Sequence[LayerMeasure], split: Split) -> _Table:
    """What enters a stage that begins at each layer; 0 at the first, and at the end."""
    found, passing = [0.0], 0
    for before, here in itertools.pairwise(layers):
        found.append(split.of(passing + before.boundary_bytes))
        passing += max(before.boundary_bytes - here.private_bytes, 0)
    return np.array([*found, 0.0])
