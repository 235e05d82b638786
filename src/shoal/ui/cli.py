"""The command line: what each verb takes, and nothing of what it does.

[Note: imports inside functions] ``shoal --help`` and ``shoal ls`` must not wait a second
for torch. So this file imports only the parser, and each verb imports its own module
when it runs: this is the one place of the package where that is so.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from shoal import __version__
from shoal.ui.failures import run_command, show_warnings_in_words
from shoal.ui.flags import HardwareFlags
from shoal.ui.interrupts import heeding_interrupts
from shoal.ui.options import (
    STUDY_HELP,
    AcceptNumerics,
    AcceptRecipe,
    AddAgain,
    Arguments,
    AsJson,
    DeviceMemory,
    Devices,
    Directory,
    Exact,
    File,
    FileCommand,
    Fuse,
    HostMemory,
    Name,
    NewestName,
    RetryFailed,
    SourceFile,
    SpillDir,
    TechniqueName,
)

if TYPE_CHECKING:
    from shoal.control import CloneTrial, ExtendTrials
    from shoal.runtime.pool import WorkerPool

app = typer.Typer(
    name="shoal",
    help="Train many models at once, each possibly larger than the device, exactly as alone.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the program and leave with its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # \xe9 where there is no é
    show_warnings_in_words()
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


@app.command(short_help="Train eight language models on two devices that hold none.")
def demo(
    minutes: Annotated[float, typer.Option(help="About how long, on two idle cores.")] = 1.0,
    directory: Directory = "runs",
    json: AsJson = False,
) -> None:
    """Train eight language models side by side on two devices that hold none of them."""
    with heeding_interrupts():
        from shoal.ui.demo import run_demo

    raise typer.Exit(run_demo(minutes, directory, as_json=json))


@contextlib.contextmanager
def _warm_workers() -> Iterator[WorkerPool]:
    """Workers that import torch while this process still does."""
    from shoal.runtime.pool import WorkerPool

    with WorkerPool() as pool:
        pool.warm(1)
        gc.disable()  # nothing of what is imported is garbage, and looking costs 0.2 s
        try:
            with heeding_interrupts():
                import shoal.ui.train  # noqa: F401

            gc.freeze()
        finally:
            gc.enable()
        yield pool


class _Again(NamedTuple):
    """How to run a study again that no process runs now."""

    study: str
    directory: str
    flags: HardwareFlags
    file: str | None
    as_json: bool
    accept_numerics: bool = False
    accept_recipe: bool = False
    retry_failed: bool = False
    fuse: str | None = None

    @property
    def given(self) -> list[str]:
        """The options that only a new process could obey, by name."""
        values = {
            "--devices": self.flags.devices,
            "--device-memory": self.flags.device_memory,
            "--host-memory": self.flags.host_memory,
            "--spill-dir": self.flags.spill_dir,
            "--file": self.file,
            "--fuse": self.fuse,
            "--accept-numerics": self.accept_numerics or None,
            "--accept-recipe": self.accept_recipe or None,
            "--retry-failed": self.retry_failed or None,
        }
        return [name for name, value in values.items() if value is not None]

    def run(self, *, extend: ExtendTrials | None = None, clones: Sequence[CloneTrial] = ()) -> int:
        """Run it to its end; the exit code."""
        from shoal.ui.studies import find_study

        place = find_study(self.study, Path(self.directory))
        with _warm_workers() as workers:
            from shoal.ui.train import resume_study

            return resume_study(
                place,
                self.flags,
                file=self.file,
                extend=extend,
                clones=clones,
                as_json=self.as_json,
                accept_numerics=self.accept_numerics,
                accept_recipe=self.accept_recipe,
                retry_failed=self.retry_failed,
                fuse=self.fuse,
                workers=workers,
            )


@app.command(cls=FileCommand)
def run(
    file: File,
    arguments: Arguments = None,
    devices: Devices = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    spill_dir: SpillDir = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete what an earlier run of this study left.")
    ] = False,
    technique: TechniqueName = None,
    fuse: Fuse = None,
    exact: Exact = "auto",
    plan: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Follow a plan that 'shoal plan --json' printed."),
    ] = None,
    accept_numerics: AcceptNumerics = False,
    accept_recipe: AcceptRecipe = False,
    retry_failed: RetryFailed = False,
    json: AsJson = False,
) -> None:
    """Run the study that a file defines; one that was stopped goes on."""
    flags = HardwareFlags(devices, device_memory, host_memory, spill_dir)
    with _warm_workers() as workers:
        from shoal.ui.train import run_file

        code = run_file(
            file,
            flags,
            arguments=arguments or (),
            overwrite=overwrite,
            technique=technique,
            fuse=fuse,
            exact=exact,
            plan=plan,
            as_json=json,
            accept_numerics=accept_numerics,
            accept_recipe=accept_recipe,
            retry_failed=retry_failed,
            workers=workers,
        )
    raise typer.Exit(code)


@app.command(cls=FileCommand, short_help="Show how a study would run, and why.")
def plan(
    file: File,
    arguments: Arguments = None,
    devices: Devices = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    spill_dir: SpillDir = None,
    technique: TechniqueName = None,
    fuse: Fuse = None,
    exact: Exact = "auto",
    measured: Annotated[
        bool,
        typer.Option(
            "--measured",
            help="Instead, the plan of its last run beside what that came to; FILE may be a "
            "study's name or directory.",
        ),
    ] = False,
    directory: Annotated[
        str | None, typer.Option(help="With --measured: where studies are kept. Default: runs.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Show how a study would run, and why: techniques, shards, bytes, time. Trains nothing."""
    flags = HardwareFlags(devices, device_memory, host_memory, spill_dir)
    if directory is not None and not measured:
        raise typer.BadParameter("it goes with --measured alone", param_hint="--directory")
    if measured:
        from shoal.ui.measured import compare_plan, planned_place

        place = planned_place(file, directory, given=(*flags, technique, fuse))
        raise typer.Exit(compare_plan(place, as_json=json))
    with heeding_interrupts():
        from shoal.ui.train import plan_file

    code = plan_file(
        file,
        flags,
        arguments=arguments or (),
        technique=technique,
        fuse=fuse,
        exact=exact,
        as_json=json,
    )
    raise typer.Exit(code)


@app.command()
def ls(directory: Directory = "runs", json: AsJson = False) -> None:
    """List the studies of a directory, the newest first."""
    from shoal.ui.show import list_studies

    raise typer.Exit(list_studies(Path(directory), as_json=json))


@app.command(short_help="Show the studies of a directory as a page in the browser.")
def ui(
    directory: Directory = "runs",
    port: Annotated[int, typer.Option(help="0: one that is free.")] = 0,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open it in a browser.")
    ] = True,
) -> None:
    """Show the studies of a directory as a page, for this machine's browser alone."""
    from shoal.ui.web.server import serve

    raise typer.Exit(serve(Path(directory), port, browse=browser))


@app.command(short_help="Show a study: leaderboard, devices, failures; or one trial.")
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


@app.command(short_help="Show a study that another process runs, live.")
def watch(study: NewestName = None, directory: Directory = "runs") -> None:
    """Show a study that another process runs, live, until it ends; Ctrl-C leaves it alone."""
    from shoal.ui.watch import watch_study

    raise typer.Exit(watch_study(study, Path(directory)))


@app.command(short_help="Write a study's timeline for ui.perfetto.dev, and a chart.")
def trace(
    study: NewestName = None,
    output: Annotated[
        str | None, typer.Option(help="A directory, or FILE.json. Default: the study's directory.")
    ] = None,
    directory: Directory = "runs",
    json: AsJson = False,
) -> None:
    """Write a study's timeline for ui.perfetto.dev, and a Gantt chart of its devices."""
    from shoal.ui.show import trace_study

    raise typer.Exit(trace_study(study, output, Path(directory), as_json=json))


@app.command(short_help="Train finished trials again alone, and compare every bit.")
def verify(
    study: NewestName = None,
    trials: Annotated[
        int | None, typer.Option(help="How many trials to train again. Default: 2.")
    ] = None,
    trial: Annotated[
        list[int] | None, typer.Option(help="A trial to train again; can be given repeatedly.")
    ] = None,
    file: SourceFile = None,
    directory: Directory = "runs",
    json: AsJson = False,
) -> None:
    """Train finished trials again, alone, with plain PyTorch, and compare every bit."""
    with heeding_interrupts():
        from shoal.ui.verify import verify_study

    raise typer.Exit(
        verify_study(study, Path(directory), count=trials, trials=trial, file=file, as_json=json)
    )


@app.command(short_help="Write a trained model for others.")
def export(
    study: Name,
    trial: Annotated[
        str | None, typer.Argument(metavar="best|NUMBER", help="Which trial.")
    ] = None,
    target: Annotated[
        str | None, typer.Argument(metavar="DIR", help="A directory for its files.")
    ] = None,
    optuna: Annotated[
        str | None,
        typer.Option(metavar="FILE.db", help="All trials instead, for Optuna's dashboard."),
    ] = None,
    at_best: Annotated[
        bool,
        typer.Option("--at-best", help="As its best evaluation found it: Study(keep_best=True)."),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what an earlier export left there.")
    ] = False,
    file: SourceFile = None,
    directory: Directory = "runs",
    json: AsJson = False,
) -> None:
    """Write a trained model for others: safetensors, hyperparameters, metrics, provenance."""
    with heeding_interrupts():
        from shoal.ui.export import check_target, export_model

    place = Path(directory)
    if optuna is not None:
        from shoal.ui.handover import export_optuna

        check_target(trial, with_optuna=True)
        raise typer.Exit(
            export_optuna(study, optuna, place, overwrite=overwrite, file=file, as_json=json)
        )
    trial, target = check_target(trial, target)
    raise typer.Exit(
        export_model(
            study,
            trial,
            target,
            place,
            overwrite=overwrite,
            file=file,
            at_best=at_best,
            as_json=json,
        )
    )


@app.command()
def logs(
    study: Name,
    trial: Annotated[int, typer.Argument(metavar="TRIAL", help="The trial's number.")],
    tail: Annotated[int | None, typer.Option(help="Only so many of the last lines.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print what comes, until the study ends.")
    ] = False,
    directory: Directory = "runs",
) -> None:
    """Print what a trial printed and was warned of."""
    from shoal.ui.logs import show_log

    raise typer.Exit(show_log(study, trial, Path(directory), tail=tail, follow=follow))


@app.command(short_help="Delete studies with all they hold; asks before.")
def rm(
    studies: Annotated[list[str], typer.Argument(metavar="STUDY...", help=STUDY_HELP)],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    directory: Directory = "runs",
    json: AsJson = False,
) -> None:
    """Delete studies with all they hold, checkpoints too; asks before it does."""
    from shoal.ui.rm import remove_studies

    raise typer.Exit(remove_studies(studies, Path(directory), yes=yes, as_json=json))


@app.command(short_help="Save a running study and end it, or one of its trials.")
def stop(
    study: Name,
    trial: Annotated[
        int | None, typer.Argument(metavar="[TRIAL]", help="One trial; the others go on.")
    ] = None,
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long saving may take.")
    ] = 30.0,
    reason: Annotated[str, typer.Option(help="Why; kept in the study's record.")] = "",
    directory: Directory = "runs",
    json: AsJson = False,
) -> None:
    """Save a running study and end it until `resume`; or one of its trials, which is kept."""
    from shoal.ui.control import stop_study

    place = Path(directory)
    raise typer.Exit(stop_study(study, trial, place, grace_s=grace, reason=reason, as_json=json))


@app.command()
def pause(study: Name, directory: Directory = "runs", json: AsJson = False) -> None:
    """Save and park all trials of a running study until it is resumed."""
    from shoal.ui.control import pause_study

    raise typer.Exit(pause_study(study, Path(directory), as_json=json))


@app.command(short_help="Go on with a study that was paused, stopped or killed.")
def resume(
    study: Name,
    devices: Devices = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    spill_dir: SpillDir = None,
    file: SourceFile = None,
    fuse: Fuse = None,
    accept_numerics: AcceptNumerics = False,
    accept_recipe: AcceptRecipe = False,
    retry_failed: RetryFailed = False,
    directory: Directory = "runs",
    json: AsJson = False,
) -> None:
    """Go on with a study: where it is paused, or from what a stop or a crash left."""
    from shoal.ui.control import continue_study

    flags = HardwareFlags(devices, device_memory, host_memory, spill_dir)
    more = (accept_numerics, accept_recipe, retry_failed, fuse)
    again = _Again(study, directory, flags, file, json, *more)
    code = continue_study(study, Path(directory), again.given, as_json=json)
    raise typer.Exit(again.run() if code is None else code)


@app.command()
def extend(
    study: Name,
    trials: Annotated[
        int | None, typer.Option(help="How many more trials of the study's space.")
    ] = None,
    to: Annotated[
        int | None, typer.Option(help="How many trials in all; those that are missing are added.")
    ] = None,
    again: AddAgain = False,
    devices: Devices = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    spill_dir: SpillDir = None,
    file: SourceFile = None,
    directory: Directory = "runs",
    json: AsJson = False,
) -> None:
    """Add trials to a study; one that does not run is resumed with them.

    Typed again before they have ended, it goes on with them and adds none.
    """
    from shoal.control import ExtendTrials
    from shoal.ui.control import extend_study

    order = ExtendTrials(trials=trials, to=to, again=again)
    flags = HardwareFlags(devices, device_memory, host_memory, spill_dir)
    stopped = _Again(study, directory, flags, file, json)
    code = extend_study(study, order, Path(directory), stopped.given, as_json=json)
    raise typer.Exit(stopped.run(extend=order) if code is None else code)


@app.command(short_help="Add a trial like another one, changed.")
def clone(
    study: Name,
    trial: Annotated[int, typer.Argument(metavar="TRIAL", help="The trial's number.")],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A changed hyperparameter; repeatable."),
    ] = None,
    cold: Annotated[
        bool,
        typer.Option(
            "--cold", help="Begin anew, not from the state of TRIAL: also where that has finished."
        ),
    ] = False,
    again: AddAgain = False,
    devices: Devices = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    spill_dir: SpillDir = None,
    file: SourceFile = None,
    directory: Directory = "runs",
    json: AsJson = False,
) -> None:
    """Add a trial like another one, changed, that goes on from its state.

    One that has finished has no step left to do: its clone begins anew, with --cold.
    Typed again before it has ended, it goes on with it and adds none.
    """
    from shoal.ui.control import clone_command, clone_trial

    place = Path(directory)
    flags = HardwareFlags(devices, device_memory, host_memory, spill_dir)
    stopped = _Again(study, directory, flags, file, json)
    command = clone_command(study, trial, changes or (), place, warm=not cold)
    command = replace(command, again=again)
    code = clone_trial(study, command, place, stopped.given, as_json=json)
    raise typer.Exit(stopped.run(clones=[command]) if code is None else code)


@app.command(short_help="Check what this machine offers.")
def doctor(json: AsJson = False) -> None:
    """Check what this machine offers: versions, cores, memory, devices, disk, link speed."""
    from shoal.ui.doctor import run_doctor

    raise typer.Exit(run_doctor(as_json=json))


@app.command(short_help="Measure memory, link, disk and kernels.")
def bench(
    seconds: Annotated[float, typer.Option(help="About how long.")] = 60.0,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:0. Default: the first GPU, else cpu.")
    ] = None,
    directory: Annotated[
        str, typer.Option(help="Which disk; one for temporary files if it is not there.")
    ] = "runs",
    json: AsJson = False,
) -> None:
    """Measure memory, link, disk and kernels, and from how many tokens spilling is free."""
    from shoal.ui.bench import bench

    raise typer.Exit(bench(seconds, device, directory, as_json=json))
