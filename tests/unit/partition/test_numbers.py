"""What a block returns beside tensors is that batch's own, and not what it was in the pilot."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from shoal.core.errors import TrialError
from shoal.partition.build import build_chain
from shoal.partition.drive import every_layer, sharded_backward
from shoal.partition.pilot import pilot
from shoal.partition.template import is_same_constant, may_vary

CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Told:
    rows: int
    scale: object


class Telling(nn.Linear):
    """Returns something of its output that is no tensor."""

    def __init__(self, told):
        super().__init__(8, 8)
        self.told = told

    def forward(self, x, last=0):
        y = super().forward(x)
        return scaled(y, last), self.told(y)


def scaled(y, told):
    """``y`` times what was told of another one."""
    if isinstance(told, Told):
        return scaled(scaled(y, told.rows), told.scale)
    if callable(told):
        return told(y)
    return y * (1 + sum([told] if isinstance(told, (int, float)) else told))


class Blocks(nn.Module):
    """Hands what a block tells to the next one, or computes with it, or does neither."""

    def __init__(self, told, body):
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(Telling(told) for _ in range(4))
        self.body = body

    def forward(self, x):
        return self.leave(self.body(self, self.enter(x)))


def handed_on(model, x):
    last = 0
    for block in model.blocks:
        x, last = block(x, last)
    return x


def computed_with(model, x):
    for block in model.blocks:
        x, told = block(x)
        x = scaled(x, told)
    return x


def scaling_by(mean):
    return lambda z: z * mean


TOLD = {
    "a mean": lambda y: float(y.detach().mean()),
    "a class": lambda y: int(y.detach().sum(0).argmax()),
    "a decision": lambda y: bool(y.detach().mean() > 0),
    "the rows": lambda y: len(y),
    "the shape": lambda y: y.shape,
    "how many": lambda y: int((y.detach() > 0).sum()) / 9,
    "a closure": lambda y: scaling_by(y.detach().mean()),
    "a part": lambda y: functools.partial(torch.mul, y.detach().mean()),
    "a method": lambda y: y.detach().mean().mul,
    "a record": lambda y: Told(len(y), functools.partial(torch.mul, y.detach().mean())),
}


@pytest.mark.parametrize(
    ("told", "body"), list(zip(TOLD, itertools.cycle([handed_on, computed_with]), strict=False))
)
def test_a_number_of_a_block_is_that_of_its_own_batch(told, body, assert_bitwise):
    torch.manual_seed(3)
    batches = [(torch.randn(n, 6), torch.randint(0, 5, (n,))) for n in (4, 4, 3)]
    assert_bitwise(Blocks(TOLD[told], body), batches)


def test_a_pilot_admits_it(make_recipe):
    model, batch = (
        Blocks(TOLD["a mean"], handed_on),
        (torch.randn(4, 6), torch.tensor([0, 1, 2, 3])),
    )
    report = pilot(model, make_recipe(model), batch, CPU)
    assert (report.bitwise, report.notes) == (True, ())


def test_words_that_are_others_for_another_batch_are_refused(make_recipe):
    class Wordy(Blocks):
        def forward(self, x):
            word = ""
            for block in self.blocks:
                x, word = block(self.enter(x) if not word else x)
            return self.leave(x)

    model = Wordy(lambda y: "many" if len(y) > 3 else "few", None)
    many, few = ((torch.randn(n, 6), torch.randint(0, 5, (n,))) for n in (4, 3))
    chain = build_chain(model, make_recipe(model), many, CPU)
    sharded_backward(chain, many, every_layer(chain))
    with pytest.raises(
        TrialError, match=r"'blocks.0' behaves .* output 1 is 'few', and was 'many'"
    ):
        sharded_backward(chain, few, every_layer(chain))


class Sized(nn.Linear):
    """Hands on the sizes that it is given, or what ``sizes`` makes of them."""

    def __init__(self, sizes):
        super().__init__(8, 8)
        self.sizes = sizes

    def forward(self, x, size, scale=1.5):
        rows, columns = size
        return super().forward(x) * rows, self.sizes(self, rows, columns), scale


class HandedOn(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(Sized(sizes) for _ in range(4))

    def forward(self, x):
        size, x = (len(x), 8), self.enter(x)
        scale = size[0] / 3
        for block in self.blocks:
            x, size, scale = block(x, size, scale)
        return self.leave(x) * size[0] * scale


def odd_one(block, rows, columns):
    return (rows, columns) if block.bias[0] < 1 else (rows + int(block.bias[0]), columns)


SIZES = {
    "as they are": (lambda block, rows, columns: (rows, columns), ()),
    "exchanged": (lambda block, rows, columns: (columns, rows), ()),
    "another number": (lambda block, rows, columns: (rows, columns + rows), (1, 2, 3)),
    "otherwise in one block": (odd_one, (1, 2, 3)),
}


@pytest.mark.parametrize("sizes", SIZES)
def test_a_number_that_is_handed_on_is_the_batchs_own_without_a_joint(
    sizes, assert_bitwise, make_recipe
):
    torch.manual_seed(3)
    batches = [(torch.randn(n, 6), torch.randint(0, 5, (n,))) for n in (4, 4, 3)]
    made, joints = SIZES[sizes]
    model = HandedOn(made)
    with torch.no_grad():
        model.blocks[2].bias[0] += 3
    chain = build_chain(model, make_recipe(model), batches[0], CPU)
    assert chain.skeleton.sections.joints == joints
    assert_bitwise(model, batches)


def test_a_number_that_is_handed_on_no_more_is_refused(make_recipe):
    model = HandedOn(lambda block, rows, columns: (min(rows, 4), columns))
    some, more = ((torch.randn(n, 6), torch.randint(0, 5, (n,))) for n in (4, 5))
    chain = build_chain(model, make_recipe(model), some, CPU)
    with pytest.raises(TrialError, match=r"'blocks.0' behaves .* output 1 is 4, and was 5"):
        sharded_backward(chain, more, every_layer(chain))


def test_constants_are_told_apart_by_type_and_value():
    made = [lambda: 1 for _ in range(2)]
    same = [(1, 1), (float("nan"), float("nan")), (None, None), made, (len, len), (Told, Told)]
    assert all(is_same_constant(*pair) for pair in same)
    others = [(1, True), (1, 1.0), ("a", "b"), (0, None), (len, sum), (lambda: 1, lambda: 2)]
    assert not any(is_same_constant(*pair) for pair in others)


def test_functions_and_classes_that_hold_nothing_are_known_beforehand():
    known = [torch.relu, torch.mul, math.sin, nn.functional.gelu, nn.Linear, nn.ReLU(), "word"]
    assert not any(map(may_vary, [*known, nn.ReLU().forward, torch.float32, None, Told]))


class Packed(nn.Module):
    """Packs before each of its layers, and pads behind it."""

    def __init__(self, layers):
        super().__init__()
        self.blocks, self.leave = nn.ModuleList(layers), nn.Linear(6, 5)

    def forward(self, x, lengths):
        for block in self.blocks:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            x, _ = pad_packed_sequence(block(packed)[0], batch_first=True, total_length=7)
        return self.leave(x.mean(1))


class Reversed(nn.LSTM):
    """Forgets, where told to, that it is to give its sequences back in the order they came in."""

    order = True

    def forward(self, packed, hx=None):
        output, state = super().forward(packed, hx)
        if not self.order:
            output = output._replace(unsorted_indices=output.unsorted_indices.flip(0))
        return output, state


def sequences(*lengths):
    sizes = torch.tensor(lengths)
    return torch.randn(len(sizes), 7, 6), torch.arange(len(sizes)), sizes


def lengths_too(batch):
    return batch[0], batch[2]


def test_how_sequences_are_packed_is_what_a_block_hands_on(assert_bitwise):
    model = Packed(nn.LSTM(6, 6, batch_first=True) for _ in range(3))
    batches = [sequences(7, 3, 5), sequences(1, 7, 2), sequences(4, 4)]
    chain = assert_bitwise(model, batches, inputs=lengths_too)
    assert chain.num_layers == 3 + 2 + 2


def test_a_block_that_packs_otherwise_later_is_refused(make_recipe):
    model = Packed([nn.LSTM(6, 6, batch_first=True), Reversed(6, 6), Reversed(6, 6)])
    recipe = make_recipe(model, inputs=lengths_too)
    chain = pilot(model, recipe, sequences(7, 3, 5), CPU).chain
    model.blocks[1].order = False
    with pytest.raises(
        TrialError, match=r"'blocks\.1' behaves unlike in the pilot: output 3 is its"
    ):
        sharded_backward(chain, sequences(7, 3, 5), every_layer(chain))
