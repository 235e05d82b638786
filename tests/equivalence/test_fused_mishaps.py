"""A trial's mishap in an array is its own: its neighbours keep their bits, and train on."""

from __future__ import annotations

import breakdowns
import pytest
import squads
from listening import Orders

import shoal
from shoal.control import StopTrial
from shoal.core.event import StepFinished
from shoal.testing import array_loop, compare


def hardly(*words):
    """These in the full product alone."""
    return [pytest.param(word, marks=pytest.mark.full) for word in words]


LOOP = {"steps": 8, "eval_every": 2}
WIDTH = 8  # all of most studies, so that each is the others' neighbour


@pytest.fixture
def check(run_study):
    """Run a study of mishaps in arrays; trials without one end on the bits of their slots."""

    def run(kinds, recipe=None, *, survivors=("none",), extra=None, width=WIDTH, **options):
        space = shoal.grid(mishap=kinds, lr=[0.01, 0.003], drop=[0.1, 0.2]) | (extra or {})
        recipe = recipe or breakdowns.recipe()
        report = run_study(recipe, space, **(LOOP | {"fuse": width} | options))
        alive = [trial for trial in report.trials if trial.hp["mishap"] in survivors]
        assert alive
        pairs = zip(squads.widths(report), report.trials, strict=True)
        assert {found for found, trial in pairs if trial in alive} == {width}
        squads.assert_arrayed(report, alive, recipe, width, **LOOP)
        return [trial for trial in report.trials if trial not in alive]

    return run


@pytest.mark.sample(2)
@pytest.mark.parametrize("mishap", breakdowns.WORDS)
def test_a_mishap_fails_its_trial_alone(mishap, check):
    for trial in check(["none", mishap]):
        assert trial.state == "FAILED"
        assert breakdowns.WORDS[mishap] in trial.error


@pytest.mark.slow
@pytest.mark.parametrize("mishap", ["nan", "inside", *hardly("target", "loss", "shape", "data")])
def test_so_it_is_in_a_step_of_several_batches(mishap, check):
    recipe = breakdowns.recipe(accumulate=2, clip_grad_norm=0.5)
    for trial in check(["none", mishap], recipe, devices=2):
        assert trial.state == "FAILED"


@pytest.mark.slow
@pytest.mark.parametrize("mishap", ["loss", *hardly("nan", "target", "inside")])
def test_so_it_is_where_one_kernel_steps_all(mishap, check):
    recipe = breakdowns.recipe(optimizer=squads.adam, clip_grad_norm=0.5, schedule=squads.cosine)
    for trial in check(["none", mishap], recipe):
        assert trial.state == "FAILED"


@pytest.mark.sample(1)
@pytest.mark.parametrize("devices", [1, 2])
def test_many_mishaps_at_once_leave_the_others_alone(devices, check):
    kinds = [*breakdowns.WORDS, "none"]
    for trial in check(kinds, devices=devices, width=31):
        assert trial.state == "FAILED"
        assert breakdowns.WORDS[trial.hp["mishap"]] in trial.error


def test_a_trial_that_fails_at_its_first_step_keeps_nobody_from_arrays(check):
    for trial in check(["first", "none"]):
        assert trial.state == "FAILED"
        assert breakdowns.WORDS["target"] in trial.error


@pytest.mark.parametrize("mishap", ["nan"])
def test_a_loss_that_is_no_number_may_be_trained_on(mishap, check):
    recipe = breakdowns.recipe(on_nonfinite="ignore")
    check(["none", mishap], recipe, survivors=("none", mishap))


def test_a_trial_that_is_tried_again_goes_on_to_its_bits(check, tmp_path):
    flag = tmp_path / "failed"
    survivors = ("none", "once")
    check(
        list(survivors),
        survivors=survivors,
        extra={"flag": str(flag), "lr": 0.01, "drop": 0.1},
        retries=1,
        checkpoint_every=0,
    )
    assert flag.exists()


@pytest.mark.full
def test_trials_that_take_too_long_stop_at_a_step_with_its_bits(run_study):
    space = shoal.grid(mishap=["slow"], lr=[0.01, 0.003], drop=[0.1, 0.2])
    recipe = breakdowns.recipe()
    report = run_study(recipe, space, **LOOP, fuse=WIDTH, trial_time_limit=0.3)
    assert {str(trial.state) for trial in report.trials} == {"STOPPED"}
    for trial in report.trials:
        state = trial.load_state()
        place = {"slot": trial.number, "width": WIDTH, "eval_every": LOOP["eval_every"]}
        plain = array_loop(recipe, trial.hp, trial.seed, **place, steps=state["step"])
        assert compare(plain, state).equal


@pytest.mark.full
def test_one_trial_can_be_stopped_and_the_others_go_on(run_study, tmp_path, monkeypatch):
    space = shoal.grid(mishap=["slow"], lr=[0.01, 0.003], drop=[0.1, 0.2])
    recipe, orders = breakdowns.recipe(), Orders(tmp_path / "study-0", monkeypatch)
    orders.at(lambda e: isinstance(e, StepFinished) and e.step == 2, StopTrial(trial=1), "stop")
    report = run_study(recipe, space, **LOOP, fuse=WIDTH, callbacks=[orders])
    assert "stopped" in orders.join()["stop"]["text"]
    assert [str(trial.state) for trial in report.trials] == [
        *("FINISHED", "STOPPED", "FINISHED", "FINISHED")
    ]
    alive = [trial for trial in report.trials if trial.number != 1]
    assert set(squads.widths(report)) == {WIDTH}
    squads.assert_arrayed(report, alive, recipe, WIDTH, **LOOP)
