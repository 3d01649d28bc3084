"""Windows of several steps, against episodes followed one step at a time."""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.lanes import HISTORIES, World, everything, part
from helpers.support import (
    agent,
    algorithm,
    batch,
    config,
    fields_of,
    interface,
    output_of,
    population,
    replay_experience,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from evorl.algorithms import make_algorithm
from evorl.algorithms.functional import bootstrapped_return, n_step_return
from evorl.distributed import Placement, Ranks
from evorl.replay.batches import BatchBuilder
from evorl.replay.storage import Storage
from evorl.system.stopwatch import Stopwatch
from evorl.types.batches import Transition
from evorl.types.outcomes import UserError

CPU = torch.device("cpu")
GAMMAS = (0.9, 0.5, 1.0, 0.0)


def agents(gammas=GAMMAS):
    return [SimpleNamespace(hyperparameters={"gamma": gamma}) for gamma in gammas]


def storage(rows, lanes, frames=0):
    """The parts and columns of `lanes.storage`, and a reward of each step."""
    parts = {"position": part()} | ({"picture": part((frames, 2), torch.int32, frames)} if frames else {})
    columns = {"number": torch.int64, "reward": torch.float32, "terminated": torch.bool}
    return Storage(rows, lanes, parts, {name: ((), dtype) for name, dtype in columns.items()}, CPU)


class Rewarded:
    """A storage that is told a reward with each step: a number that says which step it was."""

    def __init__(self, store):
        self.store = store

    def __getattr__(self, name):
        return getattr(self.store, name)

    def write(self, observation, columns, *, valid, **flags):
        # What stands where nothing happened must not count, not even as a NaN.
        reward = torch.where(valid, columns["number"].float(), torch.nan)
        self.store.write(observation, columns | {"reward": reward}, valid=valid, **flags)


def by_hand(steps, row, lane, n, gamma):
    """Follow the lane from a step on: its return, the discount of what follows, and the last step."""
    total, factor = 0.0, 1.0
    for k in range(n):
        step = steps[row + k][lane]
        total, factor = total + factor * step.number, factor * gamma
        if step.last or row + k + 1 == len(steps):
            break
    return total, factor, step


@given(n=st.integers(2, 12), **HISTORIES)
@settings(max_examples=120, deadline=None)
def test_windows_are_what_happened(seed, lanes, rows, frames, n, resets_in_step, plan):
    """In episodes that terminate or are truncated, over breaks of the lanes and ends of the ring."""
    rows = max(2, rows)
    n = min(n, rows)
    world, store = World(lanes, frames, seed, resets_in_step), storage(rows, lanes, frames)
    builder = BatchBuilder(store, n, n_step_return)
    builder.begin(agents())
    for steps, then in plan:
        world.play(Rewarded(store), steps)
        place = {step.number: (row, at) for row, own in enumerate(world.steps) for at, step in enumerate(own)}
        index = store.valid_index()
        found = builder.gather(index.expand(2, len(GAMMAS), -1))
        for at in np.ndindex(found.columns["number"].shape):
            fields = {name: value[at] for name, value in fields_of(found).items()}
            row, lane = place[int(fields["number"])]
            first = world.steps[row][lane]
            total, factor, last = by_hand(world.steps, row, lane, n, GAMMAS[at[1]])
            assert float(fields["reward"]) == pytest.approx(total, rel=1e-5)
            assert float(fields["discount"]) == pytest.approx(factor, rel=1e-5)
            assert bool(fields["terminated"]) == last.terminated
            for name in store.parts:
                assert fields[f"observation.{name}"].tolist() == first.before[name]
                assert fields[f"next_observation.{name}"].tolist() == last.after[name]
        if then != "go on":
            world.end(store, fresh=then == "anew")


def test_a_window_of_one_step_is_the_stored_transition():
    world, store = World(3, 2, 5, True), storage(8, 3, 2)
    world.play(Rewarded(store), 20)
    index = everything(store)[0].expand(1, 4, -1)
    one = BatchBuilder(store, 1, n_step_return).gather(index)
    torch.testing.assert_close(fields_of(one), fields_of(store.gather(index)), rtol=0, atol=0)


def test_targets_of_several_steps_worked_by_hand():
    """Two agents; the second window has two steps and the third terminates."""
    reward = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, torch.nan], [1.0, 2.0, 4.0]]).expand(2, 3, 3)
    sums, factor = n_step_return(reward, torch.tensor([[3, 2, 3]] * 2), torch.tensor([0.5, 0.1]))
    torch.testing.assert_close(sums, torch.tensor([[3.0, 2.0, 3.0], [1.24, 1.2, 1.24]]))
    torch.testing.assert_close(factor, torch.tensor([[0.125, 0.25, 0.125], [0.001, 0.01, 0.001]]))
    columns = {"reward": sums, "discount": factor, "terminated": torch.tensor([[False, False, True]] * 2)}
    target = bootstrapped_return(columns, torch.full((2,), torch.nan), torch.full((2, 3), 8.0))
    torch.testing.assert_close(target, torch.tensor([[4.0, 4.0, 3.0], [1.248, 1.28, 1.24]]))


def test_the_loss_bootstraps_by_the_windows_discount():
    dqn = algorithm()
    pair = [agent(id=0, dqn=dqn, gamma=0.9), agent(id=1, dqn=dqn, gamma=0.5)]
    stack, some = population(pair, dqn).policy.stacks[0], batch(pair)
    once = dqn.loss(stack, some, torch.Generator())
    gamma = torch.tensor([[0.9], [0.5]])
    some.columns["discount"] = gamma.expand(2, 8)
    torch.testing.assert_close(dqn.loss(stack, some, torch.Generator()).errors, once.errors)
    some.columns["discount"] = gamma.expand(2, 8) ** 3
    assert not torch.allclose(dqn.loss(stack, some, torch.Generator()).errors, once.errors)


def test_an_experience_gives_windows_by_each_agents_own_discount():
    store = Storage(
        9, 4, {"position": part()},
        {"action": ((), torch.int64), "reward": ((), torch.float32), "terminated": ((), torch.bool)}, CPU,
    )  # fmt: skip
    experience = replay_experience(
        store, BatchBuilder(store, 3, n_step_return), learning_starts=1, gather=lambda numbers: numbers[None],
        lockstep=True, part=0, rank=0,
    )  # fmt: skip
    members = [agent(id=id, gamma=gamma, batch_size=64.0, learn_step=2.0) for id, gamma in enumerate((0.5, 0.1))]
    experience.begin(SimpleNamespace(agents=members, acted=lambda steps: None), 1)
    never, everywhere = torch.zeros(2, 2, dtype=torch.bool), torch.ones(2, 2, dtype=torch.bool)
    for step in range(5):
        shown = {"position": torch.full((2, 2, 2), float(step))}
        after = {"position": torch.full((2, 2, 2), step + 1.0)}
        started = everywhere if step == 0 else never
        made = Transition(shown, started, torch.full((2, 2), 2.0**step), after, never, never, everywhere)
        experience.add(made, output_of(torch.zeros(2, 2, dtype=torch.int64)))
        batches = list(experience.take_batches())
    (due,) = batches
    first, reached = (seen["position"][..., 0] for seen in (due.observation, due.next_observation))
    steps = (5 - first).clamp(max=3)
    assert torch.equal(reached, first + steps)
    assert steps.unique().tolist() == [1, 2, 3]
    for p, gamma in enumerate((0.5, 0.1)):
        torch.testing.assert_close(due.columns["discount"][p], gamma ** steps[p])
        wanted = sum(torch.where(k < steps[p], (2 * gamma) ** k, 0.0) for k in range(3)) * 2 ** first[p]
        torch.testing.assert_close(due.columns["reward"][p], wanted)


def test_windows_longer_than_what_a_process_keeps_are_an_error():
    settings = config("replay={n_step: 6, capacity: 40, learning_starts: 0}", "population.size=4")
    made = make_algorithm(settings, interface(gym.spaces.Box(-1.0, 1.0, (5,))))
    placement = Placement(Ranks(), "replicated", 4)
    with pytest.raises(UserError, match=r"replay\.n_step: windows of 6 .* the 5 steps .* replay\.capacity .*=5 at"):
        made.experience(placement, True, Stopwatch())
