"""A float per slot: computes value by value, and never passes for a number that it is not."""

import collections
import copy
import functools
import math
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend

from shoal.fusion.declined import Declined, Disagreement
from shoal.fusion.rows.blend import blend, blend_settings
from shoal.fusion.rows.perslot import PerSlot, in_words, values_of

pytestmark = pytest.mark.usefixtures("one_thread")


def test_arithmetic_goes_value_by_value():
    rate = PerSlot([0.1, 0.4])

    assert (1 - rate).values == (0.9, 0.6)
    assert (rate * 2).values == (0.2, 0.8)
    assert (2 / PerSlot([1.0, 4.0])).values == (2.0, 0.5)
    assert (PerSlot([2.0, 3.0]) ** PerSlot([2.0, 1.0])).values == (4.0, 3.0)
    assert (-rate).values == (-0.1, -0.4)
    assert values_of(0.5, 3) == (0.5, 0.5, 0.5)


def test_a_question_is_answered_if_all_slots_agree():
    rate = PerSlot([0.1, 0.4])

    assert rate < 1.0
    assert not rate > 1.0
    assert rate
    assert rate != 0.5
    with pytest.raises(
        Disagreement, match=r"asks whether a hyperparameter is > 0\.2; for the values 0\.1, 0\.4"
    ):
        _ = rate > 0.2
    with pytest.raises(Disagreement, match="is true"):
        bool(PerSlot([0.0, 0.1]))


def test_code_that_reads_the_double_gets_no_number():
    rate = PerSlot([0.1, 0.4])

    assert math.isnan(math.fsum([rate]))
    with pytest.raises(Disagreement, match="makes one number of a hyperparameter of which each"):
        float(rate)
    assert float(PerSlot([0.5, 0.5])) == 0.5


def test_equal_values_stay_and_floats_that_differ_become_one_per_slot():
    assert blend([0.1, 0.1], "a") == 0.1
    assert blend([0.1, 0.3], "a").values == (0.1, 0.3)
    assert blend([{"p": 0.1, "n": 3}, {"p": 0.3, "n": 3}], "a")["p"].values == (0.1, 0.3)
    assert blend([(1, 0.1), (1, 0.2)], "a")[1].values == (0.1, 0.2)
    made = blend([types.SimpleNamespace(x=0.1), types.SimpleNamespace(x=0.2)], "a")
    assert made.x.values == (0.1, 0.2)


def test_functions_of_equal_code_are_made_anew_around_what_differs():
    def scaled(by):
        return lambda x: x * by

    made = blend([scaled(2.0), scaled(3.0)], "the loss")
    partial = blend([functools.partial(pow, 2.0), functools.partial(pow, 3.0)], "the loss")
    module = blend([nn.CrossEntropyLoss(label_smoothing=s) for s in (0.0, 0.1)], "the loss")

    assert made(2.0).values == (4.0, 6.0)
    assert partial.args[0].values == (2.0, 3.0)
    assert module.label_smoothing.values == (0.0, 0.1)


def test_named_tuples_and_enums_are_compared_by_what_they_are():
    kind = collections.namedtuple("Config", ["backends", "scale"])
    plain, flash = SDPBackend.MATH, SDPBackend.FLASH_ATTENTION

    made = blend([kind([plain, flash], scale) for scale in (1.0, 1.0)], "the place")
    assert made == kind([plain, flash], 1.0)
    made = blend([kind([plain, flash], scale) for scale in (1.0, 2.0)], "the place")
    assert made.scale.values == (1.0, 2.0)
    with pytest.raises(Declined, match="the place differs"):
        blend([kind([plain], 1.0), kind([flash], 1.0)], "the place")


def test_what_differs_in_more_than_floats_is_declined_with_its_place():
    for values in (["a", "b"], [True, False], [(1,), (1, 2)], [{"a": 1}, {"b": 1}]):
        with pytest.raises(Declined, match="the place"):
            blend(values, "the place")
    with pytest.raises(Declined, match="the loss is other code"):
        blend([lambda x: x, lambda x: -x], "the loss")
    with pytest.raises(Declined, match="is a module with tensors"):
        blend([nn.Linear(1, 1), nn.Linear(1, 1)], "the loss")
    with pytest.raises(Declined, match="the mask differs"):
        blend([torch.zeros(2), torch.ones(2)], "the mask")


def calling(part: str) -> nn.Module:
    module = nn.ModuleDict({"one": nn.Linear(1, 1), "other": nn.Linear(1, 1)})
    own = module[part]
    module.call = lambda x: own(x)
    return module


def test_functions_that_close_over_other_parts_of_their_models_are_declined():
    modules = [calling("one"), calling("one")]
    call = modules[0].call
    assert blend_settings(copy.copy(modules[0]), modules, "the model").call is call
    modules = [calling("one"), calling("other")]
    with pytest.raises(Declined, match="is a module with tensors"):
        blend_settings(modules[0], modules, "the model")


def test_its_type_is_told_in_words_and_its_values_once_each_and_not_too_many():
    error = TypeError("'PerSlot' object cannot be interpreted as an integer")
    words = in_words(error)
    assert words.startswith("a hyperparameter of which each trial has its own cannot be")
    many = repr(PerSlot([0.1 * n for n in range(64)]))
    assert many.endswith("(0, 0.1, 0.2, 0.3, 0.4, 0.5 and 58 more)")
    assert repr(PerSlot([0.1, 0.2, 0.1])).endswith("(0.1, 0.2)")


def test_numbers_of_numpy_that_are_equal_are_one_setting():
    """As the number of patches of MONAI's vision transformers is."""
    assert blend([np.int64(8), np.int64(8)], "the model.n_patches") == 8
    with pytest.raises(Declined, match=r"n_patches differs between trials: np.int64\(8\) and"):
        blend([np.int64(8), np.int64(9)], "the model.n_patches")


def test_equal_arrays_of_numpy_are_one_setting():
    """As the permutations of normalizing flows are, and a diffusion's noise by step."""
    one = np.array([2, 0, 1])
    assert blend([one, one.copy()], "the model.perm") is one
    unlike = (np.array([2, 1, 0]), np.array([2.0, 0.0, 1.0]), np.array([2, 0]))
    for other in (*unlike, np.array([2, 0, 1], dtype=object)):
        with pytest.raises(Declined, match=r"perm differs between trials"):
            blend([one, other], "the model.perm")


@pytest.mark.parametrize(
    "held", [lambda x: x, lambda x: [x], lambda x: {"x": x}, lambda x: types.SimpleNamespace(x=x)]
)
def test_tensors_that_are_trained_and_no_parameters_are_declined(held):
    """As the architecture that DARTS searches is, which its model has in a list."""
    modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
    for module in modules:
        module.alphas = held(torch.zeros(3, requires_grad=True))
    with pytest.raises(Declined, match=r"the model\.alphas.* has a tensor with requires_grad"):
        blend_settings(copy.copy(modules[0]), modules, "the model")
    for module in modules:
        module.alphas = held(torch.zeros(3))
    blend_settings(copy.copy(modules[0]), modules, "the model")


class Asks(collections.UserDict):
    """A configuration that raises where a value is missing."""

    def values(self):
        raise RuntimeError("Missing mandatory value: root")


def test_a_mapping_of_another_type_that_trials_share_is_not_opened():
    one, modules = Asks(root=None), [nn.Linear(2, 2), nn.Linear(2, 2)]
    for module in modules:
        module.config = one
    assert blend([one, one], "the model.config") is one
    blend_settings(copy.copy(modules[0]), modules, "the model")


def test_what_is_in_itself_is_one_setting():
    one = [1]
    one.append(one)
    assert blend([one, one], "the model.circle") is one
