"""What several tests need: small configurations, agents, and the demo as a function."""

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

from evorl.actors.collectors import COLLECTORS, Acting, note_counts
from evorl.algorithms import make_algorithm
from evorl.config import override, read_yaml, validate
from evorl.config.algorithms import SETTINGS
from evorl.config.task import environment_of
from evorl.config.yaml import configuration_file
from evorl.distributed import Placement, Ranks
from evorl.envs import Environments
from evorl.envs.spaces import EnvSpec, ObservationSpec, observation_specs
from evorl.envs.suites import suite_of
from evorl.evolution.mutation import Context
from evorl.networks.stack import new_tensors
from evorl.population import Learner, Policy, initial_population
from evorl.population.evaluation import evaluate
from evorl.replay.batches import BatchBuilder
from evorl.replay.observations import ObservationStatistics
from evorl.replay.replay import ReplayExperience
from evorl.replay.samplers import UniformSampler
from evorl.replay.storage import Storage
from evorl.runs.configuration import read_config
from evorl.runs.program import run_program
from evorl.runs.storage.checkpoint_files import AGENTS, Checkpoints
from evorl.runs.storage.trust import note_trained
from evorl.runs.train import main_of
from evorl.seeding import torch_generator
from evorl.system.extras import EXTRAS
from evorl.system.stopwatch import Stopwatch
from evorl.types.agents import Agent, AgentState
from evorl.types.batches import Batch, PolicyOutput
from evorl.types.outcomes import UserError

ROOT = Path(__file__).parent.parent.parent
SMALL = Path(__file__).parent / "small.yaml"
OBSERVATIONS = gym.spaces.Box(-1.0, 1.0, (5,))
ACTIONS = gym.spaces.Discrete(3)

EVERY_MUTATION = [
    "evolution.mutation={none: 0.1, architecture: 1, parameters: 0.5, activation: 0.5, hyperparameters: 0.5,"
    " new_layer: 0.5}",
    "evolution.architecture={min_units: 4, max_units: 96, max_layers: 4}",
    "evolution.hyperparameters={learning_rate: {min: 1e-4, max: 1e-2}, batch_size: {min: 4, max: 16},"
    " learn_step: {min: 1, max: 4, grow: 1.5, shrink: 0.75}}",
]
LEAGUE = (
    "environment.id=helpers.games:ThreeMoves", "algorithm={name: a2c, rollout_steps: 4}", "evolution.fitness=rating",
    "league={games: 2, margin: 0, archive: 2}", "population.size=3",
)  # fmt: skip
OUTSIDE = "evolution.hyperparameters={learning_rate: {min: 1e-6, max: 1e-5}}"
"""A range of which a run warns at its start: the first learning rate is above it."""


def needs_its_extra(name):
    """Skip a test unless the packages of a shipped configuration's environment are installed."""
    needs_extra_of(environment_of(read_yaml(configuration_file(name))))


def needs_extra_of(id):
    """Skip a test unless the packages of this environment are installed."""
    for module in EXTRAS.get(suite_of(id), ()):
        pytest.importorskip(module)
    packages = {"pettingzoo:": "pettingzoo", "openspiel:": "pyspiel", "gymnax:": "gymnax", "brax:": "brax"}
    for beginning, module in packages.items():
        if id.startswith(beginning):
            pytest.importorskip(module)


def fitting(overrides):
    """The overrides, and without small.yaml's replay where the algorithm that they name keeps none."""
    rollouts = [name for name, settings in SETTINGS.items() if not settings.replayed]
    named = any(f"name: {name}{end}" in each for each in overrides for name in rollouts for end in ",}")
    return ("replay={}", *overrides) if named else overrides


def config(*overrides):
    return validate(override(read_yaml(SMALL), fitting(overrides)))


def interface(observations=OBSERVATIONS, actions=ACTIONS, masked=False):
    return EnvSpec("Some-v0", observation_specs(observations), actions, masked)


def algorithm(*overrides, **spaces):
    return make_algorithm(config(*overrides), interface(**spaces))


def context(*overrides):
    """What mutations and selections are told, with the networks of the first algorithm."""
    return Context(config(*overrides).evolution, algorithm().networks)


def agent(architecture=None, id=0, dqn=None, **hyperparameters):
    """An agent with random parameters, moments and biases, so that nothing is zero by luck."""
    dqn = dqn or algorithm()
    architectures = {name: architecture or spec.architecture for name, spec in dqn.networks.items()}
    made = Agent(id, architectures, dqn.settings.first_hyperparameters() | hyperparameters)
    made.state = AgentState(acting=dqn.initial_state())
    generator = torch.Generator().manual_seed(id)
    new_tensors(dqn.networks, made, generator)
    for roles in made.tensors.values():
        for role in ("parameters", "target"):
            for value in roles.get(role, {}).values():
                value += 0.1 * torch.randn(value.shape, generator=generator)
    return made


def first_architecture(algorithm):
    """The architecture of a new agent that has one network."""
    (spec,) = algorithm.networks.values()
    return spec.architecture


def population(agents, dqn=None, **options):
    """The learner of agents that are copies of these."""
    copies = [replace(a.child(a.id), parent=a.parent, mutation=a.mutation) for a in agents]
    generator = torch_generator(0, generation=0, rank=0, purpose="test")
    return Learner(Policy(copies, dqn or algorithm(), generator), **options)


def check_stacks_equal_singles(agents, algorithm, batches, look, state=None, **tolerance):
    """Check that agents in stacks of their own and in one act and learn as each does alone; nothing may be drawn.

    `look` is what they see [P, E, ...], and `state` their recurrent state, zero beyond each agent's own units.
    """
    shown = {name: value for name, value in look.items() if name != "started"}
    copies = next(iter(shown.values())).shape[1]
    started = look.get("started", torch.zeros(len(agents), copies, dtype=torch.bool))

    def course(learner, own, batches):
        """What agents do, the state after it and the values then, the errors of each update, and what they become."""
        seen, units = {name: value[own] for name, value in shown.items()}, learner.policy.initial_state(1).shape[-1]
        first = learner.policy.initial_state(copies) if state is None else state[own, ..., :units]
        output, after = learner.policy.act(seen, started[own], first.clone(), deterministic=True)
        value = learner.policy.value(seen, None if state is None else after)
        return output.action, after, value, [learner.update(batch).errors for batch in batches], learner.to_agents()

    alone = []
    for index, single in enumerate(agents):
        learner, own = population([single], algorithm), slice(index, index + 1)
        units = learner.policy.stacks[0].recurrent_units
        alone.append(course(learner, own, [batch.part(own, units) for batch in batches]))
        ((network, roles), *_), before = alone[-1][-1][0].tensors.items(), single.tensors
        moved = roles["parameters"].items()
        assert any(not torch.equal(value, before[network]["parameters"][name]) for name, value in moved)
    for overhead in (0, 10**9):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("evorl.networks.stack.STACK_OVERHEAD", overhead)
            together = population(agents, algorithm)
            assert (len(together.policy.stacks) == 1) == (overhead > 0)
            action, after, value, errors, trained = course(together, slice(None), batches)
            _check_padding(together)
        for index, (own_action, then, own_value, own_errors, (expected,)) in enumerate(alone):
            torch.testing.assert_close(action[index], own_action[0])
            torch.testing.assert_close(value[index], own_value[0])
            if state is not None:
                torch.testing.assert_close(after[index][..., : then.shape[-1]], then[0])
            for error, own_error in zip(errors, own_errors, strict=True):
                if error is not None:
                    torch.testing.assert_close(error[index], own_error[0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(trained[index].tensors, expected.tensors, **tolerance)
            assert trained[index].state == expected.state
            assert trained[index].fault is None


def _check_padding(learner):
    """Check that of the networks of stacks only their agents' own entries are other than zero."""
    for stack in learner.policy.stacks:
        for name, network in stack.networks.items():
            padding = {key: view.detach().clone() for key, view in network.parameters.views.items()}
            for index, place in enumerate(learner.policy.places(stack)):
                for key, tensor in learner.policy.agents[place].tensors[name]["parameters"].items():
                    padding[key][index][tuple(slice(size) for size in tensor.shape)].zero_()
            assert not any(values.any() for values in padding.values())


def check_tensors(member, algorithm):
    """Check that an agent has the tensors of its architecture and no others, in its shapes."""
    for network, tensors in member.tensors.items():
        shape = member.architectures[network]
        specs = algorithm.networks[network].network.specs(shape)
        for role, named in tensors.items():
            assert {name: tuple(value.shape) for name, value in named.items()} == {
                name: spec.shape(shape.sizes()) for name, spec in specs.items() if spec.trained == (role != "buffers")
            }


def seen(values):
    """An observation of one vector part."""
    return {"observation": values}


def greedy(learner, observation, state=None, started=None):
    """The best actions known and the recurrent state after them."""
    shape = next(iter(observation.values())).shape[:2]
    state = learner.policy.initial_state(shape[1]) if state is None else state
    started = torch.zeros(shape, dtype=torch.bool) if started is None else started
    output, after = learner.policy.act(observation, started, state, deterministic=True)
    return output.action, after


def learning(settings, change=lambda agents: agents, **options):
    """A learner of a configuration's first agents, after a change of them, its experience, and its environments."""
    agents = settings.population.size
    environments = Environments(settings.environment, agents, settings.environment.num_envs)
    chosen = make_algorithm(settings, environments.interface)
    generator = torch_generator(0, generation=0, rank=0, purpose="test")
    learner = Learner(Policy(change(initial_population(settings, chosen)), chosen, generator), **options)
    experience = chosen.experience(Placement(Ranks(), "replicated", agents), environments.always_valid, Stopwatch())
    if settings.league is not None and settings.league.learn_from == "both":
        environments.play_both_seats()
    environments.reset(1)
    return learner, experience, environments


def play(learner, experience, environments, steps, generation=0, over=lambda step: False):
    """The training loop, for so many steps of environments that have been reset, unless it is over before."""
    policy = learner.policy
    if policy.algorithm.config.actors is not None:
        play_as_actor(learner, experience, environments, steps)
        return
    experience.begin(policy, generation)
    state = policy.initial_state(environments.num_envs)
    for step in range(1, steps + 1):
        output, state = policy.act(environments.observation, environments.started, state)
        experience.add(environments.step(output.action), output)
        for batch in experience.take_batches():
            experience.observe(batch, learner.update(batch))
        if over(step):
            break


def play_as_actor(learner, experience, environments, steps):
    """The same for algorithms that learn from actors, of which this process is one."""
    policy, config = learner.policy, learner.policy.algorithm.config
    # Where actors update what they share they first compute gradients.
    kind = COLLECTORS[config.algorithm.actor_messages.replace("updates", "gradients")]
    message = kind.layout(policy, config)(lambda shape, dtype: torch.empty(shape, dtype=dtype))
    collector = kind(Acting(config, environments, None, policy, policy.flat, None, 0, 0))
    experience.begin(policy, 0)
    for _ in range(steps // config.algorithm.sent_steps):
        collector.collect(message, lambda: None)
        note_counts(message, environments)
        experience.extend(message)
        for batch in experience.take_batches():
            # Actors that update shared parameters take the step themselves; the learner would only count it.
            experience.observe(batch, learner.update(replace(batch, applied=False)))


BETWEEN_SCORES = 40


def trained(*overrides, steps, learning_rate=1e-2, enough=None):
    """A population of two that has been trained for so many steps, and its environments.

    Training ends before where two scores in a row, `BETWEEN_SCORES` steps apart, are `enough`.
    """
    settings = config("population.size=2", *overrides, f"algorithm.learning_rate={learning_rate}")
    learner, experience, environments = learning(settings)
    if enough is None:
        play(learner, experience, environments, steps)
    else:
        scored, before = Environments(settings.environment, 2, settings.environment.num_envs), [False]

        def over(step):
            if step % BETWEEN_SCORES:
                return False
            before.append(bool((score(learner, scored) >= enough).all()))
            return all(before[-2:])

        play(learner, experience, environments, steps, over=over)
        scored.close()
    return learner, environments


def score(learner, environments):
    """The mean return [P] over episodes that the agents have not seen."""
    return evaluate(learner.policy, environments, range(900, 940), None).returns.mean(1)


def output_of(action, state=None, next_state=None, **extras):
    """The output of a policy with these values, without a recurrent state unless one is given."""
    none = torch.zeros(*action.shape[:2], 0, 0)
    return PolicyOutput(action, extras, none if state is None else state, none if next_state is None else next_state)


PREFIXES = ("observation.", "next_observation.")


def batch_of(fields, weight, due, recurrent=None):
    """A batch from fields whose names say where they belong."""
    parts = [{name[len(p) :]: value for name, value in fields.items() if name.startswith(p)} for p in PREFIXES]
    columns = {name: value for name, value in fields.items() if not name.startswith(PREFIXES)}
    return Batch(*parts, columns, weight, due, recurrent)


def fields_of(batch):
    """The fields of a batch under names that say where they belong."""
    parts = zip(PREFIXES, (batch.observation, batch.next_observation), strict=True)
    return {p + name: value for p, part in parts for name, value in part.items()} | batch.columns


REPLAYED = {"action": ((), torch.int64), "reward": ((), torch.float32), "terminated": ((), torch.bool)}


def replay_of(rows, streams, part):
    """A storage of what a replay keeps, with one part of observations."""
    return Storage(rows, streams, {"observation": part}, REPLAYED, torch.device("cpu"))


def replay_experience(
    storage,
    builder=None,
    sampler=None,
    part=0,
    rank=0,
    split_batches=False,
    **settings,
):
    """The experience of this storage: single transitions, drawn alike, unless `builder` or `sampler` say otherwise."""
    settings = {"gather": lambda numbers: numbers[None], "reward_clip": None, "period": 1} | settings
    place = {"seed": 0, "rank": rank, "part": part, "split_batches": split_batches}
    stopwatch = Stopwatch()
    nothing = ObservationStatistics({}, settings["gather"], stopwatch)
    return ReplayExperience(
        storage, builder or BatchBuilder(storage), sampler or UniformSampler(storage, **place), nothing,
        stopwatch=stopwatch, split_batches=split_batches, **settings,
    )  # fmt: skip


def draw_below(size, shape, generator):
    return torch.randint(size, shape, generator=generator)


def uniform_samplers(sizes, *batch_size, seed=0, drawable=None):
    """The samplers of ranks whose replays have these sizes, as those expect them; slots count from 0."""
    agents = [SimpleNamespace(hyperparameters={"batch_size": size}) for size in batch_size]
    found = []
    for rank, size in enumerate(sizes):
        there = size if drawable is None else drawable
        storage = SimpleNamespace(draw=partial(draw_below, there), device=torch.device("cpu"))
        sampler = UniformSampler(storage, seed=seed, rank=rank, part=rank, split_batches=True)
        sampler.begin(agents, 1, len(sizes))
        sampler.sync(np.array(sizes), np.zeros(len(agents)), np.zeros((len(sizes), 0)))
        found.append(sampler)
    return found


def vector(size):
    """A part of so many numbers."""
    return ObservationSpec("vector", (size,), torch.float32)


def kept(storage):
    """The fields of all that can be drawn, oldest first."""
    return fields_of(storage.gather(storage.valid_index()))


def batch(agents, size=8, seed=0):
    """A random batch [P, B] for `agents`, all of whom are due."""
    generator = torch.Generator().manual_seed(seed)
    count = len(agents)
    fields = {
        "observation.observation": torch.randn(count, size, 5, generator=generator),
        "next_observation.observation": torch.randn(count, size, 5, generator=generator),
        "action": torch.randint(3, (count, size), generator=generator),
        "reward": torch.randn(count, size, generator=generator),
        "terminated": torch.rand(count, size, generator=generator) < 0.2,
    }
    return batch_of(fields, torch.full((count, size), 1 / size), torch.ones(count))


def probe_network(inputs, outputs):
    """A user's own network."""
    return torch.nn.Sequential(torch.nn.Linear(inputs, 24), torch.nn.SiLU(), torch.nn.Linear(24, outputs))


def buggy_network(inputs, outputs):
    return torch.nn.Linear(inputs, {}["units"])


def partly_frozen(inputs, outputs):
    """A network with a frozen layer, and a layer that nothing uses."""
    model = torch.nn.Sequential(torch.nn.Linear(inputs, 24), torch.nn.Tanh(), torch.nn.Linear(24, outputs))
    model[0].requires_grad_(False)
    model[2].unused = torch.nn.Linear(2, 2)
    return model


def program_for(configuration, overrides):
    """The demo that trains what a configuration asks for."""
    algorithm = override(read_yaml(Path(configuration)), [each for each in overrides if "=" in each]).get(
        "algorithm", {}
    )
    name = algorithm.get("name", "dqn") if isinstance(algorithm, dict) else "dqn"
    return f"demos/{'asynchronous' if name in SETTINGS and SETTINGS[name].actor_messages else 'online'}.py"


def demo(program="demos/online.py"):
    """The `main` of a demo."""
    return main_of(ROOT / program)


def train(*overrides, configuration=None):
    """Run the demo in this process; its exit code."""
    overrides = overrides if configuration else fitting(overrides)
    configuration = configuration or SMALL
    try:
        program = program_for(configuration, overrides)
    except UserError:
        program = "demos/online.py"
    return run_program(demo(program), ["--config", str(configuration), *overrides])


def launch(directory, *overrides, processes=2, program=None, timeout=180, arguments=()):
    """Run a demo with `accelerate launch` in `directory`."""
    overrides = fitting(overrides)
    program = program or program_for(SMALL, overrides)
    command = [
        sys.executable, "-m", "accelerate.commands.launch",
        "--config_file", str(ROOT / "configs" / "accelerate" / "accelerate.yaml"),
        "--num_processes", str(processes), "--main_process_port", str(free_port()), *arguments,
        str(ROOT / program), "--config", str(SMALL), *overrides,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    return subprocess.run(
        command, cwd=directory, env=environment, timeout=timeout, capture_output=True, text=True, check=False
    )


def free_port():
    """A port that is free, below those that the system hands out to other processes by itself."""
    while True:
        port = 20_000 + secrets.randbelow(9_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def error_line(capsys):
    """The one line that was printed, after what trains if it began, which is an error."""
    header = r"\A(settings: [^\n]+\n)?(\w+ on [^\n]+ agents? x [^\n]+\n(until|for) [^\n]+\n)?"
    error = re.sub(header, "", capsys.readouterr().err)
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def cut_back(run, generation, copy=None):
    """Leave a run, or its copy, only the checkpoints up to a generation, after which a resume trains again."""
    run = run if copy is None else shutil.copytree(run, copy)
    for path in (run / "checkpoints").glob("generation-*"):
        if int(path.name[-6:]) > generation:
            shutil.rmtree(path)
    return run


def train_below(directory, *settings):
    """Train the run `a` below a directory, to be read or copied and not to be changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        assert train(*settings, "run.name=a") == 0
    return directory / "runs" / "a"


def own_copy(run, copy):
    """Copy a run that was trained in another directory as the user's own, whose code may be executed."""
    shutil.copytree(run, copy)
    note_trained(read_config(copy / "config.yaml", ()))
    return copy


def steps_until(run, generation):
    """A `training.max_steps` that ends a run like `run` after this generation, which has its full length.

    Steps in which an environment only resets do not count, so a generation of 40 counts some less.
    """
    return lines(run / "metrics.jsonl")[generation - 1]["agent_steps"] + 4


def saved_agents(run, generation=None, file=AGENTS):
    """The agents in a checkpoint of a run, the newest unless told."""
    checkpoints = Checkpoints(run / "checkpoints")
    return checkpoints.agents(generation or checkpoints.generations()[-1], file)


def contents(path):
    """The bytes of a file, or of all files in a directory."""
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    return {file: file.read_bytes() for file in files}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
