"""A value has the same letters in two processes, and another value others."""

from __future__ import annotations

import threading

import pytest
import torch

from shoal.fusion.effects.processwide import settings_of_process
from shoal.fusion.matching.digests import Digests


class Node:
    """As configurations have them: each part knows whose it is."""

    def __init__(self, scale, parent=None):
        self.parent, self.kind, self.lock = parent, "node", threading.Lock()
        self.parts = {"scale": scale, "child": None if parent else Node(2 * scale, self)}


def within_itself(scale):
    made = [None, scale]
    made[0] = made
    return made


KINDS = {
    "a node": Node,
    "a list": within_itself,
    "a tensor": lambda scale: {"t": torch.tensor(scale)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_values_have_other_digests_also_where_they_have_themselves_in_them(kind):
    make = KINDS[kind]
    one, same, other = (Digests().of(make(scale)) for scale in (1.0, 1.0, 2.0))
    assert one == same != other


def test_variables_of_the_environment_count_whatever_their_letters(monkeypatch):
    monkeypatch.setenv("net_scale", "2.0")
    found = settings_of_process({"environ", "net_scale", "NET_SCALE", "gain"})
    environ = {name: value for name, value in found.items() if "environ" in name}
    assert environ == {
        "os.environ['net_scale']": "'2.0'",
        "os.environ['NET_SCALE']": "None",
    }
