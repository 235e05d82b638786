"""What forward hooks inside of blocks keep is there when the forward reads it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.core.errors import TrialError
from shoal.partition.build import build_chain
from shoal.partition.drive import every_layer, sharded_backward, sharded_evaluation
from shoal.partition.pilot import pilot

CPU = torch.device("cpu")
WIDTH, KINDS = 8, 5


class Router(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, 3)

    def forward(self, x):
        scores = super().forward(x)
        return scores, scores.softmax(-1)


class Block(nn.Module):
    """A layer of two experts, of which the second is there for what is left."""

    def __init__(self):
        super().__init__()
        self.router = Router()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        weights = self.router(flat)[1]
        mixed = sum(weights[:, k, None] * expert(flat) for k, expert in enumerate(self.experts))
        return x + self.drop(mixed.tanh().reshape(x.shape))


class Collecting(nn.Module):
    """Its forward collects by hooks, which the first one makes, as transformers does."""

    def __init__(self, *kinds, depth=3, block=Block):
        super().__init__()
        self.enter, self.leave = nn.Linear(6, WIDTH), nn.Linear(WIDTH, KINDS)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.kinds, self.collected, self.hooked = kinds, None, False

    def forward(self, x):
        if not self.hooked:
            self.hook()
        self.collected = {kind: [] for kind in self.kinds}
        h = self.enter(x)
        for block in self.blocks:
            h = block(h)
        found, self.collected = self.collected, None
        return {"logits": self.leave(h).mean(1), **found}

    def hook(self):
        self.hooked = True
        self.enter.register_forward_hook(self.keeping("entered"))
        for block in self.blocks:
            block.register_forward_hook(self.keeping("hidden", first=True))
            for module in block.modules():
                if isinstance(module, Router):
                    module.register_forward_hook(self.keeping("scores"))
                    keep = self.keeping("inputs")
                    module.register_forward_pre_hook(lambda m, args, keep=keep: keep(m, (), args))

    def keeping(self, kind, first=False):
        def keep(module, args, output):
            if self.collected is None or kind not in self.collected:
                return
            if first and not self.collected[kind]:
                self.collected[kind].append(args[0])
            kept = output[0] if isinstance(output, tuple) else output
            assert kept.device.type == "cpu"
            self.collected[kind].append(kept)

        return keep


def batch(rows=4, length=3):
    return torch.randn(rows, length, 6), torch.arange(rows) % KINDS


def loss(output, batch):
    total = F.cross_entropy(output["logits"], batch[1])
    if scores := output.get("scores"):
        total = total + 0.1 * torch.cat(scores).softmax(-1).mean(0).square().sum()
    for kind in ("entered", "hidden", "inputs"):
        for kept in output.get(kind, ()):
            total = total + 0.1 * kept.square().mean()
    return total


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "kinds", [("scores",), ("hidden",), ("hidden", "scores"), ("entered", "inputs")]
)
def test_what_hooks_collect_trains_in_shards_as_alone(kinds, precision, assert_bitwise):
    model = Collecting(*kinds)
    chain = assert_bitwise(model, [batch(), batch(6, 2)], loss, precision=precision)

    assert chain.layer_names == ("prologue", "blocks.0", "blocks.1", "blocks.2", "epilogue")
    assert not any(block.num_returned is None for block in chain.skeleton.blocks)


def test_the_pilot_admits_it_and_validation_has_it_too(make_recipe):
    model, data = Collecting("hidden", "scores"), batch()
    report = pilot(model, make_recipe(model, loss), data, CPU)
    assert (report.bitwise, report.notes) == (True, ())
    found, output = sharded_evaluation(report.chain, batch(5), every_layer(report.chain))
    assert output["hidden"][1].shape == (5, 3, WIDTH)
    assert not found.isnan()


def test_what_a_loss_reads_of_the_model_by_itself_is_there(make_recipe):
    """Features that a hook puts into a dictionary, for a distillation loss."""
    model, kept = Collecting(), {}
    for n, block in enumerate(model.blocks):
        block.router.register_forward_hook(lambda m, a, output, n=n: kept.update({n: output[0]}))

    def distill(output, batch):
        return loss(output, batch) + sum(kept[n].square().mean() for n in (0, 2))

    report = pilot(model, make_recipe(model, distill), batch(), CPU)
    assert (report.bitwise, report.notes) == (True, ())


def test_hooks_that_nothing_reads_run_with_their_module(make_recipe):
    model, kept = Collecting(), []
    model.blocks[1].router.register_forward_hook(lambda m, a, output: kept.append(output[0]))
    chain = build_chain(model, make_recipe(model, loss), batch(), CPU)
    kept.clear()

    sharded_evaluation(chain, batch(), every_layer(chain))

    assert all(block.num_returned is None for block in chain.skeleton.blocks)
    assert len(kept) == 1
    assert not kept[0].isnan().any()


@pytest.mark.parametrize("place", ["before", "behind"])
def test_a_hook_that_computes_runs_with_its_module_where_it_stands(place, assert_bitwise):
    def sharpen(module, args, output):
        return 3 * output[0], (2 * output[0]).softmax(-1)

    class Sharpened(Collecting):
        def hook(self):
            super().hook()
            for block in self.blocks:
                block.router.register_forward_hook(sharpen, prepend=place == "before")

    assert_bitwise(Sharpened("scores"), [batch()], loss)


def test_a_hook_that_has_gone_is_named(make_recipe):
    model, data = Collecting("scores"), batch()
    chain = build_chain(model, make_recipe(model, loss), data, CPU)
    model.blocks[1].router._forward_hooks.clear()

    with pytest.raises(TrialError, match=r"keep' of the module 'router' in a block is gone"):
        sharded_backward(chain, data, every_layer(chain))


def test_what_a_hook_computes_for_the_forward_is_refused_with_the_setting(make_recipe):
    class Computing(Collecting):
        config = SimpleNamespace(output_router_logits=True)

        def keeping(self, kind, first=False):
            keep = super().keeping(kind)
            return lambda module, args, output: keep(module, args, 2 * output[0])

        def forward(self, x):
            output = super().forward(x)
            return output | {"scores": (torch.cat(output["scores"]),)}

    model = Computing("scores")
    report = pilot(model, make_recipe(model, loss), batch(), CPU)

    assert report.chain is None
    assert "the config sets output_router_logits" in report.notes[0]
    assert report.notes[0].endswith("without it the model may be cut.")
