"""Agents of every kind against torch's own layers, and over sequences. Axes: P agents, T time, S sequences."""

from dataclasses import replace
from itertools import pairwise

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.kinds import OBSERVATIONS, act, made, rollout_batch, shown
from helpers.replayed import replayed_batch
from helpers.support import agent, check_stacks_equal_singles, first_architecture, greedy, population
from torch.nn import functional

from evorl.networks.dense import ACTIVATIONS
from evorl.replay.statistics import Moments
from evorl.types.batches import RecurrentInput

CELLS = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}


@pytest.fixture
def one_stack(monkeypatch):
    monkeypatch.setattr("evorl.networks.stack.STACK_OVERHEAD", 10**9)


def varied(algorithm):
    """Agents that differ in all widths and depths."""
    first, members = first_architecture(algorithm), []
    for index, (sizes, depths) in enumerate(
        (((16, 12), (0, 0)), ((20, 40), (1, 0)), ((33, 9), (0, 2)), ((5, 16), (1, 1)))
    ):
        shape = replace(first, activation="gelu", hidden_sizes=sizes, residual_layers=depths)
        if first.recurrent:
            shape = replace(shape, recurrent_size=(12, 33, 7, 20)[index])
        if first.convolutions:
            shape = shape.resized("channels.0", 3 + 3 * index).resized("channels.1", 9 - 2 * index)
            shape = shape if index in (0, 3) else shape.deepened(f"channels.{index - 1}", 1)
        members.append(agent(shape, id=index, dqn=algorithm, learning_rate=1e-3 * (index + 1)))
    return members


def by_torch(member, algorithm, seen, started, cell):
    """Heads [T * S, ...] of one agent, layer by layer through torch's own, episode by episode."""
    (roles,) = member.tensors.values()
    p, shape = roles["parameters"], member.architectures["policy"]
    normal = roles["buffers"]
    act = ACTIVATIONS[shape.activation]
    encoded = {}
    for name, part in algorithm.interface.parts.items():
        x = seen[name][0]
        if part.kind == "image":
            x = x / 255 if x.dtype == torch.uint8 else x
            x = x.unsqueeze(1) if x.ndim == 3 else x.permute(0, 3, 1, 2) if part.channels_last else x
            for index, layer in enumerate(shape.convolutions):

                def convolved(x, name, **options):
                    return act(
                        functional.conv2d(x, p[f"{name}.weight"].permute(3, 0, 1, 2), p[f"{name}.bias"][0], **options)
                    )

                key = f"encoder.{name}.{index}"
                x = convolved(x, key, stride=layer.stride)
                for depth in range(layer.residual_layers):
                    scale = p[f"{key}.residual.{depth}.scale"].view(1, -1, 1, 1)
                    x = x + scale * convolved(x, f"{key}.residual.{depth}", padding=1)
        elif part.kind == "categories":
            columns = x.view(len(x), -1).T
            x = torch.cat([torch.eye(size)[column] for size, column in zip(part.sizes, columns, strict=True)], -1)
        x = x.movedim(1, -1).flatten(1)
        if f"normal.{name}.mean" in normal:
            spread = normal[f"normal.{name}.variance"].sqrt()
            x = ((x - normal[f"normal.{name}.mean"]) / spread).clamp(-10, 10)
        encoded[name] = x
    heads = {}
    for place, head in enumerate(("action", "value")):

        def own(name, place=place):
            """The head's copy of what may be parted; biases and the like are [1, N], or [copies, 1, N]."""
            return p[name][place] if shape.branches == "all" else p[name]

        x = None
        for index in range(len(shape.hidden_sizes)):
            key = f"hidden.{index}"
            if x is None:
                read = torch.cat(list(encoded.values()), -1)
                weight = torch.cat([own(f"{key}.weight.{name}").flatten(0, -2) for name in encoded])
            else:
                read, weight = x, own(f"{key}.weight")
            x = act(read @ weight + own(f"{key}.bias"))
            for depth in range(shape.residual_layers[index]):
                inner = f"{key}.residual.{depth}"
                x = x + own(f"{inner}.scale") * act(x @ own(f"{inner}.weight") + own(f"{inner}.bias"))
        if cell:
            x = unrolled(cell, x.unflatten(0, started.shape), started, own)
        heads[head] = x @ p[f"{head}.weight"] + p[f"{head}.bias"]
    return heads


def unrolled(cell, x, started, own):
    """[T, S, N] through torch's cell, each episode from nothing -> [T * S, units]."""
    reference = CELLS[cell](x.shape[-1], own("recurrent.weight").shape[0])
    with torch.no_grad():
        reference.weight_ih_l0.copy_(own("recurrent.input").flatten(1).T)
        reference.weight_hh_l0.copy_(own("recurrent.weight").flatten(1).T)
        reference.bias_ih_l0.copy_(own("recurrent.bias").flatten())
        reference.bias_hh_l0.zero_()
    columns = []
    for s in range(x.shape[1]):
        cuts = [0, *(t for t in range(1, len(x)) if started[t, s]), len(x)]
        columns.append(torch.cat([reference(x[a:b, s])[0] for a, b in pairwise(cuts)]))
    return torch.stack(columns, 1).flatten(0, 1)


@pytest.mark.parametrize("critic", ["separate", "shared"])
@pytest.mark.parametrize("cell", ["lstm", "gru", None])
@pytest.mark.parametrize(
    ("seen", "overrides", "layers"),
    [("dict", [], 2), ("channels last", [], 2), ("channels last", ["network.convolutions=[]"], 0)],
)
def test_a_stack_computes_what_torchs_own_layers_compute(cell, critic, seen, overrides, layers, one_stack):
    settings = *overrides, f"network.recurrent={cell or 'null'}", f"algorithm.critic={critic}"
    algorithm = made("ppo", *settings, observations=OBSERVATIONS[seen])
    assert len(first_architecture(algorithm).convolutions) == layers
    together, generator = population(varied(algorithm), algorithm), torch.Generator().manual_seed(1)
    time, sequences = 6, 4
    looks = shown(algorithm.interface, 4, time * sequences, generator)
    started = looks.pop("started").view(4, time, sequences)
    # Some sequences begin with an episode and some do not, but their state is zero.
    state = together.policy.initial_state(sequences)
    assert started[:, 1:].any()
    assert len(together.policy.stacks) == 1
    for stack in together.policy.stacks:
        recurrent = RecurrentInput(state, started).part(stack.members, stack.recurrent_units) if cell else None
        part = {name: value[stack.members] for name, value in looks.items()}
        outputs = stack.networks["policy"](part, recurrent)
        for place, member in enumerate(together.policy.agents[at] for at in together.policy.places(stack)):
            own = {name: value[place : place + 1] for name, value in part.items()}
            expected = by_torch(member, algorithm, own, started[stack.members][place], cell)
            for head, value in expected.items():
                torch.testing.assert_close(outputs[head][place], value, rtol=1e-4, atol=1e-5)


def test_a_stack_normalises_by_each_agents_own_statistics(one_stack):
    algorithm = made("ppo", "algorithm.normalize_observations=true", observations=OBSERVATIONS["dict"])
    members, generator = varied(algorithm), torch.Generator().manual_seed(1)
    for member in members:
        buffers = member.tensors["policy"]["buffers"]
        assert {name for name in buffers if name.endswith("mean")} == {"normal.arm.angles.mean"}
        buffers["normal.arm.angles.mean"].copy_(torch.randn(1, 4, generator=generator))
        # The last number hardly varied, so that it comes to more than ten deviations and is clipped.
        buffers["normal.arm.angles.variance"].copy_(torch.tensor([[0.5, 1.0, 2.0 + member.id, 1e-4]]))
    together = population(members, algorithm)
    looks = shown(algorithm.interface, 4, 8, generator)
    for stack in together.policy.stacks:
        part = {name: value[stack.members] for name, value in looks.items()}
        outputs = stack.networks["policy"](part)
        for place, member in enumerate(together.policy.agents[at] for at in together.policy.places(stack)):
            own = {name: value[place : place + 1] for name, value in part.items()}
            for head, value in by_torch(member, algorithm, own, None, None).items():
                torch.testing.assert_close(outputs[head][place], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("overhead", [0, 10**9])
def test_each_agent_takes_over_the_statistics_of_what_it_saw_itself(overhead, monkeypatch):
    monkeypatch.setattr("evorl.networks.stack.STACK_OVERHEAD", overhead)
    algorithm = made("ppo", "algorithm.normalize_observations=true")
    agents, rng = varied(algorithm), np.random.default_rng(0)
    together = population(agents, algorithm)
    place = np.arange(1, 5)[:, None, None]
    samples = [rng.normal(3.0 * place, place, (4, count, 5)) for count in (40, 7)]
    for some in samples:
        together.policy.update_observation_stats(
            "observation", Moments.of(torch.from_numpy(some), torch.ones(some.shape[:2]))
        )
    whole = np.concatenate(samples, 1)
    for index, member in enumerate(together.to_agents()):
        kept = member.tensors["policy"]["buffers"]
        np.testing.assert_allclose(kept["normal.observation.mean"][0], whole[index].mean(0), rtol=1e-4)
        np.testing.assert_allclose(kept["normal.observation.variance"][0], whole[index].var(0), rtol=1e-4)
        assert kept["normal.observation.number"].item() == 47


@pytest.mark.parametrize("critic", ["separate", "shared"])
@pytest.mark.parametrize("cell", CELLS)
def test_acting_step_by_step_is_learning_from_the_sequence(cell, critic, one_stack):
    """What a rollout wrote down while acting, the update finds again: probabilities, values and recurrent states."""
    algorithm = made(
        "ppo", f"network.recurrent={cell}", f"algorithm.critic={critic}", observations=OBSERVATIONS["tuple"]
    )
    together, generator = population(varied(algorithm), algorithm), torch.Generator().manual_seed(1)
    (stack,) = together.policy.stacks
    time, sequences = 5, 3
    first = rollout_batch(algorithm, together.policy.agents, size=3, length=1).recurrent.state
    state, steps = first.clone(), []
    looks = [shown(algorithm.interface, 4, sequences, generator) for _ in range(time)]
    for look in looks:
        output, state = act(together, look, state)
        steps.append(output.extras)
    whole = {name: torch.cat([look[name] for look in looks], 1) for name in looks[0] if name != "started"}
    started = torch.stack([look["started"] for look in looks], 1)
    assert started[:, 1:].any()
    assert not started[:, 0].all()
    # The stack has an order of its own.
    order, inverse = stack.members, torch.as_tensor(together.policy.places(stack)).argsort()
    inputs = RecurrentInput(first[order], started[order])
    outputs, after = stack.networks["policy"].forward_recurrent({k: v[order] for k, v in whole.items()}, inputs)
    outputs = {name: value[inverse] if len(value) == 4 else value for name, value in outputs.items()}
    unclipped = torch.cat([step["unclipped_action"] for step in steps], 1)
    torch.testing.assert_close(after, state[stack.members])
    torch.testing.assert_close(outputs["value"].squeeze(-1), torch.cat([step["value"] for step in steps], 1))
    torch.testing.assert_close(
        algorithm.distribution.likelihood(outputs, None, unclipped).log_prob,
        torch.cat([step["log_prob"] for step in steps], 1),
    )
    for index, member in enumerate(together.policy.agents):
        units = member.architectures["policy"].recurrent_size
        assert state[index, ..., :units].all()
        assert not state[index, ..., units:].any(), "units that an agent does not have stay at zero"


@pytest.mark.parametrize("cell", CELLS)
def test_what_came_before_an_episode_does_not_reach_its_gradient(cell):
    algorithm = made("ppo", f"network.recurrent={cell}", "network.recurrent_size=6", "network.activation=tanh")
    together = population([agent(dqn=algorithm)], algorithm)
    module = together.policy.stacks[0].networks["policy"]
    x = torch.randn(1, 4 * 2, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    started = torch.zeros(1, 4, 2, dtype=torch.bool)
    started[:, 2, 0] = True
    value = module({"observation": x}, RecurrentInput(together.policy.initial_state(2), started))["value"].view(4, 2)
    (gradient,) = torch.autograd.grad(value[3].sum(), x)
    reached = gradient.view(4, 2, 5).abs().sum(-1) > 0
    assert reached.tolist() == [[False, True], [False, True], [True, True], [True, True]]


@pytest.mark.parametrize("seen", ["image", "dict"])
@pytest.mark.parametrize("dueling", ["true", "false"])
def test_stacks_of_dqn_agents_with_images_and_masks_learn_as_they_do_alone(seen, dueling):
    algorithm = made("dqn", f"algorithm.dueling={dueling}", observations=OBSERVATIONS[seen], masked=True)
    agents = varied(algorithm)
    together = population(agents, algorithm)
    looks = shown(algorithm.interface, 4, 64, torch.Generator().manual_seed(5))
    best, _ = greedy(together, looks)
    assert looks["action_mask"].gather(-1, best.unsqueeze(-1)).all()
    free = {name: value for name, value in looks.items() if name != "action_mask"}
    assert (greedy(together, free)[0] != best).any(), "a mask changes what is best"
    batches = [replayed_batch(algorithm, len(agents), seed=seed) for seed in range(3)]
    check_stacks_equal_singles(agents, algorithm, batches, looks, rtol=2e-4, atol=2e-5)


def test_a_dqn_target_is_of_an_action_that_is_allowed_next():
    """The best next action is forbidden; the loss is that of the second best."""
    for double in ("true", "false"):
        algorithm = made("dqn", f"algorithm.double={double}", "algorithm.loss=mse", masked=True)
        stack = population([agent(dqn=algorithm)], algorithm).policy.stacks[0]
        whole = replayed_batch(algorithm, 1)
        following = whole.next_observation
        q, target_q = stack.networks["q"], stack.target_networks["q"]
        with torch.no_grad():
            chosen = (q(following) if double == "true" else target_q(following))["q_values"]
            ranked = chosen.argsort(-1, descending=True)
            mask = torch.ones_like(chosen, dtype=torch.bool).scatter_(-1, ranked[..., :1], False)
            value = target_q(following)["q_values"].gather(-1, ranked[..., 1:2]).squeeze(-1)
            now = q(whole.observation)["q_values"]
        whole.next_observation["action_mask"] = mask
        now = now.gather(-1, whole.columns["action"].unsqueeze(-1)).squeeze(-1)
        gamma = stack.hyperparameters["gamma"].unsqueeze(-1)
        target = whole.columns["reward"] + gamma * value * ~whole.columns["terminated"]
        expected = (now - target).square().mean(-1)
        loss = algorithm.loss(stack, whole, torch.Generator())
        torch.testing.assert_close((loss.per_sample * whole.weight).sum(-1), expected)


def test_a_grouped_convolution_is_one_for_each_agent(one_stack):
    """A GPU takes all agents of a stack in one call."""
    algorithm = made("ppo", observations=OBSERVATIONS["image"])
    together = population(varied(algorithm), algorithm)
    (stack,) = together.policy.stacks
    module = stack.networks["policy"]
    assert module.layout.agents == 4
    encoder, weights = module.network.images["observation"], module.weights
    mine = {name: value for name, value in weights.items() if name.startswith("encoder.")}
    images = torch.randint(256, (4, 7, 2, 12, 12), dtype=torch.uint8)
    one_by_one = encoder.forward(module.layout, weights, images)
    joined = encoder._layers(module.layout.architecture, mine, images.transpose(0, 1).flatten(1, 2), 1 / 255)
    joined = joined.unflatten(1, (4, -1)).permute(1, 0, 3, 4, 2).flatten(2)
    torch.testing.assert_close(joined, one_by_one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("low", "high"), [(0, 255), (0, 100), (10, 250)])
def test_bytes_of_an_image_are_read_from_its_bounds(low, high, monkeypatch):
    algorithm = made("ppo", observations=gym.spaces.Box(low, high, (2, 12, 12), np.uint8))
    together = population(varied(algorithm), algorithm)
    network = together.policy.stacks[0].networks["policy"]
    encoder = network.network.images["observation"]
    images = torch.randint(low, high + 1, (1, 7, 2, 12, 12), dtype=torch.uint8)
    numbers = (images.float() - low) / (high - low)
    read = encoder.forward(network.layout, network.weights, images)
    monkeypatch.setattr(encoder, "part", replace(encoder.part, low=0.0, high=1.0))
    torch.testing.assert_close(read, encoder.forward(network.layout, network.weights, numbers))


@pytest.mark.parametrize("cell", CELLS)
def test_values_after_a_step_count_no_new_episode(cell):
    """`Policy.value` goes on with the state that it is given, whatever the observation says of starts."""
    algorithm = made("ppo", f"network.recurrent={cell}")
    together, generator = population(varied(algorithm), algorithm), torch.Generator().manual_seed(1)
    look = shown(algorithm.interface, 4, 3, generator)
    state = rollout_batch(algorithm, together.policy.agents, size=3).recurrent.state
    look["started"][:] = False
    expected = act(together, look, state)[0].extras["value"]
    look["started"][:] = True
    torch.testing.assert_close(together.policy.value(look, state), expected)
    assert not torch.allclose(act(together, look, state)[0].extras["value"], expected)
