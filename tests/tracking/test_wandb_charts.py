"""What W&B is told, read back from its offline file: the charts that it opens, their tables, console and elite."""

import json
from collections import Counter
from itertools import pairwise

import pytest
from helpers.offline_wandb import panels, records
from helpers.support import config, lines, train

from evorl.runs.output import logger
from evorl.runs.output.metrics import record_of
from evorl.tracking.tracker import AgentRecord, Paths, Record
from evorl.tracking.wandb import TABLE, WeightsAndBiases
from evorl.types.outcomes import EvorlWarning, UserError


def recorded(run):
    """The numbers, hidden keys, custom charts and tables of a run, and the kinds of its records."""
    (directory,) = (run / "wandb").glob("offline-run-*")
    history, hidden, custom, tables, kinds, console = [], set(), {}, {}, Counter(), ""
    for record in records(directory):
        kinds[record.WhichOneof("record_type")] += 1
        if record.HasField("metric") and record.metric.options.hidden:
            hidden.add(record.metric.name)
        if record.HasField("output_raw"):
            console += record.output_raw.line
        for item in record.config.update:
            if list(item.nested_key[:2]) == ["_wandb", "visualize"]:
                custom[item.nested_key[2]] = json.loads(item.value_json)["panel_config"]
        for item in record.summary.update:
            if item.key == "lineage":
                path = json.loads(item.value_json)["path"]
                tables["lineage"] = json.loads((directory / "files" / path).read_text())
        if record.HasField("history"):
            items = {tuple(item.nested_key) or (item.key,): json.loads(item.value_json) for item in record.history.item}
            for key, value in items.items():
                if key[1:] == ("path",) and value.endswith(".json"):
                    tables[key[0]] = json.loads((directory / "files" / value).read_text())
            history.append({key[0]: value for key, value in items.items() if len(key) == 1})
    return history, hidden, custom, tables, kinds, console


def test_wandb_opens_few_charts_and_no_more_of_more_agents(in_directory):
    overrides = ("run.name=a", "tracking.backends=[wandb]", "population.size=6", "evaluation.max_steps=5")
    evolution = "evolution.mutation={architecture: 1, hyperparameters: 1}"
    assert train(*overrides, evolution) == 0
    run = in_directory / "runs" / "a"
    history, hidden, custom, tables, kinds, console = recorded(run)
    rows = lines(run / "metrics.jsonl")

    (directory,) = (run / "wandb").glob("offline-run-*")
    assert panels(directory).total() == 21, "they were 105 when each number of each of 4 agents had one"
    numbers = {key for items in history for key in items if not key.startswith("_")} - hidden
    assert {"charts/episodic_return", "charts/episodic_length", "charts/SPS", "fitness/best"} <= numbers
    assert not any("agent" in key for key in numbers)
    assert {"losses/loss", "hyperparameters/learning_rate", "architecture/units", "fitness/agents"} <= custom.keys()
    assert "charts/episodic_return_by_agent" in custom

    for chart in custom.values():
        fields, (query,) = chart["fieldSettings"], chart["userQuery"]["queryFields"]
        assert query["fields"][-1]["args"] == [{"name": "tableKey", "value": "agents"}]
        assert set(fields.values()) <= set(tables["agents"]["columns"])
    curves = [dict(zip(tables["agents"]["columns"], row, strict=True)) for row in tables["agents"]["data"]]
    labels = {row["line"] for row in curves}
    assert {label.split()[0] for label in labels} == {f"#{id}" for id in rows[-1]["agents"]}
    assert any("->" in label for label in labels), "mutations are marked"
    for label in labels:
        own = [row for row in curves if row["line"] == label]
        assert [row["generation"] for row in own] == [row["generation"] for row in rows], "from an initial agent on"
        assert [row["global_steps"] for row in own] == [row["global_steps"] for row in rows]
        for row, generation in zip(own, rows, strict=True):
            place = generation["agents"].index(row["agent"])
            assert row["fitness/agents"] == generation["fitness"][place]
    assert len(tables["lineage"]["data"]) == sum(len(row["agents"]) for row in rows)
    assert kinds["artifact"] >= 2
    assert "gen 1/" in console


def test_points_within_a_generation_come_before_its_end(in_directory, monkeypatch):
    monkeypatch.setattr("evorl.runs.output.metrics.INTERVAL", 1e-6)
    extra = ("tracking.backends=[wandb]", "training.max_steps=80")
    assert train("run.name=a", *extra) == 0
    run = in_directory / "runs" / "a"
    history, *_ = recorded(run)
    ends = {row["global_steps"] for row in lines(run / "metrics.jsonl")}
    within = [items for items in history if "fitness/mean" not in items]
    assert ends == {items["global_steps"] for items in history if "fitness/mean" in items}
    assert len(within) > 5 * len(ends)
    assert any("charts/episodic_return" in items for items in within)
    assert all(items["charts/SPS"] > 0 for items in within)
    assert all(before["_step"] < after["_step"] for before, after in pairwise(history))


def test_charts_of_all_agents_end_with_the_newest_generation(tmp_path, monkeypatch):
    """Though not every generation of a long run uploads them."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = WeightsAndBiases(config(), tmp_path)
    for number in (100, 101):
        tracker.log(Record(number, 10 * number, {}, [AgentRecord(0, points={"fitness/agents": 1.0})]))
    tracker.finish({"ended": "finished"}, [])
    (directory,) = (tmp_path / "wandb").glob("offline-run-*")
    updates = [item for record in records(directory) for item in record.summary.update if item.key == TABLE]
    path = json.loads(updates[-1].value_json)["path"]
    rows = json.loads((directory / "files" / path).read_text())["data"]
    assert [row[2] for row in rows] == [100, 101]


def test_each_new_elite_is_filmed_on_request(in_directory):
    pytest.importorskip("av")
    assert train("run.name=a", "tracking={backends: [wandb, tensorboard], video: true}", "evaluation.max_steps=5") == 0
    run = in_directory / "runs" / "a"
    *_, kinds, _ = recorded(run)
    assert kinds["history"] == len(lines(run / "metrics.jsonl")) + len(list((run / "videos").iterdir()))
    rows = lines(run / "metrics.jsonl")
    elites = [row["generation"] for row in rows if row["elite_generation"] == row["generation"]]
    assert elites
    films = [run / "videos" / f"generation-{number:06d}.mp4" for number in elites]
    assert sorted((run / "videos").iterdir()) == films
    uploaded = (run / "wandb").glob("offline-run-*/files/media/videos/*.mp4")
    assert {film.read_bytes() for film in uploaded} == {film.read_bytes() for film in films}


def test_what_cannot_be_filmed_is_told_once_and_training_goes_on(in_directory, monkeypatch):
    def broken(run, generation):
        raise UserError("nothing to be seen")

    monkeypatch.setattr(logger, "film_elite", broken)
    with pytest.warns(EvorlWarning, match=r"tracking\.video: no film of the best agent: nothing to be seen") as caught:
        assert train("run.name=a", "tracking={backends: [], video: true}") == 0
    assert len(caught) == 1


def test_tracker_paths_lead_through_parents():
    paths = Paths()
    for number, agents in enumerate([{0: None, 1: None}, {0: None, 2: 1}, {3: 2, 4: 0, 2: 1}], start=1):
        made = [AgentRecord(id, parent) for id, parent in agents.items()]
        living = paths.add(Record(number, 10 * number, {}, made))
    found = {node.agent.id: [(each.generation, each.agent.id) for each in node.path()] for node in living}
    assert found == {3: [(1, 1), (2, 2), (3, 3)], 4: [(1, 0), (2, 0), (3, 4)], 2: [(1, 1), (2, 2), (3, 2)]}


def test_constant_hyperparameters_have_no_curves(trained_run):
    ranges = "evolution.hyperparameters={learning_rate: {min: 1e-4, max: 1e-2}}"
    settings = config(ranges, "evolution.mutation.architecture=0")
    for row in lines(trained_run / "metrics.jsonl"):
        record = record_of(row, settings)
        (name,) = {name for agent in record.agents for name in agent.points if name.startswith("hyperparameters/")}
        assert name == "hyperparameters/learning_rate"
        assert not {name for name in record.points if name.startswith("architecture/")}
        ended = any(row["train_episodes"])
        assert ended or row["generation"] > 1, "the last generation may be too short for an episode"
        lengths, returns = (record.points.get(f"charts/episodic_{name}") for name in ("length", "return"))
        assert (lengths is not None) == ended
        assert lengths == pytest.approx(returns)
