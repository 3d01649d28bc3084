"""Draw a run: fitness of every agent over environment steps, who came from whom, and one hyperparameter.

python benchmarks/plot_run.py runs/NAME docs/run.png [--returns training] [--solved 200]
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def draw(run: Path, picture: Path, hyperparameter: str, returns: str, solved: float) -> None:
    metrics, lineage = read(run / "metrics.jsonl"), read(run / "lineage.jsonl")
    steps = {row["generation"]: row["agent_steps"] for row in metrics}
    born = {(row["generation"], row["id"]): row for row in lineage}

    trained = {
        (row["generation"], agent): value
        for row in metrics
        for agent, value in zip(row["agents"], row["train_return"], strict=True)
    }

    def reached(row: dict[str, Any]) -> float:
        value = row["fitness"] if returns == "evaluation" else trained[row["generation"], row["id"]]
        return float("nan") if value is None else float(value)

    def setting(row: dict[str, Any]) -> float:
        return float(row["hyperparameters"][hyperparameter])

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1))
    colours = {"none": "0.6", "initial": "0.6", "architecture": "C0", "parameters": "C1", "activation": "C4"}
    for (generation, agent), row in born.items():
        before = born.get((generation - 1, agent)) or born.get((generation - 1, row["parent"]))
        colour = colours.get(row["mutation"]["kind"], "C2")
        for axis, value in ((above, reached), (below, setting)):
            if before is not None:
                places = [steps[generation - 1], steps[generation]]
                axis.plot(places, [value(before), value(row)], color=colour, linewidth=1, zorder=1)
            axis.scatter(steps[generation], value(row), color=colour, s=14, zorder=2)
    if returns == "evaluation":
        best = [row["elite_fitness"] for row in metrics]
        above.plot(steps.values(), best, color="k", linewidth=1.5, label="best so far")
        above.axhline(solved, color="0.8", linestyle="--", zorder=0)
    for name, colour in {**colours, "hyperparameters": "C2"}.items():
        if name != "initial":
            above.plot([], [], color=colour, label=name if name != "none" else "no mutation")
    above.set_ylabel(f"mean return in {returns}")
    above.legend(fontsize=8, loc="lower right")
    below.set_ylabel(hyperparameter)
    below.set_yscale("log")
    below.set_xlabel("environment steps of each agent")
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--hyperparameter", default="learning_rate")
    parser.add_argument("--returns", choices=("evaluation", "training"), default="evaluation")
    parser.add_argument("--solved", type=float, default=200.0, help="where to draw a line")
    parsed = parser.parse_args()
    draw(parsed.run, parsed.picture, parsed.hyperparameter, parsed.returns, parsed.solved)


if __name__ == "__main__":
    main()
