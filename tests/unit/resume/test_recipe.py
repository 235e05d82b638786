"""A recipe's record: what shows in it, and what does not."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.resume import RecipeRecord, describe_recipe
from shoal.resume.recipe import record_of
from shoal.resume.walk import MAX_SOURCES
from shoal.source import MODULE_NAME

Describe = Callable[..., RecipeRecord]
HEADER = """
from dataclasses import make_dataclass

def Recipe(**fields):
    return make_dataclass("Recipe", fields)(**fields)

"""

PLAIN = """
WIDTH = 64

def block(width):
    return [width] * 2

class Net:
    depth = 3

    def __init__(self, hp):
        self.blocks = block(WIDTH)

def build(hp):
    return Net(hp)

recipe = Recipe(model=build, accumulate=2)
"""


def test_a_recipe_is_its_fields_and_all_that_they_refer_to(describe: Describe) -> None:
    record = describe(PLAIN)

    assert record.fields == {"model": "build", "accumulate": "2"}
    assert record.sources == {
        "build": "def build(hp):\n    return Net(hp)",
        "Net": "class Net:\n    depth = 3\n\n    def __init__(self, hp):\n"
        "        self.blocks = block(WIDTH)",
        "block": "def block(width):\n    return [width] * 2",
        "WIDTH": "WIDTH = 64",
    }


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    return Net(hp)", "    # the model\n\n    return Net(hp)  # of one trial"),
        ("def build(hp):", 'def build(hp):\n    """A model."""'),
        ("class Net:", 'class Net:\n    """A model."""\n'),
        ("[width] * 2", "[width]*2"),
        ("WIDTH = 64", "UNUSED = 7\n\n\nWIDTH = 64"),
        ("recipe =", "def unused():\n    return 1\n\nrecipe ="),
    ],
)
def test_what_changes_nothing_is_no_change(describe: Describe, old: str, new: str) -> None:
    assert old in PLAIN

    assert describe(PLAIN).is_same(describe(PLAIN.replace(old, new)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Net(hp)", "Net(dict(hp))"),
        ("[width] * 2", "[width] * 3"),
        ("WIDTH = 64", "WIDTH = 65"),
        ("WIDTH = 64", "WIDTH = 64.0"),
        ("depth = 3", "depth = 4"),
        ("accumulate=2", "accumulate=3"),
        ("model=build", "model=Net"),
        ("def build(hp)", "def build(hp, width=WIDTH)"),
    ],
)
def test_what_changes_the_training_is_a_change(describe: Describe, old: str, new: str) -> None:
    assert old in PLAIN

    assert not describe(PLAIN).is_same(describe(PLAIN.replace(old, new)))


def test_a_file_is_the_same_recipe_however_it_was_imported(describe: Describe) -> None:
    records = [describe(PLAIN, module=name) for name in ("__main__", MODULE_NAME, "sweep")]

    assert records[0] == records[1] == records[2]


def test_a_file_that_was_renamed_is_the_same_recipe(describe: Describe) -> None:
    assert describe(PLAIN) == describe(PLAIN, file="renamed.py")


# ---------------------------------------------------------------- how far it is followed


def test_neighbouring_files_are_followed(describe: Describe) -> None:
    text = "import net\nfrom parts import head\n\ndef build(hp):\n    return net.body(), head()\n"
    text += "\nrecipe = Recipe(model=build)\n"

    record = describe(
        text,
        parts="SIZE = 3\n\ndef head():\n    return 1",
        net="import parts\n\ndef body():\n    return parts.SIZE",
    )

    assert record.sources == {
        "build": "def build(hp):\n    return (net.body(), head())",
        "net": "net = module net",
        "net.body": "def body():\n    return parts.SIZE",
        "net.parts": "parts = module parts",
        "parts.SIZE": "SIZE = 3",
        "parts.head": "def head():\n    return 1",
    }


def test_of_a_library_the_name_is_recorded_and_in_a_field_the_version(describe: Describe) -> None:
    text = "import functools\nfrom rich.text import Text\n\ndef build(hp):\n"
    text += "    return Text(), functools.reduce\n\nrecipe = Recipe(model=build, loss=Text)\n"

    record = describe(text)

    assert record.fields["loss"].startswith("rich.text.Text of rich 1")
    assert record.sources["Text"] == "Text = rich.text.Text"
    assert record.sources["functools"] == "functools = module functools"


def test_shoal_itself_is_a_library(describe: Describe) -> None:
    text = "from shoal.core.units import format_bytes\nrecipe = Recipe(loss=format_bytes)\n"

    record = describe(text)

    assert record.fields["loss"] == f"shoal.core.units.format_bytes of shoal {shoal.__version__}"
    assert record.sources == {}


def test_what_users_import_of_shoal_has_the_name_that_older_records_have(
    describe: Describe,
) -> None:
    record = describe("from shoal import WholeSet\nrecipe = Recipe(loss=WholeSet)\n")

    assert record.fields["loss"].startswith("shoal.wholeset.WholeSet of shoal")


def test_definitions_that_name_each_other_are_each_there_once(describe: Describe) -> None:
    text = "def even(n):\n    return n == 0 or odd(n - 1)\n\ndef odd(n):\n    return not even(n)\n"
    text += "\nrecipe = Recipe(model=even, loss=odd)\n"

    assert list(describe(text).sources) == ["even", "odd"]


def test_a_web_of_definitions_ends_somewhere(describe: Describe) -> None:
    count = MAX_SOURCES + 9
    lines = [f"def f{n}():\n    return f{n + 1}()" for n in range(count)]

    record = describe("\n".join([*lines, f"def f{count}(): pass", "recipe = Recipe(model=f0)"]))

    assert record.sources["..."] == f"more than {MAX_SOURCES} definitions"


def test_a_local_name_is_no_global_one(describe: Describe) -> None:
    text = "def loss():\n    return 1\n\ndef build(hp):\n    loss = 2\n    return loss\n"

    assert list(describe(text + "\nrecipe = Recipe(model=build)\n").sources) == ["build"]


def test_what_code_may_come_to_by_a_name_that_it_makes_is_followed(describe: Describe) -> None:
    text = "def one(): return 1\n\ndef other(): return 2\n\ndef build(hp): return CALL\n"
    recipe = "\nrecipe = Recipe(model=build)\n"

    for call in ("globals()[hp['model']]()", "eval(hp['model'])()"):
        assert {*describe(text.replace("CALL", call) + recipe).sources} >= {"one", "other"}
    assert list(describe(text.replace("CALL", "hp.eval()") + recipe).sources) == ["build"]
    own = "def eval(name): return len\n\n" + text.replace("CALL", "eval('x')(hp)") + recipe
    assert {*describe(own).sources} == {"build", "eval"}


def test_base_classes_decorators_and_defaults_are_followed(describe: Describe) -> None:
    text = """
import functools

def noisy(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper

class Base:
    @staticmethod
    def size(): return SIZE

class Net(Base):
    @property
    def width(self): return helper()

SIZE = 3
def helper(): return 1
DEFAULT = 7

@noisy
def build(hp, n=DEFAULT):
    return Net()

recipe = Recipe(model=build)
"""
    record = describe(text)

    assert {"build", "noisy", "Net", "Base", "SIZE", "helper", "DEFAULT"} <= set(record.sources)


def test_what_a_function_has_from_the_one_around_it_is_recorded(describe: Describe) -> None:
    text = "def make(width):\n    def build(hp):\n        return width\n    return build\n\n"

    narrow = describe(text + "recipe = Recipe(model=make(64))\n")
    wide = describe(text + "recipe = Recipe(model=make(128))\n")

    name = "make.<locals>.build"
    assert narrow.sources[f"{name}: width"] == "width = 64"
    assert wide.sources[f"{name}: width"] == "width = 128"
    assert narrow.sources[name] == wide.sources[name]


def test_a_function_that_writes_to_the_one_around_it_is_recorded(describe: Describe) -> None:
    text = """
SCALE = 3

def make():
    calls = 0

    def build(hp):
        nonlocal calls
        calls += SCALE
        return calls

    return build

recipe = Recipe(model=make())
"""
    record = describe(text)

    name = "make.<locals>.build"
    assert "nonlocal calls" in record.sources[name]
    assert record.sources[f"{name}: calls"] == "calls = 0"
    assert record.sources["SCALE"] == "SCALE = 3"


def test_two_definitions_of_one_name_are_two(describe: Describe) -> None:
    text = "def make(n):\n    def build(hp):\n        return n\n    return build\n\n"

    record = describe(text + "recipe = Recipe(model=make(1), data=make(2))\n")

    assert record.fields == {
        "model": "make.<locals>.build",
        "data": "make.<locals>.build (2)",
    }
    assert record.sources["make.<locals>.build (2): n"] == "n = 2"


# ---------------------------------------------------------------- lambdas, partials, objects


def test_a_lambda_is_its_text_wherever_it_stands(describe: Describe) -> None:
    text = "recipe = Recipe(model=lambda hp: (lambda x: x + 1), data=(lambda hp: hp['n']),\n"
    text += "    loss=lambda o, b: o - b, inner=(lambda a: lambda b: b)(3))\n"

    record = describe(text)

    assert [record.sources[record.fields[name]] for name in record.fields] == [
        "lambda hp: lambda x: x + 1",
        "lambda hp: hp['n']",
        "lambda o, b: o - b",
        "lambda b: b",
    ]


def test_a_partial_is_its_function_and_arguments(describe: Describe) -> None:
    text = "from functools import partial\n\ndef build(hp, depth, width):\n    return SIZE\n\n"
    text += "SIZE = 1\nrecipe = Recipe(model=partial(build, depth=2, width=None))\n"

    record = describe(text)

    assert record.fields["model"] == "partial(build, depth=2, width=None)"
    assert list(record.sources) == ["build", "SIZE"]


def test_an_object_that_is_called_is_its_class_and_attributes(describe: Describe) -> None:
    text = "class Loss:\n    def __init__(self, a):\n        self.a = a\n"
    text += "    def __call__(self, o, b):\n        return self.a\n    def other(self): pass\n\n"
    text += "recipe = Recipe(loss=Loss(0.5), model=Loss([1]).other)\n"

    record = describe(text)

    assert record.fields == {"loss": "Loss object(a=0.5)", "model": "Loss object(a=[1]).other"}
    assert list(record.sources) == ["Loss"]


def test_a_librarys_object_is_known_by_what_can_be_set(describe: Describe) -> None:
    text = "from torch import nn\n\n"

    sharp = describe(text + "recipe = Recipe(loss=nn.CrossEntropyLoss())\n").fields["loss"]
    smooth = describe(text + "recipe = Recipe(loss=nn.CrossEntropyLoss(label_smoothing=0.1))\n")

    assert sharp.startswith("torch.nn.modules.loss.CrossEntropyLoss of torch ")
    assert "+" not in sharp  # no build: it is in the numerics key
    assert "label_smoothing=0.0" in sharp
    assert "label_smoothing=0.1" in smooth.fields["loss"]


def test_metrics_are_described_one_by_one(describe: Describe) -> None:
    record = describe("def acc(o, b): pass\n\nrecipe = Recipe(metrics={'accuracy': acc})\n")

    assert record.fields["metrics"] == "{'accuracy': acc}"
    assert list(record.sources) == ["acc"]


# ---------------------------------------------------------------- constants


def test_a_constant_that_can_change_is_what_made_it(describe: Describe) -> None:
    text = "N = 2\nCACHE = {}\nSIZES = [N, N]\nSIZES[0] = 5\n\ndef build(hp):\n"
    text += "    return CACHE, SIZES\n\nCACHE['used'] = object()\nrecipe = Recipe(model=build)\n"

    assert describe(text).sources == {
        "build": "def build(hp):\n    return (CACHE, SIZES)",
        "CACHE": "CACHE = {}\nCACHE['used'] = object()",
        "SIZES": "SIZES = [N, N]\nSIZES[0] = 5",
        "N": "N = 2",
    }


def test_of_the_command_line_what_code_reads_is_recorded(
    describe: Describe, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "from argparse import ArgumentParser\nparser = ArgumentParser()\n"
        "parser.add_argument('--width', type=int, default=8)\n"
        "parser.add_argument('--out', default='logs')\nargs = parser.parse_args()\n"
        "def build(hp): return args.width\nrecipe = Recipe(model=build, data=dict)\n"
    )

    def given(*words: str, text: str = text) -> RecipeRecord:
        monkeypatch.setattr(sys, "argv", ["sweep.py", *words])
        return describe(text)

    assert given().is_same(given("--out", "elsewhere"))
    assert given("--width", "5").sources["args.width"] == "args.width = 5"
    whole = text.replace("return args.width", "return Net(args)")
    assert not given(text=whole).is_same(given("--out", "elsewhere", text=whole))
    used = f"{whole}print(args.out, args.width)\ndef Net(cfg): return cfg.width\n"
    assert given(text=used).is_same(given("--out", "elsewhere", text=used))
    assert not given(text=used).is_same(given("--width", "5", text=used))


def test_a_constant_from_outside_is_its_value(
    describe: Describe, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import os\nWIDTH = int(os.environ['WIDTH'])\n\ndef build(hp):\n    return WIDTH\n\n"
    text += "recipe = Recipe(model=build)\n"

    records = []
    for width in ("64", "128"):
        monkeypatch.setenv("WIDTH", width)
        records.append(describe(text))

    assert [record.sources["WIDTH"] for record in records] == ["WIDTH = 64", "WIDTH = 128"]


def test_a_secret_is_recorded_as_a_digest(describe: Describe) -> None:
    text = "HUB_TOKEN = 'hunter2'\n\ndef data(hp):\n    return HUB_TOKEN\n\n"

    record = describe(text + "recipe = Recipe(data=data)\n")

    assert "hunter2" not in repr(record)
    assert record.sources["HUB_TOKEN"].startswith("HUB_TOKEN = a text of digest ")


def test_a_long_value_is_its_beginning_and_a_digest(describe: Describe) -> None:
    text = "PROMPT = 'x' * {}\n\ndef data(hp):\n    return PROMPT\n\nrecipe = Recipe(data=data)\n"

    one, other = (describe(text.format(n)).sources["PROMPT"] for n in (9000, 9001))

    assert one != other
    assert len(one) < 400


def test_a_class_that_a_call_made_is_that_call(describe: Describe) -> None:
    text = "from collections import namedtuple\nSize = namedtuple('Size', 'depth width')\n\n"
    text += "def build(hp):\n    return Size(1, 2)\n\nrecipe = Recipe(model=build)\n"

    assert describe(text).sources["Size"] == "Size = namedtuple('Size', 'depth width')"


def test_an_object_that_wraps_itself_is_described(describe: Describe) -> None:
    text = "class Odd:\n    def __getattr__(self, name): return self\n"
    text += "    def __call__(self): pass\n\nrecipe = Recipe(model=Odd())\n"

    assert describe(text).fields == {"model": "Odd object()"}


def test_a_script_and_its_import_from_elsewhere_are_one_recipe(tmp_path: Path) -> None:
    text = (
        "import net\nfrom parts import head\n\nrecipe = Recipe(model=lambda hp: net.N, data=head)"
    )
    show = "\nfrom shoal.resume import describe_recipe\n\ndef show(recipe):\n"
    show += "    print(describe_recipe(recipe).digest)\n"
    (tmp_path / "net.py").write_text("N = 1\n")
    (tmp_path / "parts.py").write_text("def head(hp): pass\n")
    (tmp_path / "sweep.py").write_text(
        HEADER + text + show + "\nif __name__ == '__main__':\n    show(recipe)\n"
    )
    load = (
        "import importlib.util, sys; sys.path.insert(0, sys.argv[1])\n"
        f"name, file = {MODULE_NAME!r}, sys.argv[1] + '/sweep.py'\n"
        "spec = importlib.util.spec_from_file_location(name, file)\n"
        "module = importlib.util.module_from_spec(spec); sys.modules[spec.name] = module\n"
        "spec.loader.exec_module(module); module.show(module.recipe)\n"
    )

    digests = [
        subprocess.run(
            [sys.executable, *words], cwd=place, capture_output=True, text=True, check=True
        ).stdout
        for words, place in (
            (["sweep.py"], tmp_path),
            (["-m", "sweep"], tmp_path),
            ([str(tmp_path / "sweep.py")], "/"),
            (["-c", load, str(tmp_path)], "/"),
            (["-c", "import sweep; sweep.show(sweep.recipe)"], tmp_path),
        )
    ]

    assert len(digests[0]) > 9
    assert set(digests) == {digests[0]}


# ---------------------------------------------------------------- without source


def _interactive(text: str) -> Any:
    """A function as an interactive session defines it: nowhere is its text."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "<stdin>", "exec"), namespace)
    return namespace


@dataclass
class _Recipe:
    model: Any


def test_without_source_the_code_is_recorded_as_a_digest() -> None:
    text = "N = 3\ndef helper(): return N\ndef build(hp, depth={}): return helper() + {}\n"

    first, again, other, deeper = (
        describe_recipe(_Recipe(_interactive(text.format(*n))["build"]))
        for n in ((1, 1), (1, 1), (1, 2), (2, 1))
    )

    assert first.sources["build"].startswith("code ")
    assert first.sources["N"] == "N = 3"
    assert first.sources["build: depth"] == "depth = 1"
    assert first.is_same(again)
    assert not first.is_same(other)
    assert not first.is_same(deeper)


def test_without_source_a_class_is_its_methods() -> None:
    text = "class Net:\n    def __init__(self, hp): self.n = {}\n"

    one, other = (describe_recipe(_Recipe(_interactive(text.format(n))["Net"])) for n in (1, 2))

    assert one.sources["Net"] == "class of object, Net.__init__"
    assert not one.is_same(other)


def test_nested_code_counts() -> None:
    text = "def build(hp):\n    return [x * {} for x in {{'a', 'b', 'c'}} if x in {{1, 2}}]\n"

    one, again, other = (
        describe_recipe(_Recipe(_interactive(text.format(n))["build"])) for n in (1, 1, 2)
    )

    assert one == again
    assert one != other


# ---------------------------------------------------------------- the record itself


def test_a_text_that_another_python_wrote_is_the_same() -> None:
    def record(text: str) -> RecipeRecord:
        return record_of({"model": "f"}, {"f": text})

    assert record("def f(a):\n    return (a, 'b')").is_same(record('def f(a): return a, "b"'))
    assert not record("def f(a): return a").is_same(record("def f(b): return b"))
    assert not record("code 1 of cpython").is_same(record("code 2 of cpython"))


def test_a_real_recipe_can_be_described() -> None:
    recipe = shoal.Recipe(model=_a_model, data=functools.partial(_a_model, depth=2))

    record = describe_recipe(recipe)

    assert record.fields == {"model": "_a_model", "data": "partial(_a_model, depth=2)"}
    assert record.sources["_a_model"].endswith("return depth")
    json.dumps([record.fields, record.sources])


def test_only_what_is_not_the_default_is_recorded() -> None:
    usual = {"model": _a_model, "data": _a_model}

    record = describe_recipe(shoal.Recipe(**usual, accumulate=2, clip_grad_norm=1.0, metrics={}))

    assert record.fields.keys() == {"model", "data", "accumulate", "clip_grad_norm"}


def _a_model(hp: Any, depth: int = 1) -> int:
    return depth
