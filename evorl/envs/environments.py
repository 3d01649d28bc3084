"""Vector environments whose transitions are true: what resets do is decided here and nowhere else.

Axes: P agents, E environments of each agent. Environment e of agent p is copy p * E + e.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from torch import Tensor

from evorl.config import Environment
from evorl.envs.episodes import Episodes, Returns
from evorl.envs.guard import FAILURES, FAULT, another_seed, in_words
from evorl.envs.spec import EnvSpec, ObservationSpecs, choices, observation_specs, split
from evorl.envs.vector import discard, make_vector, serving_action, stacked_frames
from evorl.envs.watch import Watch
from evorl.types import Agent, Observation, Tensors, Transition, UserError

TYPES = {torch.uint8: np.uint8, torch.int64: np.int64, torch.float32: np.float32}
MASK = "action_mask"
"""The name of the environment's mask, and of the observation's part that holds it."""


class Environments:
    """P * E copies of one environment, stepped together.

    `observation` is what to act on next, each part [P, E, ...], and `started` [P, E] where it begins an episode. `step`
    returns the transitions just made, and never one from the end of an episode to the start of the next:

    - where the vector environment resets within the step (SAME_STEP), the true last observation is put back;
    - where it spends a step on the reset (NEXT_STEP), that step is marked as not valid; `always_valid` is then false;
    - where a lost life has ended what is learned from, the step that presses FIRE for the next one is not valid;
    - where an environment raises, it is restarted, and that step is not valid whatever `always_valid` says.
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
        serves = settings.life_loss_ends
        if whole_games:
            settings = settings.model_copy(update={"life_loss_ends": False})
        self.agents = agents
        self.num_envs = num_envs
        self.device = torch.device(device)
        self._settings = settings
        self._vector = make_vector(settings, agents * num_envs)
        self._lives = settings.life_loss_ends
        self._space: gym.Space[Any] = self._vector.single_observation_space
        self._actions_of: gym.Space[Any] = self._vector.single_action_space
        # Atari environments share one `metadata`, in which the last one made writes its mode.
        known = self._vector.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        mode = getattr(self._vector, "autoreset_mode", known)
        if mode not in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP):
            raise UserError(f"environment.id: {settings.id} never resets by itself (autoreset mode {mode})")
        self._resets_in_step = mode == AutoresetMode.SAME_STEP
        self.always_valid = self._resets_in_step
        copies = agents * num_envs
        self._resetting = np.zeros(copies, dtype=bool)
        self._fire = serving_action(settings, self._vector) if serves else None
        self._serving = np.zeros(copies, dtype=bool)
        self._lives_left = np.zeros(copies, dtype=np.int64)
        self._episodes = Episodes(agents, num_envs)
        self._steps = np.zeros(agents)
        self._id = settings.id
        self._seed = 0
        self._watch = Watch(settings.id, copies, num_envs, settings.max_restarts)
        self._observation_indices = None if settings.observation_indices is None else list(settings.observation_indices)
        self.observation: Observation
        self._started: Tensor
        _, info = self._reset()
        # Whether actions can be forbidden shows only in what a reset says.
        self._masked = MASK in info
        if self._masked:
            self._mask(info)
        self.interface = EnvSpec(settings.id, self._parts(settings), self._actions_of, self._masked)

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
        seeds = [] if isinstance(seed, int) else [number % 2**31 for number in seed] * self.agents
        self._seed = seed % 2**31 if isinstance(seed, int) else seeds[0]
        self._watch.begin(slice(None))
        observation, info = self._reset(seeds)
        self._resetting[:] = False
        self._serving[:] = False
        if self._fire is not None:
            self._lives_left = np.array(info["lives"])
        self._episodes.restart()
        self.observation = self._seen(observation, info)
        self._started = self._flags(np.ones_like(self._resetting))

    def step(self, action: Tensor) -> Transition:
        """Act [P, E, ...] everywhere. Raises ValueError for an action outside the space."""
        self._watch.tick()
        actions = self._actions(action)
        if self._fire is not None:
            actions[self._serving] = self._fire
        observation, gained, terminated, truncated, info = self._step(actions)
        if not self._masked:
            self._refuse_late_masks(info)
        reward = np.asarray(gained, dtype=np.float32)
        self._watch.check_finite(reward, "as its reward")
        ended = terminated | truncated
        # Where an error came in the reset after an episode's end, the step before it is still a transition.
        dropped = self._watch.faulty(info) & ~ended if FAULT in info else None
        idle = self._resetting | self._serving if self._lives else self._resetting
        valid = ~idle if dropped is None else ~idle & ~dropped
        truncated = truncated & ~terminated
        last = self._last(ended, info)
        # Where a lost life ends what is learned from, the game goes on until the last one.
        over = (ended & (info["lives"] == 0)) | truncated if self._lives else ended
        if self._fire is not None:
            self._serving = (info["lives"] < self._lives_left) & ~over
            self._lives_left = np.array(info["lives"])
        self._episodes.step(np.asarray(gained, dtype=np.float64), over, dropped)
        started = over if self._resets_in_step else self._resetting
        if not self._resets_in_step:
            self._resetting = over.copy()
        if dropped is not None:
            started = started | dropped
        self._watch.begin(started)
        seen = self._seen(observation, info)
        transition = Transition(
            observation=self.observation,
            started=self._started,
            reward=self._tensor(reward),
            next_observation=self._with_last(seen, last),
            terminated=self._tensor(np.asarray(terminated, dtype=bool)),
            truncated=self._tensor(np.asarray(truncated, dtype=bool)),
            valid=self._flags(valid),
            all_valid=bool(valid.all()),
            any_truncated=bool(truncated.any()),
        )
        self._steps += valid.reshape(self.agents, self.num_envs).sum(1)
        self.observation, self._started = seen, self._flags(np.array(started))
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

    def _reset(self, seeds: Sequence[int] = ()) -> tuple[Any, dict[str, Any]]:
        try:
            observation, info = self._vector.reset(seed=self._seeds(seeds))
        except UserError:
            raise
        except Exception as error:
            observation, info = self._start_over(error)
        if FAULT in info:
            self._watch.faulty(info)
        return observation, info

    def _seeds(self, seeds: Sequence[int]) -> Any:
        """Return the seeds of all copies as the vector environment takes them: most native ones only know one."""
        if seeds and isinstance(self._vector, gym.vector.SyncVectorEnv | gym.vector.AsyncVectorEnv):
            return list(seeds)
        return np.array(seeds) if seeds and stacked_frames(self._settings) else self._seed

    def _step(self, action: NDArray[Any]) -> tuple[Any, ...]:
        try:
            return self._vector.step(action)
        except UserError:
            raise
        except Exception as error:
            observation, info = self._start_over(error)
            none = np.zeros(self.agents * self.num_envs)
            return observation, none, none.astype(bool), none.astype(bool), info

    def _start_over(self, error: Exception) -> tuple[Any, dict[str, Any]]:
        """Restart all copies, where one error has hit them all, and begin new episodes."""
        copies, failures = self.agents * self.num_envs, 1
        observation: Any = None
        info: dict[str, Any] = {}
        discard(self._vector)
        while failures <= self._settings.max_restarts:
            self._seed = another_seed(self._seed)
            self._vector = make_vector(self._settings, copies)
            try:
                observation, info = self._vector.reset(seed=self._seed)
                break
            except UserError:
                raise
            except Exception as another:
                error = another
                failures += 1
                discard(self._vector)
        return observation, {
            **info,
            FAULT: np.full(copies, in_words(error), dtype=object),
            f"_{FAULT}": np.ones(copies, dtype=bool),
            FAILURES: info.get(FAILURES, 0) + np.full(copies, failures),
        }

    def _parts(self, settings: Environment) -> ObservationSpecs:
        space = self._space
        if self._observation_indices is not None:
            space = _picked(space, self._observation_indices, settings.id)
        parts = observation_specs(space)
        if MASK in parts:
            raise UserError(f"environment.id: {settings.id} has an observation part named {MASK!r}")
        if frames := stacked_frames(settings):
            if settings.image_channels == "last":
                raise UserError(
                    f"environment.image_channels: {settings.id} stacks frames on the first axis; take 'first'"
                )
            return {name: replace(part, frames=frames, channels_last=False) for name, part in parts.items()}
        if settings.image_channels == "auto":
            return parts
        last = settings.image_channels == "last"
        return {
            name: replace(part, channels_last=last) if part.kind == "image" and len(part.shape) == 3 else part
            for name, part in parts.items()
        }

    def _stored(self, observation: Any, copy: int | None = None) -> dict[str, NDArray[Any]]:
        """Return copies of the parts of a batch of observations, or of one `copy`'s, in the types they are kept in.

        Copies, because vector environments may reuse the array that they return.
        """
        parts = split(self._space, observation)
        if self._observation_indices is not None:
            parts = {name: array[..., self._observation_indices] for name, array in parts.items()}
        types = {name: TYPES[part.dtype] for name, part in self.interface.parts.items()}
        stored = {name: np.array(array, dtype=types[name]) for name, array in parts.items()}
        which = "the observation" if copy is None else "the last observation"
        for name, array in stored.items():
            if array.dtype == np.float32:
                self._watch.check_finite(array, f"in part {name!r} of {which}", copy)
            elif sizes := self.interface.parts[name].sizes:
                self._watch.check_choices(array, sizes, f"in part {name!r} of {which}", copy)
        return stored

    def _last(self, ended: NDArray[np.bool_], info: dict[str, Any]) -> dict[int, dict[str, NDArray[Any]]]:
        """Return the true last observations of copies that the step also reset."""
        if not (self._resets_in_step and ended.any()):
            return {}
        last = {int(copy): self._stored(info["final_obs"][copy], int(copy)) for copy in np.flatnonzero(ended)}
        if self._masked:
            final = info["final_info"]
            for copy, parts in last.items():
                given = MASK in final and final[f"_{MASK}"][copy]
                parts[MASK] = np.asarray(final[MASK][copy] if given else True, dtype=bool)
        return last

    def _with_last(self, seen: Tensors, last: dict[int, dict[str, NDArray[Any]]]) -> Tensors:
        """Return the observations after the step: where it also reset, the last ones of the episode that ended."""
        if not last:
            return seen
        result = {name: value.clone() for name, value in seen.items()}
        for copy, parts in last.items():
            for name, array in parts.items():
                result[name][divmod(copy, self.num_envs)] = torch.as_tensor(array)
        return result

    def _seen(self, observation: Any, info: dict[str, Any]) -> Tensors:
        seen = {name: self._tensor(array) for name, array in self._stored(observation).items()}
        if self._masked:
            seen[MASK] = self._tensor(self._mask(info))
        return seen

    def _mask(self, info: dict[str, Any]) -> NDArray[np.bool_]:
        """Return the allowed actions [N, A] of all copies; an environment that gives no mask at a step allows all."""
        copies = self.agents * self.num_envs
        mask = np.array(info.get(MASK, np.ones((copies, 1))), dtype=bool).reshape(copies, -1)
        given = info.get(f"_{MASK}", np.ones(copies, dtype=bool)) if MASK in info else np.zeros(copies, dtype=bool)
        sizes = choices(self._actions_of)
        mask = np.broadcast_to(mask, (copies, sum(sizes))) if mask.shape[1] == 1 else mask
        mask = mask | ~given[:, None]
        if mask.shape[1] != sum(sizes):
            raise UserError(
                f"environment.id: {self._id} gives masks of {mask.shape[1]} actions; its space has {sum(sizes)}"
            )
        allowed = np.logical_or.reduceat(mask, np.cumsum([0, *sizes[:-1]]), axis=1).all(1)
        if not allowed.all():
            agent, place = divmod(int(np.flatnonzero(~allowed)[0]), self.num_envs)
            raise UserError(
                f"environment.id: {self._id} forbids every action in environment {place} of agent {agent} "
                "(info['action_mask'] is all zero); at least one must be allowed"
            )
        return np.asarray(mask)

    def _refuse_late_masks(self, info: dict[str, Any]) -> None:
        if MASK in info or MASK in info.get("final_info", ()):
            raise UserError(
                f"environment.id: {self._id} gives info['{MASK}'] in `step` but not in `reset`; it must give "
                "it in both, or an episode's first action is chosen without it"
            )

    def _actions(self, action: Tensor) -> NDArray[Any]:
        """Return the actions [N, ...] of all copies as a new array that the space holds."""
        values = action.detach().cpu().numpy()
        values = values.reshape(self.agents * self.num_envs, *values.shape[2:])
        space = self._actions_of
        if isinstance(space, gym.spaces.Box):
            # An agent whose numbers are lost is stopped when it learns; until then its environment shall not break.
            values = np.where(np.isnan(values), 0.0, values)
            # Single precision may lie a hair beyond bounds in double precision.
            whole = np.rint(values) if np.issubdtype(space.dtype, np.integer) else values
            return np.asarray(np.clip(whole.astype(space.dtype), space.low, space.high))
        # An Atari environment that is given an action outside its space hangs for ever.
        sizes = np.array(choices(space)).reshape(values.shape[1:])
        outside = ((values < 0) | (values >= sizes)).reshape(len(values), -1).any(1)
        if outside.any():
            wrong = int(np.flatnonzero(outside)[0])
            raise ValueError(
                f"agent {wrong // self.num_envs} chose action {values[wrong]} in environment "
                f"{wrong % self.num_envs}; the space has actions 0 to {(sizes - 1).tolist()}"
            )
        return np.asarray(values + space.start)  # type: ignore[attr-defined]

    def _flags(self, array: NDArray[np.bool_]) -> Tensor:
        """Flags [N] as a tensor [P, E] on the CPU, where looking at them waits for no GPU."""
        return torch.from_numpy(array).view(self.agents, self.num_envs)

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array).to(self.device)
        return tensor.view(self.agents, self.num_envs, *array.shape[1:])


def _picked(space: gym.Space[Any], indices: list[int], id: str) -> gym.Space[Any]:
    """Return the space of some numbers of a vector. Raises UserError where it has none at these places."""
    if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
        raise UserError(f"environment.observation_indices: these are of a vector; {id} shows {space}")
    if max(indices) >= space.shape[0]:
        last = space.shape[0] - 1
        raise UserError(f"environment.observation_indices: there is no number {max(indices)}; {id} shows 0 to {last}")
    return gym.spaces.Box(space.low[indices], space.high[indices], dtype=space.dtype.type)
