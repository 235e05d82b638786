"""One plain step against the finest chain, bit for bit, before a chain is trusted."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor, nn

from shoal.core.errors import ShoalError
from shoal.frames import user_line
from shoal.partition.build import build_chain, clone_batch, configs_with_cache
from shoal.partition.chain import Chain
from shoal.partition.dataread import DataReads, contents
from shoal.partition.discover import NotCuttable
from shoal.partition.drive import every_layer, sharded_backward, sharded_evaluation
from shoal.partition.preserve import BufferWatch, evaluating, preserved, same_values, shaken
from shoal.partition.template import flatten
from shoal.partition.writes import WriteWatch
from shoal.recipes.recipe import Batch, Recipe, autocast, loss_and_output
from shoal.rng import RngState, capture_rng, same_rng

_NOISE_FACTOR = 2.0  # a chain may differ this much more than two plain runs do
_NOT_IN_TRAINING = (
    "; a step of training is equal, so its forward reads in evaluation or without gradients what "
    "it does not read in training, or keeps something from one run to the next"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotReport:
    """What the pilot found. ``chain`` is None when the model cannot be cut.

    ``bitwise``: the chain equalled the model in loss, output, every gradient, every changed
    buffer and the random state. ``notes`` say in words why not, and what was switched off.
    """

    chain: Chain | None
    bitwise: bool
    loss: float
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a run left behind: tensors by what they are, and the random state.

    ``kept``: the attributes in which modules have what a forward computed with a gradient.
    """

    tensors: Mapping[str, Tensor]
    rng: RngState
    kept: tuple[str, ...] = ()


def pilot(model: nn.Module, recipe: Recipe, batch: Batch, device: torch.device) -> PilotReport:
    """Compare one plain step of ``model`` with its chain cut after every layer.

    ``model`` and ``batch`` are on ``device``, the model in training mode. Holds the whole
    model, its activations and two sets of gradients. Afterwards all is as before, except
    that key-value caches stay switched off until the chain is closed.
    """
    with _Memory(model) as memory:
        plain = _plain_step(model, recipe, batch, device)
    if not memory.written and memory.is_handed_out:  # it may hold by now what is written each time
        _look_again(memory, model, recipe, batch, device)
    if why_not := _sparse_gradients(plain) or memory.in_words():
        loss = float(plain.tensors["the loss"])
        return PilotReport(chain=None, bitwise=False, loss=loss, notes=(why_not,))
    report = _attempt(model, recipe, batch, device, plain)
    if report.chain is not None or not configs_with_cache(model):
        return report
    second = _attempt(model, recipe, batch, device, plain, switch_caches_off=True)
    return second if second.chain is not None else report


def _look_again(
    memory: _Memory, model: nn.Module, recipe: Recipe, batch: Batch, device: torch.device
) -> None:
    """A step with other weights, which code may not stand; what it writes later is seen then."""
    try:
        with shaken(model), memory:
            _plain_step(model, recipe, batch, device)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception:
        return


def _sparse_gradients(plain: _Outcome) -> str:
    """Why a model cannot be cut whose gradients are no dense tensors; empty where they are."""
    sparse = [n for n, tensor in plain.tensors.items() if tensor.layout is not torch.strided]
    if not sparse:
        return ""
    return (
        f"{sparse[0]} is sparse, and what is cut keeps its gradients in flat memory, which has no "
        "place for one; a layer built with sparse=False has a dense one"
    )


class _Memory:
    """The memory of a model's weights, to which a step has written if it is other than before.

    Torch's own writes are put back by then: what is left are those that torch knows nothing of.
    """

    def __init__(self, model: nn.Module) -> None:
        self._weights = dict(model.named_parameters())
        self._reads = DataReads(list(self._weights.values()))
        self.written: list[str] = []

    @property
    def is_handed_out(self) -> bool:
        """Whether code asked for the memory of one."""
        return bool(self._reads)

    def __enter__(self) -> Self:
        self._before = {name: contents(weight) for name, weight in self._weights.items()}
        self._reads.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._reads.__exit__(*error)
        held = self._before.items()
        self.written += [name for name, what in held if contents(self._weights[name]) != what]

    def in_words(self) -> str:
        """Why such a model cannot be cut; empty where nothing was written."""
        if not self.written:
            return ""
        return (
            "its forward or backward writes into the memory of the weight "
            f"{self.written[0]!r} without torch, as NumPy and kernels of one's own do, and in "
            "shards a weight is elsewhere before and after its layer; do that after the "
            "optimizer's step, in a class or a hook of the optimizer's"
        )


def _attempt(
    model: nn.Module,
    recipe: Recipe,
    batch: Batch,
    device: torch.device,
    plain: _Outcome,
    *,
    switch_caches_off: bool = False,
) -> PilotReport:
    loss = float(plain.tensors["the loss"])
    try:
        chain = build_chain(model, recipe, batch, device, switch_caches_off=switch_caches_off)
    except NotCuttable as error:
        return PilotReport(chain=None, bitwise=False, loss=loss, notes=(str(error),))
    try:
        notes = _compare(chain, batch, plain)
    except NotCuttable as error:
        chain.close()
        return PilotReport(chain=None, bitwise=False, loss=loss, notes=(str(error), *chain.notes))
    except BaseException:
        chain.close()
        raise
    return PilotReport(chain=chain, bitwise=not notes, loss=loss, notes=(*notes, *chain.notes))


def _compare(chain: Chain, batch: Batch, plain: _Outcome) -> tuple[str, ...]:
    """Notes on noise; none when the chain equals the model bit for bit.

    Raises:
        NotCuttable: the chain is not the model; names the first difference.
    """
    try:
        sharded = _sharded_step(chain, batch)
        pairs = [(plain, sharded), *_evaluations(chain, batch)]
    except ShoalError as error:
        words = str(error).removesuffix(".")
        raise NotCuttable(f"the pilot of the sharded run failed: {words}") from error
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # whole, the model has done this step
        words = _raises_when_cut(error).removesuffix(".")
        raise NotCuttable(f"{words}{_written_between(chain)}") from error
    different = _differences(plain, sharded)
    for first, second in pairs[1:]:
        if _differences(first, second):
            _require_same_again(chain, batch, plain)
        _require_equal(chain, first, second, cause="" if different else _NOT_IN_TRAINING)
    if chain.record.recomputes:
        with shaken(chain.model):
            plain_step = _plain_step(chain.model, chain.recipe, batch, chain.device)
            _require_equal(chain, plain_step, _sharded_step(chain, batch))
    if not different:
        return ()
    again = _plain_step(chain.model, chain.recipe, batch, chain.device)
    if chain.caches_off and not _differences(again, sharded):
        largest = max(_distance(plain, again, name) for name in different)
        return (f"a plain run with use_cache on differs from one without by up to {largest:.1e}",)
    noise = {name: _distance(plain, again, name) for name in different}
    if any(
        noise[name] == 0 or _distance(plain, sharded, name) > _NOISE_FACTOR * noise[name]
        for name in different
    ):
        _require_equal(chain, plain, sharded)
    worst = max(different, key=lambda name: noise[name])
    return (
        f"two plain runs of this model differ by up to {noise[worst]:.1e} in {worst}; the sharded "
        "run differs from them no more than that",
    )


def _raises_when_cut(error: Exception) -> str:
    line = user_line(error)
    words = f"cut, its code raises{f' at {line}' if line else ''} what it does not raise whole: "
    words += f"{type(error).__name__}: {str(error).removesuffix('.')}"
    if "differentiated Tensor" in str(error):
        words += "; a derivative by what an earlier layer had needs all layers between at once"
    return words


def _require_equal(chain: Chain, plain: _Outcome, sharded: _Outcome, *, cause: str = "") -> None:
    different = _differences(plain, sharded)
    if different:
        name = different[0]
        raise NotCuttable(
            f"sharded training would not equal plain training: {name} differs by "
            f"{_distance(plain, sharded, name):.1e} ({len(different)} of {len(plain.tensors)} "
            f"tensors differ){cause or _likely_cause(chain, plain, different)}"
        )


def _require_same_again(chain: Chain, batch: Batch, plain: _Outcome) -> None:
    """Refuse what keeps something where nothing puts it back: a loss that counts its calls."""
    again = _plain_step(chain.model, chain.recipe, batch, chain.device)
    if "the loss" in _differences(plain, again):
        raise NotCuttable(
            "a step on the same weights, batch and random numbers has another loss each time (by "
            f"{_distance(plain, again, 'the loss'):.1e}): the recipe's loss, or a global that the "
            "code reads, keeps something from one call to the next, and of what is cut forwards "
            "run again. Let it be a buffer of the model"
        )


def _likely_cause(chain: Chain, plain: _Outcome, different: list[str]) -> str:
    layers = range(chain.num_layers)
    shared = sorted({name for layer in layers for name in chain.borrowed_by(layer)})
    blamed = [name for name in shared if f"the gradient of {name!r}" in different]
    if len(blamed) == len(different):  # nothing else is another one
        return f"; the weight {blamed[0]!r} is used in several layers"
    if plain.kept:
        return (
            f"; a forward keeps what it computed in the attribute {plain.kept[0]!r}, and what a "
            "block returns is all that is handed on to other layers and the loss: have it returned"
        )
    return _written_between(chain) or (
        "; something passes between the layers that is neither an argument of a block nor its "
        "output, for example a skip from before the blocks to after them"
    )


def _written_between(chain: Chain) -> str:
    """Of buffers that the forward itself writes: it runs again for each part of it."""
    sections = chain.skeleton.sections
    heads = [layer for layer in range(chain.num_layers) if sections.headed_by(layer) is not None]
    names = sorted({name for layer in heads for name in chain.changing_buffers(layer)})
    if not names:
        return ""
    return (
        f"; the forward itself writes {', '.join(map(repr, names))} between its "
        "blocks, and runs more than once where it is cut. Let a block write it: a module around "
        "the layer that it comes from, with the buffer"
    )


def _differences(plain: _Outcome, sharded: _Outcome) -> list[str]:
    names = list(dict.fromkeys([*plain.tensors, *sharded.tensors]))
    different = [
        name
        for name in names
        if name not in plain.tensors
        or name not in sharded.tensors
        or not same_values(plain.tensors[name], sharded.tensors[name])
    ]
    return different if different or same_rng(plain.rng, sharded.rng) else ["the random state"]


def _distance(first: _Outcome, second: _Outcome, name: str) -> float:
    """Largest difference; infinite where one has no such tensor, or NaN."""
    if name not in first.tensors or name not in second.tensors:
        return float("inf")
    pair = first.tensors[name], second.tensors[name]
    one, other = (t.to(torch.promote_types(t.dtype, torch.float64)) for t in pair)
    if one.shape != other.shape:
        return float("inf")
    distance = float((one - other).abs().max()) if one.numel() else 0.0
    return distance if distance == distance else float("inf")


def _plain_step(model: nn.Module, recipe: Recipe, batch: Batch, device: torch.device) -> _Outcome:
    with preserved(model, device):
        watch = BufferWatch(model)
        mine = clone_batch(batch)
        with torch.enable_grad(), autocast(recipe, device):
            loss = loss_and_output(recipe, model, mine)[0]
        (loss / 1).backward()
        return _outcome(model, loss.detach(), watch, device)


def _sharded_step(chain: Chain, batch: Batch) -> _Outcome:
    with preserved(chain.model, chain.device):
        watch = BufferWatch(chain.model)
        loss = sharded_backward(chain, clone_batch(batch), every_layer(chain))
        return _outcome(chain.model, loss, watch, chain.device)


def _outcome(model: nn.Module, loss: Tensor, watch: BufferWatch, device: torch.device) -> _Outcome:
    tensors = {"the loss": loss}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            tensors[f"the gradient of {name!r}"] = parameter.grad
    for name in sorted(watch.have_other_values()):
        tensors[f"the buffer {name!r}"] = model.get_buffer(name).clone()
    return _Outcome(tensors, capture_rng(device), _kept_with_gradients(model))


def _kept_with_gradients(model: nn.Module) -> tuple[str, ...]:
    """What modules have as attributes that goes back to their parameters, by its name."""
    return tuple(
        f"{path}.{key}" if path else key
        for path, module in model.named_modules()
        for key, value in (*vars(module).items(), *module._buffers.items())
        if isinstance(value, Tensor) and value.grad_fn is not None
        if not {f"{key}_g", f"{key}_orig"} & module._parameters.keys()  # of torch's old norms
    )


def _evaluations(chain: Chain, batch: Batch) -> list[tuple[_Outcome, _Outcome]]:
    """Loss and output without gradients, plain and sharded, in training and evaluation mode."""
    pairs: list[tuple[_Outcome, _Outcome]] = []
    if not chain.skeleton.graph_kernels:  # else training never runs without gradients
        words = " without gradients"
        plain = _evaluate(chain, batch, words, sharded=False)
        pairs.append((plain, _evaluate(chain, batch, words, sharded=True)))
    writes, whole = WriteWatch(chain.model, ()), None
    with evaluating(chain.model):
        with suppress(Exception), writes:  # a model without a loss there is not validated
            whole = _evaluate(chain, batch, " in evaluation", sharded=False)
        if new := writes.names - set(chain.record.written):
            raise NotCuttable(
                f"in evaluation its forward writes to the weight {min(new)!r}, as to rescale "
                "layers for inference, and in shards a weight is elsewhere before and after its "
                "layer"
            )
        if whole is not None:
            pairs.append((whole, _evaluate(chain, batch, " in evaluation", sharded=True)))
    return pairs


def _evaluate(chain: Chain, batch: Batch, when: str, *, sharded: bool) -> _Outcome:
    mine = clone_batch(batch)
    ranges = every_layer(chain) if sharded else ((0, chain.num_layers),)
    with preserved(chain.model, chain.device):
        loss, output = sharded_evaluation(chain, mine, ranges)
        leaves = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]
        tensors = {f"output {index}{when}": leaf for index, leaf in enumerate(leaves)}
        return _Outcome({f"the loss{when}": loss, **tensors}, capture_rng(chain.device))
