"""From how many tokens a step on does spilling cost nothing? Pure.

[Note: the model]
A step over T tokens computes c FLOPs per token and parameter at F FLOP/s, and moves b bytes per
parameter over each of: the link up, the link down, both together, the host's memory. What moves
hides behind what computes when

    T >= (F / c) * max(b_up / B_up, b_down / B_down, (b_up + b_down) / B_both, b_host / D)

c is 6, and 8 where a backward runs its forward again. It is a bound for many trials on one
device, or for one that overlaps perfectly; attention's FLOPs are left out, so that long
sequences need fewer tokens than this says. Bytes per parameter and step, weights loaded once for
the forward and once for the backward whatever the number of micro-batches:

    precision  optimizer   up  down  host
    fp32       host         8     4    40   28 of AdamW, 12 of the copies
    fp32       device      16    12    28   copies only: weights 4, then weights and state 12
    bf16       host         4     2    34   28 of AdamW on a float32 master, 6 of the copies
    bf16       device      16    14    30   copies only: bf16 2, then 2 + 12 of master and state

D is the triad's bandwidth for what is copied, and for the 28 bytes what AdamW itself gets of the
memory: more than the triad where it is bound by memory (it writes what it has just read), less
where the cores are too slow for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.bench.measured import Measured
from shoal.core.profile import Precision
from shoal.core.spec import Place

FLOPS_PER_TOKEN = 6  # and parameter: forward and backward
FLOPS_WITH_RECOMPUTE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Where the optimizer steps, in which precision, and the bytes per parameter it moves."""

    precision: Precision
    optimizer: Place
    up: float
    down: float
    host: float


SCHEMES = (
    Scheme(precision="fp32", optimizer="host", up=8, down=4, host=40),
    Scheme(precision="fp32", optimizer="device", up=16, down=12, host=28),
    Scheme(precision="bf16", optimizer="host", up=4, down=2, host=34),
    Scheme(precision="bf16", optimizer="device", up=16, down=14, host=30),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeFrom:
    """Tokens a step from which spilling is free, and every number that went in.

    ``up``, ``down``, ``both`` and ``host`` are the tokens that each of them asks for.
    """

    scheme: Scheme
    recompute: bool
    flops_per_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    both_bytes_per_s: float
    host_bytes_per_s: float
    up: float
    down: float
    both: float
    host: float

    @property
    def tokens(self) -> float:
        return max(self.up, self.down, self.both, self.host)

    @property
    def limit(self) -> str:
        """What asks for the most: ``up``, ``down``, ``both`` directions, or ``host`` memory."""
        asked = {"up": self.up, "down": self.down, "both": self.both, "host": self.host}
        return max(asked, key=lambda name: asked[name])


def free_from(measured: Measured) -> tuple[FreeFrom, ...]:
    """Every scheme on this machine, with and without recompute."""
    return tuple(
        _free_from(measured, scheme, recompute=recompute)
        for scheme in SCHEMES
        for recompute in (True, False)
    )


def _free_from(measured: Measured, scheme: Scheme, *, recompute: bool) -> FreeFrom:
    link, flops_per_s = measured.link, measured.block(scheme.precision).flops_per_s
    host = host_bandwidth(measured, scheme)
    parameters_per_s = flops_per_s / (FLOPS_WITH_RECOMPUTE if recompute else FLOPS_PER_TOKEN)
    return FreeFrom(
        scheme=scheme,
        recompute=recompute,
        flops_per_s=flops_per_s,
        up_bytes_per_s=link.up.best,
        down_bytes_per_s=link.down.best,
        both_bytes_per_s=link.both.best,
        host_bytes_per_s=host,
        up=parameters_per_s * scheme.up / link.up.best,
        down=parameters_per_s * scheme.down / link.down.best,
        both=parameters_per_s * (scheme.up + scheme.down) / link.both.best,
        host=parameters_per_s * scheme.host / host,
    )


def host_bandwidth(measured: Measured, scheme: Scheme) -> float:
    """Bytes per second of the host's memory over all that a scheme moves through it."""
    triad, optimizer = measured.host.triad_all.best, measured.optimizer
    if scheme.optimizer == "device":
        return triad
    stepped = optimizer.bytes_per_parameter
    seconds = stepped / optimizer.bytes_per_s + (scheme.host - stepped) / triad
    return scheme.host / seconds
