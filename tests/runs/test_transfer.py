"""Runs whose first agents another run has trained."""

import re
import shutil

import gymnasium as gym
import pytest
import torch
from helpers.support import agent as new_agent
from helpers.support import algorithm, config, error_line, lines, train

from evorl.commands.command import run_command
from evorl.distributed import Ranks
from evorl.population import Policy
from evorl.runs.reading.transfer import first_agents
from evorl.runs.storage.directory import ELITE_AGENT, load_elite
from evorl.types.outcomes import UserError


@pytest.fixture
def source(run):
    return run.rename(run.parent / "before")


def taken(source, *overrides):
    asked = (f"population.from={source}", *overrides)
    spaces = {"observations": gym.spaces.Box(-1.0, 1.0, (4,)), "actions": gym.spaces.Discrete(2)}
    return first_agents(config(*asked), algorithm(*asked, **spaces), Ranks())


def same_tensors(one, other):
    assert one.architectures == other.architectures
    for network, roles in one.tensors.items():
        for role, named in roles.items():
            for name, value in named.items():
                assert torch.equal(value, other.tensors[network][role][name])


def test_population_from_begins_with_the_elite(source):
    _, elite = load_elite(source)
    agents = taken(source, "population.size=3")
    assert [agent.id for agent in agents] == [0, 1, 2]
    for agent in agents:
        same_tensors(agent, elite)
        assert (agent.hyperparameters, agent.state) == (elite.hyperparameters, elite.state)
        assert (agent.parent, agent.parent_generation, agent.fitness) == (None, None, None)
        assert str(agent.mutation) == f"initial (agent {elite.id} of before)"
    first, second, _ = agents
    next(iter(first.tensors["q"]["parameters"].values())).zero_()
    same_tensors(second, elite)


def test_agents_of_another_run_take_the_hyperparameters_that_are_named(source, capsys):
    _, elite = load_elite(source)
    (agent,) = taken(
        source, "population.size=1", "algorithm.learning_rate=0.25", "population.hyperparameters=[learning_rate]"
    )
    same_tensors(agent, elite)
    assert agent.hyperparameters == elite.hyperparameters | {"learning_rate": 0.25}
    assert train("run.name=b", f"population.from={source}", "algorithm.learning_rate=0.25", "evolution=false") == 0
    assert load_elite(source.parent / "b")[1].hyperparameters == elite.hyperparameters | {"learning_rate": 0.25}
    capsys.readouterr()
    assert train(f"population.from={source}", "population.hyperparameters=[lerning_rate]") == 2
    assert "no hyperparameter 'lerning_rate'; did you mean 'learning_rate'?" in error_line(capsys)


def test_a_hyperparameter_that_one_run_lacks_can_be_named(source):
    _, elite = load_elite(source)
    assert "max_grad_norm" not in elite.hyperparameters
    begin, follow = (f"population.from={source.parent / name}" for name in (source.name, "b"))
    assert train("run.name=b", begin, "algorithm.max_grad_norm=5", "evolution=false") == 0
    assert load_elite(source.parent / "b")[1].hyperparameters == elite.hyperparameters | {"max_grad_norm": 5}
    assert train("run.name=c", follow, "algorithm.max_grad_norm=null", "evolution=false") == 0
    assert load_elite(source.parent / "c")[1].hyperparameters == elite.hyperparameters


def test_population_from_is_noted_in_the_lineage(source, capsys):
    _, elite = load_elite(source)
    asked = ("population.from=runs/before", "training.max_steps=40", "run.name=after")
    assert train(*asked) == 0
    run = source.parent / "after"
    first = lines(run / "lineage.jsonl")[0]
    assert first["mutation"] == {
        "kind": "initial", "target": f"agent {elite.id} of before", "before": None, "after": None,
    }  # fmt: skip
    assert first["state"]["updates"]["q"] > elite.state.updates["q"]
    capsys.readouterr()
    run_command(["lineage", "runs/after"])
    assert f"initial (agent {elite.id} of before)" in capsys.readouterr().out
    assert f"from: {source}" in (run / "config.yaml").read_text()
    shutil.rmtree(source)
    assert train(*asked, "run.resume=auto", "training.max_steps=80") == 0, "what was taken stands in the checkpoint"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("algorithm.noisy={}",), "population.from: .*before: agent .*"),
        (
            ("environment.id=Acrobot-v1",),
            "population.from: .*before: was trained in environment.id 'CartPole-v1', but this run is in "
            "'Acrobot-v1': agent .*",
        ),
    ],
)
def test_agents_that_the_run_could_not_train_are_refused(source, overrides, message, capsys):
    assert train(f"population.from={source}", "run.name=after", *overrides) == 2
    assert re.search(message, error_line(capsys))


def test_what_is_no_run_or_damaged_is_refused(source, capsys):
    assert train("population.from=runs/none", "run.name=a") == 2
    assert "error: population.from: " in error_line(capsys)
    file = source / ELITE_AGENT
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"population.from: .*agent.safetensors: not a file of agents"):
        taken(source)


@pytest.mark.parametrize("annealing", [True, False])
def test_annealing_begins_anew_since_it_ends_with_a_run(annealing):
    """Also without it, since a branch may begin it."""
    a2c = algorithm(f"algorithm={{name: a2c, annealing: {str(annealing).lower()}}}")
    before = new_agent(dqn=a2c)
    before.state.acting["steps"] = 1000.0
    assert a2c.adopt(before, a2c.settings).state.acting["steps"] == 0


BOX = {"observations": gym.spaces.Box(-1.0, 1.0, (3,)), "actions": gym.spaces.Box(-1.0, 1.0, (2,))}


def on_the_box(name, settings):
    return algorithm(f"algorithm={{name: {name}, {settings}}}", "network.hidden_sizes=[8]", **BOX)


def temperature(agent, sac):
    (stack,) = Policy([agent], sac, torch.Generator()).stacks
    return sac.log_temperature(stack).exp().item()


def test_sac_keeps_its_temperature_where_the_first_one_is_another():
    theirs, own = (on_the_box("sac", f"initial_temperature: {first}") for first in (0.02, 0.5))
    agent = new_agent(dqn=theirs)
    learned = temperature(agent, theirs)
    assert temperature(own.adopt(agent, theirs.settings), own) == pytest.approx(learned)


@pytest.mark.parametrize(
    ("theirs", "ours", "told"),
    [
        ("distribution: none", "distribution: none", None),
        (
            "distribution: categorical",
            "distribution: categorical, categorical: {v_max: 500}",
            "categorical, -10.0, 10.0, and here as categorical, -10.0, 500.0 ",
        ),
        (
            "distribution: categorical",
            "distribution: quantile, quantile: {quantiles: 51}",
            "categorical, -10.0, 10.0, and here as quantile ",
        ),
    ],
)
def test_population_from_refuses_other_value_distributions(theirs, ours, told):
    other, own = (algorithm(f"algorithm={{name: dqn, {settings}}}") for settings in (theirs, ours))
    agent = new_agent(dqn=other)
    if told is None:
        assert own.adopt(agent, other.settings) is agent
        return
    with pytest.raises(UserError, match=f"^its agents represent values as .*{told}"):
        own.adopt(agent, other.settings)


def test_scales_of_state_dependent_noise_are_kept_where_the_first_one_is_another():
    theirs, own = (
        on_the_box("sac", f"state_dependent_noise: {{initial_log_scale: {first}}}") for first in (-3.0, -1.0)
    )
    agent = new_agent(dqn=theirs)
    before = agent.tensors["actor"]["parameters"]["noise_log_scale.weight"].clone()
    adopted = own.adopt(agent, theirs.settings).tensors["actor"]["parameters"]["noise_log_scale.weight"]
    torch.testing.assert_close(adopted - 1.0, before - 3.0)
