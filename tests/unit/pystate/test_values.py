"""What a value held: put back in this process, or packed and given to another one's."""

from __future__ import annotations

import copy
import enum
import functools
import random
import types
from collections import OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from torch import nn

from shoal.pystate.packing import Giving, Known, Unkept, pack
from shoal.pystate.values import NOTHING, Look, look_at, put_back, same

CPU = torch.device("cpu")


class Thing:
    def __init__(self, value):
        self.value, self.more = value, [1, 2]


class Slotted:
    __slots__ = ("value",)

    def __init__(self):
        self.value = 1


class Own(list):
    pass


class Counted(nn.Module):
    calls = 0


def counter():
    calls = 0

    def count():
        nonlocal calls
        calls += 1
        return calls

    return count


@torch.no_grad()
def decorated():
    decorated.__wrapped__.calls = getattr(decorated.__wrapped__, "calls", 0) + 1


def stepping():
    """As SAM has one within."""
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return torch.optim.Adam([{"params": [one]} for one in parameters])


def grow(value, name, item):
    setattr(value, name, item)


CHANGES = {
    "number": (lambda: 1, None, 2),
    "none to a tensor": (lambda: None, None, torch.ones(3)),
    "tensor in place": (lambda: torch.zeros(3), lambda t: t.add_(1), None),
    "tensor of another shape": (lambda: torch.zeros(3), None, torch.ones(2, 2)),
    "list": (lambda: [1, torch.zeros(2)], lambda v: v.append((3, "x")), None),
    "list within": (lambda: [[1], [2]], lambda v: v[1].append(3), None),
    "bounded deque": (lambda: deque([1, 2], maxlen=2), lambda v: v.append(3), None),
    "set": (lambda: {"a", "b", "c"}, lambda v: (v.discard("a"), v.add("z")), None),
    "tuple": (lambda: (1, 2), None, (1, 2, 3)),
    "dict": (lambda: {"a": 1, 2: [0]}, lambda v: (v.pop("a"), v[2].append(1)), None),
    "ordered": (lambda: OrderedDict(a=1), lambda v: v.update(b=2), None),
    "default": (lambda: defaultdict(int, a=1), lambda v: v.update(b=2), None),
    "array in place": (lambda: np.zeros(3), lambda v: v.__iadd__(1), None),
    "array, another": (lambda: np.zeros(3), None, np.ones((2, 2), dtype=np.int16)),
    "object": (lambda: Thing(1), lambda v: (grow(v, "value", 2), v.more.append(0)), None),
    "object, new name": (lambda: Thing(1), lambda v: grow(v, "late", 0.5), None),
    "space": (lambda: types.SimpleNamespace(a=1), lambda v: grow(v, "a", "b"), None),
    "closure": (counter, lambda v: v(), None),
    "partial": (lambda: functools.partial(list, [1]), lambda v: v.args[0].append(2), None),
    "torch's generator": (torch.Generator, lambda v: torch.rand(3, generator=v), None),
    "numpy's generator": (lambda: np.random.default_rng(0), lambda v: v.random(), None),
    "numpy's old one": (lambda: np.random.RandomState(0), lambda v: v.random(), None),
    "python's generator": (lambda: random.Random(0), lambda v: v.random(), None),
    "long list": (lambda: [7] * 11_000, lambda v: v.pop(), None),
    "slots": (Slotted, lambda v: grow(v, "value", 2), None),
    "a list of one's own": (Own, lambda v: v.append(1), None),
    "numpy's number": (lambda: np.float32(1), None, np.float32(2)),
    "module's attribute": (Counted, lambda v: grow(v, "calls", 2), None),
    "module": (lambda: nn.Linear(2, 2), lambda v: nn.init.ones_(v.weight), None),
    "optimizer": (stepping, lambda v: v.step(), None),
    "optimizer's option": (stepping, lambda v: v.param_groups[1].update(lr=0.5), None),
}


def changed(make, change, instead):
    value = make()
    if change is None:
        return value, instead
    change(value)
    return value, value


@pytest.mark.parametrize("case", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen_and_put_back(case):
    make, change, instead = case
    value = make()
    before = look_at(value, Look())
    assert same(before, look_at(value, Look()))
    if change is None:
        assert not same(before, look_at(instead, Look()))
    else:
        change(value)
        assert not same(before, look_at(value, Look()))
    back = put_back(before)
    assert back is value or isinstance(value, int)
    assert same(before, look_at(back, Look()))


@pytest.mark.parametrize("case", CHANGES.values(), ids=CHANGES)
def test_what_was_packed_makes_another_one_the_same(case):
    make, change, instead = case
    torch.manual_seed(0)
    value = make()
    before = look_at(value, Look())
    if change is not None:
        change(value)
    value = value if change is not None else instead
    packed = copy.deepcopy(pack(look_at(value, Look()), before))
    torch.manual_seed(0)
    other = Giving(CPU).give(packed, make())
    assert same(look_at(value, Look()), look_at(other, Look()))


def test_what_did_not_change_is_not_packed():
    value = Thing(torch.zeros(3))
    before = look_at(value, Look())
    assert pack(look_at(value, Look()), before) is None


def test_a_function_that_torch_wrapped_is_looked_into():
    before = look_at(decorated, Look())
    decorated()
    assert not same(before, look_at(decorated, Look()))
    put_back(before)
    assert not vars(decorated.__wrapped__)


@pytest.mark.parametrize(
    "value", [object(), Thing(1), torch.Generator(), counter(), {(1, Thing(0)): 2}]
)
def test_what_was_not_there_and_is_no_plain_value_is_refused(value):
    with pytest.raises(Unkept):
        pack(look_at(value, Look()), NOTHING)


def test_what_somebody_else_looks_after_is_left_alone():
    weight = nn.Parameter(torch.zeros(2))
    look = Look({id(weight): "weight"})
    before = look_at([weight, weight[:1]], look)
    with torch.no_grad():
        weight.add_(1)
    assert same(before, look_at([weight, weight[:1]], look))
    put_back(before)
    assert weight.sum() == 2


def test_large_tensors_are_not_copied_but_seen_to_be_written():
    value = torch.zeros(100)
    look = Look(largest=16)
    before = look_at(value, look)
    assert before.inside[1] is None
    value.add_(1)
    assert not same(before, look_at(value, look))


# -- several names --------------------------------------------------------------------------------


def built():
    first, second = [1.0], Thing([2.0])
    return {"a": first, "b": second, "active": first, "late": None, "later": None, "held": None}


def noted(values):
    return {name: look_at(value, Look()) for name, value in values.items()}


def through(values, before):
    """What another process has, that built the same and was given what changed."""
    now = noted(values)
    known = Known(before, now)
    packed = {n: pack(note, before[n], known, (n,)) for n, note in now.items()}
    other = built()
    giving = Giving(CPU, noted(other))
    for name, one in copy.deepcopy(packed).items():
        other[name] = giving.give(one, other[name], (name,))
    return other


def test_objects_with_several_names_stay_one():
    values = built()
    before = noted(values)
    values["active"] = values["b"].value  # was another one of those that there were
    values["late"] = values["later"] = torch.ones(2)  # a new one, twice
    values["held"] = [values["late"], 3]
    other = through(values, before)
    assert other["active"] is other["b"].value
    assert other["active"] == [2.0]
    assert other["late"] is other["later"] is other["held"][0]
    assert other["a"] == [1.0]


def test_another_object_of_a_kind_leaves_the_first_one_alone():
    values = built()
    before = noted(values)
    values["kept"] = values["b"]
    values["b"] = Thing([5.0])
    other = built()
    first = other["b"]
    packed = pack(look_at(values["b"], Look()), before["b"])
    assert Giving(CPU).give(packed, first).value == [5.0]
    assert first.value == [2.0]


class Mood(enum.Enum):
    GOOD, BAD = 1, 2


class Loud(str, enum.Enum):  # noqa: UP042 - as older code has it
    YES, NO = "yes", "no"


@pytest.mark.parametrize("pair", [(Mood.GOOD, Mood.BAD), (Loud.YES, Loud.NO)])
def test_members_of_an_enum_stay_those_that_there_are(pair):
    before = look_at(pair[0], Look())
    packed = pack(look_at(pair[1], Look()), before)
    assert Giving(CPU).give(packed, pair[0]) is pair[1]
    assert list(type(pair[0])) == list(pair)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.eye(2).to_sparse_csr(),
        random.SystemRandom,
        lambda: nn.LazyLinear(2),
        lambda: np.frombuffer(b"abcd", dtype=np.uint8),
        lambda: torch.zeros(1).expand(4),
    ],
    ids=["sparse", "sparse rows", "system's generator", "lazy", "read-only", "expanded"],
)
def test_odd_values_are_looked_at_and_put_back_without_an_error(make):
    value = make()
    note = look_at(value, Look())
    assert same(note, look_at(value, Look()))
    assert put_back(note) is value


@pytest.mark.parametrize(
    "value", [torch.zeros(2, dtype=torch.complex128), torch.zeros(2, device="meta")]
)
def test_tensors_that_no_file_can_hold_are_refused(value):
    with pytest.raises(Unkept):
        pack(look_at(value, Look()), NOTHING)
