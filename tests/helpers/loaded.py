"""Runs whose agents have not been trained, to be loaded and exported."""

import torch

from evorl.algorithms import make_algorithm
from evorl.config import validate
from evorl.config.yaml import read_settings
from evorl.envs import Environments
from evorl.envs.json_spaces import interface_to_json
from evorl.population import initial_population
from evorl.runs.storage.directory import INTERFACE, RunDirectory
from evorl.system.formats import encode_agents
from helpers.support import SMALL

STEPS = 40
SPACES = {
    **{f"shown {kind}": ("Shown-v0", f"{{kind: {kind}}}") for kind in ("category", "categories", "dict", "tuple")},
    "choices": ("Done-v0", "{kind: choices}"),
    "continuous": ("Done-v0", "{kind: continuous}"),
    "masks": ("Masked-v0", "{}"),
    "masked choices": ("helpers.probes:MaskedChoices-v0", "{}"),
    "memory": ("Recall-v0", "{}"),
}
A2C = "algorithm={name: a2c, rollout_steps: 16}"


def fresh_run(path, file, *overrides):
    """The directory of a run whose elite has not been trained; its parameters are noise, so that it does something."""
    settings = [f"evaluation.max_steps={STEPS}", "replay.capacity=30000", "environment.num_envs=8", *overrides]
    settings = settings if "replay" in read_settings(file, overrides) else [settings[0], *settings[2:]]
    config = validate(read_settings(file, settings))
    environments = Environments(config.environment, 1, 1)
    algorithm = make_algorithm(config, environments.interface)
    agent = initial_population(config, algorithm)[0]
    generator = torch.Generator().manual_seed(3)
    for roles in agent.tensors.values():
        for value in roles["parameters"].values():
            value += 0.1 * torch.randn(value.shape, generator=generator)
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(config.to_yaml())
    directory = RunDirectory(path)
    directory.write_elite(encode_agents([agent]))
    directory.write(INTERFACE, interface_to_json(environments.interface))
    environments.close()
    return config


def spaces_run(path, kind):
    """The same for each kind of space."""
    id, kwargs = SPACES[kind]
    id = id if ":" in id else f"helpers.spaces:{id}"
    environment = f"environment={{id: '{id}', kwargs: {kwargs}}}"
    recurrent = ("network.recurrent=lstm", "network.recurrent_size=8") if kind == "memory" else ()
    recurrent += ("network.convolutions=[{channels: 4, kernel: 3}]",)
    return fresh_run(path, SMALL, "replay={}", A2C, environment, *recurrent)
