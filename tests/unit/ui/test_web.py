"""The page of ``shoal ui``: what it says, and to whom."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import SpecError
from shoal.core.event import Event, StudyFinished, StudyPlanned, TrialExploited
from shoal.observe import Database
from shoal.observe.snapshot import Snapshot
from shoal.ui.show import DEVICE_HEADER, leaderboard, read_snapshot, read_summary
from shoal.ui.web import server
from shoal.ui.web.reading import POINTS, Studies
from shoal.ui.web.server import Page, serve

Events = Callable[..., Iterator[Event]]


def write(directory: Path, name: str, events: Iterator[Event] | list[Event]) -> Path:
    with Database(directory / name) as database:
        database.write(list(events))
    return directory / name


@pytest.fixture
def runs(tmp_path: Path, study_events: Events) -> Path:
    warned = StudyPlanned(time=1.0, trials=4, seconds=1.0, warnings=("nobody reads 'q'",))
    write(tmp_path, "sweep", [*study_events(4, failing=(2,)), warned])
    return tmp_path


@pytest.fixture
def page(runs: Path) -> Iterator[Page]:
    with Page(runs) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(page: Page, path: str, *, token: bool = True, method: str = "GET", **headers: str) -> Any:
    port = page.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    given = {"Host": f"127.0.0.1:{port}", **({"Cookie": f"shoal={page.token}"} if token else {})}
    connection.request(method, path, headers={**given, **headers})
    answer = connection.getresponse()
    answer.text = answer.read().decode()  # type: ignore[attr-defined]
    connection.close()
    return answer


def test_the_page_of_a_study_that_took_anothers_place_is_its_own(
    runs: Path, study_events: Events
) -> None:
    studies = Studies(runs)
    assert len(studies.study("sweep")["trials"]) == 4
    shutil.rmtree(runs / "sweep")  # where a new directory gets the number of one that is gone
    write(runs, "sweep", study_events(2))
    assert len(studies.study("sweep")["trials"]) == 2


def test_a_study_that_nobody_wrote_to_is_not_read_again(
    runs: Path, study_events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def note(place: Path) -> Snapshot:
        read.append(place.name)
        return read_summary(place)

    monkeypatch.setattr("shoal.ui.web.reading.read_summary", note)
    studies = Studies(runs)
    assert studies.all() == studies.all()
    assert read == ["sweep"]
    ended = StudyFinished(time=99.0, finished=3, failed=1, seconds=9.0, stopped="by hand")
    write(runs, "sweep", [ended])
    assert [one["state"] for one in studies.all()] == ["stopped"]
    assert read == ["sweep", "sweep"]


def test_a_study_is_told_with_its_trials_devices_curves_and_remarks(page: Page) -> None:
    (listed,) = json.loads(ask(page, "/api/studies").text)["studies"]
    assert (listed["name"], listed["state"], listed["failed"]) == ("sweep", "finished", 1)

    study = json.loads(ask(page, "/api/studies/sweep").text)
    assert [trial["number"] for trial in study["trials"]][-1] == 2, "the best first"
    assert {trial["state"] for trial in study["trials"]} == {"finished", "failed"}
    assert [device["name"] for device in study["devices"]] == ["cpu:0", "cpu:1"]
    assert "warning   nobody reads 'q'" in study["remarks"]
    assert {curve["trial"] for curve in study["curves"]} == {0, 1, 2, 3}
    assert all(len(point) == 2 for curve in study["curves"] for point in curve["points"])


def test_the_page_says_where_a_trial_went_on_from_as_the_terminal_does(
    tmp_path: Path, study_events: Events
) -> None:
    took = TrialExploited(time=9.0, trial=1, step=2, source=0, before={}, hp={}, checkpoint="")
    place = write(tmp_path, "pbt", [*study_events(2), took])
    trials = Studies(tmp_path).study("pbt")["trials"]
    assert {trial["number"]: trial["from"] for trial in trials} == {0: "-", 1: "0 at 2"}
    assert " 0 at 2 " in leaderboard(read_snapshot(place))


def test_the_page_has_the_digits_of_the_terminal(page: Page) -> None:
    study = json.loads(ask(page, "/api/studies/sweep").text)
    board = leaderboard(read_snapshot(page.studies.directory / "sweep"))
    first = study["trials"][0]
    words = [*first["settings"].values(), *first["cells"].values()]
    assert len(words) >= 5
    line = next(row for row in board.splitlines() if row.split()[0] == str(first["number"]))
    assert all(word in line for word in words), (words, line)
    assert study["device_header"] == list(DEVICE_HEADER)
    assert study["devices"][0]["cells"][0] == "cpu:0"
    assert study["time"].endswith("elapsed")
    assert study["total_steps"] == study["steps_done"], "of a failed trial what it did"


def test_a_trial_is_told_as_show_tells_it_with_the_end_of_its_log(page: Page, runs: Path) -> None:
    place = runs / "sweep" / "trials" / "0002"
    place.mkdir(parents=True)
    (place / "log.txt").write_text("hello\n\x1b[31mred\n")
    trial = json.loads(ask(page, "/api/studies/sweep/trials/2").text)
    assert trial["text"].startswith("trial 2 of sweep (lr=")
    assert "ValueError: the label 7 is unknown" in trial["text"]
    assert trial["log"] == ["hello\n", "\\x1b[31mred\n"]


def test_what_is_not_there_is_not_found(page: Page) -> None:
    paths = ("/x", "/api/studies/other", "/api/studies/sweep/trials/9", "/api/studies/sweep/x")
    names = ("/api/studies/..%2f..%2fetc", "/api/studies/%2e%2e/trials/0", "/page.py")
    for path in (*paths, *names):
        assert ask(page, path).status == 404, path


def test_the_timeline_is_an_image_with_styles_of_its_own(page: Page) -> None:
    chart = ask(page, "/api/studies/sweep/chart.svg")
    assert (chart.status, chart.headers["Content-Type"]) == (200, "image/svg+xml")
    assert chart.text.startswith("<svg")
    assert "style-src 'unsafe-inline'" in chart.headers["Content-Security-Policy"]
    assert "unsafe-inline" not in ask(page, "/").headers["Content-Security-Policy"]


def test_without_the_token_nothing_is_said(page: Page) -> None:
    for path in ("/", "/page.js", "/api/studies", "/?token=", "/?token=wrong", "/api?token=x"):
        answer = ask(page, path, token=False)
        assert (answer.status, answer.text) == (403, "open the address that shoal ui printed.\n")
    assert ask(page, "/", token=False, Cookie="shoal=wrong; x").status == 403


def test_the_address_lets_in_and_is_free_of_the_token_then(page: Page) -> None:
    answer = ask(page, f"/?token={page.token}", token=False)
    assert (answer.status, answer.headers["Location"]) == (303, "/")
    cookie = answer.headers["Set-Cookie"]
    assert cookie == f"shoal={page.token}; HttpOnly; SameSite=Strict; Path=/"
    assert page.url.endswith(f"/?token={page.token}")
    assert page.server_address[0] == "127.0.0.1"


def test_another_name_for_this_server_is_refused(page: Page) -> None:
    port = page.server_address[1]
    for host in ("evil.example", f"evil.example:{port}", f"127.0.0.1:{port + 1}", ""):
        assert ask(page, "/", Host=host).status == 421
    assert ask(page, "/", Host=f"localhost:{port}").status == 200


def test_the_page_may_load_nothing_from_elsewhere_and_nobody_may_write(page: Page) -> None:
    for path in ("/", "/page.js", "/page.css", "/page.svg", "/api/studies"):
        answer = ask(page, path)
        assert answer.status == 200
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'; script-")
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in answer.headers
    assert 'rel="icon" href="page.svg"' in ask(page, "/").text, "else a browser asks for another"
    assert ask(page, "/page.svg").headers["Content-Type"] == "image/svg+xml"
    assert "//" not in ask(page, "/").text.replace("<!DOCTYPE html>", "")
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(page, "/api/studies", method=method).status == 501


def test_a_study_that_grows_is_read_on_and_one_in_its_place_anew(
    tmp_path: Path, study_events: Events
) -> None:
    events = list(study_events(2))
    studies = Studies(tmp_path)
    place = write(tmp_path, "sweep", events[:20])
    first = studies.study("sweep")["steps_done"]
    with Database(place) as database:
        database.write(events[20:])
    assert studies.study("sweep")["steps_done"] > first
    place.rename(tmp_path / "old")
    write(tmp_path, "sweep", events[:20])
    assert studies.study("sweep")["steps_done"] == first


def test_devices_of_a_study_that_runs_are_told_to_be_busy(
    tmp_path: Path, study_events: Events
) -> None:
    events = list(study_events(2))
    with Database(tmp_path / "sweep") as database:
        studies = Studies(tmp_path)
        half = len(events) // 2
        database.write(events[:half])
        early = studies.study("sweep")
        database.write(events[half:])
        late = studies.study("sweep")
    assert early["state"] == "running"
    assert all(device["busy"] > 0 for device in early["devices"])
    assert late["devices"] == Studies(tmp_path).study("sweep")["devices"]


def test_a_study_that_cannot_be_read_is_named_with_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "study.db").write_bytes(b"no database" * 100)
    (listed,) = Studies(tmp_path).all()
    assert (listed["name"], listed["state"]) == ("bad", "unreadable")
    assert listed["error"]


def test_a_long_curve_is_thinned_and_keeps_its_end() -> None:
    from shoal.ui.web.reading import _thinned

    points = [(step, 0.5) for step in range(10_001)]
    found = _thinned(points)
    assert len(found) <= POINTS
    assert found[-1] == points[-1]
    assert _thinned(points[:5]) == points[:5]
    assert _thinned([]) == []


def test_a_port_that_is_taken_or_none_is_refused_in_words(page: Page, tmp_path: Path) -> None:
    for port in (page.server_address[1], 99_999):
        with pytest.raises(SpecError, match=f"cannot listen on port {port}"):
            serve(tmp_path, port, browse=False)


_CHANGED_UNDER_WAY = """
const any = new Proxy(function () {}, { get: () => any, apply: () => any, set: () => true });
const waiting = [], heard = {}, all = [];
const page = {
  document: { hidden: false, getElementById: () => any, querySelector: () => any },
  location: { hash: "#a/1" }, setTimeout: () => {},
  window: { addEventListener: (name, listener) => { heard[name] = listener; } },
  fetch: (path) => { all.push(path); return new Promise((done) => { waiting.push(done); }); },
};
const vm = require("vm");
const scope = vm.createContext(page);
vm.runInContext(require("fs").readFileSync(process.argv[1], "utf8"), scope);
vm.runInContext("showStudies = () => {}; showStudy = () => {}; showTrial = () => {};", scope);
const studies = { studies: [{ name: "a" }, { name: "b" }] };
async function answer(value) {
  waiting.shift()({ ok: true, json: async () => value });
  await new Promise((done) => setImmediate(done));
}
(async () => {
  await answer(studies);
  page.location.hash = "#b/2";
  heard.hashchange();
  for (const value of [{}, studies, {}, {}]) await answer(value);
  console.log(all.join(" "));
})();
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js")
def test_a_page_that_is_left_for_another_one_asks_no_more_of_its_study() -> None:
    script = Path(server.__file__).with_name("page.js")
    command = ["node", "-e", _CHANGED_UNDER_WAY, str(script)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    paths = [f"api/studies{more}" for more in ("", "/a", "", "/b", "/b/trials/2")]
    assert found.stdout.split() == paths


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium")
def test_a_browser_shows_the_study_and_the_trial_of_the_address(
    page: Page, tmp_path: Path
) -> None:
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'browser'}", "--virtual-time-budget=4000"]
    found = subprocess.run(
        [*command, f"{page.url}#sweep/2"], capture_output=True, text=True, timeout=120
    )
    assert '<h2 id="name">sweep</h2>' in found.stdout
    picture = found.stdout.partition('id="curves"')[2].partition("</svg>")[0]
    assert picture.count("<polyline") == 3
    assert ">step</text>" in picture, "what the axis counts"
    rows = found.stdout.partition('id="trials"')[2].partition("</table>")[0]
    assert rows.count("<button") == 4, "a trial can be opened from the keyboard"
    assert rows.count('aria-expanded="true"') == 1
    assert "<h3>Trial 2</h3>" in found.stdout
    assert "nobody reads 'q'" in found.stdout
    assert '<p id="trouble" role="alert" hidden="">' in found.stdout
