"""Throughput of Sample Factory's APPO, by default of two policies with its PBT. Prints one JSON line.

One process with `--workers` workers collects, another one trains each policy. Counted are the steps of all agents
between the first and the last report, after `--warm-up` seconds of training.

With --env ALE/Pong-v5, images, network, passes and clipping of rewards are those of configs/training/appo_atari.yaml.

Environment:  python -m venv V && V/bin/pip install torch==2.13.0 sample-factory==2.1.1 ale-py==0.10.1
Run:          OMP_NUM_THREADS=1 V/bin/python benchmarks/experiments/baselines/sample_factory_appo.py --seconds 30
              ... --env ALE/Pong-v5 --rollout-steps 128 --batch-size 256 --minibatches 4 --epochs 4 --hidden 256
"""

import argparse
import json
import tempfile
import time
from typing import Any

import ale_py  # noqa: F401 (registers the games)
import gymnasium as gym
import numpy as np
import torch
from sample_factory.algo.runners.runner import Runner
from sample_factory.algo.utils.context import global_model_factory
from sample_factory.algo.utils.misc import LEARNER_ENV_STEPS, ExperimentStatus
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.model.encoder import Encoder
from sample_factory.train import make_runner

PIXELS = 42
CONVOLUTIONS = ((16, 6, 3), (32, 4, 2))
"""Channels, kernel and stride of each layer."""


class ImageEncoder(Encoder):
    """Convolutions and one hidden layer, on images of four frames."""

    def __init__(self, config: Any, spaces: gym.spaces.Dict) -> None:
        super().__init__(config)
        channels, layers = spaces["obs"].shape[0], []
        for out, kernel, stride in CONVOLUTIONS:
            layers += [torch.nn.Conv2d(channels, out, kernel, stride), torch.nn.ReLU()]
            channels = out
        features = torch.nn.Sequential(*layers, torch.nn.Flatten())
        width = features(torch.zeros(1, *spaces["obs"].shape)).shape[1]
        self.width = config.encoder_conv_mlp_layers[0]
        self.layers = torch.jit.script(
            torch.nn.Sequential(*features, torch.nn.Linear(width, self.width), torch.nn.ReLU())
        )

    def forward(self, observations: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.layers(observations["obs"])

    def get_out_size(self) -> int:
        return self.width


def make_env(name: str, config: Any = None, env_config: Any = None, render_mode: str | None = None) -> gym.Env:
    if not name.startswith("ALE/"):
        return gym.make(name, render_mode=render_mode)
    env = gym.make(name, frameskip=1, repeat_action_probability=0.0, render_mode=render_mode)
    env = gym.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=PIXELS)
    return gym.wrappers.TransformObservation(gym.wrappers.FrameStack(env, 4), np.asarray)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--policies", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--num-envs", type=int, default=8, help="environments of each policy in each worker")
    parser.add_argument("--rollout-steps", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--minibatches", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=1024, help="steps in a minibatch")
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 64])
    parser.add_argument("--warm-up", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(measure(args, directory)))


def measure(args: argparse.Namespace, directory: str) -> dict[str, Any]:
    register_env(args.env, make_env)
    given = {
        "env": args.env,
        "experiment": "benchmark",
        "train_dir": directory,
        "device": "cpu",
        "num_workers": args.workers,
        "num_envs_per_worker": args.num_envs * args.policies,
        "num_policies": args.policies,
        "with_pbt": args.policies > 1,
        "rollout": args.rollout_steps,
        "recurrence": 1,
        "use_rnn": False,
        "batch_size": args.batch_size,
        "num_batches_per_epoch": args.minibatches,
        "num_epochs": args.epochs,
        "shuffle_minibatches": args.minibatches > 1,
        "normalize_input": False,
        "nonlinearity": "relu",
        "save_every_sec": 3600,
    }
    options = [f"--{name}={value}" for name, value in given.items()]
    if args.env.startswith("ALE/"):
        global_model_factory().register_encoder_factory(ImageEncoder)
        options += ["--obs_scale=255", "--reward_clip=1", "--encoder_conv_mlp_layers", *map(str, args.hidden)]
    else:
        options += ["--encoder_mlp_layers", *map(str, args.hidden)]
    parser, _ = parse_sf_args(options)
    _, runner = make_runner(parse_full_cfg(parser, options))
    seen: list[tuple[float, int]] = []

    def note(runner: Runner, message: dict[str, Any], policy: int) -> None:
        seen.append((time.perf_counter(), sum(runner.env_steps.values())))
        if seen[-1][0] > seen[0][0] + args.warm_up + args.seconds:
            runner.cfg.train_for_env_steps = 0  # Its own limit of seconds does not end it.

    runner.policy_msg_handlers[LEARNER_ENV_STEPS].append(note)
    if runner.init() != ExperimentStatus.SUCCESS:
        raise SystemExit("Sample Factory did not start")
    runner.run()
    begin = next(index for index, (when, _) in enumerate(seen) if when >= seen[0][0] + args.warm_up)
    seconds, steps = seen[-1][0] - seen[begin][0], seen[-1][1] - seen[begin][1]
    return {
        "system": "sample factory",
        "population": args.policies,
        "agent_env_steps_per_s": round(steps / seconds, 1),
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    main()
