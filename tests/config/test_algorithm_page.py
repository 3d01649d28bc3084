"""docs/algorithms.md against the registry and the data of the learning curves."""

import json
import re

from helpers.support import ROOT

from evorl.algorithms import ALGORITHMS

TEXT = (ROOT / "docs" / "algorithms.md").read_text()
CURVES = ROOT / "benchmarks" / "data" / "curves.jsonl"


def test_each_algorithm_has_a_section_in_the_registrys_order():
    sections = re.findall(r"^## (\w+)$", TEXT, re.MULTILINE)
    assert sections == list(ALGORITHMS)
    for name, section in zip(sections, re.split(r"^## ", TEXT, flags=re.MULTILINE)[2:], strict=True):
        assert "```math" in section, name
        assert re.search(r"arXiv \d{4}\.\d{5}", " ".join(section.split())), name
        assert f"`evorl config {name}`" in section, name


def test_curves_have_a_point_for_each_generation():
    for line in map(json.loads, CURVES.read_text().splitlines()):
        assert len(line["steps"]) == len(line["mean"]) == len(line["quantiles"]) > 0
        assert line["steps"] == sorted(line["steps"])
        assert all(values == sorted(values) for values in line["quantiles"])
