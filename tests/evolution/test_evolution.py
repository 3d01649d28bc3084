"""Selection and mutation: frequencies, limits, and what must never happen."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.support import EVERY_MUTATION, agent, algorithm, config, context

from evorl.config import Selection
from evorl.config.fields import HyperparameterRange
from evorl.evolution.mutation import (
    MUTATIONS,
    Context,
    mutate,
    mutate_hyperparameter,
    perturbed,
    sample_hyperparameters,
)
from evorl.evolution.selection import (
    SELECTIONS,
    begins,
    best_first,
    evolve,
    note_ranks,
    rank_correlation,
    ranks,
    select,
)
from evorl.population import initial_population
from evorl.types.agents import Agent, Mutation


def agents(fitness):
    made = [agent(id=index) for index in range(len(fitness))]
    for member, value in zip(made, fitness, strict=True):
        member.fitness = value
    return made


def test_tournament_winners_have_the_frequencies_of_theory():
    """With n agents and tournaments of k, the r-th best wins with probability C(n - r, k - 1) / C(n, k)."""
    fitness, rng = np.array([3.0, 1.0, 4.0, 2.0]), np.random.default_rng(0)
    settings, rounds = Selection(size=2, replace=1), 20_000
    wins = Counter()
    for _ in range(rounds):
        _, *children = select(best_first(fitness, range(len(fitness))), settings, rng)
        wins.update(child.candidate for child in children)
    share = {index: wins[index] / (3 * rounds) for index in range(4)}
    assert share == pytest.approx({2: 3 / 6, 0: 2 / 6, 3: 1 / 6, 1: 0.0}, abs=0.01)


def test_a_gentle_tournament_replaces_the_worst_and_leaves_the_others_in_their_places():
    """Winners of tournaments of two among the n survivors: the r-th best with probability 2 (n - r) / (n (n - 1))."""
    fitness, rng = np.array([5.0, 1.0, 3.0, 2.0, 9.0, 4.0, 8.0, 7.0]), np.random.default_rng(0)
    settings, wins = Selection(size=2, replace=0.25), Counter()
    for _ in range(10_000):
        places = select(best_first(fitness, range(len(fitness))), settings, rng)
        assert [index for index, place in enumerate(places) if place.mutate] == [1, 3]
        assert [place.candidate for place in places if not place.mutate] == [0, 2, 4, 5, 6, 7]
        wins.update(place.candidate for place in places if place.mutate)
    survivors = [4, 6, 7, 0, 5, 2]
    theory = {index: 2 * (6 - rank) / (6 * 5) for rank, index in enumerate(survivors, 1)}
    assert {index: wins[index] / 20_000 for index in range(8)} == pytest.approx(
        {index: theory.get(index, 0.0) for index in range(8)}, abs=0.012
    )


def test_of_equal_agents_gentle_tournaments_replace_the_oldest():
    """Children take the places of the worst, so that places do not tell ages."""
    population, here = agents([500.0] * 4), context("evolution.selection.replace=0.25")
    for generation in range(3):
        population = evolve(population, here, next_id=4 + generation, rng=np.random.default_rng(0))
        for member in population:
            member.fitness = 500.0
        assert sorted(member.id for member in population) == list(range(generation + 1, generation + 5))


def test_a_fault_is_replaced_without_mutation_where_nothing_is_selected():
    members = agents([1.0, None, 3.0, 2.0])
    members[1].fault = "not finite"
    evolved = evolve(members, context(*EVERY_MUTATION), 4, np.random.default_rng(0), begun=False)
    assert [(member.id, member.parent) for member in evolved] == [(0, None), (4, 2), (2, None), (3, None)]
    assert evolved[1].mutation == Mutation("none")


def test_a_fault_has_no_children_though_no_agent_has_a_fitness():
    members = agents([None] * 4)
    members[3].fault = "not finite"
    evolved = evolve(members, context(*EVERY_MUTATION), 4, np.random.default_rng(0), begun=False)
    assert [(member.id, member.parent) for member in evolved] == [(0, None), (1, None), (2, None), (4, 2)]


def test_on_pure_noise_gentle_selection_keeps_more_lines_of_descent():
    """After four selections of 16 agents by noise, means over 2,000 repetitions are 4.2 and 6.9 initial agents."""

    def left(settings, repetitions=300):
        rng, total = np.random.default_rng(0), 0
        for _ in range(repetitions):
            lines = np.arange(16)
            for _ in range(4):
                places = select(best_first(rng.random(16), range(16)), settings, rng)
                lines = lines[[place.candidate for place in places]]
            total += len(set(lines.tolist()))
        return total / repetitions

    assert left(Selection(size=2, replace=1)) == pytest.approx(4.2, abs=0.3)
    assert left(Selection(size=2, replace=0.25)) > 6.5


def test_ranks_are_the_share_of_the_others_beaten():
    fitness = np.array([3.0, np.nan, 1.0, 3.0])
    assert ranks(fitness).tolist() == [0.75, 0.125, 0.375, 0.75]


def test_the_ranks_of_two_generations_are_kept_and_children_have_their_parents():
    members = agents([1.0, 2.0])
    note_ranks(members, context("evolution.burn_in=0").settings)
    assert members[0].ranks == ()
    for _ in range(3):
        note_ranks(members, context("evolution.burn_in=auto").settings)
    assert members[1].ranks == (0.75,) * 2
    assert members[1].child(5).ranks == members[1].ranks
    note_ranks(members, context("evolution.burn_in=5").settings)
    assert members[1].ranks == (), "a branch of the run would tell a correlation of old ranks for ever"


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ("12345678", "12345678", 1.0),
        ("12345678", "87654321", -1.0),
        ("12345678", "21345687", 0.952381),
        ("12245678", "13245678", 0.994030),
        ("12345678", "55555555", None),
        ("1234567", "1234567", None),
    ],
)
def test_ranks_of_successive_generations_correlate_after_spearman(before, now, expected):
    members, settings = agents([float(value) for value in before]), context("evolution.burn_in=auto").settings
    note_ranks(members, settings)
    assert rank_correlation(members) is None
    for member, value in zip(members, now, strict=True):
        member.fitness = float(value)
    note_ranks(members, settings)
    assert rank_correlation(members) == (expected if expected is None else pytest.approx(expected, abs=1e-6))


def test_selection_begins_when_it_is_due_or_ranks_can_be_trusted():
    fixed, auto = context("evolution.burn_in=2").settings, context("evolution.burn_in=auto").settings
    assert [begins(fixed, generation, 1.0, 1.0) for generation in (1, 2, 3)] == [False, False, True]
    assert [begins(auto, 1, known, 0.1) for known in (None, 0.69, 0.71)] == [False, False, True]
    assert [begins(auto, 9, None, spent) for spent in (0.33, 0.34)] == [False, True]
    assert begins(context("evolution.burn_in=0").settings, 1, None, 0.0)


def test_evolution_follows_an_optimum_that_drifts_and_no_fixed_setting_does():
    """The best learning rate falls from 1e-2 to 1e-5 within 60 generations; a decade away from it, nothing is learned.

    It shows that the mechanism works, not that learning rates of reinforcement learning behave so.
    """
    span = "{learning_rate: {min: 1e-6, max: 1e-1}}"
    common = f"evolution.hyperparameters={span}", "evolution.initial=sampled", "population.size=16"
    moves = "evolution.mutation={none: 0, architecture: 0, parameters: 0, hyperparameters: 1}"
    still = moves.replace("none: 0", "none: 1").replace("hyperparameters: 1", "hyperparameters: 0")

    def progress(*overrides):
        """The highest skill in the end, and the median distance from the optimum in the last ten generations."""
        settings, rng = config(*common, *overrides), np.random.default_rng(0)
        here, members, skill, away = Context(settings.evolution, {}), [], {}, []
        for id in range(16):
            members.append(Agent(id, {}, {"learning_rate": 10 ** rng.uniform(-6, -1)}))
            skill[id] = 0.0
        for generation in range(60):
            optimum = -2 - 3 * generation / 60
            for member in members:
                distance = abs(np.log10(member.hyperparameters["learning_rate"]) - optimum)
                skill[member.id] += max(0.0, 1 - distance)
                member.fitness = skill[member.id]
                away.append(distance)
            evolved = evolve(members, here, 1000 * (generation + 1), rng, generation=generation + 1)
            skill |= {member.id: skill[member.parent] for member in evolved if member.id not in skill}
            members = evolved
        return max(skill.values()), float(np.median(away[-160:]))

    best_fixed, _ = progress(still, "evolution.selection.name=none")
    inherited, _ = progress(still, "evolution.selection.replace=0.25")
    for gentle in ("1.0", "0.25"):
        followed, distance = progress(moves, f"evolution.selection.replace={gentle}")
        assert followed > 1.5 * max(best_fixed, inherited)
        assert distance < 0.6


@pytest.mark.parametrize("name", SELECTIONS)
def test_every_selection_fills_the_population_and_keeps_the_best(name):
    for size in (2, 3, 8):
        fitness = np.random.default_rng(size).normal(size=size)
        fitness[0] = np.nan
        places = select(best_first(fitness, range(len(fitness))), Selection(name=name), np.random.default_rng(1))
        assert len(places) == size
        best = int(np.nanargmax(fitness))
        assert any(place.candidate == best and not place.mutate for place in places)
        if size > 2:
            assert not any(place.candidate == 0 and place.mutate for place in places), "an agent without fitness won"


def test_the_elite_is_never_mutated_and_children_know_their_parents():
    before = agents([1.0, 7.0, 3.0, 2.0])
    start = {member.id: member.child(0).tensors for member in before}
    here = context(*EVERY_MUTATION, "evolution.selection.replace=1")
    evolved = evolve(before, here, next_id=10, rng=np.random.default_rng(2))
    assert evolved[0] is before[1]
    torch.testing.assert_close(evolved[0].tensors, start[1], rtol=0, atol=0)
    assert [member.id for member in evolved[1:]] == [10, 11, 12]
    for child in evolved[1:]:
        assert child.parent in range(4)
        assert child.fitness is None
        assert child.mutation.kind != "initial"
    for member in before:
        torch.testing.assert_close(member.tensors, start[member.id], rtol=0, atol=0)


def test_kinds_of_mutation_come_with_their_weights():
    here = context(
        "evolution.mutation={none: 0.4, architecture: 0.2, parameters: 0.1, activation: 0.1, hyperparameters: 0.2}",
        "evolution.hyperparameters={gamma: {min: 0.9, max: 0.999}}",
    )
    rng, seen, rounds = np.random.default_rng(0), Counter(), 1000
    parent = agent()
    for _ in range(rounds):
        child = parent.child(1)
        mutate(child, here, rng)
        seen[child.mutation.kind] += 1
    share = {kind: count / rounds for kind, count in seen.items()}
    expected = {"none": 0.4, "architecture": 0.2, "parameters": 0.1, "activation": 0.1, "hyperparameters": 0.2}
    assert share == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("kind", MUTATIONS)
def test_every_mutation_changes_what_it_says_and_nothing_else(kind):
    here, rng = context(*EVERY_MUTATION), np.random.default_rng(1)
    parent = agent()
    child = parent.child(5)
    mutation = MUTATIONS[kind](child, here, rng)
    assert mutation is not None
    assert mutation.kind == kind
    tensors_differ = any(
        not torch.equal(value, child.tensors["q"]["parameters"].get(name, torch.zeros(0)))
        for name, value in parent.tensors["q"]["parameters"].items()
    )
    assert tensors_differ == (kind in ("parameters", "architecture"))
    assert (child.hyperparameters != parent.hyperparameters) == (kind == "hyperparameters")
    assert (child.architectures != parent.architectures) == (kind in ("architecture", "activation"))


def test_a_mutation_with_nothing_to_change_says_so():
    here = context(
        "evolution.mutation={none: 0, architecture: 0, parameters: 0, hyperparameters: 1}",
        "evolution.hyperparameters={}",
    )
    child = agent().child(1)
    mutate(child, here, np.random.default_rng(0))
    assert str(child.mutation) == "none (hyperparameters: nothing to change)"


def test_parameter_noise_is_relative_to_each_weight():
    child = agent()
    before = {name: value.clone() for name, value in child.tensors["q"]["parameters"].items()}
    MUTATIONS["parameters"](child, context("evolution.mutation.strength=0.1"), np.random.default_rng(0))
    relative = torch.cat(
        [((child.tensors["q"]["parameters"][name] - value) / value.abs()).flatten() for name, value in before.items()]
    )
    assert relative.std() == pytest.approx(0.1, rel=0.1)
    assert relative.mean() == pytest.approx(0.0, abs=0.02)


SCALES = {
    "log": ("learning_rate", 1e-4, 1e-2, 1e-3, np.log),
    "linear": ("tau", 0.0, 1.0, 0.5, lambda values: values),
    "one_minus_log": ("gamma", 0.9, 0.999, 0.99, lambda values: -np.log1p(-values)),
}


def walk(here, name, start, moves, rng):
    """The values that a hyperparameter takes in so many mutations that nobody selects."""
    member, seen = SimpleNamespace(hyperparameters={name: start}), []
    for _ in range(moves):
        mutate_hyperparameter(member, here, rng)
        seen.append(member.hyperparameters[name])
    return np.array(seen)


def perturbing(name, low, high, scale):
    """The settings of runs that perturb one hyperparameter only."""
    span = HyperparameterRange(min=low, max=high, scale=scale, grow=1.2 if scale != "linear" else 1.02)
    return SimpleNamespace(settings=SimpleNamespace(hyperparameters={name: span}))


@pytest.mark.parametrize("scale", SCALES)
def test_moves_that_nobody_selects_lead_nowhere(scale):
    """With factors of 1.2 and 0.8 a hyperparameter fell to 0.66 of itself in 20 of them."""
    name, low, high, start, place = SCALES[scale]
    rng, here = np.random.default_rng(0), perturbing(name, low, high, scale)
    ends = np.array([walk(here, name, start, 10, rng)[-1] for _ in range(1000)])
    moves = place(ends) - place(np.array(start))
    assert moves.std() > 0.01
    assert abs(moves.mean()) < 4 * moves.std() / np.sqrt(1000)


@pytest.mark.parametrize("scale", SCALES)
def test_no_end_of_a_range_keeps_what_comes_to_it(scale):
    """0.99 jumped between both ends of its range for ever where it was perturbed on a log scale."""
    name, low, high, start, place = SCALES[scale]
    values = walk(perturbing(name, low, high, scale), name, start, 10_000, np.random.default_rng(1))
    share = (place(values) - place(np.array(low))) / (place(np.array(high)) - place(np.array(low)))
    counts, _ = np.histogram(share, bins=5, range=(0, 1))
    assert counts.sum() == 10_000
    assert counts.min() > 1_000, "all parts of the range are come to alike"
    assert np.isin([low, high], values).all()
    assert np.diff(values).all(), "at a bound it goes the other way"


def test_numbers_near_one_are_turned_by_their_distance_from_one():
    for name, overrides in (("gamma", ()), ("gae_lambda", ("algorithm={name: a2c}",))):
        span = config(f"evolution.hyperparameters={{{name}: {{min: 0.8, max: 0.999}}}}", *overrides)
        span = span.evolution.hyperparameters[name]
        assert span.scale == "one_minus_log"
        up, down = (perturbed(0.98, span, factor) for factor in span.factors)
        assert 1 - up == pytest.approx(0.02 / 2)
        assert 1 - down == pytest.approx(0.02 * 2)
        assert [perturbed(1.0, span, factor) for factor in span.factors] == [0.999, 0.999], "a first value may be 1"
    other = config("evolution.hyperparameters={gamma: {min: 0.8, max: 1, scale: linear}, tau: {min: 1e-3, max: 1e-2}}")
    scales = {name: span.scale for name, span in other.evolution.hyperparameters.items()}
    assert scales == {"gamma": "linear", "tau": "log"}


def test_integers_do_not_stick():
    """int(4 * 1.2) == 4, for ever; the value underneath moves on."""
    span = HyperparameterRange(min=1, max=120, grow=1.2)
    value = 4.0
    seen = []
    for _ in range(10):
        value = perturbed(value, span, span.factors[0])
        seen.append(round(value))
    assert seen[-1] == 25
    assert seen == sorted(seen)
    for _ in range(10):
        value = perturbed(value, span, span.factors[1])
    assert round(value) == 4


@pytest.mark.parametrize("scale", SCALES)
def test_resampled_and_first_values_are_drawn_evenly_on_the_scale(scale):
    name, low, high, start, place = SCALES[scale]
    span = HyperparameterRange(min=low, max=high, scale=scale, resample=1.0)
    assert (span.at(0.0), span.at(1.0)) == pytest.approx((low, high))
    rng = np.random.default_rng(0)
    moves = walk(SimpleNamespace(settings=SimpleNamespace(hyperparameters={name: span})), name, start, 2000, rng)
    first = np.array([sample_hyperparameters({name: span}, rng)[name] for _ in range(2000)])
    for values in (moves, first):
        share = np.sort((place(values) - place(np.array(low))) / (place(np.array(high)) - place(np.array(low))))
        # The statistic of Kolmogorov and Smirnov; 1.63 / sqrt(n) is exceeded once in a hundred times.
        assert np.abs(share - np.arange(2000) / 2000).max() < 1.63 / np.sqrt(2000)


def test_a_quarter_of_moves_is_drawn_anew_and_the_rest_are_by_a_factor_of_two_where_nothing_is_said():
    """Moves by 1.2 alone were not told from no search (docs/evidence.md)."""
    span = HyperparameterRange(min=1e-4, max=1e-2, scale="log")
    here = SimpleNamespace(settings=SimpleNamespace(hyperparameters={"learning_rate": span}))
    values = walk(here, "learning_rate", 1e-3, 4000, np.random.default_rng(0))
    ratios = np.abs(np.log(values[1:] / values[:-1]))
    clipped = np.isin(values[1:], [1e-4, 1e-2])
    assert np.isclose(ratios, np.log(2))[~clipped].mean() == pytest.approx(0.75, abs=0.05)


def test_first_agents_are_drawn_from_the_limits_of_what_may_mutate():
    given = (
        "population.size=30", "evolution.initial=sampled", "evolution.hyperparameters={gamma: {min: 0.9, max: 0.999}}",
        "evolution.architecture={min_units: 8, max_units: 100}", "network.hidden_sizes=[32, 32]",
    )  # fmt: skip
    settings = config(*given)
    members = initial_population(settings, algorithm(*given))
    gammas = [member.hyperparameters["gamma"] for member in members]
    assert len(set(gammas)) == 30
    assert all(0.9 <= gamma <= 0.999 for gamma in gammas)
    assert {member.hyperparameters["learning_rate"] for member in members} == {settings.algorithm.learning_rate}
    widths = [width for member in members for width in member.architectures["q"].hidden_sizes]
    assert min(widths) >= 8
    assert max(widths) <= 100
    assert np.median(widths) == pytest.approx(np.sqrt(800), rel=0.35)
    fixed = initial_population(config(*given, "evolution.mutation.architecture=0"), algorithm(*given))
    assert {member.architectures["q"].hidden_sizes for member in fixed} == {(32, 32)}
    assert [member.hyperparameters["gamma"] for member in fixed] == gammas


def test_agents_are_left_alone_until_evolution_is_due():
    members = agents([1.0, 2.0, 3.0])
    assert evolve(members, context(), 10, np.random.default_rng(0), begun=False) == members
    evolved = evolve(members, context(), 10, np.random.default_rng(0), generation=7)
    assert {member.parent_generation for member in evolved if member.id >= 10} == {7}


def test_without_selection_only_what_is_lost_is_replaced():
    members = agents([1.0, 5.0, 3.0])
    members[0].fault = "NaN"
    evolved = evolve(members, context("evolution.selection.name=none"), 10, np.random.default_rng(0))
    assert [member.id for member in evolved] == [10, 1, 2]
    assert evolved[0].parent == 1


def test_linear_scale_moves_by_a_share_of_the_range():
    span = HyperparameterRange(min=0.0, max=2.0, scale="linear", grow=1.25)
    assert span.factors == (1.25, 0.75)
    assert perturbed(0.0, span, span.factors[0]) == pytest.approx(0.5)
    assert perturbed(1.0, span, span.factors[1]) == pytest.approx(0.5)
    assert perturbed(1.9, span, span.factors[0]) == 2.0
    assert HyperparameterRange(min=0.0, max=2.0, scale="linear").factors == pytest.approx((1.2, 0.8))


def test_evolution_is_a_function_of_its_generator():
    results = []
    for _ in range(2):
        evolved = evolve(agents([1.0, 2.0, 3.0]), context(*EVERY_MUTATION), 3, np.random.default_rng(9))
        results.append(([member.describe() for member in evolved], [member.tensors for member in evolved]))
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=0)


def test_a_network_without_room_for_layers_changes_its_width():
    made = algorithm("network.hidden_sizes=[16, 16, 16]")
    (child,) = initial_population(config("network.hidden_sizes=[16, 16, 16]", "population.size=1"), made)
    here = Context(
        config("evolution.mutation.new_layer=1", "evolution.architecture.max_layers=3").evolution, made.networks
    )
    mutation = MUTATIONS["architecture"](child, here, np.random.default_rng(0))
    assert mutation is not None
    assert mutation.target.startswith("hidden.")
