"""Vector environments whose transitions are true, put together from what decides on resets, faults and masks.

Axes: P agents, E environments of each agent. Environment e of agent p is copy p * E + e.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evorl.config import Environment
from evorl.config.fields import ENVIRONMENT, as_configured
from evorl.envs.actions import action_reader
from evorl.envs.episodes import Episodes, Recent, Returns
from evorl.envs.masks import MASK, ActionMasks, refuse_late_masks
from evorl.envs.observations import ObservationReader
from evorl.envs.recovery import RecoveringVector
from evorl.envs.reports import read_reports
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
        self._on_host = self.device.type == "cpu"
        copies = agents * num_envs
        # Where a lost life ends nothing, the native environment shall not report one as an end.
        asked = settings.model_copy(update={"life_loss_ends": False}) if whole_games else settings
        self._watch = Watch(settings.id, copies, num_envs, settings.max_restarts)
        self._vector = RecoveringVector(asked, copies, self._watch)
        try:
            self._prepare(settings, whole_games)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(self, settings: Environment, whole_games: bool) -> None:
        """Reset all copies once, and find out what they show and take. Raises UserError for what evorl cannot use."""
        vector, copies = self._vector.env, self.agents * self.num_envs
        self._resets = Resets(settings, vector, copies, whole_games=whole_games)
        self.always_valid = self._resets.in_step
        self._read_actions = action_reader(vector.single_action_space, self.num_envs)
        self._episodes = Episodes(self.agents, self.num_envs)
        self._steps = np.zeros(self.agents)
        self._id = settings.id
        self._kwargs = settings.kwargs
        self.observation: Observation
        self._started: Tensor
        _, info = self._vector.reset(0)
        self._info = info
        # Whether actions can be forbidden shows only in what a reset says.
        self._masks: ActionMasks | None = None
        if MASK in info:
            self._masks = ActionMasks(settings.id, vector.single_action_space, copies, self.num_envs)
            self._masks.read(info)
        self._observations = ObservationReader(settings, vector.single_observation_space, self._watch)
        parts, masked = self._observations.parts, self._masks is not None
        spaces = vector.single_action_space, vector.single_observation_space
        self.interface = EnvSpec(settings.id, parts, spaces[0], masked, spaces[1])

    @property
    def started(self) -> Tensor:
        """Return where `observation` begins an episode [P, E]."""
        return self._started.to(self.device)

    def begin(self, seed: int, agents: Sequence[Agent], carry_over: bool) -> None:
        """Begin a generation of these agents: with new episodes, or with those that are running if they carry over.

        Where hyperparameters of agents are settings of their environments, each agent gets environments that have them;
        then none of the running episodes goes on. Raises UserError where an environment refuses them.
        """
        self._episodes.hand_over([agent.id for agent in agents])
        own = [own_kwargs(agent, self._kwargs) for agent in agents]
        changed = any(own) and self._vector.differ([kwargs for kwargs in own for _ in range(self.num_envs)])
        if changed or not (carry_over and hasattr(self, "observation")):
            self.reset(seed)

    def reset(self, seed: int | Sequence[int]) -> None:
        """Start a new episode everywhere: copy i from `seed` + i, or environment e of every agent from seeds [E]."""
        self._watch.begin(slice(None))
        observation, info = self._vector.reset(seed if isinstance(seed, int) else list(seed) * self.agents)
        self._resets.restart(info)
        self._episodes.restart()
        self.observation = self._tensors(self._read(observation, info))
        self._started = torch.ones(self.agents, self.num_envs, dtype=torch.bool)

    def step(self, action: Tensor) -> Transition:
        """Act [P, E, ...] everywhere. Raises ValueError for an action outside the space."""
        self._watch.tick()
        chosen = action.numpy(force=True)
        actions = self._read_actions(chosen.reshape(-1, *chosen.shape[2:]))
        self._resets.serve(actions)
        observation, gained, terminated, truncated, info = self._vector.step(actions)
        self._info = info
        if self._masks is None:
            refuse_late_masks(info, self._id)
        reward = np.array(gained, dtype=np.float32)
        self._watch.check_finite(reward, "as its reward")
        ends = self._resets.step(terminated, truncated, self._vector.faulty(info), info)
        last = self._last(ends.ended, info)
        self._episodes.step(np.asarray(gained), ends.over, ends.dropped)
        self._watch.begin(ends.started)
        parts = self._read(observation, info)
        seen = self._tensors(parts)
        transition = Transition(
            observation=self.observation,
            started=self._started,
            reward=self._tensor(reward),
            next_observation=self._tensors(_with_last(parts, last)) if last else seen,
            terminated=self._tensor(ends.terminated),
            truncated=self._tensor(ends.truncated),
            valid=self._flags(ends.valid),
            all_valid=bool(np.count_nonzero(ends.valid) == ends.valid.size),
            any_truncated=bool(np.count_nonzero(ends.truncated)),
        )
        self._steps += ends.valid.reshape(self.agents, -1).sum(1)
        self.observation, self._started = seen, self._flags(ends.started)
        return transition

    def reports(self, names: Sequence[str], chosen: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return what the last step's info says of `names` in the `chosen` environments [P, E], [names, chosen].

        Raises UserError where it says nothing.
        """
        return read_reports(self._info, names, np.flatnonzero(chosen).tolist(), self._id)

    def pop_steps(self) -> NDArray[np.float64]:
        """Return the transitions [P] made since the last call."""
        steps = self._steps.copy()
        self._steps[:] = 0.0
        return steps

    def pop_returns(self) -> Returns:
        """Return the returns since the last call; episodes that began too lately to count wait for a later one."""
        return self._episodes.pop()

    def recent(self) -> Recent | None:
        """Return means over all episodes that ended since the last call, and none where none did."""
        return self._episodes.recent()

    def close(self) -> None:
        """Close all copies within a deadline. It raises nothing: copies that raise or hang are reported."""
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

    def _read(self, observation: Any, info: dict[str, Any]) -> Parts:
        """Return the parts [N, ...] of what the vector environment shows, with the mask if there is one."""
        parts = self._observations.read(observation)
        if self._masks is not None:
            parts[MASK] = self._masks.read(info)
        return parts

    def _tensors(self, parts: Parts) -> Tensors:
        return {name: self._tensor(array) for name, array in parts.items()}

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        """Return an array [N, ...] as a tensor [P, E, ...] on the device."""
        # numpy's reshape takes half the time of a tensor's view.
        tensor = torch.from_numpy(array.reshape(self.agents, self.num_envs, *array.shape[1:]))
        return tensor if self._on_host else tensor.to(self.device)

    def _flags(self, array: NDArray[np.bool_]) -> Tensor:
        """Return flags [N] as a tensor [P, E] on the CPU, where looking at them waits for no GPU."""
        return torch.from_numpy(array.reshape(self.agents, self.num_envs))


def own_kwargs(agent: Agent, configured: Mapping[str, Any]) -> dict[str, float]:
    """Return an agent's own keyword arguments of environments; whole numbers stay whole."""
    values = {
        name.removeprefix(ENVIRONMENT): value
        for name, value in agent.hyperparameters.items()
        if name.startswith(ENVIRONMENT)
    }
    return {key: as_configured(value, configured.get(key)) for key, value in values.items()}


def _with_last(parts: Parts, last: dict[int, Parts]) -> Parts:
    """Return the parts [N, ...] after a step that also reset some copies: the last ones of their ended episodes."""
    result = {name: array.copy() for name, array in parts.items()}
    for copy, own in last.items():
        for name, array in own.items():
            result[name][copy] = array
    return result
