"""Captured updates against single ones, bit by bit, with a recorder that repeats operations on a CPU."""

import gc
import importlib
import weakref

import numpy as np
import pytest
import torch
from helpers.support import config, learning, play
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evorl.population.graphs import Recorder
from evorl.types.batches import Batch, RecurrentInput
from evorl.types.outcomes import EvorlWarning, UserError

aten = torch.ops.aten
WAITS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.bincount, aten._unique2, aten.lift_fresh}
"""Operations in which the host waits for a GPU or copies numbers to it, which a capture refuses."""


INDEXED = {aten.index, aten.index_put, aten.index_put_}
"""Those that wait if an index is a mask."""


def is_mask(index):
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool


class Tape(TorchDispatchMode):
    """Repeats operations on the same tensors with the same numbers, as a CUDA graph does; the host may read nothing."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        masks = [index for index in tree_leaves(args[1:]) if function.overloadpacket in INDEXED and is_mask(index)]
        if function.overloadpacket in WAITS or masks:
            raise RuntimeError(f"the host waits in {function}")
        result = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, result in self.calls:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


class OnCPU(Recorder):
    """A capture here also takes the first step, which the first replay leaves out."""

    def __init__(self):
        self.captured = self.replayed = 0

    def try_out(self, function):
        return function(), ""

    def capture(self, function):
        tape = Tape()
        with tape:
            result = function()
        self.captured += 1
        first = True

        def replay():
            nonlocal first
            self.replayed += not first
            if not first:
                tape.replay()
            first = False

        return result, replay


def learner_of(settings, steps, recorder=None):
    """A population of two that has been trained for so many steps."""
    learner, experience, environments = learning(settings, recorder=recorder)
    learner._checks_agents = True  # As after the first update on a GPU, which this would otherwise read from.
    play(learner, experience, environments, steps)
    experience.end(learner.policy.agents)
    environments.close()
    return learner


STEPS = 200
REPLAY = "replay={capacity: 2000, learning_starts: 100}"
PENDULUM = "environment.id=Pendulum-v1"
CASES = {
    "dqn": ("algorithm={name: dqn, batch_size: 16, learn_step: 2}", REPLAY),
    "dueling, periodic": (
        "algorithm={name: dqn, batch_size: 16, dueling: true, target: periodic, target_period: 7}", REPLAY,
    ),
    "rainbow": (
        "algorithm={name: dqn, batch_size: 16, dueling: true, noisy: {}, distribution: categorical}",
        "replay={capacity: 2000, learning_starts: 100, n_step: 3, prioritised: {}}",
    ),
    "quantiles": ("algorithm={name: dqn, batch_size: 16, distribution: quantile}", REPLAY),
    "recurrent dqn": (
        "algorithm={name: dqn, batch_size: 32, sequence_length: 4, burn_in: 2}", "network.recurrent=gru", REPLAY,
    ),
    "ddpg": ("algorithm={name: ddpg, batch_size: 16}", REPLAY, PENDULUM),
    "td3": ("algorithm={name: td3, batch_size: 16}", REPLAY, PENDULUM),
    "sac": ("algorithm={name: sac, batch_size: 16}", REPLAY, PENDULUM),
    "sac, choices": ("algorithm={name: sac, batch_size: 16}", REPLAY),
    "a2c": ("algorithm={name: a2c, annealing: true, rollout_steps: 4}",),
    "ppo": ("algorithm={name: ppo, annealing: true, rollout_steps: 32, batch_size: 16, epochs: 4}",),
    "recurrent ppo": (
        "algorithm={name: ppo, rollout_steps: 16, sequence_length: 8, batch_size: 16}", "network.recurrent=lstm",
    ),
    "agents of other sizes": (
        "algorithm={name: dqn, batch_size: 16, learn_step: 2}", REPLAY, "evolution.initial=sampled",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings(f"error::{EvorlWarning.__module__}.{EvorlWarning.__qualname__}")
@pytest.mark.parametrize("case", CASES)
def test_captured_updates_are_single_ones_bit_by_bit(case):
    settings, recorder = small(case), OnCPU()
    single, captured = learner_of(settings, STEPS), learner_of(settings, STEPS, recorder)
    assert recorder.captured >= 1
    assert recorder.replayed > 5 * recorder.captured
    for one, other in zip(single.to_agents(), captured.to_agents(), strict=True):
        assert one.fault is None
        assert one.state.metrics() == other.state.metrics()
        for name, roles in one.tensors.items():
            for role, tensors in roles.items():
                for key, value in tensors.items():
                    assert torch.equal(value, other.tensors[name][role][key]), (name, role, key)
    assert torch.equal(single.policy.generator.get_state(), captured.policy.generator.get_state())
    means, others = single.metrics(), captured.metrics()
    assert means.updates.tolist() == others.updates.tolist()
    assert {name: total.tolist() for name, total in means.sums.items()} == {
        name: total.tolist() for name, total in others.sums.items()
    }


class Waiting(OnCPU):
    def try_out(self, function):
        return function(), "loss.py:3"


class Failing(OnCPU):
    def capture(self, function):
        raise RuntimeError("operation not permitted when stream is capturing")


def small(case):
    return config("population.size=2", "run.kernel=false", "network.hidden_sizes=[16]", *CASES[case])


def test_a_batch_is_copied_as_a_whole():
    """A tensor that `Batch.mapped` left out would keep the numbers of the batch that was captured."""
    some, named = torch.zeros(2, 3), {"name": torch.zeros(2, 3)}
    batch = Batch(named, named, named, some, some, RecurrentInput(some, some, burn_in=named), share=some)
    assert all(value is not None for value in vars(batch).values()), "a part is new"
    there = batch.mapped(lambda value: value.to("meta"))
    parts = tree_leaves([list(vars(whole).values()) for whole in (there, there.recurrent)])
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    assert len(tensors) == 9
    assert all(tensor.is_meta for tensor in tensors)


def test_updates_in_which_the_host_waits_are_taken_singly():
    recorder = Waiting()
    with pytest.warns(EvorlWarning, match=r"run\.kernel: .*the host waits for the GPU at loss\.py:3") as warned:
        waiting = learner_of(small("dqn"), 180, recorder)
    assert len([warning for warning in warned if warning.category is EvorlWarning]) == 1
    assert recorder.captured == 0
    single = learner_of(small("dqn"), 180)
    assert torch.equal(single.policy.flat, waiting.policy.flat)


def test_a_capture_that_fails_names_the_way_out():
    with pytest.raises(UserError, match=r"run\.kernel: .*not permitted.*; use run\.kernel=auto"):
        learner_of(small("dqn"), 180, Failing())


def test_a_learner_with_graphs_is_freed_at_once():
    importlib.import_module("torch._dynamo")  # The first dispatch mode imports it, and it keeps the frames around that.
    gc.collect()
    gc.disable()
    try:
        learner = learner_of(small("dqn"), 180, OnCPU())
        freed = weakref.ref(learner)
        del learner
        assert freed() is None
    finally:
        gc.enable()


def test_acting_states_stay_in_their_tensors():
    (stack,) = (learner := learner_of(small("dqn"), 1)).policy.stacks
    before = dict(stack.state)
    learner.policy.acted(np.array([40.0, 40.0]))
    assert stack.state["epsilon"] is before["epsilon"]
    assert (before["epsilon"] < 1).all()
