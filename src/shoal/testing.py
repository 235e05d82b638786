"""What shoal is measured against, and builders for tests: public, for outsiders too.

``plain_loop`` is the definition of training alone. ``compare`` and ``assert_same`` say
whether a trial of a study ended on the same bits, and name the first that differ.

    plain = plain_loop(recipe, trial.hp, trial.seed, steps=100)
    assert_same(plain, trial)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from shoal.alone import PlainResult, PlainSource, backward_group, evaluate, optimizer_state
from shoal.builders import (
    ManualClock,
    make_device,
    make_job,
    make_layer,
    make_measure,
    make_shard,
)
from shoal.efficiency import SeedEfficiency, StaleEfficiency, stale_efficiency
from shoal.memory.store import same_bits
from shoal.plain import (
    PlainTrial,
    array_loop,
    plain_2bw_loop,
    plain_data_parallel_loop,
    plain_loop,
    plain_population,
    plain_wide_loop,
)
from shoal.rng import RngState

__all__ = [
    "Comparison",
    "ManualClock",
    "PlainResult",
    "PlainSource",
    "PlainTrial",
    "SeedEfficiency",
    "StaleEfficiency",
    "Trained",
    "array_loop",
    "assert_same",
    "backward_group",
    "compare",
    "evaluate",
    "make_device",
    "make_job",
    "make_layer",
    "make_measure",
    "make_shard",
    "optimizer_state",
    "plain_2bw_loop",
    "plain_data_parallel_loop",
    "plain_loop",
    "plain_population",
    "plain_wide_loop",
    "same_bits",
    "stale_efficiency",
]


# ---------------------------------------------------------------- comparing


class Comparison(NamedTuple):
    """Whether two trained states are the same bits; ``first_difference`` is words, or empty."""

    equal: bool
    tensors: int
    first_difference: str


class Trained(Protocol):
    """What ``assert_same`` needs of a trial's result."""

    @property
    def number(self) -> int: ...
    @property
    def history(self) -> Sequence[Mapping[str, Any]]: ...
    def load_state(self) -> Mapping[str, Any]: ...


@dataclass(slots=True)
class _Tally:
    """What a walk over two states has found so far."""

    tensors: int = 0
    differences: list[str] = field(default_factory=list)


def compare(
    plain: PlainResult, state: Mapping[str, Any], *, losses: Sequence[float] | None = None
) -> Comparison:
    """Compare a trial's state with the plain loop's, bit for bit.

    Weights, buffers, optimizer state and groups by parameter name, schedule, random
    streams, the step, and ``losses`` (one per step) when given. A tied weight may stand
    under any of its names; buffers that a checkpoint omits are not asked for.
    """
    expected = plain.state()
    tally = _Tally()
    _compare_model(plain.model, state["model"], tally)
    _walk("optimizer", expected["optimizer"], state["optimizer"], tally)
    _walk("schedule", expected["schedule"], state["schedule"], tally)
    _compare_rng(expected["rng"], state["rng"], tally)
    _walk("step", expected["step"], state["step"], tally)
    if losses is not None:
        _walk("losses", list(plain.losses), list(losses), tally)
    first = tally.differences[0] if tally.differences else ""
    return Comparison(not tally.differences, tally.tensors, first)


def assert_same(
    plain: PlainResult, trial: Trained, *, losses: Sequence[float] | None = None
) -> None:
    """Raise AssertionError with the first difference unless ``trial`` ended on the plain bits.

    Beside the state, compares every validation metric of the trial's history, and
    ``losses``, one per step, when given.
    """
    found = compare(plain, trial.load_state(), losses=losses)
    if not found.equal:
        raise AssertionError(
            f"trial {trial.number} differs from the loop: {found.first_difference}"
        )
    tally = _Tally()
    _walk("metrics", _valid_rows(plain.history), _valid_rows(trial.history), tally)
    if tally.differences:
        raise AssertionError(f"trial {trial.number}: {tally.differences[0]}")


def _valid_rows(history: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    rows = {row["step"]: row["metrics"] for row in history}
    return {
        step: {name: value for name, value in metrics.items() if name.startswith("valid_")}
        for step, metrics in rows.items()
        if any(name.startswith("valid_") for name in metrics)
    }


def _compare_model(model: nn.Module, found: Mapping[str, Tensor], tally: _Tally) -> None:
    known: dict[str, Tensor] = dict(model.named_buffers(remove_duplicate=False))
    known |= dict(model.named_parameters(remove_duplicate=False))
    own = {key: v for key, v in model.state_dict().items() if key.endswith("_extra_state")}
    first_name: dict[int, str] = {}
    for name, tensor in known.items():
        first_name.setdefault(id(tensor), name)
    stated = {first_name[id(known[name])] for name in model.state_dict() if name in known}
    present = {first_name[id(known[name])] for name in found if name in known}
    tally.differences += [f"model: {name!r} is missing" for name in sorted(stated - present)]
    for name, tensor in found.items():
        if name in known:
            _walk(f"model {name!r}", known[name], tensor, tally)
        elif name in own:
            _walk(f"model {name!r}", own[name], tensor, tally)
        else:
            tally.differences.append(f"model: {name!r} is no parameter or buffer of the model")


def _compare_rng(expected: RngState, found: RngState, tally: _Tally) -> None:
    for stream in ("torch", "python", "numpy", "cuda"):
        _walk(
            f"random stream {stream!r}", getattr(expected, stream), getattr(found, stream), tally
        )


def _walk(name: str, expected: Any, found: Any, tally: _Tally) -> None:
    """Compare two structures of containers, tensors, arrays and scalars; note each difference."""
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        tally.tensors += 1
        if not same_bits(expected, found):
            tally.differences.append(f"{name}: {_describe(expected, found)}")
    elif isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in expected.keys() | found.keys():
            if key in expected and key in found:
                _walk(f"{name} {key!r}", expected[key], found[key], tally)
            else:
                owner = "the plain loop" if key in expected else "the trial"
                tally.differences.append(f"{name} {key!r} exists in {owner} only")
    elif _is_sequence(expected) and _is_sequence(found):
        if len(expected) != len(found):
            tally.differences.append(
                f"{name}: {len(expected)} entries expected, {len(found)} found"
            )
        for index, pair in enumerate(zip(expected, found, strict=False)):
            _walk(f"{name}[{index}]", *pair, tally)
    elif isinstance(expected, np.ndarray) and isinstance(found, np.ndarray):
        if not np.array_equal(expected, found):
            tally.differences.append(f"{name}: the arrays differ")
    elif not _same_scalar(expected, found):
        tally.differences.append(f"{name}: {expected!r} expected, {found!r} found")


def _is_sequence(value: object) -> bool:
    return isinstance(value, list | tuple | deque)


def _same_scalar(expected: object, found: object) -> bool:
    expected, found = _as_saved(expected), _as_saved(found)
    if isinstance(expected, float) and isinstance(found, float) and math.isnan(expected):
        return math.isnan(found)
    return type(expected) is type(found) and bool(expected == found)


def _as_saved(value: object) -> object:
    """A number of NumPy's in a group as Python's, which older checkpoints have in its place."""
    return value.item() if isinstance(value, np.generic) else value


def _describe(expected: Tensor, found: Tensor) -> str:
    if expected.dtype != found.dtype or expected.shape != found.shape:
        return (
            f"{expected.dtype} {tuple(expected.shape)} expected, "
            f"{found.dtype} {tuple(found.shape)} found"
        )
    # As float64 a NaN, or a zero's sign, may hide a difference; then only the count speaks.
    wide = torch.complex128 if expected.is_complex() else torch.float64
    one, other = expected.detach().cpu().to(wide), found.detach().cpu().to(wide)
    count = int((one != other).sum())
    largest = float((one - other).abs().max())
    return f"{count} of {expected.numel()} elements differ, the largest by {largest:.3g}"
