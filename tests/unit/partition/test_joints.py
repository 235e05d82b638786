"""Models that compute between their blocks: the forward is entered again there, exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F

from shoal.partition.build import build_chain
from shoal.partition.drive import every_layer, forward_all, run_evaluation
from shoal.partition.measure import measure_layers
from shoal.partition.pilot import pilot
from shoal.recipes.recipe import loss_and_output
from shoal.rng import seed_all

CPU = torch.device("cpu")
WIDTH = 8


def vectors(count):
    return torch.randn(count, 6), torch.randint(0, 5, (count,))


def texts(count, length, *, vocabulary=40):
    generator = torch.Generator().manual_seed(length)
    first, second = (
        torch.randint(1, vocabulary, (count, size), generator=generator)
        for size in (length, length - 2)
    )
    mask = torch.ones_like(first)
    mask[0, length // 2 :] = 0
    return {"input_ids": first, "attention_mask": mask, "labels": second}


def own_loss(output, batch):
    return output.loss


def t5(**options):
    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 2}
    return hf.T5ForConditionalGeneration(
        hf.T5Config(**sizes, vocab_size=40, decoder_start_token_id=0, **options)
    )


class Blocks(nn.Module):
    """Four blocks; subclasses compute something between them."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.leave = nn.Linear(WIDTH, 5)

    def block(self):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))

    def forward(self, x):
        return self.leave(self.body(self.enter(x)))


class Residual(Blocks):
    """The sum is an argument of the next block."""

    def body(self, x):
        for block in self.blocks:
            x = x + self.drop(block(x))
        return x


class PreNorm(Blocks):
    """The sum is an argument of a module that is no block."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def body(self, x):
        for block in self.blocks:
            x = x + block(self.norm(x))
        return x


class InPlace(Blocks):
    """Adds into a block's output."""

    def body(self, x):
        for block in self.blocks:
            before, x = x, block(x)
            x += before
        return x


class Copied(Residual):
    """Copies what goes into the first block, for the end; three gradients are added up there."""

    def body(self, x):
        kept = x.clone()
        return super().body(x) * torch.clone(kept)


class Rewritten(Blocks):
    """Changes its copy, with others before and behind."""

    def body(self, x):
        kept = x.clone().clone()
        kept += 1
        for block in self.blocks:
            x = block(x)
        return x * kept * x.clone()


class Branched(Blocks):
    """Hands its copy to later blocks."""

    def body(self, x):
        kept = x.clone()
        x = self.blocks[1](self.blocks[0](x))
        return self.blocks[2](x) * self.blocks[3](kept) + kept


class Noisy(Blocks):
    """Draws random numbers between blocks that it hands nothing else to."""

    def body(self, x):
        for block in self.blocks:
            noise = torch.rand(WIDTH)
            x = block(x)
        return x * noise


class Copying(Blocks):
    """Copies early, and draws between its blocks."""

    def body(self, x):
        kept = x.clone()
        for block in self.blocks:
            x = block(x) + torch.rand(WIDTH)
        return x * kept


class Gated(Blocks):
    """Computes from parameters of its own: one early, and read in the end."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def body(self, x):
        scale = self.scale.exp()
        for block in self.blocks[:2]:
            x = block(x)
        x = x + self.shift
        for block in self.blocks[2:]:
            x = block(x)
        return x * scale


class TwiceGated(Gated):
    """What is computed early is read in two places: it is a wire of what computed it."""

    def body(self, x):
        scale = self.make_scale()
        for block in self.blocks[:2]:
            x = block(x)
        x = x * scale + self.shift
        for block in self.blocks[2:]:
            x = block(x)
        return x * scale

    def make_scale(self):
        return 2 * self.scale.exp()


class GatedAtBothEnds(TwiceGated):
    """One of these places is where it is computed, by a function that draws besides."""

    def body(self, x):
        scale = F.dropout(self.make_scale(), 0.2)
        noise = torch.rand(WIDTH)
        x = x * scale
        for block in self.blocks:
            x = block(x)
        return F.dropout(x + self.shift, 0.2) * scale * noise


class GatedInPlace(TwiceGated):
    """What is computed early is changed at once: a wire would be changed once more."""

    def make_scale(self):
        scale = self.scale.cos()
        scale *= 2
        return scale


class Towers(Blocks):
    """A module condenses what the first blocks gave, and only the end reads it."""

    def __init__(self):
        super().__init__()
        self.pooler = nn.Linear(WIDTH, WIDTH)

    def body(self, x):
        first, second = x, x.flip(-1)
        for block in self.blocks[:2]:
            first = block(first)
        first = self.pooler(first)
        for block in self.blocks[2:]:
            second = block(second)
        return torch.tanh(first) * second


class Weighing(nn.Linear):
    def forward(self, x, other):
        return super().forward(x) * other


class Attending(Blocks):
    """The same, and a later block is given it, as a decoder is the normed output of an encoder."""

    def __init__(self):
        super().__init__()
        self.norm, self.blocks[3] = nn.LayerNorm(WIDTH), Weighing(WIDTH, WIDTH)

    def body(self, x):
        first = self.norm(self.blocks[1](self.blocks[0](x)))
        return self.blocks[3](self.blocks[2](x), first)


class Pyramid(Blocks):
    """A module is handed what was added up before the block that has just run, as in HRNet."""

    def __init__(self):
        super().__init__()
        self.down = nn.Linear(WIDTH, WIDTH)

    def body(self, x):
        y = self.blocks[0](x)
        for block in self.blocks[1:]:
            y = block(x) + self.down(y)
        return y


class Fused(Blocks):
    """What was added up before a block has its output added, too, as where HRNet fuses."""

    def body(self, x):
        first, second = self.blocks[0](x), self.blocks[1](x)
        y = first + second
        y = y + self.blocks[2](first - second)
        return self.blocks[3](y)


class Recalled(Blocks):
    """What is computed behind a block is read before the next one and before later ones."""

    def body(self, x):
        x = self.blocks[0](x)
        kept = torch.tanh(x)
        x = self.blocks[2](kept * self.blocks[1](kept * x))
        return kept * self.blocks[3](x)


class RecalledLate(Blocks):
    """The same, and not before the next one."""

    def body(self, x):
        x = self.blocks[0](x)
        kept = torch.tanh(x)
        x = self.blocks[2](kept * self.blocks[1](x))
        return kept * self.blocks[3](x)


class Direct(Blocks):
    """Calls the forwards of some listed modules, and what is in them, as HRNet does."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(2)
        )

    def body(self, x):
        for block, norm in zip(self.blocks[::2], self.norms, strict=True):
            x = block(x) + norm.forward(x)
        return self.blocks[3](self.blocks[1](x))


class Shortcut(Blocks):
    """Adds into what a module returned earlier, and gives that to a module that changes it too."""

    def __init__(self):
        super().__init__()
        self.norm, self.act = nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True)

    def body(self, x):
        y = self.norm(x)
        y += self.blocks[1](self.blocks[0](x))
        return self.blocks[3](self.blocks[2](self.act(y)))


class Dropped(Blocks):
    """The end reads what the first block is given: in evaluation a module's output, as in BART."""

    def body(self, x):
        first = F.dropout(x, 0.2, self.training)
        x = first
        for block in self.blocks:
            x = block(x)
        return x + first


class Passes(nn.Linear):
    def forward(self, x):
        return x


class Passing(Blocks):
    """One block hands on what it was given, which others are given too."""

    def __init__(self):
        super().__init__()
        self.blocks[1] = Passes(WIDTH, WIDTH)

    def body(self, x):
        first = self.blocks[0](x)
        same = self.blocks[1](first)
        return self.blocks[2](first) * self.blocks[3](same)


class Siamese(Blocks):
    """The same blocks, with batch statistics, for two inputs."""

    def block(self):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU())

    def body(self, x):
        return self.half(x) - self.half(x.flip(0))

    def half(self, x):
        x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        return x


class Nested(Blocks):
    """A list of lists, none of which is ever called."""

    def block(self):
        return nn.ModuleList([nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)])

    def body(self, x):
        for norm, layer in self.blocks:
            x = x + layer(norm(x))
        return x


class Listless(nn.Module):
    """Modules by name, and no list of them."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        x = self.drop(torch.relu(self.one(x)))
        return self.three(torch.relu(self.two(x)))


class Biased(nn.Module):
    """A learned attention bias: torch takes another kernel for it without gradients."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, 8 * 16)
        self.blocks = nn.ModuleList(BiasedAttention() for _ in range(3))
        self.leave = nn.Linear(16, 5)

    def forward(self, x):
        x = self.enter(x).unflatten(-1, (8, 16))
        for block in self.blocks:
            x = block(x)
        return self.leave(x.mean(1))


class BiasedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.Linear(16, 48)
        self.bias = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        query, key, value = self.heads(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        bias = self.bias[None, None].expand(x.shape[0], 2, 8, 8)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return x + mixed.transpose(1, 2).flatten(2)


KINDS = {
    Residual: 4 + 3,
    PreNorm: 4 + 3,
    InPlace: 4 + 3,
    Copied: 4 + 3,
    Rewritten: 4,
    Branched: 4,
    Noisy: 4 + 3,
    Gated: 4 + 1,
    TwiceGated: 4 + 1,
    GatedAtBothEnds: 4,
    Towers: 4 + 1,
    Attending: 4 + 2,
    Pyramid: 4 + 2,
    Fused: 4 + 2,
    Recalled: 4 + 2,
    RecalledLate: 4 + 2,
    Direct: 4 + 2,
    Shortcut: 4 + 1,
    Dropped: 4,
    Passing: 4,
    Siamese: 8 + 1,
    Nested: 8 + 3,
    Listless: 3 + 2,
    Biased: 3,
}  # blocks and joints


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_computed_between_blocks_is_a_layer_of_its_own(kind, precision, assert_bitwise):
    batches = [vectors(4), vectors(4), vectors(3)]
    if kind is InPlace and precision == "bf16":
        batches = batches[:1]  # adds float32 into a bf16 tensor, which rounds and is no matter

    chain = assert_bitwise(kind(), batches, precision=precision)

    assert chain.num_layers == KINDS[kind] + 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_pilot_lets_it_train_in_shards(kind, make_recipe):
    model = kind()

    report = pilot(model, make_recipe(model), vectors(4), CPU)

    assert (report.bitwise, report.notes) == (True, ())
    assert report.chain.num_layers == KINDS[kind] + 2


@pytest.mark.parametrize("kind", [*KINDS, t5])
def test_a_layer_needs_no_parameters_but_its_own_and_those_it_borrows(kind, make_recipe):
    model = kind().eval()
    batch, loss = (texts(2, 8), own_loss) if kind is t5 else (vectors(4), None)
    recipe = make_recipe(model, loss) if loss else make_recipe(model)
    chain = build_chain(model, recipe, batch, CPU)
    with torch.no_grad():
        torch.manual_seed(1)
        plain, _ = chain.loss(chain.begin(batch), 0, {})
        torch.manual_seed(1)
        values = {name: parameter.data for name, parameter in model.named_parameters()}
        micro, wires = chain.begin(batch), {}
        for layer in range(chain.num_layers):
            here = {*chain.parameters_of(layer), *chain.borrowed_by(layer)}
            for name, parameter in model.named_parameters():
                nothing = torch.full((), float("nan")).expand(parameter.shape)
                parameter.data = values[name] if name in here else nothing
            if layer == chain.num_layers - 1:
                loss, _ = chain.loss(micro, layer, wires)
                break
            made = chain.forward(micro, layer, layer + 1, wires)
            alive = chain.live_wires(layer + 1, micro)
            wires = {wire: made[wire] if wire in made else wires[wire] for wire in alive}

    assert torch.equal(loss, plain)


@pytest.mark.parametrize("kind", [Residual, PreNorm])
def test_a_running_sum_is_one_wire_however_many_blocks_added_to_it(kind, make_recipe):
    model = kind()

    chain = build_chain(model, make_recipe(model), vectors(4), CPU)

    at_joints = [layer for layer, name in enumerate(chain.layer_names) if name.startswith("joint")]
    assert [len(chain.live_wires(layer)) for layer in at_joints] == [2, 2, 2]


def test_random_numbers_that_a_message_brought_are_no_copy_of_the_forwards(make_recipe):
    """They are a part of its memory, and copied where they are put back."""
    model, batch = Copying().eval(), vectors(4)
    chain = build_chain(model, make_recipe(model), batch, CPU)
    seed_all(1)
    expected = loss_and_output(chain.recipe, model, batch)[0]
    seed_all(1)
    micro, ranges = chain.begin(batch), every_layer(chain)
    wires = forward_all(chain, micro, ranges)[-1].wires

    rng = micro.sheet.parts[0].rng
    message = torch.cat([torch.zeros(64, dtype=torch.uint8), rng.torch])
    part = replace(micro.sheet.parts[0], rng=replace(rng, torch=message[64:]))
    micro.sheet = micro.sheet.with_part(0, part)

    assert torch.equal(run_evaluation(chain, micro, ranges[-1][0], wires)[0], expected)


def test_a_joint_is_named_after_the_block_behind_it_and_measured(make_recipe):
    model = Gated()
    chain = build_chain(model, make_recipe(model), vectors(4), CPU)

    layers = measure_layers(chain, vectors(4), {})

    assert [layer.name for layer in layers][2:5] == [
        "blocks.1",
        "joint before blocks.2",
        "blocks.2",
    ]
    assert layers[3].parameter_bytes == 512  # the shift
    assert layers[3].boundary_bytes == 4 * WIDTH * 4


def test_a_parameter_that_is_read_early_and_again_later_is_borrowed_there(make_recipe):
    model = Gated()

    chain = build_chain(model, make_recipe(model), vectors(4), CPU)

    assert "scale" in chain.parameters_of(0)
    assert "scale" in chain.borrowed_by(6)
    assert "shift" in chain.parameters_of(3)


def test_what_would_have_to_be_computed_twice_is_found_though_its_values_hide_it(make_recipe):
    model = GatedInPlace()  # the sine of 0 is 0, by which all is equal at first

    report = pilot(model, make_recipe(model), vectors(4), CPU)

    assert report.chain is None
    assert "the gradient of 'scale' differs" in report.notes[0]
    assert torch.equal(model.scale, torch.zeros(WIDTH))


# ------------------------------------------------------------------ encoder and decoder


@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_t5_is_one_chain_of_encoder_joint_and_decoder(precision, assert_bitwise):
    batches = [texts(3, 10), texts(3, 10), texts(2, 7)]

    chain = assert_bitwise(t5(), batches, own_loss, precision=precision)

    assert chain.layer_names == (
        "prologue",
        "encoder.block.0",
        "encoder.block.1",
        "joint before decoder.block.0",
        "decoder.block.0",
        "decoder.block.1",
        "epilogue",
    )
    assert "shared.weight" in chain.parameters_of(0)
    assert "shared.weight" in chain.borrowed_by(3)
    assert "shared.weight" in chain.borrowed_by(6)
    assert chain.parameters_of(3) == ("encoder.final_layer_norm.weight",)


def test_the_encoders_states_are_one_wire_that_all_decoder_blocks_read(make_recipe):
    model = t5()
    chain = build_chain(model, make_recipe(model, own_loss), texts(2, 8), CPU)

    memory = next(w for w in chain.live_wires(4) if w.layer == 3 and "encoder" in w.slot)

    assert memory in chain.live_wires(5)
    assert chain.needs_grad(memory)


def test_batches_of_other_lengths_than_the_pilots_train_too(assert_bitwise):
    assert_bitwise(t5(), [texts(2, 6), texts(3, 12), texts(1, 9)], own_loss)


@pytest.mark.parametrize("build", [hf.BartForConditionalGeneration, hf.MarianMTModel])
def test_decoder_embeddings_draw_their_dropout_after_the_encoder(build, assert_bitwise):
    sizes = {
        f"{part}_{what}": value
        for part in ("encoder", "decoder")
        for what, value in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 32))
    }
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = build.config_class(
        vocab_size=40,
        d_model=16,
        max_position_embeddings=16,
        decoder_start_token_id=1,
        **sizes,
        **special,
    )

    chain = assert_bitwise(build(config), [texts(2, 8), texts(2, 8)], own_loss)

    assert "joint before model.decoder.layers.0" in chain.layer_names


class Pair(nn.Module):
    """Two inputs, through the blocks in turn, and a head tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.encode = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2)
        )
        self.decode = nn.ModuleList(
            nn.TransformerDecoderLayer(16, 2, 32, batch_first=True) for _ in range(2)
        )
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, source, target):
        memory = self.embed(source)
        for block in self.encode:
            memory = block(memory)
        memory, x = self.norm(memory), self.embed(target)
        for block in self.decode:
            x = block(x, memory)
        return self.head(x)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_pair_of_sequences_of_a_model_of_ones_own(precision, assert_bitwise, tokens):
    def loss(output, batch):
        return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())

    batches = [(tokens(3, 7), tokens(3, 5)), (tokens(2, 9), tokens(2, 4))]

    chain = assert_bitwise(Pair(), batches, loss, precision=precision, inputs=tuple)

    assert chain.num_layers == 7
