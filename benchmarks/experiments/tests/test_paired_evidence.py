"""The analysis of the paired experiment on invented runs whose figures are worked by hand."""

import json
import sys

import numpy as np
import pytest
from helpers.support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks" / "experiments"))
import paired_evidence
from paired_evidence import (
    LOOKS,
    adjusted_p,
    analysis,
    comparisons,
    look_table,
    mean_difference,
    paired_improvement,
    pairs_of,
    success_share,
    unpaired_improvement,
    without_pilots,
)
from score_tests import sign_flip_test

RANDOM, SOLVED = -181.37, 200.0


def line(arm, seed, score, members=None):
    run = {"task": "lunar_lander", "arm": arm, "seed": seed, "held_out": {"mean": RANDOM + score * (SOLVED - RANDOM)}}
    run |= {"evaluation_steps": [10, 20], "cpu_seconds": 5.0}
    if members is not None:
        run |= {"fitness": [members], "members": members}
    return run


def arms(**scores):
    """Arms by name from their scores; seeds count from 101, and None is a run that is missing."""
    return {
        arm: [
            line(arm, seed, score, [-100.0, 0.0, 100.0 * score] if arm == "pool" else None)
            for seed, score in enumerate(found, 101)
            if score is not None
        ]
        for arm, found in scores.items()
    }


def rng():
    return np.random.default_rng(0)


def test_runs_pair_by_seed_whatever_their_order():
    ours = [line("selection", seed, seed / 100) for seed in (103, 101, 102, 109)]
    theirs = [line("pool", seed, seed / 200) for seed in (101, 103, 105, 102)]
    found = pairs_of(ours, theirs)
    assert found == pytest.approx(np.array([[1.01, 0.505], [1.02, 0.51], [1.03, 0.515]]))
    assert pairs_of(ours, []).shape == (0, 2)


def test_pairs_improve_by_pairs_and_by_all_combinations():
    pairs = np.array([[1.0, 0.0], [2.0, 2.0], [3.0, 4.0], [5.0, 1.0]])
    assert paired_improvement(pairs) == (1 + 0.5 + 0 + 1) / 4
    # 1 beats 0 and ties with 1; 2 beats 0 and 1 and ties with 2; 3 beats all but 4; 5 beats all.
    assert unpaired_improvement(pairs) == (1.5 + 2.5 + 3 + 4) / 16
    assert mean_difference(pairs) == 1


def test_a_missing_arm_or_a_single_pair_is_left_out():
    found = comparisons(arms(pool=[1, 2, 3], selection=[2, None, 4], pbt_late=[None, 5], pbt=[]))
    assert list(found) == [("selection", "pool")]
    assert len(found["selection", "pool"]) == 2
    for few in (arms(), arms(selection=[1, 2]), arms(pool=[1]), arms(pool=[1, 2]), arms(pool=[1, 2], selection=[1, 2])):
        assert list(analysis(few, rng()))


def test_only_the_primary_comparisons_are_tested():
    rows = list(analysis(arms(pool=[0, 0, 0], selection=[1, 2, 3], pbt=[1, 1, 1]), rng()))
    primary, secondary = (
        next(row for row in rows if row.startswith(f"| `{arm}` | `pool`")) for arm in ("selection", "pbt")
    )
    # Three differences of one sign have p = 2 / 8, and Holm's correction is for two planned tests.
    assert "| 0.2500 | 0.5000 | 0.00 |" in primary
    assert "2.00 (1.00 to 3.00)" in primary
    assert secondary.endswith("|  |  |  |")


def test_a_look_takes_the_first_pairs_and_its_own_level():
    generator = rng()
    pool = np.zeros(40)
    # The first half improves by chance only, the second half clearly.
    scores = np.concatenate([generator.normal(0, 1, 20), generator.normal(2, 1, 20)])
    found = comparisons(arms(pool=pool, selection=scores))
    rows = [row.strip("| ").split(" | ") for row in look_table(found)][2:]
    assert [row[0] for row in rows] == ["20", "40"]
    first = sign_flip_test(scores[:20], rng())
    assert float(rows[0][3]) == pytest.approx(first, abs=1e-4)
    assert float(rows[0][4]) == pytest.approx(min(1, 2 * first), abs=2e-4)
    assert [float(row[5]) for row in rows] == list(LOOKS.values())
    assert [row[6] for row in rows] == ["no", "yes"]


def test_a_protocol_of_two_tasks_is_corrected_over_both():
    """Three differences of one sign have p = 2 / 8; those of the other task, two of them, p = 2 / 4."""
    found = comparisons(arms(pool=[0, 0, 0], pbt_late=[1, 2, 3]))
    (other,) = comparisons(arms(pool=[0, 0], pbt_late=[1, 2])).values()
    assert adjusted_p(found, []) == {("pbt_late", "pool"): (0.25, 0.5)}
    assert adjusted_p(found, [other]) == {("pbt_late", "pool"): (0.25, 0.5)}
    (smaller,) = comparisons(arms(pool=[0] * 4, pbt_late=[1] * 4)).values()
    assert adjusted_p(found, [smaller]) == {("pbt_late", "pool"): (0.25, 0.25)}


def test_no_look_is_taken_before_half_of_the_pairs():
    found = comparisons(arms(pool=[0] * 19, selection=range(1, 20)))
    assert len(list(look_table(found))) == 2


def test_a_look_corrects_over_the_comparisons_that_have_their_pairs():
    """With all differences of one sign p is 1 / 100,001 for both: Holm doubles it."""
    found = comparisons(arms(pool=[0] * 20, selection=[1] * 20, pbt_late=[1] * 20))
    rows = [row.strip("| ").split(" | ") for row in look_table(found)][2:]
    assert [row[1] for row in rows] == ["`selection`", "`pbt_late`"]
    assert all(row[6] == "yes" for row in rows)


def test_the_command_prints_all_tables_or_names_the_missing_file(tmp_path, monkeypatch, capsys):
    data = tmp_path / "selection.jsonl"
    monkeypatch.setattr(sys, "argv", ["paired_evidence.py", "--data", str(data)])
    with pytest.raises(SystemExit, match="there is no such file"):
        paired_evidence.main()
    runs = arms(pool=[0.5, 0.75, 1.0, 0.5], selection=[1.0, 0.75, 1.25, 1.0], pbt_late=[0.5, 1.0])
    data.write_text("".join(json.dumps(run) + "\n" for lines in runs.values() for run in lines))
    paired_evidence.main()
    printed = capsys.readouterr().out
    assert printed.startswith("lunar_lander\n")
    # Wins, a tie, wins: 3.5 of 4. Of 16 flips, eight leave a sum as large: p = 0.25 with the tie, which flips freely.
    assert "| `selection` | `pool` | 4 | 0.88 (0.62 to 1.00)" in printed
    assert "| 0.2500 | 0.5000 |" in printed
    assert "| `pbt_late` | `pool` | 2 |" in printed
    assert "| arm | runs | mean score | worth in random trials |" in printed


def test_pools_of_pilots_take_no_part():
    runs = without_pilots(arms(pool=[0.5, 0.75, 1.0], pbt_late=[1.0, 0.75]))
    assert [len(lines) for lines in runs.values()] == [2, 2]
    assert not any(without_pilots(arms(pool=[0.5, 0.75])).values())


def test_the_share_of_trials_that_succeed_is_over_the_agents_of_all_pools():
    assert success_share([line("pool", 101, 1.1, [0.0, 200.0, 199.0, 250.0]), line("pool", 102, 0, [0.0] * 4)]) == 0.25
    assert success_share([line("pool", 101, 0.9)]) == 0
    with pytest.raises(ValueError, match="pool 101 of lunar_lander succeeded"):
        success_share([line("pool", 101, 1.1)])


def test_the_figure_is_drawn_from_the_data_of_the_repository(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["paired_evidence.py", "--figure", str(tmp_path / "selection.png")])
    paired_evidence.main()
    assert (tmp_path / "selection.png").read_bytes().startswith(b"\x89PNG")
