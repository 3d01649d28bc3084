"""A simulator of N copies of one environment on one device, and its users. Axes: N copies."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import gymnasium as gym
import torch
from torch import Tensor

from evorl.system.closing import Closeable
from evorl.types.tensors import Tensors


class Step(NamedTuple):
    """A step of all copies. Observations are tensors [N, ...], nested as the observation space is.

    `last` is the result of the action in every copy, also where a reset followed within the step; None where the
    simulator did not say. `info` has numbers [N] of the result of the action, by name.
    """

    observation: Any
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    last: Any | None
    info: Mapping[str, Tensor]


class Simulator(Closeable):
    """N copies of one environment whose states, observations and rewards are tensors on `device`."""

    observation_space: gym.Space[Any]
    """Of one copy."""
    action_space: gym.Space[Any]
    """Of one copy."""
    copies: int
    device: torch.device
    in_step: bool = True
    """True if a step that ends an episode resets the copy; else the next step does, whatever its action."""
    limit: int | None = None
    """The most steps of an episode; None if there is no known limit."""
    running: Any = None
    """The state of all copies, where it is a value that can be set again to go on from it, else None."""
    can_save: bool = False
    """True if episodes go on in another process from `state_dict`."""
    frames_per_second: int = 30

    @abstractmethod
    def reset(self, seeds: Sequence[int]) -> Any:
        """Begin an episode in every copy, with seeds [N] where copies have their own; return the observations."""

    @abstractmethod
    def step(self, action: Tensor) -> Step:
        """Step all copies with actions [N, ...] of the action space."""

    def state_dict(self) -> Tensors:
        """The state of all copies."""
        raise NotImplementedError

    def load_state_dict(self, state: Tensors) -> None:
        """Load the output of `state_dict` after a reset. Raises UserError for one that does not fit."""
        raise NotImplementedError

    def picture(self) -> Any:
        """A picture [rows, columns, 3] of the first copy, of bytes, or None if the simulator draws none."""
        return None


class SharedSimulator:
    """A simulator that several users step in turn."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self._user: object = None
        self._running = WeakKeyDictionary[object, Any]()
        """The state of all copies as each user left it; None if its episodes cannot go on."""

    def used_by(self, user: object, *, anew: bool) -> Simulator:
        """The simulator as `user` left it, or as it is if that user is about to begin episodes `anew`.

        Raises RuntimeError if another user has ended the episodes of this one.
        """
        if self._user is not user:
            if self._user is not None:
                self._running[self._user] = self.simulator.running
            self._user = user
            if not anew:
                running = self._running.get(user)
                if running is None:
                    raise RuntimeError("these episodes were ended by another use of the simulator: reset first")
                self.simulator.running = running
        return self.simulator
