"""Throughput of RLlib's IMPALA or APPO, one agent. Prints one JSON line.

One process collects with its vector of environments, the main one learns. Counted are the steps that its learner has
learned from, after `--warm-up` seconds of training.

Environment:  python -m venv V && V/bin/pip install torch==2.13.0 "ray[rllib]==2.60.0" "gymnasium==1.2.3"
Run:          OMP_NUM_THREADS=1 V/bin/python benchmarks/experiments/baselines/rllib_impala.py --seconds 30 [--algorithm appo]
"""

import argparse
import json
import time
from typing import Any

import ray
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

CONFIGS = {"impala": IMPALAConfig, "appo": APPOConfig}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=CONFIGS, default="impala")
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--rollout-steps", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 64])
    parser.add_argument("--warm-up", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    config = (
        CONFIGS[args.algorithm]()
        .environment(args.env)
        .env_runners(
            num_env_runners=1, num_envs_per_env_runner=args.num_envs, rollout_fragment_length=args.rollout_steps
        )
        .learners(num_learners=0)
        .training(train_batch_size_per_learner=args.batch_size)
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=args.hidden, fcnet_activation="relu"))
        .reporting(min_time_s_per_iteration=1)
    )
    algorithm = config.build_algo()
    try:
        measured(algorithm, args.warm_up)
        seconds, steps = measured(algorithm, args.seconds)
    finally:
        algorithm.stop()
        ray.shutdown()
    line = {
        "system": f"rllib {args.algorithm}",
        "population": 1,
        "agent_env_steps_per_s": round(steps / seconds, 1),
        "seconds": round(seconds, 1),
    }
    print(json.dumps(line))


def measured(algorithm: Any, seconds: float) -> tuple[float, float]:
    """Train for so many seconds; the seconds it took, and the steps that were learned from."""
    before, started = learned(algorithm.train()), time.perf_counter()
    while time.perf_counter() - started < seconds:
        after = learned(algorithm.train())
    return time.perf_counter() - started, after - before


def learned(result: dict[str, Any]) -> float:
    """Return the steps learned from so far; the first results come before any."""
    metrics = result.get("learners", {}).get("__all_modules__", {})
    return float(metrics.get("num_env_steps_trained_lifetime", 0))


if __name__ == "__main__":
    main()
