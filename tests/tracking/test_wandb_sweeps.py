"""A sweep of W&B: its agent's command is one that trains, and its runs are those that the agent waits for."""

from pathlib import Path

import pytest
import wandb
import yaml
from helpers.offline_wandb import records
from helpers.support import ROOT, SMALL

from evorl.__main__ import main
from evorl.config.yaml import configuration_file, plain_assignments, read_settings
from evorl.tracking.tracker import run_id

CHOSEN = {"algorithm.learning_rate": {"value": 0.002}, "evolution.mutation.hyperparameters": {"value": 0.0}}


def command_of(file, args):
    """The command that `wandb agent` runs, put together as it does (wandb_agent.py: Agent._command_run)."""
    from wandb.sdk.launch.sweeps import utils  # Half a second or more, which all processes of the tests would take.

    words = utils.create_sweep_command(yaml.safe_load(file.read_text())["command"])
    given = utils.create_sweep_command_args({"args": args})
    return [word for each in words for word in (given[each[2:-1]] if str(each).startswith("${") else [each])]


@pytest.fixture
def sweep(monkeypatch, in_directory):
    """What an agent of a sweep gives to a run's environment."""
    parameters = Path("wandb", "sweep-s1", "config-abc123.yaml")
    (in_directory / parameters).parent.mkdir(parents=True)
    (in_directory / parameters).write_text(yaml.safe_dump({"wandb_version": 1, **CHOSEN}))
    given = {"WANDB_SWEEP_ID": "s1", "WANDB_RUN_ID": "abc123", "WANDB_SWEEP_PARAM_PATH": str(parameters)}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    # The client has read the environment if another test of this process has used it.
    wandb.teardown()
    yield in_directory
    wandb.teardown()


def test_the_recipe_is_a_command_whose_settings_are_known():
    recipe = yaml.safe_load((ROOT / "configs" / "sweep.yaml").read_text())
    args = {name: {"value": each.get("min", each.get("value", each.get("values", [0])[0]))}
            for name, each in recipe["parameters"].items()}  # fmt: skip
    program, command, name, *given = plain_assignments(command_of(ROOT / "configs" / "sweep.yaml", args))
    assert (program, command) == ("evorl", "train")
    settings = read_settings(configuration_file(name), given)
    for path, value in args.items():
        found = settings
        for key in path.split("."):
            found = found[key]
        assert found == value["value"]
    assert recipe["metric"]["name"] == "fitness/elite"


@pytest.mark.slow
def test_a_run_of_a_sweep_is_the_one_that_its_agent_waits_for(sweep, monkeypatch):
    words = command_of(ROOT / "configs" / "sweep.yaml", CHOSEN)
    words[words.index("dqn")] = str(SMALL)
    monkeypatch.setattr("sys.argv", [*words, "run.name=a", "tracking.backends=[wandb]"])
    assert main() == 0
    (offline,) = (sweep / "runs" / "a" / "wandb").glob("offline-run-*")
    told = [record for record in records(offline) if record.HasField("run")]
    assert {(record.run.run_id, record.run.sweep_id) for record in told} == {("abc123", "s1")}
    assert run_id(sweep / "runs" / "a") == "abc123", "also when it is resumed"
