"""Agents that learn rock, paper, scissors in a league: self-play goes round, and PFSP comes near the mixture."""

import itertools

import numpy as np
import pytest
from helpers.support import config, train

from evorl.algorithms import make_algorithm
from evorl.envs import Environments
from evorl.envs.games.players import MoveRequest
from evorl.league.players import Players
from evorl.population import Policy
from evorl.seeding import torch_generator
from evorl.system.formats import decode_agents

GENERATIONS, UPDATES = 16, 30
SETTINGS = (
    "environment={id: 'helpers.games:RockPaperScissors', num_envs: 32}", "population.size=1",
    "algorithm={name: a2c, rollout_steps: 1, learning_rate: 3e-2, entropy_coefficient: 0.25}",
    "network.hidden_sizes=[8]", f"evolution.steps={32 * UPDATES}", f"training.max_steps={32 * UPDATES * GENERATIONS}",
    "evolution.fitness=rating", "evaluation={episodes: 2, confirmation_episodes: 0}", "checkpoint.keep=100",
    "league={games: 20, margin: 0, archive: 16}",
)  # fmt: skip
PAYOFF = np.array([[0, -1, 1], [1, 0, -1], [-1, 1, 0]])


def exploitability(policy):
    """What the best reply gets against the probabilities [3] of moves: 0 for the mixture, 1 for a pure move."""
    return (PAYOFF @ policy).max()


def probabilities(path, count=1000):
    """The frequencies [agents, 3] of moves of the agents in a file, to 0.016 (one standard error at one half)."""
    settings = config(*SETTINGS)
    with Environments(settings.environment, 1, 1) as environments:
        algorithm = make_algorithm(settings, environments.interface)
    agents = decode_agents(path.read_bytes(), path.name)
    places = np.repeat(np.arange(len(agents)), count)
    policy = Policy(agents, algorithm, torch_generator(0, generation=0, rank=0, purpose="test"))
    everyone = np.arange(len(places))
    seen = np.ones((len(places), 1), np.float32)
    moves = Players(policy, settings.environment, algorithm.interface, places)(
        MoveRequest(seen, None, everyone, np.ones(len(places), dtype=bool))
    )
    return np.stack([np.bincount(moves[places == place], minlength=3) / count for place in range(len(agents))])


def learned(in_directory, matchmaking):
    """The agent's policy after each generation [G, 3], and the archive's at the end [A, 3]."""
    assert train(f"run.name={matchmaking}", *SETTINGS, f"league.matchmaking={matchmaking}") == 0
    checkpoints = sorted((in_directory / "runs" / matchmaking / "checkpoints").glob("generation-*"))
    policies = np.concatenate([probabilities(each / "agents.safetensors") for each in checkpoints])
    return policies, probabilities(checkpoints[-1] / "archive.safetensors")


@pytest.mark.slow
def test_self_play_that_learns_goes_round_and_pfsp_comes_near_the_mixture(in_directory):
    """With an entropy coefficient c the reply to payoffs u is softmax(u / c), whose slope at the mixture is 0.58 / c.

    Against its last self alone (`latest`) an agent overshoots if that is above 1: 2.3 with c = 0.25. Against an archive
    of n agents one reply shifts the mean by 1 / n, so that the mixture attracts. With c near 0 policies become pure
    before they meet what beats them, and a pure policy that draws with itself learns nothing any more. A generation
    must be long enough for a reply: 30 updates of 32 games.
    """
    circling, _ = learned(in_directory, "latest")
    settled, archive = learned(in_directory, "pfsp")
    later = slice(GENERATIONS // 2, None)
    of_latest, of_pfsp = (np.mean([exploitability(each) for each in run[later]]) for run in (circling, settled))
    assert of_latest > 0.4 > 2 * of_pfsp, (of_latest, of_pfsp)
    assert exploitability(archive.mean(0)) < 0.15, "the league's mean policy"
    # Rock, paper, scissors, each of which beats the one before it.
    favourites = [move for move, _ in itertools.groupby(circling[2:].argmax(1).tolist())]
    assert len(favourites) > 3, "once round and further"
    assert all(after == (before + 1) % 3 for before, after in itertools.pairwise(favourites)), favourites
