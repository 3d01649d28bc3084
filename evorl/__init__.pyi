"""The public names of evorl, for type checkers and for `evorl/__init__.py`, which imports them lazily."""

from evorl.config.actor_critic import A2CSettings as A2CSettings
from evorl.config.actor_critic import A3CDataParallelSettings as A3CDataParallelSettings
from evorl.config.actor_critic import A3CSettings as A3CSettings
from evorl.config.actor_critic import A3CSharedSettings as A3CSharedSettings
from evorl.config.actor_critic import APPOSettings as APPOSettings
from evorl.config.actor_critic import IMPALASettings as IMPALASettings
from evorl.config.actor_critic import PPOSettings as PPOSettings
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
from evorl.config.off_policy import ActionNoise as ActionNoise
from evorl.config.off_policy import ApeXDDPGSettings as ApeXDDPGSettings
from evorl.config.off_policy import ApeXDQNSettings as ApeXDQNSettings
from evorl.config.off_policy import CategoricalSettings as CategoricalSettings
from evorl.config.off_policy import DDPGExploration as DDPGExploration
from evorl.config.off_policy import DDPGSettings as DDPGSettings
from evorl.config.off_policy import DQNSettings as DQNSettings
from evorl.config.off_policy import EpsilonGreedy as EpsilonGreedy
from evorl.config.off_policy import EpsilonLadder as EpsilonLadder
from evorl.config.off_policy import NoisyLayerSettings as NoisyLayerSettings
from evorl.config.off_policy import QuantileSettings as QuantileSettings
from evorl.config.off_policy import SACExploration as SACExploration
from evorl.config.off_policy import SACSettings as SACSettings
from evorl.config.off_policy import StateDependentNoiseSettings as StateDependentNoiseSettings
from evorl.config.off_policy import TD3Settings as TD3Settings
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
