"""Simulators by the prefix of an environment's id; each is made once in a process."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from importlib import import_module

import torch

from evorl.config import Environment
from evorl.distributed import launched_device
from evorl.envs.faults.closing import close_in_time
from evorl.envs.tensor.simulator import SharedSimulator, Simulator
from evorl.system.extras import extra_needed
from evorl.system.plugins import described
from evorl.system.processes import usable_cores
from evorl.types.outcomes import UserError

OWN = "tensor:"
"""Beginning of ids of users' own simulators: `tensor:package.module:make`."""


def _share_with_jax() -> None:
    """Leave room for others, before JAX is imported: it would take most of a GPU's memory, and all cores of ranks."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if usable_cores() <= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")


SOURCES: Mapping[str, str] = {
    "gymnax:": "from_gymnax:simulator",
    "brax:": "from_brax:simulator",
    OWN: "vector:VectorSimulator",
}
"""What makes a simulator by the beginnings of ids: a function of settings, the rest of the id, a number of copies and a
device. It is imported when it is called, since those of JAX belong to an extra."""


def is_tensor(id: str) -> bool:
    """True for the id of an environment that is made by a simulator. `tensor:NAME` is a Gymnasium id of a module."""
    return any(id.startswith(beginning) for beginning in SOURCES) and (not id.startswith(OWN) or id.count(":") == 2)


def device_of(settings: Environment) -> torch.device:
    """The device of an environment before ranks have met: that of this process for simulators, else the CPU."""
    return launched_device() if is_tensor(settings.id) else torch.device("cpu")


_open: dict[str, SharedSimulator] = {}
"""The simulators of this process, by their settings and device."""
_wanted: dict[str, int] = {}
"""The most copies of each that this process is going to use."""


def _key(settings: Environment, device: torch.device) -> str:
    index = "" if device.type == "cpu" else f":{device.index or 0}"
    return f"{device.type}{index} {settings.id} {sorted(settings.kwargs.items())!r}"


def reserve(settings: Environment, copies: int, device: torch.device) -> None:
    """Say how many copies of an environment will be used, before the first is: many simulators are made only once."""
    if is_tensor(settings.id):
        key = _key(settings, device)
        _wanted[key] = max(copies, _wanted.get(key, 1))


def shared_simulator(settings: Environment, copies: int, device: torch.device) -> SharedSimulator:
    """This process's simulator of at least so many copies on a device. Raises UserError if it cannot be made."""
    _check(settings)
    key = _key(settings, device)
    shared = _open.get(key)
    if shared is None or shared.simulator.copies < copies:
        if shared is not None:
            close_in_time(shared.simulator.close, settings.id)
        simulator = _made(settings, max(copies, _wanted.get(key, 1)), device)
        shared = _open[key] = SharedSimulator(simulator)
    if settings.carry_over is True and not shared.simulator.can_save:
        raise UserError(
            f"environment.carry_over: the state of {settings.id} cannot be saved, so each generation begins new "
            "episodes; use auto"
        )
    return shared


def width(settings: Environment, agents: int, num_envs: int, device: torch.device) -> int:
    """The number of environments of each of `agents` agents, at most `num_envs`, for which the simulator has copies."""
    shared = _open.get(_key(settings, device))
    return num_envs if shared is None else max(1, min(num_envs, shared.simulator.copies // agents))


def simulator_of(settings: Environment) -> Simulator:
    """The simulator of these settings that is open, on any device; else one on the CPU is made."""
    name = _key(settings, torch.device("cpu")).partition(" ")[2]
    opened = (shared for key, shared in _open.items() if key.partition(" ")[2] == name)
    return (next(opened, None) or shared_simulator(settings, 1, torch.device("cpu"))).simulator


def _check(settings: Environment) -> None:
    """Raise UserError for settings that only Gymnasium's environments have."""
    if settings.vectorization != "auto":
        raise UserError(f"environment.vectorization: {settings.id} is a simulator of all copies; leave it out")
    if settings.life_loss_ends:
        raise UserError(f"environment.life_loss_ends: only Atari's image environments report lives, not {settings.id}")


def _made(settings: Environment, copies: int, device: torch.device) -> Simulator:
    beginning = next(each for each in SOURCES if settings.id.startswith(each))
    module, _, name = SOURCES[beginning].partition(":")
    try:
        if beginning != OWN:
            _share_with_jax()
        make = getattr(import_module(f"evorl.envs.tensor.{module}"), name)
        simulator: Simulator = make(settings, settings.id.removeprefix(beginning), copies, device)
        return simulator
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        key = "kwargs" if settings.kwargs and isinstance(error, TypeError) else "id"
        needed = extra_needed(error) if isinstance(error, ImportError) else ""
        raise UserError(f"environment.{key}: cannot make {settings.id!r}: {needed or described(error)}") from error


@atexit.register
def _close_all() -> None:
    for key, shared in _open.items():
        close_in_time(shared.simulator.close, key.split()[1])
    _open.clear()
