"""What all tests share: importable helper modules, and studies of a few steps."""

from __future__ import annotations

import functools
import gc
import itertools
import linecache
import os
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path

import hypothesis
import pytest
import torch

import shoal
import shoal.launch.packing
import shoal.launch.plan
import shoal.pipeline.processes
import shoal.resume.code
import shoal.runtime.pool
from shoal import forkserver
from shoal.forkserver import ForkServer
from shoal.launch.packing import _state_of
from shoal.launch.replaced import find_changes, users_modules
from shoal.pipeline.processes import StageProcesses
from shoal.planning import Planner
from shoal.pystate.modulestate import ModuleState
from shoal.runtime.pool import WorkerPool
from shoal.testing import assert_same, plain_loop
from shoal.verify import read_losses

HERE = Path(__file__).parent
gc.disable()  # until all is collected, see there
torch.set_num_threads(1)  # others run beside: threads of a pool would spin while one waits
if "SHOAL_CUDA_STANDIN" not in os.environ:  # workers are forked, whatever this shell asks for
    for name in (forkserver.HOW, *forkserver.THREADS):
        os.environ.pop(name, None)
# Workers get this process's path: test modules and their helpers are imported there by name.
for folder in (HERE.parent, HERE, HERE / "equivalence", HERE / "chaos"):
    sys.path.insert(0, str(folder))

from covering import cover_values  # noqa: E402

STUDY_OPTIONS = (
    *("steps", "epochs", "eval_every", "seed", "trials", "metric", "mode"),
    *("checkpoint_every", "keep", "keep_finished", "disk_budget", "retries"),
    *("time_limit", "trial_time_limit"),
)


hypothesis.settings.register_profile("untimed", deadline=None)  # others use the machine too
hypothesis.settings.load_profile("untimed")


# -- which cases run --------------------------------------------------------------------------


def pytest_addoption(parser):
    parser.addoption(
        "--part", metavar="K/N", type=part_of, help="the K-th of N parts of the cases marked full"
    )


def part_of(text):
    """Whether a test is in the part that ``text`` names, the same one wherever it is asked."""
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise ValueError(text)
    return lambda name: zlib.crc32(name.encode()) % int(parts) == int(part) - 1


@pytest.hookimpl(tryfirst=True)  # before those that are marked so are left out
def pytest_collection_modifyitems(config, items):
    """Mark as ``full`` the cases of a test that it does without in most runs.

    Those of an equivalence test are as many as let every value of its parameters occur;
    ``sample(n)`` says that there are ``n`` of any test, which have as many values as can be.
    With ``--part`` a part of them is all that runs.
    """
    cases = sorted(filter(has_cases, items), key=of_which_test)  # stable
    for _, group in itertools.groupby(cases, key=of_which_test):
        named = {case.nodeid: case for case in group}
        sample = next(iter(named.values())).get_closest_marker("sample")
        kept = cover_values(
            {n: values_of(c) for n, c in named.items()}, *(sample.args if sample else ())
        )
        for name in named.keys() - set(kept):
            named[name].add_marker(pytest.mark.full)
    if belongs := config.getoption("--part"):
        items[:] = [i for i in items if i.get_closest_marker("full") and belongs(i.nodeid)]


def has_cases(item):
    """Whether it is one of several that are to be fewer."""
    if not hasattr(item, "callspec") or item.get_closest_marker("full"):
        return False
    return HERE / "equivalence" in item.path.parents or item.get_closest_marker("sample")


def of_which_test(item):
    return item.nodeid.partition("[")[0]


def values_of(item):
    """A case's parameters: those of one ``parametrize`` as one, those of a row for themselves."""
    params = item.callspec.params
    lists = [mark.args[0] for mark in item.iter_markers("parametrize")]
    named = [names.split(",") if isinstance(names, str) else names for names in lists]
    together = [[name.strip() for name in names] for names in named]
    together += [[name] for name in params if name not in itertools.chain(*together)]
    found = {", ".join(names): repr([params[name] for name in names]) for names in together}
    for name, value in params.items():
        if isinstance(value, Mapping) and found.pop(name, None):
            found |= {f"{name}, {key}": repr(one) for key, one in value.items()}
            found[f"keys of {name}"] = repr(sorted(value))  # none is a row too
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    """What is imported and collected stays for good: the garbage collector need not look at it."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def own_modules():
    """Modules of the tests themselves, imported as they were collected."""
    files = ((n, getattr(m, "__file__", None)) for n, m in sys.modules.items())
    return {n: sys.modules[n] for n, file in files if file and HERE in Path(file).parents}


@pytest.fixture(autouse=True)
def own_modules_stay(own_modules):
    """A test writes modules of its own, and those that it takes away are no others' by a name."""
    yield
    lost = [name for name, module in own_modules.items() if sys.modules.get(name) is not module]
    sys.modules.update(own_modules)
    assert not lost


# -- studies ----------------------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def one_fork_server():
    """Workers of all studies in this process are forked from one server, which lives as long."""
    server = ForkServer(shoal.runtime.pool.MODULE, shoal.pipeline.processes.MODULE)
    close, server.close = server.close, lambda: None
    with pytest.MonkeyPatch.context() as patch:
        for module in (shoal.runtime.pool, shoal.pipeline.processes):
            patch.setattr(module, "ForkServer", lambda *modules: server)
        yield
    close()


@pytest.fixture(scope="session", autouse=True)
def one_parse_of_a_text():
    """Each study of a process describes its recipe, of files that hundreds of studies share."""
    read = functools.lru_cache(64)(lambda path, text: shoal_file(path))
    shoal_file = shoal.resume.code._File

    def file_of(path):
        linecache.checkcache(path)
        return read(path, "".join(linecache.getlines(path)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shoal.resume.code, "_File", file_of)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_look_at_modules():
    """Thousands are imported here, and what tests have put into packages is the same for all.

    Hundreds are of tests, whose values nobody changes for a study: none are sent.
    """
    found, none = find_changes(), ModuleState(())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shoal.launch.plan, "find_changes", lambda: found)
        patch.setattr(shoal.launch.packing, "_state_of", lambda modules, **options: none)
        patch.setattr(shoal.launch.packing, "users_modules", dict)
        yield


@pytest.fixture
def look_at_modules(one_look_at_modules):
    """Each study of this test looks for what is in modules, as any study does.

    Of those that came with the test: the others are of other tests, and hold more and more.
    """
    before = frozenset(sys.modules)

    def others():
        return {name: module for name, module in users_modules().items() if name not in before}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shoal.launch.plan, "find_changes", find_changes)
        patch.setattr(shoal.launch.packing, "_state_of", _state_of)
        patch.setattr(shoal.launch.packing, "users_modules", others)
        yield


@pytest.fixture(scope="session")
def warm_workers():
    """Worker processes that all studies share, so that torch is imported once."""
    with WorkerPool() as pool:
        yield pool


@pytest.fixture
def warm_plans(warm_workers, monkeypatch):
    """Plans of this test are made by them, where it names no others."""
    plan = shoal.Study.plan

    def planned(study, **options):
        return plan(study, **({"workers": warm_workers} | options))

    monkeypatch.setattr(shoal.Study, "plan", planned)


@pytest.fixture(scope="session")
def stage_processes():
    """Processes for up to four stages that all pipelines share."""
    with StageProcesses(4) as processes:
        yield processes


@pytest.fixture
def run_study(tmp_path, warm_workers):
    """A function that runs a small study on virtual devices and returns its report."""
    numbers = itertools.count()

    def run(recipe, space, *, devices=1, memory="64MiB", poison=False, **options):
        settings = {key: options.pop(key) for key in STUDY_OPTIONS if key in options}
        name = f"study-{next(numbers)}"
        study = shoal.Study(name, recipe, space=space, directory=tmp_path, **settings)
        hardware = shoal.Hardware.virtual(devices=devices, memory=memory, poison=poison)
        shown = {"progress": False, "timeline": False, "workers": warm_workers}
        return study.run(hardware=hardware, **(shown | options))

    return run


@pytest.fixture
def assert_alone():
    """A function that compares finished trials of a report with the plain loop, bit for bit."""

    def check(report, trials, recipe, **loop):
        losses = read_losses(report.directory)
        for trial in trials:
            if trial.error:
                pytest.fail(f"{trial.error_line}\ntrial {trial.number}, {trial.hp}: {trial.error}")
            plain = plain_loop(recipe, trial.hp, trial.seed, **loop)
            assert_same(plain, trial, losses=losses[trial.number])

    return check


@pytest.fixture
def jobs(monkeypatch):
    """The jobs of every plan that is made, in order."""
    made, plan = [], Planner.plan

    def planned(planner, trials, **options):
        found = plan(planner, trials, **options)
        made.extend(found.plan.jobs)
        return found

    monkeypatch.setattr(Planner, "plan", planned)
    return made


@pytest.fixture
def one_thread():
    """This process computes on one thread, as trials and the plain loop do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
