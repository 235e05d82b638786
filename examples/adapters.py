"""A study of adapters (LoRA) for a model that is frozen: which rank, which scale, how fast?"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, layer_norm, pad, scaled_dot_product_attention
from torch.utils.data import DataLoader

import shoal

WORDS, WIDTH, CLASSES, MULTIPLE = 2000, 64, 4, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, WIDTH))

    def forward(self, x):
        seen = scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        x = layer_norm(x + self.out(seen), (WIDTH,))
        return layer_norm(x + self.mlp(x), (WIDTH,))


class Adapted(nn.Module):
    """A frozen linear layer, and a product of two narrow ones that learns what it lacks."""

    def __init__(self, layer, rank, alpha):
        super().__init__()
        self.layer, self.scaling = layer, alpha / rank
        self.down, self.up = nn.Linear(WIDTH, rank, False), nn.Linear(rank, WIDTH, False)
        nn.init.zeros_(self.up.weight)  # it begins as the layer is

    def forward(self, x):
        return self.layer(x) + self.scaling * self.up(self.down(x))


def pretrained():
    """Stands for ``from_pretrained(...)``: the same weights in every trial."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(3)))


def model(hp):
    base = pretrained().requires_grad_(False)
    for block in base[1:]:
        for name in ("query", "value"):
            setattr(block, name, Adapted(getattr(block, name), hp["rank"], hp["alpha"]))
    return base.append(nn.Linear(WIDTH, CLASSES))


def loss(output, batch):
    return cross_entropy(output.mean(1), batch[1])


def texts(seed, count):
    """Words, 8 to 40 a text, and its class, of which two of the words are signs."""
    random = torch.Generator().manual_seed(seed)
    for label in torch.randint(CLASSES, (count,), generator=random).tolist():
        length = int(torch.randint(8, 41, (1,), generator=random))
        words = torch.randint(10, WORDS, (length,), generator=random)
        yield words.index_fill(0, torch.tensor([1, length // 2]), 1 + label), label


def padded(rows):
    words, labels = zip(*rows, strict=True)
    longest = -(-max(map(len, words)) // MULTIPLE) * MULTIPLE
    return torch.stack([pad(w, (0, longest - len(w))) for w in words]), torch.tensor(labels)


def data(hp):
    train = DataLoader([*texts(0, 512)], batch_size=8, shuffle=True, collate_fn=padded)
    return train, DataLoader([*texts(1, 128)], batch_size=8, collate_fn=padded)


study = shoal.Study(
    "adapters",
    shoal.Recipe(model=model, data=data, loss=loss),
    space=shoal.grid(lr=[3e-4, 1e-3], rank=[2, 8], alpha=[8, 16], seed=[0]),
    epochs=3,
)

if __name__ == "__main__":  # python adapters.py, or: shoal run adapters.py
    report = study.run(hardware=shoal.Hardware.virtual(devices=1, memory="64MiB"), fuse="auto")
    print(report)
    learned = {n: p for n, p in report.best.load().named_parameters() if p.requires_grad}
