"""What users write for numbers, flags, words and lists: taken as meant, or refused in words."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

import shoal
from shoal.core.errors import ShoalError, SpecError
from shoal.core.units import counted
from shoal.launch.request import Request
from shoal.launch.wishes import refuse_useless
from shoal.testing import stale_efficiency


def model(hp):
    raise AssertionError("nothing is built before what was asked for is checked")


RECIPE = partial(shoal.Recipe, model=model, data=model)


def study(**given):
    settings = {"space": {"lr": shoal.uniform(0, 1)}, "steps": 20, "trials": 4, **given}
    return shoal.Study(settings.pop("name", "s"), settings.pop("recipe", RECIPE()), **settings)


def asked(**given):
    return Request(hardware=shoal.Hardware.virtual(), **given)


COUNTS = ("2", True, 1.5, -1, math.nan, np.float64(2), [2])
FLAGS = ("yes", 1, 0.0, [True])
WORDS = ("other", 1, True, ["host"])
SHARDS = (2, "01", {0: 1}, (0, "1"), (0, True), (0, 9), (-1,))
SIZES = (2.5, True, -1, "big", [1], math.nan)
LENGTHS = ("soon", True, -1, math.nan, [1])
EFFICIENCY = partial(stale_efficiency, RECIPE(), {"lr": 1})

WRONG = {
    (shoal.Spilled, "shards"): (*COUNTS, 0),
    (shoal.Spilled, "lookahead"): (*COUNTS, 3),
    (shoal.Spilled, "lookbehind"): COUNTS,
    (shoal.Spilled, "keep_turn"): COUNTS,
    (shoal.Spilled, "keep_gradients"): COUNTS,
    (partial(shoal.Spilled, shards=3), "keep"): SHARDS,
    (partial(shoal.Spilled, shards=3), "keep_weights"): SHARDS,
    (partial(shoal.Spilled, shards=3), "keep_activations"): SHARDS,
    (partial(shoal.Spilled, shards=3), "spill_activations"): SHARDS,
    (partial(shoal.Spilled, shards=3), "keep_head"): (3, "01", (1,), (1, 2.0), {0, 1}),
    (shoal.Spilled, "late_state"): FLAGS,
    (shoal.Spilled, "recompute"): ("yes", 1, 0, None, [True]),
    **{(shoal.Spilled, name): WORDS for name in ("optimizer", "order", "boundaries")},
    **{(shoal.Spilled, name): WORDS for name in ("transfer", "master", "offload")},
    **{(shoal.Pipelined, name): COUNTS for name in ("stages", "micro_batches", "lag", "width")},
    (shoal.Pipelined, "shards"): (*COUNTS, 1),
    (shoal.Pipelined, "lookahead"): (*COUNTS, 3),
    (shoal.Pipelined, "cuts"): (3, "12", (), (2, 1), (1, 1), (1.0,), (True,), (-1,)),
    (partial(shoal.Pipelined, shards=3), "keep"): SHARDS,
    **{(shoal.Pipelined, name): FLAGS for name in ("recompute", "keep_gradients")},
    (partial(shoal.Pipelined, schedule="2bw"), "predict"): FLAGS,
    **{(shoal.Pipelined, name): WORDS for name in ("schedule", "optimizer")},
    (partial(shoal.Pipelined, schedule="gpipe"), "lag"): (1,),
    (shoal.DataParallel, "width"): (*COUNTS, 1),
    (shoal.DataParallel, "shard"): FLAGS,
    (shoal.Stale, "efficiency"): (0, -1, 1.5, math.nan, "0.8", True, None, [0.8]),
    (partial(shoal.Stale, efficiency=1), "predict"): FLAGS,
    (EFFICIENCY, "steps"): (*COUNTS, 3),
    (partial(EFFICIENCY, steps=20), "seeds"): (3, "12", (), (1.0,), (-1,), (True,), {0: 1}),
    (partial(EFFICIENCY, steps=20), "predict"): FLAGS,
    (partial(EFFICIENCY, steps=20), "threads"): (*COUNTS, 0),
    (partial(EFFICIENCY, steps=20), "micro_batches"): (*COUNTS, 0),
    (partial(shoal.Recipe, data=model), "model"): (3, "f", None),
    (partial(shoal.Recipe, model=model), "data"): (3, "f", None),
    **{(RECIPE, name): (3, "f") for name in ("loss", "inputs", "optimizer", "schedule", "step")},
    (RECIPE, "metrics"): (3, [len], {1: len}, {"": len}, {"f1": 2}),
    (RECIPE, "accumulate"): (*COUNTS, 0),
    (RECIPE, "loss_rows"): (*COUNTS, 0),
    (RECIPE, "clip_grad_norm"): ("1", True, 0, -1.0, math.nan, [1]),
    **{(RECIPE, name): WORDS for name in ("precision", "on_nonfinite")},
    **{(RECIPE, name): FLAGS for name in ("splittable", "share_data")},
    (RECIPE, "stale"): (0.8, True, "2bw"),
    (study, "name"): (3, "", "A/B", None),
    (study, "recipe"): (3, None, shoal.Recipe),
    (study, "space"): (3, "lr", {"lr"}, [("lr", 1)], {"lr": {1, 2}}, {"lr": math.nan}),
    **{(study, name): (*COUNTS, 0) for name in ("trials", "steps", "eval_every", "keep")},
    **{(study, name): COUNTS for name in ("seed", "retries")},
    (partial(study, pruner="asha", eval_every=2), "generation"): (*COUNTS, 0),
    (study, "generation"): (9,),
    **{(study, name): (3, "other", ["min"]) for name in ("metric", "mode", "sampler", "pruner")},
    (study, "directory"): (3, "", ["runs"]),
    (study, "disk_budget"): SIZES,
    **{(study, f"{name}time_limit"): LENGTHS for name in ("", "trial_")},
    (study, "checkpoint_every"): LENGTHS,
    (study, "keep_finished"): (3, "best:0", "some", None),
    (shoal.PBT, "interval"): (*COUNTS, 0),
    (shoal.PBT, "quantile"): ("1", True, 0, 0.6, math.nan, [0.1]),
    (shoal.PBT, "resample"): ("1", True, -0.1, 1.1, math.nan),
    (shoal.PBT, "vary"): ("lr", {"lr"}, (), (1,)),
    (shoal.PBT, "perturb"): (2, {0.8, 1.2}, (), (0,), (math.nan,), (math.inf,), ("2",)),
    **{(shoal.Hardware.virtual, name): (*COUNTS, 0) for name in ("devices", "threads")},
    **{(shoal.Hardware.virtual, name): SIZES for name in ("memory", "host_memory")},
    (shoal.Hardware.virtual, "poison"): FLAGS,
    (shoal.Hardware.virtual, "link"): ("fast", True, 0, -1.0, math.nan, math.inf, [1]),
    (shoal.Hardware.emulated, "profile"): ("h2", 3, None, ["h200"]),
    (shoal.Hardware.emulated, "scale"): ("2", True, 0, -1, math.nan, math.inf),
    (shoal.Hardware.parse, "devices"): (2, "gpu", "cpu:x", ["cpu:2"]),
    (shoal.Hardware, "devices"): (2, "cpu:2", (), ("cpu:0",)),
    (partial(shoal.uniform, 0), "hi"): ("1", True, -1, math.nan, math.inf, [1], None),
    (partial(shoal.integer, 1, 9), "log"): FLAGS,
    (partial(shoal.choice, 1), "when"): (3, "a", [1]),
    (shoal.grid, "lr"): (0.1, "0.1", [], {0.1, 0.2}, {0.1: 1}, [math.nan], [[1]]),
    **{(asked, name): FLAGS for name in ("overwrite", "retry_failed", "resume", "timeline")},
    (asked, "callbacks"): (print, "print", [3]),
    (asked, "clones"): (3, [3]),
    (asked, "extend"): COUNTS,
}


@pytest.mark.parametrize(("case", "values"), WRONG.items(), ids=map(str, range(len(WRONG))))
def test_what_cannot_be_meant_is_refused_with_what_was_found(case, values):
    make, name = case
    for value in values:
        with pytest.raises(ShoalError) as refused:
            make(**{name: value})
        words = str(refused.value)
        names = (name.removeprefix("trial_"), name.rstrip("s"), repr(value), "'lr'")
        assert any(word in words for word in names), words


RIGHT = [
    (shoal.Spilled(shards=np.int64(4), keep={2, 0}), shoal.Spilled(shards=4, keep=(0, 2))),
    (shoal.Spilled(recompute=np.True_), shoal.Spilled(recompute=True)),
    (shoal.Spilled(shards=3, keep=np.arange(2)), shoal.Spilled(shards=3, keep=(0, 1))),
    (shoal.Pipelined(cuts=[np.int32(2), 5]), shoal.Pipelined(stages=3, cuts=(2, 5))),
    (shoal.Pipelined(cuts={5, 2}), shoal.Pipelined(cuts=(2, 5))),
    (shoal.Stale(efficiency=np.float64(0.8)), shoal.Stale(efficiency=0.8)),
    (shoal.Stale(efficiency=np.float32(0.5)), shoal.Stale(efficiency=0.5)),
    (shoal.DataParallel(width=np.int64(2)), shoal.DataParallel(width=2)),
    (shoal.PBT(vary=["lr"], quantile=np.float64(0.5)), shoal.PBT(vary=("lr",), quantile=0.5)),
    (RECIPE(accumulate=np.int64(2), clip_grad_norm=np.float32(1)).accumulate, 2),
    (study(trials=np.int64(4), seed=np.int64(3)).seed, 3),
    (study(directory="runs").directory, study(directory=study().directory.parent).directory),
    (shoal.Hardware.virtual(np.int64(2), np.int64(1024)), shoal.Hardware.virtual(2, 1024)),
    (shoal.grid(lr=np.array([1, 2])), shoal.grid(lr=[1, 2])),
]


@pytest.mark.parametrize("place", range(len(RIGHT)))
def test_scalars_of_numpy_and_lists_of_any_kind_are_what_they_mean(place):
    found, meant = RIGHT[place]
    assert found == meant
    assert repr(found) == repr(meant)


USELESS = [
    ({"late_state": True, "shards": 2, "keep": (0,)}, {}, "Name some in keep_weights="),
    ({"late_state": False}, {"clip_grad_norm": 1.0}, "always comes late"),
]


@pytest.mark.parametrize(("settings", "recipe", "words"), USELESS)
def test_what_would_do_nothing_is_refused(settings, recipe, words):
    with pytest.raises(SpecError, match=words):
        refuse_useless(shoal.Spilled(**settings), RECIPE(**recipe))


def test_what_does_something_is_not():
    refuse_useless(shoal.Spilled(late_state=True), RECIPE())
    refuse_useless(shoal.Spilled(keep_gradients=2), RECIPE(accumulate=2))
    refuse_useless(shoal.Spilled(keep_gradients=0, late_state=False), RECIPE())
    refuse_useless(shoal.Pipelined(), RECIPE())
    refuse_useless(None, RECIPE())


def test_a_count_goes_with_its_noun():
    assert counted(1, "trial") == "1 trial"
    assert [counted(n, "copy", "copies") for n in (0, 1, 2)] == ["0 copies", "1 copy", "2 copies"]
