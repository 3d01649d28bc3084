"""Two-player games: what a learner sees of them, whose turn it is, and what is refused."""

import itertools

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.support import play, trained

from evorl.config import Environment
from evorl.distributed import Placement, Ranks
from evorl.envs import Environments
from evorl.envs.games import is_game
from evorl.envs.games.players import FunctionPlayers, MoveRequest, RandomPlayers
from evorl.envs.games.vector import RESULT
from evorl.envs.vector import make_vector
from evorl.system.stopwatch import Stopwatch
from evorl.types.outcomes import UserError

HERE = "helpers.games:"


class Scripted:
    """Opponents that answer by `reply(observation)`, and note what they were asked."""

    def __init__(self, reply):
        self.reply, self.asked = reply, []

    def __call__(self, asked):
        self.asked.append(asked)
        return np.array([self.reply(seen) for seen in asked.observation])


def vector(name, copies, reply, seed=0):
    made = make_vector(Environment(id=f"{HERE}{name}"), copies)
    made.opponents = Scripted(reply)
    return made, made.reset(seed=seed)


def test_a_learner_sees_its_own_turns_with_the_reward_until_the_next():
    # Copy 0 is in the first seat, copy 1 in the second. The opponent plays 0, or replies 0.
    made, (seen, info) = vector("ThreeMoves", 2, lambda seen: 0 if seen[0] < 2 else 1)
    assert seen.tolist() == [[0, -1, -1, 0], [1, 0, -1, 1]]
    assert info["action_mask"].tolist() == [[True] * 3] * 2
    seen, reward, terminated, truncated, info = made.step(np.array([1, 2]))
    # Copy 0 played 1, and the reply 0 neither wins nor ends the game. Copy 1 replied 2, and the other's c = 1 drew;
    # both moves of the other gave it something. Its next episode begins in the first seat.
    assert reward.tolist() == [0.25, 0.5]
    assert terminated.tolist() == [False, True]
    assert not truncated.any()
    assert seen.tolist() == [[2, 1, 0, 0], [0, -1, -1, 0]]
    assert info["action_mask"].tolist() == [[True, False, True], [True] * 3]
    assert info["final_obs"][1].tolist() == [3, 0, 2, 1], "its own view, after the other's last move"
    assert info["final_info"][RESULT][1] == 1.0, "what it got for the other's moves makes it ahead"
    assert not info["final_info"]["_action_mask"].any(), "a mask that allows nothing is none"
    seen, reward, terminated, _, info = made.step(np.array([0, 2]))
    # Copy 0 wins by c = b; copy 1's move 2 is answered by the winning 0 = (2 + 1) % 3.
    assert reward.tolist() == [1.0, 0.25 - 1]
    assert terminated.all()
    assert info["final_obs"][0].tolist() == [3, 1, 0, 0]
    assert info["final_obs"][1].tolist() == [2, 2, 0, 0]
    assert info["final_info"][RESULT].tolist() == [1, 0]


def test_seats_alternate_and_each_has_its_own_turns():
    made, _ = vector("ThreeMoves", 3, lambda seen: 0 if seen[0] < 2 else (1 + seen[1]) % 3, seed=4)
    assert made.seats.tolist() == [0, 1, 0]
    rng, began = np.random.default_rng(0), [[], [], []]
    for _ in range(40):
        before = made.seats.copy()
        mask = made._shown()[1]["action_mask"]
        actions = (rng.random((3, 3)) * mask).argmax(1)
        seen, _, terminated, _, _ = made.step(actions)
        assert (seen[:, 3] == made.seats).all(), "observations are the learner's"
        assert (made.seats == np.where(terminated, 1 - before, before)).all()
        for copy in np.flatnonzero(terminated):
            began[copy].append(int(made.seats[copy]))
    for seats in began:
        assert all(one != other for one, other in itertools.pairwise(seats))
        assert len(seats) > 10
    for asked in made.opponents.asked:
        assert (asked.first == (asked.observation[:, 0] <= 1)).all(), "its first move is the game's first or second"


def test_both_seats_are_the_learners_by_turns():
    made = make_vector(Environment(id=f"{HERE}Duel"), 2)
    made.play_both_seats()
    seen, _ = made.reset(seed=0)
    assert made.seats.tolist() == [0, 0], "the game says who begins"
    assert seen.tolist() == [[0, -1, -1, 0]] * 2
    seen, reward, terminated, _, _ = made.step(np.array([1, 0]))
    assert seen.tolist() == [[1, 1, -1, 1], [1, 0, -1, 1]], "the other seat's view"
    assert reward.tolist() == [-0.25] * 2, "the mover pays 0.25"
    assert not terminated.any()
    # Copy 0 replies 0, which decides nothing; copy 1 wins by (0 + 1) % 3.
    seen, reward, terminated, truncated, info = made.step(np.array([0, 1]))
    assert reward.tolist() == [-0.25, 0.75]
    assert terminated.tolist() == [False, True]
    assert not truncated.any()
    assert seen.tolist() == [[2, 1, 0, 0], [0, -1, -1, 0]]
    assert info["final_obs"][1].tolist() == [2, 0, 1, 0], "the loser's view"
    _, reward, terminated, _, info = made.step(np.array([0, 0]))
    assert reward.tolist() == [0.75, -0.25], "c = b wins"
    assert terminated.tolist() == [True, False]
    assert info["final_obs"][0].tolist() == [3, 1, 0, 1]
    assert info["final_info"][RESULT][0] == 1.0


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (f"{HERE}RockPaperScissors", "seats that move in turn"),
        (f"{HERE}MovesTwice", "seats that move in turn"),
        (f"{HERE}ThreeMoves", "a zero-sum game, and an episode gave 0.25 and 0.5"),
        ("openspiel:kuhn_poker", "perfect information"),
    ],
)
def test_games_in_which_nobody_can_play_both_seats_are_refused(name, told):
    if name.startswith("openspiel"):
        pytest.importorskip("pyspiel")
    made = make_vector(Environment(id=name), 1)

    def play():
        made.play_both_seats()
        made.reset(seed=0)
        for move in (0, 2, 1):
            made.step(np.array([move]))

    with pytest.raises(UserError, match=f"^league.learn_from: both does not fit .*{told}") as raised:
        play()
    assert name in str(raised.value)


@pytest.mark.parametrize(
    ("algorithm", "replay", "close"),
    [
        # Random replies are among the rewards of an n-step return.
        ("name: dqn, batch_size: 32, learn_step: 8", ["replay={n_step: 2, learning_starts: 64}"], 0.3),
        ("name: a2c, rollout_steps: 4, gae_lambda: 0.9, entropy_coefficient: 0.1", [], 0.35),
    ],
)
def test_algorithms_learn_minimax_play_from_both_seats(algorithm, replay, close):
    # The right reply wins 0.75, so the first move is worth -0.25 - 0.9 * 0.75 whatever it is. A seat that learned from
    # its own turns alone, or added the other seat's value, would be far from that.
    learner = trained(
        f"environment.id={HERE}Duel",
        "league={matchmaking: latest, learn_from: both}",
        "environment.num_envs=16",
        f"algorithm={{{algorithm}, gamma: 0.9}}",
        *replay,
        learning_rate=3e-3,
        steps=800,
    )[0]
    assert all(agent.hyperparameters["gamma"] == 0.9 for agent in learner.to_agents())

    def reply(view):
        """The greedy moves [2], and values [2], in what agents see."""
        seen = {"observation": view.float().view(2, 1, 4), "action_mask": torch.ones(2, 1, 3, dtype=torch.bool)}
        started, state = torch.zeros(2, 1, dtype=torch.bool), learner.policy.initial_state(1)
        output, _ = learner.policy.act(seen, started, state, True)
        return output.action[:, 0], learner.policy.value(seen, None)[:, 0]

    first, value = reply(torch.tensor([[0, -1, -1, 0]] * 2))
    assert torch.allclose(value, torch.full((2,), -0.25 - 0.9 * 0.75), atol=close)
    second, value = reply(torch.stack([torch.ones(2), first, -torch.ones(2), torch.ones(2)], dim=1))
    assert torch.equal(second, (first + 1) % 3)
    assert torch.allclose(value, torch.full((2,), 0.75), atol=close)


def test_rewards_of_both_seats_are_scaled_by_the_return_of_the_one_that_moves():
    """Each move takes 1 from the other seat, so that returns are 1 - 0.9 + 0.81 and so on: between 0.1 and 1."""
    learner, environments = trained(
        f"environment.id={HERE}Takes",
        "league={matchmaking: latest, learn_from: both}",
        "algorithm={name: a2c, rollout_steps: 8, gamma: 0.9, normalize_rewards: true}",
        steps=0,
    )
    made = learner.policy.algorithm.experience(Placement(Ranks(), "replicated", 2), True, Stopwatch())
    play(learner, made, environments, 64)
    made.end(learner.policy.agents)
    assert all(agent.state.rewards.mean == pytest.approx(1 / 1.9, abs=0.05) for agent in learner.policy.agents)


def test_a_simultaneous_game_moves_both_at_once():
    made, _ = vector("RockPaperScissors", 2, lambda seen: 0)
    for paper in range(3):
        _, reward, terminated, _, info = made.step(np.array([paper, paper]))
        assert reward.tolist() == [[0, 1, -1][paper]] * 2, "from either seat"
        assert terminated.all()
        assert info["final_info"][RESULT].tolist() == [[0.5, 1, 0][paper]] * 2
    assert {len(asked.copies) for asked in made.opponents.asked} == {2}, "one call for all copies"


def test_episodes_that_end_before_the_learners_first_turn_are_nobodys():
    resigned = iter([2, 2, 0, 0, 0, 0, 0])
    made, (_, _) = vector("OpponentFirst", 1, lambda seen: next(resigned), seed=1)
    # Seats alternate over the episodes that never came to the learner, too.
    _, reward, terminated, _, info = made.step(np.array([2]))
    assert terminated.all()
    assert reward.tolist() == [-1], "its own resignation"
    assert info["final_info"][RESULT][0] == 0.0
    made.opponents.reply = lambda seen: 2
    _, reward, terminated, _, info = made.step(np.array([0]))
    assert terminated.all()
    assert reward.tolist() == [1], "the other's"


def test_no_simulator_is_imported_to_see_that_it_is_no_game(monkeypatch):
    """Importing gymnax starts JAX, which must be told before to leave room on the GPU."""
    monkeypatch.setattr("evorl.envs.games.import_from_here", pytest.fail)
    assert not any(map(is_game, ("gymnax:CartPole-v1", "brax:ant", "tensor:mine:make")))


def test_an_evaluation_counts_games_that_end_before_its_first_turn():
    """Leaving them out would misjudge an agent whose opponents resign, or win, at once."""
    with Environments(Environment(id=f"{HERE}OpponentFirst"), 1, 2, whole_games=True) as environments:
        environments.set_opponents(Scripted(lambda seen: 2))
        environments.reset(0)
        transitions = [environments.step(torch.tensor([[2, 2]])) for _ in range(3)]
    # It resigns in the first seat; in the second, the other one does before. Seats alternate.
    assert [each.reward[0].tolist() for each in transitions] == [[-1, 1], [1, -1], [-1, 1]]
    assert all(each.terminated.all() for each in transitions)


def test_a_turn_that_is_over_has_a_mask_and_ignores_its_action():
    with Environments(Environment(id=f"{HERE}Resigned"), 1, 1, whole_games=True) as environments:
        environments.set_opponents(Scripted(lambda seen: 2))
        environments.reset(1)
        assert environments.observation["action_mask"].tolist() == [[[True] * 3]]
        transition = environments.step(torch.tensor([[1]]))
    assert transition.reward.tolist() == [[1]]
    assert environments.observation["action_mask"].tolist() == [[[False, False, True]]]


def test_both_random_seats_of_a_game_are_seeded():
    def played():
        with Environments(Environment(id=f"{HERE}ThreeMoves"), 2, 3) as environments:
            environments.reset(5)
            steps = [environments.step(torch.ones(2, 3, dtype=torch.int64)).reward for _ in range(1)]
            rng = np.random.default_rng(1)
            for _ in range(20):
                mask = environments.observation["action_mask"].numpy()
                actions = torch.from_numpy((rng.random(mask.shape) * mask).argmax(-1))
                steps.append(environments.step(actions).next_observation["observation"])
            return torch.cat([each.reshape(-1) for each in steps])

    assert torch.equal(played(), played())


def test_transitions_of_environments_are_the_learners_and_end_with_its_last_view():
    with Environments(Environment(id=f"{HERE}ThreeMoves"), 1, 2) as environments:
        environments._vector.opponents = Scripted(lambda seen: 0 if seen[0] < 2 else 1)
        environments.reset(0)
        assert environments.interface.masked
        assert environments.interface.parts["observation"].shape == (4,)
        transition = environments.step(torch.tensor([[1, 2]]))
    assert transition.next_observation["observation"][0].tolist() == [[2, 1, 0, 0], [3, 0, 2, 1]]
    assert transition.terminated[0].tolist() == [False, True]
    assert transition.next_observation["action_mask"][0, 1].all()


@pytest.mark.parametrize(
    "settings",
    [
        ("algorithm={name: dqn, batch_size: 8, learn_step: 2}", "replay.learning_starts=16"),
        ("algorithm={name: ppo, rollout_steps: 8, sequence_length: 8, batch_size: 8}", "network.recurrent=lstm"),
    ],
)
def test_algorithms_learn_from_games(settings):
    learner = trained(f"environment.id={HERE}ThreeMoves", *settings, steps=40)[0]
    assert all(agent.state.updates for agent in learner.to_agents())


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("Three", {}, "id: helpers.games:Three has 3 seats; evorl plays games of two"),
        ("Unlike", {}, "id: the seats of helpers.games:Unlike have different spaces"),
        (
            "Wrong",
            {},
            "id: the reset of helpers.games:Wrong returns the observation of shape [5]; its observation_space",
        ),
        (
            "OldLast",
            {},
            "id: last of helpers.games:OldLast returns 4 values; PettingZoo's interface wants (observation,",
        ),
        (
            "Bare",
            {},
            "id: reset of helpers.games:Bare returns a dict; PettingZoo's interface wants (observations, info",
        ),
        ("Unfinished", {}, "id: helpers.games:Unfinished has no step, which PettingZoo's interface asks for"),
        ("ThreeMoves", {"vectorization": "async"}, "vectorization: "),
        ("ThreeMoves", {"carry_over": True}, "carry_over: "),
        ("ThreeMoves", {"life_loss_ends": True}, "life_loss_ends: "),
        ("ThreeMoves", {"kwargs": {"colour": 1}}, "kwargs: "),
    ],
)
def test_what_cannot_be_played_is_refused_in_one_line(name, settings, told):
    with pytest.raises(UserError) as raised:
        Environments(Environment(id=f"{HERE}{name}", **settings), 1, 1)
    assert str(raised.value).startswith(f"environment.{told}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("plays_both", [False, True])
def test_the_last_observation_is_not_that_of_the_next_episode(plays_both):
    made, _ = vector("Buffered", 1, lambda seen: 2)
    if plays_both:
        made.play_both_seats()
        made.reset(seed=0)
        made.step([1])
    _, _, terminated, _, info = made.step([2 if plays_both else 1])
    assert terminated.all()
    assert info["final_obs"][0][:3].tolist() == [2, 1, 2]


def moves_on(seen):
    """An opponent of `ThreeMoves` that begins with 0, replies by the same move, and ends with 1."""
    return (0, int(seen[1]), 1)[int(seen[0])]


def test_a_game_that_raises_ends_the_run():
    with Environments(Environment(id=f"{HERE}Lame"), 1, 3) as environments:
        environments._vector.opponents = Scripted(moves_on)
        environments.reset(0)
        # In the middle copy the other seat makes the third move.
        with pytest.raises(UserError, match=r"^environment.id: a step of .*Lame raised RuntimeError: a leg is broken"):
            environments.step(torch.tensor([[0, 2, 0]]))


@pytest.mark.parametrize(
    ("name", "part", "mask"),
    [("connect_four_v3", (6, 7, 2), 7), ("rps_v2", (), 0)],
)
def test_pettingzoos_games_are_played(name, part, mask):
    pytest.importorskip("pettingzoo")
    with Environments(Environment(id=f"pettingzoo:{name}"), 1, 2) as environments:
        assert environments.interface.parts["observation"].shape == part
        assert environments.interface.mask_size == mask
        environments.try_step()


@pytest.mark.parametrize(("low", "high", "kind"), [(-2, 2, np.int64), (0, 1, bool), (250, 255, np.uint8)])
def test_random_players_draw_whole_numbers_uniformly(low, high, kind):
    space = gym.spaces.Box(low, high, (2,), kind)
    players = RandomPlayers(space)
    drawn = players(MoveRequest(None, None, np.arange(4000), None))
    assert drawn.dtype == space.dtype
    assert np.unique(drawn, return_counts=True)[1] == pytest.approx(8000 / (high - low + 1), rel=0.1)


@pytest.mark.parametrize("space", [gym.spaces.Discrete(4), gym.spaces.Dict(hand=gym.spaces.Discrete(4))])
def test_a_users_player_sees_single_observations_of_categories(space):
    batch = np.array([0, 3]) if isinstance(space, gym.spaces.Discrete) else {"hand": np.array([0, 3])}
    players = FunctionPlayers("helpers.games:by_category", space, gym.spaces.Discrete(4))
    assert players(MoveRequest(batch, None, np.arange(2), np.ones(2, bool))).tolist() == [0, 3]


def test_an_episode_against_random_moves_depends_on_its_seed_and_not_on_other_copies():
    """All agents of a generation play the same episodes, however many there are."""

    def rewards(seeds):
        copies = 1 if isinstance(seeds, int) else len(seeds)
        made = make_vector(Environment(id=f"{HERE}RockPaperScissors"), copies)
        made.reset(seed=seeds)
        gained = [made.step(np.zeros(copies, dtype=np.int64))[1] for _ in range(20)]
        made.close()
        return np.stack(gained, axis=1).tolist()

    assert rewards(3) == rewards([3])
    first, second = rewards([3, 8])
    assert rewards([8, 3, 8, 3, 3]) == [second, first, second, first, first]
    assert first != second


def test_copies_beyond_the_seeds_move_each_on_its_own():
    players, asked = RandomPlayers(gym.spaces.Discrete(1000)), MoveRequest(None, None, np.arange(5), None)
    players.begin([3])
    moves = players(asked)
    assert len(set(moves.tolist())) == 5
    players.begin([3])
    assert (players(asked) == moves).all()
