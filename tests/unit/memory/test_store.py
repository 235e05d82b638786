"""Host memory for what waits there: what is said where there is none."""

from __future__ import annotations

import errno
import mmap

import pytest
import torch

from shoal.core.errors import CapacityError, TrialError
from shoal.memory.store import Staging, keep


def test_a_host_without_room_for_what_waits_is_no_room_and_no_other_error(monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    assert Staging(1024).bytes.numel() == 1024
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(CapacityError, match=r"cannot allocate 1.0 KiB .*Cannot allocate memory"):
        Staging(1024)


def test_a_buffer_of_another_shape_is_no_content_of_its_place():
    with pytest.raises(TrialError, match=r"'table' is \[4\], and was \[3\] when the trial was"):
        keep("table", torch.zeros(3), torch.zeros(4))


def test_a_buffer_that_a_forward_resizes_is_refused_with_what_to_do():
    words = r"'a.scale' is \[1\], and was \[24\].*run a forward.*module.scale = module._buffers"
    with pytest.raises(TrialError, match=words):
        keep("a.scale", torch.zeros(24), torch.ones(1))


def test_a_buffer_that_the_first_forward_registers_is_refused_with_what_to_do():
    words = r"'bias' is not there, and was \[2, 4\].*Register it where the model is built"
    with pytest.raises(TrialError, match=words):
        keep("bias", torch.zeros(2, 4), None)
