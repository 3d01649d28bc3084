"""Files of agents that somebody has prepared: one line says which, and nothing is built from them."""

import json
import resource
import time

import pytest
import torch
from helpers.forged import DESCRIBED, described, hostile, raw
from helpers.support import agent, algorithm

from evorl.population import check_agents
from evorl.system.formats import decode_agents, decode_tensors, encode_agents
from evorl.types.outcomes import UserError

FILES = {
    "nothing": b"",
    "a header past the end": (2**60).to_bytes(8, "little") + b"{}",
    "a header of no JSON": raw(b"{" * 50),
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
