"""What a study may not be asked for, in words."""

import pytest

import shoal
from shoal.core.errors import SpecError
from shoal.launch.checks import check_metric

RECIPE = shoal.Recipe(model=len, data=len, loss=max, metrics={"accuracy": max})


@pytest.mark.parametrize(
    ("metric", "meant"),
    [
        ("accuracy", "Did you mean 'valid_accuracy'"),
        ("valid_acuracy", "Did you mean 'valid_accuracy'"),
        ("val_loss", "Did you mean 'valid_loss'"),
        ("bleu", r"Add it to Recipe\(metrics=...\)"),
    ],
)
def test_a_metric_that_is_not_measured_has_a_suggestion(metric, meant):
    with pytest.raises(SpecError, match=rf"metric='{metric}' is not measured .*{meant}"):
        check_metric(RECIPE, metric, "max")
