"""The public names of evorl, for type checkers and for `evorl/__init__.py`, which imports them lazily."""

from evorl.algorithms.a2c import A2CSettings as A2CSettings
from evorl.algorithms.a3c import A3CDataParallelSettings as A3CDataParallelSettings
from evorl.algorithms.a3c import A3CSettings as A3CSettings
from evorl.algorithms.a3c import A3CSharedSettings as A3CSharedSettings
from evorl.algorithms.apex import ApeXDDPGSettings as ApeXDDPGSettings
from evorl.algorithms.apex import ApeXDQNSettings as ApeXDQNSettings
from evorl.algorithms.apex import EpsilonLadder as EpsilonLadder
from evorl.algorithms.apex import NoiseLadder as NoiseLadder
from evorl.algorithms.ddpg import DDPGExploration as DDPGExploration
from evorl.algorithms.ddpg import DDPGSettings as DDPGSettings
from evorl.algorithms.ddpg import TD3Settings as TD3Settings
from evorl.algorithms.dqn import DQNSettings as DQNSettings
from evorl.algorithms.dqn import NoisyLayerSettings as NoisyLayerSettings
from evorl.algorithms.exploration import ActionNoise as ActionNoise
from evorl.algorithms.exploration import EpsilonGreedy as EpsilonGreedy
from evorl.algorithms.impala import APPOSettings as APPOSettings
from evorl.algorithms.impala import IMPALASettings as IMPALASettings
from evorl.algorithms.ppo import PPOSettings as PPOSettings
from evorl.algorithms.sac import SACExploration as SACExploration
from evorl.algorithms.sac import SACSettings as SACSettings
from evorl.algorithms.state_dependent import StateDependentNoiseSettings as StateDependentNoiseSettings
from evorl.algorithms.values import CategoricalSettings as CategoricalSettings
from evorl.algorithms.values import QuantileSettings as QuantileSettings
from evorl.config.evolution import ArchitectureLimits as ArchitectureLimits
from evorl.config.evolution import Evolution as Evolution
from evorl.config.evolution import Mutation as Mutation
from evorl.config.evolution import PopulationSettings as PopulationSettings
from evorl.config.evolution import Selection as Selection
from evorl.config.fields import HyperparameterRange as HyperparameterRange
from evorl.config.learning import ActorSettings as ActorSettings
from evorl.config.learning import ConvolutionalLayer as ConvolutionalLayer
from evorl.config.learning import ImportanceExponent as ImportanceExponent
from evorl.config.learning import Network as Network
from evorl.config.learning import Prioritised as Prioritised
from evorl.config.learning import Replay as Replay
from evorl.config.run import Checkpoint as Checkpoint
from evorl.config.run import Environment as Environment
from evorl.config.run import Evaluation as Evaluation
from evorl.config.run import EvaluationEnvironment as EvaluationEnvironment
from evorl.config.run import LeagueSettings as LeagueSettings
from evorl.config.run import RunSettings as RunSettings
from evorl.config.run import Tracking as Tracking
from evorl.config.run import Training as Training
from evorl.runs.output.callbacks import Generation as Generation
from evorl.runs.output.callbacks import Stop as Stop
from evorl.runs.reading.loaded import LoadedAgent as LoadedAgent
from evorl.runs.reading.loaded import load as load
from evorl.runs.reading.read import RunRecord as RunRecord
from evorl.runs.reading.read import columns as columns
from evorl.runs.reading.read import read_run as read_run
from evorl.runs.train import TrainedRun as TrainedRun
from evorl.runs.train import train as train

__all__: list[str]
__version__: str
