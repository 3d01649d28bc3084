"""Task-specific settings, which are dropped when a file is used for another environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from evorl.config.fields import ENVIRONMENT, Section
from evorl.config.schema import Environment, Evaluation, Evolution, Training, with_dotted_names

TARGET = "training.target_fitness"
GAMES = ("pettingzoo", "openspiel")
"""What stands before the colon in ids of PettingZoo's and OpenSpiel's games, each a suite."""
OF_ENVIRONMENT = (TARGET, "environment.observation_indices")
"""Settings specific to one environment."""
OF_SUITE = ("environment.kwargs", "environment.image_channels", "environment.life_loss_ends")
"""Settings that may apply to all environments of a suite, such as Atari games, but to no others."""
OF_SHIPPED = (
    "training.max_steps",
    "evolution.steps",
    "evolution.fitness",
    "evaluation.fitness",
    "evaluation.episodes",
    "evaluation.confirmation_episodes",
    "evaluation.max_steps",
    "algorithm.reward_clip",
)
"""Settings tuned to one suite in a shipped configuration; in a user's own file they express how long to
train, in any environment."""
SECTIONS: dict[str, Section] = {
    "environment": Environment(),
    "evolution": Evolution(),
    "evaluation": Evaluation(),
    "training": Training(),
}


def environment_of(data: Mapping[str, Any]) -> str:
    """Return the environment id in a file's settings, or an empty string."""
    section = data.get("environment")
    id = section.get("id") if isinstance(section, dict) else section
    return id if isinstance(id, str) else ""


def suite_of(id: str) -> str:
    """Return the namespace of an environment id, such as ALE of ALE/Pong-v5, or an empty string."""
    before = id.partition(":")[0]
    if before in GAMES and before != id:
        return before
    return id.rpartition(":")[2].rpartition("/")[0]


@dataclass(frozen=True)
class Tuned:
    """A shipped configuration's entry in `configs/tasks.yaml`: its algorithm, and the tasks that it is for.

    `tasks` maps an environment id, or `SUITE/*` for all of a suite, to the settings that this task adds to the file.
    """

    algorithm: str
    tasks: Mapping[str, Mapping[str, Any]]

    def is_for(self, id: str) -> bool:
        """Return whether the file is tuned for the task `id`."""
        return self._entry(id) is not None

    def settings_for(self, id: str) -> Mapping[str, Any]:
        """Return the settings that the task `id` adds to the file, by dotted path."""
        return self._entry(id) or {}

    def _entry(self, id: str) -> Mapping[str, Any] | None:
        id = id.rpartition(":")[2]
        return self.tasks.get(id, self.tasks.get(f"{suite_of(id)}/*"))


def for_another(
    data: Mapping[str, Any], asked: str, *, is_shipped: bool, is_tuned: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a file's settings for another environment `asked` into those kept and those dropped.

    A shipped file that is tuned for `asked` too keeps what environments of one suite share. Dropped settings that equal
    their default are not reported.
    """
    same_suite = is_tuned or (suite_of(asked) != "" and suite_of(asked) == suite_of(environment_of(data)))
    keys: tuple[str, ...] = OF_ENVIRONMENT if same_suite else OF_ENVIRONMENT + OF_SUITE
    evolution = data.get("evolution")
    if is_shipped and not same_suite:
        keys += OF_SHIPPED
    kept, left_out = dict(data), {}
    for key in keys:
        name, _, setting = key.partition(".")
        section = kept.get(name)
        if isinstance(section, dict) and setting in section:
            kept[name] = {inner: value for inner, value in section.items() if inner != setting}
            if section[setting] != getattr(SECTIONS.get(name), setting, None):
                left_out[key] = section[setting]
    if same_suite or not isinstance(evolution, dict):
        return kept, left_out
    ranges = with_dotted_names(evolution.get("hyperparameters"))
    if isinstance(ranges, dict):
        others = {name: range for name, range in ranges.items() if not str(name).startswith(ENVIRONMENT)}
        left_out |= {f"evolution.hyperparameters.{name}": ranges[name] for name in ranges if name not in others}
        kept["evolution"] = {**kept["evolution"], "hyperparameters": others}
    return kept, left_out


def paths_in(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield the dotted paths of all sections and settings in a file."""
    for name, section in data.items():
        yield str(name)
        if isinstance(section, dict):
            yield from (f"{name}.{key}" for key in section)
