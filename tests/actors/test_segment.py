"""A rollout in shared memory is what was written, true last observations and frames of stacks included."""

import pytest
import torch

from evorl.actors.memory import Arena, SharedMemory
from evorl.envs.spaces import ObservationSpec
from evorl.replay.rollout_memory import RolloutLayout, RolloutMemory
from evorl.types.batches import PolicyOutput, Transition

T, P, E = 6, 2, 3
FLAG = ((), torch.bool)
FIELDS = {
    "log_prob": ((), torch.float32), "reward": ((), torch.float32),
    "terminated": FLAG, "truncated": FLAG, "started": FLAG,
}  # fmt: skip


def two_views(layout):
    """A rollout as its actor has it, and as the learner has it, in the same memory."""
    memory, counted = SharedMemory(), Arena()
    RolloutMemory(layout, counted.empty)
    memory.grow(counted.used)
    learner = RolloutMemory(layout, memory.arena().empty)
    return RolloutMemory(layout, SharedMemory(memory.descriptor).arena().empty), learner


def steps(generator, frames):
    """Endless steps of episodes that end at random, in observations [P, E, F] of the newest F numbers, or of one."""
    shape = (P, E, max(frames, 1))
    seen, started = torch.zeros(shape), torch.ones(P, E, dtype=torch.bool)
    seen[..., -1] = torch.rand(P, E, generator=generator)
    while True:
        draws = torch.rand(2, P, E, generator=generator)
        terminated, truncated = draws[0] < 0.15, (draws[0] > 0.85)
        new = torch.rand(P, E, 1, generator=generator)
        following = torch.cat([seen[..., 1:], new], -1) if frames else new
        yield Transition(
            {"x": seen}, started, draws[1], {"x": following}, terminated, truncated,
            torch.ones(P, E, dtype=torch.bool), True, bool(truncated.any()),
        )  # fmt: skip
        started = terminated | truncated
        fresh = torch.zeros(shape)
        fresh[..., -1] = torch.rand(P, E, generator=generator)
        seen = torch.where(started.unsqueeze(-1), fresh, following)


@pytest.mark.parametrize("frames", [0, 3])
def test_the_learner_reads_what_the_actor_wrote(frames):
    part = ObservationSpec("vector", (max(frames, 1),), torch.float32, frames=frames)
    actor, learner = two_views(RolloutLayout(T, P, E, {"x": part}, FIELDS, (2, 4)))
    generator = torch.Generator().manual_seed(3)
    source, state = steps(generator, frames), torch.zeros(P, E, 2, 4)
    for _ in range(4):  # One rollout goes on where the last one ended.
        written = []
        for step in range(T):
            transition = next(source)
            log_prob, after = (torch.rand(P, E, *shape, generator=generator) for shape in ((), (2, 4)))
            output = PolicyOutput(torch.zeros(P, E), {"log_prob": log_prob}, state, after)
            state = after
            actor.write(step, transition, output)
            written.append((transition, output))
        transitions, outputs = zip(*written, strict=True)
        expected = torch.stack([each.observation["x"] for each in transitions], 1)
        torch.testing.assert_close(learner.observation()["x"], expected, rtol=0, atol=0)
        found = learner.columns([*FIELDS, "valid"])
        assert found["valid"].all()
        for name in ("reward", "terminated", "truncated", "started"):
            assert found[name].equal(torch.stack([getattr(each, name) for each in transitions], 1))
        assert found["log_prob"].equal(torch.stack([each.extras["log_prob"] for each in outputs], 1))
        assert learner.state(0).equal(outputs[0].state)
        ends = [step for step in range(T) if transitions[step].truncated.any() or step == T - 1]
        assert learner.ends() == ends
        for step in ends:
            following = learner.next_observation(step)["x"]
            torch.testing.assert_close(following, transitions[step].next_observation["x"], rtol=0, atol=0)
            assert learner.state(step + 1).equal(outputs[step].next_state)
