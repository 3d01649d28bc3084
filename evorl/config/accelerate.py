"""Reject options of Accelerate that would have no effect or fail in a traceback, with one-line errors."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from evorl.types import UserError

PRECISION = "ACCELERATE_MIXED_PRECISION"
PRECISIONS = ("no", "bf16")
PLAIN = {
    "dynamo_backend": ("ACCELERATE_DYNAMO_BACKEND", "no"),
    "use_fsdp": ("ACCELERATE_USE_FSDP", "false"),
    "use_deepspeed": ("ACCELERATE_USE_DEEPSPEED", "false"),
    "use_megatron_lm": ("ACCELERATE_USE_MEGATRON_LM", "false"),
    "use_parallelism_config": ("ACCELERATE_USE_PARALLELISM_CONFIG", "false"),
    "gradient_accumulation_steps": ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1"),
}
"""For each option, its environment variable and the only value that evorl supports."""


def refuse_options(variables: Mapping[str, str] = os.environ) -> None:
    """Raise UserError if Accelerate was given an option that evorl does not support."""
    precision = variables.get(PRECISION, "no").lower()
    if precision not in PRECISIONS:
        reason = (
            "the range of float16 is too small for gradients, and each agent would need a scale of its own"
            if precision == "fp16"
            else "stacks of agents compute in float32 or bfloat16"
        )
        raise UserError(f"accelerate's mixed_precision: {precision} is not supported: {reason}; take 'bf16' or 'no'")
    for option, (name, plain) in PLAIN.items():
        value = variables.get(name, plain)
        if value.lower() != plain:
            raise UserError(
                f"accelerate's {option}: {value.lower()} would have no effect, since agents train as stacks in float32 "
                f"and only their gradients are averaged; leave it out, or take {plain!r}"
            )
    if "ACCELERATE_USE_CPU" in variables and variables.get("WORLD_SIZE", "1") == "1":
        wanted = processes_wanted(_launcher_arguments())
        if wanted > 1:
            raise UserError(
                f"accelerate was asked for {wanted} processes and has started one, as it does on a CPU; take `evorl "
                f"train --processes {wanted}`, or `--multi_gpu` or `distributed_type: MULTI_GPU` and `use_cpu: false`, "
                "which serve CPU machines too (configs/accelerate/accelerate.yaml)"
            )


def asked_for_bf16(variables: Mapping[str, str] = os.environ) -> bool:
    """Return whether Accelerate was asked for `mixed_precision: bf16`."""
    return variables.get(PRECISION, "no").lower() == "bf16"


def processes_wanted(arguments: Sequence[str]) -> int:
    """Return the number of processes that an `accelerate launch` command line requests; 1 if unspecified."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--num_processes", "--num-processes", type=int)
    parser.add_argument("--config_file", "--config-file", type=Path)
    try:
        parsed, _ = parser.parse_known_args(list(arguments))
        if parsed.num_processes is not None:
            return int(parsed.num_processes)
        settings: Any = yaml.safe_load(parsed.config_file.read_text(encoding="utf-8")) if parsed.config_file else {}
        return int(settings["num_processes"])
    except (argparse.ArgumentError, OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return 1


def _launcher_arguments() -> list[str]:
    try:
        return psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        return []
