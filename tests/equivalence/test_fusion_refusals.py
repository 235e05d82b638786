"""What cannot be fused is declined with the reason, and what can be lost is not."""

import random
from collections import deque

import fusing
import numpy as np
import pytest
import torch
from companies import member_of
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

from shoal.fusion import Array, Declined, LoopBackend, Member, dry_run
from shoal.fusion.graphs.traced import TracedBackend
from shoal.fusion.passes.fused import StackedBackend
from shoal.recipes.recipe import Recipe
from shoal.rng import capture_rng
from shoal.testing import array_loop

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """A layer whose forward does something odd besides."""

    def __init__(self, odd):
        super().__init__()
        self.layer, self.odd, self.steps = nn.Linear(4, 4), odd, 0
        self.register_buffer("seen", torch.zeros(4, dtype=torch.float64))
        self.double()

    def forward(self, x):
        return self.odd(self, self.layer(x))


def branches(net, x):
    return x if x.sum() > 0 else x.tanh()


def counts(net, x):
    net.steps += 1
    return x * net.steps


def keeps(net, x):
    net.last = x
    return x


def draws_python(net, x):
    return x * random.random()


def draws_numpy(net, x):
    return x * np.random.rand()


def assigns(net, x):
    net.seen = net.seen * 0.9 + x.detach().mean(0)
    return x + net.seen


def writes(net, x):
    net.seen.mul_(0.9).add_(x.detach().mean(0))
    return x + net.seen


def writes_memory(net, x):
    net.seen.data.mul_(0.9).add_(x.detach().mean(0))
    return x + net.seen


def writes_behind(net, x):
    net.seen.data = net.seen.data * 0.9 + x.detach().mean(0)
    return x + net.seen


def checkpoints(net, x):
    return torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=False)


NEWER = pytest.mark.skipif(torch.__version__ < "2.11", reason="torch 2.10 does that for all slots")


def members(odd, loss=None, width=3):
    torch.manual_seed(0)
    recipe = Recipe(model=lambda hp: Net(odd), data=lambda hp: ([], None), loss=loss or mean)
    made = []
    for _ in range(width):
        net = Net(odd)
        steps = torch.optim.SGD(net.parameters(), lr=0.1)
        made.append(
            Member(
                recipe=recipe, hp={}, module=net, optimizer=steps, schedule=None, rng=capture_rng()
            )
        )
    return made


def says_where_memory_begins(net, x):
    return x * net.layer.weight.as_strided((4,), (5,), 0)


def goes_sparse(net, x):
    return (x * net.layer.weight.to_sparse().to_dense().sum()).tanh()


def mean(output, batch):
    return output.square().mean()


def batches(width=3):
    draws = torch.Generator().manual_seed(1)
    return [torch.randn(5, 4, generator=draws, dtype=torch.float64) * 3 for _ in range(width)]


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (counts, "changes the attribute 'steps', which would change once for all slots"),
        (keeps, "changes the attribute 'last', which would change once for all slots"),
        (draws_python, "draws from random, which has one stream for all slots"),
        (draws_numpy, "draws from NumPy, which has one stream for all slots"),
        (branches, "control flow that depends on the data"),
        pytest.param(checkpoints, "runs again in the backward", marks=NEWER),
        (says_where_memory_begins, "as_strided is told where in the memory of a tensor"),
        (goes_sparse, "the backward of all slots at once fails: Could not run 'aten::select_b"),
        (writes_behind, "it gives a tensor other memory by .data"),
    ],
)
def test_a_model_with_an_odd_forward_is_declined_with_the_reason(odd, reason):
    assert reason in dry_run(members(odd), batches())


ATEN = torch.ops.aten
BY_PLACE = {
    "torch": lambda w: torch.as_strided(w, (2,), (1,), 0),
    "by name": lambda w: torch.as_strided(input=w, size=(2,), stride=(1,), storage_offset=0),
    "operator": lambda w: ATEN.as_strided(w, (2,), (1,), 0),
    "overload": lambda w: ATEN.as_strided.default(w, (2,), (1,), 0),
    "in place": lambda w: w.detach().as_strided_((2,), (1,), 0),
    "copy": lambda w: torch.as_strided_copy(w, (2,), (1,), storage_offset=0),
    "copy by the operator": lambda w: ATEN.as_strided_copy.default(w, (2,), (1,), 0),
    "scatter": lambda w: torch.as_strided_scatter(w, w[0, :2], (2,), (1,), 0),
    "scatter by the method": lambda w: w.as_strided_scatter(w[0, :2], (2,), (1,), 0),
    "scatter by the operator": lambda w: ATEN.as_strided_scatter(w, w[0, :2], (2,), (1,), 0),
    "scatter elsewhere": lambda w: (2 * w).as_strided_scatter(w[0, :2], (2,), (1,), 0),
}


@pytest.mark.parametrize("how", BY_PLACE)
def test_a_view_by_a_place_in_memory_is_declined_by_whichever_name(how):
    def odd(net, x):
        return x * BY_PLACE[how](net.layer.weight).sum()

    assert "as_strided is told where in the memory of a tensor" in dry_run(members(odd), batches())


@pytest.mark.parametrize("odd", [branches, counts, assigns, writes, checkpoints, goes_sparse])
def test_what_is_declined_trains_slot_by_slot_all_the_same(odd):
    made, lone = members(odd), members(odd)
    array = Array(made, backend=LoopBackend())

    array.step(batches())

    for slot, (member, batch) in enumerate(zip(lone, batches(), strict=True)):
        mean(member.module(batch), batch).backward()
        member.optimizer.step()
        found = array.extract(slot)["model"]
        assert all(torch.equal(found[k], t) for k, t in member.module.state_dict().items())


@pytest.mark.parametrize("backend", [StackedBackend, TracedBackend])
@pytest.mark.parametrize("odd", [assigns, writes, writes_memory])
def test_a_buffer_that_a_forward_assigns_or_writes_is_each_slots_own(odd, backend):
    made, lone = members(odd), members(odd)
    assert dry_run(made, batches()) == ""
    array = Array(made, backend=backend())

    for _ in range(4):
        array.step(batches())

    for slot, (member, batch) in enumerate(zip(lone, batches(), strict=True)):
        for _ in range(4):
            member.optimizer.zero_grad()
            mean(member.module(batch), batch).backward()
            member.optimizer.step()
        torch.testing.assert_close(array.extract(slot)["model"]["seen"], member.module.seen)


@pytest.mark.parametrize("backend", [StackedBackend, TracedBackend])
def test_a_gradient_of_zeros_that_have_no_memory_is_one(backend):
    def signs(net, x):
        return net.layer.weight.sgn() + net.layer.bias

    array = Array(members(signs), backend=backend())

    for _ in range(4):
        assert not array.step(batches()).failures

    for slot in range(3):
        weight = array.member(slot).module.layer.weight
        assert torch.equal(weight.grad, torch.zeros(4, 4, dtype=torch.float64))


def test_a_buffer_update_that_gets_lost_is_found(monkeypatch):
    from shoal.fusion.passes import template

    class Forgets(dict):
        def items(self):
            return ()

    right = template.Template.running

    def forgetful(self, *args):
        from contextlib import contextmanager

        @contextmanager
        def run():
            with right(self, *args):
                yield Forgets()

        return run()

    monkeypatch.setattr(template.Template, "running", forgetful)

    assert "slot 0: the buffer 'seen' is another one" in dry_run(members(assigns), batches())


def test_a_model_that_cannot_run_fails_at_its_first_step_and_nothing_has_changed():
    made = members(branches)
    before = [{k: t.clone() for k, t in m.module.state_dict().items()} for m in made]
    array = Array(made)

    with pytest.raises(Declined, match=r"cannot train as one array, at .*\w+\.py:\d+: "):
        array.step(batches())

    for state, member in zip(before, array.dissolve(), strict=True):
        assert all(torch.equal(member.module.state_dict()[k], t) for k, t in state.items())
        assert member.step == 0


def test_a_part_that_depends_on_its_data_runs_slot_by_slot_and_the_notes_say_so():
    made = members(branches)
    for member in made:
        member.module = nn.Sequential(member.module, nn.Linear(4, 2).double())
        member.optimizer = torch.optim.SGD(member.module.parameters(), lr=0.1)
    array = Array(made)

    array.step(batches())

    (note,) = array.backend.notes
    assert note.startswith("'0' runs slot by slot: ")
    assert "control flow that depends on the data" in note
    assert array.by_data == ("0",)


def test_a_loss_that_mixes_slots_is_declined():
    total = torch.zeros((), dtype=torch.float64)

    def mixing(output, batch):
        total.add_(output.detach().mean())
        return (output - total).square().mean()

    history = []

    def remembering(output, batch):
        history.append(1.0)
        return output.mean() * len(history)

    for loss in (mixing, remembering):
        found = dry_run(members(writes, loss), batches())
        assert "changes what the recipe's loss keeps, which would change once for all" in found


KEPT = {"mean": torch.zeros((), dtype=torch.float64)}
SEEN: list = []
RECENT: deque = deque(maxlen=2)
LAST = None
CONSTANT = {"weight": 0.5}


def keeps_a_mean(output, batch):
    KEPT["mean"] = 0.9 * KEPT["mean"] + 0.1 * output.detach().mean()
    return (output - KEPT["mean"]).square().mean()


def keeps_a_list(output, batch):
    SEEN.append(output.detach().mean())
    return output.mean() * len(SEEN)


def keeps_the_recent(output, batch):
    RECENT.append(output.detach().mean())
    return output.mean() * len(RECENT)


def keeps_through_another(output, batch):
    return _remembered(output).mean()


def _remembered(output):
    global LAST
    before, LAST = LAST, output.detach()
    return output if before is None else output - before


def keeps_behind(net, x):
    return _remembered(torch.tanh(x))


def reads_a_constant(output, batch):
    return CONSTANT["weight"] * output.square().mean()


@pytest.mark.parametrize(
    ("odd", "loss", "name"),
    [
        (None, keeps_a_mean, "KEPT"),
        (None, keeps_a_list, "SEEN"),
        (None, keeps_the_recent, "RECENT"),
        (None, keeps_through_another, "LAST"),
        (keeps_behind, None, "LAST"),
    ],
)
def test_what_the_code_keeps_in_globals_declines_before_any_array_runs(odd, loss, name):
    """An array would leave a tensor of a level that is over there, for every trial to read."""
    found = dry_run(members(odd or writes, loss), batches())
    assert f"changes the global '{__name__}.{name}', which would change once for all" in found
    assert torch.isfinite(mean(LAST if LAST is not None else KEPT["mean"], None))


class Running(nn.Module):
    """A loss that divides by its own running mean."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones((), dtype=torch.float64))

    def forward(self, output, batch):
        found = output.square().mean()
        self.mean.mul_(0.9).add_(0.1 * found.detach())
        return found / self.mean


class Counting(nn.Module):
    calls = 0

    def forward(self, output, batch):
        self.calls += 1
        return output.mean() / self.calls


@pytest.mark.parametrize(
    ("loss", "what"), [(Running(), "the buffer 'mean'"), (Counting(), "the attribute 'calls'")]
)
def test_what_a_loss_module_keeps_is_named(loss, what):
    found = dry_run(members(writes, loss), batches())
    assert f"changes {what} of the recipe's loss, which would change once for all" in found


def test_globals_that_nobody_changes_keep_nobody_from_an_array():
    assert dry_run(members(writes, reads_a_constant), batches()) == ""


def test_hyperparameters_that_change_shapes_are_declined_with_the_first_difference():
    recipe = fusing.recipe("mlp")
    one, other = fusing.trials(recipe, fusing.hps("mlp", 2))
    other.member.module[3] = nn.Linear(24, 32).double()

    with pytest.raises(Declined, match="'out_features' of module '3': 24 in one, 32 in the other"):
        Array([one.member, other.member])


def test_gradient_hooks_are_declined():
    for place, words in (
        (lambda net: net.layer.weight.register_hook(lambda g: g), "the parameter 'layer.weight'"),
        (
            lambda net: net.layer.bias.register_post_accumulate_grad_hook(lambda p: None),
            "the parameter 'layer.bias'",
        ),
        (
            lambda net: net.layer.register_full_backward_hook(lambda *_: None),
            "the module 'layer'",
        ),
    ):
        made = members(writes)
        for member in made:
            place(member.module)
        with pytest.raises(Declined, match=f"{words} has a gradient hook"):
            Array(made)
        assert f"{words} has a gradient hook" in dry_run(made, batches())


def test_precisions_that_no_array_has_are_declined():
    for changes, words in (({"precision": "bf16-sr"}, "rounds"), ({"loss_rows": 4}, "in pieces")):
        recipe = fusing.recipe("mlp", **changes)
        made = fusing.trials(recipe, fusing.hps("mlp", 2, dtype="float32"))
        with pytest.raises(Declined, match=words):
            Array([t.member for t in made])


def test_a_loss_with_weights_of_every_slots_own_is_fused():
    def recipe_of(share):
        def loss(output, batch):
            hard = F.cross_entropy(output, batch[1], label_smoothing=share / 4)
            return (1 - share) * hard + share * output.square().mean()

        return fusing.recipe("mlp", loss=loss)

    made = [
        fusing.Trial(recipe_of(share), hp, slot)
        for slot, (share, hp) in enumerate(zip((0.0, 0.2, 0.5), fusing.hps("mlp"), strict=True))
    ]
    array = Array([t.member for t in made])

    losses = [fusing.step(array, made).losses for _ in range(5)]

    assert array.backend.notes == ()
    for slot, trial in enumerate(made):
        plain = fusing.alone(trial.recipe, trial.hp, slot, 5)
        assert [found[slot] for found in losses] == pytest.approx(plain.losses, abs=1e-12)


# -- norms that a hook makes, and those that are a parametrization -----------------------------


def plain_sgd(named, hp):
    return torch.optim.SGD([parameter for _, parameter in named], lr=hp["lr"])


def normed(norm, numbers=(1, 2, 3)):
    """Trials of a model whose second layer has that norm of its weight."""

    def build(hp):
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), norm(nn.Linear(4, 4))).double()

    recipe = Recipe(model=build, data=lambda hp: (batches(), None), loss=mean, optimizer=plain_sgd)
    return recipe, [member_of(recipe, {"lr": 0.1}, seed) for seed in numbers]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
def test_a_norm_that_a_hook_makes_is_declined_with_the_one_that_an_array_takes(name):
    _, made = normed(getattr(nn.utils, name))
    words = dry_run(made, batches())
    assert words.startswith(
        f"torch.nn.utils.{name} keeps '2.weight' as an attribute that its hook"
    )
    assert words.endswith(f"Use torch.nn.utils.parametrizations.{name}, which an array takes.")
    assert dry_run(normed(getattr(nn.utils.parametrizations, name))[1], batches()) == ""


class Mask(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.eye(4))

    def forward(self, weight):
        return weight * self.mask


def test_a_mask_that_a_hook_multiplies_by_is_declined_with_what_an_array_takes():
    _, made = normed(lambda layer: prune.random_unstructured(layer, "weight", amount=0.2))
    words = dry_run(made, batches())
    assert words.startswith("torch.nn.utils.prune keeps '2.weight' as an attribute that its hook")
    assert words.endswith("multiplies by the mask, a buffer of its own, which an array takes.")
    masked = normed(lambda layer: parametrize.register_parametrization(layer, "weight", Mask()))
    assert dry_run(masked[1], batches()) == ""


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
def test_a_parametrized_norm_trains_in_a_slot_as_with_others_beside_it(name):
    """Beside it are trials as they were built, or copies, of whose hooks torch keeps less."""
    recipe, made = normed(getattr(nn.utils.parametrizations, name))
    array = Array(made)
    for batch in batches():
        array.step([batch] * 3)
    found = array.extract(1)["model"]
    plain = array_loop(recipe, {"lr": 0.1}, 2, slot=1, width=3, steps=3)
    assert all(torch.equal(found[key], tensor) for key, tensor in plain.state()["model"].items())
