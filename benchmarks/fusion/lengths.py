"""How many lengths do the batches of trials have in one step? Counts, no times.

python benchmarks/fusion/lengths.py [--rows 2000]

Texts of 20 to 120 words, batches padded to their longest row, or to a multiple of some number;
each trial reads them in an order of its own. In an array the batches of one length are one pass.
"""

from __future__ import annotations

import argparse
from statistics import mean

import torch


def lengths_of(texts: torch.Tensor, seed: int, rows: int, multiple: int) -> list[int]:
    """Of each batch of an epoch, in the order of this seed."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))
    longest = [int(texts[some].max()) for some in order.split(rows) if len(some) == rows]
    return [-(-length // multiple) * multiple for length in longest]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2000)
    count = parser.parse_args().rows
    texts = torch.randint(20, 121, (count,), generator=torch.Generator().manual_seed(7))
    print("| batch | padded to | trials | lengths a step | lengths in all |")
    print("|---|---|---|---|---|")
    for rows in (8, 32):
        for multiple in (1, 8, 32):
            for trials in (8, 16):
                found = [lengths_of(texts, seed, rows, multiple) for seed in range(trials)]
                each = mean(len(set(step)) for step in zip(*found, strict=True))
                some = len({length for mine in found for length in mine})
                told = f"a multiple of {multiple}" if multiple > 1 else "the longest row"
                print(f"| {rows} | {told} | {trials} | {each:.1f} | {some} |")


if __name__ == "__main__":
    main()
