"""Model pages: what they hold, and how they are sent, to a server that is ours."""

import base64
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import yaml
from helpers.drawn import CONFIG, write_run
from helpers.loaded import fresh_run
from helpers.support import ROOT, SMALL

import evorl
from evorl.commands.command import run_command
from evorl.commands.evaluate import evaluate_elite
from evorl.commands.train import program_arguments
from evorl.export import hub
from evorl.export.hub import card
from evorl.report.data import load
from evorl.runs.launch import load_config
from evorl.types.outcomes import EvorlWarning, UserError

huggingface_hub = pytest.importorskip("huggingface_hub")
pytest.importorskip("matplotlib")
EVIL = "<script>alert(1)</script> [x](http://e) `|\n# h"


@pytest.fixture
def run(tmp_path):
    """A run with an agent to load, and a lineage to draw."""
    path = tmp_path / "runs" / "a"
    fresh_run(path, SMALL)
    written = write_run(tmp_path / "drawn")
    for name in ("metrics.jsonl", "lineage.jsonl", "summary.json"):
        (path / name).write_bytes((written / name).read_bytes())
    return path


EARLIER = ("agent.onnx", "elite/agent.safetensors", "mine.txt", "README.md")
"""What an earlier push and a person have left on the page."""


class Handler(http.server.BaseHTTPRequestHandler):
    """As much of the Hub as a small upload needs."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.calls.append((self.path, self.headers.get("Authorization")))
        address = f"http://127.0.0.1:{self.server.server_port}/me/x"
        if self.path == "/api/repos/create":
            self.server.made = json.loads(body)
            self._answer({"url": address, "name": "me/x"})
        elif "/preupload/" in self.path:
            files = [{**each, "uploadMode": "regular", "shouldIgnore": False} for each in json.loads(body)["files"]]
            self._answer({"files": files})
        elif "/commit/" in self.path:
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.server.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                elif entry["key"] == "deletedFile":
                    self.server.deleted.append(entry["value"]["path"])
            self._answer({"commitUrl": f"{address}/commit/1", "commitOid": "1" * 40, "hookOutput": ""})
        else:
            self._answer({})

    def do_GET(self):
        if "/tree/" in self.path:
            self._answer([{"type": "file", "path": path, "oid": "1" * 40, "size": 1} for path in EARLIER])
        else:
            self._answer({"id": "me/x", "sha": "1" * 40, "siblings": [], "tags": []})

    def _answer(self, value):
        payload = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_):
        pass


@contextmanager
def server():
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.files, running.calls, running.deleted, running.made = {}, [], [], None
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield running
    running.shutdown()


def test_a_page_is_a_run_that_can_be_loaded(run, tmp_path):
    folder = tmp_path / "page"
    folder.mkdir()
    files = hub.write_page(run, folder, "me/x", None)
    assert {"README.md", "config.yaml", "elite/agent.safetensors", "lineage.png", "lineage.jsonl"} <= set(files)
    assert evorl.load(folder).agent.id == evorl.load(run).agent.id
    text = (folder / "README.md").read_text()
    head = yaml.safe_load(text.split("---")[1])
    assert head["model-index"][0]["results"][0]["metrics"][0] == {"type": "mean_reward", "value": "60.00"}
    assert 'agent = evorl.load("hf:me/x")' in text, "no name to be replaced by the reader"
    assert '`pip install -e ".[hub]"`' in text
    assert "`evorl train config.yaml population.from=hf:me/x`" in text, "the algorithm and environment are the page's"


def test_a_page_needs_a_valid_name(run, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_key")
    for name in ("x", "me/x)["):
        with pytest.raises(UserError, match="is not a valid Hub name; use ME/NAME"):
            run_command(["push", str(run), name])


def test_an_exported_agent_is_on_the_page_unless_it_is_older_than_the_best(run, tmp_path):
    exported, elite = run / "agent.onnx", run / "elite" / "agent.safetensors"
    exported.write_bytes(b"onnx")
    written = elite.stat().st_mtime
    for age, folder in ((0, tmp_path / "page"), (5, tmp_path / "other")):
        folder.mkdir()
        os.utime(exported, (written - age, written - age))
        with nullcontext() if not age else pytest.warns(EvorlWarning, match="is older than the best agent"):
            files = hub.write_page(run, folder, "me/x", None)
        assert ("agent.onnx" in files) == ("onnxruntime" in (folder / "README.md").read_text()) == (not age)


def test_what_a_page_trains_further_is_not_where_and_for_whom_its_run_was(run, tmp_path, monkeypatch):
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["run"] |= {"directory": str(run.parent), "name": run.name}
    settings["population"] |= {"from": str(run)}
    settings["tracking"] |= {"project": "client X", "exclude": ["checkpoint.keep"]}
    settings["league"] = {"benchmark": str(run)}
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"because": f"raised at {tmp_path}/own.py:3"}))
    folder = tmp_path / "page"
    folder.mkdir()
    hub.write_page(run, folder, "me/x", None)
    assert str(tmp_path) not in (folder / "summary.json").read_text()
    text = (folder / "README.md").read_text()
    for published in (text, (folder / "config.yaml").read_text()):
        assert str(tmp_path) not in published
        assert "client X" not in published
        assert "keep:" not in published
        assert "benchmark: a\n" in published
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(text.split("```yaml\n")[1].split("```")[0])
    words = re.search(r"`evorl train (\S+ population.from=\S+)` trains it further", text)[1].split()
    config = load_config(program_arguments([*words, "league=null"], None, None), SMALL)
    assert (config.run.directory, config.run.name) == (tmp_path / "runs", None)


def test_who_reads_a_page_is_warned_of_an_environment_that_it_does_not_have(run, tmp_path):
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["environment"]["kwargs"] = {"sutton_barto_reward": True}
    settings["tracking"]["exclude"] = ["environment.kwargs", "seed"]
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    folder = tmp_path / "page"
    folder.mkdir()
    hub.write_page(run, folder, "me/x", None)
    for read in (evorl.load, partial(evaluate_elite, episodes=1, seed=0)):
        with pytest.warns(EvorlWarning, match=r"page: was published without environment\.kwargs, so its environment"):
            read(folder)


@pytest.mark.slow
def test_a_push_sends_the_page_with_the_key(run):
    """In a process of its own, since the client keeps its server's address."""
    (run / "film.mp4").write_bytes(b"film")
    with server() as running:
        program = (
            "import os, sys; "
            f"os.environ |= {{'HF_ENDPOINT': 'http://127.0.0.1:{running.server_port}', 'HF_TOKEN': 'hf_key', "
            "'HF_HUB_DISABLE_XET': '1', 'HF_HUB_DISABLE_TELEMETRY': '1'}; "
            "from evorl.commands.command import run_command; run_command(sys.argv[1:])"
        )
        arguments = ["push", str(run), "me/x", "--private", "--video", str(run / "film.mp4")]
        command = [sys.executable, "-c", program, *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert running.made["name"] == "x"
    assert "private" in (running.made.get("visibility"), running.made.get("private") and "private")
    assert running.files["replay.mp4"] == b"film"
    assert running.files["elite/agent.safetensors"] == (run / "elite" / "agent.safetensors").read_bytes()
    assert b'<video src="replay.mp4"' in running.files["README.md"]
    assert running.deleted == ["agent.onnx"], "the page no longer has it"
    assert all(key == "Bearer hf_key" for path, key in running.calls if path.startswith("/api/"))
    assert f"http://127.0.0.1:{running.server_port}/me/x" in done.stdout


def test_hub_card_escapes_words_of_the_run(tmp_path):
    config = {**CONFIG, "environment": {"id": EVIL}, "algorithm": {"name": EVIL}}
    text = card(load(write_run(tmp_path / "a", config)), {"a": "```\n# out"}, "me/x", [])
    text = text.split("\n---\n")[1]
    assert "<script" not in text
    assert "[x](" not in text
    assert "\n# h" not in text
    assert text.count("```") == 4


def test_what_is_missing_is_said_before_anything_starts(tmp_path, monkeypatch):
    missing = str(tmp_path / "not here")
    with pytest.raises(UserError, match=r"--video: there is no file x\.mp4; `evorl watch '/.*/not here' .* makes one"):
        run_command(["push", missing, "me/x", "--video", "x.mp4"])
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(UserError, match=r"pushing needs a Hub token .* `hf auth login`, or set HF_TOKEN"):
        run_command(["push", missing, "me/x"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"a push needs huggingface_hub; install it with"):
        run_command(["push", missing, "me/x"])
