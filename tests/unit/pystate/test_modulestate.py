"""What modules hold goes to a process that has imported them anew, and none of it is doubled."""

from __future__ import annotations

import collections
import contextvars
import copy
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import pickle
import random
import re
import sys
import threading
import types
import uuid

import cloudpickle
import numpy as np
import pytest
import torch
from sentover import arrived
from torch import nn

from shoal.core.errors import SpecError
from shoal.pystate.arriving import arrive
from shoal.pystate.bringing import ABSENT, Bringing
from shoal.pystate.modulestate import ModuleState
from shoal.pystate.sendable import may_go
from shoal.pystate.statepickler import LARGEST


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Sealed(dict):
    def __setitem__(self, key, value):
        raise TypeError("sealed")


class Thing:
    def __init__(self, **values):
        vars(self).update(values)

    def __getstate__(self):
        raise TypeError("nobody pickles this")


class Shape(tuple):
    def __new__(cls, *items):
        return super().__new__(cls, items)


class Text(str):
    pass


class Act(enum.Enum):
    DOUBLE = functools.partial(pow, 2)


class Constant(type):
    def __setattr__(cls, name, value):
        raise TypeError("constants")


Point = collections.namedtuple("Point", "x y")


VALUES = [
    *(None, True, 3, 0.5, 1j, "x", b"x", (1, "a"), frozenset({1}), Color.RED, Point(1, 2)),
    *(range(3), pathlib.Path("x"), re.compile("a+"), uuid.UUID(int=1), decimal.Decimal("1.5")),
    *(datetime.datetime(2020, 1, 1), datetime.timedelta(1), np.float32(3), np.dtype("f4")),
    *(torch.float32, torch.device("cpu"), torch.Size([1]), nn.ReLU, torch.tanh, len),
    torch._C._set_blas_preferred_backend,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_that_never_change_are_those_that_were_there(module, value):
    module.value = value
    arrived(module, value="another")
    assert module.value == value
    assert type(module.value) is type(value)


FILLED = [
    (lambda: {"a": 1, "b": {"c": 2}}, lambda: {"b": {"c": 3, "d": 4}, "e": 5}),
    (lambda: [1, [2]], lambda: [1, [3], 4]),
    (lambda: {1, 2}, lambda: {3}),
    (lambda: collections.OrderedDict(a=1), lambda: collections.OrderedDict(b=1, a=2)),
    (lambda: collections.deque([1]), lambda: collections.deque([2, 3])),
    (lambda: Sealed(a=1), lambda: Sealed(b=2)),
    (lambda: types.SimpleNamespace(a=1, b=2), lambda: types.SimpleNamespace(a=[3])),
]


@pytest.mark.parametrize(("then", "now"), FILLED)
def test_what_changes_in_place_is_filled_and_is_the_same_object(module, then, now):
    module.value, here = now(), then()
    arrived(module, value=here)
    assert module.value is here
    assert module.value == now()


def test_numbers_are_written_where_they_are(module):
    module.tensor, module.array = torch.arange(3.0), np.arange(3)
    module.layer = nn.Linear(2, 2)
    weight = module.layer.weight.clone()
    here = torch.zeros(3), np.zeros(3, int), nn.Linear(2, 2)
    parameter = here[2].weight
    arrived(module, tensor=here[0], array=here[1], layer=here[2])
    assert module.tensor is here[0]
    assert module.array is here[1]
    assert here[0].tolist() == [0, 1, 2] == here[1].tolist()
    assert module.layer.weight is parameter
    assert torch.equal(parameter, weight)


@pytest.mark.parametrize("make", [random.Random, np.random.default_rng, np.random.RandomState])
def test_a_random_generator_goes_on_from_where_it_was(module, make):
    module.stream, here, expected = make(3), make(4), make(3)
    arrived(module, stream=here)
    assert module.stream is here
    draw = "random" if hasattr(here, "random") else "rand"
    assert getattr(here, draw)() == getattr(expected, draw)()


def test_what_the_thread_has_in_context_variables_and_locals_arrives(module):
    set_here, unset = contextvars.ContextVar("set", default=1), contextvars.ContextVar("unset")
    module.local, module.set_here, module.unset = threading.local(), set_here, unset
    module.local.scale, module.local.items = 3, [1]
    set_here.set(3)
    state = ModuleState([module])
    module.local.scale, module.local.more = 4, 5
    set_here.set(4)
    there, items = module.local, module.local.items
    items.append(2)
    arrive(sys.argv, [], state.packed, cloudpickle.dumps((state.of_main, None)))
    assert module.local is there
    assert vars(there) == {"scale": 3, "items": [1]}
    assert there.items is items
    assert (module.set_here, set_here.get(), unset.get("none")) == (set_here, 3, "none")


def test_a_part_that_cannot_go_stays_as_it_is_and_the_rest_arrives(module):
    module.thing = Thing(lock=threading.Lock(), width=3, act=nn.ReLU())
    lock = threading.Lock()
    here = Thing(lock=lock, width=1)
    arrived(module, thing=here)
    assert module.thing is here
    assert (here.lock, here.width, type(here.act)) == (lock, 3, nn.ReLU)


def test_two_names_of_one_object_are_of_one_and_two_objects_are_two(module):
    one = {"a": 1}
    module.first, module.second, module.holder, module.third = one, one, [one], {"a": 2}
    here = {"a": 0}  # there all names are of one
    arrived(module, first=here, second=here, holder=[here], third=here)
    assert module.first is here
    assert module.second is module.first is module.holder[0]
    assert module.third is not here
    assert (here, module.third) == ({"a": 1}, {"a": 2})


def test_what_refers_to_itself_arrives(module):
    module.ring = [1]
    module.ring.append(module.ring)
    here = [0]
    arrived(module, ring=here)
    assert module.ring[1] is here
    assert module.ring[0] == 1


def test_attributes_of_a_modules_classes_arrive(module):
    kind = type("Kind", (), {"__module__": "held_here", "width": 3, "sizes": [1]})
    module.Kind = kind
    state = ModuleState([module])
    kind.width, sizes = 1, kind.sizes
    sizes[:] = [9]
    arrive(sys.argv, [], state.packed, pickle.dumps(([], None)))
    sys.meta_path.pop(0)
    assert (kind.width, kind.sizes) == (3, [1])
    assert kind.sizes is sizes


def test_what_is_large_or_lives_in_a_process_stays(module):
    module.large, module.lock = bytes(LARGEST + 1), threading.Lock()
    module.tensor = torch.zeros(LARGEST)
    lock, tensor = threading.Lock(), torch.zeros(LARGEST)
    assert not arrived(module, large=(large := bytes(LARGEST + 1)), lock=lock, tensor=tensor)
    assert module.large is large
    assert module.lock is lock
    assert module.tensor is tensor


def parts(number):
    return [[[number] for _ in range(99)] for _ in range(999)]


MANY = LARGEST // 100 + 1
LARGE = [
    (torch.zeros(LARGEST), torch.ones(LARGEST), "a float32 tensor of 1048576, 4.0 MiB"),
    (np.zeros(LARGEST), np.zeros(LARGEST, "f4"), "a float64 array of 1048576, 8.0 MiB"),
    (bytes(LARGEST + 1), bytes(9), "a bytes of 1,048,577 items"),
    (list(range(LARGEST)), list(range(LARGEST, 0, -1)), "a list of 1,048,576 items"),
    ([(n,) for n in range(MANY)], [(-n,) for n in range(MANY)], "a list of 10,486 items"),
    (parts(0), parts(1), "a list of 999 items"),  # none of which is large
]


@pytest.mark.parametrize(("there", "here", "words"), LARGE, ids=[one[2] for one in LARGE])
def test_what_is_too_large_and_another_one_here_is_refused_by_name(module, there, here, words):
    """It was drawn as the module was imported, or the file that it is read from has changed."""
    module.table = there
    assert not arrived(module, table=copy.deepcopy(there))
    module.table = there
    with pytest.raises(SpecError, match=f"held_here.table: {words}, and workers have "):
        arrived(module, table=here)
    module.table = there
    (told,) = arrived(module, table=None)
    assert "'table' cannot be sent to workers, which have of it what its import makes" in told


def test_what_a_function_keeps_and_is_too_large_is_told_of(module):
    keeping = "def use(rows=None, width=1):\n    return rows, width\n"
    exec(keeping, vars(module))
    here = module.use
    exec(keeping, vars(module))
    module.use.__defaults__ = (parts(0), 3)
    (told,) = arrived(module, use=here)
    assert told.endswith("what the function keeps is too large, or cannot be taken apart")
    assert here() == (None, 1)


def test_what_cannot_be_taken_apart_is_told_of(module):
    module.chain = []
    for _ in range(5000):
        module.chain = [module.chain]
    (told,) = arrived(module, chain=[])
    assert told.endswith("a list of 1 items is too large, or cannot be taken apart")


def test_of_an_object_with_a_large_part_all_else_arrives(module):
    module.data = Thing(table=torch.zeros(LARGEST), width=3)
    here = Thing(table=torch.zeros(LARGEST), width=1)
    assert not arrived(module, data=here)
    assert (module.data, here.width) == (here, 3)
    here.table[-1] = 1
    module.data = Thing(table=torch.zeros(LARGEST), width=3)
    with pytest.raises(SpecError, match=r"held_here\.data: a float32 tensor of 1048576"):
        arrived(module, data=here)


def test_a_large_value_that_the_recipe_refers_to_goes(module):
    module.table, module.texts = torch.ones(LARGEST), [str(n) for n in range(LARGEST)]
    module.first = [module.table]
    whole = {id(module.table), id(module.texts)}
    state = ModuleState([module], whole=whole)
    assert not state.large
    assert whole <= state.numbers.keys()
    module.table, module.texts, module.first = (here := torch.zeros(LARGEST)), [], None
    arrive(sys.argv, [], state.packed, pickle.dumps(([], None)))
    sys.meta_path.pop(0)
    assert here.sum() == LARGEST
    assert module.first[0] is module.table is here
    assert len(module.texts) == LARGEST


def test_many_numbers_and_texts_go_as_a_whole_and_of_many_objects_none_does(module):
    module.vocabulary = {str(number): number for number in range(1000)}
    module.same, module.rows = [module.vocabulary], [[number] for number in range(LARGEST // 100)]
    here = {"0": 1}
    arrived(module, vocabulary=here, same=None, rows=None)
    assert module.same[0] is module.vocabulary is here
    assert (len(here), here["0"], here["999"]) == (1000, 0, 999)
    assert module.rows is None


def test_what_was_made_by_and_by_and_cannot_travel_is_made_here_too(module):
    module.whole, module.partly = Thing(width=1), Thing(width=1, lock=threading.Lock())
    module.large = Thing(width=1, data=torch.zeros(LARGEST))
    (told, large) = arrived(module, whole=None, partly=None, large=None)
    assert module.whole.width == 1
    assert module.partly is None
    assert module.large is None
    assert told == large.replace("'large'", "'partly'")
    assert told == (
        "what the module held_here holds as 'partly' cannot be sent to workers, which have of it "
        "what its import makes: a part of it (an open file, a lock, what is larger than 1 MiB) "
        "stays there, and they have none in its place"
    )


def test_what_is_the_processs_own_stays(module):
    module.modules, module.all, module.inner = sys.modules, vars(module), [sys.modules]
    before = dict(sys.modules)
    modules, names = {"here": 1}, {"here": 2}
    arrived(module, modules=modules, all=names, inner=None)
    assert (modules, names, module.inner) == ({"here": 1}, {"here": 2}, None)
    assert sys.modules == before


def test_a_module_goes_by_its_name(module):
    module.holder = types.SimpleNamespace(one=np)
    here = types.SimpleNamespace(one=torch)
    arrived(module, holder=here)
    assert here.one is np


class Proxy:
    @property
    def __class__(self):
        raise RuntimeError("stands for nothing now")


def test_an_object_that_cannot_be_asked_what_it_is_stays(module):
    module.proxy, module.holder, module.width = Proxy(), [Proxy()], 3
    arrived(module, proxy=None, holder=None, width=1)
    assert (module.proxy, module.holder, module.width) == (None, None, 3)


class Local(threading.local):
    pass


def test_an_object_whose_type_is_written_in_c_stays(module):
    module.local, module.holder, module.width = Local(), {"a": Local(), "b": 3}, 3
    local = Local()
    arrived(module, local=None, holder={"a": local}, width=1)
    assert (module.local, module.holder, module.width) == (None, {"a": local, "b": 3}, 3)


def test_what_two_names_have_counts_once_and_what_has_no_end_spoils_nothing(module):
    data = bytes(LARGEST - 1000)
    module.first, module.second = [data], [[data]]
    module.lost = [nn.Linear(2, 2), bytes(LARGEST), threading.Lock()]
    module.third = [module.lost[0]]
    arrived(module, first=None, second=None, lost=None, third=None)
    assert module.second[0][0] is module.first[0]
    assert module.lost is None
    assert module.third[0].in_features == 2


def test_objects_of_torch_with_registries_behind_them_stay():
    assert not may_go(torch.ops.aten.view)
    assert not may_go(torch.optim.SGD([torch.zeros(1)], lr=0.1))


def test_how_data_was_split_and_what_distributions_hold_arrives(module):
    """Each import would have drawn another split."""
    whole = torch.utils.data.TensorDataset(torch.arange(4.0))

    def made(numbers, scale):
        weights = torch.full((4,), scale)
        return {
            "part": torch.utils.data.Subset(whole, numbers),
            "sampler": torch.utils.data.WeightedRandomSampler(weights, 4),
            "prior": torch.distributions.Normal(torch.zeros(1), torch.full((1,), scale)),
        }

    vars(module).update(made([3, 1], 2.0))
    arrived(module, **(here := made([0, 2], 5.0)))
    assert module.part is here["part"]
    assert module.part.indices == [3, 1]
    assert module.sampler.weights.tolist() == [2.0] * 4
    assert module.prior.scale.tolist() == [2.0]


def test_nothing_is_brought_where_a_worker_has_nothing_to_keep():
    assert Bringing().bring({"a": ABSENT, "b": 1}, {}) == {"b": 1}


MADE = [
    lambda width: uuid.UUID(int=width),
    lambda width: pathlib.Path(str(width)),
    lambda width: fractions.Fraction(1, width),
    lambda width: functools.partial(pow, width),
    lambda width: types.MappingProxyType({"width": width}),
    lambda width: Shape(width, 2),
    lambda width: Text(width),
    lambda width: Color.RED if width == 5 else Color.BLUE,
    lambda width: torch.ones(1).mul(width).expand(3),
]


@pytest.mark.parametrize("make", MADE)
def test_what_is_made_once_is_replaced_and_never_changed(module, make):
    module.value, module.holder = make(5), [make(5)]
    here = make(3)
    arrived(module, value=here, holder=[here])
    for value in (module.value, *module.holder):
        assert repr(value).replace(hex(id(value)), "") == repr(make(5))
        assert type(value) is type(here)
    assert repr(here) == repr(make(3))


def test_a_bound_method_is_of_the_object_that_came(module):
    module.one, module.value = (one := random.Random(3)), one.choice
    here = random.Random(4)
    arrived(module, one=here, value=here.choice)
    assert module.value.__self__ is module.one is here


def test_what_calls_a_function_that_cannot_go_breaks_nothing(module):
    module.counts = collections.defaultdict(lambda: 1, a=3)
    module.call, module.act, module.after = functools.partial(lambda: 3), Act.DOUBLE, 5
    counts, call = collections.defaultdict(lambda: 2), functools.partial(lambda: 4)
    arrived(module, counts=counts, call=call, act=None, after=1)
    assert (counts, counts["b"], module.counts) == ({"a": 3, "b": 2}, 2, counts)
    assert (module.call(), module.act, module.after) == (4, Act.DOUBLE, 5)


def test_a_random_generator_that_a_worker_lacks_is_made(module):
    module.streams = {"a": random.Random(3), "b": np.random.default_rng(3)}
    module.stream = torch.Generator().manual_seed(3)
    arrived(module, streams={}, stream=None)
    assert module.streams["a"].random() == random.Random(3).random()
    assert module.streams["b"].random() == np.random.default_rng(3).random()
    assert module.stream.initial_seed() == 3


def test_keys_are_the_objects_that_other_names_have(module):
    module.layer = nn.Linear(1, 1)
    module.names, here = {module.layer: "now"}, nn.Linear(1, 1)
    arrived(module, layer=here, names={here: "then"})
    assert module.names == {here: "now"}


def test_a_list_of_another_length_with_a_part_that_cannot_go_stays(module):
    first, second = threading.Lock(), threading.Lock()
    module.value = ["x", threading.Lock(), threading.Lock()]
    arrived(module, value=[first, second])
    assert module.value == [first, second]


def test_a_class_that_forbids_to_be_changed_is_filled(module):
    kind = module.Kind = Constant("Kind", (), {"__module__": "held_here", "width": 3})
    state = ModuleState([module])
    type.__setattr__(kind, "width", 1)
    arrive(sys.argv, [], state.packed, pickle.dumps(([], None)))
    sys.meta_path.pop(0)
    assert kind.width == 3


KEEPING = """
from types import SimpleNamespace as Namespace
import functools
cfg = Namespace(width=WIDTH)
def default(cfg=cfg, *, width=WIDTH):
    return cfg.width + width
def make(width):
    @functools.wraps(default)
    def inner():
        return width
    return inner
inner = make(WIDTH)
class Kind:
    def __init__(self, width=WIDTH):
        super().__init__()
        self.width = width
    @staticmethod
    def of(width=WIDTH):
        return width
"""


def test_what_functions_have_as_defaults_and_close_over_arrives(module):
    """A default was taken as the module was imported: ``cfg`` may be another one by now."""
    module.WIDTH = 3
    exec(KEEPING, vars(module))
    module.cfg = types.SimpleNamespace(width=9)
    state = ModuleState([module])
    module.WIDTH = 1
    exec(KEEPING, vars(module))
    arrive(sys.argv, [], state.packed, pickle.dumps(([], None)))
    sys.meta_path.pop(0)
    assert (module.cfg.width, module.WIDTH) == (9, 3)
    assert (module.default(), module.inner(), module.Kind().width, module.Kind.of()) == (
        6,
        3,
        3,
        3,
    )


def test_what_cannot_be_filled_is_told_of_and_all_else_is_filled(module):
    module.Kind = type("Kind", (), {"__module__": "held_here", "width": 3})
    module.after = 5
    told = arrived(module, Kind=None, after=1)
    assert module.after == 5
    assert told == (
        "what the module held_here holds as 'Kind.width' cannot be sent to workers, which have of "
        "it what its import makes: they have no such class",
    )


NORMED = [
    lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)),
    lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(2, 3)),
    lambda: nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(2, 2)), nn.Tanh()),
    lambda: nn.utils.weight_norm(nn.Linear(2, 3)),
]


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("make", NORMED)
def test_of_a_module_with_a_class_of_its_own_the_tensors_arrive(module, make):
    there, here, x = make().eval(), make(), torch.rand(5, 2)
    module.net, module.holder = there, {"net": there}
    assert not torch.equal(there(x), here.eval()(x))
    here.train()
    told = arrived(module, net=here, holder={"net": here})
    assert not told
    assert module.holder["net"] is module.net is here
    assert not here.training
    assert torch.equal(there(x), here(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is:DeprecationWarning")
def test_of_a_module_of_torchscript_the_tensors_arrive(module):
    there, here = (torch.jit.trace(nn.Linear(2, 3), torch.rand(5, 2)) for _ in range(2))
    x = torch.rand(5, 2)
    module.net = there
    assert not arrived(module, net=here)
    assert module.net is here
    assert torch.equal(there(x), here(x))


def test_hooks_stay_though_each_process_counts_its_own(module):
    def hooked(by, first=0):
        made = nn.Linear(1, 1, bias=False)
        for _ in range(first):
            made.register_forward_hook(print).remove()
        made.register_forward_hook(lambda module, args, output, by=by: output * by)
        return made

    module.net, here = hooked(3), hooked(2, first=4)
    assert not arrived(module, net=here)
    assert here(torch.ones(1)) == 3 * here.weight


def test_a_module_of_another_structure_is_told_of(module):
    normed = nn.utils.parametrizations.weight_norm
    module.net = normed(nn.Linear(2, 3))
    (told,) = arrived(module, net=(here := nn.Linear(2, 3)))
    assert module.net is here
    assert told.endswith("the ParametrizedLinear is another module there")
    module.net = normed(nn.Linear(2, 3))
    (told,) = arrived(module, net=normed(nn.Linear(2, 4)))
    assert "'parametrizations.weight.original0' of the ParametrizedLinear is another" in told
    module.net = normed(nn.Linear(2, 3))
    (told,) = arrived(module, net=None)
    assert told.endswith("the ParametrizedLinear is another module there")


def test_what_the_main_file_defines_arrives_where_it_is(module):
    kind = type("OfMain", (), {"__module__": "__main__"})
    function = types.FunctionType((lambda: 3).__code__, {"__name__": "__main__"}, "function")
    one = module.one = kind()
    module.cfg = types.SimpleNamespace(act=function, parts=(1, [function, one]), kind=kind)
    module.cfg.call = functools.partial(function)
    here = types.SimpleNamespace(act=len, parts=None)
    arrived(module, size_by_value=lambda value: 1, one=None, cfg=here)
    assert module.cfg is here
    assert here.act() == 3 == here.call()
    assert here.parts[1] == [here.act, module.one]
    assert type(module.one) is here.kind


def test_what_the_main_file_defines_and_cannot_be_sent_stays(module):
    kind = type("OfMain", (), {"__module__": "__main__"})
    module.cfg = types.SimpleNamespace(act=kind(), width=3)
    here = types.SimpleNamespace(act=len, width=1)
    arrived(module, cfg=here)
    assert (here.act, here.width) == (len, 3)
