"""What people get wrong, and the three parts of the answer: asked, found, what to do."""

import copy
import re
import subprocess
import sys
import textwrap
import threading

import commands
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.core.event import StudyPlanned
from shoal.observe import read_events
from shoal.recipes.recipe import HyperParameters, read_data
from shoal.testing import assert_same, plain_loop


class Bag:
    """A batch type without a rule."""


def build(hp):
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def lazy(hp):
    return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 3))


def double_complex(hp):
    model = nn.Linear(4, 2)
    model.weight = nn.Parameter(model.weight.to(torch.complex128))
    return model


def tied_by_data(hp):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data
    return model


def kept_by_reference(hp):
    model = build(hp)
    model.register_buffer("first", next(model.parameters()).data[:1])
    return model


def on_a_plateau(optimizer, hp):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


def with_sparse(hp):
    model = build(hp)
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    return model


def data(hp):
    return [(torch.ones(2, 6), torch.tensor([0, 2]))], None


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


BACKBONE = nn.Linear(6, 8)


def around_one_that_is_there(hp):
    return nn.Sequential(BACKBONE, nn.ReLU(), nn.Linear(8, 3))


def no_valid_batches(hp):
    return data(hp)[0], []


def number_loss(output, batch):
    return F.cross_entropy(output, batch[1]).item()


def asks_for_momentum(hp):
    hp["momentum"]
    return build(hp)


def no_loss(output, batch):
    return None


def vector_loss(output, batch):
    return F.cross_entropy(output, batch[1], reduction="none")


def validated(hp):
    return data(hp)[0], data(hp)[0]


def once_only_data(hp):
    return (batch for batch in data(hp)[0]), None


def once_only_valid(hp):
    return data(hp)[0], iter(data(hp)[0])


def train_alone(hp):
    return data(hp)[0]


def no_batches(hp):
    return [], None


def bags(hp):
    return [Bag()], None


def held_bags(hp):
    return [(torch.ones(2, 6), Bag())], None


def no_optimizer(named_parameters, hp):
    return list(named_parameters)


def list_inputs(batch):
    return batch[0]


WRONG = {
    "unknown hyperparameter": (
        {"model": asks_for_momentum},
        r"unknown hyperparameter 'momentum'; this trial has 'lr'\. "
        r"Add it to the study's space, or read it with hp\.get\('momentum', default\)",
    ),
    "lazy layers that saw no batch": (
        {"model": lazy},
        r"a model with 2 tensors that have no shape yet, '0\.weight' of LazyLinear first\. .* Run "
        r"one batch through the model in the factory before it is returned",
    ),
    "a type that no file has": (
        {"model": double_complex},
        r"whose tensor 'weight' is of torch\.complex128, which no checkpoint can hold",
    ),
    "a schedule that asks for a metric": (
        {"schedule": on_a_plateau},
        r"returned a ReduceLROnPlateau, whose step\(\) needs 'metrics'\. Schedules are",
    ),
    "weights that are tied by their data": (
        {"model": tied_by_data},
        r"parameter '0\.weight' and parameter '1\.weight' are two tensors in the same memory\. .* "
        r"\(b\.weight = a\.weight, not \.data\)",
    ),
    "a buffer in a parameter": (
        {"model": kept_by_reference},
        r"buffer 'first' and parameter '.*' are two tensors in the same memory",
    ),
    "a sparse buffer": (
        {"model": with_sparse},
        r"whose tensor 'sparse' is torch\.sparse_coo, and a trial's parameters and buffers are",
    ),
    "no loss": (
        {"loss": no_loss},
        r"the loss at .*test_bad_input\.py:\d+ must be a scalar, got NoneType\. Re",
    ),
    "a loss that is no scalar": (
        {"loss": vector_loss},
        r"the loss at .*\.py:\d+ must be a scalar, got shape \(2,\)\. Reduce it, e\.g\. \.mean",
    ),
    "an output without a loss": (
        {"loss": None},
        r"the model's output \(Tensor\) has no loss\. Give Recipe\(loss=\.\.\.\)",
    ),
    "data that can be read once": (
        {"data": once_only_data},
        r"train data is a generator, which can be read only once; an epoch needs a source that "
        r"starts again\. Return a list, a DataLoader",
    ),
    "validation that can be read once": (
        {"data": once_only_valid},
        r"valid data is a list_iterator, which can be read only once",
    ),
    "one source instead of two": (
        {"data": train_alone},
        r"Recipe\(data=\.\.\.\) returned list of 1; return a pair \(train, valid\)",
    ),
    "a batch type without a rule": (
        {"data": bags},
        r"there is no rule to move a batch of type Bag to cpu\. Yield tensors",
    ),
    "a batch that holds a type without a rule": (
        {"data": held_bags},
        r"there is no rule to move a batch of type Bag to cpu\. Yield tensors",
    ),
    "a loss that is a number": (
        {"loss": number_loss},
        r"must be a scalar, got float\. Return the tensor itself, without \.item\(\)",
    ),
    "no batches": ({"data": no_batches}, "train.* data .*no batch"),
    "no validation batches": (
        {"data": no_valid_batches},
        "valid.* data yielded no batch.*or None",
    ),
    "a factory that makes no optimizer": (
        {"optimizer": no_optimizer},
        r"Recipe\(optimizer=\.\.\.\) returned list; return one torch\.optim\.Optimizer",
    ),
    "a metric that is several numbers": (
        {"data": validated, "metrics": {"acc": vector_loss}},
        r"Recipe\(metrics\['acc'\]=\.\.\.\) returned a tensor of shape \(2,\); return one number",
    ),
    "a metric that is no number": (
        {"data": validated, "metrics": {"acc": no_loss}},
        r"Recipe\(metrics\['acc'\]=\.\.\.\) returned NoneType; return one number",
    ),
    "inputs that are no arguments": (
        {"inputs": list_inputs},
        r"Recipe\(inputs=\.\.\.\) returned Tensor; return a tuple of arguments or a dict",
    ),
}
CASES = pytest.mark.parametrize(("changes", "words"), WRONG.values(), ids=WRONG)


def make_recipe(**changes):
    return shoal.Recipe(**{"model": build, "data": data, "loss": loss, **changes})


@pytest.fixture
def make_study(tmp_path):
    def make(recipe=None, name="wrong", **options):
        settings = {"space": {"lr": 0.1}, "steps": 2, "directory": tmp_path, **options}
        return shoal.Study(name, recipe or make_recipe(), **settings)

    return make


def one_device(memory="32MiB"):
    return shoal.Hardware.virtual(devices=1, memory=memory)


@CASES
def test_the_plain_loop_says_what_is_wrong_with_a_recipe(changes, words):
    with pytest.raises(shoal.SpecError, match=words):
        plain_loop(make_recipe(**changes), {"lr": 0.1}, 0, steps=2)


@CASES
def test_a_study_says_what_is_wrong_with_its_recipe(changes, words, make_study, warm_workers):
    with pytest.raises(shoal.SpecError, match=words):
        make_study(make_recipe(**changes)).run(hardware=one_device(), workers=warm_workers)


@pytest.mark.parametrize("fuse", [None, 2])
def test_a_part_that_trials_share_is_refused_before_it_trains(fuse, make_study, warm_workers):
    recipe = make_recipe(model=around_one_that_is_there)
    study = make_study(recipe, space=shoal.grid(lr=[0.1, 0.2]))
    words = (
        r"whose parameter '0\.weight' an earlier call returned too \('0' is kept .*\)\. Each "
        r"trial trains a model of its own: make that part in the function, or return a copy of it"
    )
    with pytest.raises(shoal.SpecError, match=words):
        study.run(hardware=one_device(), workers=warm_workers, fuse=fuse)
    copied = make_recipe(model=lambda hp: copy.deepcopy(nn.Sequential(BACKBONE, nn.Linear(8, 3))))
    for seed in (0, 0):
        plain_loop(copied, {"lr": 0.1}, seed, steps=1)


TABLE = torch.ones(8, 6)


ARRAY = np.ones((8, 6), np.float32)


def over_a_table(hp):
    model = build(hp)
    model[0].weight = nn.Parameter(TABLE if hp["lr"] < 0.15 else torch.from_numpy(ARRAY))
    return model


def test_a_parameter_over_somebodys_tensor_trains_in_memory_of_its_own(make_study, warm_workers):
    recipe = make_recipe(model=over_a_table)
    report = make_study(recipe, space=shoal.grid(lr=[0.1, 0.2])).run(
        hardware=one_device(), workers=warm_workers
    )
    for trial in report.trials:
        assert_same(plain_loop(recipe, trial.hp, trial.seed, steps=2), trial)
    assert torch.equal(TABLE, torch.ones(8, 6))
    assert (ARRAY == 1).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model": nn.Linear(6, 3)},
            r"got a Linear that is made already\. Write model=lambda hp: ",
        ),
        (
            {"optimizer": torch.optim.Adam},
            r"got the class Adam\. Write optimizer=lambda named, hp",
        ),
        ({"metrics": {"loss": vector_loss}}, r"one called 'loss', and valid_loss is the mean of"),
    ],
)
def test_what_is_called_with_other_arguments_is_refused_with_what_to_write(changes, words):
    with pytest.raises(shoal.SpecError, match=words):
        make_recipe(**changes)


class OfItsOwn(torch.optim.SGD):
    def __init__(self, named, hp):
        super().__init__([p for _, p in named], lr=hp["lr"])


def test_a_class_of_optimizers_that_takes_what_it_gets_is_a_function():
    assert plain_loop(make_recipe(optimizer=OfItsOwn), {"lr": 0.1}, 0, steps=1).losses


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            (torch.utils.data.TensorDataset(torch.ones(2, 6)), None),
            r"^train data is TensorDataset, a data set of single examples; training needs "
            r"batches\. Wrap it: torch\.utils\.data\.DataLoader\(dataset, batch_size=32, "
            r"shuffle=True\)\.$",
        ),
        (
            ([], torch.utils.data.TensorDataset(torch.ones(2, 6))),
            r"^valid data is .*Wrap it: torch\.utils\.data\.DataLoader\(dataset, batch_size=32\)",
        ),
        ((3, None), r"^train data is int, which is no iterable\. Return a DataLoader, a list of"),
    ],
)
def test_data_that_yields_no_batches_is_told_what_does(given, words):
    with pytest.raises(shoal.SpecError, match=words):
        read_data(make_recipe(data=lambda hp: given), HyperParameters({}))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (nn.CrossEntropyLoss(), r"got CrossEntropyLoss\(\), which takes an output and a target"),
        (F.cross_entropy, r"is a tuple\. Write loss=lambda output, batch: F\.cross_entropy\(outp"),
    ],
)
def test_a_loss_of_torchs_has_to_be_told_the_target(given, words, make_study, warm_workers):
    with pytest.raises(shoal.SpecError, match=words):
        make_study(make_recipe(loss=given)).run(hardware=one_device(), workers=warm_workers)


def test_a_batch_that_is_a_tensor_may_be_the_target_itself(make_study, warm_workers):
    functions = {
        "model": lambda hp: nn.Linear(6, 6),
        "data": lambda hp: ([torch.ones(2, 6)], None),
    }
    recipe = make_recipe(**functions, loss=F.mse_loss)
    report = make_study(recipe).run(hardware=one_device(), workers=warm_workers)
    assert [trial.error for trial in report.trials] == [""]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"data": lambda hp: ([{"x": torch.ones(2, 6), "n": 3}], None)},
            r"\nThe forward got x=float32 \[2, 6\], n=int: each item of the batch by its name, "
            r"since there is no Recipe\(inputs=...\), which says what the forward gets\.$",
        ),
        (
            {"model": lambda hp: nn.Linear(6, 3).double(), "inputs": lambda batch: (batch[0],)},
            r"\nThe forward got float32 \[.*\]: as Recipe\(inputs=...\) says\. Its parameters are "
            r"float64\.$",
        ),
    ],
)
def test_a_forward_that_fails_outside_the_users_code_tells_what_it_was_given(
    changes, words, make_study, warm_workers
):
    with pytest.raises(shoal.TrialError, match=words) as caught:
        make_study(make_recipe(**changes)).run(hardware=one_device(), workers=warm_workers)
    assert "shoal/runtime" not in str(caught.value)


def test_a_rate_that_is_text_is_told_of_by_its_name(make_study, warm_workers):
    study = make_study(make_recipe(optimizer=None), space=shoal.grid(lr=["1e-3"]))
    with pytest.raises(shoal.SpecError, match=r"hp\['lr'\] is '1e-3', str, and AdamW, which"):
        study.run(hardware=one_device(), workers=warm_workers)


WHERE = {  # a mistake can come to light
    "build": "unknown hyperparameter",
    "data": "no batches",
    "forward": "inputs that are no arguments",
    "loss": "a loss that is no scalar",
    "metric": "a metric that is no number",
}


@pytest.mark.parametrize("where", WHERE)
def test_a_refusal_loses_nothing(where, make_study, warm_workers):
    changes, words = WRONG[WHERE[where]]
    how = {"hardware": one_device(), "workers": warm_workers}
    with pytest.raises(shoal.SpecError, match=words):
        make_study(make_recipe(**changes)).run(**how)
    report = make_study().run(**how)
    assert [trial.error for trial in report.trials] == [""]


def raises(hp):
    return nn.Linear(6, 3 // 0)


def test_code_that_raises_in_every_trial_is_shown_from_its_own_lines_on(make_study, warm_workers):
    study = make_study(make_recipe(model=raises), space={"lr": shoal.grid(lr=[0.1, 0.2])["lr"]})
    with pytest.raises(shoal.TrialError) as caught:
        study.run(hardware=one_device(), workers=warm_workers)
    first, second, where, line, *_, last = str(caught.value).splitlines()
    assert first == "none of 2 trials can run; trial 0 says:"
    assert second == "Traceback (most recent call last):"
    assert where.endswith("in raises")
    assert line.strip() == "return nn.Linear(6, 3 // 0)"
    assert last.startswith("ZeroDivisionError")


def test_lazy_layers_that_saw_a_batch_train_as_others():
    def shaped(hp):
        model = lazy(hp)
        model(torch.zeros(1, 6))
        return model

    assert plain_loop(make_recipe(model=shaped), {"lr": 0.1}, 0, steps=2).losses


def test_an_unknown_hyperparameter_lists_the_known_ones():
    hp = HyperParameters({"lr": 0.1, "width": 64})
    with pytest.raises(shoal.SpecError, match=r"'depth'; this trial has 'lr', 'width'\. Add it"):
        hp["depth"]
    with pytest.raises(shoal.SpecError, match="this trial has none"):
        HyperParameters({})["depth"]


def test_a_hyperparameter_that_no_code_reads_is_told_of_before_anything_trains(
    make_study, warm_workers
):
    how = {"hardware": one_device(), "workers": warm_workers}
    study = make_study(space={"lr": 0.1, "weight_decya": shoal.choice(0.0, 0.1)}, trials=2)
    words = (
        "no code of the recipe seems to read the hyperparameter 'weight_decya', so trials that "
        "differ in it alone differ in their seeds alone. Did you mean 'weight_decay', which is "
        "read if a study has it?"
    )
    plan = study.plan(**how)
    assert words in plan.warnings
    assert f"WARNING: {words}" in plan.explain()
    assert shoal.Plan.from_json(plan.to_json()) == plan
    study.run(**how)
    (planned,) = (e for e in read_events(study.directory) if isinstance(e, StudyPlanned))
    assert words in planned.warnings
    assert planned.trials == 2


def one_cycle(optimizer, hp):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, hp["lr"], total_steps=hp["cycle"])


def test_a_schedule_that_ends_before_its_trial_is_refused_and_others_train(
    make_study, warm_workers
):
    how = {"hardware": one_device(), "workers": warm_workers}
    recipe, words = make_recipe(schedule=one_cycle), "can be stepped 1 time, and the trial trains"
    study = make_study(recipe, space={"lr": 0.1, "cycle": shoal.grid(cycle=[2, 1])["cycle"]})
    whole, short = study.run(**how).trials
    assert (str(whole.state), str(short.state)) == ("FINISHED", "FAILED")
    assert words in short.error
    with pytest.raises(shoal.SpecError, match=rf"^the schedule of trial 0 .*{words} for 2 steps"):
        make_study(recipe, "short", space={"lr": 0.1, "cycle": 1}).run(**how)


def plateau(optimizer, hp):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


def test_a_plateau_without_validation_data_is_refused_in_the_plan_and_others_train(
    make_study, warm_workers
):
    how = {"hardware": one_device(), "workers": warm_workers}
    recipe = make_recipe(
        data=lambda hp: (data(hp)[0], data(hp)[0] if hp["validates"] else None),
        schedule=plateau,
        schedule_interval="evaluation",
    )
    words = (
        "ReduceLROnPlateau, which Recipe(schedule=...) returned, goes by 'valid_loss' "
        "(schedule_metric=), which is measured on validation batches, and Recipe(data=...) "
        "returned (train, None). Return validation batches, or a schedule that goes by steps or "
        "epochs"
    )
    space = {"lr": 0.1, "validates": shoal.grid(validates=[True, False])["validates"]}
    study = make_study(recipe, space=space)
    assert words in study.plan(**how).failures[1]
    whole, without = study.run(**how).trials
    assert (str(whole.state), str(without.state)) == ("FINISHED", "FAILED")
    assert words in without.error
    assert not without.history
    alone = make_study(recipe, "alone", space={"lr": 0.1, "validates": False})
    for refused in (alone.plan, alone.run):
        with pytest.raises(shoal.SpecError, match=re.escape(words)):
            refused(**how)


def test_a_schedule_that_seems_to_count_epochs_is_warned_of(make_study, warm_workers):
    def cosine(optimizer, hp):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)

    recipe = make_recipe(data=lambda hp: (data(hp)[0] * 3, data(hp)[0]), schedule=cosine)
    how = {"hardware": one_device(), "workers": warm_workers}
    (warning,) = make_study(recipe, steps=None, epochs=4).plan(**how).warnings
    assert "CosineAnnealingLR(T_max=4), and it is stepped after each step" in warning
    assert warning.endswith("T_max=4 * 3.")
    assert not make_study(recipe, steps=12).plan(**how).warnings


def test_without_validation_data_trials_are_not_ranked_and_not_compared(make_study, warm_workers):
    how = {"hardware": one_device(), "workers": warm_workers}
    words = r"metric='valid_loss' is measured on validation batches, .* for 1 trial: 0, so "
    (warning,) = make_study().plan(**how).warnings
    assert re.match(words + "no leaderboard ranks them", warning)
    assert not make_study(metric="train_loss").plan(**how).warnings
    asked = {"steps": None, "epochs": 3, "pruner": "asha"}
    with pytest.raises(shoal.PlanError, match=words + "there is nothing to compare them by"):
        make_study(**asked).run(**how)


def test_an_empty_grid_names_the_key():
    with pytest.raises(shoal.SpecError, match=r"grid\(lr=\[\]\) is empty.*no trial.*Add a value"):
        shoal.grid(lr=[], width=[64])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": 3}, r"Recipe\(model=\.\.\.\) is a callable, got int: 3"),
        ({"metrics": {"f1": 2}}, r"Recipe\(metrics\['f1'\]=\.\.\.\) is a callable, got int"),
        ({"accumulate": 0}, "accumulate is a whole number from 1, got 0"),
        ({"accumulate": 1.5}, "accumulate is a whole number from 1, got 1.5"),
        ({"clip_grad_norm": -1.0}, r"clip_grad_norm is positive or None, got -1\.0"),
        ({"precision": "fp8"}, "precision is 'fp32', 'bf16' or 'bf16-sr', got 'fp8'"),
        ({"on_nonfinite": "stop"}, "on_nonfinite is 'fail' or 'ignore', got 'stop'"),
        (
            {"evaluate": lambda models, batch, hp: 0},
            r"Recipe\(evaluate=\.\.\.\) belongs to a step of one's own",
        ),
    ],
)
def test_a_recipe_that_no_training_could_mean_is_refused_when_it_is_made(changes, words):
    with pytest.raises(shoal.SpecError, match=words):
        make_recipe(**changes)


@pytest.mark.parametrize("name", ["", "Uppercase", "a/b", "..", "x" * 65, "sp ace"])
def test_a_study_needs_a_name_that_is_no_path(name, make_study):
    with pytest.raises(shoal.SpecError, match=r"name.*\[a-z0-9\._-\]"):
        make_study(name=name)


def test_a_directory_of_another_study_is_left_alone(make_study, tmp_path, warm_workers):
    make_study(name="mine").run(hardware=one_device(), workers=warm_workers)

    def content():
        """What counts: the lock's text and the database's header say who looked last."""
        found = [path for path in (tmp_path / "mine").rglob("*") if path.is_file()]
        files = {path: path.read_bytes() for path in found if path.stem not in ("lock", "study")}
        record = (tmp_path / "mine" / "study.json").read_text()
        return files, record, list(read_events(tmp_path / "mine"))

    before = content()
    with pytest.raises(shoal.SpecError, match=r"cannot go on with study 'mine'.*not asked for"):
        make_study(name="mine", space={"lr": 0.2, "width": 3}).run(hardware=one_device())
    assert content() == before


def test_a_directory_that_is_no_study_is_left_alone(make_study, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    with pytest.raises(shoal.SpecError, match="mine"):
        make_study(name="mine").run(hardware=one_device())
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


class WithLock:
    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, hp):
        return build(hp)


def test_a_recipe_that_cannot_be_sent_names_the_object_and_the_way_out(make_study):
    with pytest.raises(shoal.SpecError, match=r"(?s)model.*lock.*(build|make|create|open)"):
        make_study(make_recipe(model=WithLock())).run(hardware=one_device())


def wide(hp):
    return nn.Sequential(nn.Linear(6, 512), nn.Linear(512, 4096), nn.Linear(4096, 3))


def vast(hp):
    if torch.get_default_device().type != "meta":
        raise MemoryError("nobody has this much")
    return nn.Sequential(nn.Linear(6, 100_000), nn.Linear(100_000, hp["width"]))


def test_a_model_larger_than_the_host_is_refused_before_it_is_built(make_study, warm_workers):
    hardware = shoal.Hardware.virtual(devices=1, memory="4MiB", host_memory="8GiB")
    how = {"hardware": hardware, "workers": warm_workers}
    space = {"lr": 0.1, "width": shoal.grid(width=[100_000, 50_000])["width"]}
    words = (
        r"^trial 0 needs 149\.\d GiB or more on the host for its parameters, gradients and "
        r"optimizer state, of 8\.0 GiB that may be used there\. Train a smaller model, or give "
        r"host_memory= more.*\. 2 trials do not fit: 0, 1\.$"
    )
    with pytest.raises(shoal.PlanError, match=words):
        make_study(make_recipe(model=vast), space=space).run(**how)


def test_a_shard_larger_than_the_budget_says_the_bytes_and_what_would_fit(
    make_study, warm_workers
):
    how = {"hardware": one_device("4MiB"), "workers": warm_workers}
    with pytest.raises(shoal.PlanError, match=r"(?s)[0-9.]+ MiB.*[0-9.]+ MiB.*(memory|smaller)"):
        make_study(make_recipe(model=wide)).run(**how)


SCRIPT = """
    import sys
    import torch
    from torch import nn
    import shoal

    SCALE = 2

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x) / SCALE

    def build(hp):
        return Model()

    def data(hp):
        return [(torch.ones(2, 6), torch.tensor([0, 2]))], None

    def loss(output, batch):
        return nn.functional.cross_entropy(output, batch[1])

    recipe = shoal.Recipe(model=build, data=data, loss=loss)
    study = shoal.Study("script", recipe, space={"lr": 0.1}, steps=2, directory=sys.argv[1])
    hardware = shoal.Hardware.virtual(devices=1, memory="32MiB")
"""
RUN = "\nreport = study.run(hardware=hardware)\nprint('state:', report.trials[0].state)\n"


def run_script(*arguments):
    answer = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@pytest.mark.sample(1)
@pytest.mark.parametrize("guarded", [False, True], ids=["unguarded", "guarded"])
def test_a_recipe_defined_in_a_script_works_with_and_without_a_main_guard(guarded, tmp_path):
    run = "\nif __name__ == '__main__':" + textwrap.indent(RUN, "    ") if guarded else RUN
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT) + run)
    assert "state: FINISHED" in run_script(str(script), str(tmp_path / "runs"))


def test_a_recipe_defined_in_a_notebook_works(tmp_path):
    """A notebook's cells are executed in ``__main__``, which has no file."""
    cells = textwrap.dedent(SCRIPT).replace("sys.argv[1]", repr(str(tmp_path / "runs"))) + RUN
    kernel = tmp_path / "kernel.py"
    kernel.write_text(f"del __file__\nexec(compile({cells!r}, '<cell 1>', 'exec'))")
    told = commands.run(kernel, cwd=tmp_path)
    assert "state: FINISHED" in told.stdout, told.stderr
