"""What a module's code asks of its own floats."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.fusion.matching.asked import answers, questions
from shoal.fusion.matching.match import first_difference
from shoal.fusion.matching.signature import signature_of


class Asks(nn.Module):
    def __init__(self, rate=0.1, scale=1.0):
        super().__init__()
        self.rate, self.scale, self.plain = rate, scale, rate
        self.of = SimpleNamespace(scale=scale)

    def helper(self):
        plain = self.rate
        plain = 2 * plain  # no attribute any more
        scale = self.scale
        return 1 if not scale or plain > 7 or self.of.scale >= 2 else 2

    def forward(self, x):
        if self.rate > 0:
            x = F.dropout(x, self.rate, self.training)
        if 0.25 < self.rate < 1 and self.scale != 3:
            x = x * 2
        return x * self.plain * self.helper()


class Inherits(Asks):
    pass


class AsksAnother(nn.Module):
    """Asks what a module within it has, a number of NumPy's maybe."""

    def __init__(self, rate):
        super().__init__()
        self.drop = nn.Dropout(rate)

    def forward(self, x):
        return self.drop(x) if self.drop.p > 0 else x


class Rates(nn.Module):
    """Hands its rate to an operation that has a rule, and asks nothing."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        return F.dropout(x, self.rate, self.training)


@pytest.mark.parametrize("kind", [Asks, Inherits])
def test_comparisons_and_truth_of_attributes_are_questions(kind):
    assert {path: set(asked) for path, asked in questions(kind).items()} == {
        ("rate",): {(">", 0.0), (">", 0.25), ("<", 1.0)},
        ("scale",): {("!=", 3.0), ("is true", 0.0)},
        ("of", "scale"): {(">=", 2.0)},
    }


def test_answers_are_told_and_no_number():
    assert dict(answers(Asks())) == {
        "rate": "< 1, > 0, not > 0.25",
        "scale": "!= 3, is true",
        "of.scale": "not >= 2",
    }
    assert dict(answers(nn.MultiheadAttention(4, 2))) == {"dropout": "not > 0"}
    assert not dict(answers(nn.Dropout()))


RECIPE = shoal.Recipe(model=len, data=len, loss=max)


def difference(one, other):
    return first_difference(signature_of(RECIPE, one), signature_of(RECIPE, other))


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (Asks(0.1), Asks(0.2), ""),
        (Asks(0.1), Asks(0.3), "not > 0.25"),
        (Asks(0.1), Asks(0.0), "not > 0"),
        (Asks(0.1, 1.0), Asks(0.1, 1.5), ""),
        (Asks(0.1, 1.0), Asks(0.1, 2.0), "'of.scale' of the model, as its code asks: not >= 2"),
        (Asks(0.1, 1.0), Asks(0.1, 0.0), "not is true"),
        (nn.MultiheadAttention(4, 2, 0.1), nn.MultiheadAttention(4, 2, 0.3), ""),
        (nn.MultiheadAttention(4, 2, 0.1), nn.MultiheadAttention(4, 2, 0), "not > 0"),
        (nn.Dropout(0.1), nn.Dropout(0), ""),
        (AsksAnother(0.1), AsksAnother(0.0), "'drop.p' of the model, as its code asks: > 0"),
        (AsksAnother(np.float64(0.1)), AsksAnother(np.float64(0.0)), "'drop.p' of the model"),
        (Rates(0.1), Rates(0.0), ""),
        (nn.LSTM(2, 2, 2, dropout=0.1), nn.LSTM(2, 2, 2, dropout=0.0), ""),
    ],
)
def test_who_answers_otherwise_is_of_another_shape(one, other, words):
    found = difference(one, other)
    assert bool(found) == bool(words)
    assert words in found


def test_asking_tensors_is_no_question_of_this_kind():
    class Tensors(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    assert not questions(Tensors)
    assert not questions(nn.Linear)
    assert torch.is_tensor(Tensors()(torch.ones(1)))
