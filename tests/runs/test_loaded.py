"""An agent that was loaded acts as it does in the run's own evaluation, and needs no environment."""

import json
import shutil

import gymnasium as gym
import numpy as np
import pytest
from helpers.loaded import A2C, SPACES, STEPS, fresh_run, spaces_run
from helpers.support import SMALL, needs_its_extra

import evorl
from evorl.commands.evaluate import evaluate_elite, seeds_of
from evorl.config.yaml import configuration_file
from evorl.envs.json_spaces import space_from_json, space_to_json
from evorl.envs.spaces import choices
from evorl.envs.vector import for_evaluation, make_vector
from evorl.types.outcomes import UserError


def returns_of(agent, config, seeds, steps=STEPS):
    """The returns of episodes that a user's own loop plays, up to so many steps of each."""
    returns = []
    native = config.environment.id.startswith("ALE/")
    make = make_vector(for_evaluation(config.environment), 1) if native else None
    for seed in seeds:
        # Another one for each episode, because BipedalWalker's physics keep something of the last one.
        env = make or gym.make(config.environment.id.rpartition(":")[2], **config.environment.kwargs)
        observation, info = env.reset(seed=np.array([seed]) if native else seed)
        total, state = 0.0, None
        for _ in range(steps):
            action, state = agent.predict(observation, state, action_mask=info.get("action_mask"))
            observation, reward, terminated, truncated, info = env.step(action)
            total += float(np.sum(reward))
            if np.any(terminated) or np.any(truncated):
                break
        returns.append(total)
        if make is None:
            env.close()
    if make is not None:
        make.close()
    return returns


@pytest.mark.parametrize("name", ["dqn", "dqn_atari", "ppo_recurrent", "td3_mujoco"])
def test_predict_gives_the_returns_of_evaluate(name, tmp_path):
    needs_its_extra(name)
    small = ["network.hidden_sizes=[16]"] if "atari" in name else []
    # Contacts amplify rounding errors: 1e-7 in the first action are 0.6 in the return of HalfCheetah's 40th step.
    steps = 10 if "mujoco" in name else STEPS
    config = fresh_run(tmp_path / "a", configuration_file(name), f"evaluation.max_steps={steps}", *small)
    episodes = 1 if config.environment.id.startswith("ALE/") else 3
    evaluated = evaluate_elite(tmp_path / "a", episodes, 0)
    returns = returns_of(evorl.load(tmp_path / "a"), config, seeds_of(0, episodes), steps)
    assert returns == pytest.approx(evaluated["returns"], abs=1e-3)


@pytest.mark.parametrize("kind", SPACES)
def test_every_kind_of_space_is_read_and_acted_in(kind, tmp_path):
    config = spaces_run(tmp_path / "a", kind)
    evaluated = evaluate_elite(tmp_path / "a", 6, 0, allow_code=True)
    agent = evorl.load(tmp_path / "a")
    returns = returns_of(agent, config, seeds_of(0, 6))
    assert returns == pytest.approx(evaluated["returns"], abs=1e-5)
    mask = {"action_mask": np.ones(sum(choices(agent.action_space)))} if "mask" in kind else {}
    assert agent.action_space.contains(agent.predict(agent.observation_space.sample(), **mask)[0])


def test_predict_of_a_batch_equals_single_predictions(tmp_path):
    fresh_run(tmp_path / "a", SMALL, "replay={}", A2C, "network.recurrent=gru")
    agent = evorl.load(tmp_path / "a")
    agent.observation_space.seed(0)
    steps = [np.stack([agent.observation_space.sample() for _ in range(5)]) for _ in range(3)]
    state, states = None, [None] * 5
    for number, batch in enumerate(steps):
        start = np.arange(5) == 2 if number == 2 else None
        actions, state = agent.predict(batch, state, episode_start=start)
        for place in range(5):
            before = None if number == 2 and place == 2 else states[place]
            action, states[place] = agent.predict(batch[place], before)
            assert action == actions[place]
            np.testing.assert_allclose(states[place][0], state[place], rtol=1e-5, atol=1e-6)
    assert np.ptp(state) > 0


def test_exploration_is_drawn_by_the_seed(trained_run):
    observation = np.zeros(4, np.float32)
    drawn = [
        [int(agent.predict(observation, deterministic=False)[0]) for _ in range(30)]
        for agent in (evorl.load(trained_run, seed=seed) for seed in (0, 0, 1))
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len({int(evorl.load(trained_run).predict(observation)[0]) for _ in range(5)}) == 1


def test_agents_of_checkpoints_are_loaded_by_number_and_generation(trained_run):
    rows = [json.loads(line) for line in (trained_run / "metrics.jsonl").read_text().splitlines()]
    agent = evorl.load(trained_run, generation=3)
    assert agent.agent.id == evorl.load(trained_run).agent.id
    best = max(rows[-1]["fitness"])
    survivor = rows[-1]["agents"][rows[-1]["fitness"].index(best)]
    assert evorl.load(trained_run, agent=survivor).agent.id == survivor
    with pytest.raises(UserError, match=r"no checkpoint of generation 99; its checkpoints are of generations .*3"):
        evorl.load(trained_run, generation=99)
    with pytest.raises(UserError, match=r"no checkpoint holds agent 999; they hold agents \d"):
        evorl.load(trained_run, agent=999)
    with pytest.raises(UserError, match="agent: '3' is not a whole number"):
        evorl.load(trained_run, agent="3")


def test_load_makes_no_environment(trained_run, monkeypatch):
    monkeypatch.setattr("gymnasium.make", None)
    assert evorl.load(trained_run).predict(np.zeros(4, np.float32))[0] in (0, 1)


PARTS = {"a": np.zeros((12, 12), np.uint8), "b": np.zeros(1, np.float32)}


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("shown dict", {"observation": {"a": PARTS["a"]}}, "observation: is not of .*: it has no part 'b'$"),
        ("shown dict", {"observation": PARTS | {"b": [np.nan]}}, "observation: number 0 of the batch has nan in part"),
        ("shown category", {"observation": [3, 9]}, r"observation: number 1 of the batch has \[6\] in part"),
        ("masks", {"observation": (np.zeros(1), {})}, "observation: is the tuple that .* returns; give its first part"),
        ("masks", {"observation": [0.0], "action_mask": [1, 0]}, r"action_mask: has the shape \[2\]; .* \[1, 4\]"),
        ("memory", {"observation": np.zeros((2, 2)), "state": [[[0.0] * 3]]}, r"state: has the shape \[1, 1, 3\]"),
    ],
)
def test_predict_names_the_part_that_does_not_fit(kind, given, message, tmp_path):
    spaces_run(tmp_path / "a", kind)
    with pytest.raises(UserError, match=f"^{message}") as error:
        evorl.load(tmp_path / "a", allow_code=True).predict(**given)
    assert "\n" not in str(error.value)
    assert "environment" not in str(error.value)


@pytest.mark.parametrize(
    "payload",
    [
        "{}",
        '{"observation": {"kind": "Box", "shape": [1000000, 1000000], "dtype": "float32", "low": [0], "high": [1]}}',
    ],
    ids=["empty", "huge"],
)
def test_a_damaged_description_of_the_environment_is_one_line(payload, trained_run, tmp_path):
    run = shutil.copytree(trained_run, tmp_path / "a")
    (run / "environment.json").write_text(payload)
    with pytest.raises(UserError, match=r"environment.json: is no"):
        evorl.load(run)


def test_predict_checks_action_masks(trained_run, tmp_path):
    with pytest.raises(UserError, match=r"^action_mask: this agent was trained without masks"):
        evorl.load(trained_run).predict(np.zeros(4, np.float32), action_mask=[0, 1])
    spaces_run(tmp_path / "a", "masks")
    agent = evorl.load(tmp_path / "a")
    observation = agent.observation_space.sample()
    sizes = choices(agent.action_space)
    parts = tuple(np.eye(size, dtype=np.int8)[-1] for size in sizes)
    chosen = agent.predict(observation, action_mask=parts)[0]
    assert np.array_equal(chosen, agent.predict(observation, action_mask=np.concatenate(parts))[0])
    assert np.array_equal(np.ravel(chosen) - np.ravel(agent.action_space.start), np.array(sizes) - 1)
    with pytest.raises(
        UserError, match=r"^action_mask: .* call predict\(observation, action_mask=info\['action_mask'\]\)"
    ):
        agent.predict(observation)
    with pytest.raises(UserError, match=r"^action_mask: forbids every action"):
        agent.predict(observation, action_mask=np.zeros(sum(sizes)))


def test_spaces_are_read_back_as_they_were():
    box = gym.spaces.Box(np.array([-1.0, -np.inf]), np.array([2.0, np.inf]), dtype=np.float64)
    space = gym.spaces.Dict(
        a=gym.spaces.Tuple((box, gym.spaces.Discrete(3, start=-1))),
        b=gym.spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])),
        c=gym.spaces.MultiBinary((2, 3)),
        d=gym.spaces.Box(0, 255, (4, 6, 6), np.uint8),
        e=gym.spaces.MultiBinary(5),
        f=gym.spaces.MultiDiscrete([2, 3], dtype=np.int8),
        g=gym.spaces.Discrete(3, dtype=np.int32),
    )
    data = json.loads(json.dumps(space_to_json(space), allow_nan=False))
    assert space_from_json(data) == space


def test_names_that_evorl_has_are_listed_and_others_are_refused():
    assert "load" in dir(evorl)
    with pytest.raises(AttributeError, match="no attribute 'loud'"):
        evorl.loud  # noqa: B018
