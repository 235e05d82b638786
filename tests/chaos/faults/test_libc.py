"""The same at libc: it counts what Python counts, and it can fail SQLite too."""

from __future__ import annotations

import pytest
from faults.preload import compile_library, compiler
from faults.process import output_of

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler (cc) on this machine")

LASTING = ("DEAD", "FULL")
PARTIAL = ("SHORT", "EINTR")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compile_library(tmp_path_factory.mktemp("preload"))


@pytest.fixture(scope="module")
def counted(library):
    return output_of("faults.enumeration", "--preload", "TORN", "SHORT", preload=library)


def test_libc_sees_the_calls_that_python_counts(counted):
    found = {tally["scenario"]: tally["calls"] for tally in counted}

    expected = {t["scenario"]: t["calls"] for t in output_of("faults.enumeration", "NONE")}
    assert found == expected


def test_a_torn_or_a_short_write_of_a_generation_loses_nothing(counted):
    assert [line for tally in counted for line in tally["violations"]] == []


@pytest.mark.full
def test_no_fault_in_libc_loses_a_generation(library):
    found = output_of("faults.enumeration", "--preload", preload=library)

    assert [line for tally in found for line in tally["violations"]] == []


def test_a_killed_study_has_the_batches_that_were_written(library):
    found = output_of("faults.database", "--fast", "KILL", "TORN", preload=library)

    assert [line for tally in found for line in tally["violations"]] == []
    assert len(found[0]["calls"]) > 30


@pytest.mark.full
@pytest.mark.parametrize(
    "faults", [("KILL", "KILL_AFTER", "TORN"), ("EIO", "ENOSPC"), LASTING, PARTIAL], ids="-".join
)
def test_no_fault_takes_a_written_batch_from_the_database(library, faults):
    found = output_of("faults.database", *faults, preload=library)

    assert [line for tally in found for line in tally["violations"]] == []
