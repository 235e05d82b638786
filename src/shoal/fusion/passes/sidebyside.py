"""Gradients of a tensor's parts, put side by side in a graph instead of added up.

[Note: zeros that nobody need add]
Autograd makes of the gradient of ``x[i]`` or ``x[a:b]`` one of all of ``x``, zero elsewhere, and
adds these up: for the three parts of an attention's projection three tensors of zeros, three
copies and two sums, for a loop over T moments T of each. Where the parts do not overlap, each
is written once to where it belongs. It is still added to a zero, as a sum would, since that makes
of a -0.0 a 0.0: the bits are those of the sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx

ATEN = torch.ops.aten
SELECTS, SLICES, ADDS = (
    ATEN.select_backward.default,
    ATEN.slice_backward.default,
    ATEN.add.Tensor,
)


class Part(NamedTuple):
    """Where in a dimension a gradient belongs; one number has no extent of its own there."""

    start: int
    extent: int
    is_one: bool


def put_side_by_side(graph: fx.Graph) -> None:
    """Replace sums of what does not overlap. What nobody reads any more is left to be dropped."""
    for node in list(graph.nodes):
        if node.target is ADDS and not _is_in_a_sum(node):
            _replace(graph, node, list(_terms(node)))


def side_by_side(
    gradients: Sequence[Tensor],
    parts: Sequence[tuple[int, int, bool]],
    sizes: Sequence[int],
    dim: int,
) -> Tensor:
    """One tensor of ``sizes`` with each gradient in its ``Part`` of ``dim``, zeros elsewhere."""
    whole = sum(extent for _, extent, _ in parts) == sizes[dim]
    out = gradients[0].new_empty(sizes) if whole else gradients[0].new_zeros(sizes)
    for gradient, (start, extent, is_one) in zip(gradients, parts, strict=True):
        place = out.select(dim, start) if is_one else out.narrow(dim, start, extent)
        torch.add(gradient, 0, out=place)
    return out


def _replace(graph: fx.Graph, node: fx.Node, terms: Sequence[fx.Node]) -> None:
    found = [_part_of(term) for term in terms]
    if any(one is None for one in found):
        return
    places = [one for one in found if one is not None]
    sizes, dim, _ = places[0]
    parts = [part for *_, part in places]
    if any(place[:2] != (sizes, dim) for place in places) or _overlap(parts):
        return
    gradients = [term.args[0] for term in terms]
    with graph.inserting_before(node):
        plain = [tuple(part) for part in parts]  # what runs a graph may write them out
        new = graph.call_function(side_by_side, (gradients, plain, list(sizes), dim))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)


def _is_in_a_sum(node: fx.Node) -> bool:
    """Whether ``_terms`` of a later sum has its terms."""
    return len(node.users) == 1 and _adds_two(next(iter(node.users)))


def _terms(node: fx.Node) -> Iterator[fx.Node]:
    """What a sum of sums adds up, down to what others read as well."""
    if not _adds_two(node):
        yield node
        return
    for term in node.args:
        assert isinstance(term, fx.Node)
        if _adds_two(term) and len(term.users) == 1:
            yield from _terms(term)
        else:
            yield term


def _adds_two(node: fx.Node) -> bool:
    return (
        node.target is ADDS
        and not node.kwargs
        and len(node.args) == 2
        and all(isinstance(term, fx.Node) for term in node.args)
        and node.args[0] is not node.args[1]
    )


def _part_of(node: fx.Node) -> tuple[tuple[int, ...], int, Part] | None:
    """Of what sizes, in which dimension and where a gradient is not zero; None if unknown."""
    if node.target not in (SELECTS, SLICES) or node.kwargs:
        return None
    _, sizes, dim, *rest = node.args
    if not isinstance(sizes, list | tuple) or not all(type(size) is int for size in sizes):
        return None
    if not isinstance(dim, int) or not all(isinstance(number, int) for number in rest):
        return None
    shape = tuple(size for size in sizes if isinstance(size, int))
    dim %= len(shape)
    numbers, length = [number for number in rest if isinstance(number, int)], shape[dim]
    if node.target is SELECTS:
        return shape, dim, Part(numbers[0] % length, 1, is_one=True)
    *ends, step = numbers
    start, end = (min(max(at + length * (at < 0), 0), length) for at in ends)
    if step != 1 or end <= start:
        return None
    return shape, dim, Part(start, end - start, is_one=False)


def _overlap(parts: Sequence[Part]) -> bool:
    ordered = sorted(parts)
    return any(a.start + a.extent > b.start for a, b in itertools.pairwise(ordered))
