"""A process that dies is noticed, whenever it does."""

import os
import time

import pytest

from shoal.data.processes import ProcessWatch


class DiesWhileAsked:
    """Alive at the first question, dead at the next: as one that dies between the two."""

    pid = 17

    def __init__(self, code: int) -> None:
        self.sentinel, self._writing = os.pipe()
        os.close(self._writing)
        self._code, self._asked = code, 0

    @property
    def exitcode(self) -> int | None:
        self._asked += 1
        return self._code if self._asked > 1 else None

    def kill(self) -> None:
        pass


@pytest.mark.parametrize(
    ("code", "said"),
    [(-9, "process 17 was killed by SIGKILL"), (3, "process 17 ended with exit code 3")],
)
def test_a_process_that_dies_between_two_questions_is_noticed(code, said):
    watch = ProcessWatch([DiesWhileAsked(code)], timeout_s=5)

    began = time.monotonic()
    assert watch.find_ended() == said
    assert watch.death == said
    assert time.monotonic() - began < 0.9  # noticed, not given up on


def test_one_that_ends_well_is_no_death():
    watch = ProcessWatch([DiesWhileAsked(0)], timeout_s=5)

    assert watch.find_ended() == "process 17 ended with exit code 0"
    assert watch.death == ""
