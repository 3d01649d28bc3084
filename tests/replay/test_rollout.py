"""Rollouts: what an update learns from is what happened, and every rank makes the same number of updates."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.support import fields_of, interface, output_of

from evorl.algorithms.a2c import A2C
from evorl.algorithms.returns import gae
from evorl.replay.minibatches import Minibatches, check_rollout
from evorl.replay.rollout import RolloutExperience, RolloutSettings
from evorl.replay.trajectories import Trajectories
from evorl.system.timing import Stopwatch
from evorl.types import AgentState, Transition, UpdateResult

T, P, E = 8, 2, 3
GAMMA, TRACE = [0.9, 0.5], [0.8, 1.0]


def member(index, **hyperparameters):
    numbers = {"gamma": GAMMA[index % 2], "gae_lambda": TRACE[index % 2], **hyperparameters}
    return SimpleNamespace(hyperparameters=numbers, state=AgentState())


class Group:
    """A population that values an observation by its first number, and writes down what it absorbs."""

    def __init__(self, agents):
        self.agents = agents
        self.absorbed = []

    def value(self, observation, memory):
        return observation["observation"][..., 0] * 100

    def update_observation_stats(self, part, moments):
        self.absorbed.append((part, moments))

    def acted(self, steps):
        pass


def experience(sequence=1, gather=lambda numbers: numbers[None], clip=None, centre=False, scale=False, normalized=()):
    settings = RolloutSettings(T, E, sequence, clip, centre, scale, normalized)
    return RolloutExperience(
        settings,
        interface().parts,
        A2C.targets,
        gather=gather,
        seed=0,
        rank=0,
        device=torch.device("cpu"),
        stopwatch=Stopwatch(),
    )


def steps(seed=0, valid=None):
    """T random steps whose observations say which step, agent and environment they are."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for t in range(T):
        place = torch.stack(torch.meshgrid(torch.arange(P), torch.arange(E), indexing="ij"), -1).float()
        shown = torch.cat([torch.full((P, E, 1), float(t)), place], -1)
        terminated = torch.rand(P, E, generator=generator) < 0.2
        truncated = (torch.rand(P, E, generator=generator) < 0.2) & ~terminated
        fine = torch.ones(P, E, dtype=torch.bool) if valid is None else valid[t]
        started = torch.rand(P, E, generator=generator) < 0.3
        transition = Transition(
            {"observation": shown}, started, torch.randn(P, E, generator=generator),
            {"observation": shown + 0.5}, terminated, truncated, fine, bool(fine.all()), bool(truncated.any()),
        )  # fmt: skip
        decision = {
            "action": torch.zeros(P, E), "unclipped_action": shown.sum(-1), "log_prob": -shown.sum(-1),
            "value": torch.randn(P, E, generator=generator),
        }  # fmt: skip
        made.append((transition, decision))
    return made


def played(memory, group, made):
    memory.begin(group, 1)
    for transition, decision in made[:-1]:
        memory.add(transition, output_of(decision))
        assert not list(memory.batches()), "nothing is due before the rollout is complete"
    transition, decision = made[-1]
    memory.add(transition, output_of(decision))
    return memory.batches()


def stacked(made, name):
    return torch.stack([getattr(transition, name) for transition, _ in made])


def expected_advantage(made, reward=None):
    value = torch.stack([decision["value"] for _, decision in made])
    following = torch.stack([transition.next_observation["observation"][..., 0] * 100 for transition, _ in made])
    truncated = stacked(made, "truncated")
    next_value = torch.cat([value[1:], following[-1:]])
    next_value = torch.where(truncated, following, next_value)
    terminated = stacked(made, "terminated")
    reward = stacked(made, "reward") if reward is None else reward
    ends = terminated | truncated
    return gae(reward, value, next_value, terminated, ends, torch.tensor(GAMMA), torch.tensor(TRACE)), value


def whole(batch, name):
    """A field of a batch of all steps as [T, P, E]."""
    result = torch.full((T, P, E), torch.nan)
    shown = fields_of(batch)["observation.observation"].long()
    for p in range(P):
        for b in range(T * E):
            t, agent, env = shown[p, b].tolist()
            assert agent == p, "an agent learns from its own steps"
            assert fields_of(batch)["unclipped_action"][p, b] == t + agent + env == -fields_of(batch)["log_prob"][p, b]
            result[t, p, env] = fields_of(batch)[name][p, b] if name != "weight" else batch.weight[p, b]
    assert not result.isnan().any(), "every step is there once"
    return result


def test_advantages_and_returns_are_those_of_the_steps_with_true_last_observations():
    made, group = steps(), Group([member(0), member(1)])
    (batch,) = played(experience(), group, made)
    advantage, value = expected_advantage(made)
    torch.testing.assert_close(whole(batch, "advantage"), advantage)
    torch.testing.assert_close(whole(batch, "return"), advantage + value)
    assert batch.due.tolist() == [1, 1]
    torch.testing.assert_close(batch.weight, torch.full((P, T * E), 1 / (T * E)))


def test_reset_steps_count_for_nothing():
    valid = torch.rand(T, P, E, generator=torch.Generator().manual_seed(1)) < 0.7
    made = steps(valid=valid)
    (batch,) = played(experience(), Group([member(0), member(1)]), made)
    weight = whole(batch, "weight")
    assert torch.equal(weight > 0, valid)
    torch.testing.assert_close(weight.sum((0, 2)), torch.ones(P))


def test_advantages_are_normalised_within_each_agents_minibatch():
    valid = torch.rand(T, P, E, generator=torch.Generator().manual_seed(1)) < 0.7
    agents = [member(0, batch_size=8), member(1, batch_size=12)]
    for batch in played(experience(centre=True), Group(agents), steps(valid=valid)):
        for p in range(P):
            counted = fields_of(batch)["advantage"][p][batch.weight[p] > 0]
            if batch.due[p]:
                torch.testing.assert_close(counted.mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
                torch.testing.assert_close(counted.std(unbiased=False), torch.tensor(1.0))


def test_learning_may_cut_rewards():
    made = steps()
    (batch,) = played(experience(clip=0.5), Group([member(0), member(1)]), made)
    advantage, _ = expected_advantage(made, stacked(made, "reward").clamp(-0.5, 0.5))
    torch.testing.assert_close(whole(batch, "advantage"), advantage)


def test_rewards_are_divided_by_the_spread_of_their_sums_over_all_ranks():
    made, told = steps(), []

    def gather(numbers):
        if numbers.ndim == 1:
            return np.stack([numbers, numbers])
        other = numbers * np.array([1.0, 3.0, 5.0])
        told.append((numbers, other))
        return np.stack([numbers, other])

    group = Group([member(0), member(1)])
    memory = experience(scale=True, gather=gather)
    (batch,) = played(memory, group, made)
    ((mine, other),) = told
    count = mine[:, 0] + other[:, 0]
    mean = (mine[:, 0] * mine[:, 1] + other[:, 0] * other[:, 1]) / count
    second = (mine[:, 0] * (mine[:, 2] + mine[:, 1] ** 2) + other[:, 0] * (other[:, 2] + other[:, 1] ** 2)) / count
    scale = torch.tensor(1 / np.sqrt(second - mean**2), dtype=torch.float32)
    advantage, _ = expected_advantage(made, stacked(made, "reward") * scale[:, None])
    torch.testing.assert_close(whole(batch, "advantage"), advantage, rtol=1e-4, atol=1e-4)
    memory.end(group.agents)
    assert group.agents[0].state.rewards.count == 2 * T * E
    again = experience(scale=True)
    again.begin(group, 2)
    assert again._rewards.number[0] == 2 * T * E, "the statistics stay with the agent"


def test_a_reward_that_nothing_compares_with_is_cut():
    """Where every sum has been the same, dividing by its spread makes 1 to 10,000."""
    made, group = steps(), Group([member(0, gamma=0.0), member(1, gamma=0.0)])
    for transition, _ in made:
        transition.reward = torch.ones_like(transition.reward)
    (batch,) = played(experience(scale=True), group, made)
    assert whole(batch, "return").abs().max() <= 10.0


def test_what_was_seen_is_absorbed_once_learning_from_it_is_over():
    made, group = steps(), Group([member(0, epochs=2), member(1, epochs=2)])
    due = played(experience(normalized=("observation",)), group, made)
    for _ in range(2):
        next(due)
        assert not group.absorbed
    assert next(due, None) is None
    ((part, moments),) = group.absorbed
    assert part == "observation"
    np.testing.assert_allclose(moments.mean, [[(T - 1) / 2, p, (E - 1) / 2] for p in range(P)])


@pytest.mark.parametrize("shape", [(), (1,), (3, 1)])
def test_vectors_of_every_shape_are_absorbed(shape):
    made, group = steps(), Group([member(0), member(1)])
    for transition, _ in made:
        shown = transition.observation["observation"][..., :1]
        shown = shown.expand(*shown.shape[:2], shape[0] if len(shape) else 1)
        transition.observation = {**transition.observation, "observation": shown.reshape(*shown.shape[:2], *shape)}
    list(played(experience(normalized=("observation",)), group, made))
    np.testing.assert_allclose(group.absorbed[0][1].mean, np.full((P, max((1, *shape))), (T - 1) / 2))


def test_bytes_are_absorbed_as_networks_read_them():
    made, group = steps(), Group([member(0), member(1)])
    for transition, _ in made:
        shown = transition.observation["observation"].to(torch.uint8)
        transition.observation = {**transition.observation, "observation": shown}
    list(played(experience(normalized=("observation",)), group, made))
    np.testing.assert_allclose(group.absorbed[0][1].mean[:, 0], (T - 1) / 2 / 255, rtol=1e-6)


def test_sequences_are_whole_and_come_with_what_was_remembered_before_them():
    made, length = steps(), 4
    for t, (_, decision) in enumerate(made):
        decision["memory"] = decision["unclipped_action"].view(P, E, 1, 1) + 1000.0 * t
        decision["next_memory"] = decision["memory"] + 1.0
    group = Group([member(0, batch_size=2 * length), member(1, batch_size=2 * length)])
    batches = list(played(experience(sequence=length), group, made))
    assert len(batches) == T * E // (2 * length)
    started = torch.stack([transition.started for transition, _ in made])
    begun = []
    for batch in batches:
        shown = fields_of(batch)["observation.observation"].view(P, length, 2, 3).long()
        assert batch.recurrent.state.shape == (P, 2, 1, 1)
        for p in range(P):
            for s in range(2):
                t, _, env = shown[p, 0, s].tolist()
                assert t % length == 0
                assert shown[p, :, s].tolist() == [[t + k, p, env] for k in range(length)]
                assert batch.recurrent.state[p, s].item() == t + p + env + 1000.0 * t
                assert torch.equal(batch.recurrent.started[p, :, s], started[t : t + length, p, env])
                begun.append((p, t, env))
    assert len(set(begun)) == P * E * T // length


def test_an_agent_that_stops_sits_the_rest_out_and_all_stopped_ends_it():
    agents = [member(index, epochs=3, batch_size=8) for index in range(P)]
    memory, seen = experience(), []
    for number, batch in enumerate(played(memory, Group(agents), steps())):
        seen.append(batch.due.tolist())
        memory.observe(batch, UpdateResult(batch.due * torch.tensor([float(number != 1), 1.0])))
    assert seen == [[1, 1], [1, 1]] + [[0, 1]] * 7
    memory, count = experience(), 0
    for batch in played(memory, Group(agents), steps()):
        memory.observe(batch, UpdateResult(torch.zeros(2)))
        count += 1
    assert count == 1


def test_ranks_make_equally_many_updates_whatever_their_environments_did():
    valid = torch.rand(T, P, E, generator=torch.Generator().manual_seed(1)) < 0.4
    agents = [member(index, epochs=2, batch_size=4) for index in range(P)]
    counts = [len(list(played(experience(), Group(agents), steps(valid=given)))) for given in (None, valid)]
    assert counts == [12, 12]


def test_every_epoch_passes_over_everything_once_for_each_agent():
    agents = [
        member(0, epochs=3, batch_size=7.6),
        member(1, epochs=1, batch_size=24),
        member(2, epochs=2, batch_size=6),
    ]
    minibatches = Minibatches(agents, 24, 1, torch.device("cpu"))
    index = minibatches.draw(torch.Generator().manual_seed(0))
    assert minibatches.due.sum(0).tolist() == [9, 1, 8]
    assert minibatches.updates == len(index) == 9
    orders = []
    for p, parts in enumerate((3, 1, 4)):
        for epoch in range(round(agents[p].hyperparameters["epochs"])):
            rows = range(epoch * parts, (epoch + 1) * parts)
            drawn = torch.cat([index[u, p][minibatches.counted[u, p]] for u in rows])
            assert sorted(drawn.tolist()) == list(range(24))
            assert all(minibatches.due[u, p] for u in rows)
            orders.append(drawn.tolist())
    assert len({tuple(order) for order in orders}) == len(orders), "each pass has an order of its own"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((256, 8, 1, 64), None),
        ((128, 8, 32, 256), None),
        ((16, 8, 16, None), None),
        ((256, 8, 1, 60), "algorithm.batch_size: .* into minibatches of 60; .* 64,"),
        ((128, 8, 32, 16), "algorithm.batch_size: .* sequences of 32, .*minibatches of 16; take one of .32, 64,"),
        ((2**20, 2**6, 1, 100), r"algorithm.batch_size: .* minibatches of 100; .* 64, 128,"),
        ((100, 8, 32, 64), "algorithm.sequence_length: 32 does not divide algorithm.rollout_steps 100; .* 25,"),
    ],
)
def test_what_does_not_divide_is_named_with_what_does(arguments, message):
    found = check_rollout(*arguments)
    if message is None:
        assert found is None
    else:
        assert re.search(message, found)


def test_stacked_frames_are_put_together_as_they_were_seen():
    generator, depth, device = torch.Generator().manual_seed(0), 4, torch.device("cpu")
    kept, shown = Trajectories(20, 1, {"picture": depth}, (), device), []
    stack, never = torch.zeros(P, E, depth, 2, 2, dtype=torch.uint8), torch.zeros(P, E, dtype=torch.bool)
    index = torch.arange(20 * E).expand(1, P, -1)
    for rollout in range(3):
        for step in range(20):
            started = torch.rand(P, E, generator=generator) < (1.0 if rollout == step == 0 else 0.2)
            newest = torch.randint(1, 256, (P, E, 1, 2, 2), generator=generator, dtype=torch.uint8)
            stack = torch.where(started[..., None, None, None], 0, stack)
            stack = torch.cat([stack[:, :, 1:], newest], 2)
            seen, number = {"picture": stack}, torch.full((P, E), float(len(shown)))
            kept.write(step, Transition(seen, started, number, {}, never, never, ~never), {"number": number}, None)
            shown.append(stack)
        found = kept.gather(kept.slots(index), ("number",))
        expected = torch.stack(shown[-20:]).movedim(1, 0)
        assert torch.equal(found.observation["picture"][0, :, 0].unflatten(1, (20, E)), expected)
        numbers = torch.arange(20.0) + 20 * rollout
        assert torch.equal(found.columns["number"][0, :, 0].unflatten(1, (20, E)), numbers[:, None].expand(P, 20, E))
        assert torch.equal(kept.column("number"), numbers[:, None, None].expand(20, P, E))
    assert kept._storage.seen["picture"].shape == (20 + depth, P * E, 2, 2), "each frame is kept once"


def test_recurrent_states_may_grow_between_rollouts():
    kept, never = Trajectories(4, 2, {}, (), torch.device("cpu")), torch.zeros(P, E, dtype=torch.bool)
    index = torch.arange(2 * E).expand(1, P, -1)
    for units in (3, 5):
        states = torch.randn(4, P, E, 2, units)
        for step in range(4):
            seen = {"observation": torch.zeros(P, E, 1)}
            kept.write(step, Transition(seen, never, never, {}, never, never, ~never), {}, states[step])
        expected = states[::2].movedim(1, 0).flatten(1, 2)
        assert torch.equal(kept.states(index)[0], expected)
