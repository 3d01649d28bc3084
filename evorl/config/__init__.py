"""The YAML schema, its parser, and error messages."""

from evorl.config.fields import AlgorithmSettings, HyperparameterRange
from evorl.config.schema import (
    AnyConfig,
    ArchitectureLimits,
    Config,
    Environment,
    Evolution,
    Network,
    Selection,
    check_name,
    model_of,
    validate,
)
from evorl.config.yaml import override, read_yaml

__all__ = [
    "AlgorithmSettings",
    "AnyConfig",
    "ArchitectureLimits",
    "Config",
    "Environment",
    "Evolution",
    "HyperparameterRange",
    "Network",
    "Selection",
    "check_name",
    "model_of",
    "override",
    "read_yaml",
    "validate",
]
