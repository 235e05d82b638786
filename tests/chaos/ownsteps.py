"""Recipes with a step of their own, by name, and studies of them.

Imported by tests, by this name by worker processes, and by the files that ``Case`` writes.
"""

from __future__ import annotations

import copy

import studies
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.recipes.recipe import Recipe

KINDS = ("gan", "distillation", "actor-critic", "target", "autocast")


def of(named, name):
    return [parameter for key, parameter in named if key.startswith(f"{name}.")]


def pictures(hp):
    generator = torch.Generator().manual_seed(7)
    x = torch.rand(48, 1, 8, 8, generator=generator)
    y = torch.randint(3, (48,), generator=generator)
    train, valid = TensorDataset(x[:40], y[:40]), TensorDataset(x[40:], y[40:])
    return DataLoader(train, 8, shuffle=True), DataLoader(valid, 4)


# ---------------------------------------------------------------- a GAN


def build_gan(hp):
    generator = nn.Sequential(
        nn.Linear(4, 32),
        nn.Unflatten(1, (8, 2, 2)),
        nn.ConvTranspose2d(8, 4, 4, stride=2, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 1, 4, stride=2, padding=1),
        nn.Sigmoid(),
    )
    discriminator = nn.Sequential(
        nn.Conv2d(1, 4, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Dropout(hp.get("dropout", 0.25)),
        nn.Flatten(),
        nn.Linear(64, 1),
    )
    return {"generator": generator, "discriminator": discriminator}


def gan_optimizers(named, hp):
    named = list(named)
    return {
        "generator": torch.optim.Adam(of(named, "generator"), lr=hp["lr"], betas=(0.5, 0.999)),
        "discriminator": torch.optim.SGD(of(named, "discriminator"), lr=hp["lr"], momentum=0.9),
    }


def gan_schedules(optimizers, hp):
    return [torch.optim.lr_scheduler.StepLR(o, 3, 0.7) for o in optimizers.values()]


def gan_step(models, batch, optimizers, hp):
    studies_wait()
    generator, discriminator = models["generator"], models.discriminator
    real = batch[0]
    fake = generator(torch.randn(len(real), 4, device=real.device))
    optimizers.discriminator.zero_grad()
    right, wrong = discriminator(real), discriminator(fake.detach())
    d_loss = F.binary_cross_entropy_with_logits(right, torch.ones_like(right))
    d_loss = d_loss + F.binary_cross_entropy_with_logits(wrong, torch.zeros_like(wrong))
    d_loss.backward()
    nn.utils.clip_grad_norm_(discriminator.parameters(), 1.0)
    optimizers.discriminator.step()
    optimizers["generator"].zero_grad()
    judged = discriminator(fake)
    g_loss = F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))
    g_loss.backward()
    optimizers["generator"].step()
    return {"generator": g_loss, "discriminator": d_loss.detach()}


def gan_evaluation(models, batch, hp):
    fake = models.generator(torch.randn(len(batch[0]), 4, device=batch[0].device))
    return {
        "gap": (fake.mean(0) - batch[0].mean(0)).norm(),
        "score": models.discriminator(batch[0]).mean(),
    }


# ---------------------------------------------------------------- distillation


def build_distillation(hp):
    teacher = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 3)
    )
    student = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.1), nn.Linear(8, 3))
    return {"teacher": teacher.eval().requires_grad_(False), "student": student}


def distillation_step(models, batch, optimizers, hp):
    studies_wait()
    x, y = batch
    assert not models.teacher.training
    assert models.student.training
    with torch.no_grad():
        taught = models.teacher(x)
    output = models.student(x)
    loss = F.cross_entropy(output, y) + F.kl_div(
        output.log_softmax(1), taught.log_softmax(1), reduction="batchmean", log_target=True
    )
    optimizers.student.zero_grad()
    loss.backward()
    optimizers.student.step()
    return loss


def distillation_evaluation(models, batch, hp):
    return F.cross_entropy(models["student"](batch[0]), batch[1])


def autocast_step(models, batch, optimizers, hp):
    """Forwards and losses in bfloat16, in a region for each model."""
    studies_wait()
    x, y = batch
    with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16):
        taught = models.teacher(x)
    with torch.autocast(x.device.type, torch.bfloat16):
        output = models.student(x)
        loss = F.cross_entropy(output, y) + F.mse_loss(output, taught)
    optimizers.student.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(models.student.parameters(), 0.5)
    optimizers.student.step()
    return loss


def autocast_evaluation(models, batch, hp):
    with torch.autocast(batch[0].device.type, torch.bfloat16):
        return distillation_evaluation(models, batch, hp)


# ---------------------------------------------------------------- actor and critic, one module


class ActorCritic(nn.Module):
    """Two heads on one trunk, which both optimizers step."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh())
        self.actor, self.critic = nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, x):
        x = self.trunk(x)
        return self.actor(x), self.critic(x)


def actor_critic_optimizers(named, hp):
    named = list(named)
    trunk = of(named, "trunk")
    return (
        torch.optim.Adam(trunk + of(named, "actor"), lr=hp["lr"]),
        torch.optim.AdamW([{"params": trunk + of(named, "critic")}], lr=hp["lr"], fused=True),
    )


def actor_critic_step(models, batch, optimizers, hp):
    studies_wait()
    actor, critic = optimizers
    logits, value = models(batch[0])
    policy = torch.distributions.Categorical(logits=logits)
    action = policy.sample()
    reward = (action == batch[1]).float()
    advantage = reward - value.squeeze(1)
    actor_loss = -(policy.log_prob(action) * advantage.detach()).mean()
    critic_loss = advantage.square().mean()
    actor.zero_grad()
    actor_loss.backward(retain_graph=True)
    gradients = [p.grad.clone() for p in models.trunk.parameters()]
    critic.zero_grad()
    critic_loss.backward()
    for parameter, gradient in zip(models.trunk.parameters(), gradients, strict=True):
        parameter.grad += gradient
    actor.step()
    critic.step()
    return {"loss": actor_loss + critic_loss, "actor": actor_loss, "critic": critic_loss.item()}


def actor_critic_loss(output, batch):
    return F.cross_entropy(output[0], batch[1])


# ---------------------------------------------------------------- a target that follows


def build_target(hp):
    online = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3))
    target = copy.deepcopy(online).requires_grad_(False)
    target.register_buffer("updates", torch.zeros((), dtype=torch.long))
    return {"online": online, "target": target}


def target_step(models, batch, optimizers, hp, number):
    """No optimizer for the target; every third step another one steps, on replaced tensors."""
    studies_wait()
    x, y = batch
    loss = F.cross_entropy(models.online(x) + models.target(x), y)
    optimizer = optimizers["now and then" if number % 3 == 2 else "always"]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for one, other in zip(models.online.parameters(), models.target.parameters(), strict=True):
        other.data = other.data.lerp(one.data, 0.1)
    models.target.updates = models.target.updates + 1
    return loss.item()


def target_optimizers(named, hp):
    named = list(named)
    return {
        "always": torch.optim.SGD(of(named, "online"), lr=hp["lr"]),
        "now and then": torch.optim.RMSprop(of(named, "online"), lr=hp["lr"]),
    }


# ---------------------------------------------------------------- a critic with a penalty


def build_critic(hp):
    critic = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.SiLU(), nn.Linear(16, 1))
    generator = nn.Sequential(nn.Linear(4, 64), nn.Unflatten(1, (1, 8, 8)))
    return {"generator": generator, "critic": critic}


def penalty_step(models, batch, optimizers, hp, number):
    """WGAN-GP; the generator steps now and then, in each trial at other times."""
    studies_wait()
    real = batch[0]
    like = {"dtype": real.dtype, "device": real.device}
    with torch.no_grad():
        fake = models.generator(torch.randn(len(real), 4, **like))
    share = torch.rand(len(real), 1, 1, 1, **like)
    between = (share * real + (1 - share) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(models.critic(between).sum(), between, create_graph=True)
    penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
    critic_loss = models.critic(fake).mean() - models.critic(real).mean() + penalty
    optimizers.critic.zero_grad()
    critic_loss.backward()
    optimizers.critic.step()
    losses = {"critic": critic_loss}
    if number % hp.get("every", 2) == 0:
        models.critic.requires_grad_(False)
        optimizers.generator.zero_grad()
        loss = -models.critic(models.generator(torch.randn(8, 4, **like))).mean()
        loss.backward()
        assert all(p.grad is not None for p in models.generator.parameters())
        optimizers.generator.step()
        models.critic.requires_grad_(True)
        losses["generator"] = loss
    return losses


# ---------------------------------------------------------------- recipes and studies


RECIPES = {
    "gan": {
        "model": build_gan,
        "optimizer": gan_optimizers,
        "schedule": gan_schedules,
        "step": gan_step,
        "evaluate": gan_evaluation,
    },
    "distillation": {
        "model": build_distillation,
        "step": distillation_step,
        "evaluate": distillation_evaluation,
    },
    "autocast": {
        "model": build_distillation,
        "step": autocast_step,
        "evaluate": autocast_evaluation,
    },
    "actor-critic": {
        "model": lambda hp: ActorCritic(),
        "optimizer": actor_critic_optimizers,
        "step": actor_critic_step,
        "loss": actor_critic_loss,
    },
    "target": {
        "model": build_target,
        "optimizer": target_optimizers,
        "step": target_step,
        "evaluate": lambda models, batch, hp: F.cross_entropy(models.target(batch[0]), batch[1]),
    },
}
RECIPES["penalty"] = {
    "model": build_critic,
    "step": penalty_step,
    "evaluate": lambda models, batch, hp: models.critic(batch[0]).mean(),
}
METRICS = {"gan": "valid_gap"}


def studies_wait() -> None:
    """In a worker, take as long over a batch as the test wants."""
    if studies.is_worker():
        studies.wait()


def recipe(kind: str) -> Recipe:
    return Recipe(data=pictures, **RECIPES[kind])


def make(directory, *, kind="gan", name="k", lr=(1e-2, 3e-2), **options) -> shoal.Study:
    """5 steps an epoch."""
    settings = {"epochs": 3, "checkpoint_every": 0.2, "metric": METRICS.get(kind, "valid_loss")}
    space = shoal.grid(lr=list(lr))
    return shoal.Study(
        name, recipe(kind), space=space, directory=directory, **(settings | options)
    )
