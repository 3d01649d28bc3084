"""Recurrent DQN on sequences of a replay, against its loss one step at a time. Axes: T learned steps, S sequences."""

import numpy as np
import pytest
import torch
from helpers.support import agent, algorithm, population, score, trained

from evorl.algorithms.functional import of_action
from evorl.types.batches import Batch, RecurrentInput

RECURRENT = "network.recurrent=gru", "network.recurrent_size=7", "network.hidden_sizes=[9]"
LENGTH, BURN_IN, SEQUENCES = 4, 3, 5
SHAPE = f"algorithm.sequence_length={LENGTH}", f"algorithm.burn_in={BURN_IN}"


def sequences(agents, seed=0):
    """A random batch of sequences, of which some begin within the burn-in and some end early."""
    generator = torch.Generator().manual_seed(seed)
    count, size = len(agents), LENGTH * SEQUENCES

    def numbers(*shape):
        return torch.randn(count, *shape, generator=generator)

    rows = numbers(size + SEQUENCES, 5)
    steps = torch.tensor([LENGTH, LENGTH, 2, 1, LENGTH])
    first = torch.tensor([0, 3, 1, 2, 0])
    time = torch.arange(LENGTH).unsqueeze(-1)
    started = (torch.arange(BURN_IN + LENGTH).unsqueeze(-1) == first).expand(count, -1, -1)
    ends = torch.tensor([True, False, True, False, False])
    weight = (time < steps).float().flatten() / steps.sum()
    columns = {
        "action": torch.randint(3, (count, size), generator=generator),
        "reward": numbers(size),
        "terminated": (ends & (time == steps - 1)).flatten().expand(count, -1),
    }
    recurrent = RecurrentInput(numbers(SEQUENCES, 0, 0), started, {"observation": numbers(BURN_IN * SEQUENCES, 5)})
    return Batch(
        {"observation": rows[:, :-SEQUENCES]},
        {"observation": rows[:, SEQUENCES:]},
        columns,
        weight.expand(count, -1),
        torch.ones(count),
        recurrent,
        all_due=True,
    )


def q_values(dqn, network, batch, sequence):
    """Q-values [P, T + 1, A] of one sequence, one look after the other."""
    found, (state_shape, recurrent) = [], (network.recurrent_shape, batch.recurrent)
    state = torch.zeros(len(batch.weight), 1, *state_shape)
    looks = [recurrent.burn_in["observation"][:, time * SEQUENCES + sequence] for time in range(BURN_IN)]
    looks += [batch.observation["observation"][:, time * SEQUENCES + sequence] for time in range(LENGTH)]
    looks.append(batch.next_observation["observation"][:, (LENGTH - 1) * SEQUENCES + sequence])
    for time, look in enumerate(looks):
        begins = recurrent.started[:, time, sequence] if time < BURN_IN + LENGTH else torch.zeros(len(look)).bool()
        shown = {"observation": look.unsqueeze(1)}
        outputs, state = network.forward_recurrent(shown, RecurrentInput(state, begins[:, None, None]))
        found.append(dqn.q_values(outputs)[:, 0])
    return torch.stack(found[BURN_IN:], 1)


def two_agents(dqn):
    return [agent(id=0, dqn=dqn, gamma=0.9), agent(id=1, dqn=dqn, gamma=0.5)]


@pytest.mark.parametrize("parts", [(), ("algorithm.double=false",), ("algorithm.dueling=true",)])
def test_the_loss_is_that_of_every_step_in_turn(parts):
    dqn = algorithm(*RECURRENT, *SHAPE, "algorithm.loss=mse", *parts)
    stack = population(two_agents(dqn), dqn).policy.stacks[0]
    batch = sequences([0, 1])
    loss = dqn.loss(stack, batch, torch.Generator())
    for sequence in range(SEQUENCES):
        with torch.no_grad():
            online, target = (
                q_values(dqn, networks["q"], batch, sequence) for networks in (stack.networks, stack.target_networks)
            )
        for time in range(LENGTH):
            index = time * SEQUENCES + sequence
            chosen = (online if dqn.settings.double else target)[:, time + 1].argmax(-1)
            value = target[:, time + 1].gather(-1, chosen[:, None])[:, 0] * ~batch.columns["terminated"][:, index]
            wanted = batch.columns["reward"][:, index] + stack.hyperparameters["gamma"] * value
            own = of_action(online[:, time].unsqueeze(-1), batch.columns["action"][:, index])[:, 0]
            torch.testing.assert_close(loss.errors[:, index], own - wanted, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(loss.per_sample[:, index], (own - wanted) ** 2, rtol=1e-4, atol=1e-5)


def test_what_was_shown_once_is_remembered():
    """As with PPO: the answer was shown at the beginning, and the score without recurrence stays below 0.8."""
    where = "environment={id: 'helpers.spaces:Recall-v0', num_envs: 8}"
    dqn = (
        "algorithm={name: dqn, batch_size: 128, learn_step: 8, gamma: 0.95, sequence_length: 4, burn_in: 4, tau: 0.05, "
        "exploration: {decay: 0.999, end: 0.05}}"
    )
    group, environments = trained(
        where,
        dqn,
        "network.recurrent=gru",
        "replay.learning_starts=200",
        "population.size=2",
        steps=1_500,
        learning_rate=5e-3,
        enough=1.0,
    )
    assert (score(group, environments) == 1.0).all()


def test_a_burn_in_of_none_computes_no_state():
    dqn = algorithm(*RECURRENT, "algorithm.burn_in=0", f"algorithm.sequence_length={LENGTH}")
    stack = population(two_agents(dqn), dqn).policy.stacks[0]
    batch = sequences([0, 1])
    batch.recurrent = RecurrentInput(batch.recurrent.state, batch.recurrent.started[:, BURN_IN:])
    assert np.isfinite(dqn.loss(stack, batch, torch.Generator()).per_sample.detach().numpy()).all()
