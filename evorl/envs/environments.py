"""Vector environments with correct transitions: which steps are transitions, and where episodes end and start.

Axes: P agents, E environments of each agent; N = P * E copies. Environment e of agent p is copy p * E + e.

- With same-step autoreset (SAME_STEP), a step that ends an episode returns the next episode's first observation; the
  final observation is in its info.
- With next-step autoreset (NEXT_STEP), the extra step spent on the reset is not a transition.
- If a lost life is a termination for learning, the game continues, and the step that presses FIRE is not a transition.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import iterate
from numpy.typing import NDArray
from torch import Tensor

from evorl.config import Environment
from evorl.envs.continuation import Continuation, PlainEpisodes, Vector, continuation, is_plain
from evorl.envs.episodes import Collected, Episodes
from evorl.envs.faults.checks import reset_mode
from evorl.envs.faults.closing import close_vector
from evorl.envs.faults.raising import Start, call_or_user_error
from evorl.envs.games.players import Opponents
from evorl.envs.games.vector import GameVector
from evorl.envs.generation import longest_episode
from evorl.envs.reading import ActionMasks, Copies, ObservationReader, action_reader, check_finite, refuse_late_masks
from evorl.envs.spaces import MASK, EnvSpec
from evorl.envs.stepped import COUNTED, OBSERVATION_PREFIX, WHERE, SteppedEnvironments, layout
from evorl.envs.vector import make_vector, serving_action, stacked_frames
from evorl.seeding import global_generators_restored, seed_global_generators
from evorl.system.formats import check_tensors, part_of, with_prefix
from evorl.types.batches import Transition
from evorl.types.messages import nearest, shown
from evorl.types.outcomes import UserError
from evorl.types.tensors import Flags, Tensors


class Ends(NamedTuple):
    """Episode boundaries of one step of all copies [N].

    `valid` marks real transitions, `ended` terminated or truncated ones, `game_over` the end of the environment's
    own episode (not a lost life), and `started` that the observation after the step is the first of an episode.
    """

    terminated: Flags
    truncated: Flags
    ended: Flags
    valid: Flags
    game_over: Flags
    started: Flags


class Resets:
    """Reset state of N copies between steps: which wait for a reset, and which for FIRE."""

    def __init__(
        self, settings: Environment, vector: VectorEnv[Any, Any, Any], copies: int, *, whole_games: bool
    ) -> None:
        """Determine the autoreset mode of `vector`. With `whole_games` a lost life does not end the episode, but
        FIRE is pressed after it.

        Raises UserError if the vector environment does not declare the mode, or never resets by itself.
        """
        try:
            self.in_step = reset_mode(vector, settings.id) == AutoresetMode.SAME_STEP
        except UserError as error:
            raise UserError(f"{error}; where single copies can be made, use environment.vectorization=sync") from error
        self.serving_action = serving_action(settings, vector) if settings.life_loss_ends else None
        self._lives = settings.life_loss_ends and not whole_games
        self._most_steps = longest_episode(settings) or np.inf
        """Steps of a game of Atari after which it is truncated, where a lost life is a termination."""
        self._nowhere = np.zeros(copies, dtype=bool)
        self.resetting = self._serving = self._nowhere
        """Copies [N] whose episode has ended and whose next action only resets them."""
        self._lives_left = np.zeros(copies, dtype=np.int64)

    def restart(self, info: dict[str, Any]) -> None:
        self.resetting = self._serving = self._nowhere
        if self.serving_action is not None:
            self._lives_left = np.array(info["lives"])

    def state_dict(self) -> dict[str, Any]:
        return {"resetting": self.resetting, "serving": self._serving, "lives": self._lives_left.astype(np.int64)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.resetting, self._serving, self._lives_left = (state[name] for name in ("resetting", "serving", "lives"))

    def serve(self, actions: NDArray[Any]) -> None:
        """Overwrite the actions [N, ...] of copies that wait for FIRE, in place."""
        if self.serving_action is not None:
            actions[self._serving] = self.serving_action

    def step(self, terminated: Any, truncated: Any, info: dict[str, Any], steps: NDArray[np.int64]) -> Ends:
        """The episode boundaries of a step, which is number `steps` [N] of the running episodes.

        An episode that is both terminated and truncated counts as terminated.
        """
        # Copied because vector environments may reuse the returned arrays.
        terminated, truncated = np.array(terminated, dtype=bool), np.array(truncated, dtype=bool)
        ended = terminated | truncated
        truncated &= ~terminated
        idle = self.resetting | self._serving if self._lives else self.resetting
        game_over = ended
        if self._lives:
            # The game goes on until the last life is lost; ALE does not report that it is truncated as a life is lost.
            game_over = truncated | ended & ((info["lives"] == 0) | (steps >= self._most_steps))
        if self.serving_action is not None:
            self._serving = (info["lives"] < self._lives_left) & ~game_over
            self._lives_left = np.array(info["lives"])
        started = game_over if self.in_step else self.resetting
        if not self.in_step:
            self.resetting = game_over
        return Ends(terminated, truncated, ended, ~idle, game_over, started)


Parts = dict[str, NDArray[Any]]
FINAL = "final_info"
"""Info key under which a same-step autoreset stores the info of episodes that ended in this step."""
ORIGINS = "origins"
"""The name of the start states in the saved state of running episodes."""


class Environments(SteppedEnvironments):
    """Copies of an environment of Gymnasium, or of a game; no transition crosses an episode boundary."""

    def __init__(
        self,
        settings: Environment,
        agents: int,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        whole_games: bool = False,
        continued: bool = True,
    ) -> None:
        """Create the environments. With `whole_games` (evaluation) a lost life does not end the episode, but
        FIRE is pressed after it.

        If not `continued`, nothing is recorded for another process to resume their episodes.
        """
        self.agents = agents
        self.num_envs = num_envs
        self.device = torch.device(device)
        self._on_host = self.device.type == "cpu"
        copies = agents * num_envs
        # In whole games the native environment must not report a lost life as a termination.
        training_settings = settings.model_copy(update={"life_loss_ends": False}) if whole_games else settings
        self._copies = Copies(settings.id, copies, num_envs)
        self._id = settings.id
        self._vector: Vector = make_vector(training_settings, copies, num_envs)
        self._frames = stacked_frames(settings)
        # Evaluation episodes are never resumed by another process.
        is_resumed = continued and not whole_games
        self._continuation = continuation(self._vector, copies, self._frames > 0) if is_resumed else None
        try:
            self._prepare(settings, whole_games)
        except BaseException:
            self.close()
            raise

    def _prepare(self, settings: Environment, whole_games: bool) -> None:
        """Reset all copies once and determine the interface. Raises UserError for unsupported environments."""
        vector, copies = self._vector, self.agents * self.num_envs
        if isinstance(vector, GameVector):
            vector.whole_games = whole_games
        self._resets = Resets(settings, vector, copies, whole_games=whole_games)
        self.always_valid = self._resets.in_step
        self._read_actions = action_reader(vector.single_action_space, self.num_envs)
        self._episodes = Episodes(self.agents, self.num_envs, resets=int(not self._resets.in_step))
        self._begin_counting()
        self._may_be_endless = longest_episode(settings) is None
        with global_generators_restored():  # Copies that are made next would draw the same numbers on every rank.
            _, info = self._reset_vector(0)
        self._info = info
        # Only the info of a reset reveals whether the environment masks actions.
        self._masks: ActionMasks | None = None
        if MASK in info:
            self._masks = ActionMasks(vector.single_action_space, self._copies)
            self._masks.read(info)
        self._observations = ObservationReader(
            settings, vector.single_observation_space, self._copies.source, self._frames
        )
        parts, masked = self._observations.parts, self._masks is not None
        spaces = vector.single_action_space, vector.single_observation_space
        self.interface = EnvSpec(settings.id, parts, spaces[0], masked, spaces[1])

    def set_opponents(self, opponents: Opponents) -> None:
        assert isinstance(self._vector, GameVector)
        self._vector.opponents = opponents

    def play_both_seats(self) -> None:
        assert isinstance(self._vector, GameVector)
        self._vector.play_both_seats()

    def _begin_counting(self) -> None:
        self._steps = np.zeros(self.agents)

    def reset(self, seed: int | Sequence[int]) -> None:
        self._copies.steps[:] = 0
        observation, info = self._reset_vector(seed if isinstance(seed, int) else list(seed) * self.agents)
        self._resets.restart(info)
        self._episodes.restart()
        self.observation = self._tensors(self._read(observation, info))
        self._started = torch.ones(self.agents, self.num_envs, dtype=torch.bool)
        self._has_begun = True

    def _reset_vector(self, seed: int | Sequence[int]) -> Start:
        """Reset all copies, copy i with `seed` + i or with seeds [N], and this process's global generators."""
        if isinstance(seed, int):
            seeds = list(range(seed % 2**31, seed % 2**31 + self._copies.count))
        else:
            seeds = [number % 2**31 for number in seed]
        argument: Any = seeds[0]  # Most native implementations accept only a single seed.
        if isinstance(self._vector, SyncVectorEnv | AsyncVectorEnv | GameVector):
            argument = seeds
        elif self._frames:
            argument = np.array(seeds)
        seed_global_generators(seeds[0])
        observation, info = call_or_user_error(f"a reset of {self._id}", partial(self._vector.reset, seed=argument))
        # A reset may give an environment attributes that cannot be saved.
        if isinstance(self._continuation, PlainEpisodes) and not is_plain(self._vector):
            self._continuation = None
        if self._continuation is not None:
            self._continuation.reset(seeds)
        return observation, info

    def step(self, action: Tensor) -> Transition:
        """Step all environments with actions [P, E, ...]. Raises ValueError for an action outside the space."""
        self._copies.steps += 1
        chosen = action.numpy(force=True)
        actions = self._read_actions(chosen.reshape(-1, *chosen.shape[2:]))
        self._resets.serve(actions)
        if self._continuation is not None and self._continuation.journal is not None:
            self._continuation.journal.add(actions)
        result = call_or_user_error(f"a step of {self._id}", self._vector.step, actions)
        observation, gained, terminated, truncated, info = result
        self._info = info
        if self._masks is None:
            refuse_late_masks(info, self._id)
        gained = np.array(gained, dtype=np.float64)
        reward = gained.astype(np.float32)
        if reward.shape != (self._copies.count,):
            raise UserError(
                f"environment.id: {self._id} gives rewards of shape {list(reward.shape)}; a vector environment of "
                f"{self._copies.count} copies gives [{self._copies.count}]"
            )
        check_finite(self._copies.source, reward, "as its reward")
        ends = self._resets.step(terminated, truncated, info, self._copies.steps)
        last = self._last(ends.ended, info)
        self._episodes.step(self._host(gained), self._host(ends.game_over))
        self._copies.steps[ends.started] = 0
        if self._continuation is not None and np.count_nonzero(ends.started):
            observation, info = self._continuation.begin(self._vector, ends.started) or (observation, info)
        parts = self._read(observation, info, self._resets.resetting)
        seen = self._tensors(parts)
        transition = Transition(
            observation=self.observation,
            started=self._started,
            reward=self._tensor(reward),
            next_observation=self._tensors(_with_last(parts, last)) if last else seen,
            terminated=self._tensor(ends.terminated),
            truncated=self._tensor(ends.truncated),
            valid=self._host(ends.valid),
            all_valid=bool(np.count_nonzero(ends.valid) == ends.valid.size),
            any_truncated=bool(np.count_nonzero(ends.truncated)),
        )
        self._steps += ends.valid.reshape(self.agents, -1).sum(1)
        self.observation, self._started = seen, self._host(ends.started)
        return transition

    def reports(self, names: Sequence[str], chosen: Tensor) -> Tensor:
        copies = chosen.flatten().nonzero()[:, 0].tolist()
        reports = torch.zeros(len(names), *chosen.shape, dtype=torch.float64)
        for copy in copies:
            source = self._info[FINAL] if _has(self._info, FINAL, copy) else self._info
            for row, name in enumerate(names):
                if not _has_number(source, name, copy):
                    reported = [key for key in source if not key.startswith("_") and _has_number(source, key, copy)]
                    more = nearest(name, reported) if reported else "; it reports nothing"
                    raise UserError(
                        f"evolution.fitness: {self._id} reports no number under {name!r} in the last step of an "
                        f"episode{more}"
                    )
                reports[row].view(-1)[copy] = _number(source[name][copy], name, self._id)
        return reports

    def pop_collected(self) -> Collected:
        steps = self._steps
        self._begin_counting()
        return Collected(steps, *self._episodes.pop())

    @property
    def can_continue(self) -> bool:
        return self._continuation is not None

    def state_dict(self) -> Tensors:
        if self._continuation is None or not self._has_begun:
            return {}
        starts = {"kind": self._continuation.kind, "origins": self._continuation.origins(self._vector)}
        arrays = {
            ORIGINS: np.frombuffer(json.dumps(starts).encode(), dtype=np.uint8),
            **self._resets.state_dict(),
            "started": self._started.numpy(),
            "made": self._steps,
            "steps": self._copies.steps,
        }
        if self._continuation.journal is not None:
            arrays |= self._continuation.journal.state_dict()
        tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        tensors |= with_prefix(COUNTED, self._episodes.state_dict())
        return tensors | with_prefix(OBSERVATION_PREFIX, dict(self.observation))

    def load_state_dict(self, state: Tensors, seed: int) -> str:
        starts = _starts(state)
        self.reset(seed)
        if self._continuation is None or starts["kind"] != self._continuation.kind:
            return "any environment"
        saved = {name: value for name, value in state.items() if name != ORIGINS}
        here = {name: value for name, value in self.state_dict().items() if name != ORIGINS}
        check_tensors(saved, {name: layout(name, value, saved) for name, value in here.items()}, WHERE)
        arrays = {name: value.numpy() for name, value in saved.items()}
        self._episodes.load_state_dict(part_of(COUNTED, saved))
        if self._continuation.journal is not None:
            self._continuation.journal.load_state_dict(arrays)
        self._copies.steps = arrays["steps"].copy()
        parts = {name: arrays[f"{OBSERVATION_PREFIX}{name}"] for name in self.observation}
        parts = {name: array.reshape(-1, *array.shape[2:]) for name, array in parts.items()}
        failed = self._play(self._continuation, starts, parts)
        if failed.any():
            names = self._copies.names(np.flatnonzero(failed))
            self.reset(seed)
            return names
        self._resets.load_state_dict(arrays)
        self._started = self._host(arrays["started"].reshape(-1))
        self._steps = arrays["made"].copy()
        self.observation = self._tensors(parts)
        return ""

    def _play(self, continuation: Continuation, starts: Mapping[str, Any], parts: Parts) -> NDArray[np.bool_]:
        """Replay the running episodes; return a mask [N] of copies whose observation differs from `parts` [N, ...]."""
        copies = self.agents * self.num_envs
        try:
            replayed = continuation.play(self._vector, starts["origins"])
        except UserError:
            raise
        except Exception:  # Environments and corrupt files may raise anything.
            return np.ones(copies, dtype=bool)
        failed = np.zeros(copies, dtype=bool)
        for copy, observation in enumerate(replayed):
            read = {} if observation is None else self._observations.read(observation, copy)
            failed[copy] = not read or any(not np.array_equal(read[name], parts[name][copy]) for name in read)
        return failed

    def close(self) -> None:
        close_vector(self._vector, self._id)

    def _last(self, ended: NDArray[np.bool_], info: dict[str, Any]) -> dict[int, Parts]:
        """The final observations of the copies that were reset within the step."""
        if not (self._resets.in_step and ended.any()):
            return {}
        if "final_obs" not in info:
            raise UserError(
                f"environment.id: {self._id} resets within the step (autoreset mode SAME_STEP), but gives no "
                "info['final_obs'] where an episode ends"
            )
        copies, final = np.flatnonzero(ended).tolist(), info["final_obs"]
        if isinstance(final, Mapping):
            final = list(iterate(self._vector.observation_space, final))
        last = {copy: self._observations.read(final[copy], copy, "the last observation") for copy in copies}
        if self._masks is not None:
            for copy, parts in last.items():
                parts[MASK] = self._masks.last(info, copy)
        return last

    def _read(self, observation: Any, info: dict[str, Any], ended: Flags | None = None) -> Parts:
        """The observation parts [N, ...], with the mask if there is one; copies that have `ended` may allow nothing."""
        parts = self._observations.read(observation)
        if self._masks is not None:
            parts[MASK] = self._masks.read(info, ended)
        return parts

    def _tensors(self, parts: Parts) -> Tensors:
        return {name: self._tensor(array) for name, array in parts.items()}

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        """An array [N, ...] as a tensor [P, E, ...] on the device."""
        # numpy's reshape takes half the time of a tensor view.
        tensor = torch.from_numpy(array.reshape(self.agents, self.num_envs, *array.shape[1:]))
        return tensor if self._on_host else tensor.to(self.device)

    def _host(self, array: NDArray[Any]) -> Tensor:
        """An array [N] as a tensor [P, E] on the CPU, which is read there without waiting for a GPU."""
        return torch.from_numpy(array.reshape(self.agents, self.num_envs))


def _has(info: Mapping[str, Any], name: str, copy: int) -> bool:
    """True if a copy reports `name`; native vector environments may report for all copies without a mask."""
    mask = info.get(f"_{name}")
    return name in info and (mask is None or bool(mask[copy]))


def _has_number(info: Mapping[str, Any], name: str, copy: int) -> bool:
    """True if a copy reports `name`, and not as a dictionary."""
    return _has(info, name, copy) and not isinstance(info[name], Mapping)


def _number(value: Any, name: str, id: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = np.nan
    if not np.isfinite(number):
        raise UserError(f"evolution.fitness: {id} reports {shown(value)} for {name!r}, which is not a finite number")
    return number


def _starts(tensors: Tensors) -> dict[str, Any]:
    """The decoded start states of the running episodes. Raises UserError if they are missing or malformed."""
    try:
        starts = json.loads(tensors[ORIGINS].numpy().tobytes())
        return {name: starts[name] for name in ("kind", "origins")}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise UserError("the running episodes: their start states are missing or damaged") from error


def _with_last(parts: Parts, last: dict[int, Parts]) -> Parts:
    """The next observations [N, ...]: `parts`, with the final observations of ended episodes in place."""
    result = {name: array.copy() for name, array in parts.items()}
    for copy, last_parts in last.items():
        for name, array in last_parts.items():
            result[name][copy] = array
    return result
