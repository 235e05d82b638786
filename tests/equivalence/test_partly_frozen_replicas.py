"""Replicas of models that train in part: the bits of their rule, the bytes of their plan."""

from __future__ import annotations

import parts
import pytest
import twins
from torch.optim import lr_scheduler

from shoal import DataParallel
from shoal.core.event import PeakMeasured

WHOLE, SHARDED = DataParallel(width=2), DataParallel(width=2, shard=True)


def kinds():
    """Every model sharded, and whole where that is another case; a few of them always."""
    models = (
        *(parts.outside, parts.adapters, parts.backbone, parts.prefix, parts.middle),
        *(parts.layers, parts.weights, parts.one_row, parts.masked, parts.none),
    )
    always = {(parts.outside, SHARDED), (parts.adapters, SHARDED), (parts.masked, WHOLE)}
    for model in models:
        for technique, name in ((SHARDED, "sharded"), (WHOLE, "whole")):
            marks = () if (model, technique) in always else pytest.mark.full
            yield pytest.param(model, technique, marks=marks, id=f"{model.__name__}, {name}")


@pytest.mark.slow
@pytest.mark.parametrize(("model", "technique"), list(kinds()))
def test_a_replica_holds_what_its_plan_says(model, technique, run_replicas):
    """The fullest of them to a hundredth, and none more."""
    run_replicas(twins.recipe(model=model, data=parts.data), technique, epochs=1)
    (heard,) = run_replicas.heard
    peaks = heard.of(PeakMeasured)
    for peak in peaks:
        assert peak.peak_bytes <= peak.predicted_bytes
    assert max(peak.peak_bytes for peak in peaks) > 0.98 * peaks[0].predicted_bytes


@pytest.mark.full
@pytest.mark.parametrize("technique", [SHARDED, WHOLE], ids=["sharded", "whole"])
@pytest.mark.parametrize("model", [parts.adapters, parts.middle])
def test_so_it_does_where_steps_are_of_several_batches_and_clipped(model, technique, run_replicas):
    recipe = twins.recipe(model=model, accumulate=2, data=parts.data, clip_grad_norm=0.1)
    run_replicas(recipe, technique, epochs=1)
    (heard,) = run_replicas.heard
    for peak in heard.of(PeakMeasured):
        assert 0.95 * peak.predicted_bytes < peak.peak_bytes <= peak.predicted_bytes


def test_whole_parameters_are_counted_while_they_are_gathered_and_not_afterwards(run_replicas):
    """Half of the weights, and of those of five blocks two at a time, in three copies at most."""
    run_replicas(twins.recipe(model=parts.backbone, data=parts.data), SHARDED, epochs=1)
    (heard,) = run_replicas.heard
    weights = sum(p.nbytes for p in parts.backbone({}).parameters())
    for peak in heard.of(PeakMeasured):
        assert 0.5 * weights < peak.predicted_bytes < 1.3 * weights


class Changing(lr_scheduler.LambdaLR):
    """Trains what was frozen, or the other way round, after three steps."""

    def step(self):
        super().step()
        if self.last_epoch == 3:
            for parameter in self.optimizer.param_groups[0]["params"]:
                parameter.requires_grad_(not parameter.requires_grad)


def changing(optimizer, hp):
    return Changing(optimizer, lambda step: 1.0)


@pytest.mark.parametrize("technique", [SHARDED, WHOLE], ids=["sharded", "whole"])
def test_what_is_trained_since_the_replicas_were_made_fails_their_trial(technique, run_study):
    """It had the gradients of each replica's own rows, or none."""
    of = twins.recipe(model=parts.backbone, data=parts.data, schedule=changing)
    report = run_study(of, twins.LR, technique=technique, devices=2, steps=6)
    (trial,) = report.trials
    assert trial.state == "FAILED"
    assert "was frozen when this trial's replicas were made, and is trained in step 4" in (
        trial.error
    )


class Freezing(lr_scheduler.LambdaLR):
    """Freezes the first two parameters after three steps."""

    def step(self):
        super().step()
        if self.last_epoch == 3:
            for parameter in self.optimizer.param_groups[0]["params"][:2]:
                parameter.requires_grad_(False)


def freezing(optimizer, hp):
    return Freezing(optimizer, lambda step: 1.0)


def test_what_is_frozen_since_stays_as_it_is_or_fails_its_trial(run_study, run_replicas):
    """FSDP2 goes on to make its gradients."""
    of = twins.recipe(schedule=freezing)
    run_replicas(of, WHOLE, steps=6)
    (trial,) = run_study(of, twins.LR, technique=SHARDED, devices=2, steps=6).trials
    assert "was trained when this trial's replicas were made, and is frozen" in trial.error
