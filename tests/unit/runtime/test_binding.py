"""Shards step apart with the user's optimizer, at the same time, as if it stepped them all."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from shoal.core.errors import SpecError
from shoal.runtime.placing.binding import Binding, state_specs
from shoal.runtime.placing.placed import Placed

CPU = torch.device("cpu")


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


def grouped(model, kind):
    """Two groups, each with parameters of every layer."""
    named = list(model.named_parameters())
    return kind(
        [
            {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.1},
            {"params": [p for n, p in named if n.endswith("bias")], "lr": 0.05},
        ],
        lr=0.01,
    )


def binding_of(model, optimizer):
    owned = [[n for n, _ in model.named_parameters() if n.startswith(f"{i}.")] for i in range(4)]
    return Binding(model, optimizer, owned, CPU)


def give_gradients(model, step):
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.NAdam])
def test_shards_that_step_apart_step_as_the_whole_does_with_groups_and_schedule(kind):
    whole, parts = model_of(), model_of()
    optimizers = [grouped(model, kind) for model in (whole, parts)]
    schedules = [halving(optimizer) for optimizer in optimizers]
    binding = binding_of(parts, optimizers[1])
    for step in range(6):
        for model in (whole, parts):
            give_gradients(model, step)
        optimizers[0].step()
        for shard in (2, 0, 3, 1):
            binding.step_part(shard)
        for schedule in schedules:
            schedule.step()
    assert all(map(torch.equal, whole.parameters(), parts.parameters()))
    assert binding.groups()[1]["lr"] == optimizers[0].param_groups[1]["lr"] == 0.05 / 8


def test_evicted_state_leaves_nothing_that_holds_its_memory():
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    binding = binding_of(model, optimizer)
    give_gradients(model, 0)
    binding.step_part(1)
    names = ["1.weight", "1.bias"]
    made = {n: dict(optimizer.state[binding.params[n]]) for n in names}
    for name in names:
        state = {k: v.clone() for k, v in made[name].items() if k != "step"}
        binding.settle(name, state)
    held = [v.data_ptr() for n in names for v in optimizer.state[binding.params[n]].values()]
    binding.evict_state(1)
    for name in names:
        state = optimizer.state[binding.params[name]]
        assert state["step"] == 1
        for key in ("exp_avg", "exp_avg_sq"):
            assert state[key].shape == binding.params[name].shape
            assert bool(state[key].isnan().all())
            assert state[key].untyped_storage().nbytes() == 4
            assert state[key].data_ptr() not in held


def test_two_threads_step_their_shards_at_the_same_time():
    whole, parts = model_of(), model_of()
    optimizers = [grouped(model, torch.optim.AdamW) for model in (whole, parts)]
    binding = binding_of(parts, optimizers[1])
    for step in range(30):
        for model in (whole, parts):
            give_gradients(model, step)
        optimizers[0].step()
        both = [
            threading.Thread(target=lambda mine=mine: list(map(binding.step_part, mine)))
            for mine in ((0, 2), (1, 3))
        ]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
    assert all(map(torch.equal, whole.parameters(), parts.parameters()))


def test_what_a_step_changes_in_its_group_is_kept():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                group["last"] = len(group["params"])

    model = model_of()
    optimizer = grouped(model, Counting)
    binding = binding_of(model, optimizer)
    give_gradients(model, 0)
    binding.step_part(0)
    assert [group["last"] for group in optimizer.param_groups] == [1, 1]


def test_a_step_that_was_replaced_on_the_object_is_refused_where_shards_step_apart():
    model = model_of()
    optimizer = grouped(model, torch.optim.SGD)
    optimizer.step = lambda closure=None: None
    give_gradients(model, 0)
    with pytest.raises(SpecError, match="Put it into a subclass"):
        binding_of(model, optimizer).step_part(0)


KERNELS = [
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"foreach": False}),
    (torch.optim.Adam, {"fused": True, "amsgrad": True, "weight_decay": 0.1}),
    (torch.optim.Adam, {"foreach": True}),
    (torch.optim.SGD, {"fused": True, "momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"foreach": True, "momentum": 0.9, "dampening": 0.5}),
    (torch.optim.SGD, {"foreach": False, "momentum": 0.9}),
    (torch.optim.Adagrad, {"fused": True, "lr_decay": 0.1}),
    (torch.optim.Adagrad, {"foreach": True}),
    (torch.optim.RMSprop, {"foreach": True, "momentum": 0.9, "centered": True}),
    (torch.optim.RMSprop, {"foreach": False}),
    (torch.optim.Adafactor, {}),
    (torch.optim.ASGD, {"foreach": True}),
]


@pytest.mark.parametrize(("kind", "options"), KERNELS)
def test_what_a_kernel_makes_of_a_tensor_does_not_depend_on_which_others_are_in_the_call(
    kind, options, one_thread
):
    sizes = [1, 3, 15, 16, 17, 63, 65, 1000, 4099, 70_001]

    def build():
        generator = torch.Generator().manual_seed(7)
        return nn.ParameterList(torch.randn(size, generator=generator) for size in sizes)

    whole, parts = build(), build()
    optimizers = [kind(model.parameters(), lr=0.01, **options) for model in (whole, parts)]
    names = [name for name, _ in parts.named_parameters()]
    chunks = {0: [[name] for name in names[:3]] + [names[3:7], names[7:]]}
    binding = Binding(parts, optimizers[1], [names], CPU, chunks=chunks)
    for step in range(5):
        for model in (whole, parts):
            give_gradients(model, step)
        optimizers[0].step()
        for part, _ in binding.pieces[0]:
            binding.step_part(part)
    assert all(map(torch.equal, whole.parameters(), parts.parameters()))


def test_a_shard_that_is_not_cut_is_one_piece():
    model = model_of()
    owned = [["0.weight", "0.bias"], ["1.weight", "1.bias"], ["2.weight"]]
    chunks = {1: [["1.weight"], ["1.bias"]]}
    binding = Binding(model, torch.optim.SGD(model.parameters()), owned, CPU, chunks=chunks)
    assert binding.pieces == [
        [(0, ["0.weight", "0.bias"])],
        [(3, ["1.weight"]), (4, ["1.bias"])],
        [(2, ["2.weight"])],
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_what_lets_go_refers_to_no_memory_that_it_stepped_in(kind):
    """A step notes where it left every tensor; a trial that waits has to forget it."""
    model = nn.Linear(16, 16)
    binding = Binding(model, kind(model.parameters(), lr=0.1), [["weight", "bias"]], CPU)
    memory = torch.zeros(16384, dtype=torch.uint8)
    seen, storage = model.weight.numel() * 4, weakref.ref(memory.untyped_storage())
    fields = {"weight": memory[:seen].view(torch.float32).view(16, 16)}
    fields["bias"] = memory[seen : seen + 64].view(torch.float32)
    states = {
        name: {
            key: memory[at : at + like.nbytes].view(torch.float32).view(like.shape)
            for key, at in (("exp_avg", 4096 + n * 2048), ("exp_avg_sq", 8192 + n * 2048))
        }
        for n, (name, like) in enumerate(fields.items())
    }
    placed = Placed(fields, states, {}, memory[:2048], memory[4096:], {})
    grads = {name: torch.ones_like(tensor) for name, tensor in fields.items()}
    for _ in range(2):
        binding.step(0, placed, grads)
    for name, parameter in model.named_parameters():
        parameter.grad = grads[name]
    binding.step_where_it_is(0, placed)
    del memory, fields, states, placed
    gc.collect()
    assert storage() is not None
    scalars = binding.scalars()
    binding.let_go()
    gc.collect()
    assert storage() is None
    assert str(binding.scalars()) == str(scalars)  # what is no tensor of the store stays
    assert all(p.isnan().all() for p in model.parameters())


def test_state_that_no_checkpoint_could_hold_is_refused_where_it_is_measured():
    class Noting(torch.optim.Adam):
        def step(self, closure=None):
            super().step(closure)
            for state in self.state.values():
                state |= {"noted": [noted], "mean": np.float32(1), "many": [meta]}

    noted, meta = object(), torch.empty(3, device="meta")
    model = model_of()
    binding = binding_of(model, grouped(model, Noting))
    give_gradients(model, 0)
    binding.step_part(0)
    words = "'noted', which the optimizer keeps of '0.weight', .* no rule for object"
    with pytest.raises(SpecError, match=words):
        state_specs(binding)
    noted = 3
    binding.step_part(0)
    assert [spec.key for spec in state_specs(binding)["0.bias"]] == ["exp_avg", "exp_avg_sq"]
