"""A program for a GPU: what each step of a spilled trial asks the allocator for, as JSON.

Arguments: where the optimizer steps, and the budget of cuda:0. A line for each step: how many
blocks were asked for since the one before, their bytes, and how much host memory was pinned.
"""

import itertools
import json
import os
import sys
import tempfile
from pathlib import Path

import spilled
import torch

import shoal

STEPS = 8


class Batches:
    """The same batches again and again; notes what was asked for up to each of them."""

    def __init__(self, told):
        self.told, (self.batches, _) = Path(told), spilled.data({})
        self.pinned = 0

    def __len__(self):
        return STEPS

    def __iter__(self):
        runtime = torch.cuda.cudart()
        register = runtime.cudaHostRegister

        def counted(*args):
            self.pinned += 1
            return register(*args)

        runtime.cudaHostRegister = counted
        try:
            for number in range(STEPS):
                self.note()
                yield self.batches[number % len(self.batches)]
            self.note()
        finally:
            runtime.cudaHostRegister = register

    def note(self):
        stats = torch.cuda.memory_stats() if torch.cuda.is_initialized() else {}
        told = [
            stats.get(f"{what}.all.allocated", 0) for what in ("allocation", "allocated_bytes")
        ]
        with self.told.open("a") as file:
            file.write(json.dumps([os.getpid(), *told, self.pinned]) + "\n")


def main(place, budget):
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.jsonl"
        recipe = shoal.Recipe(
            model=spilled.model,
            data=lambda hp: (Batches(told), None),
            loss=spilled.loss,
            clip_grad_norm=1.0,
        )
        study = shoal.Study("one", recipe, space={"lr": 1e-3}, epochs=1, directory=folder)
        report = study.run(
            hardware=shoal.Hardware.parse("cuda:0", budget, threads=1),
            technique=shoal.Spilled(optimizer=place),
            progress=False,
        )
        assert not report.trials[0].error, report.trials[0].error
        rows = [json.loads(line) for line in told.read_text().splitlines()]
    rows = rows[-STEPS - 1 :]
    steps = [
        [after - before for before, after in zip(one[1:], next_[1:], strict=True)]
        for one, next_ in itertools.pairwise(rows)
    ]
    sys.stdout.write(json.dumps({"steps": steps}) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # autograd's thread may meet an interpreter that is being taken down
