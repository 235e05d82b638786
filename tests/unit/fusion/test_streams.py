"""Each slot draws what its trial would draw alone, and a pass that failed has drawn nothing."""

import pytest
import torch

from shoal.fusion.passes.streams import SlotStreams
from shoal.rng import capture_rng, restore_rng, seed_all

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


@pytest.fixture
def states():
    outer, found = capture_rng(), []
    for seed in (1, 2):
        seed_all(seed)
        found.append(capture_rng())
    restore_rng(outer)
    return found


def test_a_generator_and_the_defaults_draw_the_slots_numbers_in_turn(states):
    streams = SlotStreams(states, CPU)
    outer = torch.get_rng_state()
    streams.begin([True, True])

    found = [torch.rand(2, generator=streams.generator(1))]
    with streams.as_default(1):
        found.append(torch.rand(2))

    torch.manual_seed(2)
    expected = [torch.rand(2), torch.rand(2)]
    assert torch.equal(torch.stack(found), torch.stack(expected))
    assert torch.equal(streams.state(1).torch, torch.get_rng_state())
    assert torch.equal(streams.state(0).torch, states[0].torch)
    torch.set_rng_state(outer)


def test_undo_leads_back_to_where_the_pass_began(states):
    streams = SlotStreams(states, CPU)
    streams.begin([True, True])
    torch.rand(2, generator=streams.generator(0))
    with streams.as_default(1):
        torch.rand(2)

    streams.undo()

    assert torch.equal(streams.state(0).torch, states[0].torch)
    assert torch.equal(streams.state(1).torch, states[1].torch)


def test_a_slot_that_takes_no_part_draws_from_a_spare(states):
    streams = SlotStreams(states, CPU)
    streams.begin([True, False])

    torch.rand(2, generator=streams.generator(1))
    with streams.as_default(1):
        torch.rand(2)

    assert torch.equal(streams.state(1).torch, states[1].torch)


def test_the_process_keeps_its_own_numbers(states):
    streams = SlotStreams(states, CPU)
    before = torch.get_rng_state()
    streams.begin([True, True])

    with streams.as_default(0):
        torch.rand(2)

    assert torch.equal(torch.get_rng_state(), before)
