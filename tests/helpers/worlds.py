"""Small worlds whose every step is known, and what agents must learn from them, followed one episode at a time."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from evorl.algorithms.functional import gae
from evorl.envs.spaces import ObservationSpec
from evorl.replay.rollouts import RolloutExperience
from evorl.system.stopwatch import Stopwatch
from evorl.types.agents import AgentState
from evorl.types.batches import Transition
from helpers.support import config, fields_of, interface, output_of

T, P, E = 8, 3, 2
GAMMA, TRACE = (0.9, 0.5, 0.99), (0.8, 1.0, 0.3)
ALL = dict.fromkeys(np.ndindex(2 * T, P, E))
PARTS = {**interface().parts, "picture": ObservationSpec("vector", (2, 3), torch.uint8, high=255.0)}


def members(**hyperparameters):
    """P agents; a tuple gives each of them a number of its own."""
    numbers = {"gamma": GAMMA, "gae_lambda": TRACE, **hyperparameters}
    each = [{name: v[p] if isinstance(v, tuple) else v for name, v in numbers.items()} for p in range(P)]
    return [SimpleNamespace(hyperparameters=values, state=AgentState()) for values in each]


def next_state(observation, state):
    """The recurrent state [P, E, 1, 1] of a world's agents once they have seen this."""
    return 0.5 * state + observation["observation"][..., :1, None].sin()


def value_of(observation, state=None):
    """The value that they see in it [P, E], which with a state depends on all that was seen in the episode."""
    # In double precision, since processors multiply batches of other sizes with other rounding.
    place = observation["observation"].double() @ torch.tensor([12.9, 78.2, 37.7, 3.3], dtype=torch.float64)
    return place.sin().float() + (0.0 if state is None else next_state(observation, state)[..., 0, 0])


class Group:
    """A population that knows the value of everything, and writes down what it is told."""

    def __init__(self, agents):
        self.agents = agents
        self.events = []
        self.steps = np.zeros(len(agents))

    def value(self, observation, state):
        return value_of(observation, state)

    def update_observation_stats(self, part, moments):
        self.events.append((part, moments))

    def acted(self, steps):
        self.steps += steps


class World:
    """2 T steps whose observations say step, agent and environment, and 1 where an episode was left.

    In `next_step` mode an environment spends a step on a reset, which brings a reward that must not be learned from.
    """

    def __init__(self, seed=0, next_step=False, recurrent=False, ends=0.3, wide=False):
        generator = torch.Generator().manual_seed(seed)
        self.steps, resetting, started = [], torch.zeros(P, E, dtype=torch.bool), torch.ones(P, E, dtype=torch.bool)
        kept, left = torch.zeros(P, E, 1, 1), torch.zeros(P, E)
        for t in range(2 * T):
            chance = torch.rand(P, E, generator=generator)
            terminated, truncated = chance < ends / 2, (chance >= ends / 2) & (chance < ends)
            terminated, truncated, valid = terminated & ~resetting, truncated & ~resetting, ~resetting
            ended = terminated | truncated
            reward = torch.where(valid, torch.randn(P, E, generator=generator), -99.0)
            seen = {"observation": self.place(t, left)}
            left = ended.float()
            after = {"observation": self.place(t + 1, left)}
            if wide:
                seen["picture"] = torch.randint(256, (P, E, 2, 3), generator=generator, dtype=torch.uint8)
                seen["action_mask"] = torch.rand(P, E, 4, generator=generator) < 0.5
            number = seen["observation"] @ torch.tensor([100.0, 10.0, 1.0, 0.0])
            values = {"unclipped_action": number + 0.25, "log_prob": -number, "value": value_of(seen)}
            if recurrent:
                before = torch.where(started[..., None, None], 0.0, kept)
                # The state is not reset where an episode starts: `started` says that it must be.
                values |= {"value": value_of(seen, before), "state": kept, "next_state": next_state(seen, before)}
                kept = values["next_state"]
            flags = bool(valid.all()), bool(truncated.any())
            step = Transition(seen, started, reward, after, terminated, truncated, valid, *flags)
            self.steps.append((step, output_of(number, **values)))
            started, resetting = (resetting, ended) if next_step else (ended, resetting)
            left = left if next_step else torch.zeros(P, E)

    @staticmethod
    def place(t, left):
        agent, env = torch.meshgrid(torch.arange(P), torch.arange(E), indexing="ij")
        return torch.stack([torch.full((P, E), float(t)), agent.float(), env.float(), left], -1)

    def at(self, t, p, e):
        step, output = self.steps[t]
        flags = {name: bool(getattr(step, name)[p, e]) for name in ("terminated", "truncated", "valid")}
        after = {name: value[p : p + 1, e : e + 1] for name, value in step.next_observation.items()}
        state = output.next_state[p : p + 1, e : e + 1] if output.next_state.numel() else None
        return SimpleNamespace(
            **flags, reward=float(step.reward[p, e]), value=float(output.extras["value"][p, e]),
            next_value=float(value_of(after, state)),
        )  # fmt: skip

    def advantage(self, t, p, e, reward):
        """Of one step, by following its episode to its end or that of the rollout; `reward` is of (t, p, e)."""
        total, decay = 0.0, 1.0
        for k in range(t, (t // T + 1) * T):
            step = self.at(k, p, e)
            following = 0.0 if step.terminated else GAMMA[p] * step.next_value
            total += decay * (reward(k, p, e) + following - step.value)
            decay *= GAMMA[p] * TRACE[p]
            if step.terminated or step.truncated:
                break
        return total

    def reward(self, t, p, e):
        return self.at(t, p, e).reward

    def valid(self, first=0, last=2 * T):
        return {place for place in np.ndindex(2 * T, P, E) if first <= place[0] < last and self.at(*place).valid}


def targets(segment, hyperparameters):
    advantage = gae(segment, hyperparameters["gamma"], hyperparameters["gae_lambda"])
    return {"advantage": advantage, "return": advantage + segment.value}


def rollout_experience(
    *, gather=lambda numbers: numbers[None], rank=0, seed=0, sequence=1, normalized=(), copies=1, **settings
):
    """Rollouts of T steps, of which nothing is normalised or clipped unless the algorithm's `settings` say so."""
    algorithm = ", ".join(f"{name}: {'null' if value is None else value}" for name, value in settings.items())
    settings = config(f"algorithm={{name: a2c, rollout_steps: {T * copies}, {algorithm}}}", f"environment.num_envs={E}")
    return RolloutExperience(
        settings.model_copy(update={"seed": seed}), PARTS, targets, sequence=sequence,
        normalized={name: PARTS[name] for name in normalized}, copies=copies, gather=gather, rank=rank,
        device=torch.device("cpu"), stopwatch=Stopwatch(),
    )  # fmt: skip


def play(experience, world, first=0, last=2 * T):
    """The batches of each rollout."""
    rollouts = []
    for transition, output in world.steps[first:last]:
        experience.add(transition, output)
        batches = list(experience.take_batches())
        if batches:
            rollouts.append(batches)
    return rollouts


def played(world, agents=None, generation=1, **options):
    experience = rollout_experience(**options)
    experience.begin(Group(agents or members()), generation)
    return play(experience, world)


def flat(lists):
    return [item for items in lists for item in items]


def learned(batches):
    """What is learned from each step (t, p, e): a list of its fields and weight, one for each time."""
    found = {}
    for batch in batches:
        for p, b in np.ndindex(batch.weight.shape):
            if batch.due[p] and batch.weight[p, b]:
                t, agent, e, _ = fields_of(batch)["observation.observation"][p, b].int().tolist()
                assert agent == p, "an agent learns from what it did itself"
                fields = {name: value[p, b] for name, value in fields_of(batch).items()}
                found.setdefault((t, p, e), []).append(fields | {"weight": batch.weight[p, b]})
    return found


def check_rollouts(world):
    """The second rollout goes on where the first stopped, in the same rows."""
    rollouts = played(world)
    assert len(rollouts) == 2
    for index, batches in enumerate(rollouts):
        check(world, batches)
        assert set(learned(batches)) == world.valid(index * T, (index + 1) * T)


def check(world, batches, reward=None):
    reward = reward or world.reward
    for place, times in learned(batches).items():
        advantage, value = world.advantage(*place, reward), world.at(*place).value
        for fields in times:
            assert float(fields["advantage"]) == pytest.approx(advantage, rel=1e-4, abs=1e-4)
            assert float(fields["return"]) == pytest.approx(advantage + value, rel=1e-4, abs=1e-4)
