"""A pass as a flat list of torch's operations: without modules, Python code and autograd's nodes.

[Note: the eager kernels, and nothing between]
``make_fx`` sees every operation that the code's forward and its backward run. Run one after the
other they are the same kernels on the same numbers in the same order, so the bits are the eager
pass's; random numbers too, which the operations draw from the process's generators as ever. What
a list of operations cannot know is declined: Python values made of tensors, shapes that the data
decides, gradients that are sparse.

A list holds no tensor of a trial's: which parameter or buffer an operation takes is told by name.
So one list serves all trials whose code is the same (``captures.py``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.fusion.graphs.tracing import trace
from shoal.fusion.passes.sidebyside import put_side_by_side
from shoal.kernels.bernoulli import bernoulli_
from shoal.kernels.dispatched import run_operation
from shoal.partition.preserve import place_of
from shoal.runtime.capture.replay import Found, Pass, Untraceable, in_words

Place = tuple[str, str]  # "parameter" or "buffer", and its name
DECIDED_BY_DATA = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
READS = frozenset(
    getattr(Tensor, name)
    for name in ("tolist", "numpy", "__array__", "data_ptr", "untyped_storage", "storage")
)
"""What tells Python of a tensor's values, and no operation is seen."""
QUICKER: dict[Any, Callable[..., Any]] = {torch.ops.aten.bernoulli_.float: bernoulli_}
"""Functions that do what an operation does, to the bit."""
MAKES = (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default)
"""What code makes of numbers it has written out, as ``torch.tensor(0.5)``."""


class NoValues(TorchFunctionMode):
    """Refuses code that makes Python values of tensors past torch's operations."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """One operation of the code."""
        if func in READS:
            raise Untraceable(f"its code reads a tensor's values ({func.__name__})")
        return func(*args, **(kwargs or {}))


class NoNumbers(TorchDispatchMode):
    """Refuses Python values of parameters and buffers, which tracing takes for constants."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation, before it is traced."""
        if torch.Tag.data_dependent_output in func.tags:
            raise Untraceable("its code makes a Python value of a tensor")
        return run_operation(func, args, kwargs)


@dataclass(frozen=True, slots=True)
class OperationList:
    """The operations of a pass, to be run on any trial's tensors.

    Attributes:
        run: Takes the leaves of a batch and then the tensors of ``places``; leaves the loss and
            the gradients.
        gradients: Whose these are, among the trained parameters.
        relaid: Gradients that do not lie in memory as their parameters do, or share it.
        constants: Tensors of the code that are neither parameters nor buffers.
        shares: Whether these are the same for every trial of the code.
    """

    run: Callable[..., Sequence[Tensor]]
    places: tuple[Place, ...]
    gradients: tuple[int, ...]
    relaid: frozenset[int]
    constants: tuple[Tensor, ...]
    shares: bool
    nodes: int


class Operations:
    """A list of operations on the tensors of one trial, wherever these are now."""

    def __init__(self, model: nn.Module, trained: Sequence[nn.Parameter], found: OperationList):
        self.list = found
        self._trained = trained
        parameters = dict(model.named_parameters(remove_duplicate=False))
        held = [parameters[name] for kind, name in found.places if kind == "parameter"]
        self._parameters = held
        self._buffers = [_slot(model, name) for kind, name in found.places if kind == "buffer"]
        self._at: list[int] = []  # the addresses that ``_plain`` is of
        self._plain: list[Tensor] = []

    def run(self, leaves: Sequence[Tensor]) -> Found:
        """The pass, on the process's random streams."""
        found = self.list
        at = [parameter.data_ptr() for parameter in self._parameters]
        if at != self._at:
            self._plain = [parameter.detach() for parameter in self._parameters]
            self._at = at
        buffers = [store[key] for store, key in self._buffers]
        # Some kernels ask whether a backward will follow: below autograd, which has no part in it.
        with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
            loss, *gradients = found.run(*leaves, *self._plain, *buffers, *found.constants)
            for index in found.relaid:
                like = self._trained[found.gradients[index]]
                gradients[index] = _laid(gradients[index], like)
        return Found(loss, dict(zip(found.gradients, gradients, strict=True)))

    def let_go(self) -> None:
        """Forget where the parameters are."""
        self._at, self._plain = [], []


def list_operations(what: Pass, leaves: Sequence[Tensor]) -> OperationList:
    """The operations of a pass, which is run twice: the caller puts back what it writes and draws.

    Raises:
        Untraceable: it cannot be told from one run what another one does; says why.
    """
    there: list[int] = []

    def traced(*tensors: Tensor) -> list[Tensor]:
        with NoNumbers():  # type: ignore[no-untyped-call]  # torch leaves it untyped
            loss, root = what.loss_and_root(tensors)
        if not root.requires_grad:
            raise Untraceable("its loss has no gradient")
        found = torch.autograd.grad([root], list(what.trained), allow_unused=True)
        there[:] = [index for index, gradient in enumerate(found) if gradient is not None]
        gradients = [gradient for gradient in found if gradient is not None]
        if any(gradient.layout is not torch.strided for gradient in gradients):
            raise Untraceable("a gradient is sparse")
        return [loss.detach(), *gradients]

    with in_words(), torch.enable_grad(), NoValues():
        module = trace(traced, *[leaf.detach() for leaf in leaves])
    _require_known(module.graph)
    _tidy(module.graph)
    lifted = _lifted(module, what)
    found = OperationList(
        run=_assembled(module.graph),
        places=lifted.places,
        gradients=tuple(there),
        relaid=frozenset(),
        constants=lifted.constants,
        shares=lifted.shares,
        nodes=sum(node.op == "call_function" for node in module.graph.nodes),
    )
    with in_words():
        ran = Operations(what.model, what.trained, found).run(leaves)
    return replace(found, relaid=_relaid(ran, what, [*leaves, *found.constants]))


# -- what a list must not hold ------------------------------------------------------------


def _require_known(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if any(tag in node.target.tags for tag in DECIDED_BY_DATA) and not _by_numbers(node):
            raise Untraceable(f"the data decides what shape {node.target.__name__} makes")


def _by_numbers(node: fx.Node) -> bool:
    """Whether an indexing operation takes numbers, whose count is the result's, and no masks."""
    if node.target is not torch.ops.aten.index.Tensor:
        return False
    given: Any = node.args[1]
    indices = [index for index in given if isinstance(index, fx.Node)]
    return not any(index.meta["val"].dtype in (torch.bool, torch.uint8) for index in indices)


def _tidy(graph: fx.Graph) -> None:
    """Drop what nobody reads, and ``detach``, which without autograd is nothing."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
    put_side_by_side(graph)
    graph.eliminate_dead_code()


# -- whose tensors it takes -----------------------------------------------------------------


class _Lifted(NamedTuple):
    places: tuple[Place, ...]
    constants: tuple[Tensor, ...]
    shares: bool


def _lifted(module: fx.GraphModule, what: Pass) -> _Lifted:
    """Make arguments of the tensors that the graph holds.

    Raises:
        Untraceable: one is neither a parameter or buffer nor made by the code or known to it.
    """
    names: dict[int, Place] = {}
    for name, buffer in what.model.named_buffers():
        names.setdefault(id(buffer), ("buffer", name))
    for name, parameter in what.model.named_parameters():
        names.setdefault(id(parameter), ("parameter", name))
    graph, found, constants = module.graph, dict[int, fx.Node](), dict[int, Tensor]()
    held = [node for node in graph.nodes if node.op == "get_attr"]
    shares = True
    for node in held:
        tensor = getattr(module, str(node.target))
        if id(tensor) in names:
            continue
        is_made = all(user.target in MAKES for user in node.users)
        if not is_made and id(tensor) not in what.known:
            raise Untraceable("its code takes a tensor from where nobody can see it")
        if any(_writes(user, node) for user in node.users):
            raise Untraceable("its code writes to a tensor that is no buffer")
        shares &= is_made
        constants[id(tensor)] = tensor
    taken = [key for node in held if (key := id(getattr(module, str(node.target)))) in names]
    taken = sorted(dict.fromkeys(taken), key=lambda key: names[key][0], reverse=True)
    order = [*taken, *constants]  # parameters, buffers, and the rest
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for key in reversed(order):
        with graph.inserting_after(last):
            found[key] = graph.placeholder(f"held_{key}")
    for node in held:
        node.replace_all_uses_with(found[id(getattr(module, str(node.target)))])
        graph.erase_node(node)
    places = tuple(names[key] for key in order if key in names)
    return _Lifted(places, tuple(constants.values()), shares)


def _writes(user: fx.Node, node: fx.Node) -> bool:
    if not isinstance(user.target, torch._ops.OpOverload):
        return False
    arguments = user.target._schema.arguments
    return any(
        given is node and argument.alias_info is not None and argument.alias_info.is_write
        for argument, given in zip(arguments, user.args, strict=False)
    )


def _relaid(found: Found, what: Pass, leaves: Sequence[Tensor]) -> frozenset[int]:
    """Gradients that autograd would have copied: of other strides, or of another's memory."""
    held = (*leaves, *what.model.parameters(), *what.model.buffers())
    places = {tensor.untyped_storage().data_ptr() for tensor in held}
    relaid = set()
    for index, (at, gradient) in enumerate(found.gradients.items()):
        place = gradient.untyped_storage().data_ptr()
        if place in places or gradient.stride() != what.trained[at].stride():
            relaid.add(index)
        places.add(place)
    return frozenset(relaid)


def _laid(gradient: Tensor, like: Tensor) -> Tensor:
    """A copy that lies in memory as its parameter does."""
    laid = torch.empty_strided(
        like.shape, like.stride(), dtype=gradient.dtype, device=gradient.device
    )
    return laid.copy_(gradient)


def _slot(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Where a module looks up a buffer."""
    module, leaf = place_of(model, name)
    return module._buffers, leaf


# -- how it is run --------------------------------------------------------------------------


def _assembled(graph: fx.Graph) -> Callable[..., Sequence[Tensor]]:
    """A function that calls the operations one by one, and lets go of what nobody reads later.

    What ``fx`` writes does the same, and looks each operation up by four names at each call.
    """
    nodes = list(graph.nodes)
    last = {used: index for index, node in enumerate(nodes) for used in node.all_input_nodes}
    source = _Source()
    for index, node in enumerate(nodes):
        source.add(node, index)
        over = [one for one in node.all_input_nodes if last[one] == index]
        source.drop([*over, *([] if node in last else [node])])
    return source.function()


class _Source:
    """Python source of a function, line by line, and the objects that it names."""

    def __init__(self) -> None:
        self._named: dict[str, Any] = {}
        self._arguments: list[str] = []
        self._lines: list[str] = []
        self._names: dict[fx.Node, str] = {}

    def add(self, node: fx.Node, index: int) -> None:
        """One operation; or an argument, or what is returned."""
        self._names[node] = name = f"v{index}"
        if node.op == "placeholder":
            self._arguments.append(name)
        elif node.op == "output":
            self._lines.append(f"return {self._text(node.args[0])}")
        elif node.target is operator.getitem:
            self._lines.append(f"{name} = {self._text(node.args[0])}[{node.args[1]}]")
        else:
            assert node.op == "call_function", node.op
            target: Any = node.target
            does = QUICKER.get(target) or getattr(target, "_op", target)
            called = self._object(does)
            given = [self._text(value) for value in node.args]
            given += [f"{key}={self._text(value)}" for key, value in node.kwargs.items()]
            self._lines.append(f"{name} = {called}({', '.join(given)})")

    def drop(self, nodes: Sequence[fx.Node]) -> None:
        """Let go of these, which are read no more."""
        names = [self._names[node] for node in nodes if node.op == "call_function"]
        if names and not self._lines[-1].startswith("return"):
            self._lines.append(f"del {', '.join(names)}")

    def function(self) -> Callable[..., Sequence[Tensor]]:
        """The function."""
        body = "\n    ".join(self._lines)
        source = f"def run({', '.join(self._arguments)}):\n    {body}\n"
        exec(compile(source, "<captured pass>", "exec"), self._named)
        run: Callable[..., Sequence[Tensor]] = self._named["run"]
        return run

    def _text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._names[value]
        if isinstance(value, list | tuple):
            inside = "".join(f"{self._text(item)}, " for item in value)
            return f"[{inside}]" if isinstance(value, list) else f"({inside})"
        if value is None or type(value) in (bool, int):
            return repr(value)
        return self._object(value)

    def _object(self, value: Any) -> str:
        name = f"k{len(self._named)}"
        self._named[name] = value
        return name
