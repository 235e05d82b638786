"""Which layer owns each parameter, and which layers borrow it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.core.errors import TrialError
from shoal.kernels.dispatched import run_operation
from shoal.partition.record import Record
from shoal.partition.wires import storage_key, tensors_in


@dataclass(frozen=True, slots=True)
class Owners:
    """Per layer, the names of the parameters it owns and borrows, in the model's order.

    ``shared_casts`` are those that autocast casts in this and in another layer.
    """

    owned: tuple[tuple[str, ...], ...]
    borrowed: tuple[tuple[str, ...], ...]
    shared_casts: tuple[frozenset[str], ...]


class UseRecorder(TorchDispatchMode):
    """Notes which parameters the operators of a layer read; ``layer`` None notes nothing.

    Parameters are known by their storage, so that views and ``.data`` count.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.layer: int | None = None
        self.uses: set[tuple[int, str]] = set()
        self.casts: set[tuple[int, str]] = set()
        self._names = {storage_key(parameter): name for name, parameter in parameters.items()}

    def enter(self, layer: int) -> None:
        """From here on it is ``layer`` that reads."""
        self.layer = layer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.layer is not None:
            for tensor in tensors_in((args, kwargs)):
                name = self._names.get(storage_key(tensor))
                if name is not None:
                    self.uses.add((self.layer, name))
                    if func.name() == "aten::_to_copy":
                        self.casts.add((self.layer, name))
        return run_operation(func, args, kwargs)


class AwayGuard(TorchDispatchMode):
    """Lets ``who`` read none of these parameters, whose weights are elsewhere.

    They are known by their identity: those that are away together may have one memory.
    """

    def __init__(self, who: str, away: Mapping[str, nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._who, self._away = who, {id(parameter): name for name, parameter in away.items()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for tensor in tensors_in((args, kwargs)):
            if (name := self._away.get(id(tensor))) is not None:
                raise TrialError(
                    f"the code of Recipe({self._who}=...) finds the model without being given it, "
                    f"and reads {name!r}, which it did not in the step by which the model was cut "
                    "into shards, and which is elsewhere when it runs. Have the model's forward "
                    "return what that needs, or train with technique='resident'."
                )
        return run_operation(func, args, kwargs)


def find_owners(model: nn.Module, record: Record, recorder: UseRecorder) -> Owners:
    """The earliest user owns a parameter; one that nothing uses belongs to the epilogue.

    A layer uses the parameters of the modules it calls, and those that its operators
    were recorded to read: a head may read the embedding's weight without calling it.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    num_layers = record.sections.num_layers
    users: dict[str, set[int]] = {name: set() for name in names.values()}
    for position, block in enumerate(record.blocks):
        _add_users(users, names, block.module, record.sections.layer_of(position))
    for layer, module in record.called:
        _add_users(users, names, module, layer)
    for layer, name in recorder.uses | record.uses:
        users[name].add(layer)
    owned: list[list[str]] = [[] for _ in range(num_layers)]
    borrowed: list[list[str]] = [[] for _ in range(num_layers)]
    for name, layers in users.items():
        first, *others = sorted(layers) or [num_layers - 1]
        owned[first].append(name)
        for layer in others:
            borrowed[layer].append(name)
    return Owners(
        tuple(map(tuple, owned)), tuple(map(tuple, borrowed)), _shared(recorder.casts, num_layers)
    )


def _shared(casts: set[tuple[int, str]], num_layers: int) -> tuple[frozenset[str], ...]:
    """Per layer, the names that it and another layer cast."""
    count = Counter(name for _, name in casts)
    return tuple(
        frozenset(name for at, name in casts if at == layer and count[name] > 1)
        for layer in range(num_layers)
    )


def _add_users(
    users: dict[str, set[int]], names: dict[int, str], module: nn.Module, layer: int
) -> None:
    for parameter in module.parameters():
        users[names[id(parameter)]].add(layer)
