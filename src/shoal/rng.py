"""The random streams a trial owns: seeded, captured and put back together.

A trial draws from torch's CPU generator, its device's generator, Python's ``random``
and NumPy's legacy global stream. A worker that interleaves trials swaps all of them, so
that each trial sees the numbers it would see alone.
"""

from __future__ import annotations

import ctypes
import functools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RngState:
    """A moment of all streams. ``cuda`` is None off the GPU."""

    torch: Tensor
    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    cuda: Tensor | None = None


def process_streams() -> tuple[object, ...]:
    """The host's generators, which a process has one of each of and a trial in its own state.

    ``from random import randrange`` is a method of Python's.
    """
    numpy: Any = np.random.random
    return torch.default_generator, _python(), numpy.__self__


def seed_all(seed: int) -> None:
    """Seed torch (every device), ``random`` and NumPy from one number."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def seeded_host(seed: int) -> Iterator[None]:
    """The host's streams from a seed inside, and as they were afterwards."""
    before = capture_rng()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        restore_rng(before)


WORDS_BYTES = 624 * 4 + 4  # of NumPy's legacy generator, and where among them it is


class _Legacy:
    """NumPy's legacy global stream, which takes 0.08 ms to read by its own call, and to set.

    [Note: what is read of NumPy's stream]
    Its words are compared where they lie, and written there. Beside them it may keep one more
    normal number, of which they tell nothing. But to make one words are drawn: so a stream that
    was seen without it, and has the same words still, is the same. Whatever has one goes the slow
    way, and any generator but NumPy's first.
    """

    def __init__(self) -> None:
        self._seen: tuple[bytes, tuple[Any, ...]] | None = None  # words and state, with no number

    def get(self) -> tuple[Any, ...]:
        """Its state now, which nobody writes to."""
        words = _words()
        if self._seen is not None and words == self._seen[0]:
            return self._seen[1]
        state: tuple[Any, ...] = np.random.get_state()  # type: ignore[assignment]  # legacy=True
        self._see(words, state)
        return state

    def set(self, state: tuple[Any, ...]) -> None:
        """Put it into a state."""
        now = _words()
        if self._seen is None or not now or now != self._seen[0] or _keeps_number(state):
            np.random.set_state(state)
            self._see(_words(), state)
        elif self._seen[1] is not state:
            words = np.asarray(state[1], np.uint32).tobytes() + np.int32(state[2]).tobytes()
            ctypes.memmove(_address(), words, WORDS_BYTES)
            self._seen = words, state

    def _see(self, words: bytes, state: tuple[Any, ...]) -> None:
        self._seen = (words, state) if words and not _keeps_number(state) else None


def _keeps_number(state: Any) -> bool:
    return not isinstance(state, tuple) or state[0] != "MT19937" or bool(state[3])


def _words() -> bytes:
    """Of the global stream; nothing where they cannot be found."""
    address = _address()
    return ctypes.string_at(address, WORDS_BYTES) if address else b""


def _address() -> int:
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # it has no stub
    is_usual = type(generator) is np.random.MT19937 and _knows_layout()
    return int(generator.ctypes.state_address) if is_usual else 0


@functools.cache
def _knows_layout() -> bool:
    """Whether this NumPy's generator has its words where they are looked for."""
    generator = np.random.MT19937(5)
    state: Any = generator.state["state"]
    words = np.asarray(state["key"], np.uint32).tobytes() + np.int32(state["pos"]).tobytes()
    return ctypes.string_at(generator.ctypes.state_address, WORDS_BYTES) == words


_LEGACY = _Legacy()

Host = tuple[tuple[Any, ...], tuple[Any, ...]]
"""A moment of the streams that are Python's own: of ``random``, and of NumPy."""


def capture_host() -> Host:
    """Python's own streams as they are now."""
    return random.getstate(), _LEGACY.get()


def restore_host(state: Host) -> None:
    """Put them back to ``state``."""
    random.setstate(state[0])
    _LEGACY.set(state[1])


def host_words() -> tuple[bytes, bytes]:
    """What is another after a draw from one of Python's own streams; a microsecond to ask for.

    Of a normal number that such a stream keeps they do not tell; see the note above.
    """
    if _knows_python():
        ours = ctypes.string_at(id(_python()) + object.__basicsize__, PYTHON_BYTES)
    else:
        ours = repr(random.getstate()).encode()
    return ours, _words() or repr(np.random.get_state()).encode()


PYTHON_BYTES = 4 + 624 * 4  # of Python's generator: where among its words it is, and these


def _python(state: Any = random.getstate) -> random.Random:
    """Python's global generator."""
    found: random.Random = state.__self__
    return found


@functools.cache
def _knows_python() -> bool:
    """Whether this Python's generator has its words where they are looked for."""
    one = random.Random(5)
    words = one.getstate()[1]
    told = np.asarray([words[-1], *words[:-1]], np.uint32).tobytes()
    return ctypes.string_at(id(one) + object.__basicsize__, PYTHON_BYTES) == told


def capture_rng(device: torch.device | None = None) -> RngState:
    """The streams as they are now; the device's too when it is a GPU."""
    on_gpu = device is not None and device.type == "cuda"
    return RngState(
        torch.get_rng_state(),
        *capture_host(),
        torch.cuda.get_rng_state(device) if on_gpu and device else None,
    )


def restore_rng(state: RngState, device: torch.device | None = None) -> None:
    """Put the streams back to ``state``."""
    words = state.torch
    if words.storage_offset():  # of a view torch reads its storage's beginning
        words = words.clone()
    torch.set_rng_state(words)
    restore_host((state.python, state.numpy))
    if state.cuda is not None and device is not None:
        torch.cuda.set_rng_state(state.cuda, device)


def same_rng(first: RngState, second: RngState) -> bool:
    """Whether two moments are equal in every stream."""
    keys_equal = np.array_equal(first.numpy[1], second.numpy[1])
    cuda_equal = (first.cuda is None) == (second.cuda is None) and (
        first.cuda is None or second.cuda is None or torch.equal(first.cuda, second.cuda)
    )
    return (
        torch.equal(first.torch, second.torch)
        and first.python == second.python
        and keys_equal
        and first.numpy[2:] == second.numpy[2:]
        and cuda_equal
    )
