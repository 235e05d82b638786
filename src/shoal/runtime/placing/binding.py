"""A trial's parameters, gradients and optimizer state, bound to wherever they are now.

The model and the optimizer are the user's own objects, built once. Their tensors point
into a device slot while a shard is on the device, into the host store while the
host steps, and to a poison (NaN without memory) in between, so that touching what is not
there is seen and not silently right.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_all, tree_map_only

from shoal.core.errors import SpecError, TrialError
from shoal.kernels.kernelstep import is_torchs, put_back
from shoal.kernels.poison import Poison
from shoal.kernels.rounding import Rounding
from shoal.memory.layout import TensorSpec
from shoal.memory.store import describe
from shoal.partition.unwritten import weight_places
from shoal.recipes.habits import kept_in_place
from shoal.recipes.several import members_of
from shoal.recipes.subsets import Subsets
from shoal.runtime.placing.placed import Placed
from shoal.runtime.placing.unplaced import replaced, unfrozen, unplaced
from shoal.runtime.saving.packing import Packer


class Binding:
    """The model's parameters and the optimizer's state by name, and where they point.

    Args:
        model: The user's module; its parameters keep their identity for good.
        optimizer: The user's optimizer over those parameters.
        owned: Per shard the names of the parameters it steps.
        device: Where evicted parameters pretend to be.
        rounding: How a step leaves the weights, where not as the optimizer does.
        chunks: Per shard groups of its names that a step on the host takes one after another;
            of a shard that is not named, all at once.

    Attributes:
        pieces: Per shard what ``step_on_host`` is to be called with, one after another: the
            number of a part of the optimizer, which is the shard's own for all of it, and the
            names it is of.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        owned: Sequence[Sequence[str]],
        device: torch.device,
        rounding: Rounding | None = None,
        chunks: Mapping[int, Sequence[Sequence[str]]] | None = None,
    ) -> None:
        self.params: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._model, self.optimizer = model, optimizer
        self._held = weight_places(model, self.params)
        self.frozen = [name for name, p in self.params.items() if not p.requires_grad]  # for good
        self.stateful: dict[str, set[str]] = {}  # name -> the stored keys it has by now
        parts = list(owned)
        self.pieces: list[list[tuple[int, Sequence[str]]]] = []
        for shard, names in enumerate(owned):
            cut = (chunks or {}).get(shard, ())
            self.pieces.append(list(enumerate(cut, len(parts))) or [(shard, names)])
            parts += cut
        self._subsets = Subsets(optimizer, self.params, parts)
        self._stepped = self._subsets.stepped
        self._bound: dict[int, Placed] = {}
        self.keeps_gradients = False  # until the schedule has stepped
        self._places: tuple[Placed | None, list[tuple[nn.Parameter, int]]] = (None, [])
        self._settled: dict[int, _Settled] = {}
        self._rounding = rounding or Rounding({}, 0)
        self.dtypes = {n: p.grad_dtype or p.dtype for n, p in self.params.items()}  # in a step
        self._poison = Poison()
        self.poison = {n: self._poison.like(p, device) for n, p in self.params.items()}

    def bind(self, shard: int, placed: Placed) -> None:
        """Point the shard's parameters, borrowed ones too, at ``placed``."""
        if self._bound.get(shard) is placed and not placed.borrowed:
            return
        for name, tensor in placed.params.items():
            self.params[name].data = tensor
        for name in self._stepped[shard]:
            self._bind_state(name, placed)
        self._turn_lenders(placed)
        self._bound[shard] = placed

    def unbind(self) -> None:
        """Have the next step point everything at its place: somebody pointed it elsewhere."""
        self._bound.clear()

    def _turn_lenders(self, placed: Placed) -> None:
        """A lender of what is borrowed has to point at its own again, where it is here too."""
        if not (lent := placed.borrowed.keys()):
            return
        for lender in [s for s, p in self._bound.items() if p.params.keys() & lent]:
            del self._bound[lender]

    def _bind_state(self, name: str, placed: Placed) -> None:
        """Point the state that the optimizer has made so far; what it has not is not there."""
        state, places = self.optimizer.state, placed.states.get(name, {})
        for key in self.stateful.get(name, ()) if places else ():
            state[self.params[name]][key] = places[key]

    def evict(self, shard: int, placed: Placed) -> None:
        """Poison the shard's parameters; borrowed ones too."""
        for name in placed.params:
            self.params[name].data = self.poison[name]
        self._turn_lenders(placed)
        self._bound.pop(shard, None)
        self._places = None, []

    def evict_state(self, shard: int) -> None:
        """Let go of the memory that holds the shard's state; it is bound again with a step."""
        for name in self._stepped[shard]:
            state = self.optimizer.state.get(self.params[name], {})
            for key, value in state.items():
                if is_stored(value):
                    state[key] = self._poison.like(value)
        self._bound.pop(shard, None)
        self._places = None, []
        for part in (shard, *(part for part, _ in self.pieces[shard])):
            self._settled.pop(part, None)

    def let_go(self) -> None:
        """Hold on to no memory of the device: what goes on from here is placed anew before.

        Parameters and state that is stored are poison, and what else the optimizer keeps for a
        parameter is on the host.
        """
        self._bound.clear()
        self._settled.clear()
        self._places = None, []
        host, self._poison = torch.device("cpu"), Poison()
        self.poison = {name: self._poison.like(p, host) for name, p in self.params.items()}
        for name, parameter in self.params.items():
            parameter.data, parameter.grad = self.poison[name], None
            state = self.optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor):
                    stored = is_stored(value)
                    state[key] = self._poison.like(value, host) if stored else value.to(host)

    def step(
        self, shard: int, placed: Placed, grads: Mapping[str, Tensor], number: int = 0
    ) -> None:
        """Step one shard with the user's optimizer on the tensors of ``placed``.

        ``number`` is that of the trial's step, from 0.
        A parameter without a gradient is skipped, as torch skips it. State that the
        optimizer makes or replaces is copied to its place.
        """
        self.bind(shard, placed)
        self._step(shard, placed, grads, number)

    def step_where_it_is(self, shard: int, placed: Placed, number: int = 0) -> None:
        """Step a bound shard on the gradients that its parameters have."""
        try:
            if self._stepped[shard]:
                self.step_part(shard, number)
        finally:
            for name in placed.params if not self.keeps_gradients else ():
                self.params[name].grad = None
        if any(p.data_ptr() != at for p, at in self._places_of(placed)):
            self._put_back(placed)
        self.keep_state(shard, placed)

    def require_frozen(self) -> None:
        """After a backward: what was frozen has no gradient now.

        Raises:
            TrialError: it has one, for which no room was planned.
        """
        for name in self.frozen:
            if self.params[name].grad is not None:
                raise TrialError(unfrozen(name, "its gradient"))

    def require_same(self) -> None:
        """After a pass: a TrialError where another parameter is in the place of one of these."""
        for held, key, name in self._held:
            if held.get(key) is not self.params[name]:
                raise TrialError(replaced("the forward", name))

    def put_back_bound(self) -> None:
        """The same for all that is bound, after a pass in which code may have done so."""
        for placed in self._bound.values():
            self._put_back(placed)

    def _places_of(self, placed: Placed) -> list[tuple[nn.Parameter, int]]:
        """The parameters of a bound shard, and where their data is; looked up once."""
        known, places = self._places
        if known is not placed:
            places = [(self.params[n], place.data_ptr()) for n, place in placed.params.items()]
            self._places = placed, places
        return places

    @contextmanager
    def around_schedule(self) -> Iterator[None]:
        """A schedule may look at gradients, which are gone behind it, and give parameters data.

        Raises:
            TrialError: data of another shape or type.
        """
        if not self.keeps_gradients:
            yield
            return
        with kept_in_place(self.params):
            yield
        for name, parameter in self.params.items():
            parameter.grad = None
            entry = self.optimizer.state.get(parameter)
            if entry is None:  # it may have cleared the state
                self.stateful.pop(name, None)
            elif name in self.stateful:
                self.stateful[name] &= entry.keys()
        self._require_groups()

    def take_stock(self, shard: int, placed: Placed) -> None:
        """After a step of one's own: parameters and state that it replaced go to their places.

        Raises:
            TrialError: a parameter or its state has no longer the shape or type that it had, or
                the model or an optimizer has other parameters.
        """
        self.require_parameters("the step")
        self._require_groups()
        for name in placed.params:
            self.params[name].grad = None
        self._put_back(placed)
        self.keep_state(shard, placed)

    def require_parameters(self, who: str) -> None:
        """The model's parameters are those whose values, state and gradients are kept here.

        Raises:
            TrialError: it has others, which ``who`` gave it, or lacks one.
        """
        now = dict(self._model.named_parameters())
        for name in (*now, *self.params):
            if now.get(name) is not self.params.get(name):
                raise TrialError(replaced(who, name, is_there=name in now))

    def _put_back(self, placed: Placed) -> None:
        """Data that code gave a parameter (``p.data = ...``) goes to its place.

        Raises:
            TrialError: as of ``take_stock``.
        """
        for name, place in placed.params.items():
            put_back(name, self.params[name], place)

    def step_on_host(
        self,
        part: int,
        host: Placed,
        grads: Mapping[str, Tensor],
        number: int,
        memory: Tensor | None = None,
    ) -> None:
        """Step an evicted shard on its host copies, or one of its ``pieces``, and poison it again.

        On a thread of its own, beside units of other shards: it touches only what this part
        steps, and of a borrowed parameter nothing. Split weights are put together in ``memory``
        meanwhile.
        """
        whole = {} if memory is None else host.joined(self._stepped[part], memory)
        for name in self._stepped[part]:
            self.params[name].data = whole[name] if name in whole else host.params[name]
            self._bind_state(name, host)
        self._step(part, host, grads, number)
        for name in self._stepped[part]:
            self.params[name].data = self.poison[name]
        for name, stepped in whole.items():
            host.split[name].split(stepped)

    def _step(self, part: int, placed: Placed, grads: Mapping[str, Tensor], number: int) -> None:
        names = self._stepped[part]
        for name in names:
            self.params[name].grad = grads.get(name)
        held = [] if is_torchs(self.optimizer) else [(n, self.params[n].data) for n in names]
        try:
            if names:
                self.step_part(part, number)
        finally:
            for name in names:
                self.params[name].grad = None
        for name, place in held:
            put_back(name, self.params[name], place)
        self.keep_state(part, placed)

    def keep_state(self, shard: int, placed: Placed) -> None:
        """Copy state that a step made or replaced to its place."""
        if self._is_settled(shard, placed):
            return
        names = self._stepped[shard]
        for name in names:
            self.settle(name, placed.states.get(name, {}))
        entries = self._entries(names)
        values = [list(entry.values()) for entry in entries]
        self._settled[shard] = _Settled(placed, self._states(), entries, values)

    def _states(self) -> list[Any]:
        """Each optimizer's mapping of states; it may begin another one."""
        return [member.state for member in members_of(self.optimizer)]

    def _entries(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """The optimizer's state of these parameters, of those that have some."""
        state = self.optimizer.state
        return [state[self.params[name]] for name in names if self.params[name] in state]

    def _is_settled(self, shard: int, placed: Placed) -> bool:
        """Whether the last step left every object of the state where it had found it."""
        settled = self._settled.get(shard)
        if settled is None or settled.placed is not placed:
            return False
        entries, names = settled.entries, self._stepped[shard]
        if len(entries) != len(names) or not _are(self._states(), settled.states):
            return False
        # The entries of torch's own are theirs for good.
        stay = all(map(is_torchs, members_of(self.optimizer)))
        if not (stay or _are(self._entries(names), entries)):
            return False
        pairs = zip(entries, settled.values, strict=True)
        return all(_are(entry.values(), kept) for entry, kept in pairs)

    def step_part(self, shard: int, number: int = 0) -> None:
        """``optimizer.step()`` as if the shard's parameters were all it had.

        Two shards may step at a time, one on the device's thread and one on the host's:
        each has a part of the optimizer, which shares its state and takes its options.
        """
        with self._rounding.stepping(self._stepped[shard], number):
            self._subsets.step(shard, number)

    def stepped(self, shard: int) -> Sequence[str]:
        """The parameters of a shard that the optimizer steps."""
        return self._stepped[shard]

    def kept_beside(self) -> str:
        """The name of something that a step has left on a part, which is lost with the part."""
        return self._subsets.kept_beside()

    def settle(self, name: str, places: Mapping[str, Tensor]) -> None:
        """Copy state that lies elsewhere to its place and point the optimizer there.

        What is there no longer is no state any more.
        """
        state = self.optimizer.state.get(self.params[name])
        if not state:
            self.stateful.pop(name, None)
            return
        stored = self.stateful[name] = {key for key, value in state.items() if is_stored(value)}
        for key in stored:
            value = state[key]
            place = self.check_place(name, key, value, places)
            if value is place:
                continue
            place.copy_(value)
            state[key] = place

    def check_place(
        self, name: str, key: str, value: Tensor, places: Mapping[str, Tensor]
    ) -> Tensor:
        """Where a tensor of a parameter's state is kept.

        Raises:
            TrialError: there is no place of its shape.
        """
        place = places.get(key)
        if place is None or place.shape != value.shape or place.dtype != value.dtype:
            was_frozen = name in self.frozen
            raise TrialError(unplaced(name, key, value, places, was_frozen=was_frozen))
        return place

    def scalars(self) -> dict[str, dict[str, Any]]:
        """What the optimizer keeps per parameter beside its stored tensors, by name."""
        return {
            name: {
                key: value.detach().cpu().clone() if isinstance(value, Tensor) else value
                for key, value in self.optimizer.state[self.params[name]].items()
                if not is_stored(value)
            }
            for name in sorted(self.stateful)
        }

    def stored_keys(self) -> dict[str, list[str]]:
        """Per parameter the keys of its stored state."""
        return {name: sorted(keys) for name, keys in self.stateful.items()}

    def restore(
        self,
        scalars: Mapping[str, Mapping[str, Any]],
        stored: Mapping[str, Sequence[str]],
        places: Mapping[str, torch.device],
    ) -> None:
        """Take up state that ``scalars`` and ``stored_keys`` described.

        Stored tensors are bound at each step. Scalars go to ``places``, where the steps
        run, for the kernels that want them there.
        """
        self.stateful = {}
        self._subsets.begin_anew()
        self.take_over(scalars, stored, places)

    def take_over(
        self,
        scalars: Mapping[str, Mapping[str, Any]],
        stored: Mapping[str, Sequence[str]],
        places: Mapping[str, torch.device],
    ) -> None:
        """As ``restore``, of some parameters; the state of the others stays."""
        self.stateful |= {name: set(keys) for name, keys in stored.items()}
        pairs = zip(self.optimizer.param_groups, self._subsets.grouped, strict=True)
        there = {
            name
            for group, names in pairs
            if group.get("fused") or group.get("capturable")
            for name in names
        }
        for name, values in scalars.items():
            state = self.optimizer.state[self.params[name]]
            state.clear()
            for key, value in values.items():
                if isinstance(value, Tensor):  # of its own: it may be a view of a message
                    value = value.to(places[name] if name in there else value.device, copy=True)
                state[key] = value

    def _require_groups(self) -> None:
        """That the optimizer steps those parameters that it was built with.

        Raises:
            TrialError: it steps others.
        """
        now = [len(group["params"]) for group in self.optimizer.param_groups]
        if now != (built := [len(names) for names in self._subsets.grouped]):
            raise TrialError(
                f"the optimizer has groups of {now} parameters, and had groups of {built} when "
                "Recipe(optimizer=...) returned it. Give it all of them there: those that are to "
                "wait have requires_grad=False or lr=0 until then."
            )

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups: options, and the names of their parameters."""
        self._require_groups()
        return [
            {**{k: _noted(v) for k, v in group.items() if k != "params"}, "params": list(names)}
            for group, names in zip(
                self.optimizer.param_groups, self._subsets.grouped, strict=True
            )
        ]

    def options_of(self, *shards: int) -> dict[int, dict[str, Any]]:
        """By number the options of those groups that these shards step: numbers and the like."""
        stepped = {name for shard in shards for name in self._stepped[shard]}
        return {
            index: {k: v for k, v in group.items() if tree_all(_is_simple, v)}
            for index, group in enumerate(self.optimizer.param_groups)
            if not stepped.isdisjoint(self._subsets.grouped[index])
        }

    def restore_groups(self, groups: Sequence[Mapping[str, Any]], *, but: Collection[str]) -> None:
        """Put the options of ``groups()`` back, ``but`` some that stay as they are made.

        A tensor stays the one that it is: a schedule may have it too, and groups share it.
        """
        for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
            for key, value in saved.items():
                if key == "params" or key in but:
                    continue
                own = group.get(key)
                if isinstance(own, Tensor) and isinstance(value, Tensor) and _fits(value, own):
                    own.copy_(value)
                else:
                    group[key] = _noted(value)


def _noted(option: Any) -> Any:
    """Of a group; a schedule writes to one that is a tensor."""
    return option.detach().clone() if isinstance(option, Tensor) else option


def _is_simple(option: Any) -> bool:
    return option is None or isinstance(option, int | float | complex | str | np.generic)


def _fits(value: Tensor, place: Tensor) -> bool:
    return value.shape == place.shape and value.dtype == place.dtype and not place.requires_grad


class _Settled(NamedTuple):
    """Where state was settled, the entries of the parameters, and the objects in each."""

    placed: Placed
    states: list[Any]
    entries: list[dict[str, Any]]
    values: list[list[Any]]


def _are(these: Collection[Any], those: Collection[Any]) -> bool:
    """Whether they are the same objects."""
    return len(these) == len(those) and all(map(operator.is_, these, those))


def is_stored(value: object) -> bool:
    """Whether optimizer state is a tensor that travels with its shard; scalars do not."""
    return isinstance(value, Tensor) and value.dim() > 0


def state_specs(binding: Binding) -> dict[str, list[TensorSpec]]:
    """The stored state of every parameter, as the optimizer holds it now.

    Raises:
        SpecError: what it keeps beside that is of a type that no checkpoint could hold.
    """
    entries = {n: binding.optimizer.state.get(p, {}) for n, p in binding.params.items()}
    for name, entry in entries.items():
        for key, value in entry.items():
            _require_rule(value, f"{key!r}, which the optimizer keeps of {name!r}")
    return {
        name: [describe(name, value, key) for key, value in entry.items() if is_stored(value)]
        for name, entry in entries.items()
    }


def _require_rule(value: Any, what: str) -> None:
    types_alone = tree_map_only(Tensor, lambda tensor: None, value)
    try:
        Packer({}).pack(types_alone)
    except TrialError as error:
        raise SpecError(f"{what}, cannot be saved: {error}") from None
