"""Compiled gradients: the same as eager ones, for what can be compiled, and a line where a machine cannot."""

from dataclasses import replace

import pytest
import torch
from helpers.support import agent, algorithm, batch, population

from evorl.population.compiled import Compiler
from evorl.types import EvorlWarning


def with_objective(dqn, **changes):
    dqn.objectives = [replace(dqn.objectives[0], **changes)]
    return dqn


def trained(compiler, dqn, updates=3):
    """The parameters of two agents after some updates that report nothing but the first."""
    learner = population([agent(id=id, dqn=dqn) for id in range(2)], dqn, compiler=compiler)
    for seed in range(updates):
        learner.update(batch(learner.policy.agents, seed=seed))
    return learner.policy.flat


@pytest.mark.slow
def test_compiled_updates_are_those_that_are_not(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    dqn, compiler = with_objective(algorithm(), report_every=100), Compiler(enabled=True)
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
    assert torch.equal(trained(Compiler(enabled=True), dqn), trained(None, dqn))
    assert not capsys.readouterr().err


def test_where_a_machine_cannot_compile_it_says_so_once_and_goes_on(monkeypatch):
    def fail(*given, **options):
        raise RuntimeError("no C++ compiler\nwas found")

    monkeypatch.setattr("evorl.population.compiled._optimised", fail)
    dqn = with_objective(algorithm(), report_every=100)
    with pytest.warns(EvorlWarning, match=r"cannot compile, so updates run without it \(no C\+\+ compiler was") as seen:
        found = trained(Compiler(enabled=True), dqn)
    assert len(seen) == 1
    assert torch.equal(found, trained(None, dqn))


def test_a_batch_that_lies_otherwise_in_memory_has_a_function_of_its_own(monkeypatch):
    made = []
    monkeypatch.setattr("evorl.population.compiled._optimised", lambda traced, inputs: made.append(inputs) or traced)
    dqn = with_objective(algorithm(), report_every=100)
    agents = [agent(id=id, dqn=dqn) for id in range(2)]
    learner, plain = population(agents, dqn, compiler=Compiler(enabled=True)), population(agents, dqn)
    for turned in (False, False, True, True):
        some = batch(agents)
        if turned:
            some.observation["observation"] = some.observation["observation"].mT.contiguous().mT
        learner.update(some)
        plain.update(batch(agents))
    assert len(made) == 2
    torch.testing.assert_close(learner.policy.flat, plain.policy.flat)
