"""What torchrun starts: a rank of a training in stages, which compares it with plain PyTorch.

python launched.py STAGES WIDTH SCHEDULE direct|host
"""

from __future__ import annotations

import sys

import torch
from pipelining import LR, sequence

from shoal.pipeline.run import run_stages
from shoal.testing import compare, plain_2bw_loop, plain_loop


def main() -> None:
    stages, width, schedule = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    is_direct = sys.argv[4] == "direct"
    recipe, seed, steps = sequence(4, clip_grad_norm=0.1), 5, 3
    torch.manual_seed(1)
    before = torch.get_rng_state()
    shape = {"steps": steps, "stages": stages, "width": width, "schedule": schedule}
    trained = run_stages(recipe, LR, seed, direct=is_direct, **shape)
    assert trained.carried.endswith("to device" if is_direct else "host memory"), trained.carried
    assert torch.equal(before, torch.get_rng_state())
    alone = plain_2bw_loop if schedule == "2bw" else plain_loop
    plain = alone(recipe, LR, seed, steps=steps, copies=width)
    found = compare(plain, trained.state, losses=trained.losses)
    assert found.equal, found.first_difference
    sys.stdout.write("EQUAL\n")


if __name__ == "__main__":
    main()
