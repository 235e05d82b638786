"""What a plan's builds of a model print is shown once, and nothing else is lost."""

from __future__ import annotations

import pytest

from shoal.runtime.printing.shownonce import MOST_REMEMBERED, ShownOnce

OUT, ERRORS = (1, 1), (1, 2)
REPORT = "LOAD REPORT of base\nclassifier.weight | MISSING\n\nNotes:\n"


def shown(*texts: str) -> str:
    once = ShownOnce()
    return "".join(once.passed(ERRORS, text) for text in texts)


def bar(what: str, total: int, rate: float) -> list[str]:
    """As tqdm writes one: each state over the one before."""
    begun = f"\r{what}  0%|          | 0/{total} [00:00<?, ?it/s]"
    done = f"\r{what}100%|##########| {total}/{total} [00:02<00:00, {rate}it/s]"
    return [begun, done, "\n"]


def test_what_every_build_prints_is_shown_once() -> None:
    assert shown(REPORT, REPORT, REPORT) == REPORT


def test_lines_that_differ_are_all_shown_and_so_are_those_between() -> None:
    assert (
        shown("width 64\n", "built\n", "width 128\n", "built\n") == "width 64\nbuilt\nwidth 128\n"
    )


@pytest.mark.parametrize("what", ["Loading weights: ", ""])
def test_a_progress_bar_moves_the_first_time_whatever_its_rate_is_the_second(what: str) -> None:
    first, second = bar(what, 71, 35.5), bar(what, 71, 29.1)
    assert shown(*first, *second) == "".join(first)


def test_progress_bars_of_other_things_are_shown() -> None:
    bars = [bar("weights: ", 71, 3.0), bar("shards: ", 71, 3.0), bar("weights: ", 72, 3.0)]
    assert shown(*(state for one in bars for state in one)) == "".join(map("".join, bars))


def test_a_line_over_which_others_are_written_is_known_without_its_numbers() -> None:
    assert (
        shown("\r3 of 9", "\r9 of 9", "\n", "\r4 of 9", "\r9 of 9", "\n") == "\r3 of 9\r9 of 9\n"
    )


def test_a_line_in_parts_waits_for_its_end_and_is_known_again() -> None:
    assert shown("load", "ed ", "base\n", "loaded ", "base\n") == "loaded base\n"


def test_what_is_flushed_before_its_end_is_shown_as_it_comes() -> None:
    once = ShownOnce()
    for _ in range(2):
        assert once.passed(ERRORS, "wait") == ""
        assert once.held(ERRORS) == "wait"
        assert once.held(ERRORS) == ""
        assert once.passed(ERRORS, " done\n") == " done\n"
    once.passed(ERRORS, "and now")
    assert once.waiting() == [ERRORS]


def test_writers_do_not_mix() -> None:
    once = ShownOnce()
    assert once.passed(OUT, "a") + once.passed(ERRORS, "b") == ""
    assert once.passed(OUT, "\n") == "a\n"
    assert once.passed(ERRORS, "\n") == "b\n"


def test_more_lines_than_are_remembered_are_shown_each_time() -> None:
    once = ShownOnce()
    for number in range(MOST_REMEMBERED):
        once.passed(ERRORS, f"{number}\n")
    assert once.passed(ERRORS, "one more\n") == "one more\n"
    assert once.passed(ERRORS, "one more\n") == "one more\n"
    assert once.passed(ERRORS, "7\n") == ""
