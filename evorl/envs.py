"""Vector environments whose transitions are true: what resets do is decided here and nowhere else.

Axes: P agents, E environments of each agent. Environment e of agent p is copy p * E + e.
"""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from evorl.config import Environment
from evorl.plugins import import_from_here
from evorl.types import Transition, UserError


class Environments:
    """P * E copies of one environment, stepped together.

    `observation` [P, E, ...] is what to act on next. `step` returns the transitions just made, and never one from the
    end of an episode to the start of the next:

    - where the vector environment resets within the step (SAME_STEP), the true last observation is put back;
    - where it spends a step on the reset (NEXT_STEP), that step is marked as not valid; `always_valid` is then false.
    """

    def __init__(self, settings: Environment, agents: int, num_envs: int, device: torch.device | str = "cpu") -> None:
        self.agents = agents
        self.num_envs = num_envs
        self.device = torch.device(device)
        self._carries_over = settings.carry_over
        self._vector = make_vector(settings, agents * num_envs)
        self.observation_space: gym.Space[Any] = self._vector.single_observation_space
        self.action_space: gym.Space[Any] = self._vector.single_action_space
        mode = self._vector.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        if mode not in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP):
            raise UserError(f"environment.id: {settings.id} never resets by itself (autoreset mode {mode})")
        self._resets_in_step = mode == AutoresetMode.SAME_STEP
        self.always_valid = self._resets_in_step
        copies = agents * num_envs
        self._resetting = np.zeros(copies, dtype=bool)
        self._running_return = np.zeros(copies)
        self._return_sum = np.zeros(agents)
        self._return_count = np.zeros(agents)
        self._steps = np.zeros(agents)
        self.observation: Tensor

    def begin(self, seed: int) -> None:
        """Begin a generation: with new episodes, unless the configuration lets the old ones run on."""
        if not (self._carries_over and hasattr(self, "observation")):
            self.reset(seed)

    def reset(self, seed: int) -> None:
        """Start a new episode everywhere."""
        observation, _ = self._vector.reset(seed=seed % 2**31)
        self._resetting[:] = False
        self._running_return[:] = 0.0
        self.observation = self._observations(observation)

    def step(self, action: Tensor) -> Transition:
        """Act [P, E, ...] everywhere. Raises ValueError for an action outside the space."""
        observation, reward, terminated, truncated, info = self._vector.step(self._actions(action))
        ended = terminated | truncated
        valid = ~self._resetting
        transition = Transition(
            observation=self.observation,
            reward=self._tensor(np.asarray(reward, dtype=np.float32)),
            next_observation=self._observations(self._last_observations(observation, ended, info)),
            terminated=self._tensor(np.asarray(terminated, dtype=bool)),
            truncated=self._tensor(np.asarray(truncated & ~terminated, dtype=bool)),
            valid=self._tensor(valid),
            all_valid=bool(valid.all()),
        )
        self._steps += valid.reshape(self.agents, self.num_envs).sum(1)
        self._count(np.asarray(reward, dtype=np.float64), ended)
        if not self._resets_in_step:
            self._resetting = ended.copy()
        restarted = self._resets_in_step and ended.any()
        self.observation = self._observations(observation) if restarted else transition.next_observation
        return transition

    def pop_steps(self) -> NDArray[np.float64]:
        """Transitions [P] made since the last call."""
        steps = self._steps.copy()
        self._steps[:] = 0.0
        return steps

    def pop_returns(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Sums and counts [P] of the returns of episodes that ended since the last call."""
        result = self._return_sum.copy(), self._return_count.copy()
        self._return_sum[:] = 0.0
        self._return_count[:] = 0.0
        return result

    def close(self) -> None:
        self._vector.close()

    def _count(self, reward: NDArray[np.float64], ended: NDArray[np.bool_]) -> None:
        self._running_return += reward
        if ended.any():
            agent = np.flatnonzero(ended) // self.num_envs
            np.add.at(self._return_sum, agent, self._running_return[ended])
            np.add.at(self._return_count, agent, 1)
            self._running_return[ended] = 0.0

    def _last_observations(self, observation: Any, ended: NDArray[np.bool_], info: dict[str, Any]) -> Any:
        if not (self._resets_in_step and ended.any()):
            return observation
        final = np.array(observation)
        for copy in np.flatnonzero(ended):
            final[copy] = info["final_obs"][copy]
        return final

    def _actions(self, action: Tensor) -> NDArray[Any]:
        values = action.detach().cpu().numpy()
        values = values.reshape(self.agents * self.num_envs, *values.shape[2:])
        if isinstance(self.action_space, gym.spaces.Discrete):
            if values.min() < 0 or values.max() >= self.action_space.n:
                wrong = int(np.flatnonzero((values < 0) | (values >= self.action_space.n))[0])
                raise ValueError(
                    f"agent {wrong // self.num_envs} chose action {values[wrong]} in environment "
                    f"{wrong % self.num_envs}; the space has actions 0 to {self.action_space.n - 1}"
                )
            return np.asarray(values + self.action_space.start)
        return values

    def _observations(self, observation: Any) -> Tensor:
        array = np.asarray(observation)
        # A copy, because vector environments may reuse the array that they return.
        return self._tensor(np.array(array, dtype=np.uint8 if array.dtype == np.uint8 else np.float32))

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array).to(self.device)
        return tensor.view(self.agents, self.num_envs, *array.shape[1:])


def make_vector(settings: Environment, copies: int) -> VectorEnv[Any, Any, Any]:
    """The vector environment that the configuration asks for. Raises UserError where there is none."""
    mode = settings.vectorization
    try:
        module, _, name = settings.id.rpartition(":")
        if module:
            import_from_here(module)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            native = gym.spec(name).vector_entry_point is not None
            if mode == "auto":
                mode = "native" if native else "sync"
            if mode == "native":
                if not native:
                    raise UserError(f"environment.vectorization: {settings.id} has no native vector implementation")
                return gym.make_vec(settings.id, copies, vectorization_mode="vector_entry_point", **settings.kwargs)
            options: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}
            return gym.make_vec(settings.id, copies, vectorization_mode=mode, vector_kwargs=options, **settings.kwargs)
    except (gym.error.Error, ImportError) as error:
        raise UserError(f"environment.id: cannot make {settings.id!r}: {' '.join(str(error).split())}") from error
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"environment.kwargs: {settings.id!r} refuses them: {' '.join(str(error).split())}") from error
