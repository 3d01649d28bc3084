"""Reset semantics: which steps are transitions, and where episodes end and start. Axes: N environment copies.

- With same-step autoreset (SAME_STEP), a step that ends an episode returns the next episode's first observation; the
  final observation is in its info.
- With next-step autoreset (NEXT_STEP), the extra step spent on the reset is not a transition.
- If a lost life is a termination for learning, the game continues, and the step that presses FIRE is not a transition.
- A step in which an environment raised is not a transition, and a new episode has started.
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
    """Episode boundaries of one step of all copies [N].

    `valid` marks real transitions, `ended` terminated or truncated ones, `over` the end of the environment's own
    episode (not a lost life), `dropped` episodes cut off by an error (None if there are none), and `started` that the
    observation after the step is the first of an episode.
    """

    terminated: Flags
    truncated: Flags
    ended: Flags
    valid: Flags
    over: Flags
    dropped: Flags | None
    started: Flags


class Resets:
    """Reset state of N copies between steps: which wait for a reset, and which for FIRE."""

    def __init__(
        self, settings: Environment, vector: VectorEnv[Any, Any, Any], copies: int, *, whole_games: bool
    ) -> None:
        """Determine the autoreset mode of `vector`. With `whole_games` a lost life ends nothing, but FIRE follows it.

        Raises UserError if the vector environment has autoreset disabled.
        """
        # All Atari environments share one `metadata`, which holds the mode of the one made last.
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
        """Clear the state after a reset of all copies that returned `info`."""
        self._resetting = self._serving = self._nowhere
        if self.serving_action is not None:
            self._lives_left = np.array(info["lives"])

    def state(self) -> dict[str, Any]:
        """Return the state for a resume, as arrays [N] by name."""
        return {"resetting": self._resetting, "serving": self._serving, "lives": self._lives_left.astype(np.int64)}

    def go_on(self, state: Mapping[str, Any], anew: Flags) -> None:
        """Load the output of `state`, except for copies that start a new episode (`anew` [N])."""
        self._resetting, self._serving = (state[name] & ~anew for name in ("resetting", "serving"))
        self._lives_left = np.where(anew, 0, state["lives"])

    def serve(self, actions: NDArray[Any]) -> None:
        """Overwrite the actions [N, ...] of copies that wait for FIRE, in place."""
        if self.serving_action is not None:
            actions[self._serving] = self.serving_action

    def step(self, terminated: Any, truncated: Any, faulty: Flags | None, info: dict[str, Any]) -> Ends:
        """Return the episode boundaries of a step; `faulty` marks errors in the step, or in the reset after it.

        An episode that is both terminated and truncated counts as terminated.
        """
        # Copied because vector environments may reuse the returned arrays.
        terminated, truncated = np.array(terminated, dtype=bool), np.array(truncated, dtype=bool)
        ended = terminated | truncated
        truncated &= ~terminated
        # If the error occurred in the reset after an episode's end, the step before it is still a transition.
        dropped = None if faulty is None else faulty & ~ended
        idle = self._resetting | self._serving if self._lives else self._resetting
        # If a lost life is a termination for learning, the game goes on until the last life is lost.
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
