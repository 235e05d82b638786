"""What errors say in the end."""

from __future__ import annotations

import pytest

from shoal.core.errors import last_words


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("Traceback ...\n  File x\nshoal.fusion.declined.Declined: it draws", "it draws"),
        (
            "Traceback (most recent call last):\nValueError: 3: too many\n",
            "ValueError: 3: too many",
        ),
        ("mine.shoal.Error: no", "mine.shoal.Error: no"),
        ("", ""),
        (
            "  File x\nshoal.core.errors.CapacityError: no room for 5 MiB.\nCut it, or wait.",
            "no room for 5 MiB.",
        ),
        ("  File x\nRuntimeError: no\n\nPlanError: planned again\n", "PlanError: planned again"),
        ("  File x\nmine.Odd: no\nand more", "mine.Odd: no"),
        (
            "Traceback (most recent call last):\n  File x\nKeyError: 'a'\n\nDuring ...:\n\n"
            "Traceback (most recent call last):\n  File x\nAssertionError",
            "AssertionError",
        ),
    ],
)
def test_the_kind_of_an_error_is_said_but_for_those_of_shoals_own(error, words):
    assert last_words(error) == words
