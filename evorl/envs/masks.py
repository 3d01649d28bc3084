"""Action masks from `info["action_mask"]`. Axes: N environment copies, A actions of all choices concatenated."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from evorl.envs.spec import choices
from evorl.types import UserError

MASK = "action_mask"
"""Key of the mask in the info, and name of the observation part that stores it."""


class ActionMasks:
    """Reads the action masks of N environment copies, `num_envs` copies per agent.

    A copy without a mask at a step allows every action.
    """

    def __init__(self, id: str, space: gym.Space[Any], copies: int, num_envs: int) -> None:
        self._id = id
        self._copies = copies
        self._num_envs = num_envs
        self._sizes = choices(space)

    def read(self, info: dict[str, Any]) -> NDArray[np.bool_]:
        """Return the mask of allowed actions [N, A]. Raises UserError for a wrong size, or if no action is allowed."""
        copies, actions = self._copies, sum(self._sizes)
        mask = np.array(info.get(MASK, np.ones((copies, 1))), dtype=bool).reshape(copies, -1)
        given = info.get(f"_{MASK}", np.ones(copies, dtype=bool)) if MASK in info else np.zeros(copies, dtype=bool)
        mask = np.broadcast_to(mask, (copies, actions)) if mask.shape[1] == 1 else mask
        mask = mask | ~given[:, None]
        if mask.shape[1] != actions:
            raise UserError(
                f"environment.id: {self._id} gives masks of {mask.shape[1]} actions; its space has {actions}"
            )
        allowed = np.logical_or.reduceat(mask, np.cumsum([0, *self._sizes[:-1]]), axis=1).all(1)
        if not allowed.all():
            agent, place = divmod(int(np.flatnonzero(~allowed)[0]), self._num_envs)
            raise UserError(
                f"environment.id: {self._id} forbids every action in environment {place} of agent {agent} "
                "(info['action_mask'] is all zero); at least one must be allowed"
            )
        return np.asarray(mask)

    def last(self, info: dict[str, Any], copy: int) -> NDArray[np.bool_]:
        """Return the mask [A] of one copy's final observation, or a scalar True if all actions are allowed."""
        final = info["final_info"]
        given = MASK in final and final[f"_{MASK}"][copy]
        return np.asarray(final[MASK][copy] if given else True, dtype=bool)


def refuse_late_masks(info: dict[str, Any], id: str) -> None:
    """Raise UserError if an environment that gave no mask in `reset` gives one in `step`."""
    if MASK in info or MASK in info.get("final_info", ()):
        raise UserError(
            f"environment.id: {id} gives info['{MASK}'] in `step` but not in `reset`; it must give "
            "it in both, or an episode's first action is chosen without it"
        )
