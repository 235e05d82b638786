"""What the user brings: callables for model, data, loss, optimizer, and their defaults.

The functions below the class are the definition of how a recipe is used: the plain
loop (``shoal.testing.plain_loop``) and the workers call the same ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from shoal.core.arguments import names_what_is_meant
from shoal.core.errors import SpecError
from shoal.core.spec import HyperParameters as HyperParameters
from shoal.core.spec import Scalar
from shoal.core.stale import Stale
from shoal.core.values import as_number, flag, is_number, one_of, optional_whole, plain, whole
from shoal.frames import line_of
from shoal.kernels import rounding
from shoal.kernels.rounding import Rounding
from shoal.recipes.modelchecks import check_model
from shoal.recipes.recipechecks import check_functions, check_metrics, check_schedule
from shoal.recipes.several import (
    Models,
)
from shoal.recipes.wholeset import WholeSet
from shoal.rowwise import LossByRows

Batch = Any
Output = Any
HP = Mapping[str, Scalar]
Found = dict[str, Any]
"""Of a validation batch, by name: numbers, and parts of what is computed of all batches."""

NO_LSTM = (
    "this CPU cannot run an nn.LSTM in bfloat16 under autocast: oneDNN, which torch hands it to, "
    "has that on CPUs with AVX-512 only. Train it with precision='fp32', on a GPU, or open "
    "torch.autocast('cpu', enabled=False) around the LSTM in the model's forward."
)


@names_what_is_meant(
    **dict.fromkeys(("lr_scheduler", "scheduler"), "schedule"),
    **dict.fromkeys(("criterion", "loss_fn"), "loss"),
    **dict.fromkeys(("accumulate_grad_batches", "gradient_accumulation_steps"), "accumulate"),
    **dict.fromkeys(("gradient_clip_val", "max_grad_norm"), "clip_grad_norm"),
    **dict.fromkeys(("training_step", "train_step"), "step"),
)
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to build, feed and train one model; unmodified PyTorch throughout.

    Args:
        model: ``(hp) -> nn.Module``, built on the CPU.
        data: ``(hp) -> (train, valid)``; each can be iterated again and again and yields
            batches; ``valid`` may be None.
        loss: ``(output, batch) -> scalar Tensor``; default: the output's own ``loss``. One that
            has a parameter called ``hp`` is given the trial's hyperparameters by that name, as
            ``(output, batch, hp)``: a label smoothing or a weight of a term to search over. In an
            array its floats may differ from trial to trial; it reads them by names that its code
            spells out, as in ``hp["smoothing"]``. See docs/design/0015-fusion.md.
        inputs: ``(batch) -> args tuple or kwargs dict`` of the model's forward. Default: a
            Tensor is the one argument, of a tuple or list the first item, a mapping is
            the keyword arguments.
        optimizer: ``(named_parameters, hp) -> Optimizer``, or a list, tuple or mapping of
            several, each over parameters of its own (Muon and AdamW). Default: fused AdamW with
            ``hp["lr"]`` and ``hp.get("weight_decay", 0.01)``; where ``model`` returned a mapping,
            one for each module that has something to train, by its name.
        schedule: ``(optimizer, hp) -> LRScheduler``, stepped once per optimizer step; gets what
            ``optimizer`` returned, and may return several too.
            Parameters are unfrozen in a schedule, which is looked at before training begins, and
            not in a forward, once an epoch or once a step::

                class Unfreeze(torch.optim.lr_scheduler.LambdaLR):
                    def step(self):  # Unfreeze(optimizer, lambda epoch: 1.0)
                        super().step()
                        for p in self.optimizer.param_groups[0]["params"]:
                            p.requires_grad_(p.requires_grad or self.last_epoch >= 3)

        schedule_interval: ``"epoch"`` steps the schedule after the last step of each epoch
            instead, as ``StepLR(optimizer, 30)`` is mostly meant; the training data has a length.
            ``"evaluation"`` steps it after each evaluation, with ``schedule_metric`` if its
            ``step`` takes one, as that of ``ReduceLROnPlateau``; on one device. One at the end,
            where no longer training would have it, does not count.
        schedule_metric: what an evaluation found, for such a schedule.
        metrics: name -> ``(output, batch) -> float``, averaged over the validation batches and
            recorded as ``valid_<name>``; with a parameter called ``hp`` as in ``loss``. Or a
            ``shoal.WholeSet``, which is computed once of all batches: AUC, F1, a mean that weighs
            a short last batch less.
        clip_grad_norm: the largest global gradient norm, or None; or ``(hp) -> norm or None``, for
            each trial its own. A trial for which it says None is not clipped, but is planned as
            one that is: a spilled one begins no step before the whole backward is done.
        accumulate: batches per optimizer step.
        precision: ``"fp32"``; ``"bf16"`` for autocast with float32 parameters; ``"bf16-sr"``
            for autocast with weights in bfloat16 alone, which a step rounds stochastically
            (biases, norms and the optimizer's state stay float32).
        loss_rows: so many rows at a time of the projection to a large vocabulary and of its
            ``F.cross_entropy``, forward and backward, so that the logits are never wholly in
            memory; None computes them at once. It is another order of sums, so other bits,
            and part of the numerics key. See docs/design/0011-loss-by-rows.md.
        on_nonfinite: ``"fail"`` ends a trial whose loss is not finite before its step,
            ``"ignore"`` trains on as a plain loop would.
        step: a step of one's own, ``(models, batch, optimizers, hp) -> loss``: forwards,
            backwards, clipping and the optimizers' steps, called once for each batch with what
            ``model`` and ``optimizer`` returned. ``model`` may return a mapping of modules then.
            It returns a scalar, or a mapping name -> scalar: each is recorded as ``train_<name>``,
            and ``train_loss`` is the one called "loss", or their sum. One that has an argument
            ``number`` is told the number of the step, from 0. It clears the gradients itself: one
            that goes on from those of the step before is refused. A loss that is not finite fails
            the trial after the step that had it. See docs/design/0019-a-step-of-ones-own.md.
        evaluate: with ``step``, ``(models, batch, hp) -> value``, or a mapping name -> value, of
            one validation batch; means are recorded as ``valid_<name>``, a bare value as
            ``valid_loss``. In place of ``loss``, ``inputs`` and ``metrics``.
        splittable: may a batch be cut by rows? ``Pipelined(micro_batches=...)`` does so, and
            ``DataParallel``.
        share_data: may the trials of a worker share what ``data`` made, where they agree in all
            hyperparameters that it read? True says that it follows from these alone, that the
            function leaves nothing elsewhere that the loss or anything else reads, and that
            nobody writes to it. Only plain loaders over a TensorDataset are shared
            (docs/design/0007).
        stale: ``shoal.Stale(efficiency=...)`` lets the planner take ``"2bw"`` where a pipeline's
            schedule is left open and the loss is reached clearly sooner so; None: never. It
            changes nothing else: a trial that has begun goes on as it began.

    Raises:
        SpecError: a value that no training could mean.
    """

    model: Callable[[HP], nn.Module | Mapping[str, nn.Module]]
    data: Callable[[HP], tuple[Iterable[Batch], Iterable[Batch] | None]]
    loss: Callable[..., Tensor] | None = None
    inputs: Callable[[Batch], tuple[Any, ...] | Mapping[str, Any]] | None = None
    optimizer: Callable[[Any, HP], Any] | None = None
    schedule: Callable[[Any, HP], Any] | None = None
    metrics: Mapping[str, Callable[..., float]] = field(default_factory=dict)
    clip_grad_norm: float | Callable[[HP], float | None] | None = None
    accumulate: int = 1
    precision: str = "fp32"
    loss_rows: int | None = None
    on_nonfinite: str = "fail"
    step: Callable[..., Any] | None = None
    evaluate: Callable[[Any, Batch, HP], Any] | None = None
    splittable: bool = False
    share_data: bool = False
    stale: Stale | None = None
    schedule_interval: str = "step"
    schedule_metric: str = "valid_loss"

    def __post_init__(self) -> None:
        check_functions(vars(self))
        check_metrics(self.metrics)
        self._set("accumulate", whole("accumulate", self.accumulate, 1))
        self._set("clip_grad_norm", _norm(self.clip_grad_norm))
        known = ("fp32", "bf16", rounding.NAME)
        self._set("precision", one_of("precision", self.precision, known))
        self._set("loss_rows", optional_whole("loss_rows", self.loss_rows, 1))
        self._set("on_nonfinite", one_of("on_nonfinite", self.on_nonfinite, ("fail", "ignore")))
        intervals = ("step", "epoch", "evaluation")
        asked = one_of("schedule_interval", self.schedule_interval, intervals)
        self._set("schedule_interval", asked)
        check_schedule(vars(self))
        for name in ("splittable", "share_data"):
            self._set(name, flag(f"Recipe({name}=...)", getattr(self, name)))
        if self.stale is not None and not isinstance(self.stale, Stale):
            raise SpecError(
                f"Recipe(stale=...) is shoal.Stale(efficiency=...) or None, got {self.stale!r}"
            )
        self._check_step()

    def metric_functions(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """The functions that metrics consist of, each under a name of its own."""
        for name, metric in self.metrics.items():
            if isinstance(metric, WholeSet):
                yield f"{name}.collect", metric.collect
                yield f"{name}.compute", metric.compute
            else:
                yield name, metric

    def _set(self, name: str, value: object) -> None:
        """What was given, as it is kept."""
        object.__setattr__(self, name, value)

    def _check_step(self) -> None:
        """What a step of one's own does itself is not to be asked for beside it."""
        if self.step is None:
            if self.evaluate is not None:
                raise SpecError(
                    "Recipe(evaluate=...) belongs to a step of one's own, Recipe(step=...). "
                    "Without one validation is the recipe's loss and its metrics."
                )
            return
        its_own = {
            "accumulate": (1, "is called once for each batch. Give larger batches, or cut them"),
            "clip_grad_norm": (None, "clips its gradients itself, with clip_grad_norm_"),
            "precision": ("fp32", "opens torch.autocast around its forwards itself"),
            "loss_rows": (None, "computes its losses itself"),
            "stale": (None, "takes the newest weights, on one device"),
        }
        for name, (default, words) in its_own.items():
            if getattr(self, name) != default:
                raise SpecError(
                    f"Recipe({name}={getattr(self, name)!r}) cannot be asked for with step=...: a "
                    f"step of one's own {words}. Leave {name}= out."
                )
        unused = [name for name in ("loss", "inputs", "metrics") if getattr(self, name)]
        if self.evaluate is not None and unused:
            raise SpecError(
                f"Recipe(evaluate=...) says what validation measures, so {', '.join(unused)} "
                "would not be used. Leave out one or the other."
            )


def _norm(asked: object) -> float | Callable[[HP], float | None] | None:
    """The largest norm of a gradient that is not clipped, or what says it of a trial."""
    if callable(asked):
        return asked
    norm: float | None = plain(asked)
    if norm is not None and (not is_number(norm) or not norm > 0):
        raise SpecError(
            f"clip_grad_norm is positive or None, got {asked!r}. A limit for each trial is a "
            "function (hp) -> norm or None."
        )
    return norm


def build_model(recipe: Recipe, hp: HP) -> nn.Module:
    """The recipe's model, with its weights in the recipe's precision; a mapping as ``Models``.

    Raises:
        SpecError: the factory returned something that is no module, or that has no shapes yet.
    """
    model: Any = recipe.model(hp)
    if isinstance(model, Mapping) and not isinstance(model, nn.Module):
        model = _several_models(recipe, model)
    if not isinstance(model, nn.Module):
        raise SpecError(f"Recipe(model=...) returned {type(model).__name__}; return an nn.Module.")
    check_model(model, vars(recipe))
    if recipe.precision == rounding.NAME:
        rounding.lower(model)
    return model


def _several_models(recipe: Recipe, given: Mapping[str, Any]) -> Models:
    if recipe.step is None:
        raise SpecError(
            f"Recipe(model=...) returned a mapping of {len(given)} modules, which are trained by "
            "a step of one's own. Give Recipe(step=...), or return one nn.Module."
        )
    unused = [name for name in ("loss", "inputs", "metrics") if getattr(recipe, name)]
    if unused:
        raise SpecError(
            f"Recipe({unused[0]}=...) is about one model, and Recipe(model=...) returned a "
            "mapping. Give Recipe(evaluate=...), (models, batch, hp) -> {name: value}."
        )
    return Models(given)


def rounding_of(recipe: Recipe, parameters: Mapping[str, nn.Parameter], seed: int) -> Rounding:
    """How the recipe's steps leave the weights; as they are in most precisions."""
    return Rounding(parameters if recipe.precision == rounding.NAME else {}, seed)


def read_data(recipe: Recipe, hp: HP) -> tuple[Iterable[Batch], Iterable[Batch] | None]:
    """The training and validation batches.

    Raises:
        SpecError: not a pair, a data set without a loader, or a source that can be read only once.
    """
    data = recipe.data(hp)
    if not isinstance(data, tuple | list) or len(data) != 2:
        several = f" of {len(data)}" if isinstance(data, tuple | list) else ""
        raise SpecError(
            f"Recipe(data=...) returned {type(data).__name__}{several}; return a pair (train, "
            "valid), valid may be None."
        )
    for name, source in zip(("train", "valid"), data, strict=True):
        if source is None and name == "valid":
            continue
        if not isinstance(source, Iterable):
            raise SpecError(_no_batches(name, source))
        if isinstance(source, Iterator):
            raise SpecError(
                f"{name} data is a {type(source).__name__}, which can be read only once; an epoch "
                "needs a source that starts again. Return a list, a DataLoader, or an object "
                "whose __iter__ makes a new iterator."
            )
    return data[0], data[1]


def _no_batches(name: str, source: Any) -> str:
    if not hasattr(source, "__getitem__"):
        return (
            f"{name} data is {type(source).__name__}, which is no iterable. Return a DataLoader, "
            "a list of batches, or an object whose __iter__ makes a new iterator."
        )
    shuffle = ", shuffle=True" * (name == "train")
    return (
        f"{name} data is {type(source).__name__}, a data set of single examples; training needs "
        f"batches. Wrap it: torch.utils.data.DataLoader(dataset, batch_size=32{shuffle})."
    )


def with_fixed_data(recipe: Recipe, varied: Iterable[str]) -> Recipe:
    """The recipe, whose data may not depend on hyperparameters that change while it is read."""
    names = frozenset(varied)
    return replace(recipe, data=_FixedData(recipe.data, names)) if names else recipe


@dataclass(frozen=True)
class _FixedData:
    """A data function that is told when it reads what is going to change."""

    data: Callable[[HP], tuple[Iterable[Batch], Iterable[Batch] | None]]
    varied: frozenset[str]

    def __call__(self, hp: HP) -> tuple[Iterable[Batch], Iterable[Batch] | None]:
        return self.data(_Guarded(hp, self.varied))


class _Guarded(HyperParameters):
    """Hyperparameters of which some may not be read."""

    def __init__(self, values: HP, varied: frozenset[str]) -> None:
        self._values, self._varied = values, varied

    def __getitem__(self, name: str) -> Scalar:
        self._check(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._check(name)
        return super().get(name, default)

    def _check(self, name: str) -> None:
        if name in self._varied:
            raise SpecError(
                f"Recipe(data=...) reads the hyperparameter {name!r}, which population-based "
                "training changes, and a trial's data stays the same while it trains. Name what "
                "may change without it: shoal.PBT(vary=(...))."
            )


def evaluate_metrics(recipe: Recipe, loss: Tensor, output: Any, batch: Any) -> Found:
    """The names and values of one validation batch; of a metric of the whole set its part."""
    values: Found = {"valid_loss": float(loss)}
    for name, metric in recipe.metrics.items():
        found = metric(output, batch)
        is_part = isinstance(metric, WholeSet)
        what = f"Recipe(metrics[{name!r}]=...)"
        values[f"valid_{name}"] = found if is_part else as_number(what, found)
    return values


class Fed(NamedTuple):
    """A batch whose inputs have been made: it goes as a batch wherever one is computed with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: Batch


def model_inputs(recipe: Recipe, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments of the model's forward for one batch.

    Raises:
        SpecError: a batch type that has no rule.
    """
    if type(batch) is Fed:
        return batch.args, batch.kwargs
    if recipe.inputs is not None:
        chosen = recipe.inputs(batch)
        if isinstance(chosen, Mapping):
            return (), dict(chosen)
        if isinstance(chosen, tuple | list):
            return tuple(chosen), {}
        raise SpecError(
            f"Recipe(inputs=...) returned {type(chosen).__name__}; return a tuple of arguments "
            "or a dict of keyword arguments."
        )
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list) and batch:
        return (batch[0],), {}
    raise SpecError(
        f"there is no rule to feed a batch of type {type(batch).__name__} to the model. Give "
        "Recipe(inputs=...), a function from the batch to a tuple or dict of arguments."
    )


def compute_loss(recipe: Recipe, output: Output, batch: Batch) -> Tensor:
    """The scalar loss of one batch; one number in brackets, ``tensor([0.7])``, is one.

    Raises:
        SpecError: no loss, or one that is not a scalar tensor.
    """
    if type(batch) is Fed:
        batch = batch.batch
    if recipe.loss is not None:
        loss: Any = recipe.loss(output, batch)
    else:
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None:
            raise SpecError(
                f"the model's output ({type(output).__name__}) has no loss. Give "
                "Recipe(loss=...), a function (output, batch) -> scalar, or put the labels "
                "among the model's inputs if it computes its own loss."
            )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = type(loss).__name__
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else kind
        where = line_of(recipe.loss)
        way = "Reduce it, e.g. .mean()." if isinstance(loss, Tensor) else "Return the tensor."
        if isinstance(loss, int | float):
            way = "Return the tensor itself, without .item() or float()."
        elif isinstance(loss, Mapping | tuple | list):
            way = (
                "Return one tensor, the sum of its terms; each may be one of Recipe(metrics=...)."
            )
        raise SpecError(f"the loss{where} must be a scalar, got {found}. {way}")
    return loss if loss.dim() == 0 else loss.reshape(())  # autograd begins at either


def loss_and_output(
    recipe: Recipe, model: Callable[..., Output], batch: Batch
) -> tuple[Tensor, Output]:
    """The loss of one batch, and the output that it is of; modes and autocast are the caller's.

    Raises:
        SpecError: as of ``model_inputs`` and ``compute_loss``.
    """
    args, kwargs = model_inputs(recipe, batch)
    output = model(*args, **kwargs)
    return compute_loss(recipe, output, batch), output


def to_device(batch: Batch, device: torch.device) -> Batch:
    """``batch`` with every tensor on ``device``; containers keep their type.

    Raises:
        SpecError: a batch type that has no rule.
    """
    if isinstance(batch, Tensor):
        return _moved(batch, device)
    if type(batch) is list:  # first, as it is what a DataLoader yields
        return [to_device(value, device) for value in batch]
    if isinstance(batch, Mapping):
        moved = {key: to_device(value, device) for key, value in batch.items()}
        return type(batch)(moved) if type(batch) is not dict else moved  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(to_device(value, device) for value in batch)
    if batch is None or isinstance(batch, bool | int | float | str):
        return batch
    if hasattr(batch, "to"):
        return batch.to(device)
    raise SpecError(
        f"there is no rule to move a batch of type {type(batch).__name__} to {device}. Yield "
        "tensors, tuples, lists or mappings of them, or give the type a .to(device) method."
    )


def tensors_of(batch: Batch) -> list[Tensor]:
    """The tensors of a batch of any containers, in order."""
    if isinstance(batch, Tensor):
        return [batch]
    if type(batch) in (tuple, list):  # quicker than a pytree, and most batches are
        return [tensor for item in batch for tensor in tensors_of(item)]
    found: list[Tensor] = []
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping):  # one that pytree does not know
            found += tensors_of(list(leaf.values()))
    return found


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``; to a GPU behind its work, which is not waited for.

    From pageable memory a copy waits until all before it on its stream is done. So it starts from
    a pinned one, which torch keeps until it is through; whoever gave the tensor may write to it.
    """
    if tensor.device == device:
        return tensor
    if device.type != "cuda" or tensor.device.type != "cpu" or type(tensor) is not Tensor:
        return tensor.to(device)
    if tensor.layout is not torch.strided or tensor.requires_grad:
        return tensor.to(device)
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor).to(device, non_blocking=True)


def autocast(recipe: Recipe, device: torch.device) -> AbstractContextManager[object]:
    """The recipe's numerics as a context, which may be entered again and again.

    Its precision, and with ``loss_rows`` the loss by rows.
    """
    enabled = recipe.precision != "fp32"
    cast: AbstractContextManager[object]
    if device.type == "cpu":
        cast = _CPUAutocast("cpu", torch.bfloat16) if enabled else _NoAutocast()
    else:
        cast = torch.autocast(device.type, torch.bfloat16, enabled=enabled)
    return cast if recipe.loss_rows is None else _Both(cast, LossByRows(recipe.loss_rows))


def loss_notes(entered: object) -> tuple[str, ...]:
    """Whether ``loss_rows`` took effect, of what entering the ``autocast`` of a recipe gave."""
    return (entered.note,) if isinstance(entered, LossByRows) else ()


class _NoAutocast:
    """``torch.autocast("cpu", torch.bfloat16, enabled=False)``, and some microseconds quicker.

    What that context does to a model that opens another one within it is that casts of
    weights are kept until the outer one ends.
    """

    def __enter__(self) -> None:
        torch.autocast_increment_nesting()

    def __exit__(self, *error: object) -> None:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


class _CPUAutocast(torch.autocast):
    """Torch's, which says of an LSTM that a CPU cannot run in bfloat16 what to do about it.

    Torch hands it to oneDNN without asking whether that has it, which is not so of a CPU without
    AVX-512, and fails in words that name neither the CPU nor a remedy.
    """

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if (
            isinstance(error, RuntimeError)
            and "primitive descriptor for the LSTM" in str(error)
            and NO_LSTM not in getattr(error, "__notes__", ())
        ):
            error.add_note(NO_LSTM)
        super().__exit__(kind, error, trace)


class _Both:
    """An autocast, and in it losses by rows."""

    def __init__(self, cast: AbstractContextManager[object], by_rows: LossByRows) -> None:
        self._cast, self._by_rows = cast, by_rows

    def __enter__(self) -> LossByRows:
        self._cast.__enter__()
        return self._by_rows.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self._by_rows.__exit__(kind, error, trace)
        finally:
            self._cast.__exit__(kind, error, trace)


def epoch_length(source: Iterable[Batch]) -> int | None:
    """Batches per epoch, or None where the source does not know or only guesses."""
    if isinstance(source, DataLoader) and isinstance(source.dataset, IterableDataset):
        return None
    try:
        return len(source)  # type: ignore[arg-type]  # a TypeError is an answer
    except (TypeError, NotImplementedError):
        return None


def chunks(batches: Iterable[Batch], size: int) -> Iterator[Iterator[Batch]]:
    """Groups of ``size`` batches, lazily; the last one may be short.

    A group's first batch is fetched to know that there is one; the others when the
    training asks for them, so that data and training draw random numbers in turn.
    """
    iterator = iter(batches)
    for first in iterator:
        group = itertools.chain((first,), itertools.islice(iterator, size - 1))
        yield group
        for _ in group:  # the loop above must not see what a caller left
            pass
