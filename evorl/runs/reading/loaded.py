"""Loading a trained agent for inference without its training environment. Axes: B batch of observations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from evorl.algorithms import Algorithm, make_algorithm
from evorl.config import AnyConfig, validate
from evorl.envs.json_spaces import interface_from_json
from evorl.envs.reading import ObservationReader, action_reader, flat_mask
from evorl.envs.spaces import MASK, EnvSpec, allows_each_choice, choices, parts_of
from evorl.population import Policy, check_agents
from evorl.runs.reading.hub import local_run, warn_of_excluded
from evorl.runs.storage.checkpoint_files import AGENTS, ELITE, Checkpoints
from evorl.runs.storage.directory import INTERFACE, from_here, load_elite, saved_settings
from evorl.runs.storage.trust import refuse_code
from evorl.seeding import torch_generator
from evorl.system.files import CHECKPOINTS, file_errors, read_json
from evorl.types.agents import Agent
from evorl.types.messages import on_one_line, shown
from evorl.types.outcomes import UserError

State = NDArray[np.float32] | None
Action = Any
"""One action in the environment's format, or an array [B, ...] of them."""


class LoadedAgent:
    """A trained agent of a run, ready for inference.

    `config` is the run's configuration; `agent` is the agent's record: its id, parent, architectures, hyperparameters
    and weights. `observation_space` and `action_space` are those it was trained on. `predict` has the signature that
    Stable-Baselines3's `evaluate_policy` expects.
    """

    def __init__(
        self,
        agent: Agent,
        config: AnyConfig,
        algorithm: Algorithm,
        reader: ObservationReader,
        seed: int = 0,
        run: str | Path = "",
    ) -> None:
        interface = algorithm.interface
        self.agent = agent
        self.config = config
        self.algorithm = algorithm
        self.observation_space = interface.observation
        self.action_space = interface.action
        self._mask_size = interface.mask_size
        self.reader = reader
        self._read_actions = action_reader(interface.action, 1)
        generator = torch_generator(seed, generation=0, rank=0, purpose="prediction")
        self._policy = Policy([agent], algorithm, generator)
        self._run = run

    def __repr__(self) -> str:
        where = f" of {from_here(self._run)}" if self._run else ""
        return f"<LoadedAgent {self.agent.id}{where}: {self.config.algorithm.name} on {self.config.environment.id}>"

    def predict(
        self,
        observation: Any,
        state: State = None,
        *,
        deterministic: bool = True,
        episode_start: ArrayLike | None = None,
        action_mask: ArrayLike | None = None,
    ) -> tuple[Action, State]:
        """The action for one observation, or actions [B, ...] for a batch, and the next recurrent state.

        `state` is the one that the previous call returned, or None at the start of episodes; it is always None for
        feed-forward agents, unless their exploration noise persists across steps. `episode_start` [B] marks the
        entries at which a new episode starts. `action_mask` [A] or [B, A] is 1 for valid actions; agents that were
        trained with masks need one. That of one observation may also be a tuple with an array for each choice. Entries
        of a dictionary that only critics read may be left out. Raises UserError for observations outside the agent's
        space, and for other arguments that do not fit them.
        """
        space = self.observation_space
        is_pair = isinstance(observation, tuple) and len(observation) == 2
        if is_pair and isinstance(observation[1], Mapping) and not isinstance(space, gym.spaces.Tuple):
            raise UserError("observation: is the tuple that `env.reset()` returns; give its first part alone")
        try:
            present = self._present_space(observation)
            single = any(np.ndim(value) == len(part.shape or ()) for _, value, part in parts_of(present, observation))
            parts = self.reader.within(present).read(observation, 0 if single else None)
            lead = (1, 1) if single else (1,)
            seen = {name: torch.from_numpy(array.reshape(*lead, *array.shape)) for name, array in parts.items()}
            batch = next(iter(seen.values())).shape[1]
            if any(value.shape[1:] != (batch, *self.reader.parts[name].shape) for name, value in seen.items()):
                raise ValueError("another shape")
        except (KeyError, IndexError, TypeError, ValueError) as error:
            reason = f"it has no part {error}" if isinstance(error, KeyError) else error
            message = " ".join(f"observation: is not of the agent's space {space}: {reason}".split())
            raise UserError(on_one_line(message)) from error
        if not batch:
            raise UserError("observation: the batch is empty")
        for name, part in self.reader.parts.items():
            if name not in seen:  # Only critics read it.
                seen[name] = torch.zeros(1, batch, *part.shape, dtype=part.dtype)
        if action_mask is not None and not self._mask_size:
            raise UserError("action_mask: this agent was trained without masks; choose among its actions yourself")
        if self._mask_size:
            seen[MASK] = self._mask(action_mask, batch, single)
        started = np.zeros(batch, dtype=bool) if episode_start is None else np.asarray(episode_start, dtype=bool)
        fresh = self._policy.initial_state(batch)
        before = fresh if state is None else torch.from_numpy(np.asarray(state, np.float32))[None]
        if before.shape != fresh.shape:
            raise UserError(
                f"state: has the shape {list(before.shape[1:])}; for these observations it is {list(fresh.shape[1:])}, "
                "or None at the start of an episode"
            )
        starts = _fitting("episode_start", started, batch)
        output, after = self._policy.act(seen, starts, before, deterministic)
        chosen = output.action[0].numpy(force=True)
        actions = self._read_actions(chosen)
        return actions[0] if single else actions, after[0].numpy(force=True) if after.numel() else None

    def _present_space(self, observation: Any) -> gym.Space[Any]:
        """The observation space without the entries that `observation` lacks and only critics read."""
        space = self.observation_space
        if not isinstance(space, gym.spaces.Dict) or not isinstance(observation, Mapping):
            return space
        read = {name.partition(".")[0] for name in self.algorithm.policy_parts}
        return gym.spaces.Dict({key: inner for key, inner in space.items() if key in read or key in observation})

    def _mask(self, given: Any, batch: int, single: bool) -> torch.Tensor:
        """The action masks [1, B, A] given to `predict`; that of a single observation may have one array per choice.

        Raises UserError for a missing mask, too.
        """
        if given is None:
            raise UserError(
                f"action_mask: this agent was trained with masks; call predict(observation, {MASK}=info['{MASK}']), or "
                f"give {self._mask_size} ones where every action is allowed"
            )
        try:
            mask = flat_mask(given) if single else np.array(given)
        except ValueError as error:
            raise UserError(f"action_mask: {error}") from error
        fitting = _fitting("action_mask", mask.astype(bool), batch, self._mask_size)
        if not allows_each_choice(fitting.numpy(), choices(self.action_space)).all():
            raise UserError("action_mask: forbids every action; at least one must be allowed")
        return fitting


def load(
    run: str | Path,
    *,
    agent: int | None = None,
    generation: int | None = None,
    allow_code: bool = False,
    seed: int = 0,
) -> LoadedAgent:
    """Load an agent of a run: the best so far by default, or one from a checkpoint.

    `run` is a directory, or `hf:OWNER/NAME` for a page that `evorl push` made on the Hugging Face Hub, which has no
    checkpoints. `agent` is the agent's id, `generation` the generation of the checkpoint; `generation` alone selects
    the best agent at that time. `seed` seeds the sampling of stochastic actions. Raises UserError if there is no such
    agent, or if the configuration names custom code to run with which this user has not trained here, and `allow_code`
    is False.
    """
    if not isinstance(seed, int | np.integer) or seed < 0:
        raise UserError(f"seed: {shown(seed)} does not fit; it must be a whole number, at least 0")
    with local_run(run) as path:
        if agent is None and generation is None:
            data, member = load_elite(path)
        else:
            data, member = saved_settings(path), _saved(path, agent, generation)
        config = validate(data)
        warn_of_excluded(run, data, config)
        interface, reader = _interface(path / INTERFACE, config)
        if config.network.factory is not None:
            refuse_code(config, allow_code)
        algorithm = make_algorithm(config, interface)
        check_agents([member], algorithm, str(path))
        return LoadedAgent(member, config, algorithm, reader, seed, run)


def _interface(file: Path, config: AnyConfig) -> tuple[EnvSpec, ObservationReader]:
    """The environment's spec and observation reader from a run's file. Raises UserError."""
    try:
        with file_errors(file):
            data = read_json(file)
    except ValueError as error:
        raise UserError(f"{file}: is not JSON") from error
    return interface_from_json(data, config.environment, str(file))


def _saved(run: Path, agent: int | None, generation: int | None) -> Agent:
    """An agent from the newest checkpoint that contains it, or from that of `generation`. Raises UserError."""
    for name, number in (("agent", agent), ("generation", generation)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int | np.integer)):
            raise UserError(f"{name}: {shown(number)} is not a whole number")
    checkpoints = Checkpoints(run / CHECKPOINTS)
    generations = checkpoints.generations()
    if generation is not None and generation not in generations:
        listed = ", ".join(map(str, generations)) or "none"
        raise UserError(
            f"{run}: has no checkpoint of generation {generation}; its checkpoints are of generations {listed}"
        )
    ids: set[int] = set()
    for number in reversed(generations if generation is None else [generation]):
        agents = {member.id: member for member in checkpoints.agents(number, ELITE if agent is None else AGENTS)}
        if agent is None or agent in agents:
            return next(iter(agents.values())) if agent is None else agents[agent]
        ids |= agents.keys()
    raise UserError(
        f"{run}: no checkpoint holds agent {agent}; they hold agents {', '.join(map(str, sorted(ids))) or 'none'}"
    )


def _fitting(name: str, array: NDArray[np.bool_], *shape: int) -> torch.Tensor:
    """An argument of `predict` as [1, *shape], which fits the observations. Raises UserError for another size."""
    if array.size != math.prod(shape):
        raise UserError(f"{name}: has the shape {list(array.shape)}; for these observations it must be {list(shape)}")
    return torch.from_numpy(array.reshape(1, *shape))
