"""Environments in processes of their own."""

import os
import signal
import time

import torch
from helpers.learning import all_gone, descendants
from helpers.support import config

from evorl.envs import Environments


def test_an_environment_that_hangs_ends_with_its_rank():
    reader, writer = os.pipe()
    rank = os.fork()
    if rank == 0:
        others = descendants()
        hanging = config("environment={id: 'helpers.faults:Hanging-v0', num_envs: 2, vectorization: async}").environment
        environments = Environments(hanging, 1, 2)
        environments.reset(1)
        family = descendants() - others
        os.write(writer, f"{' '.join(map(str, family))}\n".encode())
        for number in range(3):
            os.write(writer, str(number).encode())
            environments.step(torch.zeros(1, 2, dtype=torch.int64))
        os._exit(1)
    os.close(writer)
    family = [int(pid) for pid in os.read(reader, 4096).splitlines()[0].split()]
    begun = b""
    while not begun.endswith(b"2"):
        begun += os.read(reader, 1)
    time.sleep(0.5)
    assert os.waitpid(rank, os.WNOHANG) == (0, 0), "it is meant to wait for environments that hang"
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    assert len(family) == 2
    assert all_gone(family)
