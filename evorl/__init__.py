"""Evolve a population of reinforcement-learning agents on every process that Accelerate starts."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evorl.system.installation import mixed_with

if TYPE_CHECKING:
    from evorl.algorithms.a2c import A2CSettings, OnPolicyNoiseSettings
    from evorl.algorithms.a3c import A3CDataParallelSettings, A3CSettings, A3CSharedSettings
    from evorl.algorithms.apex import ApeXDDPGSettings, ApeXDQNSettings, EpsilonLadder, NoiseLadder
    from evorl.algorithms.ddpg import DDPGExploration, DDPGSettings, TD3Settings
    from evorl.algorithms.dqn import DQNSettings, NoisyLayerSettings
    from evorl.algorithms.exploration import ActionNoise, EpsilonGreedy
    from evorl.algorithms.impala import APPOSettings, IMPALASettings
    from evorl.algorithms.ppo import PPOSettings
    from evorl.algorithms.sac import SACExploration, SACSettings
    from evorl.algorithms.state_dependent import StateDependentNoiseSettings
    from evorl.algorithms.values import CategoricalSettings, QuantileSettings
    from evorl.config.fields import HyperparameterRange
    from evorl.config.schema import (
        ActorSettings,
        ArchitectureLimits,
        Checkpoint,
        ConvolutionalLayer,
        Environment,
        Evaluation,
        Evolution,
        ImportanceExponent,
        Mutation,
        Network,
        PopulationSettings,
        Prioritised,
        Replay,
        RunSettings,
        Selection,
        Tracking,
        Training,
    )
    from evorl.runs.callbacks import Generation, Stop
    from evorl.runs.loaded import LoadedAgent, load
    from evorl.runs.read import RunRecord, columns, read_run
    from evorl.runs.train import TrainedRun, train

__version__ = "0.1.0"
__all__ = [
    "A2CSettings",
    "A3CDataParallelSettings",
    "A3CSettings",
    "A3CSharedSettings",
    "APPOSettings",
    "ActionNoise",
    "ActorSettings",
    "ApeXDDPGSettings",
    "ApeXDQNSettings",
    "ArchitectureLimits",
    "CategoricalSettings",
    "Checkpoint",
    "ConvolutionalLayer",
    "DDPGExploration",
    "DDPGSettings",
    "DQNSettings",
    "Environment",
    "EpsilonGreedy",
    "EpsilonLadder",
    "Evaluation",
    "Evolution",
    "Generation",
    "HyperparameterRange",
    "IMPALASettings",
    "ImportanceExponent",
    "LoadedAgent",
    "Mutation",
    "Network",
    "NoiseLadder",
    "NoisyLayerSettings",
    "OnPolicyNoiseSettings",
    "PPOSettings",
    "PopulationSettings",
    "Prioritised",
    "QuantileSettings",
    "Replay",
    "RunRecord",
    "RunSettings",
    "SACExploration",
    "SACSettings",
    "Selection",
    "StateDependentNoiseSettings",
    "Stop",
    "TD3Settings",
    "Tracking",
    "TrainedRun",
    "Training",
    "columns",
    "load",
    "read_run",
    "train",
]

_PLACES = {
    "A2CSettings": "evorl.algorithms.a2c",
    "A3CDataParallelSettings": "evorl.algorithms.a3c",
    "A3CSettings": "evorl.algorithms.a3c",
    "A3CSharedSettings": "evorl.algorithms.a3c",
    "APPOSettings": "evorl.algorithms.impala",
    "ActionNoise": "evorl.algorithms.exploration",
    "ActorSettings": "evorl.config.schema",
    "ApeXDDPGSettings": "evorl.algorithms.apex",
    "ApeXDQNSettings": "evorl.algorithms.apex",
    "ArchitectureLimits": "evorl.config.schema",
    "CategoricalSettings": "evorl.algorithms.values",
    "Checkpoint": "evorl.config.schema",
    "ConvolutionalLayer": "evorl.config.schema",
    "DDPGExploration": "evorl.algorithms.ddpg",
    "DDPGSettings": "evorl.algorithms.ddpg",
    "DQNSettings": "evorl.algorithms.dqn",
    "Environment": "evorl.config.schema",
    "EpsilonGreedy": "evorl.algorithms.exploration",
    "EpsilonLadder": "evorl.algorithms.apex",
    "Evaluation": "evorl.config.schema",
    "Evolution": "evorl.config.schema",
    "Generation": "evorl.runs.callbacks",
    "HyperparameterRange": "evorl.config.fields",
    "IMPALASettings": "evorl.algorithms.impala",
    "ImportanceExponent": "evorl.config.schema",
    "LoadedAgent": "evorl.runs.loaded",
    "Mutation": "evorl.config.schema",
    "Network": "evorl.config.schema",
    "NoiseLadder": "evorl.algorithms.apex",
    "NoisyLayerSettings": "evorl.algorithms.dqn",
    "OnPolicyNoiseSettings": "evorl.algorithms.a2c",
    "PPOSettings": "evorl.algorithms.ppo",
    "PopulationSettings": "evorl.config.schema",
    "Prioritised": "evorl.config.schema",
    "QuantileSettings": "evorl.algorithms.values",
    "Replay": "evorl.config.schema",
    "RunRecord": "evorl.runs.read",
    "RunSettings": "evorl.config.schema",
    "SACExploration": "evorl.algorithms.sac",
    "SACSettings": "evorl.algorithms.sac",
    "Selection": "evorl.config.schema",
    "StateDependentNoiseSettings": "evorl.algorithms.state_dependent",
    "Stop": "evorl.runs.callbacks",
    "TD3Settings": "evorl.algorithms.ddpg",
    "Tracking": "evorl.config.schema",
    "TrainedRun": "evorl.runs.train",
    "Training": "evorl.config.schema",
    "columns": "evorl.runs.read",
    "load": "evorl.runs.loaded",
    "read_run": "evorl.runs.read",
    "train": "evorl.runs.train",
}
"""The files of what `evorl` offers: each is imported when it is first asked for, since torch takes seconds."""

if _other := mixed_with(Path(__file__).parent.parent):
    warnings.warn(
        f"{Path(__file__).parent}: holds files of two projects, evorl-accelerate and {_other}, which is another one; "
        "run `pip uninstall evorl evorl-accelerate`, and install the one that you want",
        RuntimeWarning,
        stacklevel=2,
    )


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
