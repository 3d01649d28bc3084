"""Vector environments whose transitions are true, put together from what decides on resets, faults and masks.

Axes: P agents, E environments of each agent. Environment e of agent p is copy p * E + e.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evorl.config import Environment
from evorl.envs.actions import action_reader
from evorl.envs.episodes import Episodes, Returns
from evorl.envs.masks import MASK, ActionMasks, refuse_late_masks
from evorl.envs.observations import ObservationReader
from evorl.envs.recovery import RecoveringVector
from evorl.envs.resets import Resets
from evorl.envs.spec import EnvSpec
from evorl.envs.watch import Watch
from evorl.types import Agent, Observation, Tensors, Transition

Parts = dict[str, NDArray[Any]]


class Environments:
    """P * E copies of one environment, stepped together.

    `observation` is what to act on next, each part [P, E, ...], and `started` [P, E] where it begins an episode. `step`
    returns the transitions just made, and never one from the end of an episode to the start of the next
    (`envs/resets.py`). Where `always_valid`, every step is one unless an environment raises.
    """

    def __init__(
        self,
        settings: Environment,
        agents: int,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        whole_games: bool = False,
    ) -> None:
        """Make environments. With `whole_games`, as in evaluation, a lost life ends nothing, but FIRE follows it."""
        self.agents = agents
        self.num_envs = num_envs
        self.device = torch.device(device)
        copies = agents * num_envs
        # Where a lost life ends nothing, the native environment shall not report one as an end.
        asked = settings.model_copy(update={"life_loss_ends": False}) if whole_games else settings
        self._watch = Watch(settings.id, copies, num_envs, settings.max_restarts)
        self._vector = RecoveringVector(asked, copies, self._watch)
        vector = self._vector.env
        self._resets = Resets(settings, vector, copies, whole_games=whole_games)
        self.always_valid = self._resets.in_step
        self._read_actions = action_reader(vector.single_action_space, num_envs)
        self._episodes = Episodes(agents, num_envs)
        self._steps = np.zeros(agents)
        self._id = settings.id
        self.observation: Observation
        self._started: Tensor
        _, info = self._vector.reset(0)
        # Whether actions can be forbidden shows only in what a reset says.
        self._masks: ActionMasks | None = None
        if MASK in info:
            self._masks = ActionMasks(settings.id, vector.single_action_space, copies, num_envs)
            self._masks.read(info)
        self._observations = ObservationReader(settings, vector.single_observation_space, self._watch)
        parts, masked = self._observations.parts, self._masks is not None
        self.interface = EnvSpec(settings.id, parts, vector.single_action_space, masked)

    @property
    def started(self) -> Tensor:
        """Return where `observation` begins an episode [P, E]."""
        return self._started.to(self.device)

    def begin(self, seed: int, agents: Sequence[Agent], carry_over: bool) -> None:
        """Begin a generation of these agents: with new episodes, or with those that are running if they carry over."""
        self._episodes.hand_over([agent.id for agent in agents])
        if not (carry_over and hasattr(self, "observation")):
            self.reset(seed)

    def reset(self, seed: int | Sequence[int]) -> None:
        """Start a new episode everywhere: copy i from `seed` + i, or environment e of every agent from seeds [E]."""
        self._watch.begin(slice(None))
        observation, info = self._vector.reset(seed if isinstance(seed, int) else list(seed) * self.agents)
        self._resets.restart(info)
        self._episodes.restart()
        self.observation = self._seen(observation, info)
        self._started = torch.ones(self.agents, self.num_envs, dtype=torch.bool)

    def step(self, action: Tensor) -> Transition:
        """Act [P, E, ...] everywhere. Raises ValueError for an action outside the space."""
        self._watch.tick()
        actions = self._read_actions(action.detach().flatten(0, 1).cpu().numpy())
        self._resets.serve(actions)
        observation, gained, terminated, truncated, info = self._vector.step(actions)
        if self._masks is None:
            refuse_late_masks(info, self._id)
        reward = np.asarray(gained, dtype=np.float32)
        self._watch.check_finite(reward, "as its reward")
        faulty = self._vector.faulty(info)
        # Where an error came in the reset after an episode's end, the step before it is still a transition.
        dropped = None if faulty is None else faulty & ~(terminated | truncated)
        last = self._last(terminated | truncated, info)
        ends = self._resets.step(terminated, truncated, dropped, info)
        self._episodes.step(np.asarray(gained, dtype=np.float64), ends.over, dropped)
        self._watch.begin(ends.started)
        seen = self._seen(observation, info)
        transition = Transition(
            observation=self.observation,
            started=self._started,
            reward=self._tensor(reward),
            next_observation=self._with_last(seen, last),
            terminated=self._tensor(np.asarray(ends.terminated, dtype=bool)),
            truncated=self._tensor(np.asarray(ends.truncated, dtype=bool)),
            valid=self._flags(ends.valid),
            all_valid=bool(ends.valid.all()),
            any_truncated=bool(ends.truncated.any()),
        )
        self._steps += ends.valid.reshape(self.agents, self.num_envs).sum(1)
        self.observation, self._started = seen, self._flags(ends.started)
        return transition

    def pop_steps(self) -> NDArray[np.float64]:
        """Return the transitions [P] made since the last call."""
        steps = self._steps.copy()
        self._steps[:] = 0.0
        return steps

    def pop_returns(self) -> Returns:
        """Return the returns since the last call; episodes that began too lately to count wait for a later one."""
        return self._episodes.pop()

    def close(self) -> None:
        self._vector.close()

    def _last(self, ended: NDArray[np.bool_], info: dict[str, Any]) -> dict[int, Parts]:
        """Return the true last observations of copies that the step also reset."""
        if not (self._resets.in_step and ended.any()):
            return {}
        copies = np.flatnonzero(ended).tolist()
        last = {copy: self._observations.read(info["final_obs"][copy], copy) for copy in copies}
        if self._masks is not None:
            for copy, parts in last.items():
                parts[MASK] = self._masks.last(info, copy)
        return last

    def _with_last(self, seen: Tensors, last: dict[int, Parts]) -> Tensors:
        """Return the observations after the step: where it also reset, the last ones of the episode that ended."""
        if not last:
            return seen
        result = {name: value.clone() for name, value in seen.items()}
        for copy, parts in last.items():
            for name, array in parts.items():
                result[name][divmod(copy, self.num_envs)] = torch.as_tensor(array)
        return result

    def _seen(self, observation: Any, info: dict[str, Any]) -> Tensors:
        parts = self._observations.read(observation)
        if self._masks is not None:
            parts[MASK] = self._masks.read(info)
        return {name: self._tensor(array) for name, array in parts.items()}

    def _flags(self, array: NDArray[np.bool_]) -> Tensor:
        """Flags [N] as a tensor [P, E] on the CPU, where looking at them waits for no GPU."""
        return torch.from_numpy(array).view(self.agents, self.num_envs)

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array).to(self.device)
        return tensor.view(self.agents, self.num_envs, *array.shape[1:])
