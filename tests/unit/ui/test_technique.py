"""``--technique``: what the command line hands to a study, and how names are refused."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import shoal
from shoal.core.errors import PlanError, SpecError
from shoal.core.technique import DataParallel, Pipelined, Resident, Spilled
from shoal.launch.wishes import technique_of, wish_of
from shoal.ui import train
from shoal.ui.cli import app
from shoal.ui.flags import HardwareFlags


class Asked:
    """A study that notes what it is asked."""

    directory = "nowhere"

    def __init__(self):
        self.asked = []

    def plan(self, **options):
        self.asked.append(options["technique"])
        raise PlanError("far enough")

    def run(self, **options):
        self.asked.append(options["technique"])
        raise PlanError("far enough")


@pytest.fixture
def asked(monkeypatch):
    study = Asked()
    monkeypatch.setattr(train, "open_study", lambda file, arguments: study)
    return study.asked


def test_plan_hands_it_to_the_study(asked):
    names = ("pipelined", "spilled", "data_parallel")
    for given in (*(["--technique", name] for name in names), []):
        found = CliRunner().invoke(app, ["plan", "f.py", "--devices", "cpu:2", *given])
        assert isinstance(found.exception, PlanError)
    assert asked == [*names, None]


def test_run_hands_it_to_the_study(asked):
    flags = HardwareFlags()
    with pytest.raises(PlanError, match="far enough"):
        train.run_file("f.py", flags, overwrite=False, as_json=False, technique="pipelined")
    assert asked == ["pipelined"]


def test_names_and_objects():
    assert technique_of("pipelined") == Pipelined()
    assert technique_of(Pipelined(stages=3)) == Pipelined(stages=3)
    assert [technique_of(t) for t in (None, "resident", "spilled")] == [
        None,
        Resident(),
        Spilled(),
    ]
    assert shoal.Pipelined is Pipelined
    assert technique_of("data_parallel") == shoal.DataParallel() == DataParallel(shard=False)


@pytest.mark.parametrize("technique", ["Pipelined", "", "2bw", ["pipelined"], {}, Pipelined])
def test_what_is_none(technique):
    with pytest.raises(SpecError, match=r"technique is 'resident', 'captured', 'spilled', "):
        technique_of(technique)


@pytest.mark.parametrize(
    "technique", ["pipelined", Pipelined(stages=2), "data_parallel", DataParallel(width=2)]
)
def test_an_array_of_what_has_several_devices_is_refused(technique):
    with pytest.raises(PlanError, match="has one device"):
        wish_of(2, technique_of(technique))
    assert [wish_of(f, technique_of(technique)) for f in (False, 1, "auto", None)] == [
        0,
        1,
        "auto",
        None,
    ]
