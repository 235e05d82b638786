"""What ``shoal plan`` says of a pipeline, as text: a change of the words is read here.

To accept a change: ``python tests/golden/test_explain.py`` writes the files again; then
read the diff.
"""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

import shoal
from shoal.core.plan import Plan
from shoal.core.planwords import shard_in_words
from shoal.core.spec import JobMeasure, TrialSpec
from shoal.core.technique import Pipelined
from shoal.core.units import Bytes, Seconds
from shoal.memory.layout import TensorSpec, lay_out
from shoal.pipeline.stops import Stops
from shoal.planner.job import make_pipeline_job
from shoal.planner.need import Request
from shoal.planner.price import Speeds
from shoal.planner.stages import predicted
from shoal.planning.pipelining import Pipelining, numerics
from shoal.runtime.wire.messages import Measured, MeasureShards
from shoal.testing import make_device, make_layer, make_shard

FOLDER = Path(__file__).parent / "explain"
MIB = 2**20
SPEEDS = Speeds(up_bytes_per_s=1e9, down_bytes_per_s=1e9, source="the link speed that was given")
TRIAL = TrialSpec(number=0, hp={"lr": 0.1}, seed=7)
PLANS = {
    "flush": Pipelined(),
    "2bw_guessed_in_pieces": Pipelined(schedule="2bw", stages=2, micro_batches=8, predict=True),
    "stale_weights_allowed": Pipelined(),
    "stale_weights_worth_little": Pipelined(),
}
STALE = {
    "stale_weights_allowed": shoal.Stale(efficiency=1.0),
    "stale_weights_worth_little": shoal.Stale(efficiency=0.72),
}


def measured() -> Measured:
    """Six blocks of a mebibyte; the first is slow."""
    layers = [
        make_layer(
            f"blocks.{index}",
            MIB,
            boundary_bytes=Bytes(MIB // 4),
            carry_bytes=Bytes(MIB // 4),
            private_bytes=Bytes(MIB // 4),
            saved_bytes=Bytes(MIB),
            backward_peak_bytes=Bytes(3 * MIB),
            forward_s=Seconds(0.020),
            backward_s=Seconds(0.160 if index == 0 else 0.060),
            step_s=Seconds(0.001),
        )
        for index in range(6)
    ]
    whole = make_shard(0, 6 * MIB, backward_peak_bytes=Bytes(16 * MIB))
    measure = JobMeasure(
        layers=tuple(layers),
        shards=(whole,),
        batch_bytes=Bytes(64 * 1024),
        buffer_bytes=Bytes(0),
        resident_bytes=Bytes(34 * MIB),
        num_batches=64,
        valid_scale=1.0,
        optimizer="AdamW",
        cuttable=True,
        bitwise=True,
        draws=False,
        data="place in the data: index into a list",
        rows=64,
    )
    return Measured(0, measure, layout([tuple(range(6))]))


def layout(spans):
    weight = TensorSpec("", (MIB // 4,), (1,), "float32", MIB)
    names = [[f"blocks.{layer}" for layer in span] for span in spans]
    specs = {name: replace(weight, name=name) for part in names for name in part}
    states = {name: [replace(spec, key="exp_avg")] * 2 for name, spec in specs.items()}
    return lay_out(names, [[] for _ in names], specs, states, [])


def explain(asked: Pipelined, stale: shoal.Stale | None = None) -> str:
    recipe = shoal.Recipe(model=dict, data=dict, accumulate=4, splittable=True, stale=stale)
    request = Request(micro_batches=4, clip=False, technique=asked, prefers="host")
    each = (24 if stale is None else 40) * MIB
    devices = [make_device(f"cpu:{i}", each) for i in range(2)]
    stops = Stops(epochs=2, eval_every=10)
    pipelining = Pipelining(devices, recipe, request, stops=stops)
    question = pipelining.settle(TRIAL, asked, 1, SPEEDS)
    order, first, answer = next(question), measured(), measured()
    while True:
        if isinstance(order, MeasureShards):
            shards = predicted(first.measure.layers, order.cuts)
            bounds = [0, *order.cuts, 6]
            spans = [range(*span) for span in pairwise(bounds)]
            answer = Measured(0, replace(first.measure, shards=shards), layout(spans))
        try:
            order = question.send(answer)
        except StopIteration as end:
            settled = end.value
            break
    key = {"accumulate": 4, **numerics(settled.technique, 4)}
    args = (settled.measure, settled.layout, settled.staged, request, settled.why, key)
    job = make_pipeline_job(TRIAL, *args)
    plan = Plan(study="s", devices=tuple(devices), jobs=(job,), active=1, seconds=Seconds(9.0))
    assert Plan.from_json(plan.to_json()) == plan
    assert repr(plan) == "<Plan of study s: 1 trial on 2 devices; print it to read it>"
    assert str(plan) == plan.explain()
    return plan.explain()


@pytest.mark.parametrize("name", PLANS)
def test_a_pipeline_is_explained_as_it_was(name):
    assert f"{explain(PLANS[name], STALE.get(name))}\n" == (FOLDER / f"{name}.txt").read_text()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, technique in PLANS.items():
        (FOLDER / f"{name}.txt").write_text(f"{explain(technique, STALE.get(name))}\n")


@pytest.mark.parametrize(("layers", "words"), [((3, 4), "layer 3"), ((3, 6), "layers 3..5")])
def test_a_shard_says_which_layers_it_has(layers: tuple[int, int], words: str) -> None:
    shard = replace(make_shard(7, MIB), layers=layers)
    assert shard_in_words(shard).startswith(f"shard 7: {words}, parameters ")
