"""What stands around the package: its metadata and its container."""

import json
import re
import tomllib

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
