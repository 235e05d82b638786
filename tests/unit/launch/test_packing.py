"""A recipe on its way to a worker."""

from __future__ import annotations

import contextvars
import functools
import importlib
import os
import pickle
import random
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType

import cloudpickle
import numpy as np
import pytest
import torch

import shoal
from shoal.launch import packing
from shoal.launch.packing import pack_recipe
from shoal.launch.replaced import find_changes
from shoal.source import load_study


def test_a_function_with_a_cache_travels_as_it_is_and_nothing_that_is_cached() -> None:
    @functools.lru_cache(maxsize=3, typed=True)
    def fibonacci(number: int) -> int:
        return number if number < 2 else fibonacci(number - 1) + fibonacci(number - 2)

    assert fibonacci(9) == 34
    there = cloudpickle.loads(packing._dumps(fibonacci))
    assert there is not fibonacci
    assert there.cache_info().currsize == 0
    assert there.cache_parameters() == {"maxsize": 3, "typed": True}
    assert there(9) == 34
    assert there.cache_info().misses == 10  # it calls itself, not the function within
    assert cloudpickle.loads(packing._dumps(of_this_module)) is of_this_module


def test_what_the_standard_library_makes_of_functions_and_classes_travels() -> None:
    class Settings:
        @functools.cached_property  # Python 3.11 has a lock in it
        def gain(self) -> float:
            return 2.0

    @functools.singledispatch
    def kind(value: object) -> str:
        return "object"

    kind.register(int, lambda value: "int")
    assert kind(1) == "int"  # which fills a cache of weak references
    scale, unset = contextvars.ContextVar("scale", default=1.0), contextvars.ContextVar("unset")
    scale.set(3.0)
    packed = packing._dumps((Settings(), kind, scale, unset))
    settings, there, variable, empty = contextvars.Context().run(_read, packed)
    assert (settings.gain, vars(settings)) == (2.0, {"gain": 2.0})
    assert (there(True), there("")) == ("int", "object")
    assert variable == 3.0
    assert empty is None


def test_methods_of_the_processes_generators_are_those_of_the_process_that_reads() -> None:
    sent = (
        random.random,
        random.choice,
        np.random.rand,
        torch.default_generator,
        random.Random(3),
    )
    draw, choose, rand, generator, own = cloudpickle.loads(packing._dumps(sent))
    assert draw.__self__ is choose.__self__ is random.random.__self__
    assert rand.__self__ is np.random.rand.__self__
    assert generator is torch.default_generator
    assert own.random() == random.Random(3).random()


def _read(packed: bytes) -> tuple[object, ...]:
    *others, scale, unset = cloudpickle.loads(packed)
    return *others, scale.get(), unset.get(None)


def test_what_code_makes_the_names_of_travels() -> None:
    """As ``globals()[hp["model"]]`` does; what cannot is not asked for, maybe."""
    file = {"__name__": "__main__", "nn": torch.nn, "lock": threading.Lock(), "WIDTH": 3}
    text = """
class Net(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, 1)

def held(lock=lock): ...
def wide(hp): return globals()[hp["model"]](), "held" in globals(), "nn" in globals()
def spelled(hp): return eval(hp["model"]), eval("WIDTH")
def named(hp): return Net.eval(Net()), "WIDTH" in {**vars(hp)}
"""
    many = "".join(f"class M{i}:\n    def made(self): return eval('M{i}')\n" for i in range(60))
    exec(text + many, file)
    packed = {name: packing._dumps(file[name]) for name in ("wide", "spelled", "named")}
    there = {name: cloudpickle.loads(one) for name, one in packed.items()}
    made, *others = there["wide"]({"model": "Net"})
    assert (type(made).__name__, made.in_features, others) == ("Net", 3, [False, True])
    assert there["spelled"]({"model": "nn.Tanh()"})[1] == 3
    assert {f"M{i}" for i in range(60)} <= there["wide"].__globals__.keys()
    assert "spelled" not in there["named"].__globals__


def test_a_class_that_a_decorator_took_the_place_of_has_its_modules_globals(monkeypatch, tmp_path):
    """The module's own functions are there by names that no code has, too."""
    (tmp_path / "replacing.py").write_text(
        "def replaced(kind):\n"
        "    class Replaced(kind):\n"
        "        def made(self):\n"
        "            return super().made()\n"
        "        def helped(self):\n"
        "            return helper()\n"
        "    return Replaced\n\n"
        "def helper():\n"
        "    return 1\n\n"
        "def returning(value):\n"
        "    return lambda: value\n\n"
        "GAIN = [1.0]\n"
        "@replaced\n"
        "class Inner:\n"
        "    def made(self):\n"
        "        return globals()['GAI' + 'N']\n\n"
        "class Base:\n"
        "    def kept(self):\n"
        "        return 5\n\n"
        "@replaced\n"
        "class Outer(Base):\n"
        "    def kept(self):\n"
        "        return super().kept()\n"
        "    def made(self):\n"
        "        return globals()['In' + 'ner']()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    replacing = importlib.import_module("replacing")
    replacing.helper = replacing.returning(7)  # no name finds it
    outer = packing._dumps(replacing.Outer)
    monkeypatch.delitem(sys.modules, "replacing")
    (tmp_path / "outer").write_bytes(outer)
    code = (
        "import cloudpickle, replacing\n"
        "outer = cloudpickle.load(open('outer', 'rb'))\n"
        "assert outer is not replacing.Outer\n"
        "assert outer().made().made() is replacing.GAIN\n"
        "assert (outer().kept(), outer().helped(), replacing.helper()) == (5, 7, 7)\n"
    )
    homes = [str(tmp_path), str(Path(shoal.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(homes)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)


def test_what_cannot_travel_is_named() -> None:
    lock = threading.local()

    def helper() -> object:
        return lock

    def loss(output: object, batch: object) -> object:
        return helper()

    words = r"cannot pickle.*'lock', which .*helper closes over, is an object that lives in this"
    with pytest.raises(shoal.SpecError, match=words):
        pack_recipe(shoal.Recipe(model=len, data=len, loss=loss))
    with pytest.raises(shoal.SpecError, match="It refers to an object that lives"):
        pack_recipe(shoal.Recipe(model=len, data=len, loss=functools.partial(max, lock)))


def test_what_cannot_travel_is_said_in_sentences() -> None:
    chance = random.SystemRandom()

    def loss(output: object, batch: object) -> float:
        return chance.random()

    words = r"source does not have state\. 'chance', which .*loss closes over, is an"
    with pytest.raises(shoal.SpecError, match=words):
        pack_recipe(shoal.Recipe(model=len, data=len, loss=loss))


def test_what_cannot_travel_is_named_within_a_class_whose_methods_lead_to_it() -> None:
    lock = threading.Lock()

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with lock:
                return x

    with pytest.raises(shoal.SpecError, match=r"'lock', which .*forward closes over, is an obj"):
        pack_recipe(shoal.Recipe(model=lambda hp: Net(), data=len, loss=max))


def test_what_a_file_put_elsewhere_and_cannot_travel_is_named(monkeypatch) -> None:
    mine = eval("lambda x: lock", {"__name__": "__main__", "lock": threading.local()})
    monkeypatch.setattr(torch.nn.functional, "gelu", mine)
    words = r"torch\.nn\.functional\.gelu is what your file put there, and that cannot be sent"
    recipe = shoal.Recipe(model=len, data=len, loss=lambda output, batch: output)
    with pytest.raises(shoal.SpecError, match=words):
        pack_recipe(recipe, find_changes())


@torch.library.custom_op("shoal_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_an_operator_travels_by_the_name_that_its_module_has_for_it(monkeypatch) -> None:
    assert cloudpickle.loads(packing._dumps(twice))(torch.ones(1)) == 2
    monkeypatch.setattr(twice._init_fn, "__module__", "__main__")
    with pytest.raises(TypeError, match="the operator shoal_tests::twice is not at the top level"):
        packing._dumps(twice)


@functools.lru_cache
def of_this_module() -> None: ...


def test_modules_of_a_class_of_their_own_travel_by_name(monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)  # and back afterwards

    def seed_everything() -> object:
        torch.backends.cudnn.deterministic = True
        return torch.backends, torch.backends.mkldnn, torch.ops

    packed = packing._dumps((seed_everything, torch.backends.cudnn, torch.utils.deterministic))
    assert len(packed) < 2000
    there, cudnn, deterministic = cloudpickle.loads(packed)
    assert there() == (torch.backends, torch.backends.mkldnn, torch.ops)
    assert cudnn is torch.backends.cudnn
    assert deterministic is torch.utils.deterministic


def test_a_module_that_is_made_on_the_way_does_not_travel_by_a_name_of_another() -> None:
    class Own(ModuleType): ...

    with pytest.raises(TypeError, match="cannot pickle"):
        packing._dumps(Own("math"))


def test_code_keeps_the_name_of_its_file_and_tracebacks_show_its_lines(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import shoal\n"
        "def model(hp):\n"
        "    raise ValueError('no such width')  # as the user wrote it\n"
        "recipe = shoal.Recipe(model=model, data=lambda hp: ([], None))\n"
        "study = shoal.Study('mine', recipe, space={'lr': 0.1}, trials=1, steps=1)\n"
    )
    study: shoal.Study = load_study(str(file)).study

    recipe: shoal.Recipe = pickle.loads(pack_recipe(study.recipe))

    try:
        recipe.model({})
    except ValueError:
        told = traceback.format_exc()
    assert f'File "{file}", line 3, in model' in told
    assert "# as the user wrote it" in told


def test_functions_that_close_over_one_variable_do_so_in_a_worker():
    """Each had a cell for itself: what one assigned, the others never saw."""
    count = 0

    def model(hp):
        return loss if later else None

    def loss(output, batch):
        nonlocal count
        count += 1
        return model

    def metric(output, batch):
        return count

    recipe = shoal.Recipe(model=model, data=model, loss=loss, metrics={"count": metric})
    made: shoal.Recipe = pickle.loads(pack_recipe(recipe))
    later = True  # a cell that was empty
    assert made.loss(None, None) is made.model
    assert made.metrics["count"](None, None) == 1
    with pytest.raises(NameError, match="later"):
        made.model({})
    assert model({}) is loss
    assert later


class InItself:
    """A pickle of one is read by asking it for its hash before it has a name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.peers = {self}

    def __hash__(self) -> int:
        return hash(self.name)


def test_a_value_that_cannot_be_read_again_is_not_sent_and_named_and_all_others_are(
    monkeypatch, look_at_modules
):
    one, package = ModuleType("one_module"), ModuleType("package")
    one.width, one.node, one.nodes = 3, (bad := InItself("a")), [bad]
    package.cfg, package.node = {"a": 1}, InItself("b")
    named = [(package, "cfg"), (package, "node")]
    monkeypatch.setattr(packing, "named_objects", lambda: iter(named))
    with pytest.warns(UserWarning, match="holds .*cannot be sent.* no attribute 'name'") as told:
        state = packing._state_of([one])
    assert [str(warned.message).partition(" cannot")[0] for warned in told] == [
        "what the module one_module holds as 'node'",
        "what the module one_module holds as 'nodes'",
        "what the module package holds as 'node'",
    ]
    values, _ = packing.read_state(state.packed)
    assert values == {"one_module": {"width": 3}, "package": {"cfg": {"a": 1}}}


def test_a_study_packs_its_recipe_once(run_study, monkeypatch):
    packed = []
    monkeypatch.setattr(
        "shoal.launch.plan.pack_recipe",
        lambda recipe, changes: packed.append(recipe) or pack_recipe(recipe, changes),
    )
    recipe = shoal.Recipe(
        model=lambda hp: torch.nn.Linear(1, 1),
        data=lambda hp: ([(torch.ones(1, 1),)], None),
        loss=lambda output, batch: output.sum(),
    )
    run_study(recipe, {"lr": 0.1}, trials=1, steps=1)
    assert packed == [recipe]
