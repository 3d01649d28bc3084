"""The comparison of devices moves everything that a batch consists of."""

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from helpers.support import ROOT

from evorl.types.batches import Batch, RecurrentInput

sys.path.insert(0, str(ROOT / "benchmarks"))
from gpu import moved


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors within a dataclass, its mappings and its dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_of(each)


def test_a_batch_is_moved_as_a_whole():
    some, named = torch.zeros(2, 3), {"name": torch.zeros(2, 3)}
    recurrent = RecurrentInput(some, some, burn_in=named)
    batch = Batch(named, named, named, some, some, recurrent, gradients=named, share=some)
    assert all(getattr(batch, field.name) is not None for field in dataclasses.fields(batch)), "a part is new"
    there = list(tensors_of(moved(batch, lambda value: value.to("meta"))))
    assert len(there) == 10
    assert {value.device.type for value in there} == {"meta"}
