"""Which weights of a generation lie in the file that others have too."""

from __future__ import annotations

import pytest
import torch

from shoal.runtime.saving import checkpoint
from shoal.runtime.saving.checkpoint import (
    STATE,
    WEIGHTS,
    Content,
    generations,
    read_weights,
)
from shoal.storage.manifest import APART
from shoal.storage.shared import LEAST_SHARED_BYTES, Shared

MANY = LEAST_SHARED_BYTES // 4  # as many float32 are worth a file


@pytest.fixture
def save(tmp_path):
    """A function that saves a trial's weights; says what it wrote, and what lies apart."""
    shared = Shared(APART)

    def run(step, weights, frozen=(), trial=0):
        files = {WEIGHTS: weights, STATE: {"s": torch.zeros(2)}}
        meta = {"trial": trial, "ties": {}, "extra": {"dict": []}}
        what = Content(trial, step, files, meta, frozenset(frozen))
        written = checkpoint.write(what, generations(tmp_path, trial, keep=9), shared)
        found = read_weights(written.generation.path)
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weights[name]) for name in weights)
        files = written.generation.manifest.files
        return written, set(files[APART].tensors) if APART in files else set()

    return run


def weights_of(base, head, size=MANY):
    return {"base": torch.full((size,), float(base)), "head": torch.full((4,), float(head))}


def test_of_a_first_generation_what_is_frozen(save):
    written, apart = save(1, weights_of(1, 1), ["base"])
    assert apart == {"base"}
    assert set(written.generation.manifest.files[WEIGHTS].tensors) == {"head"}
    assert written.num_bytes == 4 * MANY + 16 + 8


def test_from_the_third_on_nothing_of_it_is_written(save):
    sizes = [save(step, weights_of(1, step), ["base"])[0].num_bytes for step in (1, 2, 3, 4)]
    assert max(sizes[2:]) < 1000 < 4 * MANY < min(sizes[:2])


def test_what_is_not_frozen_any_more_or_changed_lies_with_the_others(save):
    assert save(1, weights_of(1, 1), ["base"])[1] == {"base"}
    assert save(2, weights_of(1, 2), [])[1] == set()
    assert save(3, weights_of(1, 3), ["base"])[1] == {"base"}
    assert save(4, weights_of(2, 3), ["base"])[1] == set()
    assert save(5, weights_of(3, 3), ["base"])[1] == set()
    assert save(6, weights_of(3, 3), ["base"])[1] == {"base"}


def test_of_what_an_older_version_saved_it_is_known_what_changed_since(save):
    assert save(1, weights_of(1, 1), [])[1] == set()  # all in one file, as it was
    assert save(2, weights_of(1, 2), ["base"])[1] == {"base"}


def test_of_a_trained_weight_no_more_than_before(save):
    weights = {**weights_of(1, 1), "other": torch.ones(MANY)}
    assert save(1, weights, ["base", "other"])[1] == {"base", "other"}
    weights["other"] = torch.zeros(MANY)
    assert save(2, weights, ["base", "other"])[1] == {"base"}


def test_little_is_not_worth_a_file(save):
    written, apart = save(1, weights_of(1, 1, size=MANY - 1), ["base"])
    assert apart == set()
    assert b'"format":1' in (written.generation.path / "manifest.json").read_bytes().replace(
        b" ", b""
    )


def test_all_of_a_model_may_be_frozen(save):
    assert save(1, weights_of(1, 1), ["base", "head"])[1] == {"base", "head"}


def test_another_trials_first_generation_has_the_same_file(save):
    one, _ = save(1, weights_of(1, 1), ["base"])
    other, apart = save(1, weights_of(1, 2), ["base"], trial=1)
    assert apart == {"base"}
    assert (one.generation.path / APART).samefile(other.generation.path / APART)
    third, _ = save(1, weights_of(2, 2), ["base"], trial=2)
    assert not (one.generation.path / APART).samefile(third.generation.path / APART)
