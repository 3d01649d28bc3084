"""Files of agents and checkpoints as somebody might prepare them."""

import json

from safetensors.torch import save

from evorl.runs.storage.checkpoint_files import Checkpoints
from evorl.system.formats import decode_agents, encode_agents
from helpers.support import agent

CONVOLUTION = {"channels": 65536, "kernel": 65536, "stride": 1, "residual_layers": 0}
DESCRIBED = {
    "a huge layer": {"architectures__q__hidden_sizes": [10**12, 16]},
    "a large layer": {"architectures__q__hidden_sizes": [65536, 65536]},
    "100000 layers": {
        "architectures__q__hidden_sizes": [1] * 100_000,
        "architectures__q__residual_layers": [0] * 100_000,
    },
    "fewer residual layers": {"architectures__q__residual_layers": []},
    "a layer of text": {"architectures__q__hidden_sizes": ["many", 16]},
    "large convolutions": {"architectures__q__convolutions": [CONVOLUTION] * 1000},
    "an unknown cell": {"architectures__q__recurrent": "os.system"},
    "an activation of a megabyte": {"architectures__q__activation": "x\n" * 500_000},
    "an unknown key": {"reward": 1.0},
    "no architecture": {"architectures": ...},
    "another network": {"architectures__" + "n\n" * 100_000: {}},
    "no state": {"state": ...},
    "a fraction of an id": {"id": 0.5},
    "no hyperparameters": {"hyperparameters": {}},
    "a hyperparameter that is not finite": {"hyperparameters__learning_rate": float("nan")},
}


def forge(run, payloads, listed=()):
    """Put files into the checkpoint of generation 3; its manifest agrees with them, and lists others too."""
    checkpoints = Checkpoints(run / "checkpoints")
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
