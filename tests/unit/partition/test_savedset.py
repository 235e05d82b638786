"""What a forward saved leaves and comes back: the gradients of a plain backward, and what left."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.partition.savedset import SavedSet
from shoal.partition.track import AllocationTracker
from shoal.partition.wires import Wire

WIRE = Wire(0, "out.0")


class Moved:
    """A forward under a saved set; ``away`` moves what can move, parameters and input included."""

    def __init__(self, model, function=None, rows=8):
        torch.manual_seed(1)
        self.model, self.function = model, function or model
        self.x = torch.randn(rows, 16)
        names = [name for name, _ in model.named_parameters()]
        self.saved = SavedSet(model, names, {WIRE: self.x})
        torch.manual_seed(2)
        self.leaf = self.x.detach().requires_grad_()
        with self.saved.saving(torch.device("cpu")):
            self.output = self.function(self.leaf)
        self.cells = self.saved.movable({self.output.untyped_storage()._cdata})
        self.moved_bytes = sum(cell.num_bytes for cell in self.cells)

    def away(self):
        """All is written over with NaN where it was, and is somewhere else from now on."""
        copies = [cell.bytes_now().clone() for cell in self.cells]
        was = [cell.bytes_now() for cell in self.cells]
        for cell in self.cells:
            cell.leave()
        for memory in was:
            memory.fill_(0xFF)
        for cell, copy in zip(self.cells, copies, strict=True):
            cell.memory = copy
        for parameter in self.model.parameters():
            old = parameter.data
            parameter.data = old.clone()
            old.fill_(torch.nan)
        return self

    def gradients(self):
        shape = torch.Generator().manual_seed(3)
        grad = torch.randn(self.output.shape, generator=shape)
        with self.saved.using({WIRE: self.x.clone()}):
            self.output.backward(grad)
        return [self.leaf.grad, *(p.grad for p in self.model.parameters())]


def plain(model, function=None, rows=8):
    torch.manual_seed(1)
    leaf = torch.randn(rows, 16).requires_grad_()
    torch.manual_seed(2)
    output = (function or model)(leaf)
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(3)))
    return [leaf.grad, *(p.grad for p in model.parameters())]


def same(ones, others):
    pairs = list(zip(ones, others, strict=True))
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


def made(kind, seed=0):
    torch.manual_seed(seed)
    return kind()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward, self.outward = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.inward(x).view(1, -1, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.0)
        return self.outward(mixed.transpose(1, 2).reshape(-1, 16))


class Twice(torch.autograd.Function):
    """Saves its input and its output, and keeps a number of its own."""

    @staticmethod
    def forward(ctx, x, factor):
        y = x * factor
        ctx.factor = factor
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * ctx.factor + 0 * (x + y), None


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return torch.tanh(Twice.apply(self.linear(x), 2.0))


class Views(nn.Module):
    """Saved tensors that are views, expanded, strided and overlapping parts of one storage."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 48)

    def forward(self, x):
        all_ = self.linear(x)
        a, b, c = all_.chunk(3, dim=-1)
        one = all_[:, :1].expand(-1, 16)
        return a * b * one + c.t().contiguous().t() * all_[:, 8:24]


class Checkpointed(nn.Module):
    reentrant = False

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        inner = lambda y: torch.tanh(F.dropout(self.one(y), 0.5))  # noqa: E731
        return self.two(checkpoint(inner, x, use_reentrant=self.reentrant)).sigmoid()


class Reentrant(Checkpointed):
    reentrant = True


MODELS = {
    "linear": lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)),
    "norm": lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.BatchNorm1d(16)),
    "dropout": lambda: nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Tanh()),
    "in place": lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True)),
    "no bias": lambda: nn.Sequential(nn.Linear(16, 16, bias=False), nn.ReLU()),
    "attention": Attention,
    "custom": Custom,
    "views": Views,
    "checkpoint": Checkpointed,
    "re-entrant checkpoint": Reentrant,
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_a_plain_backward_wherever_everything_was(name):
    moved = Moved(made(MODELS[name]))
    assert moved.cells
    assert same(moved.away().gradients(), plain(made(MODELS[name])))


class Parts(nn.Module):
    """Reads one weight in parts, as torch's attention does."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48, 16))

    def forward(self, x):
        one, other = self.weight.split([16, 32])
        return F.linear(F.linear(x, one), other[16:])


def test_parts_of_a_weight_that_lies_in_a_larger_memory_are_found_by_a_step_that_counts():
    moved = Moved(made(Parts)).away()
    flat = torch.cat([torch.zeros(5), moved.model.weight.detach().flatten()])
    moved.model.weight.data = flat[5:].view(48, 16)
    with AllocationTracker(as_alone=True):
        found = moved.gradients()
    assert same(found, plain(made(Parts)))


@pytest.mark.parametrize("name", ["linear", "attention", "views"])
def test_under_autocast_the_casts_of_weights_travel_too(name):
    def cast(model):
        def run(x):
            with torch.autocast("cpu", torch.bfloat16):
                return model(x)

        return run

    one, other = made(MODELS[name]), made(MODELS[name])
    moved = Moved(one, cast(one))
    assert same(moved.away().gradients(), plain(other, cast(other)))


def test_what_never_left_is_there_where_it_was():
    assert same(Moved(made(Views)).gradients(), plain(made(Views)))


def test_a_storage_moves_once_however_many_views_of_it_are_saved():
    moved = Moved(made(Views))
    assert moved.moved_bytes == 4 * 8 * (48 + 16 + 16)  # all_, a * b, and c in its own order


def test_parameters_the_input_and_what_others_hold_stay():
    table = torch.randn(8, 16)
    model = made(lambda: nn.Linear(16, 16))
    moved = Moved(model, lambda x: model(x).mul(table).sin())
    assert moved.moved_bytes == 4 * 8 * 16  # what sin saved; of mul only the table
    other = made(lambda: nn.Linear(16, 16))
    assert same(moved.away().gradients(), plain(other, lambda x: other(x).mul(table).sin()))


def test_a_frozen_parameter_that_left_is_found_again():
    def frozen():
        model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        model[2].requires_grad_(False)
        return model

    assert same(Moved(made(frozen)).away().gradients(), plain(made(frozen)))


def test_conjugates_and_few_bytes_stay_where_they_are():
    model = made(lambda: nn.Linear(16, 16))

    def spectrum(x):
        turned = torch.view_as_complex(model(x).view(-1, 8, 2))
        return (turned * turned.conj()).real.contiguous() * x.sum()

    moved = Moved(model, spectrum)
    assert all(cell.num_bytes >= 64 for cell in moved.cells)
    other = made(lambda: nn.Linear(16, 16))
    gradients = moved.away().gradients()
    model = other
    assert same(gradients, plain(other, spectrum))


def test_what_was_changed_in_place_after_it_was_saved_is_refused_as_torch_does():
    model = made(lambda: nn.Linear(16, 16))

    def careless(x):
        y = torch.exp(model(x))
        y.add_(1.0)
        return y * 2

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain(model, careless)
    for moved in (Moved(model, careless), Moved(model, careless).away()):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            moved.gradients()


def test_an_input_that_was_changed_in_place_is_refused():
    model = made(lambda: nn.Linear(16, 16))

    def careless(x):
        y = model(x)
        x.detach().add_(1.0)
        return y

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Moved(model, careless).gradients()


def test_memory_is_free_once_it_has_left_and_again_as_the_backward_goes_on():
    moved = Moved(made(MODELS["attention"]))
    copies = [cell.bytes_now().clone() for cell in moved.cells]
    for cell, copy in zip(moved.cells, copies, strict=True):
        cell.leave()
        cell.memory = copy
    moved.saved.moved.update(moved.cells)
    del copies, copy, cell
    moved.cells.clear()
    assert sum(tensor.nbytes for tensor in moved.saved.here()) == moved.moved_bytes
    moved.gradients()
    assert moved.saved.here() == []


class Complex(nn.Module):
    """Reads its weight as a conjugate, and as the negative of its imaginary part."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16, 2))

    def forward(self, x):
        turned = torch.view_as_complex(self.weight).conj()
        y = x @ turned.imag + x
        return torch.view_as_real(y.to(turned.dtype) @ turned).sum(-1)


class OwnParameter(nn.Parameter):
    pass


class OfOwnKind(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = OwnParameter(torch.randn(16, 16))

    def forward(self, x):
        return torch.tanh(x @ self.weight)


class WithSparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return torch.eye(len(x)).to_sparse_csr() @ self.linear(x).sigmoid()


class Slope(nn.Module):
    """Its own forward runs a backward, which wants what was saved of the input."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        energy = self.linear(x).square().sum() + x.pow(3).sum()
        return x - 0.1 * torch.autograd.grad(energy, x, create_graph=True)[0]


@pytest.mark.parametrize("kind", [Complex, OfOwnKind, WithSparse, Slope])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_weights_of_every_look_and_backwards_inside_of_forwards(kind):
    assert same(Moved(made(kind)).away().gradients(), plain(made(kind)))


def test_versions_are_compared_of_one_tensor_only():
    model = made(lambda: nn.Linear(16, 16))

    def detached(x):
        x.detach().mul_(1.0)  # as of a clone whose counter has gone on; x.data begins at 0
        return model(x) + model(x.data)

    other = made(lambda: nn.Linear(16, 16))
    gradients = Moved(model, detached).away().gradients()
    model = other
    assert same(gradients, plain(other, detached))


class Forwards(nn.Module):
    """A derivative taken forwards, of which autograd saves zeros that have no memory."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        shifted = torch.func.jvp(lambda y: torch.tanh(self.linear(y)), (x,), (torch.ones_like(x),))
        return shifted[1] + self.linear(x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch.func.jvp's own
def test_zeros_without_memory_stay():
    model = made(Forwards)
    assert same(Moved(model).away().gradients(), plain(made(Forwards)))
