"""README and docs: files and headings that they link to, source files that they name, and all algorithms are there."""

import re

import pytest
from helpers.support import ROOT

from evorl.algorithms import ALGORITHMS

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
ROOMS = ("evorl", "demos", "benchmarks", "tests")
CODE = re.compile(r"^```.*?^```$|^    .*?$", re.MULTILINE | re.DOTALL)


def anchors(text):
    """The anchors that GitHub makes of the headings, numbered where a heading occurs again."""
    found = []
    for heading in re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.M):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
        same = sum(re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", each) is not None for each in found)
        found.append(f"{anchor}-{same}" if same else anchor)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_relative_link_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", page.read_text())):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {path}, which is not there"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target.read_text()), f"{page.name} links to {link}, which has no such heading"


@pytest.mark.parametrize("page", [ROOT / "README.md", *ROOT.glob("docs/**/*.md")], ids=lambda page: page.name)
def test_each_source_file_that_is_named_exists(page):
    files = {str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    ends = {file[place:] for file in files for place in [0, *(m.end() for m in re.finditer("/", file))]}
    named = re.findall(r"`([\w/]+\.py)`", page.read_text())
    assert [name for name in named if name not in ends] == []


def test_the_site_has_each_page():
    nav = set(re.findall(r"[\w/]+\.md", (ROOT / ".ci/site/mkdocs.yml").read_text()))
    assert {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")} <= nav


def test_each_algorithm_has_a_section_in_the_registrys_order():
    text = (ROOT / "docs" / "algorithms.md").read_text()
    sections = re.findall(r"^## (\w+)$", text, re.MULTILINE)
    assert sections == list(ALGORITHMS)
    for name, section in zip(sections, re.split(r"^## ", text, flags=re.MULTILINE)[2:], strict=True):
        assert "```math" in section, name
        assert re.search(r"arXiv \d{4}\.\d{5}", " ".join(section.split())), name
