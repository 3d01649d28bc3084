"""OpenSpiel's games of two players (arXiv 1908.09453), directly over its states. Axes: A actions.

The learner's seat is OpenSpiel's player of that number. Its view is OpenSpiel's tensor for it: the information state
(all that the player knows, with perfect recall) where information is imperfect, else the observation. Many tensors are
the same for both players and mark pieces by their owner's number, so the seat is appended to each: a last plane of an
image, or a last number, that is 0 in the first seat and 1 in the second.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from evorl.config import Environment
from evorl.envs.games.game import Spaces, Turn
from evorl.system.extras import require
from evorl.system.plugins import without_place
from evorl.types.messages import nearest
from evorl.types.outcomes import UserError
from evorl.types.tensors import Flags

OPENSPIEL = "openspiel"
SEATS = 2


class OpenSpielGame:
    """A sequential two-player game. Chance events are drawn from a generator that `reset` seeds."""

    def __init__(self, game: Any, id: str) -> None:
        """Raises UserError for a game that evorl cannot play."""
        self.game, self._perfect_recall = game, _has_perfect_recall(game, id)
        shape = game.information_state_tensor_shape() if self._perfect_recall else game.observation_tensor_shape()
        self._shape = (shape[0] + 1, *shape[1:]) if len(shape) == 3 else (int(np.prod(shape)) + 1,)
        self._actions = int(game.num_distinct_actions())
        self._observer = _observer(game, self._perfect_recall)
        self._rng = np.random.default_rng(0)
        self._state: Any = None
        self._paid = [0.0] * SEATS
        self.acting: tuple[int, ...] = ()
        self.seen: dict[int, Turn] = {}
        self.totals = [0.0] * SEATS
        self._type = kind = game.get_type()
        self.hides = kind.information != kind.Information.PERFECT_INFORMATION

    def spaces(self) -> Spaces:
        """A Box of the tensor with the seat, and the actions."""
        seen = gym.spaces.Box(-np.inf, np.inf, self._shape, np.float32)
        return seen, gym.spaces.Discrete(self._actions)

    def text(self, seat: int) -> str | None:
        if not (self.hides or self._perfect_recall):
            return str(self._state)
        # The whole state would show the other player's cards.
        if not self._perfect_recall and self._type.provides_observation_string:
            return str(self._state.observation_string(seat))
        return str(self._state.information_state_string(seat)) if self._type.provides_information_state_string else None

    def reset(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._state = self.game.new_initial_state()
        self.seen, self._paid = {}, [0.0] * SEATS
        self._settle()

    def step(self, actions: Mapping[int, Any]) -> None:
        self._state.apply_action(int(actions[self.acting[0]]))
        self._settle()

    def close(self) -> None:
        self._state = None

    def _settle(self) -> None:
        """Draw chance events, then record the view of the player to move, or of both when the game is over."""
        state = self._state
        while state.is_chance_node():
            state.apply_action(self._drawn(state.chance_outcomes()))
        over = bool(state.is_terminal())
        self.totals = state.returns()
        self.acting = () if over else (state.current_player(),)
        for seat in range(SEATS) if over else self.acting:
            reward = self.totals[seat] - self._paid[seat]
            self._paid[seat] = self.totals[seat]
            self.seen[seat] = Turn(self.view(state, seat), self._legal(over), reward, over, False)

    def _drawn(self, outcomes: list[tuple[int, float]]) -> int:
        actions, probabilities = zip(*outcomes, strict=True)
        return int(self._rng.choice(actions, p=probabilities))

    def view(self, state: Any, seat: int) -> NDArray[np.float32]:
        """The player's tensor in a state of OpenSpiel's, and its seat."""
        self._observer.set_from(state, seat)
        tensor = self._observer.tensor
        view = np.empty(self._shape, dtype=np.float32)
        flat = view.reshape(-1)
        flat[: len(tensor)] = tensor
        flat[len(tensor) :] = seat
        return view

    def _legal(self, over: bool) -> Flags:
        """The mask [A] of the moves that the acting player has; none when the game is over."""
        mask = np.zeros(self._actions, dtype=bool)
        if not over:
            mask[self._state.legal_actions()] = True
        return mask


def make_open_spiel(settings: Environment) -> OpenSpielGame:
    """One copy of the game `openspiel:NAME`; its parameters are `environment.kwargs`.

    Raises UserError for an unknown game, one that evorl cannot play, and parameters that the game does not have.
    """
    name = settings.id.partition(":")[2]
    require(OPENSPIEL, f"environment.id: {settings.id}")
    spiel = importlib.import_module("pyspiel")
    games = {kind.short_name: kind for kind in spiel.registered_games()}
    if name not in games:
        raise UserError(f"environment.id: OpenSpiel has no game {name!r}{nearest(name, sorted(games))}")
    defaults = games[name].parameter_specification
    # OpenSpiel takes no whole number where it wants a fraction.
    parameters = {
        key: float(value) if type(value) is int and isinstance(defaults.get(key), float) else value
        for key, value in settings.kwargs.items()
    }
    try:
        game = spiel.load_game(name, parameters)
    except (spiel.SpielError, TypeError) as error:
        raise UserError(f"environment.kwargs: {settings.id} cannot be made: {without_place(error)}") from error
    return OpenSpielGame(game, settings.id)


def _has_perfect_recall(game: Any, id: str) -> bool:
    """True if a player's view is its information state, not its observation. Raises UserError if the game is unfit."""
    kind, players = game.get_type(), game.num_players()
    begin = f"environment.id: {id}"
    if players != SEATS:
        raise UserError(f"{begin} has {players} players; evorl plays games of two")
    if kind.dynamics != kind.Dynamics.SEQUENTIAL:
        raise UserError(f"{begin} is played by simultaneous moves; evorl plays OpenSpiel's sequential games")
    if kind.chance_mode == kind.ChanceMode.SAMPLED_STOCHASTIC:
        raise UserError(f"{begin} draws its chance events itself, so that a run could not be repeated")
    if not (kind.provides_information_state_tensor or kind.provides_observation_tensor):
        raise UserError(f"{begin} gives neither an information state nor an observation as a tensor")
    imperfect = kind.information == kind.Information.IMPERFECT_INFORMATION
    return bool(kind.provides_information_state_tensor and (imperfect or not kind.provides_observation_tensor))


def _observer(game: Any, perfect_recall: bool) -> Any:
    """OpenSpiel's observer, which fills a buffer of its own: ten times as fast as the states' methods on large ones."""
    spiel = importlib.import_module("pyspiel")
    python = importlib.import_module("open_spiel.python.observation")
    recall = spiel.IIGObservationType(perfect_recall=True) if perfect_recall else None
    return python.make_observation(game, recall)
