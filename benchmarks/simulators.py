"""Check simulators of tensors on a GPU in one command of a few minutes; without a GPU, the same at small sizes.

    python benchmarks/simulators.py [--output simulators.json] [--parts equal rates cost run] [--environments ID ...]

The parts write one JSON file as they end:

- `equal`: the same episodes on the CPU and on the device, from the same seeds with the same actions: the first step in
  which an observation differs by more than 1e-4, and the largest difference before it.
- `rates`: environment steps per second by the number of copies, with random actions, through `TensorEnvironments`.
- `cost`: steps per second of all agents and milliseconds of a rollout with its updates, for 1 to 16 agents that share a
  fixed number of copies, so that only the number of agents differs.
- `run`: one training run by the command line, with its seconds and its elite.
- `kills` (only if asked for): a run that is killed ten times at random moments, by SIGKILL or SIGTERM, and resumed; the
  files of its last checkpoint that differ from those of a run left alone.

By default the environments are the CartPole in torch of the tests, which needs nothing but torch, and where JAX is
installed gymnax's CartPole and Breakout, and brax's ant.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from records import run
from throughput import Trainer, environments_alone

from evorl.config import Environment, override, validate
from evorl.distributed import launched_device
from evorl.envs import make_environments
from evorl.envs.spaces import choices
from evorl.runs.launch import load_config

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
TORCH = "tensor:helpers.torch_cartpole:make"
JAX = {"gymnax": ("gymnax:CartPole-v1", "gymnax:Breakout-MinAtar"), "brax": ("brax:ant",)}
PARTS = ("equal", "rates", "cost", "run", "kills")
KILLS = 10
ON_GPU = torch.cuda.is_available()
STEPS = 200
Row = dict[str, Any]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("simulators.json"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:-1])
    found = [id for package, ids in JAX.items() if importlib.util.find_spec(package) for id in ids]
    parser.add_argument("--environments", nargs="+", default=[TORCH, *found])
    parser.add_argument("--copies", type=int, nargs="+", default=[64, 1024, 8192, 65536] if ON_GPU else [64, 256])
    parser.add_argument("--seconds", type=float, default=3.0 if ON_GPU else 1.0)
    parser.add_argument("--steps", type=int, default=1_000_000 if ON_GPU else 20_480, help="of each agent of the run")
    parsed = parser.parse_args(arguments)
    sys.path.append(str(TESTS))
    record: Row = {"machine": machine()}
    for part in parsed.parts:
        began = time.perf_counter()
        if part == "run":
            rows = [trained(id, parsed.steps) for id in parsed.environments[:2]]
        elif part == "kills":
            rows = [killed(id) for id in parsed.environments]
        else:
            measures = {"equal": equal, "rates": rates, "cost": cost}
            rows = [alone(measures[part], id, parsed.copies, parsed.seconds) for id in parsed.environments]
        record[part], record[f"{part}_seconds"] = rows, round(time.perf_counter() - began, 1)
        parsed.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        for row in rows:
            print(part, json.dumps(row), flush=True)


def machine() -> Row:
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"gpus": gpus, "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}


def alone(measure: Any, id: str, copies: Sequence[int], seconds: float) -> Row:
    """A measure of one environment; a failure becomes its row, so that the others are measured."""
    try:
        return {"environment": id, **measure(id, copies, seconds)}
    except Exception as error:
        return {"environment": id, "error": f"{type(error).__name__}: {error}"[:500]}


def settings_of(id: str) -> Environment:
    return validate(override({}, [f"environment.id={id}"])).environment


def equal(id: str, copies: Sequence[int], seconds: float) -> Row:
    """The same episodes on the CPU and on the device, one after the other: on a CPU they share the simulator."""
    here, there = (episodes(id, torch.device("cpu")), episodes(id, launched_device()))
    differences = (here - there).abs().flatten(1).amax(1)
    wrong = (differences > 1e-4).nonzero()[:, 0].tolist()
    until = wrong[0] if wrong else STEPS
    return {"equal_until": until, "largest": float(differences[:until].max()) if until else None}


def episodes(id: str, device: torch.device) -> torch.Tensor:
    """The observations [T, N, D] of 16 copies from one seed, with the same actions on every device."""
    rng, seen = np.random.default_rng(0), []
    environments = make_environments(settings_of(id), 1, 16, device)
    space = environments.interface.action
    environments.reset(1)
    for _ in range(STEPS):
        seen.append(torch.cat([part[0].flatten(1).float().cpu() for part in environments.observation.values()], 1))
        if choices(space):
            action = torch.from_numpy(rng.integers(choices(space)[0], size=(1, 16)))
        else:
            action = torch.from_numpy(rng.uniform(-1, 1, (1, 16, *(space.shape or ()))).astype(np.float32))
        environments.step(action)
    return torch.stack(seen)


def rates(id: str, copies: Sequence[int], seconds: float) -> Row:
    """Steps per second with random actions, by the number of copies."""
    return {
        "steps_per_second": {
            count: round(environments_alone(make_environments(settings_of(id), 1, count, launched_device()), seconds))
            for count in copies
        }
    }


def cost(id: str, copies: Sequence[int], seconds: float) -> Row:
    """Steps per second of PPO for populations that share as many copies."""
    whole, found = max(min(copies), 256 if not ON_GPU else 8192), {}
    for agents in (1, 4, 16) if ON_GPU else (1, 4):
        words = [f"environment.id={id}", f"environment.num_envs={whole // agents}", f"population.size={agents}"]
        words += ["algorithm.rollout_steps=32", f"algorithm.batch_size={8 * whole // agents}", "tracking.backends=[]"]
        trainer = Trainer(load_config(words, ROOT / "configs" / "training" / "ppo_gymnax.yaml"))
        trainer.begin()
        while trainer.step() == 0:
            pass
        waited()
        began, rollouts = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            for _ in range(32):
                trainer.step()
            rollouts += 1
            waited()
        each = (time.perf_counter() - began) / rollouts
        found[agents] = {"steps_per_second": round(32 * whole / each), "milliseconds": round(1000 * each, 1)}
    return {"copies": whole, "agents": found}


def waited() -> None:
    """Wait for the GPU, so that times are those of its work."""
    if ON_GPU:
        torch.cuda.synchronize()


def trained(id: str, steps: int) -> Row:
    """One run of four agents by the command line."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"environment.id={id}", "population.size=4", f"training.max_steps={steps}", f"run.directory={folder}"]
        command = [sys.executable, "-m", "evorl", "train", "ppo_gymnax", *words, "run.name=a", "tracking.backends=[]"]
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(TESTS), os.environ.get("PYTHONPATH", "")])
        began = time.perf_counter()
        code, output = run(command, 600)
        seconds = time.perf_counter() - began
        return {"environment": id, "exit_code": code, "seconds": round(seconds, 1), "output": output.splitlines()[-4:]}


def killed(id: str) -> Row:
    """A run that is killed at random moments, compared with one that is left alone."""
    rng, beginnings = np.random.default_rng(1), 0
    kills: list[str] = []
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(TESTS), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        words = [f"environment.id={id}", "environment.num_envs=8", "population.size=4", "evolution.steps=2048"]
        words += ["algorithm.rollout_steps=32", "algorithm.batch_size=64", "training.max_steps=40960"]
        words += ["checkpoint.minutes=0.02", "tracking.backends=[]", f"run.directory={folder}", "run.resume=auto"]
        command = [sys.executable, "-m", "evorl", "train", "ppo_gymnax", *words]
        began = time.perf_counter()
        code, output = run([*command, "run.name=alone"], 900)
        if code:
            return {"environment": id, "output": output.splitlines()[-4:]}
        whole = time.perf_counter() - began
        log = Path(folder) / "disturbed" / "metrics.jsonl"
        while len(kills) < KILLS and beginnings < 3 * KILLS:
            beginnings += 1
            process = subprocess.Popen(
                [*command, "run.name=disturbed"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            before = len(log.read_bytes().splitlines()) if log.is_file() else 0
            # Wait for its first generation, so that kills do not all come while modules are imported.
            deadline = time.monotonic() + 120
            while process.poll() is None and time.monotonic() < deadline:
                if log.is_file() and len(log.read_bytes().splitlines()) > before:
                    break
                time.sleep(0.05)
            time.sleep(rng.uniform(0, whole / 20))
            number = signal.SIGKILL if rng.random() < 0.5 else signal.SIGTERM
            if process.poll() is None:
                process.send_signal(number)
                kills.append(number.name)
            process.wait(120)
        code, _ = run([*command, "run.name=disturbed"], 900)
        newest = {name: sorted((Path(folder) / name / "checkpoints").iterdir())[-1] for name in ("alone", "disturbed")}
        files = sorted(path.name for path in newest["alone"].glob("*.safetensors"))
        differing = [f for f in files if (newest["alone"] / f).read_bytes() != (newest["disturbed"] / f).read_bytes()]
        lines = {name: (Path(folder) / name / "metrics.jsonl").read_text().splitlines() for name in newest}
        fitness = {name: [json.loads(line)["fitness"] for line in own] for name, own in lines.items()}
        same = fitness["alone"] == fitness["disturbed"]
        return {
            "environment": id, "kills": kills, "exit_code": code, "files": files, "differing": differing,
            "generations": len(fitness["alone"]), "same_fitness": same,
        }  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
