"""What a rollout stores: frames once, and recurrent states of any size."""

from dataclasses import replace

import torch
from helpers import worlds

from evorl.envs.spaces import ObservationSpec
from evorl.replay.rollout_buffer import RolloutBuffer, RolloutLayout
from evorl.types import PolicyOutput, Transition

P, E = 2, 3


def test_stacked_frames_are_put_together_as_they_were_seen():
    generator, depth, device = torch.Generator().manual_seed(0), 4, torch.device("cpu")
    picture = ObservationSpec("vector", (depth, 2, 2), torch.uint8, frames=depth)
    layout = RolloutLayout(20, P, E, {"picture": picture}, {"reward": ((), torch.float32)}, (0, 0))
    kept, shown, none = RolloutBuffer(layout, device), [], torch.zeros(P, E, 0, 0)
    stack, never = torch.zeros(P, E, depth, 2, 2, dtype=torch.uint8), torch.zeros(P, E, dtype=torch.bool)
    index = torch.arange(20 * E).expand(1, P, -1)
    for rollout in range(3):
        for step in range(20):
            started = torch.rand(P, E, generator=generator) < (1.0 if rollout == step == 0 else 0.2)
            newest = torch.randint(1, 256, (P, E, 1, 2, 2), generator=generator, dtype=torch.uint8)
            stack = torch.where(started[..., None, None, None], 0, stack)
            stack = torch.cat([stack[:, :, 1:], newest], 2)
            seen, number = {"picture": stack}, torch.full((P, E), float(len(shown)))
            output = PolicyOutput(never, {}, none, none)
            kept.write(step, Transition(seen, started, number, {}, never, never, ~never), output)
            shown.append(stack)
        found = kept.gather(kept.sequence_index(index), ("reward",))
        expected = torch.stack(shown[-20:]).movedim(1, 0)
        assert torch.equal(found.observation["picture"][0, :, 0].unflatten(1, (20, E)), expected)
        numbers = torch.arange(20.0) + 20 * rollout
        assert torch.equal(found.columns["reward"][0, :, 0].unflatten(1, (20, E)), numbers[:, None].expand(P, 20, E))
        assert torch.equal(kept.column("reward"), numbers[:, None, None].expand(20, P, E))
    assert kept.storage.seen["picture"].shape == (20 + depth, P * E, 2, 2), "each frame is kept once"


def test_recurrent_states_are_those_before_each_sequence_and_after_the_last_step():
    layout = RolloutLayout(4, P, E, {}, {}, (2, 3), sequence=2)
    kept, never = RolloutBuffer(layout, torch.device("cpu")), torch.zeros(P, E, dtype=torch.bool)
    states = torch.randn(5, P, E, 2, 3)
    for step in range(4):
        output = PolicyOutput(never, {}, states[step], states[step + 1])
        kept.write(step, Transition({}, never, never, {}, never, never, ~never), output)
    index = torch.arange(2 * E).expand(1, P, -1)
    assert torch.equal(kept.states(index)[0], states[:4:2].movedim(1, 0).flatten(1, 2))
    assert all(torch.equal(kept.state(steps), states[steps]) for steps in (0, 2, 4))


def test_recurrent_states_may_grow_between_generations():
    experience = worlds.rollout_experience(replace(worlds.PLAIN, sequence=2))
    for units in (3, 5, 5):
        experience.begin(worlds.Group(worlds.members()), 1)
        for transition, output in worlds.World(recurrent=True).steps[: worlds.T]:
            wide = (each.expand(-1, -1, -1, units) for each in (output.state, output.next_state))
            experience.add(transition, PolicyOutput(output.action, output.extras, *wide))
        (batch,) = experience.take_batches()
        assert batch.recurrent.state.shape == (worlds.P, worlds.T // 2 * worlds.E, 1, units)
