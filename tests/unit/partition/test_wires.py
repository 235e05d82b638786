"""Which tensor of a running forward is which, and what it was computed from."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.partition.taint import CHANCE, BlockOutput, Taint
from shoal.partition.wires import Names, Substitution, Touch, TouchWatch, Wire

FIRST, SECOND = Wire(1, "out.0"), Wire(2, "3.1")


def test_wires_know_how_they_are_named():
    assert SECOND.is_argument
    assert Wire(0, "norm#1<0").is_argument
    assert not FIRST.is_argument
    assert not Wire(0, "3.norm#0.1").is_argument
    assert str(SECOND) == "2:3.1"


def test_a_tensor_goes_by_its_last_name():
    names, tensor = Names(), torch.zeros(2)
    names.give(tensor, FIRST)
    names.give(tensor, SECOND)

    assert names.of(tensor) == SECOND
    assert names.of(tensor.clone()) is None


def test_a_tensor_that_was_changed_in_place_has_no_name_any_more():
    names, kept, changed = Names(), torch.zeros(2), torch.zeros(2)
    names.give(kept, FIRST)
    names.give(changed, SECOND)
    changed += 1

    assert names.of(changed) is None
    assert [id(tensor) for tensor in names.changed()] == [id(changed)]
    assert names.changed() == []
    assert names.of(kept) == FIRST


def test_a_name_dies_with_its_tensor():
    names, tensor = Names(), torch.zeros(2)
    names.give(tensor, FIRST)
    del tensor

    assert names.changed() == []
    assert all(names.of(torch.zeros(2)) is None for _ in range(10))


def test_forgotten_wires_are_nobodys():
    names, tensor = Names(), torch.zeros(2)
    names.give(tensor, FIRST)
    names.forget({FIRST})

    assert names.of(tensor) is None


def test_functions_read_the_real_tensor_in_place_of_its_like():
    like, real = torch.full((2,), float("nan")), torch.ones(2, requires_grad=True)
    with Substitution() as substitution:
        substitution.replace(like, real)
        total = (like + torch.cat([like, like]).sum()).sum()
        substitution.paused = True
        assert torch.add(like, 0).isnan().all()
    total.backward()

    assert total == 10
    assert real.grad.tolist() == [5, 5]
    assert substitution.in_leaves({"x": [like]})["x"][0] is real


def test_a_look_at_a_shape_is_a_touch():
    seen, unseen = torch.zeros(2, 3), torch.zeros(2, 3)
    with TouchWatch() as touch:
        touch.watch(seen, FIRST)
        touch.watch(unseen, SECOND)
        assert seen.shape[1] == 3
        touch.paused = True
        assert unseen.shape[1] == 3

    assert touch.touched == {Touch(FIRST, size_only=True)}


SIZES = {
    "shape": lambda t: t.shape, "size": lambda t: t.size(0), "dim": lambda t: t.dim(),
    "ndim": lambda t: t.ndim, "len": len, "numel": lambda t: t.numel(),
    "device": lambda t: t.device,
}  # fmt: skip
TYPES = {
    "dtype": lambda t: t.dtype, "type": lambda t: t.type(), "floating": torch.is_floating_point,
    "is_floating_point": lambda t: t.is_floating_point(), "itemsize": lambda t: t.itemsize,
    "element_size": lambda t: t.element_size(), "nbytes": lambda t: t.nbytes,
    "result_type": lambda t: torch.result_type(t, 1.0), "to": lambda t: t.to(torch.float32),
    "new": lambda t: t.new_zeros(2), "sum": lambda t: t + 1, "text": repr,
}  # fmt: skip


@pytest.mark.parametrize("look", [*SIZES, *TYPES])
def test_a_look_that_may_tell_the_type_is_told_from_one_at_the_size(look):
    tensor = torch.zeros(2, 3)
    with TouchWatch() as touch:
        touch.watch(tensor, FIRST)
        (SIZES | TYPES)[look](tensor)

    assert (Touch(FIRST, size_only=False) in touch.touched) == (look in TYPES)
    assert touch.touched


def test_no_mode_is_there_where_a_watch_is_left_and_what_is_handed_over_is_touched():
    handed, other = torch.zeros(2), torch.zeros(2)
    with TouchWatch() as touch:
        touch.watch(handed, FIRST)
        touch.watch(other, SECOND)
        with touch.left_for(({"x": [handed]},)):
            assert not torch.overrides.has_torch_function((handed,))
        assert torch.overrides.has_torch_function((handed,))

    assert touch.touched == {Touch(FIRST, size_only=False)}


def test_a_watch_below_another_mode_is_not_left():
    with TouchWatch() as touch, Substitution(), touch.left_for(()):
        assert torch.overrides.has_torch_function((torch.zeros(2),))


def test_sources_pass_through_operators_and_views_and_end_at_a_name():
    scale = nn.Parameter(torch.ones(3))
    output, mask = torch.ones(3), torch.ones(3)
    with torch.no_grad(), Taint({"scale": scale}) as taint:
        taint.name(output, FIRST, position=0)
        scaled = (output * scale).view(3, 1)
        noisy = mask + torch.rand(3)
        assert {FIRST, "scale", BlockOutput(0)} <= taint.of(scaled)
        assert CHANCE in taint.of(noisy)
        assert not taint.of(mask)

        taint.name(scaled, SECOND)

        assert taint.of(scaled) == {SECOND, BlockOutput(0)}
        assert FIRST not in taint.of(scaled + 1)


def test_what_reaches_python_is_noted_and_nothing_of_what_is_done_aside():
    output = torch.ones(())
    with Taint({}) as taint:
        taint.name(output, FIRST, position=4)
        taint.paused = True
        assert float(output) == 1
        assert not taint.looked_at
        taint.paused = False
        assert float(output * 2) == 2

    assert BlockOutput(4) in taint.looked_at
