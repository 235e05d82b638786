"""The order of what is done with a CUDA graph, by a stand-in that computes on the CPU."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shoal
from shoal.runtime.capture.captured import CapturedUnits
from shoal.runtime.capture.cudagraph import WARM_UPS, CapturedPass, CudaGraphs
from shoal.runtime.units import Micro, ResidentUnits

CPU = torch.device("cpu")


class StandIn:
    """Keeps what was captured, and runs it again into the tensors that the capture left."""

    def __init__(self):
        self.log = []
        self.passes = []

    def warm_up(self, work):
        self.log.append("warm up")
        work()

    def capture(self, work):
        self.log.append("capture")
        work()
        return Launched(self.log, work)


class Launched:
    """A replay writes to the same memory as the one before: nothing new is handed out."""

    def __init__(self, log, work):
        self._log, self._work, self._made = log, work, work.__self__
        self._static, self.is_live = self._made._found, True

    def replay(self):
        self._log.append("replay")
        self._work()
        made, static = self._made, self._static
        static.loss.copy_(made._found.loss)
        for index, gradient in made._found.gradients.items():
            static.gradients[index].copy_(gradient)
        made._found = static


class Watched(CapturedPass):
    def __init__(self, what, leaves, cuda):
        cuda.passes.append(self)
        super().__init__(what, leaves, cuda)


def units(cuda, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    recipe = shoal.Recipe(
        model=lambda hp: model,
        data=lambda hp: ([], None),
        loss=lambda output, batch: output.square().mean(),
        **settings,
    )

    def make(what, leaves, key):
        return Watched(what, leaves, cuda)

    return model, CapturedUnits(model, recipe, CPU, make), ResidentUnits(model, recipe, CPU)


def drawn(seed):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))


def test_a_batch_is_copied_in_and_results_are_in_the_graphs_memory():
    cuda = StandIn()
    model, captured, _ = units(cuda)
    losses, places = [], []
    for seed in range(5):
        model.zero_grad(set_to_none=True)
        batch = drawn(seed)
        losses.append(float(captured.backward(0, Micro(batch)).detach()))
        places.append(model[0].weight.grad.data_ptr())
        assert all(leaf is not batch for leaf in cuda.passes[0]._inputs)
    # Two passes are compared, of which the first makes the graph; then nothing but replays.
    assert cuda.log == ["warm up"] * WARM_UPS + ["capture"] + ["replay"] * 5
    assert torch.equal(cuda.passes[0]._inputs[0], drawn(4))
    assert places[2] == places[3] == places[4]
    assert len(set(losses)) == 5


def test_gradients_of_a_steps_batches_are_summed_outside_of_the_graph():
    cuda = StandIn()
    model, captured, eager = units(cuda, accumulate=2)
    for seed in range(4):
        model.zero_grad(set_to_none=True)
        captured.backward(0, Micro(drawn(seed)))
    assert captured.is_captured

    found = []
    for kind in (eager, captured):
        torch.manual_seed(7)
        model.zero_grad(set_to_none=True)
        for seed in (8, 9):
            kind.backward(0, Micro(drawn(seed)))
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


def test_where_a_parameter_is_elsewhere_the_graph_is_made_and_compared_again():
    cuda = StandIn()
    model, captured, _ = units(cuda)
    for seed in range(3):
        model.zero_grad(set_to_none=True)
        captured.backward(0, Micro(drawn(seed)))
    model[0].weight.data = model[0].weight.data.clone()
    cuda.log.clear()
    for seed in range(3):
        model.zero_grad(set_to_none=True)
        captured.backward(0, Micro(drawn(seed)))
    assert cuda.log == ["warm up"] * WARM_UPS + ["capture"] + ["replay"] * 3

    captured.let_go()
    assert cuda.passes[-1]._launch is None


def test_a_capture_that_fails_is_told_and_the_trial_trains_as_ever():
    class Failing(StandIn):
        def capture(self, work):
            raise RuntimeError("operation not permitted when stream is capturing")

    model, captured, _ = units(Failing())
    with pytest.warns(UserWarning, match="is not captured: RuntimeError: operation not permitted"):
        captured.backward(0, Micro(drawn(0)))
    captured.backward(0, Micro(drawn(1)))
    assert model[0].weight.grad is not None
    assert not captured.is_captured


def test_a_graph_that_comes_to_other_bits_is_not_trusted():
    class Off(Launched):
        def replay(self):
            super().replay()
            self._static.gradients[0].add_(1e-6)

    class Wrong(StandIn):
        def capture(self, work):
            super().capture(work)
            return Off(self.log, work)

    _, captured, _ = units(Wrong())
    with pytest.warns(UserWarning, match="its capture comes to other bits than the pass"):
        captured.backward(0, Micro(drawn(0)))
    assert captured.why_not == "its capture comes to other bits than the pass"


class Asks(nn.Module):
    """Goes another way while it is captured, as code does that must not wait for the device."""

    def forward(self, x):
        return x * (1.5 if torch.cuda.is_current_stream_capturing() else 1.25)


class Noticed(StandIn):
    """Code is being captured inside ``capture``; a replay is what it did then."""

    def __init__(self):
        super().__init__()
        self.capturing = False

    def capture(self, work):
        self.capturing = True
        answer = torch.cuda.is_current_stream_capturing
        self.capturing, told = False, answer()

        def replayed():
            self.capturing, before = told, self.capturing
            work()
            self.capturing = before

        replayed.__self__ = work.__self__
        return super().capture(replayed)


def test_code_that_asks_if_it_is_captured_is_not_told_where_that_changes_what_it_does(monkeypatch):
    cuda = Noticed()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: cuda.capturing)
    model, captured, eager = units(cuda)
    model.append(Asks())
    for seed in range(3):
        model.zero_grad(set_to_none=True)
        captured.backward(0, Micro(drawn(seed)))
    assert captured.is_captured
    assert cuda.log.count("capture") == 2  # the first went the other way
    assert not torch.cuda.is_current_stream_capturing()
    found = []
    for kind in (eager, captured):
        torch.manual_seed(7)
        model.zero_grad(set_to_none=True)
        kind.backward(0, Micro(drawn(8)))
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


def test_a_graph_that_went_with_another_one_is_made_again():
    cuda = StandIn()
    model, captured, _ = units(cuda)
    for seed in range(3):
        model.zero_grad(set_to_none=True)
        captured.backward(0, Micro(drawn(seed)))
    cuda.passes[0]._launch.is_live = False
    for seed in range(3, 6):
        captured.backward(0, Micro(drawn(seed)))
        model.zero_grad(set_to_none=True)
    assert len(cuda.passes) == 2
    assert captured.is_captured


@pytest.mark.parametrize("goes_on", [True, False])
def test_without_room_a_slot_trains_on_and_a_trial_is_planned_anew(goes_on):
    class Full(StandIn):
        def capture(self, work):
            raise torch.OutOfMemoryError("cannot allocate memory")

    model, captured, _ = units(Full())
    captured._goes_on = goes_on
    if not goes_on:
        with pytest.raises(torch.OutOfMemoryError):
            captured.backward(0, Micro(drawn(0)))
        return
    with pytest.warns(UserWarning, match="there is no room to compare it"):
        captured.backward(0, Micro(drawn(0)))
    found = [parameter.grad.clone() for parameter in model.parameters()]
    assert captured.why_not == "there is no room to compare it with a pass"
    assert len(found) == len(list(model.parameters()))


# -- what is asked of CUDA, by a stand-in for torch.cuda --------------------------------------


class Graph:
    """Notes what is asked of it."""

    def __init__(self, log, fails=False):
        self.log, self.fails = log, fails

    def capture_begin(self, **options):
        self.log.append(f"begin {options['capture_error_mode']}")

    def capture_end(self):
        self.log.append("end")
        if self.fails:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self):
        self.log.append("replay")


@pytest.fixture
def graphs(monkeypatch):
    log, made, state = [], [], SimpleNamespace(fails=False, current="main")

    def handle(name):
        wait = lambda other: log.append(f"{name} waits for {other.name}")  # noqa: E731
        return SimpleNamespace(name=name, wait_stream=wait)

    @contextmanager
    def within(stream):
        before, state.current = state.current, stream.name
        try:
            yield
        finally:
            state.current = before

    def graph():
        made.append(Graph(log, state.fails and not made))
        return made[-1]

    for name, value in {
        "Stream": lambda device, priority: handle(f"priority {priority}"),
        "current_stream": lambda device: handle(state.current),
        "stream": within,
        "CUDAGraph": graph,
        "graph_pool_handle": lambda: (0, 1),
        "current_device": lambda: 0,
        "synchronize": lambda device: log.append("synchronize"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *args, n=name: log.append(n), raising=False)
    return SimpleNamespace(log=log, state=state, made=made, of=CudaGraphs(torch.device("cuda")))


def test_a_capture_is_on_a_stream_of_its_own(graphs):
    seen = []
    launch = graphs.of.capture(lambda: seen.append(graphs.state.current))
    assert seen == ["priority -1"]
    assert graphs.state.current == "main"
    assert graphs.log == [
        "synchronize",
        "priority -1 waits for main",
        "begin thread_local",
        "end",
        "main waits for priority -1",
    ]
    launch.replay()
    assert graphs.log[-1] == "replay"


@pytest.mark.sample(1)
@pytest.mark.parametrize("apart", [False, True])
def test_when_a_graph_goes_all_of_its_stream_go_unless_they_are_apart(graphs, apart):
    made = CudaGraphs(torch.device("cuda"), apart=apart)
    one, other = (made.capture(lambda: None) for _ in range(2))
    del one
    gc.collect()
    assert other.is_live == apart


@pytest.mark.parametrize(("many", "streams"), [(1, 1), (3, 3), (9, 4)])
def test_parts_begin_after_what_was_before_and_what_follows_waits_for_all(
    graphs, monkeypatch, many, streams
):
    names = iter(f"side {number}" for number in range(streams))
    handle = torch.cuda.current_stream

    def made(device, priority):
        graphs.state.current, before = next(names), graphs.state.current
        found = handle(device)
        graphs.state.current = before
        return found

    monkeypatch.setattr(torch.cuda, "Stream", made)
    where = []
    parts = [lambda: where.append(graphs.state.current)] * many
    for _ in range(2):  # its streams are there the second time
        graphs.log.clear()
        graphs.of.beside(parts)
        assert graphs.log == [
            *(f"side {number} waits for main" for number in range(streams)),
            *(f"main waits for side {number}" for number in range(streams)),
        ]
    assert where == [f"side {number % streams}" for number in range(many)] * 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("fails", [True, False], ids=["and is invalidated", "and is not"])
def test_a_capture_that_fails_leaves_streams_and_allocator_as_they_were(graphs, fails):
    def work():
        raise ValueError("the code's own words")

    graphs.state.fails = fails
    with pytest.raises(ValueError, match="the code's own words"):
        graphs.of.capture(work)
    assert graphs.state.current == "main"
    tail = graphs.log[graphs.log.index("end") :]
    assert tail == [
        *("end", "_cuda_endAllocateToPool", "_cuda_releasePool"),
        *("begin thread_local", "end", "main waits for priority -1"),
    ]


@pytest.mark.full
def test_when_a_graph_goes_all_of_its_stream_go(graphs):
    one, other = (graphs.of.capture(lambda: None) for _ in range(2))
    assert one.is_live
    assert other.is_live
    del one
    assert not other.is_live
    assert graphs.of.capture(lambda: None).is_live
