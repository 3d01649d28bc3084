"""The sections of the configuration that say how agents are built and learn: networks, actors and the replay."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from evorl.config.fields import Count, Fraction, Importable, Initialisation, Plain, Section, Text, Width


class ConvolutionalLayer(Section):
    """A convolution without padding, followed by the network's activation."""

    channels: Annotated[int, Field(ge=1, le=4096)]
    """The number of output channels."""
    kernel: Annotated[int, Field(ge=1, le=64)]
    """The width and height of its kernel."""
    stride: Annotated[int, Field(ge=1, le=64)] = 1
    """The stride of the convolution, in pixels."""


DEFAULT_CONVOLUTIONS = {
    36: (
        ConvolutionalLayer(channels=32, kernel=8, stride=4),
        ConvolutionalLayer(channels=64, kernel=4, stride=2),
        ConvolutionalLayer(channels=64, kernel=3, stride=1),
    ),
    12: (ConvolutionalLayer(channels=16, kernel=4, stride=2), ConvolutionalLayer(channels=32, kernel=3, stride=2)),
    3: (ConvolutionalLayer(channels=16, kernel=3, stride=1),),
    1: (ConvolutionalLayer(channels=16, kernel=1, stride=1),),
}
"""The layers for images by their shortest side in pixels, at least."""


class Network(Section):
    """The networks of initial agents; if an algorithm has several, all start with these settings."""

    name: Text = "standard"
    """`standard`, which reads every observation, or `module` for a network of your own; see `factory`. A module ignores
    `hidden_sizes`, `activation`, `layer_norm` and `convolutions`."""
    hidden_sizes: Annotated[tuple[Width, ...], Field(min_length=1, max_length=256)] = (64, 64)
    """The units of each hidden layer, in initial agents if mutations change them."""
    activation: Text = "relu"
    """The activation of hidden layers and convolutions: `relu`, `tanh`, `elu`, `gelu` or `silu`."""
    layer_norm: bool | None = None
    """Normalise hidden layers (arXiv 1607.06450). Null is the algorithm's default: true for DQN and Ape-X DQN, else
    false."""
    initialisation: Initialisation | None = None
    """Null is the algorithm's default: `orthogonal` where it learns from rollouts, `uniform` with a replay buffer."""
    convolutions: Annotated[tuple[ConvolutionalLayer, ...], Field(max_length=64)] | None = None
    """The convolutional layers of image encoders; without any (`[]`) hidden layers read all pixels. Null chooses by the
    shortest side of the images: from 36 pixels the three layers of Mnih et al. (2015), from 12 two of 16 and 32
    channels, below that one of 16 channels (MinAtar)."""
    bf16: bool | None = None
    """Multiply in bfloat16 in hidden layers and convolutions; parameters and the optimiser stay in float32. Null
    follows Accelerate's `mixed_precision`. Do not use it with SAC, TD3 or DDPG where
    values are large: their rounding error exceeds the differences between actions (docs/results/tasks.md)."""
    recurrent: Text | None = None
    """A recurrent cell after the hidden layers: `lstm` or `gru`."""
    recurrent_size: Width = 64
    """The units of the recurrent cell."""
    policy_parts: Annotated[tuple[Plain, ...] | None, Field(min_length=1)] = None
    """The parts of the observation that the policy of an actor-critic reads, and all that exported agents need; null:
    all."""
    critic_parts: Annotated[tuple[Plain, ...] | None, Field(min_length=1)] = None
    """The parts that the critics of an actor-critic read, such as a simulator's true state; null: all."""
    factory: Importable | None = None
    """For `name: module`: `package.module:function`, called with (inputs, outputs), returns an `nn.Module`; `inputs` is
    the width of a vector or the shape of an image. The module runs in evaluation mode: dropout does nothing, and batch
    normalisation keeps the statistics that it was made with."""

    def ineffective(self, name: str) -> str | None:
        if name == "recurrent_size" and self.recurrent is None:
            return "without `recurrent`"
        is_replaced = name in ("hidden_sizes", "activation", "layer_norm", "convolutions")
        return "because a `module` has layers of its own" if is_replaced and self.name == "module" else None

    @model_validator(mode="after")
    def _factory_where_it_belongs(self) -> Self:
        if (self.name == "module") != (self.factory is not None):
            raise ValueError("`factory` and `name: module` go together")
        if self.name == "module" and self.recurrent:
            raise ValueError(f"a module has no recurrent state; leave `recurrent: {self.recurrent}` out")
        if self.name == "module" and self.initialisation:
            raise ValueError(
                f"a module initialises itself, without `initialisation: {self.initialisation}`; where the file has it, "
                "use network.initialisation=null"
            )
        return self


class ImportanceExponent(Section):
    """The exponent of importance weights, which changes linearly from `start` to `end` over `training.max_steps`; where
    that is raised later, the exponent falls back at once."""

    start: Fraction = 0.4
    """Its initial value."""
    end: Fraction = 1.0
    """Its final value."""


class Prioritised(Section):
    """Proportional prioritised replay (arXiv 1511.05952), by default with the paper's exponents."""

    exponent: Fraction = 0.6
    """Priorities are (|error| + 1e-6) to this power; 0 samples uniformly."""
    importance_exponent: ImportanceExponent = ImportanceExponent()


class Replay(Section):
    """The replay buffer; algorithms that learn from rollouts have none."""

    capacity: Annotated[int, Field(ge=1, le=10**9)] = 100_000
    """Transitions kept, over all ranks and agents. Of stacked frames from actors fewer fit: each rollout also stores a
    row without a transition per frame of the stack."""
    learning_starts: Annotated[int, Field(ge=0, le=10**9)] = 1_000
    """Transitions held, over all ranks and agents, before learning starts."""
    n_step: Annotated[int, Field(ge=1, le=1_000)] = 1
    """Steps of an n-step return (arXiv 1710.02298), without off-policy correction as there; SAC's omits the
    entropies of the steps between. Fewer if the episode ends, or if no more have been collected yet."""
    prioritised: Prioritised | None = None
    """Prioritised sampling; null samples all transitions uniformly."""
    shared: bool = True
    """Agents learn from each other's transitions, with `placement: sharded` only within a rank. If false, an agent
    learns only from its own transitions and its ancestors' (a child of another rank's agent, or of one that is gone,
    also from those collected before at its index in the population), and `capacity` is divided among the agents."""


class ActorSettings(Section):
    """Actor processes of each rank, each with `environment.num_envs` environments for every agent."""

    count: Annotated[int, Field(ge=1, le=4096)] = 1
    """Actors of each rank."""
    queue: Annotated[int, Field(ge=1, le=256)] = 2
    """Messages of an actor: the one it is collecting and those that wait for the learner; it blocks if none is
    free."""
    fetch_steps: Count = 1
    """Steps of each environment after which an actor fetches the learner's parameters, at its next rollout; an actor
    of `a3c_shared` fetches them with each update that it makes."""
    lockstep: bool = False
    """For tests and debugging: actors take turns with the learner and each other, so that a run can be repeated."""
