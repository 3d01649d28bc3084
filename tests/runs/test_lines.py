"""What a run prints: a line for each generation, and how it ended."""

import json
import re
import shlex
import signal
from dataclasses import asdict

import pytest
from helpers.support import config, lines, train

from evorl.runs.agents.elite import Elite
from evorl.runs.output.console import closing_lines, generation_line
from evorl.system.console import compact, say
from evorl.system.signals import Interrupted
from evorl.types.agents import Mutation

ROW = {
    "generation": 5, "agent_steps": 80_000, "agents": [10, 12, 14], "fitness": [218.24, None, 164.0],
    "best_fitness": 218.24, "mean_fitness": 191.1, "wall_clock_seconds": 58.4,
}  # fmt: skip
SUMMARY = {
    "ended": "finished", "solved": None, "generations": 5, "agent_steps": 80_000, "elite_fitness": 231.6,
    "elite_std": 72.2, "elite_episodes": 120, "elite_lower_bound": None,
    "episodes_repeat": False,
}  # fmt: skip


def born(id, *mutation):
    return {"id": id, "mutation": asdict(Mutation(*mutation))}


def test_a_branch_is_suggested_where_a_longer_run_is_refused(tmp_path):
    """Where the learning rate falls to 0 over `training.max_steps`, a run cannot go on with more of them."""
    summary = {**SUMMARY, "elite_fitness": None}
    told = closing_lines(summary, config("algorithm={name: a2c, annealing: true}"), tmp_path, has_elite=True)
    assert "evorl evaluate" in told[-1]
    assert "resume" not in told[-1]
    assert re.search(r"`evorl branch \S+ NEW training.max_steps=\d+` to train longer", told[-1])


def test_generation_line_of_the_console():
    children = [born(12, "none"), born(14, "hyperparameters", "batch_size", 64.0, 51.2)]
    assert generation_line(ROW, children, config("training.max_steps=400000")) == (
        "gen 5/25 | 80k steps | best 218.2 (#10), mean 191.1 | mutated: #14 batch_size: 64 -> 51 | 58 s"
    )


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (999.7, "1k"),
        (999_800, "1M"),
        (1_254_000, "1.25M"),
        (0.5, "0.5"),
    ],
)
def test_numbers_have_the_unit_of_what_they_are_rounded_to(number, shown):
    assert compact(number) == shown


ENDS = {
    "solved": (
        {"solved": True}, 200,
        ["solved: the mean return is above 200", "231.6 ± 6.59 over 120 fresh episodes", "evorl evaluate r/a"],
    ),
    "steps": (
        {"agent_steps": 400_021}, None,
        ["trained for 400,021 steps;", "`evorl resume r/a training.max_steps=800000` to train longer"],
    ),
    "not solved": ({"solved": False}, 300, ["the target of 300 is not reached; best"]),
    "not yet certain": (
        {"solved": False, "elite_lower_bound": 214.96}, 215,
        ["the target of 215 is not yet certain (at least 214.9 with 95 %); best: a mean return of 231.6 ± 6.59"],
    ),
    "a signal": ({"ended": "SIGINT"}, None, ["ended by SIGINT after generation 5", "`evorl resume r/a` to go on"]),
    "nothing": ({"ended": "SIGTERM", "elite_fitness": None}, None, ["best: no agent yet", "next: `evorl resume r/a`"]),
}  # fmt: skip


@pytest.mark.parametrize(("change", "target", "told"), ENDS.values(), ids=ENDS)
def test_closing_lines_say_how_the_run_ended_and_what_is_next(change, target, told, in_directory):
    asked = config("training.max_steps=400000", f"training.target_fitness={'null' if target is None else target}")
    summary = {**SUMMARY, **change}
    has_elite = summary["elite_fitness"] is not None
    text = "\n".join(closing_lines(summary, asked, in_directory / "r" / "a", has_elite=has_elite))
    for words in told:
        assert words in text
    assert ("evorl evaluate" in text) == has_elite
    assert ("resume" in text) != (change.get("solved") is True)


def test_how_a_run_ended_is_told_before_trackers_close(in_directory, monkeypatch, capsys):
    """A tracker that takes too long after a signal is ended with the process."""
    monkeypatch.setattr("evorl.tracking.trackers.Trackers.finish", lambda *given: say("trackers close"))
    assert train("run.name=a", "training.max_steps=40") == 0
    *_, advice, last = capsys.readouterr().err.splitlines()
    assert (advice.partition(":")[0], last) == ("next", "trackers close")


def test_commands_that_are_suggested_can_be_pasted(in_directory):
    told = closing_lines(SUMMARY, config(), in_directory / "it's my run", has_elite=True)[-1]
    commands = [shlex.split(words) for words in told.split("`")[1::2]]
    assert [command[:3] for command in commands] == [["evorl", verb, "it's my run"] for verb in ("evaluate", "resume")]


@pytest.mark.parametrize("generation", [1, 2])
def test_a_signal_while_the_next_elite_is_measured_tells_of_what_is_on_disk(
    generation, in_directory, monkeypatch, capsys
):
    test, calls = Elite.reaches, []

    def interrupted(*given, **named):
        calls.append(given)
        if len(calls) == generation:
            raise Interrupted(signal.SIGINT)
        return test(*given, **named)

    monkeypatch.setattr(Elite, "reaches", interrupted)
    train("run.name=a", "training.target_fitness=475", "evaluation.confirmation_episodes=3")
    summary = json.loads((in_directory / "runs" / "a" / "summary.json").read_text())
    said = "\n".join(capsys.readouterr().err.splitlines()[-2:])
    metrics = in_directory / "runs" / "a" / "metrics.jsonl"
    rows = lines(metrics) if metrics.exists() else []
    assert f"ended by SIGINT after generation {generation - 1}; best: " in said
    assert summary["generations"] == len(rows) == generation - 1
    assert summary["elite_fitness"] == (rows[-1]["elite_fitness"] if rows else None)
    assert ("best: no agent yet" in said) == (generation == 1)
    assert ("evorl evaluate" in said) == (generation > 1)
    assert (in_directory / "runs" / "a" / "elite").is_dir() == (generation > 1)


def test_a_run_tells_of_its_generations_and_its_end_also_when_nothing_is_left(in_directory, capsys):
    assert train("run.name=a", "training.max_steps=70") == 0
    said = capsys.readouterr().err.splitlines()
    assert sum(line.startswith("gen ") for line in said) == 2
    assert not any("\r" in line or "%|" in line for line in said), "nobody watches a bar here"
    assert said[-1].startswith("next: `evorl evaluate runs/a`")
    assert train("run.name=a", "training.max_steps=70", "run.resume=auto") == 0
    again = capsys.readouterr().err.splitlines()
    assert not any(line.startswith("gen ") for line in again)
    assert again[-2:] == said[-2:]
