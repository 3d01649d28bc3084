"""How processes end: with the right exit code, whatever their threads do."""

import json
import os
import subprocess
import sys

from support import ROOT, free_port

VARIABLES = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_signs_of_life_do_not_abort_a_process_that_ends():
    """The short form of benchmarks/ends.py: before threads were stopped, a fifth of such ends aborted."""
    command = [
        sys.executable, str(ROOT / "benchmarks" / "ends.py"), "--count", "15", "--interval", "0.00001",
        "--port", str(free_port()),
    ]  # fmt: skip
    done = subprocess.run(command, env=VARIABLES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of 15 ended wrongly" in done.stdout


STUCK = """
import functools, json, os, sys, time
sys.path.insert(0, "{root}/benchmarks")
import ends
from evorl import launch
from evorl.background import Background, end_background

launch.end_background = functools.partial(end_background, 0.1)

def stuck(end):
    def main(arguments):
        Background(lambda over: time.sleep(60), "stuck").start()
        print("said")
        end()
    return launch.run_program(main, [])

began, codes = time.monotonic(), dict()
for name, (end, _) in ends.WAYS.items():
    codes[name] = os.waitstatus_to_exitcode(os.waitpid(ends.forked(lambda: stuck(end)), 0)[1])
print(json.dumps([codes, time.monotonic() - began]))
"""


def test_a_thread_that_does_not_return_changes_neither_exit_code_nor_output():
    program = STUCK.format(root=ROOT)
    done = subprocess.run([sys.executable, "-c", program], env=VARIABLES, capture_output=True, text=True, check=True)
    *said, result = done.stdout.splitlines()
    codes, seconds = json.loads(result)
    assert codes == {"return": 0, "UserError": 2, "RankLost": 1, "SIGTERM": 143, "exception": 1}
    assert said == ["said"] * len(codes)
    assert seconds < 20
