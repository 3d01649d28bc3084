"""DQN with each part of Rainbow, and with several. Axes: P agents."""

import torch

DQNS = {
    "categorical": ("algorithm={distribution: categorical, categorical: {atoms: 11, v_min: -4, v_max: 4}}",),
    "categorical, dueling, not double": (
        "algorithm={distribution: categorical, dueling: true, double: false}",
        "algorithm.categorical={atoms: 11, v_min: -4, v_max: 4}",
    ),
    "quantile": ("algorithm={distribution: quantile, quantile: {quantiles: 8}}",),
    "quantile, dueling, no kappa": (
        "algorithm={distribution: quantile, dueling: true, quantile: {quantiles: 8, kappa: 0}}",
    ),
    "noisy": ("algorithm={noisy: {sigma: 0.3}}",),
    "noisy, dueling, categorical, normalised": (
        "algorithm={noisy: {sigma: 0.3}, dueling: true, distribution: categorical, normalize_observations: true}",
        "algorithm.categorical={atoms: 11, v_min: -4, v_max: 4}",
    ),
    "periodic": ("algorithm={target: periodic, target_period: 2}",),
}

RAINBOW = (
    "algorithm={dueling: true, distribution: categorical, target: periodic, target_period: 7, batch_size: 8,"
    " noisy: {sigma: 0.5}, normalize_observations: true}",
    "algorithm.categorical={atoms: 11, v_min: 0, v_max: 20}",
    "algorithm.exploration={schedule: linear, steps: 100}",
    "algorithm.learn_step=2",
    "replay={n_step: 3, capacity: 400, learning_starts: 20, prioritised: {}}",
)


def same_noise(noise, generator):
    """Noise that is alike for all agents, whatever the padding: what `WeightNoise.draw` may be replaced by."""
    found = {}
    for name, (copies, read, produced) in noise.matrices.items():
        waves = (1.0 + torch.arange(read)).sin().unsqueeze(1) * (2.0 + torch.arange(produced)).cos()
        found[name] = waves.expand(noise.agents * copies, read, produced)
    return found
