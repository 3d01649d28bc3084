"""`evorl export`: an agent of a run as an ONNX file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import evorl
from evorl.commands.command import Command, add_run, count
from evorl.export.onnx_file import check_packages, in_float32, write_onnx
from evorl.runs.loaded import LoadedAgent, load


def facts_of(loaded: LoadedAgent) -> dict[str, str]:
    """Return the metadata to store in the agent's ONNX file."""
    return {
        "environment": loaded.config.environment.id,
        "algorithm": loaded.config.algorithm.name,
        "agent": str(loaded.agent.id),
        "hyperparameters": json.dumps(loaded.agent.hyperparameters),
        "made_with": f"evorl {evorl.__version__}",
    }


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--output", "-o", type=Path, metavar="FILE", help="agent.onnx in the run's directory")
    parser.add_argument("--agent", type=int, metavar="ID", help="an agent of a checkpoint (default: the best one)")
    parser.add_argument("--generation", type=count, metavar="N", help="the generation of that checkpoint")


def _run(parsed: argparse.Namespace) -> None:
    check_packages()
    found = load(parsed.run, agent=parsed.agent, generation=parsed.generation, allow_code=parsed.allow_code)
    loaded, output = in_float32(found), parsed.output or parsed.run / "agent.onnx"
    difference = write_onnx(loaded, output, facts_of(loaded))
    exact = "" if loaded is found else "; it multiplies in float32, where the agent has learned in bfloat16"
    close = f"within {difference:.1g} of what" if difference else "exactly what"
    print(f"{output}: agent {loaded.agent.id}, {close} `predict` gives{exact}")


COMMAND = Command(
    run=_run,
    arguments=_arguments,
    examples=("evorl export runs/my-run", "evorl export runs/my-run --generation 12 --agent 7 -o agent-7.onnx"),
)
