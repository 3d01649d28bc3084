"""The experiments' runs: one process works on each."""

import sys

from helpers.support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from evidence import claimed


def test_a_run_that_another_has_claimed_is_left_to_it_until_it_ends(tmp_path):
    job = ("lunar_lander", "pool", 101)
    with claimed(job, tmp_path) as first:
        assert first
        with claimed(job, tmp_path) as second, claimed(("lunar_lander", "pool", 102), tmp_path) as other:
            assert not second
            assert other
    with claimed(job, tmp_path) as again:
        assert again
