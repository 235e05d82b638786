"""The settings by which a process computes: those that kernels are chosen by, and repeatable ones.

[Note: which kernels]
What a user set in their own process (``torch.set_default_dtype``, which chooses kernels by their
type, ``torch.use_deterministic_algorithms``, ``torch.backends.cudnn.deterministic``,
``torch.set_float32_matmul_precision``, and what ``OTHERS`` lists) holds for what they
train there alone. So workers are told of it, and train with the same kernels. Some of a GPU's add
up in whatever order their threads come by: two runs of one pass differ then in the last bits,
by torch's defaults in most convolutions, and in attention over long sequences. Where two passes
should be equal (a chain and its module, a capture and its pass) both are run with ``repeatable``
kernels before it is said that they are not.
"""

from __future__ import annotations

import decimal
import importlib
import locale
import operator
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.kernels.dispatched import run_operation

CUBLAS = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
EXACT, STRICT = "exact", "strict"
"""What a numerics key says where a study asked for deterministic kernels alone."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One more that holds for a whole process: its ``name`` in a numerics key, in words for what
    differs from torch's default; without a name no bit depends on it."""

    name: str
    usual: Any
    read: Callable[[], Any]
    put: Callable[[Any], Any]
    is_of_gpu: bool = False


def _flushes() -> bool:
    """Whether numbers too small for the usual format are zero; torch does not say."""
    tiny = torch.finfo(torch.float32).tiny
    return not torch.full((), tiny, dtype=torch.float32, device="cpu").mul(0.5).item()


def _of_torch(name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}")


def _attention(name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    backends = torch.backends.cuda  # those of a CPU too
    return getattr(backends, f"{name}_sdp_enabled"), getattr(backends, f"enable_{name}_sdp")


def _of_products(name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    products = torch.backends.cuda.matmul
    return lambda: getattr(products, name), lambda value: setattr(products, name, value)


def _casts_to(kind: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return (
        lambda: torch.get_autocast_dtype(kind),
        lambda value: torch.set_autocast_dtype(kind, value),
    )


def _library(name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    read, put = _of_torch(f"{name}_preferred_backend")
    return lambda: read().name, lambda value: put(getattr(type(read()), value))


def _contracts_in_order() -> bool:
    einsum = torch.backends.opt_einsum
    return bool(einsum.is_available() and not einsum.enabled)


def _contract_in_order(value: bool) -> None:
    torch.backends.opt_einsum.enabled = not value


def _inductors() -> tuple[tuple[str, Any], ...]:
    """What differs from its defaults; nothing while nobody has imported it, which takes seconds.

    ``deterministic`` is what torch's own deterministic algorithms set.
    """
    config: Any = sys.modules.get("torch._inductor.config")
    if config is None:
        return ()
    return tuple(
        (name, value)
        for name, value in config.get_config_copy().items()
        if isinstance(value, bool | int | float | str)
        and name != "deterministic"
        and value != config._config[name].default
    )


def _tell_inductor(settings: tuple[tuple[str, Any], ...]) -> None:
    config: Any = importlib.import_module("torch._inductor.config")
    usual = {name: config._config[name].default for name, _ in _inductors()}
    for name, value in {**usual, **dict(settings)}.items():
        setattr(config, name, value)


def _detect_anomaly(value: tuple[bool, bool]) -> None:
    torch.set_anomaly_enabled(*value)


def _tell_numpy(errors: tuple[tuple[str, Any], ...]) -> None:
    numpy.seterr(**dict(errors))


_OF_DECIMALS = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")


def _decimals() -> tuple[Any, ...]:
    """The decimal context of this thread, but for what has happened in it."""
    context = decimal.getcontext()
    traps = tuple(signal for signal, is_on in context.traps.items() if is_on)
    return (*(getattr(context, name) for name in _OF_DECIMALS), traps)


def _set_decimal_context(wanted: tuple[Any, ...]) -> None:
    context, (*values, traps) = decimal.getcontext().copy(), wanted
    for name, value in zip(_OF_DECIMALS, values, strict=True):
        setattr(context, name, value)
    for signal in context.traps:
        context.traps[signal] = signal in traps
    decimal.setcontext(context)  # a thread may still have work in the one before


def _set_locale(wanted: str) -> None:
    locale.setlocale(locale.LC_ALL, wanted)


_ANOMALY = torch.is_anomaly_enabled, torch.is_anomaly_check_nan_enabled

OTHERS = (
    Setting("flushed denormals", False, _flushes, torch.set_flush_denormal),
    Setting("without oneDNN", True, *_of_torch("mkldnn_enabled")),
    Setting("deterministic oneDNN", False, *_of_torch("mkldnn_deterministic")),
    Setting("without NNPACK", True, *_of_torch("nnpack_enabled")),
    Setting("without flash attention", True, *_attention("flash")),
    Setting("without memory-efficient attention", True, *_attention("mem_efficient")),
    Setting("without attention by products", True, *_attention("math")),
    Setting("without attention of cuDNN", True, *_attention("cudnn"), is_of_gpu=True),
    Setting(
        "attention with narrow sums",
        False,
        torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp,
    ),
    Setting(
        "without attention's fast path",
        True,
        torch.backends.mha.get_fastpath_enabled,
        torch.backends.mha.set_fastpath_enabled,
    ),
    Setting("autocast of CPUs", torch.bfloat16, *_casts_to("cpu")),
    Setting("autocast of GPUs", torch.float16, *_casts_to("cuda"), is_of_gpu=True),
    Setting(
        "weights cast for each use",
        True,
        torch.is_autocast_cache_enabled,
        torch.set_autocast_cache_enabled,
    ),
    Setting("settings of inductor", (), _inductors, _tell_inductor),
    Setting("einsum in order", False, _contracts_in_order, _contract_in_order),
    Setting("without cuDNN", True, *_of_torch("cudnn_enabled"), is_of_gpu=True),
    Setting("products by", "Cublas", *_library("blas"), is_of_gpu=True),
    Setting("linear algebra by", "Default", *_library("linalg"), is_of_gpu=True),
    Setting(
        "order of attentions", [1, 2, 0, 3, 4], *_of_torch("sdp_priority_order"), is_of_gpu=True
    ),
    *(
        Setting(name, usual, *_of_products(f"allow_{kind}"), is_of_gpu=True)
        for name, usual, kind in (
            ("float16 products summed in full", True, "fp16_reduced_precision_reduction"),
            ("bfloat16 products summed in full", True, "bf16_reduced_precision_reduction"),
            ("float16 products summed in float16", False, "fp16_accumulation"),
        )
    ),
    Setting(
        "",
        (False, True),
        lambda: tuple(ask() for ask in _ANOMALY),
        _detect_anomaly,
    ),
    Setting(
        "",
        False,
        torch.sparse.check_sparse_tensor_invariants.is_enabled,
        torch._C._set_check_sparse_tensor_invariants,
    ),
    Setting("", (), lambda: tuple(numpy.geterr().items()), _tell_numpy),
    Setting("", 1000, sys.getrecursionlimit, sys.setrecursionlimit),
    Setting("", (), _decimals, _set_decimal_context),
    Setting("", "C", lambda: locale.setlocale(locale.LC_ALL), _set_locale),
)
TOLD = (
    EXACT,
    *("deterministic algorithms", "deterministic cuDNN"),
    *("cuDNN by timing", "cuDNN in full float32", "default type"),
    *(setting.name for setting in OTHERS if setting.name),
)
BY_BACKEND = (
    "cuda.matmul",
    "cudnn.conv",
    "cudnn.rnn",
    "mkldnn.matmul",
    "mkldnn.conv",
    "mkldnn.rnn",
)


_strict = False  # whether a study of this process, which plans it, asked for that


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """Settings of one process; torch's names for them.

    ``fp32``: those of each backend, where somebody set them one by one and the names that are
    for all cannot be asked for (``BY_BACKEND``).
    """

    matmul: str
    deterministic: bool
    only_warns: bool
    cudnn_deterministic: bool
    cudnn_benchmark: bool
    cudnn_tf32: bool
    fp32: tuple[str, ...] = ()
    default_dtype: torch.dtype = torch.float32
    others: tuple[Any, ...] = ()  # of OTHERS

    @staticmethod
    def here() -> KernelChoice:
        """Those of this process."""
        cudnn = torch.backends.cudnn
        matmul, tf32, fp32 = _fp32()
        return KernelChoice(
            matmul=matmul,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            only_warns=torch.is_deterministic_algorithms_warn_only_enabled(),
            cudnn_deterministic=cudnn.deterministic,
            cudnn_benchmark=cudnn.benchmark,
            cudnn_tf32=tf32,
            fp32=fp32,
            default_dtype=torch.get_default_dtype(),
            others=tuple(setting.read() for setting in OTHERS),
        )

    def take(self) -> None:
        """Have this process choose so from here on."""
        if self.deterministic and not self.only_warns:
            os.environ.setdefault(*CUBLAS)  # without it torch refuses every product on a GPU
        here = KernelChoice.here()
        for setting, wanted, found in zip(OTHERS, self.others, here.others, strict=True):
            if wanted != found:
                setting.put(wanted)
        if self != here:
            torch.set_default_dtype(self.default_dtype)
            torch.use_deterministic_algorithms(self.deterministic, warn_only=self.only_warns)
            cudnn = torch.backends.cudnn
            cudnn.deterministic = self.cudnn_deterministic
            cudnn.benchmark = self.cudnn_benchmark
            if self.fp32:
                for path, value in zip(BY_BACKEND, self.fp32, strict=True):
                    operator.attrgetter(path)(torch.backends).fp32_precision = value
            else:
                cudnn.allow_tf32 = self.cudnn_tf32
                torch.set_float32_matmul_precision(self.matmul)

    def without(self, before: KernelChoice, after: KernelChoice) -> KernelChoice:
        """These, but ``before`` of each setting that is still as ``after`` has it."""
        names = [one.name for one in fields(KernelChoice) if one.name != "others"]
        pairs = {n: (getattr(self, n), getattr(before, n), getattr(after, n)) for n in names}
        others = zip(self.others, before.others, after.others, strict=True)
        return KernelChoice(
            **{name: was if now == then else now for name, (now, was, then) in pairs.items()},
            others=tuple(was if now == then else now for now, was, then in others),
        )

    def called(self) -> dict[str, Any]:
        """All of them, by what a plan calls each."""
        found = {f"torch's {f.name}": getattr(self, f.name) for f in fields(self)}
        del found["torch's others"]
        for setting, value in zip(OTHERS, self.others, strict=True):
            found[f"the setting {setting.name or setting.put.__name__.strip('_')!r}"] = value
        return found

    def told(self, *, on_gpu: bool) -> dict[str, str]:
        """For the numerics key: what is not torch's default, but for the matmul precision."""
        words = {
            "deterministic algorithms": self.deterministic,
            "deterministic cuDNN": on_gpu and self.cudnn_deterministic,
            "cuDNN by timing": on_gpu and self.cudnn_benchmark,
            "cuDNN in full float32": on_gpu and not self.cudnn_tf32,
        }
        found = {name: "yes" for name, differs in words.items() if differs}
        if self.default_dtype != torch.float32:
            found["default type"] = _in_words(self.default_dtype)
        for setting, value in zip(OTHERS, self.others, strict=True):
            if setting.name and value != setting.usual and (on_gpu or not setting.is_of_gpu):
                found[setting.name] = _in_words(value)
        return {EXACT: STRICT, **found} if _strict else found


@contextmanager
def only_deterministic(wanted: bool = True) -> Iterator[None]:
    """Inside, this process chooses deterministic kernels, and refuses what has none.

    Workers that are configured inside do so too. ``wanted`` False: nothing changes.
    """
    if not wanted:
        yield
        return
    global _strict
    before, was_strict, _strict = KernelChoice.here(), _strict, True
    deterministic: dict[str, Any] = {"deterministic": True, "only_warns": False}
    by_cudnn: dict[str, Any] = {"cudnn_deterministic": True, "cudnn_benchmark": False}
    replace(before, **deterministic, **by_cudnn).take()
    try:
        yield
    finally:
        _strict = was_strict
        before.take()


def _in_words(value: Any) -> str:
    if isinstance(value, tuple):  # of names and values
        return ", ".join(f"{name}={one}" for name, one in value)
    return "yes" if isinstance(value, bool) else str(value).removeprefix("torch.")


def _fp32() -> tuple[str, bool, tuple[str, ...]]:
    """Of products, of cuDNN, and of each backend where the first two are not asked for so."""
    try:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, ()
    except RuntimeError:
        found = (operator.attrgetter(path)(torch.backends) for path in BY_BACKEND)
        each = tuple(str(backend.fp32_precision) for backend in found)
        return "/".join(each), "ieee" not in each[1:3], each


class _StrictAttention(TorchDispatchMode):
    """Has the backwards of attention repeat themselves.

    While torch only warns of operations that do not, it leaves them as they are, though it
    has kernels for them that do; and where it raises, it does so of every product unless cuBLAS
    was told something before it was loaded. So it raises for these alone.
    """

    OF: tuple[str, ...] = ("_attention_backward",)  # how their names end

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not func._schema.name.endswith(self.OF):
            return run_operation(func, args, kwargs)
        torch.use_deterministic_algorithms(True)
        try:
            return run_operation(func, args, kwargs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # there is none
            torch.use_deterministic_algorithms(True, warn_only=True)
            return run_operation(func, args, kwargs)
        finally:
            torch.use_deterministic_algorithms(True, warn_only=True)


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Inside, what runs twice on a GPU comes to the same bits, wherever torch has such a kernel.

    Of operations that have none torch would warn. On a CPU nothing changes.
    """
    if device.type != "cuda":
        yield
        return
    memory: Any = torch.utils.deterministic
    before, filled = KernelChoice.here(), memory.fill_uninitialized_memory
    by_cudnn = torch.backends.cuda.cudnn_sdp_enabled()  # whose backward has no such kernel
    try:
        with warnings.catch_warnings(), _StrictAttention():  # type: ignore[no-untyped-call]
            warnings.filterwarnings("ignore", message=".*deterministic")
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.backends.cudnn.deterministic = True
            torch.backends.cudnn.benchmark = False
            torch.backends.cuda.enable_cudnn_sdp(False)
            memory.fill_uninitialized_memory = False
            yield
    finally:
        memory.fill_uninitialized_memory = filled
        torch.backends.cuda.enable_cudnn_sdp(by_cudnn)
        before.take()
