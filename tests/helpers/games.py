"""Small two-player games by PettingZoo's interfaces, without PettingZoo."""

from typing import ClassVar

import gymnasium as gym
import numpy as np


class Seats:
    """What all games here share."""

    possible_agents: ClassVar = ["first", "second"]
    observed = gym.spaces.Box(-1.0, 8.0, (4,))
    acts = gym.spaces.Discrete(3)

    def observation_space(self, name):
        return self.observed

    def action_space(self, name):
        return self.acts

    def close(self):
        pass


class ThreeMoves(Seats):
    """The first seat plays a, the second replies b, and the first plays c, which may not be a.

    The reply (a + 1) % 3 wins at once. Else c = b wins, and anything else is a draw. Each move gives the other seat
    0.25 beside. The observation is [moves made, a, b, seat], with -1 for what has not been played.
    """

    observed = gym.spaces.Dict(
        observation=gym.spaces.Box(-1.0, 8.0, (4,)), action_mask=gym.spaces.Box(0, 1, (3,), np.int8)
    )

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        self.moves, self.done = [], False
        self.agent_selection = "first"
        self.gained = dict.fromkeys(self.agents, 0.0)

    def last(self):
        name = self.agent_selection
        seat = self.possible_agents.index(name)
        played = [*self.moves, -1, -1][:2]
        mask = np.array([not (len(self.moves) == 2 and move == self.moves[0]) for move in range(3)], dtype=np.int8)
        seen = np.array([len(self.moves), *played, seat], dtype=np.float32)
        return {"observation": seen, "action_mask": mask * (not self.done)}, self.gained[name], self.done, False, {}

    def step(self, action):
        name = self.agent_selection
        other = self.possible_agents[1 - self.possible_agents.index(name)]
        self.gained[name] = 0.0
        if self.done:
            self.agents.remove(name)
            self.agent_selection = other
            return
        assert self.last()[0]["action_mask"][action], "an illegal move"
        self.moves.append(action)
        self.gained[other] += 0.25
        won = action == (self.moves[0] + 1) % 3 if len(self.moves) == 2 else False
        won = won or (len(self.moves) == 3 and action == self.moves[1])
        if won:
            self.gained[name] += 1
            self.gained[other] -= 1
        self.done = won or len(self.moves) == 3
        self.agent_selection = other


class Duel(ThreeMoves):
    """`ThreeMoves` as a zero-sum game: what a move gives the other seat, its mover pays."""

    def step(self, action):
        name = self.agent_selection
        paid = 0.0 if self.done else 0.25
        super().step(action)
        self.gained[name] -= paid


class MovesTwice(Duel):
    """`Duel`, in which the first seat moves again at once."""

    def step(self, action):
        super().step(action)
        if len(self.moves) == 1:
            self.agent_selection = "first"


class RockPaperScissors(Seats):
    """One round of rock, paper, scissors by the parallel interface; the observation tells nothing."""

    observed = gym.spaces.Box(0.0, 1.0, (1,))

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        return dict.fromkeys(self.agents, np.ones(1, np.float32)), {key: {} for key in self.agents}

    def step(self, actions):
        gain = (0.0, 1.0, -1.0)[(actions["first"] - actions["second"]) % 3]
        names, self.agents = self.agents, []
        seen = dict.fromkeys(names, np.zeros(1, np.float32))
        over = dict.fromkeys(names, True), dict.fromkeys(names, False)
        return seen, {"first": gain, "second": -gain}, *over, {key: {} for key in names}


class Forever(RockPaperScissors):
    """Rounds without an end."""

    def step(self, actions):
        names = self.agents
        seen, rewards, _, _, infos = super().step(actions)
        self.agents = names
        return seen, rewards, dict.fromkeys(names, False), dict.fromkeys(names, False), infos


class OpponentFirst(Seats):
    """The first seat may end the game before the second has moved: by 2, its resignation."""

    def reset(self, seed=None, options=None):
        self.agents, self.count, self.done = list(self.possible_agents), 0, False
        self.agent_selection, self.gained = "first", dict.fromkeys(self.agents, 0.0)

    def last(self):
        return np.full(4, self.count % 8, np.float32), self.gained[self.agent_selection], self.done, False, {}

    def step(self, action):
        name = self.agent_selection
        other = self.possible_agents[1 - self.possible_agents.index(name)]
        self.agent_selection = other
        if self.done:
            self.agents.remove(name)
            return
        self.count += 1
        self.done = action == 2
        if self.done:
            self.gained = {name: -1.0, other: 1.0}


class Resigned(OpponentFirst):
    """The same with masks that allow the resignation alone, and none at the end."""

    def observation_space(self, name):
        return gym.spaces.Dict(
            {"observation": super().observation_space(name), "action_mask": gym.spaces.MultiBinary(3)}
        )

    def last(self):
        observation, *others = super().last()
        masked = {"observation": observation, "action_mask": np.array([0, 0, 1], np.int8)}
        return observation if self.done else masked, *others


def right_reply(observation, mask):
    """A player of `ThreeMoves` who answers the first move right."""
    return (int(observation[1]) + 1) % 3 if observation[0] == 1 else int(np.flatnonzero(mask)[0])


def cheat(observation, mask):
    """One who plays what is not allowed in the third move."""
    return int(observation[1]) if observation[0] == 2 else 0


class Three(Seats):
    possible_agents: ClassVar = ["first", "second", "third"]


class Unlike(ThreeMoves):
    def action_space(self, name):
        return gym.spaces.Discrete(3 if name == "first" else 4)


class Wrong(ThreeMoves):
    """Its observations are of another shape than its space."""

    def last(self):
        seen, *rest = super().last()
        return seen | {"observation": np.zeros(5, np.float32)}, *rest


class OldLast(ThreeMoves):
    def last(self):
        seen, gained, done, _, info = super().last()
        return seen, gained, done, info


class Bare(RockPaperScissors):
    def reset(self, seed=None, options=None):
        return super().reset(seed)[0]


class Buffered(Duel):
    """All its observations are one array."""

    def reset(self, seed=None, options=None):
        super().reset(seed)
        self.buffer = getattr(self, "buffer", np.zeros(4, np.float32))

    def last(self):
        seen, *rest = super().last()
        self.buffer[:] = seen["observation"]
        return {**seen, "observation": self.buffer}, *rest


class Lame(ThreeMoves):
    """It raises in the third move."""

    def step(self, action):
        if len(self.moves) == 2:
            raise RuntimeError("a leg is broken")
        super().step(action)


class Unfinished(Seats):
    """It lacks what the interface asks for."""

    def reset(self, seed=None):
        pass


class Takes(Seats):
    """Each move takes 1 from the other seat at once. Without an end of its own, by PettingZoo's base class."""

    def reset(self, seed=None, options=None):
        self.agents, self.agent_selection = list(self.possible_agents), "first"
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)

    def last(self):
        return np.zeros(4, np.float32), self._cumulative_rewards[self.agent_selection], False, False, {}

    def step(self, action):
        name = self.agent_selection
        other = self.possible_agents[1 - self.possible_agents.index(name)]
        self._cumulative_rewards[name] = 0.0
        self._cumulative_rewards[name] += 1
        self._cumulative_rewards[other] -= 1
        self.agent_selection = other


def by_category(observation, mask):
    """A user's player that makes the move of the number that it sees."""
    return observation["hand"] if isinstance(observation, dict) else observation
