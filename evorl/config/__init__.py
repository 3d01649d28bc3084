"""The YAML schema, its parser, and error messages."""

from evorl.config.evolution import ArchitectureLimits, Evolution, Schedule, ScheduledMutation, Selection
from evorl.config.fields import AlgorithmSettings, HyperparameterRange
from evorl.config.network import Network
from evorl.config.reader import override, read_yaml
from evorl.config.removed import without_removed
from evorl.config.schema import (
    AnyConfig,
    Config,
    Environment,
    check_name,
    model_of,
    validate,
)

__all__ = [
    "AlgorithmSettings",
    "AnyConfig",
    "ArchitectureLimits",
    "Config",
    "Environment",
    "Evolution",
    "HyperparameterRange",
    "Network",
    "Schedule",
    "ScheduledMutation",
    "Selection",
    "check_name",
    "model_of",
    "override",
    "read_yaml",
    "validate",
    "without_removed",
]
