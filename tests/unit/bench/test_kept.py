"""The file of a bench: kept whole, and read only where it is this machine's."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.bench import Measured, bench_path, kept, load, save
from shoal.core.errors import StorageError


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measured: Measured) -> Measured:
    """What was measured on this very machine; its cache directory is the test's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return replace(measured, machine=kept.this_machine())


def test_what_was_kept_is_read_back(here: Measured, tmp_path: Path) -> None:
    place = save(here)

    assert place == tmp_path / "shoal" / "bench.json"
    assert load() == here
    assert [path.name for path in place.parent.iterdir()] == ["bench.json"]


def test_a_later_result_takes_the_place_of_an_earlier_one(here: Measured) -> None:
    save(replace(here, load=1.0))
    save(replace(here, load=2.0))

    assert load() == replace(here, load=2.0)


def test_without_a_file_nothing_is_known(here: Measured) -> None:
    assert load() is None


@pytest.mark.parametrize(
    "changes",
    [{"cpu": "Another CPU"}, {"cores": 99}, {"torch": "1.0"}, {"gpus": ("Another GPU",)}],
)
def test_another_machine_s_figures_are_none(here: Measured, changes: dict[str, object]) -> None:
    save(replace(here, machine=replace(here.machine, **changes)))

    assert load() is None


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"format": 99}', '{"format": 1}', "\x00" * 64],
)
def test_a_file_that_is_none_is_no_figures(here: Measured, content: str) -> None:
    save(here).write_text(content)

    assert load() is None


def test_a_damaged_figure_makes_the_file_none(here: Measured) -> None:
    place = save(here)
    record = json.loads(place.read_text())
    record["link"]["up"]["best"] = -1
    place.write_text(json.dumps(record))

    assert load() is None


def test_a_directory_that_cannot_be_written_is_told(here: Measured, tmp_path: Path) -> None:
    (tmp_path / "shoal").write_text("in the way")

    with pytest.raises((StorageError, OSError)):
        save(here)
    assert load() is None


def test_the_place_is_the_user_s_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert bench_path() == Path.home() / ".cache" / "shoal" / "bench.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")  # to be ignored, says the standard
    assert bench_path() == Path.home() / ".cache" / "shoal" / "bench.json"


def test_the_cpu_has_the_kernel_s_name_for_it(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n")

    assert kept.cpu_model(info) == "Some CPU @ 2 GHz"
    assert kept.cpu_model(tmp_path / "nowhere")


def test_asking_for_figures_that_are_not_there_leaves_torch_unloaded(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from shoal.bench import load; "
        f"load(Path({str(tmp_path)!r}) / 'bench.json'); sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
