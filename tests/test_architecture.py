"""The shape of the package: what ``lint-imports`` cannot say."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "shoal"
MODULES = sorted(PACKAGE.rglob("*.py"))
LONGEST_FILE = 600
RUNS = {"not clock": "many", "tests/chaos": "clock", "tests/gpu": "gpu"}  # of scripts/test
# Everything that decides or is read by a screen: must work, and start fast, without torch.
PURE = (
    "shoal.core.errors",
    "shoal.core.event",
    "shoal.core.plan",
    "shoal.core.spec",
    "shoal.core.units",
    "shoal.observe",
    "shoal.program",
    "shoal.scheduler",
    "shoal.search",
    "shoal.spill",
    "shoal.memory.ledger",
    "shoal.pipeline.check",
    "shoal.pipeline.schedule",
    "shoal.pipeline.stops",
    "shoal.planner.choose",
    "shoal.planner.pipeline",
    "shoal.planner.stages",
    "shoal.hardware",
    "shoal.runtime.pool",  # a worker starts while its study's process imports torch
    "shoal.source",
    "shoal.ui.cli",
    "shoal.ui.show",
    "shoal.ui.dashboard",
)


@pytest.fixture(scope="module")
def trees() -> Mapping[Path, ast.Module]:
    """Not read before they are needed: every process of a run imports this file."""
    return {path: ast.parse(path.read_text()) for path in MODULES}


def _names(paths: Iterable[Path]) -> list[str]:
    return [str(path.relative_to(PACKAGE)) for path in paths]


def test_a_file_stops_at_600_lines() -> None:
    assert _names(p for p in MODULES if len(p.read_text().splitlines()) > LONGEST_FILE) == []


def test_a_module_says_first_what_it_is_for(trees: Mapping[Path, ast.Module]) -> None:
    said = {path: ast.get_docstring(tree) or "" for path, tree in trees.items()}

    assert _names(path for path, docstring in said.items() if not docstring) == []
    assert _names(path for path, words in said.items() if len(words.partition("\n")[0]) > 99) == []


def test_a_package_file_only_gathers_names(trees: Mapping[Path, ast.Module]) -> None:
    kinds = (ast.Import, ast.ImportFrom, ast.Assign)
    files = [p for p in MODULES if p.name == "__init__.py" and p.parent != PACKAGE]

    assert (
        _names(p for p in files if not all(isinstance(node, kinds) for node in trees[p].body[1:]))
        == []
    )


def test_nothing_but_the_ui_prints(trees: Mapping[Path, ast.Module]) -> None:
    elsewhere = [path for path in MODULES if not path.is_relative_to(PACKAGE / "ui")]

    assert _names(path for path in elsewhere if _prints(trees[path])) == []


def _prints(tree: ast.Module) -> bool:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(isinstance(c.func, ast.Name) and c.func.id == "print" for c in calls)


def test_pure_modules_leave_torch_unloaded() -> None:
    imports = "; ".join(f"import {name}" for name in (*PURE, *_modules_of("program", "scheduler")))
    program = f"import sys; {imports}; sys.exit('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)

    assert done.returncode == 0, done.stderr.decode() or "torch was imported"


def _modules_of(*packages: str) -> list[str]:
    return [
        f"shoal.{package}.{path.stem}"
        for package in packages
        for path in sorted((PACKAGE / package).glob("*.py"))
        if path.stem != "__init__"
    ]


def test_every_public_name_can_be_imported() -> None:
    import shoal

    missing = [name for name in shoal.__all__ if not hasattr(shoal, name)]

    assert missing == []
    assert set(shoal.__all__) <= set(dir(shoal))


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    import shoal

    with pytest.raises(AttributeError, match="module 'shoal' has no attribute 'nothing'"):
        _ = shoal.nothing
    with pytest.raises(AttributeError, match=r"did you mean log_uniform\?"):
        _ = shoal.loguniform
    with pytest.raises(AttributeError, match=r"did you mean integer\?"):
        _ = shoal.randint


def test_starting_the_command_line_costs_less_than_a_third_of_a_second() -> None:
    """In CPU time, which other processes do not change much; the best of three."""
    program = (
        "import sys; sys.argv = ['shoal', '--help']; from shoal.ui.cli import app; "
        "from shoal.ui.failures import run_command; run_command(app); "
        "import time; print(time.process_time())"
    )
    times = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        times.append(float(done.stdout.splitlines()[-1]))

    assert min(times) < 0.3


@pytest.mark.parametrize("script", ["scripts/check", "scripts/test", ".ci/run"])
def test_a_script_can_be_run(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)


@pytest.mark.parametrize(
    ("arguments", "codes", "status"),
    [
        (["--part", "8/12"], {"many": 0, "clock": 0, "gpu": 5}, 0),
        (["--part", "8/12"], {"many": 1, "clock": 5, "gpu": 5}, 1),
        (["--part", "8/12"], {"many": 0, "clock": 4, "gpu": 0}, 4),
        ([], {"many": 0, "clock": 0, "gpu": 5}, 5),
    ],
)
def test_a_part_without_a_case_for_gpus_passes(
    arguments: list[str], codes: Mapping[str, int], status: int, tmp_path: Path
) -> None:
    runs = "".join(
        f'*"-m pytest "*"{word}"*) exit {codes[name]};;\n' for word, name in RUNS.items()
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in\n{runs}esac\n')
    python.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environ = {k: v for k, v in os.environ.items() if k != "SHOAL_CUDA_STANDIN"} | path

    done = subprocess.run([ROOT / "scripts" / "test", *arguments], env=environ)

    assert done.returncode == status


def test_every_error_class_has_a_section_in_the_docs() -> None:
    tree = ast.parse((PACKAGE / "core" / "errors.py").read_text())
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    headings = [
        line.strip("# `")
        for line in (ROOT / "docs" / "errors.md").read_text().splitlines()
        if line.startswith("## ")
    ]

    assert [name for name in classes if name not in headings] == []
