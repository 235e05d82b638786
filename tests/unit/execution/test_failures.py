"""What a traceback says of its cause, and when the first trials failed alike."""

from __future__ import annotations

import traceback

import pytest
import torch

from shoal.core.errors import CapacityError, TrialError
from shoal.execution.failures import SameEnds, SameFailures, is_out_of_memory, signature

ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4611686018427387904 bytes. Error code 12 (Cannot allocate memory)"
)
CUDA = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.15 GiB"


class OutOfMemoryError(Exception):
    """A user's own, of a store of prompts."""


def text_of(error: BaseException, cause: BaseException | None = None) -> str:
    """The traceback of an error that was really raised, as workers send it."""
    try:
        _raise(error, cause)
    except BaseException as raised:
        return "".join(traceback.format_exception(raised))


def _raise(error, cause):
    if cause is not None:
        try:
            raise cause
        except BaseException:
            raise error  # noqa: B904  # the context is what is tested
    raise error


@pytest.mark.parametrize(
    "error",
    [
        CapacityError("cannot reserve 6.0 GiB on cuda:0 for 'a':\n5.0 GiB are free.\n\nEvict."),
        torch.OutOfMemoryError(CUDA),
        MemoryError(),
        MemoryError("cannot allocate"),
        RuntimeError(ALLOCATOR),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_a_lack_of_memory_is_recognised(error):
    assert is_out_of_memory(text_of(error))
    assert is_out_of_memory(text_of(error, KeyError("while another one was handled")))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("the model cannot begin"),
        ValueError("MemoryError: CUDA out of memory. Tried to allocate"),
        ValueError("two\nMemoryError: lines\n\nCapacityError: and more"),
        RuntimeError("there is not enough memory in the replay buffer"),
        RuntimeError("CUDA out of memory is what this model fears"),
        OutOfMemoryError("the store of prompts is full"),
        TrialError("the loss of step 3 is nan"),
    ],
)
def test_an_error_that_only_speaks_of_memory_is_none(error):
    assert not is_out_of_memory(text_of(error))


def test_an_error_raised_while_memory_was_short_is_the_users_own():
    assert not is_out_of_memory(text_of(ValueError("no"), torch.OutOfMemoryError(CUDA)))


def test_a_note_or_a_line_after_the_message_changes_nothing():
    error = MemoryError("cannot allocate")
    error.add_note("while batch 3 was read")
    assert is_out_of_memory(text_of(error))


def test_what_no_python_raised_is_no_lack_of_memory():
    assert not is_out_of_memory("WorkerError: the worker died 3 times while it ran this trial")
    assert not is_out_of_memory("")


def test_a_signature_is_the_type_and_the_place():
    one, other = text_of(ValueError("of trial 1")), text_of(ValueError("of trial 2\nand more"))
    assert signature(one) == signature(other)
    assert signature(one) != signature(text_of(TypeError("of trial 1")))
    assert signature(one)[0] == "ValueError"


def test_a_signature_differs_where_the_place_does():
    try:
        raise ValueError("of trial 1")
    except ValueError:
        here = traceback.format_exc()
    assert signature(here) != signature(text_of(ValueError("of trial 1")))


def test_three_trials_that_fail_alike_stop_the_study_with_one_traceback():
    same, error = SameFailures(), text_of(ValueError("the data is not there"))
    assert same.failed(0, error) == ""
    assert same.failed(4, error) == ""
    why = same.failed(2, error)
    assert "the first 3 trials (0, 4, 2) failed in the same way" in why
    assert why.count("ValueError: the data is not there") == 1


def test_different_errors_do_not_stop_it():
    same = SameFailures()
    for trial, kind in enumerate([ValueError, TypeError, ValueError, ValueError, ValueError]):
        assert same.failed(trial, text_of(kind("no"))) == ""


def test_one_good_step_is_enough():
    same, error = SameFailures(), text_of(ValueError("no"))
    same.failed(0, error)
    same.passed()
    assert not any(same.failed(trial, error) for trial in range(1, 5))


def test_an_exception_that_ends_three_workers_in_several_trials_stops_the_study():
    ends, error = SameEnds(), text_of(TypeError("not callable"))
    assert ends.ended({4}, error, of=9) == ""
    assert ends.ended({4}, error, of=9) == ""
    assert ends.ended({4}, error, of=9) == ""  # it may be that trial's own trouble
    why = ends.ended({5, 7}, error, of=9)
    assert "the same exception ended 4 workers, when it was the turn of trials 4, 5," in why
    assert "this is an error of shoal itself" in why
    assert why.count("TypeError: not callable") == 1


def test_one_trial_is_enough_where_there_is_one_and_a_step_begins_the_count_anew():
    ends, error = SameEnds(), text_of(TypeError("not callable"))
    for _ in range(3):
        assert not any(ends.ended({0}, error, of=1) for _ in range(2))
        ends.passed()
    assert not any(ends.ended({0}, error, of=1) for _ in range(2))
    assert "the turn of trial 0" in ends.ended({0}, error, of=1)


@pytest.mark.parametrize(
    "error",
    [
        "",
        text_of(RuntimeError("CUDA error: device-side assert triggered")),
        text_of(MemoryError("no room")),
    ],
)
def test_a_kill_a_broken_kernel_and_a_lack_of_memory_are_no_error_of_shoals(error):
    ends = SameEnds()
    assert not any(ends.ended({trial}, error, of=9) for trial in range(9))
