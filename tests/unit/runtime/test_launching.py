"""An array's pass as a CUDA graph, and slots' passes side by side, by stand-ins on the CPU."""

from __future__ import annotations

import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import companies
import pytest
import torch

from shoal.core.plan import ArrayPlace
from shoal.fusion import Array, backend_of
from shoal.fusion.batches import layout_of
from shoal.fusion.graphs import traced
from shoal.fusion.graphs.launcher import ByCode, Ready
from shoal.partition.track import AllocationTracker
from shoal.runtime.arrays.desk import MOST, ArrayDesk
from shoal.runtime.capture.captures import Captures
from shoal.runtime.capture.cudagraph import WARM_UPS, CapturedRun, Lanes

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


class StandIn:
    """Runs again what was captured, and puts what that leaves where the capture left it."""

    def __init__(self):
        self.log = []

    def warm_up(self, work):
        self.log.append("warm up")
        work()

    def capture(self, work):
        self.log.append("capture")
        (run,) = [
            cell.cell_contents
            for cell in work.__closure__
            if isinstance(cell.cell_contents, CapturedRun)
        ]
        work()
        static = list(run._left)

        def replay():
            self.log.append("replay")
            work()
            for place, found in zip(static, run._left, strict=True):
                place.copy_(found)
            run._left = static

        return SimpleNamespace(replay=replay, is_live=True)


class Launcher(ByCode):
    """Passes of whole arrays as CUDA graphs, by a stand-in."""

    def __init__(self, cuda):
        super().__init__(CPU)
        self.cuda, self.runs = cuda, []

    def of_graph(self, run, held, written, *, hands_out):
        made = CapturedRun(run, held, written, self.cuda, hands_out=hands_out)
        self.runs.append(made)
        return made


def letters(word, seed):
    draws = torch.Generator().manual_seed(seed)
    return [companies.batch_of(letter, draws) for letter in word]


def array_of(launcher, accumulate=1, kind="traced"):
    recipe = companies.recipe(companies.adam, accumulate, None, "fail")
    members = [
        companies.member_of(recipe, {"lr": 0.1, "drop": drop, "data": 0}, seed=3)
        for drop in (0.2, 0.5)
    ]
    usual = layout_of(letters("u", 0)[0])
    return Array(members, backend=backend_of(kind, launcher=launcher), usual=usual)


def steps(array, words=("uuuuuu", "uuuuuu"), accumulate=1):
    columns = [letters(word, seed) for seed, word in enumerate(words)]
    rows = list(zip(*columns, strict=True))
    return [
        array.step(*rows[at : at + accumulate]).losses for at in range(0, len(rows), accumulate)
    ]


def turned(array):
    """The same trials, in other rows."""
    members = [array.retire(1), array.retire(0)]
    return Array(members, backend=array.backend, usual=layout_of(letters("u", 0)[0]))


def same(one, other):
    """Whether both arrays' trials have the same weights, statistics, masks to come and moments."""
    return all(map(_same, map(one.extract, range(2)), map(other.extract, range(2))))


def _same(one, other):
    return (
        all(torch.equal(value, other["model"][name]) for name, value in one["model"].items())
        and torch.equal(one["rng"].torch, other["rng"].torch)
        and all(
            torch.equal(value, other["optimizer"]["state"][name][key])
            for name, moments in one["optimizer"]["state"].items()
            for key, value in moments.items()
        )
    )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_arrays_pass_is_launched_as_one_to_the_same_bits(accumulate):
    launcher = Launcher(StandIn())
    array, eager = array_of(launcher, accumulate), array_of(None, accumulate, "eager")
    assert steps(array, accumulate=accumulate) == steps(eager, accumulate=accumulate)
    assert same(array, eager)
    log = launcher.cuda.log
    assert log[: WARM_UPS + 1] == ["warm up"] * WARM_UPS + ["capture"]
    assert set(log[WARM_UPS + 1 :]) == {"replay"}
    assert len(launcher.runs) == 1  # evaluations, and other batches, have none


def test_where_the_rows_are_elsewhere_the_graph_is_made_again():
    launcher = Launcher(StandIn())
    array, eager = array_of(launcher), array_of(None, kind="eager")
    steps(array), steps(eager)
    array, eager = turned(array), turned(eager)
    assert steps(array) == steps(eager)
    assert same(array, eager)
    assert launcher.cuda.log.count("capture") >= 2


def test_a_pass_that_cannot_be_captured_runs_as_ever():
    class Failing(StandIn):
        def capture(self, work):
            raise RuntimeError("operation not permitted when stream is capturing")

    launcher = Launcher(Failing())
    array, eager = array_of(launcher), array_of(None, kind="eager")
    assert steps(array) == steps(eager)
    assert same(array, eager)
    assert launcher.runs[0].why_not.startswith("RuntimeError: operation not permitted")


def test_no_graph_is_made_where_there_is_no_room_or_while_allocations_are_counted():
    class Full(StandIn):
        def capture(self, work):
            raise torch.OutOfMemoryError("cannot allocate memory")

    launcher = Launcher(Full())
    array, eager = array_of(launcher), array_of(None, kind="eager")
    with AllocationTracker():
        assert steps(array) == steps(eager)
    assert launcher.cuda.log == []
    assert steps(array) == steps(eager)
    assert same(array, eager)
    assert launcher.runs[0].why_not == "there is no room for its graph"


def test_a_launch_that_comes_to_other_bits_is_not_trusted():
    class Wrong(StandIn):
        def capture(self, work):
            made = super().capture(work)
            right = made.replay

            def replay():
                right()
                (run,) = launcher.runs
                run._left[-1].add_(1e-9)

            return SimpleNamespace(replay=replay, is_live=True)

    launcher = Launcher(Wrong())
    array, eager = array_of(launcher), array_of(None, kind="eager")
    assert steps(array) == steps(eager)
    assert same(array, eager)
    assert launcher.runs[0].why_not == "its launch comes to other bits than its operations"
    assert not array.backend.why_eager


class Leaving:
    """A launch with which all others of its stream go."""

    def __init__(self, made, others):
        self._made, self._others, self.is_live = made, others, True
        others.add(self)

    def replay(self):
        if not self.is_live:
            raise AssertionError("launched when it was gone")
        self._made.replay()

    def __del__(self):
        for other in self._others:
            other.is_live = False


def test_a_graph_with_repeatable_kernels_outlives_the_one_without():
    there = weakref.WeakSet()

    class FirstIsWrong(StandIn):
        def capture(self, work):
            number = self.log.count("capture")
            made = super().capture(work)
            right = made.replay

            def replay():
                right()
                if number == 0:
                    launcher.runs[0]._left[-1].add_(1e-9)

            made.replay = replay
            return Leaving(made, there)

    launcher = Launcher(FirstIsWrong())
    array, eager = array_of(launcher), array_of(None, kind="eager")
    assert steps(array) == steps(eager)
    assert same(array, eager)
    assert not launcher.runs[0].why_not
    assert launcher.cuda.log.count("capture") == 2
    assert launcher.cuda.log[-1] == "replay"


class Kernels:
    """Of a device that leaves other bits each time, but where it is asked not to."""

    def __init__(self, monkeypatch, repeats):
        self.inside, self.asked = 0, 0
        same = traced.same_bits
        monkeypatch.setattr(traced, "_varies", lambda device: True)
        monkeypatch.setattr(traced, "repeatable", self.repeatable)
        monkeypatch.setattr(
            traced, "same_bits", lambda *pair: same(*pair) and bool(self.inside) and repeats
        )

    @contextmanager
    def repeatable(self, device):
        self.inside += 1
        self.asked += 1
        yield
        self.inside -= 1


@pytest.mark.parametrize("repeats", [True, False])
def test_passes_that_do_not_repeat_themselves_are_compared_by_kernels_that_do(
    monkeypatch, repeats
):
    kernels = Kernels(monkeypatch, repeats)
    array, eager = array_of(None), array_of(None, kind="eager")
    assert steps(array) == steps(eager)
    assert same(array, eager)
    backend = array.backend
    if repeats:
        assert not backend.why_eager
        assert not backend.learns
        asked = kernels.asked
        assert steps(array) == steps(eager)
        assert kernels.asked == asked  # it is trusted, and runs by whatever kernels there are
        recipe = companies.recipe(companies.adam, 1, None, "fail")
        for one in (array, eager):
            one.retire(0)
            hp = {"lr": 0.1, "drop": 0.3, "data": 0}  # another rate: its pass is looked at again
            one.refill(0, companies.member_of(recipe, hp, seed=9))
        assert steps(array) == steps(eager)
        assert same(array, eager)
        assert kernels.asked > asked
        assert not backend.why_eager
    else:
        assert backend.why_eager == "its graph comes to other bits than the pass"


# -- side by side -------------------------------------------------------------------------


class Streams:
    """Those of CUDA: who waits for whom, and where something is launched."""

    def __init__(self, monkeypatch):
        self.log, self.current, self.count = [], "main", 0
        found = {"Stream": self.made, "stream": self.within}
        found["current_stream"] = lambda device: self.handle(self.current)
        for name, value in found.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def made(self, device, priority):
        self.count += 1
        return self.handle(f"lane {self.count - 1}")

    def handle(self, name):
        def wait(other):
            if other.name != name:
                self.log.append(f"{name} waits for {other.name}")

        return SimpleNamespace(
            name=name,
            wait_stream=wait,
            wait_event=wait,
            record_event=lambda: SimpleNamespace(name=f"what {name} had"),
        )

    @contextmanager
    def within(self, stream):
        self.current = stream.name
        yield
        self.current = "main"


@pytest.fixture
def streams(monkeypatch):
    return Streams(monkeypatch)


def launched(streams, lanes, slots, beside):
    streams.log.clear()
    with lanes.together():
        for slot in slots:
            with lanes.lane(slot, beside=beside):
                streams.log.append(f"slot {slot} in {streams.current}")
    return streams.log


def test_lanes_begin_after_what_was_before_and_end_before_what_follows(streams):
    lanes = Lanes(CPU)
    for _ in range(2):
        assert launched(streams, lanes, (0, 1, Lanes.MOST), beside=True) == [
            "lane 0 waits for what main had",
            "slot 0 in lane 0",
            "lane 1 waits for what main had",
            "slot 1 in lane 1",
            f"slot {Lanes.MOST} in lane 0",
            "main waits for lane 0",
            "main waits for lane 1",
        ]
    assert lanes.graphs(0) is lanes.graphs(Lanes.MOST)  # which captures on that stream
    assert lanes.graphs(1).stream.name == "lane 1"


def test_what_may_not_run_beside_others_is_after_all_before_and_before_all_after(streams):
    assert launched(streams, Lanes(CPU), (0, 1), beside=False) == [
        "lane 0 waits for main",
        "slot 0 in lane 0",
        "main waits for lane 0",
        "lane 1 waits for main",
        "lane 1 waits for lane 0",
        "slot 1 in lane 1",
        "main waits for lane 1",
        "main waits for lane 0",
        "main waits for lane 1",
    ]


class Watching(Captures):
    """Notes which slots' passes were launched beside others'."""

    def launcher(self):
        found = super().launcher()
        self.beside, self.others = [], []

        def lane(slot, *, beside):
            (self.beside if beside else self.others).append(slot)
            return nullcontext()

        found.lane = lane
        return found


@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_only_proven_passes_that_draw_nothing_are_beside_others(drop):
    recipe = companies.recipe(companies.sgd, 1, None, "fail")
    members = [
        companies.member_of(recipe, {"lr": 0.1, "drop": drop, "data": 0}, seed=3) for _ in range(2)
    ]
    captures = Watching(recipe, CPU)
    array = Array(members, backend=backend_of("branches", launcher=captures.launcher()))
    steps(array)
    assert array.backend.why_eager == ""
    first = [0, 1] * 2  # two passes were compared
    assert captures.beside == ([] if drop else [0, 1] * 4)
    assert captures.others == (first + [0, 1] * 4 if drop else first)


def test_a_launch_that_is_of_no_use_any_more_runs_as_ever():
    recipe = companies.recipe(companies.sgd, 1, None, "fail")
    made = [companies.member_of(recipe, {"lr": 0.1, "drop": 0.5, "data": 0}, 3) for _ in range(4)]

    class Moving(ByCode):
        def capture(self, member, slot):
            found = super().capture(member, slot)
            found.ready = lambda batch: Ready(lambda: None, draws=False)
            return found

    one = Array(made[:2], backend=backend_of("branches", launcher=Moving(CPU)))
    other = Array(made[2:], backend=backend_of("branches"))
    assert steps(one) == steps(other)
    assert same(one, other)


def test_the_end_of_an_epoch_is_not_what_a_slot_captures():
    recipe = companies.recipe(companies.sgd, 1, None, "fail")
    made = [companies.member_of(recipe, {"lr": 0.1, "drop": 0.5, "data": 0}, 3) for _ in range(2)]
    launcher = Captures(recipe, CPU).launcher()
    array = Array(made, backend=backend_of("branches", launcher=launcher))
    steps(array, ("suuuuus", "suuuuus"))
    short, usual = letters("su", 1)
    for _, passes in array.backend._passes.values():
        assert passes.ready(usual)
        assert not passes.ready(short)


def test_who_leaves_takes_his_capture_along():
    recipe = companies.recipe(companies.sgd, 1, None, "fail")
    made = [companies.member_of(recipe, {"lr": 0.1, "drop": 0.5, "data": 0}, 3) for _ in range(3)]
    array = Array(
        made[:2], backend=backend_of("branches", launcher=Captures(recipe, CPU).launcher())
    )
    steps(array)
    kept = dict(array.backend._passes)
    array.refill(1, made[2]) if array.retire(1) else None
    assert array.backend._passes == {0: kept[0]}
    steps(array)
    assert array.backend._passes[1][0] is made[2].module


# -- arrays that come after one another ------------------------------------------------------


def place(group):
    return ArrayPlace(group=group, slot=0, width=2, alone=None, kind="traced")


@pytest.fixture
def desk():
    found = ArrayDesk.__new__(ArrayDesk)
    found._rested, found._device = {}, SimpleNamespace(torch_device=CPU)
    found._captures = Captures(companies.recipe(companies.adam, 1, None, "fail"), CPU)
    return found


def rest(desk, group, backend):
    desk._rest(SimpleNamespace(place=place(group), backend=backend))


def test_an_array_has_the_graphs_of_the_one_before_of_its_kind(desk):
    first = array_of(None)
    steps(first)
    graphs = [kept.graph for kept in first.backend._all()]
    rest(desk, "a", first.backend)
    assert not first.backend._known  # of no trial any more

    again = desk._backend(place("a"))
    assert again is first.backend
    recipe = companies.recipe(companies.adam, 1, None, "fail")
    hps = [{"lr": lr, "drop": 0.2 + lr, "data": 1} for lr in (0.1, 0.3)]
    later, alone = (
        Array([companies.member_of(recipe, hp, seed=5) for hp in hps], backend=backend)
        for backend in (again, backend_of("eager"))
    )
    assert steps(later) == steps(alone)
    assert same(later, alone)
    assert [kept.graph for kept in again._all()] == graphs


def test_few_are_kept_and_none_on_a_gpu(desk):
    for number in range(MOST + 2):
        rest(desk, str(number), backend_of("traced"))
    assert [*desk._rested] == [str(number) for number in range(2, MOST + 2)]
    rest(desk, "eager", backend_of("eager"))
    assert "eager" not in desk._rested

    desk._device = SimpleNamespace(torch_device=torch.device("cuda"))
    rest(desk, "gpu", backend_of("traced"))
    assert "gpu" not in desk._rested
