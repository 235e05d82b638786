"""A study that was killed before its first record: every verb says so."""

import json

import pytest

from shoal.core.errors import SpecError, StorageError
from shoal.observe.db import Database
from shoal.observe.lock import StudyLock
from shoal.ui import control, export, handover, logs, rm, show, verify, watch
from shoal.ui.failures import ExitCode


@pytest.fixture
def runs(tmp_path):
    """A directory of studies, one of them as a process that was killed left it."""
    place = tmp_path / "runs" / "gone"
    place.mkdir(parents=True)
    with StudyLock(place) as lock, Database(place, lock=lock):
        pass
    return tmp_path / "runs"


VERBS = {
    "show": lambda runs: show.show_study("gone", None, runs, as_json=False),
    "show the newest": lambda runs: show.show_study(None, None, runs, as_json=True),
    "show a trial": lambda runs: show.show_study("gone", 0, runs, as_json=False),
    "trace": lambda runs: show.trace_study("gone", None, runs, as_json=False),
    "verify": lambda runs: verify.verify_study("gone", runs, count=1, as_json=False),
    "export": lambda runs: export.export_model(
        "gone", "best", str(runs / "out"), runs, overwrite=False, as_json=False
    ),
    "hand over": lambda runs: handover.export_optuna(
        "gone", str(runs / "all.db"), runs, overwrite=False, as_json=False
    ),
    "watch": lambda runs: watch.watch_study("gone", runs),
    "logs": lambda runs: logs.show_log("gone", 0, runs, tail=None, follow=False),
    "stop": lambda runs: control.stop_study(
        "gone", None, runs, grace_s=1.0, reason="", as_json=False
    ),
    "pause": lambda runs: control.pause_study("gone", runs, as_json=False),
    "resume": lambda runs: control.continue_study("gone", runs, (), as_json=False),
    "clone": lambda runs: control.clone_command("gone", 0, ("lr=1",), runs, warm=True),
}


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_every_verb_says_that_nothing_is_on_record_and_what_to_do(verb, runs):
    with pytest.raises(SpecError, match=r"killed while it was planned.*shoal rm .*gone"):
        verb(runs)


def test_one_that_is_being_planned_is_called_so(runs, capsys):
    with StudyLock(runs / "gone"):
        with pytest.raises(SpecError, match=r"is being planned.* Look again in a moment"):
            show.show_study("gone", None, runs, as_json=False)
        show.list_studies(runs, as_json=False)
    assert "planning" in capsys.readouterr().out


@pytest.mark.parametrize("record", [False, True])
def test_a_clone_of_one_that_is_being_planned_is_told_that_and_not_how_many_trials_it_has(
    runs, record
):
    if record:
        (runs / "gone" / "study.json").write_text("{}")
    words = r"the study in .*gone is .*planned.* Look again|no trial of the study in .*gone is on "
    with StudyLock(runs / "gone"), pytest.raises(SpecError, match=words):
        control.clone_command("gone", 0, ("lr=1",), runs, warm=True)


def test_it_is_listed_under_its_name_and_can_be_removed(runs, capsys):
    show.list_studies(runs, as_json=True)
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["study"], listed["state"]) == ("gone", "not begun")
    assert rm.remove_studies(["gone"], runs, yes=True, as_json=False) == ExitCode.DONE
    assert not (runs / "gone").exists()


def test_one_whose_database_is_lost_says_that_nothing_is_on_record(runs, capsys):
    (runs / "gone" / "study.json").write_text("{}")
    show.show_study("gone", None, runs, as_json=False)
    out = capsys.readouterr().out
    assert out.startswith("study gone: not begun, nothing that happened is on record in ")


def test_what_a_name_is_that_is_no_studys_is_told(runs, monkeypatch):
    monkeypatch.chdir(runs.parent)
    for name, words in {
        "runs": r"The directory runs is none: it has no study\.db\.",
        "gone.py": r"there: gone\. A study is called what its file calls it, .* not gone\.py\.",
    }.items():
        with pytest.raises(SpecError, match=words):
            show.show_study(name, None, runs, as_json=False)


def test_a_timeline_that_cannot_be_written_is_told_where_it_may_go(runs, monkeypatch):
    monkeypatch.setattr(show, "find_recorded", lambda name, directory: runs / "gone")
    monkeypatch.setattr(
        show, "write_trace", lambda place, out: (runs / "no" / "it").write_text("")
    )
    with pytest.raises(StorageError, match=r"to .*/no/it: No such file.* shoal trace .* --output"):
        show.trace_study("gone", None, runs, as_json=False)
