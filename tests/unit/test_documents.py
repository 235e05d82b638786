"""What the documents promise is what is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "benchmarks", "tests/standin")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(d for f in FOLDERS for d in (ROOT / f).rglob("*.md"))])
LINK = re.compile(r"\]\(([^)#:]+)[)#]")
TO_HEADING = re.compile(r"\]\(([^)#:\s]*)#([^)\s]+)\)")


def test_the_readme_shows_the_example_as_it_is() -> None:
    shown = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)

    assert shown is not None
    assert shown[1] == (ROOT / "examples" / "spirals.py").read_text()


def test_every_link_to_a_file_leads_somewhere() -> None:
    links = [(d, link) for d in DOCUMENTS for link in LINK.findall(d.read_text())]
    broken = [(d, link) for d, link in links if not (d.parent / link).exists()]

    assert [f"{d.relative_to(ROOT)}: {link}" for d, link in broken] == []


def test_every_link_to_a_heading_leads_to_one() -> None:
    links = [(d, link) for d in DOCUMENTS for link in TO_HEADING.findall(d.read_text())]
    broken = [
        f"{d.relative_to(ROOT)}: {file}#{heading}"
        for d, (file, heading) in links
        if heading not in headings(d.parent / file if file else d)
    ]

    assert len(links) > 30
    assert broken == []


def headings(document: Path) -> set[str]:
    """As links have them: without punctuation, with hyphens for spaces."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}


def test_the_readme_names_only_verbs_that_exist() -> None:
    cli = (ROOT / "src" / "shoal" / "ui" / "cli.py").read_text()
    verbs = set(re.findall(r"@app\.command\([^)]*\)\ndef (\w+)", cli))

    named = set(re.findall(r"`shoal (\w+)", (ROOT / "README.md").read_text()))

    assert named <= verbs
    assert verbs - named == set()
