"""Compiled gradients: the same as eager ones, for what can be compiled, and a line where a machine cannot."""

from dataclasses import replace

import pytest
import torch
from helpers.support import (
    EVERY_MUTATION,
    agent,
    algorithm,
    batch,
    config,
    first_architecture,
    lines,
    population,
    train,
)

from evorl.population.compiled import AUTO_UPDATES, Compiler
from evorl.types import EvorlWarning


def with_objective(dqn, **changes):
    dqn.objectives = [replace(dqn.objectives[0], **changes)]
    return dqn


def trained(compiler, dqn, updates=3, **changes):
    """The parameters of two agents after some updates that report nothing but the first."""
    architecture = replace(first_architecture(dqn), **changes)
    learner = population([agent(architecture, id=id, dqn=dqn) for id in range(2)], dqn, compiler=compiler)
    for seed in range(updates):
        learner.update(batch(learner.policy.agents, seed=seed))
    return learner.policy.flat


@pytest.fixture
def compilations(monkeypatch):
    """The inputs of each compilation; the traced functions are called as they are."""
    made = []
    monkeypatch.setattr("evorl.population.compiled._optimised", lambda traced, inputs: made.append(inputs) or traced)
    return made


@pytest.mark.slow
def test_compiled_updates_are_those_that_are_not(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    dqn, compiler = with_objective(algorithm(), report_every=100), Compiler(True)
    torch.testing.assert_close(trained(compiler, dqn), trained(None, dqn))
    assert "training.compile: compiled the update of q of 2 agents in " in capsys.readouterr().err
    trained(compiler, dqn)
    assert not capsys.readouterr().err, "a later generation has the same functions"


def test_a_loss_that_draws_is_not_compiled(capsys):
    dqn = algorithm()

    def drawing(stack, batch, generator, loss=dqn.loss):
        torch.rand((), generator=generator)
        return loss(stack, batch, generator)

    with_objective(dqn, loss=drawing, report_every=100)
    assert torch.equal(trained(Compiler(True), dqn), trained(None, dqn))
    assert not capsys.readouterr().err


def test_where_a_machine_cannot_compile_it_says_so_once_and_goes_on(monkeypatch):
    def fail(*given, **options):
        raise RuntimeError("no C++ compiler\nwas found")

    monkeypatch.setattr("evorl.population.compiled._optimised", fail)
    dqn = with_objective(algorithm(), report_every=100)
    with pytest.warns(EvorlWarning, match=r"cannot compile, so updates run without it \(no C\+\+ compiler was") as seen:
        found = trained(Compiler(True), dqn)
    assert len(seen) == 1
    assert torch.equal(found, trained(None, dqn))


@pytest.mark.parametrize("mode", [True, "auto"])
def test_a_machine_that_can_no_longer_compile_says_that_a_resume_will_differ(mode, monkeypatch):
    compiled = []

    def once(traced, inputs):
        if compiled:
            raise OSError("No space left on device")
        compiled.append(inputs)
        return traced

    monkeypatch.setattr("evorl.population.compiled._optimised", once)
    dqn, compiler = with_objective(algorithm(), report_every=100), Compiler(mode, any_widths=False)

    def train_some(size):
        agents = [agent(id=id, dqn=dqn) for id in range(size)]
        for each in agents:
            each.state.updates = dict.fromkeys(each.state.updates, AUTO_UPDATES)
        learner = population(agents, dqn, compiler=compiler)
        for _ in range(2):  # The first reports metrics, and so is not compiled.
            learner.update(batch(agents))

    train_some(1)
    assert compiled
    with pytest.warns(EvorlWarning, match=r"No space left on device\); a resume that can compile will not be"):
        train_some(2)


def test_a_batch_that_lies_otherwise_in_memory_has_a_function_of_its_own(compilations):
    dqn = with_objective(algorithm(), report_every=100)
    agents = [agent(id=id, dqn=dqn) for id in range(2)]
    learner, plain = population(agents, dqn, compiler=Compiler(True)), population(agents, dqn)
    for turned in (False, False, True, True):
        some = batch(agents)
        if turned:
            some.observation["observation"] = some.observation["observation"].mT.contiguous().mT
        learner.update(some)
        plain.update(batch(agents))
    assert len(compilations) == 2
    torch.testing.assert_close(learner.policy.flat, plain.policy.flat)


WIDTHS = [(8, 8), (40, 200), (200, 40), (400, 90)]


@pytest.mark.parametrize("norm", [False, True])
def test_one_function_serves_all_widths(norm, compilations):
    dqn, compiler = with_objective(algorithm(), report_every=100), Compiler(True, speaks=False)
    for widths in WIDTHS:
        changes = {"hidden_sizes": widths, "residual_layers": (0, 0), "layer_norm": norm}
        torch.testing.assert_close(trained(compiler, dqn, **changes), trained(None, dqn, **changes))
    assert len(compilations) == 1
    changes = {"hidden_sizes": (8, 8, 8), "residual_layers": (0, 0, 0), "layer_norm": norm}
    torch.testing.assert_close(trained(compiler, dqn, **changes), trained(None, dqn, **changes))
    assert len(compilations) == 2


@pytest.mark.parametrize(("weight", "compiled"), [(0.0, 4), (0.2, 1)])
def test_widths_that_no_mutation_changes_are_constants(weight, compiled, compilations):
    settings = config("training.compile=true", f"evolution.mutation.architecture={weight}")
    dqn, compiler = with_objective(algorithm(), report_every=100), Compiler.of(settings, speaks=False)
    for widths in WIDTHS:
        trained(compiler, dqn, hidden_sizes=widths, residual_layers=(0, 0))
    assert len(compilations) == compiled


def test_a_loss_that_needs_the_number_of_units_has_a_function_for_each(compilations):
    dqn, compiler = algorithm(), Compiler(True, speaks=False)

    def scaled(stack, batch, generator, loss=dqn.loss):
        found = loss(stack, batch, generator)
        units = float(stack.networks["q"].tensors["hidden.0.bias"].shape[-1])
        return replace(found, per_sample=found.per_sample / units)

    with_objective(dqn, loss=scaled, report_every=100)
    for widths in WIDTHS:
        changes = {"hidden_sizes": widths, "residual_layers": (0, 0)}
        torch.testing.assert_close(trained(compiler, dqn, **changes), trained(None, dqn, **changes))
    assert len(compilations) == len(WIDTHS)


def test_a_loss_may_have_tensors_of_its_own(compilations):
    dqn, compiler, own = algorithm(), Compiler(True, speaks=False), torch.tensor(0.5)

    def scaled(stack, batch, generator, loss=dqn.loss):
        found = loss(stack, batch, generator)
        return replace(found, per_sample=found.per_sample * own)

    with_objective(dqn, loss=scaled, report_every=100)
    for widths in WIDTHS:
        changes = {"hidden_sizes": widths, "residual_layers": (0, 0)}
        torch.testing.assert_close(trained(compiler, dqn, **changes), trained(None, dqn, **changes))
    assert len(compilations) == 1


def test_a_loss_that_reads_the_acting_state_sees_it_change(compilations):
    dqn = algorithm()

    def scaled(stack, batch, generator, loss=dqn.loss):
        found, share = loss(stack, batch, generator), stack.state["epsilon"].float().unsqueeze(-1)
        return replace(found, per_sample=found.per_sample * share)

    with_objective(dqn, loss=scaled, report_every=100)
    agents = [agent(id=id, dqn=dqn) for id in range(2)]
    learner, plain = population(agents, dqn, compiler=Compiler(True, speaks=False)), population(agents, dqn)
    for seed in range(4):
        for each in (learner, plain):
            each.update(batch(agents, seed=seed))
            dqn.after_acting(each.policy.stacks[0], 1000.0)
    assert len(compilations) == 1
    torch.testing.assert_close(learner.policy.flat, plain.policy.flat)


@pytest.mark.parametrize(("updates", "compiled"), [(AUTO_UPDATES - 1, 0), (AUTO_UPDATES, 1)])
def test_auto_compiles_late(updates, compiled, compilations):
    dqn = with_objective(algorithm(), report_every=100)
    agents = [agent(id=id, dqn=dqn) for id in range(2)]
    for each in agents:
        each.state.updates["q"] = float(updates)
    learner, plain = population(agents, dqn, compiler=Compiler("auto")), population(agents, dqn)
    for seed in range(3):
        learner.update(batch(agents, seed=seed))
        plain.update(batch(agents, seed=seed))
    assert len(compilations) == compiled
    torch.testing.assert_close(learner.policy.flat, plain.policy.flat)


def test_auto_says_nothing_where_a_machine_cannot_compile(monkeypatch, recwarn, capsys):
    monkeypatch.setattr("evorl.population.compiled.AUTO_UPDATES", 0)
    tried = []

    def fail(traced, inputs):
        tried.append(traced)
        raise RuntimeError("no compiler")

    monkeypatch.setattr("evorl.population.compiled._optimised", fail)
    dqn = with_objective(algorithm(), report_every=100)
    assert torch.equal(trained(Compiler("auto"), dqn), trained(None, dqn))
    assert tried
    assert not [each for each in recwarn if issubclass(each.category, EvorlWarning)]
    assert not capsys.readouterr().err


@pytest.mark.campaign
def test_a_resumed_run_gets_the_functions_that_it_had(monkeypatch, tmp_path, in_directory, capsys):
    """Inductor's code depends on the sizes of its example, which must not be those that a process meets first."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    widths = "evolution.mutation={none: 0, architecture: 1, parameters: 0, hyperparameters: 0, new_layer: 0}"
    settings = (widths, *EVERY_MUTATION[1:2], "training.compile=true")
    assert train("run.name=whole", *settings) == 0
    assert "training.compile: compiled the update of q of 4 agents" in capsys.readouterr().err
    assert train("run.name=stopped", *settings, "training.max_steps=80") == 0
    assert train("run.name=stopped", *settings, "run.resume=auto") == 0
    whole, stopped = (in_directory / "runs" / name for name in ("whole", "stopped"))
    sizes = [line["architectures"] for line in lines(whole / "lineage.jsonl")]
    assert len({str(each) for each in sizes}) > 4
    newest = "checkpoints/generation-000003/agents.safetensors"
    assert (whole / newest).read_bytes() == (stopped / newest).read_bytes()
