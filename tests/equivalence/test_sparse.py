"""A model with sparse gradients trains resident, to the plain loop's bits; all else refuses it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.core.errors import PlanError, SpecError
from shoal.recipes.recipe import Recipe

LR = shoal.grid(lr=[0.01, 0.003])


class Bag(nn.Module):
    """Two tables of which a batch reads a few rows, and one that none reads."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(64, 8, sparse=True)
        self.bags = nn.EmbeddingBag(32, 8, sparse=True, mode="sum")
        self.unread = nn.Embedding(16, 8, sparse=True)

    def forward(self, x):
        return self.words(x).mean(1) + self.bags(x % 32)


class Dense(nn.Module):
    """The same with layers after it, whose gradients are dense."""

    def __init__(self):
        super().__init__()
        self.table, self.layers = Bag(), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        x = self.table(x)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def bag(hp):
    return Bag()


def dense(hp):
    return Dense()


def data(hp):
    generator = torch.Generator().manual_seed(1)
    draw = lambda high, *size: torch.randint(high, size, generator=generator)  # noqa: E731
    return [(draw(64, 4, 5), draw(8, 4)) for _ in range(6)], [(draw(64, 4, 5), draw(8, 4))]


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def sparse_adam(named_parameters, hp):
    return torch.optim.SparseAdam([p for _, p in named_parameters], lr=hp["lr"])


def sgd(named_parameters, hp):
    return torch.optim.SGD([p for _, p in named_parameters], lr=hp["lr"])


def recipe_of(model, optimizer, **changes):
    return Recipe(model=model, data=data, loss=loss, optimizer=optimizer, **changes)


@pytest.mark.parametrize(
    ("model", "optimizer", "accumulate", "precision"),
    [
        (bag, sparse_adam, 1, "fp32"),
        (bag, sparse_adam, 2, "fp32"),
        (dense, sgd, 2, "fp32"),
        (dense, sgd, 2, "bf16"),
    ],
)
@pytest.mark.parametrize("technique", ["resident", None])
def test_resident_it_trains_to_the_plain_loops_bits(
    model, optimizer, accumulate, precision, technique, run_study, assert_alone
):
    recipe = recipe_of(model, optimizer, accumulate=accumulate, precision=precision)
    report = run_study(recipe, LR, technique=technique, steps=6, eval_every=3)
    assert_alone(report, report.trials, recipe, steps=6, eval_every=3)


@pytest.mark.parametrize(
    ("technique", "devices"),
    [
        (shoal.Spilled(shards=2), 1),
        (shoal.Pipelined(stages=2), 2),
        (shoal.Pipelined(stages=2, shards=4), 2),
        (shoal.Pipelined(stages=2, width=2), 4),
    ],
    ids=str,
)
def test_a_model_with_sparse_gradients_is_not_cut(technique, devices, run_study):
    recipe = recipe_of(dense, sgd, accumulate=2)
    with pytest.raises(PlanError, match=r"gradient of 'table.\w+.weight' is sparse, and what is"):
        run_study(recipe, LR, technique=technique, devices=devices, steps=2)


def test_where_it_does_not_fit_the_words_say_why_it_is_not_spilled(run_study):
    recipe = recipe_of(dense, sgd)
    with pytest.raises(PlanError, match=r"is sparse, and what is cut"):
        run_study(recipe, LR, memory="6KiB", steps=2)


@pytest.mark.parametrize("shard", [False, True])
def test_replicas_refuse_it(shard, run_study):
    recipe = recipe_of(dense, sgd, splittable=True)
    technique = shoal.DataParallel(width=2, shard=shard)
    with pytest.raises(PlanError, match="is sparse, and replicas do not add those up"):
        run_study(recipe, LR, technique=technique, devices=2, steps=2)


@pytest.mark.parametrize("model", [bag, dense])
def test_arrays_leave_it_to_train_alone(model, run_study, assert_alone):
    recipe = recipe_of(model, sparse_adam if model is bag else sgd)
    report = run_study(recipe, LR, fuse=2, steps=4)
    assert_alone(report, report.trials, recipe, steps=4)


class Asked(nn.Module):
    """Its code asks for a sparse gradient, which no layer tells."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 8))

    def forward(self, x):
        return F.embedding(x, self.table, sparse=True).mean(1)


MODELS = {"sparse": Dense, "asked": Asked, "dense": lambda: nn.EmbeddingBag(64, 8)}


def chosen(hp):
    return MODELS[hp["model"]]()


@pytest.mark.parametrize(
    ("model", "name"),
    [("sparse", "table.words.weight"), ("asked", "table")],
    ids=["layer", "code"],
)
def test_clipping_asks_for_a_norm_that_torch_does_not_take(model, name, run_study):
    recipe = recipe_of(chosen, sgd, clip_grad_norm=1.0)
    with pytest.raises(SpecError, match=f"that of '{name}' is sparse, of which torch"):
        run_study(recipe, LR | shoal.grid(model=[model]), steps=2)


@pytest.mark.parametrize("fuse", [False, 2])
def test_it_fails_those_trials_and_no_other(fuse, run_study, assert_alone):
    recipe = recipe_of(chosen, sgd, clip_grad_norm=1.0)
    space = shoal.grid(lr=[0.01, 0.003], model=list(MODELS))
    report = run_study(recipe, space, fuse=fuse, steps=2)
    failed = [trial for trial in report.trials if str(trial.state) == "FAILED"]
    assert [trial.hp["model"] for trial in failed] == ["sparse", "asked"] * 2
    assert all("is sparse, of which torch takes none" in trial.error for trial in failed)
    others = [trial for trial in report.trials if trial not in failed]
    assert_alone(report, others, recipe, steps=2) if not fuse else None
    assert {str(trial.state) for trial in others} == {"FINISHED"}


class Graph(nn.Module):
    """Layers between which rows are mixed as a batch's sparse matrix says."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, edges):
        for layer in self.layers:
            x = torch.relu(edges @ layer(x))
        return x


def graph(hp):
    return Graph()


def graphs(hp):
    generator = torch.Generator().manual_seed(1)
    edges = (torch.rand(6, 6, generator=generator) < 0.4).float()
    x, y = torch.rand(6, 8, generator=generator), torch.randint(8, (6,), generator=generator)
    return [(x, y, edges.to_sparse()), (x, y, (edges / 2).to_sparse_csr())], [
        (x, y, edges.to_sparse())
    ]


def with_edges(batch):
    return batch[0], batch[2]


@pytest.mark.parametrize(
    "wish",
    [{"technique": "resident"}, {"technique": shoal.Spilled(shards=2)}, {"fuse": 2}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_batches_train_to_the_plain_loops_bits(wish, run_study, assert_alone):
    recipe = Recipe(model=graph, data=graphs, inputs=with_edges, loss=loss)
    report = run_study(recipe, LR, steps=4, eval_every=2, **wish)
    assert_alone(report, report.trials, recipe, steps=4, eval_every=2)
    if "fuse" in wish:
        plan = (report.directory / "plan.json").read_text()
        assert "its batches have sparse tensors, and arrays stack dense ones" in plan
