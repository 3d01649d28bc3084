"""Runs on the Hugging Face Hub, which a stand-in for the client downloads from a folder of pages."""

import fnmatch
import shutil

import numpy as np
import pytest
import yaml
from helpers.support import config, lines, train

import evorl
from evorl.commands.command import run_command
from evorl.runs.launch import launched
from evorl.runs.program import run_program
from evorl.runs.reading import hub
from evorl.types.outcomes import UserError

huggingface_hub = pytest.importorskip("huggingface_hub")
from huggingface_hub.errors import HFValidationError  # noqa: E402


class Pages:
    """The pages of a Hub, and a cache of links to blobs, as the real client keeps it."""

    def __init__(self, folder):
        self.folder, self.cache, self.asked = folder / "pages", folder / "cache", []

    def download(self, name, *, revision, allow_patterns, repo_type):
        self.asked.append((name, revision, repo_type))
        assert set(allow_patterns) == {*hub.FILES}, "nothing else is downloaded"
        snapshot = self.cache / name / (revision or "main")
        shutil.rmtree(snapshot, ignore_errors=True)
        snapshot.mkdir(parents=True)
        for path in sorted((self.folder / name).rglob("*")):
            place = path.relative_to(self.folder / name).as_posix()
            if path.is_file() and any(fnmatch.fnmatch(place, pattern) for pattern in allow_patterns):
                (snapshot / place).parent.mkdir(exist_ok=True)
                (snapshot / place).symlink_to(path)
        return str(snapshot)


@pytest.fixture
def pages(trained_run, in_directory, monkeypatch):
    """A Hub whose page `me/x` is the trained run, with a file that nothing may load."""
    pages = Pages(in_directory / "hub")
    shutil.copytree(trained_run, pages.folder / "me" / "x", ignore=shutil.ignore_patterns("checkpoints"))
    (pages.folder / "me" / "x" / "agent.pkl").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", pages.download)
    return pages


@pytest.fixture
def page(pages):
    return pages.folder / "me" / "x"


def test_hub_page_is_loaded_by_its_name(pages, trained_run):
    found, own = evorl.load("hf:me/x@v1"), evorl.load(trained_run)
    assert pages.asked == [("me/x", "v1", "model")]
    observations = np.random.default_rng(1).normal(size=(20, 4))
    assert np.array_equal(found.predict(observations)[0], own.predict(observations)[0])
    assert (found.agent.id, found.config) == (own.agent.id, own.config)


def test_hub_page_with_custom_code_needs_consent(pages, page):
    settings = yaml.safe_load((page / "config.yaml").read_text())
    settings["network"] = {"name": "module", "factory": "evil:make"}
    (page / "config.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(UserError, match=r"network.factory: 'evil:make' names custom code to execute; add --allow-code"):
        evorl.load("hf:me/x")
    with pytest.raises(UserError, match=r"network.factory: 'evil:make' names custom code to execute; add --allow-code"):
        run_command(["evaluate", "hf:me/x", "--episodes", "1"])


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("elite/agent.safetensors", b"cos\nsystem\n", "hf:me/x/elite/agent.safetensors: "),
        ("config.yaml", b"seed: !!python/object:os.system x", "hf:me/x/config.yaml: not valid YAML: "),
    ],
)
def test_hub_page_with_damaged_files_is_refused(pages, page, file, content, message):
    (page / file).write_bytes(content)
    with pytest.raises(UserError) as error:
        evorl.load("hf:me/x")
    assert str(error.value).startswith(message), "by the name that the user gave"


def test_training_begins_with_the_agent_of_a_page(pages, in_directory, capsys):
    assert str(launched(config("population.from=hf:me/x")).population.from_) == "hf:me/x", "it is no path"
    assert train("run.name=a", "training.max_steps=80", "population.from=hf:me/x") == 0
    assert pages.asked == [("me/x", None, "model")]
    elite = evorl.load("hf:me/x").agent
    first = lines(in_directory / "runs" / "a" / "lineage.jsonl")[0]
    assert first["mutation"]["target"] == f"agent {elite.id} of x"
    assert "hf:me/x" in (in_directory / "runs" / "a" / "config.yaml").read_text()
    capsys.readouterr()
    assert run_program(run_command, ["list"]) == 0
    assert "agents of hf:me/x" in capsys.readouterr().out


def test_hub_download_error_is_one_line(monkeypatch):
    def fail(*name, **options):
        raise HFValidationError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=r"^hf:me/x: cannot be downloaded: no route$"):
        evorl.load("hf:me/x")


def test_hub_name_and_extra_are_checked_first(monkeypatch):
    for name in ("hf:me", "hf:me/x y"):
        with pytest.raises(UserError, match=r"a run on the Hub has the form hf:OWNER/NAME"):
            evorl.load(name)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"hf:me/x needs huggingface_hub; install it with"):
        evorl.load("hf:me/x")
