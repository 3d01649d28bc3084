"""The interface of environments to a training loop, however they are made and wherever they are stepped."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from evorl.envs.episodes import Collected, Episodes, Recent
from evorl.envs.games.players import Opponents
from evorl.envs.spaces import MASK, EnvSpec, choices
from evorl.seeding import seed_global_generators
from evorl.system.closing import Closeable
from evorl.types.agents import Agent
from evorl.types.batches import Transition
from evorl.types.outcomes import EvorlWarning
from evorl.types.tensors import Observation, Tensors

OBSERVATION_PREFIX, COUNTED = "observation.", "episodes."
"""Prefixes of tensors in the state of running episodes."""
WHERE = "the running episodes"


class SteppedEnvironments(Closeable):
    """P * E copies of one environment, stepped together. Environment e of agent p is copy p * E + e.

    `observation` is the current observation, each part [P, E, ...]. If `always_valid`, every step is a transition.
    """

    agents: int
    num_envs: int
    device: torch.device
    interface: EnvSpec
    observation: Observation
    always_valid: bool
    _id: str
    _may_be_endless: bool
    _episodes: Episodes
    _started: Tensor
    _has_begun: bool = False
    """True from the first reset on: there are running episodes."""

    @property
    def started(self) -> Tensor:
        """A mask [P, E] of the environments whose current observation is the first of an episode."""
        return self._started.to(self.device)

    def begin(self, seed: int, agents: Sequence[Agent], carry_over: bool) -> None:
        """Start a generation with these agents: with new episodes, or with the running ones if `carry_over`."""
        seed_global_generators(seed)
        self._episodes.hand_over([agent.id for agent in agents])
        if not (carry_over and self._has_begun):
            self._begin_counting()
            self.reset(seed)

    @abstractmethod
    def _begin_counting(self) -> None:
        """Set what is counted of a generation's steps to zero."""

    @abstractmethod
    def reset(self, seed: int | Sequence[int]) -> None:
        """Reset all environments: copy i with `seed` + i, or environment e of every agent with seeds [E]."""

    @abstractmethod
    def step(self, action: Tensor) -> Transition:
        """Step all environments with actions [P, E, ...]."""

    def try_step(self) -> None:
        """Take the first step of episodes, each with an allowed action. Raises UserError if it cannot be used."""
        self.reset(0)
        space = self.interface.action
        whole = (self.agents, self.num_envs, *(space.shape or ()))
        action = torch.zeros(whole, dtype=torch.int64 if choices(space) else torch.float32, device=self.device)
        if self.interface.masked:
            allowed = self.observation[MASK].split(choices(space), dim=-1)
            action = torch.stack([choice.int().argmax(-1) for choice in allowed], dim=-1).reshape(whole)
        self.step(action)

    @abstractmethod
    def reports(self, names: Sequence[str], chosen: Tensor) -> Tensor:
        """The info values `names` of the last step [names, P, E] in the `chosen` environments [P, E].

        If an episode ended in that step, the values are from its final info. Raises UserError if an environment reports
        no number under a name.
        """

    def warn_of_endless(self, steps: int) -> None:
        """Warn once that an episode has taken this many steps, if the environment has no time limit."""
        if self._may_be_endless:
            self._may_be_endless = False
            warnings.warn(
                f"evaluation.max_steps: an episode of evaluation in {self._id} has not ended after {steps:,} steps, "
                "and may never end; set this limit, or give the environment one",
                EvorlWarning,
                stacklevel=3,
            )

    def check(self) -> None:
        """Raise UserError if a number since the last call was not finite, where that is not known at once."""

    @abstractmethod
    def pop_collected(self) -> Collected:
        """The counters since the last call; episodes that started too recently count in a later one."""

    def set_opponents(self, opponents: Opponents) -> None:
        """Let `opponents` move in the other seat of a game, from the next reset on."""
        raise NotImplementedError

    def play_both_seats(self) -> None:
        """Let the agent move in both seats of a game, from the next reset on. Raises UserError if the game is unfit."""
        raise NotImplementedError

    @property
    @abstractmethod
    def can_continue(self) -> bool:
        """True if another process can resume the running episodes of this kind of environment."""

    @abstractmethod
    def state_dict(self) -> Tensors:
        """The state of the running episodes, from which a run resumes; empty if they cannot be resumed."""

    @abstractmethod
    def load_state_dict(self, state: Tensors, seed: int) -> str:
        """Resume the episodes of the output of `state_dict`.

        Return the names of the environments where that failed; these start new episodes from `seed`. Raises UserError
        for a state that does not fit these environments.
        """

    def recent(self) -> Recent | None:
        """Means of the returns and lengths of all episodes that ended since the last call, or None if none did."""
        return self._episodes.recent()


def layout(name: str, here: Tensor, saved: Tensors) -> tuple[tuple[int, ...], torch.dtype]:
    """The expected shape and dtype: that of `here`, but with as many actions or waiting episodes as were saved."""
    shape, axis = list(here.shape), {"actions": 0, f"{COUNTED}waiting": 1}.get(name)
    if axis is not None and name in saved and saved[name].dim() == len(shape):
        shape[axis] = saved[name].shape[axis]
    return tuple(shape), here.dtype
