"""torch's ``make_fx``, in some half of its time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx


def trace(code: Callable[..., Sequence[Tensor]], *given: Tensor) -> fx.GraphModule:
    """The operations that ``code`` does to ``given``, which it runs on.

    What each leaves is noted in the graph as a tensor without data. torch makes a mode for every
    single one, with the whole stack of calls in it, unless there is a context that has one.
    """
    with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
        return make_fx(code)(*given)
