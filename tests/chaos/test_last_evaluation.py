"""A trial that is killed while it is validated for the last time is validated where it goes on."""

from __future__ import annotations

import os
import signal
import textwrap
import time

import commands
import pytest
from processes import until

import shoal
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.verify import verify_trials

SCRIPT = """
    import os, time
    from pathlib import Path

    import torch
    from torch import nn

    import shoal

    PLACE = Path({place!r})


    def model(hp):
        return nn.Linear(4, 2)


    def data(hp):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
        rows = [(x[i : i + 4], x[i : i + 4].sum(1).gt(0).long()) for i in range(0, 16, 4)]
        return rows, rows[:2]


    def loss(output, batch):
        return nn.functional.cross_entropy(output, batch[1])


    def slow(output, batch):
        time.sleep(0.4 if os.environ.get("SLOW") else 0.0)
        return float(output.mean())


    recipe = shoal.Recipe(model=model, data=data, loss=loss, metrics={{"slow": slow}})
    study = shoal.Study(
        *("it", recipe), space=shoal.grid(lr=[0.1, 0.01]), steps=10, eval_every=8,
        directory=PLACE, checkpoint_every=0, keep_finished={keep_finished!r},
    )


    if __name__ == "__main__":
        hardware = shoal.Hardware.virtual(devices=1, memory="64MiB")
        study.run(hardware=hardware, fuse={fuse!r})
"""


@pytest.mark.parametrize(("fuse", "keep_finished"), [(False, "all"), (2, "weights")])
def test_its_metrics_are_those_of_its_last_step(fuse, keep_finished, tmp_path):
    script = tmp_path / "script.py"
    text = SCRIPT.format(place=str(tmp_path), fuse=fuse, keep_finished=keep_finished)
    script.write_text(textwrap.dedent(text))
    with open(os.devnull, "wb") as null:
        out, slow = null.fileno(), os.environ | {"SLOW": "1"}
        process = commands.start([str(script)], out, out, slow, tmp_path)
    trials = tmp_path / "it" / "trials"
    until(lambda: list(trials.glob("*/step-00000010*/manifest.json")), "nothing of the last step")
    time.sleep(0.1)  # it is on record
    process.kill()
    assert process.wait() == -signal.SIGKILL
    commands.run(script, cwd=tmp_path).check_returncode()
    report = shoal.open(tmp_path / "it")
    assert [trial.state for trial in report.trials] == ["FINISHED"] * 2
    for trial in report.trials:
        assert [row["step"] for row in trial.history] == [8, 10]
        assert trial.metrics == trial.history[-1]["metrics"]
    rows = Snapshot.of(read_outline(tmp_path / "it")).trials
    verdicts = list(verify_trials(tmp_path / "it", rows))
    assert [v.first_difference or v.failure or v.skipped for v in verdicts] == ["", ""]
