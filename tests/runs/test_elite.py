"""Who is the best so far, and when a run may stop: on episodes that chose nobody."""

import math
from statistics import NormalDist

import numpy as np
import pytest
from helpers.support import agent, config, context, train

from evorl.evolution import SELECTIONS, evolve
from evorl.records import Mutation
from evorl.runs.archive import Archive
from evorl.runs.elite import Elite, Score, error_of_test, play_until_clear
from evorl.runs.progress import PROGRESS, Progress


def lives(rng, means, target, *, generations=25, episodes=10, confirmation=60, draw=None):
    """A whole run of agents with these true means: the true mean of who made it stop, or None."""
    draw = draw or (lambda mean, count: rng.normal(mean, 70.0, count))
    elite, true = Elite(), []
    for generation in range(1, generations + 1):
        returns = [draw(mean, episodes) for mean in means]
        best = int(np.argmax([each.mean() for each in returns]))
        hopes = (returns[best].mean(), -math.inf if elite.score is None else elite.score.mean)
        again = draw(true[0], episodes) if true else None

        def confirm(first, count, members=(means[best], *true)):
            return np.stack([draw(mean, count) for mean in members])

        if elite.challenge(returns[best], again, confirm, confirmation, generation):
            true = [means[best]]

        def play(first, count, true=true):
            return draw(true[0], count)[None]

        if elite.reaches(target, 0.05, max(hopes) >= target, play, confirmation):
            return true[0]
    return None


def crashes(rng):
    """Returns as of landers: most are alike, and one in ten is a disaster that drags the mean down."""
    return lambda mean, count: mean + np.where(rng.random(count) < 0.1, -180.0, 20.0) + rng.normal(0, 20.0, count)


@pytest.mark.parametrize("skewed", [False, True])
def test_a_run_of_agents_below_the_target_stops_in_fewer_than_one_case_of_twenty(skewed):
    rng = np.random.default_rng(0)
    draw = crashes(rng) if skewed else None
    stops = sum(lives(rng, (215, 210, 205, 200), 220, draw=draw) is not None for _ in range(600))
    assert stops / 600 < 0.05


def test_a_run_stops_soon_once_an_agent_is_clearly_above_the_target():
    rng = np.random.default_rng(1)
    stops = [lives(rng, (260, 215, 200, 150), 220, generations=6) for _ in range(100)]
    assert stops.count(260) >= 95


def test_a_lucky_mean_is_forgotten():
    """The best of many single means would be some 50 too high here, and nobody could replace its agent."""
    rng = np.random.default_rng(2)
    elite = Elite()
    for generation in range(15):
        best = max((rng.normal(230, 70, 10) for _ in range(4)), key=np.mean)
        again = None if elite.score is None else rng.normal(230, 70, 10)
        agents = 1 if elite.score is None else 2
        elite.challenge(
            best, again, lambda first, count, agents=agents: rng.normal(230, 70, (agents, count)), 60, generation
        )
    assert elite.score.mean == pytest.approx(230, abs=20)


def test_the_elite_gives_way_only_to_who_is_better_on_the_same_episodes():
    elite = Elite(Score(60, 200.0, 50.0), 3)
    assert not elite.challenge(np.full(10, 219.0), np.full(10, 220.0), None, 0, 4)
    assert (elite.generation, elite.score.episodes) == (3, 70)
    assert not elite.challenge(np.full(10, 300.0), np.full(10, 220.0), two(199.0, 200.0), 60, 5)
    assert (elite.generation, elite.score.episodes) == (3, 90)
    assert elite.challenge(np.full(10, 300.0), np.full(10, 220.0), two(201.0, 200.0), 60, 6)
    assert (elite.generation, elite.score) == (6, Score(10, 201.0, 0.0))


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


def test_ties_go_to_the_newer():
    elite = Elite(Score(10, 1.0, 0.0), 1)
    assert elite.challenge(np.ones(10), np.ones(10), None, 0, 2)
    assert elite.generation == 2


def test_scores_pool_to_that_of_all_episodes():
    rng = np.random.default_rng(3)
    parts = [rng.exponential(size=size) for size in (1, 5, 2, 40)]
    pooled = Score.of(parts[0])
    for part in parts[1:]:
        pooled = pooled.merged(Score.of(part))
    whole = np.concatenate(parts)
    skewness = ((whole - whole.mean()) ** 3).mean() / whole.std() ** 3
    assert pooled == pytest.approx((48, whole.mean(), whole.std(ddof=1), skewness))


@pytest.mark.parametrize(
    ("freedom", "error", "quantile"),
    [(9, 0.025, 2.2622), (29, 0.05, 1.6991), (59, 0.01, 2.3912), (59, 0.0005, 3.4632), (9, 0.001, 4.2968)],
)
def test_bounds_are_those_of_students_distribution(freedom, error, quantile):
    """Quantiles from the usual tables."""
    bound = Score(freedom + 1, 0.0, math.sqrt(freedom + 1)).lower_bound(error)
    assert -bound == pytest.approx(quantile, rel=0.005)


def test_bounds_hold_where_disasters_are_rare():
    rng = np.random.default_rng(4)
    draw = crashes(rng)
    above = sum(Score.of(draw(0.0, 60)).lower_bound(0.025) > 0 for _ in range(2000))
    assert above / 2000 < 0.025


def test_a_single_episode_bounds_nothing_and_equal_ones_their_mean():
    assert Score.of([5.0]).lower_bound(0.05) == -math.inf
    assert Score.of([5.0] * 20).lower_bound(0.001) == 5.0


def test_all_tests_together_spend_the_error():
    assert sum(error_of_test(0.05, number) for number in range(1, 10_000)) == pytest.approx(0.05, rel=1e-3)
    assert error_of_test(0.05, 1) < 0.05


def test_a_test_is_made_only_where_there_is_hope_and_on_fresh_episodes():
    elite = Elite(Score(60, 250.0, 10.0), 1)
    assert not elite.reaches(220, 0.05, False, None, 60)
    assert elite.tests == 0
    assert elite.reaches(220, 0.05, True, None, 60)
    assert elite.lower_bound == pytest.approx(250 + NormalDist().inv_cdf(0.025) * 10 / math.sqrt(60), abs=0.1)
    assert not elite.reaches(220, 0.05, True, lambda first, count: np.full((1, count), 150.0), 60)
    assert elite.score.episodes == 120


def test_progress_keeps_the_elite_over_a_file():
    progress = Progress(elite=Elite(Score(70, 1.5, 0.5), 3, tests=2, lower_bound=1.25))
    assert PROGRESS.validate_json(PROGRESS.dump_json(progress)) == progress


@pytest.mark.parametrize("name", SELECTIONS)
def test_the_archive_is_a_parent_and_never_takes_an_identity(name):
    """A population that has collapsed gets its best agent back, as a child that no mutation touches."""
    members = [agent(id=id) for id in range(4)]
    for member in members:
        member.fitness = float(member.id)
    archived = agent(id=2)
    archived.fitness = 100.0
    settings = context(f"evolution.selection={{name: {name}}}")
    evolved = evolve(members, settings, next_id=10, rng=np.random.default_rng(0), archive=[archived])
    assert len(evolved) == 4
    assert len({each.id for each in evolved}) == 4
    children = [each for each in evolved if each.id >= 10 and each.parent == 2]
    if name == "tournament":
        assert children[0].mutation == Mutation("none", "archive")
        for role, tensors in archived.tensors["q"].items():
            for key, value in tensors.items():
                assert value.equal(children[0].tensors["q"][role][key])
    else:
        assert len(children) == {"truncation": 1, "none": 0}[name]
    alone = evolve(members, settings, next_id=10, rng=np.random.default_rng(0))
    assert 3 in {each.id for each in alone}


def test_the_newest_of_equal_agents_goes_on():
    members = [agent(id=id) for id in range(3)]
    for member in members:
        member.fitness = 1.0
    assert evolve(members, context(), next_id=10, rng=np.random.default_rng(0))[0].id == 2


def test_fewer_confirming_episodes_than_those_to_confirm_are_refused(in_directory, capsys):
    assert config("evaluation.confirmation_episodes=0").evaluation.confirmation_episodes == 0
    assert train("evaluation.episodes=10", "evaluation.confirmation_episodes=9") == 2
    assert "evaluation: confirmation_episodes: 9 are fewer than the 10" in capsys.readouterr().err


@pytest.mark.parametrize(("generations", "expected"), [(0, []), (2, [9, 10]), (5, [9, 10, 11, 12, 13])])
def test_the_archive_competes_for_so_many_generations_and_no_longer(generations, expected):
    settings = config(f"evolution.selection.archive={generations}")
    archive = Archive(settings, Elite(generation=8), b"")
    archive.parents = [agent(id=2)]
    assert [now for now in range(9, 20) if archive.competing(now)] == expected
