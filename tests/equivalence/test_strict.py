"""``exact="strict"``: deterministic kernels alone, and nothing that trains to other bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.core.event import StudyChanged
from shoal.kernels.kernelchoice import EXACT, STRICT, KernelChoice
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.verify import verify_trials

HARDWARE = shoal.Hardware.virtual(devices=2, memory="12MiB")


class Asserts(nn.Sequential):
    def forward(self, x):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        return super().forward(x)


class HasNone(nn.Sequential):
    """``put_`` that overwrites has no deterministic kernel, on a CPU neither."""

    def forward(self, x):
        empty = torch.zeros_like(x)
        return super().forward(empty.put_(torch.arange(x.numel()), x.detach().reshape(-1)))


def layers(width):
    return [nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 5)]


def data(hp):
    generator = torch.Generator().manual_seed(3)
    batches = [(torch.randn(8, 16, generator=generator), torch.arange(8) % 5) for _ in range(4)]
    return batches, batches[:2]


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def recipe(kind=Asserts, **options):
    model = lambda hp: kind(*layers(hp["width"]))  # noqa: E731
    return shoal.Recipe(model=model, data=data, loss=loss, **options)


@pytest.fixture
def make(tmp_path):
    def made(of=None, **options):
        space = shoal.grid(lr=[0.1, 0.01], width=[64])
        settings = {"space": space, "epochs": 3, "directory": tmp_path, **options}
        return shoal.Study("it", of or recipe(), **settings)

    return made


def keys(study):
    return [row.numerics for row in Snapshot.of(read_outline(study.directory)).trials]


@pytest.mark.parametrize("technique", ["captured", "spilled"])
def test_trials_train_with_deterministic_kernels_and_are_verified_with_them(
    technique, make, warm_workers
):
    before = KernelChoice.here()
    study = make()
    report = study.run(
        hardware=HARDWARE, exact="strict", technique=technique, workers=warm_workers
    )
    assert not any(trial.error for trial in report.trials)
    assert {key[EXACT] for key in keys(study)} == {STRICT}
    assert KernelChoice.here() == before
    rows = Snapshot.of(read_outline(study.directory)).trials
    verdicts = list(verify_trials(study.directory, rows, recipe=study.recipe))
    assert [(v.equal, v.notes) for v in verdicts] == [(True, ())] * 2


def test_trials_that_began_so_go_on_so(make, warm_workers):
    how = {"hardware": HARDWARE, "workers": warm_workers}
    make(time_limit=0.02).run(exact="strict", **how)
    study = make()
    report = study.run(**how)
    assert {trial.state.name for trial in report.trials} == {"FINISHED"}
    assert {key[EXACT] for key in keys(study)} == {STRICT}


@pytest.mark.full
def test_what_began_otherwise_does_not_become_strict_in_silence(make, warm_workers):
    how = {"hardware": HARDWARE, "workers": warm_workers}
    loose = {"epochs": None, "steps": 600, "checkpoint_every": 0}
    space = {"space": {"lr": 0.1, "width": 64}}
    make(recipe(nn.Sequential), time_limit=0.3, **loose, **space).run(**how)
    study = make(recipe(nn.Sequential), **loose, **space)
    assert study.report().trials[0].state.name != "FINISHED"
    with pytest.raises(shoal.SpecError, match=r"exact of trial 0 was 'no' and is 'strict'"):
        study.run(exact="strict", **how)
    study.run(exact="strict", accept_numerics=True, **how)
    changes = [e for e in read_outline(study.directory) if isinstance(e, StudyChanged)]
    assert "exact of trial 0 was 'no' and is 'strict'" in str(changes)


def test_a_process_that_only_warns_is_not_strict(make, warm_workers):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        study = make(recipe(HasNone))
        report = study.run(hardware=HARDWARE, workers=warm_workers)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not any(trial.error for trial in report.trials)
    assert not any(EXACT in key for key in keys(study))


def test_trials_that_come_later_are_in_no_array_either(make, warm_workers):
    how = {"hardware": HARDWARE, "workers": warm_workers}
    make().run(exact="strict", **how)
    more = make(space=shoal.grid(lr=[0.1, 0.01, 0.03, 0.02], width=[64]))
    with pytest.raises(shoal.PlanError, match="trial 2 would train in an array"):
        more.run(fuse=2, **how)


def test_a_plan_that_is_strict_is_followed_so(make, warm_workers):
    how = {"hardware": HARDWARE, "workers": warm_workers}
    plan = make().plan(exact="strict", **how)
    study = make()
    study.run(plan=plan, **how)
    assert {key[EXACT] for key in keys(study)} == {STRICT}


def test_what_has_no_deterministic_kernel_is_refused_by_name(make, warm_workers):
    how = {"hardware": HARDWARE, "workers": warm_workers}
    with pytest.raises(shoal.TrialError, match=r"put_.* does not have a deterministic impl"):
        make(recipe(HasNone)).run(exact="strict", **how)
    report = make(recipe(HasNone)).run(**how)
    assert not any(trial.error for trial in report.trials)


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"fuse": 2}, "fuse=2: an array's kernels round in other ways"),
        ({"fuse": "auto"}, "fuse='auto'"),
        ({"technique": "data_parallel"}, "a data-parallel technique: it adds up in another order"),
        ({"technique": shoal.Pipelined(schedule="2bw")}, "weights that are one step old"),
    ],
)
def test_what_trains_to_other_bits_is_refused(wish, words, make):
    with pytest.raises(shoal.PlanError, match=words):
        make().run(hardware=HARDWARE, exact="strict", **wish)
    with pytest.raises(shoal.PlanError, match=words):
        make().plan(hardware=HARDWARE, exact="strict", **wish)


def test_another_word_is_refused(make):
    with pytest.raises(shoal.SpecError, match="exact is 'auto' or 'strict', got 'very'"):
        make().run(hardware=HARDWARE, exact="very")


def test_fuse_off_and_a_width_of_one_are_no_arrays(make, warm_workers):
    for fuse in (False, 1):
        how = {"hardware": HARDWARE, "workers": warm_workers, "fuse": fuse}
        assert make().plan(exact="strict", **how).jobs
