"""Keys that an unknown one may stand for: mistyped, without its section, or as other libraries call it."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

ALIASES: Mapping[str, str] = {
    "algo": "algorithm.name",
    "buffer_size": "replay.capacity",
    "clip_range": "algorithm.clip",
    "discount": "algorithm.gamma",
    "ent_coef": "algorithm.entropy_coefficient",
    "env": "environment.id",
    "env_id": "environment.id",
    "env_name": "environment.id",
    "lr": "algorithm.learning_rate",
    "max_timesteps": "training.max_steps",
    "n_envs": "environment.num_envs",
    "n_epochs": "algorithm.epochs",
    "n_steps": "algorithm.rollout_steps",
    "net_arch": "network.hidden_sizes",
    "num_agents": "population.size",
    "num_steps": "algorithm.rollout_steps",
    "num_timesteps": "training.max_steps",
    "pop_size": "population.size",
    "population_size": "population.size",
    "timesteps": "training.max_steps",
    "total_steps": "training.max_steps",
    "total_timesteps": "training.max_steps",
    "update_epochs": "algorithm.epochs",
    "vf_coef": "algorithm.value_coefficient",
}
"""What other libraries call a key, and its path here."""
ELSEWHERE: Mapping[str, str] = {
    "device": "each process takes a GPU if there is one; `CUDA_VISIBLE_DEVICES= evorl train` hides them",
}
"""What other libraries have a key for, and what to do here."""
SIMILAR, SIMILAR_ELSEWHERE = 0.5, 0.8
"""The least similarity to a key of the same section, and to the last part of another key."""


def suggested(path: str, known: Sequence[str], value: str | None = None) -> str:
    """The end of an error message on the unknown key `path`: the keys of `known` that may be meant, with the value.

    Empty if there are none.
    """
    found = _meant(path, known)
    if isinstance(found, str):
        return f"; {found}"
    section = path.rpartition(".")[0]
    # Only a key's name was mistyped: its value is where it belongs.
    with_value = value is not None and any(each.rpartition(".")[0] != section for each in found)
    each = [f"'{key}={value}'" if with_value else f"'{key}'" for key in found]
    return f"; did you mean {' or '.join(filter(None, (', '.join(each[:-1]), each[-1])))}?" if each else ""


def _meant(path: str, known: Sequence[str]) -> list[str] | str:
    """The known keys that `path` may stand for, or what to do instead of setting one."""
    path = path.lstrip("-").replace("-", "_").lower()
    section, _, last = path.rpartition(".")
    if path in known:
        return [path]
    if not section and last in ELSEWHERE:
        return ELSEWHERE[last]
    if ALIASES.get(last) in known:
        return [ALIASES[last]]
    if same := [each for each in known if _last(each) == last]:
        return same
    matcher, similar = difflib.SequenceMatcher(b=last), {}
    for each in known:
        matcher.set_seq1(_last(each))
        least = SIMILAR if each.rpartition(".")[0] == section else SIMILAR_ELSEWHERE
        # The quick bounds spare most comparisons, also with a key of thousands of letters.
        if matcher.real_quick_ratio() >= least and matcher.quick_ratio() >= least and matcher.ratio() >= least:
            similar[each] = matcher.ratio()
    best = max(similar.values(), default=0.0)
    return [each for each, found in similar.items() if found == best]


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The paths of all keys that a command line can set: sections and settings, except those in lists and mappings."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        yield path
        for section in _sections(field.annotation):
            yield from keys_of(section, f"{path}.")


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in an annotation, also inside `X | None`, but in no list or mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif typing.get_origin(annotation) not in (dict, tuple):
        for argument in typing.get_args(annotation):
            yield from _sections(argument)
