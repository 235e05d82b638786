"""Any optimizer and schedule steps rows as it steps a model alone."""

import fusing
import pytest
import torch

from shoal.fusion import Array

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 12


def no_decay(named, hp):
    groups = [
        {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": hp["decay"]},
        {"params": [p for n, p in named if n.endswith("bias")], "lr": 2 * hp["lr"]},
    ]
    return torch.optim.AdamW(groups, lr=hp["lr"], weight_decay=0.0, fused=True)


def some(named, hp):
    return torch.optim.Adam([p for _, p in named][2:], lr=hp["lr"], fused=True)


def of(kind, **options):
    return lambda named, hp: kind([p for _, p in named], lr=hp["lr"], **options)


OPTIMIZERS = {
    "AdamW fused": of(torch.optim.AdamW, fused=True),
    "Adam fused": of(torch.optim.Adam, fused=True, weight_decay=0.01),
    "AdamW": of(torch.optim.AdamW),
    "AMSGrad": of(torch.optim.AdamW, fused=True, amsgrad=True),
    "SGD": of(torch.optim.SGD, momentum=0.9, nesterov=True),
    "SGD fused": of(torch.optim.SGD, momentum=0.9, fused=True),
    "RMSprop": of(torch.optim.RMSprop),
    "Adagrad": of(torch.optim.Adagrad),
    "groups": no_decay,
    "some": some,
}


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_its_slot_as_alone(name, clip):
    def plan(optimizer, hp):
        if hp["plan"] == "cycle":  # it also moves Adam's betas and SGD's momentum
            return None if "grad" in name else torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return fusing.schedule(optimizer, hp)

    recipe = fusing.recipe("mlp", optimizer=OPTIMIZERS[name], clip_grad_norm=clip, schedule=plan)
    hps = fusing.hps("mlp")

    array, _ = fusing.train(recipe, hps, STEPS)

    for slot, hp in enumerate(hps):
        plain = fusing.alone(recipe, hp, slot, STEPS)
        moved = fusing.alone(recipe, hp, slot, STEPS, ulp=True).state()
        found, expected = array.extract(slot), plain.state()
        bound = 10 * max(fusing.drift(moved, expected), 1e-15)
        assert fusing.drift(found, expected) <= bound
        assert found["optimizer"]["groups"] == expected["optimizer"]["groups"]
        assert keys(found) == keys(expected)
        assert found["schedule"] == expected["schedule"]


def keys(state):
    """The layout of an optimizer's state: names, kinds, types and shapes, in their order."""
    return [
        (name, key, getattr(value, "dtype", type(value)), getattr(value, "shape", ()))
        for name, entries in state["optimizer"]["state"].items()
        for key, value in entries.items()
    ]


def test_steps_past_torchs_python_are_bitwise_those_of_the_optimizer(monkeypatch):
    recipe, hps = fusing.recipe("cnn", clip_grad_norm=None), fusing.hps("cnn")
    quick, _ = fusing.train(recipe, hps, STEPS)
    monkeypatch.setattr("shoal.fusion.optim.FusedSteps.takes", lambda self, optimizer: False)
    slow, _ = fusing.train(recipe, hps, STEPS)

    for slot in range(3):
        assert fusing.drift(quick.extract(slot), slow.extract(slot)) == 0


def test_an_optimizer_that_loads_a_state_in_between_goes_on_from_it():
    recipe, hps = fusing.recipe("mlp"), fusing.hps("mlp")
    made = fusing.trials(recipe, hps)
    array = Array([t.member for t in made])
    for _ in range(3):
        fusing.step(array, made)
    optimizer = array.member(1).optimizer
    optimizer.load_state_dict(optimizer.state_dict())
    for _ in range(3):
        fusing.step(array, made)

    plain = fusing.alone(recipe, hps[1], 1, 6)
    moved = fusing.alone(recipe, hps[1], 1, 6, ulp=True).state()
    bound = 10 * fusing.drift(moved, plain.state())
    assert fusing.drift(array.extract(1), plain.state()) <= bound


def test_a_hook_on_one_optimizer_is_called_and_the_steps_are_those_alone():
    recipe, hps = fusing.recipe("mlp"), fusing.hps("mlp")
    made = fusing.trials(recipe, hps)
    called = []
    made[1].member.optimizer.register_step_post_hook(lambda *_: called.append(1))
    array = Array([t.member for t in made])

    for _ in range(4):
        fusing.step(array, made)

    assert len(called) == 4
    plain = fusing.alone(recipe, hps[1], 1, 4)
    assert fusing.drift(array.extract(1), plain.state()) <= 1e-12


def test_one_slots_optimizer_that_raises_fails_that_slot_alone():
    recipe = fusing.recipe("mlp")
    made = fusing.trials(recipe, fusing.hps("mlp"))
    array = Array([t.member for t in made])

    def fail(*_):
        raise OverflowError("no step")

    made[1].member.optimizer.register_step_pre_hook(fail)
    stepped = fusing.step(array, made)

    assert isinstance(stepped.failures[1], OverflowError)
    assert [array.member(slot).step for slot in range(3)] == [1, 0, 1]
