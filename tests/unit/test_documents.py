"""What the documents promise is what is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)#:]+)\)")


def test_the_readme_shows_the_example_as_it_is() -> None:
    shown = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)

    assert shown is not None
    assert shown[1] == (ROOT / "examples" / "spirals.py").read_text()


def test_every_link_to_a_file_leads_somewhere() -> None:
    links = [(d, link) for d in DOCUMENTS for link in LINK.findall(d.read_text())]
    broken = [(d, link) for d, link in links if not (d.parent / link).exists()]

    assert [f"{d.relative_to(ROOT)}: {link}" for d, link in broken] == []


def test_the_readme_names_only_verbs_that_exist() -> None:
    cli = (ROOT / "src" / "shoal" / "ui" / "cli.py").read_text()
    verbs = set(re.findall(r"@app\.command\([^)]*\)\ndef (\w+)", cli))

    named = set(re.findall(r"`shoal (\w+)", (ROOT / "README.md").read_text()))

    assert named <= verbs
    assert verbs - named == set()
