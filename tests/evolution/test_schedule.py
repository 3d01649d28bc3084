"""Scheduled mutations: each kind does again to an agent what was recorded of another one."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.support import agent, algorithm, check_tensors, context

from evorl.config import Schedule, ScheduledMutation
from evorl.evolution.schedule import follow
from evorl.evolution.selection import evolve
from evorl.population.initial import check_description
from evorl.types import Mutation, UserError


def followed(member, *mutations, generation=2):
    """The agent after a generation, on a schedule of these mutations."""
    here = context()
    schedule = Schedule(hyperparameters={}, architectures={}, mutations=mutations)
    here = replace(here, settings=here.settings.model_copy(update={"schedule": schedule}))
    return follow(member, here, generation, 7, np.random.default_rng(0))


def scheduled(kind, target="", before=None, after=None, generation=2):
    return ScheduledMutation(generation=generation, kind=kind, target=target, before=before, after=after)


def test_an_agent_for_which_nothing_is_due_stays_itself():
    member = agent()
    assert followed(member, scheduled("none", generation=1), scheduled("none", generation=3)) is member


def test_a_kind_that_cannot_be_repeated_is_named():
    with pytest.raises(UserError, match="mine of 'x' after generation 2 does not fit: mutations of this kind"):
        followed(agent(), scheduled("mine", "x"))


def test_of_several_on_a_schedule_one_with_a_fault_is_replaced_by_a_child_of_the_best():
    here = context()
    schedule = Schedule(hyperparameters={}, architectures={}, mutations=())
    here = replace(here, settings=here.settings.model_copy(update={"schedule": schedule}))
    members = [agent(id=index) for index in range(3)]
    members[0].fitness, members[1].fault, members[2].fitness = 1.0, "the loss of q was not finite", 2.0
    evolved = evolve(members, here, next_id=3, rng=np.random.default_rng(0))
    assert [(member.id, member.parent, member.fault) for member in evolved] == [
        (0, None, None),
        (4, 2, None),
        (2, None, None),
    ]


def test_a_child_has_all_that_is_due_in_its_order():
    gamma = [scheduled("hyperparameters", "gamma", 0.99, value) for value in (0.9, 0.8)]
    child = followed(agent(), *gamma, scheduled("hyperparameters", "learning_rate", 1e-3, 2e-3, generation=3))
    assert (child.id, child.parent, child.parent_generation) == (7, 0, 2)
    assert child.hyperparameters["gamma"] == 0.8
    assert child.hyperparameters["learning_rate"] == agent().hyperparameters["learning_rate"]
    assert child.mutation == Mutation("hyperparameters", "gamma", 0.99, 0.8)


def test_a_child_with_several_changed_settings_is_recorded_so_that_all_of_them_can_be_followed():
    due = scheduled("hyperparameters", "gamma", 0.99, 0.9), scheduled("hyperparameters", "learning_rate", 1e-3, 2e-3)
    assert followed(agent(), *due).mutation == Mutation("migration", "hyperparameters")


@pytest.mark.parametrize("size", [12, 16, 40])
def test_a_layer_gets_the_size_that_was_recorded(size):
    child = followed(agent(), scheduled("architecture", "hidden.1", 16, size))
    assert child.architectures["q"].hidden_sizes == (16, size)
    check_tensors(child, algorithm())


def test_activations_and_noise_come_again():
    child = followed(agent(), scheduled("activation", "", "relu", "tanh"))
    assert child.architectures["q"].activation == "tanh"
    before, after = agent(), followed(agent(), scheduled("parameters", "noise", None, 0.1))
    weights = [each.tensors["q"]["parameters"]["hidden.1.weight"] for each in (before, after)]
    change = (weights[1] - weights[0]).std() / weights[0].std()
    assert 0.02 < change < 0.5


@pytest.mark.parametrize(
    "wrong",
    [
        scheduled("hyperparameters", "gama", 0.99, 0.9),
        scheduled("architecture", "hidden.9", 16, 32),
        scheduled("architecture", "hidden.1", 16, "many"),
        scheduled("growth", "hidden.1", 16, 32),
    ],
)
def test_what_does_not_fit_is_named_with_its_generation(wrong):
    with pytest.raises(UserError, match=f"^evolution.schedule: {wrong.kind} of '{wrong.target}' after generation 2 do"):
        followed(agent(), wrong)


def test_each_hidden_layer_of_a_schedule_needs_its_number_of_residual_layers():
    member = agent()
    member.architectures["q"] = replace(member.architectures["q"], residual_layers=())
    with pytest.raises(UserError, match=r"^evolution\.schedule: q has 2 hidden_sizes and 0 residual_layers"):
        check_description(member, algorithm(), "evolution.schedule")
