"""What a file sets in other modules of the user's, and what these drew, is there in workers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import shoal
from shoal.observe.reader import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.source import load_study

pytestmark = pytest.mark.usefixtures("look_at_modules")

CONFIG = """
import threading
from types import SimpleNamespace
import torch

class Node(dict):
    def __getattr__(self, name):
        return self[name]
    def __setattr__(self, name, value):
        raise TypeError("a node is changed by merge")
    def merge(self, **values):
        dict.update(self, values)

class Defaults:
    bias = True
    shapes = [4]

cfg = SimpleNamespace(width=4, inner=Node(gain=1.0, kinds=["relu"]), lock=threading.Lock())
SCALE, TABLE = 1.0, {"width": 4}
PROJECTION, FROZEN = torch.randn(4, 4), torch.nn.Linear(4, 4)  # as they were drawn there
"""
NET = """
import torch
from torch import nn
import config
from config import TABLE, cfg

inner = cfg.inner

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, cfg.width, bias=config.Defaults.bias)
        self.second = nn.Linear(cfg.width, TABLE["width"])
        self.last = nn.Linear(TABLE["width"], config.Defaults.shapes[0])

    def forward(self, x):
        with torch.no_grad(), cfg.lock:
            x = config.FROZEN(x @ config.PROJECTION)
        for kind in inner.kinds:
            x = getattr(torch, kind)(x)
        x = self.last(self.second(self.first(x)).tanh())
        return config.SCALE * inner.gain * x.mean(1, keepdim=True)
"""
SPECIES = "NETS = {}\n"
NETS = """
import species
from net import Net
species.NETS["plain"] = Net
"""
HEAD = """
import torch
import shoal
import config
from config import Defaults, cfg
{imports}
cfg.inner.merge(gain=3.0, kinds=["tanh", "sigmoid"])
config.SCALE, config.TABLE["width"] = 0.5, 5
Defaults.bias, Defaults.shapes[:] = False, [3]

def model(hp):
    cfg.width = hp["width"]
    {model}

def data(hp):
    draws = torch.Generator().manual_seed(1)
    return [(torch.rand(5, 4, generator=draws), torch.rand(5, 1, generator=draws))] * 3, None

def loss(output, batch):
    return config.SCALE * (output - batch[1]).square().mean()

recipe = shoal.Recipe(model=model, data=data, loss=loss)
study = shoal.Study("modules", recipe, space=shoal.grid(width=[3, 6], lr=[0.1]), steps=3)
"""
WAYS = {
    "at the top": ("from net import Net", "return Net()"),
    "within": ("", "from net import Net; return Net()"),
    "by registration": ("import nets\nimport species", 'return species.NETS["plain"]()'),
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a main file beside modules of the user's, and give its place."""
    monkeypatch.syspath_prepend(tmp_path)
    names = {"config": CONFIG, "net": NET, "species": SPECIES, "nets": NETS}
    for name, text in names.items():
        (tmp_path / f"{name}.py").write_text(text)

    def write(text):
        (tmp_path / "main.py").write_text(text)
        return str(tmp_path / "main.py")

    yield write
    for name in (*names, "given", "gears"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("way", WAYS)
def test_trials_train_with_what_the_file_set_elsewhere(way, write, run_study, assert_alone):
    imports, model = WAYS[way]
    study = load_study(write(HEAD.format(imports=imports, model=model))).study
    report = run_study(study.recipe, study.space, steps=3)
    widths = [trial.load().first.weight.shape[0] for trial in report.trials]
    assert sorted(widths) == [3, 6]
    assert {trial.load().second.weight.shape[0] for trial in report.trials} == {5}
    assert_alone(report, report.trials, study.recipe, steps=3)


def test_what_changes_between_two_studies_is_the_second_ones(write, run_study, assert_alone):
    imports, model = WAYS["at the top"]
    recipe = load_study(write(HEAD.format(imports=imports, model=model))).study.recipe
    for scale in (0.5, 4.0):
        sys.modules["config"].SCALE = scale
        report = run_study(recipe, shoal.grid(width=[3], lr=[0.1]), steps=2)
        assert_alone(report, report.trials, recipe, steps=2)


PARTS = """
import threading
from types import SimpleNamespace
import torch

cfg = SimpleNamespace(act=torch.relu, gain=1.0, lock=threading.Lock())
STEPS, SCALE, ROW = [], None, SimpleNamespace(gain=2.0)

def scale(x, row=ROW):
    return x * row.gain
"""
OF_MAIN = """
import torch
import shoal
import gears
from gears import cfg

class Scale:
    def __init__(self, by):
        self.by = by
    def __call__(self, x):
        return self.by * x

def act(x):
    return x.sin()

cfg.act, cfg.gain, gears.SCALE, gears.ROW = act, 3.0, Scale(2.0), None
gears.STEPS.append(act)

def model(hp):
    return torch.nn.Linear(4, 1)

def data(hp):
    draws = torch.Generator().manual_seed(1)
    return [(torch.rand(5, 4, generator=draws), torch.rand(5, 1, generator=draws))] * 3, None

def loss(output, batch):
    {loss}

recipe = shoal.Recipe(model=model, data=data, loss=loss)
study = shoal.Study("modules", recipe, space={{"lr": 0.1}}, steps=3)
"""
LOSSES = {
    "an attribute": "return cfg.gain * cfg.act(output - batch[1]).square().mean()",
    "in a list": "return gears.STEPS[0](output - batch[1]).square().mean()",
    "an object": "return gears.SCALE(output - batch[1]).square().mean()",
    "a default": "return gears.scale(output - batch[1]).square().mean()",
}


@pytest.mark.parametrize("where", LOSSES)
def test_what_the_main_file_defines_is_where_it_was_put(where, write, run_study, assert_alone):
    (Path(sys.path[0]) / "gears.py").write_text(PARTS)
    study = load_study(write(OF_MAIN.format(loss=LOSSES[where]))).study
    report = run_study(study.recipe, study.space, steps=3)
    assert_alone(report, report.trials, study.recipe, steps=3)


def test_modules_find_the_command_lines_arguments(write, run_study, tmp_path, monkeypatch):
    (tmp_path / "given.py").write_text("import sys\nWIDTH = int(sys.argv[1])\n")
    monkeypatch.setattr(sys, "argv", ["main.py", "7"])
    model = "import given; cfg.width = given.WIDTH; return Net()"
    study = load_study(write(HEAD.format(imports="from net import Net", model=model))).study
    report = run_study(study.recipe, shoal.grid(width=[3], lr=[0.1]), steps=1)
    assert report.trials[0].load().first.weight.shape[0] == 7


def test_of_what_cannot_travel_the_modules_own_is_not_blamed(write, run_study):
    """``cfg`` has a lock, and is the workers' own; the main file's is not."""
    text = HEAD.format(imports="import threading\nfrom net import Net", model="return Net()")
    text = text.replace(
        "def loss(output, batch):", "mine = threading.Lock()\ndef loss(output, batch):\n    mine"
    )
    study = load_study(write(text)).study
    with pytest.raises(shoal.SpecError, match=r"loss=.* The global 'mine'"):
        run_study(study.recipe, study.space, steps=1)


PACKAGE = """
class Cfg:
    width = 4

cfg = Cfg()

def width():
    return cfg.width
"""


@pytest.mark.parametrize("line", ["from package import cfg as own", "own = package.cfg"])
def test_an_object_of_a_package_that_the_file_names_is_the_packages(
    line, write, run_study, tmp_path, monkeypatch
):
    """Installed packages stay as they are, but for what the file may have changed of them."""
    home = tmp_path / "site-packages"
    home.mkdir()
    (home / "package.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(home)
    model = 'own.width = hp["width"]; cfg.width = package.width(); return Net()'
    study = load_study(
        write(HEAD.format(imports=f"from net import Net\nimport package\n{line}", model=model))
    ).study
    report = run_study(study.recipe, study.space, steps=2)
    sys.modules.pop("package")
    assert sorted(trial.load().first.weight.shape[0] for trial in report.trials) == [3, 6]


@pytest.mark.slow
def test_what_workers_cannot_be_given_is_told_once_for_each_value(write, run_study, tmp_path):
    """``session`` is made by and by in the study's process, and cannot travel."""
    (tmp_path / "gears.py").write_text("session, width = None, 4\n")
    text = HEAD.format(
        imports="import gears, threading\nfrom net import Net", model="gears; return Net()"
    )
    text += "from types import SimpleNamespace\n"
    text += "gears.session = SimpleNamespace(lock=threading.Lock(), width=3)\n"
    study = load_study(write(text)).study
    report = run_study(study.recipe, study.space, steps=1, devices=2)
    warnings = Snapshot.of(read_outline(report.directory)).warnings
    told = [words for words in warnings if "gears" in words]
    assert len(told) == 1
    assert "what the module gears holds as 'session' cannot be sent to workers" in told[0]


TABLE = """
import torch
DRAWN = torch.randn(600, 600)  # 1.4 MiB
SEEDED = torch.randn(600, 600, generator=torch.Generator().manual_seed(3))
def use(x, table):
    return x * (1 + 0.1 * table.mean())
"""
USES = {
    "seeded": "seeded.use(x, seeded.SEEDED)",
    "named": "named.use(x, DRAWN)",
    "drawn": "drawn.use(x, drawn.DRAWN)",
}


@pytest.mark.parametrize("use", USES)
def test_a_large_value_is_the_same_one_or_the_study_is_refused(
    use, write, run_study, assert_alone, tmp_path
):
    """Each worker drew another table, and its trials trained with that."""
    text = TABLE.replace("DRAWN = torch.randn", "DRAWN = torch.ones") if use == "seeded" else TABLE
    (tmp_path / f"{use}.py").write_text(text)
    text = HEAD.format(imports=f"import {use}\nfrom net import Net", model="return Net()")
    text = text.replace(
        "return config.SCALE * (output - batch[1])",
        f"x = config.SCALE * (output - batch[1])\n    return {USES[use]}",
    ).replace("import named\n", "import named\nfrom named import DRAWN\n")
    study = load_study(write(text)).study
    if use == "drawn":
        words = r"drawn\.DRAWN: a float32 tensor of 600 x 600, 1.4 MiB, and workers have other con"
        with pytest.raises(shoal.SpecError, match=words):
            run_study(study.recipe, study.space, steps=2)
    else:
        report = run_study(study.recipe, study.space, steps=2)
        assert_alone(report, report.trials, study.recipe, steps=2)
    sys.modules.pop(use)


def test_what_loading_a_trial_sets_is_no_change_of_the_recipe(write, warm_workers, tmp_path):
    """``model(hp)`` sets ``cfg.width``, and the next trial's recipe is looked at after that."""
    imports, model = WAYS["at the top"]
    place = write(HEAD.format(imports=imports, model=model))
    study = (loaded := load_study(place)).study
    made = shoal.Study("loaded", study.recipe, space=study.space, steps=1, directory=tmp_path)
    made.source = loaded.source
    made.run(
        hardware=shoal.Hardware.virtual(devices=1, memory="64MiB"),
        progress=False,
        timeline=False,
        workers=warm_workers,
    )
    trials = shoal.open(tmp_path / "loaded").trials
    for trial in (*trials, *trials):
        assert trial.load().first.weight.shape[0] == trial.hp["width"]
    Path(place).write_text(Path(place).read_text().replace("square()", "abs()"))
    with pytest.warns(UserWarning, match="trial 0: the recipe has changed"):
        trials[0].load()
