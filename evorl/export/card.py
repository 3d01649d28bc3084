"""The model card of a run's best agent: its score, usage, lineage and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from evorl.report.data import Drawn
from evorl.report.facts import effect_rows, environment_facts, path_rows, run_facts, state
from evorl.report.statistics import effects

PICTURE = "lineage.png"


def card(run: Drawn, settings: Mapping[str, Any], files: Sequence[str]) -> str:
    """Return the model card of a run, in Markdown with the YAML metadata that the Hugging Face Hub reads.

    `settings` are the shareable settings, `files` the names of the other files on the page.
    """
    environment, algorithm = str(run.setting("environment.id")), str(run.setting("algorithm.name"))
    best = run.described_best
    parts = [
        f"---\n{yaml.safe_dump(_head(run, environment, algorithm), sort_keys=False)}---",
        f"# {_plain(algorithm)} on {_plain(environment)}",
        f"The best agent of a population, trained and evolved by evorl: a mean return of **{best}** "
        f"({_plain(state(run))}).",
    ]
    parts += [f'<video src="{name}" controls loop muted></video>' for name in files if name.endswith(".mp4")]
    parts += ["## Use", _use(files)]
    parts += ["## How it came about", f"![Returns of all agents, and the winner's path through them]({PICTURE})"]
    steps = [[row["generation"], row["agent"], row["fitness"], row["changed"]] for row in path_rows(run)]
    parts.append(_table(("generation", "agent", "fitness", "what changed"), [row for row in steps if row[3]][-30:]))
    found = effect_rows(effects(run))
    parts += [
        "## What mutations did",
        "Fitness of children less that of their parents, a generation before; compare with no mutation:",
    ]
    names = ("name", "count", "mean", "interval")
    parts.append(
        _table(("mutation", "children", "mean", "95 % interval"), [[row[name] for name in names] for row in found])
    )
    parts += ["## How it was made", _table(("", ""), [*run_facts(run), *environment_facts(run)])]
    shown = yaml.safe_dump(dict(settings), sort_keys=False).replace("```", "'''")
    parts += ["<details><summary>Configuration</summary>", f"```yaml\n{shown}```", "</details>"]
    return "\n\n".join(parts) + "\n"


def _head(run: Drawn, environment: str, algorithm: str) -> dict[str, Any]:
    last = run.generations[-1]
    head: dict[str, Any] = {
        "library_name": "evorl",
        "tags": ["reinforcement-learning", "deep-reinforcement-learning", "evolution", algorithm, environment],
    }
    if last.elite_fitness is not None:
        task = {"type": "reinforcement-learning", "name": "reinforcement-learning"}
        # By convention +/- is the standard deviation of returns here: the Hub's leaderboards rank by it.
        metric = {"type": "mean_reward", "value": f"{last.elite_fitness:.2f} +/- {last.elite_std or 0:.2f}"}
        result = {"task": task, "dataset": {"name": environment, "type": environment}, "metrics": [metric]}
        head["model-index"] = [{"name": f"{algorithm}-{environment}", "results": [result]}]
    return head


def _use(files: Sequence[str]) -> str:
    lines = [
        "```python",
        "import evorl",
        "from huggingface_hub import snapshot_download",
        "",
        'agent = evorl.load(snapshot_download("NAME/OF-THIS-PAGE", local_dir="agent"))',
        "action, state = agent.predict(observation)",
        "```",
    ]
    if "agent.onnx" in files:
        lines += ["", "`agent.onnx` does the same in any program that has onnxruntime."]
    return "\n".join(lines)


def _table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(_plain(str(cell)) for cell in line) + " |" for line in lines)


def _plain(text: str) -> str:
    """Escape text for Markdown and HTML, on one line, truncated to 200 characters."""
    escaped = "".join(f"&#{ord(letter)};" if letter in "|<>&[]()!`*_#\\" else letter for letter in text[:200])
    return " ".join(escaped.split())
