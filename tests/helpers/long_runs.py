"""Long runs as files: a tournament that is simulated, in the lines that a real run would write."""

import json
from dataclasses import asdict

import numpy as np
import yaml

from evorl.types import INITIAL, Mutation

from .drawn import CONFIG, SHAPE

FIRST = {
    "learning_rate": 1e-3, "gamma": 0.99, "gae_lambda": 0.95, "entropy_coefficient": 0.01, "value_coefficient": 0.5,
    "max_grad_norm": 0.5, "epochs": 4.0, "batch_size": 64.0, "clip": 0.2,
}  # fmt: skip
KINDS = ("none", "hyperparameters", "architecture", "parameters")


class Simulation:
    """A population whose fitness rises: in each generation the best agent stays and the others are children."""

    def __init__(self, agents, seed):
        self._rng = np.random.default_rng(seed)
        self._next = agents
        self.agents = [
            {"id": id, "parent": None, "parent_generation": None, "mutation": asdict(INITIAL), "fitness": None,
             "fault": None, "architectures": {"policy": SHAPE}, "hyperparameters": dict(FIRST), "state": _state(0)}
            for id in range(agents)
        ]  # fmt: skip
        self._skill = self._rng.normal(20.0, 5.0, agents)

    def evaluate(self, generation):
        """Give each agent its fitness."""
        noise = self._rng.normal(0.0, 8.0, len(self.agents))
        for agent, value in zip(self.agents, self._skill + noise, strict=True):
            agent["fitness"] = float(value)
            agent["state"] = _state(generation)

    def evolve(self, generation):
        """Make the next generation."""
        rng, count = self._rng, len(self.agents)
        fitness = np.array([agent["fitness"] for agent in self.agents])
        rivals = rng.integers(count, size=(count, 2))
        parents = rivals[np.arange(count), fitness[rivals].argmax(1)]
        parents[0] = fitness.argmax()
        gains = rng.normal(0.0, 40.0 / (20 + generation), count) + 60.0 / (30 + generation)
        self._skill = self._skill[parents] + gains
        kinds = rng.choice(len(KINDS), size=count, p=(0.3, 0.4, 0.1, 0.2))
        picks, factors = rng.integers(3, size=count), rng.choice((0.8, 1.2), size=count)
        children = [self.agents[parents[0]]]
        for place in range(1, count):
            children.append(self._child(parents[place], generation, KINDS[kinds[place]], picks[place], factors[place]))
        self.agents = [dict(agent) for agent in children]

    def _child(self, parent, generation, kind, pick, factor):
        old = self.agents[parent]
        child = old | {"id": self._next, "parent": old["id"], "parent_generation": generation, "fault": None}
        self._next += 1
        mutation = Mutation(kind)
        if kind == "hyperparameters":
            name = ("learning_rate", "entropy_coefficient", "batch_size")[pick]
            before = old["hyperparameters"][name]
            after = float(np.clip(before * factor, FIRST[name] / 10, FIRST[name] * 10))
            mutation = Mutation(kind, name, before, after)
            child["hyperparameters"] = old["hyperparameters"] | {name: after}
        elif kind == "architecture":
            sizes = list(old["architectures"]["policy"]["hidden_sizes"])
            before, sizes[pick % 2] = sizes[pick % 2], int(np.clip(sizes[pick % 2] * factor, 8, 256))
            mutation = Mutation(kind, f"policy.hidden.{pick % 2}", before, sizes[pick % 2])
            child["architectures"] = {"policy": SHAPE | {"hidden_sizes": sizes}}
        elif kind == "parameters":
            mutation = Mutation(kind, "noise", None, 0.02)
        return child | {"mutation": asdict(mutation)}


def effective_value(name, value):
    return round(value) if name == "batch_size" else value


def write_long_run(path, generations, agents, seed=0, config=CONFIG):
    """Write a run of so many generations and agents; its checkpoints are missing."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.yaml").write_text(yaml.safe_dump(config | {"population": {"size": agents}}))
    simulation, best = Simulation(agents, seed), None
    with (path / "lineage.jsonl").open("w") as lineage, (path / "metrics.jsonl").open("w") as metrics:
        for generation in range(1, generations + 1):
            simulation.evaluate(generation)
            lineage.writelines(json.dumps({"generation": generation, **agent}) + "\n" for agent in simulation.agents)
            top = max(simulation.agents, key=lambda agent: agent["fitness"])
            if best is None or top["fitness"] > best["fitness"]:
                best = top | {"generation": generation}
            metrics.write(json.dumps(_row(generation, simulation.agents, best)) + "\n")
            simulation.evolve(generation)
    (path / "elite").mkdir(exist_ok=True)
    (path / "elite" / "agent.json").write_text(json.dumps(best))
    (path / "summary.json").write_text(json.dumps({"ended": "finished", "solved": True, "generations": generations}))
    return path


def _state(generation):
    rewards = {"count": 0.0, "mean": 0.0, "variance": 0.0}
    return {
        "acting": {"steps": 1971.0 * generation}, "updates": {"policy": 64.0 * generation}, "update_debt": 0.0,
        "rewards": rewards,
    }  # fmt: skip


def _row(generation, agents, best):
    fitness = [agent["fitness"] for agent in agents]
    each = [value / 7 for value in fitness]
    losses = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "explained_variance")
    return {
        "generation": generation, "agent_steps": 2000 * generation, "global_steps": 2000 * generation * len(agents),
        "next_id": 0, "solved": False, "wall_clock_seconds": 2.0 * generation, "ranks": 1, "placement": "replicated",
        "vectorization": "auto", "replay": True, "shortened_by": None,
        "selection_began": None, "rank_correlation": None, "drifts": 0,
        "made_with": {"python": "3.11", "torch": "2.13"},
        "elite_fitness": best["fitness"], "elite_std": 8.0, "elite_episodes": 10, "elite_lower_bound": None,
        "elite_generation": best["generation"], "best_fitness": max(fitness), "mean_fitness": float(np.mean(fitness)),
        "env_steps_per_second": 20000.0 + generation % 7, "updates_per_second": 600.0,
        "seconds": {"training": 1.0, "learning": 0.6, "acting": 0.2, "evaluation": 0.5},
        "agents": [agent["id"] for agent in agents], "fitness": fitness,
        "parents": [agent["parent"] for agent in agents],
        "parent_generations": [agent["parent_generation"] for agent in agents],
        "mutations": [str(Mutation(**agent["mutation"]).with_effective_values(effective_value)) for agent in agents],
        "hyperparameters": [agent["hyperparameters"] for agent in agents],
        "architectures": [agent["architectures"] for agent in agents], "fitness_std": each,
        "fitness_episodes": [10] * len(agents), "train_return": each, "train_length": each,
        "train_episodes": [20] * len(agents), "metrics": dict.fromkeys(losses, each), "updates": each,
        "state": [{**agent["state"]["acting"], "updates/policy": 1.0, "update_debt": 0.0, "rewards/count": 0.0,
                   "rewards/mean": 0.0, "rewards/variance": 0.0} for agent in agents],
        "evaluation_steps": 1000,
    }  # fmt: skip
