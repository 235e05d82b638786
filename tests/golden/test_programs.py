"""Generated programs as text: a change of the generator is seen, and read, here.

To accept a change: ``python tests/golden/test_programs.py`` writes the files again; then
read the diff.
"""

from pathlib import Path

import pytest

from shoal.pipeline.schedule import Pipeline
from shoal.pipeline.spilled import SpilledPipeline
from shoal.program.ir import parse_program
from shoal.spill.generate import Route, resident_step, spilled_step

FOLDER = Path(__file__).parent / "programs"

PROGRAMS = {
    "resident_clip": resident_step(micro_batches=2, clip=True),
    "spilled_1_accumulate": spilled_step(1, micro_batches=2),
    "spilled_2": spilled_step(2),
    "spilled_2_accumulate": spilled_step(2, micro_batches=2),
    "spilled_2_host_accumulate_clip": spilled_step(
        2, micro_batches=2, clip=True, optimizer="host"
    ),
    "spilled_3": spilled_step(3),
    "spilled_3_no_lookahead": spilled_step(3, lookahead=0),
    "spilled_3_clip": spilled_step(3, clip=True),
    "spilled_3_host": spilled_step(3, optimizer="host"),
    "spilled_3_host_clip": spilled_step(3, clip=True, optimizer="host"),
    "spilled_3_kept": spilled_step(3, keep=(1,), lookahead=0),
    "spilled_3_kept_host_clip": spilled_step(3, keep=(0,), optimizer="host", clip=True),
    "spilled_3_weights_lent": spilled_step(3, weights=(0, 2), lent=(0,)),
    "spilled_4_late": spilled_step(4, keep=(3,), weights=(0, 1, 2), late=(0, 1, 2)),
    "spilled_4_saves": spilled_step(4, keep=(0,), saves=(0, 2), micro_batches=2),
    "spilled_6_saves_and_moves": spilled_step(
        6, optimizer="host", keep=(4,), saves=(4,), spills=(0, 2), boundaries="host"
    ),
    "spilled_6_turn_host_clip": spilled_step(
        6, optimizer="host", clip=True, keep=(1,), turn=(2, 3)
    ),
    "spilled_4_turn_accumulate": spilled_step(
        4, optimizer="host", micro_batches=2, lookahead=0, turn=(1, 2)
    ),
    "spilled_4_waits_clip": spilled_step(
        4, clip=True, lookahead=0, keep=(0,), weights=(1,), waits=(1, 2)
    ),
    "spilled_3_waits_accumulate": spilled_step(3, micro_batches=2, weights=(0,), waits=(0, 1)),
    "spilled_4_behind_none": spilled_step(
        4, optimizer="host", lookahead=0, lookbehind=0, keep=(1,), boundaries="host"
    ),
    "spilled_5_boundaries_host": spilled_step(5, boundaries="host"),
    "spilled_4_by_shard_boundaries_host": spilled_step(
        4, micro_batches=2, order="shard", lookahead=0, boundaries="host"
    ),
    "spilled_2_by_shard": spilled_step(2, micro_batches=2, clip=True, order="shard"),
    "spilled_2_micro_1": Route(2).micro(1),
    "spilled_2_finish_clip": Route(2).finish(clip=True),
    "evaluation_3": Route(3).evaluation(),
    "pipeline_naive_2": Pipeline(schedule="naive", stages=2, groups=(2,)).program(),
    "pipeline_gpipe_3_recompute": Pipeline(
        schedule="gpipe", stages=3, groups=(3,), recompute=True
    ).program(),
    "pipeline_flush_3_clip": Pipeline(
        schedule="flush", stages=3, groups=(3, 1), clip=True
    ).program(),
    "pipeline_zb-h1_3": Pipeline(schedule="zb-h1", stages=3, groups=(4,)).program(),
    "pipeline_2bw_2_clip_ties": Pipeline(
        schedule="2bw", stages=2, groups=(2, 2, 2, 2), clip=True, ties=((0, 1),)
    ).program(),
    "pipeline_2bw_3_draws": Pipeline(
        schedule="2bw", stages=3, groups=(3, 3), draws=True, lag=1
    ).program(),
    "pipeline_flush_2_foretold": Pipeline(
        schedule="flush", stages=2, groups=(2, 2), draws=True, foretold=True
    ).program(),
    "spilled_stages_flush_2_host": SpilledPipeline(
        pipeline=Pipeline(schedule="flush", stages=2, groups=(2,), follows=True),
        spans=((0, 3), (3, 5)),
    ).program(),
    "spilled_stages_gpipe_2_clip_kept": SpilledPipeline(
        pipeline=Pipeline(schedule="gpipe", stages=2, groups=(2,), clip=True, follows=True),
        spans=((0, 3), (3, 5)),
        optimizer="device",
        keep=(1,),
    ).program(),
    "spilled_stages_naive_2_ties_draws": SpilledPipeline(
        pipeline=Pipeline(schedule="naive", stages=2, groups=(2,), draws=True, follows=True),
        spans=((0, 2), (2, 4)),
        ties=((0, 3),),
        keep_gradients=True,
    ).program(),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_generated_program_is_the_golden_one_which_reads_back(name):
    golden = (FOLDER / f"{name}.txt").read_text()
    assert f"{PROGRAMS[name]}\n" == golden
    assert parse_program(golden) == PROGRAMS[name]


def test_every_golden_file_is_of_a_program_that_is_generated():
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(PROGRAMS)


if __name__ == "__main__":
    for name, program in PROGRAMS.items():
        (FOLDER / f"{name}.txt").write_text(f"{program}\n")
