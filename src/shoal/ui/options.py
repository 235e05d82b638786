"""The options and arguments that several verbs take, each with its help."""

from __future__ import annotations

from typing import Annotated

import typer
from typer.core import TyperCommand

FILE_HELP = "FILE.py or FILE.py:attribute, a file that defines a shoal.Study."


class FileCommand(TyperCommand):
    """A verb that takes a file, and what that is to find in ``sys.argv``, after --."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Refuse what only looks as if it were for the file."""
        behind = args[args.index("--") + 1 :] if "--" in args else []
        rest = super().parse_args(ctx, args)
        given = [*(ctx.params.get("arguments") or ())]
        if len(given) > len(behind):
            ctx.fail(
                f"Got unexpected extra argument ({given[0]}). What the file is to find in "
                f"sys.argv stands after --: shoal {ctx.info_name} FILE.py -- {given[0]}"
            )
        return rest


STUDY_HELP = "A study's name under --directory, or its own directory."

File = Annotated[str, typer.Argument(metavar="FILE.py[:STUDY]", help=FILE_HELP)]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- ARGUMENTS", help="What the file finds in sys.argv, if it looks."),
]
Devices = Annotated[
    str | None,
    typer.Option(
        help="cpu:2 (two virtual devices), cpu, cuda, cuda:0,1; cuda:0,0 is two workers on one "
        "GPU; cpu:2@h200 emulates two H200. Default: what is there."
    ),
]
DeviceMemory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Budget of each device, such as 256MiB.")
]
SpillDir = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="A directory on a disk for the trials' states, where host memory is too small.",
    ),
]
HostMemory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Host memory of the study, such as 8GiB.")
]
Directory = Annotated[str, typer.Option(help="Where studies are kept.")]
Name = Annotated[str, typer.Argument(metavar="STUDY", help=STUDY_HELP)]
NewestName = Annotated[
    str | None, typer.Argument(metavar="[STUDY]", help=STUDY_HELP + " Default: the newest.")
]
SourceFile = Annotated[
    str | None,
    typer.Option(metavar="FILE.py[:STUDY]", help="Where the study's file is now, if it moved."),
]
Fuse = Annotated[
    str | None,
    typer.Option(
        help="Train trials of one shape as arrays: auto (measured), off, or how wide, up to 64, "
        "and how passes run: 16, 16-compiled, 16-branches; 16/4/1: narrower as trials are pruned.",
        metavar="auto|off|N[/N...][-KIND]",
    ),
]
Exact = Annotated[
    str,
    typer.Option(
        help="strict: deterministic kernels alone, and nothing that trains to other bits than "
        "training alone.",
        metavar="auto|strict",
    ),
]
TechniqueName = Annotated[
    str | None,
    typer.Option(
        "--technique",
        help="Have every trial train so, and not as is best: resident, captured, spilled, "
        "pipelined, data_parallel.",
        metavar="NAME",
    ),
]
AcceptNumerics = Annotated[
    bool,
    typer.Option(
        "--accept-numerics", help="Go on to other bits, where software, devices or --fuse changed."
    ),
]
AcceptRecipe = Annotated[
    bool,
    typer.Option(
        "--accept-recipe",
        help="Go on with the recipe as it is now: trials that have not ended from their last "
        "state, on record.",
    ),
]
RetryFailed = Annotated[
    bool, typer.Option("--retry-failed", help="Train failed trials again, from their last state.")
]
AddAgain = Annotated[
    bool,
    typer.Option(
        "--again", help="Add, though what the same command added before has not ended yet."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
