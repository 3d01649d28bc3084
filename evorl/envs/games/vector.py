"""Two-player games as vector environments of the learner's seat.

Axes: N copies of a game, A actions of all choices concatenated.

A game is turn-based (PettingZoo's AEC interface, OpenSpiel) or simultaneous (PettingZoo's parallel interface).
`GameVector` makes the learner's move in each copy, then asks `opponents` for moves in all copies where the other seat
is to move, until it is the learner's turn in each copy or a new episode has begun. So a transition spans two of the
learner's turns: its reward is the sum of its seat's rewards until its next turn, in the first also of those before it,
and the last observation is the learner's, whichever seat made the final move. After `play_both_seats` every move is the
learner's, and the next observation is the other seat's.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from evorl.config import Environment
from evorl.envs.continuation import another_seed
from evorl.envs.faults.checks import check_observation
from evorl.envs.faults.closing import close_in_time
from evorl.envs.games import make_game
from evorl.envs.games.game import Game, Turn, result_of
from evorl.envs.games.players import MoveRequest, Opponents, RandomPlayers, game_move, move_request, reseed
from evorl.envs.spaces import MASK, choices
from evorl.types.outcomes import UserError
from evorl.types.tensors import Flags

RESULT = "result"
"""Info key of an episode's result so far: 1 for the seat that got more, 0 for the other, 0.5 if equal."""
ROUNDING = 1e-6
"""The tolerance for the sum of the rewards of a zero-sum episode."""
MAX_EMPTY = 1_000
"""Episodes of each copy that may end before the learner's first turn, in one step or reset of all copies."""


class GameVector(VectorEnv[Any, Any, Any]):
    """N copies of a game, each from one seat, with same-step autoreset.

    `seats` [N] are the learner's. The first episode after a reset with seed s has it in seat s % 2, and seats alternate
    from episode to episode. `opponents` move for the other seat, at random until others are set. After
    `play_both_seats`, `seats` are those that are to move, and there are no opponents.
    """

    def __init__(self, settings: Environment, copies: int) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.num_envs = copies
        self._id = settings.id
        self.games: list[Game] = []
        try:
            for _ in range(copies):
                self.games.append(make_game(settings))
            self.single_observation_space, self.single_action_space = self.games[0].spaces()
        except BaseException:
            self.close()
            raise
        self.observation_space = batch_space(self.single_observation_space, copies)
        self.action_space = batch_space(self.single_action_space, copies)
        self.seats = np.zeros(copies, dtype=np.int64)
        self._seeds = [np.random.default_rng(copy) for copy in range(copies)]
        self.opponents: Opponents = RandomPlayers(self.single_action_space)
        self.whole_games = False
        """True to count episodes that end before the learner's first turn: they take one step, whose action is ignored.
        Otherwise they are skipped, since nothing can be learned from them."""
        self._is_checked = self._is_masked = False
        self._has_moved = np.zeros((2, copies), dtype=bool)
        """The copies in which the learner, and the other seat, have moved in the running episode."""
        self._ended: dict[int, tuple[Turn, float]] = {}
        """The learner's last turn, and the result, in the copies whose episode has ended in this step."""
        self._plays_both = False
        self._gains = np.zeros(copies)
        """With both seats, what the seat that moved last gained by that move."""

    def play_both_seats(self) -> None:
        """Let the learner move in both seats. Raises UserError for a game of imperfect information, as far as known."""
        if self.games[0].hides:
            raise self._unfit("perfect information, since values of one seat are learned from those of the other")
        self._plays_both = True

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in every copy: copy i with `seed` + i, or with seeds [N]."""
        first = [(seed or 0) + copy for copy in range(self.num_envs)] if not isinstance(seed, Sequence) else list(seed)
        self._seeds = [np.random.default_rng(first_seed) for first_seed in first]
        reseed(self.opponents, [another_seed(first_seed) for first_seed in first])
        # `_begin` takes the other seat.
        self.seats = np.array([1 - first_seed % 2 for first_seed in first], dtype=np.int64)
        for copy, first_seed in enumerate(first):
            self._begin(copy, first_seed % 2**31)
        self._advance()
        return self._shown()

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Move with the learner, then with the other seat until the learner is to move again."""
        self._ended = {}
        rewards = self._step_both_seats(actions) if self._plays_both else self._step_own_seat(actions)
        ended = np.zeros(self.num_envs, dtype=bool)
        ended[list(self._ended)] = True
        terminated, truncated = ended.copy(), np.zeros(self.num_envs, dtype=bool)
        for copy, (turn, _) in self._ended.items():
            terminated[copy], truncated[copy] = turn.terminated, turn.truncated
        observation, info = self._shown()
        # Evaluation may cut an episode off, and then counts who is ahead.
        results = np.array([self._result(copy) for copy in range(self.num_envs)])
        info |= {RESULT: results, f"_{RESULT}": np.ones(self.num_envs, dtype=bool)}
        if ended.any():
            info |= self._last(ended)
        return observation, rewards, terminated, truncated, info

    def _step_own_seat(self, actions: Any) -> NDArray[np.float64]:
        """Move with the learner, then with the other seat until the learner is to move again; the rewards [N]."""
        both = [copy for copy, game in enumerate(self.games) if len(game.acting) == 2]
        replies = dict(zip(both, self._ask(both), strict=True))
        before = np.zeros(self.num_envs)
        for copy in range(self.num_envs):
            seat = int(self.seats[copy])
            if not self._has_moved[0, copy] and seat in self.games[copy].acting:
                before[copy] = self._turn(copy).reward
            moves = {seat: game_move(self.single_action_space, actions[copy])}
            if copy in replies:
                moves[1 - seat] = game_move(self.single_action_space, replies[copy])
            self._has_moved[0, copy] = True
            if seat in self.games[copy].acting:
                self.games[copy].step(moves)
        self._advance()
        turns = [self._ended[copy][0] if copy in self._ended else self._turn(copy) for copy in range(self.num_envs)]
        return before + [turn.reward for turn in turns]

    def _step_both_seats(self, actions: Any) -> NDArray[np.float64]:
        """Move with the seat that is to move in each copy; what each of these gained by its move [N].

        Raises UserError for a game whose seats do not move in turn, or that is not zero-sum.
        """
        rewards = np.zeros(self.num_envs)
        for copy in range(self.num_envs):
            mover = int(self.seats[copy])
            game = self.games[copy]
            game.step({mover: game_move(self.single_action_space, actions[copy])})
            if game.acting not in ((), (1 - mover,)):
                raise self._unfit("seats that move in turn")
            other = game.seen.get(1 - mover)
            if other is None or not (game.acting or other.over):
                raise self._no_last_turn()
            # A turn's reward covers two moves: that seat's own last one, and the reply to it, which was made just now.
            rewards[copy] = self._gains[copy] = self._gains[copy] - other.reward
            if game.acting:
                self.seats[copy] = 1 - mover
                continue
            if abs(sum(game.totals)) > ROUNDING:
                gave = " and ".join(f"{total:g}" for total in game.totals)
                raise self._unfit(f"a zero-sum game, and an episode gave {gave}")
            # Copied, since the next episode may overwrite what the game has given.
            self._ended[copy] = deepcopy(other), self._result(copy)
            self._begin(copy)
        return rewards

    def _unfit(self, wanted: str) -> UserError:
        return UserError(f"league.learn_from: both does not fit {self._id}, since it needs {wanted}; use own")

    def close(self, **kwargs: Any) -> None:
        for game in self.games:
            close_in_time(game.close, self._id)

    def _turn(self, copy: int) -> Turn:
        return self.games[copy].seen[int(self.seats[copy])]

    def _begin(self, copy: int, seed: int | None = None) -> None:
        """Begin an episode, with the learner in the other seat."""
        self.seats[copy] = 1 - self.seats[copy]
        game = self.games[copy]
        game.reset(int(self._seeds[copy].integers(2**31)) if seed is None else seed)
        self._has_moved[:, copy] = False
        if self._plays_both:
            if len(game.acting) != 1:
                raise self._unfit("seats that move in turn")
            self.seats[copy], self._gains[copy] = game.acting[0], 0.0
        if not self._is_checked:
            (_seat, turn), *_ = game.seen.items()
            check_observation(
                turn.observation, self.single_observation_space, f"environment.id: the reset of {self._id} returns"
            )
            self._is_checked, self._is_masked = True, turn.mask is not None

    def _advance(self) -> None:
        """Go on in all copies until the learner is to move, beginning new episodes where one has ended."""
        waiting, empty = list(range(self.num_envs)), 0
        while waiting:
            for copy in waiting:
                while self._is_over(copy) and (self._has_moved[0, copy] or not self.whole_games):
                    if self._has_moved[0, copy]:
                        self._ended[copy] = deepcopy(self._turn(copy)), self._result(copy)
                    elif (empty := empty + 1) > MAX_EMPTY * self.num_envs:
                        raise UserError(f"environment.id: {self._id} ends before one of its seats has ever moved")
                    self._begin(copy)
            waiting = [
                copy for copy in waiting if self.seats[copy] not in self.games[copy].acting and not self._is_over(copy)
            ]
            for copy, reply in zip(waiting, self._ask(waiting), strict=True):
                self.games[copy].step({1 - int(self.seats[copy]): game_move(self.single_action_space, reply)})

    def _is_over(self, copy: int) -> bool:
        game, seat = self.games[copy], int(self.seats[copy])
        over = seat in game.seen and game.seen[seat].over
        if not over and not game.acting:
            raise self._no_last_turn()
        return over

    def _no_last_turn(self) -> UserError:
        return UserError(
            f"environment.id: {self._id} ended without a last turn for each of its seats; an agent that is done stays "
            "in `agents` until its last turn, with terminations or truncations set"
        )

    def _result(self, copy: int) -> float:
        totals, seat = self.games[copy].totals, int(self.seats[copy])
        return result_of(totals[seat], totals[1 - seat])

    def _ask(self, copies: Sequence[int]) -> Any:
        if not copies:
            return []
        turns = [self.games[copy].seen[1 - int(self.seats[copy])] for copy in copies]
        chosen = np.array(copies, dtype=np.intp)
        first = ~self._has_moved[1, chosen]
        self._has_moved[1, chosen] = True
        return self.opponents(self._request(turns, chosen, first))

    def _request(self, turns: Sequence[Turn], copies: NDArray[np.intp], first: Flags) -> MoveRequest:
        """A request for moves in these turns. Raises UserError if only some turns of the game have a mask."""
        if any((turn.mask is None) == self._is_masked for turn in turns if not turn.over):
            given = "one" if self._is_masked else "none"
            raise UserError(
                f"environment.id: {self._id} gives an action mask in some turns, but {given} in its first; it must "
                "give one in each, or in none"
            )
        spaces = self.single_observation_space, self.single_action_space
        return move_request(spaces, self._is_masked, turns, copies, first)

    def _shown(self) -> tuple[Any, dict[str, Any]]:
        """The learner's observations [N, ...], and the info with its masks."""
        turns = [self._turn(copy) for copy in range(self.num_envs)]
        shown = self._request(turns, np.arange(self.num_envs), ~self._has_moved[0])
        info = {} if shown.mask is None else {MASK: shown.mask, f"_{MASK}": np.ones(self.num_envs, dtype=bool)}
        return shown.observation, info

    def _last(self, ended: Flags) -> dict[str, Any]:
        """The info entries of the episodes that `ended` [N] in this step."""
        observations = np.full(self.num_envs, None, dtype=object)
        results = np.zeros(self.num_envs)
        final: dict[str, Any] = {RESULT: results, f"_{RESULT}": ended}
        if self._is_masked:
            # At the end of a game PettingZoo's mask is all zero and allows no choice, so such a turn has no mask.
            has_mask = np.zeros(self.num_envs, dtype=bool)
            final |= {MASK: np.ones((self.num_envs, sum(choices(self.single_action_space))), dtype=bool)}
            final[f"_{MASK}"] = has_mask
        for copy, (turn, result) in self._ended.items():
            observations[copy], results[copy] = turn.observation, result
            if self._is_masked and turn.mask is not None and turn.mask.any():
                final[MASK][copy], has_mask[copy] = turn.mask, True
        return {"final_obs": observations, "_final_obs": ended, "final_info": final, "_final_info": ended}
