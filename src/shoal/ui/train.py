"""``shoal run`` and ``shoal plan``: a user's study on the devices asked for."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shoal.control import CloneTrial, ExtendTrials
from shoal.core.errors import ShoalError, SpecError
from shoal.core.event import Event, StudyChanged
from shoal.core.plan import Plan
from shoal.core.units import counted
from shoal.hardware import Hardware
from shoal.observe import jsonl, read_outline
from shoal.observe.rows import TrialState
from shoal.observe.snapshot import Snapshot
from shoal.runtime.pool import WorkerPool
from shoal.source import LoadedStudy, load_recorded, load_study, reading_for
from shoal.study import Study
from shoal.ui.failures import ExitCode
from shoal.ui.flags import HardwareFlags
from shoal.ui.interrupts import heeding_interrupts
from shoal.ui.show import describe_ending, ending_code, full_record, read_snapshot
from shoal.ui.text import terminal_width, wrap


def run_file(
    file: str,
    flags: HardwareFlags,
    *,
    arguments: Sequence[str] = (),
    overwrite: bool,
    as_json: bool,
    technique: str | None = None,
    fuse: str | None = None,
    exact: str = "auto",
    plan: str | None = None,
    accept_numerics: bool = False,
    accept_recipe: bool = False,
    retry_failed: bool = False,
    workers: WorkerPool | None = None,
) -> int:
    """Run the study of a file to its end; the exit code says whether all trials finished."""
    study = open_study(file, arguments)
    followed = None if plan is None else Plan.from_json(Path(plan).read_bytes())
    named = followed is None or any(flag is not None for flag in flags)
    hardware = _hardware(flags) if named else None
    runs = 0 if overwrite else _runs(study.directory)
    with _told_if_stopped(study.directory, as_json=as_json, runs=runs):
        study.run(
            hardware=hardware,
            overwrite=overwrite,
            technique=technique,
            fuse=fuse,
            exact=exact,
            plan=followed,
            accept_numerics=accept_numerics,
            accept_recipe=accept_recipe,
            retry_failed=retry_failed,
            workers=workers,
        )
    return tell_ending(study.directory, as_json=as_json, runs=runs)


def resume_study(
    place: Path,
    flags: HardwareFlags,
    *,
    file: str | None = None,
    extend: int | ExtendTrials | None = None,
    clones: Sequence[CloneTrial] = (),
    as_json: bool = False,
    accept_numerics: bool = False,
    accept_recipe: bool = False,
    retry_failed: bool = False,
    fuse: str | None = None,
    workers: WorkerPool | None = None,
) -> int:
    """Go on with the study of a directory, with more trials if wanted; the code as of a run."""
    study = reopen_study(place, file)
    hardware = _hardware(flags)
    print(f"going on with study {study.name} in {place}, from {study.source}", file=sys.stderr)
    wanted: dict[str, Any] = {
        "extend": extend,
        "clones": tuple(clones),
        "accept_numerics": accept_numerics,
        "accept_recipe": accept_recipe,
        "retry_failed": retry_failed,
    }
    more = {name: value for name, value in wanted.items() if value}
    if fuse is not None:
        more["fuse"] = fuse
    if (extend or clones) and sys.stderr.isatty():  # where there is none, lines say it
        more["callbacks"] = [_tell_changes]
    runs = _runs(study.directory)
    with _told_if_stopped(study.directory, as_json=as_json, runs=runs):
        study.run(hardware=hardware, resume=True, workers=workers, **more)
    return tell_ending(study.directory, as_json=as_json, runs=runs)


def _hardware(flags: HardwareFlags) -> Hardware:
    return Hardware.parse(*flags[:3], spill_dir=flags.spill_dir)


def _runs(place: Path) -> int:
    """How often the study of a directory was run before; 0 where that cannot be read."""
    try:
        return Snapshot.of(read_outline(place)).runs
    except ShoalError:
        return 0


def _tell_changes(event: Event) -> None:
    """Say above the live table what was added; by then it is on record."""
    if isinstance(event, StudyChanged):
        print("\n".join(event.changes), file=sys.stderr)


@contextmanager
def _told_if_stopped(place: Path, *, as_json: bool, runs: int) -> Iterator[None]:
    """After Ctrl-C or SIGTERM print what there is by then, where this run trained anything."""
    try:
        yield
    except SystemExit:
        with suppress(ShoalError, OSError):
            if _runs(place) > runs and Snapshot.of(read_outline(place)).stopped:
                tell_ending(place, as_json=as_json, runs=runs)
        raise


def tell_ending(place: Path, *, as_json: bool, runs: int) -> int:
    """Print what a run came to; the exit code says whether all trials finished.

    ``runs``: how often the study had been run before.
    """
    snapshot = read_snapshot(place, with_actions=True)
    if snapshot.runs == runs:
        failed = snapshot.count(TrialState.FAILED)
        again = f" {counted(failed, 'trial')} failed: --retry-failed tries again." * bool(failed)
        ended = counted(snapshot.total, "trial has", "trials have")
        print(
            f"nothing to train: {ended} ended.{again} More trials or longer ones in the file go "
            "on with the study, --overwrite begins it anew.",
            file=sys.stderr,
        )
    if as_json:
        print(jsonl.dumps(full_record(place, snapshot), indent=2))
    else:
        verbs = ("show", "trace", *["verify"] * bool(snapshot.count(TrialState.FINISHED)))
        following = ", ".join(f"shoal {verb} {place}" for verb in verbs)
        text = f"{describe_ending(snapshot, place)}\nnext      {following}"
        print(wrap(text, terminal_width()))
    return ending_code(snapshot)


def plan_file(
    file: str,
    flags: HardwareFlags,
    *,
    arguments: Sequence[str] = (),
    technique: str | None = None,
    fuse: str | None = None,
    exact: str = "auto",
    as_json: bool,
) -> int:
    """Measure the models of a study and print its plan."""
    study = open_study(file, arguments)
    hardware = _hardware(flags)
    print("measuring each distinct model once ...", file=sys.stderr)
    wishes: dict[str, Any] = {"technique": technique, "fuse": fuse, "exact": exact}
    plan = study.plan(hardware=hardware, **wishes)
    print(plan.to_json() if as_json else wrap(plan.explain(), terminal_width()))
    return ExitCode.DONE


def open_study(file: str, arguments: Sequence[str] = ()) -> Study:
    """The study of a file, which remembers where it came from."""
    with heeding_interrupts():
        return _opened(load_study(file, arguments))


def _opened(loaded: LoadedStudy) -> Study:
    """Its study; from now on this process has the arguments of its file, as its workers have."""
    study: Study = loaded.study
    study.source = loaded.source
    sys.argv[:] = loaded.argv
    return study


def reopen_study(place: Path, file: str | None = None) -> Study:
    """The study of a directory, from the file it came from, or from ``file``.

    It goes on in ``place``, wherever its file would put it now.

    Raises:
        SpecError: no file is on record or there, or it defines another study.
    """
    recorded = Snapshot.of(read_outline(place))
    source = file or recorded.source
    if not recorded.runs:
        raise SpecError(
            f"the study in {place} was begun, and ended before anything of it was on record. Run "
            "its file again: shoal run FILE.py."
        )
    if not source:
        raise SpecError(
            f"study {recorded.study!r} was made interactively, or in a function of a script, so "
            "no file says what it is. Go on "
            "with study.run(resume=True) where it was made, or name a file that defines it: "
            "--file FILE.py[:STUDY]."
        )
    path = Path(source.rpartition(":")[0] or source)
    if not file and path.suffix == ".py" and not path.is_file():
        raise SpecError(
            f"study {recorded.study!r} was defined in {path}, and that file is not there any "
            "more. Name the one that defines it now: --file FILE.py[:STUDY]."
        )
    with heeding_interrupts(), reading_for(recorded.study):
        given = recorded.arguments
        loaded = (
            load_study(source, given)
            if file
            else load_recorded(source, place, recorded.study, given)
        )
        study = _opened(loaded)
    if study.name != recorded.study:
        raise SpecError(
            f"{study.source} defines study {study.name!r}, and {place} holds study "
            f"{recorded.study!r}. Name the file that defines that one: --file FILE.py[:STUDY]."
        )
    study.directory = place
    return study
