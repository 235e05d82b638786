"""The example of a step of one's own trains, and plainly too."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

from shoal.testing import plain_loop

PLACE = Path(__file__).parents[3] / "examples" / "gan.py"


def test_the_gan_trains_in_a_plain_loop() -> None:
    spec = importlib.util.spec_from_file_location("gan_example", PLACE)
    assert spec is not None
    assert spec.loader is not None
    gan = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gan)

    result = plain_loop(gan.study.recipe, {"width": 16, "lr": 1e-3}, 0, steps=5)

    names = {"train_loss", "train_generator", "train_discriminator"}
    assert set(result.metrics) == names | {"valid_off_ring", "valid_missed"}
    assert all(map(math.isfinite, result.metrics.values()))
