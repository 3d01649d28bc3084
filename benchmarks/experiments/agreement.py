"""Check that four ways of running a trained agent agree on the same seeds; append one JSON line per run.

    python benchmarks/experiments/agreement.py [RUN ...] [--runs DIR] [--episodes 10] [--data benchmarks/data/agreement.jsonl.gz]

Without RUN arguments, every shipped configuration is first trained briefly in `--runs`. The four ways are `evorl
evaluate`; `evorl.load(run).predict` in `gym.make`; the file of `evorl export` in onnxruntime; and Stable-Baselines3's
`evaluate_policy`, if installed. The exported agent's actions are also compared in every step of the `predict` episodes.
Atari games are created by `gym.make_vec`, as in training.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import onnxruntime
from numpy.typing import NDArray

from evorl import LoadedAgent, load
from evorl.commands.evaluate import evaluate_elite, seeds_of
from evorl.config.yaml import configuration_file, shipped_names
from evorl.envs.vector import for_evaluation, make_vector
from evorl.export.network import STATE
from evorl.export.onnx_file import in_float32, write_onnx

sys.path.append(str(Path(__file__).parents[1]))
from records import EVORL, append, revision

DATA = Path(__file__).parents[1] / "data" / "agreement.jsonl.gz"
SHORT = ("evaluation.episodes=2", "evaluation.confirmation_episodes=2", "tracking.backends=[]")
GAME = ("population.size=2", "environment.num_envs=2", "evaluation.max_steps=150")
State = Any
Acts = Callable[[Any, State], tuple[Any, State]]


class OneOfMany(gym.Env[Any, Any]):
    """A vector environment with one copy, wrapped as a single environment."""

    def __init__(self, vector: gym.vector.VectorEnv[Any, Any, Any]) -> None:
        self.vector = vector
        self.observation_space = vector.single_observation_space
        self.action_space = vector.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        seeds: Any = None if seed is None else np.array([seed])
        observation, _ = self.vector.reset(seed=seeds)
        return observation[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, _ = self.vector.step(np.array([action]))
        return observation[0], float(reward[0]), bool(terminated[0]), bool(truncated[0]), {}

    def close(self) -> None:
        self.vector.close()


def environment_of(agent: LoadedAgent) -> gym.Env[Any, Any]:
    """Create one environment with the agent's evaluation settings."""
    settings = for_evaluation(agent.config.environment)
    if settings.id.startswith("ALE/"):
        env: gym.Env[Any, Any] = OneOfMany(make_vector(settings, 1))
    else:
        env = gym.make(settings.id, **settings.kwargs)
    most = agent.config.evaluation.max_steps
    return env if most is None else gym.wrappers.TimeLimit(env, most)


def played(env: gym.Env[Any, Any], seeds: list[int], act: Acts) -> list[float]:
    """Play one episode per seed and return the episodic returns."""
    returns = []
    for seed in seeds:
        (observation, _), state, total, ended = env.reset(seed=seed), None, 0.0, False
        while not ended:
            action, state = act(observation, state)
            observation, reward, terminated, truncated, _ = env.step(action)
            total, ended = total + float(reward), terminated or truncated
        returns.append(total)
    return returns


class Exported:
    """An exported agent, run by onnxruntime alone."""

    def __init__(self, path: Path) -> None:
        self._session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self._shapes = {each.name: each.shape for each in self._session.get_inputs()}

    def act(self, observation: Any, state: State) -> tuple[Any, State]:
        """Return the action and the next state."""
        given = {name: np.asarray(observation)[None] for name in self._shapes if name != STATE}
        if STATE in self._shapes:
            given[STATE] = np.zeros((1, *self._shapes[STATE][1:]), np.float32) if state is None else state
        action, *after = self._session.run(None, given)
        return action[0], after[0] if after else None


def largest_difference(agent: LoadedAgent, exported: Exported, env: gym.Env[Any, Any], seeds: list[int]) -> float:
    """Return the largest action difference in the episodes of `predict`; 1 or more if a discrete action differs."""
    largest = 0.0

    def both(observation: Any, states: State) -> tuple[Any, State]:
        nonlocal largest
        own, its = states or (None, None)
        action, own = agent.predict(observation, own)
        other, its = exported.act(observation, its)
        largest = max(largest, float(np.abs(np.asarray(action, np.float64) - other).max()))
        return action, (own, its)

    played(env, seeds, both)
    return largest


def by_stable_baselines(agent: LoadedAgent, env: gym.Env[Any, Any], seeds: list[int]) -> list[float] | None:
    """Return the return that `evaluate_policy` reports for one episode per seed; None if it is not installed."""
    if importlib.util.find_spec("stable_baselines3") is None:
        return None
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv

    vector = DummyVecEnv([lambda: Monitor(env)])
    returns = []
    for seed in seeds:
        vector.seed(seed)
        returns.append(float(evaluate_policy(agent, vector, n_eval_episodes=1)[0]))
    return returns


def compare(run: Path, episodes: int, seed: int) -> dict[str, Any]:
    """Run a run's best agent in the four ways; return the largest differences of returns of the same seed."""
    code, evaluated = revision(), evaluate_elite(run, episodes, seed)
    agent, seeds = load(run), seeds_of(seed, episodes)
    file = run / "agent.onnx"
    write_onnx(in_float32(agent), file, {})
    exported, env = Exported(file), environment_of(agent)
    predicted = played(env, seeds, agent.predict)
    ways = {
        "predict": predicted,
        "onnx": played(env, seeds, exported.act),
        "evaluate_policy": by_stable_baselines(agent, env, seeds),
    }
    difference = largest_difference(agent, exported, env, seeds)
    env.close()
    return {
        "run": run.name,
        "environment": agent.config.environment.id,
        "revision": code,
        "episodes": episodes,
        "mean": evaluated["mean"],
        "std": evaluated["std"],
        "differences": {name: _furthest(values, evaluated["returns"]) for name, values in ways.items()},
        "onnx_actions": difference,
    }


def _furthest(returns: list[float] | None, others: list[float]) -> float | None:
    if returns is None:
        return None
    first, second = (np.asarray(values, np.float64) for values in (returns, others))
    furthest: NDArray[np.float64] = np.abs(first - second).max()
    return float(furthest)


def train(name: str, runs: Path) -> Path:
    """Train a shipped configuration briefly unless its run exists, and return its directory."""
    run = runs / name
    if (run / "elite").is_dir():
        return run
    text = configuration_file(name).read_text()
    steps = 200 if "ALE/" in text else 2000
    settings = [*SHORT, f"evolution.steps={steps}", f"training.max_steps={2 * steps}", f"run.directory={runs}"]
    settings += list(GAME) if "ALE/" in text else []
    settings += ["replay.learning_starts=200", "replay.capacity=20000"] if "\nreplay:" in text else []
    command = [sys.executable, "-c", EVORL, "train", name, "--name", name, *settings]
    with (runs / f"{name}.log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=log, check=True)
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chosen", type=Path, nargs="*", metavar="RUN", help="directories of runs")
    parser.add_argument("--runs", type=Path, default=Path("runs/agreement"))
    parser.add_argument("--episodes", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=DATA)
    parsed = parser.parse_args()
    parsed.runs.mkdir(parents=True, exist_ok=True)
    chosen: Mapping[str, Path | None] = {str(run): run for run in parsed.chosen} or dict.fromkeys(shipped_names())
    for name, run in chosen.items():
        line = compare(run or train(name, parsed.runs), parsed.episodes, parsed.seed)
        append(parsed.data, line)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
