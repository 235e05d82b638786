"""A shard's parameters come back to another slot for its backward: whatever its code kept."""

from __future__ import annotations

import pytest
import torch
import traps
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.core.errors import PlanError
from shoal.core.event import PeakMeasured

SPILLS = (0, 1, 2, 3, 4)
ROWS = 999
"""Of a position embedding that is a wire: its bytes are seen in a peak."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(traps.WIDTH, traps.WIDTH)


class Force(Block):
    """Takes a gradient with regard to its input inside its forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x if x.requires_grad else x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(inner.pow(3).sum(), inner, create_graph=self.training)
        return self.linear(x) - 0.1 * slope


class Detached(Block):
    """Reads its input with another counter of versions than that of the tensor it was made as."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.linear(x) + 0.1 * self.linear(x.data))


class Turned(Block):
    """A weight that is read through a lazy conjugate."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, 2) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.view_as_complex(self.linear(x).view(-1, 8, 2))
        return x + torch.tanh(
            torch.view_as_real(y @ torch.view_as_complex(self.weight).mH).reshape(-1, 16)
        )


class OwnParameter(nn.Parameter):
    pass


class Subclassed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = OwnParameter(torch.randn(16, 16) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight)


class Rows(Block):
    """Multiplies by a matrix in a format without strides."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.eye(len(x)).to_sparse() @ torch.tanh(self.linear(x))


class Positioned(Block):
    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        at = at.mean(0)
        return x + torch.tanh(self.linear(x) * at) * at


class PositionWire(traps.Chain):
    """All blocks read a view of a parameter of the prologue."""

    depth = 6

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(ROWS, traps.WIDTH))

    def make_block(self, index: int) -> nn.Module:
        return Positioned()

    def forward(self, x: Tensor) -> Tensor:
        x, at = self.enter(x), self.position.view(-1, traps.WIDTH)
        for block in self.blocks:
            x = block(x, at)
        return self.leave(x)


class Handing(Block):
    """The first hands on a view of its parameter."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.position = None if index else nn.Parameter(torch.randn(1, traps.WIDTH))

    def forward(self, x: Tensor, at: Tensor | None) -> tuple[Tensor, Tensor]:
        at = at if self.position is None else self.position[:1]
        return x + torch.tanh(self.linear(x) * at) * at, at


class BlockOutput(traps.Chain):
    depth = 6

    def make_block(self, index: int) -> nn.Module:
        return Handing(index)

    def forward(self, x: Tensor) -> Tensor:
        x, at = self.enter(x), None
        for block in self.blocks:
            x, at = block(x, at)
        return self.leave(x)


class KeptOnCtx(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.turned = weight.t()
        ctx.save_for_backward(x)
        return x @ ctx.turned

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad @ ctx.turned.t(), grad.t() @ x


class Hidden(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(KeptOnCtx.apply(x, self.linear.weight))


class Closed(Block):
    """A checkpoint whose function closes over a view of a weight."""

    def forward(self, x: Tensor) -> Tensor:
        turned = self.linear.weight.t()
        return x + checkpoint(lambda y: torch.tanh(y @ turned), x, use_reentrant=False)


class Inner(Block):
    """Packs what is saved by hooks of its own, which keep it."""

    def forward(self, x: Tensor) -> Tensor:
        def pack(tensor: Tensor) -> Tensor:
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return x + torch.tanh(self.linear(x))


def chain_of(kind: type[nn.Module]) -> type[traps.Chain]:
    class Alike(traps.Chain):
        depth = 6

        def make_block(self, index: int) -> nn.Module:
            return kind()

    return Alike


MODELS = {
    "gradient inside": chain_of(Force),
    "data": chain_of(Detached),
    "conjugate": chain_of(Turned),
    "subclass": chain_of(Subclassed),
    "sparse": chain_of(Rows),
    "position wire": PositionWire,
    "block output": BlockOutput,
}
STUCK = {"ctx": chain_of(Hidden), "closure": chain_of(Closed), "inner hooks": chain_of(Inner)}


class Build:
    def __init__(self, table: str, name: str) -> None:
        self.table, self.name = table, name

    def __call__(self, hp: object) -> nn.Module:
        return globals()[self.table][self.name]()


def recipe_of(table, name):
    return shoal.Recipe(
        model=Build(table, name),
        data=traps.data,
        loss=traps.loss,
        optimizer=traps.adamw,
        accumulate=2,
        clip_grad_norm=0.5,
    )


def technique(spills):
    return shoal.Spilled(
        shards=8,
        optimizer="host",
        keep=(),
        keep_turn=1,
        spill_activations=spills,
    )


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("spills", "poison"), [(SPILLS, True), (SPILLS, False), ((), True)], ids=str
)
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_are_those_of_the_plain_loop(name, spills, poison, run_study, assert_alone):
    peaks = []
    recipe = recipe_of("MODELS", name)
    report = run_study(
        recipe,
        shoal.grid(lr=[1e-2, 3e-3]),
        steps=3,
        technique=technique(spills),
        poison=poison,
        callbacks=[lambda event: peaks.append(event) if isinstance(event, PeakMeasured) else None],
    )
    assert_alone(report, report.trials, recipe, steps=3)
    assert peaks
    if name in ("position wire", "block output"):
        assert all(peak.peak_bytes <= peak.predicted_bytes for peak in peaks)


@pytest.mark.parametrize("name", STUCK)
def test_what_hooks_do_not_see_is_found_out_and_said(name, run_study, assert_alone):
    recipe = recipe_of("STUCK", name)
    with pytest.raises(PlanError, match="keeps memory of parameters where hooks do not see it"):
        run_study(recipe, {"lr": 1e-2}, steps=1, technique=technique(SPILLS))
    report = run_study(recipe, {"lr": 1e-2}, steps=2, technique=technique(None), poison=True)
    assert_alone(report, report.trials, recipe, steps=2)
