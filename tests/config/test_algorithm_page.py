"""docs/algorithms.md against the registry, the models and the data of the learning curves."""

import json
import re
import sys

from helpers.support import ROOT

from evorl.algorithms import ALGORITHMS

sys.path.insert(0, str(ROOT / "benchmarks"))
from algorithm_page import CURVES, PAGE, filled

TEXT = PAGE.read_text()


def test_each_algorithm_has_a_section_in_the_registrys_order():
    sections = re.findall(r"^## (\w+)$", TEXT, re.MULTILINE)
    assert sections == list(ALGORITHMS)
    assert re.findall(r"<!-- begin (\w+) -->", TEXT) == sections
    for name, section in zip(sections, re.split(r"^## ", TEXT, flags=re.MULTILINE)[2:], strict=True):
        assert "```math" in section, name
        assert re.search(r"arXiv \d{4}\.\d{5}", " ".join(section.split())), name


def test_settings_and_ends_of_curves_are_current():
    """`python benchmarks/algorithm_page.py` updates them."""
    assert filled(TEXT) == TEXT


def test_curves_have_a_point_for_each_generation():
    for line in map(json.loads, CURVES.read_text().splitlines() if CURVES.is_file() else ()):
        assert len(line["steps"]) == len(line["mean"]) == len(line["quantiles"]) > 0
        assert line["steps"] == sorted(line["steps"])
        assert all(values == sorted(values) for values in line["quantiles"])
