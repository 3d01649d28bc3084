"""Deep Q-learning (Mnih et al. 2015) with double Q-learning (arXiv 1509.06461) and soft target updates (1509.02971).

Axes: P agents, E environments, B batch, A actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import gymnasium as gym
import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from evorl.config import AlgorithmSettings, Config, Count, Fraction, Positive, Section
from evorl.distributed import Placement
from evorl.losses import REGRESSION_LOSSES
from evorl.networks import NETWORKS, Network
from evorl.networks.stacked import Stack
from evorl.replay.buffer import ReplayBuffer
from evorl.replay.experience import ReplayExperience
from evorl.returns import double_q_value, one_step_return
from evorl.timing import Stopwatch
from evorl.types import Batch, Decision, UserError


class Exploration(Section):
    """Epsilon-greedy: the probability of a random action falls from `start` to `end`."""

    start: Fraction = 1.0
    end: Fraction = 0.1
    decay: Annotated[float, Field(gt=0, le=1)] = 0.9995
    """The factor for each step of each of an agent's environments, over all ranks."""


class DQNSettings(AlgorithmSettings):
    name: Literal["dqn"] = "dqn"
    double: bool = True
    batch_size: Count = 128
    """Transitions in an agent's update, on each rank."""
    learning_rate: Positive = 1e-3
    gamma: Fraction = 0.99
    learn_step: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1
    """Environment steps of an agent for each of its updates, on each rank."""
    tau: Annotated[float, Field(gt=0, le=1)] = 1e-3
    """The share of the way that the target network follows in each update."""
    loss: Literal["mse", "huber"] = "mse"
    max_grad_norm: Positive | None = None
    exploration: Exploration = Exploration()

    hyperparameters: ClassVar[tuple[str, ...]] = (
        "batch_size",
        "learning_rate",
        "gamma",
        "learn_step",
        "tau",
        "max_grad_norm",
    )


class DQN:
    """How a stack of DQN agents acts and what it minimises."""

    def __init__(
        self, config: Config[DQNSettings], observation_space: gym.Space[Any], action_space: gym.Space[Any]
    ) -> None:
        self.config = config
        self.settings = config.algorithm
        if not isinstance(action_space, gym.spaces.Discrete):
            raise UserError(f"algorithm.name: dqn needs discrete actions; {config.environment.id} has {action_space}")
        if not isinstance(observation_space, gym.spaces.Box) or len(observation_space.shape) != 1:
            raise UserError(
                f"algorithm.name: dqn reads vectors of numbers; {config.environment.id} shows {observation_space}"
            )
        self.observation_space = observation_space
        self.actions = int(action_space.n)
        network = NETWORKS[config.network.name](config.network, observation_space.shape[0], self.actions)
        self.widths = observation_space.shape[0], self.actions
        self.networks: Mapping[str, Network] = {"q": network}
        self.losses: Mapping[str, Callable[[Stack, Batch], Tensor]] = {"q": self.q_loss}

    def first_hyperparameters(self) -> dict[str, float]:
        """An agent's hyperparameters as the configuration gives them."""
        values = {name: getattr(self.settings, name) for name in self.settings.hyperparameters}
        return {name: float(value) for name, value in values.items() if value is not None}

    def first_state(self) -> dict[str, float]:
        """What acting moves: the exploration rate."""
        return {"epsilon": self.settings.exploration.start}

    def experience(self, placement: Placement, always_valid: bool, stopwatch: Stopwatch) -> ReplayExperience:
        """This rank's part of the replay, which capacity and start of learning divide over the ranks."""
        ranks, replay, space = placement.ranks, self.config.replay, self.observation_space
        share = max(1, replay.capacity // ranks.size)
        observation = space.shape, torch.uint8 if space.dtype == np.uint8 else torch.float32
        fields = {
            "observation": observation,
            "action": ((), torch.int64),
            "reward": ((), torch.float32),
            "next_observation": observation,
            "terminated": ((), torch.bool),
        }
        return ReplayExperience(
            ReplayBuffer(share, fields, ranks.device),
            learning_starts=min(replay.learning_starts * placement.copies // ranks.size, share * placement.copies),
            gather=placement.gather_copies,
            lockstep=always_valid,
            part=0 if placement.is_sharded else ranks.rank,
            seed=self.config.seed,
            rank=ranks.rank,
            stopwatch=stopwatch,
        )

    def act(self, stack: Stack, observation: Tensor, generator: torch.Generator) -> Decision:
        """Epsilon-greedy actions [P, E] for observations [P, E, ...]."""
        greedy = self.best(stack, observation)["action"]
        explores = torch.rand(greedy.shape, generator=generator, device=greedy.device)
        random = torch.randint(self.actions, greedy.shape, generator=generator, device=greedy.device)
        return {"action": torch.where(explores < stack.state["epsilon"].unsqueeze(1), random, greedy)}

    def best(self, stack: Stack, observation: Tensor) -> Decision:
        """Greedy actions [P, E] for observations [P, E, ...]."""
        return {"action": stack.modules["q"](observation).argmax(-1)}

    def after_acting(self, stack: Stack, steps: int) -> None:
        """Decay exploration by `steps` further environment steps of each agent."""
        exploration = self.settings.exploration
        stack.state["epsilon"].mul_(exploration.decay**steps).clamp_(min=exploration.end)

    def q_loss(self, stack: Stack, batch: Batch) -> Tensor:
        """The temporal-difference loss [P] of a batch."""
        q = stack.modules["q"]
        fields = batch.fields
        with torch.no_grad():
            target_next = q.target(fields["next_observation"])
            if self.settings.double:
                next_value = double_q_value(q(fields["next_observation"]), target_next)
            else:
                next_value = target_next.amax(-1)
            target = one_step_return(fields["reward"], fields["terminated"], stack.hyperparameters["gamma"], next_value)
        chosen = q(fields["observation"]).gather(-1, fields["action"].unsqueeze(-1)).squeeze(-1)
        return (REGRESSION_LOSSES[self.settings.loss](chosen, target) * batch.weight).sum(-1)

    def after_update(self, stack: Stack, due: Tensor) -> None:
        """Let the target networks of the agents that learned follow."""
        stack.modules["q"].follow(stack.hyperparameters["tau"] * due)
