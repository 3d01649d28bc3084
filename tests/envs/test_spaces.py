"""How boxes are read: the bounds of bytes, and where an image has its channels; the mask beside them."""

from collections import OrderedDict

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.kinds import made
from helpers.support import agent, algorithm, population

from evorl.config import Environment
from evorl.envs import Environments
from evorl.envs.json_spaces import space_from_json, space_to_json
from evorl.envs.reading import action_reader
from evorl.envs.spaces import MASK, EnvSpec, as_numbers, observation_specs
from evorl.types.outcomes import UserError


def part_of(space):
    return observation_specs(space)["observation"]


@pytest.mark.parametrize(
    ("low", "high", "shape", "seen", "read"),
    [
        (0, 10, (7, 7, 3), [0, 5, 10], [0.0, 0.5, 1.0]),
        (0, 1, (4, 4), [0, 1], [0.0, 1.0]),
        (100, 120, (6,), [100, 105, 120], [0.0, 0.25, 1.0]),
        (0, 255, (84, 84, 3), [0, 51, 255], [0.0, 0.2, 1.0]),
        (np.array([2, 0], np.uint8), np.array([4, 8], np.uint8), (2,), [0, 2, 8], [0.0, 0.25, 1.0]),
        (3, 3, (2,), [3], [0.0]),
    ],
)
def test_bytes_are_scaled_by_their_declared_bounds(low, high, shape, seen, read):
    part = part_of(gym.spaces.Box(low, high, shape, np.uint8))
    numbers = as_numbers(torch.tensor(seen, dtype=torch.uint8), part)
    torch.testing.assert_close(numbers, torch.tensor(read))


@pytest.mark.parametrize(
    ("low", "high", "dtype", "read"),
    [
        (0, 255, np.float32, [0.0, 0.2, 1.0]),
        (0, 255, np.int32, [0.0, 0.2, 1.0]),
        (-255, 255, np.float32, [0.0, 51.0, 255.0]),
        (0, 1, np.float32, [0.0, 51.0, 255.0]),
        (-1, 1, np.float32, [0.0, 51.0, 255.0]),
        (-np.inf, 255, np.float32, [0.0, 51.0, 255.0]),
        (-3e38, 3e38, np.float32, [0.0, 51.0, 255.0]),
    ],
)
def test_images_of_other_numbers_are_scaled_by_bounds_of_pixels(low, high, dtype, read):
    part, seen = part_of(gym.spaces.Box(low, high, (12, 12, 3), dtype)), torch.tensor([0.0, 51.0, 255.0])
    torch.testing.assert_close(as_numbers(seen, part), torch.tensor(read))
    assert seen.tolist() == [0.0, 51.0, 255.0], "observations are stored as they are"
    vector = part_of(gym.spaces.Box(low, high, (3,), dtype))
    assert as_numbers(seen, vector).tolist() == seen.tolist()


@pytest.mark.parametrize("shape", [(12, 12, 3), (5,)])
def test_every_network_reads_bytes_by_their_bounds(shape):
    """What a box to 10 shows as 10 is what a box to 255 shows as 255: to convolutions, vectors and users' modules."""
    seen = torch.zeros(1, 4, *shape, dtype=torch.uint8)
    seen[:, ::2] = 1
    module = ("network.name=module", "network.factory=test_spaces:flat_network")
    for make in (lambda box: made("dqn", observations=box), lambda box: algorithm(*module, observations=box)):
        values = []
        for high in (10, 255):
            dqn = make(gym.spaces.Box(0, high, shape, np.uint8))
            (stack,) = population([agent(dqn=dqn)], dqn).policy.stacks
            values.append(dqn.value(stack, {"observation": seen * high}, None))
        torch.testing.assert_close(values[0], values[1])
        assert values[0][0, 0] != values[0][0, 1]


def flat_network(inputs, outputs):
    width = int(np.prod(inputs))
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(width, outputs))


@pytest.mark.parametrize(
    ("shape", "channels", "size"),
    [
        ((84, 84, 3), 3, (84, 84)),
        ((3, 84, 84), 3, (84, 84)),
        ((8, 8, 12), 12, (8, 8)),
        ((12, 8, 8), 12, (8, 8)),
        ((3, 210, 160), 3, (210, 160)),
        ((5, 5, 5), 5, (5, 5)),
        ((3, 84, 3), 3, (3, 84)),
        ((1, 11, 12), 1, (11, 12)),
    ],
)
@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_channels_are_found(shape, channels, size, kind):
    part = part_of(gym.spaces.Box(0, 1, shape, kind))
    assert (part.kind, part.channels, part.image_size) == ("image", channels, size)


def test_stacked_frames_are_channels_whatever_their_size():
    pytest.importorskip("ale_py")
    kwargs = {"img_height": 12, "img_width": 12, "stack_num": 12}
    part = Environments(Environment(id="ALE/Pong-v5", kwargs=kwargs), 1, 1).interface.parts["observation"]
    assert (part.frames, part.channels_last) == (12, False)


def test_a_mask_is_a_part_of_its_own_with_an_entry_for_each_action_of_each_choice():
    parts = observation_specs(gym.spaces.Box(-1, 1, (3,)))
    action = gym.spaces.MultiDiscrete([2, 3])
    masked, free = EnvSpec("Masked-v0", parts, action, masked=True), EnvSpec("Free-v0", parts, action)
    assert list(masked.with_mask()) == ["observation", MASK]
    assert masked.with_mask()[MASK].shape == (masked.mask_size,) == (5,)
    assert masked.with_mask()[MASK].dtype == torch.bool
    assert (free.with_mask(), free.mask_size) == (parts, 0)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int32, np.float32])
def test_unbounded_spaces_of_every_type_are_read_again(dtype):
    space = gym.spaces.Box(0, np.inf if dtype != np.uint8 else 255, (2,), dtype)
    assert space_from_json(space_to_json(space)) == space


def test_parts_of_a_space_that_is_read_again_keep_their_order():
    parts = OrderedDict((name, gym.spaces.Discrete(2)) for name in "zab")
    assert [*space_from_json(space_to_json(gym.spaces.Dict(parts)))] == [*"zab"]


@pytest.mark.parametrize("dtype", [np.int8, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("inward", [0, 1])
def test_actions_at_the_bounds_of_integers_stay_there(dtype, inward):
    limits = np.iinfo(dtype)
    ends = limits.min + inward, limits.max - inward
    space = gym.spaces.Box(*ends, (1,), dtype)
    read = action_reader(space, 1)
    for value, end in [(ends[0], ends[0]), (-np.inf, ends[0]), (ends[1], ends[1]), (np.inf, ends[1])]:
        for kind in (np.float32, np.float64):
            action = read(np.array([[value]], kind))[0]
            assert space.contains(action)
            # 64 bits are more than a float64 holds.
            assert abs(int(action[0]) - end) <= (2047 if limits.bits == 64 else 0)
    assert read(np.array([[2.5], [np.nan], [3.6]], np.float32)).ravel().tolist() == [2, max(0, ends[0]), 4]


def test_names_of_parts_are_strings():
    """A saved space keeps names as JSON does, so that a loaded agent would not know the environment's own."""
    box = gym.spaces.Box(0, 1, (2,))
    with pytest.raises(UserError, match="has keys that are not strings"):
        observation_specs(gym.spaces.Dict({1: box, 2: box}))
