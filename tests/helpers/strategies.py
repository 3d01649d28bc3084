"""Strategies that choose hyperparameters: one that works, and some that do not."""

from typing import ClassVar

import numpy as np


class Climber:
    """Tries points near the best one so far; a function of its seed and of all that it is told."""

    calls: ClassVar = []

    def __init__(self, ranges, seed):
        self.ranges = ranges
        self.rng = np.random.default_rng(seed)
        self.best, self.point = -np.inf, np.full(len(ranges), 0.5)
        self.calls.append(("made", ranges, seed))

    def ask(self, count):
        points = self.point + 0.2 * self.rng.standard_normal((count, len(self.ranges)))
        self.calls.append(("ask", count, points.tolist()))
        return points

    def tell(self, settings, fitness):
        self.calls.append(("tell", settings, fitness))
        if max(fitness) >= self.best:
            self.best, self.point = max(fitness), np.array(settings[int(np.argmax(fitness))])


class Forgetful(Climber):
    """Draws from a generator that a resumed run cannot have."""

    drawn = np.random.default_rng(0)

    def ask(self, count):
        return self.drawn.random((count, len(self.ranges)))


class Short(Climber):
    def ask(self, count):
        return [[0.5]] * count


class Failing(Climber):
    def tell(self, settings, fitness):
        return {}["mine"]


def refuses(ranges, seed):
    raise ValueError("no ranges that it likes")


NOTHING = 3
