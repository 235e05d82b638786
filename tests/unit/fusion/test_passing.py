"""Attributes that a forward hands on to itself, watched without a trace in the user's classes."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from shoal.fusion.effects.passing import handed_on


class Norm(nn.Module):
    """Each class of its kind is known by its name, once."""

    known: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        if cls.__name__ in Norm.known:
            raise ValueError(f"{cls.__name__} is registered already")
        Norm.known[cls.__name__] = cls


class RevIN(Norm):
    def forward(self, x):
        self.mean = x.mean()
        return (x - self.mean) + self.mean


def test_a_class_that_registers_its_subclasses_hears_of_no_watch():
    model = RevIN()

    def run():
        model(torch.ones(3))

    assert handed_on(model, {("", "mean")}, run, run) == {("", "mean")}
    assert Norm.known == {"RevIN": RevIN}
    assert type(model) is RevIN
