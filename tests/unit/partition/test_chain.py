"""Sharded training equals plain training bit for bit, for models of many kinds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from shoal.core.errors import TrialError
from shoal.partition.build import build_chain
from shoal.partition.drive import every_layer, sharded_backward, sharded_evaluation

CPU = torch.device("cpu")


def cross_entropy(output, batch):
    return F.cross_entropy(output, batch[1])


def images(count, size=8):
    return torch.randn(count, 3, size, size), torch.randint(0, 5, (count,))


def vectors(count):
    return torch.randn(count, 6), torch.randint(0, 5, (count,))


def mlp():
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(16, 16)),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Linear(16, 5),
    )


class Residual(nn.Module):
    """Begins in place, as many ResNets do at a cut."""

    def __init__(self, width):
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        x = self.act(x)
        return x + self.norm(self.conv(x))


def resnet():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        Residual(8),
        Residual(8),
        nn.Conv2d(8, 16, 3, stride=2),
        Residual(16),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )
    return model.to(memory_format=torch.channels_last)


class Block(nn.Module):
    """A pre-norm transformer block; returns a tuple and takes an optional bias."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x, bias=None):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        if bias is not None:
            scores = scores + bias
        x = x + self.drop(self.proj(scores.softmax(-1) @ v))
        return x + self.drop(self.mlp(self.mlp_norm(x))), None


class GPT(nn.Module):
    """Tied head, a raw position parameter, dropout, final norm."""

    def __init__(self, *, ties=2, position_bias=False, functional_head=False):
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.position = nn.Parameter(torch.randn(1, 12, 16) / 8)
        self.drop = nn.Dropout(0.1)
        self.layers = nn.ModuleList(Block(16) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.head = None if functional_head else nn.Linear(16, 40, bias=False)
        self.bias = nn.Embedding(25, 1) if position_bias else None
        if self.head is not None and ties > 1:
            self.head.weight = self.embed.weight
        if ties > 2:
            self.layers[1].readout = nn.Linear(16, 40, bias=False)
            self.layers[1].readout.weight = self.embed.weight
            self.layers[1].register_forward_hook(add_readout)

    def forward(self, ids):
        length = ids.shape[1]
        x = self.embed(ids)
        x += self.position[:, :length]
        x = self.drop(x)
        bias = None
        if self.bias is not None:
            steps = torch.arange(length)
            bias = self.bias(steps[:, None] - steps + 12).squeeze(-1)
        for layer in self.layers:
            x, _ = layer(x, bias)
        x = self.norm(x)
        return self.head(x) if self.head is not None else F.linear(x, self.embed.weight)


def add_readout(block, args, output):
    """A third use of the tied weight, inside a block."""
    weight = block.readout.weight
    return output[0] + torch.tanh(block.readout(output[0])) @ weight / 40, None


def next_token(output, ids):
    return F.cross_entropy(output[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_an_mlp_with_dropout_and_in_place_activations(assert_bitwise):
    chain = assert_bitwise(mlp(), [vectors(8), vectors(8)])

    assert chain.layer_names == ("prologue", "0", "1.0", "1.1", "1.2", "2", "3", "4", "epilogue")


def test_a_resnet_keeps_its_batch_statistics_and_its_memory_format(assert_bitwise):
    chain = assert_bitwise(resnet(), [images(4), images(4)])

    assert chain.changing_buffers(2) == (
        "1.num_batches_tracked",
        "1.running_mean",
        "1.running_var",
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gpt_with_a_tied_head_and_three_micro_batches(assert_bitwise, tokens, precision):
    batches = [tokens(4, 12) for _ in range(3)]
    chain = assert_bitwise(GPT(), batches, next_token, precision=precision)

    assert chain.parameters_of(0) == ("position", "embed.weight")
    assert chain.borrowed_by(4) == ("embed.weight",)


def test_a_weight_that_the_head_reads_without_calling_its_module_is_tied_too(
    assert_bitwise, tokens
):
    batches = [tokens(2, 12), tokens(2, 12)]
    chain = assert_bitwise(GPT(functional_head=True), batches, next_token)

    assert chain.borrowed_by(4) == ("embed.weight",)


def test_a_weight_used_in_three_layers_with_accumulation(assert_bitwise, tokens):
    batches = [tokens(2, 12) for _ in range(3)]
    chain = assert_bitwise(GPT(ties=3), batches, next_token)

    assert chain.borrowed_by(2) == chain.borrowed_by(4) == ("embed.weight",)


def test_a_bias_with_gradient_that_every_block_reads(assert_bitwise, tokens):
    batches = [tokens(2, 12), tokens(2, 12)]
    chain = assert_bitwise(GPT(position_bias=True), batches, next_token)

    bias = next(wire for wire in chain.live_wires(3) if wire.layer == 0)
    assert chain.needs_grad(bias)


def test_a_last_batch_of_another_shape(assert_bitwise, tokens):
    assert_bitwise(GPT(), [tokens(4, 12), tokens(3, 7)], next_token)
    assert_bitwise(resnet(), [images(4), images(3), images(3, size=10)])


def test_frozen_parameters_get_no_gradient_and_stop_it(assert_bitwise, tokens):
    model = GPT()
    model.layers[0].requires_grad_(False)
    assert_bitwise(model, [tokens(2, 12)], next_token)
    model = GPT()
    for part in (model.embed, model.layers[0], model.layers[1]):
        part.requires_grad_(False)
    model.position.requires_grad_(False)
    chain = assert_bitwise(model, [tokens(2, 12)], next_token)

    assert not any(chain.needs_grad(wire) for wire in chain.live_wires(2))


class Skipping(GPT):
    """Reads the embedding again behind the blocks, and one block's output."""

    def forward(self, ids):
        first = self.embed(ids)
        second, _ = self.layers[0](first)
        third, _ = self.layers[1](second)
        fourth, _ = self.layers[2](third)
        return self.head(self.norm(fourth + first * 2) + second.tanh())


def test_a_skip_from_before_the_blocks_to_behind_them_is_a_wire(assert_bitwise, tokens):
    chain = assert_bitwise(Skipping(), [tokens(2, 12), tokens(2, 12)], next_token)

    assert [str(wire) for wire in chain.live_wires(4)] == ["0:embed#0.0", "1:out.0", "3:out.0"]


def test_one_module_in_two_places_of_a_sequential(assert_bitwise):
    act, shared = nn.Tanh(), nn.Linear(6, 6)
    model = nn.Sequential(shared, act, nn.Linear(6, 6), act, shared, nn.Linear(6, 5))
    chain = assert_bitwise(model, [vectors(4), vectors(4)])

    assert chain.layer_names[5] == "0#2"
    assert chain.borrowed_by(5) == ("0.weight", "0.bias")


class SharedInside(nn.Module):
    """One layer in every block and one parameter that is handed to every block."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(8, 8)
        self.enter = nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.randn(8, 8) / 4)
        self.blocks = nn.ModuleList(Scaled(shared) for _ in range(3))
        self.leave = nn.Linear(8, 5)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, self.scale)
        return self.leave(x)


class Scaled(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.own, self.shared = nn.Linear(8, 8), shared

    def forward(self, x, scale):
        return torch.tanh(self.own(x) + self.shared(x) @ scale)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_shared_by_blocks_are_exact_also_where_autocast_casts_them(
    assert_bitwise, precision
):
    batches = [vectors(4) for _ in range(3)]
    chain = assert_bitwise(SharedInside(), batches, precision=precision)

    names = ("scale", "blocks.0.shared.weight", "blocks.0.shared.bias")
    assert chain.borrowed_by(2) == chain.borrowed_by(3) == names


class Padded(GPT):
    """Makes a mask only where something is padded, as Hugging Face models do."""

    def forward(self, ids):
        padded = ids == 0
        bias = torch.where(padded, -1e4, 0.0)[:, None, :] if padded.any() else None
        x = self.embed(ids)
        for layer in self.layers:
            x, _ = layer(x, bias)
        return self.head(self.norm(x))


def test_a_batch_may_have_a_mask_where_the_pilots_batch_had_none(assert_bitwise, tokens):
    full = tokens(2, 12).clamp(min=1)
    padded = full.clone()
    padded[0, 8:] = 0

    assert_bitwise(Padded(), [full, padded], next_token)


def test_hooks_of_a_block_fire_once_a_run_of_the_block(make_recipe, tokens):
    model, calls = GPT(), []
    model.layers[1].register_forward_hook(lambda *_: calls.append("block"))
    chain = build_chain(model, make_recipe(model, next_token), tokens(2, 12), CPU)
    calls.clear()

    sharded_backward(chain, tokens(2, 12), every_layer(chain))

    assert calls == ["block", "block"]  # its forward and its recompute


def test_building_a_chain_leaves_the_model_as_it_was(make_recipe):
    model = nn.Sequential(*resnet(), nn.Unflatten(1, (5,)))
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    batch = images(4)
    torch.manual_seed(3)

    build_chain(model, make_recipe(model), batch, CPU)

    assert all(torch.equal(tensor, before[n]) for n, tensor in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert {name: set(m.__dict__) for name, m in model.named_modules()} == attributes
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))


def test_a_parameter_that_the_forward_writes_to_is_put_back(make_recipe, tokens):
    model = GPT()
    model.embed.max_norm = 0.5
    before = model.embed.weight.detach().clone()

    chain = build_chain(model, make_recipe(model, next_token), tokens(2, 12), CPU)

    assert torch.equal(model.embed.weight, before)
    assert chain.written_parameters(0) == ("embed.weight",)


def test_prologue_parameters_may_be_poisoned_while_the_epilogue_runs(make_recipe, tokens):
    model, ids = GPT(ties=1), tokens(2, 12)
    chain = build_chain(model.eval(), make_recipe(model, next_token), ids, CPU)
    plain, _ = sharded_evaluation(chain, ids, ((0, chain.num_layers),))
    micro = chain.begin(ids)
    last = chain.num_layers - 1
    with torch.no_grad():
        wires = chain.forward(micro, 0, last, {})
        for name in chain.parameters_of(0):
            parameter = model.get_parameter(name)
            parameter.data = torch.full((), float("nan")).expand(parameter.shape)

        loss, _ = chain.loss(micro, last, wires)

    assert torch.equal(loss, plain)


def test_evaluation_in_shards_equals_the_model_and_draws_nothing(make_recipe, tokens):
    model, ids = GPT(), tokens(2, 12)
    chain = build_chain(model, make_recipe(model, next_token), ids, CPU)
    model.eval()

    loss, output = sharded_evaluation(chain, ids, every_layer(chain))

    with torch.no_grad():
        assert torch.equal(output, model(ids))
    assert torch.equal(loss, next_token(output, ids))


def test_unfreezing_after_the_cut_is_refused(make_recipe, tokens):
    model = GPT()
    model.embed.requires_grad_(False)
    chain = build_chain(model, make_recipe(model, next_token), tokens(2, 12), CPU)
    model.embed.requires_grad_(True)

    with pytest.raises(TrialError, match="frozen or unfrozen after the model was cut"):
        chain.begin(tokens(2, 12))


class Branching(GPT):
    """Hands its blocks a trained tensor only for some batches."""

    def forward(self, ids):
        bias = self.position[0, :, 0] if ids.shape[0] == 3 else None
        x = self.embed(ids)
        for layer in self.layers:
            x, _ = layer(x, bias)
        return self.head(x)


def test_a_gradient_that_the_pilot_did_not_see_is_refused_not_lost(make_recipe, tokens):
    model = Branching()
    chain = build_chain(model, make_recipe(model, next_token), tokens(2, 12), CPU)

    with pytest.raises(TrialError, match="layer 'prologue' makes a tensor with a gradient"):
        sharded_backward(chain, tokens(3, 12), every_layer(chain))


class Striding(nn.Module):
    """Its shape between the blocks depends on the length in a way no rule foresees."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(4, 4, 2, stride=2) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.mean(-1)


class Measuring(Striding):
    """Looks at that shape between the blocks."""

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            weights = torch.linspace(0, 1, x.shape[-1])
        return (x * weights).sum(-1)


def squared(output, batch):
    return output.square().mean()


@pytest.mark.parametrize("model", [Striding, Measuring])
def test_a_shape_that_no_rule_foresees_may_change_from_batch_to_batch(model, assert_bitwise):
    assert_bitwise(model(), [torch.randn(2, 4, 8), torch.randn(1, 4, 12)], squared)


class Cropping(nn.Module):
    """Looks like its argument, for batches that are short."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Crop(4, 4) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.mean(-1)


class Crop(nn.Linear):
    def forward(self, x):
        return super().forward(x[:, :8])


def test_a_shape_unlike_the_pilots_is_refused_while_training(make_recipe):
    model = Cropping()
    chain = build_chain(model, make_recipe(model, squared), torch.randn(2, 8, 4), CPU)

    with pytest.raises(TrialError, match=r"'layers.0' behaves unlike in the pilot.*\(2, 12, 4\)"):
        sharded_backward(chain, torch.randn(2, 12, 4), every_layer(chain))


class Dropping(GPT):
    depth = 3

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers[: self.depth]:
            x, _ = layer(x)
        return self.head(x)


class Passing(nn.Module):
    """Some forwards pass its norm over, as stochastic depth does."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return x if x.amax() > 50 else x + self.norm(x)


def test_a_norm_that_the_first_forward_passed_over_counts_each_batch_once(assert_bitwise):
    model = nn.Sequential(nn.Linear(6, 6), Passing(), nn.Linear(6, 6), Passing(), nn.Linear(6, 5))
    labels = torch.randint(0, 5, (4,))

    assert_bitwise(model, [(torch.randn(4, 6) * 1000, labels), (torch.randn(4, 6), labels)])


class Halved(nn.Module):
    """Halves what its blocks return, so that there are joints."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Passing() for _ in range(3))
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        for block in self.blocks:
            x = 0.5 * block(x)
        return self.head(x)


@pytest.mark.parametrize("joints", [False, True])
def test_blocks_that_the_first_forward_passed_over_are_trained_by_others(joints, assert_bitwise):
    """Nothing before them has a gradient, and where they are passed over they make none."""
    model = Halved() if joints else nn.Sequential(Passing(), Passing(), nn.Linear(6, 5))
    labels = torch.randint(0, 5, (4,))

    assert_bitwise(model, [(torch.randn(4, 6) * 1000, labels), (torch.randn(4, 6), labels)])


class Shifting(nn.Linear):
    def forward(self, x):
        x += 0.25
        return super().forward(x)


def test_what_a_block_hands_on_as_it_is_may_be_changed_in_place_by_the_next(make_recipe):
    """The forward runs again from what the first of them was handed."""
    model = nn.Sequential(nn.Linear(6, 6), Passing(), Shifting(6, 6), nn.Linear(6, 5))
    model[0].requires_grad_(False)
    x, labels = vectors(4)
    cross_entropy(model(x * 1000), (x, labels)).backward()
    alone = [p.grad for p in model.parameters()]
    model.zero_grad()
    chain = build_chain(model, make_recipe(model), (x, labels), CPU)

    sharded_backward(chain, (x * 1000, labels), ((0, 2), (2, 4), (4, chain.num_layers)))

    found = [p.grad for p in model.parameters()]
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(alone, found, strict=True))


def test_a_forward_that_skips_a_block_is_refused_while_training(make_recipe, tokens):
    model, ids = Dropping(), tokens(2, 12)
    chain = build_chain(model, make_recipe(model, next_token), ids, CPU)
    model.depth = 2

    with pytest.raises(TrialError, match="called 2 of the 3 blocks"):
        sharded_backward(chain, ids, every_layer(chain))


class Packed(nn.Module):
    """Layers between which sequences stay packed."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.LSTM(6, 6, batch_first=True) for _ in range(3))
        self.leave = nn.Linear(6, 5)

    def forward(self, x, lengths):
        x = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        for block in self.blocks:
            x, _ = block(x)
        x, _ = pad_packed_sequence(x, batch_first=True, total_length=7)
        return self.leave(x.mean(1))


def test_a_batch_of_one_length_is_computed_as_with_gradients_where_the_pilots_had_several(
    assert_bitwise,
):
    """A CPU has another kernel for an LSTM without gradients, where all lengths are equal."""
    lengths = [torch.tensor(sizes) for sizes in ((7, 3, 5), (4, 4), (6,))]
    batches = [(torch.randn(len(n), 7, 6), torch.arange(len(n)), n) for n in lengths]
    assert_bitwise(Packed(), batches, inputs=lambda batch: (batch[0], batch[2]))
