"""Runs for reports, written by hand or simulated: their files are small."""

import json

import numpy as np
import yaml

SHAPE = {
    "hidden_sizes": [16, 16], "residual_layers": [0, 0], "activation": "relu", "layer_norm": False,
    "branches": "shared", "convolutions": [], "recurrent": None, "recurrent_size": 0,
}  # fmt: skip
LIVES = [
    # generation, agent, parent, its generation, kind, target, before, after, fitness
    (1, 0, None, None, "initial", "", None, None, 10.0),
    (1, 1, None, None, "initial", "", None, None, 20.0),
    (2, 1, None, None, "initial", "", None, None, 24.0),
    (2, 2, 1, 1, "hyperparameters", "learning_rate", 1e-3, 2e-3, 40.0),
    (3, 2, 1, 1, "hyperparameters", "learning_rate", 1e-3, 2e-3, 43.0),
    (3, 3, 1, 1, "architecture", "q.hidden.0", 16, 32, 15.0),
    (4, 4, 2, 3, "hyperparameters", "gamma", 0.99, 0.98, 60.0),
    (4, 5, 2, 3, "none", "", None, None, 44.0),
]
CONFIG = {
    "seed": 1, "run": {"name": "x"}, "environment": {"id": "CartPole-v1", "num_envs": 2},
    "algorithm": {"name": "dqn", "learning_rate": 1e-3}, "population": {"size": 2},
    "evolution": {"steps": 100, "selection": {"name": "tournament"}}, "evaluation": {"episodes": 2},
    "training": {"target_fitness": 50.0},
}  # fmt: skip


def write_run(path, config=CONFIG, lives=LIVES, gain=0.0, ended="finished", elite=4):
    """Write a run whose agents' fitness is that of `lives`, more by `gain`."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    lineage, metrics = [], []
    for generation, id, parent, before, *mutation, fitness in lives:
        kind, target, *values = mutation
        rate = 2e-3 if id in (2, 4, 5) else 1e-3
        lineage.append(
            {
                "generation": generation, "id": id, "parent": parent, "parent_generation": before,
                "mutation": {"kind": kind, "target": target, "before": values[0], "after": values[1]},
                "fitness": None if fitness is None else fitness + gain, "architectures": {"q": SHAPE},
                "hyperparameters": {"learning_rate": rate, "gamma": 0.98 if id == 4 else 0.99}, "fault": None,
            }
        )  # fmt: skip
    for number in sorted({row["generation"] for row in lineage}):
        agents = [row for row in lineage if row["generation"] == number]
        scores = [row["fitness"] for row in agents if row["fitness"] is not None]
        metrics.append(
            {
                "generation": number, "agent_steps": 100 * number, "global_steps": 200 * number,
                "wall_clock_seconds": 2.0 * number, "env_steps_per_second": 100.0, "elite_generation": number,
                "elite_fitness": max(scores), "best_fitness": max(scores), "mean_fitness": sum(scores) / len(scores),
                "made_with": {"python": "3.11", "torch": "2.13"},
                "agents": [row["id"] for row in agents],
                "train_return": [None if row["id"] == 3 else row["fitness"] - 5 for row in agents],
            }
        )  # fmt: skip
    for name, rows in (("metrics", metrics), ("lineage", lineage)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "elite").mkdir()
    (path / "elite" / "agent.json").write_text(json.dumps({"id": elite, "generation": lives[-1][0]}))
    (path / "summary.json").write_text(json.dumps({"ended": ended, "solved": True}))
    return path


KINDS = {
    "none": ("none", "", None, None),
    "hyperparameters": ("hyperparameters", "learning_rate", 1e-3, 2e-3),
    "architecture": ("architecture", "q.hidden.0", 16, 32),
}


def write_long_run(path, generations, agents):
    """Write a simulated run: in each generation the best agent stays, and the others are children of random ones."""
    rng, lives, count = np.random.default_rng(0), [], agents
    born = [(id, None, None, "initial", "", None, None) for id in range(agents)]
    for generation in range(1, generations + 1):
        fitness = generation + rng.normal(0.0, 8.0, agents)
        lives += [(generation, *life, float(value)) for life, value in zip(born, fitness, strict=True)]
        best, parents, kinds = (
            born[fitness.argmax()],
            rng.integers(agents, size=agents - 1),
            rng.choice([*KINDS], agents),
        )
        children = zip(range(count, count + agents - 1), parents, kinds[1:], strict=True)
        born = [best, *((id, born[parent][0], generation, *KINDS[kind]) for id, parent, kind in children)]
        count += agents - 1
    return write_run(path, lives=lives, elite=best[0])
