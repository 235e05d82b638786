"""The command line: what each verb takes, and nothing of what it does.

[Note: imports inside functions] ``shoal --help`` and ``shoal ls`` must not wait a second
for torch. So this file imports only the parser, and each verb imports its own module
when it runs: this is the one place of the package where that is so.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal import __version__
from shoal.ui.failures import run_command

if TYPE_CHECKING:
    from shoal.runtime.pool import WorkerPool

app = typer.Typer(
    name="shoal",
    help="Train many models at once, each possibly larger than the device, exactly as alone.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_FILE_HELP = "FILE.py or FILE.py:attribute, a file that defines a shoal.Study."
_STUDY_HELP = "A study's name under --directory, or its own directory."

File = Annotated[str, typer.Argument(metavar="FILE.py[:STUDY]", help=_FILE_HELP)]
Devices = Annotated[
    str | None,
    typer.Option(help="cpu:2 (two virtual devices), cpu, cuda, cuda:0,1. Default: what is there."),
]
DeviceMemory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Budget of each device, such as 256MiB.")
]
HostMemory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Host memory of the study, such as 8GiB.")
]
Directory = Annotated[str, typer.Option(help="Where studies are kept.")]
Name = Annotated[str, typer.Argument(metavar="STUDY", help=_STUDY_HELP)]
NewestName = Annotated[
    str | None, typer.Argument(metavar="[STUDY]", help=_STUDY_HELP + " Default: the newest.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]


def main() -> None:
    """Run the program and leave with its exit code."""
    sys.exit(run_command(app))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"shoal {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of every error (SHOAL_DEBUG=1).")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train many models at once, each possibly larger than the device, exactly as alone."""
    if debug:
        os.environ["SHOAL_DEBUG"] = "1"


@app.command()
def demo(
    minutes: Annotated[float, typer.Option(help="About how long, on two idle cores.")] = 1.0,
    directory: Directory = "runs",
    json: AsJson = False,
) -> None:
    """Train eight language models side by side on two devices that hold none of them."""
    from shoal.ui.demo import run_demo

    raise typer.Exit(run_demo(minutes, directory, as_json=json))


@contextlib.contextmanager
def _warm_workers() -> Iterator[WorkerPool]:
    """Workers that import torch while this process still does."""
    from shoal.runtime.pool import WorkerPool

    with WorkerPool() as pool:
        pool.warm(1)
        yield pool


@app.command()
def run(
    file: File,
    devices: Devices = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete what an earlier run of this study left.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Run the study that a file defines."""
    flags = (devices, device_memory, host_memory)
    with _warm_workers() as workers:
        from shoal.ui.train import run_file

        code = run_file(file, flags, overwrite=overwrite, as_json=json, workers=workers)
    raise typer.Exit(code)


@app.command()
def plan(
    file: File,
    devices: Devices = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    json: AsJson = False,
) -> None:
    """Show how a study would run, and why: techniques, shards, bytes, time. Trains nothing."""
    from shoal.ui.train import plan_file

    raise typer.Exit(plan_file(file, (devices, device_memory, host_memory), as_json=json))


@app.command()
def ls(directory: Directory = "runs", json: AsJson = False) -> None:
    """List the studies of a directory, the newest first."""
    from shoal.ui.show import list_studies

    raise typer.Exit(list_studies(Path(directory), as_json=json))


@app.command()
def show(
    study: NewestName = None,
    trial: Annotated[
        int | None, typer.Option(help="One trial's settings, history and error.")
    ] = None,
    directory: Directory = "runs",
    json: AsJson = False,
) -> None:
    """Show a study: its leaderboard, devices and failures, or one of its trials."""
    from shoal.ui.show import show_study

    raise typer.Exit(show_study(study, trial, Path(directory), as_json=json))


@app.command()
def trace(
    study: NewestName = None,
    output: Annotated[
        str | None, typer.Option(help="Where to write. Default: the study's directory.")
    ] = None,
    directory: Directory = "runs",
    json: AsJson = False,
) -> None:
    """Write a study's timeline for ui.perfetto.dev, and a Gantt chart of its devices."""
    from shoal.ui.show import trace_study

    raise typer.Exit(trace_study(study, output, Path(directory), as_json=json))


@app.command()
def verify(
    study: NewestName = None,
    trials: Annotated[int, typer.Option(help="How many trials to train again.")] = 2,
    directory: Directory = "runs",
    json: AsJson = False,
) -> None:
    """Train finished trials again, alone, with plain PyTorch, and compare every bit."""
    from shoal.ui.verify import verify_study

    raise typer.Exit(verify_study(study, trials, Path(directory), as_json=json))


@app.command()
def doctor(json: AsJson = False) -> None:
    """Check what this machine offers: versions, cores, memory, devices, disk, link speed."""
    from shoal.ui.doctor import run_doctor

    raise typer.Exit(run_doctor(as_json=json))
