"""Runs whose first agents have settings drawn around those that ended well in earlier runs."""

import json
import re
import shutil

import numpy as np
import pytest
import yaml
from helpers.support import algorithm, config, lines, train

from evorl.config.fields import HyperparameterRange
from evorl.distributed import Ranks
from evorl.population import Predecessor, initial_population
from evorl.runs.agents.transfer import LAST, first_agents, read_predecessors
from evorl.runs.storage.directory import load_elite
from evorl.types import UserError

RANGES = "evolution.hyperparameters={learning_rate: {min: 1e-5, max: 1e-1}, gamma: {min: 0.9, max: 0.999}}"
SPANS = {
    "learning_rate": HyperparameterRange(min=1e-5, max=1e-1, scale="log"),
    "gamma": HyperparameterRange(min=0.9, max=0.999, scale="one_minus_log"),
}
LIMITS = "evolution.architecture={min_units: 4, max_units: 256}"


@pytest.fixture
def before(trained_run, in_directory):
    return shutil.copytree(trained_run, in_directory / "runs" / "before")


def drawn(predecessors, *overrides):
    given = ("evolution.initial=[runs/before]", "population.size=800", RANGES, LIMITS, *overrides)
    return initial_population(config(*given), algorithm(*given), predecessors)


def shares(agents, name):
    return np.array([SPANS[name].share_of(each.hyperparameters[name]) for each in agents])


def test_settings_are_drawn_around_a_predecessors_and_every_fourth_from_the_whole_ranges():
    near = Predecessor(
        "agent 3 of before", {"learning_rate": 1e-3, "gamma": 0.99}, {"q": {"hidden.0": 32, "hidden.1": 32}}
    )
    agents = drawn([near])
    others = [each for each in agents if each.mutation.target == ""]
    assert [each.id for each in others] == list(range(3, 800, 4))
    around = [each for each in agents if each.mutation.target == "agent 3 of before"]
    assert len(around) == 600
    for name, value in near.hyperparameters.items():
        center = SPANS[name].share_of(value)
        here = shares(around, name)
        assert np.median(here) == pytest.approx(center, abs=0.03)
        # The middle two thirds of a normal distribution lie within one standard deviation.
        assert np.quantile(here, 0.8413) - np.quantile(here, 0.1587) == pytest.approx(2 / 6, rel=0.15)
        assert shares(others, name).std() == pytest.approx(np.sqrt(1 / 12), rel=0.15)
    assert all(0.9 <= each.hyperparameters["gamma"] <= 0.999 for each in agents)
    widths = np.log([each.architectures["q"].hidden_sizes for each in around]) / np.log(64)
    assert np.median(widths) == pytest.approx(np.log(32) / np.log(64), abs=0.03)
    assert np.quantile(widths, 0.8413) - np.quantile(widths, 0.1587) == pytest.approx(2 / 6, rel=0.15)
    fixed = drawn([near], "evolution.mutation.architecture=0")
    assert {each.architectures["q"].hidden_sizes for each in fixed} == {(16, 16)}


def test_predecessors_outside_the_ranges_are_clipped():
    agents = drawn([Predecessor("it", {"learning_rate": 1e9}, {"q": {"hidden.0": 10_000}})])
    around = [each for each in agents if each.mutation.target == "it"]
    rates = np.array([each.hyperparameters["learning_rate"] for each in around])
    assert (rates == 1e-1).mean() == pytest.approx(0.5, abs=0.08)
    assert shares(around, "gamma").std() == pytest.approx(np.sqrt(1 / 12), rel=0.15)
    first, second = np.array([each.architectures["q"].hidden_sizes for each in around]).T
    assert (first == 256).all()
    assert np.log(second / 4).std() / np.log(64) == pytest.approx(np.sqrt(1 / 12), rel=0.15)


def test_the_best_quarter_of_the_last_generations_and_the_elite_are_taken(before):
    _, elite = load_elite(before)
    line = lines(before / "lineage.jsonl")[-1]

    def written(generation, id, fitness):
        hyperparameters = line["hyperparameters"] | {"learning_rate": 1e-4 * id}
        return line | {"generation": generation, "id": id, "fitness": fitness, "hyperparameters": hyperparameters}

    # The best is too old, and agent 3 was best before it got worse.
    rows = [written(1, 1, 900.0), written(2, 2, 1.0), written(2, 3, 800.0), written(3, 3, 0.5), written(4, 4, None)]
    rows += [written(LAST + 1, id, float(id)) for id in range(21, 25)]
    (before / "lineage.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {one.name: one for one in read_predecessors(config(), algorithm(), [before])}
    assert set(found) == {"agent 24 of before", "agent 23 of before", f"agent {elite.id} of before"}
    assert found["agent 23 of before"].hyperparameters["learning_rate"] == pytest.approx(23e-4)
    assert found[f"agent {elite.id} of before"].sizes == {"q": elite.architectures["q"].sizes()}
    (before / "lineage.jsonl").write_text(json.dumps(written(1, elite.id, 1.0)) + "\n")
    assert [one.name for one in read_predecessors(config(), algorithm(), [before])] == [f"agent {elite.id} of before"]
    (before / "lineage.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    twice = [one.name for one in read_predecessors(config(), algorithm(), [before, before])]
    assert len(twice) == 6


def test_resumed_run_does_not_need_its_predecessors(before, capsys):
    asked = ("evolution.initial=[runs/before]", "population.size=5", RANGES, "run.name=after")
    assert train(*asked, "training.max_steps=40") == 0
    run = before.parent / "after"
    first = lines(run / "lineage.jsonl")[:5]
    targets = [row["mutation"]["target"] for row in first]
    assert [bool(re.fullmatch(r"agent \d+ of before", target)) for target in targets] == [True] * 3 + [False, True]
    assert f"- {before}" in (run / "config.yaml").read_text(), "an absolute path"
    shutil.rmtree(before)
    capsys.readouterr()
    assert train(*asked, "run.resume=auto", "training.max_steps=80") == 0
    assert len({row["generation"] for row in lines(run / "lineage.jsonl")}) == 2


def refused(before, message):
    with pytest.raises(UserError, match=rf"^evolution\.initial: .*{message}") as told:
        first_agents(config(f"evolution.initial=[{before}]"), algorithm(), Ranks())
    assert "\n" not in str(told.value)


def test_what_is_no_run_or_empty_or_damaged_is_refused(before):
    refused(before.parent / "none", "none: there is no run here")
    lineage, whole = before / "lineage.jsonl", (before / "lineage.jsonl").read_text()
    lineage.write_text("")
    refused(before, r"lineage\.jsonl: no agent of the last generations has a fitness; leave this run out")
    lineage.write_text(json.dumps(json.loads(whole.splitlines()[-1]) | {"fitness": 1e300}) + "\n")
    refused(before, r"lineage\.jsonl: agent .* in generation 3: cannot be read: ")
    lineage.write_text(whole)
    config_file = before / "config.yaml"
    data = yaml.safe_load(config_file.read_text())
    config_file.write_text(yaml.safe_dump(data | {"algorithm": {"name": "dqn", "gama": 1}}))
    refused(before, r"before/config\.yaml: algorithm\.gama: unknown key")
    config_file.write_text(yaml.safe_dump(data))
    (before / "elite" / "agent.safetensors").unlink()
    refused(before, "the run has no elite yet")


@pytest.mark.parametrize("given", ["runs/x", "[]"])
def test_evolution_initial_of_wrong_type_is_refused(given):
    with pytest.raises(UserError, match=r"^evolution\.initial: .* is neither 'configured' nor 'sampled' nor a list"):
        config(f"evolution.initial={given}")


@pytest.mark.two_process
def test_two_ranks_begin_with_the_same_agents(before, forked_launch):
    here = before.parent.parent
    settings = ("evolution.initial=[runs/before]", RANGES, "run.name=a", "training.max_steps=80")
    done = forked_launch(here, *settings)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [row["mutation"]["kind"] for row in lines(here / "runs" / "a" / "lineage.jsonl")[:4]] == ["initial"] * 4
    shutil.rmtree(before)
    refused_on_both = forked_launch(here, *settings[:-2], "run.name=b")
    assert refused_on_both.returncode != 0
    assert refused_on_both.stderr.count("error: evolution.initial: ") == 1
