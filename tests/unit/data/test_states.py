"""Copies of a source's own state."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from shoal.core.errors import TrialError
from shoal.data import Feed
from shoal.data.states import is_stateful, portable


class Source:
    def __init__(self, state):
        self.state = state

    def __iter__(self):
        yield torch.zeros(1)

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_a_copy_has_the_types_and_shares_nothing():
    tensor, inner = torch.zeros(2), [1]
    state = {"a": (1, 2.5, None, True), "b": inner, 3: tensor, "c": Counter("x")}

    copy = portable(state)
    tensor += 1
    inner.append(2)

    assert copy["a"] == (1, 2.5, None, True)
    assert copy["b"] == [1]
    assert copy[3].tolist() == [0, 0]
    assert isinstance(copy["c"], Counter)


def test_numpys_numbers_are_numbers():
    assert portable({"n": np.int64(3)}) == {"n": 3}


def test_what_cannot_be_kept_is_named_by_its_place():
    with pytest.raises(TrialError) as refusal:
        portable({"workers": [{"seen": {1, 2}}]})
    assert str(refusal.value) == (
        "the training data's state_dict()['workers'][0]['seen'] is set, which no checkpoint can "
        "keep. Give numbers, strings, tensors and containers of them: torch.from_numpy(array), "
        "for one. Without state_dict() the data is read again from the first batch instead."
    )


def test_a_state_that_cannot_be_kept_is_refused_with_the_first_batch():
    feed = Feed(Source({"bytes": b"x"}), torch.device("cpu"))

    with pytest.raises(TrialError, match=r"state_dict\(\)\['bytes'\] is bytes"):
        feed.next()


def test_both_methods_make_a_source_stateful():
    assert is_stateful(Source({}))
    assert not is_stateful([1])
