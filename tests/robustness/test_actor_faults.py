"""The short form of actor_faults.py: a run whose actors are killed and stopped."""

import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, os.fspath(Path(__file__).parent))

from actor_faults import disturb_actors


def test_a_run_goes_on_without_the_actors_that_it_loses(tmp_path):
    result = disturb_actors("a3c", tmp_path, np.random.default_rng(1), kills=3, stops=1, steps=500)
    assert result.fine, result
    assert result.restarts >= 3
