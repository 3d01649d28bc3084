"""What stands around the package: its metadata, its container, and what is built of it."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest
import yaml
from helpers.support import ROOT

import evorl

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == evorl.__version__
    assert cited["license"] == PROJECT["project"]["license"]
    assert cited["authors"] == PROJECT["project"]["authors"]


def test_the_container_runs_the_first_command_of_the_readme():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    words = {line.split()[0]: json.loads(line.partition(" ")[2]) for line in lines if line.startswith(("ENTRY", "CMD"))}
    first = re.search(r"^    (evorl train .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [*words["ENTRYPOINT"], *words["CMD"]] == first[1].split()
    extras = re.search(r"/source\[(.*)\]", "\n".join(lines))[1]
    assert f'pip install ".[{extras}]"' in (ROOT / "README.md").read_text()
    (cpu,) = [line for line in lines if "--extra-index-url" in line]
    for command in (cpu.partition("--no-cache-dir ")[2], PROJECT["tool"]["uv"]["index"][0]["url"]):
        assert command in (ROOT / "README.md").read_text(), "the CPU build is the same by pip, uv and in the container"
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not {"evorl", "configs", "demos", "README.md", "LICENSE", "pyproject.toml"} & {*ignored}, (
        "the build needs them"
    )


@pytest.mark.slow
def test_the_wheel_is_all_that_a_user_needs(tmp_path):
    def output(*command, **options):
        return subprocess.run(command, check=True, capture_output=True, text=True, **options).stdout

    output(sys.executable, "-m", "hatchling", "build", "-d", tmp_path, cwd=ROOT)
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    assert wheel.name.startswith(f"evorl_accelerate-{evorl.__version__}-")
    names = zipfile.ZipFile(wheel).namelist()
    shipped = {str(path.relative_to(ROOT)) for path in ROOT.glob("configs/**/*.yaml")}
    assert {f"evorl/shipped/{name}" for name in shipped} <= {*names}
    assert {"evorl/kernels/dense.cpp", "evorl/py.typed", "evorl/__init__.pyi", "evorl/shipped/demos/online.py"} <= {
        *names
    }
    assert {name.split("/")[0] for name in names} == {"evorl", f"evorl_accelerate-{evorl.__version__}.dist-info"}
    with tarfile.open(sdist) as archive:
        tops = {name.split("/")[1] for name in archive.getnames()}
    assert not tops & {"tests", "benchmarks", "docs"}
    assert max(wheel.stat().st_size, sdist.stat().st_size) < 1_000_000

    site = tmp_path / "site"
    output(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel)
    (tmp_path / "empty").mkdir()
    for command in (["--help"], ["list"], ["config", "ppo"]):
        installed = {"cwd": tmp_path / "empty", "env": os.environ | {"PYTHONPATH": str(site)}}
        assert output(sys.executable, site / "bin" / "evorl", *command, **installed)
