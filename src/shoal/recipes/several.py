"""Several models or optimizers that stand for one, each under its own name.

What a recipe's functions return for a GAN, or for Muon beside AdamW. The rest of shoal sees one
module and one optimizer (and schedule, ``schedules.py``); the recipe's own functions get back
what they returned.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shoal.core.errors import SpecError

V = TypeVar("V")


class Named(Mapping[str, V]):
    """A read-only mapping whose values are attributes too: ``models.generator``.

    Raises:
        SpecError: a name that is not there; says which are.
    """

    def __init__(self, values: Mapping[str, V], what: str) -> None:
        self.__dict__["_values"], self.__dict__["_what"] = dict(values), what

    def __getitem__(self, name: str) -> V:
        found: dict[str, V] = self.__dict__["_values"]
        if name not in found:
            raise SpecError(
                f"there is no {self.__dict__['_what']} {name!r}; there are {', '.join(found)}."
            )
        return found[name]

    def __getattr__(self, name: str) -> V:
        if name.startswith("__"):  # copy and pickle ask for what is not there
            raise AttributeError(name)
        return self[name]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"the {self.__dict__['_what']}s of a step are read-only")

    def __contains__(self, name: object) -> bool:
        return name in self.__dict__["_values"]

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dict."""
        return self.__dict__["_values"].get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dict__["_values"])

    def __len__(self) -> int:
        return len(self.__dict__["_values"])

    def __repr__(self) -> str:
        return repr(self.__dict__["_values"])

    def __reduce__(self) -> tuple[Any, ...]:
        return Named, (self.__dict__["_values"], self.__dict__["_what"])


# ---------------------------------------------------------------- models


class Models(nn.Module):
    """The modules of a factory's mapping as children of one; parameters are "generator.0.weight".

    Raises:
        SpecError: no module, or a name that no child of a module can have.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__()
        if not given:
            raise SpecError("Recipe(model=...) returned an empty mapping; return name -> module.")
        for name, module in given.items():
            if not isinstance(module, nn.Module):
                raise SpecError(
                    f"Recipe(model=...) returned {type(module).__name__} under {name!r}; every "
                    "value of its mapping is an nn.Module."
                )
            if not isinstance(name, str) or not name.isidentifier() or hasattr(self, name):
                raise SpecError(
                    f"Recipe(model=...) returned a module under the name {name!r}, which cannot "
                    "be one: parameters are called by it, as in 'generator.net.0.weight'. Use "
                    "letters, digits and underscores, and nothing that every module has, such as "
                    "'train'."
                )
            self.add_module(name, module)

    def __getitem__(self, name: str) -> nn.Module:
        return self.named()[name]

    def named(self) -> Named[nn.Module]:
        """The user's own modules."""
        # Of what is tied under two names ``children`` would give one.
        found = {name: m for name, m in self._modules.items() if m is not None}
        return Named(found, "model")


def models_of(model: nn.Module) -> Any:
    """What a recipe's functions get: the mapping of modules, or the bare module."""
    return model.named() if isinstance(model, Models) else model


# ---------------------------------------------------------------- optimizers


class Optimizers(torch.optim.Optimizer):
    """Several optimizers as one: their groups one after another, their state by parameter.

    ``given`` is what the recipe returned. A parameter that two of them have has the state of
    both, each under the optimizer's name: "actor/exp_avg".
    """

    def __init__(self, given: Any, members: Mapping[str, torch.optim.Optimizer]) -> None:
        # Not Optimizer's own: it would make groups and state of its own.
        self.given, self.members = given, dict(members)
        self.defaults: dict[str, Any] = {}
        self._states = _States(self.members)

    def __getstate__(self) -> dict[str, Any]:
        return {"given": self.given, "members": self.members}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.given, self.members = state["given"], state["members"]
        self.defaults = {}
        self._states = _States(self.members)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # not to be set
        """The members' own groups: what changes in one changes there."""
        return [group for member in self.members.values() for group in member.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]  # likewise
        """A view of the members' states; see the class."""
        return self._states

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Each member's own."""
        for member in self.members.values():
            member.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Each member's own, in order."""
        for member in self.members.values():
            member.step()

    def __repr__(self) -> str:
        return repr(self.members)


class _States(MutableMapping[Any, Any]):
    """What several optimizers keep, by parameter."""

    def __init__(self, members: Mapping[str, torch.optim.Optimizer]) -> None:
        self._members = members
        self._holders = _holders(members)

    def _of(self, parameter: object) -> list[str]:
        """The optimizers that have it; a group may have been added since."""
        if id(parameter) not in self._holders:
            self._holders = _holders(self._members)
        return self._holders.get(id(parameter), [])

    def __getitem__(self, parameter: Tensor) -> Any:
        holders = self._of(parameter)
        if not holders:
            raise KeyError(parameter)
        if len(holders) == 1:
            return self._members[holders[0]].state[parameter]
        return _Shared({name: self._members[name].state[parameter] for name in holders})

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        """The state, or ``default`` where there is none yet."""
        if parameter not in self:
            return default
        return self[parameter]

    def __contains__(self, parameter: object) -> bool:
        holders = self._of(parameter)
        return any(parameter in self._members[name].state for name in holders)

    def __setitem__(self, parameter: Tensor, entry: Mapping[str, Any]) -> None:
        holders = self._of(parameter)
        if len(holders) == 1:
            self._members[holders[0]].state[parameter] = dict(entry)
        else:
            self[parameter].update(entry)

    def __delitem__(self, parameter: Tensor) -> None:
        for name in self._of(parameter):
            self._members[name].state.pop(parameter, None)

    def __iter__(self) -> Iterator[Tensor]:
        held = (p for member in self._members.values() for p in member.state)
        return iter({id(p): p for p in held if isinstance(p, Tensor)}.values())

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _holders(members: Mapping[str, torch.optim.Optimizer]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for name, member in members.items():
        for parameter in (p for group in member.param_groups for p in group["params"]):
            found.setdefault(id(parameter), []).append(name)
    return found


class _Shared(MutableMapping[str, Any]):
    """What several optimizers keep for one parameter, under "<optimizer>/<key>"."""

    def __init__(self, entries: Mapping[str, dict[str, Any]]) -> None:
        self._entries = entries

    def _find(self, key: str) -> tuple[dict[str, Any], str]:
        name, _, rest = key.partition("/")
        return self._entries[name], rest

    def __getitem__(self, key: str) -> Any:
        entry, rest = self._find(key)
        return entry[rest]

    def __setitem__(self, key: str, value: Any) -> None:
        entry, rest = self._find(key)
        entry[rest] = value

    def __delitem__(self, key: str) -> None:
        entry, rest = self._find(key)
        del entry[rest]

    def __iter__(self) -> Iterator[str]:
        return iter([f"{name}/{key}" for name, entry in self._entries.items() for key in entry])

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {key: copy.deepcopy(value, memo) for key, value in self.items()}


def as_one_optimizer(given: Any) -> torch.optim.Optimizer:
    """What an optimizer factory returned, as one optimizer.

    Raises:
        SpecError: it is none, nor a list, tuple or mapping of some.
    """
    if isinstance(given, torch.optim.Optimizer):
        return given
    named = by_name(given)
    if not named or not all(isinstance(o, torch.optim.Optimizer) for o in named.values()):
        some = any(isinstance(o, torch.optim.Optimizer) for o in named.values())
        held = ", ".join(type(o).__name__ for o in named.values()) if some else ""
        raise SpecError(
            f"Recipe(optimizer=...) returned {type(given).__name__}{f' of {held}' if held else ''}"
            "; return one torch.optim.Optimizer over the named parameters it was given, or a "
            "list, tuple or mapping of some."
        )
    for name in named:
        if not name or "/" in name or "|" in name:
            raise SpecError(
                f"Recipe(optimizer=...) returned an optimizer under the name {name!r}: a name is "
                "not empty and has no '/' and no '|'."
            )
    if len({id(o) for o in named.values()}) < len(named):
        raise SpecError("Recipe(optimizer=...) returned one optimizer twice; return it once.")
    return Optimizers(given, named)


def members_of(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """The user's own optimizers, of which there is one in most recipes."""
    if isinstance(optimizer, Optimizers):
        return tuple(optimizer.members.values())
    return (optimizer,)


def entries_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What it keeps for each parameter; it may keep something for none, under a name."""
    return [entry for key, entry in optimizer.state.items() if isinstance(key, Tensor)]


def optimizers_of(optimizer: torch.optim.Optimizer) -> Any:
    """What a recipe's functions get: what the factory returned, a mapping with attributes."""
    if not isinstance(optimizer, Optimizers):
        return optimizer
    given = optimizer.given
    return Named(given, "optimizer") if isinstance(given, Mapping) else given


def held_by_several(
    optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]
) -> tuple[str, ...]:
    """The parameters that more than one of the optimizers has."""
    counts: defaultdict[int, int] = defaultdict(int)
    for member in members_of(optimizer):
        for one in {id(p) for group in member.param_groups for p in group["params"]}:
            counts[one] += 1
    return tuple(name for name, p in named.items() if counts[id(p)] > 1)


def by_name(given: Any) -> dict[str, Any]:
    """The members of a list, tuple or mapping by name; of something else none."""
    if isinstance(given, Mapping):
        return {str(name): member for name, member in given.items()}
    if isinstance(given, list | tuple):
        return {str(index): member for index, member in enumerate(given)}
    return {}


def each_kind(optimizer: torch.optim.Optimizer, say: Callable[[Any], str]) -> str:
    """Words about an optimizer, for several one after another."""
    return " + ".join(map(say, members_of(optimizer)))
