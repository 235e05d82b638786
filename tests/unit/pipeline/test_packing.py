"""Structures of tensors go through a frame and come out the same."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

from shoal.pipeline.packing import Packer, apart_bytes, pack_rng, unpack_rng
from shoal.planner.pipeline import RNG_BYTES
from shoal.rng import capture_rng, restore_rng, same_rng
from shoal.testing import same_bits


def through(tree, packer=None, **how):
    packer = packer or Packer()
    packed = packer.pack(tree, **how)
    frame = torch.zeros(64 + packed.num_bytes, dtype=torch.uint8)
    packed.write(frame, 64)
    return packer.unpack(packed.form, frame, 64)


def test_values_shapes_types_and_strides_are_kept():
    tree = {
        "image": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "turned": torch.randn(3, 5).t(),
        "mask": torch.tensor([True, False]),
        "half": torch.randn(7).bfloat16(),
        "number": torch.tensor(3),
        "none": torch.empty(0, 4),
        "plain": ("words", 3.5, None),
    }
    found = through(tree)
    assert found["plain"] == tree["plain"]
    for name in tree.keys() - {"plain"}:
        assert same_bits(found[name], tree[name]), name
        assert found[name].stride() == tree[name].stride(), name


def test_views_with_gaps_arrive_with_their_strides_and_share_what_they_shared():
    base = torch.randn(2, 1000)
    tree = {
        "first": base[:, 3:400],
        "second": base[:, 500:],
        "spread": torch.randn(3, 1).expand(3, 50),
        "windows": torch.randn(40).unfold(0, 8, 3),
        "bytes": torch.arange(30, dtype=torch.uint8).view(5, 6)[:, 1:4],
        "conjugate": torch.randn(3, 4, dtype=torch.complex64)[:, :2].conj(),
    }
    found = through(tree)
    for name in tree:
        assert same_bits(found[name].resolve_conj(), tree[name].resolve_conj()), name
    for name in tree.keys() - {"conjugate"}:
        assert found[name].stride() == tree[name].stride(), name
    first, second = found["first"], found["second"]
    assert second.data_ptr() - first.data_ptr() == 4 * 497
    assert Packer().pack(tree).num_bytes < base.nbytes + 1000
    assert Packer().pack(base.t()[7].expand(10**6, 2)).num_bytes <= 4096 + 64


def test_of_a_small_view_of_much_memory_its_elements_are_sent_and_it_lies_as_it_lay():
    much = torch.randn(64, 40, 128)
    region = torch.randn(1_000_000)
    tree = {
        "first token": much[:, 0],
        "last token": much[:, -1].expand(9, 64, 128),
        "chunks": much.view(64, -1).chunk(40, 1)[::39],
        "windows": much[3, :, 5].unfold(0, 8, 3),
        "weights": [region[at:][:1000].view(10, 100)[:, 1:50] for at in (3, -1000)],
        "bytes": region.view(torch.uint8)[9:][:90_000].view(9, 10_000)[:, 1:4],
    }
    for name, value in tree.items():
        views = value if isinstance(value, list | tuple) else [value]
        once = [view[0] if name == "last token" else view for view in views]
        assert Packer().pack(value).num_bytes <= sum(view.nbytes + 63 for view in once), name
        for view, found in zip(views, [*through([*views])], strict=True):
            assert same_bits(found, view), name
            assert found.stride() == view.stride(), name
            assert same_bits(found.sum(), view.sum()), name
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage() for t in through(tree["weights"])
    }
    assert sum(storage.nbytes() for storage in storages.values()) < 10_000


def test_what_may_not_lie_widely_arrives_without_wide_gaps():
    much = torch.randn(8, 10_000)
    for view, stride in [(much[:, 30:40], (10, 1)), (much[:, 5_000:], (10_000, 1))]:
        (found,) = through([view], widely=False)
        assert same_bits(found, view)
        assert found.stride() == stride


def test_one_tensor_in_two_places_is_sent_once():
    tensor = torch.randn(100)
    assert Packer().pack([tensor, tensor]).num_bytes < 2 * tensor.nbytes
    first, second = through([tensor, tensor])
    assert first is second


def test_tensors_of_a_device_go_in_a_frame_of_their_own():
    apart = torch.device("meta")
    tree = [torch.arange(5), torch.empty(3, 7, device=apart), torch.arange(3.0)]
    packed = Packer().pack(tree, apart)
    assert (packed.num_bytes, packed.apart.num_bytes) == (128, apart_bytes(packed.form))
    frame = torch.zeros(packed.num_bytes, dtype=torch.uint8)
    packed.write(frame, 0)
    beside = torch.empty(packed.apart.num_bytes, dtype=torch.uint8, device=apart)
    first, second, third = Packer().unpack(packed.form, frame, 0, beside)
    assert same_bits(first, tree[0])
    assert same_bits(third, tree[2])
    assert (second.shape, second.device) == (tree[1].shape, apart)


def test_parameters_go_by_name():
    layer = nn.Linear(2, 2)
    packer = Packer(dict(layer.named_parameters()))
    assert packer.pack({"bias": layer.bias}).num_bytes == 0
    assert through({"bias": layer.bias}, packer)["bias"] is layer.bias


def test_the_form_does_not_change_with_the_values():
    def tree():
        return {"x": torch.randn(3, 4), "rng": pack_rng(capture_rng())}

    packer = Packer()
    first = packer.pack(tree()).form
    random.gauss(0, 1)
    np.random.randn()
    assert packer.pack(tree()).form == first
    assert packer.pack({**tree(), "x": torch.randn(4, 3)}).form != first


def test_random_states_survive_with_their_spare_gauss():
    before = capture_rng()
    random.gauss(0, 1)
    np.random.randn()
    torch.rand(3)
    state = capture_rng()
    found = unpack_rng(through(pack_rng(state)))
    drawn = random.gauss(0, 1), np.random.randn(), torch.rand(2)
    assert same_rng(found, state)
    restore_rng(found)
    again = random.gauss(0, 1), np.random.randn(), torch.rand(2)
    assert drawn[:2] == again[:2]
    assert torch.equal(drawn[2], again[2])
    restore_rng(before)


def test_a_random_state_takes_no_more_than_plans_count():
    assert Packer().pack(pack_rng(capture_rng())).num_bytes <= RNG_BYTES
