"""The README is short, pages begin with their purpose, links lead somewhere, tables are current.

So are the rows of operations in pictures of `effasr doctor`.
"""

import html
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from effasr_kernels import OPERATIONS
from tests.docs.scripts import ROOT, load

DOCS = sorted(path for path in (ROOT / "docs").glob("*.md"))
PAGES = [
    *(ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"),
    *(ROOT / "kernels/README.md", ROOT / "docs/api/README.md"),
    *DOCS,
]
OF_THE_NOTE = (
    *("data", "augmentation", "batching", "distributed", "fault-tolerance", "finetuning"),
    *("conversion", "transcription", "run-directory", "profiling", "kernels", "benchmarks"),
    *("architecture", "design-log"),
)


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_readme_is_short_and_the_pages_that_were_agreed_are_there():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    assert {f"{name}.md" for name in OF_THE_NOTE} <= {page.name for page in DOCS}


@pytest.mark.parametrize("page", DOCS, ids=named)
def test_a_page_begins_with_its_purpose_and_the_readme_leads_to_it(page):
    title, blank, first, *_ = page.read_text().splitlines()
    assert title.startswith("# ")
    assert not blank
    assert first.startswith("After this page you ")
    assert f"(docs/{page.name})" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_tables_are_those_of_the_measured_rows():
    generate = load(ROOT / "docs/generate_tables.py")
    assert generate.main(["--check"]) == 0
    text = (ROOT / "README.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| base, nl "))
    figure = row.split("|")[5].strip()
    changed = text.replace(row, row.replace(f"| {figure} |", f"| {figure}9 |"))
    assert changed != text
    assert generate.updated(changed) == text
    with pytest.raises(ValueError, match="must be one of training, "):
        generate.updated(text.replace("table: finetuning_summary", "table: nothing"))


@pytest.mark.parametrize("columns", [80, 120])
def test_the_picture_of_doctor_has_its_last_operations(columns):
    """Those above are off the screen."""
    picture = (ROOT / f"docs/images/doctor_{columns}.svg").read_text()
    lines = html.unescape(" ".join(re.findall(r"<text[^>]*>(.*?)</text>", picture)))
    visible = re.findall(r"\| ([^\s|][^|]*) on cpu ", lines.replace("\xa0", " "))
    labels = [example.label for operation in OPERATIONS.values() for example in operation.examples]
    assert len(visible) > 20
    assert visible == labels[-len(visible) :]


def test_the_citation_has_the_version_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
