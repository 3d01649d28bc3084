"""Who is the best so far, and when a run may stop: on episodes that chose nobody."""

import json
import math
import sys
from dataclasses import asdict

import numpy as np
import pytest
from helpers.support import ROOT, agent, config, context, lines, train

from evorl.distributed import Placement
from evorl.distributed.ranks import Ranks
from evorl.evolution.selection import SELECTIONS, evolve
from evorl.runs.agents.elite import Elite, Score, error_of_test, lower_bound, play_until_clear
from evorl.runs.storage.progress import PROGRESS, Progress, progress_of
from evorl.types.outcomes import UserError

sys.path.insert(0, str(ROOT / "benchmarks"))
from stopping import ABOVE, BELOW, outcomes, run, students_bound

RARE = ("one landing in 30 crashes", "one landing in 60 crashes", "success 0.97, target 0.98")


@pytest.mark.parametrize("name", ["normal, 70", *RARE, "scores of -21 to 21"])
def test_a_run_of_agents_below_the_target_does_not_stop(name):
    assert not any(each.stopped for each in outcomes(BELOW[name], 6, known=False))


@pytest.mark.parametrize("name", ABOVE)
def test_a_run_stops_soon_once_an_agent_is_clearly_above_the_target(name):
    ends = outcomes(ABOVE[name], 8, known=True)
    assert all(each.stopped and each.generation <= 3 for each in ends)
    assert sum(each.generation for each in ends) <= 1.3 * len(ends)


def test_equal_returns_stop_a_run_at_once():
    """Cart poles that all stay up, with a target just below, and the worst return of agents that all fell."""
    end = run(ABOVE["constant 500 (target 475)"], np.random.default_rng(0), known=True)
    assert (end.generation, end.stopped, end.reported) == (1, True, 500.0)
    assert end.episodes <= 40 + 90


def test_the_mean_that_is_reported_is_not_too_high():
    """The mean of the episodes that won the duel would be, by a tenth of a standard deviation."""
    case = BELOW["normal, far below"]
    ends = outcomes(case, 30, known=False)
    assert np.mean([end.reported - case.true for end in ends]) / case.std < 0.05


def test_elite_with_a_lucky_mean_is_replaced():
    """The best of many single means would be some 50 too high here, and nobody could replace its agent."""
    rng = np.random.default_rng(2)
    elite = Elite()
    for generation in range(15):
        best = max((rng.normal(230, 70, 10) for _ in range(4)), key=np.mean)
        again = None if elite.score is None else rng.normal(230, 70, 10)
        elite.challenge(best, again, lambda first, count: rng.normal(230, 70, (2, count)), 60, generation)
        elite.measure(lambda first, count: rng.normal(230, 70, (1, count)), 10, 60)
    assert elite.score.mean == pytest.approx(230, abs=45)


def elite_of(*returns, **others):
    return Elite(returns, **{"generation": 3, "worst": min(returns), **others})


def test_the_elite_gives_way_only_to_who_is_better_on_the_same_episodes():
    elite = elite_of(190.0, 210.0)
    assert not elite.challenge(np.full(10, 219.0), np.full(10, 220.0), two(9e9, 0.0), 60, 4)
    assert not elite.challenge(np.full(10, 300.0), np.full(10, 220.0), two(199.0, 200.0), 60, 5)
    assert (elite.generation, elite.returns) == (3, (190.0, 210.0))
    assert elite.challenge(np.full(10, 300.0), np.full(10, 220.0), two(201.0, 200.0), 60, 6)
    assert elite.generation == 6


def test_only_what_was_played_after_an_agent_became_the_elite_is_its_score():
    elite = elite_of(190.0, 210.0, is_tested=True, tests=1, lower_bound=180.0)
    assert elite.challenge(np.full(10, 300.0), np.full(10, 220.0), two(280.0, 200.0), 60, 6)
    assert (elite.score, elite.is_tested, elite.lower_bound, elite.tests) == (None, False, None, 1)
    assert elite.measure(lambda first, count: np.full((1, count), 250.0), 10, 60) == 10
    assert elite.score == Score(10, 250.0, 0.0)
    assert not elite.challenge(np.full(10, 300.0), np.full(10, 220.0), two(1.0, 200.0), 60, 7)
    assert elite.score == Score(10, 250.0, 0.0), "the episodes by which it held its place do not count"


def test_elite_is_measured_up_to_confirmation_episodes():
    elite, asked = elite_of(0.0), []

    def play(first, count):
        asked.append((first, count))
        return np.zeros((1, count))

    while elite.measure(play, 10, 25):
        pass
    assert asked == [(0, 10), (0, 10), (0, 4)]
    assert elite.measure(None, 10, 60) == 0


def test_without_confirmation_the_means_that_chose_the_elite_are_its_score():
    elite = Elite()
    assert elite.challenge(np.full(3, 5.0), None, None, 0, 1)
    assert not elite.challenge(np.full(3, 4.0), np.full(3, 6.0), None, 0, 2)
    assert elite.returns == (5.0,) * 3 + (6.0,) * 3


def two(challenger, elite):
    return lambda first, count: np.array([[challenger] * count, [elite] * count])


@pytest.mark.parametrize(("noise", "least", "most"), [(0.1, 10, 10), (2.0, 20, 50), (1000.0, 60, 60)])
def test_fresh_episodes_are_played_until_the_difference_is_clear(noise, least, most):
    rng, asked = np.random.default_rng(6), []

    def play(first, count):
        asked.append((first, count))
        return np.stack([1.0 + rng.normal(0, noise, count), rng.normal(0, noise, count)])

    played = play_until_clear(play, 10, 60)
    assert least <= played.shape[1] <= most
    assert asked == [(first, 10) for first in range(0, played.shape[1], 10)]


def test_elite_ties_go_to_the_newer():
    elite = elite_of(1.0)
    assert elite.challenge(np.ones(10), np.ones(10), None, 0, 2)
    assert elite.generation == 2


@pytest.mark.parametrize("name", [name for name in BELOW if name != "constant"])
def test_lower_bound_holds_for_every_distribution_at_any_time(name):
    """Someone looks after 10, 20, 40, 80 and 160 episodes, and the error is one of 10."""
    case, rng = BELOW[name], np.random.default_rng(4)
    fails = 0
    for _ in range(40):
        returns = case.draw(rng, 160)
        worst = min(case.worst, returns.min())
        fails += any(lower_bound(returns[:count], worst, 0.1) > case.true for count in (10, 20, 40, 80, 160))
    assert fails / 40 <= 0.1


def test_lower_bound_counts_an_unseen_failure():
    """Of returns without a variance the bound is that of Clopper and Pearson for a failure that never came."""
    returns, error = [500.0] * 88, 0.025
    exact = 500 * error ** (1 / 88)
    assert exact - 5 < lower_bound(returns, 0.0, error) < exact
    assert lower_bound(returns, 400.0, error) > 490
    assert lower_bound(returns, -1000.0, error) < 450


def test_lower_bound_rises_with_episodes_and_stays_below_the_mean():
    rng = np.random.default_rng(5)
    returns = rng.normal(250, 30, 1000)
    bounds = [lower_bound(returns[:count], -300.0, 0.025) for count in (10, 30, 100, 300, 1000)]
    assert sorted(bounds) == bounds
    assert bounds[-1] < returns.mean() < bounds[-1] + 10
    assert students_bound(returns, 0.025) > bounds[-1]


def test_lower_bound_of_degenerate_returns():
    assert lower_bound([], 0.0, 0.05) == -math.inf
    assert lower_bound([5.0] * 3, 5.0, 0.05) == 5.0
    assert lower_bound([0.0, 0.0], 0.0, 0.05) == 0.0
    assert 0 <= lower_bound([5.0], 0.0, 0.05) < 5


def test_a_standard_error_is_that_of_the_mean_and_with_one_less():
    returns = np.random.default_rng(6).normal(250, 30, 50)
    score = Score.of(returns)
    assert score.std == pytest.approx(math.sqrt(((returns - returns.mean()) ** 2).sum() / 49))
    assert score.standard_error == pytest.approx(score.std / math.sqrt(50))
    assert Score(50, 250.0, 30.0).described() == "250.0 ± 4.24 over 50 fresh episodes"
    single = Score.of([5.0])
    assert (single.std, single.standard_error) == (None, None)
    assert single.described(fresh=False) == Score(1, 5.0, 0.0).described(fresh=False) == "5 over 1 episode"


def test_all_tests_together_spend_the_error():
    assert sum(error_of_test(number) for number in range(1, 10_000)) == pytest.approx(0.05, rel=1e-3)
    assert error_of_test(1) < 0.05


def test_target_is_tested_only_by_an_elite_above_it():
    asked = []

    def play(first, count):
        asked.append((first, count))
        return np.full((1, count), 250.0)

    elite = elite_of(*[250.0] * 10, worst=-300.0)
    assert not elite.reaches(220, False, play, 60)
    assert (elite.tests, elite.lower_bound, asked) == (0, None, [])
    assert elite.reaches(220, True, play, 60, played=10)
    assert asked == [(10, 30), (40, 30), (70, 30)]
    assert (elite.tests, elite.is_tested) == (1, True)
    assert elite.lower_bound == pytest.approx(lower_bound(elite.returns, -300.0, 0.025))
    assert elite.lower_bound >= 220


def test_target_test_of_a_worse_elite_ends_soon():
    elite, asked = elite_of(*[100.0, 200.0] * 10), []

    def play(first, count):
        asked.append(count)
        return np.full((1, count), 150.0)

    for _ in range(3):
        assert not elite.reaches(220, True, play, 60)
    assert (elite.tests, asked) == (1, [])
    assert elite.lower_bound < 150


def test_target_test_may_take_more_episodes_in_a_larger_population():
    """As the worst founder returned -10,000, some 1,000 episodes are needed, more than eight sets of 60."""

    def play(first, count):
        return np.full((1, count), 243.0)

    small, large = (elite_of(*[243.0] * 60, worst=-10_000.0) for _ in range(2))
    assert not small.reaches(200, True, play, 60, played=60, agents=4)
    assert large.reaches(200, True, play, 60, played=60, agents=16)
    assert len(small.returns) == 90
    assert 60 + 8 * 60 < len(large.returns) < 1200


@pytest.mark.parametrize("confirmation", [1, 3, 60])
def test_target_test_ends_in_every_generation(confirmation):
    """The mean is at the target: no number of episodes tells."""
    rng, elite, asked = np.random.default_rng(7), elite_of(*[0.0, 440.0] * 30), []

    def play(first, count):
        asked.append((first, count))
        return rng.normal(220, 220, (1, count))

    assert not elite.reaches(220, True, play, confirmation)
    assert sum(count for _, count in asked) <= 8 * confirmation


NO_FRESH = "evaluation.confirmation_episodes=0"


@pytest.mark.parametrize(
    ("before", "now", "reached"),
    [
        ([], ["training.target_fitness=4"], True),
        ([], ["training.target_fitness=6"], False),
        ([], [], False),
        ([], ["training.target_fitness=4", "population.control=true"], False),
        ([], ["training.target_fitness=4", "evaluation.max_steps=7"], False),
        ([NO_FRESH], [NO_FRESH, "training.target_fitness=6"], True),
        ([NO_FRESH], [NO_FRESH, "training.target_fitness=8"], False),
    ],
)
def test_a_target_is_reached_by_what_was_certain_before_it_was_lowered(before, now, reached):
    progress = Progress.of_new_run(config(*before))
    progress.note_setup(config(*before), Placement(Ranks(), "replicated", 4))
    progress.elite = Elite(returns=(7.0, 7.0), lower_bound=5.0)
    assert progress.is_solved(config(*now)) is reached


def test_an_unseen_return_of_nought_counts_where_no_agent_has_failed_yet():
    successes = elite_of(*[1.0] * 60)
    assert not successes.reaches(0.98, True, lambda first, count: np.ones((1, 0)), 60)
    assert 0.9 < successes.lower_bound < 0.98


def test_the_worst_return_is_that_of_all_agents_and_not_of_faults():
    elite = Elite()
    elite.note_worst(np.array([[math.nan, 3.0], [math.inf, 4.0]]))
    assert elite.worst == 3.0
    elite.note_worst(np.array([math.nan]))
    elite.challenge(np.full(2, 9.0), None, None, 0, 1)
    elite.challenge(np.full(2, 9.0), np.array([-5.0, 30.0]), None, 0, 2)
    assert elite.worst == -5.0


def told(**elite):
    given = asdict(Progress(generation=3, elite=elite_of(1.0, 2.0, tests=2, is_tested=True, lower_bound=1.25)))
    given["elite"] |= elite
    return json.dumps(given).encode()


def test_progress_keeps_the_elite_over_a_file():
    progress = Progress(generation=3, elite=elite_of(1.0, 2.0, tests=2, is_tested=True, lower_bound=1.25))
    assert progress_of(PROGRESS.dump_json(progress), "here") == progress == progress_of(told(), "here")


def test_an_elite_that_is_not_finite_in_a_checkpoint_is_refused():
    with pytest.raises(UserError, match=r"^here: elite.worst: Input should be a finite number"):
        progress_of(told(worst=math.nan), "here")


@pytest.mark.parametrize("name", [*SELECTIONS, "none"])
def test_a_single_agent_goes_on_as_it_is(name):
    alone = agent(id=0)
    alone.fitness = 1.0
    settings = context("population.size=1", f"evolution.selection.name={name}")
    for seed in range(5):
        rng = np.random.default_rng(seed)
        assert evolve([alone], settings, next_id=1, rng=rng) == [alone]


def test_a_run_of_a_single_agent_is_one_training_and_keeps_the_best_state_aside(in_directory):
    overrides = ("population.size=1", "evaluation.confirmation_episodes=3", "training.max_steps=120")
    assert train("run.name=a", *overrides) == 0
    rows = lines(in_directory / "runs" / "a" / "metrics.jsonl")
    assert [row["agents"] for row in rows] == [[0]] * len(rows)
    updates = [row["state"][0]["updates/q"] for row in rows]
    assert updates == list(np.cumsum([row["updates"][0] for row in rows]))
    assert rows[-1]["elite_generation"] in range(1, len(rows) + 1)
    assert all(name == "initial" for row in rows for name in row["mutations"])


def test_fewer_confirming_episodes_than_those_to_confirm_are_refused(in_directory, capsys):
    assert config("evaluation.confirmation_episodes=0").evaluation.confirmation_episodes == 0
    assert train("evaluation.episodes=10", "evaluation.confirmation_episodes=9") == 2
    assert "evaluation: confirmation_episodes: 9 are fewer than the 10" in capsys.readouterr().err
