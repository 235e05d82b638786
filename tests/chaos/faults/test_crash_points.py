"""Every call that changes the disk, times everything that may happen there.

``python -m faults.enumeration`` in tests/chaos prints the table.
"""

from __future__ import annotations

import pytest
from faults.injector import Fault
from faults.mutants import MUTANTS
from faults.process import output_of
from faults.scenarios import SCENARIOS


@pytest.fixture(scope="module")
def tallies():
    return {tally["scenario"]: tally for tally in output_of("faults.enumeration")}


@pytest.fixture(scope="module")
def catches():
    return output_of("faults.mutants")


@pytest.mark.parametrize("name", [scenario.name for scenario in SCENARIOS])
def test_whatever_happens_a_reader_finds_the_old_or_the_new(tallies, name):
    assert tallies[name]["violations"] == []
    assert tallies[name]["runs"]["KILL"] == len(tallies[name]["calls"]) > 3


def test_no_point_and_no_fault_was_left_out(tallies):
    calls = tallies["the next generation"]["calls"]

    assert "link" in tallies["a file that is shared"]["calls"]
    for fault in Fault:
        assert any(fault.name in tally["runs"] for tally in tallies.values())
    assert set(calls) == {
        "open", "posix_fallocate", "write", "fsync", "rename", "unlink", "rmdir", "mkdir"
    }  # fmt: skip
    assert sum(sum(tally["runs"].values()) for tally in tallies.values()) > 700


@pytest.mark.full
def test_a_process_that_follows_a_killed_one_may_be_killed_too():
    tallies = output_of("faults.enumeration", "--twice", "KILL", "KILL_AFTER", "EIO")

    assert [line for tally in tallies for line in tally["violations"]] == []
    assert sum(sum(tally["runs"].values()) for tally in tallies) > 1000


@pytest.mark.parametrize("name", [mutant.name for mutant in MUTANTS])
def test_the_harness_sees_it_when(catches, name):
    assert catches[name], f"a mutant lives: {name}"
