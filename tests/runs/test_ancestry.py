"""The winner's schedule: read from a run's lineage, and followed by another agent."""

import json
import shutil
from itertools import pairwise

import pytest
import yaml
from helpers.support import SMALL, config, lines, train, train_below

from evorl.commands.command import run_command
from evorl.commands.train import retrain_command
from evorl.config import override, read_yaml
from evorl.evolution.mutation import MERGED
from evorl.runs.lineage import SAME, Stage, ancestry, constant_schedule_of, replayed, schedule_of
from evorl.types import INITIAL, Mutation, UserError

pytestmark = pytest.mark.filterwarnings("ignore:no episode ended")
SEARCH = (
    "run.name=a", "training.max_steps=400", "seed=3",
    "evolution.mutation={none: 0.1, architecture: 1, parameters: 0.5, activation: 0.5, hyperparameters: 1,"
    " new_layer: 0.5}",
    "evolution.architecture={min_units: 4, max_units: 64, unit_steps: [3, 16], max_layers: 4}",
    "evolution.hyperparameters={learning_rate: {min: 1e-4, max: 1e-2}, gamma: {min: 0.9, max: 0.999}}",
)  # fmt: skip


def settings_of(row):
    return row["hyperparameters"], row["architectures"]


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A run of some ten generations, to be copied and not to be changed."""
    return train_below(tmp_path_factory.mktemp("searched"), *SEARCH)


@pytest.fixture
def run(searched, in_directory):
    return shutil.copytree(searched, in_directory / "runs" / "a")


def follow(run, capsys, *overrides, constant=False):
    """The lineage of a run that follows the winner of another one, trained in this process."""
    command = retrain_command(run, [*overrides, "run.name=again"], SMALL, 1, constant)
    assert train(*command[command.index("--config") + 2 :], configuration=command[command.index("--config") + 1]) == 0
    return lines(run.parent / "again" / "lineage.jsonl")


def test_steps_that_a_lost_line_would_tell_are_not_taken_for_all_before(run):
    rows = lines(run / "metrics.jsonl")
    kept = [row for row in rows if row["generation"] != ancestry(run)[-1].generation - 1]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    with pytest.raises(UserError, match="does not say how many steps each generation of the best agent had"):
        retrain_command(run, ["run.name=again"], SMALL, 1, False)


def test_a_retrained_agent_begins_with_no_agents_of_another_run(run):
    begun = config(f"population={{from: {run}, from_agents: population}}")
    alone = replayed(begun, run, ancestry(run), False).population
    assert (alone.size, alone.from_, alone.from_agents) == (1, None, "elite")


def test_stages_lead_from_an_initial_agent_to_the_elite(run):
    stages = ancestry(run)
    rows = {(row["generation"], row["id"]): row for row in lines(run / "lineage.jsonl")}
    assert stages[0].generation == 1
    assert stages[0].parent is None
    assert stages[-1].id == json.loads((run / "elite" / "agent.json").read_text())["id"]
    for before, after in pairwise(stages):
        if after.id == before.id:
            assert after.mutation == SAME, "a birth is told once"
            assert after.generation == before.generation + 1
        else:
            assert (before.generation, before.id) == (after.parent_generation, after.parent)
            assert after.mutation == Mutation(**rows[after.generation, after.id]["mutation"])
    assert len({stage.id for stage in stages}) > 2, "the winner is meant to have ancestors"


def test_a_birth_is_told_once_however_long_the_agent_lives(run):
    elite = json.loads((run / "elite" / "agent.json").read_text())["id"]
    row = lines(run / "lineage.jsonl")[0]
    born = {"kind": "parameters", "target": "noise", "before": None, "after": 0.1}
    child = {**row, "id": elite, "parent": row["id"], "parent_generation": 1, "mutation": born}
    change(run, lambda rows: rows.__setitem__(slice(None), [row, child | {"generation": 2}, child | {"generation": 3}]))
    metrics = lines(run / "metrics.jsonl")
    (run / "metrics.jsonl").write_text(json.dumps(metrics[-1] | {"elite_generation": 3}) + "\n")
    assert [stage.mutation.kind for stage in ancestry(run)] == ["initial", "parameters", "none"]
    assert [one.generation for one in schedule_of(ancestry(run)).mutations] == [1]


@pytest.mark.parametrize("size", [1, 2])
def test_an_agent_that_follows_the_schedule_has_the_winners_settings_in_every_generation(run, size, capsys):
    rows = follow(run, capsys, "seed=11", f"population.size={size}")
    stages = ancestry(run)
    theirs = {(row["generation"], row["id"]): row for row in lines(run / "lineage.jsonl")}
    wanted = [settings_of(theirs[stage.generation, stage.id]) for stage in stages]
    assert [settings_of(row) for row in rows[::size]] == wanted
    assert [settings_of(row) for row in rows[size - 1 :: size]] == wanted
    assert len(rows) == size * len(stages)


def test_a_winner_among_agents_of_another_run_is_replayed_with_new_weights(run, capsys):
    data = override(read_yaml(run / "config.yaml"), [f"population.from={run}"])
    (run / "config.yaml").write_text(yaml.safe_dump(data))
    assert follow(run, capsys, "training.max_steps=40")
    assert "this one begins with new weights" in capsys.readouterr().err


def test_a_constant_schedule_is_that_of_the_last_settings(run, capsys):
    rows = follow(run, capsys, constant=True)
    last = ancestry(run)[-1]
    assert {row["hyperparameters"]["learning_rate"] for row in rows} == {last.hyperparameters["learning_rate"]}
    assert {row["id"] for row in rows} == {0}
    assert constant_schedule_of(ancestry(run)).mutations == ()


def test_the_schedule_is_shown_with_what_changed(run, capsys):
    run_command(["lineage", str(run), "--settings"])
    shown = capsys.readouterr().out.splitlines()
    stages = ancestry(run)
    assert len(shown) == 1 + len(stages)
    for line, stage in zip(shown[1:], stages, strict=True):
        assert line.split()[:2] == [str(stage.generation), str(stage.id)]
        assert stage.mutation == SAME or str(stage.mutation) in line


@pytest.mark.parametrize(("shared", "said"), [(True, True), (False, False)])
def test_a_replay_says_that_the_winner_had_the_steps_of_others(run, capsys, shared, said):
    path = run / "config.yaml"
    path.write_text(yaml.safe_dump(override(read_yaml(path), [f"replay.shared={shared}"])))
    retrain_command(run, [], SMALL, 1, constant=False)
    assert ("from the steps of 3 other agents" in capsys.readouterr().err) == said


@pytest.mark.parametrize(
    ("file", "key", "value"), [("lineage.jsonl", "id", []), ("metrics.jsonl", "elite_generation", {"a": 1})]
)
def test_names_that_cannot_be_looked_up_are_refused(run, file, key, value):
    rows = [{**row, key: value} for row in lines(run / file)]
    (run / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match="has no line for agent"):
        ancestry(run)


def change(run, what):
    rows = lines(run / "lineage.jsonl")
    what(rows)
    (run / "lineage.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_lineage_that_leads_nowhere_is_refused(run):
    change(run, lambda rows: rows.clear())
    with pytest.raises(UserError, match=r"lineage.jsonl: has no line for agent \d+ in generation"):
        ancestry(run)


def test_a_lineage_that_goes_in_circles_is_refused(run):
    def circle(rows):
        for row in rows:
            row["id"], row["parent"], row["parent_generation"] = row["id"] + row["generation"] * 1000, row["id"], 99

    change(run, circle)
    with pytest.raises(UserError, match=r"lineage.jsonl"):
        ancestry(run)


MISFITS = {
    "a layer that is not there": ({"kind": "architecture", "target": "hidden.7", "after": 9}, "'hidden.7'"),
    "a hyperparameter that is not there": ({"kind": "hyperparameters", "target": "magic", "after": 1}, "'magic'"),
    "a kind that is not there": ({"kind": "wishes"}, "wishes"),
    "no number": ({"kind": "parameters", "target": "noise"}, "parameters"),
    "a rate below zero": ({"kind": "hyperparameters", "target": "learning_rate", "after": -1e-3}, "learning_rate"),
    "a layer of no width": ({"kind": "architecture", "target": "hidden.0", "before": 16, "after": 0}, "hidden_sizes.0"),
    "an unknown activation": ({"kind": "activation", "target": "activation", "after": "relo"}, "relo"),
    "the last layer merged": ({"kind": "architecture", "target": "hidden.1", "after": MERGED}, "hidden.1"),
}


@pytest.mark.parametrize(("record", "named"), MISFITS.values(), ids=MISFITS)
def test_a_schedule_that_does_not_fit_ends_in_one_line(record, named, run, capsys):
    schedule = schedule_of(ancestry(run)).model_dump(mode="json")
    schedule["mutations"] = [{"generation": 99, **record}]
    data = override(read_yaml(SMALL), ["run.name=b"])
    data.setdefault("evolution", {})["schedule"] = schedule
    (run / "x.yaml").write_text(json.dumps(data))
    capsys.readouterr()
    assert train(configuration=run / "x.yaml") == 2
    # Before training, not in generation 99.
    message = capsys.readouterr().err.splitlines()[-1]
    assert "evolution.schedule: " in message
    assert named in message


def test_a_migration_is_followed_setting_by_setting():
    first = Stage(1, 0, None, None, INITIAL, {"gamma": 0.9, "tau": 0.1}, {})
    moved = Stage(2, 5, 0, 1, Mutation("migration", "hyperparameters"), {"gamma": 0.99, "tau": 0.1}, {})
    (mutation,) = schedule_of([first, moved]).mutations
    assert (mutation.generation, mutation.kind, mutation.target, mutation.after) == (
        1,
        "hyperparameters",
        "gamma",
        0.99,
    )


def test_an_agent_of_a_sharded_run_is_retrained_on_one_process(in_directory, monkeypatch, capsys):
    assert train("run.name=a", "population.placement=sharded") == 0
    monkeypatch.setattr("evorl.commands.train._ranks_of", lambda run: 2)
    run = in_directory / "runs" / "a"
    assert "--num_processes" not in retrain_command(run, (), None, None, constant=False)
    capsys.readouterr()
    assert "--num_processes" in retrain_command(run, (), None, 2, constant=False)
    assert "the best agent trained on one process (population.placement sharded)" in capsys.readouterr().err
