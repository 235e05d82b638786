"""What a checkpoint holds of values that are no tensors comes back as it was."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import Enum, IntEnum, IntFlag
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shoal.core.errors import StorageError, TrialError
from shoal.runtime.saving.packing import Packer, unpack

Span = namedtuple("Span", "first last")
Way = IntEnum("Way", "THERE BACK")
Ways = IntFlag("Ways", "LEFT RIGHT")
Odd = Enum("Odd", {"NAN": float("nan"), "CODE": len})


VALUES = [
    np.float32(0.1),
    np.float64(1e-3),
    np.float16(0.3),
    np.int64(2**60),
    np.uint64(2**63),
    np.bool_(True),
    np.float64("inf"),
    np.longdouble(1) / 3,
    np.complex64(1 + 2j),
    np.datetime64("2026-11-30T10:00:00.000001"),
    True,
    0.1,
    2**70,
    "text",
    b"\x00\xff",
    torch.bfloat16,
    torch.Size([2, 3]),
    (1, [np.float32(2), None]),
    1 - 2.5j,
    deque([1, 2], maxlen=3),
    deque(),
    Counter({3: 2}),
    OrderedDict(b=1, a=2),
    {(1, 2): {"x": deque([np.int8(3)])}},
    Way.BACK,
    Ways.LEFT | Ways.RIGHT,
    Odd.NAN,
    Odd.CODE,
    Span(1, [Way.THERE, Span(2.0, None)]),
]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.linalg.qr(torch.randn(4, 4))[0],
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(3, 5)[:, 1:4],
        torch.tensor(2.0).expand(3),
        torch.randn(4, 2).t(),
        torch.empty(0, 3).t(),
        torch.randn(2, 2, dtype=torch.complex64).t().conj(),
        torch.tensor(3),
    ],
    ids=["qr", "channels", "slice", "expanded", "turned", "nothing", "conjugate", "number"],
)
def test_a_tensor_comes_back_with_the_strides_that_a_copy_of_it_has(tensor):
    (back,) = there_and_back([tensor])
    assert back.stride() == tensor.clone().stride()
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)


def there_and_back(value):
    tensors = {}
    packed = json.loads(json.dumps(Packer(tensors).pack(value)))
    return unpack(packed, tensors)


def types(value):
    if isinstance(value, dict):
        return type(value), [(types(k), types(v)) for k, v in value.items()]
    if isinstance(value, tuple | list | deque):
        return type(value), [types(item) for item in value]
    return type(value)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_keeps_its_type(value):
    found = there_and_back(value)
    assert found == value
    assert types(found) == types(value)
    assert getattr(found, "maxlen", None) == getattr(value, "maxlen", None)


def test_a_dictionary_keeps_how_it_makes_what_is_missing():
    found = there_and_back(defaultdict(list, a=[1]))
    found["b"].append(2)
    assert found == {"a": [1], "b": [2]}


@pytest.mark.parametrize(
    "array",
    [
        np.linspace(0, 1, 5, dtype=np.float32),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(12, dtype=np.uint16).reshape(3, 4)[:, ::2],
        np.array(3.0),
        np.zeros((0, 2)),
    ],
    ids=lambda array: f"{array.dtype}-{array.shape}",
)
def test_an_array_keeps_its_type_and_order(array):
    found = there_and_back(array)
    np.testing.assert_array_equal(found, array, strict=True)
    assert found.flags.fnc == array.flags.fnc
    assert found.flags.writeable


LOCAL = SimpleNamespace(
    Pair=namedtuple("Pair", "a b", module=__name__), Mode=IntEnum("Mode", "UP DOWN")
)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (LOCAL.Pair(1, 2), "Pair, which is in no module"),
        (LOCAL.Mode.UP, "Mode, which is in no module"),
        (defaultdict(lambda: 3), "defaultdict whose default is made by <lambda>"),
        (np.array(["a"]), "ndarray"),
        (np.ma.masked_array([1.0], [True]), "MaskedArray"),
        ({1, 2}, "set"),
        (defaultdict(partial(int)), "defaultdict whose default is made by partial"),
        (object(), "object"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_come_back_as_something_else_has_no_rule(value, name):
    with pytest.raises(TrialError, match=f"no rule for {name}"):
        Packer({}).pack([value])


@pytest.mark.parametrize(
    "record",
    [
        {"numpy": ["|O", "00"]},
        {"numpy": ["<f4", "00"]},
        {"dtype": "load"},
        {"defaultdict": ["eval", []]},
        {"thing": 1},
    ],
)
def test_a_record_that_was_not_packed_is_refused(record):
    with pytest.raises(StorageError):
        unpack(record, {})


def test_a_member_of_a_class_that_is_not_there_is_its_value():
    for place in (["nowhere", "Way"], ["collections", "Counter"], ["torch", "Size"]):
        assert unpack({"enum": [*place, "BACK"]}, {}) == "BACK"
        assert unpack({"enum": [*place, {"value": 3}]}, {}) == 3
        assert unpack({"named": [*place, [1, 2]]}, {}) == (1, 2)
