"""A trial's signature: everything in which the trials of one array have to be equal.

Modules (names, classes, settings), parameters and buffers (shape, type, strides, what is tied
to what, what is frozen), the code of the recipe's functions, the optimizer's class, and the
shapes of a batch. Floats are told as floats only: they may differ (see ``perslot.py``).
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.closures import contents_of
from shoal.fusion.matching.asked import answers
from shoal.fusion.matching.match import Signature
from shoal.fusion.matching.oldnorms import made_anew
from shoal.fusion.rows.blend import HIDDEN
from shoal.fusion.rows.keptparts import named_parts, with_names
from shoal.fusion.rows.stacked import owners
from shoal.recipes.bound import OfTrial, code_of
from shoal.recipes.recipe import Recipe
from shoal.recipes.several import each_kind
from shoal.source import lasting_name

DEEPEST = 6  # objects within objects that are looked into

NUMBERS = {  # settings that are floats by nature, where a user may well have written 0 or 1
    "p",
    "dropout",
    "eps",
    "momentum",
    "negative_slope",
    "label_smoothing",
    "alpha",
    "lora_alpha",
    "scaling",
    "temperature",
}


def is_number(name: object, value: object) -> bool:
    """Whether an int is a float that was written as one."""
    return type(value) is int and name in NUMBERS


def named_items(name: object, values: Mapping[Any, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """A dict's keys, what its items are called, and they; without a ``name`` none has one.

    Where all are numbers the dict's name is that of each: peft has ``{"default": 16}`` for one.
    """
    of_all = name if all(type(item) in (int, float) for item in values.values()) else ""
    for key, item in values.items():
        is_known = isinstance(key, str) and key in NUMBERS
        yield key, None if name is None else key if is_known else of_all, item


def signature_of(
    recipe: Recipe,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    batch: Any = None,
) -> Signature:
    """The facts about one trial; without an optimizer or a batch, of the rest."""
    facts = [*_recipe_facts(recipe), *_module_facts(module), *_tensor_facts(module)]
    if optimizer is not None:
        facts += _optimizer_facts(module, optimizer)
    if batch is not None:
        facts.append(("batch", kind_of(batch)))
    return Signature(tuple(facts))


def kind_of(batch: Any) -> str:
    """The structure of a batch with its tensors' shapes and types, and other values."""
    if isinstance(batch, Tensor):
        return f"{_dtype(batch)} {list(batch.shape)}"
    if isinstance(batch, Mapping):
        inside = ", ".join(f"{key!r}: {kind_of(value)}" for key, value in batch.items())
        return f"{type(batch).__name__}({inside})"
    if isinstance(batch, tuple | list):
        return f"{type(batch).__name__}({', '.join(kind_of(value) for value in batch)})"
    return repr(batch)


def _recipe_facts(recipe: Recipe) -> Iterator[tuple[str, str]]:
    loss = recipe.loss
    yield "the recipe's loss", described(code_of(loss))
    for name, value in loss.hp.spelled.items() if isinstance(loss, OfTrial) else ():
        yield f"the hyperparameter {name!r}, which the recipe's loss reads", described(value)
    yield "the recipe's inputs", described(recipe.inputs)
    for name in ("step", "evaluate") if recipe.step is not None else ():
        yield f"the recipe's {name}", described(getattr(recipe, name))
    for name, metric in recipe.metric_functions():
        yield f"the recipe's metric {name!r}", described(code_of(metric))
    for name in ("accumulate", "precision", "loss_rows"):
        yield f"the recipe's {name}", repr(getattr(recipe, name))


def _module_facts(module: nn.Module) -> Iterator[tuple[str, str]]:
    parts = named_parts(module)
    for path, child in module.named_modules():
        subject = f"module {path!r}" if path else "the model"
        yield subject, _class(child)
        anew = made_anew(child)  # no array takes it, whatever it is now
        for name, value in vars(child).items():
            if name not in HIDDEN and name not in anew:
                yield f"{name!r} of {subject}", _setting(name, with_names(value, parts))
        for name, told in answers(child):
            yield f"{name!r} of {subject}, as its code asks", told


def _setting(name: str, value: Any) -> str:
    if name.endswith("_hooks") and isinstance(value, dict):  # by numbers of the process
        return described(list(value.values()))
    return described(value, name=name)


def _tensor_facts(module: nn.Module) -> Iterator[tuple[str, str]]:
    owner = owners(module)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        tied = "" if owner[name] == name else f", the same as {owner[name]!r}"
        frozen = "" if parameter.requires_grad else ", frozen"
        yield f"parameter {name!r}", f"{_layout(parameter)}{frozen}{tied}"
    for name, buffer in module.named_buffers(remove_duplicate=False):
        tied = "" if owner[name] == name else f", the same as {owner[name]!r}"
        yield f"buffer {name!r}", f"{_layout(buffer)}{tied}"


def _optimizer_facts(
    module: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, str]]:
    yield "the optimizer", each_kind(optimizer, _class)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    names = [name for name, p in module.named_parameters() if id(p) not in held]
    yield "parameters that the optimizer leaves alone", repr(names)


def _layout(tensor: Tensor) -> str:
    return f"{_dtype(tensor)} {list(tensor.shape)}, strides {list(tensor.stride())}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _class(value: object) -> str:
    return lasting_name(f"{type(value).__module__}.{type(value).__qualname__}")


def described(value: Any, depth: int = 0, name: object = None) -> str:
    """A value in words that two processes agree on: no address, no float.

    ``name``: of a module's setting, in which an int may stand for a float; else None.
    """
    if isinstance(value, float) or is_number(name, value):
        return "a float"
    if value is None or isinstance(value, bool | int | complex | str | bytes | range):
        return repr(value)
    if isinstance(value, Tensor):
        return f"a tensor, {_layout(value)}, {_digest(value)}"
    if isinstance(value, torch.dtype | torch.device | type | types.ModuleType):
        return lasting_name(str(value))
    if depth > DEEPEST:
        return _class(value)
    inside = functools.partial(described, depth=depth + 1)
    if isinstance(value, nn.Module):
        return _class(value)
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        return _code(value, inside)
    if isinstance(value, dict):
        items = [f"{key!r}: {inside(one, name=of)}" for key, of, one in named_items(name, value)]
        return "{" + ", ".join(items) + "}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(inside(item) for item in value)})"
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}({', '.join(sorted(inside(item) for item in value))})"
    if not type(value).__dictoffset__:
        return f"{_class(value)}()"
    return f"{_class(value)}({inside(vars(value), name=None if name is None else '')})"


def _code(value: Any, inside: Any) -> str:
    if isinstance(value, functools.partial):
        return f"partial({inside(value.func)}, {inside(value.args)}, {inside(value.keywords)})"
    if isinstance(value, types.MethodType):
        return f"method({inside(value.__func__)}, {inside(value.__self__)})"
    cells = [inside(item) for item in contents_of(value.__closure__)]
    defaults = [inside(value.__defaults__), inside(value.__kwdefaults__)]
    digest = hashlib.sha256(text_of(value.__code__).encode()).hexdigest()[:16]
    return f"function {value.__qualname__} {digest} ({', '.join([*cells, *defaults])})"


def text_of(code: types.CodeType) -> str:
    """Bytecode, names and constants; of code within, the same."""
    constants = [_constant(one) for one in code.co_consts]
    return repr((code.co_code, code.co_names, code.co_varnames, constants))


def _constant(value: Any) -> str:
    """A constant of code; a set, as in ``kind in {"l1", "mse"}``, has another order each time."""
    if isinstance(value, types.CodeType):
        return text_of(value)
    return f"a set of {sorted(map(repr, value))}" if isinstance(value, frozenset) else repr(value)


def _digest(tensor: Tensor) -> str:
    digest = hashlib.sha256()
    for dense in _dense_parts(tensor.detach()):
        plain = dense.cpu().contiguous()
        flat = plain.as_strided((plain.numel(),), (1,))  # one number may have a stride of 0
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _dense_parts(tensor: Tensor) -> list[Tensor]:
    """A tensor's numbers as tensors of plain memory: of a sparse one also where they are."""
    if tensor.layout == torch.strided:
        return [tensor]
    if tensor.layout == torch.sparse_coo:
        whole = tensor.coalesce()
        return [whole.indices(), whole.values()]
    names = ("crow_indices", "col_indices", "ccol_indices", "row_indices")
    by_rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    return [getattr(tensor, name)() for name in names[:2] if by_rows] + [
        *(getattr(tensor, name)() for name in names[2:] if not by_rows),
        tensor.values(),
    ]
