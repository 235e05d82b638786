"""Random generators of every kind, with one face: read, put back, count what was drawn.

The Mersenne twisters of torch, Python and NumPy can say how many numbers lie between two of
their states, so that a replay keeps a number where it would keep kilobytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Words = npt.NDArray[np.uint32]

FARTHEST = 2**22
"""How many numbers between two states are looked through, at about 400 of them a microsecond."""

CHUNK = 2**16
MARK = 4  # numbers in a row that tell a place in a stream from any other


class Stream(Protocol):
    """A generator that some code draws from."""

    def get(self) -> Any:
        """The state, as the generator has it."""

    def set(self, state: Any) -> None:
        """Put the generator into a state that ``get`` gave."""

    def same(self, first: Any, second: Any) -> bool:
        """Whether two states are equal."""

    def pack(self, state: Any) -> Any:
        """A state as numbers, strings, tensors and tuples."""

    def unpack(self, packed: Any) -> Any:
        """What ``pack`` was given."""


class Countable(Stream, Protocol):
    """A stream of 32-bit numbers, of which there can be another one for searching."""

    def draw(self, count: int) -> Words:
        """The next ``count`` numbers."""

    def twin(self) -> Countable:
        """A generator of the same kind that nobody draws from."""


class TorchStream:
    """A ``torch.Generator`` on the CPU."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def get(self) -> Any:
        return self._generator.get_state()

    def set(self, state: Any) -> None:
        self._generator.set_state(state)

    def same(self, first: Any, second: Any) -> bool:
        return torch.equal(first, second)

    def pack(self, state: Any) -> Any:
        return state

    def unpack(self, packed: Any) -> Any:
        return packed

    def draw(self, count: int) -> Words:
        drawn = torch.empty(count, dtype=torch.int32).random_(generator=self._generator)
        return drawn.numpy().view(np.uint32)

    def twin(self) -> Countable:
        return TorchStream(torch.Generator())


class DeviceStream:
    """A generator off the CPU, whose state is a few bytes. Nothing is counted."""

    def __init__(self, get: Callable[[], Tensor], put: Callable[[Tensor], object]) -> None:
        self._get, self._put = get, put

    def get(self) -> Any:
        return self._get()

    def set(self, state: Any) -> None:
        self._put(state)

    def same(self, first: Any, second: Any) -> bool:
        return torch.equal(first, second)

    def pack(self, state: Any) -> Any:
        return state

    def unpack(self, packed: Any) -> Any:
        return packed


class PythonStream:
    """A ``random.Random``, or the module ``random`` for the global one."""

    def __init__(self, generator: random.Random | ModuleType) -> None:
        self._generator: Any = generator

    def get(self) -> Any:
        return self._generator.getstate()

    def set(self, state: Any) -> None:
        self._generator.setstate(state)

    def same(self, first: Any, second: Any) -> bool:
        return bool(first == second)

    def pack(self, state: Any) -> Any:
        version, words, gauss = state
        return (version, torch.tensor(words), gauss)

    def unpack(self, packed: Any) -> Any:
        version, words, gauss = packed
        return (version, tuple(words.tolist()), gauss)

    def draw(self, count: int) -> Words:
        bits: int = self._generator.getrandbits(32 * count)
        return np.frombuffer(bits.to_bytes(4 * count, "little"), dtype="<u4")

    def twin(self) -> Countable:
        return PythonStream(random.Random())


class NumpyStream:
    """A ``numpy.random.RandomState``, or the module ``numpy.random`` for the global one."""

    def __init__(self, generator: np.random.RandomState | ModuleType) -> None:
        self._generator: Any = generator

    def get(self) -> Any:
        return self._generator.get_state()

    def set(self, state: Any) -> None:
        self._generator.set_state(state)

    def same(self, first: Any, second: Any) -> bool:
        same_keys = first[1].tobytes() == second[1].tobytes()
        return bool(same_keys and first[2:] == second[2:])

    def pack(self, state: Any) -> Any:
        algorithm, keys, *rest = state
        return (algorithm, torch.from_numpy(keys.astype(np.int64)), *rest)

    def unpack(self, packed: Any) -> Any:
        algorithm, keys, *rest = packed
        return (algorithm, keys.numpy().astype(np.uint32), *rest)

    def draw(self, count: int) -> Words:
        return np.frombuffer(self._generator.bytes(4 * count), dtype="<u4")

    def twin(self) -> Countable:
        return NumpyStream(np.random.RandomState(0))


class NumpyGeneratorStream:
    """A ``numpy.random.Generator``, whatever its bits come from. Nothing is counted."""

    def __init__(self, generator: np.random.Generator) -> None:
        self._bits: Any = generator.bit_generator

    def get(self) -> Any:
        return _without_arrays(self._bits.state)

    def set(self, state: Any) -> None:
        self._bits.state = state

    def same(self, first: Any, second: Any) -> bool:
        return bool(first == second)

    def pack(self, state: Any) -> Any:
        return state

    def unpack(self, packed: Any) -> Any:
        return packed


def stream_of(generator: object) -> Stream | None:
    """The stream of an object that is a generator of a kind that is known, else None."""
    if isinstance(generator, torch.Generator):
        return torch_stream(generator)
    if isinstance(generator, random.Random):
        return PythonStream(generator)
    if isinstance(generator, np.random.RandomState):
        return NumpyStream(generator)
    if isinstance(generator, np.random.Generator):
        return NumpyGeneratorStream(generator)
    return None


def torch_stream(generator: torch.Generator) -> Stream:
    """The stream of torch's kind of generator, which may live on a device."""
    if generator.device.type == "cpu":
        return TorchStream(generator)
    return DeviceStream(generator.get_state, generator.set_state)


def global_streams(device: torch.device) -> dict[str, Stream]:
    """The streams that a trial owns in its process; see ``shoal.rng``."""
    streams: dict[str, Stream] = {
        "torch": TorchStream(torch.default_generator),
        "python": PythonStream(random),
        "numpy": NumpyStream(np.random),
    }
    if device.type == "cuda":
        streams["cuda"] = DeviceStream(
            lambda: torch.cuda.get_rng_state(device),
            lambda state: torch.cuda.set_rng_state(state, device),
        )
    return streams


def numbers_between(stream: Stream, first: Any, second: Any) -> int | None:
    """How many numbers lead from one state to another, or None where that is not found.

    Exact: what is returned was tried. A state that was seeded anew in between, or that keeps
    half of a pair of normal numbers, is not reached by drawing.
    """
    if not hasattr(stream, "draw"):
        return None
    twin: Countable = stream.twin()  # type: ignore[attr-defined]  # a stream that draws has one
    twin.set(second)
    mark = twin.draw(MARK)
    twin.set(first)
    count = _find(twin, mark)
    if count is None:
        return None
    twin.set(first)
    skip(twin, count)
    return count if twin.same(twin.get(), second) else None


def skip(stream: Countable, count: int) -> None:
    """Draw ``count`` numbers and forget them."""
    while count > 0:
        count -= len(stream.draw(min(count, CHUNK)))


def _find(stream: Countable, mark: Words) -> int | None:
    """After how many numbers ``mark`` comes out of ``stream``, in pieces that grow."""
    passed, size = 0, 2**8
    kept = np.empty(0, np.uint32)
    while passed < FARTHEST:
        words = np.concatenate([kept, stream.draw(size)])
        places = np.flatnonzero(words[: 1 - MARK] == mark[0])
        for place in places.tolist():
            if np.array_equal(words[place : place + MARK], mark):
                return int(passed - len(kept) + place)
        passed, size = passed + size, min(2 * size, CHUNK)
        kept = words[1 - MARK :]
    return None


def _without_arrays(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_arrays(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
