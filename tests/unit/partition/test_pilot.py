"""What the pilot admits, what it refuses, and the reasons it gives."""

from __future__ import annotations

import gc
import random
import weakref

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from shoal.partition.drive import every_layer, sharded_backward
from shoal.partition.pilot import pilot

CPU = torch.device("cpu")
SMALL = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
CAUSAL = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}


def gpt2():
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 40, "n_positions": 16}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **CAUSAL))


def llama():
    sizes = {"intermediate_size": 32, "num_key_value_heads": 1, "vocab_size": 40}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, **sizes, **CAUSAL, pad_token_id=0))


def bert():
    return hf.BertForSequenceClassification(
        hf.BertConfig(**SMALL, intermediate_size=32, vocab_size=40, use_cache=False)
    )


def text(tokens, *, padded):
    ids = tokens(3, 10)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.sample(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("build", [gpt2, llama])
def test_language_models_of_hugging_face_with_their_own_loss_and_their_cache_on(
    build, precision, make_recipe, tokens
):
    model, batch = build(), text(tokens, padded=False)
    batch["labels"] = batch["input_ids"]
    assert model.config.use_cache

    report = pilot(model, make_recipe(model, None, precision=precision), batch, CPU)

    assert (report.bitwise, report.notes) == (True, ())
    assert report.chain.num_layers == 4
    assert model.config.use_cache


@pytest.mark.parametrize("padded", [False, True])
def test_bert_with_a_loss_of_the_recipe(padded, make_recipe, tokens):
    model, batch = bert(), {**text(tokens, padded=padded), "answer": torch.tensor([0, 1, 1])}
    recipe = make_recipe(
        model,
        lambda output, batch: F.cross_entropy(output.logits, batch["answer"]),
        inputs=lambda batch: {name: batch[name] for name in ("input_ids", "attention_mask")},
    )

    report = pilot(model, recipe, batch, CPU)

    assert (report.bitwise, report.notes) == (True, ())


class Blocks(nn.Module):
    """Four linear blocks; subclasses put something in the way."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.leave = nn.Linear(8, 5)

    def block(self):
        return nn.Linear(8, 8)

    def forward(self, x):
        return self.leave(self.body(self.enter(x)))


class Looking(Blocks):
    def body(self, x):
        for block in self.blocks:
            x = block(x)
            if x.sum() > 1e9:
                break
        return x


class Growing(Blocks):
    """Calls a module once more in each run of its forward."""

    runs = 0

    def body(self, x):
        self.runs += 1
        for _ in range(self.runs):
            x = self.norm(x)
        for block in self.blocks:
            x = x + block(x)
        return x

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)


def test_a_forward_that_fails_where_it_is_run_again_is_refused_and_no_error(make_recipe):
    model, batch = Growing(), (torch.randn(4, 6), torch.randint(0, 5, (4,)))
    report = pilot(model, make_recipe(model), batch, CPU)

    assert report.chain is None
    assert "its rehearsal failed: module 'norm' is called more often when" in report.notes[0]


class Averaging(Blocks):
    """Returns in evaluation what its blocks gave, as XLNet does."""

    def body(self, x):
        outputs = [x]
        for block in self.blocks:
            outputs.append(block(outputs[-1]))
        return outputs[-1] if self.training else torch.stack(outputs).mean(0)


def test_what_is_read_in_evaluation_only_is_told_from_what_is_missed_in_training(make_recipe):
    model, batch = Averaging(), (torch.randn(4, 6), torch.randint(0, 5, (4,)))
    report = pilot(model, make_recipe(model), batch, CPU)

    assert report.chain is None
    assert "the loss in evaluation differs by" in report.notes[0]
    assert "a step of training is equal, so its forward reads in evaluation" in report.notes[0]


class Counting(nn.Linear):
    def forward(self, x, log):
        log["calls"].append(1)
        return super().forward(x)


class Logging(Blocks):
    def block(self):
        return Counting(8, 8)

    def body(self, x):
        log = {"calls": []}
        for block in self.blocks:
            x = block(x, log)
        return x


class Diary:
    pages = ()


class Writing(nn.Linear):
    def forward(self, x, diary):
        diary.pages = (*diary.pages, x.mean())
        return super().forward(x)


class Remembering(Blocks):
    def block(self):
        return Writing(8, 8)

    def body(self, x):
        diary = Diary()
        for block in self.blocks:
            x = block(x, diary)
        return x + sum(diary.pages)


class Hidden(nn.Linear):
    def forward(self, x):
        self.last = super().forward(x)
        return self.last


class SideDoor(Blocks):
    """The blocks leave something behind on themselves, and the end reads it."""

    def block(self):
        return Hidden(8, 8)

    def body(self, x):
        for block in self.blocks:
            x = block(x)
        return x + sum(block.last.square().mean() for block in self.blocks)


class SharedDoor(SideDoor):
    """A weight is used twice besides, which is not what makes the difference."""

    def body(self, x):
        return F.linear(super().body(x), self.blocks[0].weight)


class Frozen(Blocks):
    def body(self, x):
        with torch.no_grad():
            for block in self.blocks:
                x = block(x)
        return x


class Overwriting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, memory):
        memory += 1
        return self.layer(x) + memory


class Parametrized(Blocks):
    """Computes weights once for all that reads them, where gradients add up before they go on."""

    def block(self):
        layer = nn.Linear(8, 8)
        parametrize.register_parametrization(layer, "weight", nn.Tanh())
        return layer

    def body(self, x):
        with parametrize.cached():
            for block in self.blocks:
                x = block(x) + block.weight.sum()
        return x


class Averager(nn.Module):
    """Adds an average that it is given, and keeps its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x, average):
        y = self.layer(x) + average
        if self.training:
            self.average.mul_(0.9).add_(y.detach().mean(0))
        return y


class Neighbours(Blocks):
    """Each block is given the buffer of the one before, the first one that of the last."""

    def block(self):
        return Averager()

    def body(self, x):
        for at, block in enumerate(self.blocks):
            x = block(x, self.blocks[at - 1].average)
        return x


class SharedScratch(Blocks):
    def block(self):
        return Overwriting()

    def body(self, x):
        memory = torch.zeros(8)
        for block in self.blocks:
            x = block(x, memory)
        return x


class Cached(nn.Linear):
    def forward(self, x, past):
        past.update(x)
        return super().forward(x)


class Cache:
    def __init__(self):
        self.kept = []

    def get_seq_length(self):
        return len(self.kept) + 1

    def update(self, x):
        self.kept.append(x)

    def reset(self):
        self.kept.clear()


class Resumed(Blocks):
    def block(self):
        return Cached(8, 8)

    def body(self, x):
        past = Cache()
        for block in self.blocks:
            x = block(x, past)
        return x


class Massive(nn.Module):
    """One module that is nearly all of it, and has no list inside."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 32, num_layers=2, batch_first=True), nn.Linear(32, 5)

    def forward(self, x):
        return self.head(self.lstm(x[:, None])[0][:, -1])


class Layerdrop(Blocks):
    """Skips a block now and then, by a number that it draws between them."""

    def body(self, x):
        for block in self.blocks:
            if torch.rand(()) > 1e-9:
                x = block(x)
        return x


class Lottery(Blocks):
    """Decides before its first block, against it."""

    def body(self, x):
        if torch.rand(()) > 2:
            x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return x


class Gambling(Blocks):
    """The same with Python's numbers."""

    def body(self, x):
        for block in self.blocks:
            if random.random() > 1e-9:
                x = block(x)
        return x


class Scribbling(Blocks):
    """Changes what two blocks read, when one of them has read it."""

    def block(self):
        return Adding(8, 8)

    def body(self, x):
        memory = x * 2
        x = self.blocks[0](x, memory)
        x = torch.relu(self.blocks[1](x, memory))
        x = self.blocks[2](x, memory)
        memory += 1
        return self.blocks[3](x, memory)


class Adding(nn.Linear):
    def forward(self, x, memory):
        return super().forward(x) + memory


class Taught(Blocks):
    """A student beside a teacher, which a forward calls without gradients."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)

    def body(self, x):
        with torch.no_grad():
            told = self.teacher(x)
        for block in self.blocks:
            x = block(x)
        return x + told


class Averaged(Taught):
    """Its teacher is an average of the student, which the forward brings up to date itself."""

    def body(self, x):
        with torch.no_grad():
            for mean, new in zip(self.teacher, self.blocks, strict=False):
                mean.weight.lerp_(new.weight, 0.1)
        return super().body(x)


class Replacing(Taught):
    """The same, and the loss of a step tells nothing of it: its average is for evaluation."""

    def body(self, x):
        for mean, new in zip(self.teacher, self.blocks, strict=False):
            mean.weight.data = 0.9 * mean.weight.data + 0.1 * new.weight.data
        for block in self.blocks:
            x = block(x)
        return x if self.training else super().body(x)


class Forwarded(Blocks):
    def body(self, x):
        for block in self.blocks:
            x = block.forward(x)
        return x


REFUSALS = {
    Forwarded: r"calls 0 of the 4 listed blocks; .* block.forward\(x\) is none",
    Averaged: r"writes to weights outside of the block they are in: teacher.0.weight",
    Replacing: r"gives weights other values by .data: teacher.0.weight, .*; do that after the opt",
    Looking: r"reads a value of the output of block 'blocks.\d' between blocks, at .*py:\d+, and",
    Logging: r"block 'blocks.0' changes its argument",
    Remembering: r"argument 'diary' of block 'blocks.0' is a Diary, which a block may change",
    Frozen: r"block 'blocks.0' within torch.no_grad .* fewer than two blocks are called otherwise",
    Parametrized: r"'blocks.0' within torch.no_grad or parametrize.cached\(\), or an autocast of",
    Neighbours: r"hands the buffer 'blocks.3.average', which changes in each forward, from",
    SharedScratch: r"'blocks.0' changes a tensor in place that later blocks read",
    Resumed: r"its blocks are given a Cache that is not empty",
    Massive: r"no nn.ModuleList or nn.Sequential with two or more children.*most of it is in one",
    Layerdrop: r"looks at a random number before block 'blocks.1', and may skip blocks by it",
    Lottery: r"looks at a random number before block 'blocks.1', and may skip blocks by it",
    Gambling: r"draws from Python's or NumPy's random numbers after block 'blocks.0'",
    Scribbling: r"the forward between the blocks changes a tensor in place that later blocks read",
    SideDoor: r"would not equal .*: the gradient of .* differs .* attribute 'blocks.0.last', and",
    SharedDoor: r"would not equal .*; a forward keeps what it computed in the attribute",
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_refusal_names_what_stands_against_a_chain(kind, make_recipe):
    model = kind()
    batch = torch.randn(4, 6), torch.randint(0, 5, (4,))
    rng = torch.get_rng_state()

    report = pilot(model, make_recipe(model), batch, CPU)

    assert report.chain is None
    assert not report.bitwise
    with pytest.raises(AssertionError, match=REFUSALS[kind]):
        raise AssertionError(report.notes[0])
    assert torch.equal(rng, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_blocks_that_a_forward_calls_without_gradients_are_left_out_of_the_chain(make_recipe):
    model, batch = Taught(), (torch.randn(4, 6), torch.randint(0, 5, (4,)))

    report = pilot(model, make_recipe(model), batch, CPU)

    assert report.bitwise
    assert report.chain.layer_names[1:-1] == tuple(f"blocks.{n}" for n in range(4))


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        return self.three(self.two(self.one(x)))


class Wrapped(nn.Module):
    """A small part beside one that is most of the model and has no lists."""

    def __init__(self):
        super().__init__()
        self.big, self.head = Flat(), nn.Linear(6, 5)

    def forward(self, x):
        return self.head(self.big(x))


def test_a_part_that_is_most_of_a_model_is_cut_between_its_own_parts(make_recipe):
    model, batch = Wrapped(), (torch.randn(4, 6), torch.randint(0, 5, (4,)))

    report = pilot(model, make_recipe(model), batch, CPU)

    assert report.bitwise
    assert report.chain.layer_names[1:-1] == ("big.one", "big.two", "big.three", "head")


def compile_whole(part):
    part.compile(backend="eager")


def script_a_part_of(part):
    part.two = torch.jit.script(part.two)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("how", [compile_whole, script_a_part_of])
def test_a_part_that_is_compiled_is_one_piece_however_large(how, make_recipe):
    model, batch = Wrapped(), (torch.randn(4, 6), torch.randint(0, 5, (4,)))
    how(model.big)

    report = pilot(model, make_recipe(model), batch, CPU)

    assert report.chain is None
    assert "most of it is in one module" in report.notes[0]


class Stages(nn.Module):
    """Several lists, one after another: one chain."""

    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8))
        self.two = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 5))

    def forward(self, x):
        return self.two(self.one(x))


def test_lists_that_follow_each_other_form_one_chain(make_recipe):
    model, batch = Stages(), (torch.randn(4, 6), torch.randint(0, 5, (4,)))

    chain = pilot(model, make_recipe(model), batch, CPU).chain

    assert chain.layer_names[1:-1] == ("one.0", "one.1", "two.0", "two.1")


def test_a_model_with_sparse_gradients_is_named_and_not_cut(make_recipe):
    model = nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Linear(8, 8), nn.Linear(8, 3))
    batch = torch.randint(10, (4,)), torch.randint(3, (4,))
    recipe = make_recipe(model, lambda output, batch: F.cross_entropy(output, batch[1]))

    report = pilot(model, recipe, batch, CPU)

    assert report.chain is None
    assert "the gradient of '0.weight' is sparse, and what is cut" in report.notes[0]
    assert "sparse=False" in report.notes[0]
    assert all(parameter.grad is None for parameter in model.parameters())


class Field(nn.Module):
    """Gives its coordinates back beside what it makes of them, for derivatives by them."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1))

    def forward(self, x):
        x = x.detach().requires_grad_()
        return self.net(x), x


def test_a_loss_with_derivatives_by_the_input_is_a_reason_and_no_failure(make_recipe):
    def loss(output, batch):
        if not torch.is_grad_enabled():  # validation
            return output[0].mean()
        slope = torch.autograd.grad(output[0].sum(), output[1], create_graph=True)[0]
        return slope.square().mean()

    model, batch = Field(), (torch.randn(4, 2), torch.zeros(4))

    report = pilot(model, make_recipe(model, loss), batch, CPU)

    assert report.chain is None
    assert "cut, its code raises at tests" in report.notes[0]
    assert report.notes[0].endswith("needs all layers between at once.")


class Clustered(nn.Module):
    """Its head calls those of its own lists of which a batch has targets."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.soft = nn.AdaptiveLogSoftmaxWithLoss(6, 5, [2, 4], 2.0)

    def forward(self, x, y):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.soft(x, y).loss


def test_a_head_that_goes_by_the_targets_is_one_piece(make_recipe):
    model, x = Clustered(), torch.randn(4, 6)
    recipe = make_recipe(model, lambda loss, batch: loss, inputs=tuple)

    chain = pilot(model, recipe, (x, torch.tensor([0, 1, 3, 4])), CPU).chain

    batch = (x, torch.tensor([0, 1, 1, 0]))
    loss = sharded_backward(chain, batch, every_layer(chain))
    assert torch.equal(loss, model(*batch))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_blocks_that_torch_jit_compiled_are_a_reason_and_no_failure(make_recipe):
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    model[1] = torch.jit.script(model[1])

    report = pilot(model, make_recipe(model, F.mse_loss), torch.zeros(2, 2), CPU)

    assert report.chain is None
    assert "'1' is compiled by torch.jit, which hides its code" in report.notes[0]


def test_a_loss_that_keeps_something_from_call_to_call_is_said_to(make_recipe):
    calls = []

    def counting(output, batch):
        calls.append(1.0)
        return output.square().mean() / len(calls)

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    (why,) = pilot(model, make_recipe(model, counting), (torch.ones(3, 4),), CPU).notes
    assert "a step on the same weights, batch and random numbers has another loss each" in why
    assert "the recipe's loss, or a global that the code reads, keeps something" in why


class Averaged(nn.Module):
    """Evaluates a copy of what it trains."""

    def __init__(self):
        super().__init__()
        self.net, self.average = (
            nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
            for _ in range(2)
        )

    def forward(self, x):
        return self.net(x) if self.training else self.average(x)


def test_a_model_that_evaluates_an_average_of_its_weights_is_said_to(make_recipe):
    model = Averaged()
    recipe = make_recipe(model, lambda output, batch: output.square().mean())
    (why,) = pilot(model, recipe, (torch.ones(3, 4),), CPU).notes
    assert "in evaluation mode the forward called 0 of the 3 blocks it calls in training" in why
    assert "an average of its weights, in modules of its own" in why


class Carrying(nn.Module):
    """Begins a batch with the hidden state that the last one ended with."""

    def __init__(self):
        super().__init__()
        self.before = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.after = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        for name in "hc":
            self.register_buffer(name, torch.zeros(1, 3, 8))

    def forward(self, x):
        x, (h, c) = self.lstm(self.before(x), (self.h, self.c))
        self.h, self.c = h.detach(), c.detach()
        return self.after(x)


class Within(nn.Module):
    """A layer that carries its own."""

    forward = Carrying.forward

    def __init__(self):
        super().__init__()
        self.lstm, self.before, self.after = nn.LSTM(8, 8, batch_first=True), *[nn.Identity()] * 2
        for name in "hc":
            self.register_buffer(name, torch.zeros(1, 3, 8))


class Counted(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        for layer in self:
            x = layer(x)
        return x / self.calls


@pytest.mark.parametrize(("build", "names"), [(Carrying, "'c', 'h'"), (Counted, "'calls'")])
def test_buffers_that_the_forward_writes_between_blocks_are_named(build, names, make_recipe):
    model = build()
    recipe = make_recipe(model, lambda output, batch: output.square().mean())
    (why,) = pilot(model, recipe, (torch.ones(3, 5, 4),), CPU).notes
    assert f"the forward itself writes {names} between its blocks, and runs more than once" in why


def test_a_hidden_state_that_a_block_keeps_is_no_reason(make_recipe):
    model = nn.Sequential(nn.Linear(4, 8), Within(), nn.Linear(8, 8), nn.Linear(8, 2))
    recipe = make_recipe(model, lambda output, batch: output.square().mean())
    report = pilot(model, recipe, (torch.ones(3, 5, 4),), CPU)
    assert report.bitwise
    assert report.chain.num_layers == 6


class Renewing(nn.Linear):
    """Makes its running mean anew in each forward."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        x = super().forward(x) + self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x


def test_a_buffer_that_a_block_makes_anew_is_the_blocks_alone(make_recipe):
    """Of two stages that both changed it a pipeline would have two copies."""
    model = nn.Sequential(nn.Linear(4, 4), Renewing(), Renewing(), nn.Linear(4, 2))
    recipe = make_recipe(model, lambda output, batch: output.square().mean())
    chain = pilot(model, recipe, (torch.ones(3, 4),), CPU).chain
    changing = [chain.changing_buffers(layer) for layer in range(chain.num_layers)]
    assert changing == [(), (), ("1.mean",), ("2.mean",), (), ()]


class Turning(nn.Module):
    """Complex, and keeps what only the imaginary part of its weight's gradient comes from."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x):
        self.turned = self.weight.imag.sum()
        return x * self.weight.real


def test_a_difference_of_imaginary_parts_is_told_by_its_size(make_recipe):
    blocks = [Turning() for _ in range(3)]
    model = nn.Sequential(*blocks)
    recipe = make_recipe(model, lambda output, batch: output.sum() + blocks[1].turned)
    (reason,) = pilot(model, recipe, (torch.ones(3, 4),), CPU).notes
    assert "the gradient of '1.weight' differs by 1.0e+00" in reason


def scaled(linear):
    array = linear.weight.detach().numpy()
    array *= 0.5


def clipped(linear):  # after the first time it changes nothing
    array = linear.weight.detach().numpy()
    np.clip(array, -0.1, 0.1, out=array)


@pytest.mark.parametrize("write", [scaled, clipped])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_who_writes_to_weights_without_torch_is_not_cut(write, where, make_recipe):
    class Writing(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            if where == "forward":
                write(self)
            elif y.requires_grad:
                y.register_hook(lambda grad: write(self))
            return y

    model = nn.Sequential(nn.Linear(4, 4), Writing(4, 4), nn.Linear(4, 4))
    if write is clipped:
        write(model[1])
    report = pilot(model, make_recipe(model, lambda y, batch: y.sum()), (torch.randn(3, 4),), CPU)
    assert report.chain is None
    assert "writes into the memory of the weight '1.weight' without torch" in report.notes[0]


class Scaling(nn.Linear):
    """Raises where its weights are a little off; ``looks`` has it ask for their memory."""

    looks = False

    def __init__(self, size):
        super().__init__(size, size)
        self.scale = nn.Parameter(torch.full((size,), 0.01))

    def forward(self, x):
        if self.looks:
            self.largest = float(self.scale.detach().numpy().max())
        return super().forward(x) * torch.distributions.Normal(0, self.scale).scale


@pytest.mark.parametrize("looks", [False, True])
def test_a_forward_that_does_not_stand_shaken_weights_is_cut(looks, make_recipe, monkeypatch):
    monkeypatch.setattr(Scaling, "looks", looks)
    model = nn.Sequential(*[Scaling(4) for _ in range(3)])
    report = pilot(model, make_recipe(model, lambda y, batch: y.sum()), (torch.randn(3, 4),), CPU)
    assert report.bitwise


def test_who_rescales_weights_to_evaluate_is_not_cut(make_recipe):
    """As RWKV does, in all of its blocks before the first of them runs."""

    class Rescaling(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
            self.is_rescaled = False

        def forward(self, x):
            if self.is_rescaled is self.training:
                for block in self.blocks:
                    block.weight.data.mul_(2.0 if self.training else 0.5)
                self.is_rescaled = not self.training
            for block in self.blocks:
                x = block(x).tanh()
            return x

    model = Rescaling()
    report = pilot(model, make_recipe(model, lambda y, batch: y.sum()), (torch.randn(3, 4),), CPU)
    assert report.chain is None
    assert "in evaluation its forward writes to the weight 'blocks.0.weight'" in report.notes[0]


def test_who_adds_a_weight_in_place_does_not_write_to_it(make_recipe):
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.positions = nn.Parameter(torch.randn(1, 4))
            self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

        def forward(self, x):
            x = x * 2
            x += self.positions
            for block in self.blocks:
                x = block(x).tanh()
            return x

    model = Positions()
    report = pilot(model, make_recipe(model, lambda y, batch: y.sum()), (torch.randn(3, 4),), CPU)
    assert report.bitwise, report.notes


class Remembered(nn.Module):
    """Two blocks, and a weak reference to what each run of the first one computed."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.computed = []

    def forward(self, x):
        x = self.blocks[0](x)
        self.computed.append(weakref.ref(x))
        return self.blocks[1](x)


def test_what_a_pilot_computed_waits_for_no_collector(make_recipe):
    model = Remembered()
    recipe = make_recipe(model, lambda output, batch: output.sum())
    gc.collect()
    gc.disable()
    try:
        report = pilot(model, recipe, {"x": torch.randn(2, 4)}, CPU)
        assert report.chain is not None
        assert [ref() for ref in model.computed] == [None] * len(model.computed)
    finally:
        gc.enable()


class Ensemble(nn.Module):
    """Runs what is in its first two blocks at once by torch.vmap, and then two more."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6)) for _ in range(4))

    def forward(self, x):
        one, other = self.blocks[0][0], self.blocks[1][0]
        stacked, _ = torch.func.stack_module_state([one, other])
        call = torch.func.functional_call
        each = torch.vmap(lambda weights: call(one, weights, (x,)))(stacked)
        return self.blocks[3](self.blocks[2](each.mean(0)))


def test_blocks_that_a_forward_maps_over_are_left_out_of_the_chain(make_recipe):
    model, batch = Ensemble(), (torch.randn(4, 6), torch.randint(0, 5, (4,)))

    report = pilot(model, make_recipe(model), batch, CPU)

    assert report.bitwise
    assert report.chain.layer_names[1:-1] == ("blocks.2", "blocks.3")


class Spectral(nn.Linear):
    """Has a few eigenvalues: torch has one kernel for them alone, and one for a derivative."""

    def forward(self, x):
        y = super().forward(x)
        return y * torch.linalg.eigvalsh(y.T @ y)


def test_eigenvalues_are_computed_as_for_their_derivative_where_they_are_computed_again(
    make_recipe,
):
    torch.manual_seed(0)
    model = nn.Sequential(*(Spectral(6, 6) for _ in range(4)))
    batch = torch.randn(4, 6), torch.randint(0, 5, (4,))
    report = pilot(model, make_recipe(model), batch, CPU)
    chain = report.chain
    assert report.bitwise
    loss = sharded_backward(chain, batch, every_layer(chain))
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    plain = F.cross_entropy(model(batch[0]), batch[1])
    plain.backward()
    assert torch.equal(plain, loss)
    assert all(map(torch.equal, found, [p.grad for p in model.parameters()]))
