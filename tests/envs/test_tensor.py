"""A population in one simulator. The reference is a CartPole in torch, compared with Gymnasium's step by step."""

import math
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import torch_cartpole
from helpers.support import agent, config, launch, lines, train, train_below
from helpers.torch_cartpole import CartPole
from torch.utils._python_dispatch import TorchDispatchMode

from evorl.algorithms import make_algorithm
from evorl.commands.evaluate import evaluate_elite
from evorl.distributed import Placement, Ranks
from evorl.envs import make_environments
from evorl.envs.tensor import environments as environments_module
from evorl.envs.tensor.observations import TensorReader
from evorl.population import Policy
from evorl.population.evaluation import evaluate
from evorl.replay import storage as storage_module
from evorl.runs.output.video import play
from evorl.runs.reading.loaded import load
from evorl.system.stopwatch import Stopwatch
from evorl.types.outcomes import EvorlWarning, UserError

CARTPOLE = "tensor:helpers.torch_cartpole:make"
PPO = "algorithm={name: ppo, rollout_steps: 10, batch_size: 20}"


def environments(agents=2, num_envs=3, *overrides, **kwargs):
    words = [f"environment.kwargs.{name}={value}" for name, value in kwargs.items()]
    settings = config(f"environment.id={CARTPOLE}", *words, *overrides).environment
    return make_environments(settings, agents, num_envs)


def actions(tensors, rng):
    return torch.from_numpy(rng.integers(2, size=(tensors.agents, tensors.num_envs)))


def test_the_reference_is_gymnasiums_cartpole():
    rng, pole = np.random.default_rng(0), CartPole(4, limit=40)
    truth = [gym.make("CartPole-v1", max_episode_steps=40) for _ in range(4)]
    pole.reset(seed=1)
    for copy, env in enumerate(truth):
        env.reset(seed=copy)
        env.unwrapped.state = pole.state[copy].numpy()
    ends = 0
    for _ in range(300):
        chosen = rng.integers(2, size=4)
        observation, reward, terminated, truncated, info = pole.step(torch.from_numpy(chosen))
        for copy, env in enumerate(truth):
            seen, gained, over, cut, _ = env.step(int(chosen[copy]))
            np.testing.assert_allclose(info["final_obs"][copy], seen, rtol=0, atol=1e-6)
            assert (reward[copy], terminated[copy], truncated[copy]) == (gained, over, cut)
            if over or cut:
                ends += 1
                env.reset()
                env.unwrapped.state = pole.state[copy].numpy()
            else:
                assert torch.equal(observation[copy], info["final_obs"][copy])
    assert ends > 20


@pytest.mark.parametrize("final", ["final_obs", "final_observation"])
def test_transitions_have_the_true_last_observation(final):
    rng, tensors, pole = np.random.default_rng(0), environments(final=final, limit=30), CartPole(6, limit=30)
    tensors.reset(3)
    pole.reset(seed=3)
    ended = 0
    for _ in range(200):
        before, action = tensors.observation["observation"], actions(tensors, rng)
        transition = tensors.step(action)
        observation, _, terminated, truncated, info = pole.step(action.flatten())
        assert torch.equal(transition.observation["observation"], before)
        assert torch.equal(transition.next_observation["observation"].flatten(0, 1), info["final_obs"])
        assert torch.equal(tensors.observation["observation"].flatten(0, 1), observation)
        assert torch.equal(transition.terminated.flatten(), terminated)
        assert torch.equal(transition.truncated.flatten(), truncated & ~terminated)
        assert torch.equal(tensors.started.flatten(), terminated | truncated)
        ended += int(tensors.started.sum())
    assert ended > 20
    assert transition.all_valid
    assert transition.valid.all()


def test_a_step_that_only_resets_is_no_transition():
    rng, tensors = np.random.default_rng(0), environments(mode="NextStep")
    tensors.reset(3)
    assert not tensors.always_valid
    for _ in range(100):
        transition = tensors.step(actions(tensors, rng))
        over = transition.terminated | transition.truncated
        then = tensors.step(actions(tensors, rng))
        assert torch.equal(then.valid, ~over)
        assert torch.equal(tensors.started, over)
        if over.any():
            break
    assert over.any()


@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_steps_that_only_reset_are_not_in_the_length_of_an_episode(mode):
    rng, tensors = np.random.default_rng(0), environments(mode=mode)
    tensors.begin(3, [agent(id=0), agent(id=1)], carry_over=False)
    for _ in range(700):
        tensors.step(actions(tensors, rng)).reward.zero_()  # What a training loop does to rewards is its own affair.
    recent = tensors.recent()
    assert recent.episodic_length == recent.episodic_return
    collected = tensors.pop_collected()
    assert collected.episodes.min() > 20
    assert collected.lengths.tolist() == collected.returns.tolist(), "each step gives a reward of 1"


@pytest.mark.filterwarnings("ignore::evorl.types.outcomes.EvorlWarning")
def test_without_last_observations_truncated_steps_bootstrap_from_the_one_before():
    rng, tensors = np.random.default_rng(0), environments(final="", limit=12)
    tensors.reset(3)
    cut = 0
    for _ in range(60):
        before = tensors.observation["observation"]
        transition = tensors.step(actions(tensors, rng))
        after = transition.next_observation["observation"]
        assert torch.equal(after[transition.truncated], before[transition.truncated])
        going = ~transition.truncated
        assert torch.equal(after[going], tensors.observation["observation"][going])
        cut += int(transition.truncated.sum())
    assert cut
    with pytest.warns(EvorlWarning, match="gives no final observations"):
        tensors.pop_collected()


def test_several_users_step_one_simulator_in_turn():
    """Evaluation uses fewer copies of the simulator in which agents train, and ends the episodes of training."""
    training, evaluation = environments(2, 4), environments(1, 3)
    training.reset(1)
    training.step(torch.zeros(2, 4, dtype=torch.int64))
    evaluation.reset([5, 6, 7])
    assert evaluation.step(torch.zeros(1, 3, dtype=torch.int64)).reward.shape == (1, 3)
    with pytest.raises(RuntimeError, match="reset first"):
        training.step(torch.zeros(2, 4, dtype=torch.int64))
    training.begin(1, [agent(id=0), agent(id=1)], carry_over=False)
    training.step(torch.zeros(2, 4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("kwargs.mode=null", "does not say when it resets; declare it"),
        ("kwargs.mode=Disabled", "declares autoreset mode"),
        ("kwargs.gravity=3", "environment.kwargs: .* unexpected keyword argument 'gravity'"),
        ("kwargs.masks=true", r"gives info\['action_mask'\], but masks of a simulator are not read"),
        ("kwargs.whole=true", "in torch.float32, which does not fit its observation_space of int64"),
        ("vectorization=sync", "environment.vectorization: .* is a simulator"),
        ("carry_over=true", "environment.carry_over: the state of .* cannot be saved"),
        ("id=tensor:helpers.nowhere:make", "cannot import 'helpers.nowhere:make'"),
    ],
)
def test_refusals(setting, words):
    with pytest.raises(UserError, match=words):
        environments(2, 3, f"environment.{setting}").reset(0)


def test_an_error_of_the_simulator_is_one_line_with_its_place():
    tensors = environments(fails=True)
    tensors.reset(0)
    with pytest.raises(UserError, match=r"a step of .* raised AttributeError: .*torch_cartpole.py:\d+ in step"):
        tensors.step(torch.zeros(2, 3, dtype=torch.int64))


def test_numbers_that_are_not_finite_end_the_generation():
    rng, tensors = np.random.default_rng(0), environments(poison=3)
    tensors.reset(0)
    for _ in range(5):
        tensors.step(actions(tensors, rng))
    with pytest.raises(UserError, match="gave nan as a reward"):
        tensors.pop_collected()


def test_a_generation_with_numbers_that_are_not_finite_is_not_saved_within(monkeypatch):
    """A resumed run would train on, since it does not know that one has been seen."""
    tensors = environments(poison=3)
    tensors.reset(0)
    monkeypatch.setattr(tensors._shared.simulator, "can_save", True)
    monkeypatch.setattr(tensors._shared.simulator, "state_dict", dict, raising=False)
    tensors.step(torch.zeros(2, 3, dtype=torch.int64))
    assert tensors.state_dict()
    for _ in range(2):
        tensors.step(torch.zeros(2, 3, dtype=torch.int64))
    for use in (tensors.state_dict, tensors.pop_collected):
        with pytest.raises(UserError, match="gave nan as a reward"):
            use()


@pytest.mark.parametrize(
    ("space", "good", "bad", "words"),
    [
        (gym.spaces.Box(0, 255, (2, 2, 3), np.uint8), 255, 256, "0 to 255"),
        (gym.spaces.Box(0, 255, (2, 2, 3), np.uint8), 0, -1, "0 to 255"),
        (gym.spaces.Discrete(3, start=1), 3, 4, r"0 to \[2\]"),
        (gym.spaces.Discrete(3, start=1), 1, 0, r"0 to \[2\]"),
        (gym.spaces.MultiDiscrete([[2, 3], [4, 5]]), 1, 2, r"0 to \[1, 2, 3, 4\]"),
    ],
)
def test_whole_numbers_outside_of_their_space_end_the_generation(space, good, bad, words):
    reader = TensorReader(config().environment, space)
    (part,) = reader.read(torch.full((4, *space.shape), good)).values()
    assert (part.long() == good - getattr(space, "start", np.zeros(()))).all()
    reader.check()
    reader.read(torch.full((4, *space.shape), bad))
    reader.read(torch.full((4, *space.shape), good))
    with pytest.raises(UserError, match=f"in part '.*' of the observation that are not in its .* has {words}"):
        reader.check()


def test_numbers_that_are_not_finite_end_an_evaluation():
    tensors = environments(poison=3)
    output = SimpleNamespace(action=torch.zeros(2, 3, dtype=torch.int64))
    policy = SimpleNamespace(initial_state=lambda envs: None, act=lambda *arguments, **options: (output, None))
    with pytest.raises(UserError, match="gave nan as a reward"):
        evaluate(policy, tensors, [1, 2, 3], 5)


def test_what_an_episode_reports_is_finite_and_of_its_own_last_step(monkeypatch):
    """`final_info` has zeros where no episode ended."""
    tensors = environments(1, 3)
    tensors.reset(0)
    env, value = tensors._shared.simulator.env, 7.0
    original, first = env.step, torch.arange(env.num_envs) == 0

    def step(action):
        observation, reward, _, truncated, info = original(action)
        numbers = {"share": torch.full((env.num_envs,), value), "final_info": {"share": 5.0 * first}}
        return observation, reward, first, truncated, {**info, "final_obs": observation, **numbers}

    monkeypatch.setattr(env, "step", step)
    action, everyone = torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 3, dtype=torch.bool)
    tensors.step(action)
    assert tensors.reports(["share"], everyone).tolist() == [[[5, 7, 7]]]
    tensors.check()
    value = math.nan
    tensors.step(action)
    tensors.reports(["share"], torch.tensor([[True, False, False]]))
    tensors.check()
    tensors.reports(["share"], everyone)
    with pytest.raises(UserError, match="gave nan as info 'share'"):
        tensors.check()


class NothingIsRead(TorchDispatchMode):
    """Raises where the host would wait for a device: for a tensor's number, or for how many entries are true."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        assert not any(name in str(function) for name in ("_local_scalar_dense", "nonzero", "masked_select")), function
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_the_host_reads_nothing_while_a_gpu_steps(monkeypatch, name):
    """As on a GPU, whose flags stay there: `Device.type` is another than `cpu` for all that decides whether to read."""
    monkeypatch.setattr(storage_module, "is_host", lambda device: False)
    monkeypatch.setattr(environments_module, "is_host", lambda device: False)
    words = {"ppo": ["algorithm={name: ppo, rollout_steps: 64, batch_size: 32}", "replay={}"], "dqn": []}[name]
    settings = config(f"environment.id={CARTPOLE}", "environment.kwargs.limit=20", *words)
    tensors = make_environments(settings.environment, 2, 2)
    chosen = make_algorithm(settings, tensors.interface)
    policy = Policy([agent(id=id, dqn=chosen) for id in range(2)], chosen, torch.Generator())
    experience = chosen.experience(Placement(Ranks(), "replicated", 2), tensors.always_valid, Stopwatch())
    experience.begin(policy, 1)
    tensors.begin(1, policy.agents, carry_over=False)
    outputs, transitions = [], []
    with NothingIsRead():
        for _ in range(64):
            outputs.append(policy.explore(tensors.observation, tensors.started))
            transitions.append(tensors.step(outputs[-1].action))
            experience.add(transitions[-1], outputs[-1])
        batches = list(experience.take_batches()) if name == "ppo" else []
    assert sum(int(each.terminated.sum() + each.truncated.sum()) for each in transitions) > 4
    assert bool(batches) == (name == "ppo")
    if name == "dqn":
        storage = experience.storage
        index = torch.arange(64 * 4)
        truth = torch.cat([each.next_observation["observation"].flatten(0, 1) for each in transitions])
        assert torch.equal(storage.gather(index).next_observation["observation"], truth)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The whole loop, by the demo."""
    return train_below(tmp_path_factory.mktemp("trained"), f"environment.id={CARTPOLE}", PPO, "replay={}")


def test_a_population_trains_and_is_evaluated_in_one_simulator(run):
    rows = lines(run / "metrics.jsonl")
    assert [row["agent_steps"] for row in rows] == [40, 80, 120]
    assert all(row["evaluation_steps"] > 0 and None not in row["fitness"] for row in rows)
    once, again = (evaluate_elite(run, 7, seed=1, allow_code=True)["returns"] for _ in range(2))
    assert once == again


def test_the_simulator_of_evaluation_has_the_copies_that_all_agents_need_at_once(in_directory, monkeypatch):
    made, make = [], torch_cartpole.make

    def counted(num_envs, device, seed, **kwargs):
        if "limit" in kwargs:  # That of training may be open, from an earlier run in this process.
            made.append(num_envs)
        return make(num_envs, device, seed, **kwargs)

    monkeypatch.setattr(torch_cartpole, "make", counted)
    words = [f"environment.id={CARTPOLE}", PPO, "replay={}", "evaluation.environment.kwargs.limit=9"]
    assert train(*words, "training.max_steps=80") == 0
    assert made == [config().population.size * config().evaluation.episodes]


def test_the_best_agent_is_shown_where_the_simulator_draws(run):
    best = load(run, allow_code=True)
    seen = list(play(best, best.config.environment, [1, 2], 20, "rgb_array"))
    returns = [total for _, total, _ in seen if total is not None]
    assert len(returns) == 2
    assert len(seen) == sum(returns) + 2
    assert all(rate == 50 for _, _, rate in seen)
    assert all((image is None) == (total is not None) for image, total, _ in seen)
    assert seen[0][0].shape == (8, 16, 3)
    with pytest.raises(UserError, match="has no window"):
        next(play(best, best.config.environment, [1], 20, "human"))


@pytest.mark.two_process
@pytest.mark.parametrize("placement", ["replicated", "sharded"])
def test_each_rank_has_a_simulator_of_its_own(tmp_path, placement):
    words = [f"environment.id={CARTPOLE}", PPO, f"population.placement={placement}", "run.name=a"]
    launched = launch(tmp_path, *words)
    assert launched.returncode == 0, launched.stderr
    assert "its state cannot be saved" in launched.stderr
    rows = lines(tmp_path / "runs" / "a" / "metrics.jsonl")
    assert len(rows) == 3
    assert None not in rows[-1]["fitness"]
