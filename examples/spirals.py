"""A study of your own module: how wide, and how fast, to tell two spirals apart?"""

import torch
from torch import nn

import shoal


def model(hp):
    width = hp["width"]
    layers = [nn.Linear(2, width), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(width, 2))


def spirals(seed, points=4096):
    random = torch.Generator().manual_seed(seed)
    label = torch.randint(2, (points,), generator=random)
    turn = 9 * torch.rand(points, generator=random).sqrt()
    angle = turn + torch.pi * label
    x = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1) / 5
    return torch.utils.data.TensorDataset(x, label)


def data(hp):
    train = torch.utils.data.DataLoader(spirals(seed=0), batch_size=128, shuffle=True)
    valid = torch.utils.data.DataLoader(spirals(seed=1), batch_size=128)
    return train, valid


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


def accuracy(output, batch):
    return (output.argmax(-1) == batch[1]).float().mean().item()


study = shoal.Study(
    "spirals",
    shoal.Recipe(model=model, data=data, loss=loss, metrics={"accuracy": accuracy}),
    space=shoal.grid(width=[64, 256], lr=[1e-3, 3e-3]),
    epochs=5,
    metric="valid_accuracy",
    mode="max",
)

if __name__ == "__main__":  # python spirals.py, or: shoal run spirals.py
    report = study.run(hardware=shoal.Hardware.virtual(devices=2, memory="2MiB"))
    print(report)
    best = report.best.load()  # your own nn.Module, trained
