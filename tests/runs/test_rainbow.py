"""Runs of DQN with all parts of Rainbow, resumed exactly."""

import pytest
import torch
from helpers.dqns import RAINBOW
from helpers.support import EVERY_MUTATION, cut_back, lines, train

from evorl.system.formats import decode_agents

QUANTILES = ("algorithm.distribution=quantile", "algorithm.quantile={quantiles: 8}")


def agents_of(run):
    generation = lines(run / "metrics.jsonl")[-1]["generation"]
    path = run / "checkpoints" / f"generation-{generation:06d}" / "agents.safetensors"
    return decode_agents(path.read_bytes(), str(path))


def check_identical(first, second):
    for one, other in zip(agents_of(first), agents_of(second), strict=True):
        torch.testing.assert_close(one.tensors, other.tensors, rtol=0, atol=0)
        assert one.state == other.state


@pytest.mark.filterwarnings("ignore:no episode ended")
@pytest.mark.parametrize("more", [(), QUANTILES], ids=["categorical", "quantile"])
def test_a_run_resumes_exactly(more, in_directory):
    def train_or_resume(name):
        overrides = f"run.name={name}", "run.resume=auto", "training.max_steps=200", "checkpoint.keep=10"
        assert train(*overrides, *RAINBOW, *more, *EVERY_MUTATION) == 0

    train_or_resume("a")
    cut_back(in_directory / "runs" / "a", 3, copy=in_directory / "runs" / "b")
    train_or_resume("b")
    check_identical(in_directory / "runs" / "a", in_directory / "runs" / "b")
