"""Files that somebody has prepared: one line says which, and nothing is built from them."""

import json
import os
import resource
import shutil
import time

import pytest
import torch
from helpers.support import agent, algorithm, train
from safetensors.torch import save

from evorl.cli import run_command
from evorl.population import check_agents
from evorl.runs.checkpoint import Checkpoints
from evorl.runs.history import JsonLines
from evorl.runs.launch import run_program
from evorl.system.files import entry, read_bounded
from evorl.system.formats import decode_agents, decode_tensors, encode_agents, encode_tensors
from evorl.types import EvorlWarning, UserError

RESUME = ("run.name=a", "run.resume=auto", "training.max_steps=200")
REPLAY = "replay-rank-000.safetensors"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    directory = tmp_path_factory.mktemp("small")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        assert train("run.name=a", "training.max_steps=108") == 0
    return directory / "runs" / "a"


@pytest.fixture
def run(small, in_directory):
    """A run of three generations that a test may spoil."""
    shutil.copytree(small, in_directory / "runs" / "a")
    return in_directory / "runs" / "a"


def refused(capsys, *overrides):
    """The one line with which a run ends that is resumed."""
    capsys.readouterr()
    assert train(*(overrides or RESUME)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def forge(run, payloads, listed=()):
    """Put files into the checkpoint of generation 3; its manifest agrees with them, and lists others too."""
    checkpoints = Checkpoints(run / "checkpoints", keep=9)
    payloads = {name: checkpoints.read(3, name) for name in checkpoints.files(3)} | payloads
    files = {name: checkpoints.write(3, name, payload) for name, payload in payloads.items()}
    checkpoints.complete(3, files | dict(listed))
    return checkpoints


def hostile(**changes):
    """A file of one agent whose description has other values; a name `a__b` stands for the value b in a."""
    payload = encode_agents([agent()])
    header = json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])
    (description,) = json.loads(header["__metadata__"]["agents"])
    for path, value in changes.items():
        *sections, last = path.split("__")
        place = description
        for section in sections:
            place = place[section]
        place[last] = value
        if value is ...:
            del place[last]
    return described(json.dumps([description]))


def described(text, **tensors):
    """A file of agents that says this of them, with the tensors of one agent."""
    (member,) = decode_agents(encode_agents([agent()]), "here")
    named = {
        f"0/{module}/{role}/{name}": value
        for module, roles in member.tensors.items()
        for role, values in roles.items()
        for name, value in values.items()
    }
    return save(named | tensors, metadata={"agents": text})


def raw(header, data=b""):
    """Bytes with any header, as no library would write it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def with_shape(shape, **metadata):
    return raw({"__metadata__": metadata, "0/q/parameters/w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}})


CONVOLUTION = {"channels": 65536, "kernel": 65536, "stride": 1, "padding": 0, "residual_layers": 0}
DESCRIBED = {
    "a huge layer": {"architectures__q__hidden_sizes": [10**12, 16]},
    "a large layer": {"architectures__q__hidden_sizes": [65536, 65536]},
    "layers without end": {"architectures__q__residual_layers": [10**9, 0]},
    "many layers": {"architectures__q__residual_layers": [1000, 1000]},
    "100000 layers": {
        "architectures__q__hidden_sizes": [1] * 100_000,
        "architectures__q__residual_layers": [0] * 100_000,
    },
    "fewer residual layers": {"architectures__q__residual_layers": []},
    "more residual layers": {"architectures__q__residual_layers": [0, 0, 3]},
    "no layers": {"architectures__q__hidden_sizes": [], "architectures__q__residual_layers": []},
    "an empty layer": {"architectures__q__hidden_sizes": [0, 16]},
    "a negative layer": {"architectures__q__hidden_sizes": [-16, 16]},
    "a layer of text": {"architectures__q__hidden_sizes": ["many", 16]},
    "large convolutions": {"architectures__q__convolutions": [CONVOLUTION] * 1000},
    "a huge cell": {"architectures__q__recurrent": "lstm", "architectures__q__recurrent_size": 65536},
    "an unknown cell": {"architectures__q__recurrent": "os.system"},
    "a size past 64 bits": {"architectures__q__recurrent_size": 2**70},
    "an unknown activation": {"architectures__q__activation": "__import__('os')"},
    "an activation of a megabyte": {"architectures__q__activation": "x\n" * 500_000},
    "other streams": {"architectures__q__streams": "some"},
    "layers normalised": {"architectures__q__layer_norm": True},
    "an unknown key": {"reward": 1.0},
    "an unknown key in the architecture": {"architectures__q__" + "k\n" * 100_000: 1},
    "no architecture": {"architectures": ...},
    "the architectures of no network": {"architectures": {}},
    "another network": {"architectures__" + "n\n" * 100_000: {}},
    "400000 networks": {"architectures": {str(index): 0 for index in range(400_000)}},
    "400000 hyperparameters": {"hyperparameters": {str(index): "x" for index in range(400_000)}},
    "no state": {"state": ...},
    "an empty state": {"state": {}},
    "a negative id": {"id": -1},
    "an id that is none": {"id": "first"},
    "a fraction of an id": {"id": 0.5},
    "a negative parent": {"parent": -3},
    "fitness of text": {"fitness": "best"},
    "hyperparameters of a list": {"hyperparameters": [1, 2]},
    "no hyperparameters": {"hyperparameters": {}},
    "a hyperparameter that is not finite": {"hyperparameters__learning_rate": float("nan")},
    "a state that is not finite": {"state__epsilon": float("inf")},
    "a hyperparameter of 100 kB": {"hyperparameters__" + "h\n" * 50_000: "x"},
}
FILES = {
    "nothing": b"",
    "seven bytes": b"1234567",
    "a header past the end": (2**60).to_bytes(8, "little") + b"{}",
    "a header of 2**64 - 1": b"\xff" * 8,
    "a header of no JSON": raw(b"{" * 50),
    "a header of 9 MB": raw({"__metadata__": {"agents": "[]", "more": "x" * 9_000_000}}),
    "a header of nested lists": raw(b"[" * 1_000_000),
    "a header that is a list": raw([1, 2]),
    "no metadata": raw({}),
    "metadata of a list": raw({"__metadata__": ["agents"]}),
    "no agents": raw({"__metadata__": {"format": "pt"}}),
    "agents of nested lists": described("[" * 1_000_000),
    "agents of text": described('"agents"'),
    "an agent of a number": described("[1]"),
    "an agent of no number": described("[NaN]"),
    "a description without end": described('[{"id": 0'),
    "more tensors than agents": described("[]"),
    "a tensor without a place": described("[]", w=torch.zeros(1)),
    "shapes that overflow": with_shape([0, 2**62, 2**62], agents="[]"),
    "shapes past 64 bits": with_shape([0, 2**64 - 1], agents="[]"),
    "offsets past the end": raw(
        {"__metadata__": {"agents": "[]"}, "w": {"dtype": "U8", "shape": [10**15], "data_offsets": [0, 10**15]}}
    ),
}


def check_refused(payload):
    """The UserError for a file of agents: soon, on one line once printed, and without memory."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    with pytest.raises(UserError) as caught:
        check_agents(decode_agents(payload, "here"), algorithm(), "here")
    assert time.perf_counter() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000, "kilobytes"
    assert str(caught.value).startswith("here: ")
    return str(caught.value)


@pytest.mark.parametrize("changes", DESCRIBED.values(), ids=DESCRIBED)
def test_an_agent_that_is_described_so_is_refused(changes):
    check_refused(hostile(**changes))


def test_an_agent_that_is_described_as_it_is_is_not_refused():
    check_agents(decode_agents(hostile(id=3), "here"), algorithm(), "here")


@pytest.mark.parametrize("payload", FILES.values(), ids=FILES)
def test_a_file_that_holds_no_agents_is_refused(payload):
    error = check_refused(payload)
    assert "not a file of agents" in error
    assert "\n" not in error
    assert len(error) < 600
    with pytest.raises(UserError, match="here: not a file of tensors"):
        decode_tensors(payload, "here")


def spoiled(change):
    (member,) = decode_agents(encode_agents([agent()]), "here")
    roles = next(iter(member.tensors.values()))
    change(roles, sorted(roles["parameters"])[0])
    return encode_agents([member])


TENSORS = {
    "another shape": lambda roles, name: roles["parameters"].update({name: torch.zeros(2, 3)}),
    "no numbers": lambda roles, name: roles["parameters"].update({name: torch.zeros(0, 2**40)}),
    "another type": lambda roles, name: roles["target"].update({name: roles["target"][name].double()}),
    "not finite": lambda roles, name: roles["parameters"][name].view(-1)[0].fill_(float("nan")),
    "moments not finite": lambda roles, name: roles["square"][name].view(-1)[0].fill_(float("inf")),
    "a tensor missing": lambda roles, name: roles["mean"].pop(name),
    "a tensor too many": lambda roles, name: roles["buffers"].update({"x" * 100_000: torch.zeros(1)}),
    "a role too many": lambda roles, name: roles.update(secret={name: torch.zeros(1)}),
}


@pytest.mark.parametrize("change", TENSORS.values(), ids=TENSORS)
def test_tensors_that_are_not_the_architectures_are_refused(change):
    error = check_refused(spoiled(change))
    assert "\n" not in error
    assert len(error) < 600


def test_tensors_of_an_agent_before_the_first_are_refused():
    """Counted from the end, they would have replaced another agent's."""
    member = agent()
    module, roles = next(iter(member.tensors.items()))
    name, value = next(iter(roles["parameters"].items()))
    payload = described(json.dumps([member.describe()]), **{f"-1/{module}/parameters/{name}": torch.zeros_like(value)})
    assert "of no agent" in check_refused(payload)


def evaluate(run, capsys):
    capsys.readouterr()
    began = time.perf_counter()
    assert run_program(run_command, ["evaluate", str(run), "--episodes", "1"]) == 2
    assert time.perf_counter() - began < 10
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert len(error) < 1200
    return error


def test_an_elite_larger_than_memory_is_not_read(run, capsys):
    elite = run / "elite" / "agent.safetensors"
    os.truncate(elite, 2**40)
    error = evaluate(run, capsys)
    assert f"{elite}: 1024.0 GiB do not fit twice into" in error


@pytest.mark.parametrize("change", ["a huge layer", "an activation of a megabyte", "no state"])
def test_evaluate_refuses_a_hostile_elite(change, run, capsys):
    elite = run / "elite" / "agent.safetensors"
    elite.write_bytes(hostile(**DESCRIBED[change]))
    assert str(elite.parent) in evaluate(run, capsys)


def test_evaluate_does_not_wait_for_a_pipe(run, capsys):
    elite = run / "elite" / "agent.safetensors"
    elite.unlink()
    os.mkfifo(elite)
    assert "no elite" in evaluate(run, capsys)
    with pytest.raises(OSError, match="not a file"):
        read_bounded(elite)


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "agents.safetensors/../../x", "config.yaml", "", "x\0"])
def test_a_manifest_cannot_reach_out_of_its_checkpoint(name, run, capsys):
    (run / "x").write_bytes(b"mine")
    checkpoints = forge(run, {}, {name: entry(b"mine")})
    with pytest.raises(UserError, match=r"manifest.json: lists .* no checkpoint has"):
        checkpoints.verify(3)
    with pytest.raises(UserError, match=r"manifest.json: lists .* no checkpoint has"):
        checkpoints.read(3, name)


@pytest.mark.parametrize("name", ["checkpoints", "elite", "metrics.jsonl", "config.yaml", "lineage.jsonl"])
def test_a_link_in_a_runs_directory_is_refused(name, run, capsys):
    outside = run.parent.parent / "outside"
    (run / name).rename(outside)
    (run / name).symlink_to(outside)
    before = sorted(path.name for path in run.parent.parent.rglob("*"))
    assert f"{run.relative_to(run.parent.parent) / name}: is a symbolic link" in refused(capsys)
    assert sorted(path.name for path in run.parent.parent.rglob("*")) == before


def test_a_link_where_something_is_gathered_is_not_followed(run, tmp_path):
    """Only names that a run writes before it renames them; the next write would go where the link leads."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text").write_text("mine")
    (run / "checkpoints" / ".partial-000004").symlink_to(tmp_path / "thesis")
    (run / "elite" / ".agent.safetensors.partial").symlink_to(tmp_path / "thesis" / "text")
    assert train(*RESUME) == 0
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["text"]
    assert (tmp_path / "thesis" / "text").read_text() == "mine"


STATES = {
    "an extra key": ({"password": "x"}, "password"),
    "a negative generation": ({"generation": -3}, "generation"),
    "negative steps": ({"agent_steps": -1}, "agent_steps"),
    "a negative id": ({"next_id": -5}, "next_id"),
    "no ranks": ({"ranks": 0}, "ranks"),
    "steps of text": ({"global_steps": "many"}, "global_steps"),
    "a negative elite": ({"elite_generation": -1}, "elite_generation"),
}


@pytest.mark.parametrize(("change", "key"), STATES.values(), ids=STATES)
def test_a_state_that_no_run_writes_is_refused(change, key, run, capsys):
    state = json.loads((run / "checkpoints" / "generation-000003" / "state.json").read_bytes())
    metrics = (run / "metrics.jsonl").read_bytes()
    forge(run, {"state.json": json.dumps(state | change).encode()})
    assert f"generation-000003/state.json: {key}: " in refused(capsys)
    assert (run / "metrics.jsonl").read_bytes() == metrics


def test_a_state_of_another_generation_is_refused(run, capsys):
    state = json.loads((run / "checkpoints" / "generation-000003" / "state.json").read_bytes())
    forge(run, {"state.json": json.dumps(state | {"generation": 2}).encode()})
    assert "generation-000003/state.json: " in refused(capsys)


@pytest.mark.parametrize("payload", [b"", b"[]", b"[" * 1_000_000, b'{"generation": 3', b"\xff\xfe"])
def test_a_state_that_is_no_state_is_refused(payload, run, capsys):
    forge(run, {"state.json": payload})
    assert "generation-000003/state.json: " in refused(capsys)


NUMBERS = {
    "more rows than there are": {"rows": 10**7, "written": 10**6, "oldest": 0},
    "more rows than fit": {"written": 501},
    "rows that were never written": {"oldest": 10**5},
    "rows before the first": {"oldest": -1},
    "a negative number of rows": {"written": -1},
    "rows past 64 bits": {"rows": 2**70, "written": 2**70, "oldest": 0},
    "fewer rows than there are": {"written": 1, "oldest": 0},
    "no rows": {"rows": 0},
    "no streams": {"streams": 0},
}


@pytest.mark.parametrize("change", NUMBERS.values(), ids=NUMBERS)
def test_a_replay_whose_numbers_lie_is_refused(change, run, capsys):
    path = run / "checkpoints" / "generation-000003" / REPLAY
    rows, numbers = decode_tensors(path.read_bytes(), "here")
    forge(run, {REPLAY: encode_tensors(rows, numbers | change)})
    assert REPLAY in refused(capsys)


@pytest.mark.parametrize("change", ["a row too few", "another shape", "another type", "a field missing", "nothing"])
@pytest.mark.parametrize("name", ["column.action", "observation.observation", "valid", "last.observation"])
def test_a_replay_of_other_rows_is_refused(change, name, run, capsys):
    path = run / "checkpoints" / "generation-000003" / REPLAY
    rows, numbers = decode_tensors(path.read_bytes(), "here")
    value = rows.pop(name)
    other = {"a row too few": value[:-1], "another shape": value.unsqueeze(-1), "another type": value.to(torch.float64)}
    rows |= {name: other[change].contiguous()} if change in other else {}
    forge(run, {REPLAY: encode_tensors({} if change == "nothing" else rows, numbers)})
    assert REPLAY in refused(capsys)


def test_a_replay_that_was_kept_before_there_was_one_storage_is_refused(run, capsys):
    """It kept both observations of each transition, and where its ring stood."""
    seen = {f"{prefix}observation.observation": torch.zeros(9, 4) for prefix in ("", "next_")}
    columns = {"action": torch.zeros(9).long(), "reward": torch.zeros(9), "terminated": torch.zeros(9) > 0}
    forge(run, {REPLAY: encode_tensors(seen | columns, {"size": 9, "next": 9, "capacity": 500})})
    assert REPLAY in refused(capsys)


def test_a_history_larger_than_memory_is_not_read(run, capsys):
    metrics = run / "metrics.jsonl"
    os.truncate(metrics, 2**40)
    with pytest.raises(UserError, match=r"metrics.jsonl: 1024.0 GiB do not fit"):
        JsonLines(metrics).read()
    assert "metrics.jsonl: 1024.0 GiB do not fit" in refused(capsys)


def test_lines_that_are_no_rows_are_left_out(run):
    metrics = run / "metrics.jsonl"
    whole = metrics.read_bytes()
    strange = [
        b"[" * 100_000,
        b"9" * 5000,
        b"\xff\xfe",
        b"[]",
        b'{"generation": "3"}',
        b'{"generation": 1e400}',
        b"null",
    ]
    metrics.write_bytes(b"\n".join(strange) + b"\n" + whole)
    assert train(*RESUME) == 0
    assert metrics.read_bytes().startswith(whole)


def test_names_that_only_look_like_checkpoints_are_left_alone(run):
    """Both would have stood for generation 3 a second time."""
    for name in ("generation-0000003", "generation-00000٣"):
        (run / "checkpoints" / name).mkdir()
    assert Checkpoints(run / "checkpoints", 9).generations()[-1] == 3
    assert Checkpoints(run / "checkpoints", 9).generations().count(3) == 1
    assert train(*RESUME) == 0


def test_a_file_in_the_place_of_a_checkpoint_is_passed_over(run):
    (run / "checkpoints" / "generation-000009").write_text("mine")
    with pytest.warns(EvorlWarning, match="generation-000009/manifest.json: cannot be read"):
        assert train(*RESUME) == 0
    assert (run / "checkpoints" / "damaged-generation-000009").read_text() == "mine"
