"""JSON documents: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import math
from collections import UserDict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import StorageError
from shoal.observe import jsonl
from shoal.storage import documents
from shoal.storage.documents import decode, encode, read_json, write_json

HERE = Path("x.json")
TEXTS = st.text() | st.sampled_from(["NaN", "\\NaN", "\\\\Infinity", "-Infinity", "\\"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=20,
)


@given(VALUES)
def test_what_is_written_can_be_read(value):
    assert decode(encode(value, HERE)) == value


@given(VALUES)
def test_it_is_the_same_text_that_events_have(value):
    assert jsonl.loads(encode(value, HERE).decode()) == value
    assert decode(jsonl.dumps(value).encode()) == value


def test_floats_that_are_not_finite_survive():
    found = decode(encode([math.inf, -math.inf, math.nan, -0.0], HERE))

    assert found[:2] == [math.inf, -math.inf]
    assert math.isnan(found[2])
    assert math.copysign(1, found[3]) == -1


def test_mappings_and_tuples_are_objects_and_lists():
    assert decode(encode(UserDict({"a": (1, 2)}), HERE)) == {"a": [1, 2]}


@pytest.mark.parametrize("value", [{1: 2}, {None: 1}, {(1, 2): 3}, {"a": object()}, [b"x"], {1.5}])
def test_what_json_has_no_words_for_is_refused_before_it_is_written(value):
    with pytest.raises(StorageError, match=r"^cannot write x\.json: .* A document holds numbers"):
        encode(value, HERE)


def test_what_could_not_be_read_again_is_not_written(monkeypatch):
    nested: list[object] = []
    for _ in range(3000):
        nested = [nested]
    with pytest.raises(StorageError, match="nested too deeply"):
        encode(nested, HERE)
    monkeypatch.setattr(documents, "MAX_VALUES", 10)
    with pytest.raises(StorageError, match="about 11 JSON values, at most 10"):
        encode(list(range(11)), HERE)
    monkeypatch.setattr(documents, "MAX_BYTES", 10)
    with pytest.raises(StorageError, match="13 bytes of JSON, at most 10"):
        encode("x" * 11, HERE)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[1,]", b"NaN", b"[Infinity]", b"-Infinity", b"1e999", b'{"a":1,"a":2}', b"\xff",
     b"\xef\xbb\xbf{}", b"'a'", b"[" * 100_000, b"01", b"9" * 5000, b"{1:2}", b"[1] x",
     b'{"a":{"b":1,"\\u0062":2}}'],
)  # fmt: skip
def test_what_is_no_json_is_a_value_error(data):
    with pytest.raises(ValueError):  # noqa: PT011  # of several kinds
        decode(data)


def test_a_document_is_replaced_and_read(tmp_path):
    write_json(tmp_path / "study.json", {"version": 1})
    write_json(tmp_path / "study.json", {"version": 2})

    assert read_json(tmp_path / "study.json") == {"version": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["study.json"]
    assert (tmp_path / "study.json").read_text() == '{\n "version": 2\n}\n'


def test_a_damaged_document_says_which_and_why(tmp_path):
    (tmp_path / "study.json").write_bytes(b'{"a": NaN}')

    with pytest.raises(StorageError, match=r"study\.json is damaged or not shoal's: NaN is no"):
        read_json(tmp_path / "study.json")


def test_a_document_that_is_gone_says_so(tmp_path):
    with pytest.raises(StorageError, match=r"cannot open .*study\.json: No such file"):
        read_json(tmp_path / "study.json")
