"""Which modules are the blocks of a model's chain, and in which lists they stand."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from shoal.core.errors import PlanError
from shoal.partition.compiled import is_compiled

_BIG = 0.25  # of the largest list's parameters: a list that a cut should not ignore


class NotCuttable(PlanError):
    """A model has no chain of layers that could train shard by shard; says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the model cannot be cut into shards: {reason}.")
        self.reason = reason


class CalledApart(NotCuttable):
    """Blocks run as no block can; ``how`` says how, with a place for a block's name."""

    def __init__(self, blocks: Collection[str], how: str) -> None:
        words = how.format(repr(min(blocks)))
        super().__init__(f"the forward {words}, and fewer than two blocks are called otherwise")
        self.blocks = blocks


@dataclass(frozen=True, slots=True)
class Candidate:
    """Lists whose children may be the blocks, by module name; ``apart`` are those that are not."""

    lists: tuple[str, ...]
    blocks: dict[str, nn.Module]
    apart: tuple[nn.Module, ...] = ()

    def without(self, names: Collection[str]) -> Candidate:
        """The same, with some of its blocks as modules among others."""
        left = {name: block for name, block in self.blocks.items() if name not in names}
        apart = (self.blocks[name] for name in names)
        return Candidate(self.lists, left, (*self.apart, *apart))


def find_candidates(model: nn.Module) -> list[Candidate]:
    """The sets of lists worth trying as a chain, the one with the most blocks first.

    An ``nn.Sequential`` model is its own list. Otherwise these are the outermost ModuleLists
    and Sequentials, all together (a ResNet's four stages form one chain), then those with at
    least a quarter of the largest one's parameters, then the largest alone. None without lists.

    Raises:
        NotCuttable: the model hides what is in it.
    """
    _refuse_compiled("", model)
    if type(model) is nn.Sequential:
        blocks = dict(_flat_children("", model))
        if len(blocks) < 2:
            raise NotCuttable(f"the nn.Sequential has {len(blocks)} layer; two or more are needed")
        return [Candidate(("",), blocks)]
    sizes = {name: _parameter_count(module) for name, module in _outer_lists("", model)}
    if not sizes:
        return []
    largest = max(sizes, key=lambda name: sizes[name])
    big = [name for name, size in sizes.items() if size >= _BIG * sizes[largest]]
    choices = [tuple(sizes), tuple(big), *([(largest,)] if len(big) == 1 else [])]
    return [_candidate(model, names) for names in dict.fromkeys(choices)]


def find_parts(model: nn.Module) -> list[Candidate]:
    """The modules that a model consists of, for one whose lists do not make a good chain.

    Those of its children that have parameters, then all of them; and where most of it is in one
    of them, that one's own parts in its place. A model that only wraps another one has that
    one's parts.
    """
    prefix, whole = "", model
    while True:
        _refuse_compiled(prefix.rstrip("."), whole)
        parts = dict(_members(prefix, whole))
        full = _with_parameters(parts)
        if len(full) != 1:
            break
        name, whole = next(iter(full.items()))
        prefix = f"{name}."
    if len(full) < 2:
        return []
    finer = _opened(full, _parameter_count(whole))
    choices = [full, *[parts] * (len(parts) > len(full)), *[finer] * (len(finer) > len(full))]
    return [Candidate((prefix.rstrip("."),), blocks) for blocks in choices]


def _opened(parts: dict[str, nn.Module], whole: int) -> dict[str, nn.Module]:
    """In place of a part with more than half of ``whole`` parameters its own parts, if any.

    One that has something compiled by torch.jit is one piece, too.
    """
    for name, part in parts.items():
        scripted = any(isinstance(inner, torch.jit.ScriptModule) for inner in part.children())
        if scripted or _is_one_piece(part) or 2 * _parameter_count(part) <= whole:
            continue
        if inner := _with_parameters(dict(_members(f"{name}.", part))):
            others = {other: module for other, module in parts.items() if other != name}
            return _opened(others | inner, whole)
    return parts


def _is_one_piece(module: nn.Module) -> bool:
    """Is what it has inside compiled with it, or called as the targets of a batch have it?"""
    return is_compiled(module) or isinstance(module, nn.AdaptiveLogSoftmaxWithLoss)


def _with_parameters(parts: dict[str, nn.Module]) -> dict[str, nn.Module]:
    return {name: part for name, part in parts.items() if _parameter_count(part)}


def _refuse_compiled(name: str, module: nn.Module) -> None:
    if is_compiled(module):
        what = repr(name) if name else "it"
        raise NotCuttable(
            f"{what} is compiled as a whole by torch.compile, which hides its blocks; give the "
            "module itself and compile its blocks with block.compile()"
        )


def ancestors_of(model: nn.Module, blocks: Iterator[str]) -> dict[str, nn.Module]:
    """The modules that contain a block, the model itself among them."""
    names = {""}
    for block in blocks:
        parts = block.split(".")
        names.update(".".join(parts[:depth]) for depth in range(len(parts)))
    return {name: model.get_submodule(name) for name in sorted(names)}


def _candidate(model: nn.Module, lists: tuple[str, ...]) -> Candidate:
    blocks: dict[str, nn.Module] = {}
    for name in lists:
        blocks.update(_members(f"{name}.", model.get_submodule(name)))
    return Candidate(lists, blocks)


def _members(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children that can be called; of a list of lists the inner ones' members."""
    for key, child in module._modules.items():
        if child is None:
            continue
        if isinstance(child, torch.jit.ScriptModule):
            raise NotCuttable(
                f"{prefix + key!r} is compiled by torch.jit, which hides its code; give the "
                "module itself"
            )
        if type(child).forward is nn.Module.forward and not is_compiled(child):
            yield from _members(f"{prefix}{key}.", child)
        else:
            yield f"{prefix}{key}", child


def _outer_lists(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Lists with two or more children that have parameters, none inside another."""
    for key, child in module.named_children():
        name = f"{prefix}{key}"
        if _is_one_piece(child):
            continue
        with_parameters = [c for c in child.children() if any(True for _ in c.parameters())]
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(with_parameters) >= 2:
            yield name, child
        else:
            yield from _outer_lists(f"{name}.", child)


def _flat_children(prefix: str, module: nn.Sequential) -> Iterator[tuple[str, nn.Module]]:
    """The leaves of nested plain Sequentials; one with hooks of its own stays whole."""
    for key, child in module._modules.items():
        if child is None:
            continue
        if type(child) is nn.Sequential and len(child) and not _is_whole(child):
            yield from _flat_children(f"{prefix}{key}.", child)
        else:
            yield f"{prefix}{key}", child


def _is_whole(module: nn.Module) -> bool:
    return has_hooks(module) or is_compiled(module)


def has_hooks(module: nn.Module) -> bool:
    """Does calling the module do more than its forward?"""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
