"""The semantics of resets: what is a transition, where an episode ends, and where the next one begins. Axes: N copies.

- Where the vector environment resets within the step (SAME_STEP), a step that ends an episode shows the next one's
  first observation: the true last one stands in its info.
- Where it spends a step on the reset (NEXT_STEP), that step is no transition.
- Where a lost life ends what is learned from, the game goes on, and the step that presses FIRE is no transition.
- Where an environment raised, that step is no transition either, and another episode has begun.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from evorl.config import Environment
from evorl.envs.vector import serving_action
from evorl.types import UserError

Flags = NDArray[np.bool_]


class Ends(NamedTuple):
    """The truth about one step of all copies [N].

    `valid` is where it was a transition, `ended` where it was terminated or truncated, `over` where the environment's
    own episode ended, which a lost life does not, `dropped` where an error cut the episode off (None for nowhere), and
    `started` where the observation after the step begins another episode.
    """

    terminated: Flags
    truncated: Flags
    ended: Flags
    valid: Flags
    over: Flags
    dropped: Flags | None
    started: Flags


class Resets:
    """The state of N copies between their steps: which wait for a reset, and which for FIRE."""

    def __init__(
        self, settings: Environment, vector: VectorEnv[Any, Any, Any], copies: int, *, whole_games: bool
    ) -> None:
        """Find out how `vector` resets. With `whole_games` a lost life ends nothing, but FIRE follows it.

        Raises UserError where the vector environment never resets by itself.
        """
        # Atari environments share one `metadata`, in which the last one made writes its mode.
        known = vector.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        mode = getattr(vector, "autoreset_mode", known)
        if mode not in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP):
            raise UserError(f"environment.id: {settings.id} never resets by itself (autoreset mode {mode})")
        self.in_step = mode == AutoresetMode.SAME_STEP
        self.serving_action = serving_action(settings, vector) if settings.life_loss_ends else None
        self._lives = settings.life_loss_ends and not whole_games
        self._nowhere = np.zeros(copies, dtype=bool)
        self._resetting = self._serving = self._nowhere
        self._lives_left = np.zeros(copies, dtype=np.int64)

    def restart(self, info: dict[str, Any]) -> None:
        """Begin after a reset of all copies that said `info`."""
        self._resetting = self._serving = self._nowhere
        if self.serving_action is not None:
            self._lives_left = np.array(info["lives"])

    def state(self) -> dict[str, Any]:
        """Return what a process needs to go on, as arrays [N] by name."""
        return {"resetting": self._resetting, "serving": self._serving, "lives": self._lives_left.astype(np.int64)}

    def go_on(self, state: Mapping[str, Any], anew: Flags) -> None:
        """Go on from what `state` gave, but for copies where episodes begin `anew` [N]."""
        self._resetting, self._serving = (state[name] & ~anew for name in ("resetting", "serving"))
        self._lives_left = np.where(anew, 0, state["lives"])

    def serve(self, actions: NDArray[Any]) -> None:
        """Press FIRE in place of the actions [N, ...] of copies that wait for it."""
        if self.serving_action is not None:
            actions[self._serving] = self.serving_action

    def step(self, terminated: Any, truncated: Any, faulty: Flags | None, info: dict[str, Any]) -> Ends:
        """Return the truth about a step; `faulty` says where an environment raised in it, or in the reset after it.

        An episode that is both terminated and truncated is terminated.
        """
        # Copies, because vector environments may reuse the arrays that they return.
        terminated, truncated = np.array(terminated, dtype=bool), np.array(truncated, dtype=bool)
        ended = terminated | truncated
        truncated &= ~terminated
        # Where an error came in the reset after an episode's end, the step before it is still a transition.
        dropped = None if faulty is None else faulty & ~ended
        idle = self._resetting | self._serving if self._lives else self._resetting
        # Where a lost life ends what is learned from, the game goes on until the last one.
        over = (ended & (info["lives"] == 0)) | truncated if self._lives else ended
        if self.serving_action is not None:
            self._serving = (info["lives"] < self._lives_left) & ~over
            self._lives_left = np.array(info["lives"])
        started = over if self.in_step else self._resetting
        if not self.in_step:
            self._resetting = over
        if dropped is not None:
            idle, started = idle | dropped, started | dropped
        return Ends(terminated, truncated, ended, ~idle, over, dropped, started)
