"""torch's own samples of its operators in, before, behind and between the blocks of a small model.

And every way of training such a model in shards or stages, unit by unit in this process, with NaN
in the place of all weights that are elsewhere.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import torch
from operators import database
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.partition.build import clone_batch
from shoal.partition.chain import Chain
from shoal.partition.units import (
    run_held_forward,
    run_held_inputs,
    run_last_inputs,
)
from shoal.recipes.recipe import Recipe, loss_and_output
from shoal.rng import capture_rng, seed_all
from shoal.runtime.units import ChainUnits

CPU = torch.device("cpu")
WIDTH, ROWS, STEPS, MOST_ELEMENTS = 5, 3, 2, 3000
PLACES = ("inside", "between", "across", "behind", "twice")
"""Of the operator: in a block, between two, or at the end or the beginning of one."""


def operators():
    """torch's operators with samples; skips where this torch has no such database."""
    known = database("op_db")
    return [op for op in known if op.supports_autograd and torch.float32 in op.dtypes]


def name_of(op):
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def sample_of(op):
    """The first sample whose input is one dense tensor of floats; None where there is none."""
    torch.manual_seed(0)
    for sample in op.sample_inputs("cpu", torch.float32, requires_grad=True):
        given = sample.input
        if not isinstance(given, Tensor) or given.layout is not torch.strided:
            continue
        if given.is_floating_point() and 1 < given.numel() <= MOST_ELEMENTS:
            return sample
    return None


def forms_of(op):
    """The operator as a function, and what it may be besides: a method, and in place."""
    forms = {"function": op.op}
    if op.method_variant:
        forms["method"] = op.method_variant
    if op.inplace_variant:
        forms["in place"] = lambda x, *args, **kw: (op.inplace_variant(x, *args, **kw), x)[1]
    return forms


# -- the model --------------------------------------------------------------------------------


def number_of(output):
    """One float of all that an operator returned."""
    found = torch.zeros(())
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.numel():
            real = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
            flat = torch.tanh(real.reshape(-1).float())
            found = found + (flat * torch.cos(torch.arange(len(flat)) + 1.0)).sum()
    return found


class Before(nn.Module):
    """From the state to the operator's first argument, near its sample."""

    def __init__(self, sample, apply=None):
        super().__init__()
        self.register_buffer("sample", sample)
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, min(sample.numel(), 64))
        self.apply_ = apply

    def forward(self, state, *others):
        moved, size = torch.tanh(self.layer(self.norm(state))).mean(0), self.sample.numel()
        moved = moved.repeat(-(-size // len(moved)))[:size].reshape(self.sample.shape)
        x = self.sample + 0.05 * moved
        return (state, self.apply_(x, *others)) if self.apply_ else (state, x)


class Behind(nn.Module):
    def __init__(self, apply=None):
        super().__init__()
        self.layer, self.way = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.apply_ = apply

    def forward(self, state, output, *others):
        output = self.apply_(output, *others) if self.apply_ else output
        return self.layer(state) + 0.3 * torch.tanh(number_of(output) * self.way)


class Inside(nn.Module):
    def __init__(self, before, behind):
        super().__init__()
        self.before, self.behind = before, behind

    def forward(self, state, *others):
        return self.behind(*self.before(state, *others))


class Operated(nn.Module):
    """Applies an operator twice, at one ``place``; its other tensors are weights or buffers."""

    def __init__(self, apply, sample, place):
        super().__init__()
        self.function, self.place = apply, place
        leaves, self.spec = pytree.tree_flatten((tuple(sample.args), dict(sample.kwargs)))
        self.leaves, self.at = leaves, {}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self.at[index] = f"other{index}"
                if leaf.requires_grad:
                    self.register_parameter(self.at[index], nn.Parameter(leaf.detach().clone()))
                else:
                    self.register_buffer(self.at[index], leaf.clone())
        given = sample.input.detach()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(b for _ in range(2) for b in self._blocks(given))

    def _blocks(self, given):
        if self.place == "inside":
            return [Inside(Before(given, self._apply), Behind())]
        first = Before(given, self._apply if self.place == "across" else None)
        return [first, Behind(self._apply if self.place == "behind" else None)]

    def _apply(self, x, *others):
        named = dict(zip(self.at, others, strict=True))
        values = [named.get(index, leaf) for index, leaf in enumerate(self.leaves)]
        args, kwargs = pytree.tree_unflatten(values, self.spec)
        return self.function(x, *args, **kwargs)

    def forward(self, x):
        state, blocks = self.enter(x), iter(self.blocks)
        others = [getattr(self, name) for name in self.at.values()]
        for _ in range(2):
            if self.place == "inside":
                state = next(blocks)(state, *others)
                continue
            state, x = next(blocks)(state, *(others if self.place == "across" else ()))
            if self.place in ("between", "twice"):
                output = self._apply(x, *others)
                x = (output, x) if self.place == "twice" else output
            state = next(blocks)(state, x, *(others if self.place == "behind" else ()))
        return self.leave(state)


# -- training ---------------------------------------------------------------------------------


def loss(output, batch):
    return (output - batch[1]).square().mean()


def batches():
    drawn = torch.Generator().manual_seed(5)
    sizes = (WIDTH, 2)
    pairs = [[torch.randn(ROWS, n, generator=drawn) for n in sizes] for _ in range(STEPS)]
    return [tuple(pair) for pair in pairs]


def trained(model, recipe, run):
    """Losses, gradients, weights, buffers and random state of a few steps of ``run``."""
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(named.values(), lr=1e-2)
    seed_all(1)
    found: dict[str, Tensor] = {}
    for step, batch in enumerate(batches()):
        found[f"loss {step}"] = run(model, recipe, clone_batch(batch)).clone()
        grads = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
        found |= {f"gradient of {name} {step}": grad for name, grad in grads.items()}
        optimizer.step()
        optimizer.zero_grad()
    found |= {
        name: t.detach().clone() for name, t in (named | dict(model.named_buffers())).items()
    }
    return found | {"random": capture_rng(CPU).torch}


def plain(model, recipe, batch):
    found = loss_and_output(recipe, model, batch)[0]
    found.backward()
    return found.detach()


class InShards:
    """One way of training ``chain``, cut into ``number`` shards."""

    def __init__(self, chain: Chain, number: int, how: str) -> None:
        self.chain, self.how = chain, how
        edges = [round(i * chain.num_layers / number) for i in range(number + 1)]
        self.spans = tuple(itertools.pairwise(edges))
        inner = tuple(range(number - 1))
        self.route = SimpleNamespace(
            order="micro",
            frozen=0,
            saves=inner if how == "kept" else (),
            spills=inner if how == "away" else (),
        )

    def __call__(self, model: nn.Module, recipe: Recipe, batch: object) -> Tensor:
        return self._halves(batch) if self.how == "halves" else self._units(model, recipe, batch)

    def _units(self, model: nn.Module, recipe: Recipe, batch: object) -> Tensor:
        units = ChainUnits(self.chain, recipe, self.spans, CPU, self.route)
        last, micro = len(self.spans) - 1, units.begin(batch)
        home = {name: p.data for name, p in model.named_parameters()}
        for shard in range(last):
            self._bind(model, home, shard)
            units.forward(shard, micro)
            self._keep_written(model, home, units.written(shard))
            if self.how == "away":
                _there_and_back(units.movable(shard, micro))
        for shard in reversed(range(last + 1)):
            self._bind(model, home, shard)
            found = units.backward(shard, micro)
            total = found if shard == last else total  # noqa: F821  # the last shard is first
            self._keep_written(model, home, units.written(shard))
        for name, parameter in model.named_parameters():
            parameter.data = home[name]
        return total

    def _bind(self, model: nn.Module, home: dict[str, Tensor], shard: int) -> None:
        """The shard's weights are here, in other memory than before; where others are is NaN."""
        here = (
            set(home) if self.how == "kept" else set(self.chain.parameters_in(*self.spans[shard]))
        )
        for name, parameter in model.named_parameters():
            if self.how == "kept":
                parameter.data = home[name]
                continue
            if parameter.data_ptr() != home[name].data_ptr():  # it was here before
                parameter.data.fill_(torch.nan)
            new = home[name].clone() if name in here else torch.full_like(home[name], torch.nan)
            parameter.data = new

    def _keep_written(self, model: nn.Module, home: dict[str, Tensor], names: object) -> None:
        for name in names:
            if self.how != "kept":
                home[name].copy_(model.get_parameter(name).data)

    def _halves(self, batch: object) -> Tensor:
        """As the stages of a pipeline do with their backwards in two."""
        chain, micro, wires = self.chain, self.chain.begin(batch), {}
        helds, halves = [], []
        for start, stop in self.spans[:-1]:
            held = run_held_forward(chain, micro, start, stop, wires)
            alive = wires | held.made
            wires = {wire: alive[wire] for wire in chain.live_wires(stop, micro)}
            held.made.clear()
            helds.append(held)
        result, half = run_last_inputs(chain, micro, self.spans[-1][0], wires, 1)
        total = result.loss
        halves.append(half)
        for span, held in zip(self.spans[-2::-1], reversed(helds), strict=True):
            given = {"grads": result.grads, "tied": result.tied}
            result, half = run_held_inputs(chain, micro, *span, held, **given)
            halves.append(half)
        for half in halves:
            half.run()
        assert total is not None
        return total


def _there_and_back(cells: list) -> None:
    for cell in cells:
        copy = cell.bytes_now().clone()
        cell.leave()
        cell.memory = copy


def same(one: Tensor, other: Tensor) -> bool:
    """Equal in every bit."""
    pair = [t.detach().resolve_conj().resolve_neg().contiguous() for t in (one, other)]
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and torch.equal(*(t.reshape(-1).view(torch.uint8) for t in pair))
