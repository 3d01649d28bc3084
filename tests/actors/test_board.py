"""Parameters in shared memory: no read is torn, and each generation is read whole."""

import fcntl
import itertools
import os
import signal
import time

import torch
from helpers.support import agent

from evorl.actors.memory import Board, Description

VALUES = 20_000


def publish_until_killed(board):
    """Publish buffers whose values are all their version, as fast as may be."""
    for version in itertools.count(1):
        board.publish(torch.full((VALUES,), float(version)), [torch.full((2,), float(version))], version)


def test_board_reads_are_not_torn():
    board = Board(1)
    board.describe(Description(1, [agent(id=0), agent(id=1)], False), VALUES, 1)
    board.publish(torch.zeros(VALUES), [torch.zeros(2)], 0)
    reader = Board(1, board.memory)
    assert [each.id for each in reader.read_description().agents] == [0, 1]
    writer = os.fork()
    if writer == 0:
        publish_until_killed(board)
    flat, states = reader.empty()
    seen, least, deadline = set(), time.monotonic() + 1, time.monotonic() + 60
    try:
        # On a busy machine the two may have to wait for each other.
        while time.monotonic() < (least if len(seen) > 20 else deadline):
            version = reader.fetch(flat, states, 1)
            assert (flat == version).all()
            assert (states == version).all()
            seen.add(version)
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    assert len(seen) > 20, "the two are meant to have run beside each other"


def test_board_of_a_new_generation_may_be_larger():
    board = Board(2)
    reader = Board(2, board.memory)
    for generation, values in ((1, 10), (2, 100_000), (3, 50)):
        board.describe(Description(generation, [agent(id=generation)], generation == 2), values, 2)
        assert reader.generation == 0, "nothing is read of it before its first parameters"
        flat = torch.arange(values, dtype=torch.float32)
        board.publish(flat, [torch.tensor([1.0]), torch.tensor([2.0])], 5)
        described = reader.read_description()
        assert (described.generation, described.carries_over) == (generation, generation == 2)
        assert described.agents[0].describe() == agent(id=generation).describe()
        copy, states = reader.empty()
        assert reader.fetch(copy, states, generation) == 5
        torch.testing.assert_close(copy, flat, rtol=0, atol=0)
        assert states.tolist() == [[1.0], [2.0]]
        assert reader.fetch(copy, states, generation - 1) is None


def test_board_lock_is_kept_while_the_memory_grows():
    """The maps of smaller memory go, and with each of them a descriptor of the memory's file."""
    board = Board(2)
    (asked, ask), (answered, answer) = os.pipe(), os.pipe()
    other = os.fork()
    if other == 0:
        while os.read(asked, 1):
            got = b"refused"
            if board._try_lock():
                fcntl.lockf(board.lock, fcntl.LOCK_UN)
                got = b"taken"
            os.write(answer, got)
        os._exit(0)
    answers = []
    for generation in range(1, 6):
        with board.locked(lambda: None):
            values = 1000 * 4**generation
            board.describe(Description(generation, [agent()], False), values, 1)
            board.publish(torch.zeros(values), [torch.zeros(1)], 1)
            os.write(ask, b"x")
            answers.append(os.read(answered, 10))
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    assert answers == [b"refused"] * 5
