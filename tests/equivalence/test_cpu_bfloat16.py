"""LSTMs under autocast on a CPU for which oneDNN has none: torch's refusal, and what to do."""

from __future__ import annotations

import pytest
import recurring
from machine import BF16_LSTM
from torch import nn

import shoal
from shoal.recipes.recipe import NO_LSTM
from shoal.testing import plain_loop

REFUSAL = (
    "could not create a primitive descriptor for the LSTM forward propagation primitive. "
    "Run workload with environment variable ONEDNN_VERBOSE=all to get additional information."
)


class Refused(nn.Module):
    """It fails as torch does on such a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x_BTI):
        raise RuntimeError(REFUSAL)


def refused(hp):
    return Refused()


def recipe_of(**changed):
    return shoal.Recipe(**{**recurring.SETTINGS, "precision": "bf16", **changed})


def test_the_plain_loop_says_what_to_do():
    with pytest.raises(RuntimeError, match="could not create") as caught:
        plain_loop(recipe_of(model=refused), {"lr": 1e-2}, seed=0, steps=1)
    assert caught.value.__notes__ == [NO_LSTM]


def test_a_study_says_what_to_do(run_study):
    with pytest.raises(shoal.TrialError) as caught:
        run_study(recipe_of(model=refused), {"lr": 1e-2}, steps=1)
    assert "ONEDNN_VERBOSE" in str(caught.value)
    assert str(caught.value).count(NO_LSTM) == 1


def test_other_failures_are_as_they_are():
    def fails(hp):
        model = Refused()
        model.forward = lambda x_BTI: 1 / 0
        return model

    with pytest.raises(ZeroDivisionError) as caught:
        plain_loop(recipe_of(model=fails), {"lr": 1e-2}, seed=0, steps=1)
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.skipif(BF16_LSTM, reason="this CPU runs them")
def test_an_lstm_itself():
    with pytest.raises(RuntimeError) as caught:
        plain_loop(recipe_of(), {"lr": 1e-2}, seed=0, steps=1)
    assert caught.value.__notes__ == [NO_LSTM]
