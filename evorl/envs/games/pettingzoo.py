"""PettingZoo's two-player games (arXiv 2009.14471), and a user's classes with one of its interfaces.

Axes: A actions of all choices concatenated.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import gymnasium as gym
import numpy as np

from evorl.config import Environment
from evorl.envs.faults.checks import check_spaces
from evorl.envs.games.game import Game, Spaces, Turn
from evorl.envs.spaces import MASK
from evorl.seeding import seed_global_generators
from evorl.system.extras import require
from evorl.system.plugins import import_from_here
from evorl.types.messages import nearest, shown
from evorl.types.outcomes import UserError

PETTINGZOO = "pettingzoo"
FAMILIES = ("classic", "butterfly", "sisl", "atari")
"""PettingZoo's packages of games."""
ENTRIES = ("parallel_env", "raw_env", "env")
"""Names under which a module of PettingZoo has its game, the preferred first. `env` wraps `raw_env` in checks of each
move that halve its speed; masked moves are legal."""
MODES, TEXT = "render_modes", "ansi"
"""The key of a game's metadata that names the ways in which it can be shown, and the one that is text."""
LAST_FIELDS = ("observation", "reward", "termination", "truncation", "info")
STEP_FIELDS = ("observations", "rewards", "terminations", "truncations", "infos")
"""The values that PettingZoo's `last` and parallel `step` return."""


class _Seats:
    """The base class of games with one of PettingZoo's interfaces: the names of their seats, and the newest turns."""

    hides = False  # PettingZoo does not declare whether information is hidden.

    def __init__(self, env: Any, names: Sequence[str], id: str) -> None:
        self.env, self.names, self._id = env, list(names), id
        self.acting: tuple[int, ...] = ()
        self.seen: dict[int, Turn] = {}
        self._received = [0.0, 0.0]
        """The sum of the rewards that each seat has been given in this episode."""

    @property
    def totals(self) -> list[float]:
        return list(self._received)

    def spaces(self) -> Spaces:
        return spaces_of(self.env, self._id)

    def text(self, seat: int) -> str | None:
        modes = (getattr(self.env, "metadata", None) or {}).get(MODES, ())
        # A game that names modes, but not this one, would warn that it cannot be shown.
        if not hasattr(self.env, "render") or (modes and TEXT not in modes):
            return None
        try:
            text = self.env.render()
        except NotImplementedError:  # PettingZoo's base classes have a `render` that raises.
            return None
        return text if isinstance(text, str) else None

    def close(self) -> None:
        self.env.close()

    def _unpacked(self, method: str, result: Any, parts: Sequence[str]) -> tuple[Any, ...]:
        """The result of a method, which must be a tuple of these parts. Raises UserError if it is none."""
        if not isinstance(result, tuple | list) or len(result) != len(parts):
            count = f"{len(result)} values" if isinstance(result, tuple | list) else f"a {type(result).__name__}"
            raise UserError(
                f"environment.id: {method} of {self._id} returns {count}; PettingZoo's interface wants "
                f"({', '.join(parts)})"
            )
        return tuple(result)

    def _note(
        self, name: str, observation: Any, reward: float, terminated: bool, truncated: bool, info: Mapping[str, Any]
    ) -> int:
        """Note what a seat sees; return its number."""
        if name not in self.names:
            raise UserError(f"environment.id: {self._id} lets {shown(name)} move, which is not in possible_agents")
        seat = self.names.index(name)
        mask = info.get(MASK)
        if isinstance(observation, Mapping) and MASK in observation:
            mask = observation[MASK]
            rest = {key: value for key, value in observation.items() if key != MASK}
            observation = next(iter(rest.values())) if len(rest) == 1 else rest
        allowed = None if mask is None else np.asarray(mask, dtype=bool).reshape(-1)
        self.seen[seat] = Turn(observation, allowed, float(reward), bool(terminated), bool(truncated))
        self._received[seat] += float(reward)
        return seat


class TurnBased(_Seats):
    """A game with PettingZoo's AEC interface: one seat moves at a time."""

    @property
    def totals(self) -> list[float]:
        # A waiting seat is given its reward at its next turn; until then PettingZoo's base class keeps it here.
        pending: Mapping[str, float] = getattr(self.env, "_cumulative_rewards", {})
        return [
            received if seat in self.acting else received + float(pending.get(name, 0.0))
            for seat, (name, received) in enumerate(zip(self.names, self._received, strict=True))
        ]

    def reset(self, seed: int) -> None:
        self.seen, self._received = {}, [0.0, 0.0]
        seed_global_generators(seed)
        self.env.reset(seed=seed)
        self._settle()

    def step(self, actions: Mapping[int, Any]) -> None:
        self.env.step(actions[self.acting[0]])
        self._settle()

    def _settle(self) -> None:
        """Record the view of the seat to move, after removing seats whose game is over.

        Raises UserError if one of these stays in the game.
        """
        for _ in range(1 + len(self.names)):
            if not self.env.agents:
                self.acting = ()
                return
            name = self.env.agent_selection
            seat = self._note(name, *self._unpacked("last", self.env.last(), LAST_FIELDS))
            if not self.seen[seat].over:
                self.acting = (seat,)
                return
            self.env.step(None)
        raise UserError(
            f"environment.id: step(None) of {self._id} does not remove an agent whose game is over from `agents`, as "
            "PettingZoo's `_was_dead_step` does"
        )


class Simultaneous(_Seats):
    """A game with PettingZoo's parallel interface: all seats move at once."""

    def reset(self, seed: int) -> None:
        self.seen, self._received = {}, [0.0, 0.0]
        seed_global_generators(seed)
        observations, infos = self._unpacked("reset", self.env.reset(seed=seed), ("observations", "infos"))
        for name in self.env.agents:
            self._note(name, observations[name], 0.0, False, False, infos.get(name, {}))
        self._settle()

    def step(self, actions: Mapping[int, Any]) -> None:
        by_name = {self.names[seat]: action for seat, action in actions.items()}
        result = self._unpacked("step", self.env.step(by_name), STEP_FIELDS)
        observations, rewards, terminated, truncated, infos = result
        for name in by_name:
            self._note(name, observations[name], rewards[name], terminated[name], truncated[name], infos.get(name, {}))
        self._settle()

    def _settle(self) -> None:
        self.acting = tuple(seat for seat, turn in sorted(self.seen.items()) if not turn.over)


def make_pettingzoo(settings: Environment) -> Game:
    """A game by one of PettingZoo's interfaces: one of its own, or a class of the user."""
    module, _, name = settings.id.rpartition(":")
    make = _entry(name) if module == PETTINGZOO else getattr(import_from_here(module), name)
    env = make(**settings.kwargs)
    try:
        seats = getattr(env, "possible_agents", None)
        if not isinstance(seats, list | tuple) or len(seats) != 2:
            count = "names no seats in `possible_agents`" if not seats else f"has {len(seats)} seats"
            raise UserError(f"environment.id: {settings.id} {count}; evorl plays games of two")
        wanted = ("reset", "step", "close", "observation_space", "action_space")
        if lacks := [name for name in wanted if not hasattr(env, name)]:
            raise UserError(f"environment.id: {settings.id} has no {lacks[0]}, which PettingZoo's interface asks for")
        kind = TurnBased if hasattr(env, "last") else Simultaneous
        return kind(env, seats, settings.id)
    except BaseException:
        if hasattr(env, "close"):
            env.close()
        raise


def has_agents(kind: type) -> bool:
    """True for PettingZoo's environments, whose agents take turns or act in parallel."""
    declared = {name for base in kind.__mro__ for name in inspect.get_annotations(base)}
    return any(hasattr(kind, name) or name in declared for name in ("possible_agents", "agent_iter"))


def spaces_of(env: Any, id: str) -> Spaces:
    """The observation space without its mask, and the action space. Raises UserError unless the seats are alike."""
    seats = [(_without_mask(env.observation_space(name)), env.action_space(name)) for name in env.possible_agents]
    if seats[0] != seats[1]:
        raise UserError(
            f"environment.id: the seats of {id} have different spaces; one agent can play only seats that are alike"
        )
    observation, action = seats[0]
    check_spaces(observation, action, id)
    return observation, action


def _without_mask(space: gym.Space[Any]) -> gym.Space[Any]:
    """A seat's observation space without its mask; if only one entry of a Dict is left, that entry's space."""
    if not isinstance(space, gym.spaces.Dict) or MASK not in space.spaces:
        return space
    rest = {name: inner for name, inner in space.spaces.items() if name != MASK}
    return next(iter(rest.values())) if len(rest) == 1 else gym.spaces.Dict(rest)


@cache
def _entry(name: str) -> Callable[..., Any]:
    """PettingZoo's game of this name. Raises UserError if there is none."""
    require("games", f"environment.id: {PETTINGZOO}:{name}")
    # Not imported before it is known to be the one: each family needs packages of its own.
    specs = [spec for family in FAMILIES if (spec := find_spec(f"{PETTINGZOO}.{family}")) is not None]
    families = {
        game.name: spec.name
        for spec in specs
        for game in pkgutil.iter_modules(spec.submodule_search_locations)
        if game.name.rpartition("_v")[2].isdecimal()
    }
    if name not in families:
        raise UserError(f"environment.id: PettingZoo has no game {name!r}{nearest(name, sorted(families))}")
    module = importlib.import_module(f"{families[name]}.{name}")
    made: Callable[..., Any] = next(getattr(module, entry) for entry in ENTRIES if hasattr(module, entry))
    return made
