"""What a rollout stores: frames once, and recurrent states of any size."""

import torch

from evorl.replay.rollouts import Trajectories
from evorl.types import Transition

P, E = 2, 3


def test_stacked_frames_are_put_together_as_they_were_seen():
    generator, depth, device = torch.Generator().manual_seed(0), 4, torch.device("cpu")
    kept, shown = Trajectories(20, 1, {"picture": depth}, (), device), []
    stack, never = torch.zeros(P, E, depth, 2, 2, dtype=torch.uint8), torch.zeros(P, E, dtype=torch.bool)
    index = torch.arange(20 * E).expand(1, P, -1)
    for rollout in range(3):
        for step in range(20):
            started = torch.rand(P, E, generator=generator) < (1.0 if rollout == step == 0 else 0.2)
            newest = torch.randint(1, 256, (P, E, 1, 2, 2), generator=generator, dtype=torch.uint8)
            stack = torch.where(started[..., None, None, None], 0, stack)
            stack = torch.cat([stack[:, :, 1:], newest], 2)
            seen, number = {"picture": stack}, torch.full((P, E), float(len(shown)))
            kept.write(step, Transition(seen, started, number, {}, never, never, ~never), {"number": number}, None)
            shown.append(stack)
        found = kept.gather(kept.slots(index), ("number",))
        expected = torch.stack(shown[-20:]).movedim(1, 0)
        assert torch.equal(found.observation["picture"][0, :, 0].unflatten(1, (20, E)), expected)
        numbers = torch.arange(20.0) + 20 * rollout
        assert torch.equal(found.columns["number"][0, :, 0].unflatten(1, (20, E)), numbers[:, None].expand(P, 20, E))
        assert torch.equal(kept.column("number"), numbers[:, None, None].expand(20, P, E))
    assert kept._storage.seen["picture"].shape == (20 + depth, P * E, 2, 2), "each frame is kept once"


def test_recurrent_states_may_grow_between_rollouts():
    kept, never = Trajectories(4, 2, {}, (), torch.device("cpu")), torch.zeros(P, E, dtype=torch.bool)
    index = torch.arange(2 * E).expand(1, P, -1)
    for units in (3, 5):
        states = torch.randn(4, P, E, 2, units)
        for step in range(4):
            seen = {"observation": torch.zeros(P, E, 1)}
            kept.write(step, Transition(seen, never, never, {}, never, never, ~never), {}, states[step])
        expected = states[::2].movedim(1, 0).flatten(1, 2)
        assert torch.equal(kept.states(index)[0], expected)
