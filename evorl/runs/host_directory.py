"""A run's directory on each host: a shared one, or one for every host that cannot access the main process's.

Axes: R ranks.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from evorl.config import AnyConfig
from evorl.distributed import Ranks
from evorl.runs.directory import LOCK_PATIENCE, Owner, RunDirectory
from evorl.system.files import Lock, json_bytes, make_directory, read_owner, reason, refuse_links_within
from evorl.types import UserError


class HostDirectory:
    """The directory this rank writes into: the main process's if this host can access it, else this host's own.

    A host's own directory holds only its ranks' parts of the replay. `is_shared` is True if this is the main process's
    directory; `who_shares` [R] marks the ranks that can access that.
    """

    def __init__(self, config: AnyConfig, ranks: Ranks) -> None:
        """Claim the directory on all hosts. Raises UserError on all ranks if it cannot be used."""
        self._ranks = ranks
        here = Owner.here(ranks.launch)
        claimed: list[RunDirectory] = []

        def claim() -> bytes:
            claimed.append(RunDirectory.claim(config, here))
            return json_bytes({"path": str(claimed[0].path), "owner": here.to_json()})

        reply = json.loads(ranks.from_main(claim, "the run directory"))
        path, problem = Path(reply["path"]), ""
        self.is_shared = ranks.is_main or read_owner(path) == reply["owner"]
        self.directory = claimed[0] if claimed else RunDirectory(path, config.checkpoint.keep)
        if self.leads and not ranks.is_main:
            try:
                self.directory = _claim_own(path, config, here)
            except OSError as error:
                problem = f"run.directory: cannot write to {reason(error, path)}"
            except UserError as error:
                problem = str(error)
        ranks.raise_if_any_failed(problem, "the hosts' run directories")
        seen = ranks.gather(np.array([float(self.is_shared)]), "who sees the run directory")
        self.who_shares = seen[:, 0] > 0

    @property
    def leads(self) -> bool:
        """True if this rank is the one that moves and removes files in its directory."""
        return self._ranks.is_main or (self._ranks.leads_host and not self.is_shared)

    def rollback(self, generation: int, elite: bytes, best: int | None, why: str = "damaged") -> None:
        """Roll every host's directory back to the end of `generation`, when the elite was that of generation `best`.

        Newer checkpoints are set aside under names that begin with `why`. Raises UserError on all ranks.
        """
        problem = ""
        try:
            if self.leads:
                self.directory.checkpoints.set_aside(generation + 1, why)
                self.directory.checkpoints.prune(best)
            if self._ranks.is_main:
                self.directory.cut_back(generation, elite)
        except OSError as error:
            problem = f"run.directory: cannot write to {reason(error, self.directory.path)}"
        except UserError as error:
            problem = str(error)
        self._ranks.raise_if_any_failed(problem, "the hosts' run directories")


def _claim_own(path: Path, config: AnyConfig, here: Owner) -> RunDirectory:
    """Create and lock this host's own directory, at the same path as the main process's. Raises OSError, UserError."""
    make_directory(path)
    lock = Lock(path, LOCK_PATIENCE)
    refuse_links_within(path)
    lock.sign(here.to_json())
    directory = RunDirectory(path, config.checkpoint.keep, lock)
    directory.checkpoints.discard()
    return directory
