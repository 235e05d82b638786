"""A signature holds what trials of an array share, and no more."""

import functools
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.fusion import first_difference, signature_of, told_apart
from shoal.fusion.declined import Declined
from shoal.fusion.effects.globals import global_settings
from shoal.fusion.graphs.constants import constants_of
from shoal.fusion.matching.signature import described
from shoal.fusion.rows.blend import blend
from shoal.recipes.recipe import Recipe
from shoal.recipes.wholeset import WholeSet

pytestmark = pytest.mark.usefixtures("one_thread")


def data(hp):
    return [], None


def plain_loss(output, batch):
    return output.mean()


def other_loss(output, batch):
    return output.sum()


def smoothed(output, batch, smoothing):
    return F.cross_entropy(output, batch[1], label_smoothing=smoothing)


def signature(module, loss=plain_loss, optimizer=torch.optim.AdamW, batch=None, **changes):
    recipe = Recipe(model=lambda hp: module, data=data, loss=loss, **changes)
    return signature_of(recipe, module, optimizer(module.parameters(), lr=0.1), batch)


def net(width=4, drop=0.1, bias=True):
    return nn.Sequential(nn.Linear(3, width, bias=bias), nn.Dropout(drop), nn.Linear(width, 2))


def difference(one, other):
    return first_difference(one, other)


class Own(nn.Linear):
    """A layer, and in it a type that its code has."""

    def __init__(self, kind):
        super().__init__(2, 2)
        self.kind = kind


@pytest.mark.parametrize("name", ["__main__", "another"])
def test_a_file_that_is_run_and_one_that_is_imported_have_the_same_signature(monkeypatch, name):
    """``python study.py`` and then ``shoal resume`` told the trials of an array apart."""
    told = set()
    for home in ("__shoal_main__", name):
        monkeypatch.setattr(Own, "__module__", home)
        told.add(signature(nn.Sequential(Own(Own))))
    assert len(told) == (1 if name == "__main__" else 2)


def test_a_set_in_code_is_the_same_whatever_its_order():
    """Each process has another one: ``kind in {"l1", "mse"}`` told its trials apart."""
    sets = frozenset([0, 8]), frozenset([8, 0])
    assert repr(sets[0]) != repr(sets[1])
    code = plain_loss.__code__
    one, other = (code.replace(co_consts=(*code.co_consts, some)) for some in sets)
    assert described(types.FunctionType(one, {})) == described(types.FunctionType(other, {}))


def test_floats_may_differ_wherever_they_are():
    assert difference(signature(net(drop=0.1)), signature(net(drop=0.5))) == ""
    assert difference(signature(net(drop=0)), signature(net(drop=0.5))) == ""
    one, other = (functools.partial(smoothed, smoothing=s) for s in (0.0, 0.1))
    assert difference(signature(net(), loss=one), signature(net(), loss=other)) == ""
    one, other = (nn.LeakyReLU(s) for s in (0.1, 0.2))
    assert (
        difference(
            signature(nn.Sequential(nn.Linear(2, 2), one)),
            signature(nn.Sequential(nn.Linear(2, 2), other)),
        )
        == ""
    )


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (net(4), net(8), "'out_features' of module '0': 4 in one, 8 in the other"),
        (net().double(), net(), "parameter '0.weight': float64"),
        (net().to(torch.bfloat16), net(), "parameter '0.weight': bfloat16"),
        (nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), nn.Sequential(nn.GELU(), nn.Linear(2, 2)),
         "module '0': torch.nn.modules.activation.ReLU in one"),
        (nn.Conv2d(2, 4, 3), nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last), "strides"),
        (nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False), "in the other"),
    ],
)  # fmt: skip
def test_the_first_difference_names_the_place(one, other, words):
    class Held(torch.optim.SGD):
        def __init__(self, parameters, lr):
            super().__init__(list(parameters), lr)

    found = difference(signature(one, optimizer=Held), signature(other, optimizer=Held))

    assert words in found


def test_the_losss_code_and_the_optimizers_class_are_told():
    one = signature(net())
    assert "the recipe's loss: function plain_loss" in difference(
        one, signature(net(), other_loss)
    )
    assert "the optimizer: torch.optim.adamw.AdamW in one, torch.optim.sgd.SGD" in difference(
        one, signature(net(), optimizer=torch.optim.SGD)
    )
    assert "the recipe's accumulate: 1 in one, 2" in difference(
        one, signature(net(), accumulate=2)
    )


def test_hyperparameters_are_told_apart_by_what_they_change():
    hps = [
        {"lr": lr, "drop": drop, "width": width, "smoothing": smoothing}
        for lr, drop, width, smoothing in (
            (0.1, 0.0, 4, 0.0),
            (0.2, 0.3, 4, 0.1),
            (0.1, 0.0, 8, 0.0),
            (0.3, 0.1, 8, 0.2),
        )
    ]
    found = told_apart(
        hps,
        [
            signature(
                net(hp["width"], hp["drop"]),
                functools.partial(smoothed, smoothing=hp["smoothing"]),
            )
            for hp in hps
        ],
    )

    assert found.fusible == ("drop", "lr", "smoothing")
    assert found.infusible == ("width",)


def test_batches_are_told_by_shape_and_type():
    rows = (torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))
    fewer = (torch.zeros(3, 3), torch.zeros(3, dtype=torch.long))

    assert difference(signature(net(), batch=rows), signature(net(), batch=rows)) == ""
    assert difference(signature(net(), batch=rows), signature(net(), batch=fewer)) == (
        "batch: tuple(float32 [4, 3], int64 [4]) in one, tuple(float32 [3, 3], int64 [3]) "
        "in the other"
    )


def test_tied_and_held_parameters_are_told():
    tied = net(3)
    tied[2] = nn.Linear(3, 3)
    free = net(3)
    free[2] = nn.Linear(3, 3)
    tied[2].weight = tied[0].weight

    assert "the same as '0.weight'" in difference(signature(tied), signature(free))
    all_of, some = (
        (lambda p, lr: torch.optim.SGD(list(p), lr)),
        (lambda p, lr: torch.optim.SGD(list(p)[1:], lr)),
    )
    assert "parameters that the optimizer leaves alone: [] in one, ['0.weight']" in difference(
        signature(net(), optimizer=all_of), signature(net(), optimizer=some)
    )


def test_plain_tensors_are_told_by_their_bits():
    one, other = net(), net()
    one.mask, other.mask = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])

    assert "'mask' of the model: a tensor, float32 [2]" in difference(
        signature(one), signature(other)
    )


def test_a_number_that_was_spread_over_others_is_told_by_its_bits():
    """A distribution's ``loc`` and ``scale``: torch calls a stride of 0 contiguous there."""
    one, alike, other = (torch.distributions.Normal(at, torch.tensor([0.5])) for at in (0, 0, 1))
    assert one.loc.stride() == (0,)
    assert described(one.loc) == described(alike.loc)
    assert described(one.loc) != described(other.loc)


def test_a_module_that_torch_fx_wrote_is_told():
    assert signature(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))) is not None


class Endless(tuple):
    """As irreducible representations of e3nn: what length would mean is left open."""

    def __len__(self):
        raise NotImplementedError


def test_floats_are_found_in_a_tuple_that_has_no_length():
    modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
    modules[0].parts, modules[1].parts = Endless((0.5, 2)), Endless((0.25, 2))
    recipe = Recipe(model=lambda hp: nn.Linear(2, 2), data=data, loss=plain_loss)
    assert constants_of(recipe, modules[0]) != constants_of(recipe, modules[1])


def test_every_fact_has_a_subject_of_its_own():
    whole = WholeSet(lambda output, batch: (output, batch[1]), lambda x, y: (x == y).float())

    facts = signature(net(), metrics={"hits": whole, "mean": plain_loss}).facts

    assert len(dict(facts)) == len(facts)
    assert difference(
        signature(net(), metrics={"hits": whole}), signature(net(5), metrics={"hits": whole})
    ).startswith("'out_features' of module '0'")


class Settings:
    """As peft's configuration."""

    def __init__(self, alpha, rank):
        self.lora_alpha, self.rank, self.names = alpha, rank, {"lora_alpha": "scale"}


def adapted(alpha, rank=2):
    module = nn.Linear(3, 2)
    module.settings = {"default": Settings(alpha, rank)}
    module.lora_alpha, module.ranks = {"default": alpha}, {"default": rank}
    return module


def test_an_int_that_is_a_float_by_nature_may_differ_in_dicts_and_objects_too():
    assert difference(signature(adapted(8)), signature(adapted(16))) == ""
    assert difference(signature(adapted(8)), signature(adapted(16.5))) == ""
    assert "'rank': 2" in difference(signature(adapted(8, 2)), signature(adapted(8, 4)))


def test_a_compiled_array_is_of_trials_whose_ints_are_the_same_constants():
    recipe = Recipe(model=adapted, data=data, loss=plain_loss)
    found = [constants_of(recipe, adapted(alpha)) for alpha in (8, 16, 8.0)]
    assert found[0] != found[1]
    assert found[0] == found[2]


def test_what_tells_two_moments_apart_tells_every_int():
    assert described({"lora_alpha": 8}) != described({"lora_alpha": 16})
    assert described(Settings(8, 2)) != described(Settings(16, 2))


def penalized(weight=None):
    """A loss that closes over ``by``, which is assigned where there is a weight only."""
    if weight is not None:
        by = weight

    def loss(output, batch):
        return plain_loss(output, batch) + (0 if weight is None else by * output.sum())

    return loss


def test_a_function_may_close_over_what_was_never_assigned():
    assert signature(net(), loss=penalized()) == signature(net(), loss=penalized())
    assert difference(signature(net(), loss=penalized()), signature(net(), loss=penalized(0.5)))
    recipe = Recipe(model=lambda hp: net(), data=data, loss=penalized())
    assert constants_of(recipe, net()) == constants_of(recipe, net())
    assert global_settings(recipe, net()) == global_settings(recipe, net())
    blended = blend([penalized(), penalized()], "the loss")
    assert blended(torch.ones(1), None) == 1
    with pytest.raises(Declined, match="closes over"):
        blend([penalized(), penalized(0.5)], "the loss")
