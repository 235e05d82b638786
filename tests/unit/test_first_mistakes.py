"""What somebody new to it does wrong, and whether what is said then leads on."""

import functools
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.search.space import check_space

LAST = 7.0
"""What the last validation batch is filled with."""


def build(hp):
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def data(hp):
    batches = [(torch.ones(2, 4) * i, torch.ones(2, 1)) for i in (1, 2, 3)]
    return batches, [*batches[:2], (torch.full((2, 4), LAST), torch.ones(2, 1))]


def loss(output, batch):
    return F.mse_loss(output, batch[1])


def refuses_the_last(output, batch):
    return 0.0 if batch[0][0, 0] != LAST else batch[7]


def refuses_all(output, batch):
    return batch[7]


def make_recipe(**changes):
    return shoal.Recipe(**{"model": build, "data": data, "loss": loss, **changes})


# ---------------------------------------------------------------- in validation


STAGES = shoal.Pipelined(stages=2)
REPLICAS = shoal.DataParallel(width=2, shard=True)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"fuse": 2},
        {"technique": STAGES, "devices": 2},
        {"technique": REPLICAS, "devices": 2},
    ],
    ids=["alone", "array", "pipeline", "replicas"],
)
def test_what_a_metric_raises_says_in_which_validation_it_was(how, run_study):
    recipe = make_recipe(metrics={"odd": refuses_the_last}, splittable=True)
    trial = run_study(recipe, {"lr": shoal.choice(0.1, 0.2)}, trials=2, epochs=2, **how).trials[0]
    lines = trial.error.rstrip().splitlines()
    words = "in the validation of trial 0 after step 3: batch 2, counted from 0"
    assert lines[-2:] == ["IndexError: tuple index out of range", words]
    assert lines[1].endswith("in refuses_the_last")
    assert trial.error_line == "IndexError: tuple index out of range"


def test_what_a_metric_of_the_whole_set_raises_says_so_too(run_study):
    metric = shoal.WholeSet(lambda output, batch: output, refuses_all)
    (trial,) = run_study(make_recipe(metrics={"odd": metric}), {"lr": 0.1}, epochs=2).trials
    assert trial.error.endswith("in the validation of trial 0 after step 3, of all its batches\n")


class EndsEarly:
    """Training data that cannot be read twice."""

    def __init__(self):
        self.reads = 0

    def __len__(self):
        return 3

    def __iter__(self):
        self.reads += 1
        if self.reads > 3:  # who measures reads it as well
            raise OSError("the disk is gone")
        return iter(data({})[0])


def test_what_data_raises_after_a_validation_in_stages_is_of_no_validation(run_study):
    recipe = make_recipe(data=lambda hp: (EndsEarly(), data(hp)[1]))
    (trial,) = run_study(recipe, {"lr": 0.1}, epochs=9, technique=STAGES, devices=2).trials
    assert trial.error.rstrip().splitlines()[-1] == "OSError: the disk is gone"


def test_what_a_metric_raises_while_a_study_is_planned_says_so_too(run_study):
    with pytest.raises(shoal.TrialError) as caught:
        run_study(make_recipe(metrics={"odd": refuses_all}), {"lr": 0.1}, epochs=2)
    *_, error, where = str(caught.value).splitlines()
    assert error == "IndexError: tuple index out of range"
    assert where == "in validation, of its first batch, before anything was trained"


def test_what_a_loss_raises_while_it_trains_is_of_no_validation(run_study):
    def odd(output, batch):
        return refuses_all(output, batch) if output.requires_grad else loss(output, batch)

    with pytest.raises(shoal.TrialError) as caught:
        run_study(make_recipe(loss=odd), {"lr": 0.1}, epochs=2)
    assert "validation" not in str(caught.value)


# ---------------------------------------------------------------- tracebacks


SCRIPT = """
    import shoal, torch
    from torch import nn

    def model(hp):
        return nn.Linear(4, hp["width"] // 0)

    def data(hp):
        return [(torch.ones(2, 4), torch.ones(2, 1))], None

    study = shoal.Study(
        "wrong", shoal.Recipe(model=model, data=data, loss=lambda out, batch: out.mean()),
        space={"lr": 0.1, "width": 3}, steps=2, directory="{place}",
    )
    study.run(hardware=shoal.Hardware.virtual(devices=1, memory="32MiB"))
"""


def test_a_script_whose_model_raises_shows_its_own_lines_alone(tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text(textwrap.dedent(SCRIPT).replace("{place}", str(tmp_path)))
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    lines = [line.strip() for line in ran.stderr.splitlines()]
    files = [line for line in lines if line.startswith("File ")]
    assert ran.returncode == 1
    assert files == [f'File "{script}", line {at}' for at in ("15, in <module>", "6, in model")]
    assert lines[-1] == "ZeroDivisionError: integer division or modulo by zero"


# ---------------------------------------------------------------- names


def test_a_metric_that_says_valid_itself_is_told_its_name():
    words = (
        r"'valid_auc', .* would be 'valid_valid_auc'\. Call it 'auc'; Study\(metric='valid_auc'"
    )
    with pytest.raises(shoal.SpecError, match=words):
        make_recipe(metrics={"valid_auc": loss})
    with pytest.raises(shoal.SpecError, match="one called 'valid_loss', and valid_loss is the"):
        make_recipe(metrics={"valid_loss": loss})


def test_an_evaluation_of_ones_own_that_says_valid_itself_is_told_its_name(run_study):
    def step(model, batch, optimizer, hp):
        optimizer.zero_grad()
        found = loss(model(batch[0]), batch)
        found.backward()
        optimizer.step()
        return found

    def evaluate(model, batch, hp):
        return {"valid_error": loss(model(batch[0]), batch)}

    recipe = shoal.Recipe(model=build, data=data, step=step, evaluate=evaluate)
    with pytest.raises(shoal.SpecError, match=r"evaluate=.*Call it 'error'"):
        run_study(recipe, {"lr": 0.1}, epochs=2, metric="valid_error")


# ---------------------------------------------------------------- functions


class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": lambda: build(None)}, r"is called as \(hp\), got <lambda>, which takes \(\)"),
        ({"model": Net}, r"model=.* got Net, which takes \(width, depth\)\. Write it with these"),
        ({"schedule": lambda optimizer: None}, r"schedule=.* called as \(optimizer, hp\)"),
        ({"loss": lambda output, x, y: 0}, r"called as \(output, batch\), .*\(output, x, y\)"),
        ({"metrics": {"it": lambda o: 0}}, r"metrics\['it'\]=.* called as \(output, batch\)"),
    ],
)  # fmt: skip
def test_a_function_that_takes_other_arguments_is_told_which_it_gets(changes, words):
    with pytest.raises(shoal.SpecError, match=words):
        make_recipe(**changes)


def test_a_function_that_may_be_called_so_is_taken():
    class Of:
        def __call__(self, *given, scale=1):
            return 0.0

    def of_three(weights, output, batch):
        return 0.0

    @functools.wraps(of_three)
    def fills_in(*given):
        return of_three(None, *given)

    odd = Of(), F.mse_loss, nn.MSELoss(), lambda o, b, *, hp: 0, lambda *given: 0, max, fills_in
    for function in odd:
        make_recipe(loss=function, metrics={"it": function})
    make_recipe(loss=None, step=lambda models, batch, optimizers, hp, number: 0)


def test_a_loss_that_hangs_on_no_parameter_is_told_so(run_study):
    recipe = make_recipe(loss=lambda output, batch: loss(output.detach(), batch))
    with pytest.raises(shoal.SpecError, match=r"the loss at .*mistakes.py:\d+ does not depend on"):
        run_study(recipe, {"lr": 0.1}, epochs=2)


def test_a_distribution_in_a_wrong_place_and_a_name_with_blanks_are_told_what_to_write():
    distributions = pytest.importorskip("optuna").distributions
    with pytest.raises(
        shoal.SpecError, match=r"FloatDistribution of Optuna's\. Write shoal\.unif"
    ):
        check_space({"lr": distributions.FloatDistribution(1e-3, 1e-1)})
    with pytest.raises(shoal.SpecError, match=r"got a uniform, .* space=\{'lr': \.\.\.\} without"):
        shoal.grid(lr=shoal.log_uniform(1e-3, 1e-1))
    with pytest.raises(shoal.SpecError, match=r"got 'My Study'\. Call it 'my-study', for example"):
        shoal.Study("My Study", make_recipe(), space={"lr": 0.1}, steps=1)


def test_a_loss_that_takes_a_batch_for_its_target_is_told_what_it_got(run_study):
    recipe = make_recipe(loss=lambda output, target: F.mse_loss(output, target))
    with pytest.raises(
        shoal.TrialError, match=r"called as \(output, batch\)\. It got .* whole batch"
    ):
        run_study(recipe, {"lr": 0.1}, epochs=2)


def test_a_loss_of_several_terms_is_told_to_return_their_sum(run_study):
    recipe = make_recipe(loss=lambda output, batch: {"one": output.mean()})
    with pytest.raises(shoal.SpecError, match=r"got dict\. Return one tensor, the sum of its"):
        run_study(recipe, {"lr": 0.1}, epochs=2)
