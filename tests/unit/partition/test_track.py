"""The tracker against sizes known by hand, and against torch's own profiler."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from shoal.core.errors import TrialError
from shoal.partition.track import AllocationTracker, read_bytes, storages_of


def test_views_and_what_was_there_before_are_not_counted():
    before = torch.zeros(1000)
    with AllocationTracker() as tracker:
        before.mul_(2)
        fresh = torch.zeros(10)
        view = fresh.view(2, 5)
        other = before[:500]

    assert tracker.current_bytes == tracker.peak_bytes == 40
    del fresh, other
    assert tracker.current_bytes == 40
    del view
    assert tracker.current_bytes == 0


def test_a_view_by_a_place_in_memory_is_refused_of_what_lies_elsewhere_alone():
    weight = torch.arange(8.0)[2:6]  # a part of a larger memory
    with AllocationTracker(as_alone=True):
        assert weight.as_strided((2,), (1,)).tolist() == [2, 3]
        assert weight.as_strided((2,), (1,), weight.storage_offset()).tolist() == [2, 3]
        assert (2 * weight).as_strided((2,), (1,), 1).tolist() == [6, 8]
        for view in (torch.as_strided, torch.as_strided_copy):
            with pytest.raises(TrialError, match="storage_offset=0"):
                view(weight, (2,), (1,), storage_offset=0)
        with pytest.raises(TrialError, match="storage_offset=1"):
            weight.as_strided_scatter(torch.zeros(2), (2,), (1,), 1)


def test_tensors_that_a_trace_makes_for_their_shapes_are_not_counted():
    def twice(x):
        return torch.cat([x, x]).relu()

    x = torch.zeros(10)
    with AllocationTracker() as tracker:
        graph = make_fx(twice, tracing_mode="fake")(x)
        assert tracker.peak_bytes == tracker.current_bytes == 0
        found = graph(x)

    assert tracker.current_bytes == found.nbytes == 80


def test_the_peak_counts_what_lives_at_the_same_time():
    with AllocationTracker() as tracker:
        for _ in range(3):
            torch.zeros(100).add(1)

    assert (tracker.peak_bytes, tracker.current_bytes) == (800, 0)


def test_tensors_from_python_numbers_and_resized_ones_are_counted():
    with AllocationTracker() as tracker:
        numbers = torch.tensor([1.0, 2.0])
        grown = torch.empty(0)
        grown.resize_(25)

    assert tracker.current_bytes == numbers.nbytes + 100


def test_a_backward_is_counted_with_its_gradients():
    weight = torch.ones(64, 64, requires_grad=True)
    x = torch.ones(8, 64)
    with AllocationTracker() as tracker:
        (x @ weight).tanh().sum().backward()

    assert tracker.current_bytes == weight.grad.nbytes
    assert tracker.peak_bytes >= weight.grad.nbytes + 8 * 64 * 4


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.drop(self.mlp(mixed.transpose(1, 2).flatten(2)))


@pytest.mark.filterwarnings("ignore")
def test_the_peak_of_a_gpt_step_is_the_profilers_to_the_byte():
    model = nn.Sequential(
        nn.Embedding(50, 32), *(Attention(32) for _ in range(3)), nn.Linear(32, 50)
    )
    ids = torch.randint(50, (4, 16))

    def step():
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        model.zero_grad(set_to_none=True)

    step()
    with AllocationTracker() as tracker:
        step()
    with torch.profiler.profile(profile_memory=True) as profile:
        step()

    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    assert tracker.peak_bytes == peak
    assert tracker.current_bytes == 0


KIB = 1024


def test_scratch_memory_of_a_kernel_is_in_the_peak_and_is_gone_after_it(memory, operator):
    x = torch.ones(KIB // 4)
    with AllocationTracker() as tracker:
        kept = x + 1
        made = operator(x, 3 * KIB)

    assert tracker.peak_bytes == (1 + 1 + 3) * KIB
    assert tracker.scratch_bytes == 3 * KIB
    assert tracker.current_bytes == kept.nbytes + made.nbytes
    tracker.restart_peak()
    assert (tracker.peak_bytes, tracker.scratch_bytes) == (2 * KIB, 0)


def test_scratch_memory_counts_beside_what_was_there_when_its_kernel_ran(memory, operator):
    x = torch.ones(KIB // 4)
    with AllocationTracker() as tracker:
        operator(x, 3 * KIB)  # 4 KiB at a time
        large = torch.ones(2 * KIB)  # 8 KiB

    assert (tracker.peak_bytes, tracker.scratch_bytes) == (large.nbytes, 0)


def test_scratch_memory_of_a_backward_and_of_a_step_is_seen(memory, operator):
    weight = nn.Parameter(torch.ones(KIB // 4))
    with AllocationTracker() as tracker:
        loss = operator(weight, 3 * KIB).sum()
        forward = tracker.scratch_bytes
        tracker.restart_peak()
        loss.backward()
        backward = tracker.scratch_bytes
        tracker.restart_peak()
        with torch.no_grad():
            weight -= operator(weight.grad, 5 * KIB)

    assert (forward, backward, tracker.scratch_bytes) == (3 * KIB, 6 * KIB, 5 * KIB)


def test_what_is_rounded_up_is_in_no_peak(memory, operator):
    x = torch.ones(3)
    with AllocationTracker() as tracker:
        operator(x, 0)

    assert memory.most_given == 512
    assert (tracker.peak_bytes, tracker.scratch_bytes) == (12, 0)


def test_scratch_memory_beyond_the_limit_is_refused_as_tensors_are(memory, operator):
    x = torch.ones(KIB // 4)
    with AllocationTracker(limit=4 * KIB) as tracker:
        operator(x, 3 * KIB)
    assert tracker.peak_bytes == 4 * KIB
    with (
        pytest.raises(torch.OutOfMemoryError, match="3073 bytes were asked for beside 1024"),
        AllocationTracker(limit=4 * KIB),
    ):
        operator(x, 3 * KIB + 1)


def test_an_allocator_that_is_asked_changes_no_bit_and_no_other_peak(memory):
    def trained(watch):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        tracker = AllocationTracker(device=watch)
        with tracker:
            for _ in range(2):
                model(torch.randn(4, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return list(model.parameters()), tracker.peak_bytes

    asked, peak = trained(None)
    assert memory.resets
    memory.resets = 0
    alone, peak_alone = trained("cpu")

    assert memory.resets == 0
    assert peak == peak_alone
    assert all(map(torch.equal, asked, alone))


def test_a_gpu_is_not_asked_while_a_graph_is_captured(memory, operator):
    memory.is_capturing = True
    with AllocationTracker() as tracker:
        operator(torch.ones(KIB // 4), 3 * KIB)

    assert memory.resets == 0
    assert tracker.scratch_bytes == 0


def test_rows_of_a_data_set_count_as_rows():
    rows = torch.zeros(24, 8)
    some, more = rows[:6], rows[6:8]
    assert read_bytes([some]) == {rows.untyped_storage().data_ptr(): some.nbytes}
    assert sum(read_bytes([some, more]).values()) == some.nbytes + more.nbytes
    assert sum(read_bytes([rows, some]).values()) == rows.nbytes
    assert sum(read_bytes([rows[:1].expand(24, 8)]).values()) <= rows.nbytes
    ids = torch.zeros(3, 3).to_sparse_coo()
    assert sum(read_bytes([ids]).values()) == sum(s.nbytes() for s in storages_of(ids))


def test_what_is_resized_without_an_operator_is_counted_by_its_size():
    """As FSDP2's gathered parameters: the memory comes and goes, the tensor stays."""
    gathered = torch.zeros(100)
    storage = gathered.untyped_storage()
    storage.resize_(0)
    with AllocationTracker(resized=[storage]) as tracker:
        torch.zeros(10)
        storage.resize_(400)
        gathered.fill_(1)
        view = gathered.view(10, 10)
        assert tracker.current_bytes == 400
        storage.resize_(0)
        fresh = torch.zeros(20)
    assert tracker.current_bytes == fresh.nbytes == 80
    assert tracker.peak_bytes == 400
    assert view.numel() == 100


def test_zeros_that_no_memory_holds_are_not_counted():
    with AllocationTracker() as tracker:
        zeros = torch._efficientzerotensor((1000,))
        kept = zeros.view(10, 100)

    assert tracker.alive() == []
    assert storages_of(kept) == []
    assert tracker.current_bytes == 0
