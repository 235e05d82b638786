"""A study that was interrupted, for tests to do something to."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
import studies
from processes import reap_all

from shoal.core.event import StepFinished

_NO_SOCKETS = shutil.ignore_patterns("*.sock")


@pytest.fixture(autouse=True)
def _nothing_left_running():
    yield
    reap_all()


def _make(folder: Path):
    return studies.make(folder, kinds=["resident"], checkpoint_every=0)


@pytest.fixture(scope="session")
def _interrupted(tmp_path_factory, warm_workers):
    folder = tmp_path_factory.mktemp("interrupted")

    def interrupt(event) -> None:
        if isinstance(event, StepFinished) and event.step == 12:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(SystemExit):
        studies.run(_make(folder), warm_workers, callbacks=[interrupt])
    return folder


@pytest.fixture
def interrupted(_interrupted, tmp_path):
    """A study's copy that was interrupted, with two generations of its one trial."""
    shutil.copytree(_interrupted / "k", tmp_path / "k", ignore=_NO_SOCKETS)
    return _make(tmp_path)
