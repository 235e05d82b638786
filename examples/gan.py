"""A study of a GAN: two models, two optimizers, and the step of a plain training loop."""

import itertools

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

import shoal


def layers(*widths):
    pairs = itertools.pairwise(widths)
    inner = [part for a, b in pairs for part in (nn.Linear(a, b), nn.SiLU())]
    return nn.Sequential(*inner[:-1])


def models(hp):
    width = hp["width"]
    return {
        "generator": layers(4, width, width, 2),
        "discriminator": layers(2, width, width, 1),
    }


def ring(seed, points=4096):
    random = torch.Generator().manual_seed(seed)
    angle = 2 * torch.pi * torch.rand(points, generator=random)
    around = torch.stack([angle.cos(), angle.sin()], dim=1)
    return around + 0.05 * torch.randn(points, 2, generator=random)


def data(hp):
    train = torch.utils.data.DataLoader(ring(seed=0), batch_size=128, shuffle=True)
    return train, [ring(seed=1, points=1024)]


def optimizers(named_parameters, hp):
    named = list(named_parameters)  # "generator.0.weight", ...

    def of(model):
        return [p for name, p in named if name.startswith(model)]

    return {
        "generator": torch.optim.Adam(of("generator"), lr=hp["lr"], betas=(0.5, 0.99)),
        "discriminator": torch.optim.Adam(of("discriminator"), lr=2 * hp["lr"], betas=(0.5, 0.99)),
    }


def step(models, real, optimizers, hp):
    """What the loop of a plain script does with one batch."""
    fake = models.generator(torch.randn(len(real), 4, device=real.device))

    right, wrong = models.discriminator(real), models.discriminator(fake.detach())
    d_loss = cross_entropy(right, torch.ones_like(right))
    d_loss = d_loss + cross_entropy(wrong, torch.zeros_like(wrong))
    optimizers.discriminator.zero_grad()
    d_loss.backward()
    optimizers.discriminator.step()

    judged = models.discriminator(fake)
    g_loss = cross_entropy(judged, torch.ones_like(judged))
    optimizers.generator.zero_grad()
    g_loss.backward()
    optimizers.generator.step()
    return {"generator": g_loss, "discriminator": d_loss}


def evaluate(models, real, hp):
    """How far the fakes are from the ring, and the ring from the nearest fake."""
    fake = models.generator(torch.randn(len(real), 4, device=real.device))
    far = (fake.norm(dim=1) - 1).abs().mean()
    return {"off_ring": far, "missed": torch.cdist(real, fake).min(dim=1).values.mean()}


study = shoal.Study(
    "gan",
    shoal.Recipe(model=models, data=data, optimizer=optimizers, step=step, evaluate=evaluate),
    space=shoal.grid(width=[32, 64], lr=[3e-4, 1e-3]),
    epochs=5,
    metric="valid_missed",
)

if __name__ == "__main__":  # python gan.py, or: shoal run gan.py
    report = study.run(hardware=shoal.Hardware.virtual(devices=2, memory="8MiB"))
    print(report)
    best = report.best.load()  # {"generator": ..., "discriminator": ...}, trained
