"""Masks drawn by shoal's own code are torch's, and so is the generator afterwards."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from shoal.kernels import bernoulli
from shoal.kernels.bernoulli import HOW, bernoulli_, dropout_mask_

compiled = pytest.mark.skipif(bernoulli._library() is None, reason="no C compiler")


@pytest.fixture
def fresh():
    """The code is looked for anew, here and afterwards."""
    bernoulli._library.cache_clear()
    yield
    bernoulli._library.cache_clear()


def _is_drawn_as_torch_does(out, p, seed, before=0):
    ours, torchs = (torch.Generator().manual_seed(seed) for _ in range(2))
    for generator in (ours, torchs):
        torch.rand(before, generator=generator)
    expected = torch.empty_like(out).bernoulli_(p, generator=torchs)
    assert bernoulli_(out, p, generator=ours) is out
    assert torch.equal(out, expected)
    assert torch.equal(ours.get_state(), torchs.get_state())


@compiled
@given(
    count=some.integers(1, 3000),
    p=some.floats(0, 1) | some.sampled_from([0.0, 0.1, 0.5, 0.9, 1 - 2**-53, 1.0, 5e-324]),
    dtype=some.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.bool]),
    seed=some.integers(0, 2**40),
    before=some.integers(0, 1300),  # words that are taken already
)
def test_numbers_and_state_are_torchs(count, p, dtype, seed, before):
    _is_drawn_as_torch_does(torch.empty(count, dtype=dtype), p, seed, before)


@compiled
@given(order=some.permutations(range(4)), sizes=some.tuples(*[some.integers(1, 9)] * 4))
def test_they_are_drawn_in_the_order_of_memory(order, sizes):
    _is_drawn_as_torch_does(torch.empty(sizes).permute(*order), 0.3, 5)
    _is_drawn_as_torch_does(torch.empty(2, *sizes)[1].permute(*order), 0.3, 5)


@compiled
def test_what_does_not_fill_its_memory_is_drawn_by_torch():
    out = torch.full((64, 64), 7.0)
    _is_drawn_as_torch_does(out[:, ::2], 0.5, 1)
    assert (out[:, 1::2] == 7).all()
    _is_drawn_as_torch_does(torch.empty(1024).as_strided((1024, 2), (1, 0))[:, 0], 0.5, 1)


@compiled
def test_it_is_the_default_generator_unless_one_is_given():
    torch.manual_seed(3)
    expected = torch.empty(1000).bernoulli_(0.2)
    then = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(bernoulli_(torch.empty(1000), 0.2), expected)
    assert torch.equal(torch.rand(3), then)


@pytest.mark.parametrize("rate", [0.1, 1 / 3, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("count", [10, 2000])
def test_a_mask_is_that_of_dropout(rate, dtype, count):
    torch.manual_seed(11)
    expected = torch.dropout(torch.ones(count, dtype=dtype), rate, True)
    mask = torch.empty(count, dtype=dtype)
    dropout_mask_(mask, rate, torch.Generator().manual_seed(11))
    assert torch.equal(mask, expected)


@pytest.mark.parametrize("lacks", ["asked not to", "no compiler", "a compiler that fails"])
def test_without_it_torch_draws(monkeypatch, tmp_path, fresh, lacks):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if lacks == "asked not to":
        monkeypatch.setenv(HOW, "torch")
    else:
        monkeypatch.setenv("CC", "false" if lacks == "a compiler that fails" else "no-such-cc")
    assert bernoulli._library() is None
    _is_drawn_as_torch_does(torch.empty(1000), 0.5, 1)


@compiled
def test_it_is_compiled_once_and_where_nothing_can_be_kept_each_time(monkeypatch, tmp_path, fresh):
    calls = []
    run = bernoulli.subprocess.run
    monkeypatch.setattr(
        bernoulli.subprocess, "run", lambda *a, **k: [calls.append(a), run(*a, **k)][1]
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        bernoulli._library.cache_clear()
        assert bernoulli._library() is not None
    assert len(calls) == 1
    assert [path.suffix for path in (tmp_path / "shoal").iterdir()] == [".so"]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    bernoulli._library.cache_clear()
    assert bernoulli._library() is not None
    assert len(calls) == 2


@compiled
def test_code_that_draws_otherwise_is_not_used(monkeypatch, tmp_path, fresh):
    source = tmp_path / "bernoulli.c"
    source.write_text(bernoulli.SOURCE.read_text().replace("word >> 18", "word >> 17"))
    monkeypatch.setattr(bernoulli, "SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert bernoulli._library() is None
    _is_drawn_as_torch_does(torch.empty(1000), 0.5, 1)


@compiled
def test_a_damaged_copy_is_not_used(monkeypatch, tmp_path, fresh):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = tmp_path / "shoal" / f"bernoulli-{bernoulli._digest(shutil.which('cc'))}.so"
    kept.parent.mkdir()
    kept.write_bytes(b"not a library")
    assert bernoulli._library() is None
    _is_drawn_as_torch_does(torch.empty(1000), 0.5, 1)
