"""Plain tables and numbers."""

from __future__ import annotations

import math

import pytest

from shoal.core.spec import varying_names
from shoal.ui.text import align, format_metric, format_value, shorten, wrap


def test_numbers_are_set_right_and_words_left() -> None:
    assert align(["a", "word"], [["1", "x"], ["100", "yy"]]).splitlines() == [
        "  a  word",
        "  1  x",
        "100  yy",
    ]


def test_columns_stand_below_each_other_where_letters_are_wide_or_marks_have_no_width() -> None:
    assert align(["学習率", "mark"], [["x", "e\u0301"], ["yy", "a"]]).splitlines() == [
        "学習率  mark",
        "x       e\u0301",
        "yy      a",
    ]


def test_a_table_without_rows_is_its_header() -> None:
    assert align(["a", "word"], []) == "a  word"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (2.5, "2.5000"), (0.0, "0.0000"), (1e-7, "1.000e-07"), (math.nan, "nan")],
)
def test_a_metric_is_short_and_never_hides_its_size(value: float | None, text: str) -> None:
    assert format_metric(value) == text


def test_a_float_setting_has_four_digits() -> None:
    assert format_value(0.00017320508) == "0.0001732"


def test_settings_that_differ_tell_trials_apart() -> None:
    assert varying_names([{"lr": 1, "depth": 2}, {"lr": 3, "depth": 2}]) == ["lr"]


def test_a_single_trial_shows_all_its_settings() -> None:
    assert varying_names([{"lr": 1, "depth": 2}]) == ["lr", "depth"]


def test_a_setting_that_only_some_trials_have_tells_them_apart() -> None:
    assert varying_names([{"lr": 1}, {"lr": 1, "decay": 0}]) == ["decay"]


def test_text_is_shortened_to_one_line() -> None:
    assert shorten("a long\nline of text", 10) == "a long ..."


def test_text_of_wide_letters_is_shortened_to_what_a_terminal_shows() -> None:
    assert shorten("学習率学習率", 12) == "学習率学習率"
    assert shorten("学習率学習率", 11) == "学習率学..."


def test_a_long_line_is_cut_between_words_and_indented_from_then_on() -> None:
    text = "study x\n    - it fits: the whole model needs 67.5 KiB\n  a long-name/that-is-not-cut"
    assert wrap(text, 24).split("\n") == [
        "study x",
        "    - it fits: the whole",
        "      model needs 67.5",
        "      KiB",
        "  a",
        "    long-name/that-is-not-cut",
    ]


def test_what_stands_behind_a_label_is_cut_beside_it() -> None:
    text = "warning   no leaderboard ranks them"
    assert wrap(text, 26).split("\n") == ["warning   no leaderboard", "          ranks them"]


def test_a_table_and_what_no_terminal_shows_are_not_cut() -> None:
    table = "step  epoch  after   train_loss  valid_loss\n  16      1  1.2 s       0.6930"
    assert wrap(table, 20) == table
    assert wrap("a long line of a file", None) == "a long line of a file"
