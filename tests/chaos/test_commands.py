"""Commands of tests are forked, and so are their servers: stand-ins for children of theirs."""

from __future__ import annotations

import os
import sys

import commands


def test_a_server_that_is_forked_for_a_command_tells_how_it_ended():
    """A worker that is asked for as it ends is told so; ``_listen`` ended in a TypeError."""
    server = object.__new__(commands._fork_server)
    words = [sys.executable, "-c", "raise SystemExit(3)"]
    server.pid = os.posix_spawn(sys.executable, words, os.environ)
    assert [server.wait(), server.wait()] == [3, 3]
