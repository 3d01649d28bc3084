"""Values read from a vector environment's info: of which copies, and of the last step of those whose episode ended."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from evorl.envs.environments import FINAL, Environments
from evorl.types.outcomes import UserError

BOTH, FIRST = np.array([True, True]), np.array([True, False])


def read(info, name, copies):
    chosen = torch.from_numpy(np.isin([[0], [1]], copies))
    return Environments.reports(SimpleNamespace(_info=info, _id="Some-v0"), [name], chosen)[:, chosen].tolist()


def test_what_is_reported_without_a_mask_is_reported_by_all_copies():
    assert read({"x": np.array([3.0, 4.0])}, "x", [0, 1]) == [[3.0, 4.0]]


def test_a_copy_that_a_mask_leaves_out_reports_nothing():
    info = {"x": np.array([3.0, 0.0]), "_x": FIRST, "y": np.array([1.0, 2.0]), "_y": BOTH}
    assert read(info, "x", [0]) == [[3.0]]
    with pytest.raises(
        UserError, match=r"^evolution.fitness: Some-v0 reports no number under 'x' in the last step .*; known: y"
    ):
        read(info, "x", [1])


def test_a_copy_whose_episode_ended_reports_what_its_last_step_did():
    last = {"x": np.array([5.0, 0.0]), "_x": FIRST}
    info = {"x": np.array([-1.0, 4.0]), "_x": BOTH, FINAL: last, f"_{FINAL}": FIRST}
    assert read(info, "x", [0, 1]) == [[5.0, 4.0]]


def test_a_dictionary_is_no_number():
    info = {"episode": {"r": np.array([9.0])}, "_episode": np.array([True]), "y": np.array([1.0])}
    with pytest.raises(UserError, match=r"reports no number under 'episode' in the last step .*; known: y$"):
        read(info, "episode", [0])


@pytest.mark.parametrize("value", ["later", None, np.nan, np.inf])
def test_what_is_no_finite_number_is_refused(value):
    with pytest.raises(UserError, match="for 'x', which is not a finite number"):
        read({"x": np.array([value], dtype=object)}, "x", [0])
