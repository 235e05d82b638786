"""What tests do something to: a study that was interrupted, workers that step into traps."""

from __future__ import annotations

import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import staged
import studies
from hunting import Hunter
from listening import Heard
from processes import reap_all

import shoal
from shoal.core.event import StepFinished
from shoal.execution.watchdog import Backoff, Watchdog
from shoal.runtime.pool import WorkerPool

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


# -- traps --------------------------------------------------------------------------------


@pytest.fixture
def heard():
    """A callback that keeps all events of a study."""
    return Heard()


@pytest.fixture(scope="module")
def traps(tmp_path_factory):
    """Where traps are laid."""
    return tmp_path_factory.mktemp("traps")


@pytest.fixture(scope="module")
def workers(traps):
    """Workers that step into traps, and whose disk can be full."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(staged.TRAPS, str(traps))
        environment.setenv(studies.FULL, str(traps / "full"))
        with WorkerPool() as pool:
            pool.warm(staged.STAGES)
            yield pool


@pytest.fixture
def hunter(traps, heard):
    """Lays traps when something happens; none is left afterwards."""
    yield Hunter(traps, heard)
    for path in traps.iterdir():
        path.unlink()


@pytest.fixture
def hasty(request, monkeypatch):
    """Studies to which LIMIT_S of the module are a hang; they wait for nothing after a death."""
    usual = shoal.Study.limits

    def limits(study):
        watchdog = Watchdog(least_s=request.module.LIMIT_S, factor=1.0, first_s=20.0)
        backoff = Backoff(first_s=0.01, most_s=0.1)
        return replace(usual(study), watchdog=watchdog, backoff=backoff)

    monkeypatch.setattr(shoal.Study, "limits", limits)
