"""How wrong a prediction was. Pure functions, elementwise. Axes: P agents, B batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.nn import functional


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """(prediction - target)^2, of the inputs' shape."""
    return (prediction - target).square()


def huber(prediction: Tensor, target: Tensor) -> Tensor:
    """Half the squared error up to 1, linear beyond (Huber 1964), of the inputs' shape."""
    return functional.smooth_l1_loss(prediction, target, reduction="none")


REGRESSION_LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"mse": squared_error, "huber": huber}
