"""DQN with each part of Rainbow, and with several."""

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
    "periodic": ("algorithm={target: periodic, target_period: 2}",),
}

RAINBOW = (
    "algorithm={dueling: true, distribution: categorical, target: periodic, target_period: 7, batch_size: 8}",
    "algorithm.categorical={atoms: 11, v_min: 0, v_max: 20}",
    "algorithm.exploration={schedule: linear, steps: 100}",
    "algorithm.learn_step=2",
    "replay={n_step: 3, capacity: 400, learning_starts: 20, prioritised: {importance_exponent: {steps: 300}}}",
)
