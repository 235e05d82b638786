"""Which modules are the blocks of a model's chain, and in which lists they stand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from shoal.core.errors import PlanError

_BIG = 0.25  # of the largest list's parameters: a list that a cut should not ignore


class NotCuttable(PlanError):
    """A model has no chain of layers that could train shard by shard; says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the model cannot be cut into shards: {reason}.")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Candidate:
    """Lists whose children may be the blocks, by module name."""

    lists: tuple[str, ...]
    blocks: dict[str, nn.Module]

    @property
    def title(self) -> str:
        return " and ".join(repr(name) if name else "the model" for name in self.lists)


def find_candidates(model: nn.Module) -> list[Candidate]:
    """The sets of lists worth trying as a chain, best first.

    An ``nn.Sequential`` model is its own list. Otherwise the outermost ModuleLists and
    Sequentials are tried all together (a ResNet's four stages form one chain), then those
    with at least a quarter of the largest one's parameters, then the largest alone.

    Raises:
        NotCuttable: no list with two children that have parameters.
    """
    if type(model).__name__ == "OptimizedModule":
        raise NotCuttable(
            "it is compiled as a whole by torch.compile, which hides its blocks; give the "
            "module itself and compile its blocks with block.compile()"
        )
    if type(model) is nn.Sequential:
        blocks = dict(_flat_children("", model))
        if len(blocks) < 2:
            raise NotCuttable(f"the nn.Sequential has {len(blocks)} layer; two or more are needed")
        return [Candidate(("",), blocks)]
    sizes = {name: _parameter_count(module) for name, module in _outer_lists("", model)}
    if not sizes:
        raise NotCuttable(
            "it has no nn.ModuleList or nn.Sequential with two or more children that have "
            "parameters, so there is no list of blocks to cut between"
        )
    largest = max(sizes, key=lambda name: sizes[name])
    big = [name for name, size in sizes.items() if size >= _BIG * sizes[largest]]
    choices = [tuple(sizes), tuple(big), *([(largest,)] if len(big) == 1 else [])]
    return [_candidate(model, names) for names in dict.fromkeys(choices)]


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
        blocks.update(
            (f"{name}.{key}", child)
            for key, child in model.get_submodule(name)._modules.items()
            if child is not None
        )
    return Candidate(lists, blocks)


def _outer_lists(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Lists with two or more children that have parameters, none inside another."""
    for key, child in module.named_children():
        name = f"{prefix}{key}"
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
        if type(child) is nn.Sequential and len(child) and not has_hooks(child):
            yield from _flat_children(f"{prefix}{key}.", child)
        else:
            yield f"{prefix}{key}", child


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
