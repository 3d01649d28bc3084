"""Islands and their twins: who descends from whom, whose transitions agents draw, and the comparison at the end."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.support import SMALL, algorithm, config, cut_back, lines, output_of, seen, train, train_below
from robustness.comparison import differences

from evorl.distributed import Placement, Ranks
from evorl.population import initial_population
from evorl.population.evaluation import Evaluator
from evorl.runs.agents.comparison import ERROR, compare, comparison_of, sentence, share_interval, sign_test
from evorl.runs.launch import load_config
from evorl.runs.output.console import announcement, closing_lines, generation_line
from evorl.runs.output.metrics import record_of
from evorl.runs.run import Run
from evorl.runs.storage.progress import Progress
from evorl.system.stopwatch import Stopwatch
from evorl.types.agents import Agent
from evorl.types.batches import Transition
from evorl.types.outcomes import EvorlWarning

pytestmark = pytest.mark.filterwarnings("ignore:population.control")
PAIRED = (
    "population={size: 3, islands: 2, control: true}", "evolution.initial=sampled",
    "evolution.hyperparameters={learning_rate: {min: 1e-4, max: 1e-2}}", "evolution.mutation.hyperparameters=1",
    "training={target_fitness: 0, max_steps: 160}", "checkpoint.keep=9",
)  # fmt: skip


def summary(run):
    return json.loads((run / "summary.json").read_text())


@pytest.fixture(scope="module")
def paired(tmp_path_factory):
    """A run of islands and twins, whose target is reached at once."""
    return train_below(tmp_path_factory.mktemp("paired"), *PAIRED)


def test_twins_stay_what_they_were_and_islands_keep_to_themselves(paired):
    rows = lines(paired / "lineage.jsonl")
    places, generations = [(row["island"], row["control"]) for row in rows[:12]], len(rows) // 12
    assert places == [(0, False)] * 3 + [(1, False)] * 3 + [(0, True)] * 3 + [(1, True)] * 3
    assert generations >= 4, "the target ends no run with twins"
    populations = {}
    for row in rows:
        populations.setdefault(row["id"], (row["island"], row["control"]))
        assert populations[row["id"]] == (row["island"], row["control"])
    children = [row for row in rows if row["parent"] is not None]
    assert {populations[row["id"]] for row in children} == {(0, False), (1, False)}
    assert all(populations[row["parent"]] == populations[row["id"]] for row in children)
    twins = [(row["id"], row["mutation"]["kind"], row["hyperparameters"]) for row in rows if row["control"]]
    assert twins == [(6 + place, "initial", rows[place]["hyperparameters"]) for place in range(6)] * generations
    assert len({row["hyperparameters"]["learning_rate"] for row in rows[:6]}) == 6


def test_a_run_says_first_what_it_compares_and_last_how_that_ended(paired):
    settings, ended = config(*PAIRED), summary(paired)
    assert announcement(settings) == [
        "dqn on CartPole-v1: 2 islands of 3 agents x 2 environments, and as many twins without evolution",
        "for 160 steps of each agent, without a test of the target, as twins train for equal steps",
    ]
    compared = ended["comparison"]
    assert (compared["islands"], compared["episodes"], len(compared["pairs"])) == (2, 3, 2)
    assert closing_lines(ended, settings, paired, has_elite=True)[-1] == sentence(compared)
    last = lines(paired / "metrics.jsonl")[-1]
    points = record_of(last, settings).points
    for name, fitness in (("evolved", last["fitness"][:6]), ("control", last["fitness"][6:])):
        assert points[f"{name}/best"] == max(fitness)
        assert points[f"{name}/mean"] == pytest.approx(np.mean(fitness))


def test_too_few_islands_to_show_anything_are_doubted(in_directory):
    with pytest.warns(EvorlWarning, match="population.control: an exact test of fewer than 6 islands can never show"):
        load_config(PAIRED, SMALL)


def test_twins_begin_with_the_same_parameters():
    chosen = config(*PAIRED)
    agents = initial_population(chosen, algorithm(*PAIRED))
    for agent, twin in zip(agents[:6], agents[6:], strict=True):
        for name, value in agent.tensors["q"]["parameters"].items():
            assert torch.equal(value, twin.tensors["q"]["parameters"][name])
    assert [agent.id for agent in agents] == list(range(12))


def test_a_resumed_run_of_islands_ends_as_undisturbed(in_directory, paired):
    resumed = in_directory / "runs" / "a"
    cut_back(paired, 2, resumed)
    assert train("run.name=a", *PAIRED, "run.resume=auto") == 0
    assert differences(resumed, paired) == []
    newest = max(path.name for path in (paired / "checkpoints").glob("generation-*"))
    for name in ("agents.safetensors", "experience-rank-000.safetensors"):
        mine, theirs = ((run / "checkpoints" / newest / name).read_bytes() for run in (resumed, paired))
        assert mine == theirs, name
    assert summary(resumed)["comparison"] == summary(paired)["comparison"]


@pytest.mark.parametrize("replay", ["shared=true", "shared=false", "prioritised={}"])
@pytest.mark.parametrize("fails", [False, True])
def test_agents_draw_no_transition_of_another_island(replay, fails):
    """The reward names the agent that made it; of failing islands most steps are no transitions."""
    settings = ("population={size: 2, islands: 2, control: true}", f"replay.{replay}", "replay.capacity=24")
    experience = algorithm(*settings).experience(Placement(Ranks(), "replicated", 8), not fails, Stopwatch())
    chosen = algorithm(*settings)
    agents = initial_population(chosen.config, chosen)
    experience.begin(SimpleNamespace(agents=agents, acted=lambda steps: None), 1)
    never, drawn = torch.zeros(8, 2, dtype=torch.bool), 0
    maker = torch.arange(8.0).unsqueeze(-1).expand(8, 2)
    for step in range(60):
        shown = seen(maker.unsqueeze(-1).expand(8, 2, 5))
        valid = torch.ones(8, 2, dtype=torch.bool)
        valid[2:4] = not fails or step % 11 == 0
        transition = Transition(shown, never, maker, shown, never, never, valid, bool(valid.all()))
        experience.add(transition, output_of(torch.zeros(8, 2, dtype=torch.long)))
        for batch in experience.take_batches():
            counted = batch.weight > 0
            owners = batch.columns["reward"]
            assert torch.equal((owners // 2)[counted], (torch.arange(8).unsqueeze(-1) // 2 * counted)[counted].float())
            if replay == "shared=false":
                assert torch.equal(owners[counted], (torch.arange(8.0).unsqueeze(-1) * counted)[counted])
            else:
                drawn |= sum(1 << int(owner) for owner in owners[counted].unique())
            experience.observe(batch, SimpleNamespace(errors=torch.ones_like(batch.weight), active=None))
    assert drawn == (0 if replay == "shared=false" else 0xFF), "and all of their own"


class Noise:
    """An evaluator whose episodes say nothing about agents."""

    def __init__(self, rng):
        self.rng = rng

    def remeasure(self, agents, generation, purpose, first, episodes):
        assert purpose == "comparison"
        return self.rng.normal(size=(len(agents), episodes))


def assigned(agents, fitness):
    for agent, value in zip(agents, fitness, strict=True):
        agent.fitness = value
    return agents


def test_where_evolution_cannot_help_the_test_seldom_says_it_does():
    """Fitness is noise; agents are compared a generation after they evolved, in islands beside their twins."""
    settings = config(
        "population={size: 3, islands: 9, control: true}",
        "evolution.mutation={architecture: 0, parameters: 0, hyperparameters: 0}",
    )
    rng, verdicts = np.random.default_rng(1), []
    for seed in range(400):
        agents = [Agent(id, {}, {}) for id in range(54)]
        progress = Progress.of_new_run(settings)
        for island in progress.islands:
            island.selection_began = 1
        run = SimpleNamespace(
            config=settings.model_copy(update={"seed": seed}), progress=progress, generation=1,
            ranks=SimpleNamespace(is_main=True), algorithm=SimpleNamespace(networks={}),
        )  # fmt: skip
        first, last = rng.normal(size=(2, 54))
        agents = Run.evolve(run, assigned(agents, first))
        verdicts.append(comparison_of(compare(settings, assigned(agents, last), Noise(rng), 2), 3))
    assert progress.next_id > 54
    benefits = [each["p"] < ERROR and each["higher"] > each["lower"] for each in verdicts]
    assert 0 < sum(benefits) <= 0.05 * 400


def test_the_comparison_is_that_of_the_tables():
    """Clopper and Pearson's interval of 12 of 16 from their figure's formula; the sign test from the binomial table."""
    assert share_interval(12, 16) == pytest.approx((0.4762, 0.9273), abs=1e-4)
    assert share_interval(0, 10) == pytest.approx((0.0, 1 - 0.025**0.1))
    assert share_interval(10, 10) == pytest.approx((0.025**0.1, 1.0))
    assert sign_test(12, 4) == pytest.approx(2 * (1 + 16 + 120 + 560 + 1820) / 2**16)
    assert sign_test(3, 3) == 1.0
    assert sign_test(6, 0) == 2 / 2**6 < ERROR < sign_test(5, 0)


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (
            [(1.0, 0.0)] * 9 + [(0.0, 1.0)] * 3 + [(2.0, 2.0)],
            "evolution ended higher in 9 of 12 islands, 1 tie left out: 0.75 (0.43 to 0.95), which could not be "
            "distinguished from no evolution (p 0.15)",
        ),
        (
            [(1.0, None)] * 6,
            "evolution ended higher in 6 of 6 islands: 1.00 (0.54 to 1.00), better than none (p 0.031)",
        ),
        ([(1.0, 2.0)] * 7, "evolution ended higher in 0 of 7 islands: 0.00 (0.00 to 0.41), worse than none (p 0.016)"),
        (
            [(2.0, 1.0)],
            "evolution ended higher in 1 of 1 island: 1.00 (0.02 to 1.00), which could not be distinguished from no "
            "evolution (p 1); it takes 6 islands that differ",
        ),
        (
            [(None, None), (3.0, 3.0)],
            "evolution ended higher in 0 of 0 islands, 2 ties left out: nothing differs from no evolution",
        ),
    ],
)
def test_the_comparison_in_words(pairs, words):
    assert sentence(comparison_of(pairs, 10)) == words


def test_every_step_of_evaluation_is_counted(in_directory, monkeypatch):
    counts, pop_steps = [], Evaluator.pop_steps

    def popped(evaluator):
        counts.append(pop_steps(evaluator))
        return counts[-1]

    monkeypatch.setattr(Evaluator, "pop_steps", popped)
    assert train("population.islands=2", "run.name=counted") == 0
    assert summary(in_directory / "runs" / "counted")["evaluation_steps"] == sum(counts) > 0


def test_no_reason_is_told_for_the_beginning_of_selection_where_each_island_has_its_own():
    settings = config("evolution.burn_in=auto", "population={size: 8, islands: 2}")
    row = {
        "generation": 5, "agent_steps": 50, "best_fitness": 1.0, "mean_fitness": 0.5, "fitness": [1.0, 0.0],
        "agents": [0, 1], "selection_began": 5, "rank_correlation": 0.57, "wall_clock_seconds": 1.0,
    }  # fmt: skip
    assert "| selection has begun in all islands |" in generation_line(row, [], settings)
