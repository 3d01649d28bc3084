"""Environments in processes of their own."""

import os
import subprocess
import sys
import time

from helpers.learning import all_gone
from helpers.support import ROOT

RANK = """
import torch
from helpers.learning import descendants
from helpers.support import config
from evorl.envs import Environments

hanging = config("environment={id: 'helpers.faults:Hanging-v0', num_envs: 2, vectorization: async}").environment
others = descendants()
environments = Environments(hanging, 1, 2)
environments.reset(1)
print(*descendants() - others, flush=True)
for number in range(3):
    print(number, flush=True)
    environments.step(torch.zeros(1, 2, dtype=torch.int64))
"""


def test_an_environment_that_hangs_ends_with_its_rank():
    """The rank is a program of its own: a fork of the tests, which have threads, could inherit a held lock."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    with subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, env=environment, text=True) as rank:
        family = [int(pid) for pid in rank.stdout.readline().split()]
        begun = [rank.stdout.readline().strip() for _ in range(3)]
        time.sleep(0.5)
        waits = rank.poll() is None
        rank.kill()
    assert begun == ["0", "1", "2"]
    assert waits, "it is meant to wait for environments that hang"
    assert len(family) == 2
    assert all_gone(family)
