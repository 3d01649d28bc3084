"""Values that environments report in the info of a step, besides rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evorl.config.errors import nearest, shown
from evorl.types import UserError

FINAL = "final_info"
"""Info key under which a same-step autoreset stores the info of episodes that ended in this step."""


def read_reports(info: Mapping[str, Any], names: Sequence[str], copies: Sequence[int], id: str) -> NDArray[np.float64]:
    """Return the values `names` from a vector environment's `info` for some of its copies, as [names, copies].

    For a copy whose episode ended, the info of that episode's last step is read. Raises UserError, citing the
    environment's `id`, if a copy reports no number of this name.
    """
    reports = np.zeros((len(names), len(copies)))
    for column, copy in enumerate(copies):
        source = info[FINAL] if _has(info, FINAL, copy) else info
        for row, name in enumerate(names):
            if not _has(source, name, copy):
                known = [key for key in source if not key.startswith("_") and _has(source, key, copy)]
                more = nearest(name, known) if known else "; it reports nothing"
                raise UserError(f"evolution.fitness: {id} reports no {name!r} in the last step of an episode{more}")
            reports[row, column] = _number(source[name][copy], name, id)
    return reports


def _has(info: Mapping[str, Any], name: str, copy: int) -> bool:
    """Return whether a copy reports `name`; native vector environments may report for all copies without a mask."""
    mask = info.get(f"_{name}")
    return name in info and (mask is None or bool(mask[copy]))


def _number(value: Any, name: str, id: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = np.nan
    if not np.isfinite(number):
        raise UserError(f"evolution.fitness: {id} reports {shown(value)} for {name!r}, which is no finite number")
    return number
