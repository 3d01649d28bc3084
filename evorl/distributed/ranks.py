"""Ranks, their collectives, and the assignment of agents to ranks.

The only file that calls Accelerate and torch.distributed. Axes: R ranks, P agents, D all parameters of a flat buffer.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.state import AcceleratorState
from accelerate.utils import parse_flag_from_env
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from evorl.distributed.pauses import Pauses
from evorl.system.processes import cpu, identity
from evorl.system.signals import note_activity, raise_if_signalled, signals_end_at_once
from evorl.types.messages import message_of
from evorl.types.outcomes import RunFailed, UserError

MAX_GATHERED = 2**18
"""CPU gradients of up to this many values over all ranks use all-gather instead of all-reduce."""


STORE_TIMEOUT = 4.0
"""Seconds that a call to the store may take, where the launcher that keeps it may have ended."""
NAMING = 5.0
"""Seconds that ranks have to show that they are alive, once a wait has ended without them."""
ATTEMPT, LAUNCH = "evorl/attempt", "evorl/launch"
"""Keys of the store: the name of the attempt that ranks are to join, and that of the launch."""
POLL = 0.02
"""Seconds between two looks at the store."""


class RankLost(RunFailed):
    """Another rank died or hung, so a collective operation could not complete."""


@dataclass(frozen=True)
class Launch:
    """One launcher invocation; all its attempts share `name`, and all but the first are `restarted`."""

    name: str
    restarted: bool


@dataclass(frozen=True)
class Peer:
    """A rank's description of itself: its host, its local rank there, its GPU's name if any, and its CPU type."""

    host: str
    local: int
    gpu: str
    cpu: str


class Ranks:
    """The processes started by Accelerate.

    Every wait times out after `timeout` seconds, with RankLost over gloo; NCCL ends the process itself. `on_host`
    counts the ranks of this machine. `backend` is the collective backend, or the
    device type of a single process.
    """

    def __init__(self, timeout: float = 300.0) -> None:
        """Join the other ranks. Raises RankLost if they do not arrive, UserError if they cannot be found."""
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        self._timeout = timeout
        self._store: Store | None = None
        self._alive: dist.ProcessGroup | None = None
        self.launch = Launch(identity(os.getppid()), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0")
        self.backend = "cuda" if _gpus() else "cpu"
        self.peers = [Peer(socket.gethostname(), 0, "", cpu())]
        if launched > 1 and "MASTER_ADDR" in os.environ:
            # If a rank dies during the rendezvous, its launcher signals the others while they wait in C++.
            with signals_end_at_once():
                meeting = _join(int(os.environ["RANK"]), launched, timeout, self.launch)
            self._store, self.launch, self.backend, self.peers, self._alive = meeting
        handler = InitProcessGroupKwargs(timeout=timedelta(seconds=timeout))
        self._accelerator = Accelerator(cpu=self.backend in ("cpu", "gloo"), kwargs_handlers=[handler])
        self.on_host = int(os.environ.get("LOCAL_WORLD_SIZE", launched))
        self.rank: int = self._accelerator.process_index
        self.size: int = self._accelerator.num_processes
        self.device: torch.device = self._accelerator.device
        if self.size != launched:
            raise UserError(
                f"{launched} processes were launched, but each is alone in a world of {self.size}; in the accelerate "
                "configuration set `distributed_type: MULTI_GPU` and `use_cpu: false`, which also serves CPU machines"
            )

    @property
    def hosts(self) -> int:
        return sum(peer.local == 0 for peer in self.peers)

    @property
    def unused_gpus(self) -> int:
        """The number of GPUs that no rank uses because there are not enough for all ranks."""
        return len({peer.gpu for peer in self.peers} - {""}) if self.backend == "gloo" else 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def average_(self, flat: Tensor) -> None:
        """Replace `flat` [D] by its mean over ranks, in one collective."""
        if self.size == 1:
            return
        with self._waiting("the gradients"):
            # All-gather sends more than all-reduce but in one round, not two: 1.3 against 2.0 ms for 6,000 values
            # (2 ranks over gloo, mean of 400).
            if flat.numel() * self.size <= MAX_GATHERED and flat.device.type == "cpu":
                everyones = flat.new_empty(self.size, flat.numel())
                dist.all_gather(list(everyones), flat)
                torch.sum(everyones, 0, out=flat)
            else:
                dist.all_reduce(flat)
        flat.div_(self.size)

    def gather(self, numbers: NDArray[np.float64], what: str = "the other ranks' counts") -> NDArray[np.float64]:
        """All-gather arrays of equal shape: [...] -> [R, ...]."""
        if self.size == 1:
            return numbers[None]
        mine = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float64)).to(self.device)
        everyones = [torch.empty_like(mine) for _ in range(self.size)]
        with self._waiting(what):
            dist.all_gather(everyones, mine)
            return torch.stack(everyones).cpu().numpy()

    def gather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        """All-gather byte strings, which may differ in length."""
        if self.size == 1:
            return [payload]
        lengths = self.gather(np.array([float(len(payload))]), what)[:, 0].astype(int)
        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8, device=self.device)
        padded[: len(payload)] = self._tensor(payload)
        everyones = [torch.empty_like(padded) for _ in range(self.size)]
        with self._waiting(what):
            dist.all_gather(everyones, padded)
        return [values[:length].cpu().numpy().tobytes() for values, length in zip(everyones, lengths, strict=True)]

    def broadcast_bytes(self, payload: bytes | None, what: str) -> bytes:
        """Broadcast the main process's payload to all ranks."""
        if self.size == 1:
            assert payload is not None
            return payload
        length = int(self.gather(np.array([float(len(payload or b""))]), what)[0, 0])
        values = self._tensor(payload or b"") if self.is_main else self._tensor(bytes(length))
        with self._waiting(what):
            dist.broadcast(values, src=0)
        return values.cpu().numpy().tobytes()

    def from_main(self, compute: Callable[[], bytes], what: str) -> bytes:
        """The main process's result of `compute` on all ranks; a UserError there is raised on all of them."""
        reply = b""
        if self.is_main:
            try:
                reply = b"+" + compute()
            except UserError as error:
                reply = b"-" + str(error).encode()
        reply = self.broadcast_bytes(reply, what)
        if reply[:1] == b"-":
            raise UserError(reply[1:].decode(), reported_elsewhere=not self.is_main)
        return reply[1:]

    def differing(self, digest: str, what: str) -> list[int]:
        """The ranks whose digest differs from that of rank 0."""
        digests = self.gather_bytes(digest.encode(), f"digests of {what}")
        return [rank for rank, other in enumerate(digests) if other != digests[0]]

    def assert_identical(self, digest: str, what: str) -> None:
        """Raise RuntimeError naming the ranks whose digest differs from that of rank 0."""
        if different := self.differing(digest, what):
            raise RuntimeError(f"rank 0 and rank {', '.join(map(str, different))} do not hold the same {what}")

    def raise_if_any_failed(self, problem: str, what: str) -> None:
        """Raise UserError on all ranks if any has a problem; the first rank with a problem prints it."""
        for rank, payload in enumerate(self.gather_bytes(problem.encode(), what)):
            if payload:
                raise UserError(payload.decode(), reported_elsewhere=rank != self.rank)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Raise a UserError of the block on all ranks, also on those whose block raised none."""
        problem = ""
        try:
            yield
        except UserError as error:
            problem = str(error)
        self.raise_if_any_failed(problem, what)

    def first_problem(self, problem: str, what: str) -> str:
        """The problem of the first rank that has one, the same on all ranks, or ""."""
        return next((each.decode() for each in self.gather_bytes(problem.encode(), what) if each), "")

    def pauses(self, *, together: bool) -> Pauses:
        """The protocol by which ranks agree on pauses; ranks that step `together` pause after the same step."""
        return Pauses(self._store, self.rank, self.size, self._timeout, together=together)

    def _tensor(self, payload: bytes) -> Tensor:
        return torch.from_numpy(np.frombuffer(bytearray(payload), dtype=np.uint8)).to(self.device)

    def end(self, reason: str) -> bool:
        """Publish why this rank ends, if it is the first; True if another rank has ended for the same reason before."""
        first = self._published("", f"rank {self.rank}: {reason}")
        return first.partition(": ")[2] == reason and not first.startswith(f"rank {self.rank}: ")

    def first_reason(self) -> str:
        """The reason of the rank that was the first to end, or "" while there is none."""
        return self._published("none", "none").removeprefix("none")

    def _published(self, expected: str, desired: str) -> str:
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # The launcher has ended, and its store with it.
                return self._store.compare_set("end", expected, desired).decode()
        return ""

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        note_activity(f"the wait for {what}")
        try:
            yield
        except (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError)):
            raise  # An error of this rank's own GPU, whose earlier work may fail only here.
        except RuntimeError as error:
            raise_if_signalled()  # The signal has ended the other ranks, too.
            missing = self._missing(error, hangs=time.monotonic() - began >= self._timeout)
            raise RankLost(f"rank {self.rank} waited for {what}, but {missing}") from error
        finally:
            note_activity("")

    def _missing(self, error: RuntimeError, hangs: bool) -> str:
        """Say which ranks have ended, or do not arrive where a wait has used up its time because a rank `hangs`."""
        lost = [rank for rank in range(self.size) if rank != self.rank] if self.size == 2 else []
        if hangs and self._alive is not None:
            try:
                # Rank 0 names the missing ranks; the others wait longer, until it has published them.
                patience = timedelta(seconds=NAMING if self.is_main else 2 * NAMING)
                dist.monitored_barrier(self._alive, patience, wait_all_ranks=True)
                lost = []
            except RuntimeError as absent:
                named = re.search(r"Ranks? ([\d, ]+) failed to pass", str(absent))
                lost = [int(rank) for rank in named[1].split(",")] if named else [0] * (not self.is_main)
        if reason := self.first_reason():
            return f"{reason.partition(': ')[0]} has ended: {reason.partition(': ')[2]}"
        who = " and ".join(f"rank {rank} on {self.peers[rank].host}" for rank in lost) or "another rank"
        why = f"every wait ends after {self._timeout:g} s, run.timeout; {message_of(error, 120)}"
        return f"{who} {'did not arrive' if hangs else 'has ended'} ({why})"


def _join(
    rank: int, size: int, timeout: float, launch: Launch
) -> tuple[Store, Launch, str, list[Peer], dist.ProcessGroup | None]:
    """Meet all ranks of this attempt and initialise the process group.

    Returns a store for what ranks publish outside of collectives, the launch, the backend, the peers, and with gloo a
    second group. The launch is the given one, unless the launcher keeps a store. Raises RankLost if ranks are missing.
    """
    launcher_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port, limit = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timedelta(seconds=timeout)
    try:
        store = TCPStore(address, port, None, rank == 0 and not launcher_has_store, limit, wait_for_workers=False)
        # The launcher keeps one store over all restarts: without a prefix, ranks would read a dead attempt's keys.
        attempt = join_attempt(store, rank, size, timeout)
        attempt_store = PrefixStore(f"evorl/{attempt}", store)
        local = int(os.environ.get("LOCAL_RANK", "0"))
        attempt_store.set(f"peer/{rank}", json.dumps(asdict(Peer(socket.gethostname(), local, _own_gpu(local), cpu()))))
        peers = [Peer(**json.loads(attempt_store.get(f"peer/{other}"))) for other in range(size)]
        if launcher_has_store:
            # A process may train several times; after a restart, each training continues in its own directory.
            training = store.add(f"evorl/trainings/{identity(os.getpid())}", 1)
            first = store.compare_set(f"evorl/first/{training}", "", attempt).decode()
            name = store.compare_set(LAUNCH, "", uuid.uuid4().hex).decode()
            launch = Launch(f"{name}/{training}", first != attempt)
        backend = choose_backend([peer.gpu for peer in peers])
        if int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == size and (name := loopback()):
            # By default gloo and NCCL listen on the interface of the host's name, open to the whole network.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
        dist.init_process_group(backend, store=attempt_store, rank=rank, world_size=size, timeout=limit)
        # A connection of its own, with a short timeout: a call must not keep a thread from ending.
        short = timedelta(seconds=min(timeout, STORE_TIMEOUT))
        published = PrefixStore(f"evorl/{attempt}/published", TCPStore(address, port, None, False, short, False))
        # After a wait that has failed, the default group can send nothing any more.
        alive = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * NAMING)) if backend == "gloo" else None
        return published, launch, backend, peers, alive
    except (RuntimeError, TimeoutError) as error:
        raise RankLost(
            f"rank {rank} did not meet all {size} ranks at {address}:{port} (every wait ends after {timeout:g} s, "
            f"run.timeout; {message_of(error, 120)})"
        ) from error


def join_attempt(store: Store, rank: int, size: int, timeout: float) -> str:
    """The name that rank 0 draws for the attempt that all ranks begin now.

    Launchers count restarts separately: `TORCHELASTIC_RESTART_COUNT` differs between hosts once one has joined or left.
    Raises TimeoutError if not all ranks arrive within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    name = uuid.uuid4().hex if rank == 0 else ""
    if rank == 0:
        store.set(ATTEMPT, name)
    awaited = [f"{name}/{other}" for other in range(1, size)]
    while not (name and store.check(awaited)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks are missing after {timeout:g} s")
        if rank != 0 and (current := store.compare_set(ATTEMPT, "none", "none").decode()) not in ("none", name):
            # It may be that of an attempt that died before it began: then a newer name will replace it.
            store.set(f"{current}/{rank}", "")
            name, awaited = current, [f"{current}/begun"]
        time.sleep(POLL)
    if rank == 0:
        store.delete_key(ATTEMPT)
        store.set(f"{name}/begun", "")
    return name


def choose_backend(gpus: Sequence[str]) -> str:
    """`nccl` if every rank has a GPU of its own, given the names `gpus`, else `gloo` for all ranks.

    One GPU cannot serve two ranks of one NCCL group, and ranks that chose separately could deadlock.
    """
    return "nccl" if all(gpus) and len(set(gpus)) == len(gpus) else "gloo"


def loopback() -> str:
    """The name of the loopback network interface, or an empty string if unknown."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "")


def launched_device() -> torch.device:
    """The device that this process will train on, before it has joined the other ranks."""
    gpus, local = _gpus(), int(os.environ.get("LOCAL_RANK", "0"))
    alone = gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return torch.device("cuda", local) if gpus and alone else torch.device("cpu")


def _gpus() -> int:
    return 0 if parse_flag_from_env("ACCELERATE_USE_CPU") else torch.cuda.device_count()


def _own_gpu(local: int) -> str:
    """The UUID of the GPU that Accelerate would assign to this rank, or an empty string without one."""
    count = _gpus()
    # If a cluster exposes one GPU per rank, its index is 0 for all ranks; the UUID distinguishes them.
    return str(torch.cuda.get_device_properties(local % count).uuid) if count else ""


def is_initialized() -> bool:
    return dist.is_initialized()


def shutdown() -> None:
    """Destroy the process group; no collective is possible afterwards."""
    if is_initialized():
        dist.destroy_process_group()


@contextmanager
def own_world() -> Iterator[None]:
    """On exit, destroy the process group and restore Accelerate's state, so that this process can train again.

    Raises UserError if the process has already joined a process group.
    """
    if is_initialized():
        raise UserError(
            "torch.distributed: this process has already joined a process group; call evorl before creating an "
            "Accelerator or calling init_process_group"
        )
    unused = not AcceleratorState._shared_state
    try:
        yield
    finally:
        shutdown()
        if unused:
            AcceleratorState._reset_state(reset_partial_state=True)


@dataclass(frozen=True)
class Placement:
    """The agents that a rank holds, and collectives over per-agent numbers.

    `replicated`: every rank holds all P agents (data parallel). `sharded`: rank r alone holds the r-th part of them; P
    must be a multiple of the number of ranks.
    """

    ranks: Ranks
    kind: Literal["replicated", "sharded"]
    agents: int

    @property
    def is_sharded(self) -> bool:
        return self.kind == "sharded"

    @property
    def local_size(self) -> int:
        return self.agents // self.ranks.size if self.is_sharded else self.agents

    @property
    def copies(self) -> int:
        """The number of ranks that hold each agent."""
        return 1 if self.is_sharded else self.ranks.size

    @property
    def copy(self) -> int:
        """This rank's number among those that hold the same agents."""
        return 0 if self.is_sharded else self.ranks.rank

    @property
    def local(self) -> slice:
        """The slice of agents on this rank."""
        if not self.is_sharded:
            return slice(0, self.agents)
        share = self.agents // self.ranks.size
        return slice(self.ranks.rank * share, (self.ranks.rank + 1) * share)

    @property
    def average_(self) -> Callable[[Tensor], None] | None:
        """Averages a flat gradient [D] in place over the ranks that hold the same agents; None if no other does."""
        return self.ranks.average_ if self.copies > 1 else None

    def gather_copies(self, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        """All-gather over the ranks that hold the same agents: [...] -> [copies, ...]."""
        return numbers[None] if self.is_sharded else self.ranks.gather(numbers)

    def total(self, numbers: NDArray[np.float64], what: str) -> NDArray[np.float64]:
        """Sum over the ranks that hold the same agent, and concatenate shards: [..., local agents] -> [..., P]."""
        everyones = self.ranks.gather(numbers, what)
        return np.concatenate(list(everyones), axis=-1) if self.is_sharded else everyones.sum(0)
