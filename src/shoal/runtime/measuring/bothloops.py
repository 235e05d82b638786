"""Whether both loops of a spilled step end on the same bits: tried before shards go first.

Shard by shard, a layer runs all micro-batches before the next one runs any. Layers that change the
same statistics, read each other's, or keep anything from one forward for another layer's then find
something else there. What of that is in buffers can be looked up; what is in Python shows when two
batches of the data run in both orders, by the units that a trial runs, and all that they leave
behind is compared bit for bit. Weights are a little off meanwhile: the 0 of a gate at its
initialisation would hide what it lets through later. In random numbers each batch starts where it
did in the plain order.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from shoal.kernels.kernelchoice import repeatable
from shoal.partition.build import clone_batch
from shoal.partition.chain import Chain
from shoal.partition.preserve import BufferWatch, preserved, same_values, shaken
from shoal.partition.wires import storage_key
from shoal.program.ir import Op
from shoal.recipes.recipe import Batch, to_device
from shoal.rng import RngState, capture_rng
from shoal.runtime.measuring.firstbatches import FEW_ROWS, first_rows
from shoal.runtime.streams import Stream
from shoal.runtime.units import ChainUnits, Micro
from shoal.spill.generate import Route

Spans = Sequence[tuple[int, int]]
Outcome = Mapping[str, Tensor]
Starts = Mapping[int, RngState]
"""Where in the random numbers each batch starts."""


def rehearse_orders(
    chain: Chain,
    train: Iterable[Batch],
    spans: Spans,
    here: torch.device,
    device: torch.device,
) -> str:
    """Why micro-batches have to go through these shards one after another; "" if they need not.

    The model is ``here``; it trains on ``device``, whose kernels are the ones that are tried,
    unless it has no room: then a few rows are on the CPU. The first batches of ``train`` are read
    again.
    """
    whole = [clone_batch(batch) for batch in itertools.islice(iter(train), 2)]
    if len(whole) < 2:
        return "its data has one batch"
    few, cpu = [first_rows(batch, FEW_ROWS) for batch in whole], torch.device("cpu")
    tries = [(here, whole)]
    if device.type == "cuda":
        tries = [(here, whole), (here, few), (cpu, few)] if here == device else [(cpu, few)]
    for where, batches in tries:
        chain.model.to(where)
        moved = [to_device(batch, where) for batch in batches]
        with repeatable(where):
            found = why_in_turn(chain.on(where), moved, spans)
        if found is not None:
            return found
        if where.type == "cuda":
            torch.cuda.empty_cache()
    return "two runs of it differ here, so that nobody can tell whether another order would too"


def why_in_turn(chain: Chain, batches: Sequence[Batch], spans: Spans) -> str | None:
    """Why micro-batches have to go through these shards one after another; "" if they need not.

    None where that cannot be told: the plain order has other bits each time, or the device has
    no memory left. ``batches`` are on the chain's device; afterwards the model is as before.
    """
    if shared := _changed_by_several(chain, spans):
        return shared
    try:
        with shaken(chain.model):
            plain, starts = _outcome(chain, batches, spans)
            other, _ = _outcome(chain, batches, spans, starts)
            different = _difference(plain, other)
            if different and _difference(plain, _outcome(chain, batches, spans)[0]):
                return None
    except (torch.OutOfMemoryError, MemoryError):
        return None
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        return f"the other order failed when it was tried: {type(error).__name__}: {text[:200]}"
    if not different:
        return ""
    return (
        f"in the other order {different} would have other bits, as where a layer reads what "
        "another one keeps from one forward to the next"
    )


def _changed_by_several(chain: Chain, spans: Spans) -> str:
    """The buffer that the forwards of several shards change, in words."""
    names: dict[int, str] = {}
    shards: Counter[int] = Counter()
    for span in spans:
        here = {n for layer in range(*span) for n in chain.changing_buffers(layer)}
        buffers = {storage_key(chain.model.get_buffer(name)): name for name in sorted(here)}
        names |= buffers
        shards.update(buffers.keys())
    for buffer, count in shards.items():
        if count > 1:
            return f"the forwards of {count} shards change {names[buffer]!r}"
    return ""


def _outcome(
    chain: Chain, batches: Sequence[Batch], spans: Spans, starts: Starts | None = None
) -> tuple[Outcome, Starts]:
    """What a step of these batches leaves behind, without its optimizer's part.

    In the plain order, and where in the random numbers each batch started; or, where these
    ``starts`` are given, by shard.
    """
    route = Route(len(spans), order="micro" if starts is None else "shard")
    units = ChainUnits(chain, chain.recipe, spans, chain.device, route)
    written = [name for shard in range(len(spans)) for name in units.written(shard)]
    with preserved(chain.model, chain.device, guard_parameters=bool(written)):
        watch = BufferWatch(chain.model)
        tensors, found = _losses(units, route, batches, starts)
        for name, parameter in chain.model.named_parameters():
            if parameter.grad is not None:
                tensors[f"the gradient of {name!r}"] = parameter.grad
        for name in sorted(watch.changed()):
            tensors[f"the buffer {name!r}"] = chain.model.get_buffer(name).clone()
        for name in written:
            tensors[f"the parameter {name!r}"] = chain.model.get_parameter(name).detach().clone()
        return tensors, found


def _losses(
    units: ChainUnits, route: Route, batches: Sequence[Batch], starts: Starts | None
) -> tuple[dict[str, Tensor], Starts]:
    """The losses of a step's units in the order of its program, and the random state at the end.

    And where each batch started.
    """
    micros: dict[int, Micro] = {}
    found: dict[int, RngState] = {}
    told: dict[str, Tensor] = {}
    device = units.chain.device
    for action in route.step(len(batches), clip=False).devices[0]:
        number, shard = action.micro, action.shard
        if action.op not in (Op.F, Op.B) or number is None or shard is None:
            continue
        if number not in micros:
            found[number] = capture_rng(device)
            micros[number] = units.begin(clone_batch(batches[number]))
            micros[number].stream = None if starts is None else Stream(starts[number])
        if action.op is Op.F:
            units.forward(shard, micros[number])
        elif (loss := units.backward(shard, micros[number])) is not None:
            told[f"the loss of batch {number}"] = loss
            end = capture_rng(device)
            told[f"the random state after batch {number}"] = (
                end.torch if end.cuda is None else end.cuda
            )
    return told, found


def _difference(one: Outcome, other: Outcome) -> str:
    """The first that has not the same bits in both, or is not there."""
    for name in (*one, *other):
        if name not in one or name not in other or not same_values(one[name], other[name]):
            return name
    return ""
