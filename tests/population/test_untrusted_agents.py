"""Files of agents that somebody has prepared: one line says which, and nothing is built from them."""

import json
import resource
import time

import numpy as np
import pytest
import torch
from helpers.forged import DESCRIBED, described, hostile, raw
from helpers.support import agent, algorithm

from evorl.algorithms import SETTINGS, make_algorithm
from evorl.config import validate
from evorl.envs import Environments
from evorl.evolution.mutation import mutate_layers
from evorl.population import check_agents, initial, initial_population
from evorl.runs.launch import check
from evorl.system.formats import MAX_HEADER_BYTES, decode_agents, decode_tensors, encode_agents, header_bytes
from evorl.types import Mutation, UserError

FILES = {
    "nothing": b"",
    "a header past the end": (2**60).to_bytes(8, "little") + b"{}",
    "a header of no JSON": raw(b"{" * 50),
    "a header of 9 MB": raw({"__metadata__": {"agents": "[]", "more": "x" * 9_000_000}}),
    "a header of nested lists": raw(b"[" * 1_000_000),
    "no metadata": raw({}),
    "an agent of a number": described("[1]"),
    "more tensors than agents": described("[]"),
    "a tensor without a place": described("[]", w=torch.zeros(1)),
    "shapes that overflow": raw(
        {
            "__metadata__": {"agents": "[]"},
            "0/q/parameters/w": {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]},
        }
    ),
    "offsets past the end": raw(
        {"__metadata__": {"agents": "[]"}, "w": {"dtype": "U8", "shape": [10**15], "data_offsets": [0, 10**15]}}
    ),
}


def check_refused(payload):
    """The UserError for a file of agents: soon, on one line once printed, and without memory."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    with pytest.raises(UserError) as caught:
        check_agents(decode_agents(payload, "here"), algorithm(), "here")
    assert time.perf_counter() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000, "kilobytes"
    assert str(caught.value).startswith("here: ")
    return str(caught.value)


@pytest.mark.parametrize("changes", DESCRIBED.values(), ids=DESCRIBED)
def test_an_agent_that_is_described_so_is_refused(changes):
    check_refused(hostile(**changes))


def test_an_agent_that_is_described_as_it_is_is_not_refused():
    check_agents(decode_agents(hostile(id=3), "here"), algorithm(), "here")


@pytest.mark.parametrize("payload", FILES.values(), ids=FILES)
def test_a_file_that_holds_no_agents_is_refused(payload):
    error = check_refused(payload)
    assert "not a file of agents" in error
    assert "\n" not in error
    assert len(error) < 600


def test_a_file_that_is_no_safetensors_holds_no_tensors():
    with pytest.raises(UserError, match="here: not a file of tensors"):
        decode_tensors(FILES["a header of no JSON"], "here")


def spoiled(change):
    (member,) = decode_agents(encode_agents([agent()]), "here")
    roles = next(iter(member.tensors.values()))
    change(roles, sorted(roles["parameters"])[0])
    return encode_agents([member])


TENSORS = {
    "another shape": lambda roles, name: roles["parameters"].update({name: torch.zeros(2, 3)}),
    "no numbers": lambda roles, name: roles["parameters"].update({name: torch.zeros(0, 2**40)}),
    "another type": lambda roles, name: roles["target"].update({name: roles["target"][name].double()}),
    "not finite": lambda roles, name: roles["parameters"][name].view(-1)[0].fill_(float("nan")),
    "moments not finite": lambda roles, name: roles["square"][name].view(-1)[0].fill_(float("inf")),
    "a tensor missing": lambda roles, name: roles["mean"].pop(name),
    "a tensor too many": lambda roles, name: roles["buffers"].update({"x" * 100_000: torch.zeros(1)}),
    "a role too many": lambda roles, name: roles.update(secret={name: torch.zeros(1)}),
}


@pytest.mark.parametrize("change", TENSORS.values(), ids=TENSORS)
def test_tensors_that_are_not_the_architectures_are_refused(change):
    error = check_refused(spoiled(change))
    assert "\n" not in error
    assert len(error) < 600


def test_tensors_of_an_agent_before_the_first_are_refused():
    """Counted from the end, they would have replaced another agent's."""
    member = agent()
    module, roles = next(iter(member.tensors.items()))
    name, value = next(iter(roles["parameters"].items()))
    payload = described(json.dumps([member.describe()]), **{f"-1/{module}/parameters/{name}": torch.zeros_like(value)})
    assert "belongs to no agent" in check_refused(payload)


NONSENSE = {
    "an id past all counting": {"id": 10**16},
    "a fitness of NaN": {"fitness": float("nan")},
    "a mutation of a long kind": {"mutation__kind": "x" * 100_000},
    "a fault of a megabyte": {"fault": "x" * 1_000_000},
    "a learning rate of 0": {"hyperparameters__learning_rate": 0.0},
    "a discount of NaN": {"hyperparameters__gamma": float("nan")},
    "a batch past memory": {"hyperparameters__batch_size": 1e12},
    "updates without end in a step": {"hyperparameters__learn_step": 1e-300},
    "an infinite exploration rate": {"state__acting__epsilon": float("inf")},
    "a debt of many updates": {"state__update_debt": 1e6},
    "a negative variance of rewards": {"state__rewards__variance": -1.0},
}


@pytest.mark.parametrize("changes", NONSENSE.values(), ids=NONSENSE)
def test_numbers_out_of_range_are_refused(changes):
    error = check_refused(hostile(**changes))
    assert "\n" not in error
    assert len(error) < 600


CARTPOLE, PENDULUM = {"id": "CartPole-v1"}, {"id": "Pendulum-v1"}
ROOM: dict[str, dict[str, dict[str, object]]] = {
    "dqn": {"algorithm": {"name": "dqn", "normalize_observations": True}, "environment": CARTPOLE},
    "sac": {"algorithm": {"name": "sac"}, "environment": PENDULUM},
    "td3": {"algorithm": {"name": "td3"}, "environment": PENDULUM},
    "recurrent ppo": {"algorithm": {"name": "ppo"}, "environment": CARTPOLE, "network": {"recurrent": "lstm"}},
}


@pytest.mark.parametrize("sections", ROOM.values(), ids=ROOM)
def test_populations_that_no_checkpoint_has_room_for_are_refused_before_training(sections, monkeypatch):
    """Also those whose header is within the bound at first: layers that are added make it longer."""
    bounds = []
    monkeypatch.setattr(initial, "header_bytes", lambda *given: bounds.append(header_bytes(*given)) or bounds[-1])
    limits = {"evolution": {"architecture": {"max_layers": 4, "min_units": 8}}}
    settings = validate({**sections, **limits, "population": {"size": 6}}, SETTINGS)
    check(settings)
    environments = Environments(settings.environment, 1, 1)
    made = make_algorithm(settings, environments.interface)
    environments.close()
    agents = initial_population(settings, made)
    rng = np.random.default_rng(0)
    monkeypatch.setattr("evorl.evolution.mutation.MIN_LAYERS", 9)  # They are only added.
    for member in agents:
        member.mutation, member.fitness = Mutation("architecture", "actor.hidden.0", 1e-17 / 3, 1 / 3), 1 / 3
        while mutate_layers(member, made.networks, settings.evolution.architecture, rng):
            pass
    payload = encode_agents(agents)
    needed = int.from_bytes(payload[:8], "little")
    assert needed / 6 <= bounds[0] < 1.3 * needed / 6
    most, one = MAX_HEADER_BYTES // bounds[0], {**sections["environment"], "num_envs": 1}
    with pytest.raises(UserError, match=r"population.size: a checkpoint has room for [0-9,]+ agents .*; 9,999 are"):
        check(validate({**sections, **limits, "population": {"size": 9999}, "environment": one}, SETTINGS))
    assert 300 < most < 3000


def test_an_agent_whose_minibatches_are_too_small_to_normalise_advantages_is_refused():
    """It may come from `population.from`, where no range bounds it."""
    ppo = algorithm("algorithm={name: ppo, rollout_steps: 64, batch_size: 8, sequence_length: 64}")
    for size in (2.0, 1.5):
        members = [agent(dqn=ppo, batch_size=size)]
        if size == 2.0:
            check_agents(members, ppo, "here")
            continue
        with pytest.raises(UserError, match=r"^here: agent 0: algorithm.normalize_advantage: .* would all be 0"):
            check_agents(members, ppo, "here")
