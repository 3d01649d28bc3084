"""End processes that send heartbeats, in every way that a program can end, and count those that end otherwise.

    OMP_NUM_THREADS=1 python tests/robustness/ends.py [--count 200] [--interval 0.0005]

Each process sends heartbeats every `--interval` seconds to a store that another process keeps, as a launcher does, and
ends through `run_program`. Exits with 1 if any has another exit code than its way of ending should give.
"""

import argparse
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from torch._C._distributed_c10d import TCPStore

from evorl.distributed import RankLost
from evorl.distributed.rendezvous import Heartbeat
from evorl.runs.program import run_program
from evorl.types import UserError


def returns() -> None:
    """End as a run that is finished."""


def mistake() -> None:
    raise UserError("a mistake")


def lost() -> None:
    raise RankLost("another rank is lost")


def told() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)


def fails() -> None:
    raise ValueError("an error of the program")


WAYS: dict[str, tuple[Callable[[], None], int]] = {
    "return": (returns, 0),
    "UserError": (mistake, 2),
    "RankLost": (lost, 1),
    "SIGTERM": (told, 128 + signal.SIGTERM),
    "exception": (fails, 1),
}
"""Each way to end, and the exit code that it should give."""


class Lingering:
    """Makes the end of the interpreter, in which all objects go, last as long as that of a run with many of them."""

    def __del__(self) -> None:
        time.sleep(0.05)


LINGERING = Lingering()


def forked(program: Callable[[], int]) -> int:
    """Start a process that ends as Python does after `program`; the imports are shared, which makes ends cheap."""
    process = os.fork()
    if process:
        return process
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stderr.fileno())
    sys.exit(program())


def keep_store(writing: int) -> int:
    """Hold the store that all heartbeats go to, and tell its port, until a signal comes."""
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    os.write(writing, str(store.port).encode())
    signal.pause()
    del store
    return 0


def give_and_end(port: int, interval: float, number: int, end: Callable[[], None]) -> int:
    """The exit code of a program that sends heartbeats for some milliseconds and then ends."""

    def main(arguments: object) -> None:
        store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=10), wait_for_workers=False)
        Heartbeat(store, number, number + 1, interval)
        time.sleep(0.01 + 0.0001 * (number % 37))
        end()

    return run_program(main, [])


def count_ends(count: int, interval: float) -> Counter[tuple[str, int]]:
    """How often each way of ending gave which exit code, in `count` processes, two at a time."""
    codes: Counter[tuple[str, int]] = Counter()
    reading, writing = os.pipe()
    store = forked(lambda: keep_store(writing))
    port = int(os.read(reading, 16))
    names, running = list(WAYS), dict[int, str]()
    for number in range(count):
        name = names[number % len(names)]
        program = partial(give_and_end, port, interval, number, WAYS[name][0])
        running[forked(program)] = name
        while len(running) >= 2 or (running and number == count - 1):
            process, status = os.wait()
            codes[running.pop(process), os.waitstatus_to_exitcode(status)] += 1
    os.kill(store, signal.SIGKILL)
    os.waitpid(store, 0)
    return codes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--interval", type=float, default=0.0005, help="seconds between two heartbeats")
    options = parser.parse_args()
    codes = count_ends(options.count, options.interval)
    wrong = 0
    for (name, code), number in sorted(codes.items()):
        wrong += number * (code != WAYS[name][1])
        print(f"{name:>10} -> {code:4d}: {number}" + ("" if code == WAYS[name][1] else f" (not {WAYS[name][1]})"))
    print(f"{wrong} of {options.count} ended wrongly")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
