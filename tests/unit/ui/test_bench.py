"""``shoal bench``: its screen, its JSON, and how it ends."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from shoal.bench import Measured, bench_path
from shoal.bench.disk import BLOCK_BYTES
from shoal.bench.kernels import BlockShape
from shoal.bench.measured import HostOptimizer, Rate
from shoal.bench.run import Sizes, run_bench
from shoal.core.errors import SpecError
from shoal.ui import bench as screen
from shoal.ui.cli import app
from shoal.ui.failures import ExitCode

SMALL = Sizes(
    array_bytes=2**16,
    copy_bytes=2**16,
    parameters=2**12,
    chunk=2**10,
    disk_bytes=BLOCK_BYTES,
    block=BlockShape(batch=1, sequence=8, width=16, heads=2),
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return run_bench(0.05, "cpu", tmp_path_factory.mktemp("disk"), sizes=SMALL)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measured: Measured) -> Measured:
    """The command measures nothing, and keeps its file in the test's directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(screen, "run_bench", lambda *_, **__: measured)
    return measured


def _invoke(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bench", *words], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def test_a_pipe_gets_plain_text_with_every_table(quick: Measured) -> None:
    code, out, _ = _invoke()

    assert code == ExitCode.DONE
    assert "\x1b" not in out
    for title in (
        "Memory, link, disk",
        "Matrix products of a transformer layer",
        "One transformer block, width 16, 2 heads, 8 tokens",
        "What goes into the last table",
        "Spilling is free from so many tokens a step on",
    ):
        assert f"\n{title}" in out
    assert "no GPU" in out
    assert f"kept in {bench_path()}" in out
    assert max(map(len, out.partition("\nnote:")[0].splitlines())) <= 99


def test_the_last_table_has_a_row_for_every_scheme(quick: Measured) -> None:
    table = screen.describe(quick, None).partition("Spilling is free")[2].splitlines()[2:10]

    assert [line.split()[:3] for line in table] == [
        [precision, optimizer, recompute]
        for precision in ("fp32", "bf16")
        for optimizer in ("host", "device")
        for recompute in ("yes", "no")
    ]


def test_json_is_all_that_goes_to_standard_output(quick: Measured) -> None:
    code, out, _ = _invoke("--json")

    record = json.loads(out)
    assert code == ExitCode.DONE
    assert Measured.from_dict(record) == quick
    assert len(record["free_from"]) == 8
    assert record["free_from"][0]["tokens"] > 0
    assert record["kept_in"] == str(bench_path())
    assert Measured.from_dict(json.loads(bench_path().read_text())) == quick


def test_a_terminal_of_80_columns_shows_every_cell(measured: Measured) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    rate = Rate(best=2.5e9, median=2.4e9, samples=3)  # what was measured on a busy machine is wide

    screen.show(replace(measured, optimizer=HostOptimizer(one=rate, all=rate)), "x", console)

    text = console.file.getvalue()
    assert "\x1b[1m" in text
    assert "…" not in text


def test_a_machine_whose_disk_was_not_measured_says_so(measured: Measured) -> None:
    text = screen.describe(replace(measured, disk=None, notes=("no room",)), None)

    assert "disk write" not in text
    assert "note: no room" in text


def test_an_interrupt_ends_it_and_keeps_nothing(
    quick: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> Measured:
        raise KeyboardInterrupt

    monkeypatch.setattr(screen, "run_bench", interrupted)

    code, out, err = _invoke()

    assert (code, out) == (ExitCode.PAUSED, "")
    assert "stopped; nothing was kept" in err
    assert not bench_path().exists()


def test_a_cache_that_cannot_be_written_is_told_and_is_no_failure(
    quick: Measured, tmp_path: Path
) -> None:
    (tmp_path / "shoal").write_text("in the way")

    code, out, err = _invoke()

    assert code == ExitCode.DONE
    assert "kept in" not in out
    assert "the figures were not kept" in err


def test_the_options_reach_the_measuring(
    quick: Measured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(screen, "run_bench", lambda *words, **__: asked.extend(words) or quick)

    _invoke("--seconds", "5", "--device", "cpu", "--directory", str(tmp_path))
    _invoke("--directory", str(tmp_path / "nowhere"))

    assert asked == [5.0, "cpu", tmp_path, 60.0, None, None]


def test_an_emulated_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="Emulated devices have the figures of their profile"):
        _invoke("--device", "cpu@h200", "--directory", str(tmp_path))


@pytest.mark.parametrize(
    ("tokens", "text"),
    [(7.4, "7"), (999.0, "999"), (15_583.0, "15,600"), (1_234_567, "1,230,000")],
)
def test_tokens_are_told_in_three_digits(tokens: float, text: str) -> None:
    assert screen._tokens(tokens) == text


def test_large_rates_are_told_in_large_units() -> None:
    assert (screen._flops(550e12), screen._flops(41e9)) == ("550.0 TFLOP/s", "41.0 GFLOP/s")
