"""Hints about optional packages: they say what installs them where the program runs."""

import re
import tomllib

import pytest
from helpers.support import ROOT

from evorl.config import Environment
from evorl.envs.vector import make_vector
from evorl.system import extras
from evorl.system.extras import EXTRAS, extra_needed, install_command, missing, require
from evorl.types.outcomes import UserError


def test_the_extras_are_those_of_the_project():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*listed} - {"dev", "cpu", "docs"} == {*EXTRAS}
    assert {extra: len(listed[extra]) for extra in EXTRAS} == {extra: len(modules) for extra, modules in EXTRAS.items()}


def test_the_command_installs_into_the_clone_from_anywhere_or_into_the_installed_package(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert install_command("atari") == "pip install -e '.[atari]'"
    monkeypatch.chdir(tmp_path)
    assert install_command("atari") == f"pip install -e '{ROOT}[atari]'"
    monkeypatch.setattr(extras, "SOURCE", tmp_path)
    assert install_command("atari") == "pip install 'evorl-accelerate[atari]'"


def test_the_modules_that_are_missing_are_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnxruntime" else name)
    assert missing("onnx") == ["onnxruntime"]
    assert missing("plot") == []
    require("plot", "a plot")
    told = f"an export needs onnxruntime; install it with `{install_command('onnx')}`"
    with pytest.raises(UserError, match=re.escape(told)):
        require("onnx", "an export")


def test_an_environment_that_lacks_a_module_of_an_extra_names_it(tmp_path, monkeypatch):
    error = RuntimeError("games")
    error.__cause__ = ModuleNotFoundError("No module named 'ale_py'", name="ale_py")
    assert extra_needed(error) == f"it needs the extra atari: {install_command('atari')}"
    assert not extra_needed(ModuleNotFoundError("No module named 'ale'", name="ale"))
    assert not extra_needed(ValueError("ale_py"))
    (tmp_path / "needs_av.py").write_text("raise ModuleNotFoundError(\"No module named 'av'\", name='av')\n")
    monkeypatch.syspath_prepend(tmp_path)
    told = f"environment.id: cannot make 'needs_av:Film': it needs the extra video: {install_command('video')}"
    with pytest.raises(UserError, match=re.escape(told)):
        make_vector(Environment(id="needs_av:Film"), 1)
