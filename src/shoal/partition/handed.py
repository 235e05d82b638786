"""What blocks hand over by forward hooks inside of them, and not by what they return.

[Note: handed over by hooks]
transformers collects router logits, hidden states and attentions by forward hooks, which put what
they are given into a list of the forward that is under way, and the model reads that list at its
end. So may a user's hooks. Such a hook must find what its module computed when the forward is run
with stand-ins, and need not run when the block does. What it is given is therefore taken for
output of the block, beside what that returns:

    the block really runs      the hooks are out of sight, what they would be given is noted
    a stub in its place        gives them that, in their order: stand-ins, or what is read of it

That is done with hooks that do nothing but keep: they return nothing and call none of torch's
functions, but may ask for a device, as timm's do. And only if the forward reads what one of them
kept; others run when their module does. Modules outside of the blocks, which are passed over where
the forward is entered again, are treated in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from shoal.core.errors import TrialError
from shoal.partition.template import flatten, is_constant

_Hook = Callable[..., Any]


class Keeper(NamedTuple):
    """A hook that keeps what it is given, as it is found in another model of the same code too.

    ``module`` is the hooked module's name inside of the block, ``number`` counts the hooks of
    one ``function`` there, of those before and those behind its forward.
    """

    module: str
    function: str
    number: int
    before: bool  # a hook that is called before its module's forward
    with_kwargs: bool


Keepers = Mapping[str, tuple[Keeper, ...]]
"""Those of each block, by its name."""
Handed = dict[tuple[Keeper, int], Any]
"""What the hooks were given in one run of a block, in the order of these calls, each counted."""


@dataclass(frozen=True, slots=True)
class Given:
    """In place of a tensor that is an argument of the block: its number among the leaves."""

    index: int


class _Place(NamedTuple):
    """Where a hook is registered."""

    module: nn.Module
    hooks: dict[int, _Hook]
    key: int


def hooks_of(block: nn.Module) -> Iterator[tuple[Keeper, _Place]]:
    """All hooks of forwards in a block, and where each is."""
    for name, module in block.named_modules():
        for before, hooks, with_kwargs in (
            (True, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
            (False, module._forward_hooks, module._forward_hooks_with_kwargs),
        ):
            numbers: Counter[str] = Counter()
            for key, hook in hooks.items():
                function = str(getattr(hook, "__qualname__", type(hook).__qualname__))
                number = numbers[function]
                numbers[function] += 1
                keeper = Keeper(name, function, number, before, key in with_kwargs)
                yield keeper, _Place(module, hooks, key)


@contextmanager
def hooks_replaced(
    block: nn.Module, replacement: Callable[[Keeper, _Hook], _Hook | None]
) -> Iterator[None]:
    """Other functions in place of a block's hooks of forwards, where there is one for it."""
    found = [(keeper, place, place.hooks[place.key]) for keeper, place in hooks_of(block)]
    for keeper, place, hook in found:
        place.hooks[place.key] = replacement(keeper, hook) or hook
    try:
        yield
    finally:
        for _, place, hook in found:
            place.hooks[place.key] = hook


# -- which hooks keep ------------------------------------------------------------------------


_DEVICE = Tensor.device.__get__


class _Functions(TorchFunctionMode):
    """Notes whether any function of torch is called, be it for a shape; a device is known."""

    called = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.called = self.called or func != _DEVICE
        return func(*args, **(kwargs or {}))


class KeeperSearch:
    """Finds the hooks that do nothing but keep what they are given.

    They are given aliases, by which it is seen whether what they kept is read: ``alias`` makes
    one of a tensor that a hook of the block of that name is given.
    """

    def __init__(self, alias: Callable[[Tensor], Tensor]) -> None:
        self._alias = alias
        self._others: set[tuple[str, Keeper]] = set()
        self._found: dict[tuple[str, Keeper], None] = {}

    @property
    def keepers(self) -> Keepers:
        """Those that were called and are such hooks."""
        found: dict[str, tuple[Keeper, ...]] = {}
        for block, keeper in self._found:
            if (block, keeper) not in self._others:
                found[block] = (*found.get(block, ()), keeper)
        return found

    def inside(self, name: str, block: nn.Module) -> AbstractContextManager[None]:
        """Watch the hooks in a block while it runs."""
        return hooks_replaced(block, lambda keeper, hook: self._watched((name, keeper), hook))

    def _watched(self, key: tuple[str, Keeper], hook: _Hook) -> _Hook:
        def watched(module: nn.Module, *given: Any) -> Any:
            leaves, spec = flatten(given)
            aliases = [self._alias(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            self._found[key] = None
            with _Functions() as functions:
                returned = hook(module, *pytree.tree_unflatten(aliases, spec))
            known = all(isinstance(leaf, Tensor) or is_constant(leaf) for leaf in leaves)
            if functions.called or returned is not None or not known:
                self._others.add(key)
            return returned

        return watched


# -- what they are given ---------------------------------------------------------------------


@contextmanager
def noted(
    block: nn.Module, keepers: Sequence[Keeper], arguments: Sequence[Any]
) -> Iterator[Handed]:
    """What the keepers in a block would be given while it runs; they do not run.

    ``arguments`` are the leaves of what it is called with. A hook that is not there is noted
    as if it were: some are made by the first forward that wants them.
    """
    handed: Handed = {}
    places = {id(leaf): n for n, leaf in enumerate(arguments) if isinstance(leaf, Tensor)}
    calls: Counter[Keeper] = Counter()

    def note(keeper: Keeper) -> _Hook:
        def hook(module: nn.Module, *given: Any) -> None:
            leaves, spec = flatten(given)
            kept = [Given(places[id(v)]) if id(v) in places else v for v in leaves]
            handed[keeper, calls[keeper]] = pytree.tree_unflatten(kept, spec)
            calls[keeper] += 1

        return hook

    wanted = frozenset(keepers)
    missing = wanted - {keeper for keeper, _ in hooks_of(block)}
    with ExitStack() as stack:
        for keeper in (keeper for keeper in keepers if keeper in missing):
            module, hook = block.get_submodule(keeper.module), note(keeper)
            if keeper.before:
                handle = module.register_forward_pre_hook(hook, with_kwargs=keeper.with_kwargs)
            else:
                handle = module.register_forward_hook(hook, with_kwargs=keeper.with_kwargs)
            stack.callback(handle.remove)
        stack.enter_context(
            hooks_replaced(block, lambda keeper, _: note(keeper) if keeper in wanted else None)
        )
        yield handed


def run_noting(
    call: Callable[..., Any],
    block: nn.Module,
    keepers: Sequence[Keeper],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """What ``call``, the block's own, returns; with keepers and what they would be given."""
    if not keepers:
        return call(*args, **kwargs)
    with noted(block, keepers, flatten((args, kwargs))[0]) as handed:
        returned = call(*args, **kwargs)
    return returned, handed


def returned_of(
    output: Any,
    block: nn.Module,
    keepers: Sequence[Keeper],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """What the block returns, of what ``run_noting`` gave; the keepers are given theirs."""
    if not keepers:
        return output
    returned, handed = output
    _hand_over(block, handed, args, kwargs)
    return returned


def _hand_over(
    block: nn.Module, handed: Handed, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Give the keepers in a block, which is called with these arguments, what is theirs.

    Raises:
        TrialError: one of them is not there.
    """
    arguments = flatten((args, kwargs))[0]
    places = dict(hooks_of(block))
    for (keeper, _), given in handed.items():
        if keeper not in places:
            raise TrialError(
                f"the forward hook {keeper.function!r} of the module {keeper.module!r} in a block "
                "is gone, by which the forward had what that computes in the pilot. Leave it "
                "there, or train this model unsharded."
            )
        place = places[keeper]
        leaves, spec = flatten(given)
        real = [arguments[v.index] if isinstance(v, Given) else v for v in leaves]
        place.hooks[place.key](place.module, *pytree.tree_unflatten(real, spec))
