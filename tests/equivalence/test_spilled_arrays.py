"""Arrays that are spilled end on the bits of the same arrays on one device as a whole."""

from __future__ import annotations

import breakdowns
import pytest
import squads
import staging
import torch
import traps
import unlucky
from listening import Heard
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.alone import evaluate
from shoal.core.event import PeakMeasured, TrialReplanned
from shoal.core.seats import epochs_of
from shoal.core.technique import Spilled, kept_shards
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.spill.generate import route_of
from shoal.verify import verify_trials

pytestmark = pytest.mark.usefixtures("warm_plans")

WAYS = {
    "host": Spilled(shards=2, optimizer="host"),
    "device": Spilled(shards=2, optimizer="device"),
    "one slot": Spilled(shards=3, optimizer="host", lookahead=0, lookbehind=0),
    "kept": Spilled(shards=3, optimizer="host", keep=(0,)),
    "weights": Spilled(shards=3, optimizer="device", keep=(1,), keep_weights=(0,)),
    "turn": Spilled(shards=3, optimizer="host", keep=(), keep_turn=1),
    "inputs": Spilled(shards=5, optimizer="host", keep=(), boundaries="host"),
    "inputs, one slot": Spilled(
        shards=4, optimizer="device", keep=(), boundaries="host", lookahead=0, lookbehind=0
    ),
    "gradients": Spilled(shards=3, optimizer="device", keep=(), keep_gradients=2),
}
FEW = {  # the others are in the full product
    ("mlp", "host"),
    ("language", "device"),
    ("language", "kept"),  # the shard that stays lends its weights
    ("conv", "kept"),
    ("images", "host"),
    ("accumulate", "one slot"),
    ("bf16", "host"),
    ("bf16", "gradients"),
    ("language, bf16", "kept"),
    ("layered", "host"),
    ("lengths", "weights"),
    ("language", "turn"),
    ("language", "inputs, one slot"),
    ("conv", "inputs, one slot"),
    ("lengths", "inputs"),
    ("accumulate", "inputs"),
    ("bf16", "inputs, one slot"),
    ("sgd", "gradients"),
}
NOT_CUT = {  # too few layers, or torch's encoder layer in bf16, which is refused alone too
    ("language", "inputs"),
    ("language, bf16", "inputs"),
    ("language, bf16", "inputs, one slot"),
}


def rows():
    for name in squads.DEEP:
        for way in (way for way in WAYS if (name, way) not in NOT_CUT):
            marks = () if (name, way) in FEW else pytest.mark.full
            yield pytest.param(name, way, marks=marks, id=f"{name}, {way}")


@pytest.fixture
def run_case(run_study):
    """Run a case in spilled arrays of some width; all of its trials were in one."""

    def run(case, *, fuse=4, **options):
        heard = Heard()
        report = run_study(
            case.recipe, case.space, **(case.loop | {"fuse": fuse, "callbacks": [heard]} | options)
        )
        assert [trial.error for trial in report.trials] == [""] * len(report.trials)
        assert set(squads.widths(report)) == {fuse}
        assert set(techniques(report)) == {"Spilled"}
        assert not heard.of(TrialReplanned)
        return report, heard

    return run


def techniques(report):
    rows = Snapshot.of(read_outline(report.directory)).trials
    return [row.technique for row in rows]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "way"), list(rows()))
def test_every_trial_ends_on_the_bits_of_its_slot(name, way, run_case, jobs):
    case = squads.DEEP[name]
    report, _ = run_case(case, technique=WAYS[way], poison=True)
    for job in jobs if way.startswith("inputs") else ():
        assert route_of(job.technique, job.shards).away
    squads.assert_arrayed(report, report.trials, case.recipe, 4, **case.loop)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("devices", [1, 2])
def test_generations_of_its_trials_do_not_disturb_it(devices, run_case):
    case = squads.DEEP["accumulate"]
    options = {"technique": WAYS["kept"], "checkpoint_every": 0, "devices": devices}
    report, _ = run_case(case, fuse=3, **options)
    squads.assert_arrayed(report, report.trials, case.recipe, 3, **case.loop)


def wide():
    """Four of these fit no device of 768 KiB as one array; one does."""
    return squads.recipe(clip_grad_norm=1.0), shoal.grid(
        lr=[0.01, 0.003], drop=[0.1, 0.4], width=[72]
    )


def test_an_array_that_does_not_fit_as_a_whole_is_spilled_within_the_budget(run_study):
    recipe, space = wide()
    heard, loop = Heard(), {"epochs": 1}
    options = {"memory": "512KiB", "fuse": 4, "callbacks": [heard]}
    report = run_study(recipe, space, **loop, **options)
    assert techniques(report) == ["Spilled"] * 4
    assert squads.widths(report) == [4] * 4
    squads.assert_arrayed(report, report.trials, recipe, 4, **loop)
    peaks = heard.of(PeakMeasured)
    assert peaks
    assert all(event.peak_bytes <= event.budget_bytes for event in peaks)
    assert all(event.peak_bytes <= event.predicted_bytes for event in peaks)


def many_rows(hp):
    """Small layers, and batches whose activations are what does not fit; the last is short."""
    first = nn.Linear(48, 48), nn.Dropout(hp["drop"]), nn.Tanh()
    return nn.Sequential(*first, *[nn.Linear(48, 48) for _ in range(20)], nn.Linear(48, 3))


def rows_to_read(hp):
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(640, 48, generator=random), torch.randint(3, (640,), generator=random)
    train = TensorDataset(x, y)
    return DataLoader(train, batch_size=256, shuffle=True), DataLoader(train, batch_size=256)


@pytest.mark.full
def test_inputs_of_shards_wait_on_the_host_where_they_are_what_does_not_fit(run_study):
    recipe = shoal.Recipe(
        model=many_rows, data=rows_to_read, loss=lambda out, batch: F.cross_entropy(out, batch[1])
    )
    space, loop, heard = shoal.grid(lr=[0.01, 0.003], drop=[0.1, 0.4]), {"epochs": 2}, Heard()
    report = run_study(recipe, space, memory="1900KiB", fuse=4, callbacks=[heard], **loop)
    assert techniques(report) == ["Spilled"] * 4
    assert squads.widths(report) == [4] * 4
    rows = Snapshot.of(read_outline(report.directory)).trials
    assert any("of inputs wait on the host" in why for why in rows[0].why)
    squads.assert_arrayed(report, report.trials, recipe, 4, **loop)
    peaks = heard.of(PeakMeasured)
    assert peaks
    assert all(event.peak_bytes <= event.predicted_bytes for event in peaks)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mishap", ["nan", "inside", "target", "loss"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_mishap_fails_its_trial_alone(mishap, accumulate, run_study):
    loop = {"steps": 8, "eval_every": 2}
    space = shoal.grid(mishap=["none", mishap], lr=[0.01, 0.003], drop=[0.1, 0.2])
    changes = {"accumulate": accumulate, "clip_grad_norm": 0.5, "optimizer": squads.adam}
    recipe = breakdowns.recipe(**changes)
    report = run_study(recipe, space, **loop, fuse=8, technique=WAYS["host"])
    alive = [trial for trial in report.trials if trial.hp["mishap"] == "none"]
    assert {str(trial.state) for trial in report.trials if trial not in alive} == {"FAILED"}
    assert set(techniques(report)) == {"Spilled"}
    squads.assert_arrayed(report, alive, recipe, 8, **loop)


def test_pruned_trials_leave_and_others_take_their_slots(tmp_path, warm_workers):
    pytest.importorskip("optuna")
    space = {"lr": shoal.log_uniform(1e-4, 1e-1), "drop": shoal.uniform(0.0, 0.3)}
    recipe, loop = squads.recipe(), {"trials": 8, "epochs": 3, "pruner": "asha"}
    study = shoal.Study("k", recipe, space=space, directory=tmp_path, **loop)
    report = study.run(
        hardware=shoal.Hardware.virtual(devices=1, memory="64MiB"),
        fuse=3,
        technique=WAYS["kept"],
        workers=warm_workers,
        progress=False,
        timeline=False,
    )
    states = [str(trial.state) for trial in report.trials]
    assert set(states) == {"FINISHED", "PRUNED"}
    assert set(techniques(report)) == {"Spilled"}
    rows = Snapshot.of(read_outline(report.directory)).trials
    told = [epochs_of(row.numerics) for row in rows]
    assert {epoch.width for epochs in told for epoch in epochs} == {3}
    assert any(len(epochs) > 1 for epochs in told), "nobody got another slot"
    done = [row for row in rows if str(row.state) == "FINISHED"]
    for verdict in verify_trials(report.directory, done, recipe=recipe):
        assert verdict.equal, verdict


def test_its_trials_are_verified_in_their_slots(run_case):
    case = squads.DEEP["lengths"]
    report, _ = run_case(case, technique=WAYS["device"])
    rows = Snapshot.of(read_outline(report.directory)).trials
    for verdict in verify_trials(report.directory, rows, recipe=case.recipe):
        assert verdict.equal, verdict


def test_the_plan_says_what_moves_and_what_stays(tmp_path):
    recipe, space = wide()
    study = shoal.Study("k", recipe, space=space, epochs=1, directory=tmp_path)
    hardware = shoal.Hardware.virtual(devices=1, memory="512KiB")
    plan = study.plan(hardware=hardware, fuse=4)
    job = plan.jobs[0]
    assert isinstance(job.technique, Spilled)
    assert job.held_bytes + job.unit_bytes <= 512 * 1024
    assert len(kept_shards(job.technique)) < len(job.shards)
    words = plan.explain()
    assert "of an array of 4" in words
    assert "as a whole 4 of them would take" in words
    assert "moves" in words
    assert shoal.Plan.from_json(plan.to_json()) == plan


def test_what_cannot_be_cut_trains_without_an_array_and_says_why(run_study, tmp_path):
    space = shoal.grid(lr=[0.01, 0.003], drop=[0.1, 0.2])
    study = shoal.Study(
        "k", squads.CASES["lstm"].recipe, space=space, epochs=1, directory=tmp_path
    )
    hardware = shoal.Hardware.virtual(devices=1, memory="160KiB")
    plan = study.plan(hardware=hardware, fuse=4)
    assert all(job.array is None for job in plan.jobs)
    assert "are no array in shards: " in plan.explain()
    assert "nothing to cut between" in plan.explain()


def test_a_weight_that_two_shards_cast_is_no_array_in_shards_and_the_plan_says_so(
    run_study, assert_alone, jobs
):
    """Autocast casts it once, for both."""
    recipe = staging.trap(traps.SharedLayer, 2, precision="bf16")
    space, technique = shoal.grid(lr=[0.01, 0.003]), Spilled(shards=2)
    report = run_study(recipe, space, steps=3, fuse=2, technique=technique)
    assert squads.widths(report) == [1, 1]
    assert "several parts of it cast one weight under autocast" in jobs[0].why[-1]
    assert_alone(report, report.trials, recipe, steps=3)


@pytest.mark.parametrize(
    ("technique", "word"),
    [
        (Spilled(order="shard"), "order='shard'"),
        (Spilled(shards=3, keep_activations=(1,), keep=(1,)), "keep_activations=(1,)"),
        (Spilled(transfer="bf16"), "transfer='bf16'"),
    ],
)
def test_what_an_array_has_not_is_refused_by_name(technique, word, tmp_path):
    study = shoal.Study("k", squads.recipe(), space=shoal.grid(lr=[0.1, 0.2]), epochs=1)
    with pytest.raises(shoal.PlanError, match="names what no array has") as error:
        study.plan(hardware=shoal.Hardware.virtual(memory="64MiB"), fuse=4, technique=technique)
    assert word in str(error.value)


@pytest.mark.slow
def test_an_evaluation_that_cannot_be_done_for_all_leaves_no_stale_rows(run_study):
    recipe, space = unlucky.asking(), shoal.grid(lr=[0.01, 0.003], drop=[0.1, 0.4])
    technique = Spilled(shards=3, optimizer="device", keep=(0,))
    report = run_study(recipe, space, steps=12, eval_every=3, fuse=4, technique=technique)
    for trial in report.trials:
        assert trial.state == "FINISHED", trial.error
        _, valid = recipe.data(trial.hp)
        found = evaluate(recipe, trial.load(), valid, torch.device("cpu"))
        assert found["valid_loss"] == pytest.approx(trial.metrics["valid_loss"], rel=1e-9)
