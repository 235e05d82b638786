"""The table in a notebook: one output, what the terminal shows, and nothing that is obeyed."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from shoal.core.event import Event, StudyStarted, TrialFailed, TrialPlanned
from shoal.observe.snapshot import Folder, Snapshot
from shoal.testing import ManualClock
from shoal.ui.dashboard import render
from shoal.ui.notebook import NotebookTable, in_notebook, to_html

Events = Callable[..., Iterator[Event]]


@dataclass
class Page:
    """What a notebook shows: one list of versions for each output."""

    outputs: list[list[str]] = field(default_factory=list)

    def display(self, shown: str, display_id: bool = False) -> Handle:
        assert display_id
        self.outputs.append([shown])
        return Handle(self.outputs[-1])


@dataclass
class Handle:
    versions: list[str]

    def update(self, shown: str) -> None:
        self.versions.append(shown)


def _ipython(shell: object, page: Page) -> dict[str, ModuleType]:
    """The two modules of IPython that are used, made up."""
    package, display = ModuleType("IPython"), ModuleType("IPython.display")
    package.get_ipython = lambda: shell  # type: ignore[attr-defined]
    display.display, display.HTML = page.display, str  # type: ignore[attr-defined]
    return {"IPython": package, "IPython.display": display}


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    page = Page()

    class ZMQInteractiveShell:
        pass

    for name, module in _ipython(ZMQInteractiveShell(), page).items():
        monkeypatch.setitem(sys.modules, name, module)
    return page


def _text(markup: str) -> str:
    """What a reader sees: cells and lines apart, tags gone."""
    apart = re.sub(r"</t[dh]>|</div>|</tr>", " ", markup)
    return " ".join(re.sub(r"<[^>]*>", "", apart).split())


def test_a_kernel_is_told_from_a_terminal_and_from_plain_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class ZMQInteractiveShell:
        pass

    class Colab(ZMQInteractiveShell):
        pass

    class TerminalInteractiveShell:
        pass

    found = {}
    for shell in (ZMQInteractiveShell(), Colab(), TerminalInteractiveShell(), None):
        monkeypatch.setitem(sys.modules, "IPython", _ipython(shell, Page())["IPython"])
        found[type(shell).__name__] = in_notebook()
    monkeypatch.delitem(sys.modules, "IPython")

    assert found == {
        "ZMQInteractiveShell": True,
        "Colab": True,
        "TerminalInteractiveShell": False,
        "NoneType": False,
    }
    assert not in_notebook()


def test_telling_imports_nothing() -> None:
    program = (
        "import sys; from shoal.ui.notebook import in_notebook; assert not in_notebook(); "
        "sys.exit(any(name in sys.modules for name in ('IPython', 'torch')))"
    )

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_there_is_one_output_refreshed_at_most_twice_a_second(
    page: Page, study_events: Events
) -> None:
    clock = ManualClock()

    with NotebookTable(clock.now) as screen:
        for event in study_events(4, upto=30):
            screen(event)
            clock.advance(0.1)
        count = len(page.outputs[0])

    elapsed = clock.now()
    assert len(page.outputs) == 1
    assert 2 <= count <= elapsed / 0.5 + 1
    assert len(page.outputs[0]) == count + 1  # the end is shown, however soon it comes


def test_the_end_that_is_shown_already_is_not_drawn_again(
    page: Page, study_events: Events
) -> None:
    with NotebookTable(ManualClock().now) as screen:
        screen(next(study_events(2)))

    assert len(page.outputs[0]) == 1


def test_it_shows_what_the_terminal_shows(study_events: Events) -> None:
    snapshot = Snapshot.of(study_events(8, upto=50, failing=(3,)))
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(render(snapshot, 200, 48))

    terminal = " ".join(re.sub(r"[━╸╺]+", " ", console.export_text()).split())
    assert _text(to_html(render(snapshot, 200, 48))) == terminal


def test_before_the_first_event_it_says_what_is_going_on() -> None:
    assert "planning" in to_html(render(Folder().snapshot()))


def test_progress_is_a_bar_and_states_have_colours(study_events: Events) -> None:
    markup = to_html(render(Snapshot.of(study_events(8, upto=80, failing=(3,)))))

    assert '<progress value="80" max="143"></progress>' in markup  # one failed after 3 of 20
    assert 'color: #2e7d32;">finished' in markup or 'color: #00838f;">running' in markup
    assert "font-weight: bold;" in markup


def test_nothing_that_comes_from_outside_becomes_markup(study_events: Events) -> None:
    evil = "<script>alert('x')</script>&\"'"
    events: list[Any] = []
    for event in study_events(2, failing=(1,)):
        if isinstance(event, StudyStarted):
            event = replace(event, study=evil, metric=evil)
        elif isinstance(event, TrialPlanned):
            event = replace(event, hp={evil: f"{evil}{event.trial}"}, technique=evil)
        elif isinstance(event, TrialFailed):
            event = replace(event, error=evil)
        events.append(event)

    markup = to_html(render(Snapshot.of(events), 400, 48))

    assert "script" in markup
    assert "<script" not in markup
    tags = set(re.findall(r"</?(\w+)", markup))
    assert tags <= {"div", "table", "tr", "td", "th", "span", "progress"}


def test_a_table_that_breaks_says_so_once_and_training_goes_on(
    page: Page,
    study_events: Events,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def gone(shown: str, display_id: bool) -> None:
        raise OSError("the page is gone")

    monkeypatch.setattr(sys.modules["IPython.display"], "display", gone)

    with NotebookTable() as screen:
        for event in study_events(2, failing=(0,)):
            screen(event)

    assert capsys.readouterr().err.count("the study goes on") == 1
