"""Accelerate's launcher for one machine, unreachable from other machines. Run as a program: see `main`."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from functools import partial

from accelerate.commands import launch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.agent.server import api as agent
from torch.distributed.elastic.multiprocessing import api as processes
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

LOOPBACK = "127.0.0.1"


def code_of(failed: ChildFailedError) -> int:
    """The exit code of the rank that failed first, or was killed; prints which were killed.

    A rank that is killed makes others fail within the same second, and the launcher ends the rest by SIGTERM.
    """
    ends = [(-failure.exitcode, rank) for rank, failure in failed.failures.items() if failure.exitcode < 0]
    killed = [(number, rank) for number, rank in ends if number != signal.SIGTERM]
    for number, rank in killed:
        print(f"error: rank {rank} was killed by signal {number} ({signal.strsignal(number)})", file=sys.stderr)
    _, first = failed.get_first_failure()
    code = -killed[0][0] if killed else first.exitcode
    return code if code > 0 else 128 - code


def main() -> None:
    """Run `accelerate launch` with these arguments and its store on the loopback interface only.

    torch's TCPStore listens on every interface, whatever address it is given, and anyone who reaches its port can read
    and change the values that ranks exchange. Given a socket, it listens on that one only. The port is a free one,
    bound from the moment it is chosen.

    A signal ends the ranks, which say what they have saved, and then the launcher, with 128 plus its number; SIGUSR1 is
    passed on as SIGTERM. If a rank fails, the launcher exits with its code: the rank has said why, unless a signal
    killed it.
    """
    bound = socket.socket()
    # Bound but not listening until the store is: Accelerate would otherwise consider the port in use.
    bound.bind((LOOPBACK, 0))
    port = bound.getsockname()[1]
    store = partial(TCPStore, master_listen_fd=bound.detach())
    setattr(static_tcp_rendezvous, "TCPStore", store)  # noqa: B010 (mypy knows no such attribute of the module)
    sys.argv[1:1] = ["--main_process_ip", LOOPBACK, "--main_process_port", str(port)]
    # It would warn of each signal that it forwards, and of each failure; the ranks report those themselves.
    for module in (agent, processes):
        module.logger.setLevel(logging.ERROR)
        module.logger.addFilter(lambda record: not record.getMessage().startswith("failed (exitcode"))
    # The launcher would die of it, and a cluster then ends the ranks at once.
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        launch.main()
    except processes.SignalException as signalled:
        sys.exit(128 + int(signalled.sigval))
    except ChildFailedError as failed:
        sys.exit(code_of(failed))


if __name__ == "__main__":
    main()
