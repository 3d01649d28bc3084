"""The YAML schema, its parser, and error messages."""

from evorl.config.evolution import ArchitectureLimits, Evolution, Selection
from evorl.config.learning import Network
from evorl.config.run import Environment
from evorl.config.schema import AnyConfig, Config, check_name, model_of, validate
from evorl.config.yaml import override, read_yaml

__all__ = [
    "AnyConfig",
    "ArchitectureLimits",
    "Config",
    "Environment",
    "Evolution",
    "Network",
    "Selection",
    "check_name",
    "model_of",
    "override",
    "read_yaml",
    "validate",
]
