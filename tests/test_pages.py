"""README, docs and examples for their readers: short, linked, and each page in the index."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from launcher.verbs import VERBS
from launcher.verdict.exit_codes import for_readme

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "examples/**/*.md", "config/*.md")
    for path in ROOT.glob(pattern)
)
LONGEST_README = 150
HISTORY = {"CHANGELOG.md", "log.md"}
"""Pages that name what was there once."""


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them: lower case, punctuation dropped, blanks as hyphens."""
    titles = re.findall(r"^#+ (.+)$", without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_or_a_heading_leads_there(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_every_test_that_a_page_names_exists() -> None:
    """Of `test_a_name_...` the beginning counts. The log tells of tests as they were."""
    code = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    tests = re.findall(r"def (test_\w+)", code)
    missing = [
        (page.name, name)
        for page in PAGES
        if page.name != "log.md"
        for name, dots in re.findall(
            r"`(?:\w+: )?(test_\w+)(\.\.\.)?(?:\[.*?\])?`", page.read_text()
        )
        if not any(test.startswith(name) if dots else test == name for test in tests)
    ]
    assert missing == [], "rename it in the page, too"


def test_the_readme_has_the_table_of_exit_codes() -> None:
    assert for_readme() in (ROOT / "README.md").read_text()


def test_the_readme_is_short_and_keeps_the_command_of_the_tests() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= LONGEST_README
    assert "`bash check.sh`" in readme


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert [name for name in sorted(pages) if f"({name})" not in index] == []


def test_the_citation_is_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == project["version"]
    assert [author["name"] for author in citation["authors"]] == [
        author["name"] for author in project["authors"]
    ]


def test_the_table_of_verbs_has_a_row_for_each() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    table = page.partition("\n## Verbs\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([a-z]+)", table, re.MULTILINE)
    assert sorted(rows) == sorted(VERBS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_verb_that_a_page_shows_is_there(page: Path) -> None:
    if page.name not in HISTORY:
        shown = re.findall(
            r"(?:^|`|bash |\./)run\.sh ([a-z]+)(?![a-z=./<])", page.read_text(), re.M
        )
        assert {*shown} <= {*VERBS}, page
