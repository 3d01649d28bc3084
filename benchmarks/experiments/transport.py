"""Measure the bandwidth from an actor process to the learner through shared-memory slots, relative to a plain copy.

    OMP_NUM_THREADS=1 python benchmarks/experiments/transport.py [--steps 128] [--envs 16] [--seconds 5]

A slot holds a rollout of Atari frames (84x84, each stored once) in the actors' format. The sender only writes all bytes
of the slot and sends its number; the receiver copies all of them out and returns the slot. The plain copy is the
receiver's part alone, in one process, from private memory. Rates are the best of several alternating rounds.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from evorl.actors.actor import NUMBER
from evorl.actors.memory import PAGE, Arena, SharedMemory
from evorl.envs.spaces import ObservationSpec
from evorl.replay.rollout_memory import RolloutLayout, RolloutMemory
from evorl.replay.storage import Field

SLOTS = 2
ROUNDS = 5
FLAG: Field = (), torch.bool
NUMBER_FIELD: Field = (), torch.float32
FIELDS: dict[str, Field] = {
    "unclipped_action": ((), torch.int64), "log_prob": NUMBER_FIELD, "value": NUMBER_FIELD, "reward": NUMBER_FIELD,
    "terminated": FLAG, "truncated": FLAG, "started": FLAG,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=5.0)
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    part = ObservationSpec("image", (4, 84, 84), torch.uint8, frames=4, high=255.0)
    layout = RolloutLayout(parsed.steps, 1, parsed.envs, {"observation": part}, FIELDS, (0, 0))
    counted = Arena()
    RolloutMemory(layout, counted.empty)
    size = -(-counted.used // PAGE) * PAGE
    memory = SharedMemory()
    memory.grow(SLOTS * size)
    slots = [_tensors(RolloutMemory(layout, memory.arena(number * size).empty)) for number in range(SLOTS)]
    own = _tensors(RolloutMemory(layout, Arena().empty))
    target = [torch.empty_like(values) for values in own]
    each = sum(values.nbytes for values in own)
    through, plain = 0.0, 0.0
    # Alternate, since the machine's speed changes from minute to minute.
    for _ in range(ROUNDS):
        plain = max(plain, _plain(own, target, parsed.seconds / ROUNDS))
        through = max(through, _through(slots, own, target, parsed.seconds / ROUNDS))
    megabytes = each / 1e6
    print("| slot | slots/s | MB/s | plain copy, MB/s | share |")
    print("|---|---|---|---|---|")
    print(
        f"| {megabytes:.1f} MB | {through:.0f} | {through * megabytes:,.0f} | {plain * megabytes:,.0f} "
        f"| {through / plain:.0%} |"
    )


def _tensors(rollout: RolloutMemory) -> list[Tensor]:
    """Return the tensors of a slot that a rollout without episode ends fills."""
    storage = rollout.storage
    return [*storage.seen.values(), *storage.columns.values(), *storage.flags.values(), rollout.counts]


def _plain(source: list[Tensor], target: list[Tensor], seconds: float) -> float:
    """Return the slots per second copied within this process."""
    _copy(source, target)
    began, count = time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        _copy(source, target)
        count += 1
    return count / (time.perf_counter() - began)


def _through(slots: list[list[Tensor]], source: list[Tensor], target: list[Tensor], seconds: float) -> float:
    """Return the slots per second received from another process."""
    reader, theirs_out = os.pipe()
    theirs_in, writer = os.pipe()
    sender = os.fork()
    if not sender:
        os.close(writer)
        for number in _numbers(theirs_in):
            _copy(source, slots[number])
            os.write(theirs_out, NUMBER.pack(number))
        os._exit(0)
    os.close(theirs_in)
    os.close(theirs_out)
    for number in range(len(slots)):
        os.write(writer, NUMBER.pack(number))
    began, count, numbers = 0.0, -len(slots), _numbers(reader)
    while count <= 0 or time.perf_counter() < began + seconds:
        if count == 0:  # Start timing once every page has been touched.
            began = time.perf_counter()
        number = next(numbers)
        _copy(slots[number], target)
        os.write(writer, NUMBER.pack(number))
        count += 1
    rate = count / (time.perf_counter() - began)
    os.close(writer)
    os.waitpid(sender, 0)
    os.close(reader)
    return rate


def _numbers(reader: int) -> Iterator[int]:
    while number := os.read(reader, NUMBER.size):
        yield int(NUMBER.unpack(number)[0])


def _copy(source: list[Tensor], target: list[Tensor]) -> None:
    for ours, theirs in zip(source, target, strict=True):
        theirs.copy_(ours)


if __name__ == "__main__":
    main()
