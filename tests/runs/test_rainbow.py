"""Runs of DQN with all parts of Rainbow, resumed exactly."""

import pytest
import torch
from helpers.dqns import RAINBOW
from helpers.support import EVERY_MUTATION, lines, steps_until, train

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
    def go_on(name, steps):
        overrides = f"run.name={name}", "run.resume=auto", f"training.max_steps={steps}"
        assert train(*overrides, *RAINBOW, *more, *EVERY_MUTATION) == 0

    go_on("a", 200)
    go_on("b", steps_until(in_directory / "runs" / "a", 3))
    assert len(lines(in_directory / "runs" / "b" / "metrics.jsonl")) == 3
    go_on("b", 200)
    check_identical(in_directory / "runs" / "a", in_directory / "runs" / "b")
