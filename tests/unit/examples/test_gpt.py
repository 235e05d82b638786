"""The example model and its data, as any PyTorch user would rely on them."""

from __future__ import annotations

import ast
import inspect
import math
from pathlib import Path

import pytest
import torch

from shoal.examples import gpt
from shoal.examples.gpt import GPT, RandomWindows, library_data, next_byte_loss, read_library


@pytest.fixture
def model() -> GPT:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT(width=32, depth=2, heads=2, context=16)


def _windows(**changes: int) -> RandomWindows:
    text = torch.arange(100, dtype=torch.uint8)
    settings = {"batches": 3, "windows": 4, "length": 8, "seed": 5} | changes
    return RandomWindows(text, **settings)


def test_the_example_imports_only_torch_and_the_standard_library() -> None:
    tree = ast.parse(inspect.getsource(gpt))
    names = {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    names |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}

    assert {name for name in names if name.partition(".")[0] in ("torch", "shoal")} == {
        "torch",
        "torch.nn.functional",
    }


def test_a_clone_shows_the_same_file_under_examples() -> None:
    clone = Path(__file__).parents[3] / "examples" / "gpt.py"

    assert clone.samefile(Path(gpt.__file__))


def test_the_output_layer_is_the_embedding(model: GPT) -> None:
    assert model.head.weight is model.token.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_an_untrained_model_expects_every_byte_alike(model: GPT) -> None:
    batch = next(iter(_windows()))

    loss = next_byte_loss(model(batch[0]), batch)

    assert loss.item() == pytest.approx(math.log(256), abs=0.2)


def test_no_position_sees_what_comes_after_it(model: GPT) -> None:
    model.eval()
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 10:] = 0

    assert torch.equal(model(tokens)[:, :10], model(changed)[:, :10])


def test_a_width_that_heads_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match="width 30 cannot be shared by 4 heads"):
        GPT(width=30, depth=1, heads=4, context=8)


def test_reading_an_epoch_again_gives_the_same_batches() -> None:
    windows = _windows()

    first, second = list(windows), list(windows)

    assert len(first) == len(windows) == 3
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True))


def test_another_seed_gives_other_batches() -> None:
    assert not torch.equal(next(iter(_windows()))[0], next(iter(_windows(seed=6)))[0])


def test_y_is_x_one_byte_later() -> None:
    x, y = next(iter(_windows()))

    assert x.shape == y.shape == (4, 8)
    assert x.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_reading_batches_draws_no_global_random_number() -> None:
    before = torch.get_rng_state()

    list(_windows())

    assert torch.equal(before, torch.get_rng_state())


def test_a_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a longer text than 100"):
        _windows(length=100)


def test_the_library_is_read_the_same_twice_within_its_limit() -> None:
    train, valid = read_library(1_000_000)
    again = read_library.__wrapped__(1_000_000)

    assert torch.equal(train, again[0])
    assert torch.equal(valid, again[1])
    assert len(train) + len(valid) <= 1_000_000
    assert 0 < len(valid) < len(train)


def test_held_out_files_are_not_trained_on() -> None:
    train, valid = (bytes(part.tolist()) for part in read_library(1_000_000))

    assert len(valid) > 2000
    assert valid[:2000] not in train


def test_validation_is_the_same_for_every_training_seed() -> None:
    first, second = (library_data(batches=1, seed=seed)[1] for seed in (1, 2))

    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True))


def test_generation_continues_the_prompt_and_repeats_with_its_seed(model: GPT) -> None:
    model.eval()
    one, two = (
        model.generate(b"def ", 40, generator=torch.Generator().manual_seed(3)) for _ in range(2)
    )

    assert one == two
    assert one.startswith(b"def ")
    assert len(one) == 44
