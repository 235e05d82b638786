"""What a block returns goes from layer to layer as it is: twice the same tensor, a dataclass."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from shoal.core.errors import TrialError
from shoal.partition.build import build_chain
from shoal.partition.discover import NotCuttable
from shoal.partition.drive import every_layer, sharded_backward
from shoal.partition.template import flatten, leaf_paths
from shoal.partition.units import run_forward

CPU = torch.device("cpu")


class Blocks(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(block() for _ in range(4))

    def forward(self, x):
        return self.leave(self.body(self.enter(x)))


class Skipping(Blocks):
    """Each block's output is also the last of its skips, as with the down blocks of diffusers."""

    def body(self, x):
        skips = []
        for block in self.blocks:
            x, made = block(x)
            skips += made
        return x + sum(skips)


class Down(nn.Linear):
    apart = False

    def __init__(self):
        super().__init__(8, 8)

    def forward(self, x):
        first = super().forward(x)
        second = torch.tanh(first)
        return second.clone() if self.apart else second, (first, second)


@dataclasses.dataclass
class Kept:
    hidden: torch.Tensor
    kind: str = "inner"
    scores: Any = None
    inside: Any = None


class Keeping(Blocks):
    """What a block computed on its way stands in a dataclass, as with x-transformers."""

    def body(self, x):
        kept = []
        for block in self.blocks:
            x, one = block(x, kept[-1] if kept else None)
            assert one.kind == "outer"
            kept.append(one)
        return x + sum(one.scores[0] + one.hidden for one in kept)


class Keeps(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)

    def forward(self, x, before):
        hidden = super().forward(x if before is None else x + before.inside.hidden)
        return hidden.tanh(), Kept(hidden, "outer", (hidden.cos(), None), Kept(hidden.sin()))


class Diary:
    def __init__(self, page):
        self.page = page


@dataclasses.dataclass
class Mapped(dict[str, torch.Tensor]):
    page: Any

    def __post_init__(self):
        self["page"] = self.page


class Ring:
    """A dataclass that is in itself."""

    def __new__(cls, page):
        made = Kept(page)
        made.inside = [made]
        return made


@dataclasses.dataclass(slots=True)
class Unfinished:
    page: Any
    later: Any = dataclasses.field(init=False)


class Writes(Keeps):
    kind: type = Diary

    def forward(self, x, before):
        hidden, kept = super().forward(x, before)
        return hidden, dataclasses.replace(kept, inside=self.kind(kept.inside))


class Maps(Writes):
    kind = Mapped


class Rings(Writes):
    kind = Ring


class Begins(Writes):
    kind = Unfinished


def batch():
    return torch.randn(3, 6), torch.tensor([0, 1, 2])


@pytest.mark.parametrize(("kind", "block"), [(Skipping, Down), (Keeping, Keeps)])
def test_a_tensor_twice_and_dataclasses_go_from_layer_to_layer(kind, block, assert_bitwise):
    chain = assert_bitwise(kind(block), [batch(), batch()])

    assert sum(name.startswith("blocks.") for name in chain.layer_names) == 4


def test_two_outputs_that_are_one_tensor_no_more_are_refused_while_training(make_recipe):
    model, data = Skipping(Down), batch()
    chain = build_chain(model, make_recipe(model), data, CPU)
    model.blocks[1].apart = True

    with pytest.raises(TrialError, match=r"'blocks.1' .*: its outputs 0 and 2 are one tensor no"):
        sharded_backward(chain, data, every_layer(chain))


@pytest.mark.parametrize(
    ("block", "name"),
    [(Writes, "Diary"), (Maps, "Mapped"), (Rings, "Kept"), (Begins, "Unfinished")],
)
def test_an_object_that_is_more_than_a_dataclass_is_refused_by_its_type(block, name, make_recipe):
    model = Keeping(block)

    words = f"'blocks.0' returns a {name}, .*dicts or dataclasses"
    with pytest.raises(NotCuttable, match=words):
        build_chain(model, make_recipe(model), batch(), CPU)


def test_a_dataclass_is_opened_and_made_again_without_its_init():
    inner, tensor = Kept(torch.ones(1)), torch.zeros(2)
    tree = ([Kept(tensor, scores=(1, inner))], None)
    leaves, spec = flatten(tree)
    made = torch.utils._pytree.tree_unflatten(leaves, spec)[0][0]

    assert len(leaves) == len(leaf_paths(tree)) == 9
    assert made.hidden is tensor
    assert made.scores[1].hidden is inner.hidden
    assert type(made) is type(made.scores[1]) is Kept
    assert inner is not made.scores[1]
    assert [str(key) for key in leaf_paths(tree)[0]] == ["[0]", "[0]", ".hidden"]
    tree[0][0].diary = 1  # it has more than its fields
    assert len(flatten(tree)[0]) == 2


class Sorting(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)

    def forward(self, x, best=None):
        y = super().forward(x)
        return torch.sort(y if best is None else y + best.values[:, None], dim=-1)


class Sorted(Blocks):
    """What torch returns by several names goes from block to block."""

    def __init__(self):
        super().__init__(Sorting)

    def body(self, x):
        best = None
        for block in self.blocks:
            found = block(x, best)
            x, best = found.values + found.indices, found.values.max(dim=-1)
        return x


def test_what_torch_returns_by_names_crosses_a_cut(assert_bitwise):
    batches = [(torch.randn(n, 6), torch.randint(0, 5, (n,))) for n in (4, 3)]
    assert_bitwise(Sorted(), batches)


class Remembering(nn.Module):
    """Returns a buffer that it changes, as it is."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x, average=0):
        y = self.layer(x) + average
        self.average.mul_(0.9).add_(y.detach().mean(0))
        return y, self.average


class Remembered(Blocks):
    def __init__(self):
        super().__init__(Remembering)

    def body(self, x):
        average = 0
        for block in self.blocks:
            x, average = block(x, average)
        return x + average


def test_a_buffer_that_a_block_returns_is_as_it_was_for_that_batch(make_recipe):
    """Where all batches of a step pass a shard before the next one is there."""
    torch.manual_seed(3)
    model, batches = Remembered(), [(torch.randn(4, 6), torch.zeros(4).long()) for _ in range(2)]
    chain = build_chain(model, make_recipe(model), batches[0], CPU)
    first, second = chain.begin(batches[0]), chain.begin(batches[1])
    made = run_forward(chain, first, 0, 2, {})
    before = {wire: tensor.clone() for wire, tensor in made.items()}
    run_forward(chain, second, 0, 2, {})
    assert all(torch.equal(tensor, before[wire]) for wire, tensor in made.items())


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, scale):
        return self.layer(x) * (1 + scale)


class Measuring(nn.Module):
    """Keeps a mean of its input, in one memory with a factor that stays."""

    def __init__(self):
        super().__init__()
        self.mean, self.factor = torch.full((16,), 0.3).chunk(2)
        for name in ("mean", "factor"):
            self.register_buffer(name, self.__dict__.pop(name))

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0))
        return x


class Measured(Blocks):
    """Hands a buffer of what runs before the blocks to them."""

    def __init__(self, buffer="mean", *, again=False):
        super().__init__(Scaled)
        self.measure, self.buffer, self.again = Measuring(), buffer, again

    def body(self, x):
        x = self.measure(x)
        for block in self.blocks:
            x = block(x, getattr(self.measure, self.buffer))
            x = self.measure(x) if self.again else x
        return x


@pytest.mark.parametrize("buffer", ["mean", "factor"])
def test_a_buffer_of_what_runs_before_the_blocks_is_as_it_was_for_that_batch(
    buffer, assert_bitwise, make_recipe
):
    torch.manual_seed(3)
    batches = [(torch.randn(n, 6), torch.zeros(n).long()) for n in (4, 4, 3)]
    model = Measured(buffer)
    assert_bitwise(model, batches)
    chain = build_chain(model, make_recipe(model), batches[0], CPU)
    first, second = chain.begin(batches[0]), chain.begin(batches[1])
    made = run_forward(chain, first, 0, 2, {})
    before = {wire: tensor.clone() for wire, tensor in made.items()}
    run_forward(chain, second, 0, 2, {})
    assert all(torch.equal(tensor, before[wire]) for wire, tensor in made.items())


def test_a_buffer_that_changes_between_blocks_too_is_refused(make_recipe):
    model = Measured(again=True)
    batch = torch.randn(4, 6), torch.zeros(4).long()
    with pytest.raises(NotCuttable, match=r"hands the buffer 'measure.mean', which changes"):
        build_chain(model, make_recipe(model), batch, CPU)
