"""Train on two hosts, lose one, and resume: two network namespaces of this machine stand for the hosts. Needs root.

    OMP_NUM_THREADS=1 python tests/robustness/two_hosts.py

Each host has its own address, its own name, and its own directory at a path that both have; what they share is a cable.
It is done without a shared file system and with one. Prints what happened and exits with 1 if anything was not as it
should be.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from chaos import CASES, ROOT, differences, drifts

HOSTS = {"evorl-a": "10.213.0.1", "evorl-b": "10.213.0.2"}
SETTINGS = (*CASES["dqn-replicated"], "run.timeout=10", "run.resume=auto")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextmanager
def two_namespaces() -> Iterator[None]:
    """The hosts, joined by a pair of virtual network devices."""
    first, second = HOSTS
    for host in HOSTS:
        ip("netns", "add", host)
    try:
        ip("link", "add", "cable", "netns", first, "type", "veth", "peer", "name", "cable", "netns", second)
        for host, address in HOSTS.items():
            ip("-n", host, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", host, "link", "set", "cable", "up")
            ip("-n", host, "link", "set", "lo", "up")
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "delete", host], check=False)


def launch(host: str, directory: Path, name: str, port: int, more: Sequence[str]) -> subprocess.Popen[bytes]:
    """What a user types on each host, with the recipe's file."""
    directory.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "accelerate.commands.launch",
        "--config_file", str(ROOT / "configs" / "accelerate" / "multi_node.yaml"), "--num_processes", "2",
        "--machine_rank", str(list(HOSTS).index(host)), "--main_process_ip", HOSTS["evorl-a"],
        "--main_process_port", str(port), str(ROOT / "demos" / "online.py"), *SETTINGS, *more, f"run.name={name}",
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable"}
    # Ranks tell each other paths: on hosts with file systems of their own, one path leads to different places.
    place = directory.parent / "here"
    place.mkdir(exist_ok=True)
    become = 'hostname "$0" && mount --bind "$1" "$2" && cd "$2" && shift 2 && exec "$@"'
    words = ["unshare", "--uts", "--mount", "sh", "-c", become, host, str(directory), str(place), *command]
    with (directory / f"{name}.log").open("ab") as log:
        return subprocess.Popen(["ip", "netns", "exec", host, *words], env=environment, stdout=log, stderr=log)


def both(directories: Sequence[Path], name: str, port: int, *more: str) -> list[subprocess.Popen[bytes]]:
    return [launch(host, directory, name, port, more) for host, directory in zip(HOSTS, directories, strict=True)]


def wait_for_generation(directory: Path, name: str, generation: int) -> None:
    path = directory / "runs" / name / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not path.is_file() or path.read_text().count("\n") < generation:
        assert time.monotonic() < deadline, f"generation {generation} did not come"
        time.sleep(0.02)


def lose(process: subprocess.Popen[bytes]) -> None:
    """Kill a host's launcher and ranks at once."""
    there = psutil.Process(process.pid)
    for one in [there, *there.children(recursive=True)]:
        one.send_signal(signal.SIGKILL)
    process.wait(30)


def logged(directory: Path, name: str, text: str) -> bool:
    return text in (directory / f"{name}.log").read_text(errors="replace")


def scenario(directories: Sequence[Path], kind: str, port: int) -> list[str]:
    """What went wrong when one host was lost, and then both resumed; the first directory is the main process's."""
    wrong = []
    for process in both(directories, "alone", port):
        wrong += [f"the undisturbed run ended with {process.returncode}"] if process.wait(300) else []
    first, second = both(directories, "lost", port + 1)
    wait_for_generation(directories[0], "lost", 8)
    lose(second)
    started = time.monotonic()
    code = first.wait(120)
    seconds = time.monotonic() - started
    print(f"{kind}: host b lost; host a ended with {code} after {seconds:.1f} s", flush=True)
    if code == 0 or not logged(directories[0], "lost", "rank 0 waited for"):
        wrong.append("host a did not notice the loss")
    for process in both(directories, "lost", port + 2):
        wrong += [f"the resumed run ended with {process.returncode}"] if process.wait(300) else []
    for directory in dict.fromkeys(directories):
        alike = not (found := differences(directory / "runs" / "alone", directory / "runs" / "lost"))
        print(f"{kind}: what {directory.name} holds is {'identical' if alike else f'DIFFERENT: {found}'}", flush=True)
        wrong += found
        wrong += [f"{name}: replicas drifted" for name in ("alone", "lost") if drifts(directory / "runs" / name)]
    return wrong


def without_its_disk(directories: Sequence[Path], port: int) -> list[str]:
    """What went wrong when a host came back empty: the run goes on and says what it lacks."""
    shutil.rmtree(directories[1])
    codes = [process.wait(300) for process in both(directories, "lost", port, "training.max_steps=9920")]
    told = logged(directories[0], "lost", "1 parts of the replay are not on these hosts")
    print(f"host b came back without its disk: ended with {codes}, and reported it: {told}")
    return [] if codes == [0, 0] and told else ["a host without its disk was not taken back"]


def main() -> int:
    with tempfile.TemporaryDirectory() as directory, two_namespaces():
        a, b, shared = (Path(directory) / name for name in ("host-a", "host-b", "shared"))
        wrong = scenario([a, b], "own file systems", 29500)
        wrong += without_its_disk([a, b], 29503)
        wrong += scenario([shared, shared], "a shared file system", 29510)
    print(f"WRONG: {wrong}" if wrong else "as it should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
