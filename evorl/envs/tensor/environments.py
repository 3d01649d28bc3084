"""A population in one simulator: agent p owns slice p of its copies, and nothing leaves its device.

Axes: P agents, E environments of each agent; the first P * E of a simulator's N copies are used.

- With a reset within the step, the simulator's last observation is the next observation of a step that ends an episode.
  Where it gives none, the observation before the step takes its place after a truncation, so that targets bootstrap
  from the value before it, as reward + discount * value of time-outs does elsewhere.
- With a reset in the next step, that step is not a transition.
- The host reads nothing before a generation's end and progress lines, but where episodes ended (`Episodes`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from evorl.config import Environment
from evorl.envs.episodes import Collected, Episodes
from evorl.envs.faults.raising import call_or_user_error
from evorl.envs.spaces import EnvSpec
from evorl.envs.stepped import COUNTED, OBSERVATION_PREFIX, WHERE, SteppedEnvironments, layout
from evorl.envs.tensor.observations import TensorReader, action_converter
from evorl.envs.tensor.simulator import Step
from evorl.envs.tensor.sources import shared_simulator
from evorl.system.devices import is_host
from evorl.system.formats import check_tensors, part_of, with_prefix
from evorl.system.plugins import described
from evorl.system.signals import raise_if_signalled
from evorl.types.batches import Transition
from evorl.types.outcomes import EvorlWarning, UserError
from evorl.types.tensors import Tensors

SIMULATOR = "simulator."
"""Prefix of the simulator's tensors in the state of running episodes."""
SEEDS = 2**31
"""Seeds of copies are below this."""


class TensorEnvironments(SteppedEnvironments):
    """The copies of one simulator as the environments of P agents. Several of them share a simulator in turn."""

    def __init__(self, settings: Environment, agents: int, num_envs: int, device: torch.device | str) -> None:
        """Raises UserError for an environment that cannot be made or used."""
        self.agents, self.num_envs, self.device = agents, num_envs, torch.device(device)
        self._id, self._copies = settings.id, agents * num_envs
        self._shared = shared_simulator(settings, self._copies, self.device)
        simulator = self._shared.simulator
        self._reader = TensorReader(settings, simulator.observation_space)
        self._converted = action_converter(simulator.action_space, self.device)
        spaces = simulator.action_space, simulator.observation_space
        self.interface = EnvSpec(settings.id, self._reader.parts, spaces[0], False, spaces[1])
        self.always_valid = simulator.in_step
        self._episodes = Episodes(agents, num_envs, self.device, int(not simulator.in_step))
        self._may_be_endless = simulator.limit is None
        self._begin_counting()

    def _begin_counting(self) -> None:
        shape, device = (self.agents, self.num_envs), self.device
        self._steps = torch.zeros(self.agents, dtype=torch.int64, device=device)
        self._cut_without_last = torch.zeros((), dtype=torch.int64, device=device)
        """Episodes that were truncated without a last observation."""
        self._nowhere = torch.zeros(shape, dtype=torch.bool, device=device)
        self._everywhere = torch.ones(shape, dtype=torch.bool, device=device)
        self._resetting = self._nowhere
        self._info: dict[str, Tensor] = {}

    @property
    def picture(self) -> Any:
        """A picture of the first copy, or None if the simulator draws none. Raises UserError if that fails."""
        try:
            return self._shared.simulator.picture()
        except Exception as error:  # MuJoCo raises errors of its own where it finds no OpenGL.
            raise UserError(f"environment.id: a picture of {self._id} raised {described(error)}") from error

    @property
    def frames_per_second(self) -> int:
        """The frame rate of the simulator's pictures."""
        return self._shared.simulator.frames_per_second

    def reset(self, seed: int | Sequence[int]) -> None:
        simulator = self._shared.used_by(self, anew=True)
        if isinstance(seed, int):
            seeds = [(seed + copy) % SEEDS for copy in range(self._copies)]
        else:
            seeds = [number % SEEDS for number in seed] * self.agents
        surplus = seeds[-1:] * (simulator.copies - self._copies)
        observation = call_or_user_error(f"a reset of {self._id}", simulator.reset, [*seeds, *surplus])
        self.observation = self._parts(observation)
        self._episodes.restart()
        self._resetting, self._started, self._has_begun = self._nowhere, self._everywhere, True

    def step(self, action: Tensor) -> Transition:
        simulator = self._shared.used_by(self, anew=False)
        actions = self._converted(action.to(self.device).flatten(0, 1))
        if simulator.copies > self._copies:
            idle = actions[-1:].expand(simulator.copies - self._copies, *actions.shape[1:])
            actions = torch.cat((actions, idle))
        step: Step = call_or_user_error(f"a step of {self._id}", simulator.step, actions)
        reward = self._mine(step.reward).float()
        self._reader.note("a reward", reward)
        terminated, truncated = self._mine(step.terminated), self._mine(step.truncated)
        ended = terminated | truncated
        truncated = truncated & ~terminated
        seen = self._parts(step.observation)
        valid = self._everywhere if simulator.in_step else ~self._resetting
        # Of any other shape, it reports something else than a number of each copy.
        reports = {name: value for name, value in step.info.items() if value.shape == (simulator.copies,)}
        self._info = {name: self._mine(value) for name, value in reports.items()}
        transition = Transition(
            observation=self.observation,
            started=self._started,
            reward=reward,
            next_observation=self._last(step, seen, truncated) if simulator.in_step else seen,
            terminated=terminated,
            truncated=truncated,
            valid=valid,
            all_valid=simulator.in_step,
            # Reading a flag takes no time on a CPU; a GPU would wait for it, and computes values instead.
            any_truncated=not is_host(self.device) or bool(truncated.any()),
        )
        # A copy: what a training loop does to its rewards must not change the returns.
        self._episodes.step(reward.double(), ended)
        self._steps += valid.sum(1)
        self._started = ended if simulator.in_step else self._resetting
        if not simulator.in_step:
            self._resetting = ended
        self.observation = seen
        return transition

    def _last(self, step: Step, seen: Tensors, truncated: Tensor) -> Tensors:
        """The result of the action in every environment."""
        if step.last is not None:
            return self._parts(step.last)
        self._cut_without_last += truncated.sum()
        return {
            name: torch.where(truncated.view(*truncated.shape, *[1] * (value.dim() - 2)), self.observation[name], value)
            for name, value in seen.items()
        }

    def _mine(self, value: Tensor) -> Tensor:
        """A tensor [N, ...] of the simulator as [P, E, ...]."""
        return value[: self._copies].view(self.agents, self.num_envs, *value.shape[1:])

    def _parts(self, observation: Any) -> Tensors:
        return {name: self._mine(value) for name, value in self._reader.read(observation).items()}

    def try_step(self) -> None:
        super().try_step()
        self.check()

    def check(self) -> None:
        self._reader.check()

    def reports(self, names: Sequence[str], chosen: Tensor) -> Tensor:
        for name in names:
            if name not in self._info:
                listed = ", ".join(sorted(self._info)) or "nothing"
                raise UserError(f"evolution.fitness: {self._id} reports no number under {name!r}; it reports {listed}")
            self._reader.note(f"info {name!r}", self._info[name].double().where(chosen, 0.0))
        return torch.stack([self._info[name].double() for name in names])

    def pop_collected(self) -> Collected:
        raise_if_signalled()
        self.check()
        if int(self._cut_without_last):
            self._cut_without_last.zero_()
            warnings.warn(
                f"environment.id: {self._id} gives no final observations, so targets of truncated steps bootstrap from "
                "the observation before the step; give them as info['final_obs'] where an episode ends",
                EvorlWarning,
                stacklevel=2,
            )
        steps, self._steps = self._steps, torch.zeros_like(self._steps)
        return Collected(steps.double().cpu().numpy(), *self._episodes.pop())

    @property
    def can_continue(self) -> bool:
        return self._shared.simulator.can_save

    def state_dict(self) -> Tensors:
        if not (self.can_continue and self._has_begun):
            return {}
        self.check()  # What the reader has noted is not saved.
        simulator = self._shared.used_by(self, anew=False)
        return with_prefix(SIMULATOR, simulator.state_dict()) | self._counted()

    def _counted(self) -> Tensors:
        """The part of the state outside the simulator: episodes, observations and flags."""
        more = {"started": self._started, "resetting": self._resetting, "steps": self._steps}
        seen = with_prefix(OBSERVATION_PREFIX, dict(self.observation))
        return with_prefix(COUNTED, self._episodes.state_dict()) | seen | more

    def load_state_dict(self, state: Tensors, seed: int) -> str:
        self.reset(seed)
        if not self.can_continue:
            return "any environment"
        counted = {name: value for name, value in state.items() if not name.startswith(SIMULATOR)}
        expected = {name: layout(name, value, counted) for name, value in self._counted().items()}
        check_tensors(counted, expected, WHERE)
        self._shared.simulator.load_state_dict(part_of(SIMULATOR, state))
        counted = {name: value.to(self.device) for name, value in counted.items()}
        self._episodes.load_state_dict(part_of(COUNTED, counted))
        self.observation = part_of(OBSERVATION_PREFIX, counted)
        self._started, self._resetting, self._steps = (counted[name] for name in ("started", "resetting", "steps"))
        return ""

    def close(self) -> None:
        """Do nothing: the simulator stays open for its other users until the process ends."""
