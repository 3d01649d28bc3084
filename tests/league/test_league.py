"""Leagues: opponents in batched products, matches, the archive, and runs that are resumed or on two ranks."""

import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.games import ThreeMoves
from helpers.support import LEAGUE, config, lines, steps_until, train

from evorl.algorithms import make_algorithm
from evorl.commands.command import run_command
from evorl.config.fields import BENCHMARK
from evorl.distributed import Placement, Ranks
from evorl.envs import Environments
from evorl.envs.games.players import MoveRequest, RandomPlayers
from evorl.league.league import League, Rated
from evorl.league.matches import Arena, Fixture
from evorl.league.players import Players, Sides
from evorl.league.rating import Standings
from evorl.population import Policy, initial_population
from evorl.population.evaluation import Evaluator
from evorl.runs.agents.elite import Elite
from evorl.runs.agents.fitness import Fitness
from evorl.runs.reading.opponents import opponent_of
from evorl.seeding import torch_generator
from evorl.system.formats import decode_agents
from evorl.types.outcomes import UserError

GAME = "environment.id=helpers.games:ThreeMoves"
SETTINGS = (GAME, "algorithm={name: a2c, rollout_steps: 4}", "evolution.fitness=rating", "league.games=2")


def made(*overrides, size=3):
    """A configuration, its algorithm and initial agents."""
    settings = config(*SETTINGS, f"population.size={size}", *overrides)
    with Environments(settings.environment, 1, 1) as environments:
        algorithm = make_algorithm(settings, environments.interface)
    return settings, algorithm, initial_population(settings, algorithm)


def generator(seed=0):
    return torch_generator(seed, generation=0, rank=0, purpose="test")


def league(*overrides, size=3):
    settings, algorithm, agents = made(*overrides, size=size)
    return League(settings, Placement(Ranks(), "replicated", size), algorithm), agents


def asked(copies, rng, first=None):
    seen = rng.normal(size=(len(copies), 4)).astype(np.float32)
    mask = np.ones((len(copies), 3), dtype=bool)
    return MoveRequest(seen, mask, np.array(copies), np.zeros(len(copies), dtype=bool) if first is None else first)


@pytest.mark.parametrize("more", [(), ("network.recurrent=lstm", "algorithm.sequence_length=4")])
def test_players_act_as_single_policies_would(more):
    """Agent 1 fills two of five seats, agent 2 one that never moves; the seats move in an order of their own."""
    settings, algorithm, agents = made(*more)
    interface, places = algorithm.interface, [1, 0, 1, 2, 0]
    together = Players(
        Policy(agents, algorithm, generator()), settings.environment, interface, places, deterministic=True
    )
    alone = [
        Players(
            Policy([agents[place]], algorithm, generator()), settings.environment, interface, [0], deterministic=True
        )
        for place in places
    ]
    rng, moves = np.random.default_rng(0), []
    for seats in ([4, 0, 1, 2], [2, 0], [0, 1, 2, 4], [1]):
        request = asked(seats, rng, rng.random(len(seats)) < 0.3)
        single = [
            alone[seat](
                MoveRequest(request.observation[[row]], request.mask[[row]], np.array([0]), request.first[[row]])
            )[0]
            for row, seat in enumerate(seats)
        ]
        moves.append(together(request))
        assert moves[-1].tolist() == single
    assert len({*np.concatenate(moves).tolist()}) > 1


def test_each_seat_keeps_its_recurrent_state_until_its_next_episode():
    settings, algorithm, agents = made("network.recurrent=lstm", "algorithm.sequence_length=4", size=1)
    policy = Policy(agents, algorithm, generator())
    players = Players(policy, settings.environment, algorithm.interface, [0, 0], deterministic=True)
    rng = np.random.default_rng(0)
    state, starts = policy.initial_state(1), (True, False, False, True, False)
    for start in starts:
        players(asked([1], rng, np.array([start])))
        request = asked([0], rng, np.array([start]))
        players(request)
        seen = {"observation": torch.from_numpy(request.observation)[None], "action_mask": torch.ones(1, 1, 3).bool()}
        _, state = policy.act(seen, torch.tensor([[start]]), state, True)
        assert torch.equal(players._state[0, 0], state[0, 0])
        assert not torch.equal(players._state[1, 0], state[0, 0])


class Level:
    """An evaluator in which every episode is drawn."""

    repeats = False

    def remeasure(self, agents, generation, purpose, first, episodes):
        return np.full((len(agents), episodes), 0.5)


def test_the_elite_goes_by_ratings_of_the_same_matches():
    settings, _, agents = made(size=2)
    elite, evaluator = Elite(), Level()

    def compete(ratings, rating_of_elite, generation):
        filled = np.array(ratings, dtype=float)
        rated = Rated(filled, np.ones(2), np.full(2, 8.0), np.full(2, 0.5), rating_of_elite)
        elite.compete(settings, agents, Fitness.of_ratings(rated), evaluator, generation)
        assert [agent.fitness for agent in agents] == ratings
        return elite.generation, decode_agents(elite.payload, "the elite")[0].id

    assert compete([10.0, 20.0], np.nan, 1) == (1, 1)
    assert compete([25.0, 20.0], 30.0, 2) == (1, 1)
    assert compete([30.0, 20.0], 30.0, 3) == (3, 0), "the newer wins ties"
    assert elite.score.mean == 0.5


def test_players_never_make_a_forbidden_move_whatever_the_padding():
    settings, algorithm, agents = made()
    players = Players(Policy(agents, algorithm, generator()), settings.environment, algorithm.interface, [0, 1, 1, 2])
    rng = np.random.default_rng(1)
    for _ in range(50):
        request = asked([0, 1, 2], rng)
        mask = rng.random((3, 3)) < 0.4
        mask[np.arange(3), rng.integers(3, size=3)] = True
        moves = players(request._replace(mask=mask))
        assert mask[np.arange(3), moves].all()


def test_all_opponents_of_a_step_act_in_one_call_and_are_frozen(monkeypatch):
    here, agents = league("league.matchmaking=uniform", "environment.num_envs=8")
    calls = []
    act = Policy.act
    monkeypatch.setattr(Policy, "act", lambda self, *rest: calls.append(self) or act(self, *rest))
    with Environments(here._config.environment, 3, 8) as environments:
        here.set_opponents(environments, agents, 1)
        environments.reset(0)
        before = environments._vector.opponents.policy.flat.clone()
        calls.clear()
        for _ in range(10):
            environments.step(environments.observation["action_mask"].int().argmax(-1))
        # The second call of a step is of those who begin a new episode against the learner.
        assert 10 <= len(calls) <= 20
        assert torch.equal(environments._vector.opponents.policy.flat, before)


@pytest.mark.parametrize("copy", [0, 1])
def test_each_agents_opponents_are_the_same_on_every_rank_that_holds_it(copy):
    here, agents = league(size=4)
    points = np.array([[0, 1, 2, 2], [1, 0, 2, 0], [0, 0, 0, 1], [0, 2, 1, 0]], dtype=float)
    games = 2 * (1 - np.eye(4))
    here.standings = Standings((0, 1, 2, 3), points=tuple(map(tuple, points)), games=tuple(map(tuple, games)),
                               ratings=(0.0,) * 4, errors=(0.0,) * 4)  # fmt: skip
    whole = here._draw(agents, 6, 5).reshape(4, 6)
    shard = SimpleNamespace(copies=1, copy=0, local=slice(2 * copy, 2 * copy + 2), ranks=here._placement.ranks)
    here._placement = shard
    assert here._draw(agents, 6, 5).reshape(2, 6).tolist() == whole[2 * copy : 2 * copy + 2].tolist()


def test_latest_plays_itself_and_children_inherit_the_results_of_their_parents():
    here, agents = league("league.matchmaking=latest")
    assert here._draw(agents, 2, 1).tolist() == [0, 0, 1, 1, 2, 2]
    here.evaluate(agents, 1)
    children = [agents[0], agents[1].child(7, 1), agents[0].child(8, 1)]
    known = here._expected(children)
    points, games = here.standings.matrices()
    assert known[1, 0] == (points[1, 0] + 0.5) / (games[1, 0] + 1)
    assert known[2, 1] == known[0, 1]
    assert known[0, 2] == 0.5, "a copy of itself"


def test_all_pairs_play_the_same_seeds_from_both_seats(monkeypatch):
    here, agents = league("league.games=4")
    seeds = {}
    reset = ThreeMoves.reset
    monkeypatch.setattr(ThreeMoves, "reset", lambda self, seed=None: reset(self, seed) or seeds.setdefault(seed, 0))
    fixtures = here._fixtures(np.zeros((3, 3)), 1)
    assert len(fixtures) == 3 * 4
    for one, other in ((0, 1), (0, 2), (1, 2)):
        own = [each.seed for each in fixtures if (each.first, each.second) == (one, other)]
        assert own == [each.seed for each in fixtures if (each.first, each.second) == (other, one)]
        assert own == [fixtures[0].seed, fixtures[2].seed]
    rated = here.evaluate(agents, 1)
    points, games = here.standings.matrices()
    assert games.tolist() == (4 * (1 - np.eye(3))).tolist()
    assert (points + points.T).tolist() == games.tolist()
    assert rated.games.tolist() == [8, 8, 8]
    assert {*seeds} == {each.seed for each in fixtures}


def test_matches_of_new_agents_end_as_chance_has_it_and_can_be_repeated():
    """Of random moves the first seat wins a sixth: by c = b, where b is neither a nor the right reply."""
    here, agents = league(size=2)

    def results():
        policy = Policy(agents, here._algorithm, generator())
        fixtures = [Fixture(0, 1, 0), Fixture(1, 0, 0)] * 200
        return here._arena.play(lambda seats: here._players(policy, np.zeros(seats)), fixtures)

    first = results()
    assert {*first.tolist()} == {0.0, 1.0}, "0.25 for a move of the other's leaves no game drawn"
    assert first.mean() == pytest.approx(1 / 6, abs=0.06)
    assert (first == results()).all()


def test_rated_agents_explore_alike_whatever_their_epsilon_is(monkeypatch):
    here, agents = league("algorithm={name: dqn, exploration: {start: 1, end: 0.25}}", size=2)
    epsilons = []

    def play(self, fill, fixtures):
        epsilons.extend(fill(1).policy.acting_states()["epsilon"].tolist())
        return np.full(len(fixtures), 0.5)

    monkeypatch.setattr(Arena, "play", play)
    agents[1].state.acting["epsilon"] = 0.5
    here.evaluate(agents, 1)
    assert epsilons == [0.25, 0.25]
    assert [agent.state.acting["epsilon"] for agent in agents] == [1, 0.5]


def filled(archive, *overrides):
    """A league after an evaluation of two agents, with so many archived ones."""
    here, agents = league(*overrides, size=2)
    for generation in range(1, archive + 1):
        here.evaluate(agents, generation)
        now = here.standings
        points = np.array(now.points)
        games = np.array(now.games)
        points[0, 2:] = games[0, 2:]
        points[2:, 0] = 0
        here.standings = Standings(
            now.population, now.archive, now.archived, tuple(map(tuple, points.tolist())), now.games,
            (1000.0, *now.ratings[1:]), now.errors,
        )  # fmt: skip
        assert here.admit(agents, generation)
    return here, agents


def test_the_archive_takes_who_beats_it_by_the_margin_and_keeps_its_first():
    here, agents = filled(3, "league.archive=3", "league.margin=0.25")
    assert here.standings.archive == (0, 0, 0)
    assert here.standings.archived == (1, 2, 3)
    here.evaluate(agents, 4)
    now = here.standings
    assert now.ratings[2] == 0, "the first archived agent is the zero"

    def after(share, ratings):
        points = np.array(now.points)
        points[0, 2:] = share * np.array(now.games)[0, 2:]
        here.standings = Standings(now.population, now.archive, now.archived, tuple(map(tuple, points.tolist())),
                                   now.games, ratings, now.errors)  # fmt: skip
        return here.admit(agents, 4)

    assert not after(0.7, (50.0, 0.0, 0.0, -5.0, 5.0))
    assert after(0.75, (50.0, 0.0, -9.0, -5.0, 5.0))
    assert here.standings.archived == (1, 3, 4), "the lowest rated but the first has left"
    assert len(here.archive) == 3
    assert len(here.standings.points) == 5


@pytest.mark.parametrize(("most", "archived"), [(2, (1, 5)), (1, (5,))])
def test_an_archive_with_a_smaller_limit_than_before_shrinks_to_it(most, archived):
    """As in a branch with another `league.archive`."""
    here, agents = filled(4, "league.archive=4", "league.margin=-0.5")
    here.settings = here.settings.model_copy(update={"archive": most})
    here.evaluate(agents, 5)
    assert here.admit(agents, 5)
    assert here.standings.archived == archived
    assert len(here.archive) == len(archived)
    assert len(here.standings.points) == 2 + len(archived)


@pytest.mark.parametrize(
    "wrong",
    [
        {"points": ((0.0,),)},
        {"games": ((0.0,), (2.0, 0.0))},
        {"ratings": (0.0,)},
    ],
)
def test_standings_that_contradict_themselves_are_refused(wrong):
    fine = {
        "population": (0, 1), "points": ((0.0, 1.0), (1.0, 0.0)), "games": ((0.0, 2.0), (2.0, 0.0)),
        "ratings": (0.0, 0.0), "errors": (1.0, 1.0),
    }  # fmt: skip
    Standings(**fine)
    with pytest.raises(ValueError, match=r"entrant"):
        Standings(**fine | wrong)


@pytest.mark.parametrize(("benchmark", "score"), [("helpers.games:right_reply", 0.0), ("random", 1.0)])
def test_the_score_of_the_elite_is_against_the_benchmark(benchmark, score):
    """Whoever meets the right reply to its first move loses; the other seat's random third move may lose to it."""
    settings, algorithm, agents = made(f"league.benchmark={benchmark}", size=1)
    placement = Placement(Ranks(), "replicated", 1)
    with Evaluator(settings, placement, algorithm) as evaluator:
        evaluator.set_opponents(opponent_of(benchmark, BENCHMARK, settings.environment, algorithm.interface).seat)
        results = evaluator.remeasure(agents, 1, "measurement", 0, 200)
        assert set(results[0].tolist()) <= {0.0, 0.5, 1.0}
        firsts = [seed % 2 == 0 for seed in evaluator._seeds(1, "measurement", 0, 200)]
        lost = results[0][firsts] == 0
        assert lost.all() == (score == 0.0)


def league_of_run(run):
    newest = max((run / "checkpoints").glob("generation-*"))
    files = {name: (newest / name).read_bytes() for name in ("agents.safetensors", "archive.safetensors")}
    return json.loads((newest / "state.json").read_text())["league"], files


BOTH = ("environment.id=helpers.games:Duel", "league.matchmaking=latest", "league.learn_from=both")


@pytest.mark.parametrize("more", [(), BOTH])
def test_a_league_that_was_stopped_ends_as_one_that_was_not(more, in_directory):
    assert train("run.name=whole", *LEAGUE, *more, "training.max_steps=200") == 0
    whole, stopped = in_directory / "runs" / "whole", in_directory / "runs" / "stopped"
    assert train("run.name=stopped", *LEAGUE, *more, f"training.max_steps={steps_until(whole, 3)}") == 0
    assert train("run.name=stopped", *LEAGUE, *more, "training.max_steps=200", "run.resume=auto") == 0
    assert league_of_run(stopped) == league_of_run(whole)
    rows = [lines(run / "metrics.jsonl") for run in (stopped, whole)]
    assert [row["fitness"] for row in rows[0]] == [row["fitness"] for row in rows[1]]
    standings, _ = league_of_run(whole)
    assert len(standings["archive"]) == 2
    assert rows[1][-1]["fitness"] == standings["ratings"][:3]


ROUNDS = ("environment.id=helpers.games:RockPaperScissors", "evaluation={episodes: 4, confirmation_episodes: 0}")


def steps_of_rounds(run, rated, episodes=4):
    """Steps of evaluation by generation: a match has two moves, an episode against the benchmark one of the agent."""
    archived = json.loads((run / "checkpoints" / "generation-000003" / "state.json").read_text())["league"]["archived"]
    for generation in (1, 2, 3):
        elite, past = generation > 1, sum(each < generation for each in archived)
        count = 4 + past + (rated and elite)
        matches = (count * (count - 1) - past * (past - 1)) // 2 * 2
        yield 2 * matches + episodes * ((1 if rated else 4) + elite)


@pytest.mark.parametrize("fitness", ["rating", "return"])
def test_moves_in_matches_are_steps_of_evaluation(fitness, in_directory):
    settings = (*LEAGUE, *ROUNDS, "population.size=4", f"evolution.fitness={fitness}", "league.archive=8")
    assert train("run.name=a", *settings, "training.max_steps=120", "evolution.steps=40") == 0
    run = in_directory / "runs" / "a"
    steps = list(steps_of_rounds(run, fitness == "rating"))
    assert [row["evaluation_steps"] for row in lines(run / "metrics.jsonl")] == steps
    assert json.loads((run / "summary.json").read_text())["evaluation_steps"] == sum(steps)
    assert train("run.name=a", *settings, "training.max_steps=160", "evolution.steps=40", "run.resume=auto") == 0
    row = lines(run / "metrics.jsonl")[-1]
    assert json.loads((run / "summary.json").read_text())["evaluation_steps"] == sum(steps) + row["evaluation_steps"]


def test_the_seed_of_a_match_decides_what_both_sides_draw(own_league_run, capsys):
    """The game itself has no chance, so different results are the players' own."""
    told = []
    for seed in ("0", "0", "1", "2", "3"):
        run_command(["match", "runs/a", "random", "--games", "40", "--seed", seed, "--json"])
        told.append({**json.loads(capsys.readouterr().out), "seed": None})
    assert told[0] == told[1]
    assert len({(each["won"], each["drawn"]) for each in told}) > 1


def test_a_match_of_two_runs_tells_results_of_both_seats(own_league_run, capsys):
    assert train("run.name=b", *LEAGUE, "training.max_steps=40", "seed=2") == 0
    capsys.readouterr()
    run_command(["match", "runs/a", "runs/b", "--games", "100", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["won"] + told["drawn"] + told["lost"] == told["games"] == 100
    assert told["mean"] == pytest.approx((told["won"] + told["drawn"] / 2) / 100)
    assert told["mean"] == pytest.approx((told["first_seat"] + told["second_seat"]) / 2)
    assert told["interval"][0] < told["mean"] < told["interval"][1]
    assert told["first_seat"] < 0.5 < told["second_seat"], "as chance has it in this game"
    run_command(["match", "runs/b", "runs/a", "--games", "100", "--json"])
    back = json.loads(capsys.readouterr().out)
    assert abs(back["mean"] + told["mean"] - 1) < 0.2
    run_command(["match", "runs/a", "random", "--games", "9"])
    assert re.fullmatch(
        r"runs/a against random: \d+ won, \d+ drawn, \d+ lost\nmean result [\d.]+ \(95 % interval .*second [\d.]+\n",
        capsys.readouterr().out,
    )


def test_a_match_needs_the_same_game_of_two_seats(own_league_run, trained_run):
    another = ("environment.id=helpers.games:RockPaperScissors", "training.max_steps=40")
    assert train("run.name=other", *LEAGUE, *another) == 0
    shutil.copytree(trained_run, "runs/pole")
    with pytest.raises(UserError, match=r"runs/pole: plays CartPole-v1, but the game is helpers\.games:ThreeMoves"):
        run_command(["match", "runs/a", "runs/pole"])
    with pytest.raises(UserError, match="runs/pole: CartPole-v1 is not a two-player game"):
        run_command(["match", "runs/pole", "runs/a"])
    with pytest.raises(UserError, match=r"watch: helpers.games:ThreeMoves is a game, which is not shown"):
        run_command(["watch", "runs/a", "--video", "a.mp4"])
    with pytest.raises(UserError, match=r"runs/other: plays helpers.games:RockPaperScissors, but the game is "):
        run_command(["match", "runs/a", "runs/other"])


@pytest.mark.two_process
@pytest.mark.parametrize("placement", ["replicated", "sharded"])
def test_two_ranks_hold_the_same_league(placement, tmp_path, forked_launch):
    settings = (*LEAGUE, "population.size=4", f"population.placement={placement}", "training.max_steps=160")
    forked_launch.well(tmp_path, "run.name=a", *settings)
    assert not any(row["drifts"] for row in lines(tmp_path / "runs" / "a" / "metrics.jsonl"))
    if placement == "sharded":
        forked_launch.well(tmp_path, "run.name=b", *settings)
        assert league_of_run(tmp_path / "runs" / "a") == league_of_run(tmp_path / "runs" / "b")
    standings, _ = league_of_run(tmp_path / "runs" / "a")
    assert (np.array(standings["points"]) + np.array(standings["points"]).T == np.array(standings["games"])).all()


def arena_of(game, moves=None):
    """An arena of a game of so many moves, and what fills its seats with random players."""
    settings = config(f"environment.id=helpers.games:{game}").environment
    with Environments(settings, 1, 1) as environments:
        interface = environments.interface

    def fill(seats):
        players = [RandomPlayers(interface.action) for _ in range(2)]
        for side, each in enumerate(players):
            each.begin([side])
        return Sides(players, seats)

    return Arena(settings, interface, moves), fill


@pytest.mark.parametrize(("moves", "result"), [(1, 1.0), (2, 0.5)])
def test_a_seat_that_waits_has_what_its_last_move_gave(moves, result):
    arena, fill = arena_of("Takes", moves)
    with arena:
        assert arena.play(fill, [Fixture(0, 1, 0)]).tolist() == [result]


def test_a_match_is_cut_off_after_the_moves_of_both_seats():
    arena, fill = arena_of("Forever", 6)
    with arena:
        arena.play(fill, [Fixture(0, 1, 0)])
        assert arena.pop_steps() == 6


def test_a_game_that_raises_in_a_match_is_named():
    arena, fill = arena_of("Lame")
    told = r"^environment\.id: a match of helpers\.games:Lame raised RuntimeError: a leg is broken"
    with arena, pytest.raises(UserError, match=told):
        arena.play(fill, [Fixture(0, 1, 0)])
