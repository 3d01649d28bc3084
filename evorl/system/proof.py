"""Proof that this user launched a run here: an authentication code in its directory, by a key that only the user has.

HMAC-SHA256 (RFC 2104) over the run's directory, the working directory, from which code is imported, and the names and
arguments of that code. The key is in a file of mode 0600 in the user's state directory, and never leaves it: a
directory that was copied, moved, or edited in one of these has no valid code.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evorl.system.files import open_file, write_atomically

PROOF = ".proof"
"""The file with the authentication code, in the run's directory."""
KEY_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
FAILS = (OSError, RuntimeError)
"""Errors if there is no working directory, no home, no key private to the user, or no space on the disk."""


def sign(run: Path, code: Mapping[str, Any]) -> None:
    """Write the proof that this user launched a run that names this `code`, as JSON; nothing where that fails."""
    with contextlib.suppress(*FAILS):
        write_atomically(run / PROOF, _authentication(_own_key(), run, code))


def is_signed(run: Path, code: Mapping[str, Any]) -> bool:
    """True if this user launched the run, in this directory and from this working directory, with this `code`."""
    try:
        with open_file(run / PROOF, "rb") as file:
            found = file.read(PROOF_BYTES + 1)
        return hmac.compare_digest(found, _authentication(_read_key(), run, code))
    except FAILS:
        return False


def _authentication(key: bytes, run: Path, code: Mapping[str, Any]) -> bytes:
    """The code of a run. Raises OSError if there is no working directory."""
    told = {"run": str(run.resolve()), "from": str(Path.cwd()), "code": code}
    return hmac.digest(key, json.dumps(told, sort_keys=True).encode(), "sha256")


def _key_file() -> Path:
    """The file of the key, in the directory that the XDG base directory specification names for states."""
    named = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".local" / "state") / "evorl" / "key"


def _read_key() -> bytes:
    """The user's key. Raises OSError if there is none, or if others could have read or written it."""
    path = _key_file()
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        mine = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
        if not (stat.S_ISREG(status.st_mode) and mine and status.st_size == KEY_BYTES):
            raise PermissionError(f"{path} is no key of this user alone")
        return os.read(descriptor, KEY_BYTES)
    finally:
        os.close(descriptor)


def _own_key() -> bytes:
    """The user's key, drawn at random if there is none yet. Raises OSError."""
    path = _key_file()
    with contextlib.suppress(FileNotFoundError):
        return _read_key()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f".key-{os.getpid()}-{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        # A link, unlike a rename, leaves the key that another process may have made meanwhile.
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)
    finally:
        fresh.unlink()
    return _read_key()
